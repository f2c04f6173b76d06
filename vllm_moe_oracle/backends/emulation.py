"""Emulation: torch only, on any device; the ground truth for every other backend, and the last resort on a CPU.

Weights are dequantized one expert and one matrix at a time, exactly, to float32; all products, sums and activations are
in float32. What enters a product is rounded only where the layer says so: to the model's dtype, or to MXFP8 or MXFP4
when the checkpoint's activations are that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..core.activations import GATED, UNGATED, spec_of
from ..core.capabilities import Capabilities, Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Activation, ActivationPrecision, Device, Problem
from ..settings import env_var
from ._contract import Adapters, Backend, Builder, Tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ACTIVATION_PRECISIONS: dict[str, tuple[ActivationPrecision, ...]] = {
    "mxfp8": ("mxfp8", "fp8_token"),
    "mxfp4": ("mxfp8", "fp8", "fp8_token", "mxfp4"),
    "wna16": (),
}
"""Formats to which the inputs of a scheme's products may be quantized."""

_ACTIVATION_SCHEMES: dict[ActivationPrecision, Literal["mxfp8", "mxfp4", "fp8", "fp8_token", "wna16"]] = {
    "mxfp8": "mxfp8", "mxfp4": "mxfp4", "fp8": "fp8", "fp8_token": "fp8_token", "int8": "wna16"
}  # fmt: skip
"""The scheme whose module rounds activations of that precision."""


class Emulation(Backend):
    """Dequantize, multiply, add: slow and right."""

    name = "emulation"
    static_priority = 1000.0  # last: every other backend is faster; stock has its emulation last too
    schemes = ("mxfp8", "mxfp4", "wna16")
    vllm_names = ("emulation",)
    capabilities = Capabilities(
        devices=("cpu", "cuda", "rocm", "xpu"),
        dtypes=("bfloat16", "float16", "float32"),
        gated=GATED,
        ungated=UNGATED,
        activation_params=True,
        bias=True,
        bits=(4, 8),
        zero_points=True,
        act_orders=("none", "group", "static"),
        formats=("standard", "batched"),
        apply_router_weight_on_input=True,
        lora=True,
        eplb=True,
    )
    rules = (
        Rule(
            "activation.parameters.undefined",
            lambda problem, device: not _has_bounds(problem.activation),
            lambda problem, device: f"{problem.activation} needs its bounds, greater than zero",
        ),
        Rule(
            "vllm.ungated",
            lambda problem, device: device.kind == "cpu" and not problem.activation.gated,
            lambda problem, device: f"vLLM builds no layer of non-gated experts ({problem.activation.name}) on a CPU",
            "serve it on a GPU",
        ),
        Rule(
            "activations",
            lambda problem, device: (
                problem.scheme.activations not in ("16bit", *_ACTIVATION_PRECISIONS[problem.scheme.name])
            ),
            lambda problem, device: (
                f"{_describe_precisions(problem)}, the checkpoint declares {problem.scheme.activations}"
            ),
            f"set {env_var('activations')}=16bit to leave them as they are",
        ),
    )

    def only_by_name(self, problem: Problem, device: Device) -> str:
        """On a GPU, where stock vLLM may have a kernel and this project has none."""
        return "" if device.kind == "cpu" else "computes in float32, slowly on a GPU"

    def activations(self, problem: Problem) -> ActivationPrecision:
        """Exactly what the layer declares."""
        return problem.scheme.activations

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights, float32 everywhere else."""
        declared = problem.scheme.activations
        kind = "left in the model's dtype" if declared == "16bit" else f"quantized to {declared.upper()} per token"
        return Numerics("dequantized exactly to float32", kind)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Canonical tensors are what it computes with."""
        return dict(expert)

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """Experts over `forward`."""
        problem = problem.as_called()

        def run(
            out: Tensor,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            expert_map: Tensor | None,
            adapters: Adapters | None = None,
        ) -> None:
            forward(tensors, problem, out, x, topk_weights, topk_ids, expert_map, adapters)

        return builder.from_function(run)


