"""vLLM's modular expert class over a plain function of this project.

The function runs inside an operator of our own namespace: it branches on data and must stay opaque to the compiler,
which on a CPU traces through the MoE layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from ..backends import Forward, ScratchForward

NAMESPACE = "vllm_moe_oracle"


class _Runner:
    """Holds a function so that the operator can find it by number, for as long as its layer lives."""

    def __init__(self, forward: Forward | ScratchForward, scratch: bool) -> None:
        self.forward: Any = forward
        self.scratch = scratch
        self.handle = next(_handles)
        _runners[self.handle] = self


_handles = itertools.count()
_runners: WeakValueDictionary[int, _Runner] = WeakValueDictionary()


@torch.library.custom_op(f"{NAMESPACE}::run_experts", mutates_args=("out", "workspace"))
def run_experts(
    out: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    workspace: Tensor,
    handle: int,
) -> None:
    """Calls the function behind `handle`; arguments as for `ScratchForward`."""
    runner = _runners[handle]
    scratch = (workspace.view(torch.uint8),) if runner.scratch else ()
    runner.forward(out, x, topk_weights, topk_ids, expert_map, *scratch)


@run_experts.register_fake
def _(
    out: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    workspace: Tensor,
    handle: int,
) -> None:
    return None


class FunctionExperts(mk.FusedMoEExpertsModular):
    """Experts that call a function on routed tokens.

    The capability questions of vLLM's own oracle are answered yes: this class is only ever built after our oracle has
    checked the layer.
    """

    def __init__(
        self,
        moe_config: Any,
        quant_config: Any,
        forward: Forward | ScratchForward,
        nbytes: Callable[[int, int], int] | None = None,
    ) -> None:
        super().__init__(moe_config, quant_config)
        self.runner: _Runner = _Runner(forward, nbytes is not None)
        self.nbytes: Callable[[int, int], int] | None = nbytes

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The function quantises activations itself, where the layer wants it."""
        return True

    @staticmethod
    def activation_format() -> Any:
        """Tokens in rows, routed ids beside them."""
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    def supports_expert_map(self) -> bool:
        """-1 in the expert map is understood."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Nothing is left to do: the function applies the router's weights and sums over experts."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Scratch memory in the second workspace (vLLM lays the output into the first); the output is `[M, K]`."""
        # vLLM's workspaces are of the model's dtype, 2 bytes and more.
        scratch = 0 if self.nbytes is None else -(-self.nbytes(M, topk) // 2)
        return (0,), (scratch,), (M, K)

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Experts, tokens, rows of the first product, hidden size, experts per token."""
        return w1.shape[0], a1.shape[0], w1.shape[1], a1.shape[-1], topk_ids.shape[1]

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor | None,
        workspace2: Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
        **kwargs: Any,
    ) -> None:
        """Runs the function. `w1` and `w2` are not looked at: it holds the layer's tensors."""
        if apply_router_weight_on_input:
            # vLLM's prepare step has multiplied the input already.
            topk_weights = torch.ones_like(topk_weights)
        torch.ops.vllm_moe_oracle.run_experts(
            output,
            hidden_states,
            topk_weights,
            topk_ids,
            expert_map,
            output.new_empty(0) if workspace2 is None else workspace2,
            self.runner.handle,
        )
