"""Times that are filled in where a backend lacks them: which cells, by what, and what a wrong one costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.samples import measured_card
from vllm_moe_oracle import settings
from vllm_moe_oracle.core.measurement_set import MeasurementSet
from vllm_moe_oracle.core.objectives import parse_objective
from vllm_moe_oracle.measurements import latency_model, lookup, model_shapes, profile
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.measurements.missing_times import INTERPOLATION_ERROR, fill_missing
from vllm_moe_oracle.oracle.measured_choice import LatencyCurve, choose_fastest
from vllm_moe_oracle.oracle.selection import decide

WIDE = (1, 4, 16, 64, 256, 1024, 4096)
NARROW = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
ERROR = 0.1
BALANCED = parse_objective("balanced")

Model = dict[int, float]


def shape_of_time(count: int) -> float:
    """A time as layers have it: weights are read up to some hundred tokens, then products take over."""
    return 20.0 + 3.0 * min(count, 100) + 0.3 * count


MODEL = {count: shape_of_time(count) for count in NARROW}


def predictor(model: Model, *unknown: str) -> object:
    def predict(names: Sequence[str], counts: Sequence[int]) -> MeasurementSet:
        known = [name for name in names if name not in unknown]
        times = {name: {"uniform": {count: model[count] for count in counts}} for name in known}
        return MeasurementSet(times, "a model", cell_errors=dict.fromkeys(known, ERROR))

    return predict


def filled(
    times: dict[str, dict[str, dict[int, float]]], model: Model | None = MODEL, names: Sequence[str] = ("a", "b")
) -> MeasurementSet:
    given = predictor(model) if model else predictor({}, *names)
    return fill_missing(MeasurementSet(times, "a test"), names, given)  # type: ignore[arg-type]


def without(times: Model, *counts: int) -> Model:
    return {count: us for count, us in times.items() if count not in counts}


# --- Which cells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "lacking", "expected"),
    [
        (WIDE, (1024,), (1024,)),
        (WIDE, (1,), (1,)),
        (WIDE, (4096,), (4096,)),
        (WIDE, (256, 1024), ()),  # side by side, and more than a quarter
        (WIDE, (4, 1024), ()),  # more than a quarter
        (NARROW, (2, 32, 512), (2, 32, 512)),
        (NARROW, (2, 8, 32, 128), ()),
        (NARROW, (1024,), (1024,)),
        (NARROW, (8, 16), (8, 16)),
        (NARROW, (1, 2), (1, 2)),
        (NARROW, (512, 1024), (1024,)),  # 4096 is a factor of eight from 512
    ],
)
def test_few_cells_with_near_neighbors_are_filled(
    counts: tuple[int, ...], lacking: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    times = {count: MODEL[count] for count in counts}
    found = filled({"a": {"uniform": times}, "b": {"uniform": without(times, *lacking)}})
    assert tuple(found.filled.get("b", {}).get("uniform", {})) == expected and "a" not in found.filled
    assert bool(found.remarks) == bool(expected)


def test_a_cell_that_few_others_have_is_not_missing() -> None:
    times = {count: MODEL[count] for count in WIDE}
    more = {**times, 512: MODEL[512]}
    one = filled({"a": {"uniform": more}, "b": {"uniform": times}, "c": {"uniform": times}}, names=("a", "b", "c"))
    assert one.filled == {} and one.remarks == ()
    two = filled({"a": {"uniform": more}, "b": {"uniform": more}, "c": {"uniform": times}}, names=("a", "b", "c"))
    assert set(two.filled) == {"c"} and set(two.filled["c"]["uniform"]) == {512}


def test_only_backends_that_are_compared_count() -> None:
    times = {"uniform": {count: MODEL[count] for count in WIDE}}
    short = {"uniform": without(times["uniform"], 1024)}
    assert filled({"a": short, "other": times}).filled == {}
    assert filled({"a": times, "other": short}).filled == {}


def test_kinds_of_routing_are_filled_apart() -> None:
    both = {routing: {count: MODEL[count] for count in WIDE} for routing in ("uniform", "skewed")}
    lacking = {"uniform": both["uniform"], "skewed": without(both["skewed"], 64)}
    found = filled({"a": both, "b": lacking, "c": {"uniform": both["uniform"]}}, names=("a", "b", "c"))
    assert {name: list(times) for name, times in found.filled.items()} == {"b": ["skewed"]}
    assert found.remarks == ("b was measured at 6 of 7 numbers of tokens under skewed routing, 1 predicted (64)",)


# --- By what ----------------------------------------------------------------------------------------------------------

TIMES = st.fixed_dictionaries({count: st.floats(10.0, 1e4) for count in NARROW})


@given(TIMES, st.floats(0.2, 5.0), st.sampled_from(NARROW))
def test_a_backend_that_the_model_knows_but_for_a_factor_is_exact(model: Model, factor: float, lacking: int) -> None:
    times = {count: factor * us for count, us in model.items()}
    found = filled({"a": {"uniform": times}, "b": {"uniform": without(times, lacking)}}, model)
    assert found.filled["b"]["uniform"] == {lacking: pytest.approx(times[lacking])}
    assert found.cell_errors == {"b": ERROR}


@given(TIMES, TIMES, st.sampled_from(NARROW))
def test_the_correction_lies_between_those_of_the_neighbors(model: Model, times: Model, lacking: int) -> None:
    found = filled({"a": {"uniform": times}, "b": {"uniform": without(times, lacking)}}, model)
    place = NARROW.index(lacking)
    near = [NARROW[each] for each in (place - 1, place + 1) if 0 <= each < len(NARROW)]
    ratios = [times[count] / model[count] for count in near]
    (us,) = found.filled["b"]["uniform"].values()
    assert min(ratios) * (1 - 1e-9) <= us / model[lacking] <= max(ratios) * (1 + 1e-9)
    assert found.known_times("b") == {"uniform": {**without(times, lacking), lacking: us}}
    assert found.times["b"]["uniform"] == without(times, lacking)  # what was measured stays apart


@given(TIMES, st.sampled_from(NARROW))
def test_without_a_model_a_time_lies_between_its_neighbors(times: Model, lacking: int) -> None:
    found = filled({"a": {"uniform": times}, "b": {"uniform": without(times, lacking)}}, None)
    if lacking in (NARROW[0], NARROW[-1]):
        assert found.filled == {}
        return
    place = NARROW.index(lacking)
    near = [times[NARROW[place - 1]], times[NARROW[place + 1]]]
    (us,) = found.filled["b"]["uniform"].values()
    assert min(near) * (1 - 1e-9) <= us <= max(near) * (1 + 1e-9)
    assert found.cell_errors == {"b": INTERPOLATION_ERROR}
    assert found.remarks == (f"b was measured at 11 of 12 numbers of tokens, 1 interpolated ({lacking})",)


def test_the_model_is_asked_only_where_times_are_missing() -> None:
    times = {"uniform": {count: MODEL[count] for count in WIDE}}

    def refuse(names: Sequence[str], counts: Sequence[int]) -> MeasurementSet:
        raise AssertionError(names)

    found = MeasurementSet({"a": times, "b": times}, "a test")
    assert fill_missing(found, ["a", "b"], refuse) is found


# --- What a wrong one costs -------------------------------------------------------------------------------------------


def score(times: Model) -> float:
    """The mean logarithm that the oracle compares."""
    return LatencyCurve({"uniform": times}).score(BALANCED, ["uniform"])


@given(TIMES, TIMES, TIMES, st.sampled_from(WIDE), st.sampled_from(["a", "b"]), st.floats(-1.0, 1.0))
def test_a_fill_within_its_error_costs_a_few_percent_at_most(
    model: Model, one: Model, other: Model, lacking: int, lacks: str, wrong: float
) -> None:
    """The winner is faster than the static choice for sure, and behind the other by the margin and the error twice."""
    times = {name: {count: each[count] for count in WIDE} for name, each in (("a", one), ("b", other))}
    given_times = {name: {"uniform": without(each, lacking) if name == lacks else each} for name, each in times.items()}
    found = filled(given_times, model)
    truth = dict(times)
    truth[lacks] = {**times[lacks], lacking: found.filled[lacks]["uniform"][lacking] * math.exp(wrong * ERROR)}
    choice = choose_fastest(found, ["a", "b"], BALANCED, 0.03)
    error = ERROR * 0.25  # a cell of so few weighs a quarter of the objective at most
    assert choice.comparison is not None and all(each.error <= error + 1e-9 for each in choice.comparison.filled)
    costs = {name: score(each) for name, each in truth.items()}
    assert costs[choice.backend] <= costs["a"] + 1e-9
    assert costs[choice.backend] <= min(costs.values()) - math.log(0.97) + 2 * error + 1e-9


def test_the_margin_grows_by_the_error_as_the_objective_weighs_it() -> None:
    """1024 tokens stand for half of 512 and of 2048, too: a quarter of `balanced`."""
    base = {"uniform": {count: MODEL[count] for count in WIDE}}
    for saving, winner in ((0.05, "a"), (0.06, "b")):  # 1 - 0.97 * exp(-0.025) is 5.4 %
        faster = {count: (1 - saving) * us for count, us in base["uniform"].items()}
        choice = choose_fastest(
            filled({"a": base, "b": {"uniform": without(faster, 1024)}}), ["a", "b"], BALANCED, 0.03
        )
        assert choice.backend == winner and choice.comparison is not None
        assert choice.comparison.ratio_error == pytest.approx(0.025)
        assert "b was measured at 6 of 7 numbers of tokens, 1 predicted (1024)" in choice.explanation
        assert 1024 not in dict(dict(choice.comparison.times)["b"]) and 1024 in dict(dict(choice.comparison.times)["a"])


def test_a_cell_that_decides_nothing_leaves_a_measured_choice() -> None:
    """One that the objective ignores, and one of a backend that is far behind."""
    times = {
        name: {count: factor * MODEL[count] for count in WIDE} for name, factor in (("a", 1), ("b", 0.8), ("c", 3))
    }
    slow = {name: {"uniform": without(each, 64) if name == "c" else each} for name, each in times.items()}
    choice = choose_fastest(filled(slow, names=("a", "b", "c")), ["a", "b", "c"], BALANCED, 0.03)
    assert choice.backend == "b" and choice.comparison is not None and not choice.comparison.is_predicted
    assert "c was measured at 6 of 7 numbers of tokens" in choice.explanation and "20.0% less" in choice.explanation
    late = {name: {"uniform": without(times[name], 4096) if name == "b" else times[name]} for name in ("a", "b")}
    choice = choose_fastest(filled(late), ["a", "b"], parse_objective("decode"), 0.03)
    assert choice.backend == "b" and choice.comparison is not None and not choice.comparison.is_predicted


# --- Shipped times ----------------------------------------------------------------------------------------------------


def test_a_layer_keeps_its_choice_when_one_time_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's time at 1024 tokens, which rests on a tile of this card: the others speak for it."""
    path, layer = profile.SHIPPED_FOLDER / "nvidia_h100.json", model_shapes.parse("int4_g128:qwen3.5-397b-a17b@tp8")
    card, shipped, shape = measured_card(path), profile.read(path), kernel_shape_of(layer)
    entries = []
    for entry in shipped.entries:
        if entry.kernel_shape == shape:
            own = entry.backends["hopper_wna16"]
            times = {"uniform": {count: each for count, each in own.times["uniform"].items() if count != "1024"}}
            backends = {**entry.backends, "hopper_wna16": msgspec.structs.replace(own, times=times)}
            entry = msgspec.structs.replace(entry, backends=backends)
        entries.append(entry)
    monkeypatch.setattr(profile, "shipped", lambda: (msgspec.structs.replace(shipped, entries=tuple(entries)),))
    chosen = settings.Settings(cache="none")
    for taken_out, why in ((True, "predicted"), (False, "measured")):
        if not taken_out:
            monkeypatch.undo()
        decision = decide(layer, card, chosen, measurements=lookup.find_measurements(layer, card, chosen))
        assert (decision.backend, decision.why) == ("hopper_wna16", why)
        of = len(shipped.samples(shape)) // len({each.backend for each in shipped.samples(shape)})
        said = (
            f"hopper_wna16 was measured at {of - 1} of {of} numbers of tokens, 1 predicted (1024)"
            in decision.explanation
        )
        assert said == taken_out and "by the shipped profile" in decision.explanation


def test_a_predicted_cell_has_the_errors_of_a_single_time() -> None:
    card = measured_card(profile.SHIPPED_FOLDER / "nvidia_h100.json")
    shape = kernel_shape_of(model_shapes.parse("int4_g128:qwen3.5-397b-a17b@tp8"))
    found = latency_model.predict(shape, card, ["hopper_wna16"], False, None, (48, 1024))
    assert set(found.times["hopper_wna16"]["uniform"]) == {48, 1024}
    assert found.cell_errors["hopper_wna16"] > found.errors["hopper_wna16"] > 0
