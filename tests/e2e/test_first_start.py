"""Two tensor-parallel ranks of a real vLLM measure at their first start, and not at their second.

Two backends of a third party compute the same; the first in static order is slow, and a third crashes its process.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.lib import checkpoints, distributions, vllm_runner
from tests.lib.served import PROMPT, job

SECONDS = 200

PLUGIN = '''
"""Backends of a third party: the emulation, late, without delay, and one that takes its process down."""
import os
import time
from vllm_moe_oracle.backends.emulation import Emulation, forward


class Timed(Emulation):
    vllm_names = ()

    def __init__(self, name, rank, delay):
        self.name, self.rank, self.delay = name, rank, delay

    def priority(self, problem, device):
        return self.rank

    def build_experts(self, tensors, problem, plan, builder):
        def run(out, x, *rest):
            if self.delay is None:
                os._exit(7)
            forward(tensors, problem, out, x, *rest)
            time.sleep(self.delay)

        return builder.from_function(run)


LATE, PROMPT, FATAL = Timed("late", 1.0, 0.05), Timed("prompt", 2.0, 0.0), Timed("fatal", 3.0, None)
'''


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """What a model said at two starts, what each rank reported, and the log."""
    folder = tmp_path_factory.mktemp("first-start")
    points = [f"{name} = timed_backends:{name.upper()}" for name in ("late", "prompt", "fatal")]
    modules = {"timed_backends": PLUGIN}
    third = distributions.install(folder / "third", "timed-backends", "vllm_moe_oracle.backends", points, modules)
    oracle = {"measure_at_start": SECONDS, "objective": "1:1,64:1", "cache": str(folder / "cache")}
    model, engine = checkpoints.write_checkpoint(folder / "model"), {"tensor_parallel_size": 2}
    start = job(model, "bfloat16", oracle=oracle, engine=engine)
    report, log = folder / "report.jsonl", list[str]()
    found = vllm_runner.run(
        "run_generate.py",
        {"first": start, "second": start},
        folder,
        log,
        PYTHONPATH=str(third),
        MOE_ORACLE_REPORT=str(report),
        VLLM_LOGGING_LEVEL="INFO",
    )
    return found, [json.loads(line) for line in report.read_text().splitlines()], log


def test_all_ranks_of_both_starts_decide_by_what_was_measured(outcome: Any) -> None:
    said, records, _ = outcome
    for name in ("first", "second"):
        assert said[name].get("tokens") == [PROMPT[-1] + 1 + index for index in range(4)], said[name]
    assert sorted(record["rank"] for record in records) == [0, 0, 1, 1]
    decisions = [group["decision"] for record in records for group in record["groups"]]
    assert Counter((each["backend"], each["why"]) for each in decisions) == {("prompt", "measured"): 4}
    assert all("fatal" in each["explanation"] and "status 7" in each["explanation"] for each in decisions)


def test_the_log_of_the_first_start_alone_says_what_was_measured(outcome: Any) -> None:
    _, _, log = outcome
    summaries = [line for line in log if "measured at this start" in line]
    assert len(summaries) == 1 and "prompt (measured, in place of late)" in summaries[0], summaries
    command = summaries[0].partition("; vllm-moe-oracle tune ")[2]
    assert "--tp 2 " in command and " --export FILE measures the rest" in command
    assert len([line for line in log if "is measured for up to 200 s" in line]) == 1
    assert any("fatal could not be measured and is left out: its process ended with status 7" in line for line in log)
