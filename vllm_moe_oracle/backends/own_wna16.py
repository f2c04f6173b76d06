"""This project's kernels for integer weights, on Hopper."""

from __future__ import annotations

from ..oracle.decision import Numerics
from ..oracle.problem import ActivationPrecision, Device, Problem
from ._limits import Limits
from ._own import HOPPER, OwnBackend

_FIRST = 1.0
"""Before every stock kernel."""

_QWEN3 = (128, 8, 2048, 768, "silu")
_MINIMAX_M2_TP4 = (256, 8, 3072, 384, "silu")
_NEMOTRON3 = (128, 6, 2688, 1856, "relu2")

_TIMED = {
    (8, 128, *_QWEN3): "1.08 to 2.0 times as fast",
    (4, 128, *_QWEN3): "1.05 to 2.2 times as fast up to 256 tokens, 2 % slower at 512,",
    (4, 32, *_QWEN3): "1.07 to 2.2 times as fast up to 256 tokens, 2 % slower at 512,",
    (4, 128, *_MINIMAX_M2_TP4): "1.03 to 2.3 times as fast",
    (4, 32, *_NEMOTRON3): "1.1 to 1.7 times as fast",
}
"""Bits, group, local experts, experts per token, hidden and intermediate size and activation of the layers that were
timed and won, and how they compare with stock 0.33.0's own choice (Humming) in the same run at 1 to 512 tokens:
symmetric, without biases, bfloat16, on an H200; `tests/golden/h200/kernels-vllm-0.33.0.json`, and for Nemotron, with
kernels that were slower than today's, `kernels-earlier-vllm-0.33.0.json` beside it. Kimi-K2's layer on one of eight
ranks (384 experts, groups of 32) was timed too: 1.06 to 1.8 times as fast up to 16 tokens, and 4 % slower to 6 % faster
from 32 to 512: there stock's choice stays."""


class OwnWna16(OwnBackend):
    """Codes stay as they are in memory and become 16-bit floats in registers; activations are left alone."""

    name = "own_wna16"
    schemes = ("wna16",)
    limits = Limits(
        capabilities=HOPPER,
        dtypes=("bfloat16", "float16"),
        gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
        ungated=("relu2",),
        parameters=True,
        bias=True,
        bits=(4, 8),
        groups=(-1, 32, 64, 128),
        zero_points=True,
        act_orders=("none", "static"),
        hidden_multiple=32,
        intermediate_multiple=32,
        weight_on_input=True,
        eplb=True,
        batch_invariant=True,
    )

    def estimate(self, problem: Problem, device: Device) -> float:
        """First where it was measured and won, else after every kernel that stock vLLM would take."""
        return _FIRST if self.measured(problem, device) else self.place

    def measured(self, problem: Problem, device: Device) -> str:
        """What was found for the layer; nothing for others, nor for the tiles of batch invariance."""
        scheme = problem.scheme
        shape = (problem.local_experts, problem.top_k, problem.hidden_size, problem.intermediate_size)
        found = _TIMED.get((scheme.bits, scheme.group_size, *shape, problem.activation.name))
        timed = (
            device.kind == "cuda"
            and any(low <= device.capability < high for low, high in HOPPER)
            and problem.dtype == "bfloat16"
            and not (scheme.zero_points or problem.has_bias or problem.batch_invariant)
            and problem.activation.limit is None
        )
        return f"{found} on an H200 as what stock 0.33.0 takes, at 1 to 512 tokens" if timed and found else ""

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Group scales multiply float32 sums where tiles allow it, else weights, which are then rounded once."""
        scaled = "the sums scaled in float32, or the weights, rounded once" if problem.scheme.group_size != -1 else (
            "the sums scaled in float32"
        )  # fmt: skip
        return Numerics(f"codes converted exactly to {problem.dtype}, {scaled}", f"left in {problem.dtype}")


BACKEND = OwnWna16()
