"""vLLM's kernel for 16-bit experts over dequantized weights: its tensors, its outputs, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.cases import CPU, GPT_OSS, MXFP8_W8A8, SILU, problem
from tests.lib.function_recorder import FunctionRecorder
from tests.lib.stock_rules import HALVES, backend, codes_of, converted, expert, stacked, wna16_scheme
from vllm_moe_oracle import schemes
from vllm_moe_oracle.backends import cpu_dequantized
from vllm_moe_oracle.backends._cpu import fill_empty_slots
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Activation, Problem, Routing, Scheme
from vllm_moe_oracle.errors import OracleError
from vllm_moe_oracle.layouts.row_blocks import pack_row_blocks
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings

NAME = "cpu_dequantized"
SCHEMES = {
    "mxfp8": MXFP8_W8A8,
    "mxfp4": Scheme("mxfp4", 4, 32, "mxfp4"),
    "int4": wna16_scheme(4, 32),
    "int8, zero points": wna16_scheme(8, 32, zeros=True),
    "int4, act order": wna16_scheme(4, 32, order="group"),
    "int4, a scale a row": wna16_scheme(4, -1),
}


def layer_of(scheme: str, **changes: Any) -> Problem:
    """A small layer."""
    usual: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 96, "activation": SILU}
    return problem(scheme=SCHEMES[scheme], **usual | changes)


def stored(layer: Problem) -> dict[str, torch.Tensor]:
    """Canonical tensors with numbers of ordinary size."""
    found = [expert(layer, seed) for seed in range(layer.local_experts)]
    for one in found:
        for key in ("w13_scale", "w2_scale"):
            if layer.scheme.name != "wna16":
                one[key] = one[key] % 4 + (112 if layer.scheme.name == "mxfp8" else 119)
        if layer.scheme.name == "mxfp8":
            for key in ("w13", "w2"):  # no NaN
                codes = one[key].view(torch.uint8)
                one[key] = codes.masked_fill(codes & 127 == 127, 0).view(torch.float8_e4m3fn)
    return stacked(found)


# --- Conversion -------------------------------------------------------------------------------------------------------


@given(blocks=st.integers(1, 9), columns=st.integers(1, 70), rows=st.sampled_from((16, 32)))
def test_a_block_holds_its_rows_column_by_column(blocks: int, columns: int, rows: int) -> None:
    original = torch.arange(rows * blocks * columns).view(rows * blocks, columns)
    packed = pack_row_blocks(original, rows)
    assert packed.shape == original.shape
    assert torch.equal(packed.view(blocks, columns, rows).mT.flatten(0, 1), original)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (64, 96), (160, 256)])
def test_vllms_operator_orders_weights_alike(dtype: torch.dtype, rows: int, columns: int) -> None:
    operators = cpu_operators()
    weights = torch.randn(2, rows, columns).to(dtype)
    packed = torch.empty_like(weights)
    operators.prepack_moe_weight(weights, packed, "vec")
    for one, other in zip(weights, packed, strict=True):
        assert torch.equal(pack_row_blocks(one, 16), other)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("inner", [96, 64, 160])
def test_kernel_tensors_hold_the_dequantized_weights(scheme: str, inner: int) -> None:
    layer = layer_of(scheme, intermediate_size=inner, has_bias=True)
    one = {key: tensor[0] for key, tensor in stored(layer).items()}
    plan = backend(NAME).plan(layer, CPU)
    assert plan == ShardPlan(256, inner, layout="vec")
    made = backend(NAME).convert(one, layer, plan)
    for key in ("w13", "w2"):
        exact = schemes.module(layer.scheme.name).dequantize_expert(one, key)
        found = made[key].view(-1, exact.shape[1], 16).mT.flatten(0, 1).float()
        if layer.scheme.name == "wna16":
            assert ((found - exact).abs() <= exact.abs() * 2.0**-8).all()  # rounded to bfloat16, once
        else:
            assert torch.equal(found, exact)
        assert torch.equal(made[f"{key}_bias"], one[f"{key}_bias"])


# --- What it computes -------------------------------------------------------------------------------------------------


def cpu_operators() -> Any:
    """vLLM's operators, if this build has those for 16-bit experts."""
    pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        pytest.skip("this build of vLLM has no experts for CPUs")
    return torch.ops._C


