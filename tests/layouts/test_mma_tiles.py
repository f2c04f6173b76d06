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


def split_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low one of a byte first."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


PACKS = {"bytes": (pack_tiles, 8), "nibbles": (pack_nibbles, 4)}
"""The function for codes of this many bits."""
each_pack = pytest.mark.parametrize(("pack", "bits"), PACKS.values(), ids=PACKS)


@each_pack
@settings(max_examples=20)
@given(tiles=st.tuples(st.integers(1, 5), st.integers(1, 9)), order=st.sampled_from(ORDERS))
def test_every_code_has_a_place(pack: Any, bits: int, tiles: tuple[int, int], order: LaneOrder) -> None:
    if (pack, order) == (pack_nibbles, "plain"):
        return  # there is no such order
    original = codes(64 * tiles[0], 2 * bits * tiles[1])
    packed = pack(original, order)
    assert packed.dtype == torch.int32 and packed.is_contiguous()
    assert packed.shape == (tiles[1], 32 * bits * tiles[0])
    assert keeps_every_bit(pack, original.shape, order=order)


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


@pytest.mark.parametrize("order", ["interleaved", "transposed"])
def test_a_lane_holds_its_fragment_of_nibbles(order: Any) -> None:
    rows, columns = 128, 32
    original = codes(rows, columns // 2)
    nibbles = split_nibbles(original).tolist()
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


@each_pack
def test_vllms_own_reference_of_the_marlin_order_agrees(pack: Any, bits: int) -> None:
    reference = pytest.importorskip("vllm.model_executor.layers.quantization.utils.marlin_utils_test")
    original = codes(192, 12 * bits)
    one_a_byte = original if bits == 8 else split_nibbles(original)
    columns_first = one_a_byte.T.to(torch.int32).contiguous()
    expected = reference.marlin_weights(columns_first, 96, 192, bits, reference.get_weight_perm(bits))
    assert torch.equal(pack(original), expected)


@each_pack
def test_shapes_are_learned_without_data(pack: Any, bits: int) -> None:
    dtype = torch.float8_e4m3fn if bits == 8 else torch.uint8
    assert pack(torch.empty(64, 4 * bits, dtype=dtype, device="meta")).shape == (2, 32 * bits)


@each_pack
@pytest.mark.parametrize("shape", [(63, 16), (64, 24), (32, 16)])
def test_what_is_no_whole_tile_is_refused_with_both_numbers(pack: Any, bits: int, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"\[{shape[0]}, {shape[1]}\].*64 rows x 16 columns"):
        pack(codes(shape[0], shape[1] * bits // 8))


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
