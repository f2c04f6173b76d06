"""Padding and cropping of one expert's tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_moe_oracle.layouts.padding import pad_columns, pad_rows

TYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32)


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    codes = torch.randint(0, 120, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return codes.view(dtype) if dtype.itemsize == 1 else codes.to(dtype)


def raw(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


@given(
    rows=st.integers(1, 40),
    more=st.integers(0, 40),
    halves=st.sampled_from((1, 2)),
    columns=st.integers(1, 9),
    dtype=st.sampled_from(TYPES),
    flat=st.booleans(),
)
def test_rows_are_padded_half_by_half(
    rows: int, more: int, halves: int, columns: int, dtype: torch.dtype, flat: bool
) -> None:
    shape = (halves * rows,) if flat else (halves * rows, columns)
    original = tensor(shape, dtype)
    padded = pad_rows(original, rows + more, halves)
    assert padded.dtype == dtype and padded.shape == (halves * (rows + more), *shape[1:])
    parts = padded.reshape(halves, rows + more, *shape[1:])
    assert torch.equal(raw(parts[:, :rows]).flatten(), raw(original).flatten())
    assert not raw(parts[:, rows:]).any()


@given(columns=st.integers(1, 40), more=st.integers(0, 40), dtype=st.sampled_from(TYPES), rows=st.integers(1, 5))
def test_columns_are_padded_at_their_end(columns: int, more: int, dtype: torch.dtype, rows: int) -> None:
    original = tensor((rows, columns), dtype)
    padded = pad_columns(original, columns + more)
    assert torch.equal(raw(padded[:, :columns]), raw(original))
    assert not raw(padded[:, columns:]).any()


def test_scales_may_be_padded_with_a_code() -> None:
    padded = pad_rows(pad_columns(torch.zeros(4, 3, dtype=torch.uint8), 4, 127), 3, 2, 127)
    assert padded.view(2, 3, 4)[:, :2, :3].eq(0).all()
    assert padded.eq(127).sum() == 24 - 12


def test_nothing_is_copied_where_nothing_is_added() -> None:
    original = tensor((4, 6), torch.uint8)
    assert pad_rows(original, 2, 2) is original
    assert pad_columns(original, 6) is original


def test_shrinking_is_refused() -> None:
    with pytest.raises(ValueError, match="6 do not fit into 5"):
        pad_columns(tensor((4, 6), torch.uint8), 5)
    with pytest.raises(ValueError, match="2 do not fit into 1"):
        pad_rows(tensor((4, 6), torch.uint8), 1, 2)
