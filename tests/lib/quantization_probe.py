"""What vLLM makes of everything in a quantized model that is not a MoE layer, with and without the plugin.

`answer` writes what vLLM's config object is and accepts, for a model without experts and one with experts in many
quantization configs (every so many of them), and what it gives linear layers, an LM head, an embedding and attention:
the class of the method, and name, class, shape and dtype of each parameter that it registers; or how they are refused.
Each side has a process of its own.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def gptq() -> Iterator[dict[str, Any]]:
    """GPTQ's configs."""
    usual = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
    for bits, group, order, sym in itertools.product((4, 8, 3), (128, 32, -1), (False, True), (True, False)):
        yield usual | {"bits": bits, "group_size": group, "desc_act": order, "sym": sym}
    for more in (
        {"static_groups": True, "desc_act": True}, {"lm_head": True}, {"checkpoint_format": "gptq_v2"},
        {"dynamic": {"-:.*o_proj.*": {}}}, {"dynamic": {"+:.*o_proj.*": {"bits": 8, "group_size": 32}}},
        {"dynamic": {"+:.*o_proj.*": {"desc_act": True}}}, {"dynamic": {"+:.*o_proj.*": {"sym": False}}},
        {"dynamic": None}, {"modules_in_block_to_quantize": [["self_attn.o_proj"]]},
        {"modules_in_block_to_quantize": ["mlp.up_proj"]}, {"desc_act": None}, {"sym": None}, {"group_size": 96},
    ):  # fmt: skip
        yield usual | more
    for lacking in ("bits", "group_size", "desc_act", "sym"):
        yield {name: value for name, value in usual.items() if name != lacking}


def awq() -> Iterator[dict[str, Any]]:
    """AWQ's configs."""
    usual = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    for bits, group, zero in itertools.product((4, 8), (128, 32, -1), (True, False)):
        yield usual | {"bits": bits, "group_size": group, "zero_point": zero}
    for more in (
        {"version": "gemv"}, {"modules_to_not_convert": ["o_proj"]}, {"modules_to_not_convert": [["o_proj"]]},
        {"modules_to_not_convert": None}, {"lm_head": True}, {"zero_point": None}, {"bits": 3},
    ):  # fmt: skip
        yield usual | more


def compressed_tensors() -> Iterator[dict[str, Any]]:
    """Configs of llm-compressor."""

    def config(weights: dict[str, Any] | None, inputs: Any = None, format: str = "pack-quantized", **more: Any) -> Any:
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        made = {"quant_method": "compressed-tensors", "format": format, "ignore": [], "config_groups": {"g": group}}
        return made | more

    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": None}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    by_token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    mxfp4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
             "scale_dtype": "torch.uint8"}  # fmt: skip
    for order, symmetric, bits in itertools.product(
        (None, "static", "weight", "group", "dynamic"), (True, False), (4, 8)
    ):
        yield config(int4 | {"actorder": order, "symmetric": symmetric, "num_bits": bits})
    yield config(int4 | {"strategy": "channel", "group_size": None})
    yield config(int4 | {"num_bits": 8, "strategy": "channel", "group_size": None}, by_token, "int-quantized")
    for format, bits in itertools.product(("int-quantized", "naive-quantized", "dense"), (4, 8)):
        yield config(int4 | {"num_bits": bits}, None, format)
    yield config(fp8, fp8, "float-quantized")
    yield config(fp8 | {"strategy": "channel"}, by_token | {"type": "float"}, "float-quantized")
    yield config(mxfp4, None, "mxfp4-pack-quantized")
    yield config(mxfp4 | {"num_bits": 8}, None, "mxfp8-quantized")
    for ignored in (None, ["lm_head"], ["re:.*o_proj"], ["model.layers.0.self_attn.o_proj"]):
        yield config(int4, ignore=ignored)
    yield config(int4, config_groups={})
    yield config(None)
    kv = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    yield config(int4, kv_cache_scheme=kv)


