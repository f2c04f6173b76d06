"""Orders 4-bit floats and their scales for CUTLASS's mixed-input GEMM on Hopper, as FlashInfer packages it.

A warp of that GEMM converts 4-bit codes in registers right before a 16-bit `wgmma`. The codes of two rows that are 8
apart are interleaved, so that one load gives a lane all of its codes (``interleaved``). From FlashInfer 0.6.18 the bits
of eight codes are also permuted, so that one mask and one shift decode two of them to bfloat16, and scales are folded
(``folded``).

Sources: FlashInfer, ``interleave_fp4_weights_for_sm90_mixed_gemm`` (``moe_gemm_mixed_utils.cu``) and
``interleave_moe_scales_for_sm90_mixed_gemm`` (``fused_moe/core.py``, later ``fused_moe/prepare.py``), in 0.6.11 to
0.6.17 (``interleaved``) and in 0.6.18 to 0.7.2 (``folded``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .nibbles import transpose_nibbles

LayoutVersion = Literal["interleaved", "folded"]

TILE_ROWS = 16
TILE_BYTES = 32
SCALE_ROWS = 64
SCALES_PER_BLOCK = 4
"""Scales per 128 columns."""

# For a word of four bytes (rows r and r + 8, then the same rows four bytes further; two codes per byte): first bit,
# number of bits, destination. The lower 16 bits become the first codes of the bytes, the upper 16 the second.
_BIT_MOVES = (
    (7, 1, 31), (4, 3, 22), (3, 1, 15), (0, 3, 6),
    (15, 1, 28), (12, 3, 19), (11, 1, 12), (8, 3, 3),
    (23, 1, 25), (20, 3, 16), (19, 1, 9), (16, 3, 0),
    (31, 1, 30), (28, 1, 29), (29, 2, 26), (27, 1, 14), (24, 1, 13), (25, 2, 10),
)  # fmt: skip

# Sizes of the dimensions of the split bytes: 0 row of 16, 1 half, 2 g, 3 column of 32 bytes, 4 q, 5 m, 6 s, 7 t.
_SPLIT_SIZES = (2, 8, 2, 2, 2, 4)
# The bytes of a word are s and half, half varying fastest; m takes the place of half in the row.
_WORD_PERMUTATION = (0, 5, 2, 3, 4, 7, 6, 1)


def interleave_codes(codes: Tensor, version: LayoutVersion) -> Tensor:
    """Orders a matrix of 4-bit codes.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first; N a multiple of 16, K of 64.
        version: the FlashInfer order to produce.

    Returns:
        uint8 of the same shape.

    Raises:
        ValueError: N or K is not such a multiple.
    """
    rows, columns = codes.shape
    if rows % TILE_ROWS or columns % TILE_BYTES:
        raise ValueError(
            f"[{rows}, {columns}] bytes of codes are not whole tiles of {TILE_ROWS} rows x {TILE_BYTES} bytes"
        )
    half, g, q, m, s, t = _SPLIT_SIZES
    split = codes.reshape(rows // TILE_ROWS, half, g, columns // TILE_BYTES, q, m, s, t).permute(_WORD_PERMUTATION)
    if version == "interleaved":
        first, second = split.unbind(-1)  # rows r and r + 8
        interleaved = torch.stack(transpose_nibbles(first, second), dim=-1)
        return interleaved.reshape(rows, columns)
    words = split.reshape(rows, columns).contiguous().view(torch.int32)
    return _move_bits(words, _BIT_MOVES).view(torch.uint8)


def interleave_scales(scales: Tensor, version: LayoutVersion) -> Tensor:
    """Orders a matrix's e8m0 scales, one per 32 columns, by blocks of 128 columns.

    Args:
        scales: uint8 `[N, K/32]`; K a multiple of 128, and N of 64 for ``folded``.
        version: the FlashInfer order to produce.

    Returns:
        uint8 `[K/128, 4 N]` (``interleaved``), or `[N/64, K/128, 16, 16]` (``folded``): the 16 scales of
        four rows that are 16 apart are contiguous.

    Raises:
        ValueError: N or K is not such a multiple.
    """
    rows, columns = scales.shape
    if columns % SCALES_PER_BLOCK:
        raise ValueError(f"{columns} scales per row are not a multiple of {SCALES_PER_BLOCK} (128 columns)")
    if version == "interleaved":
        return (
            scales.reshape(rows, columns // SCALES_PER_BLOCK, SCALES_PER_BLOCK)
            .transpose(0, 1)
            .reshape(columns // SCALES_PER_BLOCK, rows * SCALES_PER_BLOCK)
        )
    if rows % SCALE_ROWS:
        raise ValueError(f"the scales of {rows} rows are not a multiple of {SCALE_ROWS} rows")
    split = scales.reshape(rows // SCALE_ROWS, 4, TILE_ROWS, columns // SCALES_PER_BLOCK, SCALES_PER_BLOCK)
    return split.permute(0, 3, 2, 1, 4).reshape(
        rows // SCALE_ROWS, columns // SCALES_PER_BLOCK, TILE_ROWS, 4 * SCALES_PER_BLOCK
    )


def _move_bits(words: Tensor, moves: tuple[tuple[int, int, int], ...]) -> Tensor:
    """int32 words with their bits permuted. Allocates the output and one temporary of its size."""
    if words.is_meta:
        # Only the shape is needed; on meta tensors the operations below would take 40 ms.
        return torch.empty(words.shape, dtype=torch.int32, device="meta")
    found = torch.zeros_like(words)
    for first, count, target in moves:
        # The mask clears copies of the sign bit that the arithmetic shift brings in.
        found |= (words >> first).bitwise_and_((1 << count) - 1).bitwise_left_shift_(target)
    return found
