"""Layers of integer experts for `backend_table`: files of GPTQ, AWQ and compressed-tensors, loaded as vLLM does it."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.backend_table import Case, Checkpoint, Raw, Table, by_name
from tests.lib.cases import int_scheme
from tests.lib.wna16_layers import NAMES

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's ``packing_utils.py``: the column of a word of which each nibble is, from the lowest."""


CT = "compressed-tensors"
_QWEN3 = (128, 8, 2048, 768)
CASES = (
    Case("qwen3_g128", int_scheme(CT, 4, 128), *_QWEN3),
    Case("kimi_k2_tp8_g32", int_scheme(CT, 4, 32), 384, 8, 7168, 256),
    Case("qwen3_int8_g128", int_scheme("gptq", 8, 128), *_QWEN3),
    Case("qwen3_int8_channel", int_scheme(CT, 8, -1), *_QWEN3),
    Case("qwen3_channel", int_scheme(CT, 4, -1), *_QWEN3),
    Case("qwen3_awq_g128", int_scheme("awq", 4, 128, zeros=True), *_QWEN3),
    Case("qwen3_zeros_g32", int_scheme(CT, 4, 32, zeros=True), *_QWEN3),
    Case("qwen3_int8_zeros_g64", int_scheme("moe_wna16", 8, 64, zeros=True), *_QWEN3),
    Case("qwen3_moe_wna16_g128", int_scheme("moe_wna16", 4, 128), *_QWEN3),
    Case("qwen3_act_order", int_scheme("gptq", 4, 128, order="group"), *_QWEN3),
    Case("qwen3_bias", int_scheme("gptq", 4, 128), *_QWEN3, bias=True),
    Case("nemotron_relu2_g32", int_scheme(CT, 4, 32), 128, 6, 2688, 1856, "relu2_no_mul"),
    # The group is as wide as the second product, or as both; and a width that is no whole tile.
    Case("narrow_g128", int_scheme(CT, 4, 128), 128, 8, 2048, 128),
    Case("narrow_both_g128", int_scheme(CT, 4, 128), 8, 2, 128, 128),
    Case("narrow_int8_zeros_g64", int_scheme("moe_wna16", 8, 64, zeros=True), 8, 2, 128, 64),
    Case("narrow_awq_g128", int_scheme("awq", 4, 128, zeros=True), 8, 2, 256, 128),
    Case("ragged_g32", int_scheme(CT, 4, 32), 64, 8, 2048, 352),
    Case("qwen3_g128_ep2", int_scheme(CT, 4, 128), *_QWEN3, ep=2),
    Case("tiny_g32", int_scheme(CT, 4, 32), 8, 2, 256, 96),
    Case("tiny_g32_ep2", int_scheme("gptq", 4, 32), 8, 2, 256, 96, ep=2),
    Case("tiny_int8_zeros", int_scheme("moe_wna16", 8, 32, zeros=True), 8, 2, 256, 96),
    Case("tiny_awq", int_scheme("awq", 4, 32, zeros=True), 8, 2, 256, 96),
    Case("tiny_channel", int_scheme(CT, 4, -1), 8, 2, 256, 96),
    Case("tiny_act_order", int_scheme("gptq", 4, 32, order="group"), 8, 2, 256, 96),
    Case("tiny_bias", int_scheme("gptq", 8, 64), 8, 2, 256, 128, bias=True),
)


