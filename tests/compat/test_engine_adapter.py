"""What the adapter reads from an engine's config."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_moe_oracle.compat.engine_adapter import EngineAdapter


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"num_hidden_layers": 30}, 30), ({}, 0), ({"num_hidden_layers": None}, 0), (None, 0)],
)
def test_the_number_of_layers(fields: dict[str, Any] | None, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = None if fields is None else SimpleNamespace(hf_text_config=SimpleNamespace(**fields))
    adapter = EngineAdapter()
    monkeypatch.setattr(adapter, "_last_engine", lambda: SimpleNamespace(model_config=model))
    assert adapter.num_layers() == found
