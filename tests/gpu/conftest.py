"""Fixtures of the tests for an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """This process as the only rank of vLLM's groups, on the GPU."""
    from tests.gpu import backend_table

    backend_table.join_alone("cuda")
    yield
    backend_table.leave()