def forward(
    tensors: Tensors,
    problem: Problem,
    out: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None = None,
    adapters: Adapters | None = None,
) -> None:
    """Runs the experts of a layer.

    Args:
        tensors: canonical tensors of the layer, `[local_experts, ...]` each.
        problem: the layer.
        out: `[M, hidden]`, overwritten, any floating dtype.
        x: `[M, hidden]` in the model's dtype; M may be 0.
        topk_weights: `[M, top_k]` float32.
        topk_ids: `[M, top_k]`, global expert ids; -1 for an empty slot.
        expert_map: `[num_experts]`, local index of each global expert or -1; None when all are here.
        adapters: LoRA adapters of the tokens.

    Raises:
        ValueError: an id is neither -1 nor below the number of experts.
    """

    import torch

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    addend = h = None
    if adapters is not None:
        addend, h = adapters.gate_up(), x.new_zeros(topk_ids.numel(), problem.intermediate_size)
    with ieee_fp32_matmul():
        for part in expert_outputs(tensors, problem, x, topk_weights, topk_ids, expert_map, addend):
            total.index_add_(0, part.token, part.output)
            if h is not None:
                rows = part.activated.to(h.dtype)
                # While a CUDA graph is captured, every expert has every token.
                h[part.slot] = rows if part.chosen is None else torch.where(part.chosen, rows, h[part.slot])
            del part  # before the next expert's matrix is made
    out.copy_(total)
    if adapters is not None and h is not None:
        adapters.add_down(out, h)


@dataclass(frozen=True, slots=True)
class ExpertOutput:
    """What one expert adds to the output.

    Attributes:
        token: rows of its tokens, `[m]`.
        slot: ``token * top_k + choice`` of each, `[m]`.
        chosen: which of them chose it, `[m, 1]`; None if all.
        weight: the routing weights, float32 `[m, 1]`.
        activated: the activation's result, float32 `[m, intermediate]`.
        hidden: what enters the second product, float32 `[m, intermediate]`.
        w2: dequantized, float32 `[hidden, intermediate]`.
        output: weighted, float32 `[m, hidden]`.
    """

    token: Tensor
    slot: Tensor
    chosen: Tensor | None
    weight: Tensor
    activated: Tensor
    hidden: Tensor
    w2: Tensor
    output: Tensor


@contextmanager
def ieee_fp32_matmul() -> Iterator[None]:
    """Float32 products in float32, whatever the process allows: TF32 keeps 10 of 23 bits, bfloat16 7.

    Sets torch's per-library `fp32_precision`: after it was used once, torch raises when the global setting is read.
    """
    before = fp32_precisions()
    try:
        set_fp32_precisions(["ieee"] * len(before))
        yield
    finally:
        set_fp32_precisions(before)


def _matmul_libraries() -> list[Any]:
    import torch

    return [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]  # stubs lack mkldnn


def fp32_precisions() -> list[str]:
    """The precision in which each of torch's libraries computes float32 products."""
    return [library.fp32_precision for library in _matmul_libraries()]


def set_fp32_precisions(precisions: list[str]) -> None:
    """Sets the precision of each library.

    Args:
        precisions: in the order of `fp32_precisions`.
    """
    for library, precision in zip(_matmul_libraries(), precisions, strict=True):
        library.fp32_precision = precision


def expert_outputs(
    tensors: Tensors,
    problem: Problem,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None = None,
    addend: Tensor | None = None,
) -> Iterator[ExpertOutput]:
    """What each expert that has tokens adds to their outputs; arguments as for `forward`, inside `ieee_fp32_matmul`.

    addend: what `Adapters.gate_up` returns.
    """
    import torch

    from .. import schemes
    from ..kernels.activations import activate

    scheme = schemes.module(problem.scheme.name)
    ids = _local_expert_ids(topk_ids, expert_map, problem)
    for index, token, slot, weight, chosen in _tokens_by_expert(ids, topk_weights, tensors["w13"].shape[0]):
        expert = {name: tensor[index] for name, tensor in tensors.items()}
        inputs = x[token]
        if problem.routing.apply_router_weight_on_input:
            # As vLLM's prepare step does it: both factors and the product in the model's dtype.
            inputs = inputs * weight.to(x.dtype)
        inputs = round_inputs(inputs.to(torch.float32), x.dtype, problem)
        hidden = inputs @ scheme.dequantize_expert(expert, "w13").T
        if "w13_bias" in expert:
            hidden += expert["w13_bias"].to(torch.float32)
        if addend is not None:
            hidden += addend[slot].to(torch.float32)
        activated = activate(hidden, problem.activation)
        hidden = round_inputs(activated, x.dtype, problem)
        w2 = scheme.dequantize_expert(expert, "w2")
        result = hidden @ w2.T
        if "w2_bias" in expert:
            result += expert["w2_bias"].to(torch.float32)
        if not problem.routing.apply_router_weight_on_input:
            result *= weight
        if chosen is not None:
            result.masked_fill_(~chosen, 0.0)
        yield ExpertOutput(token, slot, chosen, weight, activated, hidden, w2, result)
        del w2, result  # before the next expert's are made


