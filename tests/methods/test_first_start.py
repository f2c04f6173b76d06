"""When a server's start measures and when it does not, and how ranks wait for it; what measures is pretended."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib import gloo_ranks
from tests.lib.cases import H200, MXFP8_W8A8, backend, problem, registry
from tests.lib.method_layers import undecided
from vllm_moe_oracle import plugin, settings
from vllm_moe_oracle.backends import Capabilities
from vllm_moe_oracle.core.decision import Decision
from vllm_moe_oracle.core.measurement_set import MeasurementSet
from vllm_moe_oracle.core.problem import Parallel, Problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import lookup
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.methods import backend_selection, first_start, load_caches, measure_hook, rank_sync
from vllm_moe_oracle.oracle.selection import decide

A100 = dataclasses.replace(H200, name="NVIDIA A100", capability=80, sm_count=108)
"""Nothing is predicted for it."""
ANYWHERE = Capabilities(devices=("cuda",), batch_invariant=True)
REGISTRY = registry(
    [
        backend("static", rank=1.0, capabilities=ANYWHERE),
        backend("faster", rank=2.0, capabilities=ANYWHERE),
        backend("quantizing", rank=0.5, consumes="mxfp8"),
    ]
)
COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
LAYER = problem()


class Clock:
    """Stands for the module `time`: only sleep makes it go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Measuring:
    """Pretends to measure, and stores that `faster` takes half of the time."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0, counts: tuple[int, ...] = COUNTS) -> None:
        self.error, self.seconds, self.counts = error, seconds, counts
        self.calls: list[tuple[str, tuple[str, ...], float]] = []

    def __call__(
        self, layer: Problem, names: tuple[str, ...], chosen: settings.Settings, seconds: float, progress: Any
    ) -> measure_hook.Measured:
        self.calls.append((layer.layer, names, seconds))
        progress(f"{layer.layer}: 16 tokens, uniform", 2, 7)
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        folder = settings.cache_dir(chosen)
        store = Store(folder)
        store.prepare()
        times = {"static": 100.0, "faster": 50.0}
        samples = [
            Sample(name, "16bit", count, "uniform", times[name], times[name], times[name], 9, 1e-3)
            for name in names
            for count in self.counts
        ]
        store.add(Environment.of(A100), kernel_shape_of(layer), samples)
        unfinished = "" if self.counts == COUNTS else "its 60 s were spent"
        return measure_hook.Measured(len(samples), unfinished, cache=str(store.path))


@pytest.fixture(autouse=True)
def _start_of_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(detect, "detect", lambda: A100)
    monkeypatch.setattr(lookup, "default_registry", lambda: REGISTRY)
    caplog.set_level(logging.INFO, "vllm.moe_oracle")
    new_start()
    of_the_plugin = measure_hook.current_measure()
    yield
    measure_hook.set_measure(of_the_plugin)
    new_start()


def new_start() -> None:
    first_start.forget_start()
    load_caches.end_load()


def asked(folder: Path, **assignments: str) -> settings.Settings:
    return settings.load({}, assignments={"cache": str(folder), "measure_at_start": "60", **assignments})


def decided(chosen: settings.Settings, layer: Problem = LAYER, moe_backend: str = "auto") -> Decision:
    def decide_here() -> Decision:
        measurements = backend_selection.measurements_for(layer, chosen)
        return decide(layer, A100, chosen, moe_backend, REGISTRY, measurements)

    first_start.measure_if_undecided(rank_sync.RankGroup(), layer, chosen, decide_here)
    return decide_here()


def alike(index: int) -> Problem:
    """A layer of its own name; the second has another routing, which changes no kernel's time."""
    routing = dataclasses.replace(LAYER.routing, scoring="sigmoid" if index == 1 else "softmax")
    return dataclasses.replace(LAYER, layer=f"layers.{index}", routing=routing)


def test_what_computes_the_same_is_measured_once_and_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measuring = Measuring()
    measure_hook.set_measure(measuring)
    chosen = asked(tmp_path)
    for index in range(3):
        found = decided(chosen, alike(index))
        assert (found.backend, found.why) == ("faster", "measured")
    ((name, names, seconds),) = measuring.calls
    assert (name, names) == ("layers.0", ("static", "faster")) and 59 < seconds <= 60
    assert any("measuring, 2 of 7, 0 of 60 s: layers.0: 16 tokens, uniform" in each for each in caplog.messages)
    new_start()
    assert decided(chosen).why == "measured" and len(measuring.calls) == 1


