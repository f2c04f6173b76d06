"""Orders 4-bit floats and their scales for CUTLASS's mixed-input GEMM on Hopper, as FlashInfer packages it, and back.

A warp of that GEMM converts 4-bit codes in registers right before its 16-bit `wgmma`. So that one load gives a lane
what it needs, the codes of two rows that are 8 apart are woven together, and with FlashInfer 0.6.18 the bits of eight
codes were scattered so that one mask and one shift make two bfloat16 of them.

Sources: FlashInfer, ``interleave_fp4_weights_for_sm90_mixed_gemm`` (``moe_gemm_mixed_utils.cu``) and
``interleave_moe_scales_for_sm90_mixed_gemm`` (``fused_moe/core.py``, later ``fused_moe/prepare.py``), in 0.6.11 to
0.6.17 (``woven``) and in 0.6.18 to 0.7.2 (``scattered``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Generation = Literal["woven", "scattered"]

ROWS = 16
BYTES = 32
SCALE_ROWS = 64
SCALES = 4
"""Scales per 128 columns."""

# Of the 32 bits of four bytes (rows r and r + 8, then the same four bytes further on; each byte two codes): first bit,
# number of bits, and where they go. The lower 16 bits become the first codes of the bytes, the upper 16 the second.
_BITS = (
    (7, 1, 31), (4, 3, 22), (3, 1, 15), (0, 3, 6),
    (15, 1, 28), (12, 3, 19), (11, 1, 12), (8, 3, 3),
    (23, 1, 25), (20, 3, 16), (19, 1, 9), (16, 3, 0),
    (31, 1, 30), (28, 1, 29), (29, 2, 26), (27, 1, 14), (24, 1, 13), (25, 2, 10),
)  # fmt: skip

# Dimensions of the split bytes: 0 row of 16, 1 half, 2 g, 3 column of 32 bytes, 4 q, 5 m, 6 s, 7 t.
_SPLIT = (2, 8, 2, 2, 2, 4)
# Bytes of a word: s and half, the half faster; the row that it goes to is m instead of half.
_WORDS = (0, 5, 2, 3, 4, 7, 6, 1)


def weave_codes(codes: Tensor, generation: Generation) -> Tensor:
    """Orders a matrix of 4-bit codes.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first; N a multiple of 16, K of 64.
        generation: which of the two orders.

    Returns:
        uint8 of the same shape.

    Raises:
        ValueError: N or K does not fit.
    """
    rows, columns = codes.shape
    if rows % ROWS or columns % BYTES:
        raise ValueError(f"[{rows}, {columns}] bytes of codes are no whole tiles of {ROWS} rows x {BYTES} bytes")
    half, g, q, m, s, t = _SPLIT
    split = codes.reshape(rows // ROWS, half, g, columns // BYTES, q, m, s, t).permute(_WORDS)
    if generation == "woven":
        first, second = split.unbind(-1)  # rows r and r + 8
        woven = torch.stack(((first & 15) | (second << 4), (first >> 4) | (second & 240)), dim=-1)
        return woven.reshape(rows, columns)
    words = split.reshape(rows, columns).contiguous().view(torch.int32)
    return _moved(words, _BITS).view(torch.uint8)


def unweave_codes(woven: Tensor, generation: Generation) -> Tensor:
    """Inverse of `weave_codes`: uint8 `[N, K/2]`."""
    rows, columns = woven.shape
    if generation == "woven":
        low, high = woven.reshape(rows, columns // 2, 2).unbind(-1)
        pairs = torch.stack(((low & 15) | (high << 4), (low >> 4) | (high & 240)), dim=-1)
    else:
        back = tuple((target, count, first) for first, count, target in _BITS)
        pairs = _moved(woven.contiguous().view(torch.int32), back).view(torch.uint8)
    sizes = (rows // ROWS, *_SPLIT[:2], columns // BYTES, *_SPLIT[2:])
    split = pairs.reshape([sizes[each] for each in _WORDS])
    return split.permute([_WORDS.index(each) for each in range(8)]).reshape(rows, columns)


def weave_scales(scales: Tensor, generation: Generation) -> Tensor:
    """Orders a matrix's e8m0 scales, one per 32 columns, by blocks of 128 columns.

    Args:
        scales: uint8 `[N, K/32]`; K a multiple of 128, and N of 64 for ``scattered``.
        generation: which of the two orders.

    Returns:
        uint8 `[K/128, 4 N]` (``woven``), or `[N/64, K/128, 16, 16]` (``scattered``): the four rows that are 16 apart
        next to each other, 16 bytes at once.

    Raises:
        ValueError: N or K does not fit.
    """
    rows, columns = scales.shape
    if columns % SCALES:
        raise ValueError(f"{columns} scales a row are no multiple of {SCALES}, those of 128 columns")
    if generation == "woven":
        return scales.reshape(rows, columns // SCALES, SCALES).transpose(0, 1).reshape(columns // SCALES, rows * SCALES)
    if rows % SCALE_ROWS:
        raise ValueError(f"the scales of {rows} rows are no multiple of {SCALE_ROWS} rows")
    split = scales.reshape(rows // SCALE_ROWS, 4, ROWS, columns // SCALES, SCALES)
    return split.permute(0, 3, 2, 1, 4).reshape(rows // SCALE_ROWS, columns // SCALES, ROWS, 4 * SCALES)


def unweave_scales(woven: Tensor, generation: Generation) -> Tensor:
    """Inverse of `weave_scales`: uint8 `[N, K/32]`."""
    if generation == "woven":
        blocks, width = woven.shape
        split = woven.reshape(blocks, width // SCALES, SCALES)
        return split.transpose(0, 1).reshape(width // SCALES, blocks * SCALES)
    tiles, blocks = woven.shape[:2]
    split = woven.reshape(tiles, blocks, ROWS, 4, SCALES).permute(0, 3, 2, 1, 4)
    return split.reshape(tiles * SCALE_ROWS, blocks * SCALES)


def _moved(words: Tensor, moves: tuple[tuple[int, int, int], ...]) -> Tensor:
    """Words of 32 bits with their bits in other places; int32. Beside input and output there is one tensor of their
    size: a matrix of an expert is large."""
    if words.is_meta:
        # Only the shape is asked for, and there torch computes it in Python: 40 ms for the operations below.
        return torch.empty(words.shape, dtype=torch.int32, device="meta")
    found = torch.zeros_like(words)
    for first, count, target in moves:
        # The mask clears what an arithmetic shift brings down from the sign; the last bit goes into it.
        found |= (words >> first).bitwise_and_((1 << count) - 1).bitwise_left_shift_(target)
    return found
