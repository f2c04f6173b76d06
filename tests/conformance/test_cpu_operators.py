"""Conformance of the backends over vLLM's operators for CPUs, which exist where vLLM's library is loaded."""

from __future__ import annotations

import pytest
import vllm._custom_ops  # noqa: F401  # loads the library

from vllm_moe_oracle.testing import test_outputs


@pytest.mark.parametrize("name", ["cpu_dequantized", "cpu_mxfp4"])
def test_the_operators_compute_what_the_emulation_computes(name: str) -> None:
    test_outputs.test_computes_what_the_emulation_computes(name)
