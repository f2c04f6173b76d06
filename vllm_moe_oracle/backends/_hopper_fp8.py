"""What the backends over this project's kernels for fp8 tensor cores share: storage, workspaces and the call."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ..core.decision import ShardPlan
from ..core.problem import Problem
from ._contract import Backend, Builder, Tensors
from ._hopper import CAPABILITIES

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.fp8_weights import Fp8Weights
    from ..kernels.weights import PackedWeights

FP8_CAPABILITIES = dataclasses.replace(CAPABILITIES, formats=("standard",), lora=False)
"""What the kernels take in every weight format."""

ACTIVATION_NUMERICS = "quantized to e4m3 with one scale per token, in both products ({dtype} between them)"
ACCUMULATION = "the tensor cores' float32, with the 14 bits that fp8 products are added with"


class HopperFp8Backend(Backend):
    """Experts over `vllm_moe_oracle.kernels.fp8_moe`; a subclass names the weight format, and what it loses.

    For many tokens, where the matrix unit is the limit: it multiplies fp8 at twice the rate of bfloat16.
    """

    static_priority = 910.0  # after vLLM's own kernels, and after kernels that do not quantize activations
    activation_precision = "fp8_token"

    def compile_keys(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """The same for all numbers of tokens: of a product's sizes Triton asks whether its rows are whole tiles, and
        whether chunks of 64 rows are one, or a multiple of 16; of a row that is quantized the next power of two."""
        from ..kernels import fp8_gemm, fp8_mxfp4_gemm

        scheme = problem.scheme.name
        packed = scheme == "mxfp4"
        tile_rows = (fp8_mxfp4_gemm if packed else fp8_gemm).TILE_ROWS

        def sizes(rows: int) -> tuple[bool, ...]:
            chunks = -(-rows // 64)
            return rows % tile_rows == 0, packed and chunks == 1, packed and chunks % 16 == 0

        activation = problem.activation
        hidden, inner, has_map = problem.hidden_size, problem.intermediate_size, problem.parallel.ep > 1
        product = ("hopper_fp8 product", scheme, problem.dtype, problem.has_bias)
        rows = ("hopper_fp8 rows", scheme, problem.dtype, problem.local_experts, problem.top_k)
        return frozenset({
            (*product, activation.gated, activation.name, activation.limit is None,
             *sizes(inner * (1 + activation.gated))),
            (*product, *sizes(hidden)),
            (*rows, "x", (hidden - 1).bit_length()),
            (*rows, "h", (inner - 1).bit_length()),
            ("hopper_fp8 lists", scheme, problem.local_experts, has_map),
            ("hopper_fp8 sum", problem.dtype, problem.top_k, has_map),
        })  # fmt: skip

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """Experts over the kernels, with vLLM's workspaces as their scratch memory."""
        from ..kernels.fp8_moe import fused_moe_fp8, workspace_bytes

        activation = problem.activation
        if builder.for_serving and tensors["w13"].is_cuda:
            warm_up(self._stored(tensors, problem), problem)

        def nbytes(tokens: int, top_k: int) -> int:
            return workspace_bytes(self._stored(tensors, problem), tokens, top_k) if tokens else 0

        def run(
            out: Tensor,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            expert_map: Tensor | None,
            workspace: Tensor,
        ) -> None:
            fused_moe_fp8(
                x,
                self._stored(tensors, problem),
                topk_weights,
                topk_ids.int(),  # the dtype that was compiled; some all-to-alls deliver int64
                activation=activation.name,
                alpha=activation.alpha,
                beta=activation.beta,
                limit=activation.limit,
                workspace=workspace,
                out=out,
                expert_map=expert_map,
            )

        return builder.from_workspace_function(run, nbytes)

    @abstractmethod
    def _stored(self, tensors: Tensors, problem: Problem) -> Fp8Weights | PackedWeights:
        """The layer's weights as the kernels take them, from its kernel tensors."""


def warm_up(weights: Fp8Weights | PackedWeights, problem: Problem) -> None:
    """Compiles the layer's kernels, or reads them from Triton's cache; every number of tokens runs the same ones."""
    import torch

    from ..kernels.fp8_moe import warmup

    places = None
    if problem.parallel.ep > 1:
        places = torch.full((problem.num_experts,), -1, dtype=torch.int32, device=weights.w13.codes.device)
        places[: problem.local_experts] = torch.arange(problem.local_experts, dtype=torch.int32)
    warmup(
        weights, problem.top_k, activation=problem.activation.name, limit=problem.activation.limit, expert_map=places
    )
