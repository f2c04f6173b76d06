"""Compiles the fused MoE kernels for sm_90a without a GPU, as the launcher would launch them.

`fused_moe` runs on CPU tensors with Triton's launch replaced by a recorder; each recorded launch is then compiled and
its machine code inspected: no register spills, weights decoded in registers (`HGMMA R`, wgmma's register operand), no
fallback to the older matrix instruction.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from machine_code import overwritten_in_flight  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from vllm_moe_oracle.kernels import config as configs  # noqa: E402
from vllm_moe_oracle.kernels.config import Config, Tile  # noqa: E402
from vllm_moe_oracle.kernels.fused_moe import fused_moe, plan_workspace  # noqa: E402
from vllm_moe_oracle.kernels.weights import allocate  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64",
}  # fmt: skip

# format, group, hidden, intermediate, experts, top-k, activation, biases: small in experts, real in the rest
LAYERS = {
    "gptoss": ("mxfp4", 32, 2880, 2880, 32, 4, "swigluoai", True),
    "qwen-mxfp8": ("mxfp8", 32, 2048, 768, 128, 8, "silu", False),
    "qwen-int4": ("int4", 128, 2048, 768, 128, 8, "silu", False),
    "qwen-int8": ("int8", 128, 2048, 768, 128, 8, "silu", False),
    "kimi": ("int4", 32, 7168, 256, 384, 8, "silu", False),
    "nemotron": ("mxfp8", 32, 2688, 1856, 128, 6, "relu2", False),
    "mixtral": ("int4", 128, 4096, 14336, 8, 2, "silu", False),
    "glm": ("mxfp8", 32, 5120, 192, 160, 8, "silu", False),
}


MEASURED = {
    f"{name}: {shape}": (name.split()[0], int(group or 32), hidden, inner, experts, top_k,
                         "relu2" if kind == "plain" else "swigluoai" if hidden == inner else "silu", hidden == inner)
    for name, shapes in configs.measured_table().items()
    for group in [name.partition(" g")[2]]
    for shape in shapes
    for experts, top_k, hidden, inner, kind in [
        (*map(int, re.findall(r"\d+", shape)), shape.rpartition(" ")[2])
    ]
}  # fmt: skip
"""The layers whose tiles were measured; gpt-oss is the one that is square, with biases and an activation of its own."""


def launches(monkeypatch: pytest.MonkeyPatch, layer: str, tokens: int, config: Config, **extra: Any) -> list[Any]:
    """(kernel, positional arguments, keyword arguments) of every launch of one call."""
    format, group, hidden, inner, _, top_k, activation, bias = (LAYERS | MEASURED)[layer]
    dtype = extra.pop("dtype", torch.bfloat16)
    weights = allocate(format, 2, hidden, inner, gated=activation != "relu2", group=group, bias=bias, dtype=dtype,
                       zero_points=extra.pop("zero_points", False))  # fmt: skip
    plan = plan_workspace(weights, tokens, top_k, config, quantise=extra.get("quantise_activations", False))
    recorded: list[Any] = []

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        recorded.append((self, args, kwargs))

    monkeypatch.setattr(JITFunction, "run", record)
    x = torch.zeros(tokens, hidden, dtype=dtype)
    fused_moe(
        x, weights, torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32), activation=activation,
        workspace=torch.empty(plan.nbytes, dtype=torch.uint8), out=x.clone(),
        counters=torch.zeros(plan.counters + 1, dtype=torch.int32),
        limit=7.0 if activation == "swigluoai" else None, config=config, pdl=True, **extra,
    )  # fmt: skip
    return recorded


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str, int]:
    """Compiles one recorded launch for sm_90a: (compiled kernel, machine code, bytes of stack per thread)."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    positional = dict(zip(kernel.arg_names, args, strict=False))
    options = {key: value for key, value in kwargs.items() if key not in kernel.arg_names}
    for index, name in enumerate(kernel.arg_names):
        value = positional[name] if name in positional else kwargs[name]
        free = name not in kernel.do_not_specialize if hasattr(kernel, "do_not_specialize") else True
        if name.isupper() or (isinstance(value, int) and value == 1 and free):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return compiled, *disassemble(compiled.asm["cubin"])


