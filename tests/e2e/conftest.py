"""What tests that serve models share."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all of this folder as ``full``, except one case of each scheme and what has ``matrix`` as its mark."""
    for item in items:
        if item.path.parent == HERE and item.path.name not in ("test_each_scheme.py", "test_matrix.py"):
            item.add_marker("full")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the models and jobs of a module."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
