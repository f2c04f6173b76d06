"""Two ranks of a real vLLM, one of which is other than the other: both end, and each says the same of why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib import checkpoints, distributions, vllm_runner
from tests.lib.served import job

PLUGIN = '''
"""A plugin of vLLM that makes the second rank another one."""
import multiprocessing
import os


def register():
    if not multiprocessing.current_process().name.endswith("-1"):
        return
    name, _, value = os.environ["ODD_RANK"].partition("=")
    if name != "damaged":
        os.environ[name] = value
        return
    from vllm.model_executor.model_loader import default_loader

    def damaged(*args, **kwargs):
        raise OSError("model-00002.safetensors: incomplete metadata, file not fully covered")
        yield

    default_loader.safetensors_weights_iterator = damaged
'''

CASES = {
    "MOE_ORACLE_ACTIVATIONS=16bit": ('MOE_ORACLE_ACTIVATIONS is "checkpoint" on rank 0, "16bit" on rank 1', 2),
    "MOE_ORACLE_MXFP8_SCALE_RULE=floor": ('MOE_ORACLE_MXFP8_SCALE_RULE is "ceil" on rank 0, "floor" on rank 1', 2),
    "damaged": ("rank 1 gave up at loading the model: OSError: model-00002.safetensors: incomplete", 1),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_says_what_differs(case: str, tmp_path: Path) -> None:
    words, ranks = CASES[case]
    points = ["odd_rank = odd_rank:register"]
    plugin = distributions.install(tmp_path / "odd", "odd-rank", "vllm.general_plugins", points, {"odd_rank": PLUGIN})
    log: list[str] = []
    start = job(checkpoints.write_checkpoint(tmp_path / "model"), "bfloat16", 1, engine={"tensor_parallel_size": 2})
    found = vllm_runner.run(
        "run_generate.py", {case: start}, tmp_path, log, PYTHONPATH=str(plugin), ODD_RANK=case,
        VLLM_PLUGINS="moe_oracle,odd_rank", new_interpreters=True,
    )  # fmt: skip
    assert "error" in found[case]
    assert vllm_runner.ranks_that_said(log, "RankSyncError: ", words) == set(range(ranks)), "\n".join(log)
