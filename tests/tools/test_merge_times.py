"""A benchmark's times replace those of the same layer, backend and number of tokens in a profile, and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from tests.gpu import compare_tiles, tune_kernels
from tests.lib import golden_files
from tests.lib.samples import measured_card
from tests.tools import kernel_choices, merge_times
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig
from vllm_moe_oracle.measurements import lookup, model_shapes, profile
from vllm_moe_oracle.measurements.bench_records import STOCK_DEFAULT
from vllm_moe_oracle.measurements.kernel_shape import KernelShape, Sample, kernel_shape_of
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings

SHIPPED = profile.shipped()[0]
ENTRY = SHIPPED.entries[0]


def by_key(found: profile.Profile, shape: KernelShape) -> dict[tuple[str, str, int], Sample]:
    return {each.key: each for each in found.samples(shape)}


def test_new_times_replace_old_ones_and_everything_else_stays() -> None:
    before = by_key(SHIPPED, ENTRY.kernel_shape)
    old = next(each for each in before.values() if not each.failure)
    new = msgspec.structs.replace(old, us=old.us * 2, low=old.low * 2, high=old.high * 2)
    other = msgspec.structs.replace(new, tokens=3333)
    failed = msgspec.structs.replace(old, tokens=4444, us=0.0, low=0.0, high=0.0, replays=0, failure="no memory")
    made = merge_times.merged(SHIPPED, SHIPPED.environment, {ENTRY.kernel_shape: [new, other, failed]})
    after = by_key(made, ENTRY.kernel_shape)
    assert after[old.key].us == new.us and after[other.key].us == other.us and failed.key not in after
    assert {key: each for key, each in after.items() if key not in (old.key, other.key)} == {
        key: each for key, each in before.items() if key != old.key
    }
    rest = [each.kernel_shape for each in SHIPPED.entries[1:]]
    assert all(by_key(made, shape) == by_key(SHIPPED, shape) for shape in rest)
    assert [each.kernel_shape for each in made.entries] == [each.kernel_shape for each in SHIPPED.entries]


def test_times_with_the_router_do_not_join_times_without() -> None:
    """Where a backend routes tokens itself, all others' times include vLLM's routing kernel."""
    old = next(each for each in by_key(SHIPPED, ENTRY.kernel_shape).values() if not each.failure)
    other = msgspec.structs.replace(old, router=not old.router)
    with pytest.raises(ValueError, match="with the router beside times without"):
        merge_times.merged(SHIPPED, SHIPPED.environment, {ENTRY.kernel_shape: [other]})
    for shipped in profile.shipped():
        for entry in shipped.entries:
            assert len({each.router for each in entry.backends.values()}) == 1, entry.kernel_shape


def test_a_layer_where_nothing_is_chosen_is_left_out() -> None:
    """One kernel for each precision of activations: no time could change which one runs."""
    shape = msgspec.structs.replace(ENTRY.kernel_shape, hidden_size=64)
    one = next(each for each in SHIPPED.samples(ENTRY.kernel_shape) if not each.failure)
    quantizing = msgspec.structs.replace(one, backend="hopper_mxfp8_w8a8", activations="mxfp8")
    same = msgspec.structs.replace(one, backend="marlin_mxfp8")
    assert one.activations != "mxfp8" and one.backend != same.backend
    for found, expected in (([one], False), ([one, quantizing], False), ([one, quantizing, same], True)):
        made = merge_times.merged(SHIPPED, SHIPPED.environment, {shape: found})
        assert bool(made.samples(shape)) is expected


@pytest.mark.parametrize(("counts", "taken"), [((1, 4, 16), True), ((1, 4, 17), False)])
def test_a_new_layer_with_a_gap_that_nothing_decides_over_is_left_out(counts: tuple[int, ...], taken: bool) -> None:
    shape = msgspec.structs.replace(ENTRY.kernel_shape, hidden_size=64)
    one = next(each for each in SHIPPED.samples(ENTRY.kernel_shape) if not each.failure)
    two = msgspec.structs.replace(one, backend="another")
    found = [msgspec.structs.replace(each, tokens=count) for each in (one, two) for count in counts]
    assert bool(merge_times.merged(SHIPPED, SHIPPED.environment, {shape: found}).samples(shape)) is taken


def test_times_go_to_the_profile_that_has_their_layer() -> None:
    """A GPU may have several profiles: a layer in two of them would have old times beside new ones."""
    shipped = merge_times.shipped_for("NVIDIA H200", SHIPPED.environment.packages)
    paths = list(shipped)
    assert [path.name for path in paths] == ["nvidia_h200.json", "nvidia_h200_bench.json"]
    of_each = [{each.kernel_shape for each in shipped[path].entries} for path in paths]
    assert not of_each[0] & of_each[1]
    unknown = msgspec.structs.replace(ENTRY.kernel_shape, hidden_size=64)
    shapes = [next(iter(of_each[1])), unknown, next(iter(of_each[0]))]
    found = merge_times.by_profile(shipped, {shape: [] for shape in shapes})
    assert found == {paths[1]: {shapes[0]: [], unknown: []}, paths[0]: {shapes[2]: []}}


def test_another_stack_begins_a_profile_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a name that no file has, and that is found with the others; the next file joins it."""
    for path in profile.SHIPPED_FOLDER.glob("nvidia_*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(profile, "SHIPPED_FOLDER", tmp_path)
    golden = golden_files.newest("listed-triton-3.8")
    head, *lines = golden.read_text().replace('"triton":"3.8.0"', '"triton":"3.10.0"').splitlines()
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file, rows in zip(files, (lines[:7], lines[7:14]), strict=True):
        file.write_text("\n".join([head, *rows]) + "\n")
    assert merge_times.main([str(files[0])]) == 1 and "triton 3.10.0; --new NAME" in capsys.readouterr().err
    for name in ("nvidia_h200", "h200_new"):
        with pytest.raises(SystemExit):
            merge_times.main(["--new", name, str(files[0])])
    assert merge_times.main(["--new", "nvidia_h200_triton3.10", *map(str, files)]) == 0
    with pytest.raises(SystemExit):
        merge_times.main(["--new", "nvidia_h200_other", str(files[0])])
    assert "nvidia_h200_triton3.10.json have this stack" in capsys.readouterr().err
    assert len(profile.read(tmp_path / "nvidia_h200_triton3.10.json").entries) == 2
    assert (tmp_path / "nvidia_h200.json").read_bytes() == (
        Path(profile.__file__).parents[1] / "profiles/nvidia_h200.json"
    ).read_bytes()


def test_layers_that_judge_choices_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        merge_times.main([str(golden_files.newest("choice-6"))])
    assert "mxfp8:ling-1t@tp8" in capsys.readouterr().err


def test_times_of_other_kernels_are_refused() -> None:
    other = msgspec.structs.replace(SHIPPED.environment, kernels="0" * 16)
    with pytest.raises(ValueError, match="0000000000000000"):
        merge_times.merged(SHIPPED, other, {})


def test_a_better_tile_belongs_to_one_gpu() -> None:
    """It is chosen at its number of tokens on that card; the other card runs, and has, what it had."""
    layer = model_shapes.parse("int4_g128:qwen3.5-397b-a17b@tp8")
    shape, name, chosen = kernel_shape_of(layer), "hopper_wna16", Settings(cache="none")
    h100, h200 = (profile.read(profile.SHIPPED_FOLDER / f"nvidia_{card}.json") for card in ("h100", "h200"))
    tile = json.dumps(LaunchConfig(TileConfig(16, 64, 128, num_stages=3), TileConfig(16, 64, 128)).to_json())
    old = by_key(h100, shape)[name, "uniform", 1024]
    new = msgspec.structs.replace(old, us=307.0, low=306.0, high=308.0, tile=tile)
    made = merge_times.merged(h100, h100.environment, {shape: [new]})
    assert by_key(made, shape)[new.key] == msgspec.structs.replace(new, error=by_key(made, shape)[new.key].error)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "shipped", lambda: (made, h200))
        for path, expected in (("h100", tile), ("h200", by_key(h200, shape)[name, "uniform", 1024].tile)):
            card = measured_card(profile.SHIPPED_FOLDER / f"nvidia_{path}.json")
            found = lookup.find_measurements(layer, card, chosen)
            decision = decide(layer, card, chosen, measurements=found)
            assert (decision.backend, decision.why) == (name, "measured")
            assert next(each for most, each in decision.plan.tiles if most >= 1024) == expected
        stale = [f"{shape}: {name}, 1024 tokens"]
        assert (
            kernel_choices.without_changed(made, stale) == made and kernel_choices.without_changed(h200, stale) == h200
        )
    own = merge_times.merged(h100, h100.environment, {shape: [msgspec.structs.replace(new, tile="")]})
    assert (name, "uniform", 1024) not in by_key(kernel_choices.without_changed(own, stale), shape)


