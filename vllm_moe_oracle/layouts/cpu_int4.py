"""Orders 4-bit codes in blocks for vLLM's CPU operator for int4 experts.

A matrix `[N, K]` is cut into blocks of 32 rows x one group of columns, at most 128. A block is its codes, two per byte,
followed by 32 int32: the sum of ``code - 8`` of each row, with which the operator corrects for unsigned codes. Bytes
are ordered by four columns, then 16 rows, row within eight, column within four: row ``16 pair + row`` is in the low
nibble, row ``16 pair + 8 + row`` in the high nibble.

Source: vLLM's operator ``convert_weight_packed_scale_zp``; tests compare with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .nibbles import split_nibbles

BLOCK_ROWS = 32
_ZERO_POINT = 8


def pack_blocks(codes: Tensor, columns: int) -> Tensor:
    """Orders a matrix's codes in blocks.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first; N a multiple of 32, K of `columns`.
        columns: columns per block, a multiple of 4.

    Returns:
        uint8 `[N/32, K/columns, 16 * columns + 128]`.

    Raises:
        ValueError: N or K is not such a multiple.
    """
    rows, width = codes.shape[0], 2 * codes.shape[1]
    if rows % BLOCK_ROWS or width % columns or columns % 4:
        raise ValueError(f"[{rows}, {width}] codes are not whole blocks of {BLOCK_ROWS} rows x {columns} columns")
    split = split_nibbles(codes).view(rows // 32, 2, 2, 8, width // columns, columns // 4, 4)
    # 0 block of rows, 1 pair, 2 nibble, 3 row, 4 block of columns, 5 four, 6 column
    low, high = split.permute(2, 0, 4, 5, 1, 3, 6).flatten(3).unbind(0)
    bytes_ = (low | high << 4).flatten(2)
    sums = split.permute(0, 4, 1, 2, 3, 5, 6).flatten(5).sum(-1, dtype=torch.int32) - _ZERO_POINT * columns
    return torch.cat((bytes_, sums.flatten(2).contiguous().view(torch.uint8)), dim=-1)


def block_scales(scales: Tensor) -> Tensor:
    """Values per row and group, `[N, G]`, to `[N/32, G, 32]`; N a multiple of 32.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    if scales.shape[0] % BLOCK_ROWS:
        raise ValueError(f"the scales of {scales.shape[0]} rows are not a multiple of {BLOCK_ROWS} rows")
    return scales.reshape(-1, BLOCK_ROWS, scales.shape[1]).transpose(1, 2).contiguous()
