"""A converted layer is checked as it will serve: every expert, after loading and after a reload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lib import faulty_backends as lib
from tests.lib import method_layers
from tests.lib.faulty_backends import Faulty
from tests.lib.method_layers import HIDDEN, INNER, Layer, created, load_random
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.errors import SelfCheckError
from vllm_moe_oracle.methods import backend_check, base, load_caches
from vllm_moe_oracle.verification import converted_layer
from vllm_moe_oracle.verification.self_check import Comparison

EXPERTS = 24


@pytest.fixture(params=["group", "all", "off"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads a layer with a backend, and reloads it; returns the modes of the check and how many loads went well."""

    def loads(backend: Any) -> int:
        method_layers.use_backends([backend], monkeypatch)
        layer = Layer()
        method = created(config, layer)
        for seed in range(2):
            load_caches.end_load()
            load_random(layer, seed)
            if hasattr(layer, base.PROCESSED_ATTRIBUTE):
                delattr(layer, base.PROCESSED_ATTRIBUTE)
            try:
                method.process_weights_after_loading(layer)
            except SelfCheckError as error:
                assert "after the conversion" in str(error) and "MOE_ORACLE_DISABLE" in str(error)
                return seed
        return 2

    with method_layers.moe_config({"self_check": request.param}, EXPERTS, HIDDEN // 4, INNER // 4) as config:
        yield request.param, loads


WRONG = {
    **{
        f"the expert {index}": (Faulty("wrong", compute=lib.wrong_experts(lambda each, index=index: each == index)), 0)
        for index in (9, 13, 22, 23)
    },
    "from the eighth on": (Faulty("wrong", compute=lib.wrong_experts(lambda each: each >= 8)), 0),
    "a mask of eight": (Faulty("wrong", compute=lib.masked(8)), 0),
    "a mask of sixteen": (Faulty("wrong", compute=lib.masked(16)), 0),
    "no neighbors": (Faulty("wrong", compute=lib.distant_experts), 0),
    "the weights before a reload": (lib.Kept("keeps"), 1),
}
"""Backends with wrong experts, and how many loads go well before that is caught."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_experts_are_caught_wherever_they_are(run: Any, name: str) -> None:
    mode, loads = run
    wrong, well = WRONG[name]
    assert loads(wrong) == (2 if mode == "off" else well)


FAULTS = {
    "many tokens": Faulty("wrong", compute=lib.many_tokens(lib.wrong_experts(lambda each: each == 23)), beyond=(600,)),
    "output left": Faulty("wrong", compute=lib.leaves_columns),
    "workspace read": Faulty("wrong", compute=lib.reads_workspace, scratch=True),
}


@pytest.mark.parametrize("name", FAULTS)
def test_many_tokens_and_memory_as_it_is_found(run: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, loads = run
    passes = Comparison(0.0, 1.0, 0.0)  # that before the conversion, which finds these faults as well
    monkeypatch.setattr(backend_check, "compare_with_reference", lambda *arguments: passes)
    monkeypatch.setattr(converted_layer.WeightParts, "_random_index", lambda self, count: count - 1)  # the last columns
    assert loads(FAULTS[name]) == (2 if mode == "off" else 0)


def test_a_kernel_that_takes_over_beyond_the_engines_calls_is_not_called(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, loads = run
    monkeypatch.setattr(type(current_adapter()), "trial_tokens", lambda self, moe: 600)
    assert loads(FAULTS["many tokens"]) == 2


class KeepsScales(Faulty):
    """Refers to the scales that it was built over, as vLLM's own experts do by their quant config; plans for no more
    tokens than the builder says, as this project's kernels do."""

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale")}

        def run(out: Any, x: Any, *more: Any) -> None:
            assert x.shape[0] <= builder.max_tokens
            forward({**tensors, **scales}, problem, out, x, *more)

        return builder.from_function(run)


def test_a_reload_converts_fresh_parameters_before_vllm_copies_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's reload by layer puts the converted values into the kernel's tensors only after the conversion."""
    with method_layers.moe_config({"self_check": "group"}, EXPERTS, HIDDEN // 4, INNER // 4) as config:
        method_layers.use_backends([KeepsScales("keeps_scales", beyond=(600,))], monkeypatch)
        layer = Layer()
        method = created(config, layer)
        raw = {name: (each.shape, each.dtype) for name, each in layer.named_parameters()}
        load_random(layer, 0)
        method.process_weights_after_loading(layer)
        kept = method.experts
        load_caches.end_load()
        delattr(layer, base.PROCESSED_ATTRIBUTE)
        served = dict(layer.named_parameters())
        for name in served:
            delattr(layer, name)
        for name, (shape, dtype) in raw.items():
            layer.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        load_random(layer, 1)
        method.process_weights_after_loading(layer)
        assert method.experts is kept
        for name, parameter in served.items():
            parameter.data.copy_(getattr(layer, name).data)
            setattr(layer, name, parameter)
        backend_check.check_reloaded()


def test_a_right_backend_is_checked_after_loading_and_after_a_reload(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mode, loads = run
    with caplog.at_level("INFO", "vllm.moe_oracle"):
        assert loads(Faulty("right")) == 2
    assert caplog.text.count("check of right after the conversion: relative error") == (0 if mode == "off" else 2)
