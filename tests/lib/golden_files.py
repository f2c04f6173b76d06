"""Committed measurements, one file for each kind and measured vLLM release."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

FOLDER = Path(__file__).parents[1] / "golden"


def newest(kind: str, gpu: str = "h200") -> Path:
    """The file ``KIND-vllm-VERSION.*`` of the newest measured release."""
    return max((FOLDER / gpu).glob(f"{kind}-vllm-*"), key=lambda file: Version(file.stem.rpartition("-")[2]))
