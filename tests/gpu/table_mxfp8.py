"""MXFP8 layers for `backend_table`: ModelOpt's checkpoints, which declare MXFP8 activations.

Stock's MXFP8 method drops expert biases, so its classes are given them as vLLM gives them in other formats. Backends
that quantize activations otherwise have rows where `MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION=1` is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.gpu.backend_table import LIMIT, Case, Checkpoint, Raw, Table, by_name
from vllm_moe_oracle.core.problem import Scheme

SCHEME = Scheme("mxfp8", bits=8, group_size=32, packing="modelopt", activations="mxfp8")
_QWEN3, _NEMOTRON = (SCHEME, 128, 8, 2048, 768), (SCHEME, 128, 6, 2688, 1856)
_OAI: dict[str, Any] = {
    "activation": "swigluoai_uninterleave", "bias": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0
}  # fmt: skip
CASES = (
    Case("qwen3_silu", *_QWEN3, "silu"),
    Case("qwen3_silu_bias", *_QWEN3, "silu", bias=True),
    Case("qwen3_relu2", *_QWEN3, "relu2_no_mul"),
    Case("qwen3_relu2_bias", *_QWEN3, "relu2_no_mul", bias=True),
    Case("nemotron_silu", *_NEMOTRON, "silu"),
    Case("nemotron_relu2", *_NEMOTRON, "relu2_no_mul"),
    Case("nemotron_relu2_bias", *_NEMOTRON, "relu2_no_mul", bias=True),
    Case("nemotron_relu2_tp2", SCHEME, 128, 6, 2688, 928, "relu2_no_mul"),
    Case("qwen3_swigluoai_bias", *_QWEN3, **_OAI),
    Case("qwen3_silu_ep2", *_QWEN3, "silu", ep=2),
    Case("tiny_silu", SCHEME, 8, 2, 256, 96, "silu"),
    Case("tiny_silu_ep2", SCHEME, 8, 2, 256, 96, "silu", ep=2),
    Case("tiny_swigluoai", SCHEME, 8, 2, 256, 96, **_OAI),
)


def checkpoint(case: Case, device: str) -> Checkpoint:
    """Every finite code up to 240, scales around 2**-8, biases about as large as the products."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    def codes(*shape: int) -> torch.Tensor:
        return (random(0, 120, *shape) | (random(0, 2, *shape) << 7)).view(torch.float8_e4m3fn)

    raw = {}
    for which, rows in case.rows.items():
        columns = case.columns[which]
        raw[f"{which}_weight"] = codes(case.experts, rows, columns)
        raw[f"{which}_weight_scale"] = random(115, 120, case.experts, rows, columns // 32)
        if case.bias:
            size = {"w13": 3, "w2": 30}[which]
            bias = torch.randn((case.experts, rows), device=device, generator=generator) * size
            raw[f"{which}_bias"] = bias.bfloat16()

    def matrix(which: str, expert: int) -> torch.Tensor:
        values, scales = raw[f"{which}_weight"][expert].float(), raw[f"{which}_weight_scale"][expert]
        return torch.ldexp(values, scales.int().repeat_interleave(32, dim=-1) - 127)

    return Checkpoint(raw, matrix)


def quantization(case: Case) -> Any:
    """vLLM's config of ModelOpt's MXFP8."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    algo = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []}
    return get_quantization_config("modelopt_mxfp8").from_config({"quantization": algo})


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To e4m3 under the smallest power of two, per 32, with which nothing saturates."""
    blocks = values.unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponent = torch.ceil(torch.log2(largest / 448))
    codes = (blocks * torch.exp2(-exponent)).to(torch.float8_e4m3fn).float()
    return (codes * torch.exp2(exponent)).flatten(-2)


def rounded_by_token(values: torch.Tensor) -> torch.Tensor:
    """To bfloat16, then to e4m3 with one scale a row, its largest magnitude over 448."""
    values = values.bfloat16().float()
    scale = (values.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-119)
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def by_token_limit(growth: float = 1.0) -> float:
    """The largest error with one scale a token; growth: how much an activation may enlarge relative errors.

    Between the products, two right results may have other codes: of numbers that differ by d of their size, about
    d / spacing are rounded to other codes, which lie a spacing apart, at most 2**-3 of the number: the root of 2**-3 d
    in the mean. d: of the first product's sums, of whose up to 2880 terms the matrix unit cuts off what is below 2**-13
    of the largest, 2**-13 / sqrt(3) in the mean; and of a scale whose largest number was rounded to another bfloat16.
    """
    return LIMIT + math.sqrt(2.0**-3 * growth * (math.sqrt(2880 / 3) * 2.0**-13 + 2.0**-9))


def faults(case: Case) -> dict[str, Callable[[Raw], Raw]]:
    """Scales in the order that a kernel of another layout reads, and such that are one exponent off."""

    def swizzled(name: str) -> Callable[[Raw], Raw]:
        return lambda expert: {name: expert[name].T.reshape(expert[name].shape)}

    def shifted(name: str, exponents: int) -> Callable[[Raw], Raw]:
        return lambda expert: {name: (expert[name].to(torch.int16) + exponents).to(torch.uint8)}

    return {
        "scales of w13 column by column": swizzled("w13_scale"),
        "scales of w2 column by column": swizzled("w2_scale"),
        "scales of w13 one exponent up": shifted("w13_scale", 1),
        "scales of w2 one exponent down": shifted("w2_scale", -1),
    }


def ignored(case: Case) -> dict[str, dict[str, float]]:
    """What a kernel computes with that knows nothing of a parameter; a limit of 1e6 clamps nothing."""
    if case.alpha is None:
        return {}
    return {"alpha ignored": {"alpha": 1.0}, "beta ignored": {"beta": 0.0}, "limit ignored": {"limit": 1e6}}


def register_biases(layer: Any, case: Case, raw: Raw, moe_backend: str) -> None:
    """Stock's conversion to Humming takes biases when they are there."""
    if case.bias and moe_backend == "humming":
        for name in ("w13_bias", "w2_bias"):
            layer.register_parameter(name, torch.nn.Parameter(torch.empty_like(raw[name]), requires_grad=False))


def give_biases(layer: Any, case: Case, raw: Raw, moe_backend: str) -> None:
    """Gives stock's Marlin experts biases in the order that they ask for. The layer must be one that stock need not
    pad."""
    if not (case.bias and moe_backend == "marlin"):
        return
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_permute_bias

    quant_config = layer.quant_method.moe_kernel.fused_experts.quant_config
    for slot, name in ((quant_config._w1, "w13_bias"), (quant_config._w2, "w2_bias")):
        slot.bias = torch.stack([marlin_permute_bias(each) for each in raw[name]])


TABLE = Table(
    cases=by_name(CASES),
    checkpoint=checkpoint,
    quantization=quantization,
    stock={"marlin_mxfp8": "marlin", "humming_mxfp8": "humming", "humming_mxfp8_grouped": "humming"},
    rounded={"mxfp8": rounded, "fp8_token": rounded_by_token},
    limits={"fp8_token": by_token_limit(growth=2)},  # a squared ReLU
    faults=faults,
    ignored=ignored,
    before_conversion=register_biases,
    after_conversion=give_biases,
)
