"""What a kernel's output may differ by, element by element, and where it differs by more.

A token's relative error (`tolerances`) cannot see a fault in a few columns, nor a small one under activations of 4
bits. Here every element has a size of the errors that the formats explain. Errors are compared with it over blocks of
32 columns of each token, over the tokens of each column, and over tokens.

**The size.** A sum of products in which each term has an independent relative error e is off by e times the root of the
sum of the squared terms. So the reference also sums the squares of the second product's terms, for each expert, times
the squared routing weight. Where terms, or experts, have one sign the sum itself is larger, and counts. Errors of the
first product change all of a token's columns, also those with small weights: half of the square is the token's mean.
The relative error is that of `tolerances.rounding_error`. Where activations are quantized, what quantizing them does to
the reference itself is added, times the root of 2: a kernel that rounds every value otherwise is off by as much once
more.

**The bounds.** The mean square of n independent errors, over their expected square, exceeds `largest_mean_square(n)`
once in 10**12 cases. A layer of 10,000 columns makes less than 10**5 means in one check. `rounding_error` is the
sum of the largest errors of all roundings: no whole token is off by more of its size. Quantization may add as much to
a token as to a block, for its errors in few large values move all columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..backends import Tensors
from ..backends.emulation import expert_outputs, ieee_fp32_matmul
from ..core.problem import Problem

BLOCK = 32
"""Columns of a block."""

_DEVIATIONS = 7.04
"""Standard deviations of a normal distribution that one value in 10**12 exceeds."""

_SMALLEST = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150}
"""Largest absolute error of rounding a subnormal number: half of the smallest."""

_CANCELLATION = 2.0**-20
"""What float32 sums may leave of outputs that are zero, as a share of the layer's typical output."""

_COMPARED_ROWS = 256
"""Rows of outputs that are compared at once: float32 numbers of all rows of a large call would need several times its
own memory."""

