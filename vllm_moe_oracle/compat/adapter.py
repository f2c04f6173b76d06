"""The interface to vLLM that the rest of the package uses, written against the newest tested release."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, FusedMoEQuantDesc
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEKernel
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import make_moe_prepare_and_finalize_no_dp_ep

from ..backends import Backend, Forward, WorkspaceForward
from ..core.activations import spec_of
from ..core.problem import MX_BLOCK, Activation, Problem
from ..errors import BackendDefect
from ..releases.all2all import delivers_wide_ids
from . import kernel_memory
from .experts_adapter import ExpertsAdapter
from .function_experts import BatchedFunctionExperts, FunctionExperts
from .layer_adapter import LayerAdapter

# Read at import: on a CPU torch.compile traces through `apply`, and cannot trace `inspect.signature`.
_APPLY_PARAMETERS = frozenset(inspect.signature(FusedMoEKernel.apply).parameters)
_APPLY_MONOLITHIC_PARAMETERS = frozenset(inspect.signature(FusedMoEKernel.apply_monolithic).parameters)


_EXCHANGES = ("vllm.distributed.", "vllm.model_executor.layers.fused_moe.prepare_finalize", "deep_ep", "nixl_ep")
"""Modules, by the beginning of their names, that exchange tokens between ranks."""


class Adapter(LayerAdapter, ExpertsAdapter):
    """The newest tested vLLM. The base classes adapt its engine, layers and expert classes; this class its kernels.

    `legacy_adapters` has a subclass for each group of older releases, which overrides what differs.
    """

    def quant_config(self, problem: Problem, tensors: Mapping[str, Tensor]) -> Any:
        """vLLM's `FusedMoEQuantConfig` with the layer's scales, zero points and biases."""
        weights = {"mxfp8": "mxfp8", "mxfp4": "mxfp4", "wna16": f"int{problem.scheme.bits}"}[problem.scheme.name]
        # Describes the activations that enter vLLM's prepare step, which must not quantize them.
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
        activation = problem.activation
        if not spec_of(activation).quant_config_params:
            activation = Activation("silu")
        # Keywords: the order of the fields differs between releases.
        return FusedMoEQuantConfig(
            _a1=inputs,
            _a2=FusedMoEQuantDesc(),
            _w1=w1,
            _w2=w2,
            is_scale_swizzled=False,
            gemm1_alpha=activation.alpha,
            gemm1_beta=activation.beta,
            gemm1_clamp_limit=activation.limit,
            mx_alignment=MX_BLOCK if problem.scheme.name == "mxfp8" else 0,
        )

    def function_experts(
        self,
        moe: Any,
        quant_config: Any,
        forward: Forward | WorkspaceForward,
        nbytes: Callable[[int, int], int] | None = None,
        batched: bool = False,
    ) -> Any:
        """Experts that call a function; with LoRA adapters where the layer may have them.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            quant_config: from `quant_config`.
            forward: the function.
            nbytes: bytes of scratch memory that it needs, from the number of tokens and top-k; None for none.
            batched: for activations that an all-to-all has sorted by expert; the function sees each row as a token.

        Raises:
            BackendDefect: the layer may have adapters, and the function takes none.
        """
        if batched:
            return BatchedFunctionExperts(
                moe, quant_config, forward, nbytes, **self.batched_kwargs(BatchedFunctionExperts, moe)
            )
        if not moe.is_lora_enabled:
            return FunctionExperts(moe, quant_config, forward, nbytes)
        from .lora_experts import LoRAFunctionExperts

        if "adapters" not in inspect.signature(forward).parameters:
            rule = "its capabilities include lora, and the function that it passed to the builder takes no adapters"
            raise BackendDefect(rule, "Give the function a keyword argument adapters=None; see backends.Adapters")
        alternating = self.activation(moe).interleaved
        return LoRAFunctionExperts(moe, quant_config, forward, nbytes, alternating=alternating)

    def batched_rows(self, moe: Any) -> int:
        """Rows that an all-to-all in the batched format hands to a rank: each rank's most tokens, for each expert."""
        sizes = self.batched_kwargs(BatchedFunctionExperts, moe)
        return int(moe.num_local_experts) * sizes["max_num_tokens"] * sizes["num_dispatchers"]

    def max_tokens(self, moe: Any) -> int:
        """Largest number of tokens in a call of a layer: the scheduler's limit times the data-parallel ranks."""
        config = self.engine()
        return int(config.scheduler_config.max_num_batched_tokens) * int(moe.moe_parallel_config.dp_size)

    def kernel(self, moe: Any, quant_config: Any, layer: Any, experts: Any) -> Any:
        """vLLM's modular kernel around experts, with the prepare and finalize steps of this deployment.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            quant_config: from `quant_config`.
            layer: vLLM's layer.
            experts: what a backend built.
        """
        # A backend's experts can have a quant config of their own.
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
        """vLLM's modular kernel from a prepare-and-finalize step and experts."""
        return FusedMoEKernel(prepare, experts)

    def is_monolithic(self, backend: Backend) -> bool:
        """Whether vLLM passes router logits to a backend's experts, not routed tokens."""
        return backend.monolithic

    def single_rank_config(self, moe: Any, problem: Problem) -> Any:
        """A copy of vLLM's `FusedMoEConfig` without parallelism, with the problem's numbers of experts."""
        config = copy.copy(moe)
        parallel = copy.copy(moe.moe_parallel_config)
        parallel.dp_size = parallel.ep_size = parallel.pcp_size = 1
        parallel.dp_rank = parallel.ep_rank = parallel.pcp_rank = 0
        parallel.use_ep = parallel.enable_eplb = False
        config.moe_parallel_config = parallel
        _limit_unreduced(config, 0)
        config.num_experts = config.num_logical_experts = problem.num_experts
        config.num_local_experts = problem.local_experts
        config.experts_per_token = problem.top_k
        return config

    def finalize_always(self, moe: Any) -> bool:
        """Takes back a model's request for unreduced outputs of the experts (``FusedMoEConfig.defer_moe_finalize``),
        which vLLM's model code makes while it is built, by the class of the experts then. Returns whether there was
        one."""
        asked = bool(getattr(moe, "use_deferred_moe_finalize", False))
        return _limit_unreduced(moe, 0) and asked

    def trial_tokens(self, moe: Any) -> int:
        """Most tokens of a trial call: no more than the engine's own calls have, whose workspaces may not grow."""
        most = 1 << 20 if self._last_engine() is None else self.max_tokens(moe)
        return min(most, moe.max_num_tokens) if moe.moe_parallel_config.use_batched_activation_format else most

    def ids_dtype(self, moe: Any) -> torch.dtype:
        """Dtype of the expert ids that a server's router and all-to-all deliver to modular experts."""
        parallel = moe.moe_parallel_config
        if parallel.use_batched_activation_format or not parallel.use_all2all_kernels:
            return torch.int32
        return torch.int64 if delivers_wide_ids(parallel.all2all_backend) else torch.int32

    def run_single_rank(
        self,
        experts: Any,
        layer: Any,
        tensors: Mapping[str, Tensor],
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        expert_map: Tensor | None = None,
        *,
        poisoned: bool = False,
        guards: kernel_memory.Guards | None = None,
        weights_on_input: bool = False,
    ) -> Tensor:
        """Runs modular experts on routed tokens, without other ranks and without shared experts.

        Args:
            experts: what a backend built for `layer`.
            layer: the module that holds `tensors`.
            tensors: kernel tensors by canonical name.
            x: `[M, hidden]`.
            weights: `[M, top_k]` float32.
            ids: `[M, top_k]` integer.
            expert_map: see `backends.Forward`.
            poisoned: output and workspaces are full of NaN before the experts run, and not of what the memory held.
            guards: output and workspaces lie between its guards; None for memory of vLLM's own.
            weights_on_input: vLLM's prepare step multiplies tokens by the weights, and the experts do not.

        Returns:
            `[M, hidden]` in the dtype of `x`.
        """
        batched = experts.activation_format() == FusedMoEActivationFormat.BatchedExperts
        standard = make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False)
        prepare = self.batched_prepare_finalize(experts.moe_config) if batched else standard
        kernel = self.modular_kernel(prepare, experts)
        hidden = x.shape[-1]
        # Some classes read the number of tokens on all ranks from the forward context. Without a number of its own the
        # context says that it is unknown, and does not communicate.
        engine = self._last_engine()
        with (
            nullcontext() if engine is None else set_forward_context(None, engine),
            _finalized(experts.moe_config),
            kernel_memory.poisoned(experts) if poisoned else nullcontext(),
            nullcontext() if guards is None else kernel_memory.guarded(experts, guards),
        ):
            result = kernel.apply(
                _padded(x, experts.moe_config.hidden_dim),
                tensors["w13"],
                tensors["w2"],
                topk_weights=weights,
                topk_ids=ids,
                activation=experts.moe_config.activation,
                global_num_experts=experts.moe_config.num_experts,
                expert_map=expert_map,
                apply_router_weight_on_input=weights_on_input,
            )
        return cast(Tensor, result)[..., :hidden]

    def logits_dtype(self, moe: Any) -> torch.dtype:
        """Dtype of the router logits that a layer passes to monolithic experts."""
        return cast(torch.dtype, moe.router_logits_dtype or moe.in_dtype)

    def run_single_rank_monolithic(
        self,
        experts: Any,
        tensors: Mapping[str, Tensor],
        x: Tensor,
        problem: Problem,
        logits: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Runs monolithic experts on router logits; otherwise as `run_single_rank`.

        Args:
            experts: what a backend built.
            tensors: kernel tensors by canonical name.
            x: `[M, hidden]`.
            problem: the layer on one rank.
            logits: `[M, experts]`.
            bias: correction bias, float32 `[experts]`, or None.
            scale: the layer's scaling factor.
        """
        kernel = self.modular_kernel(make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=True), experts)
        hidden = x.shape[-1]
        with _finalized(experts.moe_config):
            result = kernel.apply_monolithic(
                _padded(x, experts.moe_config.hidden_dim),
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
                **_supported_kwargs(_APPLY_MONOLITHIC_PARAMETERS, {"routing_sink": None}),
            )
        return cast(Tensor, result)[..., :hidden]

    def batched_prepare_finalize(self, moe: Any) -> Any:
        """vLLM's prepare-and-finalize step that sorts tokens by expert on one rank, without an all-to-all.

        Args:
            moe: from `single_rank_config`.
        """
        from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

        return BatchedPrepareAndFinalize(
            max_num_tokens=moe.max_num_tokens, num_local_experts=moe.num_local_experts, num_dispatchers=1, rank=0
        )

    @staticmethod
    def raised_between_ranks(error: Exception) -> bool:
        """Whether an exception of a modular kernel comes from the steps in which vLLM hands tokens to the experts and
        takes their outputs, or from what ranks exchange there."""
        names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
        return any(name.startswith(_EXCHANGES) for name in names)

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
            extra: other keyword arguments of the method's `apply` (shared experts and their input).
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
            **_supported_kwargs(_APPLY_PARAMETERS, extra),
        )

    def apply_monolithic(
        self, kernel: Any, layer: Any, x: Tensor, router_logits: Tensor, extra: Mapping[str, Any]
    ) -> Any:
        """Runs a monolithic kernel, which routes tokens itself.

        Args:
            kernel: from `kernel`.
            layer: the layer.
            x: `[M, hidden]`.
            router_logits: `[M, num_experts]`.
            extra: other keyword arguments of the method's `apply_monolithic` (token ids).

        Returns:
            `[M, hidden]` in the dtype of `x`.
        """
        extra = {
            "routing_sink": getattr(layer, "routing_sink", None),
            "hash_indices_table": getattr(layer, "hash_indices_table", None),
            **extra,
        }
        # A model can set groups and not use them. `LayerAdapter.routing` reads the same flag.
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
            **_supported_kwargs(_APPLY_MONOLITHIC_PARAMETERS, extra),
        )

    def bias_loader(self, layer: Any, loader: Any) -> Any:
        """The weight loader for biases of single experts.

        Args:
            layer: the layer.
            loader: the layer's weight loader.
        """
        return loader


_UNREDUCED_LIMIT = "defer_moe_finalize_max_num_tokens"
"""Field of vLLM's `FusedMoEConfig` in every release whose models ask for such outputs."""


@contextmanager
def _finalized(moe: Any) -> Iterator[None]:
    """Experts return sums over top-k inside, where the model that they serve has asked for unreduced outputs."""
    limit = getattr(moe, _UNREDUCED_LIMIT, None)
    _limit_unreduced(moe, 0)
    try:
        yield
    finally:
        _limit_unreduced(moe, limit)


def _limit_unreduced(moe: Any, tokens: int | None) -> bool:
    """Sets the most tokens of a call whose outputs a model gets unreduced; False in a release without such calls."""
    found = hasattr(moe, _UNREDUCED_LIMIT)
    if found:
        setattr(moe, _UNREDUCED_LIMIT, tokens)
    return found


def _padded(x: Tensor, hidden: int) -> Tensor:
    """Tokens for a kernel with a larger hidden size, as vLLM's runner pads them. Where nothing is to pad it is the same
    tensor, so that it can be seen whether the kernel changes it."""
    return torch.nn.functional.pad(x, (0, hidden - x.shape[-1])) if hidden > x.shape[-1] else x


def _supported_kwargs(names: frozenset[str], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name in names}
