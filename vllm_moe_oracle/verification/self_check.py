"""The self-check: a few tokens through a backend's kernel and through the float32 reference, on a layer's own weights.

Some of the loaded experts are converted into a small layer of their own. The check needs no second copy of the weights
and leaves the loaded ones as they are, so that another backend can still take the layer.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..backends import Backend, Tensors
from ..backends.emulation import forward
from ..compat import weight_storage
from ..compat.experts_builder import VllmBuilder
from ..core.decision import ShardPlan
from ..core.problem import Parallel, Problem, Routing
from ..errors import CheckpointError
from . import inputs, routing
from .tolerances import error_tolerance, token_error

if TYPE_CHECKING:
    from ..compat.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Comparison:
    """A kernel compared with the reference on this rank.

    Attributes:
        error: largest relative L2 error over the tokens.
        tolerance: largest error that the formats explain.
        seconds: duration, compilation included.
        skip_reason: why nothing was compared; "" when something was.
    """

    error: float
    tolerance: float
    seconds: float
    skip_reason: str = ""

    @property
    def passed(self) -> bool:
        """Whether the kernel agrees with the reference, or nothing was compared. NaN does not agree."""
        return bool(self.skip_reason) or self.error <= self.tolerance

    def __str__(self) -> str:
        if self.skip_reason:
            return f"not checked: {self.skip_reason}"
        return f"relative error {self.error:.2e}, allowed {self.tolerance:.2e}; took {self.seconds:.2f} s"


def compare_with_reference(
    backend: Backend, problem: Problem, plan: ShardPlan, raw: Tensors, moe: Any, adapter: Adapter
) -> Comparison:
    """Compares a backend's kernel with the reference on some experts of a layer.

    Args:
        backend: the backend whose conversion and kernel are checked.
        problem: the layer.
        plan: the backend's plan for it.
        raw: the loaded weights as the scheme's `read` returns them, `[local_experts, ...]` each; not modified.
        moe: vLLM's `FusedMoEConfig` of the layer.
        adapter: vLLM's side.

    Raises:
        CheckpointError: the reference itself is NaN or infinite on these weights.
    """
    start = time.perf_counter()
    tolerance = error_tolerance(backend, problem)
    if backend.monolithic and routing.routing_reference(problem.routing) is None:
        return Comparison(0.0, tolerance, 0.0, skip_reason=f"no reference for routing by {problem.routing.method}")
    count = routing.min_experts(problem, backend.capabilities.experts_multiple) if backend.monolithic else 0
    sampled = inputs.sample_experts(problem, count)
    experts = inputs.canonical_experts(problem, raw, sampled)
    inputs.make_discriminating(experts, problem)
    small = _small_problem(problem, len(sampled), backend.monolithic)
    # The reference rounds activations to the precision in which this backend consumes them.
    reference = dataclasses.replace(
        small, scheme=dataclasses.replace(small.scheme, activations=backend.activations(problem))
    )
    x, weights, ids = inputs.make_inputs(reference, experts)
    router_inputs: routing.RouterInputs | None = None
    if backend.monolithic:
        router_inputs = routing.discriminating_logits(
            small.routing, small.top_k, inputs.NUM_TOKENS, len(sampled), adapter.logits_dtype(moe)
        )
        weights, ids = (each.to(x.device) for each in routing.route(small.routing, small.top_k, *router_inputs))
    expected = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    forward(experts, reference, expected, x, weights, ids)
    _require_finite_reference(expected, sampled, problem)
    built, layer, tensors = _build_small_layer(backend, small, plan, experts, moe, adapter)
    if router_inputs is None:
        actual = adapter.run_single_rank(built, layer, tensors, x, weights, ids)
    else:
        actual = adapter.run_single_rank_monolithic(built, tensors, x, small, *router_inputs)
    return Comparison(token_error(actual, expected), tolerance, time.perf_counter() - start)


def _small_problem(problem: Problem, num_experts: int, monolithic: bool) -> Problem:
    """The layer on one rank with some of its experts; only a monolithic kernel sees the routing."""
    return dataclasses.replace(
        problem,
        num_experts=num_experts,
        local_experts=num_experts,
        top_k=min(problem.top_k, num_experts),
        parallel=Parallel(tp=problem.parallel.tp),
        routing=problem.routing if monolithic else Routing(),
        lora=False,
        eplb=False,
    )


def _require_finite_reference(expected: Tensor, experts: list[int], problem: Problem) -> None:
    """Raises where the reference output is NaN or infinite: every kernel would fail there, none by its own fault."""
    bad = int((~torch.isfinite(expected)).any(-1).sum())
    if bad:
        rule = (
            f"the float32 reference is NaN or infinite for {bad} of {len(expected)} tokens on the weights of local "
            f"experts {', '.join(map(str, dict.fromkeys(experts)))}: no backend can be checked against it"
        )
        # The inputs are scaled by the size of the weights; for tiny weights float16 cannot hold them.
        cause = f"some weights are NaN or infinite, or too small or too large for {problem.dtype}"
        raise CheckpointError(rule, f"The checkpoint is damaged: {cause}", problem.layer)


def _build_small_layer(
    backend: Backend, problem: Problem, plan: ShardPlan, experts: Tensors, moe: Any, adapter: Adapter
) -> tuple[Any, nn.Module, Tensors]:
    """A layer that holds only these experts: the built experts, the module, and the kernel tensors by name."""
    layer = nn.Module()
    for name, tensor in experts.items():
        weight_storage.replace_parameter(layer, name, tensor.clone())
    names = weight_storage.convert_in_place(
        layer,
        {name: name for name in experts},
        lambda expert: backend.convert(expert, problem, plan),
        backend.contiguous,
    )
    tensors = {name: getattr(layer, parameter).data for name, parameter in names.items()}
    config = adapter.single_rank_config(moe, problem)
    builder = VllmBuilder(adapter, config, adapter.quant_config(problem, tensors), for_serving=False)
    return backend.build_experts(tensors, problem, plan, builder), layer, tensors
