"""One MoE layer without an engine: what a worker of vLLM would have set up around it, for measuring.

A layer that serves is built by vLLM's own constructors, from a model. Here its description is made from a `Problem`, so
that a layer of any model, or of none, can be timed; what then runs it is the code that runs it when serving.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import DeviceConfig, KernelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

from ..errors import MeasurementError
from ..oracle.problem import Activation, Problem


@contextmanager
def worker(kind: str, most_tokens: int) -> Iterator[Any]:
    """What a worker has before it builds a model: process groups of its own, workspaces, and a config in force.

    Args:
        kind: ``cuda`` or ``cpu``.
        most_tokens: most tokens of a call.
    """
    config = vllm_config(kind, most_tokens)
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            # A file, not a port: several such processes may run on one machine.
            store = f"file://{tempfile.mkdtemp(prefix='moe-oracle-')}/store"
            parallel_state.init_distributed_environment(1, 0, store, 0, "nccl" if kind == "cuda" else "gloo")
            parallel_state.initialize_model_parallel(1, 1)
            from vllm.v1.worker.workspace import init_workspace_manager

            init_workspace_manager(torch.device("cuda:0" if kind == "cuda" else kind))
        yield config


def vllm_config(kind: str, most_tokens: int, moe_backend: str = "auto") -> Any:
    """vLLM's config of an engine without a model."""
    config = VllmConfig(device_config=DeviceConfig(device=kind), kernel_config=KernelConfig(moe_backend=moe_backend))
    config.scheduler_config.max_num_batched_tokens = most_tokens
    return config


def layer_config(problem: Problem, kind: str, most_tokens: int) -> Any:
    """vLLM's `FusedMoEConfig` of a layer on this rank alone; a rank of several holds what the problem says is local."""
    activation, routing = problem.activation, problem.routing
    methods = {method.name.lower(): method for method in RoutingMethodType}
    fields: dict[str, Any] = {
        "num_experts": problem.num_experts,
        "num_local_experts": problem.local_experts,
        "num_logical_experts": problem.num_experts,
        "experts_per_token": problem.top_k,
        "hidden_dim": problem.hidden_size,
        "intermediate_size": problem.intermediate_size,
        "intermediate_size_per_partition": problem.intermediate_size,
        "activation": MoEActivation.SILU,
        "device": "cuda:0" if kind == "cuda" else kind,
        "routing_method": methods.get(routing.method, RoutingMethodType.Renormalize),
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": getattr(torch, problem.dtype),
        "has_bias": problem.has_bias,
        "max_num_tokens": most_tokens,
        **_numbers_of(activation),
    }
    known = {field.name for field in dataclasses.fields(FusedMoEConfig)}
    derived = "intermediate_size_per_partition" if "intermediate_size" in known else ""
    config = FusedMoEConfig(**{name: value for name, value in fields.items() if name in known - {derived}})
    # Afterwards: on a CPU vLLM's constructor refuses experts without a gate, which only tests build.
    config.activation = MoEActivation(activation_name(problem))
    if "is_act_and_mul" in known:
        config.is_act_and_mul = activation.gated
    return config


def _numbers_of(activation: Activation) -> dict[str, float | None]:
    """Alpha, beta and limit as vLLM calls them; its ``swiglustep`` has its limit built in."""
    if activation.name == "situ":
        return {"activation_situ_beta": activation.alpha, "activation_situ_linear_beta": activation.beta}
    limit = None if activation.name == "swiglustep" else activation.limit
    return {"swiglu_limit": limit, "swiglu_alpha": activation.alpha, "swiglu_beta": activation.beta}


def activation_name(problem: Problem) -> str:
    """vLLM's name of the activation that a model with such a layer asks for."""
    activation = problem.activation
    if not activation.gated:
        return f"{activation.name}_no_mul"
    if activation.name == "swigluoai" and not activation.interleaved:
        return "swigluoai_uninterleave"
    return activation.name


