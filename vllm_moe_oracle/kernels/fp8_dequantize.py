"""Decoding stored MXFP4 codes to e4m3, scales included: Triton device functions.

A row's table has e4m3 of the eight magnitudes of e2m1 under a scale. As integers, the table of a stored scale is that
of the largest one less a multiple of its distance in binades, since only exponents differ. Zero has none.
"""

from __future__ import annotations

import triton
import triton.language as tl

# e4m3 of the magnitudes of e2m1 codes 0 to 3 and 4 to 7 under the largest scale, stored as 254, and what one binade
# changes: the exponents of all but zero. As signed words, less the change of 254 binades.
_BINADE = (0x08080800, 0x08080808)
_TABLE = (0x6C686000, 0x7C787470)


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


LOW_TABLE = tl.constexpr(_signed(_TABLE[0] - 254 * _BINADE[0]))
HIGH_TABLE = tl.constexpr(_signed(_TABLE[1] - 254 * _BINADE[1]))
LOW_BINADE = tl.constexpr(_BINADE[0])
HIGH_BINADE = tl.constexpr(_BINADE[1])
EXCESS = tl.constexpr(2.0**-5)
"""Times sums of decoded weights before `PackedMatrix.row_scale`: for that a scale of 254 stands for 2, here for 64."""


@triton.jit
def e2m1_e4m3(x, low, high, sixteen):
    """Words of 8 bit-permuted e2m1 codes (`layouts/operand_bits.py`) to e4m3, four of row g and four of row g + 8.

    low, high: bytes 0 to 3 and 4 to 7 of the row's table, e4m3 of the magnitudes 0 to 6 times its scale. Three bits of
    a code select one of them; signs are added afterwards. sixteen: as in `dequantize.e4m3_bf16_imul`.

    Row g: its codes of columns 2t + 1, 2t + 9, 2t and 2t + 8, in this order; row g + 8 likewise.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 r8, r10, v, a, b, s;
        shf.l.wrap.b32 r10, $2, $2, 10;
        shf.l.wrap.b32 r8, $2, $2, 8;
        and.b32 v, $2, 0x04000400;
        lop3.b32 v, r10, 0x70077007, v, 0xEA;
        lop3.b32 v, r8, 0x03700370, v, 0xEA;
        prmt.b32 a, v, 0, 0x4420;
        prmt.b32 b, v, 0, 0x4431;
        prmt.b32 a, $3, $7, a;
        prmt.b32 b, $5, $9, b;
        lop3.b32 a, r8, 0x00800080, a, 0xEA;
        lop3.b32 $0, r10, 0x80008000, a, 0xEA;
        shr.u32 s, $2, 2;
        lop3.b32 b, s, 0x00800080, b, 0xEA;
        mul.lo.u32 s, $2, $11;
        lop3.b32 b, s, 0x80008000, b, 0xEA;
        prmt.b32 $1, b, 0, 0x0123;
        }
        """,
        constraints="=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        args=[x, low, high, sixteen],
        dtype=(tl.float8e4nv, tl.float8e4nv),
        is_pure=True,
        pack=4,
    )
