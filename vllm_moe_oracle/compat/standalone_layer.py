"""One MoE layer without an engine, for measuring: what vLLM's worker sets up around it, made from a `Problem`.

When serving, vLLM's own constructors build a layer from a model. Here any layer can be timed, also one of no model. The
code that runs it is the code that serves.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import DeviceConfig, KernelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

from ..core.activations import spec_of, vllm_name
from ..core.problem import Activation, Problem
from ..errors import MeasurementError
from .patches import Patch, PatchManager


@contextmanager
def single_rank_worker(device_type: str, max_num_tokens: int) -> Iterator[Any]:
    """What a worker has before it builds a model: process groups of this process alone, workspaces, a current config.

    Args:
        device_type: ``cuda`` or ``cpu``.
        max_num_tokens: most tokens of a call.
    """
    config = vllm_config(device_type, max_num_tokens)
    with set_current_vllm_config(config):
        join_alone(device_type)
        yield config


def join_alone(device_type: str) -> None:
    """Makes vLLM's process groups of this process alone, and its workspaces; the config must be current.

    They last as long as the process. A process that is in groups already keeps them.
    """
    if parallel_state.model_parallel_is_initialized():
        return
    atexit.register(_leave)
    backend = "nccl" if device_type == "cuda" else "gloo"
    # vLLM takes a process group that exists. In memory: several such processes can run on one machine, and one that is
    # killed leaves neither a port nor a file.
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # documented, but not in `__all__`
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.init_distributed_environment(1, 0, local_rank=0, backend=backend)
    parallel_state.initialize_model_parallel(1, 1)
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cuda:0" if device_type == "cuda" else device_type))


def _leave() -> None:
    """Ends the groups. Without it NCCL ends after Python, and can wait for minutes (torch 2.11)."""
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def vllm_config(device_type: str, max_num_tokens: int, moe_backend: str = "auto") -> Any:
    """vLLM's config of an engine without a model."""
    config = VllmConfig(
        device_config=DeviceConfig(device=device_type), kernel_config=KernelConfig(moe_backend=moe_backend)
    )
    config.scheduler_config.max_num_batched_tokens = max_num_tokens
    return config


def fused_moe_config(problem: Problem, device_type: str, max_num_tokens: int) -> Any:
    """vLLM's `FusedMoEConfig` of a layer without parallelism. It holds the problem's local experts."""
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
        "device": "cuda:0" if device_type == "cuda" else device_type,
        "routing_method": methods.get(routing.method, RoutingMethodType.Renormalize),
        "moe_parallel_config": FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": getattr(torch, problem.dtype),
        "has_bias": problem.has_bias,
        "max_num_tokens": max_num_tokens,
        **_activation_kwargs(activation),
    }
    known = {field.name for field in dataclasses.fields(FusedMoEConfig)}
    derived = "intermediate_size_per_partition" if "intermediate_size" in known else ""
    config = FusedMoEConfig(**{name: value for name, value in fields.items() if name in known - {derived}})
    # After construction: on a CPU vLLM's constructor rejects non-gated experts, which only tests build.
    config.activation = MoEActivation(vllm_name(problem.activation))
    if "is_act_and_mul" in known:
        config.is_act_and_mul = activation.gated
    return config


def _activation_kwargs(activation: Activation) -> dict[str, float | None]:
    """The activation's parameters by the names of vLLM's config fields. Its kernels have the limit of
    ``swiglustep`` built in."""
    values = dataclasses.asdict(activation)
    if activation.name == "swiglustep":
        values["limit"] = None
    return {field: values[name] for name, field in spec_of(activation).config_fields.items()}


