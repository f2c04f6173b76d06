"""The kernels' tables are those of the committed benchmark, and that is made of `bench`'s records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools import kernel_tables
from vllm_moe_oracle.releases.supported import NEWEST

CONDITIONS = {"gpu": "NVIDIA H200", "driver": "580", "packages": {"vllm": NEWEST}, "method": "graphs", "command": "c"}


def lines(*records: dict[str, Any], **changes: Any) -> list[str]:
    """A benchmark's file."""
    return [json.dumps({"conditions": CONDITIONS | changes}), *map(json.dumps, records), ""]


def record(name: str, tokens: int, **us: float) -> dict[str, Any]:
    """One cell; `stock` stands for stock vLLM's default."""
    times = {"stock:auto" if key == "stock" else key: value for key, value in us.items()}
    return {"layer": {"name": name}, "tokens": tokens, "us": times, "roofline_us": 5.0, "failures": {},
            "quartiles": {key: [value - 1, value + 1] for key, value in times.items()}}  # fmt: skip


def test_a_benchmark_becomes_ratios() -> None:
    first = lines(
        record("mxfp4:gpt-oss-20b", 1, hopper_mxfp4=10, stock=20, marlin_mxfp4=15, emulation=1, triton_mxfp4=30),
        record("mxfp8:qwen3-30b-a3b", 64, hopper_mxfp8=100, hopper_mxfp8_w8a8=50, stock=104, marlin_mxfp8=90),
        record("mxfp8:qwen3-30b-a3b", 1, stock=104),
    )
    data = kernel_tables.golden(
        [first, lines(record("mxfp4:gpt-oss-20b", 2, hopper_mxfp4=10, stock=10), command="bench --jsonl /d/e.jsonl")]
    )
    assert data["commands"] == ["c", "bench --jsonl e.jsonl"]
    assert [(row["layer"], sorted(row["us"])) for row in data["rows"]] == [
        ("mxfp8:qwen3-30b-a3b", ["64"]),
        ("mxfp4:gpt-oss-20b", ["1", "2"]),
    ]
    assert kernel_tables.ratios(data, (1, 1), 4, best=False) == [(2.0, "mxfp4:gpt-oss-20b 1")]
    assert kernel_tables.ratios(data, (1, 1), 4, best=True) == [(1.5, "mxfp4:gpt-oss-20b 1")]
    assert kernel_tables.ratios(data, (8, 64), 8, best=True) == [(0.9, "mxfp8:qwen3-30b-a3b 64")]
    table = kernel_tables.against_stock(data)
    assert "| 1 | 2.00 (2.00) | 1.50 (1.50) |  |  |" in table
    assert "up to 512 tokens: 1 of 3 (mxfp8:qwen3-30b-a3b 64 0.90)." in table
    assert "| mxfp4:gpt-oss-20b | 10.0, 50%\\* |  |" in kernel_tables.cells(data)


def test_a_later_run_replaces_cells_and_marks_the_others() -> None:
    first = lines(record("mxfp4:gpt-oss-20b", 1, hopper_mxfp4=10), record("mxfp4:gpt-oss-20b", 4, hopper_mxfp4=40))
    second = lines(record("mxfp4:gpt-oss-20b", 1, hopper_mxfp4=8), command="bench --set profile=/a/b.json --jsonl /c/d")
    data = kernel_tables.golden([first, second])
    assert data["commands"] == ["c", "bench --set profile=b.json --jsonl d"]
    assert "| mxfp4:gpt-oss-20b | 8.0, 62% | 40.0, 12%\\* |" in kernel_tables.cells(data)


def test_every_format_is_judged_on_every_shape_that_it_supports() -> None:
    found = kernel_tables.judged()
    assert len(found) == len(set(found)) == 24
    assert "int4_g128:gpt-oss-20b" not in found and "int4_g32:gpt-oss-20b" in found
    other = kernel_tables.golden([lines(record("mxfp8:glm-4.5@tp8", 1, hopper_mxfp8=10, stock=20))])
    assert other["rows"] == []


def test_aims_are_held_against_what_was_measured() -> None:
    data = kernel_tables.golden(
        [
            lines(
                record("mxfp4:gpt-oss-20b", 1, hopper_mxfp4=10, stock=20),
                record("mxfp8:qwen3-30b-a3b", 1, hopper_mxfp8=16, stock=28),
                record("mxfp8:qwen3-30b-a3b", 16, hopper_mxfp8=6, stock=9, marlin_mxfp8=5.5),
                record("mxfp8:qwen3-30b-a3b", 16384, hopper_mxfp8=2000, stock=2600),
            )
        ]
    )
    text = kernel_tables.aims(data)
    assert "| 1 token: 2 times the default | 1.87 (4-bit 2.00; 8-bit 1.75) |" in text
    assert "reached by 1 of 2 layers; missed, us: mxfp8:qwen3-30b-a3b 0.9 |" in text  # 5 / 0.7 + 8 = 15.1
    assert "| 8 to 64 tokens: 1.25 and 1.08 times the default (4-bit, 8-bit) | 1.50 (8-bit 1.50) |" in text
    assert "8-bit: 75% of the roofline's rate | 83% in the mean, 1 of 1 cells |" in text
    assert "up to 512 tokens | 1 of 3 cells: mxfp8:qwen3-30b-a3b 16 0.92 |" in text
    assert "| 16384 tokens: 600 TFLOP/s | 1 of 1: mxfp8:qwen3-30b-a3b 618 |" in text


def test_many_tokens_are_rates() -> None:
    data = kernel_tables.golden([lines(record("mxfp4:gpt-oss-20b", 4096, hopper_mxfp4=1483.5, stock=1740.2))])
    assert "| mxfp4:gpt-oss-20b |  | 1484, 1.17, 550 |  |" in kernel_tables.many(data)


def test_benchmarks_under_other_conditions_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="different conditions"):
        kernel_tables.golden([lines(), lines(driver="590")])
