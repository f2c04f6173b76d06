"""The errors that backends declare for another Triton, against the times of both."""

from __future__ import annotations

import pytest

from tests.tools import triton_table
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.oracle.registry import default_registry


@pytest.mark.parametrize("name", [name for name, starts in triton_table.GROUPS.items() if "not Triton" not in name])
def test_backends_declare_the_error_that_was_measured(name: str) -> None:
    starts = triton_table.GROUPS[name]
    measured = triton_table.error(triton_table.logarithms(starts))
    timed = {backend for _, backend, *_ in triton_table.times(triton_table.NEW) if backend.startswith(starts)}
    (declared,) = {default_registry()[each].triton_release_error for each in timed}
    assert declared == pytest.approx(measured, rel=0.05)


def test_what_says_nothing_has_the_largest_error() -> None:
    assert Backend.triton_release_error == max(each.triton_release_error for each in default_registry())