def test_the_page_says_how_many_layers_are_shipped() -> None:
    page = (Path(__file__).parents[2] / "vllm_moe_oracle/measuring/README.md").read_text()
    for path in profile.SHIPPED_FOLDER.glob("nvidia_*.json"):
        assert re.search(rf"\| `{path.name}` \|.*\| {len(profile.read(path).entries)}: ", page), path.name
    timed, failed = [], []
    for name in ("stock_nvidia_h200", "stock_nvidia_h100_80gb_hbm3"):
        entries = profile.read(profile.SHIPPED_FOLDER / f"{name}.json").entries
        timed.append(sum(bool(each.backends[STOCK_DEFAULT].times) for each in entries))
        failed.append(len(entries) - timed[-1])
    said = "of {} and {} layers, and why stock's layer failed in {} and {} more".format(*timed, *failed)
    assert said in " ".join(page.split())
    accepted = 0
    for name, layers in kernel_choices.known_replaced().items():
        entries = {str(each.kernel_shape): each for each in profile.read(profile.SHIPPED_FOLDER / name).entries}
        for key, counts in layers.items():
            shape, _, backend = key.rpartition(": ")
            assert counts.keys() <= entries[shape].backends[backend].times["uniform"].keys(), key
            accepted += len(counts)
    assert f"lists the {accepted} shipped times that are so" in " ".join(page.split())