def modelopt() -> Iterator[dict[str, Any]]:
    """ModelOpt's configs, and those of other tags for the same tensors."""
    for algorithm in ("MXFP8", "FP8", "NVFP4", "FP8_PER_CHANNEL_PER_TOKEN", "W4A16", None):
        for excluded in ([], ["lm_head"], ["*o_proj*"], ["model.layers.1*"], ["model.layers.0"]):
            made: dict[str, Any] = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
            yield {"quant_method": "modelopt", "quantization": made | {"exclude_modules": excluded, "group_size": 16}}
            yield {"quant_method": "modelopt", "ignore": excluded, "group_size": 16, **made}
    layers = {"model.layers.0.self_attn.o_proj": {"quant_algo": "MXFP8"}, "lm_head": {"quant_algo": "FP8"}}
    mixed = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "exclude_modules": [],
             "quantized_layers": layers}  # fmt: skip
    yield {"quant_method": "modelopt", "quantization": mixed}
    yield {"quant_method": "mxfp8", "ignored_layers": ["o_proj"]}
    yield {"quant_method": "mxfp8"}


def others() -> Iterator[dict[str, Any]]:
    """Configs of the remaining families."""
    for more in ({}, {"modules_to_not_convert": ["o_proj"]}, {"modules_to_not_convert": ["model.layers.*.self_attn"]}):
        yield {"quant_method": "mxfp4", **more}
    for bits, sym, packing, kind in itertools.product(
        (4, 8), (True, False), ("auto_round:auto_gptq", "auto_round:auto_awq"), ("int", "mx_fp", "float")
    ):
        yield {"quant_method": "auto-round", "bits": bits, "group_size": 128 if kind == "int" else 32, "sym": sym,
               "packing_format": packing, "data_type": kind}  # fmt: skip
    tensor = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "observer_cls": "x",
              "ch_axis": None, "group_size": None, "symmetric": None, "round_method": None,
              "scale_type": None}  # fmt: skip
    fp4 = tensor | {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True, "ch_axis": -1,
                    "scale_format": "e8m0"}  # fmt: skip
    for weights, inputs in ((tensor, tensor), (fp4 | {"is_dynamic": False}, fp4), (fp4 | {"is_dynamic": False}, None)):
        layer = {"weight": weights, "input_tensors": inputs, "output_tensors": None, "bias": None}
        yield {"quant_method": "quark", "global_quant_config": layer, "layer_quant_config": {}, "exclude": ["o_proj"],
               "layer_type_quant_config": {}, "export": {"kv_cache_group": [], "pack_method": "reorder"}}  # fmt: skip
    for scheme, block in (("dynamic", None), ("static", None), ("dynamic", [128, 128])):
        made: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": scheme}
        yield made | ({} if block is None else {"weight_block_size": block})


def configs() -> list[dict[str, Any]]:
    """All configs of checkpoints."""
    return [config for family in (gptq, awq, compressed_tensors, modelopt, others) for config in family()]


