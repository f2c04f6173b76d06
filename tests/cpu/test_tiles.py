"""Tile configurations that were measured: timed beside a backend's own choice, kept, handed to the kernels, believed
only as far as they are configurations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import H200, problem

pytest.importorskip("vllm", reason="what is measured runs through vLLM's modular kernel")

from test_measuring import BUCKETS, HERE, LAYERS, Slowed, backends, chosen, plan, ready, store  # noqa: F401

from vllm_moe_oracle.backends import _own
from vllm_moe_oracle.backends.own_mxfp4 import OwnMxfp4
from vllm_moe_oracle.backends.own_mxfp8 import OwnMxfp8
from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels.config import Config
from vllm_moe_oracle.kernels.fused_moe import plan_workspace
from vllm_moe_oracle.kernels.weights import OwnWeights, allocate
from vllm_moe_oracle.measure import engine, environment, lookup, profile, shapes, timing, tuning
from vllm_moe_oracle.measure.cells import Sample, cell_of
from vllm_moe_oracle.measure.store import Store
from vllm_moe_oracle.oracle import oracle as oracle_module
from vllm_moe_oracle.oracle.oracle import decide

OTHER = Config(configs.Tile(16, 64, 128, stages=3), configs.Tile(16, 64, 128, stages=3))
TILE = json.dumps(OTHER.to_json(), sort_keys=True)


@pytest.fixture(autouse=True)
def no_layers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has built no layer yet."""
    monkeypatch.setattr(_own, "_first", {})
    monkeypatch.setattr(_own, "_said", set())


class Tiled(Slowed):
    """Slow by itself; with ``quick`` fast, with ``wrong`` wrong, with ``broken`` not able to run."""

    current = ""

    def tiles(self, problem: Any, tokens: int, most: int) -> tuple[str, ...]:
        return ("broken", "wrong", "quick", "slower")[:most] if tokens <= 16 else ()

    @contextlib.contextmanager
    def tiled(self, problem: Any, tile: str) -> Iterator[None]:
        before, Tiled.current = Tiled.current, tile
        try:
            yield
        finally:
            Tiled.current = before


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Tiled:
    """On a CPU nothing is captured: what a run does is settled when it is prepared, as a graph would have it. Times are
    told, not taken: a busy machine has others."""
    backend = Tiled("tiled", 1.0)
    original = engine.Layer._run
    spent = [0.0]

    def run(self: Any, engine_: Any, copy: Any, tokens: Any, routed: bool) -> Any:
        once, tile = original(self, engine_, copy, tokens, routed), Tiled.current

        def with_tile() -> Any:
            if tile == "broken":
                raise RuntimeError("out of resource: shared memory")
            result = once()
            spent[0] += {"quick": 10.0, "slower": 60.0}.get(tile, 30.0)
            return result * 1.5 if tile == "wrong" else result

        return with_tile

    def told(self: Any, runs: Any) -> list[float]:
        times = []
        for each in runs:
            before = spent[0]
            each()
            times.append(spent[0] - before)
        return times

    monkeypatch.setattr(engine.Layer, "_run", run)
    monkeypatch.setattr(timing.HostClock, "round", told)
    return backend


