"""Orders for OpenAI's triton_kernels: nothing is lost, and the library's own layouts give the same bytes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.bit_moves import keeps_every_bit
from tests.lib.stock_code import load
from tests.lib.stock_rules import every_release
from vllm_moe_oracle.layouts.scales import swizzle_scales
from vllm_moe_oracle.layouts.triton_kernels import swizzle_hopper_codes, swizzle_hopper_scales
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES

DETAILS = "vllm/third_party/triton_kernels/tensor_details/layout_details"
SHAPES = [(16, 64), (64, 128), (200, 96), (2880, 736), (5760, 2880)]


def random(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@settings(max_examples=20)
@given(rows=st.integers(1, 300), blocks=st.integers(1, 9))
def test_every_code_and_scale_has_a_place(rows: int, blocks: int) -> None:
    packed, ordered = swizzle_hopper_codes(random(rows, 16 * blocks)), swizzle_hopper_scales(random(rows, blocks))
    assert packed.dtype == ordered.dtype == torch.uint8 and packed.is_contiguous() and ordered.is_contiguous()
    assert keeps_every_bit(swizzle_hopper_codes, (rows, 16 * blocks))
    assert all(keeps_every_bit(swizzle_hopper_scales, (rows, blocks), warps=warps) for warps in (4, 8))


def test_shapes_are_learned_without_data() -> None:
    assert swizzle_hopper_codes(torch.empty(200, 48, dtype=torch.uint8, device="meta")).shape == (52, 256)
    assert swizzle_hopper_scales(torch.empty(200, 3, dtype=torch.uint8, device="meta")).shape == (8, 128)


def library(release: str, file: str, name: str) -> Any:
    """A layout of the triton_kernels that a release brings."""
    # The classes are loaded without their base, which keeps the shape and nothing else.
    base = SimpleNamespace(__init__=lambda shape: None)
    return load(release, f"{DETAILS}/{file}.py", super=lambda: base)[name]


@every_release
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_the_librarys_own_layouts_agree(release: str, rows: int, columns: int) -> None:
    if rows > 200 and release not in (RELEASES[0], NEWEST):
        pytest.skip("large shapes in the oldest and the newest only")
    codes, scales = random(1, rows, columns // 2), random(1, rows, columns // 32)
    swizzle = library(release, "hopper_value", "HopperMXValueLayout")((1, columns // 2, rows), mx_axis=1)
    expected = swizzle.swizzle_data(codes.transpose(-2, -1)).mT
    assert torch.equal(swizzle_hopper_codes(codes[0]), expected[0])
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))
    for warps in (4, 8):
        shape = (1, padded.shape[-1], rows)
        swizzle = library(release, "hopper_scale", "HopperMXScaleLayout")(shape, mx_axis=1, num_warps=warps)
        expected = swizzle.swizzle_data(padded.transpose(-2, -1)).mT
        assert torch.equal(swizzle_hopper_scales(scales[0], warps), expected[0])


@every_release
def test_scales_for_blackwell_are_tiles(release: str) -> None:
    scales = random(3, 256, 12)
    swizzle = library(release, "blackwell_scale", "BlackwellMXScaleLayout")((3, 12, 256))
    expected = swizzle.swizzle_data(scales.transpose(-2, -1))
    ours = torch.stack([swizzle_scales(torch.nn.functional.pad(each, (0, 4))) for each in scales])
    assert torch.equal(ours.view(expected.shape), expected)
