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

from ..core.problem import MX_BLOCK, Problem
from ..errors import CheckpointError
from . import _mx
from ._mx import CANONICAL_NAMES, DUMMY_FILL, E8M0_BIAS, E8M0_NAN, ScaleRule, e8m0_to_float

__all__ = [
    "CANONICAL_NAMES",
    "DUMMY_FILL",
    "E4M3_MAX",
    "E8M0_BIAS",
    "E8M0_NAN",
    "PASS_BYTES",
    "UNLOADED",
    "ScaleRule",
    "canonical_expert",
    "dequantize",
    "dequantize_expert",
    "e8m0_from_amax",
    "e8m0_to_float",
    "fake_quantize",
    "parameter_names",
    "quantize",
    "quantize_into",
    "read",
    "shapes",
]

E4M3_MAX = 448.0

PASS_BYTES = 48 << 20
"""Largest memory for the temporaries of one pass of `quantize_into`, unless one row of all experts needs more."""
_BYTES_PER_VALUE = 5 * 4
"""Bytes that `quantize` allocates per value: five float32 tensors of its input's size are alive at once."""

_E4M3_NAN = 0x7F
UNLOADED = {"w13": _E4M3_NAN, "w2": _E4M3_NAN, "w13_scale": E8M0_NAN, "w2_scale": E8M0_NAN}
"""Bytes that no checkpoint holds: they mark what was not loaded yet, by canonical name."""


def parameter_names(problem: Problem) -> dict[str, str]:
    """Parameter name by canonical name, for the parameters that the layer is read from."""
    return {canonical: name for name, canonical in CANONICAL_NAMES.items() if canonical in shapes(problem)}


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the canonical tensors of the layer on this rank, by canonical name."""
    return _mx.canonical_shapes(problem, codes_per_byte=1)


def read(parameters: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """A layer's loaded parameters as canonical tensors, checked and not copied: ModelOpt's layout is the canonical one.

    Args:
        parameters: by the names in `CANONICAL_NAMES`; others are ignored.
        problem: the layer, whose shapes the tensors must have.

    Raises:
        CheckpointError: a tensor is missing or has the wrong dtype or shape, an expert's matrix was never loaded, a
            scale is NaN (255), a bias is NaN or infinite, or the rows of the first GEMM alternate gate and up, which no
            known MXFP8 checkpoint does.
    """
    if problem.activation.interleaved:
        rule = "the rows of w13_weight alternate gate and up; MXFP8 is read as gate rows, then up rows"
        raise CheckpointError(rule, where=problem.layer)
    return _mx.read(
        parameters, parameter_names(problem), shapes(problem), torch.float8_e4m3fn, UNLOADED, problem
    )  # fmt: skip


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Canonical tensors of one expert from those that `read` returned: the same tensors."""
    return dict(expert)


def e8m0_from_amax(amax: Tensor, rule: ScaleRule = "ceil") -> Tensor:
    """The e8m0 code of each block from its largest magnitude: uint8 of the same shape.

    ``ceil``: ceil(log2(amax / 448)), vLLM's own; nothing saturates. ``floor``: floor(log2(amax)) - 8; values above 448
    times the scale saturate. ``llm-compressor``: floor, after rounding amax up to the next power of two where its
    significand is at least 1.75. (For float16 inputs the compressed-tensors package gives scale 1 to blocks whose scale
    float16 cannot hold, zeros included.) Zeros get 0 (2**-127), NaN and infinities 255.
    """
    return _mx.e8m0_from_amax(amax, rule, E4M3_MAX)


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
    blocks = _blocks(values.to(torch.float32))
    scales = e8m0_from_amax(blocks.abs().amax(-1), rule)
    # ldexp instead of a division: 1 / 2**127 is subnormal, and some devices flush it to zero.
    scaled = torch.ldexp(blocks, (E8M0_BIAS - scales.to(torch.int32)).unsqueeze(-1))
    scaled = torch.where((scales == E8M0_NAN).unsqueeze(-1), torch.full_like(scaled, torch.nan), scaled)
    codes = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.view(values.shape), scales


def quantize_into(values: Tensor, codes: Tensor, scales: Tensor, rule: ScaleRule = "ceil") -> None:
    """`quantize` for a whole layer, into existing tensors, with temporaries of at most `PASS_BYTES`.

    Args:
        values: `[E, N, K]`, floating point, K a multiple of 32.
        codes: float8_e4m3fn `[E, N, K]`, overwritten; any stride between experts.
        scales: uint8 `[E, N, K/32]`, overwritten; any stride between experts.
        rule: see `e8m0_from_amax`.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    _mx.quantize_in_passes(
        functools.partial(quantize, rule=rule), values, codes, scales, _BYTES_PER_VALUE, PASS_BYTES
    )  # fmt: skip


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
    _blocks(values).mul_(factors)
    return values.to(dtype)


def dequantize_expert(expert: Mapping[str, Tensor], which: Literal["w13", "w2"]) -> Tensor:
    """One weight matrix of one expert, float32 `[N, K]`, from the canonical tensors of that expert."""
    return dequantize(expert[which], expert[f"{which}_scale"])


def fake_quantize(values: Tensor) -> Tensor:
    """Activations quantized to MXFP8 by the ceil rule and dequantized, as dynamic W8A8 layers use them: float32
    `[..., K]`."""
    return dequantize(*quantize(values))


def _blocks(values: Tensor) -> Tensor:
    """`[..., K]` as `[..., K/32, 32]`, a view."""
    _mx.require_blocks(values.shape[-1])
    return values.view(*values.shape[:-1], values.shape[-1] // MX_BLOCK, MX_BLOCK)
