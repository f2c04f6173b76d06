"""Small MXFP8 and MXFP4 layers, and parameters as vLLM's loaders fill them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests.lib.cases import GPT_OSS, problem
from vllm_moe_oracle.core.problem import Problem, Scheme

MXFP8_LAYER = problem(experts=3, top_k=2, hidden_size=64, intermediate_size=96, has_bias=True)
MXFP4_LAYER = problem(
    scheme=Scheme("mxfp4", bits=4, group_size=32, packing="gpt_oss"), experts=3, top_k=2, hidden_size=64,
    intermediate_size=96, has_bias=True, activation=dataclasses.replace(GPT_OSS, interleaved=True),
)  # fmt: skip
APART = dataclasses.replace(MXFP4_LAYER, activation=GPT_OSS)
"""As `MXFP4_LAYER`, with gate rows, then up rows."""


def mxfp8_parameters(layer: Problem) -> dict[str, Tensor]:
    """A layer's parameters by vLLM's names, with one that the scheme does not read."""
    e, h, i, r = layer.local_experts, layer.hidden_size, layer.intermediate_size, layer.w13_rows
    return {
        "w13_weight": torch.zeros(e, r, h).to(torch.float8_e4m3fn),
        "w2_weight": torch.zeros(e, h, i).to(torch.float8_e4m3fn),
        "w13_weight_scale": torch.full((e, r, h // 32), 127, dtype=torch.uint8),
        "w2_weight_scale": torch.full((e, h, i // 32), 127, dtype=torch.uint8),
        "w13_bias": torch.zeros(e, r, dtype=torch.bfloat16),
        "w2_bias": torch.zeros(e, h, dtype=torch.bfloat16),
        "w13_input_scale": torch.zeros(e),
    }


def mxfp4_parameters(layer: Problem) -> dict[str, Tensor]:
    """The same for MXFP4; each row is filled with its index."""
    e, h, i, r = layer.local_experts, layer.hidden_size, layer.intermediate_size, layer.w13_rows
    suffix = "_packed" if layer.scheme.packing == "compressed-tensors" else ""

    def rows(count: int, width: int) -> Tensor:
        return (torch.arange(count) % 251).to(torch.uint8)[None, :, None].repeat(e, 1, width)

    return {
        f"w13_weight{suffix}": rows(r, h // 2),
        f"w2_weight{suffix}": rows(h, i // 2),
        "w13_weight_scale": rows(r, h // 32),
        "w2_weight_scale": rows(h, i // 32),
        "w13_bias": torch.arange(r).bfloat16().repeat(e, 1),
        "w2_bias": torch.zeros(e, h, dtype=torch.bfloat16),
        "w13_input_scale": torch.zeros(e),
    }
