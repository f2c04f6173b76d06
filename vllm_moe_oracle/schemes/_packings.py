"""How tools and vLLM pack integer weight codes, each way in and out of the canonical form, for one expert at a time.

Sources: AutoGPTQ `qlinear_cuda_old.py` and GPTQModel `nn_modules/qlinear` (int32 along K, qzeros along N), GPTQModel
`utils/model.py` (conversion between the two storages of zero points), AutoAWQ `awq/utils/packing_utils.py` (order in a
word), vLLM `moe_wna16.py` (bytes), compressed-tensors `compressors/pack_quantized` and `naive_quantized`.

In every packed format the first code is in a word's lowest bits, so that on a little-endian machine the bytes of a word
are in the order of its codes: packing along K needs no arithmetic to become canonical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["k_first", "n_first"]
"""Order of a matrix's dimensions. ``n_first`` is `[N, K]`, as torch's Linear; ``k_first`` is each tensor transposed."""

AWQ_ORDERS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""AutoAWQ: the i-th code of a word, from its lowest bits, belongs to this column of the word. AutoAWQ itself writes
4 bit only; the order of 8 bit is vLLM's ``awq_pack``."""


@dataclass(frozen=True, slots=True)
class Packing:
    """The tensors of one matrix `[N, K]` in a packing. Zero points are packed along N wherever they are packed.

    Attributes:
        weight: the parameter's name after ``w13_`` or ``w2_``, of the codes.
        scale: of the scales.
        zero_point: of the zero points.
        group_index: of the group of each input feature (GPTQ's g_idx).
        word: dtype of codes and zero points.
        along: the dimension along which codes lie in one word.
        layouts: orders of dimensions in which the tensors may come.
        interleaved: AutoAWQ's order in a word.
        off_by_one: zero points are stored less one.
        signed: one code a word, in two's complement.
    """

    weight: str
    scale: str
    zero_point: str
    group_index: str
    word: torch.dtype
    along: Literal["K", "N"]
    layouts: tuple[Layout, ...]
    interleaved: bool = False
    off_by_one: bool = False
    signed: bool = False

    def per_word(self, bits: int) -> int:
        """Codes in one word."""
        return 1 if self.signed else self.word.itemsize * 8 // bits


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


