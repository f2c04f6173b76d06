"""Tile configurations that were measured: timed beside a backend's own choice, kept, handed to the kernels, believed
only as far as they are configurations."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.cases import H200, problem

pytest.importorskip("vllm", reason="what is measured runs through vLLM's modular kernel")

from tests.lib import fake_backends
from tests.lib.fake_backends import HERE, LAYERS, TOKEN_COUNTS, Slowed, chosen, plan
from tests.lib.tiers import sampled
from vllm_moe_oracle.backends import _hopper
from vllm_moe_oracle.backends.hopper_mxfp4 import HopperMxfp4
from vllm_moe_oracle.backends.hopper_mxfp8 import HopperMxfp8
from vllm_moe_oracle.backends.hopper_wna16 import HopperWna16
from vllm_moe_oracle.core.problem import Parallel, Scheme
from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels import heuristic, launch_config
from vllm_moe_oracle.kernels.fused_moe import workspace_layout
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig, fits_registers
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights, storage_errors
from vllm_moe_oracle.measurements import lookup, model_shapes, profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.measuring import benchmarks, engine, timing, tuning
from vllm_moe_oracle.oracle import selection as oracle_module
from vllm_moe_oracle.oracle.selection import decide

OTHER = LaunchConfig(TileConfig(16, 64, 128, num_stages=3), TileConfig(16, 64, 128, num_stages=3))
TILE = json.dumps(OTHER.to_json(), sort_keys=True)

backends, store = fake_backends.backends, fake_backends.store
"""Fixtures."""


@pytest.fixture(autouse=True)
def no_layers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has built no layer yet."""
    monkeypatch.setattr(_hopper, "_warned", set())


class Tiled(Slowed):
    """Slow by itself; with ``quick`` fast, with ``wrong`` wrong, with ``broken`` not able to run."""

    current = ""

    def tiles(self, problem: Any, tokens: int, most: int) -> tuple[str, ...]:
        return ("broken", "wrong", "quick", "slower")[:most] if tokens <= 16 else ()

    @contextlib.contextmanager
    def use_tile(self, problem: Any, tile: str) -> Iterator[None]:
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
    original = engine.BackendLayer._run
    spent = [0.0]

    def run(self: Any, copy: Any, tokens: Any, routed: bool) -> Any:
        once, tile = original(self, copy, tokens, routed), Tiled.current

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

    monkeypatch.setattr(engine.BackendLayer, "_run", run)
    monkeypatch.setattr(timing.HostClock, "round", told)
    return backend


def test_the_fastest_right_configuration_is_a_backends_time(
    tiled: Tiled, backends: Callable[..., None], store: Store, tmp_path: Path
) -> None:
    backends(tiled, Slowed("other", 2.0))
    layer, asked = LAYERS["mxfp8"], chosen(tmp_path)
    outcomes = tuning.tune([layer], HERE, asked, store, plan(tiles=4, routings=("uniform", "skewed")))
    (outcome,) = outcomes.values()
    assert outcome.unfinished == "" and not [each for each in outcome.samples if each.failure]
    found = {(each.routing, each.tokens): each for each in outcome.samples if each.backend == "tiled"}
    for routing in ("uniform", "skewed"):
        assert [found[routing, count].tile for count in TOKEN_COUNTS] == ["quick"] * 5 + [""] * 5
        assert found[routing, 16].us < 0.8 * found[routing, 160].us
    # From the cache, and through a profile: each holds to the middle of its number of tokens and the next.
    evidence = lookup.find_measurements(layer, HERE, asked)
    assert evidence is not None
    rows = ((1, "quick"), (2, "quick"), (5, "quick"), (11, "quick"), (22, "quick"), (45, ""), (78, ""))
    assert evidence.tiles["tiled"][:7] == rows and set(evidence.tiles) == {"tiled"}
    path = tmp_path / "p.json"
    profile.write(profile.make(Environment.of(HERE), {kernel_shape_of(layer): outcome.samples}, {}), path)
    assert {(each.tokens, each.routing, each.tile) for each in profile.read(path).samples(kernel_shape_of(layer))} == {
        (each.tokens, each.routing, each.tile) for each in outcome.samples
    }
    elsewhere = lookup.find_measurements(layer, HERE, chosen(tmp_path / "nowhere", profile=str(path)))
    assert elsewhere is not None and elsewhere.tiles == evidence.tiles
    there = Environment.of(dataclasses.replace(HERE, packages={**HERE.packages, "triton": "0.1"}))
    path = tmp_path / "there.json"
    profile.write(profile.make(there, {kernel_shape_of(layer): outcome.samples}, {}), path)
    other = dataclasses.replace(HERE, packages={**HERE.packages, "triton": "0.2"})
    compiled = lookup.find_measurements(layer, other, chosen(tmp_path / "nowhere", profile=str(path)))
    assert compiled is not None and set(compiled.times) == set(evidence.times) and compiled.tiles == {}
    assert "ignored" in compiled.remarks[-1] and "triton 0.1, not 0.2" in compiled.remarks[0]
    decision = oracle_module.decide(layer, HERE, chosen(tmp_path, backend="tiled"), measurements=evidence)
    assert decision.plan.tiles == evidence.tiles["tiled"]
    assert decide(layer, HERE, chosen(tmp_path, backend="other"), measurements=evidence).plan.tiles == ()
    again = tuning.tune([layer], HERE, asked, store, plan(tiles=4, routings=("uniform", "skewed")))
    assert [each.measured for each in again.values()] == [0]


