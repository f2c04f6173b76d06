"""What a backend's methods set in the process is put back, whichever of them sets it while a layer is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="methods are vLLM's")

from tests.lib import method_layers
from tests.lib.faulty_backends import Faulty
from tests.lib.method_layers import Layer, created, load_random
from vllm_moe_oracle.methods import load_caches
from vllm_moe_oracle.oracle.checked_backend import METHODS
from vllm_moe_oracle.verification import process_state

EXPERTS = 4
STEPS = {
    "decision": ("check", "plan", "priority", "activations", "numerics", "layout"),
    "convert": ("convert",),
    "check": ("validate_weights", "build_experts", "hand_overs"),
}
CASES = [(step, name) for step, names in STEPS.items() for name in names]


def sets(method: str, calls: list[str]) -> Any:
    """A right backend, one method of which leaves other settings of torch behind."""
    original = getattr(Faulty, method)

    def leaves(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        calls.append(method)
        return found

    return type("Sets", (Faulty,), {method: leaves})("sets")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    load_caches.end_load()
    monkeypatch.setattr(method_layers, "HIDDEN", 128)
    monkeypatch.setattr(method_layers, "INNER", 128)
    with method_layers.moe_config({"self_check": "group"}, EXPERTS, 128, 128) as found:
        yield found
    load_caches.end_load()


@pytest.mark.parametrize(("step", "method"), CASES)
def test_a_method_leaves_no_setting_behind(
    config: Any, step: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert method in METHODS
    calls: list[str] = []
    method_layers.use_backends([sets(method, calls)], monkeypatch)
    layer = Layer()
    with process_state.kept() as changed:
        made = created(config, layer)
    assert not changed and made.backend.name == "sets" and (calls or step == "check")
    load_random(layer, 0)
    with process_state.kept() as changed:
        made.process_weights_after_loading(layer)
    assert not changed and calls
