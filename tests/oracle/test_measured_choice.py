"""Choosing by measurement: who wins under which objective, what measurements may not decide, and what is said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.cases import H200, MXFP8_W8A8, backend, problem, registry
from vllm_moe_oracle import settings
from vllm_moe_oracle.core import objectives
from vllm_moe_oracle.core.decision import Decision, TokenRange
from vllm_moe_oracle.core.measurement_set import MeasurementSet
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.oracle.measured_choice import MeasuredChoice, choose_fastest
from vllm_moe_oracle.oracle.selection import decide

COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BALANCED, DECODE, PREFILL = (objectives.parse_objective(name) for name in ("balanced", "decode", "prefill"))


def line(few: float, many: float | None = None, counts: tuple[int, ...] = COUNTS) -> dict[str, dict[int, float]]:
    """A backend that takes `few` us up to 256 tokens and `many` a token of 256 beyond."""
    many = few if many is None else many
    return {"uniform": {count: few if count <= 256 else many * count / 256 for count in counts}}


def evidence(**times: Mapping[str, Mapping[int, float]]) -> MeasurementSet:
    return MeasurementSet(times, source="a test")


# --- Who wins ---------------------------------------------------------------------------------------------------------


def test_the_fastest_wins_and_the_explanation_names_the_time_saved() -> None:
    choice = choose_fastest(evidence(first=line(100), second=line(80)), ["first", "second"], BALANCED, 0.03)
    assert choice.backend == "second"
    assert choice.comparison is not None and choice.comparison.time_saved == pytest.approx(0.2)
    assert "20.0% less time than first" in choice.explanation and "a test" in choice.explanation
    assert dict(choice.comparison.fastest) == dict.fromkeys(COUNTS, "second")
    assert choice.comparison.slower_at == ()


@pytest.mark.parametrize(("percent", "wins"), [(2.9, False), (3.1, True)])
def test_the_static_choice_stays_below_min_time_saving(percent: float, wins: bool) -> None:
    choice = choose_fastest(evidence(first=line(100), second=line(100 - percent)), ["first", "second"], BALANCED, 0.03)
    assert choice.backend == ("second" if wins else "first")
    assert choice.comparison is not None
    assert (choice.comparison.time_saved > 0) == wins
    assert f"{percent:.1f}%" in choice.explanation


def test_below_min_time_saving_the_static_choice_wins_not_the_second() -> None:
    times = evidence(first=line(100), second=line(99), third=line(98))
    assert choose_fastest(times, ["first", "second", "third"], BALANCED, 0.03).backend == "first"


@pytest.mark.parametrize(("objective", "winner"), [(DECODE, "decoder"), (PREFILL, "prefiller")])
def test_the_objective_decides_and_losses_are_named(objective: objectives.Objective, winner: str) -> None:
    times = evidence(decoder=line(50, 150), prefiller=line(100, 100))
    choice = choose_fastest(times, ["prefiller", "decoder"], objective, 0.03)
    assert choice.backend == winner and choice.comparison is not None
    lost = {count for count, _, _ in choice.comparison.slower_at}
    assert lost == {count for count in COUNTS if (count > 256) == (winner == "decoder")}
    assert "others are faster at" in choice.explanation
    assert all(name != winner for _, name, _ in choice.comparison.slower_at)


def test_a_long_prefill_does_not_outweigh_decode_steps() -> None:
    """By ratios, not by microseconds: 2 times faster in decode beats 1.3 times slower in prefill."""
    times = evidence(first=line(100, 100), second=line(50, 130))
    assert choose_fastest(times, ["first", "second"], BALANCED, 0.03).backend == "second"


def test_skewed_routing_counts_where_all_have_it() -> None:
    slow_when_skewed = {"uniform": line(90)["uniform"], "skewed": line(200)["uniform"]}
    steady = {"uniform": line(100)["uniform"], "skewed": line(100)["uniform"]}
    both = evidence(first=steady, second=slow_when_skewed)
    assert choose_fastest(both, ["first", "second"], BALANCED, 0.03).backend == "first"
    one = evidence(first=line(100), second=slow_when_skewed)
    assert choose_fastest(one, ["first", "second"], BALANCED, 0.03).backend == "second"


@pytest.mark.parametrize("counts", [(1,), (1, 2, 4, 8), (1, 1024, 4096)])
def test_half_of_a_skewed_run_does_not_count(counts: tuple[int, ...]) -> None:
    """A run that was ended while it measured skewed routing: what it has must not be continued to the other counts."""
    steady = {"uniform": line(100)["uniform"], "skewed": line(100, counts=counts)["uniform"]}
    faster = {"uniform": line(80)["uniform"], "skewed": line(200, counts=counts)["uniform"]}
    choice = choose_fastest(evidence(first=steady, second=faster), ["first", "second"], BALANCED, 0.03)
    assert choice.backend == "second" and choice.comparison is not None
    assert choice.comparison.time_saved == pytest.approx(0.2)


# --- No basis for a choice --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((8192,), "measured from 8192 tokens on"),
        ((1, 2, 4, 8, 16), "measured up to 16 tokens"),
        ((1, 1024, 4096), "is too wide a gap"),
        ((), "measured at no number"),
    ],
)
def test_too_few_numbers_of_tokens_decide_nothing(counts: tuple[int, ...], words: str) -> None:
    times = evidence(first=line(100, counts=counts), second=line(10, counts=counts))
    choice = choose_fastest(times, ["first", "second"], BALANCED, 0.03)
    assert choice.backend == "first" and choice.comparison is None
    assert words in choice.explanation


def test_a_static_choice_that_was_not_measured_stays() -> None:
    choice = choose_fastest(evidence(second=line(1)), ["first", "second"], BALANCED, 0.03)
    assert choice.backend == "first" and choice.comparison is None
    assert "first was not measured" in choice.explanation


def test_a_static_choice_that_could_not_be_run_gives_way() -> None:
    found = MeasurementSet({"second": line(90), "third": line(50)}, "a test", failures={"first": "OutOfMemory"})
    choice = choose_fastest(found, ["first", "second", "third"], BALANCED, 0.03)
    assert choice.backend == "third" and choice.comparison is not None and choice.comparison.comparison_base == "second"
    assert "first: OutOfMemory" in choice.explanation


@pytest.mark.parametrize("times", [{}, {"third": line(50, counts=(1, 2))}])
def test_a_backend_that_failed_gives_way_where_nothing_can_be_compared(times: dict[str, Any]) -> None:
    names = ["first", "second", "third"]
    cases = ((["first"], "second"), (["first", "second"], "third"), (names, "first"), (["third"], "first"))
    for failed, chosen in cases:
        found = MeasurementSet(times, "a test", failures=dict.fromkeys(failed, "broke the GPU's context"))
        choice = choose_fastest(found, names, BALANCED, 0.03)
        assert (choice.backend, choice.comparison) == (chosen, None)
        assert all(f"{name}: broke the GPU's context" in choice.explanation for name in failed)
    backends = [backend(name, rank=float(place)) for place, name in enumerate(names)]
    found = MeasurementSet({}, "a test", failures={"first": "broke the GPU's context"})
    decision = decide(problem(), H200, settings.load({}), registry=registry(backends), measurements=found)
    assert (decision.backend, decision.why, decision.tunable) == ("second", "static", True)
    assert decision.explanation.startswith("the next accepted backend in the static order, because first failed; ")


def test_one_backend_alone_is_compared_with_nothing() -> None:
    for accepted in (["first"], ["first", "second"]):
        choice = choose_fastest(evidence(first=line(100)), accepted, BALANCED, 0.03)
        assert choice.backend == "first" and choice.comparison is None
        assert "are not sufficient: no other backend was measured" in choice.explanation
        assert ("second was not measured" in choice.explanation) == (len(accepted) == 2)
    failed = MeasurementSet({"second": line(9)}, "a test", {"first": "OutOfMemory"})
    instead = choose_fastest(failed, ["first", "second"], BALANCED, 0.03)
    assert instead.backend == "second" and instead.comparison is not None
    assert "the only one that could be measured" in instead.explanation and "first: OutOfMemory" in instead.explanation


def test_nothing_found_says_why() -> None:
    choice = choose_fastest(MeasurementSet(remarks=("ignored: another GPU",)), ["first"], BALANCED, 0.03)
    assert choice == MeasuredChoice("first", "ignored: another GPU")


def test_measurements_of_a_backend_that_is_not_accepted_do_not_count() -> None:
    choice = choose_fastest(
        evidence(first=line(100), second=line(90), gone=line(1)), ["first", "second"], BALANCED, 0.03
    )
    assert choice.backend == "second"


# --- By number of tokens ----------------------------------------------------------------------------------------------


def test_two_backends_share_a_layer_where_they_may() -> None:
    times = evidence(decoder=line(50, 150), prefiller=line(100, 100))
    names = ["prefiller", "decoder"]
    assert choose_fastest(times, names, BALANCED, 0.03).token_ranges == ()
    shared = choose_fastest(times, names, BALANCED, 0.03, lambda one, other: True)
    assert shared.token_ranges == (TokenRange("decoder", 362), TokenRange("prefiller", None))
    assert (
        "decoder up to 362 tokens, prefiller beyond, which takes 18.4% less time than decoder alone"
        in shared.explanation
    )
    # What is said of the decision is said of both: the base is the prefiller, whose time of 100 is 50 in one half.
    assert shared.comparison is not None and shared.comparison.slower_at == ()
    assert shared.comparison.time_saved == pytest.approx(1 - 0.5**0.5)


def test_one_backend_that_is_fastest_everywhere_is_not_split() -> None:
    times = evidence(first=line(100), second=line(80, 79))
    assert choose_fastest(times, ["first", "second"], BALANCED, 0.03, lambda one, other: True).token_ranges == ()


def test_backends_timed_at_other_token_counts_do_not_share_a_layer() -> None:
    times = evidence(first=line(100, counts=(1, 4, 16, 64)), second=line(80, counts=(2, 8, 32, 128)))
    choice = choose_fastest(
        times, ["first", "second"], objectives.parse_objective("2:1,64:1"), 0.03, lambda one, other: True
    )
    assert (choice.backend, choice.token_ranges) == ("second", ())
    assert choice.comparison is not None and choice.comparison.fastest == () and "20.0% less time" in choice.explanation


def test_a_branch_must_save_more_than_min_time_saving() -> None:
    times = evidence(first=line(100, 100), second=line(99, 120))
    assert choose_fastest(times, ["first", "second"], BALANCED, 0.03, lambda one, other: True).token_ranges == ()


# --- Any times --------------------------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "d"]),
        st.lists(st.floats(1.0, 1e4), min_size=len(COUNTS), max_size=len(COUNTS)),
        min_size=1,
    ),
    st.sampled_from([BALANCED, DECODE, PREFILL]),
)
def test_the_choice_is_never_worse_than_the_static_one(
    measured: dict[str, list[float]], objective: objectives.Objective
) -> None:
    times = {name: {"uniform": dict(zip(COUNTS, values, strict=True))} for name, values in measured.items()}
    accepted = sorted(times)
    choice = choose_fastest(MeasurementSet(times, "a test"), accepted, objective, 0.03, lambda one, other: True)

    def total(time_of: Any) -> float:
        return math.exp(math.fsum(weight * math.log(time_of(count)) for count, weight in objective.weights))

    def by_step(count: int) -> float:
        step = next(step for step in choice.token_ranges if step.max_tokens is None or count <= step.max_tokens)
        return times[step.backend]["uniform"][count]

    static = total(times[accepted[0]]["uniform"].get)
    alone = total(times[choice.backend]["uniform"].get)
    assert alone <= static * (1 + 1e-9)
    assert choice.backend == accepted[0] or alone < static * 0.97 * (1 + 1e-9)
    if choice.token_ranges:
        assert [step.max_tokens is None for step in choice.token_ranges] == [False, True]
        assert choice.backend in {step.backend for step in choice.token_ranges}
        assert total(by_step) <= alone * (1 + 0.011)  # numbers of tokens without weight count a little


# --- Objectives -------------------------------------------------------------------------------------------------------


def test_objectives_weigh_to_one() -> None:
    for name in objectives.PRESET_NAMES:
        assert math.fsum(weight for _, weight in objectives.parse_objective(name).weights) == pytest.approx(1)
    assert objectives.parse_objective("64:3,1:1").weights == ((1, 0.25), (64, 0.75))


def test_named_objectives_hold_small_batches_and_full_ones() -> None:
    assert {1, 2, 4, 8, 16} <= {tokens for tokens, _ in DECODE.weights} <= {tokens for tokens, _ in BALANCED.weights}
    assert PREFILL.largest == BALANCED.largest == 4096


@pytest.mark.parametrize(
    "text", ["", "fast", "1", "0:1", "1:0", "1:-1", "1:nan", "1:inf", "1:1,1:2", "x:1", "9999999:1", "1:1e308,2:1e308"]
)
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="Write one of decode, prefill, balanced"):
        objectives.parse_objective(text)


@pytest.mark.parametrize("word", ["1.0", "-0.1", "nan", "x", "100%", "inf"])
def test_min_time_saving_is_a_fraction(word: str) -> None:
    with pytest.raises(SettingError, match=r"is not in \[0, 1\)"):
        settings.load({"MOE_ORACLE_MIN_TIME_SAVING": word})
    assert settings.load({"MOE_ORACLE_MIN_TIME_SAVING": "5%"}).min_time_saving == pytest.approx(0.05)


# --- In a decision ----------------------------------------------------------------------------------------------------


def decided(found: MeasurementSet | None, *names: str, activations: Mapping[str, str] = {}, **changes: Any) -> Decision:
    """A decision among made-up backends in the order of their names, under MXFP8 activations."""
    made = [
        backend(name, rank=float(place), consumes=activations.get(name, "16bit"), capabilities=LIMITS)
        for place, name in enumerate(names)
    ]
    chosen = settings.load({}, assignments=changes.pop("assignments", None))
    return decide(problem(scheme=MXFP8_W8A8, **changes), H200, chosen, registry=registry(made), measurements=found)


LIMITS = dataclasses.replace(backend("any").capabilities, batch_invariant=True, lora=True)


def test_a_decision_by_measurement_says_so() -> None:
    decision = decided(evidence(a=line(100), b=line(70)), "a", "b")
    assert (decision.backend, decision.why) == ("b", "measured")
    assert "30.0% less time than a" in decision.explanation
    assert decided(None, "a", "b").why == "static"
    alone = decided(evidence(a=line(100)), "a", "b")
    assert (alone.backend, alone.why, alone.comparison) == ("a", "static", None)
    assert "no other backend was measured" in alone.explanation


def test_numerics_are_never_decided_by_measurement() -> None:
    found = evidence(a=line(100), b=line(1))
    decision = decided(found, "a", "b", activations={"b": "mxfp8"})
    assert decision.backend == "a"
    assert decided(found, "a", "b", activations={"a": "mxfp8", "b": "mxfp8"}).backend == "b"


def test_explicit_choices_go_before_measurements() -> None:
    decision = decided(evidence(a=line(100), b=line(70)), "a", "b", assignments={"backend": "a"})
    assert (decision.backend, decision.why) == ("a", "user")


def test_ignored_measurements_are_remarked() -> None:
    decision = decided(MeasurementSet(remarks=("measurements of X are ignored: another GPU",)), "a", "b")
    assert decision.why == "static" and "another GPU" in decision.explanation


def test_a_second_copy_is_taken_only_when_allowed() -> None:
    found = evidence(a=line(50, 150), b=line(100, 100))
    assert decided(found, "b", "a").token_ranges == ()
    allowed = decided(found, "b", "a", assignments={"allow_second_layout": "1"})
    assert [step.backend for step in allowed.token_ranges] == ["a", "b"]
    assert decided(found, "b", "a", assignments={"allow_second_layout": "1"}, dp=2).token_ranges == ()
    invariant = decided(found, "b", "a", assignments={"allow_second_layout": "1"}, batch_invariant=True)
    assert invariant.why == "measured" and invariant.token_ranges == ()
    adapted = decided(found, "b", "a", assignments={"allow_second_layout": "1"}, lora=True)
    assert adapted.why == "measured" and adapted.token_ranges == ()


def test_the_same_evidence_decides_the_same() -> None:
    found = evidence(a=line(100), b=line(70), c=line(70))
    assert decided(found, "a", "b", "c") == decided(found, "a", "b", "c")
    assert decided(found, "a", "b", "c").backend == "b"
