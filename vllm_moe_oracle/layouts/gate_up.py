"""Orders the gate and up rows of a gated w13, and back.

Canonical tensors hold all gate rows, then all up rows. The functions take any dtype and any number of trailing
dimensions: codes, scales and biases alike.
"""

from __future__ import annotations

from torch import Tensor


def swap_gate_up(w13: Tensor) -> Tensor:
    """Gate rows, then up rows, to up rows, then gate rows: `[2 I, ...]`; its own inverse."""
    return w13.reshape(2, w13.shape[0] // 2, *w13.shape[1:]).flip(0).reshape(w13.shape)


def interleave_gate_up(w13: Tensor, period: int = 1) -> Tensor:
    """Gate rows, then up rows, to rows that alternate: `period` gate rows, `period` up rows, and so on.

    Args:
        w13: `[2 I, ...]`; I a multiple of `period`.
        period: rows of one kind in sequence.
    """
    split = w13.reshape(2, w13.shape[0] // (2 * period), period, *w13.shape[1:])
    return split.transpose(0, 1).reshape(w13.shape)


def deinterleave_gate_up(interleaved: Tensor, period: int = 1) -> Tensor:
    """Inverse of `interleave_gate_up`."""
    split = interleaved.reshape(interleaved.shape[0] // (2 * period), 2, period, *interleaved.shape[1:])
    return split.transpose(0, 1).reshape(interleaved.shape)
