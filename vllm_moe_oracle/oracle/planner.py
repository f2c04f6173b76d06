"""Shard arithmetic: what a tensor-parallel cut leaves on a rank, whether it fits, and which other cut would.

vLLM cuts the intermediate size by the tensor-parallel size and gives every rank whole experts under expert parallelism;
the hidden size is never cut.
"""

from __future__ import annotations

from .decision import Plan, Reason
from .problem import MX_BLOCK, Problem


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def working_tp_sizes(full: int, multiple: int, limit: int) -> list[int]:
    """Tensor-parallel sizes up to `limit`, powers of two, whose shard of `full` is a multiple of `multiple`."""
    sizes = [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]
    return [size for size in sizes if full % size == 0 and (full // size) % multiple == 0]


def scale_group(problem: Problem) -> int:
    """Input features that share one scale in the second product on this rank; 1 where no group can be cut."""
    if problem.scheme.name in ("mxfp8", "mxfp4"):
        return MX_BLOCK
    return max(problem.scheme.group_size, 1)


def cut_in_words(problem: Problem) -> str:
    """The shard's arithmetic: ``640 / 2 = 320``, or the size itself where nothing is cut."""
    if problem.parallel.tp == 1:
        return str(problem.intermediate_size)
    return f"{problem.full_intermediate_size} / {problem.parallel.tp} = {problem.intermediate_size}"


def ways_out(problem: Problem, multiple: int) -> str:
    """Parallel settings under which the intermediate size is a multiple of `multiple`, as a remedy; may be empty."""
    ranks = problem.parallel.tp
    if ranks == 1:
        return ""
    ways = [f"TP {size}" for size in reversed(working_tp_sizes(problem.full_intermediate_size, multiple, ranks - 1))][
        :1
    ]
    if problem.full_intermediate_size % multiple == 0 and problem.num_experts >= ranks:
        ways.append(f"expert parallelism over the {ranks} ranks (--enable-expert-parallel)")
    return f"{' or '.join(ways)} would work" if ways else ""


def group_reasons(problem: Problem) -> list[Reason]:
    """Why the checkpoint's scale groups do not survive the cut; empty when they do.

    A rank that holds part of a group would need the other ranks' codes to know what the scale belongs to.
    """
    group = scale_group(problem)
    reasons = []
    if problem.hidden_size % group:
        detail = (
            f"hidden size {problem.hidden_size} is no multiple of the scale group {group} "
            f"({problem.hidden_size} mod {group} = {problem.hidden_size % group})"
        )
        reasons.append(Reason("group.hidden", detail))
    rest = problem.intermediate_size % group
    if rest:
        detail = (
            f"intermediate size {cut_in_words(problem)} is no multiple of the scale group {group} "
            f"({problem.intermediate_size} mod {group} = {rest})"
        )
        reasons.append(Reason("group.intermediate", detail, ways_out(problem, group)))
    return reasons


def padded(problem: Problem, hidden_multiple: int = 1, intermediate_multiple: int = 1) -> Plan:
    """The plan of a kernel whose tensors are zero-padded to multiples.

    Args:
        problem: the layer.
        hidden_multiple: what the kernel wants the hidden size to be a multiple of.
        intermediate_multiple: the same for the intermediate size of one rank.
    """
    hidden = round_up(problem.hidden_size, hidden_multiple)
    intermediate = round_up(problem.intermediate_size, intermediate_multiple)
    notes = []
    for name, real, kernel, multiple in (
        ("hidden", problem.hidden_size, hidden, hidden_multiple),
        ("intermediate", problem.intermediate_size, intermediate, intermediate_multiple),
    ):
        if kernel != real:
            notes.append(f"{name} size {real} is zero-padded to {kernel}, the next multiple of {multiple}")
    return Plan(hidden, intermediate, tuple(notes))
