"""This project's kernels for MXFP4 weights and 16-bit activations, on Hopper."""

from __future__ import annotations

from ..oracle.decision import Numerics
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._limits import Limits
from ._own import HOPPER, OwnBackend

_FIRST = 1.0
"""Before every stock kernel."""

_TIMED = ((32, 4, 2880, 2880), (128, 4, 2880, 2880))
"""Local experts, experts per token, hidden and intermediate size of the layers that were timed."""

_RESULT = (
    "at 1 to 512 tokens 1.25 to 1.9 times as fast on an H200 as what stock 0.33.0 takes, and no slower than any of its "
    "kernels"
)


class OwnMxfp4(OwnBackend):
    """Weights stay as they are in memory and become bfloat16 in registers; activations are left alone."""

    name = "own_mxfp4"
    schemes = ("mxfp4",)
    limits = Limits(
        capabilities=HOPPER,
        dtypes=("bfloat16", "float16"),
        gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
        ungated=("relu2",),
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
        """First where it was measured, else after every kernel that stock vLLM would take."""
        return _FIRST if self.measured(problem, device) else self.place

    def measured(self, problem: Problem, device: Device) -> str:
        """On an H200 the layers of gpt-oss-20b and -120b, against stock's own choice and every other accepted kernel in
        the same run: `tests/golden/h200/kernels-vllm-0.33.0.json`, never slower at 1 to 512 tokens, and 1.1 to 1.4
        times as fast as stock's choice at 1024 to 16384. Nothing else was timed: neither shards, nor other
        activations, nor the tiles of batch invariance."""
        shape = (problem.local_experts, problem.top_k, problem.hidden_size, problem.intermediate_size)
        timed = (
            device.kind == "cuda"
            and any(low <= device.capability < high for low, high in HOPPER)
            and shape in _TIMED
            and problem.activation.name == "swigluoai"
            and problem.dtype == "bfloat16"
            and not problem.batch_invariant
        )
        return _RESULT if timed else ""

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights up to a row's spread of scales that bfloat16 can hold."""
        return Numerics("converted exactly to bfloat16, scaled there", f"left in {problem.dtype}")


BACKEND = OwnMxfp4()
