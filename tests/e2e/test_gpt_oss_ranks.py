"""A tiny gpt-oss in MXFP4 on two ranks of a real vLLM, cut as gpt-oss's own loader cuts it, equals float32
transformers: tensor parallelism that gives the second rank fewer blocks of scales, and experts spread over ranks. A
number of experts that the loader does not spread ends the start before weights load.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import PROMPT, assert_says, job, tolerance

# 3 blocks are 2 and 1 on two ranks.
SIZE = replace(checkpoints.Size(), top_k=4, intermediate=96)
TOKENS = 4
RANKS = 2
ODD = 7
"""Experts of which the loader gives each rank three."""
FEW = (2, 3)
"""Experts of which the loader gives each rank one: all of two, and two of three, where one would fill two places."""


@pytest.fixture(scope="module")
def outcome(folder: Path) -> dict[str, Any]:
    """What was served, what transformers says, and what each rank reported of its layers."""
    model = checkpoints.write_checkpoint(folder / "model", arch="gpt_oss", format="mxfp4", size=SIZE)
    engine = {"tensor_parallel_size": RANKS}
    jobs = {
        "rows": job(model, tokens=TOKENS, engine=engine),
        "experts": job(model, tokens=TOKENS, engine=engine | {"enable_expert_parallel": True}),
    }
    odd = checkpoints.write_checkpoint(folder / "odd", arch="gpt_oss", format="mxfp4", size=replace(SIZE, experts=ODD))
    jobs |= {
        "odd rows": job(odd, tokens=TOKENS, engine=engine),
        "odd experts": job(odd, tokens=TOKENS, engine=engine | {"enable_expert_parallel": True}),
    }
    few = {}
    for experts in FEW:
        size = replace(SIZE, experts=experts, top_k=2)
        few[experts] = checkpoints.write_checkpoint(folder / f"{experts}", arch="gpt_oss", format="mxfp4", size=size)
        jobs[f"{experts} experts"] = job(few[experts], tokens=TOKENS, engine=engine | {"enable_expert_parallel": True})
    report = folder / "report.jsonl"
    log: list[str] = []
    said = vllm_runner.run("run_generate.py", jobs, folder, log, MOE_ORACLE_REPORT=str(report))
    records = [json.loads(line) for line in report.read_text().splitlines()]
    return {
        "said": said,
        "records": {"rows": records[:RANKS], "experts": records[RANKS : 2 * RANKS]},
        "expected": reference.greedy(reference.load_transformers(model), PROMPT, TOKENS),
        "odd": reference.greedy(reference.load_transformers(odd), PROMPT, TOKENS),
        "few": reference.greedy(reference.load_transformers(few[2]), PROMPT, TOKENS),
        "log": log,
    }


@pytest.mark.parametrize("name", ["rows", "experts"])
def test_tokens_and_logprobs_equal_transformers(outcome: dict[str, Any], name: str) -> None:
    """The sum over ranks is one of the results that are rounded."""
    assert_says(outcome["said"][name], outcome["expected"], tolerance("float32"))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("rows", [(8, 8, 64, 96), (8, 8, 64, 96)]), ("experts", [(8, 4, 96, 96), (8, 4, 96, 96)])],
)
def test_each_rank_knows_its_share(outcome: dict[str, Any], name: str, sizes: list[tuple[int, ...]]) -> None:
    """Of blocks the second rank has one of two; what it has no part of are zeros."""
    records = sorted(outcome["records"][name], key=lambda record: int(record["rank"]))
    found = []
    for record in records:
        (group,) = record["groups"]
        assert group["decision"]["backend"] == "cpu_dequantized" and group["count"] == SIZE.layers
        layer = group["problem"]
        whole = layer.get("ragged_intermediate_size") or layer["intermediate_size"]
        found.append((layer["num_experts"], layer["local_experts"], layer["intermediate_size"], whole))
    assert found == sizes


def test_experts_that_the_loader_would_lose_end_the_start_on_every_rank(outcome: dict[str, Any]) -> None:
    """Without the plugin the loader itself fails, and says nothing of experts."""
    assert "error" in outcome["said"]["odd experts"]
    words = "gives each of 2 ranks 3 of 7 experts, which leaves 1 without a rank"
    assert vllm_runner.ranks_that_said(outcome["log"], "NoBackendError: ", words) == {0, 1}
    assert any("the same ranks without --enable-expert-parallel" in line for line in outcome["log"])


def test_one_expert_to_a_rank(outcome: dict[str, Any]) -> None:
    assert_says(outcome["said"]["2 experts"], outcome["few"], tolerance("float32"))
    assert "error" in outcome["said"]["3 experts"]
    words = "gives each of 2 ranks 1 of 3 experts, which leaves 1 without a rank"
    assert vllm_runner.ranks_that_said(outcome["log"], "NoBackendError: ", words) == {0, 1}


def test_the_way_out_serves_them(outcome: dict[str, Any]) -> None:
    assert_says(outcome["said"]["odd rows"], outcome["odd"], tolerance("float32"))
