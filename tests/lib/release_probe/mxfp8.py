"""Checks of MXFP8: every kind of checkpoint, running and routing, and what a layer's config says."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.lib.release_probe import layers
from tests.lib.release_probe.frame import check, has_since

MODELOPT = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": []}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "modelopt": MODELOPT,
    "modelopt_mxfp8": {**MODELOPT, "quant_method": "modelopt_mxfp8"},
    "mxfp8": {"quant_method": "mxfp8", "ignored_layers": []},
    "legacy": {
        "producer": {"name": "modelopt", "version": "0.29.0"},
        "quantization": {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []},
    },
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {layers.NAME: {"quant_algo": "MXFP8"}, f"{layers.NAME}.0.up_proj": {"quant_algo": "MXFP8"}},
}


def _replaces(stock: str) -> bool:
    from vllm_moe_oracle import methods

    return any(f":{stock}" in path for path in methods.replacements().values())


@check
def checkpoints() -> None:
    """A layer of each kind of checkpoint gets our method, with vLLM's own way from config to layer."""
    for tag, checkpoint in CHECKPOINTS.items():
        with layers.engine():
            try:
                layers.our_problem(layers.moe_layer(layers.quant_config(checkpoint)))
            except Exception as error:
                raise AssertionError(f"checkpoint {tag}") from error


@check
def mixed() -> None:
    """ModelOpt's mixed precision, which constructs the stock class itself."""
    config = layers.quant_config(MIXED)
    if has_since("0.25", hasattr(config, "mxfp8_config")):
        with layers.engine():
            layers.our_problem(layers.moe_layer(config))


@check
def online() -> None:
    """``--quantization mxfp8`` on a checkpoint in 16 bits."""
    if _replaces("Mxfp8OnlineMoEMethod"):
        with layers.engine():
            layers.our_problem(layers.moe_layer(layers.quant_config(None, "mxfp8")))


@check
def compressed_tensors_mxfp8() -> None:
    """llm-compressor's MXFP8, whose config class constructs the stock method itself."""
    if _replaces("CompressedTensorsW8A8Mxfp8MoEMethod"):
        group = {**layers.MX_GROUP, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        weights, inputs = {**group, "dynamic": False}, {**group, "dynamic": True}
        with layers.engine():
            layers.our_problem(
                layers.moe_layer(layers.quant_config(layers.compressed_tensors(weights, inputs, "mxfp8-quantized")))
            )


@check
def layer_runs() -> None:
    """Loaded through vLLM's loaders, biases too, converted and run through vLLM's kernel: the right numbers."""
    from vllm_moe_oracle.compat import current_adapter

    with layers.engine(activations="16bit"):
        layer = layers.moe_layer(layers.quant_config(CHECKPOINTS["mxfp8"]), has_bias=True)
        assert layers.our_problem(layer).has_bias
        layers.assert_runs(layer, "mxfp8", biases=True)
        assert current_adapter().moe_layer_names()


@check
def layer_routes() -> None:
    """From router logits on, as vLLM's runner does it: through its router, or in the method where that routes."""
    generator = torch.Generator().manual_seed(1)
    with layers.engine(activations="16bit"):
        layer, router = layers.moe_layer_and_router(layers.quant_config(CHECKPOINTS["mxfp8"]), has_bias=True)
        method = layer.quant_method
        experts = layers.random_experts("mxfp8", biases=True)
        layers.load(layer, experts.stored)
        method.process_weights_after_loading(layer)
        x = torch.randn(layers.TOKENS, layers.HIDDEN, generator=generator)
        logits = torch.randn(layers.TOKENS, layers.EXPERTS, generator=generator)
        if method.is_monolithic:
            found = method.apply_monolithic(layer=layer, x=x.clone(), router_logits=logits, input_ids=None)
        else:
            shares, ids = router.select_experts(hidden_states=x, router_logits=logits)
            found = layers.run_experts(layer, {"x": x, "topk_weights": shares, "topk_ids": ids})
        shares, ids = logits.softmax(-1).topk(layers.TOP_K)
        tokens = {"x": x, "topk_weights": shares / shares.sum(-1, keepdim=True), "topk_ids": ids}
        layers.assert_close(found, experts.exact, tokens)


@check
def activation_parameters() -> None:
    """A model's alpha, beta and limit reach the problem as far as the release lets a model set them."""
    known = "swiglu_alpha" in inspect.signature(layers.layer_factory()).parameters
    keywords = {"swiglu_limit": 3.0, **({"swiglu_alpha": 1.5, "swiglu_beta": 0.5} if known else {})}
    config = layers.named_config("gpt_oss_mxfp4", {"quant_method": "mxfp4"})
    with layers.engine():
        activation = layers.our_problem(
            layers.moe_layer(config, has_bias=True, activation="swigluoai", **keywords)
        ).activation
    expected = (1.5, 0.5, 3.0) if known else (1.702, 1.0, 3.0)
    assert (activation.alpha, activation.beta, activation.limit) == expected, activation


@check
def hash_routing() -> None:
    """A layer whose experts come from a table over token ids is known as such."""
    table = torch.zeros(10, layers.TOP_K, dtype=torch.int32)
    for given, keywords in ((table, {"scoring_func": "sqrtsoftplus"}), (None, {})):
        with layers.engine(backend="auto"):
            layer = layers.moe_layer(layers.quant_config(MODELOPT), hash_indices_table=given, **keywords)
        assert layer.quant_method.decision.problem.routing.hash_routing is (given is not None)
