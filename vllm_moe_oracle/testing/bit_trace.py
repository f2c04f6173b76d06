"""Where the bits of a conversion's input are in its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.problem import E8M0_MAX, Problem

ORDERS = ("order", "group_index")
"""Tensors of the order of columns, which are no numbers of weights."""


class BitTrace(NamedTuple):
    """Where the bits of a conversion's input are in its output; `[elements, bits of an element]`, lowest bit first.

    Attributes:
        place: int64, the index among the bits of all output tensors, one tensor after the other; -1 for nowhere.
        inverted: bool, the output has the bit's complement.
        constant: bool, no input had another bit there: nothing is known of it.
    """

    place: Tensor
    inverted: Tensor
    constant: Tensor


def trace_bits(
    convert: Callable[[dict[str, Tensor]], Mapping[str, Tensor]], inputs: Sequence[dict[str, Tensor]]
) -> dict[str, BitTrace]:
    """Follows each bit through a conversion: its values in the inputs are those of its place in the outputs.

    Nothing is assumed of the order. Bits that are computed from several others are found nowhere. Two bits that have
    nothing to do with each other have the same values, or inverted ones, with a probability of 2 / 2**len(inputs).

    Args:
        convert: gets one of `inputs`, and returns tensors of the same names, shapes and dtypes each time.
        inputs: 32 or 64 of them, with tensors of the same names, shapes and dtypes.

    Returns:
        Of each tensor of the input.
    """
    # The words of each run are taken at once: a conversion may return its input.
    outputs = [[bits_of(each) for each in convert(given).values()] for given in inputs]
    after = _values([torch.cat(run) for run in outputs])
    before = _values([torch.cat([bits_of(each) for each in given.values()]) for given in inputs])
    wanted = _but_for_inversion(before)
    constant = wanted == 0
    place = _places(_but_for_inversion(after), wanted).masked_fill(constant, -1)
    inverted = ((before ^ after[place]) & 1).bool()
    found, first = {}, 0
    for key, tensor in inputs[0].items():
        width = 8 * tensor.element_size()
        mine = slice(first, first + width * tensor.numel())
        found[key] = BitTrace(*(each[mine].view(-1, width) for each in (place, inverted, constant)))
        first = mine.stop
    return found


def bits_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 of one dimension."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _spread_bits() -> Tensor:
    """Of each byte a word of eight bytes, one for each of its bits, the lowest first."""
    byte = torch.arange(256, dtype=torch.int64, device="cpu")
    return torch.stack([(byte >> bit & 1) << 8 * bit for bit in range(8)]).sum(0)


def _values(runs: Sequence[Tensor]) -> Tensor:
    """Of each bit of some bytes its values in 32 or 64 runs, as the bits of a number."""
    spread = _spread_bits()
    found = torch.zeros(8 * len(runs[0]), dtype={32: torch.int32, 64: torch.int64}[len(runs)], device="cpu")
    for first in range(0, len(runs), 8):
        word = torch.zeros(len(runs[0]), dtype=torch.int64, device="cpu")
        for turn, run in enumerate(runs[first : first + 8]):
            word |= spread[run.int()] << turn
        found |= word.view(torch.uint8).to(found.dtype) << first
    return found


def _but_for_inversion(values: Tensor) -> Tensor:
    """The same number for a bit and for its complement."""
    return values ^ -(values & 1)


def _places(values: Tensor, wanted: Tensor) -> Tensor:
    """The index of each wanted number among the values, int64; -1 where there is none."""
    place = torch.full(wanted.shape, -1, dtype=torch.int64, device="cpu")
    # Of a conversion that computes, most values are wanted by none, and need not be sorted.
    is_wanted = torch.zeros(_SLOTS, dtype=torch.bool, device="cpu")
    is_wanted[_slot(wanted)] = True
    kept = is_wanted[_slot(values)].nonzero().flatten()
    if not len(kept):
        return place
    ordered, order = values[kept].sort()
    # In ascending order, too: a search of numbers in any order waits for memory.
    asked, back = wanted.sort()
    index = torch.searchsorted(ordered, asked).clamp_(max=len(ordered) - 1)
    place[back] = torch.where(ordered[index] == asked, kept[order][index], -1)
    return place


_SLOTS = 1 << 22


def _slot(values: Tensor) -> Tensor:
    """Some bits of each number, the lowest left out, which is always 0."""
    return (values >> 1 & _SLOTS - 1).int()


def random_inputs(layer: Problem, expert: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Inputs for `trace_bits`: the expert with random codes, scales, zero points and biases, none of them NaN."""
    generator = torch.Generator().manual_seed(0)

    def drawn(key: str, tensor: Tensor) -> Tensor:
        part = key.partition("_")[2]
        if part in ORDERS:
            return tensor
        # Eight bytes at once: a byte takes as long.
        words = torch.empty(-(-tensor.nbytes // 8), dtype=torch.int64, device="cpu")
        words.random_(-(2**63), None, generator=generator)
        found = words.view(torch.uint8)[: tensor.nbytes].view(*tensor.shape[:-1], -1)
        if part == "zero_point":
            found &= (1 << layer.scheme.bits) - 1
        elif tensor.dtype == torch.uint8 and part == "scale":
            found = found.clamp_(max=E8M0_MAX)
        elif layer.scheme.name == "mxfp8" and not part:
            found = torch.where(found & 0x7F == 0x7F, found ^ 1, found)
        values = found.view(tensor.dtype)
        return values if tensor.element_size() == 1 else torch.where(torch.isfinite(values), values, 1)

    return [{key: drawn(key, tensor) for key, tensor in expert.items()} for _ in range(count)]
