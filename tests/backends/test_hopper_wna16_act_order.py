"""Integer experts whose features are out of order, over this project's kernels: what is stored, and what the kernels
are given, is right by a reference that shares no code with the package. The kernels are played in float64."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.lib.cases import H200, problem
from tests.lib.function_recorder import FunctionRecorder
from tests.lib.stock_rules import converted
from tests.lib.wna16_canonical import to_canonical
from tests.lib.wna16_layers import contents_of, deviation, layer_of
from vllm_moe_oracle.backends import hopper_wna16_act_order
from vllm_moe_oracle.backends.hopper_wna16_act_order import BACKEND
from vllm_moe_oracle.core.decision import Accepted
from vllm_moe_oracle.core.problem import Parallel, Scheme
from vllm_moe_oracle.kernels.weights import dequantize_expert, unpack_expert
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings

E, M, K = 5, 7, 2


def played(x: Any, weights: Any, topk_weights: Any, topk_ids: Any, *, out: Any, expert_map: Any, **rest: Any) -> None:
    """`fused_moe` in float64."""
    assert topk_ids.shape[1] == 1, "each choice is a token"
    assert rest["workspace"].numel() >= 0
    out.zero_()
    for row, expert in enumerate(topk_ids[:, 0].tolist()):
        slot = expert if expert < 0 or expert_map is None else int(expert_map[expert])
        if slot < 0:
            continue
        matrices = {which: dequantize_expert(weights, which, slot).double() for which in ("w13", "w2")}
        hidden = matrices["w13"] @ x[row].double()
        if weights.w13.bias is not None:
            hidden += unpack_expert(weights, "w13", slot)[3].double()  # type: ignore[union-attr]
        if weights.gated:
            gate, up = hidden.chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
        else:
            hidden = hidden.clamp(min=0) ** 2
        result = matrices["w2"] @ hidden
        if weights.w2.bias is not None:
            result += unpack_expert(weights, "w2", slot)[3].double()  # type: ignore[union-attr]
        out[row] = (result * topk_weights[row, 0].double()).to(out.dtype)


def outcome(
    layer: Any, made: Any, monkeypatch: pytest.MonkeyPatch, fault: Any = None, places: Any = None, kernel: Any = played
) -> str:
    """What is wrong with the backend's output on random tokens; empty when it is right."""
    transposed = False if layer.scheme.packing.startswith("compressed") else None
    canonical = to_canonical(made.parameters(transposed), layer, transposed)
    if fault is not None:
        fault(canonical)
    tensors, plan = converted(BACKEND.name, canonical, layer, H200), BACKEND.plan(layer, H200)
    monkeypatch.setattr("vllm_moe_oracle.kernels.fused_moe.fused_moe", kernel)
    run, nbytes = BACKEND.build_experts(tensors, layer, plan, FunctionRecorder(for_serving=False))  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((M, E)), axis=1)[:, :K].astype(np.int64)
    weights = rng.uniform(0.1, 1.0, (M, K)).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((M, layer.hidden_size))).to(torch.bfloat16)
    out, scratch = torch.full_like(x, torch.nan), torch.zeros(nbytes(M, K), dtype=torch.uint8)
    given = torch.from_numpy(ids).to(torch.int32)
    run(out, x, torch.from_numpy(weights), given, None if places is None else torch.tensor(places).int(), scratch)
    if places is not None:
        ids = np.array(places)[ids]
    return deviation(made, out, x, ids, weights)