def test_on_by_default_and_off_by_its_setting(tmp_path: Path) -> None:
    measuring = Measuring()
    measure_hook.set_measure(measuring)
    assert settings.load({}).measure_at_start == 60
    assert decided(asked(tmp_path, measure_at_start="0")).why == "static" and not measuring.calls
    assert decided(settings.load({}, assignments={"cache": str(tmp_path)})).why == "measured" and measuring.calls


def test_what_may_only_compile_slowly_gets_more_time_at_the_next_start(tmp_path: Path) -> None:
    measuring = Measuring()
    measure_hook.set_measure(measuring)
    chosen, store = asked(tmp_path), Store(tmp_path)

    def keep_silent(seconds: float) -> None:
        silent = Sample("static", "16bit", 1, "uniform", failure="in whatever words", silent_seconds=seconds)
        failed = [msgspec.structs.replace(silent, tokens=count) for count in COUNTS]
        store.prepare()
        store.add(Environment.of(A100), kernel_shape_of(LAYER), failed)
        new_start()

    measuring(LAYER, ("static", "faster"), chosen, 60.0, lambda *said: None)
    keep_silent(20)
    assert decided(chosen).why == "measured" and len(measuring.calls) == 2
    keep_silent(40)
    found = decided(chosen)
    assert (found.backend, found.why) == ("faster", "measured") and len(measuring.calls) == 2


@pytest.mark.parametrize(
    ("setting", "waited", "backend"),
    [("0", 20, "static"), ("30", 20, "faster"), ("60", 30, "static"), ("120", 60, "static")],
)
def test_a_static_choice_that_may_only_compile_slowly_is_not_passed_over(
    tmp_path: Path, setting: str, waited: float, backend: str
) -> None:
    """Until it had the time of the second attempt, or of the default's where starts measure nothing."""
    measuring, chosen, store = Measuring(), asked(tmp_path, measure_at_start=setting), Store(tmp_path)
    measuring(LAYER, ("static", "faster"), chosen, 60.0, lambda *said: None)
    silent = Sample("static", "16bit", 1, "uniform", failure="in whatever words", silent_seconds=waited)
    store.add(Environment.of(A100), kernel_shape_of(LAYER), [silent])
    assert decided(chosen).backend == backend


def test_silence_is_no_excuse_for_another_failure(tmp_path: Path) -> None:
    """Of the same backend: at another number of tokens, or in a source that counts before."""
    measuring, chosen, store = Measuring(), asked(tmp_path, measure_at_start="0"), Store(tmp_path)
    measuring(LAYER, ("static", "faster"), chosen, 60.0, lambda *said: None)
    silent = Sample("static", "16bit", 1, "uniform", failure="in whatever words", silent_seconds=20)
    store.add(Environment.of(A100), kernel_shape_of(LAYER), [silent])
    assert decided(chosen).backend == "static"
    crashed = msgspec.structs.replace(silent, tokens=4, failure="it ended", silent_seconds=0)
    store.add(Environment.of(A100), kernel_shape_of(LAYER), [crashed])
    new_start()
    assert decided(chosen).backend == "faster"
    here = Environment.of(A100)
    valid = lookup._ValidSamples(here, [], ())
    slow = MeasurementSet(failures={"static": "silent"}, slow={"static"})
    ended = MeasurementSet(failures={"static": "it ended"})
    for first, second in ((slow, ended), (ended, slow)):
        assert not lookup._usable_here(second, valid, here, first, []).slow
    assert lookup._usable_here(MeasurementSet(), valid, here, slow, []).slow == {"static"}


def test_what_is_slow_and_what_failed_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def measure(layer: Problem, names: tuple[str, ...], chosen: Any, seconds: float, progress: Any) -> Any:
        progress("starting 1 process", 0, 7)
        return measure_hook.Measured(0, "", {"faster": "it ended"}, {"static": "it did not come back within 20 s"})

    measure_hook.set_measure(measure)
    decided(asked(tmp_path))
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any("faster could not be measured and is left out: it ended" in each for each in said)
    assert any(
        "static could not be measured: it did not come back within 20 s. It may only compile" in each for each in said
    )