def test_the_fastest_right_configuration_is_a_backends_time(
    tiled: Tiled,
    backends: Callable[..., None],  # noqa: F811
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    backends(tiled, Slowed("other", 2.0))
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    outcomes = tuning.tune([layer], HERE, asked, store, plan(tiles=4, routings=("uniform", "skewed")))
    (outcome,) = outcomes.values()
    assert outcome.unfinished == "" and not [each for each in outcome.samples if each.failure]
    found = {(each.routing, each.tokens): each for each in outcome.samples if each.backend == "tiled"}
    for routing in ("uniform", "skewed"):
        assert [found[routing, count].tile for count in BUCKETS] == ["quick"] * 5 + [""] * 5
        assert found[routing, 16].us < 0.8 * found[routing, 160].us
    # From the cache, and through a profile: each holds to the middle of its number of tokens and the next.
    evidence = lookup.evidence(layer, HERE, asked)
    assert evidence is not None
    rows = ((1, "quick"), (2, "quick"), (5, "quick"), (11, "quick"), (22, "quick"), (45, ""), (78, ""))
    assert evidence.tiles["tiled"][:7] == rows and set(evidence.tiles) == {"tiled"}
    path = tmp_path / "p.json"
    profile.write(profile.make(environment.of(HERE), {cell_of(layer): outcome.samples}, {}), path)
    assert {(each.tokens, each.routing, each.tile) for each in profile.read(path).samples(cell_of(layer))} == {
        (each.tokens, each.routing, each.tile) for each in outcome.samples
    }
    elsewhere = lookup.evidence(layer, HERE, chosen(tmp_path / "nowhere", profile=str(path)))
    assert elsewhere is not None and elsewhere.tiles == evidence.tiles
    there = environment.of(dataclasses.replace(HERE, packages={**HERE.packages, "triton": "0.1"}))
    path = tmp_path / "there.json"
    profile.write(profile.make(there, {cell_of(layer): outcome.samples}, {}), path)
    other = dataclasses.replace(HERE, packages={**HERE.packages, "triton": "0.2"})
    compiled = lookup.evidence(layer, other, chosen(tmp_path / "nowhere", profile=str(path)))
    assert compiled is not None and set(compiled.times) == set(evidence.times) and compiled.tiles == {}
    assert "left out" in compiled.remarks[-1] and "triton 0.1, here 0.2" in compiled.remarks[0]
    decision = oracle_module.decide(layer, HERE, chosen(tmp_path, backend="tiled"), evidence=evidence)
    assert decision.plan.tiles == evidence.tiles["tiled"]
    assert decide(layer, HERE, chosen(tmp_path, backend="other"), evidence=evidence).plan.tiles == ()
    again = tuning.tune([layer], HERE, asked, store, plan(tiles=4, routings=("uniform", "skewed")))
    assert [each.measured for each in again.values()] == [0]


def test_no_configuration_is_timed_where_none_is_asked_for(
    tiled: Tiled,
    backends: Callable[..., None],  # noqa: F811
    store: Store,  # noqa: F811
    tmp_path: Path,
) -> None:
    backends(tiled)
    (outcome,) = tuning.tune([LAYERS["mxfp8"]], HERE, chosen(tmp_path), store, plan()).values()
    assert {each.tile for each in outcome.samples} == {""}


@pytest.mark.parametrize("tile", ["x" * 3000, "a\nb", "\x1b[31m"])
def test_a_text_that_is_no_configuration_is_no_sound_measurement(tile: str) -> None:
    assert not Sample("own_mxfp8", "16bit", 1, "uniform", 5.0, 5.0, 5.0, 3, 1e-3, tile=tile).sound


# --- The kernels ------------------------------------------------------------------------------------------------------


def layer_of(shape: tuple[int, int, int, int], format: str = "mxfp8", gated: bool = True) -> tuple[OwnWeights, int]:
    experts, top_k, hidden, inner = shape
    made = allocate(
        format, experts, hidden, inner, gated=gated, group=32, bias=False,
        dtype=torch.bfloat16, device="meta",
    )  # fmt: skip
    return made, top_k


SHAPES = [(128, 8, 2048, 384), (160, 8, 5120, 192), (8, 2, 4096, 14336), (32, 4, 2880, 1440), (512, 10, 4096, 128)]


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "int4", "int8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_suggestions_are_few_different_and_fit(shape: tuple[int, int, int, int], format: str) -> None:
    weights, top_k = layer_of(shape, format)
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        now = configs.choose(weights, top_k, tokens)
        found = configs.candidates(weights, top_k, tokens, 4)
        assert len(found) <= 4 and len(set(found)) == len(found) and now not in found
        assert all(configs.fits(weights, top_k, each, False) for each in found)
        assert found or not isinstance(now, Config)
        assert all(configs.checked(json.dumps(each.to_json())) == each for each in found)
        quantised = configs.candidates(weights, top_k, tokens, 4, quantise=True)
        assert all(configs.quantisable(weights, each) for each in quantised)


def parts(config: Config, weights: OwnWeights, top_k: int, tokens: int) -> tuple[float, float]:
    """Programs of the two products."""
    active = configs.active_experts(weights.experts, top_k, tokens)
    count = tokens * top_k if config.per_slot else active
    merged = tokens if config.down.merge else count
    return count * -(-weights.w13.rows // config.gate_up.bn), merged * -(-weights.hidden // config.down.bn)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "int4", "int8"])
@pytest.mark.parametrize("inner", [704, 1440, 7168, 14336])
def test_the_rule_makes_enough_programs_or_the_narrowest_tiles(inner: int, format: str) -> None:
    """At one token an H200's 132 multiprocessors would have one program of a layer with two active experts each."""
    weights, top_k = layer_of((8, 2, 4096, inner), format)
    for tokens in (1, 2, 4, 8, 16, 32):
        config = configs.heuristic(weights, top_k, tokens)
        least = 16 if config.per_slot else 64
        for count, tile in zip(parts(config, weights, top_k, tokens), (config.gate_up, config.down), strict=True):
            enough = 330 if tile.bk == 128 else 198  # a step of 256 columns asks for twice as much ahead
            assert count >= enough or tile.bn == least, (tokens, config)
        assert config.per_slot == (tokens <= 2)  # four tokens have 8 choices, and 5.5 experts, whose weights are large


def test_where_no_shape_was_measured_wider_and_narrower_tiles_are_tried() -> None:
    weights, top_k = layer_of((8, 2, 4096, 14336), "int4")
    now = configs.choose(weights, top_k, 1)
    assert isinstance(now, Config) and (now.down.bn, now.down.fold) == (16, 4)
    first = configs.candidates(weights, top_k, 1, 1)
    assert [each.down.bn for each in first] == [32] and first[0].gate_up == now.gate_up


def test_a_given_configuration_goes_before_the_table_and_leaves_no_trace() -> None:
    weights, top_k = layer_of((128, 8, 2048, 768))
    before = [configs.choose_tiles(weights, top_k, tokens) for tokens in (1, 8, 64)]
    with configs.given(weights, top_k, OTHER):
        assert [configs.choose_tiles(weights, top_k, tokens) for tokens in (1, 8, 64)] == [OTHER] * 3
        other, other_k = layer_of((64, 8, 2048, 768))
        assert configs.choose_tiles(other, other_k, 8) != OTHER
    assert [configs.choose_tiles(weights, top_k, tokens) for tokens in (1, 8, 64)] == before
    configs.give(weights, top_k, ((4, None), (11, OTHER)))
    try:
        assert [configs.choose_tiles(weights, top_k, tokens) for tokens in (1, 8, 64)] == [before[0], OTHER, before[2]]
    finally:
        configs.give(weights, top_k, ())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 10000,
        '{"gate_up": 1, "down": 2}',
        TILE.replace('"bm": 16', '"bm": 17'),
        TILE.replace('"bm": 16', '"bm": 1e9'),
        TILE.replace('"bn": 64', '"bn": 65536'),
        TILE.replace('"stages": 3', '"stages": 3000'),
        TILE.replace('"warps": 4', '"warps": true'),
        TILE.replace('"split": 1', '"split": -1'),
        TILE.replace('"per_slot"', '"import"'),
    ],
)
def test_what_is_no_configuration_is_refused_and_serving_goes_on(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError):
        configs.checked(text)
    layer = problem()
    backend = OwnMxfp8()
    weights, top_k = layer_of((layer.num_experts, layer.top_k, layer.hidden_size, layer.intermediate_size))
    before = configs.choose(weights, top_k, 8)
    made = dataclasses.replace(backend.plan(layer, H200), tiles=((8, text),))
    with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        for _ in range(2):
            backend._give(layer, made)
    try:
        assert configs.choose(weights, top_k, 8) == before
        assert len({record.message for record in caplog.records}) == len(caplog.records)  # said once
        assert not text or "a measured tile configuration is not used" in caplog.text
    finally:
        configs.give(weights, top_k, ())


