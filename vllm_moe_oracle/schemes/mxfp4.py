"""MXFP4: e2m1 codes, two in a byte, with one e8m0 scale per 32 input features.

Source of the formats: OCP Microscaling Formats (MX) specification v1.0, sections 5.3.3 (e2m1: bias 1, largest 6, no
infinities, no NaN), 5.4 (E8M0) and 6.3 (conversion). Of the layouts: gpt-oss's own code (``gpt_oss/torch/model.py`` and
``weights.py``: rows of the first product alternate gate and up; the low nibble is the first of a pair), and the
compressed-tensors package (``pack_fp4_to_uint8``: likewise the low nibble, rows of gate and up apart).

Canonical tensors of a layer: ``w13`` `[E, R, H/2]` and ``w2`` `[E, H, I/2]` in uint8, low nibble first, ``w13_scale``
`[E, R, H/32]` and ``w2_scale`` `[E, H, I/32]` in uint8, optional ``w13_bias`` `[E, R]` and ``w2_bias`` `[E, H]`. R is
2 I (gate rows, then up rows) or I when the experts are not gated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..oracle.problem import MX_BLOCK, Problem
from ._mx_parameters import E8M0_NAN, checked, refuse_no_numbers, refuse_unloaded
from .mxfp8 import E8M0_BIAS, ScaleRule, scale_values
from .mxfp8 import scale_exponents as mx_scale_exponents

E2M1_MAX = 6.0

PASS_BYTES = 64 << 20
"""Most memory for the temporaries of one pass of `quantise_into`."""
_TEMPORARIES = 8
"""Tensors of float32, or of as many bytes in smaller ones, that a pass holds at once."""

# Halfway between neighbouring magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even one of two codes.
_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

# Names of the parameters that vLLM's loaders fill, and their canonical names.
PARAMETERS = {
    "w13_weight": "w13",
    "w2_weight": "w2",
    "w13_weight_scale": "w13_scale",
    "w2_weight_scale": "w2_scale",
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}
_PACKED = {"w13_weight": "w13_weight_packed", "w2_weight": "w2_weight_packed"}

_MINUS_ZEROS = 0x88
UNLOADED = {"w13": _MINUS_ZEROS, "w2": _MINUS_ZEROS, "w13_scale": E8M0_NAN, "w2_scale": E8M0_NAN}
"""Bytes that no checkpoint holds, for what was not loaded yet. Every byte of weights is a pair of numbers; but a matrix
of nothing but minus zeros is none."""
MADE_UP = {"w13_scale": E8M0_BIAS - 7, "w2_scale": E8M0_BIAS - 7}
"""Bytes for a model without a checkpoint, whose other weights vLLM makes up."""


def parameters_of(problem: Problem) -> dict[str, str]:
    """Parameter name by canonical name, of the parameters that the layer is read from."""
    renamed = _PACKED if problem.scheme.packing in ("compressed-tensors", "auto-round") else {}
    kept = shapes(problem)
    return {own: renamed.get(name, name) for name, own in PARAMETERS.items() if own in kept}


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the canonical tensors of the layer on this rank, by canonical name; the checkpoint's have the same."""
    experts, hidden, inner, rows = (
        problem.local_experts, problem.hidden_size, problem.intermediate_size, problem.w13_rows
    )  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        "w13": (experts, rows, hidden // 2),
        "w2": (experts, hidden, inner // 2),
        "w13_scale": (experts, rows, hidden // MX_BLOCK),
        "w2_scale": (experts, hidden, inner // MX_BLOCK),
    }
    if problem.has_bias:
        found |= {"w13_bias": (experts, rows), "w2_bias": (experts, hidden)}
    return found


def read(parameters: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """A layer's loaded parameters by canonical name, checked and not copied; `canonical_expert` puts rows into order.

    Args:
        parameters: by the names in `parameters_of`; others are not looked at.
        problem: the layer, whose shapes the tensors must have.

    Raises:
        CheckpointError: a tensor is missing, has the wrong dtype or shape, an expert's matrix was never loaded, a
            scale is the NaN code 255, or a bias is NaN or infinite.
    """
    names = parameters_of(problem)
    found = checked(parameters, names, shapes(problem), torch.uint8, problem)
    refuse_unloaded(found, names, UNLOADED, problem)
    refuse_no_numbers(found, names, problem)
    return found


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Canonical tensors of one expert from those that `read` found.

    Args:
        expert: tensors by canonical name, without the leading expert dimension; meta tensors too. Not modified.
        problem: the layer, which says whether rows of the first product alternate gate and up.

    Returns:
        Tensors of the same shapes and dtypes; those whose rows are in order already are the very ones that came in.
    """
    if not problem.activation.interleaved:
        return dict(expert)
    return {name: _halves(tensor) if name.startswith("w13") else tensor for name, tensor in expert.items()}


def _halves(rows: Tensor) -> Tensor:
    """Rows g0, u0, g1, u1, ... as g0, g1, ..., u0, u1, ...; `[R, ...]`, a copy."""
    return torch.cat((rows[0::2], rows[1::2]))


def quantise(values: Tensor, rule: ScaleRule = "ceil") -> tuple[Tensor, Tensor]:
    """Real values to MXFP4, in one vectorised pass; e2m1 rounds to nearest even and saturates at 6.

    Args:
        values: `[..., K]`, floating point, K a multiple of 32.
        rule: how a block's scale follows from its largest magnitude; see `scale_exponents`.

    Returns:
        uint8 codes `[..., K/2]`, low nibble first, and uint8 scales `[..., K/32]`.

    Raises:
        ValueError: K is no multiple of 32.
    """
    columns = values.shape[-1]
    _require_blocks(columns)
    leading = values.shape[:-1]
    blocks = values.to(torch.float32).reshape(*leading, columns // MX_BLOCK, MX_BLOCK)
    scales = scale_exponents(blocks.abs().amax(-1), rule)
    # ldexp rather than a division: 1 / 2**127 is subnormal, and some devices flush it to zero.
    scaled = torch.ldexp(blocks, (E8M0_BIAS - scales.to(torch.int32)).unsqueeze(-1))
    codes = encode(scaled).masked_fill_((scales == E8M0_NAN).unsqueeze(-1), 0)
    low, high = codes.view(*leading, columns // 2, 2).unbind(-1)
    return low | (high << 4), scales


def quantise_into(values: Tensor, codes: Tensor, scales: Tensor, rule: ScaleRule = "ceil") -> None:
    """As `quantise`, for a whole layer and into tensors that are there, in bounded memory.

    Every pass takes the same rows of all experts at once, as many as keep a pass's temporaries below `PASS_BYTES`.

    Args:
        values: `[E, N, K]`, floating point, K a multiple of 32.
        codes: uint8 `[E, N, K/2]`, overwritten; experts may lie any distance apart.
        scales: uint8 `[E, N, K/32]`, overwritten; likewise.
        rule: see `scale_exponents`.

    Raises:
        ValueError: K is no multiple of 32.
    """
    experts, rows, columns = values.shape
    step = max(1, PASS_BYTES // (_TEMPORARIES * 4 * max(1, experts * columns)))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes[:, part], scales[:, part] = quantise(values[:, part].contiguous(), rule)


def scale_exponents(amax: Tensor, rule: ScaleRule = "ceil") -> Tensor:
    """The e8m0 code of each block from its largest magnitude: uint8 of the same shape.

    ``ceil``: ceil(log2(amax / 6)): nothing saturates. ``floor``: floor(log2(amax)) - 2, the specification's section
    6.3: values above 6 times the scale saturate. ``llm-compressor``: as floor, after amax was rounded up to the next
    power of two where its significand is at least 1.75, as the compressed-tensors package does. A block of zeros gets 0
    (2**-127), one with NaN or an infinity gets 255.
    """
    return mx_scale_exponents(amax, rule, E2M1_MAX)


def encode(values: Tensor) -> Tensor:
    """The nearest e2m1 code of each value, ties to the even code, saturating at 6: uint8 `[...]`, one code a byte."""
    values = values.to(torch.float32)
    magnitude = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for lower, boundary in enumerate(_BOUNDARIES):
        # A tie belongs to the upper neighbour where the lower code is odd.
        codes += magnitude >= boundary if lower % 2 else magnitude > boundary
    return codes | (torch.signbit(values).to(torch.uint8) << 3)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 to real values.

    Exact in float64 for every pair of codes, and in float32 and bfloat16 wherever the product is representable; beyond
    their largest number it is an infinity (scale 2**127 with magnitudes of 2 and more).

    Args:
        codes: uint8 `[..., K/2]`, low nibble first.
        scales: uint8 `[..., K/32]`.
        dtype: of the result.

    Returns:
        `[..., K]`.

    Raises:
        ValueError: K is no multiple of 32.
    """
    _require_blocks(2 * codes.shape[-1])
    work = torch.float64 if dtype == torch.float64 else torch.float32
    factors = scale_values(scales).to(work).unsqueeze(-1)
    # A byte selects both of its values at once.
    pairs = _pairs(codes.device).to(work).index_select(0, codes.flatten().to(torch.int32))
    values = pairs.view(*codes.shape[:-1], scales.shape[-1], MX_BLOCK)
    return values.mul_(factors).flatten(-2).to(dtype)


def _pairs(device: torch.device) -> Tensor:
    """The two values of every byte: float32 `[256, 2]`. Computed there: a copy from the host cannot be captured."""
    byte = torch.arange(256, device=device)
    code = torch.stack((byte & 15, byte >> 4), dim=-1)
    exponent, half = (code >> 1) & 3, (code & 1) * 0.5
    # 2**(exponent - 1) as half of an integer; exponent 0 is subnormal.
    magnitude = torch.where(exponent == 0, half, (1 + half) * (1 << exponent) * 0.5).to(torch.float32)
    return torch.where(code >= 8, -magnitude, magnitude)


def dequantise_expert(expert: Mapping[str, Tensor], which: Literal["w13", "w2"]) -> Tensor:
    """One weight matrix of one expert, float32 `[N, K]`, from the canonical tensors of that expert."""
    return dequantise(expert[which], expert[f"{which}_scale"])


def round_trip(values: Tensor) -> Tensor:
    """Activations quantised to MXFP4 by the ceil rule and back, as dynamic W4A4 layers see them; float32 `[..., K]`."""
    return dequantise(*quantise(values))


def _require_blocks(columns: int) -> None:
    if columns % MX_BLOCK:
        rule = f"{columns} values are no multiple of the MX block {MX_BLOCK} (remainder {columns % MX_BLOCK})"
        raise ValueError(rule)
