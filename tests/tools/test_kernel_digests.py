"""Digests of compiled kernels, and the fingerprints that they may renew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.lib.kernel_launches import fp8_launches, launches
from tests.tools import restamp_profiles
from tests.tools.kernel_digests import Digests, without_names
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig
from vllm_moe_oracle.measurements.environment import kernel_sources_hash

TILE = TileConfig(16, 64, 128)


def test_symbols_are_numbered_in_order() -> None:
    assert without_names('call @"a.b"(%x) @c @"a.b"') == "call @0(%x) @1 @0"


def test_equal_launches_have_equal_digests() -> None:
    """A digest depends on the tile and on the dtype, not on the object."""
    digests = Digests()

    def of(tile: TileConfig) -> list[str]:
        return [digests.of(each) for each in launches("qwen-int4", 8, LaunchConfig(tile, tile))]

    first = of(TILE)
    assert of(TileConfig(16, 64, 128)) == first
    wide = of(TileConfig(16, 128, 128))
    assert [a == b for a, b in zip(first, wide, strict=True)] == [True, False, False, True]
    assert digests.of(fp8_launches(544, 96, "silu", False)[0]) not in first


def test_a_digest_depends_on_how_arguments_are_specialized() -> None:
    """On the divisibility of an integer, and on whether it is specialized at all."""
    digests = Digests()
    gemms = [each for each in fp8_launches(544, 96, "silu", False) if "rows_of_expert" in each[0].arg_names]
    kernel, args, kwargs = gemms[0]
    index = kernel.arg_names.index("columns")
    assert args[index] == 544
    first = digests.of((kernel, args, kwargs))
    assert digests.of((kernel, (*args[:index], 543, *args[index + 1 :]), kwargs)) != first
    free = next(each for each in kernel.params if each.name == "max_blocks")
    assert free.do_not_specialize
    with mock.patch.object(free, "do_not_specialize", False):
        assert digests.of((kernel, args, kwargs)) != first


@pytest.fixture
def restamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, bool]]:
    """Runs the tool on digests of before and after, and one profile's text; returns its status, and whether the text
    stayed."""

    def run(before: dict[str, Any], after: dict[str, Any], text: str) -> tuple[int, bool]:
        profile, paths = tmp_path / "gpu.json", [tmp_path / "before.txt", tmp_path / "after.txt"]
        profile.write_text(text)
        for path, made in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(made))
        monkeypatch.setattr(restamp_profiles, "PROFILES", tmp_path)
        monkeypatch.setattr(restamp_profiles, "EQUAL", tmp_path / "equal.txt")
        restamp_profiles.EQUAL.write_text('{"0123456789abcdef": ["fedcba9876543210"]}')
        monkeypatch.setattr("sys.argv", ["restamp_profiles", *map(str, paths)])
        return restamp_profiles.main(), profile.read_text() == text

    return run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"triton": "3.9.0"}, "made by another triton"),
        ({"tool": "1", "triton": "3.9.0"}, "made by another tool and another triton"),
        ({"compiled": {"a": ["1"]}}, "measure again"),
        ({"choices": {"a": "1"}}, "measure again"),
        ({"compiled": {"a": ["0"], "b: float16, 64": ["1"]}}, None),
        ({"compiled": {"a": ["0"], "fp8 silu": ["1"]}}, None),
        ({"compiled": {"b: float16, 64": ["1"]}}, "measure again"),
    ],
)
def test_profiles_are_restamped_only_for_equal_digests(
    change: dict[str, Any],
    said: str | None,
    restamp: Callable[..., tuple[int, bool]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    stale = '{\n"environment": {"gpu":"x","kernels": "0123456789abcdef"}\n}'
    digests = {"tool": "0", "triton": "3.6.0", "compiled": {"a": ["0"]}, "choices": {"a": "0"}}
    assert restamp(digests, digests | change, stale) == (said is not None, said is not None)
    assert (said or kernel_sources_hash()) in capsys.readouterr().out
    # Where no call in 16 bits differs, times of earlier sources stay those of these kernels.
    same = said is None and not any("float16" in name for name in change.get("compiled", ()))
    found = restamp_profiles.earlier_fingerprints(kernel_sources_hash())
    assert found == ({"0123456789abcdef", "fedcba9876543210"} if same else set())


@pytest.mark.parametrize(
    ("call", "text"), [("b: float16, 1", '"dtype":"float16"'), ("fp8 silu mxfp4", '"hopper_mxfp4_w4a8": 1')]
)
def test_calls_that_a_profile_has_times_of_may_not_differ(
    call: str, text: str, restamp: Callable[..., tuple[int, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    stale = f'{{\n"environment": {{"kernels": "0123456789abcdef"}},\n"entries": {{{text}}}\n}}'
    digests = {"tool": "0", "triton": "3.6.0", "compiled": {call: ["0"]}, "choices": {}}
    assert restamp(digests, digests | {"compiled": {call: ["1"]}}, stale) == (1, True)
    assert f"measure again\n{call}" in capsys.readouterr().out


def test_every_profile_has_the_fingerprint_of_these_sources() -> None:
    """See `tests/tools/restamp_profiles.py` for what to do when they differ."""
    for path in restamp_profiles.PROFILES.glob("*.json"):
        text = path.read_text()
        if restamp_profiles.FINGERPRINT.search(text):
            assert restamp_profiles.restamped(text, kernel_sources_hash()) == text, path.name


def test_a_fingerprint_is_renewed_in_the_environment_only(tmp_path: Path) -> None:
    old = "0123456789abcdef"
    text = f'{{\n"environment": {{"gpu":"x","kernels": "{old}"}},\n"note": "kernels {old}"\n}}'
    made = restamp_profiles.restamped(text, "f" * 16)
    assert json.loads(made) == {**json.loads(text), "environment": {"gpu": "x", "kernels": "f" * 16}}
