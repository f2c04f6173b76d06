"""What tests that serve models share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the models and jobs of a module."""
    return tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2])
