"""Tensors of every dtype are stacked and joined byte for byte."""

from __future__ import annotations

import pytest
import torch

from vllm_moe_oracle.layouts.byte_views import cat_bytes, stack_bytes

DTYPES = [
    torch.uint8, torch.int32, torch.bfloat16, torch.float32, torch.float8_e4m3fn,
    *(getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_bytes_are_those_of_the_parts(dtype: torch.dtype, transposed: bool) -> None:
    codes = torch.randint(0, 256, (2, 4, 4, dtype.itemsize), dtype=torch.uint8)
    parts = [each.view(dtype).view(4, 4) for each in codes]
    parts = [each.T if transposed else each for each in parts]
    expected = codes.transpose(1, 2) if transposed else codes
    stacked, joined = stack_bytes(parts), cat_bytes(parts)
    assert stacked.dtype == joined.dtype == dtype
    assert stacked.shape == (2, 4, 4) and joined.shape == (8, 4)
    for each in (stacked, joined):
        assert torch.equal(each.view(torch.uint8), expected.reshape(each.view(torch.uint8).shape))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_tensors_without_numbers_are_joined(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape, dtype=torch.float64)
    assert torch.equal(stack_bytes([empty, empty]), torch.stack([empty, empty]))
    assert torch.equal(cat_bytes([empty, empty]), torch.cat([empty, empty]))
