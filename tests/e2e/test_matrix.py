"""A tiny MXFP8 model, a tiny gpt-oss in MXFP4 and models with integer experts give in every release that has a CPU
build the same tokens, those of float32 transformers.

Each release is served in an environment of its own, see `releases`. The release that is installed here is served by
`test_served_model` on every run of the tests; this is for ``-m matrix``.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib import checkpoints, integer_checkpoints, reference, releases
from tests.lib.integer_checkpoints import Integers
from tests.lib.served import PROMPT, Expected, assert_says, job, tolerance
from vllm_moe_oracle.releases.supported import CPU_RELEASES

pytestmark = pytest.mark.matrix

GENERATE = Path(__file__).with_name("run_generate.py")
TOKENS = 6
INTEGERS = {
    "gptq": Integers("gptq", zero_points=True, act_order="group"),
    "awq": Integers("awq", zero_points=True),
    "compressed-tensors": Integers("compressed-tensors", group=64),
    "compressed-tensors, act order": Integers("compressed-tensors", bits=8, zero_points=True, act_order="group"),
}
JOBS = (("mxfp8", "float32"), ("mxfp8", "bfloat16"), ("gpt_oss", "bfloat16"), *((kind, "float32") for kind in INTEGERS))
"""Model and dtype. Until 0.30 vLLM's attention on a CPU takes gpt-oss's sinks in bfloat16 only."""


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    size = replace(checkpoints.Size(), top_k=4)
    gpt_oss = checkpoints.write_checkpoint(folder / "gpt_oss", arch="gpt_oss", format="mxfp4", size=size)
    plain = checkpoints.write_checkpoint(folder / "unquantized", format="bf16", dtype="float32")
    integers = {kind: integer_checkpoints.write(plain, folder / kind, how) for kind, how in INTEGERS.items()}
    return {"mxfp8": checkpoints.write_checkpoint(folder / "plain"), "gpt_oss": gpt_oss, **integers}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Expected:
    return {
        name: reference.greedy(
            reference.load_transformers(
                checkpoint.with_name(f"{checkpoint.name}-exact") if name in INTEGERS else checkpoint
            ),
            PROMPT,
            TOKENS,
        )
        for name, checkpoint in models.items()
    }


@pytest.fixture(scope="module", params=CPU_RELEASES)
def served(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a release generates: one result for each job."""
    release = request.param
    python = releases.environment(release)
    folder = tmp_path_factory.mktemp(release)
    jobs = [
        job(
            models[model],
            dtype,
            TOKENS,
            oracle={"backend": "emulation"} if model in INTEGERS else {"activations": "16bit"},
        )
        for model, dtype in JOBS
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    path = [str(releases.entry_points(folder / "metadata")), str(releases.ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "VLLM_PLUGINS": "moe_oracle"}
    done = subprocess.run(
        [python, GENERATE, folder / "jobs.json", folder / "results.json"],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return release, json.loads((folder / "results.json").read_text())


def test_each_release_gives_the_tokens_of_transformers(served: Any, expected: Expected) -> None:
    release, results = served
    for (model, dtype), result in zip(JOBS, results, strict=True):
        assert "error" not in result, (model, dtype, result["error"])
        assert result["tokens"] == expected[model].tokens, (model, dtype)
        layers = result["layers"]
        assert layers["vllm"].split("+")[0] == release
        assert (layers["served"], layers["moe_layers"]) in ((2, 2), (2, 0)), layers
        if dtype == "float32":
            assert_says(result, expected[model], tolerance(dtype))
