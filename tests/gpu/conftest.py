"""Fixtures of the tests for an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> pytest.CollectReport | None:
    """Skips every module of this folder where there is no GPU, without importing it."""
    if not isinstance(collector, pytest.Module) or torch.cuda.is_available():
        return None
    reason = (str(collector.path), 0, "Skipped: needs an NVIDIA GPU")
    return pytest.CollectReport(collector.nodeid, "skipped", reason, [])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all of this folder as ``gpu``."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker("gpu")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process as the only rank of vLLM's groups, on the GPU."""
    from tests.gpu import backend_table

    backend_table.join_alone("cuda")
    yield
    backend_table.leave()
