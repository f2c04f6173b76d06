"""An exception of a running kernel says which layer and backend raised it, and what takes another one."""

from __future__ import annotations

import pickle
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.cases import CPU, backend, problem, registry
from vllm_moe_oracle.compat.adapter import Adapter
from vllm_moe_oracle.core.decision import TokenRange
from vllm_moe_oracle.errors import LifecycleError
from vllm_moe_oracle.methods.base import STATE_ATTRIBUTE, OracleMoEMethod
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import load

LAYER = SimpleNamespace(**{STATE_ATTRIBUTE: "converted"})


def method(run: Any) -> Any:
    """A method whose kernel is a function of the input."""
    made: Any = object.__new__(OracleMoEMethod)
    made.decision = decide(problem(), CPU, load({}), registry=registry([backend("few"), backend("many")]))
    made.moe_kernel, made.token_dispatch = object(), None
    made.adapter = SimpleNamespace(
        apply=lambda kernel, layer, x, weights, ids, extra: run(x),
        apply_monolithic=lambda kernel, layer, x, logits, extra: run(x),
        raised_between_ranks=Adapter.raised_between_ranks,
    )
    return made


def fail(x: Any) -> Any:
    raise KeyError("w13")


CALLS = {
    "apply": lambda made, x: made.apply(LAYER, x, x, x),
    "apply_monolithic": lambda made, x: made.apply_monolithic(LAYER, x, x),
}


@pytest.mark.parametrize("call", CALLS)
def test_type_and_traceback_stay_and_notes_say_where(call: str) -> None:
    made = method(fail)
    with pytest.raises(KeyError) as caught:
        CALLS[call](made, torch.zeros(3, 4))
    assert caught.value.args == ("w13",) and caught.traceback[-1].name == "fail"
    text = "".join(traceback.format_exception(caught.value))
    assert "raised by the backend few in model.layers.0.mlp.experts, for 3 tokens" in text
    assert "MOE_ORACLE_DISABLE=few at the next start takes another backend" in text
    assert pickle.loads(pickle.dumps(caught.value)).args == ("w13",)


def test_the_backend_of_the_token_range_is_named() -> None:
    import dataclasses

    made = method(fail)
    ranges = (TokenRange("few", 8), TokenRange("many", None))
    made.decision = dataclasses.replace(made.decision, token_ranges=ranges)
    for tokens, name in ((8, "few"), (9, "many")):
        with pytest.raises(KeyError) as caught:
            made.apply(LAYER, torch.zeros(tokens, 4), None, None)
        assert f"by the backend {name} in" in caught.value.__notes__[0]


def test_no_other_backend_is_proposed_where_none_would_help() -> None:
    def no_memory(x: Any) -> Any:
        return torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(RuntimeError) as caught:
        method(no_memory).apply(LAYER, torch.zeros(1, 4), None, None)
    assert len(caught.value.__notes__) == 1 and "raised by the backend few" in caught.value.__notes__[0]

    def ours(x: Any) -> Any:
        raise LifecycleError("a rule", "a remedy", "a layer")

    with pytest.raises(LifecycleError) as typed:
        method(ours).apply(LAYER, torch.zeros(1, 4), None, None)
    assert not hasattr(typed.value, "__notes__")


@pytest.mark.parametrize("call", CALLS)
def test_no_backend_is_blamed_for_an_exchange_between_ranks(call: str) -> None:
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

    def exchange(x: Any) -> Any:
        return DeviceCommunicatorBase.all_gatherv(object(), x)  # type: ignore[arg-type]

    with pytest.raises(NotImplementedError) as caught:
        CALLS[call](method(exchange), torch.zeros(3, 4))
    exchanged, remedy = caught.value.__notes__
    where = "in model.layers.0.mlp.experts, for 3 tokens, outside of few"
    assert f"where vLLM hands over or exchanges tokens between ranks {where}" in exchanged
    assert "MOE_ORACLE_ENABLED=0" in remedy and "DISABLE" not in remedy


@pytest.mark.parametrize(
    ("module", "error", "notes"),
    [
        ("deep_ep.buffer", AssertionError(), 2),
        ("vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll", AssertionError(), 2),
        ("vllm.distributed.x", RuntimeError("CUDA error: an illegal memory access was encountered"), 2),
        ("vllm.distributed.x", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 1),
    ],
)
def test_what_is_said_of_an_exchange_depends_on_the_error(module: str, error: Exception, notes: int) -> None:
    namespace: dict[str, Any] = {"__name__": module, "error": error}
    exec("def exchange(x):\n    raise error", namespace)
    with pytest.raises(type(error)) as caught:
        method(namespace["exchange"]).apply(LAYER, torch.zeros(3, 4), None, None)
    said = caught.value.__notes__
    assert len(said) == notes and "outside of few" in said[0]
    assert ("CUDA_LAUNCH_BLOCKING" in said[-1]) == ("CUDA error" in str(error))


@pytest.mark.parametrize("call", CALLS)
def test_torch_compile_traces_through_it_in_one_graph(call: str) -> None:
    """On a CPU vLLM traces `apply`; a graph break would cost time at every step."""
    made = method(lambda x: x * 2)
    compiled = torch.compile(lambda x: CALLS[call](made, x), fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3, 4)), torch.full((3, 4), 2.0))
