"""Rows of 16-bit numbers to e4m3 with one float32 scale each."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_ELEMENTS_PER_PROGRAM = 4096
_ELEMENTS_PER_WARP = 1024


def launch_shape(columns: int) -> tuple[int, int, int]:
    """(BLOCK, ROWS, warps) of `quantize_rows` for rows of this many columns.

    A program of one short row would spend most of its time waiting for its first loads.
    """
    block = 1 << (columns - 1).bit_length()
    return block, max(1, _ELEMENTS_PER_PROGRAM // block), min(16, max(4, block // _ELEMENTS_PER_WARP))


@triton.jit
def in_fragment_order(codes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of codes in the order of `fp8_dequantize.e2m1_e4m3`: of 16 columns 2t + 1, 2t + 9, 2t and 2t + 8, t by t."""
    even, odd = tl.split(codes.reshape(ROWS, BLOCK // 16, 2, 4, 2))
    return tl.join(odd, even).trans(0, 1, 3, 4, 2).reshape(ROWS, BLOCK)


@triton.jit(do_not_specialize=["slots"])
def quantize_rows(x_ptr, codes_ptr, scales_ptr, sorted_ptr, totals_ptr, slots, columns, x_stride, TOP_K: tl.constexpr,
                  GATHER: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
                  FRAGMENT_ORDER: tl.constexpr = None):  # fmt: skip
    """codes[position] = x[row] / scale rounded to e4m3 (nearest, ties to even), scale = amax |x[row]| / 448.

    x 16-bit, row stride x_stride; codes e4m3 `[slots, columns]`, scales float32 `[slots]`, in the order of sorted. row:
    `sorted[position] // TOP_K` if GATHER, else the position. totals, int32 `[EP]`: number of positions of each expert;
    positions beyond their sum are not written. A row of zeros gets the scale 0, a row with an infinity becomes NaN.
    FRAGMENT_ORDER: every 16 columns are in the order of `in_fragment_order`. Grid `(ceil(slots / ROWS),)`; BLOCK is a
    power of two of at least `columns`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    if GATHER:
        written = position < tl.sum(tl.load(totals_ptr + tl.arange(0, EP)), axis=0)
        row = tl.load(sorted_ptr + position, mask=written, other=0) // TOP_K
        inside = written[:, None] & (column < columns)[None, :]
    else:
        row = position
        inside = (position < slots)[:, None] & (column < columns)[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    if not GATHER:
        # After the loads of x, which need not wait for it: rows beyond the sum are read, but not written.
        written = position < tl.sum(tl.load(totals_ptr + tl.arange(0, EP)), axis=0)
        inside = written[:, None] & (column < columns)[None, :]
    amax = tl.max(tl.abs(x), axis=1)
    # Below 2**-119 the reciprocal would overflow; such a row is zeros.
    inverse = tl.where(amax >= 2.0**-119, tl.div_rn(448.0, amax), 0.0)
    codes = (x * inverse[:, None]).to(tl.float8e4nv)
    if FRAGMENT_ORDER:
        codes = in_fragment_order(codes, ROWS, BLOCK)
    tl.store(codes_ptr + position.to(tl.int64)[:, None] * columns + column[None, :], codes, mask=inside)
    tl.store(scales_ptr + position, tl.div_rn(amax, 448.0), mask=written)
