"""On the sources of the installed release (all with ``-m matrix``), vLLM itself arrives at our methods.

Each release gets a process of its own, which imports that release's Python; see `release_probe`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.lib import releases
from tests.lib.releases import every_release
from vllm_moe_oracle.releases.supported import release_group

pytest.importorskip("vllm", reason="the packages that vLLM imports come with an installed vLLM")

ROOT = Path(__file__).resolve().parents[2]

SHIMS = {
    "activation_fields": ("0.24", "no attribute 'swiglu_alpha'"),
    "hash_routing": ("0.31", "no attribute 'has_hash_routing'"),
    "modular_kernel": ("0.30", "WorkspaceManager not initialized"),
    "is_monolithic": ("0.30", "topk_softmax"),
    "bias_loader": ("0.27", "biases in w13_bias are NaN"),  # the loaders drop biases silently
}
"""Methods of the adapters; the release since which the newest way of each is right, and what it raises before that."""


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
def test_without_its_shim_an_older_release_fails(release: str) -> None:
    outcomes = probed(release)["without_shims"]
    for shim, (first, error) in SHIMS.items():
        needed = Version(release_group(release).first) < Version(first)
        assert re.search(error if needed else "^ok$", outcomes[shim]), (shim, outcomes[shim])


def test_the_entry_point_is_where_vllm_looks() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert "vllm_moe_oracle.plugin:register" in {each.value for each in points}
    assert importlib.util.find_spec("vllm_moe_oracle.plugin") is not None