def disassemble(cubin: bytes) -> tuple[str, int]:
    """Machine code with resource usage, and the bytes of stack per thread (spills live there)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(TOOLS / "cuobjdump"), "--dump-sass", "--dump-resource-usage", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", text)
    assert stack
    return text, int(stack[1])


def check(monkeypatch: pytest.MonkeyPatch, layer: str, tokens: int, config: Config, **extra: Any) -> None:
    format, group, hidden, inner, *_ = (LAYERS | MEASURED)[layer]
    for kernel, args, kwargs in launches(monkeypatch, layer, tokens, config, **extra):
        compiled, code, stack = compile_launch(kernel, args, kwargs)
        name = kernel.__name__
        assert stack == 0, f"{name} of {layer} at {tokens} tokens spills {stack} bytes a thread: {config}"
        assert not re.search(r"\b(STL|LDL)\b", code)
        assert compiled.metadata.shared <= 227 * 1024
        if name in ("gate_up", "down", "down_sweep", "down_merged"):
            tile, columns = (config.gate_up, hidden) if name == "gate_up" else (config.down, inner)
            more = {"zero_points": extra.get("zero_points", False), "half": extra.get("dtype") == torch.float16}
            needed = configs.shared_bytes(tile, format, group, columns, **more)
            least, most = (0.7 * needed if tile.sweep > 1 else needed), needed
            if tile.straight and more["half"]:  # two products go through the same memory, one after the other
                least = 0
            if tile.bm >= 64:  # handing over the results takes more
                most = configs.SHARED_BYTES
            assert least <= compiled.metadata.shared <= most, f"{name}: {needed} bytes expected: {config}"
            products = re.findall(r"\bHGMMA\S* R\d+, (\S+)", code)
            assert products, f"{name} of {layer} has no wgmma: {config}"
            assert all(operand.startswith("R") for operand in products)
            assert not re.search(r"\bHMMA", code)
            assert not overwritten_in_flight(code), f"{name} of {layer} at {tokens} tokens: {config}"


def shipped() -> Iterator[tuple[str, int, Config]]:
    """Every measured configuration, and what the rule gives for some layers; each once."""
    seen = set()
    for layer, (format, group, hidden, inner, experts, top_k, activation, bias) in (LAYERS | MEASURED).items():
        weights = allocate(format, experts, hidden, inner, gated=activation != "relu2", group=group, bias=bias,
                           device="meta")  # fmt: skip
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384):
            found = configs.choose_tiles if layer in MEASURED else configs.heuristic
            config = found(weights, top_k, tokens)
            if (layer, config) not in seen:
                seen.add((layer, config))
                yield layer, tokens, config


LOOP = """
        /*0100*/                   LDS.128 R20, [R3] ;
        /*0110*/                   HFMA2.BF16_V2 R24, R20, R9, R10 ;
        /*0120*/                   HGMMA.64x16x16.F32.BF16 R48, R24, gdesc[UR16], R48, gsb0 ;
        /*0130*/                   HFMA2.BF16_V2 R28, R21, R9, R10 ;
        /*0140*/                   HGMMA.64x16x16.F32.BF16 R48, R28, gdesc[UR16], R48, gsb0 ;
        /*0150*/                   WARPGROUP.DEPBAR.LE gsb0, {left} ;
        /*0160*/                   LDGSTS.E.BYPASS.128 [R29], desc[UR20][R30.64], P6 ;
        /*0170*/                   @P2 BRA 0x100 ;
        /*0180*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0190*/                   IMAD.WIDE R26, R1, 0x4, R2 ;
