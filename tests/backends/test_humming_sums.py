"""Humming's sums: what is said of them, and that nothing is left out, for every release's configurations."""

from __future__ import annotations

import ast
import copy
import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.cases import problem
from tests.lib.humming_probe import LAYERS, SMS
from tests.lib.releases import DEFAULT_RELEASE, humming, some_releases, sources
from vllm_moe_oracle.backends._humming import accumulation, limit_k_splits
from vllm_moe_oracle.core.problem import Activation, Parallel
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import RELEASES

PROBE = Path(__file__).parents[1] / "lib/humming_probe.py"
SERVED = RELEASES[RELEASES.index(min_versions.HUMMING) :]


@cache
def probed(folder: Path, *more: str) -> dict[str, dict[str, Any]]:
    """Whether products are split, by number of columns, free and with batch invariance; or what the probe says with
    more arguments."""
    command = [sys.executable, str(PROBE), str(folder), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, f"{folder}: {ended.stderr[-2000:]}"
    found: dict[str, dict[str, Any]] = json.loads(ended.stdout)
    return found


@pytest.mark.full
@some_releases(*SERVED)
def test_products_are_split_unless_the_layer_is_batch_invariant(release: str) -> None:
    version, folder = humming(release)
    found = probed(folder)
    assert len(found) == 4
    for columns, split in found.items():
        layer = {"hidden_size": int(columns), "intermediate_size": int(columns)}
        for name, invariant in (("free", False), ("invariant", True)):
            said = accumulation(problem(**layer, batch_invariant=invariant))
            assert ("split-K partial sums" in said) == split[name], (version, columns, name)


WHOLE = ("0.1.12", "0.1.19")
"""Releases of the library from the first on whose blocks add up all of their sums."""


def tuning(folder: Path, *layers: str) -> dict[str, dict[str, list[Any]]]:
    """The library's configurations, by layer and product, of some of the probe's layers, or of all."""
    return probed(folder, "--tuning", *layers)


def never_added(config: dict[str, Any]) -> set[int]:
    """Tokens' rows of a block of which a thread's sums are never added to those of the warps that have other parts of
    K, walked through as the library's releases before 0.1.12 do it.

    A thread of a warpgroup holds, of 64 rows of weights by so many tokens, four numbers of each eight tokens, two of
    them eight rows further down; numbers lie in the order of the accumulators, these one after the other.

    Source: PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"; humming-kernels, ``epilogue/smem_reducer.cuh``.
    """
    tokens, columns, depth = config["warp_shape"]
    if config["block_shape"][2] == depth:
        return set()
    numbers = [block * 8 for _ in range(columns * 4 // 64) for block in range(tokens // 8) for _ in range(4)]
    words = [set(numbers[start : start + 4]) for start in range(0, len(numbers), 4)]
    turns = max(tokens // 16, 1)
    each = len(words) // turns
    added = {turn * each + index for turn in range(turns) for index in range(each)}
    return {row for index, rows in enumerate(words) if index not in added for row in rows}


def tallest(products: dict[str, Any], rows: int) -> dict[str, int]:
    """How many rows a block of each product has, for a number of rows of all experts."""
    return {
        name: next(config["block_shape"][0] for above, to, config in each if above < rows <= to)
        for name, each in products.items()
    }


@some_releases(*(each for each in SERVED if each < "0.28"))
def test_configurations_that_leave_sums_out_are_replaced(release: str) -> None:
    from vllm_moe_oracle.compat.humming import has_incomplete_reduction, with_complete_reduction

    version, folder = humming(release)
    faulty = 0
    for name, products in tuning(folder).items():
        before = copy.deepcopy(products)
        changed = with_complete_reduction(products)
        assert products == before, "the library keeps them for other layers"
        for product, configs in products.items():
            for (above, to, config), (new_above, new_to, new) in zip(configs, changed[product], strict=True):
                lost = never_added(config)
                assert has_incomplete_reduction(config) == bool(lost), (version, name, config)
                assert not never_added(new), (version, name, new)
                assert (above, to) == (new_above, new_to)
                faulty += bool(lost)
                if lost:
                    # One that the library has itself, for more rows.
                    assert lost == {40, 48} and json.loads(json.dumps(new)) in [each[2] for each in configs]
                    assert math.prod(new["block_shape"][1:]) == math.prod(config["block_shape"][1:])
        for rows in range(1, 8192, 7):
            heights = tallest(changed, rows)
            assert heights["w13"] == heights["w2"], (version, name, rows)
    assert faulty


def test_only_a_library_that_leaves_sums_out_gets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_oracle.compat import humming as ours

    config = {"block_shape": (56, 128, 128), "warp_shape": (56, 32, 64), "num_stages": 4}
    given = [(0, 144, {**config, "block_shape": (8, 128, 256), "warp_shape": (8, 32, 64)}), (144, 1 << 30, config)]
    for version, height in (("0.1.10", 64), ("0.1.11", 64), *((each, 56) for each in WHOLE)):
        monkeypatch.setattr(ours.metadata, "version", lambda name, version=version: version)
        experts = SimpleNamespace(w13_tuning_config=given, w2_tuning_config=given)
        experts.w13_tuning_config_str = experts.w2_tuning_config_str = json.dumps(given)
        ours.complete_reduction(experts)
        for product in ("w13", "w2"):
            of_vllm = getattr(experts, f"{product}_tuning_config")
            of_library = json.loads(getattr(experts, f"{product}_tuning_config_str"))
            assert [each[2]["block_shape"][0] for each in of_vllm] == [8, height], version
            assert [each[2]["block_shape"][0] for each in of_library] == [8, height], version


@pytest.mark.matrix
def test_releases_with_incomplete_sums_are_known_by_their_pins() -> None:
    """vLLM's releases over a stand-in for the layer are those whose library leaves sums out; `complete_reduction` is
    called there and nowhere else."""
    for release in SERVED:
        version, _ = humming(release)
        assert (tuple(map(int, version.split("."))) < (0, 1, 12)) == (release < "0.28"), (release, version)


@some_releases(*(each for each in SERVED if each < "0.28"))
def test_vllms_classes_hold_and_use_the_configurations_that_are_replaced(release: str) -> None:
    file = sources(release) / "vllm/model_executor/layers/fused_moe/experts/fused_humming_moe.py"
    tree = ast.parse(file.read_text())
    uses: dict[str, list[type]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and "tuning_config" in node.attr and ast.unparse(node.value) == "self":
            uses.setdefault(node.attr, []).append(type(node.ctx))
    # What chooses a kernel, and the height of the blocks that tokens are sorted for, is read at each call.
    for name in ("w13_tuning_config", "w13_tuning_config_str", "w2_tuning_config", "w2_tuning_config_str"):
        assert uses[name].count(ast.Store) == 1 and ast.Load in uses[name], (name, uses)
    assert set(uses) == {f"{each}_tuning_config{end}" for each in ("w13", "w2") for end in ("", "_str")}


def parts(config: dict[str, Any], rows: int, columns: int, blocks: int) -> int:
    """Most parts that a block's sum of a product is cut into, each choice being another expert's.

    Blocks that make whole waves stay whole; the columns of the others are dealt out to all multiprocessors in pieces of
    one length, one behind the other, wherever these begin.

    Source: humming-kernels, ``scheduler.cuh``, of 0.1.10 and 0.1.19, but for what makes pieces longer.
    """
    _, width, depth = config["block_shape"]
    if not config["use_stream_k"]:
        return 1
    places = (config.get("num_sms") or SMS) * config.get("num_ctas_per_sm", 1)
    steps = columns // depth
    tiles = blocks * (rows // width)
    cut = tiles
    if tiles > places:
        cut = tiles % places
        cut += places if cut and cut * 10 <= places else 0
    if not cut:
        return 1
    piece = math.ceil(cut * steps / places)
    return max((tile * steps + steps - 1) // piece - tile * steps // piece + 1 for tile in range(cut))


def replaced(products: dict[str, list[Any]], inner: int, hidden: int, **more: Any) -> Any:
    """Experts with these configurations, after `limit_k_splits`."""
    experts = SimpleNamespace(w13_tuning_config=products["w13"], w2_tuning_config=products["w2"])
    limit_k_splits(experts, problem(hidden_size=hidden, intermediate_size=inner, **more), SMS)
    return experts


def config_of(found: list[Any], choices: int) -> dict[str, Any]:
    """The one configuration for so many choices."""
    (one,) = [config for above, to, config in found if above < choices <= (to or 1 << 30)]
    assert isinstance(one, dict)
    return one


@pytest.mark.parametrize(
    ("release", "layers"),
    [
        pytest.param(DEFAULT_RELEASE, ("kimi_tp8", "narrow"), marks=pytest.mark.full),
        *(pytest.param(each, (), marks=pytest.mark.matrix) for each in SERVED),
    ],
)
def test_no_sum_of_a_short_grid_has_more_than_three_parts(release: str, layers: tuple[str, ...]) -> None:
    """In the full tier of the layers whose sums are cut most."""
    version, folder = humming(release)
    cut = 0
    for name, products in tuning(folder, *layers).items():
        _, hidden, inner = LAYERS[name.split()[0]]
        before = copy.deepcopy(products)
        experts = replaced(products, inner, hidden)
        assert products == before, "the library keeps them for other layers"
        for product, rows, columns in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            found = getattr(experts, f"{product}_tuning_config")
            assert json.loads(getattr(experts, f"{product}_tuning_config_str")) == json.loads(json.dumps(found))
            for choices in range(1, 300):
                theirs, ours = config_of(products[product], choices), config_of(found, choices)
                blocks, places = choices * (rows // theirs["block_shape"][1]), SMS * theirs.get("num_ctas_per_sm", 1)
                if blocks <= places:  # else only the last wave is cut
                    assert parts(ours, rows, columns, choices) <= 3, (version, name, product, choices)
                    cut = max(cut, parts(theirs, rows, columns, choices))
                # The same kernel on fewer multiprocessors, and only where these would be more than two for a block.
                assert {**theirs, "num_sms": 0} == {**ours, "num_sms": 0}
                few = 2 * blocks < places and theirs["use_stream_k"]
                assert (ours != theirs) is few, (version, name, product, choices)
    assert cut > 4, "nothing was cut into many parts before"


def test_two_blocks_on_a_multiprocessor_are_two_places() -> None:
    config = {"block_shape": (8, 128, 256), "use_stream_k": True, "num_ctas_per_sm": 2, "num_sms": 132}
    given = {"w13": [(0, 40, config), (40, 0, {**config, "use_stream_k": False})], "w2": [(0, 1 << 30, config)]}
    found = replaced(given, 256, 7168).w13_tuning_config
    assert [(above, to) for above, to, _ in found] == [*((each, each + 1) for each in range(32)), (32, 40), (40, 0)]
    assert [each["num_sms"] for _, _, each in found[:3]] == [4, 8, 12], "of eight places a choice"
    assert found[-2:] == [(32, 40, config), given["w13"][1]]


@pytest.mark.parametrize(
    ("ranks", "places"), [(1, (2, 4, 6, 8)), (2, (3, 4, 6, 8)), (8, (3, 5, 7, 8)), (64, (3, 5, 7, 8))]
)
def test_the_busiest_rank_of_experts_gets_a_multiprocessor_for_each_block(ranks: int, places: tuple[int, ...]) -> None:
    """By the mean of one to four choices."""
    config = {"block_shape": (8, 128, 256), "use_stream_k": True}
    given = {"w13": [(0, 1 << 30, config)], "w2": [(0, 1 << 30, {**config, "use_stream_k": False})]}
    found = replaced(given, 256, 7168, parallel=Parallel(ep=ranks)).w13_tuning_config
    assert tuple(each["num_sms"] for _, _, each in found[:4]) == tuple(4 * each for each in places)


def test_the_busiest_of_eight_ranks_has_fewer_choices_than_are_counted() -> None:
    """One token of eight choices: 2.6 in the mean, where 3 are counted."""
    drawn = torch.randint(8, (100_000, 8), generator=torch.Generator().manual_seed(0))
    busiest = torch.nn.functional.one_hot(drawn, 8).sum(1).amax(1).double().mean()
    assert busiest.item() == pytest.approx(2.6, abs=0.1)


def test_num_sms_is_capped_at_the_devices_sm_count() -> None:
    config = {"block_shape": (8, 128, 256), "use_stream_k": True}
    given = {"w13": [(0, 1 << 30, config)], "w2": [(0, 1 << 30, {**config, "use_stream_k": False})]}
    found = replaced(given, 2880, 2880, parallel=Parallel(ep=8)).w13_tuning_config
    assert [(above, to, each["num_sms"]) for above, to, each in found[:1]] == [(0, 1, SMS)], "3 times 46 of 132"
    assert found[1:] == [(1, 1 << 30, config)]


def test_a_configuration_that_does_not_say_is_cut_as_the_library_cuts_it() -> None:
    config = {"block_shape": (8, 128, 128)}
    found = replaced({"w13": [(0, 8, config)], "w2": [(0, 8, {**config, "use_stream_k": False})]}, 256, 7168)
    assert [each["num_sms"] for _, _, each in found.w13_tuning_config] == [8 * each for each in range(1, 9)]
    assert found.w2_tuning_config == [(0, 8, {**config, "use_stream_k": False})]


def test_experts_without_a_gate_have_half_the_rows_and_padded_ones_count() -> None:
    config = {"block_shape": (8, 128, 128), "use_stream_k": True}
    given = {"w13": [(0, 1 << 30, config)], "w2": [(0, 1 << 30, {**config, "use_stream_k": False})]}
    found = replaced(given, 928, 2688, activation=Activation("relu2", gated=False))
    assert found.w13_tuning_config[0] == (0, 1, {**config, "num_sms": 16}), "928 rows are padded to 1024: 8 blocks"
    assert found.w2_tuning_config == given["w2"]


def test_a_sum_of_many_parts_is_seen() -> None:
    """What `parts` counts, by hand: 32 blocks of 28 steps on 132 multiprocessors are pieces of seven steps."""
    config = {"block_shape": (8, 128, 256), "use_stream_k": True}
    assert parts(config, 512, 7168, 8) == 4
    assert parts({**config, "num_sms": 64}, 512, 7168, 8) == 2
    assert parts({**config, "use_stream_k": False}, 512, 7168, 8) == 1
    assert parts({**config, "num_sms": 8}, 512, 1280, 1) == 3, "the second block begins within a piece"
