"""Layout functions, followed bit by bit: whether they lose anything, and the way back, without an inverse of each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vllm_moe_oracle.testing.bit_trace import BitTrace, trace_bits

Layout = Callable[..., torch.Tensor]


@functools.lru_cache(maxsize=16)
def _trace(function: Layout, shape: tuple[int, ...], dtype: torch.dtype, most: int, options: Any) -> BitTrace:
    generator = torch.Generator().manual_seed(0)
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    inputs = [{"": torch.randint(most, size, dtype=torch.uint8, generator=generator).view(dtype)} for _ in range(64)]
    return trace_bits(lambda given: {"": function(given[""], **dict(options))}, inputs)[""]


def keeps_every_bit(
    function: Layout, shape: Sequence[int], dtype: torch.dtype = torch.uint8, most: int = 256, **options: Any
) -> bool:
    """Whether each bit of a matrix has a place in what a layout function makes of it.

    Args:
        function: gets the matrix and `options`.
        shape: of the matrix.
        dtype: of the matrix.
        most: its bytes are below that.
        options: keyword arguments, which can be hashed.
    """
    trace = _trace(function, tuple(shape), dtype, most, tuple(options.items()))
    return bool(((trace.place >= 0) | trace.constant).all())


def undone(
    function: Layout,
    made: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.uint8,
    most: int = 256,
    **options: Any,
) -> torch.Tensor:
    """The matrix that a layout function made a tensor of; the other arguments are those of `keeps_every_bit`."""
    return _back(_trace(function, tuple(shape), dtype, most, tuple(options.items())), _bits(made), shape, dtype)


def undone_expert(
    convert: Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    made: Mapping[str, torch.Tensor],
    inputs: list[dict[str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """The canonical tensors that a conversion which only moves bits made tensors of.

    Args:
        convert: the conversion.
        made: the tensors.
        inputs: for `trace_bits`.
    """
    bits = torch.cat([_bits(each) for each in made.values()])
    return {
        key: _back(trace, bits, inputs[0][key].shape, inputs[0][key].dtype)
        for key, trace in trace_bits(convert, inputs).items()
    }


def _back(trace: BitTrace, bits: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Bits that no input had are 0."""
    assert ((trace.place >= 0) | trace.constant).all(), "the conversion loses bits, or computes them"
    found = (bits[trace.place] ^ trace.inverted).masked_fill(trace.constant, 0).view(-1, 8)
    return (found << torch.arange(8)).sum(1).to(torch.uint8).view(dtype).view(tuple(shape))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Each bit of a tensor, the lowest of a byte first."""
    raw = tensor.contiguous().flatten().view(torch.uint8)
    return (raw[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()
