"""Rows of 16-bit numbers to e4m3 with one float32 scale each."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def in_fragment_order(codes, BLOCK: tl.constexpr):
    """Codes in the order of `fp8_dequantize.e2m1_e4m3`: of 16 columns 2t + 1, 2t + 9, 2t and 2t + 8, t by t."""
    even, odd = tl.split(codes.reshape(BLOCK // 16, 2, 4, 2))
    return tl.join(odd, even).trans(0, 2, 3, 1).reshape(BLOCK)


@triton.jit
def quantize_rows(x_ptr, codes_ptr, scales_ptr, sorted_ptr, totals_ptr, columns, x_stride, TOP_K: tl.constexpr,
                  GATHER: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
                  FRAGMENT_ORDER: tl.constexpr = None):  # fmt: skip
    """codes[position] = x[row] / scale rounded to e4m3 (nearest, ties to even), scale = amax |x[row]| / 448.

    x 16-bit, row stride x_stride; codes e4m3 `[slots, columns]`, scales float32 `[slots]`, in the order of sorted. row:
    `sorted[position] // TOP_K` if GATHER, else the position. totals, int32 `[EP]`: number of positions of each expert;
    positions beyond their sum are not written. A row of zeros gets the scale 0, a row with an infinity becomes NaN.
    FRAGMENT_ORDER: every 16 columns are in the order of `in_fragment_order`. Grid `(slots,)`; BLOCK is a power of two
    of at least `columns`.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    position = tl.program_id(0)
    if position < tl.sum(tl.load(totals_ptr + tl.arange(0, EP)), axis=0):
        row = tl.load(sorted_ptr + position) // TOP_K if GATHER else position
        column = tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        amax = tl.max(tl.abs(x), axis=0)
        # Below 2**-119 the reciprocal would overflow; such a row is zeros.
        inverse = tl.where(amax >= 2.0**-119, tl.div_rn(448.0, amax), 0.0)
        codes = (x * inverse).to(tl.float8e4nv)
        if FRAGMENT_ORDER:
            codes = in_fragment_order(codes, BLOCK)
        tl.store(codes_ptr + position.to(tl.int64) * columns + column, codes, mask=inside)
        tl.store(scales_ptr + position, tl.div_rn(amax, 448.0))
