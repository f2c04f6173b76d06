"""How checkpoints and vLLM pack integer weight codes: conversion of one expert to the canonical form, and back.

Sources: AutoGPTQ `qlinear_cuda_old.py` and GPTQModel `nn_modules/qlinear` (int32 along K, qzeros along N), GPTQModel
`utils/model.py` (conversion between its two formats of zero points), AutoAWQ `awq/utils/packing_utils.py` (order within
a word), vLLM `moe_wna16.py` (bytes), compressed-tensors `compressors/pack_quantized` and `naive_quantized`.

Every packed format has the first code in a word's lowest bits, so on a little-endian machine the bytes of a word are in
the order of its codes: codes packed along K are canonical after a view as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..layouts.nibbles import join_nibbles, split_nibbles

Layout = Literal["k_first", "n_first"]
"""Order of a matrix's dimensions: ``n_first`` is `[N, K]`, as in `torch.nn.Linear`; ``k_first`` is the transpose."""

AWQ_PACK_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""AutoAWQ: column of the i-th code of a word, counted from the lowest bits, by code width. AutoAWQ writes 4-bit codes
only; the order of 8-bit codes is that of vLLM's ``awq_pack``."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a packing stores one matrix `[N, K]`. Packed zero points are always packed along N.

    Attributes:
        weight: parameter name of the codes, after ``w13_`` or ``w2_``.
        scale: parameter name of the scales.
        zero_point: parameter name of the zero points.
        group_index: parameter name of each input feature's group (GPTQ's ``g_idx``).
        word_dtype: dtype of codes and zero points.
        packed_dim: the dimension along which a word holds several codes.
        layouts: possible orders of dimensions; checkpoints use the last one.
        interleaved: codes are in AutoAWQ's order within a word.
        off_by_one: zero points are stored minus one.
        signed: one code per word, in two's complement.
    """

    weight: str
    scale: str
    zero_point: str
    group_index: str
    word_dtype: torch.dtype
    packed_dim: Literal["K", "N"]
    layouts: tuple[Layout, ...]
    interleaved: bool = False
    off_by_one: bool = False
    signed: bool = False

    def codes_per_word(self, bits: int) -> int:
        """Number of codes in one word."""
        return 1 if self.signed else self.word_dtype.itemsize * 8 // bits


_GPTQ = ("qweight", "scales", "qzeros", "g_idx")

PACKINGS: dict[str, Packing] = {
    "gptq": Packing(*_GPTQ, torch.int32, "K", ("k_first",), off_by_one=True),
    "gptq_v2": Packing(*_GPTQ, torch.int32, "K", ("k_first",)),
    "awq": Packing(*_GPTQ, torch.int32, "N", ("k_first",), interleaved=True),
    "moe_wna16": Packing(*_GPTQ, torch.uint8, "K", ("n_first",)),
    "compressed-tensors": Packing(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", torch.int32, "K", ("k_first", "n_first")
    ),
    "compressed-tensors-int": Packing(
        "weight", "weight_scale", "weight_zero_point", "weight_g_idx", torch.int8, "K", ("k_first", "n_first"),
        signed=True,
    ),
}  # fmt: skip


def packed_shapes(
    packing: Packing, layout: Layout, bits: int, rows: int, columns: int, groups: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of one expert's tensors for a matrix `[rows, columns]` with `groups` scales per row, by suffix."""
    per_word = packing.codes_per_word(bits)
    codes = (rows, columns // per_word) if packing.packed_dim == "K" else (rows // per_word, columns)
    shapes = {"": codes, "_scale": (rows, groups), "_zero_point": (rows // per_word, groups)}
    if layout == "k_first":
        shapes = {name: shape[::-1] for name, shape in shapes.items()}
    return shapes | {"_order": (columns,)}


# --- Codes in bytes ---------------------------------------------------------------------------------------------------


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """uint8 `[..., K * bits / 8]`, low nibble first, to one code per byte: uint8 `[..., K]`."""
    return packed if bits == 8 else split_nibbles(packed)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `unpack_codes`."""
    return codes if bits == 8 else join_nibbles(codes)


def as_contiguous(tensor: Tensor) -> Tensor:
    """The tensor with the strides of a newly allocated one; shares memory if it has them already."""
    # Flattened first: torch counts a matrix of one row or column as contiguous whatever its strides are, and such a
    # matrix cannot be viewed as another dtype.
    return tensor.contiguous().flatten().view(tensor.shape)


def _view_as(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix viewed as another dtype in row-major order; the number of columns changes with the item size."""
    return as_contiguous(matrix).view(dtype)


def _unpack_words(words: Tensor, bits: int, interleaved: bool) -> Tensor:
    """`[A, B]` words to codes uint8 `[A, B * codes per word]`."""
    codes = unpack_codes(_view_as(words, torch.uint8), bits)
    if not interleaved:
        return codes
    order = AWQ_PACK_ORDER[bits]
    columns = torch.tensor([order.index(column) for column in range(len(order))], device=codes.device)
    return codes.reshape(len(codes), -1, len(order)).index_select(-1, columns).flatten(-2)


def _pack_words(codes: Tensor, bits: int, packing: Packing) -> Tensor:
    """Inverse of `_unpack_words`; words of the packing's dtype."""
    if packing.interleaved:
        order = torch.tensor(AWQ_PACK_ORDER[bits], device=codes.device)
        codes = codes.reshape(len(codes), -1, len(order)).index_select(-1, order).flatten(-2)
    return _view_as(pack_codes(codes, bits), packing.word_dtype)


def _word_of_ones(bits: int) -> int:
    """The int32 word all of whose codes are 1."""
    return {4: 0x11111111, 8: 0x01010101}[bits]


def filled_word(code: int, bits: int, packing: Packing) -> int:
    """The word of a packing, as a value of its dtype, all of whose codes are `code`."""
    if packing.signed:
        return code
    size = packing.word_dtype.itemsize
    unsigned = sum(code << shift for shift in range(0, 8 * size, bits))
    return int.from_bytes(unsigned.to_bytes(size, "little"), "little", signed=packing.word_dtype.is_signed)


# --- One expert -------------------------------------------------------------------------------------------------------


def codes_to_canonical(raw: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Packed codes of a matrix to uint8 `[N, K * bits / 8]`; may share memory with `raw`."""
    if packing.signed:
        matrix = raw if layout == "n_first" else raw.T
        return as_contiguous(pack_codes(_offset_binary(matrix, bits), bits))
    if packing.packed_dim == "K":
        return _view_as(raw if layout == "n_first" else raw.T, torch.uint8)
    by_columns = _unpack_words(raw if layout == "k_first" else raw.T, bits, packing.interleaved)
    return as_contiguous(pack_codes(by_columns.T, bits))


def codes_from_canonical(codes: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Inverse of `codes_to_canonical`."""
    if packing.signed:
        matrix = _twos_complement(unpack_codes(codes, bits), bits)
        return as_contiguous(matrix if layout == "n_first" else matrix.T)
    if packing.packed_dim == "K":
        words = _view_as(codes, packing.word_dtype)
        return as_contiguous(words if layout == "n_first" else words.T)
    words = _pack_words(unpack_codes(codes, bits).T, bits, packing)
    return as_contiguous(words if layout == "k_first" else words.T)


def zero_points_to_canonical(raw: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Packed zero points of a matrix to uint8 `[N, G]`."""
    if packing.signed:
        return as_contiguous(_offset_binary(raw if layout == "n_first" else raw.T, bits))
    words = raw if layout == "k_first" else raw.T
    if packing.off_by_one:
        # Added to the whole word, with carries, because tools subtract from the whole word: a zero point of 0 is stored
        # as all ones and borrows from its neighbor. Adding to each code separately would lose that borrow.
        words = words + _word_of_ones(bits)
    return as_contiguous(_unpack_words(words, bits, packing.interleaved).T)


def zero_points_from_canonical(zeros: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Inverse of `zero_points_to_canonical`."""
    if packing.signed:
        matrix = _twos_complement(zeros, bits)
        return as_contiguous(matrix if layout == "n_first" else matrix.T)
    words = _pack_words(zeros.T, bits, packing)
    if packing.off_by_one:
        words = words - _word_of_ones(bits)
    return as_contiguous(words if layout == "k_first" else words.T)


def _offset_binary(values: Tensor, bits: int) -> Tensor:
    """int8 in two's complement to unsigned codes that are 2**(bits-1) larger."""
    return values.view(torch.uint8) ^ 0x80 if bits == 8 else (values + (1 << bits - 1)).view(torch.uint8)


def _twos_complement(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `_offset_binary`."""
    return (codes ^ 0x80).view(torch.int8) if bits == 8 else codes.view(torch.int8) - (1 << bits - 1)
