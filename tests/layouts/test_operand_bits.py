"""Bits of e2m1 and e4m3 codes in halfwords: every code comes back, and each bit is where the module says."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from tests.lib.byte_values import every_byte_value  # noqa: E402
from vllm_moe_oracle.layouts.operand_bits import gather_e2m1, gather_e4m3, spread_e2m1, spread_e4m3  # noqa: E402

E2M1 = ((15, 8, 7, 6), (11, 4, 3, 2), (5, 14, 13, 12), (9, 10, 1, 0))
"""Of each code, the bits that take its bits from the highest to the lowest; the third's sign is in the other half."""

E4M3 = ((15, 10, 9, 8, 7, 6, 5, 4), (11, 14, 13, 12, 3, 2, 1, 0))


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.arange(65536)
    return (codes >> 8).to(torch.uint8), (codes & 255).to(torch.uint8)


def test_every_e2m1_code_comes_back() -> None:
    four = every_byte_value()
    assert torch.equal(gather_e2m1(spread_e2m1(four)), four)
    assert spread_e2m1(four.to("meta")).shape == four.shape


def test_e2m1_bits_are_where_the_module_says() -> None:
    four = every_byte_value()
    words = spread_e2m1(four).view(torch.int32).flatten().to(torch.int64) & 0xFFFFFFFF
    for half, byte in itertools.product(range(2), range(4)):
        code = (four[:, byte].to(torch.int64) >> 4 * half) & 15
        for source, place in zip((3, 2, 1, 0), E2M1[byte], strict=True):
            where = 1 - half if (byte, source) == (2, 3) else half
            assert torch.equal((words >> 16 * where + place) & 1, (code >> source) & 1)


def test_every_pair_of_e4m3_codes_comes_back() -> None:
    first, second = all_pairs()
    restored = gather_e4m3(spread_e4m3(first, second))
    assert torch.equal(restored[0], first)
    assert torch.equal(restored[1], second)


def test_e4m3_bits_are_where_the_module_says() -> None:
    pair = all_pairs()
    halves = spread_e4m3(*pair).view(torch.int16).flatten().to(torch.int64) & 0xFFFF
    for codes, places in zip(pair, E4M3, strict=True):
        for source, place in zip(range(7, -1, -1), places, strict=True):
            assert torch.equal((halves >> place) & 1, (codes.to(torch.int64) >> source) & 1)
