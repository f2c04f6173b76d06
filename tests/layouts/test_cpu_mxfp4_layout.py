"""Orders for vLLM's CPU kernel: nothing is lost, and vLLM's own operators give the same bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.bit_moves import keeps_every_bit
from vllm_moe_oracle.layouts.cpu_mxfp4 import pack_row_pairs
from vllm_moe_oracle.layouts.row_blocks import pack_row_blocks


def random(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@settings(max_examples=20)
@given(blocks=st.integers(1, 9), columns=st.integers(1, 70))
def test_every_byte_has_a_place(blocks: int, columns: int) -> None:
    assert keeps_every_bit(pack_row_pairs, (32 * blocks, columns))


def test_a_byte_holds_a_column_of_two_rows() -> None:
    original = random(64, 24)
    nibbles = torch.stack((original & 15, original >> 4), -1).flatten(-2).tolist()
    packed = pack_row_pairs(original).view(2, 24, 16, 2).tolist()
    for block in range(2):
        for pair in range(24):
            for row in range(16):
                for parity in range(2):
                    byte = packed[block][pair][row][parity]
                    column = 2 * pair + parity
                    assert byte & 15 == nibbles[32 * block + row][column]
                    assert byte >> 4 == nibbles[32 * block + 16 + row][column]


@pytest.mark.parametrize(("rows", "columns"), [(32, 32), (64, 96), (160, 256)])
def test_vllms_own_operators_agree(rows: int, columns: int) -> None:
    operators = pytest.importorskip("vllm._custom_ops") and torch.ops._C
    if not hasattr(operators, "convert_scale_packed"):
        pytest.skip("this build of vLLM has no MXFP4 experts for this CPU")
    codes, scales = random(2, rows, columns // 2), random(2, rows, columns // 32)
    for expert, packed in enumerate(operators.convert_weight_packed(codes)):
        assert torch.equal(pack_row_pairs(codes[expert]), packed.view(rows, -1))
    for expert, ordered in enumerate(operators.convert_scale_packed(scales)):
        assert torch.equal(pack_row_blocks(scales[expert], 32), ordered.view(rows, -1))


def test_shapes_are_learned_without_data() -> None:
    blank = torch.empty(64, 48, dtype=torch.uint8, device="meta")
    assert pack_row_pairs(blank).shape == pack_row_blocks(blank, 32).shape == (64, 48)


@pytest.mark.parametrize("order", [pack_row_pairs, lambda scales: pack_row_blocks(scales, 32)], ids=["codes", "scales"])
def test_what_is_no_whole_block_is_refused_with_numbers(order: object) -> None:
    with pytest.raises(ValueError, match=r"48 rows .* 32 \(remainder 16\)"):
        order(random(48, 8))  # type: ignore[operator]
