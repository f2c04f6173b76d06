"""A tiny MXFP8 model gives the same tokens in every release that has a CPU build, and those of float32 transformers.

Each release is served in an environment of its own, see `releases`. The release that is installed here is served by
`test_served_model` on every run of the tests; this is for ``-m matrix``.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import reference
import releases

from vllm_moe_oracle.compat import CPU_RELEASES

pytestmark = pytest.mark.matrix

GENERATE = Path(__file__).with_name("generate.py")
PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 6
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_checkpoint(tmp_path_factory.mktemp("matrix") / "plain")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> reference.Continuation:
    return reference.greedy(reference.load_transformers(checkpoint), PROMPT, TOKENS)


@pytest.fixture(scope="module", params=CPU_RELEASES)
def served(request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a release generates: one result for each dtype."""
    release = request.param
    python = releases.environment(release)
    folder = tmp_path_factory.mktemp(release)
    job = {"checkpoint": str(checkpoint), "prompt": PROMPT, "tokens": TOKENS, "oracle": {"activations": "16bit"}}
    (folder / "jobs.json").write_text(json.dumps([{**job, "dtype": dtype} for dtype in DTYPES]))
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


def test_each_release_gives_the_tokens_of_transformers(served: Any, expected: reference.Continuation) -> None:
    release, results = served
    for dtype, result in zip(DTYPES, results, strict=True):
        assert "error" not in result, result["error"]
        assert result["tokens"] == expected.tokens, dtype
        layers = result["layers"]
        assert layers["vllm"].split("+")[0] == release
        assert (layers["served"], layers["moe_layers"]) in ((2, 2), (2, 0)), layers
    start = len(PROMPT) - 1
    wanted = expected.logprobs[start : start + TOKENS]
    # float32 on both sides; the bound of `test_served_model` for that is larger.
    assert np.abs(np.array(results[0]["logprobs"]) - wanted).max() < 1e-3
