"""Which place's measurements answer for a layer, and which of their backends: what failed, and what is unfinished."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib.cases import backend, problem, registry
from tests.lib.samples import measured_card
from vllm_moe_oracle import settings
from vllm_moe_oracle.core.decision import Decision
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import latency_model, lookup, model_shapes, profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import RoutingKind, Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.oracle import selection
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST

LAYER = problem(hidden_size=2176)
"""Of no known model: no shipped profile has it."""
H200 = catalog.known_device("nvidia-h200")
HUMMING, MARLIN, OWN = "humming_mxfp8", "marlin_mxfp8", "hopper_mxfp8"
"""In static order."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def times(backend: str, us: float, counts: tuple[int, ...] = COUNTS, routing: RoutingKind = "uniform") -> list[Sample]:
    return [Sample(backend, "16bit", count, routing, us, us, us, 9, 1e-3) for count in counts]


def fails(backend: str, *counts: int, routing: RoutingKind = "uniform") -> list[Sample]:
    return [Sample(backend, "16bit", count, routing, failure="relative error 3.0e-01") for count in counts]


def decide_by(layer: Problem = LAYER, card: Device = H200, **assignments: str) -> Decision:
    """The decision with these settings, by what measurements they find."""
    chosen = settings.load({}, assignments=assignments)
    return decide(layer, card, chosen, measurements=lookup.find_measurements(layer, card, chosen))


def decided(folder: Path, *samples: Sample, given: tuple[Sample, ...] = ()) -> Decision:
    """The decision with a cache, and a profile in the setting of that name, of these."""
    store = Store(folder)
    store.prepare()
    store.add(Environment.of(H200), kernel_shape_of(LAYER), samples)
    if not given:
        return decide_by(cache=str(folder))
    profile.write(profile.make(Environment.of(H200), {kernel_shape_of(LAYER): given}, {}), folder / "given.json")
    return decide_by(cache=str(folder), profile=str(folder / "given.json"))


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_what_failed_once_is_not_chosen_for_its_times_elsewhere(tmp_path: Path, routing: RoutingKind) -> None:
    """Wrong numbers at one number of tokens, or when tokens crowd on few experts, are wrong numbers in serving."""
    fast = times(OWN, 10, COUNTS if routing == "skewed" else COUNTS[:-1])
    made = decided(tmp_path, *times(HUMMING, 50), *times(MARLIN, 40), *fast, *fails(OWN, 4096, routing=routing))
    assert made.backend == MARLIN and made.why == "measured"
    where = " under skewed routing" if routing == "skewed" else ""
    assert f"{OWN}: failed with 4096 tokens{where}: relative error" in made.explanation


def test_what_failed_for_long_prompts_is_not_chosen_for_decoding_either(tmp_path: Path) -> None:
    store = [*times(HUMMING, 50), *times(MARLIN, 40), *times(OWN, 10, COUNTS[:-2]), *fails(OWN, 1024, 4096)]
    decided(tmp_path, *store)
    made = decide_by(cache=str(tmp_path), objective="decode")
    assert made.backend == MARLIN and f"{OWN}: failed with 1024 tokens" in made.explanation


def test_a_static_choice_that_failed_once_gives_way(tmp_path: Path) -> None:
    made = decided(
        tmp_path, *times(HUMMING, 10, COUNTS[:-1]), *fails(HUMMING, 4096), *times(MARLIN, 40), *times(OWN, 50)
    )
    assert made.backend == MARLIN and made.why == "measured"
    assert f"{HUMMING}, the static choice, could not be measured" in made.explanation


