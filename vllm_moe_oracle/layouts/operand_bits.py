"""Spreads the bits of e2m1 and e4m3 codes over halfwords, so that few instructions decode them to bfloat16 or to
float16, and back.

Each half of a 32-bit word holds its own codes, and both halves are decoded at once. With its sign at bit 15 of a half,
its lowest exponent bit at bit 7 and its mantissa below, a code reads as its value times 2**-126 (e2m1) or 2**-120
(e4m3).

* e2m1, four codes per half. Bit positions of (sign, high exponent bit, low exponent bit, mantissa):
  ``(15, 8, 7, 6)``, by a mask; ``(11, 4, 3, 2)``, after a shift to the left by 4; ``(5 of the other half, 14, 13,
  12)``, after a rotation to the right by 6; ``(9, 10, 1, 0)``, the high exponent bit after a shift to the right by 2,
  the others to the left by 6. Nine instructions for eight codes. No placement needs only a mask and three rotations
  (seven instructions); of the six placements with one more rotation, this one has the most left shifts, which
  multiplication units can execute.
* e4m3, two codes per half. Bit positions of (sign, exponent, mantissa): ``(15, 10 to 7, 6 to 4)``, by a mask; ``(11, 14
  to 12 and 3, 2 to 0)``, after a shift to the left by 4 (sign, lowest exponent bit, mantissa) and one to the
  right by 4. Five instructions for four codes.

float16 has its lowest exponent bit at bit 10. There a code reads as its value times 2**-14 (e2m1) or 2**-8 (e4m3):

* e2m1, two codes per byte: ``(7, 3, 2, 1)``, by a mask; ``(0, 6, 5, 4)``, the sign after a shift to the left by 7, the
  others to the right by 3. The upper byte of a half is where a float16 has these bits. The lower byte gets there with
  one more shift before the mask, or a permutation of bytes after it. Nine instructions for eight codes.
* e4m3, two codes per half: ``(15, 13 to 10, 9 to 7)``, by a mask; ``(14, 6 to 3, 2 to 0)``, the sign after a shift to
  the left by 1, the others by 7. Five instructions for four codes.

All operations are on bytes. Temporaries take 2.25 times the input's memory (e2m1) or once (e4m3).
"""

from __future__ import annotations

import torch
from torch import Tensor


def spread_e2m1(four: Tensor) -> Tensor:
    """Four bytes of two e2m1 codes each to the four bytes of their word, lowest first: uint8 `[..., 4]` to the same
    shape.

    Low nibbles go to the word's lower half, high ones to the upper half.
    """
    if four.is_meta:
        # Only the shape is needed; on meta tensors the operations below would take 20 ms.
        return torch.empty(four.shape, dtype=torch.uint8, device="meta")
    low = [byte & 15 for byte in four.unbind(-1)]
    halves = [_low_byte(low), _high_byte(low)]
    sign = (low[2] & 8) << 2
    del low
    high = [byte >> 4 for byte in four.unbind(-1)]
    halves[0] |= (high[2] & 8) << 2
    return torch.stack([*halves, _low_byte(high) | sign, _high_byte(high)], dim=-1)


def gather_e2m1(word: Tensor) -> Tensor:
    """Inverse of `spread_e2m1`."""
    lower, lower_high, upper, upper_high = word.unbind(-1)
    pairs = zip(_codes(lower, lower_high, upper), _codes(upper, upper_high, lower), strict=True)
    return torch.stack([low | (high << 4) for low, high in pairs], dim=-1)


def _low_byte(codes: list[Tensor]) -> Tensor:
    """The low byte of a half, without bit 5, which belongs to the other half's third code."""
    return ((codes[0] & 3) << 6) | ((codes[1] & 7) << 2) | (codes[3] & 3)


def _high_byte(codes: list[Tensor]) -> Tensor:
    first, second, third, fourth = codes
    result = ((first & 8) << 4) | ((first & 4) >> 2)
    result |= (third & 7) << 4
    result |= second & 8
    return result | (fourth & 4) | ((fourth & 8) >> 2)


def _codes(low: Tensor, high: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first = ((high >> 4) & 8) | ((high & 1) << 2) | (low >> 6)
    second = (high & 8) | ((low >> 2) & 7)
    third = ((other >> 2) & 8) | ((high >> 4) & 7)
    fourth = ((high << 2) & 8) | (high & 4) | (low & 3)
    return first, second, third, fourth


def spread_e2m1_float16(four: Tensor) -> Tensor:
    """`spread_e2m1` for float16."""
    if four.is_meta:
        return torch.empty(four.shape, dtype=torch.uint8, device="meta")
    first, second, third, fourth = four.unbind(-1)
    bytes_of_halves = ((second, fourth), (first, third))
    low = [_pair(one & 15, other & 15) for one, other in bytes_of_halves]
    return torch.stack([*low, *(_pair(one >> 4, other >> 4) for one, other in bytes_of_halves)], dim=-1)


def gather_e2m1_float16(word: Tensor) -> Tensor:
    """Inverse of `spread_e2m1_float16`."""
    lower, lower_high, upper, upper_high = word.unbind(-1)
    codes = ((lower_high, upper_high, 0), (lower, upper, 0), (lower_high, upper_high, 1), (lower, upper, 1))
    return torch.stack([_of_pair(low, second) | (_of_pair(high, second) << 4) for low, high, second in codes], dim=-1)


def _pair(first: Tensor, second: Tensor) -> Tensor:
    """The byte of two e2m1 codes for float16."""
    return ((first & 8) << 4) | ((first & 7) << 1) | (second >> 3) | ((second & 7) << 4)


def _of_pair(byte: Tensor, second: int) -> Tensor:
    """The first or the second code of `_pair`."""
    return ((byte & 1) << 3) | ((byte >> 4) & 7) if second else ((byte >> 4) & 8) | ((byte >> 1) & 7)


def spread_e4m3(first: Tensor, second: Tensor) -> Tensor:
    """Two e4m3 codes, uint8 of any shape, to the two bytes of their half, lower first: uint8 `[..., 2]`."""
    if first.is_meta:  # as above: 4 ms for the two matrices of an expert
        return torch.empty(*first.shape, 2, dtype=torch.uint8, device="meta")
    low = ((first & 15) << 4) | (second & 15)
    high = (first & 0x80) | (second & 0x70)
    high |= (first >> 4) & 7
    high |= (second >> 4) & 8
    return torch.stack([low, high], dim=-1)


def gather_e4m3(halves: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `spread_e4m3`: the first and the second code of uint8 `[..., 2]`."""
    low, high = halves.unbind(-1)
    first = (high & 0x80) | ((high & 7) << 4) | (low >> 4)
    second = ((high & 8) << 4) | (high & 0x70) | (low & 15)
    return first, second


def spread_e4m3_float16(first: Tensor, second: Tensor) -> Tensor:
    """`spread_e4m3` for float16."""
    if first.is_meta:
        return torch.empty(*first.shape, 2, dtype=torch.uint8, device="meta")
    low = ((first & 1) << 7) | (second & 127)
    high = (first & 128) | ((first & 127) >> 1) | ((second & 128) >> 1)
    return torch.stack([low, high], dim=-1)


def gather_e4m3_float16(halves: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `spread_e4m3_float16`."""
    low, high = halves.unbind(-1)
    return (high & 128) | ((high & 63) << 1) | (low >> 7), ((high & 64) << 1) | (low & 127)
