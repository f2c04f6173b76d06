"""Whole models beside what the kernels predict: the table in the README is that of the committed numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import serving_numbers


def run(**changes: Any) -> dict[str, Any]:
    conditions = {"device": "a card", "vllm": "1", "torch": "2", "layers": 2, "decode": "d", "prefill": "p"}
    row = {"decode_ms": {"1": 2.0, "8": 3.0, "64": 4.0}, "prefill_tokens_per_second": 10, "start_seconds": 5.0}
    groups = [{"backend": "own_mxfp8", "layers": 2, "why": "measured", "measured": "much more"}]
    modes = [
        {"mode": "stock", **row},
        {"mode": "auto", **row, "groups": groups, "decode_ms": {**row["decode_ms"], "1": 1.5}},
    ]
    made = {
        "conditions": {**conditions, "command": "python serve.py --json /tmp/x.json"},
        "models": {"qwen3-mxfp8": modes},
    }
    made["conditions"] |= changes
    return made


KERNELS = {"rows": [{"cell": "mxfp8:qwen3-30b-a3b", "us": {n: {"auto": 40.0, "ours": 20.0} for n in ("1", "8", "64")}}]}


def test_a_step_is_held_against_the_kernels_difference_times_the_layers() -> None:
    made = serving_numbers.golden([run()])
    text = serving_numbers.table(made, KERNELS)
    assert "| qwen3-mxfp8 | 1 | 2.000 | 1.500 | +0.500 | +0.040 |" in text
    assert "| qwen3-mxfp8 | 8 | 3.000 | 3.000 | +0.000 | +0.040 |" in text
    assert made["models"]["qwen3-mxfp8"]["modes"][1]["backends"] == {"own_mxfp8": {"layers": 2, "why": "measured"}}
    assert "/tmp" not in json.dumps(made)


def test_what_has_no_numbers_or_other_conditions_is_refused() -> None:
    with pytest.raises(ValueError, match="different conditions"):
        serving_numbers.golden([run(), run(layers=3)])
    broken = run()
    del broken["models"]["qwen3-mxfp8"][0]["decode_ms"]["64"]
    with pytest.raises(ValueError, match="has no numbers"):
        serving_numbers.golden([broken])
    ended = run()
    ended["models"]["qwen3-mxfp8"][0]["error"] = "ended after 150 s"
    (stock, _) = serving_numbers.golden([ended])["models"]["qwen3-mxfp8"]["modes"]
    assert "after all numbers were there" in stock["remark"] and "error" not in stock
    with pytest.raises(ValueError, match="there is no one"):
        serving_numbers.with_table("nothing", "text")


def test_the_readme_is_up_to_date() -> None:
    found = json.loads(serving_numbers.GOLDEN.read_text())
    kernels = json.loads(serving_numbers.KERNELS.read_text())
    readme = serving_numbers.README.read_text()
    assert serving_numbers.with_table(readme, serving_numbers.table(found, kernels)) == readme
    assert set(found["models"]) == set(serving_numbers.CELLS)
    for each in found["models"].values():
        assert [mode["mode"] for mode in each["modes"]] == ["stock", "auto"]
        assert each["modes"][1]["served"] == "16 of 16"
