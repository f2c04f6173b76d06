"""This project's kernels for MXFP4 weights on fp8 tensor cores, with activations in e4m3, on Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..oracle.decision import Numerics, Plan
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits
from ._own import HOPPER

if TYPE_CHECKING:
    from torch import Tensor

    from ..kernels.fp8_weights import Fp8Weights


class OwnMxfp4W4A8(Backend):
    """Weights become e4m3 with one power of two a row, exactly or not at all; activations lose what e4m3 does not hold.

    For many tokens, where the matrix unit is the limit: it multiplies fp8 at twice the rate of bfloat16. In memory the
    weights take twice what MXFP4 takes, so few tokens are slower than with `own_mxfp4`.
    """

    name = "own_mxfp4_w4a8"
    schemes = ("mxfp4",)
    dense = True
    limits = Limits(
        capabilities=HOPPER,
        gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
        parameters=True,
        bias=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=MX_BLOCK,
        intermediate_multiple=MX_BLOCK,
        weight_on_input=True,
        eplb=True,
        batch_invariant=True,
    )

    def estimate(self, problem: Problem, device: Device) -> float:
        """After every kernel that stock vLLM would take, and after the one that leaves activations alone."""
        return 910.0

    def activations(self, problem: Problem) -> ActivationPrecision:
        """e4m3 with one float32 scale a token, which no checkpoint declares: offered when the user allows it."""
        return "fp8_token"

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights; both products' inputs rounded to e4m3."""
        return Numerics(
            "folded exactly into e4m3 with a power of two per row",
            f"quantised to e4m3 with one scale per token, in both products ({problem.dtype} between them)",
            "the tensor cores' float32, with the 14 bits that fp8 products are added with",
        )

    def objection(self, expert: Tensors, problem: Problem) -> str:
        """The first row whose exponents e4m3 cannot hold."""
        from ..layouts import fold

        for name in ("w13", "w2"):
            top, last = fold.exponents(expert[name], expert[f"{name}_scale"])
            wide = top - last > fold.SPREAD
            if wide.any():
                row = int(wide.nonzero()[0])
                return (
                    f"row {row} of {name} holds numbers up to 2**{int(top[row])} with last bits down to "
                    f"2**{int(last[row])}, and e4m3 holds {fold.SPREAD} binades; {int(wide.sum())} of {len(wide)} rows "
                    f"of this matrix are so. own_mxfp4 takes such weights, with activations left in {problem.dtype}"
                )
        return ""

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """The kernels' storage order.

        Returns:
            ``w13`` e4m3 `[2 I, H]`, ``w2`` `[H, I]`, their scales float32 `[2 I]` and `[H]`, biases the same. A row
            that does not fit (`objection`) has NaN for a scale.
        """
        from ..kernels.fp8_weights import convert_expert

        converted: dict[str, Tensor] = {}
        for name in ("w13", "w2"):
            codes, scale, bias = convert_expert(name, expert[name], expert[f"{name}_scale"], expert.get(f"{name}_bias"))
            converted |= {name: codes, f"{name}_scale": scale}
            if bias is not None:
                converted[f"{name}_bias"] = bias
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """Experts over the kernels, with vLLM's workspaces as their scratch memory."""
        from ..kernels.fp8_moe import fused_moe_fp8, workspace_bytes

        activation = problem.activation
        if builder.serves and tensors["w13"].is_cuda:
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
                topk_ids,
                activation=activation.name,
                alpha=activation.alpha,
                beta=activation.beta,
                limit=activation.limit,
                workspace=workspace,
                out=out,
                expert_map=expert_map,
            )

        return builder.from_scratch_function(run, nbytes)

    def _stored(self, tensors: Tensors, problem: Problem) -> Fp8Weights:
        import torch

        from ..kernels.fp8_weights import Fp8Matrix, Fp8Weights

        w13, w2 = (
            Fp8Matrix(tensors[name], tensors[f"{name}_scale"], tensors.get(f"{name}_bias")) for name in ("w13", "w2")
        )
        return Fp8Weights(w13, w2, getattr(torch, problem.dtype))


def warm_up(weights: Fp8Weights, problem: Problem) -> None:
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


BACKEND = OwnMxfp4W4A8()
