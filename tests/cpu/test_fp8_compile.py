"""Compiles the kernels for fp8 activations for sm_90a without a GPU, as their launcher would launch them.

As test_prefill_compile.py does: launches are recorded, compiled, and the machine code is read: fp8 products from shared
memory, nothing on the stack, nothing exchanged between lanes in the epilogue, results in stores of 16 bytes.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from test_kernels_compile import TYPES, disassemble  # noqa: E402
from test_prefill_compile import warnings_of_ptxas  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from vllm_moe_oracle.kernels import fp8_moe, fp8_products, fp8_quantise, gemm, prefill_launch, prefill_route  # noqa: E402
from vllm_moe_oracle.kernels.fp8_weights import Fp8Matrix, Fp8Weights  # noqa: E402

KERNELS = ["count_slots", "add_chunks", "place_slots", "quantise_rows", "product", "quantise_rows", "product",
           "sum_strips"]  # fmt: skip
FP8 = {**TYPES, torch.float8_e4m3fn: "*fp8e4nv"}


class Recorder:
    """Stands for a kernel: keeps what it would be launched with."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self._launches.append((self._kernel, args, kwargs))


def launches_of(monkeypatch: pytest.MonkeyPatch, hidden: int, inner: int, activation: str, bias: bool,
                dtype: torch.dtype = torch.bfloat16) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:  # fmt: skip
    """What the launcher would launch for a layer of two experts."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    modules = {
        prefill_route: ("count_slots", "add_chunks", "place_slots"), fp8_quantise: ("quantise_rows",),
        fp8_products: ("product",), gemm: ("sum_strips",),
    }  # fmt: skip
    for module, names in modules.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), found))
    monkeypatch.setattr(prefill_launch, "_processors", lambda device: 132)

    def matrix(rows: int, columns: int) -> Fp8Matrix:
        scale = torch.ones(2, rows)
        return Fp8Matrix(torch.zeros(2, rows, columns, dtype=torch.float8_e4m3fn), scale, scale if bias else None)

    gated = activation != "relu2"
    weights = Fp8Weights(matrix((1 + gated) * inner, hidden), matrix(hidden, inner), dtype, gated)
    x, ids = torch.zeros(3, hidden, dtype=dtype), torch.zeros(3, 2, dtype=torch.int32)
    workspace = torch.zeros(fp8_moe.workspace_bytes(weights, 3, 2), dtype=torch.uint8)
    fp8_moe.fused_moe_fp8(x, weights, torch.ones(3, 2), ids, activation=activation, limit=7.0, workspace=workspace,
                          out=torch.empty_like(x), pdl=True)  # fmt: skip
    return found


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compiles one recorded launch for sm_90a, specialised as Triton's launcher specialises it."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for index, name in enumerate(kernel.arg_names):
        value, free = values[name], name not in kernel.do_not_specialize
        if isinstance(value, TensorDescriptor):
            assert value.base.dtype == torch.float8_e4m3fn
            signature[name] = f"tensordesc<fp8e4nv{list(value.block_shape)},{value.layout!r}>"
        elif name.isupper() or (isinstance(value, int) and value == 1 and free):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = FP8[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    options = {key: value for key, value in kwargs.items() if key not in kernel.arg_names}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check(found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
    """Compiles all and reads the products' machine code."""
    assert [kernel.__name__ for kernel, _, _ in found] == KERNELS
    for kernel, args, kwargs in found:
        compiled = compile_launch(kernel, args, kwargs)
        code, stack = disassemble(compiled.asm["cubin"])
        name = f"{kernel.__name__}, {kwargs}"
        assert stack == 0, f"{name} spills {stack} bytes a thread"
        assert compiled.metadata.shared <= 227 * 1024
        if kernel.__name__ != "product":
            continue
        # Two groups of warps, tiles of 256 and 128 weight rows, four products of 32 columns in a step of 128.
        for width in (256, 128):
            assert len(re.findall(rf"QGMMA\.64x{width}x32\.F32\.E4M3\.E4M3", code)) == 8, f"{name}: {width} rows"
        assert len(re.findall(r"\bUTMALDG", code)) == 4, f"{name}: copies"
        assert not re.search(r"\bSHFL\b", code), f"{name}: lanes exchange results"
        stores = re.findall(r"\bSTG\.E\S*", code)
        assert stores and all(".128" in store for store in stores), f"{name}: {set(stores)}"
        assert "serialized" not in warnings_of_ptxas(compiled.asm["ptx"]), f"{name}: products in single file"


def test_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    check(launches_of(monkeypatch, 2880, 2880, "swigluoai", True))


@pytest.mark.slow
@pytest.mark.parametrize("activation", ("silu", "gelu", "gelu_tanh", "relu2"))
def test_other_layers_compile(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    check(launches_of(monkeypatch, 544, 96, activation, False, torch.float16))


def test_what_does_not_fit_is_refused() -> None:
    def matrix(rows: int, columns: int) -> Fp8Matrix:
        return Fp8Matrix(torch.zeros(2, rows, columns, dtype=torch.float8_e4m3fn), torch.ones(2, rows), None)

    weights = Fp8Weights(matrix(128, 32), matrix(32, 64), torch.bfloat16)
    x, ids, router = torch.zeros(3, 32, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    space = torch.zeros(fp8_moe.workspace_bytes(weights, 3, 2), dtype=torch.uint8)
    good = {"x": x, "topk_weights": router, "topk_ids": ids, "activation": "silu", "workspace": space, "out": x.clone()}
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "activation": ({"activation": "tanh"}, "unknown activation 'tanh'"),
        "gate": ({"activation": "relu2"}, "'relu2' does not fit weights that are gated"),
        "width": ({"x": x[:, :16]}, r"expected \[tokens, 32\]"),
        "type": ({"x": x.half(), "out": x.half()}, "stored for torch.bfloat16"),
        "out": ({"out": x[:2]}, r"out has shape \(2, 32\)"),
        "ids": ({"topk_ids": ids[:2]}, r"must both be \[3, top_k\]"),
        "strided": ({"topk_ids": torch.zeros(3, 4, dtype=torch.int32)[:, ::2]}, "must be contiguous"),
        "workspace": ({"workspace": space[:-300]}, "workspace of"),
    }
    for changed, words in bad.values():
        with pytest.raises(ValueError, match=words):
            fp8_moe.fused_moe_fp8(weights=weights, **{**good, **changed})  # type: ignore[arg-type]
