"""The nightly run against vLLM's sources raises an alarm for what lasts, and for nothing else."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.lib import releases, surface
from tests.tools import nightly


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-9.9.9.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.so", "x")
    return path


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, found: list[str]) -> int:
    monkeypatch.setattr(surface, "check", lambda release, sources: found)
    return nightly.main(["--state", str(tmp_path / "state" / "differences.json"), "--wheel", str(wheel)])


def test_only_a_lasting_difference_is_an_alarm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tmp_path, wheel, ["a is gone"]) == 0
    assert run(monkeypatch, tmp_path, wheel, ["b is gone"]) == 0
    assert run(monkeypatch, tmp_path, wheel, ["a is gone", "b is gone"]) == 1
    assert "* **lasting** b is gone" in capsys.readouterr().out
    assert run(monkeypatch, tmp_path, wheel, []) == 0


def test_damaged_state_and_missing_wheels_raise_no_alarm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").mkdir()
    for damaged in ("", "{", '{"a": 1}', "\x00"):
        (tmp_path / "state" / "differences.json").write_text(damaged)
        assert run(monkeypatch, tmp_path, wheel, ["a is gone"]) == 0

    def unavailable(folder: Path) -> Path:
        raise releases.ReleaseUnavailable("no network")

    monkeypatch.setattr(nightly, "download", unavailable)
    assert nightly.main(["--state", str(tmp_path / "other.json")]) == 0
    assert "no network" in capsys.readouterr().out and not (tmp_path / "other.json").exists()
    wheel.write_bytes(wheel.read_bytes()[:40])
    assert run(monkeypatch, tmp_path / "damaged", wheel, ["a is gone"]) == 0
    assert not (tmp_path / "damaged").exists()


def test_sources_that_cannot_be_followed_are_a_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path
) -> None:
    def fails(release: str, sources: surface.Sources) -> list[str]:
        raise RuntimeError("no such class")

    monkeypatch.setattr(surface, "check", fails)
    (difference,) = nightly.differences(wheel, tmp_path / "sources")
    assert "cannot follow these sources: RuntimeError: no such class" in difference
