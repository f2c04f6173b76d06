"""Stores the rows of a matrix in blocks, one column of all rows of a block after the other.

A vector instruction then loads one column of a block.

Row ``B b + r`` and column ``c`` go to block ``b``, column ``c``, place ``r``, where B is the number of rows of a block.

Source: vLLM's operator ``prepack_moe_weight`` for ``vec``, with blocks of 16 rows, and ``convert_scale_packed``, with
blocks of 32.
"""

from __future__ import annotations

from torch import Tensor


def pack_row_blocks(matrix: Tensor, rows: int) -> Tensor:
    """Orders a matrix.

    Args:
        matrix: any dtype, `[N, K]`; N a multiple of `rows`.
        rows: rows of a block.

    Returns:
        The same shape; every `rows` rows hold `[K, rows]`.

    Raises:
        ValueError: N is not a multiple of `rows`.
    """
    if matrix.shape[0] % rows:
        raise ValueError(f"{matrix.shape[0]} rows are not a multiple of {rows} (remainder {matrix.shape[0] % rows})")
    return matrix.view(-1, rows, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)
