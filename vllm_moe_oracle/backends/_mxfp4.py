"""What the backends over others' MXFP4 kernels share: the order of gate and up rows, padding, gpt-oss's activation.

vLLM tells its kernels by the layer's activation whether the rows of the first product alternate gate and up: with
``swigluoai`` they do, with every other one they are halves. Canonical tensors are halves always, so what goes into such
a kernel is put back into the order that the activation asks for, after padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..oracle.decision import Plan
from ..oracle.problem import MX_BLOCK, Activation, Device, Problem
from ._contract import Tensors
from ._limits import Rule
from ._stock import activation_rule

if TYPE_CHECKING:
    from torch import Tensor

BUILT_IN = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, interleaved=True)
"""gpt-oss's activation: vLLM's kernels for alternating rows have its constants built in."""


def in_rows_of(problem: Problem, w13: Tensor) -> Tensor:
    """Rows in the order that the layer's activation asks for: `[R, ...]`, gate rows then up rows, or alternating."""
    from ..layouts.rows import alternate_halves

    return alternate_halves(w13) if problem.activation.interleaved else w13


def padded_expert(expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
    """Canonical tensors of one expert, zero-padded to the plan's sizes: gate and up each by themselves, biases too.

    Rows of the first product are in the order of `in_rows_of`. A padded scale is 2**-127: its codes are zeros.
    """
    from ..layouts.pad import pad_columns, pad_rows

    hidden, inner = plan.hidden_size, plan.intermediate_size
    halves = 2 if problem.activation.gated else 1
    found = {
        "w13": pad_columns(pad_rows(expert["w13"], inner, halves), hidden // 2),
        "w2": pad_columns(pad_rows(expert["w2"], hidden), inner // 2),
        "w13_scale": pad_columns(pad_rows(expert["w13_scale"], inner, halves), hidden // MX_BLOCK),
        "w2_scale": pad_columns(pad_rows(expert["w2_scale"], hidden), inner // MX_BLOCK),
    }
    if "w13_bias" in expert:
        found["w13_bias"] = pad_rows(expert["w13_bias"], inner, halves)
        found["w2_bias"] = pad_rows(expert["w2_bias"], hidden)
    return {name: in_rows_of(problem, each) if name.startswith("w13") else each for name, each in found.items()}


def oai_rule(halves_since: str) -> Rule:
    """Alpha, beta and limit reach the kernel, or the layer is refused.

    Args:
        halves_since: first vLLM release whose class takes ``swigluoai`` with gate rows, then up rows.
    """
    halves = activation_rule(halves_since)

    def broken(problem: Problem, device: Device) -> bool:
        activation = problem.activation
        return activation != BUILT_IN if activation.interleaved else halves.broken(problem, device)

    def detail(problem: Problem, device: Device) -> str:
        if problem.activation.interleaved:
            return f"has {BUILT_IN} built in for rows that alternate gate and up, the layer has {problem.activation}"
        return halves.detail(problem, device)

    return Rule("activation.parameters", broken, detail)


def alternating_rule(kernel: str) -> Rule:
    """Only gpt-oss's rows and activation, with the constants that vLLM passes."""
    return Rule(
        "activation.parameters",
        lambda problem, device: problem.activation != BUILT_IN,
        lambda problem, device: (
            f"vLLM gives {kernel} the constants of {BUILT_IN} and rows that alternate gate and up; the layer has "
            f"{problem.activation}" + ("" if problem.activation.interleaved else " and gate rows, then up rows")
        ),
    )