_Number = TypeVar("_Number", float, Tensor)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference output of some tokens.

    Attributes:
        expected: float32 `[M, hidden]`.
        noise: float32 `[M, hidden]`, positive: root mean square of the error that the formats explain.
        token_noise: float32 `[M]`, positive: root mean square over a token's columns that the formats explain at most.
        tolerance: the same for a block, relative to the block's size, as a float32 scalar: the largest for a right
            kernel.
    """

    expected: Tensor
    noise: Tensor
    token_noise: Tensor
    tolerance: Tensor

    def permuted(self, order: Tensor) -> Reference:
        """The same of the tokens in another order: numbers of tokens, `[M]`."""
        return dataclasses.replace(
            self, expected=self.expected[order], noise=self.noise[order], token_noise=self.token_noise[order]
        )


def largest_mean_square(count: _Number) -> _Number:
    """What the mean square of `count` independent normal values of variance 1 exceeds once in 10**12 cases (Wilson and
    Hilferty's approximation of the chi-squared distribution)."""
    spread = 2.0 / (9.0 * count)
    bound: _Number = (1.0 - spread + _DEVIATIONS * spread**0.5) ** 3
    return bound


def reference_output(
    tensors: Tensors,
    problem: Problem,
    rounding: float,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None = None,
    groups: int = 1,
) -> Reference:
    """The reference output, and the size of the errors that are no fault; see the module.

    Args:
        tensors: canonical tensors, `[local_experts, ...]` each.
        problem: the layer; activations are quantized as its scheme says.
        rounding: relative error of the kernel's rounding, that of activations to their format apart.
        x: `[M, hidden]`.
        weights: `[M, top_k]` float32.
        ids: `[M, top_k]`.
        expert_map: see `backends.Forward`.
        groups: number of equally large groups of neighboring tokens, each with bounds of its own: what quantization
            does to tokens with outliers is no excuse for others. The first group has plain tokens. No group is allowed
            less than that one: an input that a format holds exactly makes the reference exact, but not a kernel that
            chooses scales by another rule.
    """
    sums = Sums(problem, x)
    sums.add(tensors, problem, weights, ids, expert_map)
    expected, size, exact = (each.chunk(groups) for each in (sums.expected, sums.size, sums.exact))
    least = _quantization(expected[0], size[0], exact[0])
    parts = zip(expected, size, exact, strict=True)
    return joined([from_parts(*part, rounding=rounding, dtype=problem.dtype, least=least) for part in parts])


class Sums:
    """The reference output of some tokens, gathered over calls of `add` with different experts.

    Attributes:
        expected: the outputs, float32 `[M, hidden]`.
        size: sums of the squared terms, likewise.
        exact: the outputs with activations left alone, likewise.
    """

    def __init__(self, problem: Problem, x: Tensor) -> None:
        """
        Args:
            problem: the layer; activations are quantized as its scheme says.
            x: `[M, hidden]`.
        """
        self._x = x
        self.expected = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        self.size = torch.zeros_like(self.expected)
        quantized = problem.scheme.activations != "16bit"
        self.exact = torch.zeros_like(self.expected) if quantized else self.expected

    def add(
        self, tensors: Tensors, problem: Problem, weights: Tensor, ids: Tensor, expert_map: Tensor | None = None
    ) -> None:
        """Adds the outputs of some experts; arguments as for `reference_output`, `problem` with their number."""
        with ieee_fp32_matmul():
            for part in expert_outputs(tensors, problem, self._x, weights, ids, expert_map):
                self.expected.index_add_(0, part.token, part.output)
                terms = part.hidden.square() @ part.w2.square_().T
                if not problem.routing.apply_router_weight_on_input:  # there it is in `hidden`
                    terms *= part.weight.square()
                self.size.index_add_(0, part.token, torch.maximum(terms, part.output.square()))
                del part
            if self.exact is not self.expected:
                plain = problem.with_activations("16bit")
                for part in expert_outputs(tensors, plain, self._x, weights, ids, expert_map):
                    self.exact.index_add_(0, part.token, part.output)
                    del part


def from_parts(
    expected: Tensor, size: Tensor, exact: Tensor, rounding: float, dtype: str, least: Tensor | None = None
) -> Reference:
    """The reference from its sums; see the module.

    Args:
        expected: the outputs, float32 `[M, columns]`.
        size: sums of the squared terms, likewise.
        exact: the outputs with activations left alone, likewise.
        rounding: relative error of the kernel's rounding, that of activations to their format apart.
        dtype: the model's.
        least: the least square of the relative error of quantizing activations; None for 0.
    """
    quantization = _quantization(expected, size, exact)
    if least is not None:
        quantization = torch.maximum(quantization, least)
    size = _spread(expected, size)
    floor = max(_SMALLEST[dtype] * 8, 1e-30) + _CANCELLATION * size.mean().sqrt()
    noise = (rounding**2 + quantization).sqrt()
    limit = largest_mean_square(BLOCK) ** 0.5
    return Reference(
        expected,
        noise * size.sqrt() + floor,
        (rounding + quantization.sqrt() * limit) * size.mean(-1).sqrt() + floor,
        noise * limit,
    )


def _spread(expected: Tensor, size: Tensor) -> Tensor:
    """The square of what errors are relative to, for each output: half of it is the token's mean. See the module."""
    size = torch.maximum(size, expected.square())
    return (size + size.mean(-1, keepdim=True)) / 2


def _quantization(expected: Tensor, size: Tensor, exact: Tensor) -> Tensor:
    """The square of the relative error of quantizing activations, as a float32 scalar: the mean over the tokens that
    are not zero. Arguments as for `from_parts`."""
    whole = _spread(expected, size).sum(-1)
    changed = (expected - exact).square().sum(-1) / whole.clamp(min=1e-30)
    return 2 * changed.sum() / (whole > 0).sum().clamp(min=1)


def joined(parts: Sequence[Reference]) -> Reference:
    """References of several groups of tokens as one. Each group keeps its own noise; the tolerance is the largest, but
    for groups whose squares leave float32, which cannot be compared."""
    tolerances = torch.stack([part.tolerance for part in parts])
    return Reference(
        torch.cat([part.expected for part in parts]),
        torch.cat([part.noise for part in parts]),
        torch.cat([part.token_noise for part in parts]),
        torch.where(tolerances.isfinite(), tolerances, tolerances[0]).amax(),
    )


def with_strange_tokens(reference: Reference, plain: int) -> Reference:
    """The reference with those of `inputs.add_strange_tokens`: a token whose output may be anything but NaN, and one
    whose output is zero, as exact as the most exact one of plain tokens.

    Args:
        reference: of the other tokens.
        plain: number of plain tokens, which come first.
    """
    noise, token_noise = reference.noise[:plain], reference.token_noise[:plain]
    return Reference(
        torch.nn.functional.pad(reference.expected, (0, 0, 0, 2)),
        torch.cat((reference.noise, torch.full_like(noise[:1], torch.inf), noise.amin().expand(1, noise.shape[1]))),
        torch.cat(
            (reference.token_noise, torch.full_like(token_noise[:1], torch.inf), token_noise.amin().unsqueeze(0))
        ),
        reference.tolerance,
    )


def excesses(actual: Sequence[Tensor], reference: Reference, rows: Sequence[Tensor]) -> Tensor:
    """How far the outputs of calls are from their bounds: the largest root mean square error of a block, column or
    token, over its bound. Small calls are compared together: on a GPU the comparison of one takes as long as its call.

    Args:
        actual: the output of each call, `[M, hidden]`.
        reference: the reference.
        rows: the reference's tokens of each call, `[M]`.

    Returns:
        float32 `[calls]` on the device; up to 1 for a right kernel, NaN if the output has NaN.
    """
    found = []
    for some in call_batches(rows):
        blocks, columns, tokens = _ratios(actual[some], reference, rows[some])
        largest = torch.maximum(blocks.amax(-1), tokens)
        found.append(torch.maximum(largest_of_calls(largest, rows[some]), columns.amax(-1)))
    return torch.cat(found)


def call_batches(rows: Sequence[Tensor]) -> list[slice]:
    """Neighboring calls that are compared together, by their numbers: as many as have few rows in all, one at least."""
    found, first, held = [], 0, 0
    for number, each in enumerate(rows):
        if number > first and held + len(each) > _COMPARED_ROWS:
            found.append(slice(first, number))
            first, held = number, 0
        held += len(each)
    return [*found, slice(first, len(rows))]


def largest_of_calls(values: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """The largest of each call's values, `[calls, ...]`; NaN where one is.

    Args:
        values: `[M, ...]`, one for each row of all calls.
        rows: of each call.
    """
    sizes = [len(each) for each in rows]
    return torch.stack([each.amax(0) for each in torch.split(values, sizes)])


def describe_excess(actual: Tensor, reference: Reference, rows: Tensor) -> str:
    """Where an output is furthest from its bounds, in words; arguments as for one call of `excesses`."""
    blocks, columns, tokens = (each.nan_to_num(nan=torch.inf) for each in ratios(actual, reference, rows))
    for what, each in (("column", columns), ("token", tokens)):
        if float(each.amax()) > max(float(other.amax()) for other in (blocks, columns, tokens) if other is not each):
            return f"{what} {int(each.argmax())} is off by {float(each.amax()):.3g} times what rounding explains"
    wrong = int((blocks > 1).sum())
    token, block = divmod(int(blocks.argmax()), blocks.shape[1])
    last = min((block + 1) * BLOCK, actual.shape[1]) - 1
    return (
        f"columns {block * BLOCK} to {last} of token {token} are off by {float(blocks.amax()):.3g} times what rounding "
        f"explains, as are {wrong} of {blocks.numel()} blocks"
    )


def ratios(actual: Tensor, reference: Reference, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Root mean square errors over their bounds: of each token's blocks `[M, hidden / 32]`, of columns `[hidden]`, of
    tokens `[M]`; arguments as for one call of `excesses`."""
    blocks, columns, tokens = _ratios([actual], reference, [rows])
    return blocks, columns[0], tokens


def _ratios(actual: Sequence[Tensor], reference: Reference, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """`ratios` of several calls: blocks and tokens of all rows, and columns `[calls, hidden]`."""
    outputs, places = (each[0] if len(each) == 1 else torch.cat(tuple(each)) for each in (actual, rows))
    hidden, calls, device = outputs.shape[1], len(rows), outputs.device
    lengths = torch.tensor([len(each) for each in rows], device=device)
    call = torch.repeat_interleave(lengths, output_size=len(places))
    # The last block may have fewer columns than the others.
    sizes = (hidden - torch.arange(0, hidden, BLOCK, dtype=torch.float32, device=device)).clamp(max=BLOCK)
    blocks, tokens = [], []
    columns = torch.zeros(calls, hidden, dtype=torch.float32, device=device)
    for first in range(0, len(places), _COMPARED_ROWS):
        part, mine, of = (each[first : first + _COMPARED_ROWS] for each in (outputs, places, call))
        differences = part.float() - reference.expected[mine]
        errors = (differences / reference.noise[mine]).square()
        columns.index_add_(0, of, errors)
        if hidden % BLOCK:
            errors = torch.nn.functional.pad(errors, (0, -hidden % BLOCK))
        blocks.append(torch.unflatten(errors, 1, (-1, BLOCK)).sum(-1))
        tokens.append(differences.square().mean(-1).sqrt() / reference.token_noise[mine])
    independent = largest_mean_square(_distinct(places, call, lengths, len(reference.expected)))
    return (
        (torch.cat(blocks) / (sizes * largest_mean_square(sizes))).sqrt(),
        (columns / (lengths * independent).unsqueeze(-1)).sqrt(),
        torch.cat(tokens),
    )


def _distinct(rows: Tensor, call: Tensor, lengths: Tensor, count: int) -> Tensor:
    """How many independent values a mean over a call's rows has, some of which are the same: one over the sum of the
    squared weights (Satterthwaite), which is their number where all repeat alike. float32 `[calls]`.

    Args:
        rows: `[M]` of all calls, from 0 to `count - 1`.
        call: `[M]`, the number of each one's call.
        lengths: `[calls]`, how many rows each call has.
        count: see `rows`.
    """
    ones = torch.ones(len(rows), dtype=torch.float32, device=rows.device)
    repeats = torch.zeros(len(lengths) * count, dtype=torch.float32, device=rows.device)
    repeats.index_add_(0, call * count + rows, ones)
    return lengths.square() / repeats.view(-1, count).square().sum(-1)
