"""Device functions that turn a tile of accumulators into stored values: scales, biases, router weights, activation."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def mxfp8_round_trip(x, GROUP_AXIS: tl.constexpr):
    """float32 -> MXFP8 (e4m3, one e8m0 scale per slice along GROUP_AXIS) -> float32.

    The scale's exponent is ceil(log2(amax / 448)), limited to [-127, 127], as vLLM's MXFP8 quantization has it.
    """
    amax = tl.maximum(tl.max(tl.abs(x), axis=GROUP_AXIS, keep_dims=True), 1.1754943508222875e-38)
    # 448 = 1.75 * 2**8, so the ceiling steps where amax's mantissa passes 1.75: exact, unlike a quotient's logarithm.
    bits = amax.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    # Two factors each way, because 2**-127 and 2**127 times a value need not be normal numbers.
    half = exponent >> 1
    rest = exponent - half
    down = x * ((127 - half) << 23).to(tl.float32, bitcast=True) * ((127 - rest) << 23).to(tl.float32, bitcast=True)
    code = tl.minimum(tl.maximum(down, -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
    return code * ((127 + half) << 23).to(tl.float32, bitcast=True) * ((127 + rest) << 23).to(tl.float32, bitcast=True)


@triton.jit
def activate(gate, up, alpha, beta, limit, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """The gated activation named by `ActivationSpec.kernel`, in float32, after limits if any."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if ACTIVATION == "swiglu":
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)
    elif ACTIVATION == "gelu":
        return gate * 0.5 * (1.0 + libdevice.erf(gate * 0.7071067811865476)) * up
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh", "no formula for this gated activation")
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * 0.5 * (1.0 + libdevice.tanh(inner)) * up


@triton.jit
def activate_ungated(x, ACTIVATION: tl.constexpr):
    """The activation of experts without a gate, named by `ActivationSpec.ungated_kernel`, in float32."""
    if ACTIVATION == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        tl.static_assert(False, "no formula for this activation without a gate")
        return x


@triton.jit
def load_epilogue_operands(row_scale_ptr, bias_ptr, router_ptr, first, n, slot, slot_mask, padded,
                           HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr):  # fmt: skip
    """(row scales, biases, router weights) of rows n, an expert's `first` of `padded`; a zero for what is absent.

    Small tiles load them before the K loop, which hides the latency. Large tiles load them after it, because the loop
    needs the registers.
    """
    row_scale = 0.0
    bias = 0.0
    router = 0.0
    if HAS_ROW_SCALE:
        row_scale = tl.load(row_scale_ptr + first + n, mask=n < padded, other=0.0)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + first + n, mask=n < padded, other=0.0)
    if HAS_ROUTER:
        router = tl.load(router_ptr + slot, mask=slot_mask, other=0.0).to(tl.float32)
    return row_scale, bias, router


@triton.jit
def load_addend(addend_ptr, slot, slot_mask, stride, tile_n, inner, OUT: tl.constexpr):
    """float32 [OUT, slots]: a tile's columns of the addend's rows `slot`, which are `stride` elements apart."""
    column = tile_n * OUT + tl.arange(0, OUT)
    ptrs = addend_ptr + slot.to(tl.int64)[None, :] * stride + column[:, None]
    return tl.load(ptrs, mask=slot_mask[None, :] & (column < inner)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_activated(acc, row_scale, bias, router, h_ptr, slot, slot_mask, tile_n, inner, alpha, beta, limit,
                    HAS_ROW_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHT_INPUT: tl.constexpr,
                    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, QUANTIZE: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr, addend_ptr=None):  # fmt: skip
    """The first product's epilogue: acc, float32 [BN, BM], becomes rows `slot` (where `slot_mask`) of h.

    addend: 16-bit [slots, inner], of gated experts [slots, 2 * inner] with gate columns, then up columns: is added
    before the activation. None adds nothing, and is no argument of the compiled kernel.
    """
    if HAS_ROW_SCALE:
        acc *= row_scale[:, None]
    if WEIGHT_INPUT:
        acc *= router[None, :]
    if HAS_BIAS:
        acc += bias[:, None]
    if GATED:
        OUT: tl.constexpr = BN // 2
        gate, up = tl.split(acc.reshape(BN // 16, 2, 8, BM).trans(0, 2, 3, 1))
        if addend_ptr is not None:
            gate += load_addend(addend_ptr, slot, slot_mask, 2 * inner, tile_n, inner, OUT).reshape(BN // 16, 8, BM)
            up += load_addend(addend_ptr + inner, slot, slot_mask, 2 * inner, tile_n, inner, OUT).reshape(
                BN // 16, 8, BM
            )
        value = activate(gate, up, alpha, beta, limit, ACTIVATION, HAS_LIMIT).reshape(OUT, BM)
    else:
        OUT: tl.constexpr = BN
        if addend_ptr is not None:
            acc += load_addend(addend_ptr, slot, slot_mask, inner, tile_n, inner, OUT)
        value = activate_ungated(acc, ACTIVATION)
    if QUANTIZE:
        value = mxfp8_round_trip(value.reshape(OUT // 32, 32, BM), 1).reshape(OUT, BM)
    value = value.to(h_ptr.dtype.element_ty)
    column = tile_n * OUT + tl.arange(0, OUT)
    h_ptrs = h_ptr + slot.to(tl.int64)[None, :] * inner + column[:, None]
    tl.store(h_ptrs, value, mask=slot_mask[None, :] & (column < inner)[:, None])


@triton.jit
def store_partial(acc, row_scale, bias, router, partial_ptr, slot, slot_mask, n, hidden, HAS_ROW_SCALE: tl.constexpr,
                  HAS_BIAS: tl.constexpr, WEIGHT_INPUT: tl.constexpr):  # fmt: skip
    """The second product's epilogue: acc, float32 [rows n, tokens],
    becomes rows `slot` (where `slot_mask`) of partial."""
    if HAS_ROW_SCALE:
        acc *= row_scale[:, None]
    if HAS_BIAS:
        acc += bias[:, None]
    if not WEIGHT_INPUT:
        acc *= router[None, :]
    offsets = slot.to(tl.int64)[None, :] * hidden + n[:, None]
    mask = slot_mask[None, :] & (n < hidden)[:, None]
    tl.store(partial_ptr + offsets, acc.to(partial_ptr.dtype.element_ty), mask=mask)
