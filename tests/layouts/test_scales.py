"""Orders of scales, biases and rows for kernels of others: none is lost, and vLLM's functions give the same bytes."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.bit_moves import keeps_every_bit
from vllm_moe_oracle.layouts import gate_up, trtllm
from vllm_moe_oracle.layouts import scales as orders

UTILS = "vllm.model_executor.layers.quantization.utils"


def codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@settings(max_examples=20)
@given(rows=st.integers(1, 6), groups=st.integers(1, 11))
def test_group_scales_have_a_place(rows: int, groups: int) -> None:
    shape = (64 * rows, groups)
    assert keeps_every_bit(orders.permute_group_scales, shape)
    assert keeps_every_bit(orders.permute_group_scales, shape, torch.bfloat16)
    assert keeps_every_bit(orders.permute_marlin_mx_scales, shape)
    assert keeps_every_bit(orders.permute_scales, shape, torch.bfloat16, on_accumulators=groups == 1)


@settings(max_examples=20)
@given(rows=st.integers(1, 4), groups=st.integers(1, 5))
def test_zero_points_have_a_place(rows: int, groups: int) -> None:
    original = codes(64 * rows, groups)
    for marlin, bits in itertools.product((True, False), (4, 8)):
        packed = orders.pack_zero_points(original & (1 << bits) - 1, bits, marlin)
        assert packed.dtype == torch.int32 and packed.shape == (groups, 2 * bits * rows) and packed.is_contiguous()
        assert keeps_every_bit(orders.pack_zero_points, original.shape, most=1 << bits, bits=bits, marlin=marlin)
    assert keeps_every_bit(orders.pack_adjacent_rows, original.shape, most=16)


@settings(max_examples=20)
@given(rows=st.integers(1, 40), groups=st.integers(1, 13))
def test_packed_scales_have_a_place(rows: int, groups: int) -> None:
    packed = orders.pack_ue8m0_scales(codes(4 * rows, groups))
    assert packed.shape == (-(-groups // 4), 4 * rows) and packed.dtype == torch.int32 and packed.is_contiguous()
    assert keeps_every_bit(orders.pack_ue8m0_scales, (4 * rows, groups))


@settings(max_examples=20)
@given(blocks=st.integers(1, 5), columns=st.integers(1, 7))
def test_tiled_scales_rows_and_biases_have_a_place(blocks: int, columns: int) -> None:
    assert keeps_every_bit(orders.swizzle_scales, (128 * blocks, 4 * columns))
    assert keeps_every_bit(orders.permute_bias, (32 * blocks,), torch.bfloat16)
    assert keeps_every_bit(trtllm.shuffle_rows, (32 * blocks, columns))
    assert keeps_every_bit(trtllm.to_block_layout, (32 * blocks, columns), width=columns)


@given(rows=st.integers(1, 80), columns=st.integers(1, 7))
def test_gate_and_up_rows_come_back(rows: int, columns: int) -> None:
    original = codes(2 * rows, columns)
    assert torch.equal(gate_up.deinterleave_gate_up(gate_up.interleave_gate_up(original)), original)
    assert torch.equal(gate_up.swap_gate_up(gate_up.swap_gate_up(original)), original)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_for_humming_stand_in_the_order_of_its_scales(bits: int) -> None:
    """Row ``8 j + i`` of every 64 at position ``8 i + j``, the first in a word's lowest bits."""
    zeros = codes(128, 3) & (1 << bits) - 1
    words = orders.pack_zero_points(zeros, bits, marlin=False).to(torch.int64) & 0xFFFFFFFF
    for row, group in itertools.product(range(128), range(3)):
        place = row // 64 * 64 + row % 8 * 8 + row % 64 // 8
        word, first = divmod(place * bits, 32)
        assert words[group, word] >> first & (1 << bits) - 1 == zeros[row, group]


def test_rows_move_as_the_kernels_documentation_says() -> None:
    numbers = torch.arange(64)
    assert gate_up.interleave_gate_up(numbers)[:4].tolist() == [0, 32, 1, 33]
    assert gate_up.swap_gate_up(numbers)[[0, 31, 32]].tolist() == [32, 63, 0]
    # FlashInfer's table srcToDstBlk32RowMap: row i of 32 goes to table[i].
    table = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27]
    table += [4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31]
    shuffled = trtllm.shuffle_rows(numbers)
    assert [shuffled[table[row]].item() for row in range(32)] == list(range(32))
    assert [shuffled[32 + table[row]].item() for row in range(32)] == list(range(32, 64))


