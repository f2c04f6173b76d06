"""Orders scales, zero points and biases for Marlin, Humming, DeepGEMM and block-scaled tensor cores.

Sources: vLLM's ``marlin_permute_scales``, ``marlin_permute_bias``, ``marlin_zero_points`` and
``mxfp8_marlin_process_scales``; the package humming-kernels, ``transform_humming_weight_scale`` and
``transform_humming_zero_point``; NVIDIA's PTX ISA, scale factors of ``tcgen05.mma``, for tiles of
128 rows x 4 scales; DeepGEMM, ``get_mn_major_tma_aligned_packed_ue8m0_tensor``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .nibbles import join_nibbles

GROUP_ROWS = 64
BIAS_ROWS = 32


def permute_group_scales(scales: Tensor) -> Tensor:
    """Orders group scales for `mma` fragments: within 64 rows, rows with the same remainder modulo 8 become neighbors.

    Args:
        scales: any dtype, `[N, G]`; N a multiple of 64.

    Returns:
        `[G, N]`: row ``8 j + i`` of every 64 at position ``8 i + j``.

    Raises:
        ValueError: N is not such a multiple.
    """
    rows, groups = scales.shape
    if rows % GROUP_ROWS:
        raise ValueError(f"the scales of {rows} rows are not a multiple of {GROUP_ROWS} rows")
    split = _as_bytes(scales).T.reshape(groups, rows // GROUP_ROWS, 8, 8)
    return split.transpose(-1, -2).reshape(groups, rows).view(scales.dtype)


def permute_marlin_mx_scales(scales: Tensor) -> Tensor:
    """`permute_group_scales`, then the second and third of every four swapped: Marlin unpacks e8m0 codes in pairs.

    Args:
        scales: e8m0, one-byte dtype, `[N, G]`; N a multiple of 64.

    Returns:
        `[G, N]`.
    """
    ordered = permute_group_scales(scales)
    quads = _as_bytes(ordered).reshape(*ordered.shape[:-1], -1, 2, 2)
    return quads.transpose(-1, -2).reshape(ordered.shape).view(ordered.dtype)


def permute_bias(bias: Tensor) -> Tensor:
    """Orders a bias like the columns of an `mma` accumulator: within 32, the i-th pairs of every 8 become neighbors.

    Args:
        bias: any dtype, `[N]`; N a multiple of 32.

    Returns:
        `[N]`.

    Raises:
        ValueError: N is not such a multiple.
    """
    if bias.shape[0] % BIAS_ROWS:
        raise ValueError(f"a bias of {bias.shape[0]} is not a multiple of {BIAS_ROWS}")
    return bias.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(bias.shape)


def permute_scales(scales: Tensor, on_accumulators: bool) -> Tensor:
    """Orders floating-point scales: with `permute_group_scales` if the kernel multiplies weights by them, with
    `permute_bias` if it multiplies accumulators.

    One scale per row does not imply scaled accumulators: kernels treat a group as wide as the matrix differently.

    Args:
        scales: floating point, `[N, G]`; N a multiple of 64.
        on_accumulators: the kernel multiplies accumulators by them; G is 1.

    Returns:
        `[G, N]`.

    Raises:
        ValueError: N is not a multiple of 64, or accumulators would have several scales.
    """
    if on_accumulators and scales.shape[1] > 1:
        raise ValueError(f"accumulators over {scales.shape[1]} groups have no common scale")
    return permute_bias(scales[:, 0]).unsqueeze(0) if on_accumulators else permute_group_scales(scales)


def pack_zero_points(zeros: Tensor, bits: int, marlin: bool) -> Tensor:
    """Orders zero points like group scales and packs them. One zero point per row is ordered so too, since kernels
    subtract it from codes.

    Args:
        zeros: uint8 `[N, G]`; N a multiple of 64.
        bits: 4 or 8, the width of a packed zero point.
        marlin: use Marlin's order within a word, where those with an even index come first; otherwise Humming's, the
            order of the rows.

    Returns:
        int32 `[G, N * bits / 32]`, the first in a word's lowest bits.

    Raises:
        ValueError: N is not such a multiple.
    """
    ordered = permute_group_scales(zeros)
    if marlin:
        ordered = ordered.reshape(ordered.shape[0], -1, 16 // bits, 2).transpose(-1, -2).flatten(-3)
    if bits == 4:
        ordered = join_nibbles(ordered)
    return ordered.contiguous().view(torch.int32)


def pack_adjacent_rows(codes: Tensor) -> Tensor:
    """Packs the 4-bit codes of neighboring rows into bytes, the even row in the low nibble.

    Args:
        codes: uint8 `[N, G]`; N even.

    Returns:
        uint8 `[N/2, G]`.
    """
    return codes[::2] | codes[1::2] << 4


def swizzle_scales(scales: Tensor) -> Tensor:
    """Swizzles scales in tiles of 128 rows x 4, as block-scaled tensor cores of sm_100 read them.

    Args:
        scales: one-byte dtype, `[N, G]`; N a multiple of 128, G of 4.

    Returns:
        The same shape: 512 bytes per tile, tiles along G first; row ``32 i + j`` of a tile at offset ``16 j + 4 i``.

    Raises:
        ValueError: N or G is not such a multiple.
    """
    rows, groups = scales.shape
    if rows % 128 or groups % 4:
        raise ValueError(f"[{rows}, {groups}] scales are not whole tiles of 128 rows x 4")
    split = _as_bytes(scales).reshape(rows // 128, 4, 32, groups // 4, 4)
    return split.transpose(1, 3).reshape(rows, groups).view(scales.dtype)


def pack_ue8m0_scales(scales: Tensor) -> Tensor:
    """Packs four e8m0 scales of a row into a word, rows contiguous, as DeepGEMM reads them.

    Args:
        scales: uint8 `[N, G]`; N a multiple of 4, required by 16-byte TMA copies.

    Returns:
        int32 `[ceil(G/4), N]`, the first scale in the lowest byte, padded with zeros. DeepGEMM takes the transpose,
        `[N, ceil(G/4)]` with contiguous columns.

    Raises:
        ValueError: N is not such a multiple.
    """
    rows, groups = scales.shape
    if rows % 4:
        raise ValueError(f"the scales of {rows} rows are not a multiple of 4 rows")
    padded = torch.nn.functional.pad(scales, (0, -groups % 4))
    return padded.contiguous().view(torch.int32).T.contiguous()


def _as_bytes(tensor: Tensor) -> Tensor:
    """One-byte dtypes as uint8: torch has few operations for 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
