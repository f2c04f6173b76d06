"""Measuring on the CPU: layers are built as serving builds them, checked before they are timed, and tuned resumably.

The backends are the emulation with a delay, or with a fault; the clock is the host's. What is tested is everything but
the figures.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.lib.cases import problem, registry
from tests.lib.fake_backends import (
    FAST,
    HERE,
    LAYERS,
    SLOW,
    SMALL,
    TOKEN_COUNTS,
    Slowed,
    chosen,
    plan,
)  # fmt: skip
from vllm_moe_oracle.core.problem import Parallel, Problem
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import bench_records, lookup, profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.measuring import benchmarks, engine, precompile, random_weights, timing, tuning
from vllm_moe_oracle.measuring.broken_context import BrokenContextError
from vllm_moe_oracle.oracle import selection as oracle_module
from vllm_moe_oracle.oracle import watchdog

pytestmark = pytest.mark.usefixtures("own_time")


# --- Layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_is_built_and_right(ready: engine.BenchContext, name: str) -> None:
    bench = ready.bench(LAYERS[name], [Slowed("one", 1.0)])
    for routing in ("uniform", "skewed"):
        (found,) = bench.measure(17, routing, 3)
        assert bench.failures == {} and found.failure == ""
        assert 0 < found.error < 6e-3  # a real comparison: bfloat16 outputs are not the float32 reference's
        assert found.is_valid and found.replays == 3
    bench.close()


class Replaying(timing.HostClock):
    """Writes each output where the first was, as a CUDA graph does, or not at all."""

    overwrites_output = True

    def __init__(self, writes: bool) -> None:
        self.writes = writes

    def prepare(self, run: timing.Run) -> tuple[timing.Run, Any]:
        output = run()

        def replay() -> None:
            if self.writes:
                with torch.inference_mode():
                    output.copy_(run())

        return replay, output


@pytest.mark.parametrize("writes", [True, False])
def test_an_output_that_replays_overwrite_is_checked(
    ready: engine.BenchContext, writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready, "clock", Replaying(writes))
    bench = ready.bench(LAYERS["mxfp8"], [Slowed("one", 1.0)])
    (found,) = bench.measure(17, "uniform", 3)
    assert found.failure == "" if writes else found.failure.startswith("MeasurementError: relative error nan, allowed")
    bench.close()


@pytest.mark.parametrize("fault", ["numbers", "nan", "conversion"])
def test_what_is_wrong_is_not_timed(ready: engine.BenchContext, fault: str) -> None:
    bench = ready.bench(LAYERS["mxfp8"], [Slowed("right", 1.0), Slowed("wrong", 2.0, fault=fault)])
    found = {each.backend: each for each in bench.measure(8, "uniform", 3)}
    assert found["right"].failure == "" and found["right"].us > 0
    assert "wrong" in bench.failures and ("wrong" not in found or found["wrong"].us == 0)
    assert "\n" not in bench.failures["wrong"]
    bench.close()


def test_what_runs_is_known_where_the_process_ends(ready: engine.BenchContext, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[watchdog.Activity]] = []
    monkeypatch.setattr(watchdog._activities, "_observer", lambda running: told.append([*running]))
    bench = ready.bench(LAYERS["mxfp8"], [registry([Slowed("one", 1.0)])["one"]])
    bench.measure(8, "uniform", 3)
    bench.close()
    place, remedy = f"of {LAYERS['mxfp8'].layer}", "MOE_ORACLE_DISABLE=one leaves it out"
    for phase, part in (
        ("building one", "method convert"),
        ("building one", "experts"),
        ("first calls one", "kernel"),
        ("graphs", "kernel"),
    ):
        assert [(f"the phase {phase!r} {place}", remedy), (f"backend one: its {part}", remedy)] in told
    assert [(f"the phase 'timing' {place}", "")] in told and told[-1] == []


@pytest.mark.parametrize("own_class", [False, True])
def test_a_backend_that_exits_is_not_timed(ready: engine.BenchContext, own_class: bool) -> None:
    class Exiting(Slowed):
        def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
            def exits(*args: Any, **kwargs: Any) -> None:
                raise SystemExit(0)

            experts = builder.from_function(exits)
            if own_class:
                experts.apply = exits
            return experts

    backends = registry([Slowed("right", 1.0), Exiting("exiting", 2.0)])
    bench = ready.bench(LAYERS["mxfp8"], [*backends])
    found = {each.backend: each for each in bench.measure(8, "uniform", 3)}
    assert found["right"].us > 0 and "its kernel raised SystemExit: 0" in bench.failures["exiting"]
    bench.close()


def test_a_layer_that_is_timed_has_memory_for_the_most_tokens(ready: engine.BenchContext) -> None:
    """Buffers that a backend plans for the layer's calls, such as the counters of Hopper's kernels."""

    class Planning(Slowed):
        def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
            seen.append(builder.max_tokens)
            return super().build_experts(tensors, problem, plan, builder)

    seen: list[int] = []
    ready.bench(LAYERS["mxfp8"], [Planning("one", 1.0)])
    assert ready.max_num_tokens == 256 and set(seen) == {256}


def test_the_reference_of_a_layer_is_not_the_layer(ready: engine.BenchContext) -> None:
    """The check would see experts mixed up: the reference takes the experts that the tokens chose, not the first."""
    bench = ready.bench(LAYERS["mxfp8"], [Slowed("one", 1.0)])
    tokens = random_weights.random_tokens(LAYERS["mxfp8"], 8, "uniform", "cpu")
    right = bench._reference(tokens, Slowed("one", 1.0))
    other = dataclasses.replace(tokens, ids=(tokens.ids + 1) % 16)
    assert (bench._reference(other, Slowed("one", 1.0)) - right).norm() > 0.5 * right.norm()
    bench.close()


def test_experts_repeat_in_memory_of_their_own() -> None:
    few = torch.arange(6, dtype=torch.int32).view(3, 2)
    many = random_weights.repeat_experts(few, 7)
    assert many.tolist() == [[0, 1], [2, 3], [4, 5]] * 2 + [[0, 1]]
    assert many.is_contiguous()
    codes = few.to(torch.float8_e4m3fn)
    assert random_weights.repeat_experts(codes, 4).dtype == torch.float8_e4m3fn


def test_skewed_tokens_choose_few_experts_often() -> None:
    layer = problem(experts=64, top_k=4, hidden_size=64, intermediate_size=64)
    shares = {}
    for routing in ("uniform", "skewed"):
        ids = random_weights.random_tokens(layer, 2048, routing, "cpu").ids
        assert all(len(set(row)) == 4 for row in ids.tolist())
        counts = torch.bincount(ids.flatten().long(), minlength=64).sort(descending=True).values
        shares[routing] = counts[:6].sum().item() / counts.sum().item()
    assert shares["uniform"] < 0.12 < 0.35 < shares["skewed"]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 48, 300])
@pytest.mark.parametrize(("experts", "top_k", "ep"), [(384, 8, 8), (256, 8, 8), (128, 4, 2), (8, 2, 8), (60, 4, 4)])
def test_a_rank_gets_the_slots_that_are_expected(count: int, experts: int, top_k: int, ep: int) -> None:
    whole = problem(experts=experts, top_k=top_k, hidden_size=64, intermediate_size=64)
    layer = dataclasses.replace(whole, parallel=Parallel(ep=ep), local_experts=experts // ep)
    found = random_weights.random_tokens(layer, count, "uniform", "cpu")
    assert all(len(set(row)) == top_k for row in found.ids.tolist())
    slots = int((found.ids < experts // ep).sum())
    expected = max(1.0, count * top_k / ep)
    # No other rank of the circle is nearer. A free draw is off by a standard deviation: by 1 at one token of the first.
    counts = [int((found.ids == index).sum()) for index in range(experts)]
    others = [sum(counts[(first + each) % experts] for each in range(experts // ep)) for first in range(experts)]
    # A tie in the model's dtype is broken by the expert's index, which the circle turns: a slot more or less each time.
    ranked = found.logits.float().sort(-1, descending=True).values
    ties = int((ranked[:, top_k - 1] == ranked[:, top_k]).sum()) if top_k < experts else 0
    assert abs(slots - expected) <= min(abs(each - expected) for each in others) + 2 * ties
    assert abs(slots - expected) <= max(0.5, 0.02 * expected)  # of these draws
    chosen = torch.topk(found.logits.float(), top_k, dim=-1).indices.sort(-1).values
    assert torch.equal(chosen, found.ids.long().sort(-1).values)  # kernels that route by themselves choose the same


def test_functions_take_turns_in_changing_order() -> None:
    order: list[str] = []
    runs = {name: [lambda name=name: order.append(name)] for name in "abc"}
    found = timing.time_interleaved(timing.HostClock(), runs, 8, 60.0)
    assert {each.replays for each in found.values()} == {8}
    rounds = [tuple(order[index : index + 3]) for index in range(0, len(order), 3)]
    assert len(rounds) == 8 + timing.WARMUP_ROUNDS and all(set(each) == set("abc") for each in rounds)
    assert len(set(rounds)) > 2


def test_copies_take_turns() -> None:
    order: list[int] = []
    timing.time_interleaved(timing.HostClock(), {"a": [lambda n=n: order.append(n) for n in range(3)]}, 4, 60.0)
    assert order == [0, 1, 2, 0, 1, 2]


def test_a_time_limit_ends_the_rounds() -> None:
    found = timing.time_interleaved(timing.HostClock(), {"a": [lambda: time.sleep(0.02)]}, 1000, 0.01)
    assert found["a"].replays == 3


# --- Tuning -----------------------------------------------------------------------------------------------------------


def test_tuning_decides_and_a_restart_decides_the_same(
    backends: Callable[..., None], store: Store, tmp_path: Path
) -> None:
    backends(SLOW, FAST)
    asked = chosen(tmp_path)
    layer = LAYERS["mxfp8"]
    before = oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
    assert (before.backend, before.why) == ("slow", "static")
    outcomes = tuning.tune([layer, dataclasses.replace(layer, layer="another")], HERE, asked, store, plan())
    (outcome,) = outcomes.values()  # layers of one cell are one
    assert outcome.unfinished == "" and outcome.measured == 2 * len(TOKEN_COUNTS)
    decisions = [
        oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
        for _ in range(2)
    ]
    assert decisions[0] == decisions[1]
    assert (decisions[0].backend, decisions[0].why) == ("fast", "measured")
    assert "the cache (NVIDIA Pretended" in decisions[0].explanation
    assert decisions[0].comparison is not None and {tokens for tokens, _ in decisions[0].comparison.fastest} == set(
        TOKEN_COUNTS
    )


@pytest.mark.full
def test_what_was_measured_is_not_measured_again(backends: Callable[..., None], store: Store, tmp_path: Path) -> None:
    backends(SLOW, FAST)
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    first = tuning.tune([layer], HERE, asked, store, plan())
    second = tuning.tune([layer], HERE, asked, store, plan())
    assert [each.measured for each in second.values()] == [0]
    assert {*second[kernel_shape_of(layer)].samples} == {*first[kernel_shape_of(layer)].samples}
    more = tuning.tune([layer], HERE, asked, store, plan(token_counts=(*TOKEN_COUNTS, 192)))
    assert more[kernel_shape_of(layer)].measured == 2
    again = tuning.tune([layer], HERE, asked, store, plan(remeasure=True))
    assert again[kernel_shape_of(layer)].measured == 2 * len(TOKEN_COUNTS)


def test_a_profile_is_read_and_not_written(backends: Callable[..., None], store: Store, tmp_path: Path) -> None:
    backends(SLOW, FAST)
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    outcomes = tuning.tune([layer], HERE, asked, store, plan())
    path = tmp_path / "profile.json"
    made = profile.make(
        Environment.of(HERE), {kernel_shape_of(layer): outcomes[kernel_shape_of(layer)].samples}, {"command": "x"}
    )
    profile.write(made, path)
    before = path.read_bytes()
    read = profile.read(path)
    assert len(read.samples(kernel_shape_of(layer))) == 2 * len(TOKEN_COUNTS)
    empty = Store(tmp_path / "other")
    empty.prepare()
    found = tuning.tune([layer], HERE, asked, empty, plan(), [read])
    assert found[kernel_shape_of(layer)].measured == 0 and empty.samples(kernel_shape_of(layer)) == []
    assert path.read_bytes() == before
    elsewhere = chosen(tmp_path / "nowhere", profile=str(path))
    decision = oracle_module.decide(
        layer, HERE, elsewhere, measurements=lookup.find_measurements(layer, HERE, elsewhere)
    )
    assert decision.backend == "fast" and f"the profile {path}" in decision.explanation


def test_a_spent_budget_leaves_the_static_choice_and_says_so(
    backends: Callable[..., None], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slowed, "sleep", staticmethod(time.sleep))
    backends(Slowed("slow", 1.0, lambda tokens: 0.05), FAST)
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    begin = time.monotonic()
    outcomes = tuning.tune([layer, LAYERS["int4"]], HERE, asked, store, plan(budget=1.0))
    assert time.monotonic() - begin < 20
    assert "spent" in outcomes[kernel_shape_of(layer)].unfinished
    decision = oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
    assert (decision.backend, decision.why) == ("slow", "static")
    assert outcomes[kernel_shape_of(layer)].measured == 0 or "are not sufficient" in decision.explanation


def test_a_backend_that_fails_is_kept_as_failing(backends: Callable[..., None], store: Store, tmp_path: Path) -> None:
    backends(Slowed("broken", 1.0, fault="numbers"), SLOW, Slowed("other", 3.0))
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    outcomes = tuning.tune([layer], HERE, asked, store, plan())
    failures = {each.backend: each.failure for each in outcomes[kernel_shape_of(layer)].samples if each.failure}
    assert set(failures) == {"broken"} and "relative error" in failures["broken"]
    assert tuning.tune([layer], HERE, asked, store, plan())[kernel_shape_of(layer)].measured == 0
    decision = oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
    assert decision.backend == "other" and "broken" in decision.explanation


def test_out_of_memory_is_not_recorded_as_a_failure(
    backends: Callable[..., None], store: Store, tmp_path: Path
) -> None:
    backends(Slowed("large", 1.0, fault="memory"), FAST)
    outcomes = tuning.tune([LAYERS["mxfp8"]], HERE, chosen(tmp_path), store, plan())
    assert {each.backend for outcome in outcomes.values() for each in outcome.samples} == {"fast"}


def test_a_broken_context_ends_the_run_and_the_next_goes_on(
    backends: Callable[..., None], store: Store, tmp_path: Path
) -> None:
    backends(Slowed("crashing", 1.0, fault="crash"), FAST, Slowed("other", 3.0))
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    with pytest.raises(MeasurementError, match=r"crashing: it broke the GPU's context.*MOE_ORACLE_DISABLE=crashing"):
        tuning.tune([layer], HERE, asked, store, plan())
    kept = [each for _, samples in store.samples(kernel_shape_of(layer)) for each in samples]
    assert {each.backend for each in kept if each.failure} == {"crashing"}  # nobody else is blamed
    outcomes = tuning.tune([layer], HERE, asked, store, plan())
    assert outcomes[kernel_shape_of(layer)].unfinished == ""
    timed = {each.backend for each in outcomes[kernel_shape_of(layer)].samples if not each.failure}
    assert timed == {"fast", "other"}
    decision = oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
    assert decision.backend in ("fast", "other") and "crashing: broke the GPU's context" in decision.explanation


@pytest.mark.parametrize(
    ("changes", "used", "words"),
    [
        ({"gpu": "NVIDIA H100"}, False, "are of NVIDIA H100, not of "),
        ({"packages": {"vllm": "0.31.0"}}, True, "fast, slow were measured with vllm 0.31.0, not "),
        ({"packages": {"vllm": f"{HERE.packages['vllm']}.dev3+g1234567"}}, True, "measured with vllm"),
    ],
)
def test_a_cache_of_another_environment_is_ignored_or_used_with_a_remark(
    backends: Callable[..., None], store: Store, tmp_path: Path, changes: dict[str, Any], used: bool, words: str
) -> None:
    backends(SLOW, FAST)
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    here = Environment.of(HERE)
    packages = {**here.packages, **changes.get("packages", {})}
    there = msgspec.structs.replace(here, gpu=changes.get("gpu", here.gpu), packages=packages)
    times = {"slow": 100.0, "fast": 50.0}
    store.add(
        there,
        kernel_shape_of(layer),
        [
            Sample(name, "16bit", count, "uniform", us, us * 0.99, us * 1.01, 9, 1e-3)
            for name, us in times.items()
            for count in TOKEN_COUNTS
        ],
    )
    decision = oracle_module.decide(layer, HERE, asked, measurements=lookup.find_measurements(layer, HERE, asked))
    assert decision.backend == ("fast" if used else "slow")
    assert words in decision.explanation


@pytest.mark.parametrize(
    ("token_counts", "words"),
    [
        ((8192,), "1, 2, 4, 8, 16 missing"),
        ((1, 2, 4, 8, 16, 32, 64, 128, 256, 8192), "nothing between 256 and 8192"),
        ((1, 2, 4, 8, 16, 32), "fewer than 10"),
    ],
)
def test_numbers_of_tokens_that_decide_nothing_are_refused(token_counts: tuple[int, ...], words: str) -> None:
    with pytest.raises(MeasurementError, match=words):
        tuning.check_token_counts(token_counts)
    tuning.check_token_counts(tuning.TOKEN_COUNTS)


def test_a_failed_compilation_is_tried_at_other_numbers_of_tokens(ready: engine.BenchContext) -> None:
    bench = ready.bench(LAYERS["mxfp8"], [Slowed("full", 1.0, fault="memory")], copies=1)
    assert "CUDA out of memory" in bench.compile(4) and bench.names == ["full"] and not bench.failures
    bench.close()
    bench = ready.bench(LAYERS["mxfp8"], [Slowed("crashing", 1.0, fault="crash")], copies=1)
    assert bench.compile(4) == ""
    with pytest.raises(BrokenContextError, match="illegal memory access"):
        bench.compile(8)
    bench.close()


@pytest.mark.slow
def test_compiling_beforehand_runs_in_processes_of_their_own() -> None:
    """With the real registry: what the processes run must be found there. Starting them takes most of a minute."""
    steps: list[tuple[int, int]] = []
    layers = [(LAYERS["mxfp8"], ("emulation",)), (LAYERS["int4"], ("emulation", "no such backend"))]
    with pytest.raises(KeyError, match="'no such backend' is not a backend"):
        precompile.precompile(layers, HERE, (1, 2, 4, 8, 16), 2, lambda words, *counts: steps.append(counts))
    steps.clear()
    precompile.precompile(layers[:1], HERE, (1, 2, 4, 8, 16), 2, lambda words, *counts: steps.append(counts))
    assert steps[-1] == (2, 2)


def test_processes_are_capped_at_the_number_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def run(work: Any, tasks: list[Any], places: list[Any], *rest: Any, **options: Any) -> Iterator[Any]:
        seen.append((len(tasks), len(places)))
        yield from ()

    monkeypatch.setattr(precompile.worker_pool, "run_tasks", run)
    layers = [(LAYERS["mxfp8"], ("emulation",))]
    precompile.precompile(layers, HERE, (1, 2, 4, 8, 16), 10**12, lambda *said: None)
    ((tasks, places),) = seen
    assert places == tasks > 0


def test_a_lack_of_memory_that_breaks_the_context_is_not_stored(store: Store, tmp_path: Path) -> None:
    layer = LAYERS["mxfp8"]
    task = tuning._TuneTask(layer, HERE, chosen(tmp_path), store, plan(), (), None)
    shape = kernel_shape_of(layer)
    for words in ("RuntimeError: CUDA error: out of memory", "RuntimeError: CUDA error: an illegal memory access"):
        task.store_failure("marlin_mxfp8", f"broke the GPU's context: {words}", [("uniform", 8)])
    kept = [each.failure for _, found in store.samples(shape) for each in found]
    assert kept == ["broke the GPU's context: RuntimeError: CUDA error: an illegal memory access"]


# --- Benchmarks -------------------------------------------------------------------------------------------------------


def test_a_benchmark_has_everything_in_its_records(
    backends: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends(SLOW, FAST)

    class Stock:
        """Stands for stock vLLM's layer, which a CPU cannot build."""

        name = "StockExperts"

        def __init__(self, *arguments: Any) -> None:
            pass

        def __call__(self, x: Tensor, *rest: Tensor) -> Tensor:
            time.sleep(1e-3)
            return x

    from vllm_moe_oracle.compat import standalone_layer

    monkeypatch.setattr(standalone_layer, "StockLayer", Stock)
    records = [
        *benchmarks.bench([LAYERS["mxfp8"]], HERE, chosen(tmp_path), benchmarks.BenchOptions((1, 16), replays=3))
    ]
    assert [record.tokens for record in records] == [1, 16]
    for record in records:
        assert set(record.us) == {"slow", "fast", "stock:auto"}
        assert record.stock == {"stock:auto": "StockExperts"}
        assert set(record.errors) == {"slow", "fast"}
        assert record.choice.backend == "slow"
        best = min(record.us[name] for name in ("slow", "fast"))
        assert record.choice.behind_best == pytest.approx(record.us["slow"] / best - 1, abs=1e-3)
        assert record.failures == {}
        json.loads(msgspec.json.encode(record))


def test_a_stock_layer_that_cannot_be_built_is_a_failure(backends: Callable[..., None], tmp_path: Path) -> None:
    backends(FAST)
    layer = dataclasses.replace(problem(**SMALL, ep=4), local_experts=4)
    (record,) = benchmarks.bench([layer], HERE, chosen(tmp_path), benchmarks.BenchOptions((4,), replays=3))
    assert "has all experts" in record.failures["stock:auto"]
    assert set(record.us) == {"fast"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "\n\n",
        "[]",
        "rubbish",
        '{"conditions": {}}',
        '{"conditions": {"environment": {"gpu": "x"}, "routing": 1}}',
    ],
)
def test_invalid_benchmark_files_are_not_imported(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.jsonl").write_text(text)
    with pytest.raises(MeasurementError, match=r"is not a file of bench records: (?!KeyError|.*unpack)"):
        bench_records.read_samples(tmp_path / "b.jsonl")
