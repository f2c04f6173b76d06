"""Orders 4-bit codes in blocks for vLLM's operator for int4 experts on CPUs, and back.

A matrix `[N, K]` is cut into blocks of 32 rows and as many columns as a group has, at most 128. A block is its codes,
two a byte, then 32 int32: the sum of each row's ``code - 8``, by which the operator corrects what unsigned codes add.
Bytes are ordered by column in fours, then pair of eight rows, row in the eight, column in the four: row
``16 pair + row`` is in the low nibble, row ``16 pair + 8 + row`` in the high one.

Source: vLLM's operator ``convert_weight_packed_scale_zp``, with which the tests compare.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 32
_MIDDLE = 8


def pack_blocks(codes: Tensor, columns: int) -> Tensor:
    """Orders a matrix's codes in blocks.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first; N a multiple of 32, K of `columns`.
        columns: of a block; a multiple of 4.

    Returns:
        uint8 `[N/32, K/columns, 16 * columns + 128]`.

    Raises:
        ValueError: N or K does not fit.
    """
    rows, width = codes.shape[0], 2 * codes.shape[1]
    if rows % BLOCK_ROWS or width % columns or columns % 4:
        raise ValueError(f"[{rows}, {width}] codes are no whole blocks of {BLOCK_ROWS} rows x {columns} columns")
    split = torch.stack((codes & 15, codes >> 4), dim=-1).view(rows // 32, 2, 2, 8, width // columns, columns // 4, 4)
    # 0 block of rows, 1 pair, 2 nibble, 3 row, 4 block of columns, 5 four, 6 column
    low, high = split.permute(2, 0, 4, 5, 1, 3, 6).flatten(3).unbind(0)
    bytes_ = (low | high << 4).flatten(2)
    sums = split.permute(0, 4, 1, 2, 3, 5, 6).flatten(5).sum(-1, dtype=torch.int32) - _MIDDLE * columns
    return torch.cat((bytes_, sums.flatten(2).contiguous().view(torch.uint8)), dim=-1)


def unpack_blocks(packed: Tensor) -> Tensor:
    """Inverse of `pack_blocks`: uint8 `[N, K/2]`."""
    blocks, across = packed.shape[:2]
    codes = packed[..., : packed.shape[2] - 4 * BLOCK_ROWS]
    columns = codes.shape[2] // 16
    split = torch.stack((codes & 15, codes >> 4)).view(2, blocks, across, columns // 4, 2, 8, 4)
    matrix = split.permute(1, 4, 0, 5, 2, 3, 6).reshape(32 * blocks, across * columns // 2, 2)
    return matrix[..., 0] | matrix[..., 1] << 4


def block_scales(scales: Tensor) -> Tensor:
    """A matrix's values per row and group, `[N, G]`, to `[N/32, G, 32]`; N a multiple of 32.

    Raises:
        ValueError: N does not fit.
    """
    if scales.shape[0] % BLOCK_ROWS:
        raise ValueError(f"the scales of {scales.shape[0]} rows are no multiple of {BLOCK_ROWS} rows")
    return scales.reshape(-1, BLOCK_ROWS, scales.shape[1]).transpose(1, 2).contiguous()


def unblock_scales(blocked: Tensor) -> Tensor:
    """Inverse of `block_scales`."""
    return blocked.transpose(1, 2).flatten(0, 1)
