"""MoE layers made, loaded and run as a model does it, with random experts and what they should give."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch

from tests.lib import configs, reference

NAME = "model.layers.3.mlp.experts"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS = 4, 2, 64, 32, 5

Tensors = dict[str, torch.Tensor]

MX_GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
"""compressed-tensors' arguments of MXFP8; with four bits, of MXFP4."""


def quant_config(checkpoint: dict[str, Any] | None, quantization: str | None = None) -> Any:
    """The config object that vLLM makes for a checkpoint's ``quantization_config`` and ``--quantization``."""
    from vllm.config.load import LoadConfig
    from vllm.config.model import ModelConfig
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.model_loader.weight_utils import get_quant_config

    hf = SimpleNamespace(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_attention_heads=4)
    hf.num_key_value_heads = 2
    if checkpoint is not None:
        hf.quantization_config = _normalized(checkpoint)
    model = SimpleNamespace(
        model=tempfile.gettempdir(),
        revision=None,
        quantization=quantization,
        quantization_config=resolve_quantization_config(quantization, None),
        model_arch_config=SimpleNamespace(
            quantization_config=getattr(hf, "quantization_config", None),
            total_num_attention_heads=4,
            total_num_kv_heads=2,
        ),
        hf_config=hf,
        hf_text_config=hf,
        hf_overrides={},
        allow_deprecated_quantization=False,
    )
    ModelConfig._verify_quantization(model)
    return get_quant_config(model, LoadConfig())


def _normalized(checkpoint: dict[str, Any]) -> dict[str, Any]:
    from vllm.transformers_utils import model_arch_config_convertor as convertors

    holder = SimpleNamespace(quantization_config=json.loads(json.dumps(checkpoint)))
    convertor = object.__new__(convertors.ModelArchConfigConvertorBase)
    found: dict[str, Any] = convertor._normalize_quantization_config(holder)
    return found


def named_config(name: str, checkpoint: dict[str, Any]) -> Any:
    """The config object of vLLM's quantization `name` for a checkpoint."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config(name).from_config(checkpoint)


def compressed_tensors(weights: dict[str, Any], inputs: dict[str, Any] | None, format: str) -> dict[str, Any]:
    """llm-compressor's ``quantization_config`` with one group for all layers."""
    group = configs.group(weights, inputs) | {"format": format}
    return configs.compressed(group, format=format, quantization_status="compressed", ignore=[])


