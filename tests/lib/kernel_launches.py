"""The kernels' launches without a GPU: what a launcher would launch, and what Triton compiles from it for sm_90a.

A launcher runs on CPU tensors while Triton's launch is replaced by a recorder. A recorded launch is specialized as
Triton's own launcher specializes it.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton._utils import canonicalize_dtype
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels import heuristic, prefill_launch
from vllm_moe_oracle.kernels.fp8_moe import fused_moe_fp8, workspace_bytes
from vllm_moe_oracle.kernels.fp8_weights import Fp8Matrix, Fp8Weights
from vllm_moe_oracle.kernels.fused_moe import fused_moe, workspace_layout
from vllm_moe_oracle.kernels.launch_config import LaunchConfig
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights

TARGET = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32",
    torch.int64: "*i64", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Kernel, positional arguments, keyword arguments."""
Shape = tuple[str, int, int, int, int, int, str, bool]
"""Format, group, hidden, intermediate, experts, top-k, activation, biases."""

LAYERS: dict[str, Shape] = {
    "gptoss": ("mxfp4", 32, 2880, 2880, 32, 4, "swigluoai", True),
    "qwen-mxfp8": ("mxfp8", 32, 2048, 768, 128, 8, "silu", False),
    "qwen-int4": ("int4", 128, 2048, 768, 128, 8, "silu", False),
    "qwen-int8": ("int8", 128, 2048, 768, 128, 8, "silu", False),
    "kimi": ("int4", 32, 7168, 256, 384, 8, "silu", False),
    "nemotron": ("mxfp8", 32, 2688, 1856, 128, 6, "relu2", False),
    "mixtral": ("int4", 128, 4096, 14336, 8, 2, "silu", False),
    "glm": ("mxfp8", 32, 5120, 192, 160, 8, "silu", False),
}

MEASURED: dict[str, Shape] = {
    f"{name}: {shape}": (name.split()[0], int(group or 32), hidden, inner, experts, top_k,
                         "relu2" if kind == "plain" else "swigluoai" if hidden == inner else "silu", hidden == inner)
    for name, shapes in configs.measured_table().items()
    for group in [name.partition(" g")[2]]
    for shape in shapes
    for experts, top_k, hidden, inner, kind in [
        (*map(int, re.findall(r"\d+", shape)), shape.rpartition(" ")[2])
    ]
}  # fmt: skip
"""The layers of the shipped table. gpt-oss is the square one, with biases and its own activation."""


def shipped() -> Iterator[tuple[str, int, LaunchConfig]]:
    """Every measured configuration, and what the rule gives for some layers; each once."""
    seen = set()
    for layer, (format, group, hidden, inner, experts, top_k, activation, bias) in (LAYERS | MEASURED).items():
        weights = allocate_weights(format, experts, hidden, inner, gated=activation != "relu2", group=group, bias=bias,
                           device="meta")  # fmt: skip
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384):
            found = configs.choose_launch_config if layer in MEASURED else heuristic.heuristic_config
            config = found(weights, top_k, tokens)
            if (layer, config) not in seen:
                seen.add((layer, config))
                yield layer, tokens, config


def record(call: Callable[[], object]) -> list[Launch]:
    """The launches of a call, none of which runs."""
    launches: list[Launch] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((kernel, args, kwargs))

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(prefill_launch, "num_sms", lambda device: 132):
        call()
    return launches


def launches(layer: str, tokens: int, config: LaunchConfig | PrefillConfig, *, dtype: torch.dtype = torch.bfloat16,
             zero_points: bool = False, addend: bool = False, **extra: Any) -> list[Launch]:  # fmt: skip
    """The launches of `fused_moe` for a layer of `LAYERS` or `MEASURED`, with two experts; addend: with what LoRA
    adapters add to the first product."""
    format, group, hidden, inner, _, top_k, activation, bias = (LAYERS | MEASURED)[layer]
    weights = allocate_weights(format, 2, hidden, inner, gated=activation != "relu2", group=group, bias=bias,
                               dtype=dtype, zero_points=zero_points)  # fmt: skip
    layout = workspace_layout(weights, tokens, top_k, config, quantize=extra.get("quantize_activations", False))
    x = torch.zeros(tokens, hidden, dtype=dtype)
    if addend:
        extra["addend"], extra["h"] = (x.new_zeros(tokens * top_k, each) for each in (weights.w13.rows, inner))
    return record(
        lambda: fused_moe(
            x, weights, torch.zeros(tokens, top_k), torch.zeros(tokens, top_k, dtype=torch.int32),
            activation=activation, workspace=torch.empty(layout.nbytes, dtype=torch.uint8), out=x.clone(),
            counters=torch.zeros(layout.counters + 1, dtype=torch.int32),
            limit=7.0 if activation == "swigluoai" else None, config=config, pdl=True, **extra,
        )
    )  # fmt: skip


