"""Ranks with different measurements: one decision, nobody waits for ever, and turns only where all ranks have them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.lib import gloo_ranks
from tests.lib.cases import H200, backend, problem, registry
from tests.lib.method_layers import undecided
from vllm_moe_oracle import settings
from vllm_moe_oracle.measurements import lookup
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.oracle.selection import decide

COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
REGISTRY = registry([backend("static", rank=1.0), backend("faster", rank=2.0)])


def full(caches: list[str]) -> Any:
    """A case of the full tier: each case starts two processes."""
    return pytest.param(caches, marks=pytest.mark.full)


def keep(folder: Path, layer: Any, few: float, many: float, tile: str = "") -> None:
    """A cache in which `static` takes 100 us everywhere and `faster` what is said, with a tile configuration."""
    store = Store(folder)
    store.prepare()
    times = {"static": (100.0, 100.0), "faster": (few, many)}
    samples = [
        Sample(name, "16bit", count, "uniform", us, us, us, 9, 1e-3, tile=tile if name == "faster" else "")
        for name, both in times.items()
        for count in COUNTS
        for us in [both[count > 64]]
    ]
    store.add(Environment.of(H200), kernel_shape_of(layer), samples)


def decided(processes: Any, folder: str, caches: list[str], shapes: list[int], allow_second_layout: bool) -> Any:
    """What a rank takes for two layers of one kind, with its own cache and its own number of local experts."""
    from vllm_moe_oracle.devices import detect
    from vllm_moe_oracle.methods import backend_selection, rank_sync

    rank = int(processes.rank())
    lookup.default_registry = lambda: REGISTRY
    detect.detect = lambda: H200
    assignments = {"cache": str(Path(folder) / caches[rank]), "allow_second_layout": str(int(allow_second_layout))}
    chosen = settings.load({}, assignments=assignments)
    base = dataclasses.replace(problem(experts=64, ep=2), local_experts=shapes[rank])
    taken = []
    for index in range(2):
        layer = dataclasses.replace(base, layer=f"layers.{index}", num_experts=64 + index)
        method = undecided(REGISTRY, chosen, rank_sync.RankGroup(processes, 20.0))

        def decide_here(layer: Any = layer) -> Any:
            return decide(
                layer, H200, chosen, registry=REGISTRY, measurements=backend_selection.measurements_for(layer, chosen)
            )

        backend_selection.select_backend(method, layer.layer, decide_here)
        steps = [[step.backend, step.max_tokens] for step in method.decision.token_ranges]
        taken.append([method.backend.name, method.decision.backend, steps, len(method.decision.plan.tiles)])
    return taken


def run(folder: Path, caches: list[str], shapes: list[int], allow_second_layout: bool = False) -> list[Any]:
    meeting = folder / "meeting"
    meeting.mkdir()
    return gloo_ranks.run(decided, len(caches), meeting, str(folder), caches, shapes, allow_second_layout)


def layers(local: int) -> list[Any]:
    base = dataclasses.replace(problem(experts=64, ep=2), local_experts=local)
    return [dataclasses.replace(base, num_experts=64 + index) for index in range(2)]


@pytest.mark.parametrize(
    ("caches", "shapes"),
    [
        (["warm", "cold"], [32, 32]),
        pytest.param(["cold", "warm"], [32, 32], marks=pytest.mark.full),
        pytest.param(["warm", "warm"], [32, 32], marks=pytest.mark.full),
        (["warm", "warm"], [33, 31]),  # experts do not divide evenly: only the first rank's shard was measured
    ],
)
def test_a_warm_and_a_cold_cache_take_the_same(tmp_path: Path, caches: list[str], shapes: list[int]) -> None:
    for layer in layers(shapes[0]):
        keep(tmp_path / "warm", layer, 50.0, 50.0)
    first, second = run(tmp_path, caches, shapes)
    assert first == second and len(first) == 2
    if caches == ["warm", "warm"]:
        assert {each[0] for each in first} == {"faster"}


def test_ranks_with_contradicting_caches_agree(tmp_path: Path) -> None:
    for layer in layers(32):
        keep(tmp_path / "one", layer, 50.0, 50.0)
        keep(tmp_path / "other", layer, 200.0, 200.0)
    first, second, third = run(tmp_path, ["other", "one", "cold"], [32, 32, 32])
    assert first == second == third


@pytest.mark.parametrize("caches", [full(["warm", "warm"]), ["warm", "other"], full(["cold", "warm"])])
def test_turns_are_taken_by_all_ranks_or_by_none(tmp_path: Path, caches: list[str]) -> None:
    for layer in layers(32):
        keep(tmp_path / "warm", layer, 50.0, 150.0)
        keep(tmp_path / "other", layer, 50.0, 50.0)
    first, second = run(tmp_path, caches, [32, 32], allow_second_layout=True)
    assert first == second
    assert [bool(steps) for _, _, steps, _ in first] == [caches == ["warm", "warm"]] * 2


@pytest.mark.parametrize("caches", [["warm", "warm"], full(["warm", "other"]), full(["warm", "cold"])])
def test_tile_configurations_are_used_by_all_ranks_or_by_none(tmp_path: Path, caches: list[str]) -> None:
    for layer in layers(32):
        keep(tmp_path / "warm", layer, 50.0, 50.0, "one")
        keep(tmp_path / "other", layer, 50.0, 50.0, "another")
    first, second = run(tmp_path, caches, [32, 32])
    assert first == second
    alike = caches == ["warm", "warm"]
    assert [(name, tiles) for name, _, _, tiles in first if alike] == [("faster", len(COUNTS))] * 2 * alike
    assert alike or {tiles for *_, tiles in first} == {0}


def refused(processes: Any, which: list[int]) -> list[str]:
    """What the ranks conclude of a layer that some of them have no backend for, and whether they can still talk."""
    from vllm_moe_oracle.devices import detect
    from vllm_moe_oracle.errors import NoBackendError
    from vllm_moe_oracle.methods import backend_selection, rank_sync

    rank, layer = int(processes.rank()), problem(experts=64, ep=2)
    detect.detect = lambda: H200
    group = rank_sync.RankGroup(processes, 20.0)
    method = undecided(REGISTRY, settings.Settings(), group)

    def decide_here() -> Any:
        if rank in which:
            raise NoBackendError(f"rank {rank} has none", "", layer.layer)
        return decide(layer, H200, settings.Settings(), registry=REGISTRY)

    found = []
    for _ in range(2):
        try:
            backend_selection.select_backend(method, layer.layer, decide_here)
            found.append(method.backend.name)
        except NoBackendError as error:
            found.append(error.rule)
    return [*found, *rank_sync.all_gather(group, "afterwards", lambda: f"rank {rank}")]


@pytest.mark.parametrize("which", [[], [1], [0, 1]])
def test_ranks_without_a_backend_leave_the_layer_together(tmp_path: Path, which: list[int]) -> None:
    ranks = gloo_ranks.run(refused, 2, tmp_path, which)
    for rank, (first, second, *afterwards) in enumerate(ranks):
        other = "static" if not which else "no backend can run the layer on rank 1"
        assert first == second == (f"rank {rank} has none" if rank in which else other)
        assert afterwards == ["rank 0", "rank 1"]
