"""Committed measurements, one file for each kind and measured vLLM release."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

FOLDER = Path(__file__).parents[1] / "golden" / "h200"


def newest(kind: str) -> Path:
    """The file ``KIND-vllm-VERSION.*`` of the newest measured release."""
    return max(FOLDER.glob(f"{kind}-vllm-*"), key=lambda file: Version(file.stem.rpartition("-")[2]))
