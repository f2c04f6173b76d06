"""What a server's log and report say: which layers are ours, which not, and what is not as it was asked for."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.lib.cases import H200, backend, problem, refusing, registry
from vllm_moe_oracle import plugin
from vllm_moe_oracle.core.decision import Decision, Reason
from vllm_moe_oracle.core.measurement_set import MeasurementSet
from vllm_moe_oracle.core.problem import Parallel
from vllm_moe_oracle.decision_records import ServerRecord
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.methods import backend_selection, first_start, load_caches, load_summary
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings, load

REGISTRY = registry([backend("fast"), refusing("wanted", "rule.one")])


class Release:
    """vLLM's side: the layers of the model that is being loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.stages, self.layers = 1, 0

    def is_pipeline_stage(self) -> bool:
        """Whether other processes hold other layers."""
        return self.stages > 1

    def num_layers(self) -> int:
        """On all stages."""
        return self.layers

    def moe_layer_names(self) -> list[str]:
        """All, ours or not, as far as the model has been built."""
        return list(self.names)

    def version(self) -> str:
        """Any."""
        return "0.0"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Release]:
    made = Release()
    monkeypatch.setattr(load_summary, "_model", load_summary._ModelLoad())
    monkeypatch.setattr(load_summary, "current_adapter", lambda: made)
    logger = logging.getLogger("vllm.moe_oracle")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger.name):
        logger.addHandler(caplog.handler)
        yield made
        logger.removeHandler(caplog.handler)


def layer(name: str, settings: Settings) -> Decision:
    return decide(problem(layer=name), H200, settings, registry=REGISTRY)


def build(release: Release, names: list[str], settings: Settings, stock: list[str] | None = None) -> list[Decision]:
    """A model's construction: each layer is decided, then listed by vLLM."""
    release.names = []
    found = []
    for name in [*names, *(stock or [])]:
        if name in names:
            load_summary.start_layer(name)
            found.append(layer(name, settings))
            load_summary.record_decision(found[-1], settings)
        release.names.append(name)
    return found


def load_model(release: Release, names: list[str], settings: Settings, stock: list[str] | None = None) -> None:
    for decision in build(release, names, settings, stock):
        load_summary.record_conversion(decision)


def words(caplog: pytest.LogCaptureFixture, level: int | None = None) -> list[str]:
    """Messages, each once."""
    return list(dict.fromkeys(each.getMessage() for each in caplog.records if level in (None, each.levelno)))


def names(count: int, model: str = "model") -> list[str]:
    return [f"{model}.layers.{index}.mlp.experts" for index in range(count)]


def test_all_layers_are_ours(release: Release, caplog: pytest.LogCaptureFixture) -> None:
    load_model(release, names(3), load({}))
    said = "moe_oracle: 3 of 3 MoE layers run through the oracle: fast x 3 (model.layers.0-2.mlp.experts)"
    assert words(caplog)[-1] == said
    assert words(caplog, logging.WARNING) == []


def test_the_last_line_names_the_layers_of_each_backend(release: Release, caplog: pytest.LogCaptureFixture) -> None:
    """Every other line names the first layer of its group alone."""
    decisions = build(release, names(6), load({}), stock=[f"model.layers.{index}.mlp.experts" for index in (7, 8)])
    for index, decision in enumerate(decisions):
        load_summary.record_conversion(dataclasses.replace(decision, backend="next") if index == 4 else decision)
    said = "fast x 5 (model.layers.0-3,5.mlp.experts), next x 1 (model.layers.4.mlp.experts)"
    assert f"moe_oracle: 6 of 8 MoE layers run through the oracle: {said}" in words(caplog)
    (warning,) = words(caplog, logging.WARNING)
    assert warning.endswith(": model.layers.7-8.mlp.experts")


