"""Profiles: those that are shipped hold for the cards that they name, and damaged or hostile ones are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.unlisted_layers import LAYERS
from tests.lib.cases import H200, problem
from tests.lib.samples import measured_card
from tests.tools import merge_times
from tests.tools.kernel_choices import QUANTIZING
from vllm_moe_oracle import settings
from vllm_moe_oracle.core.objectives import parse_objective
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.measurements import environment, lookup, model_shapes, profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.oracle.measured_choice import MAX_TOKEN_RATIO
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide

SHIPPED = sorted(profile.SHIPPED_FOLDER.glob("nvidia_*.json"))
TAKEN_OUT = "hopper_mxfp8_w8a8"
"""Its tiles of 1 to 4 tokens changed, and were not compared with the ones before: these times were taken out."""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_holds_for_its_card(path: Path) -> None:
    found = profile.read(path)
    differences = environment.differences(found.environment, Environment.of(measured_card(path)))
    assert differences.hard == ()
    assert found.environment.kernels and found.environment.driver and found.conditions["command"]
    for entry in found.entries:
        assert entry.backends.keys() <= {backend.name for backend in default_registry()}, entry.kernel_shape


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_decides(path: Path) -> None:
    """For every layer that it has: a finished layer has all numbers of tokens that the objective needs."""
    found, card = profile.read(path), measured_card(path)
    chosen = settings.load({}, assignments={"cache": str(path.parent / "no cache")})
    cells = {entry.kernel_shape for entry in found.entries}
    known = {kernel_shape_of(each): each for each in (*LAYERS, *model_shapes.served_problems())}
    for shape in cells:
        layer = known[shape]
        evidence = lookup.find_measurements(layer, card, chosen)
        decision = decide(layer, card, chosen, measurements=evidence)
        assert evidence is not None and "the shipped profile" in evidence.source and decision.comparison is not None
        # Where a rule chooses another tile than was timed, a time of ours is left out, and filled in.
        counts = {name: {each.tokens for each in found.samples(shape) if each.backend == name} for name in QUANTIZING}
        most = {each.tokens for each in found.samples(shape) if not each.failure}
        whole = decision.backend not in QUANTIZING or most == counts[decision.backend]
        assert decision.why == ("measured" if whole else "predicted"), decision.explanation
        assert whole or f"at {len(counts[decision.backend])} of {len(most)} numbers of tokens" in decision.explanation
    largest = parse_objective("balanced").largest
    for entry in found.entries:
        for backend, timing in entry.backends.items():
            counts = sorted(map(int, timing.times.get("uniform", {})))
            if len(counts) >= 10:
                first = 2 if backend == TAKEN_OUT else 1
                assert counts[0] <= first and counts[-1] * MAX_TOKEN_RATIO >= largest, (entry.kernel_shape, backend)


def test_the_h200_has_profiles_of_many_layers_and_none_twice() -> None:
    stacks = {str(each.environment): each.environment.packages for each in profile.shipped()}
    assert len([name for name in stacks if "H200" in name]) == 2
    for packages in (packages for name, packages in stacks.items() if "H200" in name):
        profiles = merge_times.shipped_for("NVIDIA H200", packages).values()
        shapes = [entry.kernel_shape for found in profiles for entry in found.entries]
        assert len(shapes) == len(set(shapes)) >= 34


def test_what_tune_measured_has_both_routings_and_ten_numbers_of_tokens() -> None:
    found = profile.read(profile.SHIPPED_FOLDER / "nvidia_h200.json")
    assert " tune --shapes " in found.conditions["command"] and len(found.entries) >= 13
    for entry in found.entries:
        measured = {name: timing for name, timing in entry.backends.items() if not timing.failures}
        # What the libraries' kernels cannot run is kept with its reason, and not chosen; ours run what they accept.
        failed = entry.backends.keys() - measured.keys()
        assert not any(name.startswith("hopper") for name in failed), entry.kernel_shape
        assert any(name.startswith("hopper") for name in measured) and len(measured) >= 2, entry.kernel_shape
        for backend, timing in measured.items():
            counts = {kind: len(found) for kind, found in timing.times.items()}
            if backend == TAKEN_OUT and min(counts.values()) < 10:
                assert counts["uniform"] >= 9, entry.kernel_shape
            else:
                assert counts.keys() == {"uniform", "skewed"} and min(counts.values()) >= 10
            assert set(timing.tiles) <= {"uniform", "skewed"} and (not timing.tiles or backend.startswith("hopper"))


def samples() -> list[Sample]:
    return [Sample("marlin_mxfp8", "16bit", count, "uniform", 50.0, 49.0, 51.0, 9, 1e-3) for count in (1, 8)] + [
        Sample("hopper_mxfp8", "16bit", 1, "skewed", failure="RuntimeError: no")
    ]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    made = profile.make(Environment.of(H200), {kernel_shape_of(problem()): samples()}, {"command": "tune"})
    profile.write(made, tmp_path / "p.json")
    return tmp_path / "p.json"


def test_what_is_written_is_read(written: Path) -> None:
    found = profile.read(written)
    assert found.environment == Environment.of(H200)
    assert sorted(found.samples(kernel_shape_of(problem())), key=str) == sorted(samples(), key=str)
    assert found.samples(kernel_shape_of(problem(hidden_size=64))) == []
    assert json.loads(written.read_bytes())["version"] == profile.VERSION
    assert [path.name for path in written.parent.iterdir()] == ["p.json"]


Change = Callable[[Any], None]


def _set(data: Any, *where: Any, to: Any) -> None:
    for key in where[:-1]:
        data = data[key]
    data[where[-1]] = to


def _add_tokens(data: Any, kind: str, tokens: str) -> None:
    value = {"times": [1, 1, 1, 9], "failures": "no", "tiles": "{}"}[kind]
    data["entries"][0]["backends"]["marlin_mxfp8"].setdefault(kind, {}).setdefault("uniform", {})[tokens] = value


TIMES = ("entries", 0, "backends", "marlin_mxfp8", "times")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("format"), "is not a profile"),
        (lambda data: _set(data, "version", to=99), "version 99"),
        (lambda data: _set(data, "extra", to=1), "unknown field"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[-1, 1, 1, 9]), "invalid"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[1e300, 1, 1, 9]), "invalid"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[1, 1]), "is not a profile"),
        (lambda data: _set(data, *TIMES, "uniform", "x", to=[1, 1, 1, 9]), "tokens 'x', which is not a number"),
        (lambda data: _set(data, *TIMES, "uniform", "-4", to=[1, 1, 1, 9]), "tokens '-4', which is not a number"),
        (lambda data: _set(data, *TIMES, "sideways", to={"1": [1, 1, 1, 9]}), "is not a profile"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[1, 1, 1, 10**30]), "has an invalid measurement"),
        (lambda data: _set(data, "entries", 0, "kernel_shape", "hidden", to=10**30), "has an invalid layer"),
        (lambda data: _set(data, "entries", 0, "kernel_shape", "experts", to=-3), "has an invalid layer"),
        (lambda data: _set(data, "environment", "capability", to=-1), "has an invalid environment"),
        (lambda data: _set(data, "environment", "sm_count", to=10**30), "has an invalid environment"),
        (lambda data: _set(data, "environment", "gpu", to=7), "is not a profile"),
        (lambda data: _set(data, "environment", "driver", to="9\x1b[2J"), "has an invalid environment"),
        (lambda data: _set(data, "environment", "packages", "torch", to="2.0\nERROR"), "has an invalid environment"),
        (lambda data: _set(data, "environment", "packages", to=dict.fromkeys(map(str, range(60)), "1")), "invalid"),
        (lambda data: _set(data, "entries", 0, "kernel_shape", "experts", to="many"), "is not a profile"),
        (lambda data: _set(data, "entries", 0, "kernel_shape", "activation", to="silu\x1b[2J"), "has an invalid layer"),
        (lambda data: _set(data, "entries", 0, "kernel_shape", "dtype", to="x" * 201), "has an invalid layer"),
        (
            lambda data: _set(data, *TIMES[:3], "\x1b[2Jown", to=data["entries"][0]["backends"]["marlin_mxfp8"]),
            "has an invalid measurement",
        ),
        (
            lambda data: _set(data, *TIMES, "uniform", to={f"{count}": [1, 1, 1, 9] for count in range(1, 4100)}),
            "measurements, more than 4096",
        ),
        (
            lambda data: data["entries"][0]["backends"].update(
                {f"b{each}": {"activations": ""} for each in range(4100)}
            ),
            "measurements, more than 4096",
        ),
        (lambda data: data["entries"].extend(data["entries"] * 2000), "measurements, more than 4096"),
        # What contradicts itself.
        (lambda data: data["entries"].append(data["entries"][0]), "has 2 entries. Keep one of them"),
        *[
            (partial(_add_tokens, kind=kind, tokens=tokens), "which is not a number in digits")
            for kind in ("times", "failures", "tiles")
            for tokens in ("01", " 8 ", "1_0", "\u0661", "+1", "1.0", "0", "")
        ],
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[2, 3, 4, 9]), "has an invalid measurement"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[2, 1, 1.5, 9]), "has an invalid measurement"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[2, 9e7, 0.01, 9]), "has an invalid measurement"),
        (lambda data: _set(data, *TIMES[:-1], "error", to=1e30), "has an invalid measurement"),
        (lambda data: _set(data, *TIMES[:-1], "error", to=-0.1), "has an invalid measurement"),
        (
            lambda data: _set(data, *TIMES[:-1], "failures", to={"uniform": {"8": "no"}}),
            "marlin_mxfp8 has a time and a failure at 8 tokens, uniform routing",
        ),
        (
            lambda data: _set(data, *TIMES[:-1], "tiles", to={"skewed": {"8": "{}"}}),
            "marlin_mxfp8 has a tile configuration and no time at 8 tokens, 'skewed' routing",
        ),
    ],
)
def test_impossible_profiles_are_refused(written: Path, change: Change, words: str) -> None:
    data = json.loads(written.read_bytes())
    change(data)
    written.write_text(json.dumps(data))
    with pytest.raises(MeasurementError, match=re.escape(words)):
        profile.read(written)


@pytest.mark.parametrize(
    ("field", "again"),
    [("entries", ', "entries": []}'), ("1", None), ("gpu", None)],
    ids=["of the file", "of a backend's times", "of the environment"],
)
def test_a_field_that_an_object_has_twice_is_refused(written: Path, field: str, again: str | None) -> None:
    text = written.read_text()
    place = text.index(f'"{field}":')
    value = re.match(r'"\w+":("[^"]*"|\[[^]]*\])', text[place:])
    doubled = text.rstrip()[:-1] + again if again else f"{text[:place]}{value and value[0]},{text[place:]}"
    assert json.loads(doubled)
    written.write_text(doubled)
    with pytest.raises(MeasurementError, match=f"has the field '{field}' more than once in an object. Keep one"):
        profile.read(written)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": {}}'])
def test_what_is_no_profile_is_refused_and_serving_goes_on(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(MeasurementError, match="is not a profile"):
        profile.read(path)
    chosen = settings.load({}, assignments={"profile": str(path), "cache": str(tmp_path)})
    found = lookup.find_measurements(problem(hidden_size=32), H200, chosen)
    assert found is not None and found.times == {} and "is not a profile" in found.remarks[0]


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    import os

    path = tmp_path / "p.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(MeasurementError, match=r"is not a regular file|is a directory|cannot be read"):
        profile.read(path)


def test_a_profile_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    made = profile.make(Environment.of(H200), {}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasurementError, match="cannot be written"):
        profile.write(made, tmp_path / "file" / "p.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_our_kernels_choose_as_they_did_when_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's fingerprint does not cover tables and rules: a layer whose choice changes is to be measured again."""
    from tests.tools import kernel_choices

    assert kernel_choices.changed() == []
    before = kernel_choices.choose_config

    def other(weights: Any, top_k: int, tokens: int, *, quantize: bool) -> Any:
        found = before(weights, top_k, tokens, quantize=quantize)
        persistent = isinstance(found, PrefillConfig) and (weights.hidden, tokens) == (2880, 4096)
        return PrefillConfig(num_stages=2) if persistent else found

    monkeypatch.setattr(kernel_choices, "choose_config", other)
    assert kernel_choices.changed() and all(
        "H2880" in each and "4096 tokens" in each for each in kernel_choices.changed()
    )
