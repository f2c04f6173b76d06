"""vLLM's own expert classes: what they support, and how they are built."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat, FusedMoEExperts

from ..backends import Backend
from ..core.decision import ShardPlan
from ..core.problem import Problem
from ..errors import BackendDefect, OracleError
from ..oracle.checked_backend import watched_calls
from . import humming
from .engine_adapter import EngineAdapter
from .function_experts import FunctionExperts
from .quant_config_overrides import override_quant_config

_WEIGHT_QUANT_KEYS = {"mxfp8": "kMxfp8Static", "mxfp4": "kMxfp4Static", "int4": "kInt4Static", "int8": "kInt8Static"}
"""Names by which vLLM's oracles ask their expert classes about a scheme's weights."""

_ACTIVATION_QUANT_KEYS = {"mxfp8": "kMxfp8Dynamic", "fp8": "kFp8Dynamic128Sym", "mxfp4": "kMxfp4Dynamic"}
"""Names by which they ask about the precision of activations; the model's own dtype has none."""


class ExpertsAdapter(EngineAdapter):
    """Queries and builds vLLM's own expert classes."""

    def stock_class_rejection(self, backend: Backend, moe: Any, problem: Problem) -> str:
        """Why the stock class that a backend wraps rejects the layer; "" when it accepts it, or gives no answer.

        A third party's class that raises rejects it."""
        scheme = problem.scheme.name
        if not (backend.stock_class and backend.check_stock_class):
            return ""
        from vllm.model_executor.layers.quantization.utils import quant_utils

        # vLLM's MXFP8 oracle asks every class about W8A8, even those that do not quantize activations.
        name = _ACTIVATION_QUANT_KEYS.get("mxfp8" if scheme == "mxfp8" else backend.activations(problem))
        weights = getattr(quant_utils, _weight_quant_key(backend, problem))
        inputs = None if name is None else getattr(quant_utils, name)
        batched = moe.moe_parallel_config.use_batched_activation_format
        activation_format = FusedMoEActivationFormat.BatchedExperts if batched else FusedMoEActivationFormat.Standard
        try:
            found = self.experts_class(backend)
            with watched_calls(backend, "stock class", (NotImplementedError,)):
                supported, reason = found.is_supported_config(found, moe, weights, inputs, activation_format)
        except NotImplementedError:  # some classes of older releases leave the question open
            return ""
        except BackendDefect as error:
            return str(error)
        return "" if supported else str(reason)

    def is_emulated_by_stock(self, method: Any) -> bool:
        """Whether a method of stock vLLM's, as its constructor leaves it, has chosen vLLM's own emulation.

        Args:
            method: it keeps its choice as a member of an enumeration, as a class of experts, or, Quark's in older
                releases, as a flag.
        """
        chosen = [str(each.name) for each in getattr(method, "__dict__", {}).values() if isinstance(each, Enum)]
        chosen.append(getattr(getattr(method, "experts_cls", None), "__name__", ""))
        return getattr(method, "emulate", False) is True or any("emulation" in each.lower() for each in chosen)

    def experts_class(self, backend: Backend) -> Any:
        """The class of the experts that a backend builds; stock code queries it before weights are loaded.

        Raises:
            BackendDefect: the import of a third party's class fails.
            OracleError: this release does not have it.
        """
        if not backend.stock_class:
            return FunctionExperts
        with watched_calls(backend, "stock class", (OracleError,)):
            return self.stock_class(backend.stock_class)

    def stock_class(self, name: str) -> Any:
        """vLLM's expert class of a name, ``module:Class``.

        Raises:
            OracleError: this release does not have it.
        """
        none = f"vLLM {self.version()} has no expert class {name} that could be used here"
        if ":" not in name:
            raise OracleError(none, "Write it as module:Class")
        try:
            return resolve_name(name)
        except (ModuleNotFoundError, AttributeError, ValueError) as error:  # the last of a path that cannot be one
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
        plan: ShardPlan | None = None,
        scales: tuple[Tensor, ...] = (),
        problem: Problem | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        group: int = 0,
        apply_router_weight_on_input: bool = False,
    ) -> Any:
        """An instance of one of vLLM's expert classes; see `vllm_moe_oracle.backends.Builder.stock`.

        With a plan the sizes in `moe` become the plan's, as in stock code: vLLM's runner then pads the input and crops
        the output.
        """
        if plan is not None:
            moe.hidden_dim = plan.hidden_size
            moe.intermediate_size_per_partition = plan.intermediate_size
        found = self.stock_class(class_name)
        described = override_quant_config(quant_config, weights, inputs, scales, swizzled, group)
        if "humming" in found.__module__:
            assert problem is not None and tensors is not None
            experts = self.humming_experts(found, moe, described, problem, tensors)
            return _weighted_by_prepare(experts) if apply_router_weight_on_input else experts
        experts = found.__new__(found)
        # Some classes with two bases do not call `FusedMoEExperts.__init__`, whose attributes other code reads.
        sizes = self.batched_kwargs(found, moe)
        FusedMoEExperts.__init__(experts, moe, described, **sizes)
        found.__init__(experts, moe, described, **sizes, **self.act_order_kwargs(class_name, problem, tensors))
        if plan is not None:
            self.keep_padded_output(experts, moe, plan)
        return _weighted_by_prepare(experts) if apply_router_weight_on_input else experts

    def batched_kwargs(self, stock_class: Any, moe: Any) -> dict[str, int]:
        """Constructor arguments of classes that take batched activations `[experts, max_num_tokens, hidden]`; empty for
        others.

        Args:
            stock_class: one of vLLM's own.
            moe: vLLM's `FusedMoEConfig`.
        """
        if stock_class.activation_format() != FusedMoEActivationFormat.BatchedExperts:
            return {}
        return {"max_num_tokens": moe.max_num_tokens, "num_dispatchers": moe.moe_parallel_config.ep_size}

    def act_order_kwargs(
        self, class_name: str, problem: Problem | None, tensors: Mapping[str, Tensor] | None
    ) -> dict[str, Any]:
        """Constructor arguments for act order; empty from vLLM 0.30 on, where no class takes them.

        Args:
            class_name: of one of vLLM's own.
            problem: the layer.
            tensors: kernel tensors of the layer by canonical name.
        """
        return {}

    def keep_padded_output(self, experts: Any, moe: Any, plan: ShardPlan) -> None:
        """Makes an expert class return its padded output.

        vLLM's runner crops it. An all-to-all in between needs input and output of one width.

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
        """Humming's experts. Their quant config holds humming-kernels' layer config of both matrices.

        Args:
            stock_class: one of vLLM's classes over Humming.
            moe: vLLM's `FusedMoEConfig`.
            quant_config: from `quant_config`.
            problem: the layer.
            tensors: kernel tensors of the layer by canonical name.
        """
        return stock_class(moe, humming.quant_config(quant_config, problem), **self.batched_kwargs(stock_class, moe))


def _weight_quant_key(backend: Backend, problem: Problem) -> str:
    """The name by which vLLM's oracle would ask about a layer's weights."""
    scheme = problem.scheme
    return (
        backend.stock_weight_key or _WEIGHT_QUANT_KEYS[scheme.name if scheme.name != "wna16" else f"int{scheme.bits}"]
    )


def _weighted_by_prepare(experts: Any) -> Any:
    """The experts, which get router weights of one where vLLM's prepare step has multiplied the input.

    Some classes leave the weight out then, others multiply by it once more or refuse the call.

    Args:
        experts: modular experts.
    """
    run = experts.apply

    def apply(**arguments: Any) -> Any:
        if arguments["apply_router_weight_on_input"]:
            weights = torch.ones_like(arguments["topk_weights"])
            arguments |= {"topk_weights": weights, "apply_router_weight_on_input": False}
        return run(**arguments)

    experts.apply = apply
    return experts
