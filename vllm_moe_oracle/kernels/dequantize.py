"""Device functions that turn stored codes into the register operand of a matrix instruction.

Codes are stored as `layouts/wgmma_fragments.py` orders them. Each function takes the bytes of a tile, `[chunks of
rows, chunks of columns, warp, 512]`, and returns 16-bit floats. A reshape and a transpose then put these into rows and
columns without moving a value between lanes.

How codes become floats:

* Integers, bfloat16: the bits of an integer below 256, read as a bfloat16, are that integer times 2**-133 (subnormal up
  to 127, normal above). A mask is enough to extract a code; one fused multiply-add scales it and subtracts the midpoint
  or the zero point.
* Integers, float16: a code OR-ed into the mantissa of 1024 is 1024 plus the code.
* e2m1 and e4m3: their bits, moved to bfloat16's exponent and mantissa, are the value times 2**-126 or 2**-120; moved to
  float16's, the value times 2**-14 or 2**-8. This holds for subnormals too, because IEEE 754 and OCP Microscaling
  Formats 1.0 encode them alike. The two NaN codes of e4m3 decode to +-480.

The scales make up for these factors (`weights.code_factors`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def u4_raw(x):
    """Words of 8 codes to bfloat16 `code * 2**-133`, of rows g + 8 `code * 2**-129`: masks and one shift."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        and.b32 $0, $4, 0x000f000f;
        and.b32 $1, $4, 0x00f000f0;
        shr.u32 a, $4, 8;
        and.b32 $2, a, 0x000f000f;
        and.b32 $3, a, 0x00f000f0;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r",
        args=[x],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def u4_bf16(x):
    """Words of 8 codes to bfloat16 `(code - 8) * 2**-6`, of rows g + 8 `(code - 8) * 2**-2`."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, power, low, high;
        mov.b32 power, 0x7f007f00;
        mov.b32 low, 0xbe00be00;
        mov.b32 high, 0xc000c000;
        and.b32 $0, $4, 0x000f000f;
        fma.rn.bf16x2 $0, $0, power, low;
        and.b32 $1, $4, 0x00f000f0;
        fma.rn.bf16x2 $1, $1, power, high;
        shr.u32 a, $4, 8;
        and.b32 $2, a, 0x000f000f;
        fma.rn.bf16x2 $2, $2, power, low;
        and.b32 $3, a, 0x00f000f0;
        fma.rn.bf16x2 $3, $3, power, high;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r",
        args=[x],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def u8_raw(x):
    """Words of 4 codes to bfloat16 `code * 2**-133`: two masks and a shift."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        shr.u32 a, $2, 8;
        and.b32 $0, a, 0x00ff00ff;
        and.b32 $1, $2, 0x00ff00ff;
        }
        """,
        constraints="=&r,=&r,r",
        args=[x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def u8_bf16(x):
    """Words of 4 codes to bfloat16 `(code - 128) * 2**-6`."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, power, zero;
        mov.b32 power, 0x7f007f00;
        mov.b32 zero, 0xc000c000;
        shr.u32 a, $2, 8;
        and.b32 $0, a, 0x00ff00ff;
        fma.rn.bf16x2 $0, $0, power, zero;
        and.b32 $1, $2, 0x00ff00ff;
        fma.rn.bf16x2 $1, $1, power, zero;
        }
        """,
        constraints="=&r,=&r,r",
        args=[x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def scale_and_add_zero(raw, addend):
    """bfloat16 raw * 2**127 + addend, exact for codes and zero points of up to 8 bits."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.b32 a, 0x7f007f00; fma.rn.bf16x2 $0, $1, a, $2; }",
        constraints="=r,r,r",
        args=[raw, addend],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def scaled_midpoints(words, FORMAT: tl.constexpr):
    """The term that takes the midpoint (8 of int4, 128 of int8) off a scaled code; both bfloat16 halves of the words.

    int4: the scale times -2**-130, in rows g + 8 times -2**-126. int8: the scale times -2**-126.
    """
    if FORMAT == "int4":
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, 0x80808008; mul.rn.bf16x2 $0, $1, a; }",
            constraints="=r,r",
            args=[words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; mov.b32 a, 0x80808080; mul.rn.bf16x2 $0, $1, a; }",
            constraints="=r,r",
            args=[words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def fma_bf16x2(a, b, c):
    """bfloat16 a * b + c, rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        constraints="=r,r,r,r",
        args=[a, b, c],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def u4_fp16(x, CENTERED: tl.constexpr):
    """Words of 8 codes to float16 `code - 8`, or `code + 1024` when not CENTERED; two results of four per word."""
    if CENTERED:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, z, sixteenth, y;
            mov.b32 z, 0xe408e408;
            mov.b32 sixteenth, 0x2c002c00;
            mov.b32 y, 0xd480d480;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xEA;
            add.f16x2 $0, $0, z;
            lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xEA;
            fma.rn.f16x2 $1, $1, sixteenth, y;
            shr.u32 a, $4, 8;
            lop3.b32 $2, a, 0x000f000f, 0x64006400, 0xEA;
            add.f16x2 $2, $2, z;
            lop3.b32 $3, a, 0x00f000f0, 0x64006400, 0xEA;
            fma.rn.f16x2 $3, $3, sixteenth, y;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r",
            args=[x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a;
            lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xEA;
            shr.u32 a, $4, 4;
            lop3.b32 $1, a, 0x000f000f, 0x64006400, 0xEA;
            shr.u32 a, $4, 8;
            lop3.b32 $2, a, 0x000f000f, 0x64006400, 0xEA;
            shr.u32 a, $4, 12;
            lop3.b32 $3, a, 0x000f000f, 0x64006400, 0xEA;
            }
            """,
            constraints="=&r,=&r,=&r,=&r,r",
            args=[x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def u8_fp16(x):
    """Words of 4 codes to float16 `code - 128`: the code under 1024's mantissa, less 1152."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, z;
        mov.b32 z, 0xe480e480;
        shr.u32 a, $2, 8;
        lop3.b32 $0, a, 0x00ff00ff, 0x64006400, 0xEA;
        add.f16x2 $0, $0, z;
        lop3.b32 $1, $2, 0x00ff00ff, 0x64006400, 0xEA;
        add.f16x2 $1, $1, z;
        }
        """,
        constraints="=&r,=&r,r",
        args=[x],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_bf16(x):
    """Words of 8 bit-permuted e2m1 codes to bfloat16 `value * 2**-126`; two results of four per word."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 b, c, d, e;
        shl.b32 b, $4, 4;
        shf.r.wrap.b32 c, $4, $4, 6;
        shl.b32 d, $4, 6;
        shr.u32 e, $4, 2;
        and.b32 d, d, 0x80c080c0;
        and.b32 $0, $4, 0x81c081c0;
        and.b32 $1, b, 0x81c081c0;
        and.b32 $2, c, 0x81c081c0;
        lop3.b32 $3, e, 0x01000100, d, 0xEA;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r",
        args=[x],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_bf16(x):
    """Words of 4 bit-permuted e4m3 codes to bfloat16 `value * 2**-120`."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        shl.b32 a, $2, 4;
        shr.u32 b, $2, 4;
        and.b32 a, a, 0x80f080f0;
        and.b32 $0, $2, 0x87f087f0;
        lop3.b32 $1, b, 0x07000700, a, 0xEA;
        }
        """,
        constraints="=&r,=&r,r",
        args=[x],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_bf16_imul(x, sixteen):
    """`e4m3_bf16` with a multiplication instead of the left shift: it runs on another unit than shifts and masks.

    sixteen: 16, passed at run time; the compiler would turn a constant into a shift again.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        mul.lo.u32 a, $2, $3;
        shr.u32 b, $2, 4;
        and.b32 a, a, 0x80f080f0;
        and.b32 $0, $2, 0x87f087f0;
        lop3.b32 $1, b, 0x07000700, a, 0xEA;
        }
        """,
        constraints="=&r,=&r,r,r,r,r,r",
        args=[x, sixteen],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_bf16_imul(x, sixteen):
    """`e2m1_bf16` with multiplications instead of left shifts, as in `e4m3_bf16_imul`."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 b, c, d, e;
        mul.lo.u32 b, $4, $5;
        shf.r.wrap.b32 c, $4, $4, 6;
        shl.b32 d, $5, 2;
        mul.lo.u32 d, $4, d;
        shr.u32 e, $4, 2;
        and.b32 d, d, 0x80c080c0;
        and.b32 $0, $4, 0x81c081c0;
        and.b32 $1, b, 0x81c081c0;
        and.b32 $2, c, 0x81c081c0;
        lop3.b32 $3, e, 0x01000100, d, 0xEA;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r,r,r,r",
        args=[x, sixteen],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_fp16(x):
    """Words of 8 codes, bit-permuted for float16, to float16 `value * 2**-14`; two results of four per word."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 b, c, d;
        shl.b32 b, $4, 8;
        shl.b32 d, $4, 7;
        shr.u32 c, $4, 3;
        and.b32 d, d, 0x80808080;
        lop3.b32 c, c, 0x0e0e0e0e, d, 0xEA;
        and.b32 $0, $4, 0x8e008e00;
        and.b32 $1, b, 0x8e008e00;
        and.b32 $2, c, 0xff00ff00;
        prmt.b32 $3, c, 0, 0x2404;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r",
        args=[x],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_fp16(x):
    """Words of 4 codes, bit-permuted for float16, to float16 `value * 2**-8`."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        shl.b32 a, $2, 1;
        shl.b32 b, $2, 7;
        and.b32 a, a, 0x80008000;
        and.b32 $0, $2, 0xbf80bf80;
        lop3.b32 $1, b, 0x3f803f80, a, 0xEA;
        }
        """,
        constraints="=&r,=&r,r",
        args=[x],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_fp16_imul(x, sixteen):
    """`e2m1_fp16` with multiplications instead of left shifts, as in `e4m3_bf16_imul`."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 b, c, d;
        shl.b32 b, $5, 4;
        mul.lo.u32 b, $4, b;
        shl.b32 d, $5, 3;
        mul.lo.u32 d, $4, d;
        shr.u32 c, $4, 3;
        and.b32 d, d, 0x80808080;
        lop3.b32 c, c, 0x0e0e0e0e, d, 0xEA;
        and.b32 $0, $4, 0x8e008e00;
        and.b32 $1, b, 0x8e008e00;
        and.b32 $2, c, 0xff00ff00;
        prmt.b32 $3, c, 0, 0x2404;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,r,r,r,r,r",
        args=[x, sixteen],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_fp16_imul(x, sixteen):
    """`e4m3_fp16` with a multiplication instead of the longer left shift, as in `e4m3_bf16_imul`."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        shl.b32 a, $2, 1;
        shl.b32 b, $3, 3;
        mul.lo.u32 b, $2, b;
        and.b32 a, a, 0x80008000;
        and.b32 $0, $2, 0xbf80bf80;
        lop3.b32 $1, b, 0x3f803f80, a, 0xEA;
        }
        """,
        constraints="=&r,=&r,r,r,r,r,r",
        args=[x, sixteen],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e8m0_words_bf16(words):
    """int32 words of four e8m0 bytes to four bfloat16 powers of two `2**(byte - 127)` (a byte of 0 gives 0)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        prmt.b32 a, $4, 0, 0x5140;
        prmt.b32 b, $4, 0, 0x7362;
        shl.b32 a, a, 7;
        shl.b32 b, b, 7;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }
        """,
        constraints="=h,=h,=h,=h,r",
        args=[words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def e8m0_words_fp16(words):
    """int32 words of four bytes up to 30 to four float16 powers of two `2**(byte - 15)` (a byte of 0 gives 0)."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        prmt.b32 a, $4, 0, 0x5140;
        prmt.b32 b, $4, 0, 0x7362;
        shl.b32 a, a, 10;
        shl.b32 b, b, 10;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }
        """,
        constraints="=h,=h,=h,=h,r",
        args=[words],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=1,
    )


