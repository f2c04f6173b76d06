"""Functions over routed tokens on activations that an all-to-all has sorted by expert, `[experts, tokens, hidden]`."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib import faulty_backends as lib
from tests.lib.cases import H200, INT4_G128, MXFP8, problem
from tests.lib.faulty_backends import MXFP4, OAI, Faulty, check, weights
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.compat.experts_builder import VllmBuilder
from vllm_moe_oracle.compat.function_experts import BatchedFunctionExperts
from vllm_moe_oracle.core.problem import Parallel
from vllm_moe_oracle.measurements import lookup
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import load

BATCHED = Parallel(dp=2, ep=2, format="batched")
LAYER = problem(
    num_experts=8, top_k=2, hidden_size=128, intermediate_size=64, has_bias=True, scheme=MXFP8, activation=OAI,
    dtype="float32", parallel=BATCHED, local_experts=4,
)  # fmt: skip


def experts_over(function: Any, batched: bool, nbytes: Any = None) -> Any:
    """What a backend gets for one rank with all experts."""
    whole = dataclasses.replace(LAYER, local_experts=8, parallel=Parallel())
    adapter = current_adapter()
    moe = adapter.single_rank_config(lib.moe_config(whole), whole)
    builder = VllmBuilder(adapter, moe, adapter.quant_config(whole, {}), for_serving=False, batched=batched)
    return builder.from_function(function) if nbytes is None else builder.from_workspace_function(function, nbytes)


def test_a_row_is_a_token_with_one_of_this_ranks_experts() -> None:
    seen = LAYER.as_called()
    assert (seen.num_experts, seen.local_experts, seen.top_k) == (4, 4, 1)
    assert (seen.parallel.ep, seen.parallel.format) == (1, "standard")
    standard = dataclasses.replace(LAYER, parallel=Parallel(dp=2, ep=2))
    assert standard.as_called() is standard


def test_rows_sorted_by_expert_give_what_routed_tokens_give() -> None:
    whole = dataclasses.replace(LAYER, local_experts=8, parallel=Parallel())
    tensors = weights(whole)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 128, generator=generator)
    scores = torch.rand(11, 8, generator=generator)
    scores[:, 5] = 0  # an expert without tokens
    router, ids = scores.topk(2)
    found = {}
    for batched in (False, True):
        called = dataclasses.replace(whole, parallel=BATCHED).as_called() if batched else whole

        def run(out: Any, x: Any, weights: Any, ids: Any, expert_map: Any, called: Any = called) -> None:
            forward(tensors, called, out, x, weights, ids, expert_map)

        layer = SimpleNamespace(w13=tensors["w13"], w2=tensors["w2"])
        found[batched] = current_adapter().run_single_rank(
            experts_over(run, batched), layer, tensors, x, router, ids.int()
        )
    # The same products; two of them are added in float32, in either order.
    assert torch.allclose(found[True], found[False], rtol=0, atol=4 * 2.0**-24 * float(found[False].abs().max()))


def test_rows_beyond_an_experts_tokens_have_no_expert() -> None:
    calls: list[Any] = []

    def run(out: Any, x: Any, weights: Any, ids: Any, expert_map: Any) -> None:
        calls.append((x.shape, weights, ids.flatten().tolist(), expert_map))
        out.copy_(torch.where(ids >= 0, x, 7.0))

    x = torch.full((3, 4, 128), torch.nan)
    x[0, :2], x[2, :4] = 1.0, 2.0
    counts = SimpleNamespace(expert_num_tokens=torch.tensor([2, 0, 4], dtype=torch.int32))
    out = torch.empty_like(x)
    experts_over(run, True).apply(
        out, x, x, x, None, torch.empty(0, 2), None, 8, torch.arange(8), None, None, None, None, counts, True
    )
    ((shape, router, ids, expert_map),) = calls
    assert shape == (12, 128) and expert_map is None
    assert router.shape == (12, 1) and router.dtype == torch.float32 and bool((router == 1).all())
    assert ids == [0, 0, -1, -1, -1, -1, -1, -1, 2, 2, 2, 2]
    assert bool((out[0, :2] == 1).all()) and bool((out[2] == 2).all()) and bool((out[1] == 7).all())


def test_memory_is_asked_for_all_rows() -> None:
    asked: list[tuple[int, int]] = []

    def nbytes(tokens: int, top_k: int) -> int:
        asked.append((tokens, top_k))
        return 100

    made = experts_over(lambda *arguments: None, True, nbytes)
    first, scratch, out = made.workspace_shapes(16, 128, 128, 2, 8, 4, None, None)
    assert asked == [(64, 1)] and (first, scratch, out) == ((0,), (50,), (4, 16, 128))
    rows, w13 = torch.empty(4, 16, 128), torch.empty(4, 256, 128)
    assert made.moe_problem_size(rows, w13, torch.empty(0), torch.empty(3, 2)) == (4, 16, 256, 128, 2)


def wrong_rows(tensors: Any, layer: Any, out: Any, *more: Any) -> None:
    """A fault that tokens in rows do not have: each expert's rows come out one too late."""
    forward(tensors, layer, out, *more)
    if layer.parallel.format == "batched":
        out.copy_(out.roll(1, 0))


