"""Compiles the fused MoE kernels for sm_90a without a GPU, as the launcher would launch them.

`fused_moe` runs on CPU tensors with Triton's launch replaced by a recorder; each recorded launch is then compiled and
its machine code inspected: no register spills, weights decoded in registers (`HGMMA R`, wgmma's register operand), no
fallback to the older matrix instruction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.lib.kernel_launches import (  # noqa: E402
    LAYERS,
    MEASURED,
    compile_launch,
    disassemble,
    launches,
    shipped,
    stack_bytes,
)
from tests.lib.machine_code import overwritten_in_flight  # noqa: E402
from tests.lib.tiers import sampled  # noqa: E402
from vllm_moe_oracle.kernels import config as configs  # noqa: E402
from vllm_moe_oracle.kernels import heuristic, launch_config  # noqa: E402
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig  # noqa: E402
from vllm_moe_oracle.kernels.weights import allocate_weights  # noqa: E402


def check(layer: str, tokens: int, config: LaunchConfig, most_stack: int = 0, **extra: Any) -> None:
    """Compiles a call's kernels and reads their machine code; `most_stack`: bytes a thread may spill."""
    format, group, hidden, inner, *_ = (LAYERS | MEASURED)[layer]
    for launch in launches(layer, tokens, config, **extra):
        compiled = compile_launch(launch)
        cubin, name = compiled.asm["cubin"], launch[0].__name__
        stack = stack_bytes(cubin)  # without one, nothing can spill
        assert stack <= most_stack, f"{name} of {layer} at {tokens} tokens spills {stack} bytes a thread: {config}"
        assert compiled.metadata.shared <= 227 * 1024
        if name in ("gate_up", "down", "down_loop_n", "down_fused_topk"):
            tile, columns = (config.gate_up, hidden) if name == "gate_up" else (config.down, inner)
            zero_points = extra.get("zero_points", False)
            needed = launch_config.shared_memory_bytes(tile, format, group, columns, zero_points=zero_points)
            least = most = needed
            if tile.n_tiles > 1:
                # Triton 3.9 brings h to registers a step at a time, through the same place, without the conversion.
                # Where rows have factors, each stage but one has them, too.
                least -= 2 * tile.bm * (columns - tile.bk) + 2048 + 8 * tile.bn
                if launch[2]["HAS_ROW_SCALE"]:
                    least += 4 * tile.bn * (tile.num_stages - 1)
            if tile.bm >= 64:  # handing over the results takes more
                most = launch_config.MAX_SHARED_MEMORY
            assert least <= compiled.metadata.shared <= most, f"{name}: {needed} bytes expected: {config}"
            code, _ = disassemble(cubin)
            assert most_stack or not re.search(r"\b(STL|LDL)\b", code)
            products = re.findall(r"\bHGMMA\S* R\d+, (\S+)", code)
            assert products, f"{name} of {layer} has no wgmma: {config}"
            assert all(operand.startswith("R") for operand in products)
            assert not re.search(r"\bHMMA", code)
            assert not overwritten_in_flight(code), f"{name} of {layer} at {tokens} tokens: {config}"


def with_zero_points() -> Iterator[tuple[str, int, LaunchConfig]]:
    """What layers of integers with zero points run; each configuration once."""
    seen = set()
    for layer, (format, group, hidden, inner, experts, top_k, *_) in (LAYERS | MEASURED).items():
        if not format.startswith("int"):
            continue
        weights = allocate_weights(format, experts, hidden, inner, group=group, zero_points=True, device="meta")
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            config = configs.choose_launch_config(weights, top_k, tokens)
            if config not in seen:
                seen.add(config)
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
def test_decode_kernels_compile(layer: str) -> None:
    format, group, hidden, inner, experts, top_k, _, bias = LAYERS[layer]
    weights = allocate_weights(format, experts, hidden, inner, group=group, bias=bias, device="meta")
    check(layer, 64, configs.choose_launch_config(weights, top_k, 64))


@pytest.mark.parametrize("layer", sampled(["gptoss", "qwen-mxfp8"], 2))
def test_float16_takes_the_instructions_of_bfloat16(layer: str) -> None:
    """One product a step, and about as many instructions and registers, with the shipped tiles."""
    format, group, hidden, inner, experts, top_k, _, bias = LAYERS[layer]
    weights = allocate_weights(format, experts, hidden, inner, group=group, bias=bias, device="meta")
    config = configs.choose_launch_config(weights, top_k, 64)
    check(layer, 64, config, dtype=torch.float16)
    counts = {}
    for dtype in (torch.bfloat16, torch.float16):
        for launch in launches(layer, 64, config, dtype=dtype):
            if launch[0].__name__ == "gate_up":
                code, _ = disassemble(compile_launch(launch).asm["cubin"])
                counts[dtype] = code.count("HGMMA"), len(re.findall(r"/\*[0-9a-f]{4,5}\*/", code))
    (products, instructions), (half_products, half_instructions) = counts[torch.bfloat16], counts[torch.float16]
    assert half_products == products and half_instructions <= 1.1 * instructions


@pytest.mark.parametrize("layer", sampled(["qwen-int4", "qwen-mxfp8"], 2))
def test_kernels_without_a_k_loop_compile(layer: str) -> None:
    up = TileConfig(4, 16, 128, k_parts=4, scale_accumulators=False, no_k_loop=True)
    down = TileConfig(1, 16, 128, num_warps=8, scale_accumulators=False, no_k_loop=True, fused_topk=True)
    check(layer, 1, LaunchConfig(up, down, per_slot=True))