def test_an_unfinished_run_hides_no_measurements_of_another_place(tmp_path: Path) -> None:
    """A `tune` that was ended after some numbers of tokens leaves its samples in the cache."""
    layer, card = model_shapes.parse("mxfp8:qwen3-30b-a3b"), measured_card(profile.SHIPPED_FOLDER / "nvidia_h200.json")
    few = [each for name in (HUMMING, MARLIN, OWN) for each in times(name, 50, (1, 2, 4))]
    store = Store(tmp_path)
    store.prepare()
    store.add(Environment.of(card), kernel_shape_of(layer), few)
    with_cache, without = (decide_by(layer, card, cache=str(each)) for each in (tmp_path, tmp_path / "none"))
    assert without.why == with_cache.why == "measured" and without.backend == with_cache.backend
    assert "by the shipped profile" in with_cache.explanation
    assert f"the cache ({Environment.of(card)}) are not sufficient" in with_cache.explanation
    assert "measured up to 4 tokens" in with_cache.explanation


def test_one_backend_alone_hides_no_measurements_of_another_place(tmp_path: Path) -> None:
    full = (*times(HUMMING, 50), *times(MARLIN, 20), *times(OWN, 30))
    made = decided(tmp_path, *full, given=tuple(times(HUMMING, 5)))
    assert made.backend == MARLIN and "by the cache" in made.explanation
    assert f"given.json (NVIDIA H200, vLLM {NEWEST}) are not sufficient" in made.explanation


def test_failures_in_a_skipped_source_stay_excluded(tmp_path: Path) -> None:
    full = (*times(HUMMING, 50), *times(MARLIN, 40), *times(OWN, 10))
    given = (*times(HUMMING, 50, (1, 2)), *fails(OWN, 4))
    made = decided(tmp_path, *full, given=given)
    assert made.backend == MARLIN and "by the cache" in made.explanation
    assert f"{OWN}: relative error 3.0e-01" in made.explanation


def elsewhere(**changes: Any) -> Environment:
    """The H200's environment with another kernel hash, driver or package."""
    here = Environment.of(H200)
    packages = here.packages | changes.pop("packages", {})
    return msgspec.structs.replace(here, packages=packages, **changes)


@pytest.mark.parametrize(
    ("there", "backend", "counts"),
    [
        (elsewhere(kernels="0123"), OWN, False),
        (elsewhere(packages={"vllm": "0.22.1"}), OWN, True),
        (elsewhere(packages={"humming-kernels": "0.1.12"}), HUMMING, False),
        (elsewhere(driver="570"), OWN, True),
    ],
)
def test_a_failure_of_other_code_counts_for_nothing(
    there: Environment, backend: str, counts: bool, tmp_path: Path
) -> None:
    """A release that mends a kernel would not run it until somebody measures again."""
    full = [*times(HUMMING, 10 if backend == HUMMING else 50), *times(MARLIN, 40), *times(OWN, 15)]
    assert decided(tmp_path / "cache", *full).backend == backend
    given = tmp_path / "old.json"
    profile.write(profile.make(there, {kernel_shape_of(LAYER): fails(backend, 4)}, {}), given)
    made = decide_by(cache=str(tmp_path / "cache"), profile=str(given))
    assert (made.backend != backend) == counts and made.why == "measured"
    assert counts or f"{backend} failed when its kernels were other code" in made.explanation


def test_an_unfinished_run_hides_no_complete_one_of_the_same_cache(tmp_path: Path) -> None:
    """The interrupted one has the closer environment: this machine's driver."""
    made = decided(tmp_path, *times(HUMMING, 50), *times(MARLIN, 20), *times(OWN, 30))
    assert made.backend == MARLIN and made.why == "measured"
    here = dataclasses.replace(H200, driver="580.1")
    Store(tmp_path).add(Environment.of(here), kernel_shape_of(LAYER), times(OWN, 30, (1,)))
    made = decide_by(card=here, cache=str(tmp_path))
    assert made.backend == MARLIN and made.why == "measured"


def test_a_damaged_latency_model_is_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise msgspec.ValidationError("Object missing required field `environment`")

    monkeypatch.setattr(latency_model, "predict", broken)
    made = decide_by(cache=str(tmp_path))
    assert made.why == "static" and "the shipped latency model is not used: " in made.explanation


