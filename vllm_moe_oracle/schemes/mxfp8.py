"""MXFP8: e4m3 codes with one e8m0 scale per 32 input features.

Source of the formats: OCP Microscaling Formats (MX) specification v1.0, sections 5.2 (MXFP8), 5.4 (E8M0) and 6.3
(conversion), and OCP 8-bit Floating Point specification v1.0 (e4m3: bias 7, largest 448, no infinities).

Canonical tensors of a layer: ``w13`` `[E, R, H]` and ``w2`` `[E, H, I]` in float8_e4m3fn, ``w13_scale``
`[E, R, H/32]` and ``w2_scale`` `[E, H, I/32]` in uint8, optional ``w13_bias`` `[E, R]` and ``w2_bias`` `[E, H]`. R is
2 I (gate rows, then up rows) or I when the experts are not gated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..oracle.problem import MX_BLOCK, Problem
from ._mx_parameters import E8M0_NAN, checked, refuse_no_numbers, refuse_unloaded

ScaleRule = Literal["ceil", "floor", "llm-compressor"]

E4M3_MAX = 448.0
E8M0_BIAS = 127
E8M0_MAX = 254
"""Largest scale code that is a number: 2**127."""

PASS_BYTES = 48 << 20
"""Most memory that one pass of `quantise_into` takes beside its arguments, unless one row of all experts takes more."""
_TEMPORARIES = 5
"""Float32 tensors of the size of its input that `quantise` has at one time."""

# Names of the parameters that vLLM's loaders fill, and their canonical names.
PARAMETERS = {
    "w13_weight": "w13",
    "w2_weight": "w2",
    "w13_weight_scale": "w13_scale",
    "w2_weight_scale": "w2_scale",
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}


def parameters_of(problem: Problem) -> dict[str, str]:
    """Parameter name by canonical name, of the parameters that the layer is read from."""
    return {canonical: name for name, canonical in PARAMETERS.items() if canonical in shapes(problem)}


def canonical_expert(expert: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Canonical tensors of one expert from those that `read` found; here they are the same."""
    return dict(expert)


