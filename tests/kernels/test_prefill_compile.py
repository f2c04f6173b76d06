"""Compiles the persistent kernels for sm_90a without a GPU, as the launcher would launch them.

As in test_compile.py, launches are recorded, then compiled, then the machine code is read: no spills, weights
as wgmma's register operand, copies by the copy engine, and products that ptxas did not put one after the other (it says
so, in a warning, when it has to).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from tests.lib import kernel_launches  # noqa: E402
from tests.lib.kernel_launches import LAYERS, compile_launch, compile_with_log, disassemble, stack_bytes  # noqa: E402
from vllm_moe_oracle.kernels import fused_moe, prefill_launch  # noqa: E402
from vllm_moe_oracle.kernels.prefill_config import (  # noqa: E402
    PrefillConfig,
    measured_prefill_table,
    prefill_errors,
    resolve_stages,
)
from vllm_moe_oracle.kernels.weights import allocate_weights  # noqa: E402

KERNELS = ("count_slots", "place_slots", "gate_up", "down", "sum_topk_strips")
SPILLS = dict.fromkeys((("down", "gptoss"), ("down", "kimi"), ("down", "nemotron")), 8)
"""Bytes a thread that Triton 3.9 keeps on the stack, outside the loops, where 3.6 keeps none."""


def inner_loops(code: str) -> list[list[str]]:
    """The instructions of each loop without a loop inside that multiplies or copies ahead."""
    found = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+([^;]+);", code)]
    places = {at: index for index, (at, _) in enumerate(found)}
    loops = []
    for index, (at, text) in enumerate(found):
        target = re.search(r"\bBRA (?:\S+, )*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            loops.append((places[int(target[1], 16)], index))
    # Loops of a few instructions wait for a barrier; what lies behind the end goes back to where it came from.
    end = max(index for index, (_, text) in enumerate(found) if text.strip() == "EXIT")
    long = [(first, last) for first, last in loops if last - first > 4 and last < end]
    inner = [
        one for one in long if not any(one != other and one[0] <= other[0] and other[1] <= one[1] for other in long)
    ]
    bodies = [[text for _, text in found[first : last + 1]] for first, last in inner]
    return [body for body in bodies if any(re.search("HGMMA|LDGSTS|UTMALDG", text) for text in body)]


def check(monkeypatch: pytest.MonkeyPatch, layer: str, **extra: Any) -> None:
    launches = kernel_launches.launches(layer, 256, PrefillConfig(), **extra)
    assert tuple(kernel.__name__ for kernel, _, _ in launches) == KERNELS
    for kernel, args, kwargs in launches:
        compiled, log = compile_with_log((kernel, args, kwargs))
        cubin, name = compiled.asm["cubin"], f"{kernel.__name__} of {layer}"
        stack = stack_bytes(cubin)
        assert compiled.metadata.shared <= 227 * 1024
        known = 0 if triton.__version__.startswith("3.6.") else SPILLS.get((kernel.__name__, layer), 0)
        assert stack <= known, f"{name} spills {stack} bytes a thread"
        if kernel.__name__ in ("gate_up", "down"):
            code, _ = disassemble(cubin)
            loops = inner_loops(code)
            assert not any(re.search(r"\b(STL|LDL)\b", text) for loop in loops for text in loop), f"{name}: spills"
            # Tiles of 32, 64, 96 and 128 tokens: two groups that multiply, and the warps that copy.
            assert sum("HGMMA" in "".join(loop) for loop in loops) == 8, f"{name} is not built as expected"
            assert sum("UTMALDG" in "".join(loop) for loop in loops) == 4, f"{name} is not built as expected"
            # Rows of x are gathered; those of h are copied as they lie.
            gathers = sum("".join(loop).count("LDGSTS") for loop in loops)
            assert gathers >= 20 if kernel.__name__ == "gate_up" else gathers <= 16, f"{name} is not built as expected"
            products = [line for line in code.splitlines() if "HGMMA" in line]
            assert products, f"{name} has no wgmma"
            # The first operand after the accumulator is the weights': registers, no descriptor.
            assert all(line.split("HGMMA")[1].split(",")[1].strip().startswith("R") for line in products)
            for width in (128, 64, 32):
                assert any(f"64x{width}x16" in line for line in products), f"{name}: no tile of {width} tokens"
            if layer in ("qwen-mxfp8", "nemotron", "gptoss"):  # one for four e4m3 codes, two for eight e2m1 codes
                counts = [len(re.findall(r"\bIMAD ", "".join(loop))) for loop in loops if "HGMMA" in "".join(loop)]
                assert min(counts) >= 16, f"{name}: shifts instead of products"
            assert "serialized" not in log, f"{name}: products in single file"


def test_persistent_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "qwen-int4")


@pytest.mark.full
def test_half_of_a_large_sum_runs_beside_the_second_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both halves of the columns in one compiled kernel each, and room for the sum's programs beside the second."""
    for layer, tiles in (("qwen-int4", 8), ("gptoss", 12), ("nemotron", 11), ("kimi", 28)):
        whole = kernel_launches.launches(layer, 256, PrefillConfig())[-2:]
        monkeypatch.setattr(prefill_launch, "_MIN_OVERLAPPED_BYTES", 256 * LAYERS[layer][5] * LAYERS[layer][2] * 2)
        launches = kernel_launches.launches(layer, 256, PrefillConfig())
        monkeypatch.undo()
        names = [kernel.__name__ for kernel, _, _ in launches]
        assert names == [*KERNELS[:4], "down", "sum_topk_strips"]
        first, second, total = (
            dict(zip(kernel.arg_names, args, strict=False)) | kwargs for kernel, args, kwargs in launches[-3:]
        )
        first_options, second_options = (kwargs for _, _, kwargs in launches[-3:-1])
        assert (first["begin"], first["tiles"]) == (0, tiles // 2)
        assert (second["begin"], second["tiles"]) == (tiles // 2, tiles - tiles // 2)
        assert total["ready"] == tiles // 2
        # What is compiled for one launch runs in two.
        assert first_options == second_options == whole[0][2]
        assert launches[-1][2] == whole[1][2]
        assert all(name in launches[-2][0].do_not_specialize for name in ("begin", "tiles"))
        assert all(name in launches[-1][0].do_not_specialize for name in ("tokens", "ready"))
        threads = 32 * 4 * 3
        assert first["maxnreg"] * threads + total["maxnreg"] * 32 * 4 <= 65536
        shared = compile_launch(launches[-2]).metadata.shared + compile_launch(launches[-1]).metadata.shared
        assert shared + 2 * 1024 <= 228 * 1024, f"{layer}: a program of each kernel does not fit"


def test_lists_of_very_many_slots_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a launch more, that adds up the chunks' counts."""
    monkeypatch.setattr(prefill_launch, "_MAX_INLINE_COUNTS", 0)
    launches = kernel_launches.launches("qwen-int4", 256, PrefillConfig())
    assert [kernel.__name__ for kernel, _, _ in launches] == ["count_slots", "scan_chunks", *KERNELS[1:]]
    for kernel, args, kwargs in launches[:3]:
        stack = stack_bytes(compile_launch((kernel, args, kwargs)).asm["cubin"])
        assert stack == 0, f"{kernel.__name__} spills {stack} bytes a thread"


@pytest.mark.slow
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer != "qwen-int4"])
def test_every_format_compiles(monkeypatch: pytest.MonkeyPatch, layer: str) -> None:
    check(monkeypatch, layer)


