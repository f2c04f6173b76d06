"""A tiny gpt-oss in MXFP4 on two ranks of a real vLLM, cut as gpt-oss's own loader cuts it, equals float32
transformers: tensor parallelism that gives the second rank fewer blocks of scales, and experts spread over ranks.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.lib import checkpoints, reference, vllm_runner

pytest.importorskip("vllm", reason="models are served")

pytestmark = pytest.mark.full

# 3 blocks are 2 and 1 on two ranks.
SIZE = replace(checkpoints.Size(), top_k=4, intermediate=96)
PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 4
RANKS = 2
TOLERANCE = 2 * 6.0 * math.sqrt(12 * SIZE.layers + 2) * (1 + math.sqrt(SIZE.hidden)) * 2.0**-24
"""As in `test_gpt_oss`; the sum over ranks is one of the results that are rounded."""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was served, what transformers says, and what each rank reported of its layers."""
    folder = tmp_path_factory.mktemp("gpt_oss_ranks")
    model = checkpoints.write_checkpoint(folder / "model", arch="gpt_oss", format="mxfp4", size=SIZE)
    job = {"checkpoint": str(model), "dtype": "float32", "prompt": PROMPT, "tokens": TOKENS, "oracle": {}}
    jobs = {
        "rows": {**job, "engine": {"tensor_parallel_size": RANKS}},
        "experts": {**job, "engine": {"tensor_parallel_size": RANKS, "enable_expert_parallel": True}},
    }
    report = folder / "report.jsonl"
    # One core for each rank: vLLM binds them to NUMA nodes of their own otherwise.
    said = vllm_runner.run(
        "run_generate.py", jobs, folder, MOE_ORACLE_REPORT=str(report), VLLM_CPU_OMP_THREADS_BIND="0|1"
    )
    records = [json.loads(line) for line in report.read_text().splitlines()]
    return {
        "said": said,
        "records": {"rows": records[:RANKS], "experts": records[RANKS : 2 * RANKS]},
        "expected": reference.greedy(reference.load_transformers(model), PROMPT, TOKENS),
    }


@pytest.mark.parametrize("name", ["rows", "experts"])
def test_tokens_and_logprobs_equal_transformers(outcome: dict[str, Any], name: str) -> None:
    result, expected = outcome["said"][name], outcome["expected"]
    assert "error" not in result, result["error"]
    start = len(PROMPT) - 1
    found = np.array(result["logprobs"])
    largest = float(np.abs(found - expected.logprobs[start : start + TOKENS]).max())
    print(f"largest difference of a logprob {largest:.2e}, allowed {TOLERANCE:.2e}")
    assert largest <= TOLERANCE
    assert result["tokens"] == expected.tokens


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
