"""Bits of e2m1 codes in halfwords: each where bfloat16 has it, after a shift that clears the rest by a mask."""

from __future__ import annotations

import itertools

import torch

from tests.lib.byte_values import every_byte_value
from vllm_moe_oracle.layouts.triton_kernels_bits import spread_bits
from vllm_moe_oracle.schemes.mxfp4 import dequantize

PLACES = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
MASK = 0b1000000111000000


def test_bits_are_where_the_module_says() -> None:
    four = every_byte_value()
    words = spread_bits(four).view(torch.int32).flatten().to(torch.int64) & 0xFFFFFFFF
    for half, byte in itertools.product(range(2), range(4)):
        code = (four[:, byte].to(torch.int64) >> 4 * half) & 15
        for source, place in zip((3, 2, 1, 0), PLACES[byte], strict=True):
            assert torch.equal((words >> 16 * half + place) & 1, (code >> source) & 1)


def test_a_shift_and_a_mask_leave_a_bfloat16() -> None:
    four = every_byte_value()
    halves = spread_bits(four).view(torch.int16).to(torch.int32) & 0xFFFF  # [.., 2]
    fourth = ((halves << 1) & 0x8000) | ((halves >> 3) & 0x0180) | ((halves >> 7) & 0x0040)
    shifted = [halves & MASK, (halves << 3) & MASK, (halves << 6) & MASK, fourth]
    for byte, bits in enumerate(shifted):
        # bfloat16's exponent is biased by 127, e2m1's by 1: the value comes out times 2**-126.
        values = bits.to(torch.int16).view(torch.bfloat16).float() * 2.0**126
        codes = torch.nn.functional.pad(four[:, byte : byte + 1], (0, 15))
        one = torch.full((four.shape[0], 1), 127, dtype=torch.uint8)
        assert torch.equal(values, dequantize(codes, one)[:, :2])