@pytest.mark.full
def test_a_time_stays_where_its_tiles_successor_was_no_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is measured again. A slower successor, another tile or another layer accepts nothing."""
    layer, count = model_shapes.parse("mxfp8:qwen3-30b-a3b@tp2"), "256"
    key = f"{kernel_shape_of(layer)}: hopper_mxfp8"
    for name in ("GOLDEN", "REPLACED"):
        path = getattr(kernel_choices, name)
        (tmp_path / path.name).write_bytes(path.read_bytes())
        monkeypatch.setattr(kernel_choices, name, tmp_path / path.name)
    kernel_choices.REPLACED.write_text("{}")
    choices = json.loads(kernel_choices.GOLDEN.read_text())
    choices[key][count] = "0" * 8
    kernel_choices.GOLDEN.write_text(json.dumps(choices))
    weights = tune_kernels.stored("mxfp8", "qwen3-30b-a3b@tp2", "meta")
    now = tune_kernels.describe(compare_tiles.chosen(weights, "qwen3-30b-a3b@tp2", int(count)))
    compared = tmp_path / "compared.json"

    def accepted(command: str = "compare_tiles before.json", **changes: object) -> int:
        row = {"scheme": "mxfp8", "shape": "qwen3-30b-a3b@tp2", "tokens": int(count), "before": 105.0, "after": 100.0}
        rows = [row | {"configs": ["", now]} | changes]
        compared.write_text(json.dumps({"conditions": {"command": command}, "rows": rows}))
        return kernel_choices.accept([compared])

    assert accepted("compare_tiles before.json --measured --quantize") == 0  # of tiles for MXFP8 activations
    for changes in ({"before": 95.0}, {"configs": ["", "16x16"]}, {"shape": "qwen3-30b-a3b"}, {"tokens": 128}):
        assert accepted(**changes) == 0 and kernel_choices.changed() == [f"{key}, {count} tokens"]
    assert accepted() > 0 and kernel_choices.changed() == []
    known = kernel_choices.known_replaced()
    # The H200's profile of Triton 3.6 names a tile of its own there.
    assert set(known) == {"nvidia_h100.json", "nvidia_h200_triton3.8.json"}
    assert all(each == {key: {count: 1.05}} for each in known.values())
    kernel_choices.measured_again("nvidia_h100.json", {(key, count)})
    assert kernel_choices.known_replaced() == known | {"nvidia_h100.json": {}}
