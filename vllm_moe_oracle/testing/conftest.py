"""What holds for every conformance test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: threads only get into each other's way."""
    import torch  # not above: where it is missing, test modules are skipped (tests/conftest.py)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