def test_zero_tiles_times_only_the_own_choice(
    tiled: Tiled, backends: Callable[..., None], store: Store, tmp_path: Path
) -> None:
    backends(tiled)
    (outcome,) = tuning.tune([LAYERS["mxfp8"]], HERE, chosen(tmp_path), store, plan()).values()
    assert {each.tile for each in outcome.samples} == {""}


def test_a_benchmark_may_time_other_tiles(tiled: Tiled, backends: Callable[..., None], tmp_path: Path) -> None:
    backends(tiled, Slowed("other", 2.0))
    for tiles, expected in ((0, {}), (4, {"tiled": "quick"})):
        options = benchmarks.BenchOptions((16,), replays=3, stock=(), tiles=tiles)
        (record,) = benchmarks.bench([LAYERS["mxfp8"]], HERE, chosen(tmp_path), options)
        assert record.tiles == expected
        assert {each.backend: each.tile for each in record.samples("uniform") if each.tile} == expected


@pytest.mark.parametrize("tile", ["x" * 3000, "a\nb", "\x1b[31m"])
def test_an_unparsable_tile_configuration_invalidates_its_measurement(tile: str) -> None:
    assert not Sample("hopper_mxfp8", "16bit", 1, "uniform", 5.0, 5.0, 5.0, 3, 1e-3, tile=tile).is_valid


# --- The kernels ------------------------------------------------------------------------------------------------------


