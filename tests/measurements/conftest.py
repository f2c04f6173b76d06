"""What several tests of the store of measurements need."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_moe_oracle.measurements.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "cache")
    assert made.prepare() == ""
    return made
