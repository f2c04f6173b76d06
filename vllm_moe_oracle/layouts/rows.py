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


def block_columns(matrix: Tensor, width: int) -> Tensor:
    """Cuts a matrix into blocks of columns, which come one after the other: FlashInfer's ``convert_to_block_layout``.

    Args:
        matrix: `[N, K]`; K a multiple of `width`.
        width: columns of a block.

    Returns:
        `[K/width, N, width]`.

    Raises:
        ValueError: K does not fit.
    """
    rows, columns = matrix.shape
    if columns % width:
        raise ValueError(f"{columns} columns are no whole blocks of {width}")
    return matrix.reshape(rows, columns // width, width).transpose(0, 1).contiguous()


def unblock_columns(blocks: Tensor) -> Tensor:
    """Inverse of `block_columns`."""
    return blocks.transpose(0, 1).flatten(1)
