"""What the two FlashInfer CUTLASS backends for MXFP4 share: limits, rules and padding.

vLLM's class is `FlashInferExperts`. Its kernel reads up rows, then gate rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..compat import since
from ..compat.order import mxfp4_place
from ..oracle.decision import Plan
from ..oracle.planner import padded
from ..oracle.problem import MX_BLOCK, Device, Problem
from ._contract import Backend, Tensors
from ._limits import Limits, Rule
from ._trtllm import EVEN_SPLIT, IN_ORDER, ONE

if TYPE_CHECKING:
    from torch import Tensor

MULTIPLE = 128

_CONSTANTS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""What the class has built in for MXFP4 before; a limit that the model sets goes before its own."""


def limits(capabilities: tuple[tuple[int, int], ...]) -> Limits:
    """The limits of both.

    Args:
        capabilities: where the kernel runs.
    """
    return Limits(
        capabilities=capabilities,
        packages={"flashinfer-python": "0.6.11", "vllm": since.OLDEST},
        dtypes=("bfloat16",),
        gated=("silu", "swigluoai"),
        parameters=True,
        bias=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=MULTIPLE,
        intermediate_multiple=MULTIPLE,
    )


def _unlike_constants(problem: Problem) -> bool:
    activation = problem.activation
    if (activation.alpha, activation.beta) != (_CONSTANTS["alpha"], _CONSTANTS["beta"]):
        return True
    return activation.limit is None


RULES = (
    Rule(
        "activation.parameters.since",
        lambda problem, device: not since.reached(since.CUTLASS_PARAMETERS, device) and _unlike_constants(problem),
        lambda problem, device: (
            f"computes with alpha {_CONSTANTS['alpha']:g} and beta {_CONSTANTS['beta']:g}, and with a limit, for every "
            f"MXFP4 layer before vLLM {since.CUTLASS_PARAMETERS}; the layer has {problem.activation}"
        ),
        f"vLLM {since.CUTLASS_PARAMETERS} or newer",
    ),
    Rule(
        "activation.rows.since",
        lambda problem, device: (
            not since.reached(since.CUTLASS_PARAMETERS, device)
            and problem.activation.name == "swigluoai"
            and not problem.activation.interleaved
        ),
        lambda problem, device: (
            f"vLLM's class takes swigluoai over two halves of rows since {since.CUTLASS_PARAMETERS}"
        ),
        f"vLLM {since.CUTLASS_PARAMETERS} or newer",
    ),
    EVEN_SPLIT,
    IN_ORDER,
)
"""Rules of both."""


class CutlassMxfp4(Backend):
    """MXFP4 weights through vLLM's `FlashInferExperts`.

    Attributes:
        place: a key of `compat.order.MXFP4_ORDER`.
    """

    schemes = ("mxfp4",)
    vllm_names = ("flashinfer_cutlass",)
    stock_class = "FlashInferExperts"
    place: str

    def plan(self, problem: Problem, device: Device) -> Plan:
        """Both sizes, zero-padded to multiples of 128, as stock does."""
        return padded(problem, MULTIPLE, MULTIPLE)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's place for gpt-oss, behind the Triton kernels; after everything else for other models."""
        return mxfp4_place(self.place, problem, device)


def ordered(expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
    """Canonical tensors of one expert, zero-padded, up rows before gate rows, biases in bfloat16."""
    import torch

    from ..layouts.pad import pad_columns, pad_rows
    from ..layouts.rows import swap_halves

    hidden, inner = plan.hidden_size, plan.intermediate_size
    full = {
        "w13": pad_rows(pad_columns(expert["w13"], hidden // 2), inner, 2),
        "w13_scale": pad_rows(pad_columns(expert["w13_scale"], hidden // MX_BLOCK, ONE), inner, 2, ONE),
        "w2": pad_rows(pad_columns(expert["w2"], inner // 2), hidden),
        "w2_scale": pad_rows(pad_columns(expert["w2_scale"], inner // MX_BLOCK, ONE), hidden, value=ONE),
    }
    if "w13_bias" in expert:
        full["w13_bias"] = pad_rows(expert["w13_bias"].to(torch.bfloat16), inner, 2)
        full["w2_bias"] = pad_rows(expert["w2_bias"].to(torch.bfloat16), hidden)
    return {name: swap_halves(tensor) if name.startswith("w13") else tensor for name, tensor in full.items()}
