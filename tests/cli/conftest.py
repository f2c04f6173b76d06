"""What several tests of the command line need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cli import Write
from tests.lib.configs import quantized


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a published model's config as ModelOpt would after quantizing to MXFP8, with fields replaced, into a
    folder whose name a shell would split."""

    def made(name: str = "qwen3-30b-a3b", **changes: Any) -> Path:
        path = tmp_path / f"$HOME it's {name}" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(quantized(name, **changes)))
        return path

    return made
