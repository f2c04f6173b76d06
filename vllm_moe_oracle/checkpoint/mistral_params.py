"""Mistral's own description of a model, ``params.json``, in the fields of a ``config.json``.

A folder with ``params.json`` alone is served by vLLM as a DeepSeek-V3 if its experts have shared ones (Mistral Large
3). Mixtral's ``params.json`` names its experts too, but vLLM's class for it reads them from ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError, short_repr

FILE_NAME = "params.json"

_FIELDS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "activation": "hidden_act",
}
_MOE_FIELDS = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
    "route_every_n": "moe_layer_freq",
}


def as_model_config(params: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The fields of a ``config.json`` that say the same; the language model's under ``text_config`` where vLLM loads
    the model with images.

    Args:
        params: the content of ``params.json``.
        where: the file, for messages.

    Raises:
        CheckpointError: its experts or its quantization are not described as vLLM reads them.
    """
    model = {_FIELDS.get(name, name): value for name, value in params.items() if name not in ("moe", "quantization")}
    model.setdefault("hidden_act", "silu")
    if moe := params.get("moe"):
        if not isinstance(moe, Mapping):
            raise CheckpointError(f"moe is {short_repr(moe)}, not an object", where=where)
        if not moe.get("num_shared_experts"):
            rule = "vLLM reads experts without shared ones from config.json, not from params.json"
            raise CheckpointError(rule, "Add the model's config.json", where)
        model |= {new: moe[old] for old, new in _MOE_FIELDS.items() if old in moe}
        model |= {"model_type": "deepseek_v3", "scoring_func": "softmax", "norm_topk_prob": True, "topk_method": None}
    multimodal = params.get("multimodal")
    shown = params.get("vision_encoder") or (isinstance(multimodal, Mapping) and multimodal.get("vision_encoder_args"))
    top: dict[str, Any] = {"model_type": "pixtral", "text_config": model} if shown else model
    if quantization := params.get("quantization"):
        top["quantization_config"] = _quantization_config(quantization, where)
    return top


def _quantization_config(found: object, where: str) -> Mapping[str, Any]:
    if isinstance(found, Mapping):
        if found.get("qformat_weight") == "fp8_e4m3":
            return {"quant_method": "fp8"}
        if str(found.get("quant_method", "")).lower().replace("_", "-") == "compressed-tensors":
            return {**found, "quant_method": "compressed-tensors"}
    rule = f"quantization is {short_repr(found)}, which vLLM does not read"
    raise CheckpointError(rule, "It reads qformat_weight fp8_e4m3, and compressed-tensors", where)
