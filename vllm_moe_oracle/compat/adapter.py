"""What the rest of the project asks of vLLM, in the language of the newest tested release."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, FusedMoEQuantDesc
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import make_moe_prepare_and_finalize_no_dp_ep

from ..backends import Backend, Forward, ScratchForward
from ..oracle.problem import MX_BLOCK, Activation, Problem
from .experts import FunctionExperts
from .layers import Layers
from .stock_experts import StockExperts

# Read once: on a CPU the compiler traces through `apply`, and a signature is nothing that it can look at.
_APPLY = frozenset(inspect.signature(FusedMoEKernel.apply).parameters)
_APPLY_MONOLITHIC = frozenset(inspect.signature(FusedMoEKernel.apply_monolithic).parameters)


class Adapter(Layers, StockExperts):
    """The newest era of vLLM: its engine, its layers, its expert classes, and here its kernels around experts. Older
    eras subclass it, in `older`, and override what differs."""

    def quant_config(self, problem: Problem, tensors: Mapping[str, Tensor]) -> Any:
        """vLLM's `FusedMoEQuantConfig` with the layer's scales and biases in their slots.

        Args:
            problem: the layer.
            tensors: kernel tensors by canonical name.
        """
        weights = {"mxfp8": "mxfp8", "mxfp4": "mxfp4", "wna16": f"int{problem.scheme.bits}"}[problem.scheme.name]
        # Activations are described as they enter vLLM's prepare step, which must leave them alone.
        inputs = FusedMoEQuantDesc()
        w1, w2 = (
            FusedMoEQuantDesc(
                dtype=weights,
                scale=tensors.get(f"{name}_scale"),
                zp=tensors.get(f"{name}_zero_point"),
                bias=tensors.get(f"{name}_bias"),
            )
            for name in ("w13", "w2")
        )
        # vLLM's kernels have the numbers of other activations from the layer's config, or built in.
        swish = problem.activation if problem.activation.name not in ("situ", "swiglustep") else Activation("silu")
        # By keyword: the order of the fields, and of the parameters of vLLM's own helpers, moves.
        return FusedMoEQuantConfig(
            _a1=inputs,
            _a2=FusedMoEQuantDesc(),
            _w1=w1,
            _w2=w2,
            is_scale_swizzled=False,
            gemm1_alpha=swish.alpha,
            gemm1_beta=swish.beta,
            gemm1_clamp_limit=swish.limit,
            mx_alignment=MX_BLOCK if problem.scheme.name == "mxfp8" else 0,
        )

    def function_experts(
        self,
        moe: Any,
        quant_config: Any,
        forward: Forward | ScratchForward,
        nbytes: Callable[[int, int], int] | None = None,
    ) -> Any:
        """Experts over a plain function; with `nbytes`, over one that needs scratch memory."""
        return FunctionExperts(moe, quant_config, forward, nbytes)

    def max_tokens(self, moe: Any) -> int:
        """Most tokens that a call of a layer may have: the scheduler's limit on every data-parallel rank together."""
        config = self.engine()
        return int(config.scheduler_config.max_num_batched_tokens) * int(moe.moe_parallel_config.dp_size)

    def kernel(self, moe: Any, quant_config: Any, layer: Any, experts: Any) -> Any:
        """vLLM's modular kernel around experts, with the prepare and finalise steps of this deployment."""
        # A backend may describe activations to its own experts otherwise than the scheme does.
        quant_config = getattr(experts, "quant_config", None) or quant_config
        prepare = maybe_make_prepare_finalize(
            moe=moe,
            quant_config=quant_config,
            routing_tables=layer._expert_routing_tables(),
            allow_new_interface=True,
            use_monolithic=experts.is_monolithic(),
        )
        return self.modular_kernel(prepare, experts)

    def modular_kernel(self, prepare: Any, experts: Any) -> Any:
        """vLLM's modular kernel of its two parts."""
        return FusedMoEKernel(prepare, experts)

    def is_monolithic(self, backend: Backend) -> bool:
        """Whether vLLM has to hand over router logits instead of routed tokens."""
        return backend.monolithic

    def lone_config(self, moe: Any, problem: Problem) -> Any:
        """A copy of vLLM's `FusedMoEConfig` for a layer on this rank alone with the problem's number of experts."""
        config = copy.copy(moe)
        parallel = copy.copy(moe.moe_parallel_config)
        parallel.dp_size = parallel.ep_size = parallel.pcp_size = 1
        parallel.dp_rank = parallel.ep_rank = parallel.pcp_rank = 0
        parallel.use_ep = parallel.enable_eplb = False
        config.moe_parallel_config = parallel
        config.num_experts = config.num_local_experts = config.num_logical_experts = problem.num_experts
        config.experts_per_token = problem.top_k
        return config

    def run_alone(
        self, experts: Any, layer: Any, tensors: Mapping[str, Tensor], x: Tensor, weights: Tensor, ids: Tensor
    ) -> Tensor:
        """Runs modular experts on routed tokens, with no other rank and no shared experts around them.

        Args:
            experts: what a backend built for `layer`.
            layer: the module that holds `tensors`; experts may have left something on it.
            tensors: kernel tensors by canonical name.
            x: `[M, hidden]`.
            weights: `[M, top_k]` float32.
            ids: `[M, top_k]` int32.
        """
        batched = experts.activation_format() == FusedMoEActivationFormat.BatchedExperts
        unsorted = make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
        prepare = self.sorting(experts.moe_config) if batched else unsorted
        kernel = self.modular_kernel(prepare, experts)
        hidden = x.shape[-1]
        # Some classes ask how many tokens all ranks have together. Without a number of its own the context says that it
        # does not know, and asks no other rank.
        engine = self._last_engine()
        with nullcontext() if engine is None else set_forward_context(None, engine):
            result = kernel.apply(
                # Padded and cropped as vLLM's runner does it for kernels that want a larger hidden size.
                torch.nn.functional.pad(x, (0, max(experts.moe_config.hidden_dim - hidden, 0))),
                tensors["w13"],
                tensors["w2"],
                topk_weights=weights,
                topk_ids=ids,
                activation=experts.moe_config.activation,
                global_num_experts=experts.moe_config.num_experts,
                expert_map=None,
                apply_router_weight_on_input=False,
            )
        return cast(Tensor, result)[..., :hidden]

    def logits_dtype(self, moe: Any) -> torch.dtype:
        """Type of the router's logits that a layer hands over.

        Args:
            moe: vLLM's `FusedMoEConfig` of the layer.
        """
        return cast(torch.dtype, moe.router_logits_dtype or moe.in_dtype)

    def run_alone_routing(
        self,
        experts: Any,
        tensors: Mapping[str, Tensor],
        x: Tensor,
        problem: Problem,
        logits: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Runs monolithic experts on router logits; otherwise as `run_alone`.

        Args:
            experts: what a backend built.
            tensors: kernel tensors by canonical name.
            x: `[M, hidden]`.
            problem: the lone layer.
            logits: `[M, experts]`.
            bias: correction bias, float32 `[experts]`, or None.
            scale: the layer's scaling factor.
        """
        kernel = self.modular_kernel(make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=True), experts)
        hidden = x.shape[-1]
        result = kernel.apply_monolithic(
            torch.nn.functional.pad(x, (0, max(experts.moe_config.hidden_dim - hidden, 0))),
            tensors["w13"],
            tensors["w2"],
            logits.to(x.device),
            activation=experts.moe_config.activation,
            global_num_experts=problem.num_experts,
            expert_map=None,
            apply_router_weight_on_input=False,
            num_expert_group=problem.routing.num_groups,
            topk_group=problem.routing.top_k_groups,
            e_score_correction_bias=None if bias is None else bias.to(x.device),
            routed_scaling_factor=scale,
            **_accepted(_APPLY_MONOLITHIC, {"routing_sink": None}),
        )
        return cast(Tensor, result)[..., :hidden]

    def sorting(self, moe: Any) -> Any:
        """vLLM's own stand-in for an all-to-all that sorts tokens by expert, on this rank alone.

        Args:
            moe: from `lone_config`.
        """
        from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

        return BatchedPrepareAndFinalize(
            max_num_tokens=moe.max_num_tokens, num_local_experts=moe.num_local_experts, num_dispatchers=1, rank=0
        )

    def apply(
        self, kernel: Any, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, extra: Mapping[str, Any]
    ) -> Any:
        """Runs a modular kernel on routed tokens.

        Args:
            kernel: from `kernel`.
            layer: the layer.
            x: `[M, hidden]`.
            topk_weights: `[M, top_k]`.
            topk_ids: `[M, top_k]`.
            extra: what else vLLM passed to the method's `apply`, by name (shared experts and their input).
        """
        return kernel.apply(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            **_accepted(_APPLY, extra),
        )

    def apply_monolithic(
        self, kernel: Any, layer: Any, x: Tensor, router_logits: Tensor, extra: Mapping[str, Any]
    ) -> Any:
        """Runs a kernel that routes itself.

        Args:
            kernel: from `kernel`.
            layer: the layer.
            x: `[M, hidden]`.
            router_logits: `[M, num_experts]`.
            extra: what else vLLM passed to the method's `apply_monolithic`, by name (token ids).
        """
        extra = {
            "routing_sink": getattr(layer, "routing_sink", None),
            "hash_indices_table": getattr(layer, "hash_indices_table", None),
            **extra,
        }
        # A model may name groups and not route by them; what was checked is what `Layers.routing` says.
        grouped = getattr(layer, "use_grouped_topk", True)
        return kernel.apply_monolithic(
            x,
            layer.w13_weight,
            layer.w2_weight,
            router_logits,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            num_expert_group=layer.num_expert_group if grouped else None,
            topk_group=layer.topk_group if grouped else None,
            e_score_correction_bias=layer.e_score_correction_bias,
            routed_scaling_factor=layer.routed_scaling_factor,
            **_accepted(_APPLY_MONOLITHIC, extra),
        )

    def parameters(self, layer: Any) -> Iterator[tuple[str, Tensor]]:
        """The layer's own parameters, by name."""
        yield from layer.named_parameters(recurse=False)

    def bias_loader(self, layer: Any, loader: Any) -> Any:
        """What loads the biases of single experts.

        Args:
            layer: the layer.
            loader: its own loader of weights.
        """
        return loader


def _accepted(names: frozenset[str], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name in names}
