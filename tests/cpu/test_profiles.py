"""Profiles: those that are shipped hold for the cards that they name, and damaged or hostile ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import H200, problem

from vllm_moe_oracle import device, settings
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.kernels.prefill_config import Prefill
from vllm_moe_oracle.measure import environment, lookup, profile, shapes
from vllm_moe_oracle.measure.cells import Sample, cell_of
from vllm_moe_oracle.oracle.measured import WIDEST_GAP
from vllm_moe_oracle.oracle.objectives import parse
from vllm_moe_oracle.oracle.oracle import decide
from vllm_moe_oracle.oracle.registry import default_registry

SHIPPED = sorted(profile.SHIPPED.glob("nvidia_*.json"))


def card_of(path: Path) -> str:
    """The card's name: a card may have several profiles, of different runs."""
    return "-".join(path.stem.split("_")[:2])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_holds_for_its_card_as_users_have_it(path: Path) -> None:
    found = profile.read(path)
    name = card_of(path)
    differences = environment.differences(found.environment, environment.of(device.named(name)))
    assert differences.hard == ()
    assert found.environment.kernels and found.environment.driver and found.conditions["command"]
    for entry in found.entries:
        assert entry.backends.keys() <= {backend.name for backend in default_registry()}, entry.cell


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_profile_decides(path: Path) -> None:
    """For every layer of the list that it has: a finished cell has all numbers of tokens that the objective needs."""
    found, name = profile.read(path), card_of(path)
    chosen = settings.load({}, assignments={"cache": str(path.parent / "no cache")})
    cells = {entry.cell for entry in found.entries}
    layers = [each for each in shapes.served() if cell_of(each) in cells]
    assert len(layers) == len(cells)
    decided = []
    for layer in layers:
        evidence = lookup.evidence(layer, device.named(name), chosen)
        decision = decide(layer, device.named(name), chosen, evidence=evidence)
        assert evidence is not None and "the shipped profile" in evidence.source
        decided.append(decision.why == "measured" and decision.measured is not None)
    assert all(decided)
    largest = parse("balanced").largest
    for entry in found.entries:
        for backend, timing in entry.backends.items():
            counts = sorted(map(int, timing.times.get("uniform", {})))
            if len(counts) >= 10:
                assert counts[0] == 1 and counts[-1] * WIDEST_GAP >= largest, (entry.cell, backend)


def test_the_h200_has_profiles_of_many_layers_and_none_twice() -> None:
    cells = [entry.cell for path in SHIPPED if card_of(path) == "nvidia-h200" for entry in profile.read(path).entries]
    assert len(cells) == len(set(cells)) >= 34


def test_what_tune_measured_has_both_routings_and_ten_numbers_of_tokens() -> None:
    found = profile.read(profile.SHIPPED / "nvidia_h200.json")
    assert " tune --shapes " in found.conditions["command"] and len(found.entries) >= 13
    for entry in found.entries:
        measured = {name: timing for name, timing in entry.backends.items() if not timing.failures}
        # What the libraries' kernels cannot run is kept with its reason, and not chosen; ours run what they accept.
        assert not any(name.startswith("own") for name in entry.backends.keys() - measured.keys()), entry.cell
        assert any(name.startswith("own") for name in measured) and len(measured) >= 2, entry.cell
        for backend, timing in measured.items():
            assert {kind: len(counts) >= 10 for kind, counts in timing.times.items()} == {
                "uniform": True,
                "skewed": True,
            }
            assert set(timing.tiles) <= {"uniform", "skewed"} and (not timing.tiles or backend.startswith("own"))


def samples() -> list[Sample]:
    return [Sample("marlin_mxfp8", "16bit", count, "uniform", 50.0, 49.0, 51.0, 9, 1e-3) for count in (1, 8)] + [
        Sample("own_mxfp8", "16bit", 1, "skewed", failure="RuntimeError: no")
    ]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    made = profile.make(environment.of(H200), {cell_of(problem()): samples()}, {"command": "tune"})
    profile.write(made, tmp_path / "p.json")
    return tmp_path / "p.json"


