"""What was decided reaches the metrics endpoint from the processes that hold the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the endpoint is vLLM's, which brings it")

import prometheus_client as prometheus

from vllm_moe_oracle import __version__, decision_records, settings
from vllm_moe_oracle.compat import metrics


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv(settings._RECORDS_DIR_VAR, str(tmp_path))
    yield tmp_path


def record(layers: int = 2, rank: int = 0, backend: str = "fast", first: str = "model.layers.0.mlp") -> dict[str, Any]:
    return {
        "rank": rank,
        "served": layers,
        "moe_layers": layers + 1,
        "groups": [
            {
                "layers": [first] * layers,
                "count": layers,
                "problem": {"scheme": {"name": "mxfp8"}},
                "decision": {"backend": backend, "why": "measured"},
            }
        ],
    }


def scrape() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = prometheus.CollectorRegistry()
    assert metrics.with_decision_collector(lambda: registry) is registry
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def info(rank: str, backend: str, layers: str = "2", first: str = "model.layers.0.mlp") -> Any:
    labels = {
        "version": __version__,
        "rank": rank,
        "scheme": "mxfp8",
        "backend": backend,
        "why": "measured",
        "layers": layers,
        "first_layer": first,
    }
    return "vllm:moe_oracle_info", tuple(sorted(labels.items()))


def test_nothing_is_shown_without_a_folder_or_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scrape() == {}
    monkeypatch.delenv(settings._RECORDS_DIR_VAR)
    decision_records.write_record(record())
    assert scrape() == {}
    assert list(folder.iterdir()) == []


def test_groups_and_counts_of_another_process_are_shown(folder: Path) -> None:
    code = f"from vllm_moe_oracle import decision_records; decision_records.write_record({record(rank=1)!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    decision_records.write_record(record(layers=3))
    assert scrape() == {
        info("0", "fast", "3"): 1.0,
        info("1", "fast"): 1.0,
        ("vllm:moe_oracle_layers", (("rank", "0"), ("run_by", "moe_oracle"))): 3.0,
        ("vllm:moe_oracle_layers", (("rank", "0"), ("run_by", "stock"))): 1.0,
        ("vllm:moe_oracle_layers", (("rank", "1"), ("run_by", "moe_oracle"))): 2.0,
        ("vllm:moe_oracle_layers", (("rank", "1"), ("run_by", "stock"))): 1.0,
    }


def test_the_text_of_the_endpoint_is_what_prometheus_reads(folder: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    decision_records.write_record(record(first='an "odd" name\nof a layer'))
    registry = prometheus.CollectorRegistry()
    metrics.with_decision_collector(lambda: registry)
    text = prometheus.generate_latest(registry).decode()
    names = {sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples}
    assert names["vllm:moe_oracle_info"].labels["first_layer"] == 'an "odd" name\nof a layer'


def test_a_reload_replaces_and_a_draft_model_is_added(folder: Path) -> None:
    decision_records.write_record(record(backend="fast"))
    decision_records.write_record(record(backend="other"))
    decision_records.write_record(record(backend="fast", first="draft.layers.0.mlp"))
    shown = {labels for name, labels in scrape() if name == "vllm:moe_oracle_info"}
    assert shown == {info("0", "other")[1], info("0", "fast", first="draft.layers.0.mlp")[1]}


def test_a_registry_gets_one_collector(folder: Path) -> None:
    decision_records.write_record(record())
    registry = prometheus.CollectorRegistry()
    for _ in range(3):
        metrics.with_decision_collector(lambda: registry)
    families = [family.name for family in registry.collect()]
    assert families == ["vllm:moe_oracle", "vllm:moe_oracle_layers"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"groups": 3}', "[" * 100_000, '{"groups": [{"layers": []}]}', '{"groups": [7]}']
)
def test_what_is_no_record_is_passed_over(folder: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "1.json").write_text(content)
    (folder / "2.json.part").write_text("{")
    decision_records.write_record(record())
    assert info("0", "fast") in scrape()


def test_a_folder_that_cannot_be_written_to_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    monkeypatch.setattr(decision_records.logger, "warning", lambda text, *words: said.append(text % words))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(settings._RECORDS_DIR_VAR, str(tmp_path / "file" / "folder"))
    decision_records.write_record(record())
    assert len(said) == 1 and "the metrics endpoint will not have these decisions" in said[0]
    assert scrape() == {}
    monkeypatch.setenv(settings._RECORDS_DIR_VAR, str(tmp_path / "full"))
    monkeypatch.setattr(tempfile, "mkstemp", _no_space)
    decision_records.write_record(record())
    assert "No space left on device" in said[1]


def _no_space(**_: object) -> str:
    raise OSError(28, "No space left on device")


def test_the_first_process_names_the_folder_and_takes_it_away() -> None:
    code = (
        "import os, subprocess, sys, json\n"
        "from vllm_moe_oracle import decision_records, settings\n"
        "decision_records.reserve_dir(); mine = settings.records_dir(); decision_records.reserve_dir()\n"
        "assert settings.records_dir() == mine and not os.path.exists(mine)\n"
        "child = 'from vllm_moe_oracle import decision_records, settings; decision_records.reserve_dir(); "
        "decision_records.write_record(dict(groups=[])); print(settings.records_dir())'\n"
        "theirs = subprocess.run([sys.executable, '-c', child], capture_output=True, text=True, check=True).stdout\n"
        "assert os.stat(mine).st_mode & 0o777 == 0o700\n"
        "pid = os.fork()\n"
        "if not pid: sys.exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(json.dumps([mine, theirs.strip(), len(list(decision_records.read_records()))]))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != settings._RECORDS_DIR_VAR}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    mine, theirs, found = json.loads(done.stdout)
    assert mine == theirs and found == 1  # neither the child nor the fork took it away
    assert not os.path.exists(mine)


def test_a_folder_that_another_process_has_named_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings._RECORDS_DIR_VAR, str(tmp_path / "theirs"))
    decision_records.write_record({"groups": []})
    (tmp_path / "theirs" / "file").touch()
    decision_records.remove_dir()
    assert (tmp_path / "theirs" / "file").exists() and settings.records_dir() is None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    decision_records.reserve_dir()
    own = settings.records_dir()
    decision_records.write_record({"groups": []})
    assert own is not None and os.path.exists(own)
    decision_records.remove_dir()
    assert not os.path.exists(own)


def test_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    """A process that is killed leaves its folder; the next server removes it. What may belong to others stays."""
    write = (
        "import os, signal, sys\n"
        "from vllm_moe_oracle import decision_records, settings\n"
        "decision_records.reserve_dir(); decision_records.write_record(dict(groups=[]))\n"
        "print(settings.records_dir(), flush=True)\n"
    )
    clean = {name: value for name, value in os.environ.items() if name != settings._RECORDS_DIR_VAR}
    start = [sys.executable, "-W", "ignore", "-c"]
    options: dict[str, Any] = {"env": clean | {"TMPDIR": str(tmp_path)}, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*start, f"{write}sys.stdin.read()"], stdin=subprocess.PIPE, **options) as alive:
        assert alive.stdout is not None
        running = Path(alive.stdout.readline().strip())
        left = [
            Path(subprocess.run([*start, f"{write}os.kill(os.getpid(), signal.{kind})"], **options).stdout.strip())
            for kind in ("SIGKILL", "SIGTERM")
        ]
        assert left[-1].is_dir() and not left[0].exists(), "the second one has found the first one's"
        others = [tmp_path / "vllm-moe-oracle-mine", tmp_path / "something"]  # one without a lock, one of another name
        for each in others:
            each.mkdir()
        (others[1] / "writers.lock").touch()
        link = tmp_path / "vllm-moe-oracle-link"
        link.symlink_to(others[1], target_is_directory=True)
        ended = Path(subprocess.run([*start, write], check=True, **options).stdout.strip())
        assert not left[1].exists() and not ended.exists()
        assert running.is_dir() and link.is_symlink() and all(each.is_dir() for each in others)
        alive.communicate("")
    assert not running.exists()
