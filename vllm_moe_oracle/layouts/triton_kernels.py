"""Orders MXFP4 codes and scales for OpenAI's package triton_kernels on Hopper, and back.

On Blackwell its codes stay in rows, with columns padded to 256, and its scales are the tiles of `scales.tile_scales`.

Sources: triton_kernels, ``tensor_details/layout_details/hopper_value.py`` (for wgmma) and ``hopper_scale.py`` (for
eight warps), in the generation that vLLM brings.

Codes: row ``16 a + 8 w + 2 t + s`` and byte ``32 b + 8 q + 4 v + u`` of a row (two columns a byte) come to row
``4 a + t`` and, last varying fastest, ``b, s, u, q``; the four bytes ``(v, w)`` make a word. Its lower half holds their
low nibbles, its upper half their high ones, each with its bits where a mask and at most three shifts leave them where
bfloat16 has them (`_BITS`).

Scales: row ``256 a + 128 b + 16 w + 8 c + d`` and group ``2 e + f`` come to row ``8 a + w`` and place ``e, b, d, f,
c``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pad import pad_columns, pad_rows

_ROWS, _BYTES = 16, 32
_SCALE_ROWS, _SCALE_GROUPS = 256, 4

# Bits of a halfword that take (sign, high exponent bit, low exponent bit, mantissa bit) of the codes of four bytes.
_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))


def pack_hopper_codes(codes: Tensor) -> Tensor:
    """Orders e2m1 codes, zero-padded to whole blocks of 16 rows x 64 columns.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first.

    Returns:
        uint8 `[N/4, 2 K]`, with N and K padded.
    """
    padded = pad_rows(pad_columns(codes, _up(codes.shape[1], _BYTES)), _up(codes.shape[0], _ROWS))
    rows, columns = padded.shape
    split = padded.view(rows // 16, 2, 4, 2, columns // 32, 4, 2, 4)
    four = split.permute(0, 2, 4, 3, 7, 5, 6, 1).reshape(rows // 4, columns, 4)
    halves = torch.stack([_spread(four & 15), _spread(four >> 4)], dim=-1)
    return torch.stack((halves & 255, halves >> 8), dim=-1).to(torch.uint8).reshape(rows // 4, 4 * columns)


def unpack_hopper_codes(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `pack_hopper_codes`: uint8 `[rows, columns/2]`, low nibble first."""
    blocks, padded = packed.shape[0] // 4, packed.shape[1] // 128
    halves = packed.reshape(-1, 2, 2).to(torch.int32)
    low, high = (_gather(each) for each in (halves[..., 0] | (halves[..., 1] << 8)).unbind(-1))
    four = (low | (high << 4)).view(blocks, 4, padded, 2, 4, 4, 2, 2)
    return four.permute(0, 7, 1, 3, 2, 5, 6, 4).reshape(blocks * 16, padded * 32)[:rows, : columns // 2]


def _spread(codes: Tensor) -> Tensor:
    """Four e2m1 codes `[..., 4]` as the bits of one halfword each: int32 `[...]`."""
    result = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for place, bits in enumerate(_BITS):
        code = codes[..., place].to(torch.int32)
        for source, target in zip((3, 2, 1, 0), bits, strict=True):
            result |= ((code >> source) & 1) << target
    return result


def _gather(halfwords: Tensor) -> Tensor:
    """Inverse of `_spread`: uint8 `[..., 4]`."""
    codes = []
    for bits in _BITS:
        code = torch.zeros_like(halfwords)
        for source, target in zip((3, 2, 1, 0), bits, strict=True):
            code |= ((halfwords >> target) & 1) << source
        codes.append(code.to(torch.uint8))
    return torch.stack(codes, dim=-1)


def order_hopper_scales(scales: Tensor) -> Tensor:
    """Orders e8m0 scales, zero-padded to whole blocks of 256 rows x 4 groups.

    The order itself asks for two groups; the kernels read four at a time, and what they read past the last must not be
    another row's.

    Args:
        scales: uint8 `[N, G]`.

    Returns:
        uint8 `[N/32, 32 G]`, with N and G padded.
    """
    padded = pad_rows(pad_columns(scales, _up(scales.shape[1], _SCALE_GROUPS)), _up(scales.shape[0], _SCALE_ROWS))
    rows, groups = padded.shape
    split = padded.view(rows // 256, 2, 8, 2, 8, groups // 2, 2)
    return split.permute(0, 2, 5, 1, 4, 6, 3).reshape(rows // 32, groups * 32)


def restore_hopper_scales(ordered: Tensor, rows: int, groups: int) -> Tensor:
    """Inverse of `order_hopper_scales`: uint8 `[rows, groups]`."""
    split = ordered.reshape(ordered.shape[0] // 8, 8, ordered.shape[1] // 64, 2, 8, 2, 2)
    return split.permute(0, 3, 1, 6, 4, 2, 5).reshape(ordered.shape[0] * 32, -1)[:rows, :groups]


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
