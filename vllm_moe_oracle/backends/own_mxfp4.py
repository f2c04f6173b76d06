"""This project's kernels for MXFP4 weights and 16-bit activations, on Hopper."""

from __future__ import annotations

from ..oracle.decision import Numerics
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Problem
from ._limits import Limits
from ._own import HOPPER, OwnBackend


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

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights up to a row's spread of scales that bfloat16 can hold."""
        return Numerics("converted exactly to bfloat16, scaled there", f"left in {problem.dtype}")


BACKEND = OwnMxfp4()
