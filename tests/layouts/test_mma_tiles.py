"""Orders of 8-bit and 4-bit codes: none is lost, and each lands where the fragment of `mma.m16n8k16` has it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.bit_moves import keeps_every_bit
from vllm_moe_oracle.layouts.mma_tiles import LaneOrder, distances_from_zero_point, pack_nibbles, pack_tiles

ORDERS: tuple[LaneOrder, ...] = ("interleaved", "transposed", "plain")


def codes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@settings(max_examples=20)
@given(tiles=st.tuples(st.integers(1, 5), st.integers(1, 9)), order=st.sampled_from(ORDERS))
def test_every_byte_has_a_place(tiles: tuple[int, int], order: LaneOrder) -> None:
    original = codes(64 * tiles[0], 16 * tiles[1])
    packed = pack_tiles(original, order)
    assert packed.dtype == torch.int32 and packed.shape == (tiles[1], 256 * tiles[0]) and packed.is_contiguous()
    assert keeps_every_bit(pack_tiles, original.shape, order=order)


def test_floats_are_ordered_as_their_bytes() -> None:
    original = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    assert torch.equal(pack_tiles(original.view(torch.float8_e4m3fn)), pack_tiles(original))


@pytest.mark.parametrize("order", ORDERS)
def test_a_lane_holds_its_fragment(order: LaneOrder) -> None:
    """The places of PTX's "Matrix Fragments for mma.m16n8k16", operand B, counted out one by one."""
    rows, columns = 128, 32
    original = codes(rows, columns)
    packed = pack_tiles(original, order).view(torch.uint8).view(columns // 16, rows // 64, 32, 32)
    for tile_k, tile_n, lane in itertools.product(range(columns // 16), range(rows // 64), range(32)):
        group, thread = divmod(lane, 4)
        loops = {
            "interleaved": [(t, h, k8, p) for t in range(4) for h in range(2) for p in range(2) for k8 in range(2)],
            "transposed": [(t, h, k8, p) for t in range(4) for k8 in range(2) for p in range(2) for h in range(2)],
            "plain": [(t, h, k8, p) for t in range(4) for h in range(2) for k8 in range(2) for p in range(2)],
        }[order]
        for place, (tile, half, k8, parity) in enumerate(loops):
            row = 64 * tile_n + 16 * tile + 8 * half + group
            column = 16 * tile_k + 8 * k8 + 2 * thread + parity
            assert packed[tile_k, tile_n, lane, place] == original[row, column]


def test_vllms_own_reference_of_the_marlin_order_agrees() -> None:
    reference = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    original = codes(192, 96)
    columns_first = original.T.to(torch.int32).contiguous()
    expected = reference.marlin_weights(columns_first, 96, 192, 8, reference.get_weight_perm(8))
    assert torch.equal(pack_tiles(original), expected)


def test_shapes_are_learned_without_data() -> None:
    assert pack_tiles(torch.empty(64, 32, dtype=torch.float8_e4m3fn, device="meta")).shape == (2, 256)


@pytest.mark.parametrize("shape", [(63, 16), (64, 24), (32, 16)])
def test_what_is_no_whole_tile_is_refused_with_both_numbers(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"\[{shape[0]}, {shape[1]}\].*64 rows x 16 columns"):
        pack_tiles(codes(*shape))


@settings(max_examples=20)
@given(tiles=st.tuples(st.integers(1, 5), st.integers(1, 9)), order=st.sampled_from(("interleaved", "transposed")))
def test_every_nibble_has_a_place(tiles: tuple[int, int], order: Any) -> None:
    original = codes(64 * tiles[0], 8 * tiles[1])
    packed = pack_nibbles(original, order)
    assert packed.dtype == torch.int32 and packed.shape == (tiles[1], 128 * tiles[0]) and packed.is_contiguous()
    assert keeps_every_bit(pack_nibbles, original.shape, order=order)


@pytest.mark.parametrize("order", ["interleaved", "transposed"])
def test_a_lane_holds_its_fragment_of_nibbles(order: Any) -> None:
    rows, columns = 128, 32
    original = codes(rows, columns // 2)
    nibbles = torch.stack((original & 15, original >> 4), -1).flatten(-2).tolist()
    packed = pack_nibbles(original, order).view(columns // 16, rows // 64, 32, 4).tolist()
    for tile_k, tile_n, lane, tile in itertools.product(range(columns // 16), range(rows // 64), range(32), range(4)):
        group, thread = divmod(lane, 4)
        loops = {
            "interleaved": [(h, k8, p) for p in range(2) for h in range(2) for k8 in range(2)],
            "transposed": [(h, k8, p) for p in range(2) for k8 in range(2) for h in range(2)],
        }[order]
        word = packed[tile_k][tile_n][lane][tile]
        for place, (half, k8, parity) in enumerate(loops):
            row = 64 * tile_n + 16 * tile + 8 * half + group
            assert (word >> 4 * place) & 15 == nibbles[row][16 * tile_k + 8 * k8 + 2 * thread + parity]


def test_vllms_own_reference_of_the_marlin_order_of_nibbles_agrees() -> None:
    reference = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    original = codes(192, 48)
    columns_first = torch.stack((original & 15, original >> 4), -1).flatten(-2).T.to(torch.int32).contiguous()
    expected = reference.marlin_weights(columns_first, 96, 192, 4, reference.get_weight_perm(4))
    assert torch.equal(pack_nibbles(original), expected)


def test_shapes_of_nibbles_are_learned_without_data() -> None:
    assert pack_nibbles(torch.empty(64, 16, dtype=torch.uint8, device="meta")).shape == (2, 128)


@pytest.mark.parametrize("shape", [(63, 8), (64, 12), (32, 8)])
def test_partial_tiles_of_nibbles_are_refused_with_both_numbers(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"\[{shape[0]}, {2 * shape[1]}\].*64 rows x 16 columns"):
        pack_nibbles(codes(*shape))


def test_distances_are_taken_from_every_zero_point() -> None:
    """What the kernel ``weight_repack_nk`` says, for each code and each zero point."""
    original = torch.arange(256, dtype=torch.uint8).repeat(64, 1)
    for zero in range(256):
        zeros = torch.full((64, 4), zero, dtype=torch.uint8)
        found = distances_from_zero_point(original, zeros)
        numbers = original.to(torch.int32)
        expected = torch.where(numbers >= zero, numbers - zero, 255 - numbers)
        assert torch.equal(found.to(torch.int32), expected)
        assert sorted(found[0].tolist()) == list(range(256)), "one-to-one"
    assert torch.equal(
        distances_from_zero_point(original),
        distances_from_zero_point(original, torch.full((64, 1), 128, dtype=torch.uint8)),
    )
