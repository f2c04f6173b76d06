"""What the rest of the project asks of vLLM, in the language of the newest tested release."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, cast

import torch
import vllm
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, FusedMoEQuantDesc
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExperts,
    FusedMoEKernel,
)
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import make_moe_prepare_and_finalize_no_dp_ep

from ..backends import Backend, Forward, ScratchForward
from ..errors import OracleError
from ..oracle.decision import Plan
from ..oracle.problem import MX_BLOCK, Activation, Parallel, Placement, Problem, Routing, Scheme
from . import humming
from .described import described_for_stock
from .experts import FunctionExperts

_STOCK_WEIGHTS = {"mxfp8": "kMxfp8Static", "mxfp4": "kMxfp4Static", "int4": "kInt4Static", "int8": "kInt8Static"}
"""Names by which vLLM's oracles ask their expert classes about a scheme's weights."""

_STOCK_INPUTS = {"mxfp8": "kMxfp8Dynamic", "fp8": "kFp8Dynamic128Sym", "mxfp4": "kMxfp4Dynamic"}
"""The same for the precision in which a backend consumes activations; None for the model's own."""

_OAI_DEFAULTS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""gpt-oss's constants, which vLLM's kernels for ``swigluoai`` have built in."""

# Read once: on a CPU the compiler traces through `apply`, and a signature is nothing that it can look at.
_APPLY = frozenset(inspect.signature(FusedMoEKernel.apply).parameters)
_APPLY_MONOLITHIC = frozenset(inspect.signature(FusedMoEKernel.apply_monolithic).parameters)


class Adapter:
    """The newest era of vLLM. Older eras subclass it, in `older`, and override what differs.

    Attributes:
        stock_experts_classes: ``module:Class`` of each stock expert class that can be built, by class name.
    """

    stock_experts_classes: ClassVar[Mapping[str, str]] = {
        "MarlinExperts": "vllm.model_executor.layers.fused_moe.experts.marlin_moe:MarlinExperts",
        "BatchedMarlinExperts": "vllm.model_executor.layers.fused_moe.experts.marlin_moe:BatchedMarlinExperts",
        "CPUExpertsInt4": "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUExpertsInt4",
        "TritonWNA16Experts": "vllm.model_executor.layers.fused_moe.experts.triton_moe:TritonWNA16Experts",
        "TrtLlmMxint4ExpertsMonolithic": (
            "vllm.model_executor.layers.fused_moe.experts.trtllm_mxint4_moe:TrtLlmMxint4ExpertsMonolithic"
        ),
        "DeepGemmExperts": "vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe:DeepGemmExperts",
        "HummingIndexedExperts": "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe:HummingIndexedExperts",
        "HummingGroupedExperts": "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe:HummingGroupedExperts",
        "OAITritonExperts": "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe:OAITritonExperts",
        "UnfusedOAITritonExperts": (
            "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe:UnfusedOAITritonExperts"
        ),
        "OAITritonMxfp4ExpertsMonolithic": (
            "vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe:OAITritonMxfp4ExpertsMonolithic"
        ),
        "TrtLlmFp8ExpertsModular": (
            "vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe:TrtLlmFp8ExpertsModular"
        ),
        "TrtLlmFp8ExpertsMonolithic": (
            "vllm.model_executor.layers.fused_moe.experts.trtllm_fp8_moe:TrtLlmFp8ExpertsMonolithic"
        ),
        "TrtLlmMxfp4ExpertsModular": (
            "vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsModular"
        ),
        "TrtLlmMxfp4ExpertsMonolithic": (
            "vllm.model_executor.layers.fused_moe.experts.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsMonolithic"
        ),
        "FlashInferExperts": "vllm.model_executor.layers.fused_moe.experts.flashinfer_cutlass_moe:FlashInferExperts",
        "DeepGemmFP4Experts": "vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe:DeepGemmFP4Experts",
    }

    # --- the running engine -----------------------------------------------------------------------

    _engine: VllmConfig | None = None

    def engine(self) -> VllmConfig:
        """vLLM's config of the engine; the last one where none is current: some releases reload weights so."""
        return self._last_engine() or get_current_vllm_config()

    def _last_engine(self) -> VllmConfig | None:
        self._engine = get_current_vllm_config_or_none() or self._engine
        return self._engine

    def version(self) -> str:
        """vLLM's version."""
        return str(vllm.__version__)

    def additional_config(self) -> object:
        """``--additional-config`` of the engine that is being built."""
        return self.engine().additional_config

    def model_type(self) -> str:
        """The kind of model that is being built, as its config.json says (``model_type``); "" where nothing says so."""
        engine = self._last_engine()
        if engine is None or engine.model_config is None:
            return ""
        return str(getattr(engine.model_config.hf_text_config, "model_type", ""))

    def activations_asked(self) -> Any:
        """vLLM's `QuantKey` that ``--quantization-config`` gives for the experts' inputs; None without one."""
        config = self.engine().model_config
        given = None if config is None else config.quantization_config
        if not isinstance(given, QuantizationConfigArgs) or given.moe is None:
            return None
        return given.moe.activation

    def beyond_us(self, moe: Any) -> list[str]:
        """What a layer is asked to do that only stock vLLM's own methods are known to do."""
        batched = moe.moe_parallel_config.use_batched_activation_format
        return ["LoRA on experts"] * bool(moe.is_lora_enabled) + ["a batched all-to-all"] * bool(batched)

    def stock_objection(self, backend: Backend, moe: Any, problem: Problem) -> str:
        """Why the stock class that a backend wraps would refuse the layer; "" when it would not, or gives no answer.

        Args:
            backend: the backend.
            moe: vLLM's `FusedMoEConfig` of the layer.
            problem: the layer.
        """
        scheme = problem.scheme.name
        if not (backend.stock_class and backend.asks_stock):
            return ""
        from vllm.model_executor.layers.quantization.utils import quant_utils

        # vLLM's MXFP8 oracle asks every class about W8A8, also those that leave activations alone.
        name = _STOCK_INPUTS.get("mxfp8" if scheme == "mxfp8" else backend.activations(problem))
        weights = getattr(quant_utils, _stock_weights(backend, problem))
        inputs = None if name is None else getattr(quant_utils, name)
        batched = moe.moe_parallel_config.use_batched_activation_format
        layout = FusedMoEActivationFormat.BatchedExperts if batched else FusedMoEActivationFormat.Standard
        found = self.experts_class(backend)
        try:
            supported, reason = found.is_supported_config(found, moe, weights, inputs, layout)
        except NotImplementedError:  # some classes of older releases leave the question open
            return ""
        return "" if supported else str(reason)

    def weights_are_made_up(self) -> bool:
        """Whether no checkpoint will be read (``--load-format dummy``)."""
        return str(self.engine().load_config.load_format) == "dummy"

    def moe_layer_names(self) -> list[str]:
        """Names of every MoE layer that the model being loaded has, ours or not."""
        return list(self.engine().compilation_config.static_all_moe_layers)

    def peers(self) -> Any:
        """torch's CPU group of the ranks that hold parts of this process's layers, data-parallel ones included; None
        where there are no others, or where ranks join while others serve (elastic expert parallelism)."""
        if not parallel_state.model_parallel_is_initialized():
            return None
        if self.engine().parallel_config.enable_elastic_ep:
            return None
        group = parallel_state._EP or parallel_state.get_tp_group()
        return group.cpu_group if group.world_size > 1 else None

    def batch_invariant(self) -> bool:
        """Whether the user asked for batch invariance."""
        import vllm.envs as envs

        return bool(envs.VLLM_BATCH_INVARIANT)

    # --- vLLM's layer config to our problem -------------------------------------------------------

    def problem(self, moe: Any, layer: Any, name: str, scheme: Scheme) -> Problem:
        """One MoE layer of this rank as a problem.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            layer: the layer under construction, or None where vLLM does not hand it out; routing details are then
                unknown.
            name: the layer's name.
            scheme: what the checkpoint holds.
        """
        parallel = moe.moe_parallel_config
        return Problem(
            layer=name,
            scheme=scheme,
            num_experts=moe.num_experts,
            local_experts=moe.num_local_experts,
            top_k=moe.experts_per_token,
            hidden_size=moe.hidden_dim,
            intermediate_size=moe.intermediate_size_per_partition,
            activation=self.activation(moe),
            has_bias=bool(moe.has_bias),
            dtype=str(moe.in_dtype).removeprefix("torch."),
            routing=self.routing(moe, layer),
            parallel=Parallel(
                tp=parallel.tp_size,
                ep=parallel.ep_size if parallel.use_ep else 1,
                dp=parallel.dp_size,
                format="batched" if parallel.use_batched_activation_format else "standard",
                placement=self.placement(moe, layer),
            ),
            lora=bool(moe.is_lora_enabled),
            eplb=bool(parallel.enable_eplb),
            batch_invariant=self.batch_invariant(),
        )

    def placement(self, moe: Any, layer: Any) -> Placement:
        """How experts are dealt out to ranks. vLLM deals by turns, where asked to, only experts in several groups, not
        under EPLB, and not with every all-to-all; before it asks for the layer's method it has decided. Of a layer that
        it does not hand out, what was asked for is taken, and a few kernels are refused that could run.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            layer: the layer under construction, or None.
        """
        parallel = moe.moe_parallel_config
        if not (parallel.use_ep and parallel.ep_size > 1):
            return "linear"
        if layer is not None:
            return "round_robin" if layer.expert_placement_strategy == "round_robin" else "linear"
        asked = self.engine().parallel_config.expert_placement_strategy
        return "round_robin" if asked == "round_robin" and not parallel.enable_eplb else "linear"

    def activation(self, moe: Any) -> Activation:
        """The layer's activation with its parameters."""
        name = str(moe.activation.value)
        gated = bool(moe.is_act_and_mul)
        interleaved = name == "swigluoai"
        name = name.removesuffix("_no_mul").removesuffix("_uninterleave")
        alpha, beta, limit = self.activation_parameters(moe)
        if name == "swigluoai":
            alpha = _OAI_DEFAULTS["alpha"] if alpha is None else alpha
            beta = _OAI_DEFAULTS["beta"] if beta is None else beta
            limit = _OAI_DEFAULTS["limit"] if limit is None else limit
        return Activation(name, gated, alpha, beta, limit, interleaved)

    def activation_in_halves(self, moe: Any) -> Any:
        """vLLM's activation for gate rows, then up rows: its ``swigluoai`` takes rows that alternate, and the other one
        has a name of its own. The very activation where the release has no other: no class takes the layer there."""
        name = f"{moe.activation.value}_uninterleave"
        return next((each for each in type(moe.activation) if str(each.value) == name), moe.activation)

    def activation_parameters(self, moe: Any) -> tuple[float | None, float | None, float | None]:
        """Alpha, beta and limit as the model set them."""
        return moe.swiglu_alpha, moe.swiglu_beta, moe.swiglu_limit

    def routing(self, moe: Any, layer: Any) -> Routing:
        """How the layer's tokens choose experts."""
        method = moe.routing_method.name.lower()
        if layer is None:
            return Routing(method=method)
        return Routing(
            method=method,
            scoring=layer.scoring_func,
            renormalize=bool(layer.renormalize),
            num_groups=layer.num_expert_group if layer.use_grouped_topk else None,
            top_k_groups=layer.topk_group if layer.use_grouped_topk else None,
            correction_bias=layer.e_score_correction_bias is not None,
            weight_on_input=bool(layer.apply_router_weight_on_input),
            hashed=self.hashed(moe, layer),
        )

    def hashed(self, moe: Any, layer: Any) -> bool:
        """Whether experts come from a table over token ids, which a kernel that routes itself has to be given."""
        return bool(moe.has_hash_routing)

    # --- our tensors to vLLM's kernel -------------------------------------------------------------

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
        activation = problem.activation
        # By keyword: the order of the fields, and of the parameters of vLLM's own helpers, moves.
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
        forward: Forward | ScratchForward,
        nbytes: Callable[[int, int], int] | None = None,
    ) -> Any:
        """Experts over a plain function; with `nbytes`, over one that needs scratch memory."""
        return FunctionExperts(moe, quant_config, forward, nbytes)

    def max_tokens(self, moe: Any) -> int:
        """Most tokens that a call of a layer may have: the scheduler's limit on every data-parallel rank together."""
        config = self.engine()
        return int(config.scheduler_config.max_num_batched_tokens) * int(moe.moe_parallel_config.dp_size)

    def experts_class(self, backend: Backend) -> Any:
        """The class of the experts that a backend will build, which stock code asks before weights are there."""
        return self.stock_class(backend.stock_class) if backend.stock_class else FunctionExperts

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
        return kernel.apply_monolithic(
            x,
            layer.w13_weight,
            layer.w2_weight,
            router_logits,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            num_expert_group=layer.num_expert_group,
            topk_group=layer.topk_group,
            e_score_correction_bias=layer.e_score_correction_bias,
            routed_scaling_factor=layer.routed_scaling_factor,
            **_accepted(_APPLY_MONOLITHIC, extra),
        )

    def stock_class(self, name: str) -> Any:
        """vLLM's own expert class of that name.

        Raises:
            OracleError: this release has none.
        """
        if name not in self.stock_experts_classes:
            raise OracleError(f"vLLM {self.version()} has no expert class {name} that could be used here")
        module, _, attribute = self.stock_experts_classes[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def stock_experts(
        self,
        class_name: str,
        moe: Any,
        quant_config: Any,
        *,
        weights: str = "",
        inputs: str = "",
        swizzled: bool = False,
        plan: Plan | None = None,
        scales: tuple[Tensor, ...] = (),
        problem: Problem | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        group: int = 0,
    ) -> Any:
        """An instance of vLLM's own expert class.

        Args:
            class_name: a key of `stock_experts_classes`.
            moe: vLLM's `FusedMoEConfig`. Given a plan, its sizes become the plan's, as stock code does it: vLLM's
                runner then pads what goes in and crops what comes out.
            quant_config: from `quant_config`.
            weights: see `vllm_moe_oracle.backends.Builder.stock`.
            inputs: see there.
            swizzled: see there.
            plan: see there.
            scales: see there.
            problem: see there.
            tensors: see there.
            group: see there.
        """
        if plan is not None:
            moe.hidden_dim = plan.hidden_size
            moe.intermediate_size_per_partition = plan.intermediate_size
        found = self.stock_class(class_name)
        described = described_for_stock(quant_config, weights, inputs, scales, swizzled, group)
        if class_name.startswith("Humming"):
            assert problem is not None and tensors is not None
            return self.humming_experts(found, moe, described, problem, tensors)
        experts = found.__new__(found)
        # Classes that share a base of their own with a second class do not call this one; what it sets, others read.
        sizes = self.batched_sizes(found, moe)
        FusedMoEExperts.__init__(experts, moe, described, **sizes)
        found.__init__(experts, moe, described, **sizes, **self.orders(class_name, problem, tensors))
        if plan is not None:
            self.widen_output(experts, moe, plan)
        return experts

    def batched_sizes(self, stock_class: Any, moe: Any) -> dict[str, int]:
        """What classes want to know whose activations come sorted by expert: the room for each, as all-to-alls make it.

        Args:
            stock_class: one of vLLM's own.
            moe: vLLM's `FusedMoEConfig`.
        """
        if stock_class.activation_format() != FusedMoEActivationFormat.BatchedExperts:
            return {}
        return {"max_num_tokens": moe.max_num_tokens, "num_dispatchers": moe.moe_parallel_config.ep_size}

    def orders(self, class_name: str, problem: Problem | None, tensors: Mapping[str, Tensor] | None) -> dict[str, Any]:
        """Arguments by which a class is told the order of input features.

        Args:
            class_name: of one of vLLM's own.
            problem: the layer.
            tensors: kernel tensors of the layer by canonical name.
        """
        return {}

    def widen_output(self, experts: Any, moe: Any, plan: Plan) -> None:
        """Makes classes that crop their output themselves leave that to vLLM's runner, as all others do: what comes
        between, an all-to-all for one, counts on one width.

        Args:
            experts: one of vLLM's own.
            moe: vLLM's `FusedMoEConfig`.
            plan: the sizes that the kernel sees.
        """
        if hasattr(experts, "hidden_dim_unpadded"):
            experts.hidden_dim_unpadded = plan.hidden_size

    def humming_experts(
        self, stock_class: Any, moe: Any, quant_config: Any, problem: Problem, tensors: Mapping[str, Tensor]
    ) -> Any:
        """Humming's experts, which want the library's own description of both matrices.

        Args:
            stock_class: one of vLLM's classes over Humming.
            moe: vLLM's `FusedMoEConfig`.
            quant_config: from `quant_config`.
            problem: the layer.
            tensors: kernel tensors of the layer by canonical name.
        """
        return stock_class(moe, humming.quant_config(quant_config, problem))

    # --- parameters -------------------------------------------------------------------------------

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


def _stock_weights(backend: Backend, problem: Problem) -> str:
    """The name by which vLLM's oracle would ask about a layer's weights."""
    scheme = problem.scheme
    if scheme.name != "wna16":
        return _STOCK_WEIGHTS[scheme.name]
    # vLLM has names for groups of 32 and for zero points too. Only the class that takes nothing but groups of 32 asks
    # for one of them; others of some releases do not know them, and run such layers all the same.
    if backend.limits.groups == (32,):
        return "kInt4Static32"
    return _STOCK_WEIGHTS[f"int{scheme.bits}"]


def _accepted(names: frozenset[str], extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in extra.items() if name in names}