def test_the_error_of_a_profile_does_not_grow(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    chosen = settings.load({}, assignments={"profile": str(tmp_path / "x.json")})
    assert len({lookup.profile_error(chosen) for _ in range(3)}) == 1
    frames = []
    for _ in range(2):
        with pytest.raises(MeasurementError) as caught:
            lookup._read_profile(chosen.profile)
        frames.append(len(caught.traceback))
    assert frames[0] == frames[1]


@pytest.mark.parametrize("predicted", [False, True])
def test_where_no_place_decides_the_first_one_says_why(
    tmp_path: Path, predicted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not predicted:
        monkeypatch.setattr(latency_model, "why_unpredictable", lambda *arguments: "not predicted")
    given = tuple(each for name in (HUMMING, MARLIN) for each in times(name, 50, (1, 2)))
    made = decided(tmp_path, *times(HUMMING, 5, (1, 2, 4)), given=given)
    if predicted:
        assert made.why == "predicted" and "given.json" in made.explanation
        return
    assert made.why == "static" and made.backend == HUMMING
    assert made.explanation.count("are not sufficient") == 1 and "given.json" in made.explanation
    assert "measured up to 2 tokens" in made.explanation


def test_sources_are_searched_in_order(tmp_path: Path) -> None:
    full = (*times(HUMMING, 50), *times(MARLIN, 20), *times(OWN, 30))
    made = decided(tmp_path, *full, given=(*times(HUMMING, 50), *times(MARLIN, 40), *times(OWN, 30)))
    assert made.backend == OWN and "given.json" in made.explanation and "the cache" not in made.explanation


def test_a_backend_of_which_only_memory_was_short_is_not_excluded(tmp_path: Path) -> None:
    """Earlier releases stored it where the error broke the GPU's context."""
    words = "broke the GPU's context: RuntimeError: CUDA error: out of memory"
    short = [Sample(OWN, "16bit", count, "uniform", failure=words) for count in COUNTS]
    given = (*times(HUMMING, 50), *times(MARLIN, 40), *times(OWN, 10))
    made = decided(tmp_path / "cache", *times(HUMMING, 50), *times(MARLIN, 40), *short, given=given)
    assert made.backend == OWN and made.why == "measured" and "memory" not in made.explanation


@pytest.mark.parametrize("place", ["cache", "profile"])
@pytest.mark.parametrize("activations", ["", "16bit"])
def test_times_of_a_backend_that_there_is_not_are_left_out(tmp_path: Path, place: str, activations: str) -> None:
    gone = [Sample("gone", activations, count, "uniform", 5, 4, 6, 9, 1e-3) for count in COUNTS]
    samples = (*times(HUMMING, 50), *times(OWN, 10), *gone)
    made = decided(tmp_path / "cache", *samples) if place == "cache" else decided(tmp_path / "cache", given=samples)
    assert made.backend == OWN and "gone" not in made.explanation


@pytest.mark.parametrize("us", [-1.0, 0.0, 1e-320, 1e-3, 1e8, float("inf"), float("nan")])
def test_times_that_no_kernel_has_are_invalid(us: float) -> None:
    assert not times(OWN, us, (1,))[0].is_valid


@pytest.mark.parametrize("us", [2e-3, 9e7])
def test_times_that_are_possible_can_be_compared(tmp_path: Path, us: float) -> None:
    made = decided(tmp_path / "cache", *times(HUMMING, us), *times(OWN, 9e7 if us < 1 else 2e-3))
    assert made.backend == (HUMMING if us < 1 else OWN) and made.why == "measured"


def test_what_breaks_while_times_are_compared_is_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise OverflowError("math range error")

    monkeypatch.setattr(lookup, "choose_fastest", broken)
    monkeypatch.setattr(latency_model, "predict", lambda *arguments: lookup.MeasurementSet())
    made = decided(tmp_path / "cache", *times(HUMMING, 50), *times(OWN, 10))
    assert made.why == "static" and "the cache is not used" in made.explanation and "math range" in made.explanation


# --- Cells that a backend lacks ---------------------------------------------------------------------------------------


def lacking(*counts: int) -> list[Sample]:
    return times(OWN, 10, tuple(count for count in COUNTS if count not in counts))


@pytest.mark.parametrize("predicted", [True, False])
def test_a_backend_that_lacks_a_time_is_still_compared(
    tmp_path: Path, predicted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a predicted one, or by those of the numbers of tokens beside it."""
    if not predicted:
        monkeypatch.setattr(latency_model, "why_unpredictable", lambda *arguments: "not predicted")
    made = decided(tmp_path, *times(HUMMING, 50), *times(MARLIN, 40), *lacking(512))
    assert (made.backend, made.why) == (OWN, "predicted")
    how = "predicted" if predicted else "interpolated"
    assert f"{OWN} was measured at 11 of 12 numbers of tokens, 1 {how} (512)" in made.explanation


def test_a_cell_that_failed_is_not_one_that_is_missing(tmp_path: Path) -> None:
    """A kernel that cannot run at a number of tokens is not chosen; lack of memory says nothing about it."""
    rest = (*times(HUMMING, 50), *times(MARLIN, 40), *lacking(512))
    failed = decided(tmp_path / "failed", *rest, *fails(OWN, 512))
    assert (failed.backend, failed.why) == (MARLIN, "measured") and "11 of 12" not in failed.explanation
    short = Sample(OWN, "16bit", 512, "uniform", failure="CUDA error: out of memory")
    assert decided(tmp_path / "short", *rest, short).backend == OWN


def test_many_missing_times_are_not_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_model, "why_unpredictable", lambda *arguments: "not predicted")
    made = decided(tmp_path, *times(HUMMING, 50), *times(MARLIN, 40), *lacking(64, 128, 256, 512))
    assert (made.backend, made.why, made.tunable) == (MARLIN, "measured", True)
    assert f"{OWN}: measured at 32 and next at 1024 tokens, which is too wide a gap" in made.explanation


@pytest.mark.parametrize(
    ("marlin", "own", "lacks", "winner", "why"),
    [
        (40, 10, (64, 128, 256, 512), OWN, "predicted"),
        (10, 30, (64, 128, 256, 512), MARLIN, "measured"),  # slower wherever both were measured
        (40, 120, (64, 128, 256, 512), MARLIN, "measured"),
        (40, 1200, COUNTS[1:], MARLIN, "measured"),  # one time, far above the predicted one
        (40, 39.5, (64, 128, 256, 512), MARLIN, "measured"),  # faster by less than the prediction's error
    ],
)
def test_others_times_do_not_decide_against_a_backend_with_too_few(
    tmp_path: Path, marlin: float, own: float, lacks: tuple[int, ...], winner: str, why: str
) -> None:
    """As after an unfinished run, or where times were taken out: by what it has, the rest is predicted."""
    few = times(OWN, own, tuple(count for count in COUNTS if count not in lacks))
    made = decided(tmp_path, *times(HUMMING, 50), *times(MARLIN, marlin), *few)
    assert (made.backend, made.why) == (winner, why)
    said = f"{OWN} was measured at 8 of 12 numbers of tokens, 4 predicted (64, 128, 256, 512)"
    assert (said in made.explanation) is (winner == OWN)


def test_a_tile_is_not_stretched_over_a_number_of_tokens_that_is_missing(tmp_path: Path) -> None:
    tile = '{"gate_up": {}}'
    tiled = [msgspec.structs.replace(each, tile=tile if each.tokens == 256 else "") for each in lacking(512)]
    decided(tmp_path, *times(HUMMING, 50), *times(MARLIN, 40), *tiled)
    chosen = settings.load({}, assignments={"cache": str(tmp_path)})
    found = lookup.find_measurements(LAYER, H200, chosen)
    assert found is not None
    assert [(most, each) for most, each in found.tiles[OWN] if 128 < most < 1024] == [(181, ""), (362, tile), (724, "")]


@pytest.mark.parametrize(
    ("torch", "triton", "expected"),
    [
        ("2.11.0", "3.6.0", "3.6"), ("2.14.0", "3.8.0", "3.8"), ("2.14.1", "3.8.1", "3.8"), ("2.11.0", "3.8.0", "3.8"),
        ("2.15.0", "3.9.0", "3.8"), ("2.12.0", "3.7.0", "3.6"), ("2.14.0", "", "3.8"),
    ],
)  # fmt: skip
def test_the_profile_of_the_closest_triton_answers(torch: str, triton: str, expected: str) -> None:
    """A patch release, or another torch, is no other Triton. Of two as close the first answers."""
    layer, card = model_shapes.parse("mxfp8:qwen3-30b-a3b"), measured_card(profile.SHIPPED_FOLDER / "nvidia_h200.json")
    packages = {**card.packages, "torch": torch, "triton": triton}
    card = dataclasses.replace(card, driver="580", packages={name: each for name, each in packages.items() if each})
    found = lookup.find_measurements(layer, card, settings.Settings(cache="none"))
    assert found is not None and found.source.endswith(f"Triton {expected})")
    assert bool(found.errors) is (triton != "" and not triton.startswith(expected))


def test_backends_that_changed_alike_are_named_in_one_remark() -> None:
    card = measured_card(profile.SHIPPED_FOLDER / "nvidia_h200.json")
    newer, older = (
        dataclasses.replace(card, packages={**card.packages, "vllm": each}) for each in ("0.31.0", "0.29.0")
    )
    names = ["marlin_mxfp8", "marlin_wna16", "hopper_mxfp8"]
    errors, remarks = lookup.release_errors(names, Environment.of(newer), Environment.of(older))
    assert list(errors) == names[:2]
    assert remarks == ["marlin_mxfp8, marlin_wna16 were measured with vllm 0.31.0, not 0.29.0"]


def test_a_gain_over_stock_is_of_the_same_triton() -> None:
    """Where none was measured under it, the gain is the decision's own."""
    layer, card = model_shapes.parse("mxfp8:qwen3-30b-a3b"), measured_card(profile.SHIPPED_FOLDER / "nvidia_h200.json")
    for triton, expected in (("3.6.0", "Triton 3.6)"), ("3.8.1", "Triton 3.8)"), ("3.9.0", "")):
        here = dataclasses.replace(card, packages={**card.packages, "triton": triton})
        found = profile.comparisons_for(Environment.of(here))
        assert [str(each.environment).rpartition(", ")[2] + ")" for each in found] == [expected] * bool(expected), layer
        part = dataclasses.replace(here, sm_count=card.sm_count // 2)
        assert profile.comparisons_for(Environment.of(part)) == []


def test_a_third_partys_disabled_backend_is_not_asked_about_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its method may hang, and that it is measured is no reason to call it."""

    class Fatal(type(backend("fatal"))):  # type: ignore[misc]
        def activations(self, problem: Any) -> str:
            raise SystemExit(3)

    both = registry([Fatal(), backend("other")])
    for module in (lookup, selection):
        monkeypatch.setattr(module, "default_registry", lambda: both)
    store = Store(tmp_path)
    store.prepare()
    store.add(Environment.of(H200), kernel_shape_of(LAYER), [*times("fatal", 10), *times("other", 20)])
    chosen = settings.load({}, assignments={"cache": str(tmp_path), "disable": "fatal"})
    found = lookup.find_measurements(LAYER, H200, chosen)
    assert found is not None and list(found.times) == ["other"]