def layer_of(shape: tuple[int, int, int, int], format: str = "mxfp8", gated: bool = True) -> tuple[PackedWeights, int]:
    experts, top_k, hidden, inner = shape
    made = allocate_weights(
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
        now = configs.choose_config(weights, top_k, tokens)
        found = configs.candidate_configs(weights, top_k, tokens, 4)
        assert len(found) <= 4 and len(set(found)) == len(found) and now not in found
        assert all(configs.is_suitable(weights, top_k, each, False) for each in found)
        assert found or not isinstance(now, LaunchConfig)
        assert all(launch_config.parse_config(json.dumps(each.to_json())) == each for each in found)
        quantized = configs.candidate_configs(weights, top_k, tokens, 4, quantize=True)
        assert all(launch_config.keeps_mx_groups(weights, each) for each in quantized)


def test_the_rules_own_tile_is_tried_where_the_table_holds_another() -> None:
    """The table's tile of 64 weight rows for 4 tokens scales accumulators; the rule's scales weights."""
    weights = allocate_weights("mxfp8", 32, 2880, 2880, device="meta")
    rule = heuristic.heuristic_config(weights, 4, 4)
    assert configs.choose_config(weights, 4, 4) != rule
    assert configs.candidate_configs(weights, 4, 4, 3)[0] == rule and not rule.down.scale_accumulators


@pytest.mark.parametrize(
    "format", ["mxfp8", "mxfp4", "int4 32", "int4 64", "int4 128z", "int4 0", "int8 128", "int8 0z"]
)
def test_the_rules_choices_are_configurations_of_their_layers(format: str) -> None:
    """Of all top-k and sizes: what one layer's registers hold, another's do not."""
    name, _, group = format.partition(" ")
    for top_k, inner, hidden in itertools.product(
        (1, 2, 4, 6, 8, 10, 16), (128, 192, 256, 384, 512, 704, 768, 1024, 1408, 1536, 2048, 16384), (2048, 2880, 8192)
    ):
        size = int(group.rstrip("z") or 32)
        if storage_errors(name, hidden, inner, size, torch.bfloat16):
            continue
        for experts in (64, 512):
            weights = allocate_weights(
                name,
                experts,
                hidden,
                inner,
                group=size,
                zero_points=format.endswith("z"),
                num_experts=512,
                device="meta",
            )
            for tokens in (1, 2, 3, 4, 16):
                config = heuristic.heuristic_config(weights, top_k, tokens)
                assert not launch_config.config_errors(weights, top_k, config), (top_k, inner, hidden, tokens)
                if name == "mxfp8":
                    quantized = configs.choose_launch_config(weights, top_k, tokens, quantize=True)
                    assert not launch_config.config_errors(weights, top_k, quantized)
                    assert launch_config.keeps_mx_groups(weights, quantized)


def parts(config: LaunchConfig, weights: PackedWeights, top_k: int, tokens: int) -> tuple[float, float]:
    """Programs of the two products."""
    active = heuristic.expected_load(weights.experts, weights.num_experts, top_k, tokens).active
    count = tokens * top_k if config.per_slot else active
    merged = tokens if config.down.fused_topk else count
    return count * -(-weights.w13.rows // config.gate_up.bn), merged * -(-weights.hidden // config.down.bn)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "int4", "int8"])
@pytest.mark.parametrize("inner", [704, 1440, 7168, 14336])
def test_the_rule_makes_enough_programs_or_the_narrowest_tiles(inner: int, format: str) -> None:
    """At one token an H200's 132 multiprocessors would have one program of a layer with two active experts each."""
    weights, top_k = layer_of((8, 2, 4096, inner), format)
    for tokens in (1, 2, 4, 8, 16, 32):
        config = heuristic.heuristic_config(weights, top_k, tokens)
        least, enough = (16, 110 / 64 * 132) if config.per_slot else (64, 132)  # more than 110 rows take tiles of 64
        for count, tile in zip(parts(config, weights, top_k, tokens), (config.gate_up, config.down), strict=True):
            assert count >= enough or tile.bn == least, (tokens, config)
        assert config.per_slot == (tokens <= 2)  # four tokens have 8 choices, and 5.5 experts, whose weights are large


@pytest.mark.parametrize("tokens", [1, 3, 8, 40, 500])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_rank_gets_its_share_of_the_slots(ranks: int, tokens: int) -> None:
    """Counted over draws of experts."""
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.rand(200, tokens, 64, generator=generator)
    local = torch.topk(logits, 4).indices.flatten(1)
    local = torch.where(local < 64 // ranks, local, -1)
    active = torch.tensor([float(len(set(each.tolist()) - {-1})) for each in local]).mean()
    load = heuristic.expected_load(64 // ranks, 64, 4, tokens)
    slots = (local >= 0).sum(1).double().mean()
    assert load.slots == pytest.approx(float(slots), rel=0.15)
    assert load.active == pytest.approx(max(1.0, float(active)), rel=0.15)
    assert load.rows == load.slots / load.active


def test_expert_parallel_ranks_have_keys_and_tiles_of_their_own() -> None:
    """Each of eight ranks gets an eighth of the slots: its tiles are those of fewer tokens."""
    whole = allocate_weights("int4", 16, 2048, 768, group=128, device="meta")
    rank = allocate_weights("int4", 16, 2048, 768, group=128, num_experts=128, device="meta")
    assert configs.shape_key(whole, 8) == "16x8 2048x768 gated"
    assert configs.shape_key(rank, 8) == "16/128x8 2048x768 gated"
    assert configs._parse_shape_key("16/128x8 2048x768 plain") == (16, 128, 8, 2048, 768, False)
    assert configs._parse_shape_key("16x8 2048x768 gated") == (16, 16, 8, 2048, 768, True)
    heights = [configs.choose_launch_config(each, 8, 128).gate_up.bm for each in (whole, rank)]
    assert heights[0] > heights[1]


def test_where_no_shape_was_measured_wider_and_narrower_tiles_are_tried() -> None:
    weights, top_k = layer_of((8, 2, 4096, 14336), "int4")
    now = configs.choose_config(weights, top_k, 1)
    assert isinstance(now, LaunchConfig) and (now.down.bn, now.down.k_parts) == (16, 4)
    first = configs.candidate_configs(weights, top_k, 1, 1)
    assert [each.down.bn for each in first] == [32] and first[0].gate_up == now.gate_up


def test_tuned_configurations_come_before_the_shipped_table() -> None:
    weights, top_k = layer_of((128, 8, 2048, 768))
    before = [configs.choose_launch_config(weights, top_k, tokens) for tokens in (1, 8, 64)]
    tuned = ((4, None), (11, OTHER))
    chosen = [configs.choose_launch_config(weights, top_k, tokens, tuned=tuned) for tokens in (1, 8, 64)]
    assert chosen == [before[0], OTHER, before[2]]
    assert configs.choose_config(weights, top_k, 8, tuned=tuned) == OTHER
    many = configs.choose_config(weights, top_k, 16384)
    assert not isinstance(many, LaunchConfig)
    assert configs.choose_config(weights, top_k, 16384, tuned=((1 << 30, OTHER),)) == many


def launches(layer: Any, tiles: tuple[tuple[int, str], ...] = (), backend: Any = None) -> _hopper._LayerLaunches:
    backend = backend or HopperMxfp8()
    return backend._launches(layer, dataclasses.replace(backend.plan(layer, H200), tiles=tiles), 512)


def test_a_timed_configuration_holds_inside_the_context_only() -> None:
    layer = problem()
    other = dataclasses.replace(layer, hidden_size=2 * layer.hidden_size)
    mine, theirs = launches(layer), launches(other)
    before = [each.config(8) for each in (mine, theirs)]
    with HopperMxfp8().use_tile(layer, TILE):
        assert [each.config(8) for each in (mine, theirs)] == [OTHER, before[1]]
        assert launches(layer, ((8, TILE.replace('"num_stages": 3', '"num_stages": 4')),)).config(8) == OTHER
    assert [each.config(8) for each in (mine, theirs)] == before


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
        TILE.replace('"num_stages": 3', '"num_stages": 3000'),
        TILE.replace('"num_warps": 4', '"num_warps": true'),
        TILE.replace('"split_k": 1', '"split_k": -1'),
        TILE.replace('"per_slot"', '"import"'),
        TILE.replace('"fuse_sum": false', '"fuse_sum": [1]'),
        TILE.replace('"scale_accumulators": true', '"scale_accumulators": []'),
        TILE.replace('"scale_accumulators": true', '"scale_accumulators": 7'),
        TILE.replace('"no_k_loop": false', '"no_k_loop": {}'),
    ],
)
def test_what_is_no_configuration_is_refused_and_serving_goes_on(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError):
        launch_config.parse_config(text)
    layer = problem()
    before = launches(layer)
    with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        found = [launches(layer, ((8, text),)) for _ in range(2)]
    assert [each.config(8) for each in found] == [before.config(8)] * 2
    assert [each.nbytes(512, layer.top_k) for each in found] == [before.nbytes(512, layer.top_k)] * 2
    assert len({record.message for record in caplog.records}) == len(caplog.records)  # logged once
    assert not text or "a measured tile configuration is not used" in caplog.text


def test_invariant_layers_have_one_configuration() -> None:
    layer = dataclasses.replace(problem(), batch_invariant=True)
    assert HopperMxfp8().tiles(layer, 8, 4) == ()
    assert len(HopperMxfp8().tiles(problem(), 8, 4)) == 4


def test_layers_of_one_shape_have_configurations_of_their_own() -> None:
    layer = problem()
    other = dataclasses.replace(OTHER, prefetch=True)
    tiles = (), ((8, TILE),), ((8, json.dumps(other.to_json())),)
    made = [launches(layer, each) for each in tiles]
    assert [each.config(8) for each in made] == [launches(layer).config(8), OTHER, other]


def test_the_workspace_holds_what_every_configuration_needs() -> None:
    layer = problem()
    wide = dataclasses.replace(OTHER, gate_up=dataclasses.replace(OTHER.gate_up, split_k=4))
    made = launches(layer, ((300, json.dumps(wide.to_json())),))
    weights = made.blank
    for tokens in (1, 8, 300, 301, 512):
        layout = workspace_layout(weights, tokens, layer.top_k, made.config(tokens))
        assert layout.nbytes <= made.nbytes(tokens, layer.top_k) <= made.nbytes(512, layer.top_k)
        assert layout.counters <= made.counters
    assert made.counters > launches(layer).counters


FEW_EXPERTS = {
    "mixtral-8x7b, 8 ranks": (8, 8, 2, 4096, 14336),
    "mixtral-8x7b, 4 ranks": (8, 4, 2, 4096, 14336),
    "llama-4-scout, 16 ranks": (16, 16, 1, 5120, 8192),
    "llama-4-maverick, 32 ranks": (128, 32, 1, 5120, 8192),
    "phi-3.5-moe, 8 ranks": (16, 8, 2, 4096, 6400),
    "qwen3-30b, 8 ranks": (128, 8, 8, 2048, 768),
    "gpt-oss, one rank": (32, 1, 4, 2880, 2880),
}


@pytest.mark.parametrize("backend", [HopperMxfp8(), HopperWna16()], ids=lambda each: each.name)
@pytest.mark.parametrize("name", sampled(FEW_EXPERTS, 3))
def test_every_number_of_tokens_has_the_memory_that_was_planned(name: str, backend: Any) -> None:
    """vLLM allocates workspace and counters once, for the largest call; fewer tokens may need more than that call."""
    experts, ranks, top_k, hidden, inner = FEW_EXPERTS[name]
    scheme = Scheme("wna16", 4, 32, "compressed-tensors") if "wna16" in backend.name else problem().scheme
    layer = dataclasses.replace(
        problem(), scheme=scheme, num_experts=experts, local_experts=experts // ranks, top_k=top_k, hidden_size=hidden,
        intermediate_size=inner, parallel=Parallel(ep=ranks),
    )  # fmt: skip
    made = backend._launches(layer, backend.plan(layer, H200), 6000)
    shared = set()
    for tokens in range(0, 6001, 1 if ranks > 4 else 7):
        config = made.config(tokens)
        layout = workspace_layout(made.blank, tokens, top_k, config)
        assert layout.counters <= made.counters
        assert layout.nbytes <= made.nbytes(tokens, top_k) or tokens == 0
        if isinstance(config, LaunchConfig) and config.down.split_k > 1:
            shared.add(tokens)
    sizes = [made.nbytes(tokens, top_k) for tokens in (0, 1, 5999, 6000, 19000)]
    assert sizes == sorted(sizes) and sizes[0] == 0 and sizes[-2] < sizes[-1]
    assert bool(shared) == (inner > 4096)
    assert not shared or made.counters > 0


def test_the_profiling_run_need_not_be_the_largest_call() -> None:
    assert _hopper._profiling_tokens([]) == 0
    assert _hopper._profiling_tokens([300, 1088, 8192, 65536]) == 1025  # a check while loading may bring 512
    assert _hopper._profiling_tokens([4096, 8192]) == 4096
    assert _hopper._profiling_tokens([400, 512]) == 512


def test_where_configurations_begin_and_end_is_planned_and_warmed_up() -> None:
    layer, backend = problem(), HopperMxfp8()
    plan = dataclasses.replace(backend.plan(layer, H200), tiles=((8, ""), (2004, TILE), (2014, ""), (1 << 30, TILE)))
    assert _hopper._tile_boundaries(plan, 2048) == [8, 9, 2004, 2005, 2014, 2015]
    assert _hopper._tile_boundaries(plan, 2004) == [8, 9, 2004]


def test_candidates_keep_in_registers_what_has_room_there() -> None:
    """h of a sweep over 14336 columns would be 448 KiB a program; every measured configuration suits its own shape."""
    wide, _ = layer_of((8, 2, 4096, 14336))
    sweep = LaunchConfig(TileConfig(16, 64, 128), TileConfig(16, 64, 128, n_tiles=8))
    assert not fits_registers(wide, sweep)
    narrow, _ = layer_of((384, 8, 7168, 256))
    assert fits_registers(narrow, sweep)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("layer", ["mxfp8:minimax-m2@tp4", "mxfp8:kimi-k2@tp8", "mxfp4:gpt-oss-120b"])
def test_no_suggestion_counts_what_a_layer_has_no_counters_for(layer: str, tokens: int) -> None:
    """A layer's counters are made for its own choices; a split of the columns found elsewhere would need some."""
    shape = model_shapes.parse(layer)
    backend = HopperMxfp8() if layer.startswith("mxfp8") else HopperMxfp4()
    weights = backend._allocate(shape, shape.local_experts, "meta")
    room = workspace_layout(weights, tokens, shape.top_k).counters
    suggested = backend.tiles(shape, tokens, 3)
    assert suggested
    assert all(
        workspace_layout(weights, tokens, shape.top_k, launch_config.parse_config(each)).counters <= room
        for each in suggested
    )
