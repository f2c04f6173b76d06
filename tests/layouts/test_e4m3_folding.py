"""MXFP4 folded into e4m3: exact for every row that fits, known and marked for every row that does not.

What MXFP4 and e4m3 are is written down here anew, from the specification's tables.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.peak_memory import Peak
from vllm_moe_oracle.layouts import e4m3_folding

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = {m / 8 * 2.0**-6 for m in range(8)} | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)}
E4M3.discard(480.0)  # the code of NaN


LOOKED, FOLDED = 9, 2
"""Operations on a part of a matrix: the places of its bytes, and twice (for the largest numbers, and for last bits) a
look-up, the best of each block, its scale, and the best of each row; then the places among the codes, and a look-up."""
MATRIX = 24
"""Most operations on the rows' exponents and the blocks' scales of a matrix, however many parts it has."""


def packed(codes: list[list[int]]) -> torch.Tensor:
    nibbles = torch.tensor(codes, dtype=torch.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 `[N, K]`."""
    table = torch.tensor(E2M1 + [-value for value in E2M1], dtype=torch.float64)
    values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    return torch.ldexp(values, scales.double().repeat_interleave(32, -1) - 127)


def fits(row: torch.Tensor) -> bool:
    """Whether some power of two makes a row of float64 numbers e4m3's: by trying all."""
    present = {abs(value) for value in row.tolist() if value}
    return any(all(value * 2.0**-shift in E4M3 for value in present) for shift in range(-150, 150))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 254), st.integers(0, 22), st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(0, 99))
def test_fold_is_exact_or_refused(low: int, spread: int, allowed: list[int], seed: int) -> None:
    """Rows of some of the codes, over scales of some spread: refused exactly where no row scale would do."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.tensor([*allowed, *(code + 8 for code in allowed)], dtype=torch.uint8)
    nibbles = choices[torch.randint(len(choices), (4, 96), generator=generator)]
    codes = packed(nibbles.tolist())
    scales = torch.randint(low, min(low + spread, 254) + 1, (4, 3), generator=generator, dtype=torch.uint8)
    folded, factors = e4m3_folding.fold_mxfp4(codes, scales)
    top, last = e4m3_folding.row_exponents(codes, scales)
    exact = numbers(codes, scales)
    for row in range(4):
        held = bool(top[row] - last[row] <= e4m3_folding.MAX_EXPONENT_SPREAD)
        assert held == fits(exact[row])
        assert held == bool(torch.isfinite(factors[row]))
        if held:
            assert torch.equal(folded[row].double() * factors[row].double(), exact[row])
            assert factors[row] >= 2.0**-126 and torch.frexp(factors[row]).mantissa == 0.5


@pytest.mark.parametrize("scale", (0, 1, 127, 253, 254))
def test_every_code_at_every_end_of_the_scales(scale: int) -> None:
    codes = packed([[*range(16), *range(16)]])
    scales = torch.tensor([[scale]], dtype=torch.uint8)
    folded, factors = e4m3_folding.fold_mxfp4(codes, scales)
    assert torch.equal(folded.double() * factors.double()[:, None], numbers(codes, scales))


@pytest.mark.parametrize(("large", "small", "within"), ((6, 1, 14), (6, 7, 16), (1, 7, 19), (7, 1, 14), (7, 3, 14)))
def test_the_limit_and_one_beyond(large: int, small: int, within: int) -> None:
    """One block of code `large`, one of `small`, `within` binades below: that fits, and one more does not."""
    for distance, held in ((within, True), (within + 1, False)):
        codes = packed([[large] * 32 + [small] * 32])
        scales = torch.tensor([[100 + distance, 100]], dtype=torch.uint8)
        folded, factors = e4m3_folding.fold_mxfp4(codes, scales)
        top, last = e4m3_folding.row_exponents(codes, scales)
        assert (int(top) - int(last) <= e4m3_folding.MAX_EXPONENT_SPREAD) == held == fits(numbers(codes, scales)[0])
        assert bool(torch.isfinite(factors)) == held
        if held:
            assert torch.equal(e4m3_folding.unfold(folded, factors).double(), numbers(codes, scales))


def test_blocks_of_zeros_may_have_any_scale() -> None:
    codes = packed([[0] * 32 + [7] * 32 + [8] * 32, [0] * 96])
    scales = torch.tensor([[0, 100, 254], [0, 254, 7]], dtype=torch.uint8)
    folded, factors = e4m3_folding.fold_mxfp4(codes, scales)
    assert torch.isfinite(factors).all()
    assert torch.equal(folded.double() * factors.double()[:, None], numbers(codes, scales))


def test_a_scale_that_is_not_a_number_makes_the_row_so() -> None:
    codes = packed([[7] * 64, [7] * 64])
    _, factors = e4m3_folding.fold_mxfp4(codes, torch.tensor([[100, 255], [100, 100]], dtype=torch.uint8))
    assert factors.isnan().tolist() == [True, False]


def test_many_rows_are_folded_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (2 * 1024 + 7, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 130, (codes.shape[0], 1), generator=generator, dtype=torch.uint8)
    monkeypatch.setattr(e4m3_folding, "_CHUNK_ELEMENTS_MXFP4", 32 * 100 + 5)
    folded, factors = e4m3_folding.fold_mxfp4(codes, scales)
    assert torch.equal(folded.double() * factors.double()[:, None], numbers(codes, scales))


def test_a_part_is_folded_in_few_operations_however_large_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU has to be told to do takes time for each operation, not for each number."""

    def counted(rows: int) -> tuple[int, int]:
        codes = torch.full((rows, 64), 0x21, dtype=torch.uint8)
        scales = torch.full((rows, 4), 120, dtype=torch.uint8)
        with Peak() as folding:
            e4m3_folding.fold_mxfp4(codes, scales)
        with Peak() as looking:
            e4m3_folding.row_exponents(codes, scales)
        return folding.starts, looking.starts

    counted(1)  # makes the tables
    monkeypatch.setattr(e4m3_folding, "_CHUNK_ELEMENTS_MXFP4", 128 * 100)
    (one, looked), (five, looked_five) = counted(100), counted(500)
    assert (one, looked) == counted(3) and (five, looked_five) == counted(401)
    assert five - one == 4 * (LOOKED + FOLDED) and looked_five - looked == 4 * LOOKED
    assert looked < one <= LOOKED + FOLDED + MATRIX


def test_of_what_has_no_data_only_shapes_are_made() -> None:
    codes, scales = (torch.empty(size, dtype=torch.uint8, device="meta") for size in ((5760, 1440), (5760, 90)))
    with Peak() as found:
        four = e4m3_folding.fold_mxfp4(codes, scales)
        eight = e4m3_folding.fold_mxfp8(codes.view(torch.float8_e4m3fn), scales)
    assert found.calls < 20
    assert [each.dtype for each in (*four, *eight)] == [torch.float8_e4m3fn, torch.float32] * 2 + [torch.float32]
    assert all(each.is_meta for each in (*four, *eight))
    assert four[0].shape == (5760, 2880) and eight[0].shape == (5760, 1440)
    assert {each.shape for each in (four[1], *eight[1:])} == {(5760,)}


def test_tables_are_the_hosts_whatever_the_default_device_is() -> None:
    e4m3_folding._tables_on_host.cache_clear()
    with torch.device("meta"):
        assert e4m3_folding._tables_on_host().device == torch.device("cpu")
    test_every_code_at_every_end_of_the_scales(127)


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
    found = folded.float().double() * factors.double()[:, None]
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