REASONS: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "switched off": ({}, {"use_measurements": "0"}, "measurements are switched off by assignments.use_measurements"),
    "chosen": ({}, {"backend": "static"}, "its backend is chosen by assignments.backend"),
    "overridden": ({}, {"overrides": "re:layers=faster"}, "is chosen by re:layers from assignments.overrides"),
    "batch invariant": ({"batch_invariant": True}, {}, "batch-invariant layers keep the static choice"),
    "alone": ({}, {"disable": "faster"}, "static is the only backend that computes these numbers"),
}


@pytest.mark.parametrize("name", REASONS)
def test_where_it_cannot_be_right_it_says_why_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    changes, assignments, words = REASONS[name]
    measuring = Measuring()
    measure_hook.set_measure(measuring)
    for index in range(2):
        decided(asked(tmp_path, **assignments), problem(layer=f"layers.{index}", tp=index + 1, **changes))
    assert not measuring.calls
    (said,) = (each for each in caplog.messages if words in each)
    assert said.startswith("moe_oracle: MOE_ORACLE_MEASURE_AT_START measures nothing of layers.0: ")


def test_vllms_own_option_is_a_choice_too(tmp_path: Path) -> None:
    measure_hook.set_measure(measuring := Measuring())
    assert decided(asked(tmp_path, on_unavailable="fallback"), moe_backend="triton").degraded
    assert len(measuring.calls) == 1  # what was asked for cannot run: the choice is the oracle's


def test_predicted_and_measured_layers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_hook.set_measure(measuring := Measuring())
    Measuring()(LAYER, ("static", "faster"), asked(tmp_path), 60.0, lambda *said: None)
    assert decided(asked(tmp_path)).why == "measured" and not measuring.calls
    quantized = problem(scheme=MXFP8_W8A8)  # the static choice takes other activations than the other two
    assert decided(asked(tmp_path), quantized).backend == "quantizing" and not measuring.calls


