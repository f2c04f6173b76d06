"""Modular expert classes of vLLM's that call a Python function.

The function runs inside a custom operator, opaque to torch.compile: it branches on data, and on a CPU the compiler
traces through the MoE layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)

from ..backends import Forward, WorkspaceForward

NAMESPACE = "vllm_moe_oracle"


class _RegisteredForward:
    """A function that the operator finds by its handle. It lives as long as its layer."""

    def __init__(self, forward: Forward | WorkspaceForward, scratch: bool) -> None:
        self.forward: Any = forward
        self.scratch = scratch
        self.handle = next(_handles)
        _registered[self.handle] = self

    def __call__(self, *arguments: Any, **more: Any) -> None:
        """Calls the function, with arguments as for `WorkspaceForward`, the workspace as bytes if it takes one."""
        *given, workspace = arguments
        scratch = (workspace.view(torch.uint8),) if self.scratch else ()
        self.forward(*given, *scratch, **more)


_handles = itertools.count()
_registered: WeakValueDictionary[int, _RegisteredForward] = WeakValueDictionary()


def run_experts(
    out: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    workspace: Tensor,
    handle: int,
) -> None:
    """Calls the function behind `handle`; arguments as for `WorkspaceForward`."""
    _registered[handle](out, x, topk_weights, topk_ids, expert_map, workspace)


def _do_nothing(*arguments: Any) -> None:
    """What the operator does with tensors that hold no data."""


# Not `torch.library.custom_op`, which wraps a function in Python for gradients: 25 to 90 us a call, where this takes 3.
_OPERATOR = f"{NAMESPACE}::run_experts"
torch.library.define(_OPERATOR, torch.library.infer_schema(run_experts, mutates_args=("out", "workspace")))
torch.library.impl(_OPERATOR, "default", run_experts)
torch.library.register_fake(_OPERATOR, _do_nothing)


def _as_rows(tensor: Tensor) -> Tensor:
    """`[rows, hidden]`, over the same memory; raises RuntimeError where that cannot be."""
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


def _always(*arguments: Any) -> bool:
    return True


class FunctionExperts(mk.FusedMoEExpertsModular):
    """Experts that call a function on routed tokens.

    All capability methods return True: our oracle checks the layer before it builds this class.
    """

    def __init__(
        self,
        moe_config: Any,
        quant_config: Any,
        forward: Forward | WorkspaceForward,
        nbytes: Callable[[int, int], int] | None = None,
        **sizes: int,
    ) -> None:
        super().__init__(moe_config, quant_config, **sizes)
        self.runner: _RegisteredForward = _RegisteredForward(forward, nbytes is not None)
        self.nbytes: Callable[[int, int], int] | None = nbytes

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The function quantizes activations itself where the layer requires it."""
        return True

    @staticmethod
    def activation_format() -> Any:
        """The standard format: tokens in rows, with their routed ids."""
        return mk.FusedMoEActivationFormat.Standard

    _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = staticmethod(_always)
    _supports_activation = _supports_parallel_config = staticmethod(_always)

    def supports_expert_map(self) -> bool:
        """Handles -1 (an expert of another rank) in the expert map."""
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        """No-op: the function applies the router's weights and sums over experts."""
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
        """No first workspace (vLLM places the output there), scratch memory in the second, and the output.

        vLLM's workspaces have the model's dtype: at least 2 bytes an element.
        """
        rows, choices = self._rows(M, topk, local_num_experts)
        scratch = 0 if self.nbytes is None else -(-self.nbytes(math.prod(rows), choices) // 2)
        return (0,), (scratch,), (*rows, K)

    def _rows(self, tokens: int, top_k: int, experts: int) -> tuple[tuple[int, ...], int]:
        """Shape of a call's rows, and the experts of each row that the function sees."""
        return (tokens,), top_k

    def moe_problem_size(self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor) -> tuple[int, int, int, int, int]:
        """Number of experts, of tokens (batched: rows of each expert), of rows of w13; hidden size; top-k."""
        return w1.shape[0], a1.shape[-2], w1.shape[1], a1.shape[-1], topk_ids.shape[1]

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
        """Calls the function. `w1` and `w2` are unused: the function holds the layer's tensors."""
        if apply_router_weight_on_input:
            # vLLM's prepare step has applied the weights to the input.
            topk_weights = torch.ones(topk_ids.shape, dtype=torch.float32, device=hidden_states.device)
        routed = self._routed(hidden_states, topk_weights, topk_ids, expert_map, expert_tokens_meta)
        workspace = output.new_empty(0) if workspace2 is None else workspace2
        self._run(_as_rows(output), _as_rows(hidden_states), *routed, workspace)

    def _run(
        self,
        out: Tensor,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        workspace: Tensor,
    ) -> None:
        """Calls the function, as `WorkspaceForward` says; through its operator where torch.compile traces."""
        arguments = out, x, topk_weights, topk_ids, expert_map, workspace
        if torch.compiler.is_compiling():
            torch.ops.vllm_moe_oracle.run_experts(*arguments, self.runner.handle)
        else:
            self.runner(*arguments)

    def _routed(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, expert_tokens_meta: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Router weights and ids `[rows, choices]` of the rows of `x`, and the expert map, for the function."""
        return topk_weights, topk_ids, expert_map


class BatchedFunctionExperts(FunctionExperts):
    """Experts that call a function on rows that an all-to-all has sorted by expert, `[experts, tokens, hidden]`.

    The function sees each row as a token with one expert of this rank, and rows beyond an expert's number of tokens as
    tokens without an expert, which it skips. What it writes there is not read.
    """

    @property
    def expects_unquantized_inputs(self) -> bool:
        """Inputs arrive as they are: the quant config says so, and vLLM's prepare steps for this format refuse to be
        asked for it."""
        return False

    @staticmethod
    def activation_format() -> Any:
        """The batched format: rows by expert, and how many of them hold tokens."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Delegated: the finalize step of the all-to-all applies the router's weights and sums over experts."""
        return TopKWeightAndReduceDelegate()

    def _rows(self, tokens: int, top_k: int, experts: int) -> tuple[tuple[int, ...], int]:
        return (experts, tokens), 1

    def _routed(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, expert_tokens_meta: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One slot a row. Ids are of this rank's experts, so there is no expert map."""
        experts, rows = x.shape[:2]
        local = torch.arange(experts, dtype=torch.int32, device=x.device)[:, None]
        held = torch.arange(rows, device=x.device) < expert_tokens_meta.expert_num_tokens[:experts, None]
        ids = torch.where(held, local, -1).reshape(experts * rows, 1)
        return torch.ones(ids.shape, dtype=torch.float32, device=x.device), ids, None
