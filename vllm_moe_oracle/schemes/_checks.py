"""Checks of loaded parameters that every scheme shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import CheckpointError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of biases, and of the scales of integer codes."""

SHAPE_REMEDY = "The checkpoint is damaged, or not in the format and of the sizes that its config names"
"""What to look for where a file's tensor has another shape than its layer."""

_CHUNK_ELEMENTS = 2**21
"""Values tested per pass. `isfinite` allocates temporaries, and the scales of one layer can take 100 MB."""


_LARGEST_SQUARED = 2.0**64 * (1 - 2.0**-24)
"""The largest float32 number whose square is one."""


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype for messages: ``bfloat16`` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


_E8M0 = getattr(torch, "float8_e8m0fnu", None)
_PACKED_E2M1_DTYPES = (torch.int8, getattr(torch, "float4_e2m1fn_x2", None))
"""Dtypes of files for bytes with two e2m1 codes, beside uint8: DeepSeek-V4 uses int8."""


def packed_bytes(tensor: Tensor, is_scale: bool) -> Tensor:
    """A file's tensor of e8m0 scales or of pairs of e2m1 codes as uint8; any other tensor as it is.

    Args:
        tensor: from a checkpoint.
        is_scale: it holds scales, which no file has as int8.
    """
    if (_E8M0 is not None and tensor.dtype == _E8M0) or (tensor.dtype in _PACKED_E2M1_DTYPES and not is_scale):
        return tensor.view(torch.uint8)
    return tensor


def refuse_bias(tensor: Tensor, where: str) -> None:
    """Refuses a bias of a layer without biases that is not zero.

    Raises:
        CheckpointError: a value is not zero.
    """
    if tensor.any():
        rule = "the checkpoint has expert biases, which the model's config does not declare"
        raise CheckpointError(rule, "Check the model's files, or serve another export of it", where)


def rounding_loss(values: Tensor, dtype: torch.dtype) -> float:
    """The largest relative error of a floating-point tensor's numbers, but for zeros, in another dtype."""
    if values.is_meta or values.dtype == dtype or not values.is_floating_point() or not values.numel():
        return 0.0
    exact = values.to(torch.float32)
    error = (values.to(dtype).to(torch.float32) - exact).abs() / exact.abs()
    return float(torch.where(exact == 0, 0.0, error).max())


def require_finite(values: Tensor, kind: str, name: str, problem: Problem) -> None:
    """Refuses a parameter with NaN or infinite values.

    Args:
        values: `[experts, ...]`, floating point.
        kind: what the values are, in the plural: ``scales`` or ``biases``.
        name: the parameter's name.
        problem: the layer.

    Raises:
        CheckpointError: a value is NaN or infinite; the message says how many are, and which is the first.
    """
    count, first = 0, ""
    for start, part in expert_chunks(values):
        bad = ~torch.isfinite(part)
        found = int(bad.sum())
        if found and not first:
            first = first_place(bad, part, start)
        count += found
    if count:
        rule = f"{count} of {values.numel()} {kind} in {name} are NaN or infinite; {first}"
        remedy = "The checkpoint is damaged, or the model's dtype cannot represent the values"
        raise CheckpointError(rule, remedy, problem.layer)


WasLoaded = Callable[[str, str, int], bool]
"""Whether a loader has brought a part of a parameter: by the parameter's name, vLLM's shard (``w1`` gate, or the only
one before the activation; ``w2`` down; ``w3`` up), and local expert."""


def require_loaded(
    tensors: Mapping[str, Tensor],
    names: Mapping[str, str],
    unloaded: Mapping[str, int],
    problem: Problem,
    was_loaded: WasLoaded | None = None,
) -> set[str]:
    """Refuses a layer in which an expert's matrix, scales or biases still hold the bytes that filled them before
    loading, and that no loader has brought. A checkpoint may hold these bytes, too: it is damaged where they are NaN.

    Args:
        tensors: `[local_experts, rows, ...]` each, by canonical name.
        names: parameter name by canonical name.
        unloaded: the byte by canonical name.
        problem: the layer.
        was_loaded: what loaders have brought; None where nobody knows, and the bytes alone decide.

    Returns:
        Canonical names of tensors that hold nothing but such bytes for some expert's matrix, which a loader brought.

    Raises:
        CheckpointError: something was never loaded. The message names the first such part of a parameter, and counts
            them.
    """
    brought: set[str] = set()
    for canonical, byte in unloaded.items():
        if canonical not in tensors:
            continue
        name, missing = names[canonical], []
        for order, (shard, projection, rows) in enumerate(_projections(tensors[canonical], canonical, problem)):
            mark = int.from_bytes(bytes([byte]) * rows.element_size(), "little", signed=rows.dtype != torch.uint8)
            # The first row decides for nearly every matrix: comparing all rows needs a temporary as large as the layer.
            for expert in (rows[:, 0] == mark).all(-1).nonzero().flatten().tolist():
                if not bool((rows[expert] == mark).all()):
                    continue
                if was_loaded is not None and was_loaded(name, shard, expert):
                    brought.add(canonical)
                else:
                    missing.append((expert, order, projection))
        if missing:
            expert, _, projection = min(missing)
            what = {"scale": "the scales of ", "bias": "the biases of "}.get(canonical.partition("_")[2], "")
            were, it = ("were", "them") if what else ("was", "it")
            rule = f"{what}the {projection} projection of local expert {expert} {were} never loaded"
            remedy = f"The checkpoint lacks {it}, or names {it} differently ({len(missing)} such in {name})"
            raise CheckpointError(rule, remedy, problem.layer)
    return brought