"""


def test_operands_of_products_in_flight_are_found() -> None:
    """One wait too short: the first product is done at the end of a step, the second is not."""
    assert overwritten_in_flight(LOOP.format(left="0x0")) == []
    assert overwritten_in_flight(LOOP.format(left="0x1")) == ["0x130 HFMA2.BF16_V2 R28, R21, R9, R10"]
    assert overwritten_in_flight(LOOP.format(left="0x2"))[0] == "0x110 HFMA2.BF16_V2 R24, R20, R9, R10"
    early = LOOP.format(left="0x0").replace("LDS.128 R20", "LDS.128 R28").replace("@P2 BRA 0x100", "NOP")
    assert overwritten_in_flight(early.replace("WARPGROUP.DEPBAR.LE gsb0, 0x0", "NOP")) == [
        "0x190 IMAD.WIDE R26, R1, 0x4, R2"
    ]


@pytest.mark.parametrize("layer", ["gptoss", "qwen-mxfp8", "qwen-int4"])
def test_decode_kernels_compile(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    format, group, hidden, inner, experts, top_k, _, bias = LAYERS[layer]
    weights = allocate(format, experts, hidden, inner, group=group, bias=bias, device="meta")
    check(monkeypatch, layer, 64, configs.choose_tiles(weights, top_k, 64))


@pytest.mark.parametrize("layer", ["qwen-int4", "qwen-mxfp8"])
def test_kernels_without_a_loop_compile(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    up = Tile(4, 16, 128, fold=4, promote=False, straight=True)
    down = Tile(1, 16, 128, warps=8, promote=False, straight=True, merge=True)
    check(monkeypatch, layer, 1, Config(up, down, per_slot=True))


def test_weights_are_asked_for_before_the_predecessor_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    up = Tile(8, 32, 128, fold=2)
    for down in (Tile(16, 64, 128, straight=True), Tile(1, 16, 128, warps=8, straight=True, merge=True)):
        for kernel, args, kwargs in launches(monkeypatch, "qwen-int4", 1, Config(up, down, per_slot=True)):
            if kernel.__name__ in ("down", "down_merged"):
                _, code, _ = compile_launch(kernel, args, kwargs)
                loads, wait = [m.start() for m in re.finditer(r"\bLDG\.E\.128", code)], code.index("ACQBULK")
                tile_bytes = down.bn * 768 // 2 * (8 if down.merge else 1)
                assert sum(at < wait for at in loads) >= tile_bytes / (16 * 32 * down.warps)


def test_a_sweep_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "kimi", 64, Config(Tile(16, 128, 128), Tile(16, 64, 128, stages=3, promote=False, sweep=8)))


def test_split_and_fused_sum_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(Tile(16, 64, 128, split=2), Tile(16, 64, 128, split=2), per_slot=True, fuse_sum=True, prefetch=True)
    check(monkeypatch, "qwen-int8", 1, config)


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "tokens", "config"), list(shipped()))
def test_every_shipped_configuration_compiles(
    monkeypatch: pytest.MonkeyPatch, layer: str, tokens: int, config: Config
) -> None:
    check(monkeypatch, layer, tokens, config)


@pytest.mark.slow
@pytest.mark.parametrize("layer", list(LAYERS))
def test_invariant_configuration_compiles(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    check(monkeypatch, layer, 64, configs.INVARIANT)


@pytest.mark.slow
@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("tokens", [1, 64])
def test_float16_compiles(monkeypatch: pytest.MonkeyPatch, layer: str, tokens: int) -> None:
    format, group, hidden, inner, experts, top_k, activation, bias = LAYERS[layer]
    zero_points = format.startswith("int")
    weights = allocate(format, experts, hidden, inner, gated=activation != "relu2", group=group, bias=bias,
                       dtype=torch.float16, zero_points=zero_points, device="meta")  # fmt: skip
    check(monkeypatch, layer, tokens, configs.heuristic(weights, top_k, tokens), dtype=torch.float16,
          zero_points=zero_points)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_float16_of_long_rows_compiles(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Where a product of integers or in bfloat16 takes 128 rows of 256 columns."""
    layer = (format, 32, 4096, 4096, 8, 2, "silu", False)
    monkeypatch.setitem(LAYERS, "long", layer)
    tiles = {}
    for dtype in (torch.bfloat16, torch.float16):
        config = configs.heuristic(allocate(format, 8, 4096, 4096, group=32, dtype=dtype, device="meta"), 2, 16)
        tiles[dtype] = config.down.bn, config.down.bk
    assert tiles == {torch.bfloat16: (128, 256), torch.float16: (64, 256)}
    check(monkeypatch, "long", 16, config, dtype=torch.float16)


@pytest.mark.slow
def test_quantised_activations_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in ("qwen-mxfp8", "nemotron"):
        config = Config(Tile(16, 64, 128), Tile(16, 128, 128, stages=3), per_slot=True)
        check(monkeypatch, layer, 2, config, quantise_activations=True)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 16, 256])
def test_quantised_activations_have_configurations(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    weights = allocate("mxfp8", 128, 2048, 768, device="meta")
    config = configs.choose_tiles(weights, 8, tokens, quantise=True)
    assert configs.quantisable(weights, config)
    check(monkeypatch, "qwen-mxfp8", tokens, config, quantise_activations=True)
