"""vLLM's own expert classes: asked, found and built."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExperts

from ..backends import Backend
from ..errors import OracleError
from ..oracle.decision import Plan
from ..oracle.problem import Problem
from . import humming
from .described import described_for_stock
from .engine import Engine
from .experts import FunctionExperts

_STOCK_WEIGHTS = {"mxfp8": "kMxfp8Static", "mxfp4": "kMxfp4Static", "int4": "kInt4Static", "int8": "kInt8Static"}
"""Names by which vLLM's oracles ask their expert classes about a scheme's weights."""

_STOCK_INPUTS = {"mxfp8": "kMxfp8Dynamic", "fp8": "kFp8Dynamic128Sym", "mxfp4": "kMxfp4Dynamic"}
"""The same for the precision in which a backend consumes activations; None for the model's own."""


class StockExperts(Engine):
    """vLLM's own expert classes.

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

    def experts_class(self, backend: Backend) -> Any:
        """The class of the experts that a backend will build, which stock code asks before weights are there."""
        return self.stock_class(backend.stock_class) if backend.stock_class else FunctionExperts

    def stock_class(self, name: str) -> Any:
        """vLLM's own expert class of that name.

        Args:
            name: a key of `stock_experts_classes`, or ``module:Class`` of one that is not among them.

        Raises:
            OracleError: this release has none.
        """
        none = f"vLLM {self.version()} has no expert class {name} that could be used here"
        place = name if ":" in name else self.stock_experts_classes.get(name)
        if place is None:
            raise OracleError(none)
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ModuleNotFoundError, AttributeError) as error:
            raise OracleError(none, str(error)) from error

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
            class_name: a key of `stock_experts_classes`, or ``module:Class``.
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
        if class_name.startswith("Humming") or "humming" in found.__module__:
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
