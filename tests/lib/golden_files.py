"""Committed measurements, one file for each kind and measured vLLM release."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.version import Version

FOLDER = Path(__file__).parents[1] / "golden"


def read(path: Path) -> dict[str, Any]:
    """A file's JSON object."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def records(lines: Iterable[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The conditions and the records of a benchmark's lines."""
    head, *found = (json.loads(line) for line in lines if line.strip())
    return head["conditions"], found


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that has conditions and rows."""
    found: list[dict[str, Any]] = read(path)["rows"]
    return found


def newest(kind: str, gpu: str = "h200") -> Path:
    """The file ``KIND-vllm-VERSION.*`` of the newest measured release."""
    return max((FOLDER / gpu).glob(f"{kind}-vllm-*"), key=lambda file: Version(file.stem.rpartition("-")[2]))