def _attempt(ask: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or that it refuses."""
    try:
        return ask(*arguments)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"[:400]}


def _parameters(layer: Any) -> dict[str, Any]:
    return {
        name: [type(each).__name__, list(each.shape), str(each.dtype)]
        for name, each in sorted(layer.named_parameters())
    }


def _layers() -> dict[str, Callable[[Any], Any]]:
    """Constructors of layers by name, from a quantization config."""
    import torch
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    dtype = torch.bfloat16
    attention = "model.layers.0.self_attn"
    return {
        "o_proj": lambda config: linear.RowParallelLinear(
            256, 256, bias=False, params_dtype=dtype, quant_config=config, prefix=f"{attention}.o_proj"
        ),
        "layer 12": lambda config: linear.RowParallelLinear(
            256, 256, bias=False, params_dtype=dtype, quant_config=config, prefix="model.layers.12.self_attn.o_proj"
        ),
        "qkv_proj": lambda config: linear.QKVParallelLinear(
            256, 64, 4, 2, bias=False, params_dtype=dtype, quant_config=config, prefix=f"{attention}.qkv_proj"
        ),
        "gate": lambda config: linear.ReplicatedLinear(
            256, 8, bias=False, params_dtype=dtype, quant_config=config, prefix="model.layers.0.mlp.gate"
        ),
        "lm_head": lambda config: ParallelLMHead(256, 256, params_dtype=dtype, quant_config=config, prefix="lm_head"),
        "embedding": lambda config: VocabParallelEmbedding(
            256, 256, params_dtype=dtype, quant_config=config, prefix="model.embed_tokens"
        ),
    }  # fmt: skip


def _of_layer(build: Callable[[Any], Any], config: Any) -> Any:
    layer = build(config)
    method = layer.quant_method
    scheme = getattr(layer, "scheme", None)
    return {"method": type(method).__name__, "scheme": type(scheme).__name__, "parameters": _parameters(layer)}


def _of_attention(config: Any) -> str:
    from vllm.model_executor.layers.attention import Attention

    attention = object.__new__(Attention)
    return type(config.get_quant_method(attention, "model.layers.0.self_attn.attn")).__name__


MODELS: dict[str, dict[str, Any]] = {
    "dense": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "decoder_sparse_step": 1, "norm_topk_prob": True,
    },
}  # fmt: skip
SIZES = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 64, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def questions(kind: str) -> Iterator[tuple[dict[str, Any], str | None, str]]:
    """Config of a checkpoint, ``--quantization`` and ``--dtype`` of each question about a kind of model."""
    for index, config in enumerate(configs()):
        yield config, None, "bfloat16"
        if kind == "dense" and config["quant_method"] in ("gptq", "awq"):
            yield config, "moe_wna16", "bfloat16"
        if kind == "dense" and index % 3 == 0:
            yield config, None, "float32"
            yield config, None, "float16"
    if kind == "dense":
        for shorthand in ("mxfp8", "mxfp4", "fp8", "int8_per_channel_weight_only", "moe_wna16", "awq_marlin"):
            yield {}, shorthand, "bfloat16"
            yield {}, shorthand, "float32"


def _of_model(folder: Path, kind: str, quantization: dict[str, Any], asked: str | None, dtype: str) -> Any:
    """What vLLM makes of one model."""
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    fields = SIZES | MODELS[kind] | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(fields))
    given = {"model": str(folder), "dtype": dtype, "quantization": asked, "skip_tokenizer_init": True}
    model: ModelConfig = EngineArgs(**given).create_model_config()
    engine = VllmConfig(model_config=model)
    config = engine.quant_config
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with set_current_vllm_config(engine):
        return {
            "name": model.quantization,
            "class": type(config).__name__,
            "bases": [each.__name__ for each in type(config).__mro__ if each.__module__.startswith("vllm.")],
            "dtypes": sorted(map(str, config.get_supported_act_dtypes())),
            "capability": config.get_min_capability(),
            "files": config.get_config_filenames(),
            "attention": _attempt(_of_attention, config),
            **{name: _attempt(_of_layer, build, config) for name, build in _layers().items()},
        }  # fmt: skip


def answer(path: str, with_plugin: bool, step: int) -> None:
    """Writes the outcomes as JSON, by model, config, ``--quantization`` and ``--dtype``.

    Args:
        path: the file.
        with_plugin: whether the plugin is registered before.
        step: of so many questions one is asked.
    """
    from vllm_moe_oracle import plugin
    from vllm_moe_oracle.compat.standalone_layer import single_rank_worker

    if with_plugin:
        plugin.register()
        assert plugin.state().active, plugin.state().reason
    found = {}
    with single_rank_worker("cpu", 16), tempfile.TemporaryDirectory() as folder:
        for kind in MODELS:
            for config, asked, dtype in itertools.islice(questions(kind), 0, None, step):
                place = f"{kind} {json.dumps(config)} {asked} {dtype}"
                found[place] = _attempt(_of_model, Path(folder), kind, config, asked, dtype)
    Path(path).write_text(json.dumps(found), encoding="utf-8")
