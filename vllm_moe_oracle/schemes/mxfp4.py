"""MXFP4: e2m1 codes, two per byte, with one e8m0 scale per 32 input features.

Source of the formats: OCP Microscaling Formats (MX) specification v1.0, sections 5.3.3 (e2m1: bias 1, largest 6, no
infinities, no NaN), 5.4 (E8M0) and 6.3 (conversion). Source of the layouts: gpt-oss's own code
(``gpt_oss/torch/model.py`` and ``weights.py``: the rows of w13 alternate gate and up, the low nibble comes first) and
the compressed-tensors package (``pack_fp4_to_uint8``: the low nibble comes first; gate rows, then up rows).

Canonical tensors of a layer: ``w13`` `[E, R, H/2]` and ``w2`` `[E, H, I/2]` in uint8, low nibble first, ``w13_scale``
`[E, R, H/32]` and ``w2_scale`` `[E, H, I/32]` in uint8, optional ``w13_bias`` `[E, R]` and ``w2_bias`` `[E, H]`. R is
2 I (gate rows, then up rows), or I for non-gated experts.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..core.problem import E8M0_NAN, MX_BLOCK, Problem
from ..layouts.gate_up import deinterleave_gate_up
from . import _mx
from ._mx import DUMMY_FILL as DUMMY_FILL
from ._mx import ScaleRule, e8m0_to_float
from ._mx import parameter_names as parameter_names
from ._mx import read as read
from ._mx import shapes as shapes

E2M1_MAX = 6.0

PASS_BYTES = 64 << 20
"""Largest memory for the temporaries of one pass of `quantize_into`, unless one row of all experts needs more."""
_BYTES_PER_VALUE = 8 * 4
"""Bytes that a pass allocates per value: as much as eight float32 tensors of its input's size."""

_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the neighboring magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code."""

UNLOADED = _mx.UNLOADED["mxfp4"]

e8m0_from_amax = functools.partial(_mx.e8m0_from_amax, largest=E2M1_MAX)
"""The e8m0 code of each block from its largest magnitude; ``floor`` is floor(log2(amax)) - 2."""


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Canonical tensors of one expert from those that `read` returned.

    Args:
        expert: tensors by canonical name, without the leading expert dimension; meta tensors too. Not modified.
        problem: the layer, which says whether the rows of w13 alternate gate and up.

    Returns:
        Tensors of the same shapes and dtypes. Those whose rows are in canonical order already are returned as they are.
    """
    if not problem.activation.interleaved:
        return dict(expert)
    return {name: deinterleave_gate_up(tensor) if name.startswith("w13") else tensor for name, tensor in expert.items()}


def check_values(tensors: Mapping[str, Tensor], problem: Problem) -> None:
    """Refuses damage in what `read` returned: weights that are too large; see `_mx.require_products`. Every code is a
    number.

    Raises:
        CheckpointError: there is some; the message names layer, parameter, expert, place and value.
    """
    _mx.require_products(tensors, problem, E2M1_MAX, dequantize)


def quantize(values: Tensor, rule: ScaleRule = "ceil") -> tuple[Tensor, Tensor]:
    """Quantizes to MXFP4 in one vectorized pass; e2m1 rounds to nearest even and saturates at 6.

    Args:
        values: `[..., K]`, floating point, K a multiple of 32.
        rule: how a block's scale follows from its largest magnitude; see `e8m0_from_amax`.

    Returns:
        uint8 codes `[..., K/2]`, low nibble first, and uint8 scales `[..., K/32]`.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    scaled, scales = _mx.scale_blocks(values, rule, E2M1_MAX)
    codes = encode_e2m1(scaled).masked_fill_((scales == E8M0_NAN).unsqueeze(-1), 0)
    low, high = codes.view(*values.shape[:-1], values.shape[-1] // 2, 2).unbind(-1)
    return low | (high << 4), scales


def quantize_into(values: Tensor, codes: Tensor, scales: Tensor, rule: ScaleRule = "ceil") -> None:
    """`quantize` for a whole layer, into existing tensors, with temporaries of at most `PASS_BYTES`; see
    `_mx.quantize_in_passes`."""
    part = functools.partial(quantize, rule=rule)
    _mx.quantize_in_passes(part, values, codes, scales, _BYTES_PER_VALUE, PASS_BYTES)


def encode_e2m1(values: Tensor) -> Tensor:
    """The nearest e2m1 code of each value, ties to the even code, saturating at 6: uint8 `[...]`, one code a byte."""
    values = values.to(torch.float32)
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for lower, boundary in enumerate(_BOUNDARIES):
        # A tie belongs to the upper neighbor where the lower code is odd.
        codes += magnitude >= boundary if lower % 2 else magnitude > boundary
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantizes MXFP4.

    Exact in float64 for every pair of code and scale, and in float32 and bfloat16 wherever the product is
    representable. A product beyond the dtype's range is an infinity (scale 2**127 with magnitudes of 2 and more).

    Args:
        codes: uint8 `[..., K/2]`, low nibble first.
        scales: uint8 `[..., K/32]`.
        dtype: of the result.

    Returns:
        `[..., K]`.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    _mx.require_blocks(2 * codes.shape[-1])
    work = torch.float64 if dtype == torch.float64 else torch.float32
    factors = e8m0_to_float(scales).to(work).unsqueeze(-1)
    # One lookup per byte gives both of its values.
    pairs = _e2m1_pairs(codes.device).to(work).index_select(0, codes.flatten().to(torch.int32))
    values = pairs.view(*codes.shape[:-1], scales.shape[-1], MX_BLOCK)
    return values.mul_(factors).flatten(-2).to(dtype)


def _e2m1_pairs(device: torch.device) -> Tensor:
    """The two values of every byte: float32 `[256, 2]`. Computed on the device: CUDA graphs cannot capture a copy from
    the host."""
    byte = torch.arange(256, device=device)
    code = torch.stack((byte & 15, byte >> 4), dim=-1)
    exponent, half = (code >> 1) & 3, (code & 1) * 0.5
    # 2**(exponent - 1) as half of an integer; exponent 0 is subnormal.
    magnitude = torch.where(exponent == 0, half, (1 + half) * (1 << exponent) * 0.5).to(torch.float32)
    return torch.where(code >= 8, -magnitude, magnitude)


def dequantize_expert(expert: Mapping[str, Tensor], which: Literal["w13", "w2"]) -> Tensor:
    """One weight matrix of one expert, float32 `[N, K]`, from the canonical tensors of that expert."""
    return dequantize(expert[which], expert[f"{which}_scale"])


dequantize_part = functools.partial(_mx.dequantize_part, dequantize)


def fake_quantize(values: Tensor) -> Tensor:
    """Activations quantized to MXFP4 by the ceil rule and dequantized, as dynamic W4A4 layers use them: float32
    `[..., K]`."""
    return dequantize(*quantize(values))
