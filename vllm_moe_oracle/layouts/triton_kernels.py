"""Orders MXFP4 codes and scales for OpenAI's package triton_kernels on Hopper, and back.

On Blackwell its codes stay in rows, with columns padded to 256, and its scales are the tiles of `scales.tile_scales`.

Sources: triton_kernels, ``tensor_details/layout_details/hopper_value.py`` (for wgmma) and ``hopper_scale.py`` (for
eight warps), in the generation that vLLM brings.

Codes: row ``16 a + 8 w + 2 t + s`` and byte ``32 b + 8 q + 4 v + u`` of a row (two columns a byte) come to row
``4 a + t`` and, last varying fastest, ``b, s, u, q``; the four bytes ``(v, w)`` make a word, as `bits` spreads them.

Scales: row ``256 a + 128 b + 16 w + 8 c + d`` and group ``2 e + f`` come to row ``8 a + w`` and place ``e, b, d, f,
c``.
"""

from __future__ import annotations

from torch import Tensor

from .bits import gather_bits, spread_bits
from .pad import pad_columns, pad_rows

_ROWS, _BYTES = 16, 32
_SCALE_ROWS, _SCALE_GROUPS = 256, 4


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
    return spread_bits(four).view(rows // 4, 4 * columns)


def unpack_hopper_codes(packed: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `pack_hopper_codes`: uint8 `[rows, columns/2]`, low nibble first."""
    blocks, padded = packed.shape[0] // 4, packed.shape[1] // 128
    four = gather_bits(packed.reshape(-1, 4)).view(blocks, 4, padded, 2, 4, 4, 2, 2)
    return four.permute(0, 7, 1, 3, 2, 5, 6, 4).reshape(blocks * 16, padded * 32)[:rows, : columns // 2]


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
