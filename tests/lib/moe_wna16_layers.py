"""vLLM's MoE layers of integer experts in this process, as the methods see them: configs, loaders, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.quantization import get_quantization_config

from tests.lib import reference, vllm_configs
from tests.lib.wna16_layers import Contents, checkpoint_of
from vllm_moe_oracle.compat.layer_context import set_current_layer
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.methods.base import OracleMoEMethod

NAME = "model.layers.3.mlp.experts"
TOKENS = 5


class Layer(RoutedExperts):
    """A MoE layer without router, with the parts that methods look at."""

    def __init__(self, moe: Any, name: str = NAME) -> None:
        nn.Module.__init__(self)
        self.moe_config = moe
        self.layer_name = name
        self.params_dtype = moe.in_dtype
        self.activation = moe.activation
        self.global_num_experts = moe.num_experts
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
        self.scoring_func, self.renormalize, self.use_grouped_topk = "softmax", True, False
        self.num_expert_group = self.topk_group = self.e_score_correction_bias = None
        self.apply_router_weight_on_input = False
        self.first_expert = 0
        self._expert_map = None
        self.quant_method: Any = None

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        local = expert_id - self.first_expert
        return local if 0 <= local < self.moe_config.num_local_experts else -1

    def _expert_routing_tables(self) -> None:
        return None


Layer.__name__ = "RoutedExperts"  # compressed-tensors finds layers by the name of their class


@contextmanager
def engine(**oracle: Any) -> Iterator[None]:
    """vLLM's current config, with settings of the plugin."""
    settings = {"self_check": "strict", "backend": "emulation", **oracle}
    with set_current_vllm_config(VllmConfig(additional_config={"moe_oracle": settings})):
        yield


def moe_config(problem: Problem, rank: int = 0, ranks: int = 1, **changes: Any) -> Any:
    """vLLM's config of a layer.

    Args:
        problem: the layer without any cut.
        rank: tensor-parallel rank.
        ranks: tensor-parallel size.
        changes: fields.
    """
    parallel = FusedMoEParallelConfig.make_no_parallel()
    parallel.tp_size, parallel.tp_rank = ranks, rank
    suffix = "" if problem.activation.gated else "_no_mul"
    usual = {
        "activation": MoEActivation(f"{problem.activation.name}{suffix}"), "moe_parallel_config": parallel,
        "in_dtype": torch.float32,
    }  # fmt: skip
    return vllm_configs.moe_config(problem, **usual | changes)


def vllm_name(problem: Problem) -> str:
    """vLLM's name for the quantization of a packing."""
    names = {"gptq": "auto_gptq", "gptq_v2": "auto_gptq", "awq": "auto_awq"}
    return names.get(problem.scheme.packing, "compressed-tensors")


def made(problem: Problem, moe: Any, name: str = "", config: Any = None, layer_name: str = NAME) -> Layer:
    """A layer with its method, parameters registered, through our config class for a checkpoint.

    Args:
        problem: the layer without any cut.
        moe: from `moe_config`.
        name: vLLM's name of the quantization; "" for the packing's own.
        config: a quant config that is there already.
        layer_name: the layer's.
    """
    layer = Layer(moe, layer_name)
    layer.quant_config = config = config or quant_config(problem, name)
    with set_current_layer(layer, layer_name):
        layer.quant_method = config.get_quant_method(layer, layer_name)
    layer.quant_method.create_weights(
        layer,
        moe.num_local_experts,
        moe.hidden_dim,
        moe.intermediate_size_per_partition,
        params_dtype=moe.in_dtype,
        weight_loader=layer.weight_loader,
        global_num_experts=moe.num_experts,
    )
    return layer


def quant_config(problem: Problem, name: str = "", **more: Any) -> Any:
    """Our config object for a checkpoint's config."""
    config = get_quantization_config(name or vllm_name(problem)).from_config(checkpoint_of(problem, **more))
    config.packed_modules_mapping = {}
    return config


def load(layer: Layer, files: dict[tuple[int, str, str], torch.Tensor]) -> None:
    """Gives every tensor of the files to the layer's loaders, as a model does."""
    parameters = dict(layer.named_parameters())
    for (expert, shard, name), tensor in files.items():
        parameter = parameters[f"{'w2' if shard == 'w2' else 'w13'}_{name}"]
        here = layer._map_global_expert_id_to_local_expert_id(expert) != -1
        done = parameter.weight_loader(
            param=parameter,
            loaded_weight=tensor,
            weight_name=f"{NAME}.{'w2' if shard == 'w2' else 'w13'}_{name}",
            shard_id=shard,
            expert_id=expert,
            return_success=True,
        )
        assert done is here or name in (
            "qzeros",
            "g_idx",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "bias",
        ), (name, done)


def tokens(problem: Problem, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs `[M, hidden]`, weights and ids `[M, top_k]`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, problem.hidden_size, generator=generator)
    ids = torch.stack(
        [torch.randperm(problem.num_experts, generator=generator)[: problem.top_k] for _ in range(TOKENS)]
    )
    return x, torch.rand(TOKENS, problem.top_k, generator=generator), ids.int()


def run(layer: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> np.ndarray[Any, Any]:
    """What the layer's method makes of routed tokens."""
    out = layer.quant_method.apply(
        layer=layer, x=x.clone(), topk_weights=weights, topk_ids=ids, shared_experts=None, shared_experts_input=None
    )
    found: np.ndarray[Any, Any] = out.double().numpy()
    return found


def expected(contents: Contents, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> np.ndarray[Any, Any]:
    """The same in float64 from the very codes, scales and zero points."""
    return reference.moe(x.numpy(), topk_ids=ids.numpy(), topk_weights=weights.numpy(), **contents.exact())


def whole_of(layers: list[Layer], contents: Any) -> float:
    """Relative error of the sum over ranks."""
    x, weights, ids = tokens(contents.problem)
    found = sum(run(layer, x, weights, ids) for layer in layers)
    wanted = expected(contents, x, weights, ids)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def loaded(contents: Any, name: str = "", ranks: int = 1, files: Any = None) -> list[Layer]:
    """The layer on each rank, converted."""
    layers = []
    for rank in range(ranks):
        layer = made(contents.problem, moe_config(contents.problem, rank, ranks), name)
        assert isinstance(layer.quant_method, OracleMoEMethod)
        load(layer, files or contents.files())
        layer.quant_method.process_weights_after_loading(layer)
        layers.append(layer)
    return layers
