from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter remembers the last engine of other tests, whose calls limit the tokens of trial calls."""
    if (compat := sys.modules.get("vllm_moe_oracle.compat")) is not None and "vllm" in sys.modules:
        monkeypatch.setattr(compat.current_adapter(), "_engine", None)
