"""The tolerance of a comparison with the float32 reference, derived from the formats that a kernel rounds to."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import Backend
from ..core.problem import Problem

_ROUNDINGS = 5
"""Places between input and output where a kernel may round to the model's dtype: a dequantized weight, the first
product, the activation, the second product, the sum over experts."""

_UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}

_FORMAT_ERROR = {"16bit": 0.0, "mxfp8": 2.0**-4, "fp8": 2.0**-4, "fp8_token": 2.0**-4, "mxfp4": 2.0**-2,
                 "int8": 2.0**-7}  # fmt: skip
"""Relative error of one rounding to the activation format. Kernel and reference may round values that differ in the
last bit to neighboring codes. Floats: half a step over the smallest significand. int8: steps of amax / 127 have an RMS
error of amax / 440, and a few thousand values an RMS of about amax / 4, which makes 4 / 440, about 2**-7."""

_FLOAT32_SUMS = 1e-4
"""Difference of two float32 sums over a few thousand terms in different orders: 2**-24 times the square root of their
number, with a margin for cancellation. It only matters to float32 models."""


def error_tolerance(backend: Backend, problem: Problem) -> float:
    """Largest relative L2 error of one token's output that the formats explain.

    Args:
        backend: the backend under test; its activation precision counts, and whether it routes tokens itself.
        problem: the layer.
    """
    return rounding_error(backend, problem) + _FORMAT_ERROR[backend.activations(problem)]


def rounding_error(backend: Backend, problem: Problem) -> float:
    """The part of `error_tolerance` that does not come from the format of activations."""
    # A kernel that routes tokens may round the routing weights, too.
    return (_ROUNDINGS + backend.monolithic) * _UNIT_ROUNDOFF[problem.dtype] + _FLOAT32_SUMS


def token_error(actual: Tensor, expected: Tensor) -> float:
    """Largest relative L2 error over tokens, both `[M, hidden]`.

    A token whose expected output is zero contributes its absolute error. NaN stays NaN.
    """
    difference = (actual.float() - expected.float()).norm(dim=-1)
    size = expected.float().norm(dim=-1)
    relative = torch.where(size > 0, difference / size.clamp(min=1e-30), difference)
    return relative.max().item()
