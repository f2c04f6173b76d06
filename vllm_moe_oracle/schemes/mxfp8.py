"""MXFP8: e4m3 codes with one e8m0 scale per 32 input features.

Source of the formats: OCP Microscaling Formats (MX) specification v1.0, sections 5.2 (MXFP8), 5.4 (E8M0) and 6.3
(conversion), and OCP 8-bit Floating Point specification v1.0 (e4m3: bias 7, largest 448, no infinities).

Canonical tensors of a layer: ``w13`` `[E, R, H]` and ``w2`` `[E, H, I]` in float8_e4m3fn, ``w13_scale``
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
from ..errors import CheckpointError
from . import _mx
from ._checks import WasLoaded
from ._mx import CANONICAL_NAMES as CANONICAL_NAMES
from ._mx import DUMMY_FILL as DUMMY_FILL
from ._mx import ScaleRule as ScaleRule
from ._mx import e8m0_to_float
from ._mx import parameter_names as parameter_names
from ._mx import shapes as shapes

E4M3_MAX = 448.0

PASS_BYTES = 48 << 20
"""Largest memory for the temporaries of one pass of `quantize_into`, unless one row of all experts needs more."""
_BYTES_PER_VALUE = 5 * 4
"""Bytes that `quantize` allocates per value: five float32 tensors of its input's size are alive at once."""

UNLOADED = _mx.UNLOADED["mxfp8"]

e8m0_from_amax = functools.partial(_mx.e8m0_from_amax, largest=E4M3_MAX)
"""The e8m0 code of each block from its largest magnitude; ``ceil`` is vLLM's own, ``floor`` floor(log2(amax)) - 8."""


def read(parameters: Mapping[str, Tensor], problem: Problem, was_loaded: WasLoaded | None = None) -> dict[str, Tensor]:
    """A layer's loaded parameters as canonical tensors: ModelOpt's layout is the canonical one.

    Raises:
        CheckpointError: as for MXFP4, or the rows of the first GEMM alternate gate and up, which no known MXFP8
            checkpoint does.
    """
    if problem.activation.interleaved:
        rule = "the rows of w13_weight alternate gate and up; MXFP8 is read as gate rows, then up rows"
        raise CheckpointError(rule, where=problem.layer)
    return _mx.read(parameters, problem, was_loaded)


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Canonical tensors of one expert from those that `read` returned: the same tensors."""
    return dict(expert)


def check_values(tensors: Mapping[str, Tensor], problem: Problem) -> None:
    """Refuses damage in what `read` returned: NaN codes, and weights that are too large; see `_mx.require_products`.

    Raises:
        CheckpointError: there is some; the message names layer, parameter, expert, place and value.
    """
    _mx.require_codes(tensors, problem)
    _mx.require_products(tensors, problem, E4M3_MAX, dequantize)


def quantize(values: Tensor, rule: ScaleRule = "ceil") -> tuple[Tensor, Tensor]:
    """Quantizes to MXFP8 in one vectorized pass; e4m3 rounds to nearest even and saturates at 448.

    Args:
        values: `[..., K]`, floating point, K a multiple of 32.
        rule: how a block's scale follows from its largest magnitude; see `e8m0_from_amax`.

    Returns:
        float8_e4m3fn codes `[..., K]` and uint8 scales `[..., K/32]`.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    scaled, scales = _mx.scale_blocks(values, rule, E4M3_MAX)
    scaled = torch.where((scales == E8M0_NAN).unsqueeze(-1), torch.full_like(scaled, torch.nan), scaled)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(values.shape), scales


def quantize_into(values: Tensor, codes: Tensor, scales: Tensor, rule: ScaleRule = "ceil") -> None:
    """`quantize` for a whole layer, into existing tensors, with temporaries of at most `PASS_BYTES`; see
    `_mx.quantize_in_passes`."""
    part = functools.partial(quantize, rule=rule)
    _mx.quantize_in_passes(part, values, codes, scales, _BYTES_PER_VALUE, PASS_BYTES)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantizes MXFP8.

    Exact in float64 for every pair of code and scale, and in float32 and bfloat16 wherever the product is
    representable. A product beyond the dtype's range is an infinity (scale 2**127 with codes of 2 and more).

    Args:
        codes: float8_e4m3fn `[..., K]`.
        scales: uint8 `[..., K/32]`.
        dtype: of the result.

    Returns:
        `[..., K]`. For float32, the only allocations are the result and the float32 scales.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    # Scales first: their temporaries are freed before the large tensor is allocated.
    factors = e8m0_to_float(scales).to(work).unsqueeze(-1)
    values = codes.to(work)
    _mx.require_blocks(values.shape[-1])
    values.view(*factors.shape[:-1], MX_BLOCK).mul_(factors)
    return values.to(dtype)


def dequantize_expert(expert: Mapping[str, Tensor], which: Literal["w13", "w2"]) -> Tensor:
    """One weight matrix of one expert, float32 `[N, K]`, from the canonical tensors of that expert."""
    return dequantize(expert[which], expert[f"{which}_scale"])


dequantize_part = functools.partial(_mx.dequantize_part, dequantize)


def fake_quantize(values: Tensor) -> Tensor:
    """Activations quantized to MXFP8 by the ceil rule and dequantized, as dynamic W8A8 layers use them: float32
    `[..., K]`."""
    return dequantize(*quantize(values))
