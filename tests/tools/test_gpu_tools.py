"""Tools that run on GPUs: their committed data, and their judgement."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.gpu import compare_tiles, ranks
from tests.lib import reference
from tests.lib.served import PROMPT, tolerance

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "golden" / "h100"


def test_what_is_said_of_the_tile_rule_is_what_was_measured() -> None:
    found = [json.loads((DATA / f"tile-rule{end}.json").read_text())["rows"] for end in ("", "-2")]
    ratios = [[row["before"] / row["after"] for row in rows] for rows in found]
    layers = {(row["scheme"], row["shape"]) for row in found[0]}
    means = [math.exp(math.fsum(map(math.log, each)) / len(each)) for each in ratios]
    slower = [sum(each < 0.95 for each in run) for run in ratios]
    said = " ".join((ROOT / "vllm_moe_oracle/kernels/README.md").read_text().split())
    low, high = min(map(min, ratios)), max(map(max, ratios))
    assert all(f"{mean:.2f}" == "1.05" for mean in means) and len(ratios[0]) == len(ratios[1])
    words = f"is 1.05 times as fast as the one before it (geometric mean of {len(ratios[0])} choices that differ, "
    words += f"{len(layers)} layers, two H100s; {low:.2f} to {high:.2f}, {slower[0]} and {slower[1]} of the choices "
    assert words in said


def test_choices_survive_their_file() -> None:
    found = compare_tiles.choices(measured=False)
    assert len(found) >= 55 and {"persistent"} < {
        key for each in found.values() for one in each.values() for key in one
    }
    for cell in found.values():
        assert all(compare_tiles.encode(compare_tiles.decode(each)) == each for each in cell.values())


def served(**changes: Any) -> dict[str, Any]:
    """What an engine of two ranks gives."""
    expected = continuation()
    group = {"count": 2, "decision": {"backend": "hopper_mxfp8", "why": "user"}}
    result = {"tokens": expected.tokens, "logprobs": expected.logprobs[len(PROMPT) - 1 : -1].tolist()}
    return {"result": result, "records": [{"groups": [group]}] * 2, "seconds": 1.0, "log": [], **changes}


def continuation() -> reference.Continuation:
    """Two tokens after the prompt, over a vocabulary of four."""
    return reference.Continuation(PROMPT, [2, 3], np.zeros((len(PROMPT) + 2, 4), np.float32))


def other(backend: str = "hopper_mxfp8", count: int = 2) -> dict[str, Any]:
    return {"groups": [{"count": count, "decision": {"backend": backend, "why": "user"}}]}


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        ({"result": {"error": "RuntimeError: no"}}, False),
        ({"records": []}, False),
        ({"records": [other(), other("marlin_mxfp8")]}, False),
        ({"records": [other(), other(count=1)]}, False),
    ],
)
def test_ranks_are_judged_by_layers_and_decisions(changes: dict[str, Any], holds: bool) -> None:
    assert ranks.judge(served(**changes), continuation())["ok"] is holds


def test_ranks_are_judged_by_tokens_and_logprobs() -> None:
    given = served()
    assert not ranks.judge({**given, "result": {**given["result"], "tokens": [2, 1]}}, continuation())["ok"]
    moved = (np.array(given["result"]["logprobs"]) + 1.01 * tolerance("bfloat16")).tolist()
    assert not ranks.judge({**given, "result": {**given["result"], "logprobs": moved}}, continuation())["ok"]
