"""MXFP4 layers for `backend_table`: gpt-oss's checkpoints, whose rows alternate gate and up, and those of others.

Backends that quantize activations have rows where `MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION=1` is set.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.backend_table import Case, Checkpoint, Table, by_name
from tests.gpu.table_mxfp8 import by_token_limit, faults, ignored, rounded_by_token
from vllm_moe_oracle.core.problem import Routing, Scheme

GPT_OSS = Scheme("mxfp4", bits=4, group_size=32, packing="gpt_oss")
OTHERS = Scheme("mxfp4", bits=4, group_size=32, packing="mxfp4")
_OAI: dict[str, Any] = {
    "activation": "swigluoai", "bias": True, "alpha": 1.702, "beta": 1.0, "limit": 7.0,
    "routing": Routing("renormalize"),
}  # fmt: skip
_SILU: dict[str, Any] = {"activation": "silu", "routing": Routing("renormalize")}
CASES = (
    Case("gpt_oss_20b", GPT_OSS, 32, 4, 2880, 2880, **_OAI),
    Case("gpt_oss_120b", GPT_OSS, 128, 4, 2880, 2880, **_OAI),
    # What a rank of four holds: 23 of 90 blocks of 32.
    Case("gpt_oss_20b_tp4", GPT_OSS, 32, 4, 2880, 736, **_OAI),
    Case("qwen3_silu", OTHERS, 128, 8, 2048, 768, **_SILU),
    # The first of eight ranks that experts are spread over.
    Case("gpt_oss_120b_ep8", GPT_OSS, 128, 4, 2880, 2880, ep=8, **_OAI),
    Case("tiny_oai", GPT_OSS, 8, 2, 320, 96, **_OAI),
    Case("tiny_oai_ep2", GPT_OSS, 8, 2, 320, 96, ep=2, **_OAI),
    Case("tiny_silu", OTHERS, 8, 2, 256, 96, **_SILU),
)


def checkpoint(case: Case, device: str) -> Checkpoint:
    """Every code, scales around 2**-4, biases about as large as the products. First products reach gpt-oss's limit."""
    generator = torch.Generator(device=device).manual_seed(0)

    def random(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    raw = {}
    for which, rows in case.rows.items():
        columns = case.columns[which]
        raw[f"{which}_weight"] = random(0, 256, case.experts, rows, columns // 2)
        raw[f"{which}_weight_scale"] = random(121, 125, case.experts, rows, columns // 32)
        if case.bias:
            size = {"w13": 3, "w2": 30}[which]
            bias = torch.randn((case.experts, rows), device=device, generator=generator) * size
            raw[f"{which}_bias"] = bias.bfloat16()

    def matrix(which: str, expert: int) -> torch.Tensor:
        codes, scales = raw[f"{which}_weight"][expert], raw[f"{which}_weight_scale"][expert]
        # The eight magnitudes of e2m1 as the OCP specification lists them, and their negatives.
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float32, device=codes.device)
        table = torch.cat((table, -table))
        values = table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()]
        return torch.ldexp(values, scales.int().repeat_interleave(32, dim=-1) - 127)

    return Checkpoint(raw, matrix)


def quantization(case: Case) -> Any:
    """vLLM's config of gpt-oss's checkpoints, or of other models'."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as stock
    from vllm.model_executor.layers.quantization import get_quantization_config

    stock._user_moe_activation_override = lambda: None  # it asks the model's config, which a lone layer has not
    name = "gpt_oss_mxfp4" if case.scheme.packing == "gpt_oss" else "mxfp4"
    return get_quantization_config(name).from_config({"quant_method": "mxfp4"})


TABLE = Table(
    cases=by_name(CASES),
    checkpoint=checkpoint,
    quantization=quantization,
    rounded={"fp8_token": rounded_by_token},
    limits={"fp8_token": by_token_limit()},
    faults=faults,
    ignored=ignored,
    stock={
        "triton_mxfp4_monolithic": "triton",
        "triton_mxfp4_unfused": "triton_unfused",
        "cutlass_mxfp4": "flashinfer_cutlass",
        "marlin_mxfp4": "marlin",
        "humming_mxfp4": "humming",
        "humming_mxfp4_grouped": "humming",
    },
)
