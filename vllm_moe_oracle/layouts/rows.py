"""Orders the rows of a matrix for kernels that write their products transposed, and back.

Sources: FlashInfer, ``get_reorder_rows_for_gated_act_gemm_row_indices`` and ``get_shuffle_matrix_a_row_indices`` with a
tile of 128 (`flashinfer/fused_moe/core.py`, `flashinfer/utils.py`). The functions take any dtype and any number of
further dimensions: codes and scales alike.
"""

from __future__ import annotations

from torch import Tensor

SHUFFLE_ROWS = 32


def swap_halves(w13: Tensor) -> Tensor:
    """Gate rows, then up rows, to up rows, then gate rows; its own inverse. `[2 I, ...]`."""
    return w13.reshape(2, w13.shape[0] // 2, *w13.shape[1:]).flip(0).reshape(w13.shape)


def alternate_halves(w13: Tensor) -> Tensor:
    """Two halves of rows to rows that alternate between them, the first half's first. `[2 I, ...]`."""
    return w13.reshape(2, w13.shape[0] // 2, *w13.shape[1:]).transpose(0, 1).reshape(w13.shape)


def separate_halves(alternating: Tensor) -> Tensor:
    """Inverse of `alternate_halves`."""
    split = alternating.reshape(alternating.shape[0] // 2, 2, *alternating.shape[1:])
    return split.transpose(0, 1).reshape(alternating.shape)


def shuffle_rows(matrix: Tensor) -> Tensor:
    """Within 32 rows, row ``4 a + b`` moves to place ``8 b + a``.

    Args:
        matrix: `[N, ...]`, N a multiple of 32.

    Raises:
        ValueError: N does not fit.
    """
    return _transposed(matrix, 8, 4)


def unshuffle_rows(shuffled: Tensor) -> Tensor:
    """Inverse of `shuffle_rows`."""
    return _transposed(shuffled, 4, 8)


def _transposed(matrix: Tensor, outer: int, inner: int) -> Tensor:
    rows = matrix.shape[0]
    if rows % SHUFFLE_ROWS:
        raise ValueError(f"{rows} rows are no multiple of {SHUFFLE_ROWS}")
    split = matrix.reshape(rows // SHUFFLE_ROWS, outer, inner, *matrix.shape[1:])
    return split.transpose(1, 2).reshape(matrix.shape)
