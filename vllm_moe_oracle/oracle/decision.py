"""What was decided and why: `Verdict` of each candidate, `Plan` of the shard, `Decision` for a layer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import msgspec

from .problem import ActivationPrecision, Problem

Why = Literal["user", "override", "measured", "estimate"]


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule that a candidate breaks.

    Attributes:
        code: stable, machine-readable name of the rule, e.g. ``capability`` or ``alignment.intermediate``.
        detail: the rule and the numbers of this case, for a person.
        remedy: what would make the candidate eligible; empty when nothing would on this machine.
    """

    code: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail} ({self.remedy})" if self.remedy else self.detail


# Structs with a tag, where everything else here is a dataclass: a JSON reader has to tell the two verdicts apart.
class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The candidate can run the layer."""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """No reasons: nothing fails."""
        return ()


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The candidate cannot run the layer; `reasons` holds every rule that fails, not the first."""

    reasons: tuple[Reason, ...]

    def __post_init__(self) -> None:
        if not self.reasons:
            raise ValueError("a rejection without a reason")


Verdict = Accepted | Rejected


@dataclass(frozen=True, slots=True)
class Plan:
    """How this rank's shard meets the kernel.

    Attributes:
        hidden_size: features of the hidden state that the kernel sees; at least the problem's.
        intermediate_size: features between the products that the kernel sees; at least the problem's.
        notes: what was padded and why, one sentence each; empty when the kernel takes the shard as it is.
        layout: which of several orders of the same tensors the kernel of this machine reads; "" where there is one.
        tiles: most tokens and the tile configuration (JSON; "" for the backend's own choice) that was measured to be
            the fastest up to there, ascending; empty where none was, and for backends without configurations.
    """

    hidden_size: int
    intermediate_size: int
    notes: tuple[str, ...] = ()
    layout: str = ""
    tiles: tuple[tuple[int, str], ...] = ()

    def pads(self, problem: Problem) -> bool:
        """Whether the kernel sees larger tensors than the checkpoint's shard."""
        return (self.hidden_size, self.intermediate_size) != (problem.hidden_size, problem.intermediate_size)


@dataclass(frozen=True, slots=True)
class Numerics:
    """What a backend computes with; never changed for speed.

    Attributes:
        weights: how the weights enter the products.
        activations: precision in which the inputs of both products enter.
        accumulate: type of the sums.
    """

    weights: str
    activations: str
    accumulate: str = "float32"

    def __str__(self) -> str:
        return f"weights {self.weights}; activations {self.activations}; sums in {self.accumulate}"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's answer for one problem."""

    backend: str
    verdict: Verdict
    rank: float

    @property
    def accepted(self) -> bool:
        """Whether the backend can run the layer."""
        return isinstance(self.verdict, Accepted)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every rule that fails; empty when accepted."""
        return self.verdict.reasons


@dataclass(frozen=True, slots=True)
class Step:
    """One backend of a layer that runs several, by number of tokens.

    Attributes:
        backend: its name.
        most: the largest number of tokens that it runs; None for the last step, which has no end.
    """

    backend: str
    most: int | None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a decision by measurement was made of. Times are medians in microseconds under uniform routing.

    Attributes:
        objective: which numbers of tokens counted.
        source: where the measurements come from.
        against: the first of the static order that was measured.
        gain: part of `against`'s time that the winner saves, over the objective; 0 where `against` won.
        best: the fastest candidate at each measured number of tokens.
        loses: numbers of tokens where the winner is slower than another by more than the margin: the number, the other,
            and by what part of the other's time.
        times: of each candidate that was compared, by number of tokens.
        remarks: how the place of measurement differs, and what was not compared.
    """

    objective: str
    source: str
    against: str
    gain: float
    best: tuple[tuple[int, str], ...]
    loses: tuple[tuple[int, str, float], ...]
    times: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The winner for one layer, with everything that led to it.

    Attributes:
        problem: the layer.
        backend: name of the winner.
        why: what decided: the user's choice, a per-layer override, measurements, or the static estimate.
        because: the same in a sentence.
        plan: the winner's shard plan.
        numerics: what the winner computes with.
        candidates: the verdict of every backend that knows the scheme, best first, rejected ones after.
        regretted: it is not what was asked for, or no kernel for this device can run the layer, on a CPU if one could
            that the user has to ask for.
        measured: what was measured, where that decided.
        steps: which backend runs up to which number of tokens, where the layer runs more than one; `backend` is among
            them.
    """

    problem: Problem
    backend: str
    why: Why
    because: str
    plan: Plan
    numerics: Numerics
    candidates: tuple[Candidate, ...]
    regretted: bool = False
    measured: Measured | None = None
    steps: tuple[Step, ...] = ()

    def at(self, tokens: int) -> str:
        """The backend that runs at a number of tokens."""
        return next((step.backend for step in self.steps if step.most is None or tokens <= step.most), self.backend)

    def after(self, declared: ActivationPrecision, asked_by: str) -> Decision:
        """The decision, with a word on activations that are not what the checkpoint declares.

        Args:
            declared: what it declares.
            asked_by: who asked for another precision; "" when nobody did.
        """
        if not asked_by:
            return self
        words = f"activations are {self.problem.scheme.activations} by {asked_by}, the checkpoint declares {declared}"
        return dataclasses.replace(self, because=f"{self.because}; {words}")

    def summary(self) -> str:
        """One line for a log."""
        notes = f"; {'; '.join(self.plan.notes)}" if self.plan.notes else ""
        return f"{self.backend} ({self.why}: {self.because}); {self.numerics}{notes}"


def table(candidates: tuple[Candidate, ...]) -> str:
    """All candidates with all their reasons, as plain lines for an error message or a log."""
    if not candidates:
        return "  none: no backend knows the scheme"
    width = max((len(candidate.backend) for candidate in candidates), default=0)
    lines = []
    for candidate in candidates:
        reasons = [str(reason) for reason in candidate.reasons] or ["accepted"]
        lines.append(f"  {candidate.backend:<{width}}  {reasons[0]}")
        lines += [f"  {'':<{width}}  {reason}" for reason in reasons[1:]]
    return "\n".join(lines)