def test_invariant_layers_have_one_configuration() -> None:
    layer = dataclasses.replace(problem(), batch_invariant=True)
    assert OwnMxfp8().tiles(layer, 8, 4) == ()
    assert len(OwnMxfp8().tiles(problem(), 8, 4)) == 4


def test_the_first_layers_configurations_hold_for_all_of_its_shape(caplog: pytest.LogCaptureFixture) -> None:
    layer, backend = problem(), OwnMxfp8()
    weights, top_k = layer_of((layer.num_experts, layer.top_k, layer.hidden_size, layer.intermediate_size))
    other = json.dumps(dataclasses.replace(OTHER, prefetch=True).to_json())
    try:
        for tile in (TILE, other):
            backend._give(layer, dataclasses.replace(backend.plan(layer, H200), tiles=((8, tile),)))
            assert configs.choose_tiles(weights, top_k, 8) == OTHER
        assert "an earlier layer of the shape has others" in caplog.text
        backend._give(layer, backend.plan(layer, H200))
        assert configs.choose_tiles(weights, top_k, 8) == OTHER
    finally:
        configs.give(weights, top_k, ())


def test_a_first_layer_without_configurations_holds_too(caplog: pytest.LogCaptureFixture) -> None:
    """Its scratch memory and what was compiled are of the table's tiles."""
    layer, backend = problem(), OwnMxfp8()
    weights, top_k = layer_of((layer.num_experts, layer.top_k, layer.hidden_size, layer.intermediate_size))
    before = configs.choose_tiles(weights, top_k, 8)
    with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        backend._give(layer, backend.plan(layer, H200))
        backend._give(layer, dataclasses.replace(backend.plan(layer, H200), tiles=((8, TILE),)))
    assert configs.choose_tiles(weights, top_k, 8) == before
    assert "an earlier layer of the shape has others" in caplog.text


