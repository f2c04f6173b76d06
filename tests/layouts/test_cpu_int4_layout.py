"""Blocks of vLLM's operator for int4 experts on CPUs: every code has a place, and vLLM's own conversion agrees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.bit_moves import keeps_every_bit
from vllm_moe_oracle.layouts.cpu_int4 import block_scales, pack_blocks


def codes(rows: int, columns: int) -> torch.Tensor:
    """Two a byte."""
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@settings(max_examples=20)
@given(blocks=st.tuples(st.integers(1, 4), st.integers(1, 4)), columns=st.sampled_from((32, 64, 128)))
def test_every_code_has_a_place(blocks: tuple[int, int], columns: int) -> None:
    original = codes(32 * blocks[0], columns * blocks[1])
    packed = pack_blocks(original, columns)
    assert packed.shape == (*blocks, 16 * columns + 128) and packed.is_contiguous()
    assert keeps_every_bit(pack_blocks, original.shape, columns=columns)
    assert keeps_every_bit(block_scales, original.shape)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_vllms_own_conversion_agrees_byte_for_byte(group: int) -> None:
    pytest.importorskip("vllm._custom_ops")
    module: Any = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.cpu_moe")
    if not hasattr(torch.ops._C, "convert_weight_packed_scale_zp") or not hasattr(module, "CPUQuantAlgo"):
        pytest.skip("this build of vLLM has no such operator")
    rows, columns = 96, 384
    original = codes(rows, columns)
    # As GPTQ stores them: eight columns a word, words of a row one below the other.
    words = original.view(torch.int32).T.unsqueeze(0).contiguous()
    sevens = torch.full((1, columns // group, rows // 8), 0x77777777, dtype=torch.int32)
    scales = torch.rand(rows, columns // group).to(torch.bfloat16)
    convert = torch.ops._C.convert_weight_packed_scale_zp
    packed, _, ordered = convert(words, sevens, scales.T.unsqueeze(0).contiguous(), module.CPUQuantAlgo.GPTQ)
    assert torch.equal(pack_blocks(original, group), packed[0])
    assert torch.equal(block_scales(scales.float()), ordered[0])


def test_shapes_are_learned_without_data() -> None:
    assert pack_blocks(torch.empty(64, 32, dtype=torch.uint8, device="meta"), 32).shape == (2, 2, 640)


@pytest.mark.parametrize(("rows", "columns", "width"), [(48, 64, 64), (32, 96, 64), (32, 60, 30)])
def test_what_is_no_whole_block_is_refused(rows: int, columns: int, width: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{rows}, {columns}\].*32 rows x {width} columns"):
        pack_blocks(codes(rows, columns), width)


def test_scales_of_no_whole_block_are_refused() -> None:
    with pytest.raises(ValueError, match="48 rows are not a multiple of 32"):
        block_scales(codes(48, 4))