@pytest.mark.parametrize(
    "name", ["none", "wrong rows", "last column", "one expert", "scales of w2", "bias of the last columns"]
)
def test_the_self_check_runs_in_the_batched_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_class: Any = type(current_adapter())
    layer = dataclasses.replace(LAYER, dtype="bfloat16", local_experts=8, parallel=Parallel(dp=2, format="batched"))
    fault = lib.FAULTS.get(name, Faulty("none", compute=wrong_rows if name == "wrong rows" else forward))
    built: list[Any] = []
    original = adapter_class.run_single_rank

    def run(self: Any, experts: Any, *more: Any, **options: Any) -> Any:
        built.append(experts)
        return original(self, experts, *more, **options)

    monkeypatch.setattr(adapter_class, "run_single_rank", run)
    result = check(fault, layer, weights(layer))
    assert result.passed is (name == "none") and not result.skip_reason, result
    assert built and all(isinstance(each, BatchedFunctionExperts) for each in built)


@pytest.mark.parametrize("act_order", [False, True])
def test_hoppers_kernels_plan_for_rows(act_order: bool) -> None:
    """Memory and configurations are those of a layer with this rank's experts and one choice a token."""
    from vllm_moe_oracle.core.decision import ShardPlan
    from vllm_moe_oracle.oracle.registry import default_registry

    scheme = dataclasses.replace(INT4_G128, packing="gptq", act_order="group" if act_order else "none")
    layer = problem(num_experts=64, local_experts=32, hidden_size=512, intermediate_size=256, scheme=scheme)
    backend = default_registry()["hopper_wna16_act_order" if act_order else "hopper_wna16"]
    asked = {}
    for name, each in (("batched", dataclasses.replace(layer, parallel=BATCHED)), (
        "rows", dataclasses.replace(layer, num_experts=32, top_k=1, parallel=Parallel())
    )):  # fmt: skip

        def keep(forward: Any, nbytes: Any, name: str = name) -> object:
            asked[name] = [nbytes(tokens, 1) for tokens in (1, 64, 2048)]
            return forward

        builder: Any = SimpleNamespace(
            max_tokens=2048, for_serving=False, register_buffer=lambda tensor: tensor, from_workspace_function=keep
        )
        tensors = {"w13": torch.empty(1), "w13_order": torch.empty(1)}
        backend.build_experts(tensors, each, ShardPlan(512, 256), builder)
    assert asked["batched"] == asked["rows"] and asked["rows"][0] > 0


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4", "wna16"])
def test_hoppers_kernels_take_it_where_vllm_has_none_or_by_name(scheme: str) -> None:
    layer = problem(
        num_experts=64, local_experts=32, hidden_size=2048, intermediate_size=768, parallel=BATCHED,
        scheme={"mxfp8": MXFP8, "mxfp4": MXFP4, "wna16": INT4_G128}[scheme],
    )  # fmt: skip
    name = f"hopper_{scheme}"
    asked = load({"MOE_ORACLE_BACKEND": name})
    assert decide(layer, H200, asked, measurements=lookup.find_measurements(layer, H200, asked)).backend == name
    chosen = load({})
    measured = lookup.find_measurements(layer, H200, chosen)
    assert measured is not None and not measured.times  # times of tokens in rows are none of this layer's
    found = decide(layer, H200, chosen, measurements=measured)
    if scheme == "mxfp8":  # vLLM has no kernels for it in this format
        assert found.backend == name and found.explanation.startswith("no other kernel here")
        return
    assert "it runs only when it is asked for by name" not in found.summary()
    (ours,) = (each for each in found.candidates if each.backend == name)
    assert ours.accepted and "vLLM's Marlin kernels" in ours.answers.only_by_name
    assert found.backend == f"marlin_{scheme}_batched" and found.why == "static" and not found.tunable