def test_where_configurations_begin_and_end_is_planned_and_warmed_up() -> None:
    layer, backend = problem(), OwnMxfp8()
    plan = dataclasses.replace(backend.plan(layer, H200), tiles=((8, ""), (2004, TILE), (2014, ""), (1 << 30, TILE)))
    assert _own._edges(plan, 2048) == [8, 9, 2004, 2005, 2014, 2015]
    assert _own._edges(plan, 2004) == [8, 9, 2004]


def test_candidates_keep_in_registers_what_has_room_there() -> None:
    """h of a sweep over 14336 columns would be 448 KiB a program; every measured configuration suits its own shape."""
    wide, _ = layer_of((8, 2, 4096, 14336))
    sweep = configs.Config(configs.Tile(16, 64, 128), configs.Tile(16, 64, 128, sweep=8))
    assert not _own._in_registers(wide, sweep)
    narrow, _ = layer_of((384, 8, 7168, 256))
    assert _own._in_registers(narrow, sweep)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("layer", ["mxfp8:minimax-m2@tp4", "mxfp8:kimi-k2@tp8", "mxfp4:gpt-oss-120b"])
def test_no_suggestion_counts_what_a_layer_has_no_counters_for(layer: str, tokens: int) -> None:
    """A layer's counters are made for its own choices; a split of the columns found elsewhere would need some."""
    shape = shapes.parse(layer)
    backend = OwnMxfp8() if layer.startswith("mxfp8") else OwnMxfp4()
    weights = backend._allocate(shape, shape.local_experts, "meta")
    room = plan_workspace(weights, tokens, shape.top_k).counters
    suggested = backend.tiles(shape, tokens, 3)
    assert suggested
    assert all(
        plan_workspace(weights, tokens, shape.top_k, configs.checked(each)).counters <= room for each in suggested
    )
