"""The stored order of quantized weights: every byte comes back, and each lane's bytes are what the kernels decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_moe_oracle.layouts import nibbles, wgmma_fragments

ROWS = st.integers(1, 200)
BLOCKS = st.integers(1, 9)  # of 32 columns
SEEDS = st.integers(0, 2**31)


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("format", "bits", "options"),
    [("int4", 4, {}), ("int8", 8, {})]
    + [(*each, {"float16": float16}) for each in (("e2m1", 4), ("e4m3", 8)) for float16 in (False, True)],
    ids=str,
)
@settings(deadline=None, max_examples=20)
@given(ROWS, BLOCKS, SEEDS)
def test_codes_come_back(format: str, bits: int, options: Any, rows: int, blocks: int, seed: int) -> None:
    shuffle, unshuffle = (getattr(wgmma_fragments, f"{verb}_{format}") for verb in ("shuffle", "unshuffle"))
    codes = random_bytes(seed, rows, blocks * 4 * bits)
    stored = shuffle(codes, **options)
    assert stored.shape == wgmma_fragments.chunk_shape(rows, blocks * 32, bits)
    assert torch.equal(unshuffle(stored, rows, blocks * 32, **options), codes)
    assert shuffle(codes.to("meta"), **options).shape == stored.shape
    target = torch.full(stored.shape, 0xA5, dtype=torch.uint8)
    assert shuffle(codes, target, **options) is target
    assert torch.equal(target, stored)


@settings(deadline=None, max_examples=20)
@given(ROWS, BLOCKS, SEEDS)
def test_mx_scales_that_are_too_small_come_back_as_zero(rows: int, blocks: int, seed: int) -> None:
    scales = random_bytes(seed, rows, blocks)
    words, largest = wgmma_fragments.shuffle_mx_scales(scales, 30)
    restored = wgmma_fragments.unshuffle_mx_scales(words, largest, rows, blocks * 32, 30)
    far = scales.amax(1, keepdim=True).int() - scales.int() > 29
    assert torch.equal(restored, scales.masked_fill(far, 0))
    assert int(words.view(torch.uint8).max()) == 30


@settings(deadline=None, max_examples=20)
@given(ROWS, BLOCKS, SEEDS)
def test_mx_scales_come_back(rows: int, blocks: int, seed: int) -> None:
    scales = random_bytes(seed, rows, blocks)
    words, largest = wgmma_fragments.shuffle_mx_scales(scales)
    assert words.shape == wgmma_fragments.mx_scale_shape(rows, blocks * 32)
    assert torch.equal(wgmma_fragments.unshuffle_mx_scales(words, largest, rows, blocks * 32), scales)
    assert torch.equal(largest[:rows], scales.amax(1))


@settings(deadline=None, max_examples=20)
@given(ROWS, BLOCKS, SEEDS, st.sampled_from([torch.bfloat16, torch.float16]))
def test_group_scales_come_back(rows: int, groups: int, seed: int, dtype: torch.dtype) -> None:
    scales = torch.randn(rows, groups, generator=torch.Generator().manual_seed(seed)).to(dtype)
    words = wgmma_fragments.shuffle_group_scales(scales)
    assert words.shape == wgmma_fragments.group_scale_shape(rows, groups)
    assert torch.equal(wgmma_fragments.unshuffle_group_scales(words, rows, dtype), scales)


@pytest.mark.parametrize("rows", [16, 64, 1536])
def test_gate_and_up_rows_interleave(rows: int) -> None:
    matrix = torch.arange(rows * 3).view(rows, 3)
    stored = wgmma_fragments.pair_gate_up(matrix)
    assert torch.equal(stored, matrix.view(2, rows // 16, 8, 3).transpose(0, 1).reshape(rows, 3))
    assert torch.equal(wgmma_fragments.unpair_gate_up(stored), matrix)
    assert stored[:16, 0].tolist() == [3 * r for r in (*range(8), *range(rows // 2, rows // 2 + 8))]


def fragment(warp: int, g: int, t: int, step: int) -> list[tuple[int, int]]:
    """(row, column) of the eight elements that a lane holds of 16 columns of wgmma's register operand, in the order of
    its registers; PTX ISA, fragment of matrix A for .bf16."""
    return [
        (16 * warp + g + 8 * half, 16 * step + 2 * t + 8 * k8 + par)
        for k8 in range(2) for half in range(2) for par in range(2)
    ]  # fmt: skip


LANES = [(warp, g, t) for warp in range(4) for g in (0, 3, 7) for t in range(4)]


def rotated(word: int, right: int) -> int:
    return (word >> right | word << 32 - right) & 0xFFFFFFFF


def int4(word: int) -> list[int]:
    """Nibbles 0 and 4 of a word, masked, are one register; 1 and 5, four bits higher, the next; then 2, 6 and 3, 7."""
    return [shifted & mask for shifted in (word, word >> 8) for mask in (0x000F000F, 0x00F000F0)]


def int8(word: int) -> list[int]:
    """Bytes 1 and 3 of a word, masked, are one register, bytes 0 and 2 the next."""
    return [word >> 8 & 0x00FF00FF, word & 0x00FF00FF]


def e2m1(word: int) -> list[int]:
    """Masked with 0x81c0 as they are, four bits to the left and turned six to the right, halfwords are bfloat16 value *
    2**-126; the fourth is put together from what is left."""
    last = word << 6 & 0x80C080C0 | word >> 2 & 0x01000100
    return [word & 0x81C081C0, word << 4 & 0x81C081C0, rotated(word, 6) & 0x81C081C0, last]


def e2m1_float16(word: int) -> list[int]:
    """Upper bytes, masked, are float16 value * 2**-14, then lower bytes; signs seven bits to the left and the rest
    three to the right, the same again."""
    second = word >> 3 & 0x0E0E0E0E | word << 7 & 0x80808080
    return [each & 0x8E008E00 for each in (word, word << 8, second, second << 8)]


def e4m3(word: int) -> list[int]:
    """A mask gives one register of bfloat16 value * 2**-120, two shifts and masks the next."""
    return [word & 0x87F087F0, word << 4 & 0x80F080F0 | word >> 4 & 0x07000700]


def e4m3_float16(word: int) -> list[int]:
    """A mask gives one register of float16 value * 2**-8, two shifts to the left and masks the next."""
    return [word & 0xBF80BF80, word << 1 & 0x80008000 | word << 7 & 0x3F803F80]


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
VALUES: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    # The registers of rows g + 8 have codes that stand four bits higher.
    int4: lambda codes: nibbles.split_nibbles(codes) * torch.tensor([1, 16]).repeat_interleave(8).repeat(4)[:, None],
    int8: lambda codes: codes,
    e2m1: lambda codes: E2M1[nibbles.split_nibbles(codes).long()],
    e4m3: lambda codes: codes.view(torch.float8_e4m3fn),
}
"""The numbers that 64 rows of codes mean."""


@pytest.mark.parametrize(
    ("format", "registers", "dtype", "power"),
    [
        (int4, int4, torch.bfloat16, 133), (int8, int8, torch.bfloat16, 133), (e2m1, e2m1, torch.bfloat16, 126),
        (e2m1, e2m1_float16, torch.float16, 14), (e4m3, e4m3, torch.bfloat16, 120),
        (e4m3, e4m3_float16, torch.float16, 8),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)  # fmt: skip
def test_words_decode_to_the_operand(
    format: Any, registers: Callable[[int], list[int]], dtype: torch.dtype, power: int
) -> None:
    codes = random_bytes(1, 64, 32)
    if format is e4m3:
        codes[codes & 127 == 127] = 0  # NaN
    options = {"float16": True} if dtype == torch.float16 else {}
    stored = getattr(wgmma_fragments, f"shuffle_{format.__name__}")(codes, **options)
    words, matrix = stored.view(4, 8, 4, 4, 4).view(torch.int32)[..., 0], VALUES[format](codes).double()
    steps = matrix.shape[1] // 16
    for warp, g, t in LANES:
        for step, lane in enumerate(words[warp, g, t].view(steps, -1).tolist()):
            operand = [register for word in lane for register in registers(word & 0xFFFFFFFF)]
            found = [register >> 16 * half & 0xFFFF for register in operand for half in range(2)]
            values = torch.tensor(found).to(torch.uint16).view(dtype).double() * 2.0**power
            assert values.tolist() == [float(matrix[place]) for place in fragment(warp, g, t, step)]


def test_chunks_tile_the_matrix() -> None:
    """Chunk [i, j] is the chunk of rows 64 i and columns 64 j (or 32 j) by itself."""
    codes = random_bytes(4, 128, 96)
    for shuffle in (
        wgmma_fragments.shuffle_int4,
        wgmma_fragments.shuffle_e2m1,
        wgmma_fragments.shuffle_int8,
        wgmma_fragments.shuffle_e4m3,
    ):
        whole = shuffle(codes)
        for i in range(2):
            for j in range(3):
                assert torch.equal(whole[i, j], shuffle(codes[64 * i : 64 * i + 64, 32 * j : 32 * j + 32])[0, 0])


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="3 bits"):
        wgmma_fragments.chunk_columns(3)
    with pytest.raises(ValueError, match="float32"):
        wgmma_fragments.shuffle_group_scales(torch.zeros(64, 2))


@settings(deadline=None, max_examples=20)
@given(ROWS, BLOCKS, SEEDS)
def test_the_spread_of_scales_is_that_of_blocks_with_a_number(rows: int, blocks: int, seed: int) -> None:
    codes, scales = random_bytes(seed, rows, blocks * 16), random_bytes(seed + 1, rows, blocks)
    codes[random_bytes(seed + 2, rows, blocks).repeat_interleave(16, 1) < 128] &= 0x88  # zeros of either sign
    found = wgmma_fragments.scale_spread(codes, scales)
    for row in range(rows):
        whole = [block for block in range(blocks) if (codes[row, 16 * block : 16 * block + 16] & 0x77).any()]
        below = [int(scales[row].max()) - int(scales[row, block]) for block in whole]
        assert int(found[row]) == max(below, default=0)