BOUNDS = {"bfloat16": 3 * 2.0**-7, "float16": 3 * 2.0**-11, "float32": 256 * 2.0**-24}
"""The weights, what enters the second product, and the output are rounded; to bfloat16 towards zero on CPUs without
instructions for it. In float32 256 products are added."""
CENTERED = 2.0**-10
"""Most by which outputs in bfloat16 may be too small or too large on average. Cut twice they are 5.6e-3 too small."""


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activation", [SILU, GPT_OSS, HALVES, Activation("gelu"), Activation("gelu_tanh")], ids=str)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_it_computes_what_the_emulation_does(scheme: str, activation: Activation, dtype: str) -> None:
    cpu_operators()
    layer = layer_of(scheme, activation=activation, dtype=dtype, has_bias=True, intermediate_size=160)
    if codes_of(NAME, layer, CPU):
        assert dtype == "float16" and layer.scheme.name != "wna16"
        return
    for places in (None, torch.tensor([3, -1, 0, 1, -1, 2, 5, 4], dtype=torch.int32)):
        found, expected = both(layer, 21, places)
        assert not found[1].any()
        assert (found.float() - expected).norm() / expected.norm() < BOUNDS[dtype]


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4", "int4"])
def test_outputs_are_neither_too_small_nor_too_large(scheme: str) -> None:
    cpu_operators()
    assert abs(slope(layer_of(scheme, intermediate_size=160))) < CENTERED


def test_without_the_factor_cut_off_numbers_make_outputs_too_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_operators()
    if not cpu_dequantized._cuts_off():
        pytest.skip("the operator rounds on this machine")
    monkeypatch.setattr(cpu_dequantized, "_cuts_off", lambda: False)
    assert slope(layer_of("mxfp8", intermediate_size=160)) < -4 * CENTERED


def test_torchs_defaults_do_not_change_what_the_operator_is_found_to_do() -> None:
    """vLLM sets them to the model's while it loads one."""
    cpu_operators()
    found = cpu_dequantized._cuts_off()
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.bfloat16, torch.float16):
            torch.set_default_dtype(dtype)
            assert cpu_dequantized._cuts_off.__wrapped__() == found
    finally:
        torch.set_default_dtype(before)


def slope(layer: Problem) -> float:
    """By what part outputs are larger than they should be."""
    found, expected = both(layer, 64)
    return float((found.float() * expected).sum() / expected.square().sum()) - 1


