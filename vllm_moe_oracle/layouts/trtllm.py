"""Orders weights and scales for TensorRT-LLM's expert kernels in FlashInfer, which compute transposed products.

Sources: FlashInfer, ``get_shuffle_matrix_a_row_indices`` with a tile of 128 and ``convert_to_block_layout``
(``flashinfer/utils.py``, ``flashinfer/fused_moe/core.py``). The gate and up rows of w13 are ordered by `gate_up`:
``get_reorder_rows_for_gated_act_gemm_row_indices`` is a swap, then an interleaving.
"""

from __future__ import annotations

from torch import Tensor

SHUFFLE_ROWS = 32


def shuffle_rows(matrix: Tensor) -> Tensor:
    """Moves row ``4 a + b`` of every 32 to position ``8 b + a``.

    Args:
        matrix: any dtype, `[N, ...]`, N a multiple of 32.

    Returns:
        The same shape.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    rows = matrix.shape[0]
    if rows % SHUFFLE_ROWS:
        raise ValueError(f"{rows} rows are not a multiple of {SHUFFLE_ROWS}")
    split = matrix.reshape(rows // SHUFFLE_ROWS, 8, 4, *matrix.shape[1:])
    return split.transpose(1, 2).reshape(matrix.shape)


def to_block_layout(matrix: Tensor, width: int) -> Tensor:
    """Cuts a matrix into blocks of columns that follow each other in memory: FlashInfer's ``convert_to_block_layout``.

    Args:
        matrix: `[N, K]`; K a multiple of `width`.
        width: columns per block.

    Returns:
        `[K/width, N, width]`.

    Raises:
        ValueError: K is not a multiple of `width`.
    """
    rows, columns = matrix.shape
    if columns % width:
        raise ValueError(f"{columns} columns are not a multiple of the block width {width}")
    return matrix.reshape(rows, columns // width, width).transpose(0, 1).contiguous()
