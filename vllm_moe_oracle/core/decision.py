"""The result of a decision: the shard plan, the verdict of each candidate, and the `Decision` for a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from .problem import ActivationPrecision, Problem

DecidedBy = Literal["user", "override", "measured", "predicted", "static"]
"""What chose the backend: a setting, a per-layer override, measurements, predicted times, or the static order."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One rule that a candidate breaks.

    Attributes:
        code: stable, machine-readable name of the rule, e.g. ``capability`` or ``alignment.intermediate``.
        detail: the rule with the numbers of this case, for a person.
        remedy: what makes the candidate eligible; empty when nothing does on this machine.
    """

    code: str
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.detail} ({self.remedy})" if self.remedy else self.detail


# Tagged structs, where everything else here is a dataclass: a JSON reader has to tell the two verdicts apart.
class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The candidate can run the layer."""

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Empty: no rule fails."""
        return ()


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The candidate cannot run the layer; `reasons` holds every rule that fails, not only the first."""

    reasons: tuple[Reason, ...]

    def __post_init__(self) -> None:
        if not self.reasons:
            raise ValueError("a rejection without a reason")


Verdict = Accepted | Rejected


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The sizes and the layout in which a kernel gets this rank's shard.

    Attributes:
        hidden_size: the kernel's hidden size, padding included; at least the problem's.
        intermediate_size: the kernel's intermediate size, padding included; at least the problem's.
        notes: what was padded and why, one sentence each; empty when the kernel takes the shard unchanged.
        layout: the variant of the weights' layout that the kernel of this machine reads; "" when there is only one.
        tiles: pairs of a number of tokens and the tile configuration (JSON; "" for the backend's own choice) that was
            measured as the fastest up to that number, ascending; empty when none was measured.
    """

    hidden_size: int
    intermediate_size: int
    notes: tuple[str, ...] = ()
    layout: str = ""
    tiles: tuple[tuple[int, str], ...] = ()

    def pads(self, problem: Problem) -> bool:
        """Whether the kernel's tensors are larger than the checkpoint's shard."""
        return (self.hidden_size, self.intermediate_size) != (problem.hidden_size, problem.intermediate_size)


@dataclass(frozen=True, slots=True)
class Numerics:
    """The precisions that a backend computes with. They are never traded for speed.

    Attributes:
        weights: how the weights enter the matrix products.
        activations: precision of the inputs of both matrix products.
        accumulate: dtype of the accumulators.
    """

    weights: str
    activations: str
    accumulate: str = "float32"

    def __str__(self) -> str:
        return f"weights: {self.weights}; activations: {self.activations}; sums: {self.accumulate}"


@dataclass(frozen=True, slots=True)
class Answers:
    """What an accepted backend answered about one problem. It is asked once, and decisions use these answers.

    Attributes:
        plan: its shard plan.
        numerics: the precisions that it computes with.
        activations: precision in which inputs enter the products.
        layout: name of the layout that it converts to.
        only_by_name: why it runs the layer only when it is asked for by name; "" if it may be chosen.
        few_tokens: which backend of the same layout runs its calls with up to so many tokens; None for none.
    """

    plan: ShardPlan
    numerics: Numerics
    activations: ActivationPrecision
    layout: str
    only_by_name: str = ""
    few_tokens: TokenRange | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's verdict on one problem.

    Attributes:
        backend: its name.
        verdict: accepted, or rejected with every reason.
        priority: its place in the static order, lower first.
        known: what it answered; None for a backend that was rejected.
    """

    backend: str
    verdict: Verdict
    priority: float
    known: Answers | None = None

    @property
    def accepted(self) -> bool:
        """Whether the backend can run the layer."""
        return isinstance(self.verdict, Accepted)

    @property
    def answers(self) -> Answers:
        """What an accepted candidate answered."""
        assert self.known is not None, f"{self.backend} was rejected"
        return self.known

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Every rule that fails; empty for an accepted candidate."""
        return self.verdict.reasons

    @property
    def sentences(self) -> tuple[str, ...]:
        """The reasons for people. Rules that fail for the same cause have the same text, which is given once."""
        return tuple(dict.fromkeys(map(str, self.reasons)))

    def to_record(self) -> dict[str, Any]:
        """The fields of decision records and of ``explain --json``."""
        return {"backend": self.backend, "accepted": self.accepted, "reasons": self.reasons}


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A range of token counts that one backend runs, in a layer that has several backends.

    Attributes:
        backend: its name.
        max_tokens: the largest number of tokens in the range; None for the last range, which has no end.
    """

    backend: str
    max_tokens: int | None

    def __str__(self) -> str:
        return f"{self.backend} {f'up to {self.max_tokens} tokens' if self.max_tokens else 'beyond'}"


def backend_in(token_ranges: Sequence[TokenRange], tokens: int) -> str:
    """The backend of ranges, the last of which has no end, that runs a number of tokens."""
    return next(each.backend for each in token_ranges if each.max_tokens is None or tokens <= each.max_tokens)


@dataclass(frozen=True, slots=True)
class FilledTimes:
    """Predicted times of a candidate that was measured at most other numbers of tokens.

    Attributes:
        backend: its name.
        times: the predicted times in microseconds, by number of tokens, under uniform routing.
        error: standard deviation of the logarithm of its mean time over the objective, as far as these cause it.
    """

    backend: str
    times: tuple[tuple[int, float], ...]
    error: float


@dataclass(frozen=True, slots=True)
class TimeComparison:
    """The figures behind a decision by measured or predicted times: medians in microseconds under uniform routing.

    Attributes:
        objective: the token counts that mattered.
        source: where the times come from.
        comparison_base: the first backend of the static order that was measured: the static choice where it was.
        time_saved: fraction of the base's time that the decision saves, over the objective; 0 when the base runs alone.
        ratio_error: standard deviation of the logarithm of the base's mean time over that of the candidate that was
            compared with it; 0 when both were measured.
        fastest: the fastest candidate at each measured number of tokens.
        slower_at: where another candidate saves more of the time of what runs than the setting `min_time_saving`: the
            number of tokens, the other candidate, and the fraction of that time that it saves.
        times: the times of each compared candidate, by number of tokens.
        remarks: how the measuring machine differs from this one, and which candidates were not compared.
        errors: standard deviation of the logarithm of predicted times, by candidate; empty when all were measured.
        filled: predicted times of candidates at single numbers of tokens, as far as the choice may depend on them.
    """

    objective: str
    source: str
    comparison_base: str
    time_saved: float
    fastest: tuple[tuple[int, str], ...]
    slower_at: tuple[tuple[int, str, float], ...]
    times: tuple[tuple[str, tuple[tuple[int, float], ...]], ...]
    remarks: tuple[str, ...] = ()
    errors: tuple[tuple[str, float], ...] = ()
    filled: tuple[FilledTimes, ...] = ()
    ratio_error: float = 0.0

    @property
    def is_predicted(self) -> bool:
        """Whether the choice depends on predicted times."""
        return bool(self.errors or self.filled)

    def to_record(self) -> dict[str, Any]:
        """The field ``comparison`` of decision records and of ``explain --json``: what is by backend or by number of
        tokens is an object, its keys are strings."""
        names = ("objective", "source", "comparison_base", "time_saved", "ratio_error", "remarks")
        return {name: getattr(self, name) for name in names} | {
            "fastest": _by_tokens(self.fastest),
            "slower_at": {
                str(tokens): {"backend": backend, "time_saved": saved} for tokens, backend, saved in self.slower_at
            },
            "times": {backend: _by_tokens(points) for backend, points in self.times},
            "errors": dict(self.errors),
            "filled": {each.backend: {"times": _by_tokens(each.times), "error": each.error} for each in self.filled},
        }


def _by_tokens(pairs: Iterable[tuple[int, Any]]) -> dict[str, Any]:
    return {str(tokens): value for tokens, value in pairs}


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen backend for one layer, with everything that led to it.

    Attributes:
        problem: the layer.
        backend: name of the chosen backend.
        why: what decided: a setting, a per-layer override, measured or predicted times, or the static order.
        explanation: the same in a sentence.
        plan: the chosen backend's shard plan.
        numerics: the precisions that it computes with.
        candidates: the verdict of every backend for the scheme: accepted ones first, in static order.
        degraded: the backend is a fallback: not the one that was requested, or the reference although the device has
            kernels that a setting or an installation would make available.
        comparison: the figures, when measured or predicted times decided.
        token_ranges: which backend runs which numbers of tokens, when the layer has more than one; `backend` is one of
            them.
        tunable: the static choice stands because measurements are missing or not sufficient, or predictions too
            uncertain: `tune` could let times decide between backends that compute the same.
    """

    problem: Problem
    backend: str
    why: DecidedBy
    explanation: str
    plan: ShardPlan
    numerics: Numerics
    candidates: tuple[Candidate, ...]
    degraded: bool = False
    comparison: TimeComparison | None = None
    token_ranges: tuple[TokenRange, ...] = ()
    tunable: bool = False

    @property
    def is_explicit(self) -> bool:
        """Whether the user chose the backend."""
        return self.why in ("user", "override")

    def candidate(self, name: str) -> Candidate:
        """The candidate of a name."""
        return next(each for each in self.candidates if each.backend == name)

    def backend_for(self, tokens: int) -> str:
        """The backend that runs a number of tokens."""
        return backend_in(self.token_ranges, tokens) if self.token_ranges else self.backend

    def with_activation_note(self, declared: ActivationPrecision, requested_by: str) -> Decision:
        """The decision; its explanation says when activations differ from what the checkpoint declares.

        Args:
            declared: the precision that the checkpoint declares.
            requested_by: the setting that requests another precision; "" when none does.
        """
        if not requested_by:
            return self
        note = (
            f"activations are {self.problem.scheme.activations} by {requested_by}, the checkpoint declares {declared}"
        )
        return dataclasses.replace(self, explanation=f"{self.explanation}; {note}")

    def to_record(self) -> dict[str, Any]:
        """The fields of decision records and of ``explain --json``; the layer and the candidates stand beside it."""
        return {
            "backend": self.backend,
            "why": self.why,
            "explanation": self.explanation,
            "numerics": str(self.numerics),
            "plan": self.plan,
            "comparison": None if self.comparison is None else self.comparison.to_record(),
            "token_ranges": self.token_ranges,
        }

    @property
    def grounds(self) -> str:
        """The kind of evidence, then the sentence, as every output of a decision gives them: ``measured: ...``."""
        return f"{self.why}: {self.explanation}"

    def summary(self) -> str:
        """One line for a log: the backend, the grounds in parentheses, numerics, padding."""
        notes = f"; {'; '.join(self.plan.notes)}" if self.plan.notes else ""
        return f"{self.backend} ({self.grounds}); {self.numerics}{notes}"


def format_candidates(candidates: tuple[Candidate, ...]) -> str:
    """A table of all candidates with all their reasons, as lines of text for an error message or a log."""
    if not candidates:
        return "  none: no backend knows the scheme"
    width = max((len(candidate.backend) for candidate in candidates), default=0)
    lines = []
    for candidate in candidates:
        reasons = candidate.sentences or ("accepted",)
        lines.append(f"  {candidate.backend:<{width}}  {reasons[0]}")
        lines += [f"  {'':<{width}}  {reason}" for reason in reasons[1:]]
    return "\n".join(lines)
