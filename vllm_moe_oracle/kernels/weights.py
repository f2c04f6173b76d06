"""Packed MoE weights as the kernels read them: allocation, packing one expert, and unpacking it.

Canonical weights are the input. A weight is `(code - zero point) * scale`, or `code * 2**(scale - 127)` in the MX
formats. w13 has gate rows then up rows, or just one half when the layer is not gated.

* MXFP8: e4m3 bytes `[N, K]`, e8m0 `[N, K/32]`.
* MXFP4: codes `[N, K/2]`, low nibble first, e8m0 `[N, K/32]`.
* int8 codes `[N, K]` or int4 codes `[N, K/2]`, unsigned, low nibble first; scales `[N, K/g]`; zero points uint8
  `[N, K/g]` or none, which means `2**(bits-1)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..layouts import float16_scales, wgmma_fragments
from ..layouts.nibbles import split_nibbles

FORMATS = ("int4", "int8", "mxfp4", "mxfp8")

# The power of two by which decoded MX products exceed the weight over its row's largest scale: wgmma_fragments.py
# stores the largest scale as 254, that is 2**127, and dequantize.py gives e2m1 times 2**-126 and e4m3 times 2**-120.
# For float16 the largest scale is 2**15, e2m1 is times 2**-14 and e4m3 times 2**-8.
_MX_EXPONENT_EXCESS = {"mxfp4": 1, "mxfp8": 7}


def has_rebased_scales(format: str, group: int, dtype: torch.dtype) -> bool:
    """Whether group scales are stored times a power of two per row, for which row_scale compensates.

    Without zero points a row's largest stored scale is near 2**127, because the kernels multiply it by codes that are
    small numbers (`code_factors`). With zero points it is near 1: the multiply-add that subtracts them has scaled the
    codes already.
    """
    return format in ("int4", "int8") and group > 0 and dtype == torch.bfloat16


def code_factors(format: str, dtype: torch.dtype, rows: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The value of an integer code of 1 in dequantize.py, for each of `rows` stored rows (a multiple of 16): float64.

    A code is used at the bit position where it is stored, as bfloat16 `code * 2**-133`; 4-bit codes of rows g + 8 of
    every 16 are four bits higher (wgmma_fragments.py). The zero point or the scale brings a factor of 2**127, row_scale
    the rest. row_scale is infinite for scales from 2**122 on, with which weights exceed bfloat16's range too.
    """
    factors = torch.ones(rows // 16, 2, 8, dtype=torch.float64, device=device)
    if dtype == torch.bfloat16:
        factors *= 2.0**-6
        if format == "int4":
            factors[:, 1] *= 16
    return factors.reshape(rows)


_SHUFFLES = {
    "int4": wgmma_fragments.shuffle_int4, "int8": wgmma_fragments.shuffle_int8,
    "mxfp4": wgmma_fragments.shuffle_e2m1, "mxfp8": wgmma_fragments.shuffle_e4m3,
}  # fmt: skip
_UNSHUFFLES = {
    "int4": wgmma_fragments.unshuffle_int4, "int8": wgmma_fragments.unshuffle_int8,
    "mxfp4": wgmma_fragments.unshuffle_e2m1, "mxfp8": wgmma_fragments.unshuffle_e4m3,
}  # fmt: skip


def _bits_option(format: str, dtype: torch.dtype) -> dict[str, bool]:
    """The option of `_SHUFFLES` and `_UNSHUFFLES` for what MX codes are decoded to."""
    return {"float16": True} if format.startswith("mx") and dtype == torch.float16 else {}


def _top_scale(dtype: torch.dtype) -> int:
    """What the largest MX scale of a row is stored as."""
    return float16_scales.TOP if dtype == torch.float16 else 254


def code_bits(format: str) -> int:
    """Bits per code of a format: 4 or 8."""
    if format not in FORMATS:
        raise ValueError(f"unknown weight format {format!r}; the kernels know {', '.join(FORMATS)}")
    return 4 if format in ("int4", "mxfp4") else 8


@dataclass(frozen=True)
class PackedMatrix:
    """One projection's stored tensors for all experts; the logical matrix of each expert is `[rows, columns]`.

    codes uint8 `[E, N/64, K/chunk, 2048]`; scales int32 `[E, N/64, K/128, 64]` (MX) or `[E, N/64, K/g, 32]` (group
    scales), zeros like group scales; row_scale float32 `[E, N]` (MX; one scale per row; `has_rebased_scales`); bias
    float32 `[E, N]`. N is padded to a multiple of 64 with zeros. Absent tensors are None.
    """

    rows: int
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    row_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All stored tensors."""
        for tensor in (self.codes, self.scales, self.zeros, self.row_scale, self.bias):
            if tensor is not None:
                yield tensor


@dataclass(frozen=True)
class PackedWeights:
    """A layer's weights as the kernels read them. `group` is the columns per scale, 0 for one scale per row.

    `dtype` is the activations' dtype, bfloat16 or float16 (group scales and zero points are stored in it).
    `num_experts` counts the experts of all ranks.
    """

    format: str
    group: int
    dtype: torch.dtype
    gated: bool
    w13: PackedMatrix
    w2: PackedMatrix
    num_experts: int

    @property
    def experts(self) -> int:
        """Local experts."""
        return self.w13.codes.shape[0]

    @property
    def hidden(self) -> int:
        """Columns of w13 and rows of w2."""
        return self.w13.columns

    @property
    def intermediate(self) -> int:
        """Columns of w2."""
        return self.w2.columns

    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.numel() * t.element_size() for matrix in (self.w13, self.w2) for t in matrix.tensors())


def storage_errors(format: str, hidden: int, intermediate: int, group: int, dtype: torch.dtype) -> list[str]:
    """Every reason why the kernels cannot hold such a layer; an empty list when they can. group: columns per scale."""
    reasons = []
    if format not in FORMATS:
        reasons.append(f"weight format {format!r} is none of {', '.join(FORMATS)}")
    if dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"activation dtype {dtype} is neither bfloat16 nor float16")
    for name, size in (("hidden size", hidden), ("intermediate size", intermediate)):
        if size <= 0 or size % 32:
            reasons.append(f"{name} {size} is not a positive multiple of 32")
        if group and size % group:
            reasons.append(f"{name} {size} is not a multiple of the scale group {group}")
    allowed = (32,) if format in ("mxfp4", "mxfp8") else (0, 32, 64, 128)
    if group not in allowed:
        reasons.append(f"scale group {group} is none of {allowed} (0: one scale per row)")
    return reasons


def allocate_weights(format: str, experts: int, hidden: int, intermediate: int, *, gated: bool = True, group: int = 32,
             dtype: torch.dtype = torch.bfloat16, zero_points: bool = False, bias: bool = False,
             num_experts: int | None = None, device: torch.device | str | None = None) -> PackedWeights:  # fmt: skip
    """Empty storage for a layer; fill it with `pack_expert`. Raises ValueError with each rule that the layer breaks.

    num_experts: experts of all ranks; None where this one holds all of them.
    """
    reasons = storage_errors(format, hidden, intermediate, group, dtype)
    if zero_points and format not in ("int4", "int8"):
        reasons.append(f"zero points do not exist in {format}")
    if reasons:
        raise ValueError("; ".join(reasons))
    mx = format.startswith("mx")
    per_row = mx or not group or has_rebased_scales(format, group, dtype)

    def matrix(rows: int, columns: int) -> PackedMatrix:
        padded = wgmma_fragments.padded_rows(rows)
        groups = wgmma_fragments.group_scale_shape(rows, max(1, columns // group if group else 1))
        words = {"dtype": torch.int32, "device": device}
        floats = {"dtype": torch.float32, "device": device}
        scales = None
        if mx:
            scales = torch.empty(experts, *wgmma_fragments.mx_scale_shape(rows, columns), **words)
        elif group:
            scales = torch.empty(experts, *groups, **words)
        return PackedMatrix(
            rows=rows,
            columns=columns,
            codes=torch.empty(
                experts,
                *wgmma_fragments.chunk_shape(rows, columns, code_bits(format)),
                dtype=torch.uint8,
                device=device,
            ),
            scales=scales,
            zeros=torch.empty(experts, *groups, **words) if zero_points else None,
            row_scale=torch.empty(experts, padded, **floats) if per_row else None,
            bias=torch.zeros(experts, padded, **floats) if bias else None,
        )

    w13 = matrix(intermediate * (2 if gated else 1), hidden)
    return PackedWeights(format, group, dtype, gated, w13, matrix(hidden, intermediate), num_experts or experts)


def _fp16_zero_offset(format: str) -> int:
    """The number that dequantize.py adds to a code where activations are float16 and there are zero points."""
    return -128 if format == "int8" else 1024


def _pack_integer_scales(
    weights: PackedWeights, matrix: PackedMatrix, expert: int, scales: torch.Tensor, zero_points: torch.Tensor | None
) -> None:
    """Stores scales and zero points of integer codes, `[N, K/g]`, rows in stored order."""
    padded = matrix.codes.shape[1] * 64
    padding = (0, padded - matrix.rows)
    factors = code_factors(weights.format, weights.dtype, padded, scales.device)
    if weights.group:
        assert matrix.scales is not None
        scales = scales.to(weights.dtype)
        if matrix.row_scale is not None:
            exponents = torch.frexp(scales.float().abs().amax(dim=1)).exponent
            powers = 127 - exponents if zero_points is None else -exponents
            scales = torch.ldexp(scales.double(), powers[:, None]).to(weights.dtype)
            row_scale = torch.nn.functional.pad(torch.exp2(exponents.double()), padding)
            matrix.row_scale[expert].copy_(row_scale / factors)
        matrix.scales[expert].copy_(wgmma_fragments.shuffle_group_scales(scales))
    else:
        assert matrix.row_scale is not None
        matrix.row_scale[expert].copy_(torch.nn.functional.pad(scales[:, 0].double(), padding) / factors)
    if zero_points is not None and matrix.zeros is not None:
        values = zero_points.to(torch.int32)
        if weights.dtype == torch.bfloat16:
            stored = -(values * factors[: matrix.rows, None])
        else:
            stored = values + _fp16_zero_offset(weights.format)
        matrix.zeros[expert].copy_(wgmma_fragments.shuffle_group_scales(stored.to(weights.dtype)))


def pack_expert(weights: PackedWeights, which: str, expert: int, codes: torch.Tensor, scales: torch.Tensor,
                zero_points: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> None:  # fmt: skip
    """Stores one expert's canonical tensors; `which` is "w13" or "w2".

    It needs memory for a few copies of the matrix's codes: four of int4, three of mxfp4, two of 8-bit codes.
    codes uint8 `[N, K * bits / 8]` (or float8_e4m3fn), scales `[N, K/g]`, zero_points uint8 `[N, K/g]`, bias `[N]`.
    For float16, MX weights are exact down to scales `float16_scales.MAX_SPREAD` binades below the row's largest. Others
    are rounded to multiples of 2**-25 (mxfp4) or 2**-31 (mxfp8) of it, or, 30 binades below it, to 0.
    """
    matrix = weights.w13 if which == "w13" else weights.w2
    bits = code_bits(weights.format)
    expected = (matrix.rows, matrix.columns * bits // 8)
    if tuple(codes.shape) != expected:
        raise ValueError(f"{which} codes of expert {expert} have shape {tuple(codes.shape)}; expected {expected}")
    expected = (matrix.rows, matrix.columns // weights.group if weights.group else 1)
    if tuple(scales.shape) != expected:
        raise ValueError(f"{which} scales of expert {expert} have shape {tuple(scales.shape)}; expected {expected}")
    if (zero_points is not None) != (matrix.zeros is not None) or (bias is not None) != (matrix.bias is not None):
        raise ValueError(f"{which} of expert {expert}: zero points and biases must match what was allocated")
    interleave = wgmma_fragments.pair_gate_up if which == "w13" and weights.gated else torch.Tensor.contiguous
    codes = interleave(codes.view(torch.uint8))
    scales = interleave(scales)
    target = matrix.codes[expert]
    _SHUFFLES[weights.format](codes, target, **_bits_option(weights.format, weights.dtype))
    padding = (0, target.shape[0] * 64 - matrix.rows)
    if weights.format.startswith("mx"):
        assert matrix.scales is not None and matrix.row_scale is not None
        words, largest = wgmma_fragments.shuffle_mx_scales(scales.view(torch.uint8), _top_scale(weights.dtype))
        matrix.scales[expert].copy_(words)
        factor = torch.exp2(largest.double() - 127 - _MX_EXPONENT_EXCESS[weights.format])
        matrix.row_scale[expert].copy_(factor.masked_fill(largest == 255, float("nan")))
    else:
        zeros = None if zero_points is None else interleave(zero_points)
        _pack_integer_scales(weights, matrix, expert, scales, zeros)
    if bias is not None and matrix.bias is not None:
        matrix.bias[expert].copy_(torch.nn.functional.pad(interleave(bias).float(), padding))


def unpack_expert(
    weights: PackedWeights, which: str, expert: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Inverse of `pack_expert`: canonical codes, scales, zero points and bias of one expert.

    Group scales come back in `weights.dtype`, scales per row and biases in float32. For float16, MX scales that are 30
    binades and more below the row's largest come back as 0.
    """
    matrix = weights.w13 if which == "w13" else weights.w2
    rows, columns = matrix.rows, matrix.columns
    restore = wgmma_fragments.unpair_gate_up if which == "w13" and weights.gated else torch.Tensor.contiguous
    stored = matrix.codes[expert]
    codes = _UNSHUFFLES[weights.format](stored, rows, columns, **_bits_option(weights.format, weights.dtype))
    factors = code_factors(weights.format, weights.dtype, stored.shape[0] * 64, stored.device)[:rows, None]
    if weights.format.startswith("mx"):
        assert matrix.scales is not None and matrix.row_scale is not None
        exponent = torch.log2(matrix.row_scale[expert].double()) + 127 + _MX_EXPONENT_EXCESS[weights.format]
        largest = exponent.nan_to_num(255.0).round().to(torch.uint8)
        top = _top_scale(weights.dtype)
        scales = wgmma_fragments.unshuffle_mx_scales(matrix.scales[expert], largest, rows, columns, top)
    elif weights.group:
        assert matrix.scales is not None
        scales = wgmma_fragments.unshuffle_group_scales(matrix.scales[expert], rows, weights.dtype)
        if matrix.row_scale is not None:
            power = matrix.row_scale[expert, :rows, None].double() * factors
            if matrix.zeros is None:
                power *= 2.0**-127
            scales = (scales.double() * power).to(weights.dtype)
    else:
        assert matrix.row_scale is not None
        scales = (matrix.row_scale[expert, :rows, None] * factors).float()
    zero_points = None
    if matrix.zeros is not None:
        values = wgmma_fragments.unshuffle_group_scales(matrix.zeros[expert], rows, weights.dtype).double()
        brain = weights.dtype == torch.bfloat16
        values = -values / factors if brain else values - _fp16_zero_offset(weights.format)
        zero_points = restore(values.to(torch.uint8))
    bias = None if matrix.bias is None else restore(matrix.bias[expert, :rows])
    return restore(codes), restore(scales), zero_points, bias


def dequantize_expert(weights: PackedWeights, which: str, expert: int) -> torch.Tensor:
    """One expert's matrix in float32, canonical row order; for references, not for speed."""
    codes, scales, zero_points, _ = unpack_expert(weights, which, expert)
    matrix = weights.w13 if which == "w13" else weights.w2
    if code_bits(weights.format) == 4:
        codes = split_nibbles(codes)
    if weights.format == "mxfp4":
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
        values = magnitudes[(codes & 7).long()] * (1.0 - 2.0 * (codes >> 3))
    elif weights.format == "mxfp8":
        values = codes.view(torch.float8_e4m3fn).float()
    else:
        zero: torch.Tensor | float = 2.0 ** (code_bits(weights.format) - 1)
        if zero_points is not None:
            zero = zero_points.float().repeat_interleave(matrix.columns // zero_points.shape[1], dim=1)
        values = codes.float() - zero
    if weights.format.startswith("mx"):
        scales = torch.exp2(scales.float() - 127)
    return values * scales.float().repeat_interleave(matrix.columns // scales.shape[1], dim=1)
