"""What holds for every test."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.lib import releases
from tests.lib.cli import Run, runner

# Small tensors on a busy machine: OpenMP's threads spin while they wait for each other, and cost 20 times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shared and slow machines are no defect; the same examples each time, and nothing is written beside the tests.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


NEED_VLLM = ("e2e", "measuring", "methods")
"""Folders whose tests all need vLLM, also where a module imports none of it."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that imports torch, Triton or vLLM is skipped where they are not installed."""
    report = yield
    call = getattr(report, "call", None)
    cause = None if call is None or call.excinfo is None else call.excinfo.value.__cause__
    missing = cause.name or "" if isinstance(cause, ModuleNotFoundError) else ""
    if isinstance(collector, pytest.Module) and collector.path.parent.name in NEED_VLLM:
        missing = missing or ("" if importlib.util.find_spec("vllm") else "vllm")
    if missing.partition(".")[0] in ("torch", "triton", "vllm"):
        report.outcome, report.result = "skipped", []
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing}")
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hides thousands of tests and what they import from the garbage collector: measuring collects for every layer, and
    would walk two million objects each time. Processes of tests fork from here, if vLLM has been imported."""
    gc.collect()
    gc.freeze()
    if "vllm" in sys.modules and "tests.lib.forked" in sys.modules and not session.config.option.collectonly:
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what these processes print belongs to the tests
        sys.modules["tests.lib.forked"].copy_this()
        capture.suspend_global_capture()


def pytest_sessionfinish() -> None:
    """The interpreter's end frees what it can."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sources of other vLLM releases are half a gigabyte each: only tests marked ``matrix`` may ask for them."""
    releases.others_allowed = item.get_closest_marker("matrix") is not None


@pytest.fixture
def explain(tmp_path: Path) -> Any:
    """Reads a config as a checkpoint folder with that config.json, and what else is given by file name: by one of a
    number of ranks, for a release of vLLM, with ``--quantization``."""
    from vllm_moe_oracle.checkpoint.files import read_checkpoint
    from vllm_moe_oracle.checkpoint.moe_layers import MoeLayers, find_moe_layers
    from vllm_moe_oracle.checkpoint.ranks import Ranks

    def run(
        data: dict[str, Any], tp: int = 1, ep: bool = False, *, online: str = "", vllm: str | None = None, **more: Any
    ) -> MoeLayers:
        ranks = {name: more.pop(name) for name in ("dp", "all2all") if name in more}
        for name, content in {"config": data, **more}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return find_moe_layers(read_checkpoint(tmp_path), Ranks(tp, ep=ep, **ranks), online=online, vllm=vllm)

    return run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line tool in this process."""
    return runner(monkeypatch, capsys)
