"""What the kernels make of stored weights, without a GPU: the PTX of their decoders, run on the stored words.

The decoders are those of kernels/dequantize.py and fp8_dequantize.py. `run` runs the instructions of their assembly on
32-bit words and float64, with the rounding of the instruction. What the kernels do around them (mainloop.py: zero
points, scales, powers of two a row) is written out here. The result must be the canonical weights, exact but for one
rounding where group scales multiply the weights.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from vllm_moe_oracle.kernels import dequantize, fp8_dequantize  # noqa: E402
from vllm_moe_oracle.kernels import weights as kernel_weights  # noqa: E402
from vllm_moe_oracle.kernels.weights import PackedMatrix, PackedWeights  # noqa: E402
from vllm_moe_oracle.layouts import wgmma_fragments  # noqa: E402
from vllm_moe_oracle.layouts.float16_scales import MAX_SPREAD  # noqa: E402

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Words = np.ndarray
"""uint32."""


@dataclass(frozen=True)
class Float:
    """A 16-bit float: significant bits, and the exponent of its smallest subnormal number."""

    bits: int
    smallest: int

    def values(self, halves: Words) -> np.ndarray:
        """float64 of the low 16 bits."""
        if self.bits == 8:
            return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return halves.astype(np.uint16).view(np.float16).astype(np.float64)

    def rounded(self, values: np.ndarray) -> np.ndarray:
        """To the nearest, ties to even."""
        _, exponents = np.frexp(values)
        unit = np.maximum(exponents - self.bits, self.smallest)
        return np.ldexp(np.rint(np.ldexp(values, -unit)), unit)

    def halves(self, values: np.ndarray) -> Words:
        """Bits of numbers that the float has."""
        if self.bits == 8:
            return values.astype(np.float32).view(np.uint32) >> 16
        return values.astype(np.float16).view(np.uint16).astype(np.uint32)


BFLOAT16, FLOAT16 = Float(8, -133), Float(11, -24)


def assembly(name: str, index: int = 0) -> str:
    """The index-th assembly of a function of dequantize.py or fp8_dequantize.py."""
    function = getattr(dequantize, name, None) or getattr(fp8_dequantize, name)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "inline_asm" in ast.unparse(node.func)]
    texts = [call.args[0].value for call in sorted(calls, key=lambda call: call.lineno)]  # type: ignore[attr-defined]
    return str(texts[index])


def arithmetic(operation: str, operands: list[Words]) -> Words:
    """Two halves of a word at once: fma, mul or add, rounded to nearest."""
    kind = BFLOAT16 if "bf16" in operation else FLOAT16
    result = np.zeros_like(operands[0])
    for shift in (0, 16):
        x = [kind.values((word >> shift) & 0xFFFF) for word in operands]
        exact = x[0] + x[1] if operation.startswith("add") else x[0] * x[1] + (x[2] if len(x) > 2 else 0.0)
        result |= kind.halves(kind.rounded(exact)) << np.uint32(shift)
    return result


def run(text: str, registers: dict[str, Words]) -> dict[str, Words]:
    """Runs assembly; `registers` has the inputs, `$0` and so on."""
    found = dict(registers)
    like = next(iter(registers.values()))
    for line in text.strip().strip("{}").split(";"):
        if not (line := line.strip()) or line.startswith(".reg"):
            continue
        operation, _, rest = line.partition(" ")
        target, *names = (each.strip() for each in rest.split(","))
        x = [found[name] if name in found else np.full_like(like, int(name, 0)) for name in names]
        if operation == "mov.b32":
            value = x[0]
        elif operation == "and.b32":
            value = x[0] & x[1]
        elif operation == "lop3.b32":
            assert names[3] == "0xEA"  # (a & b) | c
            value = (x[0] & x[1]) | x[2]
        elif operation == "shr.u32":
            value = x[0] >> x[1]
        elif operation == "shl.b32":
            value = x[0] << x[1]
        elif operation == "mul.lo.u32":
            value = (x[0].astype(np.uint64) * x[1]).astype(np.uint32)
        elif operation == "prmt.b32":
            eight, selector = x[0].astype(np.uint64) | x[1].astype(np.uint64) << np.uint64(32), x[2].astype(np.uint64)
            assert not (selector & np.uint64(0x8888)).any()  # that would repeat signs
            places = [selector >> np.uint64(4 * byte) & np.uint64(7) for byte in range(4)]
            value = sum(
                (eight >> np.uint64(8) * place & np.uint64(255)) << np.uint64(8 * byte)
                for byte, place in enumerate(places)
            ).astype(np.uint32)
        elif operation == "shf.l.wrap.b32":
            assert names[0] == names[1]
            value = x[0] << x[2] | x[0] >> (32 - x[2])
        elif operation == "shf.r.wrap.b32":
            value = ((x[0].astype(np.uint64) | x[1].astype(np.uint64) << np.uint64(32)) >> x[2]).astype(np.uint32)
        else:
            assert operation in ("fma.rn.bf16x2", "mul.rn.bf16x2", "fma.rn.f16x2", "add.f16x2"), line
            value = arithmetic(operation, x)
        found[target] = value
    return found


def operand(name: str, stored: torch.Tensor, index: int = 0) -> Words:
    """16-bit `[rows, columns]` that a function of dequantize.py makes of an expert's codes `[N/64, K/c, 2048]`."""
    chunks, columns, _ = stored.shape
    words = stored.contiguous().numpy().view(np.uint32).reshape(chunks, columns, 4, 8, 4, 4)
    text = assembly(name, index)
    count = 4 if f"${4}" in text else 2
    inputs = {f"${count}": words}
    if name.endswith("imul"):
        inputs[f"${count + 1}"] = np.full_like(words, 16)
    found = run(text, inputs)
    # Register k8 * 2 + half of four, register half of two; its halves are parities. Dimensions: chunk of rows, warp,
    # half, g, chunk of columns, sixteen columns, k8, t, parity.
    if count == 2:
        words = words.reshape(*words.shape[:5], 2, 2)
        found = {key: value.reshape(words.shape) for key, value in found.items() if value.size == words.size}
        result = np.zeros((chunks, 4, 2, 8, columns, 2, 2, 4, 2), np.uint32)
        for half, parity in itertools.product(range(2), range(2)):
            value = found[f"${half}"] >> np.uint32(16 * parity) & 0xFFFF
            result[:, :, half, ..., parity] = value.transpose(0, 2, 3, 1, 5, 6, 4)
        return result.reshape(chunks * 64, columns * 32)
    result = np.zeros((chunks, 4, 2, 8, columns, 4, 2, 4, 2), np.uint32)
    for k8, half, parity in itertools.product(range(2), range(2), range(2)):
        value = found[f"${2 * k8 + half}"] >> np.uint32(16 * parity) & 0xFFFF
        result[:, :, half, :, :, :, k8, :, parity] = value.transpose(0, 2, 3, 1, 5, 4)
    return result.reshape(chunks * 64, columns * 64)