def _projections(tensor: Tensor, canonical: str, problem: Problem) -> list[tuple[str, str, Tensor]]:
    """The parts of a parameter that loaders bring: vLLM's shard, the projection's name for messages, and the rows as
    integers `[experts, rows, columns]`."""
    bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
    bits = bits if bits.ndim > 2 else bits.unsqueeze(-1)
    if canonical.startswith("w2"):
        return [("w2", "down", bits)]
    if not problem.activation.gated:
        return [("w1", "up", bits)]
    gate, up = (bits[:, ::2], bits[:, 1::2]) if problem.activation.interleaved else bits.chunk(2, dim=1)
    return [("w1", "gate", gate), ("w3", "up", up)]


def expert_chunks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Neighboring experts of a parameter `[experts, ...]`, few enough for temporaries, with the number of the first."""
    experts = max(1, _CHUNK_ELEMENTS // max(values[0].numel(), 1))
    return ((start, values[start : start + experts]) for start in range(0, len(values), experts))


def first_place(bad: Tensor, values: Tensor, first_expert: int = 0) -> str:
    """The first marked value of a parameter and its place, in words.

    Args:
        bad: bool `[experts, ...]`, with at least one True.
        values: the values, of the same shape.
        first_expert: number of the first expert.
    """
    place = [int(index) for index in bad.nonzero()[0]]
    value = values[tuple(place)]
    shown = f"{float(value):g}" if values.dtype.is_floating_point else f"code {int(value)}"
    return f"the first is {shown} of local expert {first_expert + place[0]} at {place[1:]}"


# --- What no kernel can compute with ----------------------------------------------------------------------------------


def largest_weight(dtype: str) -> float:
    """The largest magnitude of a weight that is no damage, for a model's dtype: the dtype's own, and 2**64.

    A gated activation multiplies two products of a weight, and a norm squares what the layer adds; both are done in
    float32, in which the square of a larger weight is infinite.
    """
    return min(float(torch.finfo(getattr(torch, dtype)).max), _LARGEST_SQUARED)


def require_weights_within(
    rows: Tensor, dequantize: Callable[[Tensor], Tensor], name: str, expert: int, columns: int, problem: Problem
) -> None:
    """Refuses an expert with weights beyond `largest_weight`.

    Args:
        rows: bool `[N]`: the rows of the matrix that may have one, by their scales alone.
        dequantize: float32 weights `[n, columns]` of some rows; `[n]` int64 -> `[n, columns]`.
        name: the parameter's name.
        expert: local expert number.
        columns: input features of the matrix.
        problem: the layer.

    Raises:
        CheckpointError: there is such a weight; the message names the first.
    """
    limit = largest_weight(problem.dtype)
    for part in torch.split(rows.nonzero().flatten(), max(1, _CHUNK_ELEMENTS // columns)):
        values = dequantize(part)
        bad = ~(values.abs() <= limit)
        if bool(bad.any()):
            row, column = (int(index) for index in bad.nonzero()[0])
            rule = (
                f"{name}: the weight of local expert {expert} in row {int(part[row])}, input feature {column} is "
                f"{float(values[row, column]):.8g}, code times scale; {problem.dtype} layers hold up to {limit:.8g}"
            )
            remedy = "The checkpoint is damaged" + ("" if problem.dtype != "float16" else ", or needs --dtype bfloat16")
            raise CheckpointError(rule, remedy, problem.layer)


def require_biases_within(tensors: Mapping[str, Tensor], names: Mapping[str, str], problem: Problem) -> None:
    """Refuses biases beyond `largest_weight`.

    Args:
        tensors: as a scheme's `read` returns them.
        names: parameter name by canonical name.
        problem: the layer.

    Raises:
        CheckpointError: there is such a bias; the message names the first.
    """
    limit = largest_weight(problem.dtype)
    for canonical in ("w13_bias", "w2_bias"):
        if canonical in tensors:
            values = tensors[canonical]
            bad = ~(values.abs() <= limit)
            if bool(bad.any()):
                rule = (
                    f"{int(bad.sum())} of {values.numel()} biases in {names[canonical]} are beyond the {limit:g} that "
                    f"{problem.dtype} layers hold; {first_place(bad, values)}"
                )
                raise CheckpointError(rule, "The checkpoint is damaged", problem.layer)