def test_what_is_written_is_read(written: Path) -> None:
    found = profile.read(written)
    assert found.environment == environment.of(H200)
    assert sorted(found.samples(cell_of(problem())), key=str) == sorted(samples(), key=str)
    assert found.samples(cell_of(problem(hidden_size=64))) == []
    assert json.loads(written.read_bytes())["version"] == profile.VERSION
    assert [path.name for path in written.parent.iterdir()] == ["p.json"]


Change = Callable[[Any], None]


def _set(data: Any, *where: Any, to: Any) -> None:
    for key in where[:-1]:
        data = data[key]
    data[where[-1]] = to


TIMES = ("entries", 0, "backends", "marlin_mxfp8", "times")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.pop("format"), "is no profile"),
        (lambda data: _set(data, "version", to=99), "version 99"),
        (lambda data: _set(data, "extra", to=1), "unknown field"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[-1, 1, 1, 9]), "impossible"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[1e300, 1, 1, 9]), "impossible"),
        (lambda data: _set(data, *TIMES, "uniform", "1", to=[1, 1]), "is no profile"),
        (lambda data: _set(data, *TIMES, "uniform", "x", to=[1, 1, 1, 9]), "is no profile"),
        (lambda data: _set(data, *TIMES, "uniform", "-4", to=[1, 1, 1, 9]), "impossible"),
        (lambda data: _set(data, *TIMES, "sideways", to={"1": [1, 1, 1, 9]}), "is no profile"),
        (lambda data: _set(data, "environment", "gpu", to=7), "is no profile"),
        (lambda data: _set(data, "environment", "driver", to="9\x1b[2J"), "impossible place"),
        (lambda data: _set(data, "environment", "packages", "torch", to="2.0\nERROR"), "impossible place"),
        (lambda data: _set(data, "environment", "packages", to=dict.fromkeys(map(str, range(60)), "1")), "impossible"),
        (lambda data: _set(data, "entries", 0, "cell", "experts", to="many"), "is no profile"),
        (lambda data: _set(data, "entries", 0, "cell", "activation", to="silu\x1b[2J"), "impossible layer"),
        (lambda data: _set(data, "entries", 0, "cell", "dtype", to="x" * 201), "impossible layer"),
        (
            lambda data: _set(data, *TIMES[:3], "\x1b[2Jown", to=data["entries"][0]["backends"]["marlin_mxfp8"]),
            "has an impossible measurement",
        ),
    ],
)
def test_impossible_profiles_are_refused(written: Path, change: Change, words: str) -> None:
    data = json.loads(written.read_bytes())
    change(data)
    written.write_text(json.dumps(data))
    with pytest.raises(MeasurementError, match=words):
        profile.read(written)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": {}}'])
def test_what_is_no_profile_is_refused_and_serving_goes_on(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(content)
    with pytest.raises(MeasurementError, match="is no profile"):
        profile.read(path)
    chosen = settings.load({}, assignments={"profile": str(path), "cache": str(tmp_path)})
    found = lookup.evidence(problem(hidden_size=32), H200, chosen)
    assert found is not None and found.times == {} and "is no profile" in found.remarks[0]


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing"])
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    import os

    path = tmp_path / "p.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(MeasurementError, match=r"is no regular file|cannot be read"):
        profile.read(path)


def test_a_profile_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    made = profile.make(environment.of(H200), {}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasurementError, match="cannot be written"):
        profile.write(made, tmp_path / "file" / "p.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_our_kernels_choose_what_they_chose_where_a_profile_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's fingerprint leaves their tables and rules out: a changed choice needs its layer measured anew."""
    import own_choices

    assert own_choices.changed() == []
    before = own_choices.choose

    def other(weights: Any, top_k: int, tokens: int, *, quantise: bool) -> Any:
        found = before(weights, top_k, tokens, quantise=quantise)
        persistent = isinstance(found, Prefill) and (weights.hidden, tokens) == (2880, 4096)
        return Prefill(stages=2) if persistent else found

    monkeypatch.setattr(own_choices, "choose", other)
    assert own_choices.changed() and all("H2880" in each and "4096 tokens" in each for each in own_choices.changed())
