"""Orders 8-bit and 4-bit weight codes for kernels that feed 16-bit tensor cores from registers.

Marlin and Humming store a matrix `[N, K]` in tiles of 16 columns (K) x 64 rows (N), 1024 codes each. Each of the 32
lanes of a warp finds its fragments of the tile's four 16x16 operands of `mma.m16n8k16` (or of the `wgmma` operand with
the same register layout) in 32 consecutive codes (PTX ISA, "Matrix Fragments for mma.m16n8k16"). With row
``n = 64 n' + 16 tile + 8 half + g`` and column ``k = 16 k' + 8 k8 + 2 t + parity``, lane ``4 g + t`` holds 32 codes in
one of these orders, the last index varying fastest. A word holds eight 4-bit codes, the first in its lowest bits.

* ``interleaved``: tile, half, parity, k8. Used by Marlin for 8-bit codes, and by Humming. Two masks extract the two
  values of a 16-bit pair from a word.
* ``transposed``: tile, k8, parity, half. Used by Humming before 0.1.17 with wgmma (sm_90).
* ``plain``: tile, half, k8, parity. Used by Humming if the hardware converts 8-bit floats. Only for 8-bit codes.

For 4-bit codes the parity comes before the other two: ``interleaved`` is tile, parity, half, k8; ``transposed`` is
tile, parity, k8, half. One mask extracts a 16-bit pair from a word, and a shift by four the next.

Sources: vLLM's operator ``gptq_marlin_repack``, and the kernel ``weight_repack_nk`` in the package humming-kernels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .nibbles import transpose_nibbles

LaneOrder = Literal["interleaved", "transposed", "plain"]

TILE_ROWS = 64
TILE_COLUMNS = 16

# Dimensions of the split matrix: 0 n', 1 tile, 2 half, 3 g, 4 k', 5 k8, 6 t, 7 parity.
_LANE_DIMS = (4, 0, 3, 6)
_BYTE_DIMS: dict[LaneOrder, tuple[int, int, int, int]] = {
    "interleaved": (1, 2, 7, 5),
    "transposed": (1, 5, 7, 2),
    "plain": (1, 2, 5, 7),
}
# For 4-bit codes a byte holds both parities: the dimensions within one parity.
_PAIR_DIMS = {"interleaved": (2, 5), "transposed": (5, 2)}


def pack_tiles(codes: Tensor, order: LaneOrder = "interleaved") -> Tensor:
    """Orders 8-bit codes for register-fed 16-bit tensor cores.

    Args:
        codes: any one-byte dtype, `[N, K]`; N a multiple of 64, K of 16.
        order: order of a lane's bytes; see the module.

    Returns:
        int32 `[K/16, 4 N]`.

    Raises:
        ValueError: N or K is not such a multiple.
    """
    rows, columns = codes.shape
    if rows % TILE_ROWS or columns % TILE_COLUMNS:
        raise ValueError(f"[{rows}, {columns}] codes are not whole tiles of {TILE_ROWS} rows x {TILE_COLUMNS} columns")
    split = codes.contiguous().view(torch.uint8).view(rows // 64, 4, 2, 8, columns // 16, 2, 4, 2)
    return split.permute(*_LANE_DIMS, *_BYTE_DIMS[order]).reshape(columns // 16, rows * 16).view(torch.int32)


def pack_nibbles(codes: Tensor, order: Literal["interleaved", "transposed"] = "interleaved") -> Tensor:
    """Orders 4-bit codes for register-fed 16-bit tensor cores.

    Args:
        codes: uint8 `[N, K/2]`, low nibble first; N a multiple of 64, K of 16.
        order: order of a lane's codes; see the module.

    Returns:
        int32 `[K/16, 2 N]`.

    Raises:
        ValueError: N or K is not such a multiple.
    """
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if rows % TILE_ROWS or columns % TILE_COLUMNS:
        raise ValueError(f"[{rows}, {columns}] codes are not whole tiles of {TILE_ROWS} rows x {TILE_COLUMNS} columns")
    split = codes.reshape(rows // 64, 4, 2, 8, columns // 16, 2, 4)
    first, second = split.permute(*_LANE_DIMS, 1, *_PAIR_DIMS[order]).unbind(-1)
    return torch.stack(transpose_nibbles(first, second), dim=-2).reshape(columns // 16, rows * 8).view(torch.int32)


def distances_from_zero_point(codes: Tensor, zeros: Tensor | None = None) -> Tensor:
    """8-bit codes as distances from their zero point: 0, 1, ... from the zero point up, 255, 254, ... below it.

    Humming's kernels convert such bytes to bfloat16 through the exponent field. The mapping is one-to-one for every
    zero point.

    Source: the kernel ``weight_repack_nk`` in the package humming-kernels, ``should_preprocess_for_int2fp``.

    Args:
        codes: uint8 `[N, K]`.
        zeros: uint8 `[N, G]`, G a divisor of K; None for 128 everywhere.

    Returns:
        uint8 `[N, K]`: ``code - zero`` from the zero point up, ``255 - code`` below it.
    """
    if zeros is None:
        return codes ^ torch.where(codes < 128, 255, 128).to(torch.uint8)
    middle = zeros.repeat_interleave(codes.shape[1] // zeros.shape[1], dim=1)
    return torch.where(codes >= middle, codes - middle, 255 - codes)
