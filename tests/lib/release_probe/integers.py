"""Checks of integer experts: every tool's files, and code of vLLM's that constructs the stock classes itself."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from tests.lib.release_probe import layers
from tests.lib.release_probe.frame import check
from tests.lib.release_probe.mxfp8 import MODELOPT
from tests.lib.wna16_layers import checkpoint_of, contents_of, layer_of

KINDS: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
    ("gptq", None, {}),
    ("gptq", None, {"bits": 8, "act_order": "group", "zero_points": True, "bias": True}),
    ("gptq_v2", "moe_wna16", {"zero_points": True, "group": 64}),
    ("gptq", "moe_wna16", {"act_order": "group", "zero_points": True}),
    ("awq", None, {"zero_points": True, "bias": True}),
    ("awq", "moe_wna16", {"zero_points": True}),
    ("compressed-tensors", None, {"zero_points": True, "bias": True}),
    ("compressed-tensors", None, {"act_order": "group", "bits": 8}),
    ("compressed-tensors-int", None, {"group": -1, "bits": 8}),
)
"""Packing, ``--quantization``, and what the layer is like."""


@check
def integers() -> None:
    """Integer experts of every tool, from config to layer, loaded and run: the numbers of the very codes."""
    for packing, quantization, kind in KINDS:
        try:
            _integers(packing, quantization, kind)
        except Exception as error:
            raise AssertionError(f"{packing} {quantization} {kind}") from error


def _integers(packing: str, quantization: str | None, kind: dict[str, Any]) -> None:
    sizes = {"experts": layers.EXPERTS, "top_k": layers.TOP_K, "hidden_size": layers.HIDDEN}
    sizes["intermediate_size"] = inner = 2 * layers.INTERMEDIATE
    contents = contents_of(layer_of(packing, **kind, **sizes))
    with layers.engine():
        config = _config(checkpoint_of(contents.problem), quantization)
        layer = layers.moe_layer(config, has_bias=contents.problem.has_bias, intermediate_size=inner)
        layers.our_problem(layer)
        for (expert, shard, name), tensor in contents.files().items():
            layers.load_one(layer, f"{'w2' if shard == 'w2' else 'w13'}_{name}", shard, expert, tensor)
        layer.quant_method.process_weights_after_loading(layer)
        tokens = layers.routed_tokens()
        found = layers.run_experts(layer, tokens)
    layers.assert_close(found, contents.exact(), tokens)


def _config(checkpoint: dict[str, Any], quantization: str | None) -> Any:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    if checkpoint["quant_method"] == "awq" and quantization is None and "cpu_awq" in QUANTIZATION_METHODS:
        # That release has a config class of its own for AWQ on CPUs, which takes the place of the one for GPUs here.
        config = layers.named_config("awq_marlin", checkpoint)
        config.packed_modules_mapping = {}
        return config
    return layers.quant_config(checkpoint, quantization)


@check
def other_makers_of_integer_methods() -> None:
    """Code that constructs the stock classes itself, as Intel's AutoRound does and the fallback from one to another."""
    from vllm.model_executor.layers.quantization import auto_gptq, moe_wna16

    package = "vllm.model_executor.layers.quantization"
    fields: dict[str, Any] = {"weight_bits": 4, "group_size": 32, "lm_head_quantized": False, "full_config": {}}
    with layers.engine():
        moe = layers.moe_layer(layers.quant_config(MODELOPT)).moe_config
        config = auto_gptq.AutoGPTQConfig(desc_act=False, is_sym=True, dynamic={}, **fields)
        methods = [auto_gptq.AutoGPTQMoEMethod(config, moe)]
        plain = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
        methods.append(moe_wna16.MoeWNA16Method(moe_wna16.MoeWNA16Config.from_config(plain), moe))
        module, name = ("auto_awq", "AutoAWQ") if importlib.util.find_spec(f"{package}.auto_awq") else (
            "awq_marlin", "AWQMarlin"
        )  # fmt: skip
        awq = importlib.import_module(f"{package}.{module}")
        config = getattr(awq, f"{name}Config")(zero_point=True, modules_to_not_convert=[], **fields)
        methods.append(getattr(awq, f"{name}MoEMethod")(config, moe))
    for method in methods:
        assert type(method).__module__.startswith("vllm_moe_oracle.methods."), type(method)
        assert method.decision.problem.scheme.bits == 4