def _words(codes: torch.Tensor, bits: int, dimension: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Codes of neighbors along a dimension in int32, the first in the lowest bits, or in an order."""
    per = 32 // bits
    split = codes.unflatten(dimension, (-1, per)).movedim(dimension + 1, -1)
    found = torch.zeros(split.shape[:-1], dtype=torch.int32, device=codes.device)
    for place in range(per):
        found |= split[..., order[place] if order else place].int() << bits * place
    return found


def checkpoint(case: Case, device: str) -> Checkpoint:
    """Every code and zero point; scales such that the first products are of the order of one; biases as large."""
    generator = torch.Generator(device=device).manual_seed(0)
    scheme, bits = case.scheme, case.scheme.bits
    packing = "gptq" if scheme.packing == "moe_wna16" else scheme.packing
    codes_name, scales_name, zeros_name, index_name = NAMES[packing]
    inputs_first = packing != CT
    raw: Raw = {}
    codes: Raw = {}
    scales: Raw = {}
    zeros: Raw = {}
    groups: Raw = {}

    def random(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, dtype=torch.uint8, device=device, generator=generator)

    for which, rows in case.rows.items():
        columns = case.columns[which]
        group = columns if scheme.group_size == -1 else scheme.group_size
        codes[which] = random(1 << bits, case.experts, rows, columns)
        spread = torch.rand((case.experts, rows, columns // group), device=device, generator=generator) * 1.5 + 0.25
        size = 3 / (2**bits * columns**0.5) * {"w13": 1, "w2": 10}[which]
        scales[which] = (spread * size).bfloat16()
        middle = torch.full_like(scales[which], 1 << bits - 1, dtype=torch.uint8)
        zeros[which] = random(1 << bits, *scales[which].shape) if scheme.zero_points else middle
        index = torch.arange(columns, device=device) // group
        groups[which] = index.expand(case.experts, -1)
        if scheme.act_order == "group":
            shuffled = torch.rand((case.experts, columns), device=device, generator=generator).argsort(-1)
            groups[which] = index[shuffled]
        # In files: input features first (GPTQ, AWQ) or last; packed along them (but for AWQ); zero points along rows.
        matrix = codes[which].transpose(1, 2) if inputs_first else codes[which]
        points = zeros[which].transpose(1, 2) if inputs_first else zeros[which]
        along, across = (1, 2) if inputs_first else (2, 1)
        if packing == "awq":
            raw[f"{which}_{codes_name}"] = _words(matrix, bits, 2, AWQ_ORDER)
            raw[f"{which}_{zeros_name}"] = _words(points, bits, 2, AWQ_ORDER)
        else:
            raw[f"{which}_{codes_name}"] = _words(matrix, bits, along)
            if packing == "gptq":  # zero points less one, those of symmetric files too
                packed = _words(points, bits, across)
                raw[f"{which}_{zeros_name}"] = packed - {4: 0x11111111, 8: 0x01010101}[bits]
            elif scheme.zero_points:
                raw[f"{which}_{zeros_name}"] = _words(points, bits, across)
        scale = scales[which].transpose(1, 2) if inputs_first else scales[which]
        raw[f"{which}_{scales_name}"] = scale.contiguous()
        if scheme.act_order == "group":
            raw[f"{which}_{index_name}"] = groups[which].to(torch.int32).contiguous()
        if case.bias:
            bias = torch.randn((case.experts, rows), device=device, generator=generator)
            raw[f"{which}_bias"] = (bias * {"w13": 1, "w2": 10}[which]).bfloat16()

    def weights(which: str, expert: int) -> torch.Tensor:
        index = groups[which][expert]
        middle, scale = (each[which][expert].float()[:, index] for each in (zeros, scales))
        return (codes[which][expert].float() - middle) * scale

    return Checkpoint(raw, weights)


def quantization(case: Case) -> Any:
    """vLLM's config of such a checkpoint."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    scheme = case.scheme
    group = scheme.group_size
    if scheme.packing == CT:
        weights = {
            "num_bits": scheme.bits, "type": "int", "symmetric": not scheme.zero_points, "dynamic": False,
            "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group,
        }  # fmt: skip
        groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
        config = {"quant_method": CT, "format": "pack-quantized", "config_groups": groups, "ignore": []}
        return get_quantization_config(CT).from_config(config)
    if scheme.packing == "awq":
        config = {"quant_method": "awq", "bits": scheme.bits, "group_size": group, "zero_point": scheme.zero_points}
        return get_quantization_config("awq_marlin").from_config({**config, "version": "gemm"})
    config = {
        "quant_method": "gptq", "bits": scheme.bits, "group_size": group, "sym": not scheme.zero_points,
        "desc_act": scheme.act_order == "group", "checkpoint_format": "gptq", "lm_head": False,
    }  # fmt: skip
    return get_quantization_config("moe_wna16" if scheme.packing == "moe_wna16" else "gptq_marlin").from_config(config)


def load(layer: Any, case: Case, raw: Raw) -> None:
    """Loads a checkpoint with the layer's own loaders, one projection of one expert after the other."""
    inputs_first = case.scheme.packing != CT
    for name, parameter in list(layer.named_parameters()):
        if name not in raw or not hasattr(parameter, "weight_loader"):
            continue
        for expert in range(case.local_experts):
            tensor = raw[name][expert]
            shards = {"w2": tensor} if name.startswith("w2") else {"w1": tensor}
            if name.startswith("w13") and case.gated:
                halves = (tensor, tensor) if name.endswith("g_idx") else tensor.chunk(2, -1 if inputs_first else 0)
                shards = dict(zip(("w1", "w3"), halves, strict=True))
            for shard, part in shards.items():
                where = f"model.layers.0.mlp.experts.{name}"
                parameter.weight_loader(parameter, part.contiguous(), where, shard_id=shard, expert_id=expert)


TABLE = Table(
    cases=by_name(CASES),
    checkpoint=checkpoint,
    quantization=quantization,
    stock={
        "marlin_wna16": "marlin",
        "humming_wna16": "humming",
        "humming_wna16_grouped": "humming",
        "triton_wna16": "triton",
    },
    load=load,
)
