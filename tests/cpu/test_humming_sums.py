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
from cases import problem
from releases import ReleaseUnavailable, humming, sources

from vllm_moe_oracle.backends._humming import sums
from vllm_moe_oracle.compat import RELEASES, since

PROBE = Path(__file__).parents[1] / "humming_probe.py"
SERVED = RELEASES[RELEASES.index(since.HUMMING) :]


@cache
def probed(folder: Path) -> dict[str, dict[str, bool]]:
    """Whether products are split, by number of columns, free and with batch invariance."""
    ended = subprocess.run([sys.executable, str(PROBE), str(folder)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{folder}: {ended.stderr[-2000:]}"
    found: dict[str, dict[str, bool]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("release", SERVED)
def test_products_are_split_whatever_their_columns_but_with_batch_invariance(release: str) -> None:
    try:
        version, folder = humming(release)
    except ReleaseUnavailable as error:
        pytest.skip(str(error))
    found = probed(folder)
    assert len(found) == 4
    for columns, split in found.items():
        layer = {"hidden_size": int(columns), "intermediate_size": int(columns)}
        for name, invariant in (("free", False), ("invariant", True)):
            said = sums(problem(**layer, batch_invariant=invariant))
            assert ("parts of a product" in said) == split[name], (version, columns, name)


WHOLE = ("0.1.12", "0.1.19")
"""Releases of the library from the first on whose blocks add up all of their sums."""


@cache
def tuning(folder: Path) -> dict[str, dict[str, list[Any]]]:
    """The library's configurations, by layer and product."""
    command = [sys.executable, str(PROBE), str(folder), "--tuning"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{folder}: {ended.stderr[-2000:]}"
    found: dict[str, dict[str, list[Any]]] = json.loads(ended.stdout)
    return found


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


@pytest.mark.parametrize("release", [each for each in SERVED if each < "0.28"])
def test_configurations_that_leave_sums_out_are_replaced(release: str) -> None:
    from vllm_moe_oracle.compat.humming import leaves_out, with_whole_sums

    try:
        version, folder = humming(release)
    except ReleaseUnavailable as error:
        pytest.skip(str(error))
    faulty = 0
    for name, products in tuning(folder).items():
        before = copy.deepcopy(products)
        changed = with_whole_sums(products)
        assert products == before, "the library keeps them for other layers"
        for product, configs in products.items():
            for (above, to, config), (new_above, new_to, new) in zip(configs, changed[product], strict=True):
                lost = never_added(config)
                assert leaves_out(config) == bool(lost), (version, name, config)
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
        ours.sum_whole(experts)
        for product in ("w13", "w2"):
            of_vllm = getattr(experts, f"{product}_tuning_config")
            of_library = json.loads(getattr(experts, f"{product}_tuning_config_str"))
            assert [each[2]["block_shape"][0] for each in of_vllm] == [8, height], version
            assert [each[2]["block_shape"][0] for each in of_library] == [8, height], version


def test_the_first_release_that_leaves_nothing_out_is_told_by_its_pins() -> None:
    """vLLM's releases over a stand-in for the layer are those whose library leaves sums out; `sum_whole` is called
    there and nowhere else."""
    for release in SERVED:
        try:
            version, _ = humming(release)
        except ReleaseUnavailable as error:
            pytest.skip(str(error))
        assert (tuple(map(int, version.split("."))) < (0, 1, 12)) == (release < "0.28"), (release, version)


@pytest.mark.parametrize("release", [each for each in SERVED if each < "0.28"])
def test_vllms_classes_hold_and_use_the_configurations_that_are_replaced(release: str) -> None:
    try:
        file = sources(release) / "vllm/model_executor/layers/fused_moe/experts/fused_humming_moe.py"
    except ReleaseUnavailable as error:
        pytest.skip(str(error))
    tree = ast.parse(file.read_text())
    uses: dict[str, list[type]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and "tuning_config" in node.attr and ast.unparse(node.value) == "self":
            uses.setdefault(node.attr, []).append(type(node.ctx))
    # What chooses a kernel, and the height of the blocks that tokens are sorted for, is read at each call.
    for name in ("w13_tuning_config", "w13_tuning_config_str", "w2_tuning_config", "w2_tuning_config_str"):
        assert uses[name].count(ast.Store) == 1 and ast.Load in uses[name], (name, uses)
    assert set(uses) == {f"{each}_tuning_config{end}" for each in ("w13", "w2") for end in ("", "_str")}