def as_e4m3(weights: PackedWeights, matrix: PackedMatrix) -> np.ndarray:
    """float64 `[stored rows, columns]`: the weights that fp8 products take, power of two a row and all."""
    chunks, columns, _ = matrix.codes[0].shape
    words = unsigned(matrix.codes[0]).reshape(chunks, columns, 4, 8, 4, 4)  # warp, g, t, sixteen columns
    scales = matrix.scales[0].view(torch.uint8).numpy().reshape(chunks, -1, 4, 8, 2, 4)
    scales = scales.transpose(0, 1, 5, 2, 3, 4).reshape(chunks, -1, 4, 8, 2)[:, : 2 * columns]  # of 32 columns
    scales = scales.reshape(chunks, columns, 2, 4, 8, 2).repeat(2, 2).transpose(5, 0, 1, 3, 4, 2)[..., None, :]
    constants = fp8_dequantize.LOW_TABLE, fp8_dequantize.HIGH_TABLE
    steps = fp8_dequantize.LOW_BINADE, fp8_dequantize.HIGH_BINADE
    inputs = {"$2": words, "$11": np.full_like(words, 16)}
    for first, (table, step) in zip((3, 7), zip(constants, steps, strict=True), strict=True):
        made = (scales.astype(np.int64) * step.value + table.value & 0xFFFFFFFF).astype(np.uint32)
        for half in range(2):  # rows g and g + 8: the operands of two bytes each
            inputs[f"${first + 2 * half}"] = np.broadcast_to(made[half], words.shape)
    found = run(assembly("e2m1_e4m3"), inputs)
    result = np.zeros((chunks, 4, 2, 8, columns, 4, 16))
    for half, t, byte in itertools.product(range(2), range(4), range(4)):
        values = (found[f"${half}"][..., t, :] >> np.uint32(8 * byte) & 0xFF).astype(np.uint8)
        values = torch.from_numpy(values).view(torch.float8_e4m3fn).double().numpy()
        result[:, :, half, ..., (2 * t + 1, 2 * t + 9, 2 * t, 2 * t + 8)[byte]] = values.transpose(0, 2, 3, 1, 4)
    decoded = result.reshape(chunks * 64, columns * 64)[:, : matrix.columns]
    return decoded * fp8_dequantize.EXCESS.value * matrix.row_scale[0].double().numpy()[:, None]