def every_scale_code() -> torch.Tensor:
    """All e8m0 codes that are numbers, and more, `[256, 4]`."""
    found = codes(256, 4) % 255
    found.view(-1)[:255] = torch.arange(255, dtype=torch.uint8)
    return found


def test_marlins_scales_are_vllms_byte_for_byte() -> None:
    general: Any = pytest.importorskip(f"{UTILS}.marlin_utils")
    floats: Any = pytest.importorskip(f"{UTILS}.marlin_utils_fp8")
    original = every_scale_code()
    values = original.view(torch.float8_e8m0fnu).to(torch.bfloat16).T.contiguous()
    permuted = general.marlin_permute_scales(values, size_k=128, size_n=256, group_size=32)
    assert torch.equal(orders.permute_group_scales(original.view(torch.float8_e8m0fnu).to(torch.bfloat16)), permuted)
    expected = floats.mxfp8_marlin_process_scales(permuted).view(torch.uint8)
    assert torch.equal(orders.permute_marlin_mx_scales(original), expected)


def test_marlins_biases_are_vllms() -> None:
    general: Any = pytest.importorskip(f"{UTILS}.marlin_utils")
    bias = torch.randn(224, generator=torch.Generator().manual_seed(0))
    assert torch.equal(orders.permute_bias(bias), general.marlin_permute_bias(bias))


@pytest.mark.parametrize("groups", [1, 5])
@pytest.mark.parametrize("bits", [4, 8])
def test_marlins_zero_points_and_scales_are_vllms_byte_for_byte(bits: int, groups: int) -> None:
    general: Any = pytest.importorskip(f"{UTILS}.marlin_utils")
    zeros = codes(192, groups) & (1 << bits) - 1
    expected = general.marlin_zero_points(zeros.T.to(torch.int32).contiguous(), groups, 192, bits)
    assert torch.equal(orders.pack_zero_points(zeros, bits, marlin=True), expected.to(torch.int32))
    scales = codes(192, groups).to(torch.bfloat16)
    group = 128 if groups > 1 else -1
    expected = general.marlin_permute_scales(scales.T.contiguous(), 128 * groups, 192, group)
    assert torch.equal(orders.permute_scales(scales, on_accumulators=groups == 1), expected)


def test_accumulators_over_several_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="accumulators over 3 groups"):
        orders.permute_scales(torch.ones(64, 3), on_accumulators=True)


def test_tiled_scales_are_vllms_byte_for_byte() -> None:
    mxfp8: Any = pytest.importorskip(f"{UTILS}.mxfp8_utils")
    original = codes(384, 12)
    expected = mxfp8.swizzle_mxfp8_scale(original, M=384, K=12 * 32)
    assert torch.equal(orders.swizzle_scales(original).view(-1), expected.view(-1))


def test_blocks_of_columns_are_flashinfers_byte_for_byte() -> None:
    flashinfer: Any = pytest.importorskip("flashinfer.fused_moe.core")
    original = codes(96, 512)
    assert torch.equal(trtllm.to_block_layout(original, 128), flashinfer.convert_to_block_layout(original, 128))


def test_packed_scales_are_what_deep_gemm_makes_of_vllms_float32_scales() -> None:
    """vLLM gives DeepGEMM float32 scales, of which it takes the exponent's bits, four rows' neighbors to a word."""
    fp8: Any = pytest.importorskip(f"{UTILS}.fp8_utils")
    original = every_scale_code()
    as_floats = fp8._upcast_e8m0_to_fp32(original)
    exponents = (as_floats.view(torch.int32) >> 23).to(torch.int64)
    words = sum(exponents[:, place::4] << (8 * place) for place in range(4))
    assert torch.equal(orders.pack_ue8m0_scales(original).T.to(torch.int64) & 0xFFFFFFFF, words)


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (orders.permute_group_scales, (63, 2), "63 rows are not a multiple of 64"),
        (orders.permute_bias, (33,), "33 is not a multiple of 32"),
        (orders.swizzle_scales, (128, 3), r"\[128, 3\].*128 rows x 4"),
        (orders.pack_ue8m0_scales, (6, 4), "6 rows are not a multiple of 4"),
        (trtllm.shuffle_rows, (48, 2), "48 rows are not a multiple of 32"),
        (partial(trtllm.to_block_layout, width=3), (48, 4), "4 columns are not a multiple of the block width 3"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(function: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(codes(*shape))
