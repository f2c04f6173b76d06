"""Two tensor-parallel ranks of a real vLLM: a backend that is wrong on one of them is taken on neither, and a rank with
other settings is noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lib import checkpoints, distributions, vllm_runner
from tests.lib.served import PROMPT, job

PLUGIN = '''
"""A third party's backend: the emulation, but on the second rank it is told the wrong halves."""
import torch
import torch.distributed as dist
from vllm_moe_oracle.backends.emulation import Emulation


class Half(Emulation):
    name = "half"
    vllm_names = ()

    def priority(self, problem, device):
        return 1.0

    def convert(self, expert, problem, plan):
        made = dict(expert)
        if dist.get_rank() == 1:
            half = problem.intermediate_size
            for name in ("w13", "w13_scale"):
                codes = expert[name].view(torch.uint8)
                made[name] = torch.cat([codes[half:], codes[:half]]).view(expert[name].dtype)
        return made


BACKEND = Half()
'''


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a model on two ranks said, and what each rank reported."""
    folder = tmp_path_factory.mktemp("ranks")
    points = ["half = half_backend:BACKEND"]
    modules = {"half_backend": PLUGIN}
    third = distributions.install(folder / "third", "half-backend", "vllm_moe_oracle.backends", points, modules)
    usual = job(checkpoints.write_checkpoint(folder / "model"), "bfloat16", engine={"tensor_parallel_size": 2})
    jobs = {"wrong on one": usual, "asked for": usual | {"oracle": {"backend": "half"}}}
    report = folder / "report.jsonl"
    found = vllm_runner.run("run_generate.py", jobs, folder, PYTHONPATH=str(third), MOE_ORACLE_REPORT=str(report))
    return found, [json.loads(line) for line in report.read_text().splitlines()]


def test_both_ranks_take_the_next_candidate(outcome: Any) -> None:
    said, records = outcome
    assert "error" not in said["wrong on one"], said["wrong on one"]
    first = records[:2]
    assert sorted((record["rank"], record["ranks"]) for record in first) == [(0, 2), (1, 2)]
    for record in first:
        (group,) = record["groups"]
        assert group["decision"]["backend"] == "cpu_dequantized" and group["count"] == 2
        reasons = {each["backend"]: each["reasons"] for each in group["candidates"]}
        (reason,) = reasons["half"]
        assert reason["code"] == "self_check"
        assert "rank 1: relative error" in reason["detail"] and "rank 0" not in reason["detail"]


def test_the_model_still_recites_its_alphabet(outcome: Any) -> None:
    said, _ = outcome
    assert said["wrong on one"]["tokens"] == [PROMPT[-1] + 1 + index for index in range(4)]


def test_an_explicit_choice_that_is_wrong_on_one_rank_refuses_to_start(outcome: Any) -> None:
    said, _ = outcome
    assert "error" in said["asked for"]