def group_halves(words: Words) -> Words:
    """Words `[N/64, groups, 32]` of group values to 16-bit halves `[rows, groups]`."""
    chunks, groups, _ = words.shape
    split = words.reshape(chunks, groups, 4, 8)
    both = np.stack([split & 0xFFFF, split >> 16], axis=-1)  # rows g, g + 8
    return both.transpose(0, 2, 4, 3, 1).reshape(chunks * 64, groups)


def unsigned(words: torch.Tensor) -> Words:
    return words.contiguous().numpy().view(np.uint32)


def multiplied(weights: PackedWeights, matrix: PackedMatrix, promote: bool, by_products: bool) -> np.ndarray:
    """float64 `[stored rows, columns]`: what x is multiplied by, power of two a row and all. As in mainloop.py."""
    mx, half = weights.format.startswith("mx"), weights.dtype == torch.float16
    codes, columns = matrix.codes[0], matrix.columns
    if mx:
        kind, short = (FLOAT16, "fp16") if half else (BFLOAT16, "bf16")
        name = {"mxfp4": "e2m1", "mxfp8": "e4m3"}[weights.format] + f"_{short}" + by_products * "_imul"
        decoded = kind.values(operand(name, codes))[:, :columns]
        scales = matrix.scales[0].view(torch.uint8).numpy().reshape(codes.shape[0], -1, 4, 8, 2, 4)
        scales = scales.transpose(0, 2, 4, 3, 1, 5).reshape(decoded.shape[0], -1)[:, : columns // 32]
        exponents = scales.astype(np.uint32)
        assert not half or exponents.max() <= 30
        powers = kind.values(exponents << (10 if half else 7))
        values = kind.rounded(decoded * powers.repeat(32, 1))
        assert not half or np.abs(values).max() <= np.finfo(np.float16).max
        return values * matrix.row_scale[0].double().numpy()[:, None]
    kind, prefix = (FLOAT16, "u4" if weights.format == "int4" else "u8") if half else (
        BFLOAT16, "u4" if weights.format == "int4" else "u8")  # fmt: skip
    zeros, group = matrix.zeros, weights.group
    raw = not half and (zeros is not None or (group > 0 and not promote))
    name = f"{prefix}_fp16" if half else f"{prefix}_raw" if raw else f"{prefix}_bf16"
    values = kind.values(operand(name, codes, int(half and prefix == "u4" and zeros is not None)))[:, :columns]
    if zeros is not None:
        zero = kind.values(group_halves(unsigned(zeros[0])))
        zero = zero.repeat(columns // zero.shape[1], 1)
        values = kind.rounded(values - zero) if half else kind.rounded(values * 2.0**127 + zero)
    if group:
        words = unsigned(matrix.scales[0])
        scale = kind.values(group_halves(words)).repeat(group, 1)
        small = not half and zeros is None
        if promote:
            values = values * scale * (2.0**-127 if small else 1.0)
        elif small:
            middle = run(assembly("scaled_midpoints", 0 if prefix == "u4" else 1), {"$1": words})["$0"]
            values = kind.rounded(values * scale + kind.values(group_halves(middle)).repeat(group, 1))
        else:
            values = kind.rounded(values * scale)
    if matrix.row_scale is not None:
        values = values * matrix.row_scale[0].double().numpy()[:, None]
    return values


def stored(format: str, group: int, dtype: torch.dtype, zero_points: bool, gated: bool) -> list[tuple]:
    """(weights, matrix, codes, scales, zero points) of both products of a layer of one expert."""
    hidden, inner = {128: (384, 256), 64: (320, 192)}.get(group, (288, 96))
    weights = kernel_weights.allocate_weights(
        format, 1, hidden, inner, gated=gated, group=group, dtype=dtype, zero_points=zero_points
    )
    bits = kernel_weights.code_bits(format)
    generator = torch.Generator().manual_seed(group + bits)
    found = []
    for which, matrix in (("w13", weights.w13), ("w2", weights.w2)):
        rows, columns = matrix.rows, matrix.columns
        groups = columns // group if group else 1
        codes = torch.randint(0, 256, (rows, columns * bits // 8), generator=generator, dtype=torch.uint8)
        if format == "mxfp8":
            codes[codes & 127 == 127] = 0  # NaN
        if format.startswith("mx"):
            least = 130 - 1 - MAX_SPREAD[format] if dtype == torch.float16 else 100
            scales = torch.randint(least, 130, (rows, groups), generator=generator, dtype=torch.uint8)
        else:
            exponents = torch.randint(-12, 3, (rows, groups), generator=generator)
            scales = torch.ldexp(torch.rand(rows, groups, generator=generator), exponents).to(dtype)
            scales[3] = 0
            if dtype == torch.bfloat16:
                scales[5] *= 2.0**60
                scales[7] *= 2.0**-90
        zeros = None
        if zero_points:
            zeros = torch.randint(0, 2**bits, (rows, groups), generator=generator, dtype=torch.uint8)
        kernel_weights.pack_expert(weights, which, 0, codes, scales, zeros)
        found.append((weights, matrix, codes, scales, zeros))
    return found


def canonical(weights: PackedWeights, matrix: PackedMatrix, codes, scales, zeros, promote: bool) -> np.ndarray:
    """float64 `[rows, columns]` in stored order: what the weights are, rounded once where the kernels round."""
    bits, columns = kernel_weights.code_bits(weights.format), matrix.columns
    numbers = codes.numpy()
    if bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(numbers.shape[0], -1)
    factors = scales.double().numpy()
    if weights.format == "mxfp4":
        values = E2M1[numbers & 7] * np.where(numbers & 8, -1.0, 1.0)
    elif weights.format == "mxfp8":
        values = codes.view(torch.float8_e4m3fn).double().numpy()
    else:
        middle = 2.0 ** (bits - 1) if zeros is None else zeros.double().numpy().repeat(columns // zeros.shape[1], 1)
        values = numbers - middle
    if weights.format.startswith("mx"):
        factors = 2.0 ** (factors - 127)
    values = values * factors.repeat(columns // factors.shape[1], 1)
    if weights.group and not weights.format.startswith("mx") and not promote:
        # Of bfloat16, whose rows are scaled by powers of two, only the significant bits count.
        kind = Float(8, -(10**6)) if weights.dtype == torch.bfloat16 else FLOAT16
        values = kind.rounded(values)
    if matrix is weights.w13 and weights.gated:
        values = wgmma_fragments.pair_gate_up(torch.from_numpy(values)).numpy()
    return values


INTEGERS = [
    (format, group, dtype, zero_points)
    for format in ("int4", "int8")
    for group in (0, 32, 64, 128)
    for dtype in (torch.bfloat16, torch.float16)
    for zero_points in (False, True)
]
MX = [(format, 32, dtype, False) for format in ("mxfp4", "mxfp8") for dtype in (torch.bfloat16, torch.float16)]


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize(("format", "group", "dtype", "zero_points"), INTEGERS + MX, ids=name_of)
def test_kernels_multiply_the_canonical_weights(format, group, dtype, zero_points, gated) -> None:
    for weights, matrix, *tensors in stored(format, group, dtype, zero_points, gated):
        for promote in (False, True) if group and not format.startswith("mx") else (False,):
            expected = canonical(weights, matrix, *tensors, promote)
            for by_products in (False, True) if format.startswith("mx") else (False,):
                found = multiplied(weights, matrix, promote, by_products)
                assert np.array_equal(found[: matrix.rows], expected), (promote, by_products)
                assert not found[matrix.rows :].any()


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("zero_points", [False, True])
def test_a_wrong_factor_is_seen(format: str, zero_points: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing and restoring share the factors, so that only what the kernels make of them tells."""

    def wrong(format: str, dtype: torch.dtype, rows: int, device: object = None) -> torch.Tensor:
        return torch.full((rows,), 2.0**-3, dtype=torch.float64)

    monkeypatch.setattr(kernel_weights, "code_factors", wrong)
    for weights, matrix, *tensors in stored(format, 32, torch.bfloat16, zero_points, True):
        expected = canonical(weights, matrix, *tensors, True)
        assert not np.array_equal(multiplied(weights, matrix, True, False)[: matrix.rows], expected)


@pytest.mark.parametrize(
    ("format", "old", "new"), [("int4", "0x80808008", "0x80088008"), ("mxfp8", "80f080f0", "80e080e0")]
)
def test_a_wrong_constant_is_seen(format: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = assembly

    def changed(name: str, index: int = 0) -> str:
        return whole(name, index).replace(old, new)

    assert any(old in whole(name) for name in ("scaled_midpoints", "e4m3_bf16"))
    monkeypatch.setitem(globals(), "assembly", changed)
    for weights, matrix, *tensors in stored(format, 32, torch.bfloat16, False, True):
        expected = canonical(weights, matrix, *tensors, False)
        assert not np.array_equal(multiplied(weights, matrix, False, False)[: matrix.rows], expected)


def float16_layer(format: str, scales: torch.Tensor) -> tuple[PackedWeights, torch.Tensor]:
    """A layer whose w13 has every code in every block of 32 columns of 16 rows; scales [blocks], the same in each row.

    Returns the layer and w13's codes.
    """
    columns = 32 * len(scales)
    weights = kernel_weights.allocate_weights(format, 1, columns, 64, gated=False, dtype=torch.float16)
    places = torch.arange(64)[:, None] * 32 + torch.arange(32)[None, :]
    if format == "mxfp8":
        codes = (places % 256).repeat(1, len(scales)).to(torch.uint8)
        codes[codes & 127 == 127] = 0
    else:
        codes = ((places[:, ::2] % 16) | (places[:, 1::2] * 5 % 16 << 4)).repeat(1, len(scales)).to(torch.uint8)
    kernel_weights.pack_expert(weights, "w13", 0, codes, scales.expand(64, -1).contiguous())
    return weights, codes


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("largest", [254, 127, 40, 25])
def test_float16_is_exact_down_to_the_last_scale(format: str, largest: int) -> None:
    """All codes under every scale that is allowed, subnormal ones of e4m3 and negative zeros among them."""
    scales = torch.arange(largest - MAX_SPREAD[format], largest + 1).to(torch.uint8)
    weights, codes = float16_layer(format, scales)
    expected = canonical(weights, weights.w13, codes, scales.expand(64, -1), None, False)
    for by_products in (False, True):
        assert np.array_equal(multiplied(weights, weights.w13, False, by_products), expected)
    # One binade more loses the last bit of the smallest codes.
    weights, codes = float16_layer(format, torch.cat([scales[:1] - 1, scales]))
    spread = torch.cat([scales[:1] - 1, scales]).expand(64, -1)
    lost = multiplied(weights, weights.w13, False, False) - canonical(weights, weights.w13, codes, spread, None, False)
    unit = 2.0 ** (largest - 127 - {"mxfp4": 25, "mxfp8": 31}[format])
    assert lost[:, :32].any() and not lost[:, 32:].any() and np.abs(lost).max() <= unit / 2


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_scales_far_below_the_largest_become_zero_in_float16(format: str) -> None:
    """From the largest to the smallest e8m0 number: what float16 cannot hold is still no other weight."""
    scales = torch.tensor([0, 30, 223, 224, 225, 226, 254], dtype=torch.uint8)
    weights, codes = float16_layer(format, scales)
    found = multiplied(weights, weights.w13, False, True).reshape(64, -1, 32)
    expected = canonical(weights, weights.w13, codes, scales.expand(64, -1), None, False).reshape(64, -1, 32)
    assert not found[:, :4].any() and np.array_equal(found[:, 6], expected[:, 6])
    top = {"mxfp4": 1, "mxfp8": 7}[format]
    assert np.abs(found - expected).max() <= 2.0 ** (127 - 25 - top) + 2.0 ** (127 - 30) * 448 * (format == "mxfp8")


def test_blocks_of_zeros_may_have_any_scale_in_float16() -> None:
    scales = torch.tensor([0, 120, 121], dtype=torch.uint8).expand(64, -1).contiguous()
    for format, mask in (("mxfp4", 0x88), ("mxfp8", 0x80)):
        weights, codes = float16_layer(format, scales[0])
        codes[:, : codes.shape[1] // 3] &= mask  # signs alone
        kernel_weights.pack_expert(weights, "w13", 0, codes, scales)
        expected = canonical(weights, weights.w13, codes, scales, None, False)
        assert np.array_equal(multiplied(weights, weights.w13, False, False), expected)
        restored = kernel_weights.unpack_expert(weights, "w13", 0)
        assert torch.equal(restored[0], codes) and torch.equal(restored[1], scales)


def test_mxfp4_becomes_e4m3_exactly() -> None:
    """Scales as far apart as e4m3 holds them, and blocks of zeros with any scale."""
    generator = torch.Generator().manual_seed(0)
    weights = kernel_weights.allocate_weights("mxfp4", 1, 288, 96)
    for which, matrix in (("w13", weights.w13), ("w2", weights.w2)):
        shape = matrix.rows, matrix.columns // 32
        codes = torch.randint(0, 256, (matrix.rows, matrix.columns // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(
            110, 111 + wgmma_fragments.MAX_E4M3_SPREAD, shape, generator=generator, dtype=torch.uint8
        )
        codes[5, :16], scales[5, 0] = codes[5, :16] & 0x88, 7
        kernel_weights.pack_expert(weights, which, 0, codes, scales)
        assert (wgmma_fragments.scale_spread(codes, scales) <= wgmma_fragments.MAX_E4M3_SPREAD).all()
        expected = canonical(weights, matrix, codes, scales, None, False)
        assert np.array_equal(as_e4m3(weights, matrix)[: matrix.rows], expected)


@pytest.mark.parametrize(("old", "new"), [("0x80008000", "0x80000000"), ("0x0123", "0x0132"), ("0x4420", "0x4402")])
def test_a_changed_decoder_to_e4m3_is_found(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = assembly
    monkeypatch.setitem(globals(), "assembly", lambda name: original(name).replace(old, new))
    with pytest.raises(AssertionError):
        test_mxfp4_becomes_e4m3_exactly()