_E4M3_NAN = 0x7F
UNLOADED = {"w13": _E4M3_NAN, "w2": _E4M3_NAN, "w13_scale": E8M0_NAN, "w2_scale": E8M0_NAN}
"""Bytes that no checkpoint holds, for what was not loaded yet."""
MADE_UP = {"w13_scale": E8M0_BIAS - 7, "w2_scale": E8M0_BIAS - 7}
"""Bytes for a model without a checkpoint, whose other weights vLLM makes up."""


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the canonical tensors of the layer on this rank, by canonical name."""
    experts, hidden, inner, rows = (
        problem.local_experts, problem.hidden_size, problem.intermediate_size, problem.w13_rows
    )  # fmt: skip
    found: dict[str, tuple[int, ...]] = {
        "w13": (experts, rows, hidden),
        "w2": (experts, hidden, inner),
        "w13_scale": (experts, rows, hidden // MX_BLOCK),
        "w2_scale": (experts, hidden, inner // MX_BLOCK),
    }
    if problem.has_bias:
        found |= {"w13_bias": (experts, rows), "w2_bias": (experts, hidden)}
    return found


def read(parameters: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """A layer's loaded parameters as canonical tensors. ModelOpt's layout is the canonical one: nothing is copied.

    Args:
        parameters: by the names in `PARAMETERS`; others are not looked at.
        problem: the layer, whose shapes the tensors must have.

    Raises:
        CheckpointError: a tensor is missing, has the wrong dtype or shape, an expert's matrix was never loaded, a scale
            is the NaN code 255, a bias is NaN or infinite, or the rows of the first product alternate gate and up,
            which no MXFP8 checkpoint is known to do.
    """
    if problem.activation.interleaved:
        rule = "the rows of w13_weight alternate gate and up; MXFP8 is read as gate rows, then up rows"
        raise CheckpointError(rule, where=problem.layer)
    names = {canonical: name for name, canonical in PARAMETERS.items()}
    found = checked(parameters, names, shapes(problem), torch.float8_e4m3fn, problem)
    refuse_unloaded(found, names, UNLOADED, problem)
    refuse_no_numbers(found, names, problem)
    return found


def scale_exponents(amax: Tensor, rule: ScaleRule = "ceil", largest: float = E4M3_MAX) -> Tensor:
    """The e8m0 code of each block from its largest magnitude.

    ``ceil``: ceil(log2(amax / 448)), vLLM's own: nothing saturates. ``floor``: floor(log2(amax)) - 8, the
    specification's section 6.3: values above 448 times the scale saturate. ``llm-compressor``: as floor, after amax was
    rounded up to the next power of two where its significand is at least 1.75, as the compressed-tensors package does.
    (In float16 that package gives blocks whose scale float16 cannot hold, those of zeros included, the scale 1.)
    All are exact: no logarithm is taken.

    Args:
        amax: any shape, floating point, not negative.
        rule: which rule.
        largest: largest element of the format: 448 of e4m3 above, and likewise for another.

    Returns:
        uint8 of the same shape; a block of zeros gets 0 (2**-127), one with NaN or an infinity gets 255.
    """
    amax = amax.to(torch.float32)
    # amax = mantissa * 2**exponent with mantissa in [0.5, 1); 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(amax)
    most, binade = math.frexp(largest)
    code = exponent.to(torch.int32) - binade + E8M0_BIAS
    if rule == "ceil":
        code = code + (mantissa > most)
    elif rule == "llm-compressor":
        code = code + (mantissa >= 0.875)
    elif rule != "floor":
        raise ValueError(f"unknown scale rule {rule!r}; valid are ceil, floor, llm-compressor")
    code = code.clamp(0, E8M0_MAX)
    code = torch.where(amax == 0, torch.zeros_like(code), code)
    return torch.where(torch.isfinite(amax), code, torch.full_like(code, E8M0_NAN)).to(torch.uint8)


def scale_values(codes: Tensor) -> Tensor:
    """The float32 values 2**(code - 127) of e8m0 codes, exact for every code: 0 is a subnormal, 255 is NaN.

    The bits are placed rather than computed: exponentials of subnormal results are not exact on every device.
    """
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(codes == E8M0_NAN, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def quantise(values: Tensor, rule: ScaleRule = "ceil") -> tuple[Tensor, Tensor]:
    """Real values to MXFP8, in one vectorised pass; e4m3 rounds to nearest even and saturates at 448.

    Args:
        values: `[..., K]`, floating point, K a multiple of 32.
        rule: how a block's scale follows from its largest magnitude; see `scale_exponents`.

    Returns:
        float8_e4m3fn codes `[..., K]` and uint8 scales `[..., K/32]`.

    Raises:
        ValueError: K is no multiple of 32.
    """
    blocks = _blocks(values.to(torch.float32))
    codes = scale_exponents(blocks.abs().amax(-1), rule)
    # ldexp rather than a division: 1 / 2**127 is subnormal, and some devices flush it to zero.
    scaled = torch.ldexp(blocks, (E8M0_BIAS - codes.to(torch.int32)).unsqueeze(-1))
    scaled = torch.where((codes == E8M0_NAN).unsqueeze(-1), torch.full_like(scaled, torch.nan), scaled)
    elements = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return elements.view(values.shape), codes


def quantise_into(values: Tensor, codes: Tensor, scales: Tensor, rule: ScaleRule = "ceil") -> None:
    """As `quantise`, for a whole layer and into tensors that are there, in bounded memory.

    Every pass takes the same rows of all experts at once, as many as keep a pass's temporaries below `PASS_BYTES`.

    Args:
        values: `[E, N, K]`, floating point, K a multiple of 32.
        codes: float8_e4m3fn `[E, N, K]`, overwritten; experts may lie any distance apart.
        scales: uint8 `[E, N, K/32]`, overwritten; likewise.
        rule: see `scale_exponents`.

    Raises:
        ValueError: K is no multiple of 32.
    """
    experts, rows, columns = values.shape
    step = max(1, PASS_BYTES // (_TEMPORARIES * 4 * max(1, experts * columns)))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        elements, exponents = quantise(values[:, part].contiguous(), rule)
        codes[:, part] = elements
        scales[:, part] = exponents


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP8 to real values.

    Exact in float64 for every pair of codes, and in float32 and bfloat16 wherever the product is representable; beyond
    their largest number it is an infinity (scale 2**127 with codes of 2 and more).

    Args:
        codes: float8_e4m3fn `[..., K]`.
        scales: uint8 `[..., K/32]`.
        dtype: of the result.

    Returns:
        `[..., K]`. Allocates the result and float32 scales, nothing else as large as the result for float32.
    """
    work = torch.float64 if dtype == torch.float64 else torch.float32
    # Scales first: their temporaries are gone before the large tensor is there.
    factors = scale_values(scales).to(work).unsqueeze(-1)
    values = codes.to(work)
    _blocks(values).mul_(factors)
    return values.to(dtype)


def dequantise_expert(expert: Mapping[str, Tensor], which: Literal["w13", "w2"]) -> Tensor:
    """One weight matrix of one expert, float32 `[N, K]`, from the canonical tensors of that expert."""
    return dequantise(expert[which], expert[f"{which}_scale"])


def round_trip(values: Tensor) -> Tensor:
    """Activations quantised to MXFP8 by the ceil rule and back, as dynamic W8A8 layers see them; float32 `[..., K]`."""
    return dequantise(*quantise(values))


def _blocks(values: Tensor) -> Tensor:
    if values.shape[-1] % MX_BLOCK:
        rest = values.shape[-1] % MX_BLOCK
        raise ValueError(f"{values.shape[-1]} values are no multiple of the MX block {MX_BLOCK} (remainder {rest})")
    return values.view(*values.shape[:-1], values.shape[-1] // MX_BLOCK, MX_BLOCK)
