"""The orders of CUTLASS's mixed-input GEMM against the CUDA kernels that make them, walked through lane by lane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.bit_moves import keeps_every_bit
from vllm_moe_oracle.layouts import cutlass_mixed

GENERATIONS: tuple[Any, ...] = ("interleaved", "folded")
# Masks and shifts (positive: to the left) of `interleave_fp4_weights_for_sm90_mixed_gemm_kernel` since 0.6.18.
MASKS = (
    (0x00000080, 24), (0x00000070, 18), (0x00000008, 12), (0x00000007, 6),
    (0x00008000, 13), (0x00007000, 7), (0x00000800, 1), (0x00000700, -5),
    (0x00800000, 2), (0x00700000, -4), (0x00080000, -10), (0x00070000, -16),
    (0x80000000, -1), (0x10000000, 1), (0x60000000, -3), (0x08000000, -13), (0x01000000, -11), (0x06000000, -15),
)  # fmt: skip


def codes(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)


def before(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The kernel until 0.6.17, lane by lane."""
    rows, width = matrix.shape
    out = np.zeros_like(matrix)
    for block in range(rows // 2):
        for partition in range(width // 32):
            for lane in range(32):
                row = block // 8 * 16 + block % 8
                target = row + (lane // 8 % 2) * 8
                place = partition * 32 + lane // 16 * 16 + (lane % 4) * 4 + (lane % 8) // 4 * 2
                a, b = int(matrix[row, partition * 32 + lane]), int(matrix[row + 8, partition * 32 + lane])
                out[target, place] = (a & 0x0F) | (b & 0x0F) << 4
                out[target, place + 1] = (b & 0xF0) | (a & 0xF0) >> 4
    return out


def since(matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The kernel since 0.6.18, lane by lane."""
    rows, width = matrix.shape
    out = np.zeros_like(matrix)
    for block in range(rows // 2):
        for partition in range(width // 32):
            for lane in range(16):
                row = block // 8 * 16 + block % 8
                target = row + (lane // 4 % 2) * 8
                place = partition * 32 + lane // 8 * 16 + (lane % 4) * 4
                column = partition * 32 + lane // 4 * 8 + lane % 4
                four = (matrix[row, column], matrix[row + 8, column],
                        matrix[row, column + 4], matrix[row + 8, column + 4])  # fmt: skip
                raw = sum(int(byte) << 8 * index for index, byte in enumerate(four))
                word = 0
                for mask, shift in MASKS:
                    word |= (raw & mask) << shift if shift > 0 else (raw & mask) >> -shift
                for index in range(4):
                    out[target, place + index] = word >> 8 * index & 255
    return out


@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (32, 64), (48, 96)])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_codes_are_where_the_kernel_puts_them(rows: int, columns: int, generation: Any) -> None:
    matrix = codes(rows, columns)
    expected = {"interleaved": before, "folded": since}[generation](matrix.numpy())
    assert np.array_equal(cutlass_mixed.interleave_codes(matrix, generation).numpy(), expected)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from(GENERATIONS))
def test_codes_and_scales_have_a_place(rows: int, columns: int, generation: Any) -> None:
    assert keeps_every_bit(cutlass_mixed.interleave_codes, (16 * rows, 32 * columns), version=generation)
    assert keeps_every_bit(cutlass_mixed.interleave_scales, (64 * rows, 4 * columns), version=generation)


@pytest.mark.parametrize(("rows", "columns"), [(64, 4), (128, 8), (192, 4)])
def test_scales_are_where_flashinfer_puts_them(rows: int, columns: int) -> None:
    matrix = codes(rows, columns)
    interleaved = cutlass_mixed.interleave_scales(matrix, "interleaved")
    folded = cutlass_mixed.interleave_scales(matrix, "folded")
    assert interleaved.shape == (columns // 4, 4 * rows) and folded.shape == (rows // 64, columns // 4, 16, 16)
    for row in range(rows):
        for column in range(columns):
            assert interleaved[column // 4, 4 * row + column % 4] == matrix[row, column]
            place = (row // 64, column // 4, row % 16, row % 64 // 16 * 4 + column % 4)
            assert folded[place] == matrix[row, column]


@pytest.mark.parametrize(("rows", "columns"), [(8, 32), (16, 16), (24, 64)])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_codes_that_do_not_fit_are_refused(rows: int, columns: int, generation: Any) -> None:
    with pytest.raises(ValueError, match="not whole tiles"):
        cutlass_mixed.interleave_codes(codes(rows, columns), generation)


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of 4"):
        cutlass_mixed.interleave_scales(codes(64, 6), "interleaved")
    with pytest.raises(ValueError, match="not a multiple of 64"):
        cutlass_mixed.interleave_scales(codes(32, 8), "folded")
    assert cutlass_mixed.interleave_scales(codes(32, 8), "interleaved").shape == (2, 128)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_tensors_without_data_have_the_same_shapes(generation: Any) -> None:
    """A conversion is first run without data, to learn what storage a layer needs."""
    empty = torch.empty(64, 64, dtype=torch.uint8, device="meta")
    assert cutlass_mixed.interleave_codes(empty, generation).shape == (64, 64)
    real = cutlass_mixed.interleave_scales(codes(64, 8), generation)
    found = cutlass_mixed.interleave_scales(torch.empty(64, 8, dtype=torch.uint8, device="meta"), generation)
    assert (found.shape, found.dtype) == (real.shape, real.dtype)