def layer_namespace(problem: Problem, moe: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The attributes of vLLM's layer that `Adapter.apply` and `Adapter.apply_monolithic` read.

    Args:
        problem: the layer.
        moe: from `fused_moe_config`.
        tensors: kernel tensors by canonical name.
    """
    expert_map = None
    if problem.local_experts != problem.num_experts:
        indices = torch.arange(problem.num_experts, dtype=torch.int32, device=tensors["w13"].device)
        expert_map = indices.masked_fill(indices >= problem.local_experts, -1)
    return SimpleNamespace(
        w13_weight=tensors["w13"],
        w2_weight=tensors["w2"],
        activation=moe.activation,
        global_num_experts=problem.num_experts,
        expert_map=expert_map,
        apply_router_weight_on_input=problem.routing.apply_router_weight_on_input,
        num_expert_group=problem.routing.num_groups,
        topk_group=problem.routing.top_k_groups,
        e_score_correction_bias=None,
        routed_scaling_factor=1.0,
        _expert_routing_tables=lambda: None,
    )


@contextmanager
def forward_step(config: Any, tokens: int) -> Iterator[None]:
    """The forward context that vLLM's runner sets around a step.

    Args:
        config: vLLM's config.
        tokens: number of tokens in the step.
    """
    with set_forward_context(None, config, num_tokens=tokens):
        yield


def route_tokens(problem: Problem, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Routing weights and expert ids, `[M, top_k]` each, by the kernel that vLLM runs before modular experts.

    Args:
        problem: the layer.
        x: `[M, hidden]`.
        logits: `[M, experts]`.
    """
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    weights, ids, _ = fused_topk(x, logits, problem.top_k, problem.routing.renormalize)
    return weights, ids


# --- Stock vLLM's own layers ------------------------------------------------------------------------------------------


class StockLayer:
    """A layer of stock vLLM with random weights in the checkpoint's format. vLLM's own constructors, method and weight
    conversion make it. The plugin must not be registered in this process.

    Attributes:
        name: vLLM's class that runs the experts.
        is_monolithic: it takes router logits, not routed tokens.
    """

    def __init__(self, problem: Problem, moe_backend: str, device_type: str, max_num_tokens: int) -> None:
        """
        Args:
            problem: the layer; its experts must all be on this rank.
            moe_backend: vLLM's ``--moe-backend``.
            device_type: ``cuda`` or ``cpu``.
            max_num_tokens: most tokens of a call.

        Raises:
            MeasurementError: vLLM has no such layer, or the plugin is registered.
        """
        if problem.local_experts != problem.num_experts:
            raise MeasurementError("stock vLLM's layer on one rank has all experts")
        self.config = vllm_config(device_type, max_num_tokens, moe_backend)
        before = torch.get_default_dtype()
        with set_current_vllm_config(self.config), _without_model_config():
            torch.set_default_dtype(getattr(torch, problem.dtype))
            try:
                self.layer = _build_stock_layer(problem, device_type)
                _randomize_parameters(self.layer)
                with torch.device(device_type):
                    self.layer.quant_method.process_weights_after_loading(self.layer)
            finally:
                torch.set_default_dtype(before)
        self.method = self.layer.quant_method
        if hasattr(self.method, "decision"):
            raise MeasurementError("the plugin is registered in this process: the layer is not stock vLLM's")
        kernel = getattr(self.method, "moe_kernel", None)
        self.name = type(self.method if kernel is None else kernel.fused_experts).__name__
        self.is_monolithic = bool(self.method.is_monolithic)
        self.hidden_size = int(self.layer.moe_config.hidden_dim)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, logits: Tensor) -> Tensor:
        """Runs the layer once; pads and crops as vLLM's runner does."""
        hidden = x.shape[1]
        if self.hidden_size > hidden:
            x = torch.nn.functional.pad(x, (0, self.hidden_size - hidden))
        with set_current_vllm_config(self.config), set_forward_context(None, self.config, num_tokens=x.shape[0]):
            if self.is_monolithic:
                result: Tensor = self.method.apply_monolithic(self.layer, x, logits)
            else:
                result = self.method.apply(self.layer, x, weights, ids, None, None)
        return result[..., :hidden]


@contextmanager
def _without_model_config() -> Iterator[None]:
    """Stock's choice of an MXFP4 kernel reads the requested activations from the model's config. This layer has no
    model: nothing is requested."""
    patches = PatchManager()
    with suppress(ImportError):
        from vllm.model_executor.layers.fused_moe.oracle import mxfp4

        if hasattr(mxfp4, "_user_moe_activation_override"):
            name = "_user_moe_activation_override"
            patches.apply(Patch("requested activations without a model", mxfp4, name, lambda: None))
    try:
        yield
    finally:
        patches.undo()


def _build_stock_layer(problem: Problem, device_type: str) -> Any:
    from vllm.model_executor.layers.fused_moe import layer as moe_layer

    factory = getattr(moe_layer, "FusedMoEFactory" if hasattr(moe_layer, "FusedMoEFactory") else "FusedMoE")
    activation = problem.activation
    optional = _activation_kwargs(activation)
    if activation.name == "swigluoai" and activation.interleaved:
        # gpt-oss: vLLM's kernels have alpha and beta built in; its model passes only the limit.
        optional = {"swiglu_limit": activation.limit}
    names = ("gate_proj", "down_proj", "up_proj") if activation.gated else ("up_proj", "down_proj", None)
    with torch.device(device_type):
        made = factory(
            num_experts=problem.num_experts,
            top_k=problem.top_k,
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            renormalize=True,
            params_dtype=getattr(torch, problem.dtype),
            quant_config=_quantization_config(problem),
            has_bias=problem.has_bias,
            prefix=f"model.layers.{next(_layer_ids)}.mlp.experts",
            activation=vllm_name(problem.activation),
            ckpt_names=names,
            **{name: value for name, value in optional.items() if value is not None},
        )
    return getattr(made, "routed_experts", made)


_layer_ids = itertools.count()
"""vLLM registers layers by name and rejects a name that is taken."""


def _quantization_config(problem: Problem) -> Any:
    """vLLM's quantization config of a checkpoint in the layer's scheme.

    Raises:
        MeasurementError: no stock layer can be made for the scheme.
    """
    from vllm.model_executor.layers.quantization import get_quantization_config

    scheme = problem.scheme
    if scheme.name == "mxfp8":
        algorithm: dict[str, Any] = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []}
        return get_quantization_config("modelopt_mxfp8").from_config({"quantization": algorithm})
    if scheme.zero_points or scheme.act_order != "none":
        raise MeasurementError(f"no stock layer is made for {scheme}")
    fields: dict[str, Any] = {"quant_method": "mxfp4"}
    names = "gpt_oss_mxfp4", "mxfp4"  # older releases have only the second
    if scheme.name == "wna16":
        fields = {"bits": scheme.bits, "group_size": scheme.group_size, "desc_act": False, "sym": True}
        fields |= {"lm_head": False, "quant_method": "gptq", "checkpoint_format": "gptq", "dynamic": {}}
        names = "auto_gptq", "gptq_marlin"
    for name in names:
        try:
            return get_quantization_config(name).from_config(fields)
        except ValueError:
            continue
    raise MeasurementError(f"vLLM has no config for {scheme}")


def _randomize_parameters(layer: Any) -> None:
    """Fills parameters with random values in a plausible range. Kernels run faster on zeros."""
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