def fp8_launches(hidden: int, inner: int, activation: str, bias: bool,
                 dtype: torch.dtype = torch.bfloat16, format: str = "mxfp8") -> list[Launch]:  # fmt: skip
    """The launches of `fused_moe_fp8` for three tokens and two experts, whose weights are of MXFP8 or MXFP4."""

    def matrix(rows: int, columns: int) -> Fp8Matrix:
        scale = torch.ones(2, rows)
        return Fp8Matrix(torch.zeros(2, rows, columns, dtype=torch.float8_e4m3fn), scale, scale if bias else None)

    gated = activation != "relu2"
    weights: Fp8Weights | PackedWeights = Fp8Weights(
        matrix((1 + gated) * inner, hidden), matrix(hidden, inner), dtype, gated
    )
    if format == "mxfp4":
        weights = allocate_weights(format, 2, hidden, inner, gated=gated, bias=bias, dtype=dtype)
    x, ids = torch.zeros(3, hidden, dtype=dtype), torch.zeros(3, 2, dtype=torch.int32)
    workspace = torch.zeros(workspace_bytes(weights, 3, 2), dtype=torch.uint8)
    return record(
        lambda: fused_moe_fp8(x, weights, torch.ones(3, 2), ids, activation=activation, limit=7.0, workspace=workspace,
                              out=torch.empty_like(x), pdl=True)
    )  # fmt: skip


def specialize(launch: Launch) -> tuple[Any, dict[str, Any]]:
    """The source that Triton compiles for a launch, and the compile options."""
    kernel, args, kwargs = launch
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for index, name in enumerate(kernel.arg_names):
        value, free = values.get(name), name not in kernel.do_not_specialize
        if isinstance(value, TensorDescriptor):
            block = f"{canonicalize_dtype(value.base.dtype)}{list(value.block_shape)}"
            signature[name] = f"tensordesc<{block},{value.layout!r}>"
        elif value is None or name.isupper() or (isinstance(value, int) and value == 1 and free):
            signature[name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, int) and value % 16 == 0 and free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    return source, {key: value for key, value in kwargs.items() if key not in kernel.arg_names}


def compile_launch(launch: Launch) -> Any:
    """Triton's compiled kernel of a launch, for sm_90a."""
    source, options = specialize(launch)
    return triton.compile(source, target=TARGET, options=options)


def disassemble(cubin: bytes) -> tuple[str, int]:
    """Machine code with resource usage, and the bytes of stack per thread (spills live there)."""
    text = _cuobjdump(cubin, "--dump-sass", "--dump-resource-usage")
    return text, _stack(text)


def stack_bytes(cubin: bytes) -> int:
    """The bytes of stack per thread, without the half second that the disassembler takes to start."""
    return _stack(_cuobjdump(cubin, "--dump-resource-usage"))


def _cuobjdump(cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = [str(CUOBJDUMP), *options, file.name]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout


def _stack(text: str) -> int:
    stack = re.search(r"STACK:(\d+)", text)
    assert stack
    return int(stack[1])


def compile_with_log(launch: Launch) -> tuple[Any, str]:
    """`compile_launch`, and what ptxas says about the kernel.

    Triton keeps the log of its own run where it compiles. From its cache it gives none: then ptxas runs once more.
    """
    written = io.StringIO()
    with mock.patch.object(knobs.nvidia, "dump_ptxas_log", True), contextlib.redirect_stdout(written):
        compiled = compile_launch(launch)
    return compiled, written.getvalue() or _ptxas_log(compiled.asm["ptx"])


def _ptxas_log(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        run = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(path), "-o", str(Path(folder, "kernel.cubin"))]
        result = subprocess.run(run, capture_output=True, text=True, check=True)
    return result.stdout + result.stderr