def raw_shapes(
    packing: Packing, layout: Layout, bits: int, rows: int, columns: int, groups: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of one expert's tensors of a matrix `[rows, columns]` with `groups` scales a row, by canonical suffix."""
    words = packing.per_word(bits)
    codes = (rows, columns // words) if packing.along == "K" else (rows // words, columns)
    found = {"": codes, "_scale": (rows, groups), "_zero_point": (rows // words, groups)}
    if layout == "k_first":
        found = {name: shape[::-1] for name, shape in found.items()}
    return found | {"_order": (columns,)}


# --- Codes in bytes ---------------------------------------------------------------------------------------------------


def split_bytes(packed: Tensor, bits: int) -> Tensor:
    """uint8 `[..., K * bits / 8]` to one code a byte, `[..., K]`; the low nibble is first."""
    if bits == 8:
        return packed
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def join_bytes(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `split_bytes`."""
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def dense(tensor: Tensor) -> Tensor:
    """Contiguous, with the strides that a new tensor of its shape has; the same memory where that is so already."""
    # Through one dimension: a matrix of one row or one column counts as contiguous whatever its strides are, and then
    # cannot be viewed as another dtype.
    return tensor.contiguous().flatten().view(tensor.shape)


def _as(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of a matrix, row after row, as another dtype; columns become more or fewer."""
    return dense(matrix).view(dtype)


def _split_words(words: Tensor, bits: int, interleaved: bool) -> Tensor:
    """`[A, B]` words to codes uint8 `[A, B * codes per word]`."""
    codes = split_bytes(_as(words, torch.uint8), bits)
    if not interleaved:
        return codes
    order = AWQ_ORDERS[bits]
    places = torch.tensor([order.index(column) for column in range(len(order))], device=codes.device)
    return codes.reshape(len(codes), -1, len(order)).index_select(-1, places).flatten(-2)


def _join_words(codes: Tensor, bits: int, packing: Packing) -> Tensor:
    """Inverse of `_split_words`; words of the packing's dtype."""
    if packing.interleaved:
        order = torch.tensor(AWQ_ORDERS[bits], device=codes.device)
        codes = codes.reshape(len(codes), -1, len(order)).index_select(-1, order).flatten(-2)
    return _as(join_bytes(codes, bits), packing.word)


def _ones(bits: int) -> int:
    """An int32 with the number one in the place of each of its codes."""
    return {4: 0x11111111, 8: 0x01010101}[bits]


def every_code(code: int, bits: int, packing: Packing) -> int:
    """The word of a packing, as its dtype reads it, all of whose codes are the same."""
    if packing.signed:
        return code
    size = packing.word.itemsize
    unsigned = sum(code << place for place in range(0, 8 * size, bits))
    return int.from_bytes(unsigned.to_bytes(size, "little"), "little", signed=packing.word.is_signed)


# --- One expert -------------------------------------------------------------------------------------------------------


def codes_to_canonical(raw: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Packed codes of a matrix to uint8 `[N, K * bits / 8]`; may share memory with `raw`."""
    if packing.signed:
        matrix = raw if layout == "n_first" else raw.T
        return dense(join_bytes(_offset_binary(matrix, bits), bits))
    if packing.along == "K":
        return _as(raw if layout == "n_first" else raw.T, torch.uint8)
    by_columns = _split_words(raw if layout == "k_first" else raw.T, bits, packing.interleaved)
    return dense(join_bytes(by_columns.T, bits))


def codes_from_canonical(codes: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Inverse of `codes_to_canonical`."""
    if packing.signed:
        matrix = _twos_complement(split_bytes(codes, bits), bits)
        return dense(matrix if layout == "n_first" else matrix.T)
    if packing.along == "K":
        words = _as(codes, packing.word)
        return dense(words if layout == "n_first" else words.T)
    words = _join_words(split_bytes(codes, bits).T, bits, packing)
    return dense(words if layout == "k_first" else words.T)


def zeros_to_canonical(raw: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Packed zero points of a matrix to uint8 `[N, G]`."""
    if packing.signed:
        return dense(_offset_binary(raw if layout == "n_first" else raw.T, bits))
    words = raw if layout == "k_first" else raw.T
    if packing.off_by_one:
        # The word as one number, carries included: the inverse of how tools subtract. A zero point of 0 is stored as
        # all ones and borrows from its neighbour, which adding one to each code by itself would not give back.
        words = words + _ones(bits)
    return dense(_split_words(words, bits, packing.interleaved).T)


def zeros_from_canonical(zeros: Tensor, packing: Packing, layout: Layout, bits: int) -> Tensor:
    """Inverse of `zeros_to_canonical`."""
    if packing.signed:
        matrix = _twos_complement(zeros, bits)
        return dense(matrix if layout == "n_first" else matrix.T)
    words = _join_words(zeros.T, bits, packing)
    if packing.off_by_one:
        words = words - _ones(bits)
    return dense(words if layout == "k_first" else words.T)


def _offset_binary(values: Tensor, bits: int) -> Tensor:
    """int8 in two's complement to unsigned codes that are 2**(bits-1) larger."""
    return values.view(torch.uint8) ^ 0x80 if bits == 8 else (values + (1 << bits - 1)).view(torch.uint8)


def _twos_complement(codes: Tensor, bits: int) -> Tensor:
    """Inverse of `_offset_binary`."""
    return (codes ^ 0x80).view(torch.int8) if bits == 8 else codes.view(torch.int8) - (1 << bits - 1)