@triton.jit
def low_half(words, FP16: tl.constexpr):
    """The 16-bit float in the low half of int32 words."""
    half = (words & 0xFFFF).to(tl.int16)
    if FP16:
        return half.to(tl.float16, bitcast=True)
    else:
        return half.to(tl.bfloat16, bitcast=True)


@triton.jit
def high_half(words, FP16: tl.constexpr):
    """The 16-bit float in the high half of int32 words."""
    half = (words >> 16).to(tl.int16)
    if FP16:
        return half.to(tl.float16, bitcast=True)
    else:
        return half.to(tl.bfloat16, bitcast=True)


@triton.jit
def to_fragments_4bit(a, b, RC: tl.constexpr, KC: tl.constexpr):
    """Four-bit codes' two results `[RC, KC, 4, 512]` to `[RC * 64, KC * 64]`, no value leaving its lane."""
    w = tl.join(a, b).reshape(RC, KC, 4, 8, 4, 4, 2, 2, 2)
    return w.trans(0, 2, 6, 3, 1, 5, 8, 4, 7).reshape(RC * 64, KC * 64)


@triton.jit
def to_fragments_8bit(w, RC: tl.constexpr, KC: tl.constexpr):
    """Eight-bit codes' results `[RC, KC, 4, 512]` to `[RC * 64, KC * 32]`, no value leaving its lane."""
    w = w.reshape(RC, KC, 4, 8, 4, 2, 2, 2, 2)
    return w.trans(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(RC * 64, KC * 32)


@triton.jit
def decode_codes(packed, FORMAT: tl.constexpr, FP16: tl.constexpr, HAS_ZERO: tl.constexpr, RAW: tl.constexpr,
                 RC: tl.constexpr, KC: tl.constexpr):  # fmt: skip
    """Bytes `[RC, KC, 4, 512]` of RC x KC chunks to 16-bit floats `[RC * 64, KC * chunk columns]` in register order.

    Integers: code times `weights.code_factors`, and times 2**-127 if RAW or HAS_ZERO, else less 8 or 128 before. For
    float16: code - 8, with HAS_ZERO code + 1024 (int4); code - 128 (int8). "mxfp4": value * 2**-126; "mxfp8": value *
    2**-120; for float16 value * 2**-14, value * 2**-8.
    """
    if FORMAT == "int4" or FORMAT == "mxfp4":
        if FORMAT == "mxfp4" and FP16:
            a, b = e2m1_fp16(packed)
        elif FORMAT == "mxfp4":
            a, b = e2m1_bf16(packed)
        elif FP16:
            a, b = u4_fp16(packed, not HAS_ZERO)
        elif RAW or HAS_ZERO:
            a, b = u4_raw(packed)
        else:
            a, b = u4_bf16(packed)
        return to_fragments_4bit(a, b, RC, KC)
    else:
        if FORMAT == "mxfp8" and FP16:
            w = e4m3_fp16(packed)
        elif FORMAT == "mxfp8":
            w = e4m3_bf16(packed)
        elif FP16:
            w = u8_fp16(packed)
        elif RAW or HAS_ZERO:
            w = u8_raw(packed)
        else:
            w = u8_bf16(packed)
        return to_fragments_8bit(w, RC, KC)


@triton.jit
def decode_mx_scales(words, FP16: tl.constexpr, RC: tl.constexpr, KB: tl.constexpr, GROUPS: tl.constexpr):
    """int32 `[RC, KB, 4, 16]` to 16-bit floats `[RC * 64, KB * GROUPS]`; GROUPS (1, 2 or 4) scales of each word are
    used."""
    if FP16:
        a, b, c, d = e8m0_words_fp16(words)
    else:
        a, b, c, d = e8m0_words_bf16(words)
    if GROUPS == 4:
        joined = tl.join(tl.join(a, c), tl.join(b, d))
    elif GROUPS == 2:
        joined = tl.join(a, b)
    else:
        joined = a
    scale = joined.reshape(RC, KB, 4, 8, 2, GROUPS).trans(0, 2, 4, 3, 1, 5)
    return scale.reshape(RC * 64, KB * GROUPS)


@triton.jit
def decode_group_values(words, FP16: tl.constexpr, RC: tl.constexpr, GROUPS: tl.constexpr):
    """int32 `[RC, GROUPS, 4, 8]` to 16-bit floats `[RC * 64, GROUPS]`."""
    joined = tl.join(low_half(words, FP16), high_half(words, FP16))
    return joined.reshape(RC, GROUPS, 4, 8, 2).trans(0, 2, 4, 3, 1).reshape(RC * 64, GROUPS)