def test_what_is_left_of_the_budget_is_for_the_next_shape(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(first_start, "time", clock)
    monkeypatch.setitem(globals(), "time", clock)
    measure_hook.set_measure(measuring := Measuring(seconds=0.6))
    chosen = asked(tmp_path, measure_at_start="1")
    found = [decided(chosen, problem(layer=f"layers.{size}", intermediate_size=size)) for size in (768, 512, 256, 128)]
    assert [each.why for each in found] == ["measured", "measured", "static", "static"]
    assert [name for name, _, _ in measuring.calls] == ["layers.768", "layers.512"]
    assert measuring.calls[1][2] == pytest.approx(0.4)
    assert sum("the 1 s are spent; the next start continues" in each for each in caplog.messages) == 1


@pytest.mark.parametrize(
    "error", [MeasurementError("the disk is full", "Make room", "/a/file"), RuntimeError("in a worker\nTraceback")]
)
def test_whatever_fails_the_server_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    measure_hook.set_measure(measuring := Measuring(error))
    chosen = asked(tmp_path)
    for index in range(2):
        found = decided(chosen, alike(index))
        assert (found.backend, found.why) == ("static", "static")
    assert len(measuring.calls) == 1
    (said,) = (each for each in caplog.messages if "is not measured" in each)
    assert str(error).splitlines()[0] in said and "\n" not in said


def test_half_of_the_numbers_of_tokens_do_not_decide(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measure_hook.set_measure(Measuring(counts=COUNTS[:3]))
    found = decided(asked(tmp_path))
    assert (found.backend, found.why) == ("static", "static") and "not sufficient" in found.explanation
    said = "its 60 s were spent; the times so far are kept, and the next start continues"
    assert any(said in each for each in caplog.messages)
    new_start()
    measure_hook.set_measure(measuring := Measuring())
    assert decided(asked(tmp_path)).why == "measured" and len(measuring.calls) == 1


def test_the_last_line_says_how_to_keep_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measure_hook.set_measure(Measuring())
    layer = problem(layer="layers.0", tp=4, ep=1)
    found = decided(asked(tmp_path), layer)
    first_start.log_summary({layer.layer: found}, lambda decision: "vllm-moe-oracle tune a/model --tp 4")
    last = caplog.messages[-1]
    assert "layers.0: 14 times in 0 s, faster (measured, in place of static)" in last
    assert "vllm-moe-oracle tune a/model --tp 4 --export FILE" in last and "MOE_ORACLE_MEASURE_AT_START=0" in last
    first_start.log_summary({layer.layer: found}, lambda decision: "")
    assert caplog.messages[-1] == last and caplog.messages.count(last) == 1


def test_the_plugin_installs_what_measures() -> None:
    was = plugin.state().active
    plugin.register()
    try:
        assert (measure_hook.current_measure() is not None) == plugin.state().active
    finally:
        if not was:
            plugin.unregister()
    assert was or measure_hook.current_measure() is None


@pytest.mark.parametrize("value", ["-1", "0.5", "a minute", "1e9", "nan"])
def test_times_that_are_none_are_refused(value: str) -> None:
    with pytest.raises(
        settings.SettingError, match=r"is not a time in seconds.*from 1 to 86400, or 0 to switch it off"
    ):
        settings.load({"MOE_ORACLE_MEASURE_AT_START": value})
    assert settings.load({"MOE_ORACLE_MEASURE_AT_START": "0"}).measure_at_start == 0


def test_ranks_that_would_not_wait_that_long_measure_nothing(tmp_path: Path) -> None:
    for seconds, reason in (("570", ""), ("571", "571 s do not fit into the 600 s that ranks wait; set ")):
        chosen = asked(tmp_path, measure_at_start=seconds)

        def decide_here(chosen: settings.Settings = chosen) -> Decision:
            measurements = backend_selection.measurements_for(LAYER, chosen)
            return decide(LAYER, A100, chosen, registry=REGISTRY, measurements=measurements)

        for several, words in ((True, reason), (False, "")):
            names, found = first_start._candidates(LAYER, chosen, decide_here, several)
            assert found.startswith(words) and bool(found) == bool(words) and bool(names) != bool(words)


# --- Ranks ------------------------------------------------------------------------------------------------------------


def rank_decides(processes: Any, folder: str, dies: bool, timeout: float, fails: bool) -> Any:
    """What a rank takes for two layers of one shape, and how often it measured."""
    rank = int(processes.rank())
    lookup.default_registry = lambda: REGISTRY
    detect.detect = lambda: A100
    chosen = asked(Path(folder), rank_sync_timeout=str(timeout))
    measuring = Measuring(MeasurementError("no") if fails else None, 1.0)

    def measure(*arguments: Any) -> Any:
        if dies:
            gloo_ranks.die()
        return measuring(*arguments)

    measure_hook.set_measure(measure)
    method = undecided(REGISTRY, chosen, rank_sync.RankGroup(processes, timeout))

    begin = time.monotonic()
    for index in range(2):
        layer = dataclasses.replace(alike(index), num_experts=64, local_experts=32, parallel=Parallel(ep=2))

        def decide_here(layer: Problem = layer) -> Decision:
            measurements = backend_selection.measurements_for(layer, chosen)
            return decide(layer, A100, chosen, registry=REGISTRY, measurements=measurements)

        try:
            first_start.measure_if_undecided(method.rank_group, layer, chosen, decide_here)
            backend_selection.select_backend(method, layer.layer, decide_here)
        except Exception as error:
            return {"raised": type(error).__name__, "message": str(error), "seconds": time.monotonic() - begin}
    return [method.backend.name, method.decision.why, len(measuring.calls), rank]


def run_ranks(folder: Path, dies: bool = False, timeout: float = 120.0, fails: bool = False) -> list[Any]:
    (meeting := folder / "meeting").mkdir()
    return gloo_ranks.run(rank_decides, 2, meeting, str(folder / "cache"), dies, timeout, fails)


def test_one_rank_of_a_host_measures_and_both_decide_by_it(tmp_path: Path) -> None:
    assert run_ranks(tmp_path) == [["faster", "measured", 1, 0], ["faster", "measured", 0, 1]]


def test_a_rank_that_dies_while_it_measures_ends_the_others_in_time(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, dies=True)
    assert first is None
    assert second["raised"] == "RankSyncError" and second["seconds"] < 30
    assert "rank 0" in second["message"] and "measuring layers.0" in second["message"]


@pytest.mark.full
def test_no_rank_goes_on_in_place_of_one_that_failed(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, fails=True) == [["static", "static", 1, 0], ["static", "static", 0, 1]]


@pytest.mark.full
def test_a_budget_that_ranks_do_not_wait_for_measures_nothing(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path, timeout=80.0)
    assert first == ["static", "static", 0, 0] and second == ["static", "static", 0, 1]