def kind(packing: str = "gptq", bits: int = 4, group: int = 32, zeros: bool = False, **more: Any) -> Any:
    """A small layer with act order."""
    sizes = {"experts": E, "top_k": K, "hidden_size": 128, "intermediate_size": 192, "dtype": "bfloat16"}
    return layer_of(packing, bits, group, zeros, "group", **{**sizes, **more})


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64)])
def test_every_kind_of_layer(
    bits: int, group: int, zeros: bool, bias: bool, gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = kind("gptq" if bias else "compressed-tensors", bits, group, zeros, bias=bias, gated=gated)
    assert BACKEND.check(layer, H200) == Accepted()
    assert outcome(layer, contents_of(layer), monkeypatch) == ""


@pytest.mark.parametrize("matrix", ["w13", "w2"])
def test_an_order_that_is_left_out_is_noticed(matrix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(tensors: dict[str, torch.Tensor]) -> None:
        order = tensors[f"{matrix}_order"]
        order.copy_(torch.arange(order.shape[1], dtype=order.dtype).expand_as(order))

    layer = kind()
    assert outcome(layer, contents_of(layer), monkeypatch, fault) != ""


def test_expert_map_with_remote_and_permuted_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kind()
    assert outcome(layer, contents_of(layer), monkeypatch, places=[-1, 4, 0, -1, 2]) == ""


def test_many_tokens_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kind()
    monkeypatch.setattr(hopper_wna16_act_order, "MAX_GATHERED_FEATURES", 3 * K * layer.hidden_size)
    calls: list[int] = []

    def counted(x: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(x.shape[0])
        played(x, *args, **kwargs)

    assert outcome(layer, contents_of(layer), monkeypatch, kernel=counted) == "" and calls == [3 * K, 3 * K, K]


@pytest.mark.parametrize("tokens", [3, 64])
def test_parts_of_an_all_to_alls_calls_are_not_of_one_size(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = dataclasses.replace(kind(), parallel=Parallel(dp=2, format="batched"))
    monkeypatch.setattr(hopper_wna16_act_order, "MAX_GATHERED_FEATURES", 8 * layer.hidden_size)
    monkeypatch.setattr(hopper_wna16_act_order.HopperWna16, "_launches", launches := mock.Mock())
    launches.return_value.counters = 0
    tensors = {"w13": torch.empty(0), "w13_order": torch.empty(0)}
    builder = FunctionRecorder(max_tokens=tokens, for_serving=False)
    BACKEND.build_experts(tensors, layer, BACKEND.plan(layer, H200), builder)  # type: ignore[arg-type]
    (called,) = launches.call_args_list
    assert called.args[2:] == (min(tokens, 8), tokens <= 8)


def test_scratch_memory_is_that_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = kind()
    made = contents_of(layer)
    canonical = to_canonical(made.parameters(), layer)
    tensors, plan = converted(BACKEND.name, canonical, layer, H200), BACKEND.plan(layer, H200)
    monkeypatch.setattr(hopper_wna16_act_order, "MAX_GATHERED_FEATURES", 8 * K * layer.hidden_size)
    _, nbytes = BACKEND.build_experts(tensors, layer, plan, FunctionRecorder(for_serving=False))  # type: ignore[arg-type]
    needs = [nbytes(tokens, K) for tokens in range(65)]
    assert needs == sorted(needs) and needs[0] == 0 < needs[8] == needs[64]


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"scheme": Scheme("wna16", 4, 128, "gptq")}, "act_order", "this layer has no act order"),
        (
            {"scheme": Scheme("wna16", 4, -1, "gptq", act_order="group")},
            "act_order.none",
            "with one scale per output row the order is irrelevant",
        ),
        (
            {"tp": 2, "intermediate_size": 384},
            "act_order.sharded",
            "every group of 128 features over all 2 ranks, and this rank has 384 of 768 features",
        ),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], code: str, words: str) -> None:
    ordered = Scheme("wna16", 4, 128, "gptq", act_order="group")
    reasons = BACKEND.check(problem(**{"scheme": ordered, **changes}), H200).reasons
    assert any(reason.code.startswith(code) and words in reason.detail for reason in reasons), reasons
    assert BACKEND.check(problem(scheme=ordered, ep=2, local_experts=64), H200) == Accepted()


def test_it_is_taken_where_nothing_but_emulation_is_left() -> None:
    ordered = Scheme("wna16", 4, 128, "gptq", act_order="group")
    decision = decide(problem(scheme=ordered), H200, Settings())
    assert decision.backend == "hopper_wna16_act_order" and not decision.degraded
    assert "a token's choices rounded to bfloat16" in decision.summary()
