"""The shipped times beside stock's layer are those of the committed benchmarks; bad benchmarks are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lib import golden_files
from tests.tools import comparisons
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.bench_records import STOCK_DEFAULT
from vllm_moe_oracle.releases.supported import NEWEST


def test_the_shipped_files_are_those_of_the_benchmarks() -> None:
    found = comparisons.files()
    assert found and [path.name for path, data in found.items() if path.read_bytes() != data] == []
    assert {path.name for path in profile.SHIPPED_FOLDER.glob("stock_*.json")} == {path.name for path in found}


def test_every_time_of_stock_is_a_committed_one() -> None:
    """Read again without the code that packs them: each shipped time of stock stands in a benchmark."""
    written = {
        (json.dumps(record["kernel_shape"], sort_keys=True), str(record["tokens"]), record["us"][STOCK_DEFAULT])
        for pattern in comparisons.PATTERNS
        for path in comparisons.GOLDEN.glob(pattern)
        for line in path.read_text().splitlines()[1:]
        if STOCK_DEFAULT in (record := json.loads(line))["us"]
    }
    shipped = [
        (json.dumps(entry["kernel_shape"], sort_keys=True), tokens, times[0])
        for path in comparisons.files()
        for entry in json.loads(path.read_text())["entries"]
        for tokens, times in entry["backends"][STOCK_DEFAULT].get("times", {}).get("uniform", {}).items()
    ]
    assert len(shipped) > 400 and set(shipped) <= written


def test_of_several_runs_the_last_one_counts(tmp_path: Path) -> None:
    source = golden_files.newest("choice-5")
    head, *lines = source.read_text().splitlines()
    again = [json.loads(line) for line in lines]
    for record in again:
        record["us"][STOCK_DEFAULT] = 123.0
        record["quartiles"][STOCK_DEFAULT] = [122.0, 124.0]
    later = tmp_path / f"choice-10-vllm-{NEWEST}.jsonl"
    later.write_text("\n".join([head, *map(json.dumps, again)]))
    for given in ([source, later], [later, source]):
        ((_, found),) = comparisons.runs(given).items()
        (entry,) = comparisons.comparison(found).entries
        times = entry.backends[STOCK_DEFAULT].times["uniform"]
        assert len(times) == len(lines) and {each[0] for each in times.values()} == {123.0}


def test_unlisted_layers_count_where_stock_ran(tmp_path: Path) -> None:
    """Where no run of choices has the layer, whatever their numbers. Expert-parallel ranks have no layer of stock's."""
    source = golden_files.newest("unlisted-9")
    expected = {
        record["layer"]["name"]
        for record in map(json.loads, source.read_text().splitlines()[1:])
        if STOCK_DEFAULT in record["us"]
    }
    head, *lines = source.read_text().splitlines()
    others = [json.loads(line) for line in lines]
    for record in others:
        record["us"] |= {STOCK_DEFAULT: 1.0}
        record["quartiles"] |= {STOCK_DEFAULT: [1.0, 1.0]}
        record["replays"] |= {STOCK_DEFAULT: 9}
    others = [record for record in others if record["layer"]["name"] in expected]
    choice = tmp_path / f"choice-2-vllm-{NEWEST}.jsonl"
    choice.write_text("\n".join([head, *map(json.dumps, others)]))
    for given, first in (([source], None), ([source, choice], 1.0), ([choice, source], 1.0)):
        ((_, found),) = comparisons.runs(given).items()
        entries = comparisons.comparison(found).entries
        times = [each.backends[STOCK_DEFAULT].times["uniform"].values() for each in entries]
        assert len(entries) == len(expected) > 0
        assert first is None or {time[0] for each in times for time in each} == {first}


def test_a_later_run_keeps_the_numbers_of_tokens_it_lacks(tmp_path: Path) -> None:
    source = golden_files.newest("choice-5")
    head, *lines = source.read_text().splitlines()
    again = json.loads(lines[0])
    again["us"][STOCK_DEFAULT], again["quartiles"][STOCK_DEFAULT] = 123.0, [122.0, 124.0]
    later = tmp_path / f"choice-10-vllm-{NEWEST}.jsonl"
    later.write_text("\n".join([head, json.dumps(again)]))
    ((_, found),) = comparisons.runs([source, later]).items()
    (entry,) = comparisons.comparison(found).entries
    expected = {str(record["tokens"]): record["us"][STOCK_DEFAULT] for record in map(json.loads, lines)}
    expected[str(again["tokens"])] = 123.0
    times = entry.backends[STOCK_DEFAULT].times["uniform"]
    assert {count: each[0] for count, each in times.items()} == expected and len(expected) > 1


@pytest.mark.parametrize(
    ("change", "words"),
    [({"routing": "skewed"}, "only uniform"), ({"environment": {"driver": "1"}}, "different conditions")],
)
def test_runs_that_cannot_be_one_file_are_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    source = golden_files.newest("choice-5")
    head, *lines = source.read_text().splitlines()
    data = json.loads(head)
    for name, value in change.items():
        data["conditions"][name] = {**data["conditions"][name], **value} if isinstance(value, dict) else value
    other = tmp_path / f"choice-6-vllm-{NEWEST}.jsonl"
    other.write_text("\n".join([json.dumps(data), *lines]))
    ((_, found),) = comparisons.runs([source, other]).items()
    with pytest.raises(ValueError, match=words):
        comparisons.comparison(found)


def test_a_name_of_a_class_is_checked(tmp_path: Path) -> None:
    (path,) = list(comparisons.files())[:1]
    damaged = tmp_path / "p.json"
    damaged.write_text(path.read_text().replace("HummingIndexedExperts", "x" * 5000))
    with pytest.raises(MeasurementError, match="name of a class"):
        profile.read(damaged)
