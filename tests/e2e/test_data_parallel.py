"""Two data-parallel ranks of a real vLLM on a CPU. Stock's communicator for CPUs cannot exchange tokens of different
numbers, and the start fails, with this plugin and without it. With the two collectives that it lacks, what is served
equals float32 transformers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib import checkpoints, distributions, reference, vllm_runner
from tests.lib.served import PROMPT, assert_says, tolerance

TOKENS = 4
RANKS = 2
SHARDS: dict[str, Any] = {"data_parallel_size": RANKS}
EXPERTS = SHARDS | {"enable_expert_parallel": True}
MODELS: dict[str, dict[str, Any]] = {
    "mxfp8": {"format": "mxfp8"},
    "gpt-oss": {"format": "mxfp4", "arch": "gpt_oss", "size": replace(checkpoints.Size(), top_k=4)},
}

PLUGIN = '''
"""A plugin of vLLM that gives its communicator for CPUs the collectives that it lacks."""
import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def all_gatherv(self, input_, dim=0, sizes=None):
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes)])


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    total = input_.float()
    dist.all_reduce(total, group=self.device_group)
    sizes = sizes or [len(total) // self.world_size] * self.world_size
    return total.split(sizes)[self.rank_in_group].to(input_.dtype)


def register():
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
'''


def serve(folder: Path, model: Path, engine: dict[str, Any], log: list[str] | None = None, **more: str) -> Any:
    """What two ranks say, or the error."""
    job = {
        "feature": "async_engine", "checkpoint": str(model), "prompt": PROMPT, "tokens": TOKENS, "engine": engine,
        "oracle": {},
    }  # fmt: skip
    return vllm_runner.run("run_features.py", {"": job}, folder, log, **more)[""]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, folder: Path) -> Path:
    return checkpoints.write_checkpoint(folder / request.param, **MODELS[request.param])


@pytest.mark.parametrize("engine", [SHARDS, EXPERTS], ids=["shards", "experts"])
def test_both_ranks_say_what_transformers_say(model: Path, engine: dict[str, Any], tmp_path: Path) -> None:
    points, modules = ["cpu_collectives = cpu_collectives:register"], {"cpu_collectives": PLUGIN}
    plugin = distributions.install(tmp_path / "p", "cpu-collectives", "vllm.general_plugins", points, modules)
    report = tmp_path / "report.jsonl"
    found = serve(
        tmp_path, model, engine, PYTHONPATH=str(plugin), VLLM_PLUGINS="moe_oracle,cpu_collectives",
        MOE_ORACLE_REPORT=str(report),
    )  # fmt: skip
    assert "error" not in found, found
    expected = reference.greedy(reference.load_transformers(model), PROMPT, TOKENS)
    for said in found["said"]:
        assert_says(said, expected, tolerance("float32"))
    records = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(records) == RANKS
    for record in records:
        (group,) = record["groups"]
        assert group["decision"]["backend"] == "cpu_dequantized" and group["count"] == 2
        assert group["problem"]["parallel"]["dp"] == RANKS
        assert group["problem"]["local_experts"] == (4 if engine is EXPERTS else 8)


@pytest.mark.parametrize("plugins", ["moe_oracle", ""], ids=["plugin", "stock"])
def test_without_them_the_start_fails_where_tokens_are_exchanged(plugins: str, tmp_path: Path) -> None:
    """Stock cannot run MXFP8 on a CPU: its own experts are in 16 bits."""
    format: checkpoints.Format = "mxfp8" if plugins else "bf16"
    model = checkpoints.write_checkpoint(tmp_path / "model", format=format)
    log: list[str] = []
    found = serve(tmp_path, model, SHARDS, log, VLLM_PLUGINS=plugins)
    text = "\n".join(log)
    assert "error" in found and "NotImplementedError" in text and "in all_gatherv" in text, text[-3000:]
    if plugins:
        assert "moe_oracle: raised where vLLM hands over or exchanges tokens between ranks" in text
