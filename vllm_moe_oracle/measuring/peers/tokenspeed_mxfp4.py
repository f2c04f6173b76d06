"""TokenSpeed's Triton kernel for MXFP4 weights with activations in bfloat16 (``tokenspeed-kernel`` 0.1.4).

It is the package's portable kernel, and on Hopper the one that takes biases and gpt-oss's activation. For other layers
the package prefers Marlin, which vLLM has, too. It runs on a Triton of its own, ``tokenspeed-triton``.

Weights stay as in the checkpoint. Modules are imported without the ``__init__`` of their packages, which import kernels
of other releases of torch, FlashInfer and CUTLASS. The function allocates its output; a copy of it into the layer's is
part of the time.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import TYPE_CHECKING, Any

from ...backends import Builder, Tensors
from ...core.activations import alpha_beta
from ...core.capabilities import Capabilities
from ...core.decision import Numerics, ShardPlan
from ...core.problem import MX_BLOCK, Problem
from ._contract import PeerBackend

if TYPE_CHECKING:
    from torch import Tensor

_MODULE = "ops.moe.triton.mxfp4"
_TRITON = "tokenspeed_triton"
_PLAN = {"internal_activation_dtype": "input", "activation": "swiglu"}
"""The package's words for weights that are converted to the dtype of the activations."""


class TokenspeedMxfp4(PeerBackend):
    """`triton_mxfp4_precomputed_moe_apply`."""

    name = "peer:tokenspeed"
    schemes = ("mxfp4",)
    package = "tokenspeed_kernel"
    generation = _MODULE
    runs_parents = False
    static_priority = 9002.0
    activation_precision = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    capabilities = Capabilities(
        compute_capabilities=((90, 100),),
        dtypes=("bfloat16",),
        gated=("silu", "swigluoai"),
        activation_params=True,
        bias=True,
        hidden_multiple=64,
        intermediate_multiple=MX_BLOCK,
    )

    def load(self) -> None:
        """Imports the kernel, and the Triton that compiles it."""
        if self._folder is not None and _TRITON not in sys.modules:
            spec = importlib.machinery.PathFinder.find_spec(_TRITON, [str(self._folder)])
            if spec is not None and str(self._folder) not in sys.path:
                sys.path.append(str(self._folder))  # at the end: packages of the environment go first
        self.module(_MODULE)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """The canonical tensors, and biases in the model's dtype.

        Returns:
            ``w13`` uint8 `[2 I, H/2]`, ``w13_scale`` uint8 `[2 I, H/32]`, ``w2`` `[H, I/2]`, ``w2_scale`` `[H, I/32]`,
            biases `[2 I]` and `[H]`.
        """
        import torch

        dtype = getattr(torch, problem.dtype)
        return {name: each.to(dtype) if name.endswith("_bias") else each.clone() for name, each in expert.items()}

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """A function of routed tokens that calls the package's with a layer as it expects it."""
        apply = self.module(_MODULE).triton_mxfp4_precomputed_moe_apply
        alpha, beta = alpha_beta(problem.activation)
        layer = types.SimpleNamespace(
            w13_weight=tensors["w13"],
            w13_weight_scale=tensors["w13_scale"],
            w2_weight=tensors["w2"],
            w2_weight_scale=tensors["w2_scale"],
            w13_input_layout="concatenated",
            activation="swiglu",
            swiglu_arg=types.SimpleNamespace(alpha=alpha, limit=problem.activation.limit),
            swiglu_beta=beta,
            ep_size=1,
        )
        if problem.has_bias:
            layer.w13_weight_bias, layer.w2_weight_bias = tensors["w13_bias"], tensors["w2_bias"]

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            ids = topk_ids
            if expert_map is not None:
                ids = expert_map[ids.clamp(min=0).long()].where(ids >= 0, -1)
            out.copy_(apply(_PLAN, x, layer, None, topk_weights=topk_weights, topk_ids=ids))

        return builder.from_function(run)


PEERS = (TokenspeedMxfp4,)