def test_a_fallback_is_a_warning_also_in_a_group_that_was_announced(
    release: Release, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = load({}, {"moe_oracle": {"overrides": r"re:layers\.1\.=wanted", "on_unavailable": "fallback"}})
    load_model(release, names(3), chosen)
    (warning,) = words(caplog, logging.WARNING)
    assert warning.startswith("moe_oracle: model.layers.1.mlp.experts: fast (static: ")
    assert "not what was asked for: wanted (re:" in warning


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (
            r"re:nothing_matches_this=fast;re:layers\.0\.=fast",
            "override re:nothing_matches_this matches no layer: the model has 2 quantized MoE layers",
        ),
        (
            r"re:layers=fast;re:layers\.0\.=wanted",
            r"override re:layers\.0\.=wanted decides no layer: all that it matches are decided by re:layers=",
        ),
    ],
    ids=["matches nothing", "behind another"],
)
def test_an_override_without_effect_is_a_warning_or_an_error(
    overrides: str, rule: str, release: Release, caplog: pytest.LogCaptureFixture
) -> None:
    section = {"moe_oracle": {"overrides": overrides}}
    load_model(release, names(2), load({}, section))
    (warning,) = words(caplog, logging.WARNING)
    assert rule in warning
    with pytest.raises(SettingError, match=re.escape(rule)) as caught:
        load_model(release, names(2), load({"MOE_ORACLE_STRICT": "1"}, section))
    assert caught.value.where == "--additional-config moe_oracle.overrides"


def test_overrides_are_checked_once_before_weights_load(release: Release, caplog: pytest.LogCaptureFixture) -> None:
    """As soon as vLLM has built the model; loading takes minutes."""
    original = lambda **options: build(release, names(2), options["settings"])  # noqa: E731
    wrong = {"MOE_ORACLE_OVERRIDES": "re:nothing_matches_this=fast"}
    with pytest.raises(SettingError, match="matches no layer: the model has 2 quantized MoE layers"):
        plugin._build_model(original, settings=load(wrong | {"MOE_ORACLE_STRICT": "1"}))
    decisions = plugin._build_model(original, settings=load(wrong))
    said = [each for each in words(caplog, logging.WARNING) if "matches no layer" in each]
    assert len(said) == 1
    caplog.clear()
    for decision in decisions:
        load_summary.record_conversion(decision)
    plugin._build_model(lambda: None)  # a model without layers of ours, such as a draft
    assert words(caplog, logging.WARNING) == []


def test_an_override_for_layers_of_another_pipeline_stage_is_right(
    release: Release, caplog: pytest.LogCaptureFixture
) -> None:
    release.stages, release.layers = 2, 4
    here = [f"model.layers.{number}.mlp.experts" for number in (2, 3)]
    strict = {"MOE_ORACLE_STRICT": "1"}
    load_model(release, here, load(strict | {"MOE_ORACLE_OVERRIDES": r"re:layers\.[01]\.=fast"}))
    assert words(caplog, logging.WARNING) == []
    for wrong in (r"re:layers\.4\.=fast", r"re:nothing=fast"):
        with pytest.raises(SettingError, match="matches no layer"):
            load_model(release, here, load(strict | {"MOE_ORACLE_OVERRIDES": wrong}))


@pytest.mark.parametrize("second", ["model", "other"])
def test_a_model_that_failed_leaves_nothing_behind(
    second: str, release: Release, caplog: pytest.LogCaptureFixture
) -> None:
    build(release, names(2), load({}))
    caplog.clear()
    load_model(release, names(3, second), load({}))
    assert f"moe_oracle: 3 of 3 MoE layers run through the oracle: fast x 3 ({second}.layers.0-2.mlp.experts)" in words(
        caplog
    )
    assert any(each.startswith(f"moe_oracle: {second}.layers.0.mlp.experts: fast (") for each in words(caplog))