def layer_of(problem: Problem, moe: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What stands for the layer's module where the kernel is called.

    Args:
        problem: the layer.
        moe: from `layer_config`.
        tensors: kernel tensors by canonical name.
    """
    expert_map = None
    if problem.local_experts != problem.num_experts:
        slots = torch.arange(problem.num_experts, dtype=torch.int32, device=tensors["w13"].device)
        expert_map = slots.masked_fill(slots >= problem.local_experts, -1)
    return SimpleNamespace(
        w13_weight=tensors["w13"],
        w2_weight=tensors["w2"],
        activation=moe.activation,
        global_num_experts=problem.num_experts,
        expert_map=expert_map,
        apply_router_weight_on_input=problem.routing.weight_on_input,
        num_expert_group=problem.routing.num_groups,
        topk_group=problem.routing.top_k_groups,
        e_score_correction_bias=None,
        routed_scaling_factor=1.0,
        _expert_routing_tables=lambda: None,
    )


@contextmanager
def forward(config: Any, tokens: int) -> Iterator[None]:
    """What vLLM's runner has around a step of so many tokens."""
    with set_forward_context(None, config, num_tokens=tokens):
        yield


def route(problem: Problem, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and ids `[M, top_k]` of the experts that tokens choose, by the kernel that vLLM runs before an expert
    kernel that does not route itself."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    weights, ids, _ = fused_topk(x, logits, problem.top_k, problem.routing.renormalize)
    return weights, ids


# --- Stock vLLM's own layers ------------------------------------------------------------------------------------------


class StockLayer:
    """A layer of stock vLLM for a problem, with random weights in the checkpoint's format, by vLLM's own constructors,
    method and conversion. The plugin must not be registered in this process.

    Attributes:
        name: vLLM's class that runs the experts.
        routes: it is given router logits.
    """

    def __init__(self, problem: Problem, moe_backend: str, kind: str, most_tokens: int) -> None:
        """
        Args:
            problem: the layer; its experts must all be on this rank.
            moe_backend: vLLM's ``--moe-backend``.
            kind: ``cuda`` or ``cpu``.
            most_tokens: most tokens of a call.

        Raises:
            MeasurementError: vLLM has no such layer, or would not build its own here.
        """
        if problem.local_experts != problem.num_experts:
            raise MeasurementError("stock vLLM's layer on one rank has all experts")
        _no_model_is_asked()
        self.config = vllm_config(kind, most_tokens, moe_backend)
        before = torch.get_default_dtype()
        with set_current_vllm_config(self.config):
            torch.set_default_dtype(getattr(torch, problem.dtype))
            try:
                self.layer = _stock_layer(problem, kind)
                _fill(self.layer)
                with torch.device(kind):
                    self.layer.quant_method.process_weights_after_loading(self.layer)
            finally:
                torch.set_default_dtype(before)
        self.method = self.layer.quant_method
        if hasattr(self.method, "decision"):
            raise MeasurementError("the plugin is registered in this process: the layer is not stock vLLM's")
        kernel = getattr(self.method, "moe_kernel", None)
        self.name = type(self.method if kernel is None else kernel.fused_experts).__name__
        self.routes = bool(self.method.is_monolithic)
        self.width = int(self.layer.moe_config.hidden_dim)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        """Runs the layer once; pads and crops as vLLM's runner does."""
        hidden = x.shape[1]
        if self.width > hidden:
            x = torch.nn.functional.pad(x, (0, self.width - hidden))
        with set_current_vllm_config(self.config), set_forward_context(None, self.config, num_tokens=x.shape[0]):
            if self.routes:
                result: Tensor = self.method.apply_monolithic(self.layer, x, logits)
            else:
                result = self.method.apply(self.layer, x, weights, ids, None, None)
        return result[..., :hidden]


def _no_model_is_asked() -> None:
    """Stock's choice for MXFP4 asks the model's config for a wish about activations; a layer by itself has no model."""
    try:
        from vllm.model_executor.layers.fused_moe.oracle import mxfp4
    except ImportError:
        return
    if hasattr(mxfp4, "_user_moe_activation_override"):
        mxfp4._user_moe_activation_override = lambda: None


def _stock_layer(problem: Problem, kind: str) -> Any:
    from vllm.model_executor.layers.fused_moe import layer as moe_layer

    factory = getattr(moe_layer, "FusedMoEFactory" if hasattr(moe_layer, "FusedMoEFactory") else "FusedMoE")
    activation = problem.activation
    optional = _numbers_of(activation)
    if activation.name == "swigluoai" and activation.interleaved:
        # gpt-oss: vLLM's kernels have alpha and beta built in, and its constructor is given the limit alone.
        optional = {"swiglu_limit": activation.limit}
    names = ("gate_proj", "down_proj", "up_proj") if activation.gated else ("up_proj", "down_proj", None)
    with torch.device(kind):
        made = factory(
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            renormalize=True,
            params_dtype=getattr(torch, problem.dtype),
            quant_config=_checkpoint_config(problem),
            has_bias=problem.has_bias,
            prefix=f"model.layers.{next(_numbers)}.mlp.experts",
            activation=activation_name(problem),
            ckpt_names=names,
            **{name: value for name, value in optional.items() if value is not None},
        )
    return getattr(made, "routed_experts", made)


_numbers = itertools.count()
"""vLLM keeps a table of layers by name, and refuses a name that it has."""


def _checkpoint_config(problem: Problem) -> Any:
    """vLLM's quantisation config of a checkpoint in the layer's scheme.

    Raises:
        MeasurementError: there is none for which random tensors are made here.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    scheme = problem.scheme
    if scheme.name == "mxfp8":
        algorithm: dict[str, Any] = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []}
        return get_quantization_config("modelopt_mxfp8").from_config({"quantization": algorithm})
    if scheme.name == "mxfp4":
        for name in ("gpt_oss_mxfp4", "mxfp4"):
            try:
                return get_quantization_config(name).from_config({"quant_method": "mxfp4"})
            except ValueError:  # older releases know only the second
                continue
    if scheme.name != "wna16" or scheme.zero_points or scheme.act_order != "none":
        raise MeasurementError(f"no stock layer is made for {scheme}")
    fields: dict[str, Any] = {"bits": scheme.bits, "group_size": scheme.group_size, "desc_act": False, "sym": True}
    fields |= {"lm_head": False, "quant_method": "gptq", "checkpoint_format": "gptq", "dynamic": {}}
    for name in ("auto_gptq", "gptq_marlin"):
        try:
            return get_quantization_config(name).from_config(fields)
        except ValueError:
            continue
    raise MeasurementError(f"vLLM has no config for {scheme}")


def _fill(layer: Any) -> None:
    """Random contents of the right size and range: meaningless in value, and no zeros, on which kernels run faster."""
    for name, parameter in layer.named_parameters():
        data = parameter.data
        if data.dtype == torch.uint8:
            data.random_(*((116, 121) if "scale" in name else (0, 256)))
        elif data.dtype == torch.int32:
            data.random_(-(2**31), 2**31 - 1)
        elif data.dtype == torch.float8_e4m3fn:
            data.view(torch.uint8).random_(0, 120)
        elif "scale" in name:
            data.uniform_(0.001, 0.01)
        else:
            data.normal_(0, 0.02)