@contextmanager
def engine(**settings: Any) -> Iterator[None]:
    """vLLM's current config, with settings of the plugin; by default the emulation without a self-check."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    config.additional_config = {"moe_oracle": {"self_check": "off", "backend": "emulation", **settings}}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with set_current_vllm_config(config):
            _distributed()
            yield
    finally:
        torch.set_default_dtype(default)


def _distributed() -> None:
    from vllm import distributed

    if not distributed.parallel_state.model_parallel_is_initialized():
        place = tempfile.mkdtemp()
        distributed.init_distributed_environment(1, 0, f"file://{place}/rendezvous", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)


@contextmanager
def tensor_rank(rank: int) -> Iterator[None]:
    """A layer that is made here believes to be on this tensor-parallel rank."""
    from vllm.model_executor.layers.fused_moe import config as configs

    original = configs.get_tensor_model_parallel_rank
    configs.get_tensor_model_parallel_rank = lambda: rank
    try:
        yield
    finally:
        configs.get_tensor_model_parallel_rank = original


def layer_factory() -> Any:
    """What a model calls to make a MoE layer."""
    from vllm.model_executor.layers import fused_moe

    return getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE


def moe_layer(config: Any, **keywords: Any) -> Any:
    """A MoE layer as a model makes it; the part of it that has the experts."""
    return moe_layer_and_router(config, **keywords)[0]


def moe_layer_and_router(config: Any, **keywords: Any) -> tuple[Any, Any]:
    """The same, with the part that chooses experts."""
    made = layer_factory()(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        params_dtype=torch.float32,
        quant_config=config,
        prefix=NAME,
        **{"intermediate_size": INTERMEDIATE, **keywords},
    )
    return getattr(made, "routed_experts", made), made.router


def our_problem(layer: Any) -> Any:
    """The problem of a layer, whose method must be ours and run the emulation."""
    method = layer.quant_method
    assert type(method).__module__.startswith("vllm_moe_oracle.methods."), type(method)
    assert method.decision.problem.layer.startswith(NAME), method.decision.problem.layer
    assert method.decision.backend == "emulation", method.decision.backend
    return method.decision.problem


# --- Random experts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """Experts of one layer.

    Attributes:
        stored: the checkpoint's tensors `[E, ...]` by the layer's parameter; rows of w13 are gate, then up.
        exact: the same as arguments of `reference.moe`.
    """

    stored: Tensors
    exact: dict[str, reference.Array]


def random_experts(
    scheme: Literal["mxfp8", "mxfp4"] = "mxfp4",
    *,
    inner: int = INTERMEDIATE,
    suffix: str = "",
    biases: bool = False,
    alternating: bool = False,
) -> Experts:
    """Random experts.

    Args:
        scheme: number format of the weights.
        inner: intermediate size.
        suffix: of the weights' names in the checkpoint.
        biases: whether there are any.
        alternating: rows of w13 alternate gate and up.
    """
    generator = torch.Generator().manual_seed(3)
    made = Experts({}, {})
    for name, rows, columns in (("w13", 2 * inner, HIDDEN), ("w2", HIDDEN, inner)):
        if scheme == "mxfp8":
            codes = torch.randn(EXPERTS, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        else:
            codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator).byte()
        scales = torch.randint(120, 126, (EXPERTS, rows, columns // 32), generator=generator).byte()
        dequantize = reference.dequantize_mxfp8 if scheme == "mxfp8" else reference.dequantize_mxfp4
        matrix = dequantize(codes.view(torch.uint8).numpy(), scales.numpy())
        halves = np.argsort(np.arange(rows) % 2, kind="stable") if alternating and name == "w13" else np.arange(rows)
        made.stored.update({f"{name}_weight{suffix}": codes, f"{name}_weight_scale": scales})
        made.exact[name] = matrix[:, halves]
        if biases:
            made.stored[f"{name}_bias"] = bias = torch.randn(EXPERTS, rows, generator=generator).bfloat16()
            made.exact[f"b{name[1:]}"] = bias.double().numpy()[:, halves]
    return made


def load_one(layer: Any, name: str, shard: str, expert: int, tensor: torch.Tensor, partly: bool = False) -> None:
    """Gives one tensor of one expert to the layer's own loader.

    Args:
        layer: the layer.
        name: of the parameter.
        shard: w1 (gate), w2 (down) or w3 (up).
        expert: global id.
        tensor: as it stands in the checkpoint.
        partly: some of the experts live on other ranks.
    """
    parameter = layer.get_parameter(name)
    done = parameter.weight_loader(
        parameter, tensor, f"{NAME}.{name}", shard_id=shard, expert_id=expert, return_success=True
    )
    assert done is True or partly, (name, shard, done)


def load(layer: Any, stored: Mapping[str, torch.Tensor], partly: bool = False) -> None:
    """Loads a layer expert by expert, projection by projection."""
    for name, tensor in stored.items():
        for expert, one in enumerate(tensor):
            parts = {"w2": one} if name.startswith("w2") else dict(zip(("w1", "w3"), one.chunk(2), strict=True))
            for shard, part in parts.items():
                load_one(layer, name, shard, expert, part, partly)


# --- Running ---------------------------------------------------------------------------------------------------------


def routed_tokens(magnitude: float = 1.0) -> Tensors:
    """Random inputs `x` `[M, hidden]`, `topk_weights` and `topk_ids` `[M, top_k]`."""
    generator = torch.Generator().manual_seed(4)
    return {
        "x": torch.randn(TOKENS, HIDDEN, generator=generator) * magnitude,
        "topk_ids": torch.rand(TOKENS, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].int(),
        "topk_weights": torch.rand(TOKENS, TOP_K, generator=generator),
    }


def run_experts(layer: Any, tokens: Tensors) -> torch.Tensor:
    """The output of a loaded and converted layer for routed tokens."""
    given = {**tokens, "x": tokens["x"].clone(), "shared_experts": None, "shared_experts_input": None}
    found: torch.Tensor = layer.quant_method.apply(layer=layer, **given)
    assert torch.isfinite(found).all()
    return found


def assert_close(found: torch.Tensor, exact: dict[str, Any], tokens: Tensors, **activation: Any) -> None:
    """Compares a layer's output with that of `reference.moe`, which is told of the activation if it is not SiLU."""
    given = {name: tensor.numpy() for name, tensor in tokens.items()}
    expected = reference.moe(**given, **exact, **activation)
    error = np.linalg.norm(found.numpy() - expected) / np.linalg.norm(expected)
    assert error < 1e-5, error


def assert_runs(
    layer: Any,
    scheme: Literal["mxfp8", "mxfp4"] = "mxfp4",
    activation: str = "silu",
    *,
    suffix: str = "",
    biases: bool = False,
    magnitude: float = 1.0,
    **numbers: Any,
) -> None:
    """Loads a layer expert by expert with `random_experts`, converts it, runs it and compares its output.

    Args:
        layer: the layer.
        scheme: number format of the weights.
        activation: by the reference's name; "" where the output cannot be compared in float32.
        suffix: of the weights' names in the checkpoint.
        biases: whether the layer has any.
        magnitude: of the inputs.
        numbers: of the activation.
    """
    experts = random_experts(scheme, suffix=suffix, biases=biases)
    load(layer, experts.stored)
    layer.quant_method.process_weights_after_loading(layer)
    tokens = routed_tokens(magnitude)
    found = run_experts(layer, tokens)
    if activation:
        assert_close(found, experts.exact, tokens, activation=activation, **numbers)