def test_weights_are_loaded_before_the_predecessor_ends() -> None:
    up = TileConfig(8, 32, 128, k_parts=2)
    for down in (
        TileConfig(16, 64, 128, no_k_loop=True),
        TileConfig(1, 16, 128, num_warps=8, no_k_loop=True, fused_topk=True),
    ):
        for launch in launches("qwen-int4", 1, LaunchConfig(up, down, per_slot=True)):
            if launch[0].__name__ in ("down", "down_fused_topk"):
                code, _ = disassemble(compile_launch(launch).asm["cubin"])
                loads, wait = [m.start() for m in re.finditer(r"\bLDG\.E\.128", code)], code.index("ACQBULK")
                tile_bytes = down.bn * 768 // 2 * (8 if down.fused_topk else 1)
                assert sum(at < wait for at in loads) >= tile_bytes / (16 * 32 * down.num_warps)


def test_n_tiles_compile() -> None:
    check(
        "kimi",
        64,
        LaunchConfig(
            TileConfig(16, 128, 128), TileConfig(16, 64, 128, num_stages=3, scale_accumulators=False, n_tiles=8)
        ),
    )


def test_split_and_fused_sum_compile() -> None:
    config = LaunchConfig(
        TileConfig(16, 64, 128, split_k=2),
        TileConfig(16, 64, 128, split_k=2),
        per_slot=True,
        fuse_sum=True,
        prefetch=True,
    )
    check("qwen-int8", 1, config)


def by_tier() -> Iterator[Any]:
    """Every second configuration for one layer in the full tier; the others, and all for other layers, in the
    matrix's."""
    seen: set[LaunchConfig] = set()
    for layer, tokens, config in shipped():
        is_full = config not in seen and len(seen) % 2 == 0
        seen.add(config)
        yield pytest.param(layer, tokens, config, marks=pytest.mark.slow if is_full else pytest.mark.matrix)


@pytest.mark.parametrize(("layer", "tokens", "config"), list(by_tier()))
def test_every_shipped_configuration_compiles(layer: str, tokens: int, config: LaunchConfig) -> None:
    check(layer, tokens, config)


_INT8 = "int8 g128: 256x8 3072x384 gated"
SPILLED = {("qwen-int4", 32): 16, **{(_INT8, tokens): 8 for tokens in (16, 64, 128, 256)}}
"""Bytes of stack that Triton 3.6 gives a thread where a tile of the table meets zero points (kernels/README.md)."""


@pytest.mark.matrix
@pytest.mark.parametrize(("layer", "tokens", "config"), [*with_zero_points()])
def test_shipped_configurations_compile_with_zero_points(layer: str, tokens: int, config: LaunchConfig) -> None:
    check(layer, tokens, config, most_stack=SPILLED.get((layer, tokens), 0), zero_points=True)


@pytest.mark.slow
@pytest.mark.parametrize("layer", list(LAYERS))
def test_invariant_configuration_compiles(layer: str) -> None:
    check(layer, 64, launch_config.BATCH_INVARIANT_CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("tokens", [1, 64])
def test_float16_compiles(layer: str, tokens: int) -> None:
    format, group, hidden, inner, experts, top_k, activation, bias = LAYERS[layer]
    zero_points = format.startswith("int")
    weights = allocate_weights(format, experts, hidden, inner, gated=activation != "relu2", group=group, bias=bias,
                       dtype=torch.float16, zero_points=zero_points, device="meta")  # fmt: skip
    check(layer, tokens, heuristic.heuristic_config(weights, top_k, tokens), dtype=torch.float16,
          zero_points=zero_points)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_float16_of_long_rows_compiles(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """Where a product takes 128 rows of 256 columns."""
    layer = (format, 32, 4096, 4096, 8, 2, "silu", False)
    monkeypatch.setitem(LAYERS, "long", layer)
    weights = allocate_weights(format, 8, 4096, 4096, group=32, dtype=torch.float16, device="meta")
    config = heuristic.heuristic_config(weights, 2, 16)
    assert (config.down.bn, config.down.bk) == (128, 256)
    check("long", 16, config, dtype=torch.float16)


MX_CONFIGURATIONS = [each for each in shipped() if "mxfp" in (LAYERS | MEASURED)[each[0]][0]]


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "tokens", "config"), MX_CONFIGURATIONS[::8])
def test_an_eighth_of_mx_configurations_compiles_for_float16(layer: str, tokens: int, config: LaunchConfig) -> None:
    check(layer, tokens, config, dtype=torch.float16)


@pytest.mark.slow
def test_quantized_activations_compile() -> None:
    for layer in ("qwen-mxfp8", "nemotron"):
        config = LaunchConfig(TileConfig(16, 64, 128), TileConfig(16, 128, 128, num_stages=3), per_slot=True)
        check(layer, 2, config, quantize_activations=True)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 16, 256])
def test_quantized_activations_have_configurations(tokens: int) -> None:
    weights = allocate_weights("mxfp8", 128, 2048, 768, device="meta")
    config = configs.choose_launch_config(weights, 8, tokens, quantize=True)
    assert launch_config.keeps_mx_groups(weights, config)
    check("qwen-mxfp8", tokens, config, quantize_activations=True)