def test_a_second_model_of_other_names_is_counted_by_itself(
    release: Release, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    report, started = tmp_path / "report.jsonl", time.time()
    chosen = load({}, {"moe_oracle": {"report": str(report)}})
    load_model(release, names(2), chosen)
    load_model(release, names(1, "draft"), chosen)
    assert "moe_oracle: 1 of 1 MoE layers run through the oracle: fast x 1 (draft.layers.0.mlp.experts)" in words(
        caplog
    )
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [[group["layers"] for group in line["groups"]] for line in lines] == [[names(2)], [names(1, "draft")]]
    times = [line[field] for line in lines for field in ("load_began", "load_ended")]
    assert started <= times[0] and times == sorted(times) and times[-1] <= time.time()


def test_a_load_ends_after_it_began_though_the_clock_is_set_back(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 2e9)
    load_model(release, names(2), load({}))
    monkeypatch.setattr(time, "time", lambda: 2e9 - 3600)
    found: dict[str, Any] = load_summary.model_report(2)
    assert found["load_began"] == 2e9 <= found["load_ended"] < 2e9 + 600
    assert msgspec.convert(found, ServerRecord).load_ended == found["load_ended"]


def test_a_record_says_which_rank_of_how_many_it_is_of(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    load_model(release, names(1), load({}))
    found: dict[str, Any] = load_summary.model_report(1)
    assert (found["rank"], found["ranks"]) == (0, 1) and found["host"]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    found = load_summary.model_report(1)
    assert (found["rank"], found["ranks"]) == (3, 4)


def test_what_a_check_found_holds_for_one_load_only(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_caches, "_caches", [*load_caches._caches])
    found: dict[Any, Any] = load_caches.per_load({})
    one, two = build(release, names(2), load({}))
    found["group"] = "failed"
    load_summary.record_conversion(one)
    assert found
    load_summary.record_conversion(two)
    assert not found  # the load is over
    for _ in range(2):
        found["group"] = "failed"
        load_summary.record_conversion(one)
        assert found
        load_summary.record_conversion(two)
        assert not found  # a reload, and one more
    # A reload of the target alone, beside a draft: another one begins where a layer comes again.
    draft = build(release, [*names(2), "mtp.mlp.experts"], load({}))
    for decision in draft:
        load_summary.record_conversion(decision)
    for number in range(3):
        found["group"] = "of the reload before"
        for decision in (one, two):
            load_summary.begin_conversion(decision.problem.layer)
            assert bool(found) == (number == 0)
            load_summary.record_conversion(decision)
    build(release, names(2, "other"), load({}))
    found["group"] = "failed"
    build(release, names(2, "another"), load({}))
    assert not found  # the model before it failed


def test_the_line_of_a_decision_names_the_evidence_first(release: Release, caplog: pytest.LogCaptureFixture) -> None:
    build(release, ["model.layers.0.mlp.experts"], load({"MOE_ORACLE_BACKEND": "fast"}))
    build(release, ["other.layers.0.mlp.experts"], load({"MOE_ORACLE_OVERRIDES": "re:other=fast"}))
    build(release, ["third.layers.0.mlp.experts"], load({}))
    kinds = [each.split(": fast (")[1].partition(":")[0] for each in words(caplog) if ": fast (" in each]
    assert kinds == ["user", "override", "static"]


@pytest.mark.parametrize(
    ("parallel", "model", "options"),
    [
        (Parallel(), ("org/model", 1), "org/model"),
        (Parallel(tp=4), ("/srv/a model", 4), "'/srv/a model' --tp 4"),
        (Parallel(tp=8, dp=4), ("m/m", 2), "m/m --tp 2 --dp 4"),
        (Parallel(ep=8, dp=4), ("m/m", 2), "m/m --tp 2 --dp 4 --ep"),
        (Parallel(tp=3), ("m/m", 2), "m/m --tp 3"),
        (Parallel(), ("m/m\x1b[2J\nERROR: none of ours", 1), None),
    ],
)
def test_a_static_choice_ends_with_the_command_that_measures_it(
    release: Release,
    caplog: pytest.LogCaptureFixture,
    parallel: Parallel,
    model: tuple[str, int],
    options: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a server's log, for the model that it serves."""
    both = registry([backend("fast"), backend("other")])
    monkeypatch.setattr(release, "served_model", lambda: model, raising=False)
    settings = load({"MOE_ORACLE_RAGGED_SHARDS": "1", "MOE_ORACLE_OBJECTIVE": "decode"})
    layer = problem(layer="model.layers.0.mlp.experts")
    decided = decide(layer, H200, settings, registry=both, measurements=MeasurementSet())
    layer = dataclasses.replace(layer, parallel=parallel, batch_invariant=True)
    load_summary.record_decision(dataclasses.replace(decided, problem=layer), settings)
    (line,) = (each for each in words(caplog) if ": fast (" in each)
    if options is None:
        assert "\x1b" not in line and "\n" not in line
        return
    assert line.endswith(f"; to measure: vllm-moe-oracle tune {options} --batch-invariant --set ragged_shards=1")
    half = dataclasses.replace(layer, dtype="float16")
    load_summary.record_decision(dataclasses.replace(decided, problem=half), settings)
    (*_, line) = (each for each in words(caplog) if ": fast (" in each)
    assert f"tune {options} --dtype float16 --batch-invariant" in line


def test_no_command_without_a_model_and_where_measuring_changes_nothing(
    release: Release, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "served_model", lambda: None, raising=False)
    layer, settings = problem(layer="model.layers.0.mlp.experts"), load({})
    both, one = registry([backend("fast"), backend("other")]), registry([backend("fast")])
    failed = MeasurementSet(failures={"other": "no room"})
    unmeasured = decide(layer, H200, settings, registry=both, measurements=MeasurementSet())
    assert unmeasured.tunable and unmeasured.explanation.endswith("no measurements of this layer are valid here")
    for decided in (
        unmeasured,
        decide(layer, H200, settings, registry=one, measurements=MeasurementSet()),
        decide(layer, H200, settings, registry=both, measurements=failed),
        decide(layer, H200, settings, registry=both),
    ):
        load_summary.record_decision(decided, settings)
        assert decided is unmeasured or not decided.tunable
    assert not [each for each in words(caplog) if "to measure" in each]


@pytest.mark.parametrize(("saved", "tunable"), [(0.01, False), (0.08, True), (0.5, False)])
def test_what_is_predicted_too_uncertainly_to_be_chosen_can_be_measured(saved: float, tunable: bool) -> None:
    """Equal ones need no measurement, and neither do those that are faster for sure; in between nobody knows."""
    both = registry([backend("fast"), backend("other")])
    counts = (1, 4, 16, 64, 256, 1024, 4096)
    means = {"fast": 9.0, "other": 9 - 9 * saved}
    times = {name: {"uniform": dict.fromkeys(counts, us)} for name, us in means.items()}
    predicted = MeasurementSet(times, "a model", errors={"fast": 0.1, "other": 0.1})
    decided = decide(problem(), H200, load({}), registry=both, measurements=predicted)
    assert (decided.why, decided.backend) == ("predicted", "other" if saved > 0.3 else "fast")
    assert decided.tunable is tunable
    candidates, reason = first_start._candidates(problem(), load({}), lambda: decided, False)
    assert (candidates, reason) == (("fast", "other") if tunable else (), "")


def test_what_was_measured_at_too_few_numbers_of_tokens_can_be_measured() -> None:
    """It cannot be compared, so nobody knows whether the fastest of the others is the fastest."""
    found = registry([backend("fast"), backend("other"), backend("third")])
    counts = (1, 4, 16, 64, 256, 1024, 4096)
    whole, part = {"uniform": dict.fromkeys(counts, 9.0)}, {"uniform": {1: 5.0, 4096: 5.0}}
    measured = MeasurementSet({"fast": whole, "other": part, "third": whole}, "a test")
    decided = decide(problem(), H200, load({}), registry=found, measurements=measured)
    assert (decided.backend, decided.why, decided.tunable) == ("fast", "measured", True)
    measured = MeasurementSet({"fast": whole, "third": whole}, "a test", failures={"other": "no room"})
    assert not decide(problem(), H200, load({}), registry=found, measurements=measured).tunable


def test_a_backend_that_took_anothers_place_is_the_static_orders() -> None:
    """Whatever had decided for the other one: its times say nothing about this one."""
    found = registry([backend("fast"), backend("other"), backend("third")])
    times = {"uniform": {count: 9.0 for count in (1, 4, 16, 64, 256, 1024, 4096)}}
    slower = {"uniform": {count: 2 * us for count, us in times["uniform"].items()}}
    measured = MeasurementSet({"fast": slower, "other": times, "third": slower}, "a test")
    decided = decide(problem(), H200, load({}), registry=found, measurements=measured)
    assert (decided.backend, decided.why) == ("other", "measured")
    method = SimpleNamespace(decision=decided, backend=found["other"], registry=found)
    backend_selection.switch_backend(method, Reason("self_check", "fails"), "other fails", "fast")
    assert method.decision.grounds == "static: other fails" and method.decision.comparison is None
    assert method.decision.summary().startswith("fast (static: other fails)")
