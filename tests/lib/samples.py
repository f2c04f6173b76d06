"""One measured time, and the cell and environment that it belongs to."""

from __future__ import annotations

from tests.lib.cases import H200, problem
from vllm_moe_oracle.measurements import environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of

CELL = kernel_shape_of(problem())
HERE = environment.of(H200)


def sample(tokens: int = 1, backend: str = "marlin_mxfp8", us: float = 50.0) -> Sample:
    return Sample(backend, "16bit", tokens, "uniform", us, us * 0.98, us * 1.02, 20, 1e-3)
