"""Orders scales and biases for kernels of others, and back.

Sources: vLLM's ``marlin_permute_scales``, ``marlin_permute_bias``, ``marlin_zero_points`` and
``mxfp8_marlin_process_scales``; the package humming-kernels, ``transform_humming_weight_scale`` and
``transform_humming_zero_point``; NVIDIA's PTX ISA, scale factors of ``tcgen05.mma``, for tiles of
128 rows x 4 scales; DeepGEMM, ``get_mn_major_tma_aligned_packed_ue8m0_tensor``.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_ROWS = 64
BIAS_ROWS = 32


def order_group_scales(scales: Tensor) -> Tensor:
    """Orders a matrix's group scales for `mma` fragments: within 64 rows, those of equal remainder by 8 are neighbours.

    Args:
        scales: any dtype, `[N, G]`; N a multiple of 64.

    Returns:
        `[G, N]`: row ``8 j + i`` of each 64 at place ``8 i + j``.

    Raises:
        ValueError: N does not fit.
    """
    rows, groups = scales.shape
    if rows % GROUP_ROWS:
        raise ValueError(f"the scales of {rows} rows are no multiple of {GROUP_ROWS} rows")
    split = _bytes(scales).T.reshape(groups, rows // GROUP_ROWS, 8, 8)
    return split.transpose(-1, -2).reshape(groups, rows).view(scales.dtype)


def restore_group_scales(ordered: Tensor) -> Tensor:
    """Inverse of `order_group_scales`: `[N, G]`."""
    groups, rows = ordered.shape
    split = _bytes(ordered).reshape(groups, rows // GROUP_ROWS, 8, 8)
    return split.transpose(-1, -2).reshape(groups, rows).T.contiguous().view(ordered.dtype)


def order_marlin_mx_scales(scales: Tensor) -> Tensor:
    """As `order_group_scales`, with the second and third of every four exchanged: Marlin unpacks e8m0 codes two by two.

    Args:
        scales: e8m0 codes of one byte, `[N, G]`; N a multiple of 64.

    Returns:
        `[G, N]`.
    """
    return _exchange(order_group_scales(scales))


def restore_marlin_mx_scales(ordered: Tensor) -> Tensor:
    """Inverse of `order_marlin_mx_scales`: `[N, G]`."""
    return restore_group_scales(_exchange(ordered))


def order_bias(bias: Tensor) -> Tensor:
    """Orders a bias as an accumulator holds its columns: within 32, pair ``i`` of every 8 are neighbours.

    Args:
        bias: any dtype, `[N]`; N a multiple of 32.

    Returns:
        `[N]`.

    Raises:
        ValueError: N does not fit.
    """
    if bias.shape[0] % BIAS_ROWS:
        raise ValueError(f"a bias of {bias.shape[0]} is no multiple of {BIAS_ROWS}")
    return bias.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(bias.shape)


def restore_bias(ordered: Tensor) -> Tensor:
    """Inverse of `order_bias`, which is its own: both of its dimensions that change places have size 4."""
    return order_bias(ordered)


def order_scales(scales: Tensor, on_sums: bool) -> Tensor:
    """Orders a matrix's real scales: those that multiply codes as `order_group_scales`, those that multiply sums, an
    accumulator's columns, as `order_bias`.

    One scale a row need not multiply sums: a matrix may be as wide as its group, and kernels do not agree on what that
    is.

    Args:
        scales: a real dtype, `[N, G]`; N a multiple of 64.
        on_sums: the kernel multiplies sums with them; G is one.

    Returns:
        `[G, N]`.

    Raises:
        ValueError: N does not fit, or sums of many groups were to be scaled.
    """
    if on_sums and scales.shape[1] > 1:
        raise ValueError(f"sums of {scales.shape[1]} groups have no common scale")
    return order_bias(scales[:, 0]).unsqueeze(0) if on_sums else order_group_scales(scales)


def restore_scales(ordered: Tensor, on_sums: bool) -> Tensor:
    """Inverse of `order_scales`: `[N, G]`."""
    return restore_bias(ordered[0]).unsqueeze(1) if on_sums else restore_group_scales(ordered)


def order_zero_points(zeros: Tensor, bits: int, marlin: bool) -> Tensor:
    """Orders and packs a matrix's zero points, as group scales even where there is one a row: they meet the codes.

    Args:
        zeros: uint8 `[N, G]`; N a multiple of 64.
        bits: 4 or 8, of one zero point in a word.
        marlin: Marlin's order in a word, in which the even ones of every 32 bits come first; else Humming's, which is
            that of the rows.

    Returns:
        int32 `[G, N * bits / 32]`, the first in a word's lowest bits.

    Raises:
        ValueError: N does not fit.
    """
    ordered = order_group_scales(zeros)
    if marlin:
        ordered = ordered.reshape(ordered.shape[0], -1, 16 // bits, 2).transpose(-1, -2).flatten(-3)
    if bits == 4:
        ordered = ordered[:, ::2] | ordered[:, 1::2] << 4
    return ordered.contiguous().view(torch.int32)


def restore_zero_points(packed: Tensor, bits: int, marlin: bool) -> Tensor:
    """Inverse of `order_zero_points`: uint8 `[N, G]`."""
    ordered = packed.contiguous().view(torch.uint8)
    if bits == 4:
        ordered = torch.stack((ordered & 15, ordered >> 4), dim=-1).flatten(-2)
    if marlin:
        ordered = ordered.reshape(ordered.shape[0], -1, 2, 16 // bits).transpose(-1, -2).flatten(-3)
    return restore_group_scales(ordered)


def pair_rows(codes: Tensor) -> Tensor:
    """Packs the 4-bit codes of neighbouring rows into bytes, the even row's in the low nibble.

    Args:
        codes: uint8 `[N, G]`; N even.

    Returns:
        uint8 `[N/2, G]`.
    """
    return codes[::2] | codes[1::2] << 4


def unpair_rows(packed: Tensor) -> Tensor:
    """Inverse of `pair_rows`."""
    return torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1)


def tile_scales(scales: Tensor) -> Tensor:
    """Orders scales in tiles of 128 rows x 4, as block-scaled tensor cores of sm_100 read them.

    Args:
        scales: of one byte each, `[N, G]`; N a multiple of 128, G of 4.

    Returns:
        The same shape: 512 bytes a tile, tiles along G first; row ``32 i + j`` of a tile at place ``16 j + 4 i``.

    Raises:
        ValueError: N or G does not fit.
    """
    rows, groups = scales.shape
    if rows % 128 or groups % 4:
        raise ValueError(f"[{rows}, {groups}] scales are no whole tiles of 128 rows x 4")
    split = _bytes(scales).reshape(rows // 128, 4, 32, groups // 4, 4)
    return split.transpose(1, 3).reshape(rows, groups).view(scales.dtype)


def untile_scales(tiled: Tensor) -> Tensor:
    """Inverse of `tile_scales`."""
    rows, groups = tiled.shape
    split = _bytes(tiled).reshape(rows // 128, groups // 4, 32, 4, 4)
    return split.transpose(1, 3).reshape(rows, groups).view(tiled.dtype)


def pack_scales(scales: Tensor) -> Tensor:
    """Packs four scales of a row into a word, rows outermost in memory last: DeepGEMM's for e8m0.

    Args:
        scales: uint8 `[N, G]`; N a multiple of 4, which 16-byte copies ask for.

    Returns:
        int32 `[ceil(G/4), N]`, the first scale in the lowest byte; missing ones are zero. Its transpose is what
        DeepGEMM takes: `[N, ceil(G/4)]` with rows next to each other.

    Raises:
        ValueError: N does not fit.
    """
    rows, groups = scales.shape
    if rows % 4:
        raise ValueError(f"the scales of {rows} rows are no multiple of 4 rows")
    padded = torch.nn.functional.pad(scales, (0, -groups % 4))
    return padded.contiguous().view(torch.int32).T.contiguous()


def unpack_scales(packed: Tensor, groups: int) -> Tensor:
    """Inverse of `pack_scales`: uint8 `[N, groups]`."""
    return packed.T.flatten().view(torch.uint8).view(packed.shape[1], -1)[:, :groups]


def _exchange(codes: Tensor) -> Tensor:
    quads = _bytes(codes).reshape(*codes.shape[:-1], -1, 2, 2)
    return quads.transpose(-1, -2).reshape(codes.shape).view(codes.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """One-byte codes as uint8: 8-bit floats know few operations."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
