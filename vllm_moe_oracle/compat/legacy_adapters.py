"""Adapters for older vLLM releases. Each subclasses the next newer one and overrides only what differs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from ..backends import Backend
from ..core.decision import ShardPlan
from ..core.problem import Problem
from ..core.sharding import has_group_index
from . import humming
from .adapter import Adapter


class Vllm030Adapter(Adapter):
    """vLLM 0.30: the layer's config does not say whether routing is by hash."""

    def hash_routing(self, moe: Any, layer: Any) -> bool:
        """True for every layer of DeepSeek-V4. Only some of them route by hash; which ones is unknown here."""
        return bool(layer.scoring_func == "sqrtsoftplus")


class Vllm028Adapter(Vllm030Adapter):
    """vLLM 0.28 and 0.29: stock experts for CPUs are monolithic; the router and the modular kernel's workspace need a
    GPU. Marlin reorders input features (act order) itself."""

    def act_order_kwargs(
        self, class_name: str, problem: Problem | None, tensors: Mapping[str, Tensor] | None
    ) -> dict[str, Any]:
        """The features' order and groups, for Marlin; see `ExpertsAdapter.act_order_kwargs`."""
        if problem is None or tensors is None or "w13_order" not in tensors:
            return {}
        return {
            "w13_g_idx": tensors["w13_group_index"],
            "w2_g_idx": tensors["w2_group_index"],
            "w13_g_idx_sort_indices": tensors["w13_order"],
            "w2_g_idx_sort_indices": tensors["w2_order"],
            # Whether this rank has whole groups.
            "is_k_full": not has_group_index(problem),
        }

    def is_monolithic(self, backend: Backend) -> bool:
        """True for all backends on a CPU; `apply_monolithic` routes for those that are not monolithic."""
        return backend.monolithic or bool(current_platform.is_cpu())

    def apply_monolithic(
        self, kernel: Any, layer: Any, x: Tensor, router_logits: Tensor, extra: Mapping[str, Any]
    ) -> Any:
        """Runs a kernel on router logits, and routes for modular ones; see `Adapter.apply_monolithic`."""
        if kernel.is_monolithic:
            return super().apply_monolithic(kernel, layer, x, router_logits, extra)
        weights, ids = self.route(self.cpu_router(), layer, x, router_logits)
        return self.apply(kernel, layer, x, weights, ids, {})

    def cpu_router(self) -> Any:
        """vLLM's routing function for CPUs."""
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import select_experts

        return select_experts

    def route(self, select_experts: Any, layer: Any, x: Tensor, router_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Routing weights and expert ids, `[M, top_k]` each."""
        weights, ids = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        return weights, ids

    def modular_kernel(self, prepare: Any, experts: Any) -> Any:
        """vLLM's modular kernel; on a CPU it allocates its workspaces by `_workspaces`."""
        kernel = super().modular_kernel(prepare, experts)
        if current_platform.is_cpu() and not experts.is_monolithic():
            kernel.impl._allocate_buffers = functools.partial(_workspaces, experts)
        return kernel


class Vllm027Adapter(Vllm028Adapter):
    """vLLM 0.27: the constructors of Humming's experts take the layer and read their tensors from it."""

    def cpu_router(self) -> Any:
        """vLLM's routing function for CPUs."""
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

        return select_experts

    def humming_experts(
        self, stock_class: Any, moe: Any, quant_config: Any, problem: Problem, tensors: Mapping[str, Tensor]
    ) -> Any:
        """Experts over a stub of the layer; see `ExpertsAdapter.humming_experts`."""
        layer = humming.layer_stub(problem, tensors, self.humming_intermediate_size(problem))
        experts = stock_class(layer, moe, quant_config, **self.batched_kwargs(stock_class, moe))
        humming.complete_reduction(experts)
        run = experts.apply

        def apply(**arguments: Any) -> Any:
            # Up to 0.24 the class reads these two from the layer, not from the arguments.
            layer.activation, layer.expert_map = arguments["activation"], arguments["expert_map"]
            return run(**arguments)

        experts.apply = apply
        return experts

    def humming_intermediate_size(self, problem: Problem) -> int:
        """The value that the classes expect as intermediate size."""
        return problem.intermediate_size


class Vllm024Adapter(Vllm027Adapter):
    """vLLM 0.24 to 0.26: the layer's loader silently drops biases of single experts."""

    def humming_intermediate_size(self, problem: Problem) -> int:
        """Half the rows of w13: the classes expect two rows per unit, gated or not."""
        return problem.w13_rows // 2

    def bias_loader(self, layer: Any, loader: Any) -> Any:
        """A loader for biases of single experts: a bound method of the layer, which it does not hold otherwise. Tensors
        of all experts go to the layer's own loader."""
        function = getattr(loader, "__func__", lambda _, *arguments: loader(*arguments))

        @functools.wraps(function)
        def load(
            self: Any,
            param: Any,
            loaded_weight: Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            if loaded_weight.ndim != 1:
                done: bool | None = function(
                    self, param, loaded_weight, weight_name, shard_id, expert_id, return_success
                )
                return done
            local = self._map_global_expert_id_to_local_expert_id(expert_id)
            if local != -1:
                _load_bias(param.data[local], loaded_weight, shard_id, self.moe_config)
            return local != -1 if return_success else None

        return MethodType(load, layer)


class Vllm022Adapter(Vllm024Adapter):
    """vLLM 0.22 and 0.23: one class, `FusedMoE`, is layer, router and runner."""

    def activation_fields(self, name: str) -> Mapping[str, str]:
        """A model sets only the limit."""
        return {"limit": super().activation_fields(name)["limit"]}

    def hash_routing(self, moe: Any, layer: Any) -> bool:
        """Whether the layer holds the table."""
        return layer.hash_indices_table is not None

    def keep_padded_output(self, experts: Any, moe: Any, plan: ShardPlan) -> None:
        """See `ExpertsAdapter.keep_padded_output`. In these releases vLLM's runner reads the width from its config."""
        super().keep_padded_output(experts, moe, plan)
        if hasattr(experts, "hidden_dim_unpadded"):
            moe.hidden_dim_unpadded = plan.hidden_size


def _workspaces(
    experts: Any, out_dtype: torch.dtype, device: torch.device, M_chunk: int, M_full: int, *sizes: Any, **more: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' two workspaces and their output, for vLLM's modular kernel.

    Args:
        experts: modular experts.
        out_dtype: dtype of the output.
        device: device of the tensors.
        M_chunk: equal to `M_full`: there is one chunk.
        M_full: number of tokens.
        sizes: other arguments of the experts' `workspace_shapes`.
        more: other keyword arguments of it.
    """
    dtype = experts.workspace_dtype(out_dtype)
    first, second, out = experts.workspace_shapes(M_full, *sizes, **more)
    made = [torch.empty(shape, dtype=dtype, device=device) for shape in (first, second, out)]
    return made[0], made[1], made[2]


def _load_bias(target: Tensor, bias: Tensor, shard_id: str, moe: Any) -> None:
    """Copies the bias of one projection (w1 gate, w3 up, w2 down) of one expert.

    Args:
        target: `[rows]` of this rank, gate then up.
        bias: `[rows]` of all tensor-parallel ranks.
        shard_id: the projection.
        moe: vLLM's `FusedMoEConfig`.
    """
    if shard_id != "w2":
        # The target can be padded, the checkpoint's bias is not.
        rows = bias.shape[0] // moe.moe_parallel_config.tp_size
        bias = bias.narrow(0, rows * moe.moe_parallel_config.tp_rank, rows)
        half = target.shape[0] // 2
        if moe.is_act_and_mul:
            target = target[half:] if shard_id == "w3" else target[:half]
    target[: bias.shape[0]].copy_(bias)
