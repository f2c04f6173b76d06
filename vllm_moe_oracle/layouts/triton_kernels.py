"""Orders MXFP4 codes and scales for OpenAI's package triton_kernels on Hopper.

On Blackwell triton_kernels reads codes in rows, padded to 256 columns, and scales in the tiles of
`scales.swizzle_scales`.

Sources: triton_kernels, ``tensor_details/layout_details/hopper_value.py`` (for wgmma) and ``hopper_scale.py`` (for
eight warps), in the version that vLLM ships.

Codes: row ``16 a + 8 w + 2 t + s`` and byte ``32 b + 8 q + 4 v + u`` of a row (two columns per byte) go to row
``4 a + t`` and position ``b, s, u, q``, the last index varying fastest; the four bytes ``(v, w)`` make a word, whose
bits `triton_kernels_bits` permutes.

Scales: row ``256 a + 128 b + 16 w + 8 c + d`` and group ``2 e + f`` go to row ``8 a + w`` and position ``e, b, d, f,
c``. For four warps the numbers 256, 128 and 8 are half as large.
"""

from __future__ import annotations

from torch import Tensor

from ..core.sharding import round_up
from .padding import pad_columns, pad_rows
from .triton_kernels_bits import spread_bits

_ROWS, _BYTES = 16, 32
_WARP_ROWS, _SCALE_GROUPS = 32, 4


def swizzle_hopper_codes(codes: Tensor) -> Tensor:
    """Orders e2m1 codes, zero-padded to whole blocks of 16 rows x 64 columns.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first.

    Returns:
        uint8 `[N/4, 2 K]`, with N and K padded.
    """
    padded = pad_rows(pad_columns(codes, round_up(codes.shape[1], _BYTES)), round_up(codes.shape[0], _ROWS))
    rows, columns = padded.shape
    split = padded.view(rows // 16, 2, 4, 2, columns // 32, 4, 2, 4)
    four = split.permute(0, 2, 4, 3, 7, 5, 6, 1).reshape(rows // 4, columns, 4)
    return spread_bits(four).view(rows // 4, 4 * columns)


def swizzle_hopper_scales(scales: Tensor, warps: int = 8) -> Tensor:
    """Orders e8m0 scales, zero-padded to whole blocks of 32 rows a warp (256 for eight) x 4 groups.

    The order itself needs pairs of groups only. Kernels read four groups at a time, and padding keeps them from reading
    another row.

    Args:
        scales: uint8 `[N, G]`.
        warps: warps of the kernel: a power of two.

    Returns:
        uint8 `[N/32, 32 G]`, with N and G padded.
    """
    block = _WARP_ROWS * warps
    padded = pad_rows(pad_columns(scales, round_up(scales.shape[1], _SCALE_GROUPS)), round_up(scales.shape[0], block))
    rows, groups = padded.shape
    split = padded.view(rows // block, 2, warps, 2, 8, groups // 2, 2)
    return split.permute(0, 2, 5, 1, 4, 6, 3).reshape(rows // 32, groups * 32)
