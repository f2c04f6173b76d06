"""Measuring on a GPU: a clock that means something, every accepted backend of every scheme, tuning in its time.

    python -m pytest -m gpu tests/gpu/test_measuring_gpu.py

Not in a process in which vLLM served: the plugin is registered there, so that stock is not stock's, and vLLM's
workspaces are locked.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from vllm_moe_oracle import plugin, settings
from vllm_moe_oracle.core.measurement_set import MeasurementSet
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measurements import lookup, model_shapes
from vllm_moe_oracle.measurements.roofline import roofline_us
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.measuring import benchmarks, engine, timing, tuning
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide


@pytest.fixture(scope="module", autouse=True)
def unused_process() -> None:
    """Says why nothing can be measured here, instead of failing one by one."""
    from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

    if plugin.state().active or (is_workspace_manager_initialized() and current_workspace_manager().is_locked()):
        pytest.fail("vLLM served in this process: run pytest for this file alone, see the file's first lines")


CELLS = ("mxfp4:gpt-oss-20b", "mxfp8:qwen3-30b-a3b", "int4_g128:qwen3-30b-a3b", "int8_g128:qwen3-30b-a3b")


def test_the_cache_is_cold_and_launches_are_not_on_the_clock() -> None:
    clock = timing.CudaClock()
    few = torch.empty(8 << 20, dtype=torch.float32, device="cuda")  # 32 MiB: it would fit into the cache
    result = torch.empty_like(few)

    def copy() -> object:
        return torch.add(few, 1.0, out=result)

    def nothing() -> object:
        return result[:1].zero_()

    runs = {name: [clock.prepare(run)[0]] for name, run in (("copy", copy), ("nothing", nothing))}
    found = timing.time_interleaved(clock, runs, 30, 10.0)
    # 64 MiB at no more than the memory's rate; from the cache it would take half of that.
    assert found["copy"].us > 2 * few.nbytes / 4.8e12 * 1e6
    assert found["nothing"].us < 12
    assert (found["copy"].high - found["copy"].low) / found["copy"].us < 0.1


@pytest.mark.parametrize("cell", CELLS)
def test_every_accepted_backend_is_measured_above_the_roofline(cell: str) -> None:
    here, chosen, layer = detect.detect(), settings.load({}), model_shapes.parse(cell)
    (record, more) = benchmarks.bench([layer], here, chosen, benchmarks.BenchOptions((1, 64), replays=7))
    for each in (record, more):
        assert set(tuning.accepted_backends(layer, here, chosen)) <= set(each.us), each.failures
        assert "stock:auto" in each.us, each.failures
        bound = roofline_us(layer, each.tokens, here.name)
        # The expected number of experts is a mean; one draw has a few more or fewer.
        assert bound is None or all(us > 0.8 * bound for us in each.us.values())


def test_the_same_layer_twice_takes_the_same_time() -> None:
    here, layer = detect.detect(), model_shapes.parse("mxfp8:qwen3-30b-a3b")
    times = []
    for _ in range(2):
        records = benchmarks.bench(
            [layer], here, settings.load({}), benchmarks.BenchOptions((16,), replays=15, stock=())
        )
        times.append(next(records).us)
    for name, us in times[0].items():
        assert times[1][name] == pytest.approx(us, rel=0.05), name


def test_tuning_gpt_oss_20b_takes_less_than_three_minutes_and_decides(tmp_path: Path) -> None:
    here, layer = detect.detect(), model_shapes.parse("mxfp4:gpt-oss-20b")
    store = Store(tmp_path)
    store.prepare()
    chosen = settings.load({}, assignments={"cache": str(tmp_path)})
    begin = time.monotonic()
    (outcome,) = tuning.tune([layer], here, chosen, store, tuning.TuneOptions()).values()
    assert time.monotonic() - begin < 180
    assert outcome.unfinished == ""
    begin = time.perf_counter()
    found = lookup.find_measurements(layer, here, chosen)
    assert time.perf_counter() - begin < 0.1
    decision = decide(layer, here, chosen, measurements=found)
    assert decision.why == "measured" and decision.comparison is not None
    again = tuning.tune([layer], here, chosen, store, tuning.TuneOptions())
    assert [each.measured for each in again.values()] == [0]


def test_skewed_routing_is_no_slower_where_weights_are_the_time() -> None:
    """Fewer experts are read: at 64 tokens of 128 experts almost all are read under uniform routing."""
    here, layer = detect.detect(), model_shapes.parse("mxfp8:qwen3-30b-a3b")
    with engine.open_context(here, 64) as ready:
        bench = ready.bench(layer, [default_registry()["marlin_mxfp8"]])
        uniform, skewed = (bench.measure(64, routing, 9)[0] for routing in ("uniform", "skewed"))
        bench.close()
    assert skewed.us < uniform.us


@pytest.mark.parametrize("cell", ["int4_g128:qwen3-30b-a3b@tp2", "mxfp8:glm-4.5@tp8"])
def test_serving_runs_the_measured_tile_configuration(cell: str) -> None:
    """Of shapes that the kernels' own table does not have."""
    here, layer = detect.detect(), model_shapes.parse(cell)
    backend = next(
        each for each in default_registry() if each.name.startswith("hopper") and layer.scheme.name in each.schemes
    )
    with engine.open_context(here, 64) as ready:
        bench = ready.bench(layer, [backend])
        for count in (1, 16):
            (own,) = bench.measure(count, "uniform", 9)
            (best,) = bench.measure(count, "uniform", 9, tiles=3)
            assert best.failure == "" and best.us <= 1.05 * own.us and best.error > 0
            (again,) = bench.measure(count, "skewed", 9, fixed_tiles={backend.name: best.tile})
            assert again.tile == best.tile and again.us > 0
            if best.tile:
                tiles = ((64, best.tile),)
                given = MeasurementSet(
                    {backend.name: {"uniform": {count: best.us}}}, "a test", tiles={backend.name: tiles}
                )
                chosen = settings.load({}, assignments={"backend": backend.name})
                decision = decide(layer, here, chosen, measurements=given)
                assert decision.plan.tiles == tiles
        bench.close()