@pytest.mark.slow
def test_zero_points_and_float16_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "qwen-int4", zero_points=True, dtype=torch.float16)
    check(monkeypatch, "kimi", zero_points=True)
    for layer in ("gptoss", "qwen-mxfp8", "nemotron"):
        check(monkeypatch, layer, dtype=torch.float16)


def test_layers_that_do_not_fit_are_refused_with_reasons() -> None:
    def reasons(format: str, hidden: int, inner: int, **options: Any) -> str:
        return "; ".join(prefill_errors(allocate_weights(format, 1, hidden, inner, device="meta", **options)))

    assert not reasons("mxfp4", 2880, 2880)
    assert reasons("mxfp4", 2848, 2880) == "hidden size 2848 is not a multiple of 64, the columns of a step"
    assert not reasons("mxfp4", 2880, 1440) and not reasons("mxfp8", 256, 96) and not reasons("int8", 256, 96, group=0)
    assert "intermediate size 96 is not a multiple of 64" in reasons("int4", 256, 96, group=32)
    assert "intermediate size 96" in reasons("int8", 256, 96, group=32, zero_points=True)
    assert "zero points of one scale per row" in reasons("int4", 256, 256, group=0, zero_points=True)
    assert not reasons("mxfp8", 256, 256, dtype=torch.float16)


@pytest.mark.parametrize("stages", (-1, 1))
def test_prefill_refuses_what_cannot_run(stages: int) -> None:
    with pytest.raises(ValueError, match="at least two stages"):
        PrefillConfig(num_stages=stages)


def test_stages_fit_into_shared_memory() -> None:
    formats = (("int4", 32), ("int4", 128), ("int8", 32), ("mxfp4", 32), ("mxfp8", 32))
    for format, group in formats:
        for zero_points in {False, format.startswith("int")}:
            weights = allocate_weights(format, 1, 256, 256, group=group, zero_points=zero_points, device="meta")
            for gated in (False, True):
                assert 3 <= resolve_stages(weights, PrefillConfig(), gated) <= 8


def test_table_of_hand_overs_is_whole() -> None:
    for shapes in measured_prefill_table().values():
        for rows in shapes.values():
            tokens = [row["tokens"] for row in rows]
            assert tokens == sorted(set(tokens)) and tokens[-1] >= 10**9
            for row in rows:
                assert row["config"] is None or PrefillConfig(**row["config"])


def test_an_unsupported_layer_is_refused_also_when_chosen_by_name() -> None:
    weights = allocate_weights("mxfp8", 4, 96, 96, device="meta")
    x = torch.empty(8, 96, dtype=torch.bfloat16, device="meta")
    routed = torch.empty(8, 2, device="meta")
    empty = torch.empty(1 << 22, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match="hidden size 96 is not a multiple of 64"):
        fused_moe.fused_moe(
            x, weights, routed, routed.to(torch.int32), activation="silu", workspace=empty, pdl=True,
            counters=torch.empty(1, dtype=torch.int32, device="meta"), out=torch.empty_like(x), config=PrefillConfig(),
        )  # fmt: skip


def test_warm_up_runs_both_ways_of_adding_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = allocate_weights("mxfp8", 128, 2048, 768, device="meta")
    ran: list[bool] = []

    def record(x: Any, weights: Any, topk_weights: Any, topk_ids: Any, **more: Any) -> None:
        if isinstance(more["config"], PrefillConfig):
            ran.append(prefill_launch.needs_scan_kernel(topk_ids.numel(), weights.experts))

    monkeypatch.setattr(fused_moe, "fused_moe", record)
    fused_moe.warmup(weights, 8, [1 << power for power in range(15)], activation="silu")
    assert sorted(ran) == [False, True]
