"""What the microscaling formats MXFP8 and MXFP4 share: e8m0 scales, parameter names, and the checks of loaded weights.

Source: OCP Microscaling Formats (MX) specification v1.0, sections 5.4 (E8M0) and 6.3 (conversion).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from ..core.problem import E8M0_BIAS, E8M0_MAX, E8M0_NAN, MX_BLOCK, Problem
from ..errors import CheckpointError
from ._checks import (
    FLOAT_DTYPES,
    WasLoaded,
    dtype_name,
    first_place,
    largest_weight,
    packed_bytes,
    require_biases_within,
    require_finite,
    require_loaded,
    require_weights_within,
)

ScaleRule = Literal["ceil", "floor", "llm-compressor"]

CANONICAL_NAMES = {
    "w13_weight": "w13",
    "w2_weight": "w2",
    "w13_weight_scale": "w13_scale",
    "w2_weight_scale": "w2_scale",
    "w13_bias": "w13_bias",
    "w2_bias": "w2_bias",
}
"""Canonical name by the name of the parameter that vLLM's loaders fill."""

_PACKED_NAMES = {"w13_weight": "w13_weight_packed", "w2_weight": "w2_weight_packed"}
"""Names of MXFP4 codes in compressed-tensors and AutoRound checkpoints."""

CODE_DTYPES = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.uint8}
"""Dtype of the weights by scheme; MXFP4 has two codes in a byte."""

_E4M3_NAN, _E2M1_NEGATIVE_ZEROS = 0x7F, 0x88

UNLOADED = {
    scheme: {"w13": code, "w2": code, "w13_scale": E8M0_NAN, "w2_scale": E8M0_NAN, "w13_bias": 0xFF, "w2_bias": 0xFF}
    for scheme, code in {"mxfp8": _E4M3_NAN, "mxfp4": _E2M1_NEGATIVE_ZEROS}.items()
}
"""Bytes that mark what was not loaded yet, by scheme and canonical name: NaN, and negative zeros where every byte is a
valid pair of codes."""

DUMMY_FILL = {"w13_scale": E8M0_BIAS - 7, "w2_scale": E8M0_BIAS - 7}
"""Scale bytes for vLLM's ``load_format="dummy"``, by canonical name: 2**-7."""


_ALL = slice(None)


# --- A layer's parameters ---------------------------------------------------------------------------------------------


def parameter_names(problem: Problem) -> dict[str, str]:
    """Parameter name by canonical name, for the parameters that the layer is read from."""
    packed = problem.scheme.name == "mxfp4" and problem.scheme.packing in ("compressed-tensors", "auto-round")
    renamed = _PACKED_NAMES if packed else {}
    present = shapes(problem)
    return {canonical: renamed.get(name, name) for name, canonical in CANONICAL_NAMES.items() if canonical in present}


def shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Shapes of the canonical tensors of the layer on this rank, by canonical name; the checkpoint's are the same."""
    experts, hidden, inner, rows = (
        problem.local_experts, problem.hidden_size, problem.intermediate_size, problem.w13_rows
    )  # fmt: skip
    bits = problem.scheme.bits
    found: dict[str, tuple[int, ...]] = {
        "w13": (experts, rows, hidden * bits // 8),
        "w2": (experts, hidden, inner * bits // 8),
        "w13_scale": (experts, rows, hidden // MX_BLOCK),
        "w2_scale": (experts, hidden, inner // MX_BLOCK),
    }
    if problem.has_bias:
        found |= {"w13_bias": (experts, rows), "w2_bias": (experts, hidden)}
    return found


def read(parameters: Mapping[str, Tensor], problem: Problem, was_loaded: WasLoaded | None = None) -> dict[str, Tensor]:
    """A layer's loaded parameters by canonical name, checked and not copied.

    Args:
        parameters: by the names in `parameter_names`; others are ignored.
        problem: the layer, whose shapes the tensors must have.
        was_loaded: see `_checks.require_loaded`.

    Returns:
        The parameters' own tensors; the scheme's `canonical_expert` orders their rows.

    Raises:
        CheckpointError: a tensor is missing or has the wrong dtype or shape, a part of one was never loaded, a scale is
            NaN (255), all codes of an expert's matrix are NaN, or a bias is NaN or infinite.
    """
    names = parameter_names(problem)
    tensors = _check_parameters(parameters, names, problem)
    brought = require_loaded(tensors, names, UNLOADED[problem.scheme.name], problem, was_loaded)
    _require_numbers(tensors, names, problem)
    if problem.scheme.name == "mxfp8" and brought & {"w13", "w2"}:
        require_codes(tensors, problem)
    return tensors


def _check_parameters(
    parameters: Mapping[str, Tensor], names: Mapping[str, str], problem: Problem
) -> dict[str, Tensor]:
    """The parameters by canonical name, after a check of presence, dtype and shape."""
    tensors = {}
    for canonical, shape in shapes(problem).items():
        name = names[canonical]
        tensor = parameters.get(name)
        if tensor is None:
            remedy = f"The layer's parameters are {', '.join(sorted(parameters))}"
            raise CheckpointError(f"{name} is missing", remedy, problem.layer)
        code_or_scale = torch.uint8 if "_scale" in canonical else CODE_DTYPES[problem.scheme.name]
        dtypes = FLOAT_DTYPES if canonical.endswith("_bias") else (code_or_scale,)
        if tensor.dtype not in dtypes:
            expected = " or ".join(dtype_name(dtype) for dtype in dtypes)
            rule = f"{name} is {tensor.dtype}, {problem.scheme.name.upper()} stores it as {expected}"
            raise CheckpointError(rule, where=problem.layer)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}", where=problem.layer)
        tensors[canonical] = tensor.data
    return tensors


def _require_numbers(tensors: Mapping[str, Tensor], names: Mapping[str, str], problem: Problem) -> None:
    """Refuses NaN scales, and NaN or infinite biases."""
    for canonical in ("w13_scale", "w2_scale"):
        scales = tensors[canonical]
        # The maximum first: counting allocates eight bytes per scale.
        bad = int((scales == E8M0_NAN).sum()) if int(scales.amax()) == E8M0_NAN else 0
        if bad:
            rule = f"{bad} of {scales.numel()} scales in {names[canonical]} are NaN (e8m0 code 255)"
            rule += f"; {first_place(scales == E8M0_NAN, scales)}"
            raise CheckpointError(rule, "The checkpoint is damaged", problem.layer)
    # The self-check replaces the checkpoint's biases by its own and would not find these.
    for canonical in ("w13_bias", "w2_bias"):
        if canonical in tensors:
            require_finite(tensors[canonical], "biases", names[canonical], problem)


def require_codes(tensors: Mapping[str, Tensor], problem: Problem) -> None:
    """Refuses NaN among e4m3 codes.

    Both NaN codes are the largest byte of a kind, so that two maxima find them, without temporaries: 0x7F as a signed
    byte, 0xFF as an unsigned one.

    Args:
        tensors: as `read` returns them.
        problem: the layer.

    Raises:
        CheckpointError: a code is NaN; the message names the first.
    """
    names = parameter_names(problem)
    for canonical in ("w13", "w2"):
        codes = tensors[canonical]
        largest = [codes.view(dtype).amax((1, 2)) == nan for dtype, nan in ((torch.int8, 127), (torch.uint8, 255))]
        damaged = (largest[0] | largest[1]).nonzero().flatten().tolist()
        if damaged:
            code = codes[damaged[0] : damaged[0] + 1].view(torch.uint8)
            bad = (code & 0x7F) == _E4M3_NAN
            counted = f" of {len(damaged)} of {len(codes)} local experts" if len(codes) > 1 else ""
            rule = f"codes in {names[canonical]}{counted} are NaN (e4m3 codes 127 and 255)"
            rule += f"; {first_place(bad, code, damaged[0])}"
            raise CheckpointError(rule, "The checkpoint is damaged", problem.layer)


def require_products(
    tensors: Mapping[str, Tensor], problem: Problem, largest: float, dequantize: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Refuses weights, codes times scales, and biases that are damage; see `_checks.largest_weight`.

    Only rows are dequantized whose largest scale would make the format's largest code too large.

    Args:
        tensors: as `read` returns them.
        problem: the layer.
        largest: largest element of the format.
        dequantize: float32 weights from codes `[n, ...]` and scales `[n, K/32]` of some rows.

    Raises:
        CheckpointError: a weight is too large; the message names the first.
    """
    code = E8M0_BIAS + math.floor(math.log2(largest_weight(problem.dtype) / largest))
    names = parameter_names(problem)
    for canonical in ("w13", "w2"):
        codes, scales = tensors[canonical], tensors[f"{canonical}_scale"]
        for expert in (scales.amax((1, 2)) > code).nonzero().flatten().tolist():

            def weights(rows: Tensor, codes: Tensor = codes[expert], scales: Tensor = scales[expert]) -> Tensor:
                # As bytes: torch cannot index every 8-bit dtype.
                return dequantize(codes.view(torch.uint8)[rows].view(codes.dtype), scales[rows])

            require_weights_within(
                scales[expert].amax(-1) > code, weights, names[canonical], expert, scales.shape[-1] * MX_BLOCK, problem
            )
    require_biases_within(tensors, names, problem)


def dequantize_part(
    dequantize: Callable[[Tensor, Tensor], Tensor],
    expert: Mapping[str, Tensor],
    which: Literal["w13", "w2"],
    problem: Problem,
    rows: slice = _ALL,
    features: slice = _ALL,
) -> Tensor:
    """Some rows, or some input features of one block, of one matrix of an expert, float32.

    Args:
        dequantize: the scheme's, of codes and scales.
        expert: canonical tensors of one expert.
        which: the matrix.
        problem: the layer; the MX formats need nothing of it.
        rows: the rows.
        features: the features, all of one block; of every block by default.
    """
    codes, scales = expert[which][rows], expert[f"{which}_scale"][rows]
    if features.start is not None:
        block, width = features.start // MX_BLOCK, codes.shape[1] // scales.shape[1]
        codes, scales = codes[:, block * width : (block + 1) * width], scales[:, block : block + 1]
        inside = slice(features.start - block * MX_BLOCK, features.stop - block * MX_BLOCK)
        return dequantize(codes.contiguous(), scales.contiguous())[:, inside].clone()
    return dequantize(codes, scales)


# --- Scales and blocks ------------------------------------------------------------------------------------------------


def e8m0_from_amax(amax: Tensor, rule: ScaleRule = "ceil", *, largest: float) -> Tensor:
    """The e8m0 code of each block from its largest magnitude, computed without logarithms, so exactly.

    ``ceil``: ceil(log2(amax / largest)); nothing saturates. ``floor``: floor(log2(amax)) less the largest exponent of
    the element format, the specification's section 6.3; values above `largest` times the scale saturate.
    ``llm-compressor``: as floor, after amax was rounded up to the next power of two where its significand is at least
    1.75, as the compressed-tensors package does. (For float16 inputs that package gives scale 1 to blocks whose scale
    float16 cannot hold, zeros included.)

    Args:
        amax: any shape, floating point, not negative.
        rule: the rounding rule.
        largest: largest element of the format: 448 for e4m3, 6 for e2m1.

    Returns:
        uint8 of the same shape. A block of zeros gets 0 (2**-127), a block with NaN or an infinity gets 255.

    Raises:
        ValueError: the rule is unknown.
    """
    amax = amax.to(torch.float32)
    # amax = mantissa * 2**exponent with mantissa in [0.5, 1); 448 = 0.875 * 2**9.
    mantissa, exponent = torch.frexp(amax)
    largest_mantissa, largest_exponent = math.frexp(largest)
    code = exponent.to(torch.int32) - largest_exponent + E8M0_BIAS
    if rule == "ceil":
        code = code + (mantissa > largest_mantissa)
    elif rule == "llm-compressor":
        code = code + (mantissa >= 0.875)
    elif rule != "floor":
        raise ValueError(f"unknown scale rule {rule!r}; valid are ceil, floor, llm-compressor")
    code = code.clamp(0, E8M0_MAX)
    code = torch.where(amax == 0, torch.zeros_like(code), code)
    return torch.where(torch.isfinite(amax), code, torch.full_like(code, E8M0_NAN)).to(torch.uint8)


def e8m0_to_float(codes: Tensor) -> Tensor:
    """The float32 values 2**(code - 127) of e8m0 codes, exact for every code: 0 is subnormal, 255 is NaN.

    The bits are assembled: `exp2` and `ldexp` flush or round subnormal results on some devices.
    """
    bits = codes.to(torch.int32) << 23
    bits.masked_fill_(codes == 0, 0x00400000).masked_fill_(codes == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)


FLOAT_SCALE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes in which files of the packing ``mxfp4`` may store scales as numbers, beside e8m0 codes."""


def takes_float_scales(problem: Problem) -> bool:
    """Whether vLLM takes scales of the layer's experts as numbers, too: those of ``quant_method: mxfp4`` and of
    DeepSeek-V4, which have one method."""
    return problem.scheme.name == "mxfp4" and problem.scheme.packing == "mxfp4"


def as_parameter(tensor: Tensor, is_scale: bool, problem: Problem, where: str) -> Tensor:
    """A file's tensor of codes or scales as vLLM's uint8 parameters hold it.

    Args:
        tensor: from a checkpoint; any shape.
        is_scale: it holds scales.
        problem: the layer.
        where: the place, for messages.

    Returns:
        uint8 of the same shape for e8m0 scales, for those that are stored as numbers where vLLM takes them so, and for
        pairs of e2m1 codes; any other tensor as it is.

    Raises:
        CheckpointError: as by `e8m0_from_float`.
    """
    tensor = packed_bytes(tensor, is_scale)
    if is_scale and tensor.dtype in FLOAT_SCALE_DTYPES and takes_float_scales(problem):
        return e8m0_from_float(tensor, where)
    return tensor


def e8m0_from_float(scales: Tensor, where: str) -> Tensor:
    """The e8m0 codes of scales that a file stores as numbers. vLLM rounds them, and serves other weights.

    Args:
        scales: any shape, of one of `FLOAT_SCALE_DTYPES`; meta tensors too, of which no number is looked at.
        where: the place, for messages.

    Returns:
        uint8 of the same shape.

    Raises:
        CheckpointError: a number is none that e8m0 holds, 2**-127 to 2**127. The message names the first.
    """
    if scales.is_meta:
        return torch.empty_like(scales, dtype=torch.uint8)
    values = scales.to(torch.float32)
    bits = values.view(torch.int32)
    codes = ((bits >> 23) & 0xFF).to(torch.uint8)
    # The bits are compared: some devices flush 2**-127, which is subnormal, to zero.
    bad = (e8m0_to_float(codes).view(torch.int32) != bits) | (codes == E8M0_NAN)
    if bool(bad.any()):
        place = [int(index) for index in bad.nonzero()[0]]
        rule = (
            f"{int(bad.sum())} of {bad.numel()} scales, stored as {dtype_name(scales.dtype)}, are no powers of two "
            f"from 2**-127 to 2**127, which is what MXFP4 has; the first is {float(values[tuple(place)]):.8g} at "
            f"{place}"
        )
        remedy = "The checkpoint is damaged, or in another 4-bit format than its config names: export it as MXFP4 again"
        raise CheckpointError(rule, remedy, where)
    return codes


def require_blocks(columns: int) -> None:
    """Refuses a number of columns that is not a multiple of 32.

    Raises:
        ValueError: it is not.
    """
    if columns % MX_BLOCK:
        rule = f"{columns} values are not a multiple of the MX block {MX_BLOCK} (remainder {columns % MX_BLOCK})"
        raise ValueError(rule)


def scale_blocks(values: Tensor, rule: ScaleRule, largest: float) -> tuple[Tensor, Tensor]:
    """Divides every block of 32 values by its scale.

    Args:
        values: `[..., K]`, floating point, K a multiple of 32.
        rule: see `e8m0_from_amax`.
        largest: see there.

    Returns:
        float32 `[..., K/32, 32]`, and uint8 scales `[..., K/32]`.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    columns = values.shape[-1]
    require_blocks(columns)
    blocks = values.to(torch.float32).reshape(*values.shape[:-1], columns // MX_BLOCK, MX_BLOCK)
    scales = e8m0_from_amax(blocks.abs().amax(-1), rule, largest=largest)
    # ldexp instead of a division: 1 / 2**127 is subnormal, and some devices flush it to zero.
    return torch.ldexp(blocks, (E8M0_BIAS - scales.to(torch.int32)).unsqueeze(-1)), scales


def quantize_in_passes(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
    values: Tensor,
    codes: Tensor,
    scales: Tensor,
    bytes_per_value: int,
    pass_bytes: int,
) -> None:
    """Quantizes a layer's weights into existing tensors, in bounded memory.

    Each pass takes the same rows of all experts, as many as keep its temporaries below `pass_bytes`, and one at least.

    Args:
        quantize: codes and scales from floating-point values `[..., K]`.
        values: `[E, N, K]`, floating point.
        codes: `[E, N, ...]`, overwritten; any stride between experts.
        scales: `[E, N, K/32]`, overwritten; any stride between experts.
        bytes_per_value: what `quantize` allocates per value.
        pass_bytes: the limit.
    """
    experts, rows, columns = values.shape
    step = max(1, pass_bytes // (bytes_per_value * max(1, experts * columns)))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        codes[:, part], scales[:, part] = quantize(values[:, part].contiguous())
