"""Compiles the kernels for fp8 activations for sm_90a without a GPU, as their launcher would launch them.

As in test_compile.py, launches are recorded, compiled, and the machine code is read: fp8 products from shared
memory, nothing on the stack, nothing exchanged between lanes in the epilogue, results in stores of 16 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.lib.kernel_launches import Launch, compile_with_log, disassemble, fp8_launches, stack_bytes  # noqa: E402
from tests.lib.machine_code import overwritten_in_flight  # noqa: E402
from vllm_moe_oracle.kernels import fp8_moe  # noqa: E402
from vllm_moe_oracle.kernels.fp8_weights import Fp8Matrix, Fp8Weights  # noqa: E402
from vllm_moe_oracle.kernels.weights import allocate_weights  # noqa: E402

KERNELS = ["count_slots", "scan_chunks", "place_slots", "quantize_rows", "product", "quantize_rows", "product",
           "sum_topk_strips"]  # fmt: skip


def products(found: list[Launch], most_stack: Callable[[dict[str, Any]], int] = lambda options: 0) -> Iterator[Any]:
    """Compiles all; of each product, whose results are stored alike, its name and its machine code.

    Args:
        found: a layer's launches.
        most_stack: bytes of stack a thread that a kernel with these options may have.
    """
    assert [kernel.__name__ for kernel, _, _ in found] == KERNELS
    for kernel, args, kwargs in found:
        compiled, log = compile_with_log((kernel, args, kwargs))
        cubin, name = compiled.asm["cubin"], f"{kernel.__name__}, {kwargs}"
        stack = stack_bytes(cubin)
        assert stack <= most_stack(kwargs), f"{name} spills {stack} bytes a thread"
        assert compiled.metadata.shared <= 227 * 1024
        if kernel.__name__ != "product":
            continue
        code, _ = disassemble(cubin)
        assert not re.search(r"\bSHFL\b", code), f"{name}: lanes exchange codes or results"
        stores = re.findall(r"\bSTG\.E\S*", code)
        assert stores and all(".128" in store for store in stores), f"{name}: {set(stores)}"
        assert "serialized" not in log, f"{name}: products in single file"
        yield name, code


def check(found: list[Launch]) -> None:
    """Two groups of warps, tiles of 256 and 128 weight rows, four products of 32 columns in a step of 128."""
    for name, code in products(found):
        for width in (256, 128):
            assert len(re.findall(rf"QGMMA\.64x{width}x32\.F32\.E4M3\.E4M3", code)) == 8, f"{name}: {width} rows"
        assert len(re.findall(r"\bUTMALDG", code)) == 4, f"{name}: copies"


def test_kernels_compile() -> None:
    check(fp8_launches(2880, 2880, "swigluoai", True))


def check_mxfp4(found: list[Launch]) -> None:
    """Two groups of warps, tiles of four widths, two of which take products of 128 or 64 tokens, four products of 32
    columns in a step of 128. The first operand is in registers, which nothing writes while a product may read them."""

    def most_stack(options: dict[str, Any]) -> int:
        # Triton 3.9 keeps 32 bytes in the second product without biases; 3.6 and 3.8 none.
        return 32 if options.get("DOWN") and not options["HAS_BIAS"] else 0

    for name, code in products(found, most_stack):
        for width, tiles in ((256, 1), (128, 2), (64, 2)):
            count = len(re.findall(rf"QGMMA\.64x{width}x32\.F32\.E4M3\.E4M3 R\d+, R\d+, gdesc", code))
            assert count == 8 * tiles, f"{name}: {width} tokens, {count} products"
        assert not overwritten_in_flight(code), name


def test_kernels_of_mxfp4_compile() -> None:
    check_mxfp4(fp8_launches(2880, 2880, "swigluoai", True, format="mxfp4"))


@pytest.mark.slow
def test_other_layers_of_mxfp4_compile() -> None:
    check_mxfp4(fp8_launches(544, 96, "silu", False, format="mxfp4"))


@pytest.mark.slow
@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_tanh", "relu2"))
def test_other_layers_compile(activation: str) -> None:
    check(fp8_launches(544, 96, activation, False, torch.float16))


def test_what_does_not_fit_is_refused() -> None:
    def matrix(rows: int, columns: int) -> Fp8Matrix:
        return Fp8Matrix(torch.zeros(2, rows, columns, dtype=torch.float8_e4m3fn), torch.ones(2, rows), None)

    weights = Fp8Weights(matrix(128, 32), matrix(32, 64), torch.bfloat16)
    x, ids, router = torch.zeros(3, 32, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    space = torch.zeros(fp8_moe.workspace_bytes(weights, 3, 2), dtype=torch.uint8)
    good = {"x": x, "topk_weights": router, "topk_ids": ids, "activation": "silu", "workspace": space, "out": x.clone()}
    packed = allocate_weights("mxfp8", 2, 32, 64)
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "format": ({"weights": packed}, "weights are mxfp8 for torch.bfloat16; expected mxfp4"),
        "activation": ({"activation": "tanh"}, "'tanh' of experts with a gate"),
        "gate": ({"activation": "relu2"}, "'relu2' of experts with a gate"),
        "width": ({"x": x[:, :16]}, r"expected \[tokens, 32\]"),
        "type": ({"x": x.half(), "out": x.half()}, "stored for torch.bfloat16"),
        "out": ({"out": x[:2]}, r"out has shape \(2, 32\)"),
        "ids": ({"topk_ids": ids[:2]}, r"must both be \[3, top_k\]"),
        "strided": ({"topk_ids": torch.zeros(3, 4, dtype=torch.int32)[:, ::2]}, "must be contiguous"),
        "workspace": ({"workspace": space[:-300]}, "workspace of"),
    }
    for changed, words in bad.values():
        with pytest.raises(ValueError, match=words):
            fp8_moe.fused_moe_fp8(**{"weights": weights, **good, **changed})  # type: ignore[arg-type]
