"""Padding that a kernel reads is harmless whatever it holds, by what the kernel does with it: inputs of columns beyond
a layer's own are zeros, rows beyond are dropped. That kernels do so is tested on a GPU, with the same garbage."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from tests.lib.bit_moves import undone
from tests.lib.cases import GPT_OSS, MXFP8, RELU2, SILU, problem
from tests.lib.padding_checks import MATRICES, Cut, Dirty
from tests.lib.stock_rules import GPT_OSS as ALTERNATING
from tests.lib.stock_rules import gpu
from vllm_moe_oracle import schemes
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Problem, Routing, Scheme
from vllm_moe_oracle.core.sharding import loaded_group_size
from vllm_moe_oracle.kernels.weights import code_bits, unpack_expert
from vllm_moe_oracle.layouts import scales, wgmma_fragments
from vllm_moe_oracle.layouts.gate_up import interleave_gate_up
from vllm_moe_oracle.layouts.mma_tiles import pack_nibbles, pack_tiles
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.schemes import mxfp4, mxfp8, wna16

Matrix = tuple[torch.Tensor, Any]
"""Float64 `[N, K]` and a bias, if there is one."""
HOPPER = gpu(90)
OLD = dataclasses.replace(HOPPER, packages=HOPPER.packages | {"humming-kernels": "0.1.10"})
MXFP4 = Scheme("mxfp4", 4, 32, "mxfp4")
SMALL: dict[str, Any] = {
    "experts": 1, "top_k": 1, "hidden_size": 160, "intermediate_size": 96, "routing": Routing("renormalize")
}  # fmt: skip


def integers(bits: int, group: int, zeros: bool = False) -> Scheme:
    return Scheme("wna16", bits, group, "compressed-tensors", zeros)


LAYERS = {
    "int4": problem(**SMALL, scheme=integers(4, 32), activation=SILU, has_bias=True),
    "int4_zeros_relu2": problem(**SMALL, scheme=integers(4, 32, zeros=True), activation=RELU2),
    "int8_zeros": problem(**SMALL, scheme=integers(8, 32, zeros=True), activation=SILU),
    "int8_channel": problem(**SMALL, scheme=integers(8, -1), activation=SILU),
    "int4_channel_relu2": problem(**SMALL, scheme=integers(4, -1), activation=RELU2, has_bias=True),
    "mxfp8": problem(**SMALL, scheme=MXFP8, activation=SILU, has_bias=True),
    "mxfp8_relu2": problem(**SMALL, scheme=MXFP8, activation=RELU2),
    "mxfp4": problem(**SMALL, scheme=MXFP4, activation=SILU),
    "mxfp4_oai": problem(**SMALL, scheme=MXFP4, activation=GPT_OSS, has_bias=True),
    "mxfp4_alternating": problem(**SMALL, scheme=MXFP4, activation=ALTERNATING, has_bias=True),
    "int8_float16": problem(**SMALL, scheme=integers(8, 32), activation=SILU, dtype="float16"),
}


def expert(each: Problem) -> dict[str, torch.Tensor]:
    """Random canonical tensors of one expert, scales and zero points of all kinds."""
    generator = torch.Generator().manual_seed(7)
    found = {}
    for name, (_, *shape) in schemes.module(each.scheme.name).shapes(each).items():
        kind = name.partition("_")[2]
        if kind == "bias":
            found[name] = torch.randn(shape, generator=generator).bfloat16()
        elif kind == "scale" and each.scheme.name == "wna16":
            found[name] = (torch.rand(shape, generator=generator) * 0.01 + 0.002).bfloat16()
        else:
            low, high = {"scale": (115, 130), "zero_point": (0, 1 << each.scheme.bits)}.get(kind, (0, 256))
            made = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
            if each.scheme.name == "mxfp8" and not kind:
                made = torch.where(made & 127 == 127, made - 1, made).view(torch.float8_e4m3fn)
            found[name] = made
    return found


def dequantized(each: Problem, codes: Any, scale: Any, zeros: Any = None) -> torch.Tensor:
    """Float64 `[N, K]`."""
    if each.scheme.name == "wna16":
        return wna16.dequantize(codes, scale, each.scheme.bits, zeros).double()
    if each.scheme.name == "mxfp4":
        return mxfp4.dequantize(codes, scale).double()
    return mxfp8.dequantize(codes.view(torch.float8_e4m3fn), scale).double()


def in_humming(each: Problem, plan: ShardPlan, converted: dict[str, torch.Tensor], which: str) -> Matrix:
    """A matrix as large as the kernel's, and its bias, by what the library reads: that is said here a second time,
    apart from the conversion."""
    raw, bits, scale = converted[which], each.scheme.bits, converted[f"{which}_scale"]
    rows, groups = 2 * raw.shape[1] // bits, len(scale)
    pack, order = (pack_nibbles if bits == 4 else pack_tiles), plan.layout or "interleaved"
    codes, zeros = undone(pack, raw, (rows, 2 * bits * len(raw)), order=order), None
    if each.scheme.zero_points:
        kept = converted[f"{which}_zero_point"]
        zeros = undone(scales.pack_zero_points, kept, (rows, groups), most=1 << bits, bits=bits, marlin=False)
    if each.scheme.name == "wna16":
        if bits == 8 and each.dtype == "bfloat16":
            # Distances from the zero point: 0, 1, ... from it up, 255, 254, ... below it.
            middle = 128 if zeros is None else zeros.repeat_interleave(codes.shape[1] // groups, 1)
            codes = torch.where(codes <= 255 - middle, codes + middle, 255 - codes)
        alone = loaded_group_size(each) == -1
        scale = undone(scales.permute_scales, scale, (rows, groups), scale.dtype, on_accumulators=alone)
    else:
        scale = undone(scales.permute_group_scales, scale, (rows, groups))
    bias = converted.get(f"{which}_bias")
    if bias is not None:
        bias = undone(scales.permute_bias, bias, bias.shape, bias.dtype).double()
    return dequantized(each, codes, scale, zeros), bias


def in_own(each: Problem, plan: ShardPlan, converted: dict[str, torch.Tensor], which: str) -> Matrix:
    """A matrix of a layer's own rows, and as many columns as codes are stored of, and its bias."""
    backend: Any = default_registry()[f"hopper_{each.scheme.name}"]
    stored = backend._stored(
        {name: tensor[None] for name, tensor in converted.items()}, backend._allocate(each, 1, "meta")
    )
    matrix = getattr(stored, which)
    chunk = wgmma_fragments.chunk_columns(code_bits(stored.format))
    wide = -(-matrix.columns // chunk) * chunk
    whole = dataclasses.replace(stored, **{which: dataclasses.replace(matrix, columns=wide)})
    codes, scale, zeros, bias = unpack_expert(whole, which, 0)
    if each.scheme.name != "wna16":
        # As kernels read them: a row's largest scale is stored as 254, and what is beyond is as it stands.
        largest = torch.full((matrix.rows,), 254, dtype=torch.uint8)
        exponents = wgmma_fragments.unshuffle_mx_scales(matrix.scales[0], largest, matrix.rows, wide).double() - 254
        # A code is read as its value times 2**-126 (e2m1) or 2**-120 (e4m3), and 254 as 2**127.
        excess = {"mxfp4": 1, "mxfp8": 7}[each.scheme.name]
        powers = torch.exp2(exponents + excess) * matrix.row_scale[0, : matrix.rows, None].double()
        if which == "w13" and each.activation.gated:
            powers = wgmma_fragments.unpair_gate_up(powers)
        found = dequantized(each, codes, torch.full_like(scale, 127)) * powers.repeat_interleave(32, 1)
    else:
        group = loaded_group_size(each)
        if group != -1:
            # Of groups beyond there is nothing: kernels take zeros for them.
            scale, zeros = (
                None if part is None else torch.nn.functional.pad(part, (0, wide // group - part.shape[1]))
                for part in (scale, zeros)
            )
        found = dequantized(each, codes, scale, zeros)
    return found, None if bias is None else bias.double()


def output(each: Problem, matrices: dict[str, Matrix], beyond: float = 0.0) -> torch.Tensor:
    """Both products with the activation between them; `beyond`: what inputs hold in columns that are not the layer's.

    Rows that are not its own are dropped after each.
    """
    values = torch.randn(5, each.hidden_size, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for which in MATRICES:
        matrix, bias = matrices[which]
        rows = each.w13_rows if which == "w13" else each.hidden_size
        wide = torch.nn.functional.pad(values, (0, matrix.shape[1] - values.shape[1]), value=beyond)
        values = (wide @ matrix.T)[:, :rows]
        if bias is not None:
            values = values + bias[:rows]
        if which == "w13":
            # Of gpt-oss's rows the order and the clamps are nothing to padding.
            gate, up = values.chunk(2, -1) if each.activation.gated else (values, values)
            values = torch.nn.functional.silu(gate) * up if each.activation.gated else values.clamp(min=0) ** 2
    return values


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def own_weights(kind: str, each: Problem, one: dict[str, torch.Tensor]) -> dict[str, Matrix]:
    """Both matrices of a layer and their biases; for vLLM's kernels with rows that alternate, where the model's do."""
    found: dict[str, Matrix] = {}
    for which in MATRICES:
        weights = dequantized(each, one[which], one[f"{which}_scale"], one.get(f"{which}_zero_point"))
        bias = one[f"{which}_bias"].double() if each.has_bias else None
        if each.activation.interleaved and which == "w13" and kind == "humming":
            weights, bias = (None if part is None else interleave_gate_up(part) for part in (weights, bias))
        found[which] = weights, bias
    return found


def backend_of(kind: str, name: str) -> Any:
    return default_registry()[f"{kind}_{name.partition('_')[0].replace('int4', 'wna16').replace('int8', 'wna16')}"]


def stored_by(kind: str, each: Problem, plan: ShardPlan, converted: dict[str, torch.Tensor]) -> dict[str, Matrix]:
    read = in_humming if kind == "humming" else in_own
    return {which: read(each, plan, converted, which) for which in MATRICES}


@pytest.mark.parametrize("kind", ["humming", "hopper"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_garbage_in_the_padding_meets_zeros_or_is_dropped(kind: str, name: str) -> None:
    each, backend = LAYERS[name], backend_of(kind, name)
    plan, one = backend.plan(each, HOPPER), expert(LAYERS[name])
    dirty = Dirty(backend)
    clean, found = (stored_by(kind, each, plan, tried.convert(one, each, plan)) for tried in (backend, dirty))
    assert dirty.filled
    expected = output(each, clean)
    # Zeros times anything finite are zeros: no rounding is different.
    assert torch.equal(output(each, found), expected)
    for cut in (Cut(rows=16), Cut(columns=32)):
        wrong = output(each, stored_by(kind, each, plan, Dirty(backend, cut).convert(one, each, plan)))
        assert not distance(wrong, expected) <= 2.0**-4, cut  # NaN is none
    read = found["w2"][0].shape[1] > each.intermediate_size
    if read and not (kind == "hopper" and each.scheme.name == "wna16" and each.scheme.group_size != -1):
        # It is the inputs' zeros that make it harmless: there are scales, too.
        assert distance(output(each, found, beyond=4096.0), expected) > 2.0**-4


@pytest.mark.parametrize("kind", ["humming", "hopper"])
@pytest.mark.parametrize("name", list(LAYERS))
def test_garbage_lies_in_the_padding_alone(kind: str, name: str) -> None:
    """What a clean conversion and a dirty one have of the layer's own rows and columns are the layer's weights."""
    each, backend = LAYERS[name], backend_of(kind, name)
    for machine in (HOPPER, OLD)[: 2 if kind == "humming" else 1]:
        plan = backend.plan(each, machine)
        one = expert(each)
        clean, found = (tried.convert(one, each, plan) for tried in (backend, Dirty(backend)))
        assert found.keys() == clean.keys()
        changed = 0
        for own, tensor in clean.items():
            assert (found[own].shape, found[own].dtype) == (tensor.shape, tensor.dtype), own
            same = found[own].contiguous().view(torch.uint8) == tensor.contiguous().view(torch.uint8)
            changed += int((~same).sum())
        assert changed
        for (which, (weights, bias)), made in itertools.product(own_weights(kind, each, one).items(), (clean, found)):
            stored = stored_by(kind, each, plan, made)[which]
            assert torch.equal(stored[0][: weights.shape[0], : weights.shape[1]], weights), which
            assert (bias is None) == (stored[1] is None)
            assert bias is None or torch.equal(stored[1][: len(bias)], bias), which


def test_a_backend_with_undescribed_padding_is_not_taken_for_clean() -> None:
    with pytest.raises(ValueError, match="the padding of trtllm_mxint4 is not described"):
        Dirty(default_registry()["trtllm_mxint4"]).convert({"w13": torch.zeros(1, 1)}, LAYERS["int4"], None)