def both(layer: Problem, tokens: int, places: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the backend and of the emulation; the second token has no expert, the first one only one."""
    exact = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, activations="16bit"))
    canonical = stored(layer)
    tensors = converted(NAME, canonical, layer, CPU)
    run = backend(NAME).build_experts(tensors, layer, backend(NAME).plan(layer, CPU), FunctionRecorder())  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, layer.hidden_size, generator=generator).to(getattr(torch, layer.dtype))
    weights = torch.rand(tokens, layer.top_k, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[: layer.top_k] for _ in range(tokens)]).int()
    ids[0, -1], ids[1] = -1, -1
    before = x.clone()
    wide = torch.full((tokens, 2 * layer.hidden_size), float("nan"), dtype=x.dtype)
    out, expected = wide[:, : layer.hidden_size], torch.empty(tokens, layer.hidden_size)  # rows with gaps
    run(out, x, weights, ids, places)
    forward(canonical, exact, expected, x, weights, ids, places)
    assert torch.equal(x, before)
    run(out[:0], x[:0], weights[:0], ids[:0], places)
    return out, expected


def test_routing_that_is_ready_is_not_copied() -> None:
    weights, ids = torch.rand(3, 2), torch.tensor([[0, 1], [7, 0], [3, 2]], dtype=torch.int32)
    found = fill_empty_slots(weights, ids, None)
    assert found[0] is weights and found[1] is ids


def test_routing_of_no_tokens_is_empty() -> None:
    found = fill_empty_slots(torch.rand(0, 2), torch.empty(0, 2, dtype=torch.int32), None)
    assert [tuple(each.shape) for each in found] == [(0, 2), (0, 2)]


def _empty(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids = ids.clone()
    ids[2, 1] = -1
    return weights, ids


@pytest.mark.parametrize(
    "change",
    [
        _empty,
        lambda weights, ids: (weights.double(), ids),
        lambda weights, ids: (weights, ids.long()),
        lambda weights, ids: (weights.T.contiguous().T, ids),
        lambda weights, ids: (weights, ids.T.contiguous().T),
    ],
    ids=["empty slot", "double", "int64", "strided weights", "strided ids"],
)
def test_routing_that_is_not_ready_is_copied(change: Any) -> None:
    """The operator reads float32 and int32 without gaps, and an id of -1 lets it write outside of its memory."""
    weights, ids = change(torch.rand(3, 2), torch.tensor([[0, 1], [7, 0], [3, 2]], dtype=torch.int32))
    before = weights.clone(), ids.clone()
    found = fill_empty_slots(weights, ids, None)
    assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.int32)
    assert found[0].is_contiguous() and found[1].is_contiguous()
    assert torch.equal(found[1].long(), ids.clamp(min=0).long())
    assert torch.equal(found[0], torch.where(ids < 0, 0.0, weights.float()))
    assert torch.equal(weights, before[0]) and torch.equal(ids, before[1])


def test_the_routers_weight_multiplies_the_input_where_it_should() -> None:
    cpu_operators()
    routing = Routing("llama4", apply_router_weight_on_input=True)
    layer = layer_of("mxfp8", top_k=1, routing=routing)
    found, expected = both(layer, 9)
    other = both(dataclasses.replace(layer, routing=Routing("default")), 9)[1]
    assert (found.float() - expected).norm() / expected.norm() < BOUNDS["bfloat16"]
    assert (other - expected).norm() / expected.norm() > 0.1


def test_a_width_between_the_kernels_tiles_is_padded() -> None:
    cpu_operators()
    layer = layer_of("int4, a scale a row", intermediate_size=88)
    assert backend(NAME).plan(layer, CPU).intermediate_size == 96
    found, expected = both(layer, 5)
    assert (found.float() - expected).norm() / expected.norm() < BOUNDS["bfloat16"]


def test_a_build_without_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_C", object(), raising=False)
    with pytest.raises(OracleError, match="no operator cpu_fused_moe"):
        backend(NAME).build_experts({}, layer_of("mxfp8"), ShardPlan(256, 96), FunctionRecorder())  # type: ignore[arg-type]


# --- What it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"activation": Activation("silu", limit=10.0)}, "activation.parameters"),
        ({"activation": Activation("swigluoai", alpha=1.0, beta=1.0, limit=7.0)}, "activation.parameters"),
        ({"activation": Activation("swigluoai", alpha=1.702, beta=0.0, limit=7.0)}, "activation.parameters"),
        ({"activation": Activation("situ", alpha=1.0)}, "activation"),
        ({"dtype": "float16"}, "dtype.range"),
        ({"hidden_size": 240}, "alignment.hidden"),
        ({"lora": True}, "lora"),
    ],
)
def test_what_the_operator_cannot_compute_is_refused(changes: dict[str, Any], code: str) -> None:
    assert code in codes_of(NAME, layer_of("mxfp8", **changes), CPU)
    assert not codes_of(NAME, layer_of("mxfp8"), CPU)


def test_the_layout_is_amxs_where_the_machine_has_it() -> None:
    amx = dataclasses.replace(CPU, features=("avx2", "avx512f", "amx_tile", "amx_bf16"))
    assert backend(NAME).plan(layer_of("mxfp8"), amx).layout == "amx"
    assert backend(NAME).plan(layer_of("int4", dtype="float16"), amx).layout == "vec"
    blank = {key: tensor[0].to("meta") for key, tensor in stored(layer_of("mxfp8")).items()}
    plan = backend(NAME).plan(layer_of("mxfp8"), amx)
    assert backend(NAME).convert(blank, layer_of("mxfp8"), plan)["w13"].shape == (192, 256)


@pytest.mark.parametrize(("layers", "ranks", "fits"), [(24, 1, True), (48, 1, False), (24, 2, True), (0, 1, True)])
def test_a_model_larger_than_the_memory_is_left_quantized(layers: int, ranks: int, fits: bool) -> None:
    """128 experts of 2048 x 768 take 1.125 GiB a layer in bfloat16: 27 GiB in 24 layers."""
    machine = dataclasses.replace(CPU, memory_gib=40.0)
    layer = problem(scheme=MXFP8_W8A8, intermediate_size=768 // ranks, tp=ranks, num_layers=layers)
    reasons = [reason for reason in backend(NAME).check(layer, machine).reasons if reason.code == "memory"]
    assert bool(reasons) is not fits
    if reasons:
        assert reasons[0].detail == (
            "experts of 48 layers take 54.0 GiB in bfloat16; 70% of the machine's memory are 28.0 GiB"
        )
    assert decide(layer, machine, Settings()).backend == (NAME if fits else "emulation")
    assert not codes_of(NAME, layer, dataclasses.replace(machine, memory_gib=0.0))


def test_kernels_that_keep_the_weights_quantized_go_before_it() -> None:
    able = dataclasses.replace(CPU, features=("avx2", "avx512f", "avx512_bf16"))
    layer = layer_of("mxfp4")
    assert decide(layer, able, Settings()).backend == "cpu_mxfp4"
    assert decide(layer, CPU, Settings()).backend == NAME


def test_ranks_with_other_numbers_of_experts_agree_on_memory() -> None:
    """Five experts over two ranks, on a machine that holds five and not six."""
    layers = [
        dataclasses.replace(problem(num_experts=5, local_experts=local, top_k=2, ep=2), num_layers=48)
        for local in (3, 2)
    ]
    five = 5 * 3 * 2048 * 768 * 2 * 48 / 2**30
    for room, refused in ((1.01 * five, False), (0.99 * five, True)):
        device = dataclasses.replace(CPU, memory_gib=room / 0.7)
        found = [default_registry()[NAME].check(each, device).reasons for each in layers]
        assert [[reason.code for reason in each] for each in found] == [["memory"] * refused] * 2
        assert all("a machine with more memory" in reason.remedy for each in found for reason in each)
