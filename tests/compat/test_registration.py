"""On the sources of the installed release (all with ``-m matrix``), vLLM itself arrives at our methods.

Each release gets a process of its own, which imports that release's Python; see `release_probe`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lib import releases
from tests.lib.releases import every_release
from vllm_moe_oracle.compat import release_group

pytest.importorskip("vllm", reason="the packages that vLLM imports come with an installed vLLM")

ROOT = Path(__file__).resolve().parents[2]

SHIMS = {
    "activation_parameters": "0.24",
    "hashed": "0.31",
    "bias_loader": "0.27",
    "modular_kernel": "0.30",
    "is_monolithic": "0.30",
}
"""Methods of the adapters, and the era since which the newest way of each is right."""


SHIM_ERRORS = {
    "activation_parameters": "no attribute 'swiglu_alpha'",
    "hashed": "no attribute 'has_hash_routing'",
    "modular_kernel": "WorkspaceManager not initialized",
    "is_monolithic": "topk_softmax",
    "bias_loader": "AssertionError: 0.",  # the loaders drop the biases without a word: the numbers are wrong
}


@functools.cache
def probed(release: str) -> dict[str, Any]:
    """What the process on a release's sources found; one for all tests."""
    folder = releases.cache() / "probes"
    folder.mkdir(exist_ok=True)
    results = folder / f"{release}-{os.getpid()}.json"
    sources = releases.sources(release)
    path = [str(sources), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "tests.lib.release_probe", str(results)]
    process = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-4000:]
    found: dict[str, Any] = json.loads(results.read_text())
    results.unlink()
    assert found["version"] == release
    assert Path(found["file"]).is_relative_to(sources)
    return found


@pytest.mark.full
@every_release
def test_the_plugin_is_what_vllm_uses(release: str) -> None:
    checks = probed(release)["checks"]
    failed = {name: outcome for name, outcome in checks.items() if outcome != "ok"}
    assert not failed, "\n".join(f"{name}: {outcome}" for name, outcome in failed.items())
    assert len(checks) >= 24


@pytest.mark.full
@every_release
@pytest.mark.parametrize("shim", SHIMS)
def test_without_its_shim_an_older_release_fails(release: str, shim: str) -> None:
    outcome = probed(release)["without_shims"][shim]
    needed = tuple(map(int, release_group(release).first.split("."))) < tuple(map(int, SHIMS[shim].split(".")))
    assert (outcome != "ok") is needed, outcome
    if needed:
        assert SHIM_ERRORS[shim] in outcome, outcome


def test_the_entry_point_is_where_vllm_looks() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "vllm_moe_oracle.plugin:register" in {each.value for each in points}
    assert importlib.util.find_spec("vllm_moe_oracle.plugin") is not None