def round_inputs(values: Tensor, dtype: torch.dtype, problem: Problem) -> Tensor:
    """What enters a product: float32 `[..., K]`, rounded to the layer's format of activations or the model's dtype."""
    import torch

    from .. import schemes

    declared = problem.scheme.activations
    if declared == "16bit":
        return values.to(dtype).to(torch.float32)
    rounded: Tensor = schemes.module(_ACTIVATION_SCHEMES[declared]).fake_quantize(values)
    return rounded


def _tokens_by_expert(
    ids: Tensor, topk_weights: Tensor, experts: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor | None]]:
    """For each expert: local index, token rows `[m]`, their slots `[m]`, weights `[m, 1]`, and a mask `[m, 1]` of rows
    that count.

    While a CUDA graph is captured no size may depend on data: every expert then gets every token and a mask. Otherwise
    an expert gets its own tokens, and the mask is None.

    Raises:
        ValueError: an id is beyond the local experts. It cannot be said while a graph is captured.
    """
    import torch

    top_k = ids.shape[1]

    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        token = torch.arange(ids.shape[0], device=ids.device)
        for index in range(experts):
            mine = ids == index
            weight = topk_weights.masked_fill(~mine, 0.0).sum(-1, keepdim=True, dtype=torch.float32)
            slot = token * top_k + mine.to(torch.int8).argmax(-1)
            yield index, token, slot, weight, mine.any(-1, keepdim=True)
        return
    slots = ids.flatten()
    # One sort, and one wait for the device: looking for each expert's slots waits once for each.
    order = slots.argsort(stable=True)
    tokens, weights = order // top_k, topk_weights.flatten()[order].to(torch.float32).unsqueeze(-1)
    ends = torch.searchsorted(slots[order], torch.arange(experts + 1, device=ids.device)).tolist()
    if ends[-1] < len(slots):
        rule = f"{len(slots) - ends[-1]} of {len(slots)} expert ids are beyond the {experts} local experts"
        raise ValueError(f"{rule}: the layer's expert map is missing, or is another rank's")
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            yield index, tokens[start:end], order[start:end], weights[start:end], None


def _local_expert_ids(topk_ids: Tensor, expert_map: Tensor | None, problem: Problem) -> Tensor:
    """Local index of each slot's expert, -1 for an expert of another rank; `[M, top_k]` int64."""
    import torch

    ids = topk_ids.long()
    capturing = ids.is_cuda and torch.cuda.is_current_stream_capturing()  # reading an id back would break the capture
    if not capturing and ids.numel():
        low, high = torch.stack(ids.aminmax()).tolist()
        if high >= problem.num_experts or low < -1:
            rule = f"expert ids span {low} to {high}; valid are -1 to {problem.num_experts - 1}"
            raise ValueError(f"{problem.layer}: {rule}")
    if expert_map is None:
        return ids
    return expert_map.long()[ids.clamp(min=0)].masked_fill(ids < 0, -1)


def _describe_precisions(problem: Problem) -> str:
    name = problem.scheme.name
    if not _ACTIVATION_PRECISIONS[name]:
        return f"leaves activations of {name} experts in the model's dtype"
    return f"quantizes activations of {name} experts to {' or '.join(_ACTIVATION_PRECISIONS[name])} only"


def _has_bounds(activation: Activation) -> bool:
    """Whether a function that is bounded by its parameters has them."""
    spec = spec_of(activation)
    stated = {name: value for name in spec.parameters if (value := getattr(activation, name)) is not None}
    positive = not spec.bounds_outputs or all(value > 0 for value in stated.values())
    return positive and set(spec.required) <= set(stated)


BACKEND = Emulation()
