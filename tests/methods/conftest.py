"""What holds for every test of the methods."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from vllm_moe_oracle.methods import load_caches


@pytest.fixture(autouse=True)
def a_load_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What another test's layers left is forgotten, and vLLM's log is the test's."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    load_caches.end_load()
    yield
    load_caches.end_load()
