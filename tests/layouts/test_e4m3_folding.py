"""MXFP8 folded into e4m3 with one scale a row: what becomes subnormal loses bits, and is told.

What MXFP8 and e4m3 are is written down here anew, from the specification's tables.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.peak_memory import Peak
from vllm_moe_oracle.layouts import e4m3_folding


def test_of_what_has_no_data_only_shapes_are_made() -> None:
    codes, scales = (torch.empty(size, dtype=torch.uint8, device="meta") for size in ((5760, 1440), (5760, 45)))
    with Peak() as found:
        folded, factors, errors = e4m3_folding.fold_mxfp8(codes.view(torch.float8_e4m3fn), scales)
    assert found.calls < 20
    assert (folded.dtype, factors.dtype, errors.dtype) == (torch.float8_e4m3fn, torch.float32, torch.float32)
    assert all(each.is_meta for each in (folded, factors, errors))
    assert folded.shape == (5760, 1440) and factors.shape == errors.shape == (5760,)


def mxfp8(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 `[N, K]` of e4m3's bytes, by the table of this file."""
    magnitudes = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
    table = torch.tensor(magnitudes + [-each for each in magnitudes], dtype=torch.float64)
    return torch.ldexp(table[codes.long()], scales.double().repeat_interleave(32, -1) - 127)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 254), st.integers(0, 12), st.integers(0, 127), st.integers(0, 99))
def test_codes_under_one_scale_are_the_nearest_that_there_are(low: int, spread: int, least: int, seed: int) -> None:
    """What e4m3 does not hold is off by half of its last subnormal bit at most, and told."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (4, 96), generator=generator, dtype=torch.uint8)
    codes = torch.where(codes & 127 == 127, codes - 1, codes)
    codes = torch.where(codes & 127 < least, 0, codes).to(torch.uint8)
    scales = torch.randint(low, min(low + spread, 254) + 1, (4, 3), generator=generator, dtype=torch.uint8)
    folded, factors, errors = e4m3_folding.fold_mxfp8(codes.view(torch.float8_e4m3fn), scales)
    exact = mxfp8(codes, scales)
    found = folded.double() * factors.double()[:, None]
    half = 2.0**-10 * factors.double()[:, None]
    assert ((found - exact).abs() <= half).all()
    normal = exact.abs() >= 2.0**-6 * factors.double()[:, None]
    assert torch.equal(found[normal], exact[normal])
    size = exact.view(4, 3, 32).norm(dim=-1)
    expected = torch.where(size > 0, (found - exact).view(4, 3, 32).norm(dim=-1) / size, 0).amax(-1)
    assert torch.allclose(errors.double(), expected, rtol=1e-5, atol=0)
    assert (torch.frexp(factors).mantissa == 0.5).all()
    # The largest number is as near to 448 as a power of two brings it.
    top = folded.float().abs().amax(1)
    small = factors == 2.0**-126
    assert (((top > 224) & (top <= 448)) | (exact == 0).all(1) | small).all()


def test_a_row_of_codes_that_is_not_a_number_stays_so() -> None:
    codes = torch.full((3, 64), 0x38, dtype=torch.uint8)
    codes[0, 5] = 0x7F
    _, factors, errors = e4m3_folding.fold_mxfp8(
        codes.view(torch.float8_e4m3fn), torch.tensor([[100, 100], [100, 255], [0, 100]], dtype=torch.uint8)
    )
    assert factors.isnan().tolist() == [True, True, False] and torch.isfinite(errors).all()


@pytest.mark.parametrize("rows", (64, 192, 5760))
def test_orders_are_permutations_that_put_eight_neighbors_into_a_lane(rows: int) -> None:
    pairs, plain = e4m3_folding.gated_row_order(rows), e4m3_folding.row_order(rows)
    assert sorted(pairs.tolist()) == sorted(plain.tolist()) == list(range(rows))
    # wgmma's accumulator: of every eight columns, lane t of four has 2 t and 2 t + 1.
    for lane in range(4):
        mine = [place for place in range(64) if place % 8 // 2 == lane]
        assert pairs[mine][0::2].tolist() == list(range(8 * lane, 8 * lane + 8))
        assert (pairs[mine][1::2] - rows // 2).tolist() == list(range(8 * lane, 8 * lane + 8))
        assert plain[mine].tolist() == [*range(8 * lane, 8 * lane + 8), *range(32 + 8 * lane, 40 + 8 * lane)]
