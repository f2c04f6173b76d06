"""The stored order of quantized weights: every byte comes back, and each lane's bytes are what the kernels decode."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from vllm_moe_oracle.layouts import nibbles, wgmma_fragments  # noqa: E402

ROWS = st.integers(1, 200)
BLOCKS = st.integers(1, 9)  # of 32 columns
SEEDS = st.integers(0, 2**31)


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("format", "bits"), [("int4", 4), ("e2m1", 4), ("int8", 8), ("e4m3", 8)])
@settings(deadline=None, max_examples=20)
@given(ROWS, BLOCKS, SEEDS)
def test_codes_come_back(format: str, bits: int, rows: int, blocks: int, seed: int) -> None:
    shuffle, unshuffle = (getattr(wgmma_fragments, f"{verb}_{format}") for verb in ("shuffle", "unshuffle"))
    codes = random_bytes(seed, rows, blocks * 4 * bits)
    stored = shuffle(codes)
    assert stored.shape == wgmma_fragments.chunk_shape(rows, blocks * 32, bits)
    assert torch.equal(unshuffle(stored, rows, blocks * 32), codes)
    target = torch.full(stored.shape, 0xA5, dtype=torch.uint8)
    assert shuffle(codes, target) is target
    assert torch.equal(target, stored)


@pytest.mark.parametrize(("format", "bits"), [("e2m1", 4), ("e4m3", 8)])
@settings(deadline=None, max_examples=20)
@given(ROWS, BLOCKS, SEEDS)
def test_codes_for_float16_come_back(format: str, bits: int, rows: int, blocks: int, seed: int) -> None:
    shuffle, unshuffle = (getattr(wgmma_fragments, f"{verb}_{format}") for verb in ("shuffle", "unshuffle"))
    codes = random_bytes(seed, rows, blocks * 4 * bits)
    stored = shuffle(codes, float16=True)
    assert stored.shape == wgmma_fragments.chunk_shape(rows, blocks * 32, bits)
    assert torch.equal(unshuffle(stored, rows, blocks * 32, float16=True), codes)
    assert shuffle(codes.to("meta"), float16=True).shape == stored.shape


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


def bfloat16(bits: int) -> float:
    signed = bits & 0xFFFF
    return float(torch.tensor(signed - 65536 if signed > 32767 else signed).short().view(torch.bfloat16))


def rotated(word: int, right: int) -> int:
    return (word >> right | word << 32 - right) & 0xFFFFFFFF


def test_int4_words_decode_to_the_operand() -> None:
    """Nibbles 0 and 4 of a word, masked, are one register; 1 and 5, four bits higher, the next; then 2, 6 and 3, 7."""
    codes = random_bytes(1, 64, 32)
    matrix = nibbles.split_nibbles(codes)
    words = wgmma_fragments.shuffle_int4(codes).view(4, 8, 4, 4, 4).view(torch.int32)[..., 0]
    for warp, g, t in LANES:
        for step in range(4):
            word = int(words[warp, g, t, step]) & 0xFFFFFFFF
            registers = [shifted & mask for shifted in (word, word >> 8) for mask in (0x000F000F, 0x00F000F0)]
            values = [bfloat16(register >> 16 * half) * 2.0**133 for register in registers for half in range(2)]
            # Every other register has rows g + 8.
            places = fragment(warp, g, t, step)
            assert values == [int(matrix[row, column]) * (16 if row % 16 >= 8 else 1) for row, column in places]


def test_e2m1_words_decode_to_the_operand() -> None:
    """Masked with 0x81c0 as they are, four bits to the left and turned six to the right, halfwords are bfloat16 value *
    2**-126; the fourth is put together from what is left."""
    codes = random_bytes(2, 64, 32)
    matrix = nibbles.split_nibbles(codes)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    words = wgmma_fragments.shuffle_e2m1(codes).view(4, 8, 4, 4, 4).view(torch.int32)[..., 0]
    for warp, g, t in LANES:
        for step in range(4):
            word = int(words[warp, g, t, step]) & 0xFFFFFFFF
            last = word << 6 & 0x80C080C0 | word >> 2 & 0x01000100
            registers = [word & 0x81C081C0, word << 4 & 0x81C081C0, rotated(word, 6) & 0x81C081C0, last]
            values = [bfloat16(register >> 16 * half) * 2.0**126 for register in registers for half in range(2)]
            assert values == [float(table[int(matrix[place])]) for place in fragment(warp, g, t, step)]


def float16(bits: int) -> float:
    signed = bits & 0xFFFF
    return float(torch.tensor(signed - 65536 if signed > 32767 else signed).short().view(torch.float16))


def test_e2m1_words_for_float16_decode_to_the_operand() -> None:
    """Upper bytes, masked, are float16 value * 2**-14, then lower bytes; signs seven bits to the left and the rest
    three to the right, the same again."""
    codes = random_bytes(2, 64, 32)
    matrix = nibbles.split_nibbles(codes)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    words = wgmma_fragments.shuffle_e2m1(codes, float16=True).view(4, 8, 4, 4, 4).view(torch.int32)[..., 0]
    for warp, g, t in LANES:
        for step in range(4):
            word = int(words[warp, g, t, step]) & 0xFFFFFFFF
            second = word >> 3 & 0x0E0E0E0E | word << 7 & 0x80808080
            registers = [each & 0x8E008E00 for each in (word, word << 8, second, second << 8)]
            values = [float16(register >> 16 * half) * 2.0**14 for register in registers for half in range(2)]
            assert values == [float(table[int(matrix[place])]) for place in fragment(warp, g, t, step)]


def test_e4m3_words_for_float16_decode_to_the_operand() -> None:
    """A mask gives one register of float16 value * 2**-8, two shifts to the left and masks the next."""
    codes = random_bytes(5, 64, 32)
    codes[codes & 127 == 127] = 0  # NaN
    words = wgmma_fragments.shuffle_e4m3(codes, float16=True).view(4, 8, 4, 4, 4).view(torch.int32)[..., 0]
    expected = codes.view(torch.float8_e4m3fn).float()
    for warp, g, t in LANES:
        for step in range(2):
            values = []
            for k8 in range(2):
                word = int(words[warp, g, t, 2 * step + k8]) & 0xFFFFFFFF
                for register in (word & 0xBF80BF80, word << 1 & 0x80008000 | word << 7 & 0x3F803F80):
                    values += [float16(register >> 16 * half) * 2.0**8 for half in range(2)]
            assert values == [float(expected[place]) for place in fragment(warp, g, t, step)]


def test_int8_words_decode_to_the_operand() -> None:
    """Bytes 1 and 3 of a word, masked, are one register, bytes 0 and 2 the next."""
    codes = random_bytes(3, 64, 32)
    words = wgmma_fragments.shuffle_int8(codes).view(4, 8, 4, 4, 4).view(torch.int32)[..., 0]
    for warp, g, t in LANES:
        for step in range(2):
            values = []
            for k8 in range(2):
                word = int(words[warp, g, t, 2 * step + k8]) & 0xFFFFFFFF
                for register in (word >> 8 & 0x00FF00FF, word & 0x00FF00FF):
                    values += [bfloat16(register >> 16 * half) * 2.0**133 for half in range(2)]
            assert values == [int(codes[place]) for place in fragment(warp, g, t, step)]


def test_e4m3_words_decode_to_the_operand() -> None:
    """A mask gives one register of bfloat16 value * 2**-120, two shifts and masks the next."""
    codes = random_bytes(5, 64, 32)
    codes[codes & 127 == 127] = 0  # NaN
    words = wgmma_fragments.shuffle_e4m3(codes).view(4, 8, 4, 4, 4).view(torch.int32)[..., 0]
    for warp, g, t in LANES:
        for step in range(2):
            values = []
            for k8 in range(2):
                word = int(words[warp, g, t, 2 * step + k8]) & 0xFFFFFFFF
                for register in (word & 0x87F087F0, word << 4 & 0x80F080F0 | word >> 4 & 0x07000700):
                    values += [bfloat16(register >> 16 * half) * 2.0**120 for half in range(2)]
            expected = codes.view(torch.float8_e4m3fn).float()
            assert values == [float(expected[place]) for place in fragment(warp, g, t, step)]


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
