"""Marlin for integer weights whose activations come sorted by expert, as all-to-alls for few tokens deliver them."""

from __future__ import annotations

from ..compat.order import wna16_place
from ..oracle.problem import Device, Problem
from ._marlin_wna16 import MarlinWna16, limits


class MarlinBatched(MarlinWna16):
    """vLLM's `BatchedMarlinExperts` on integer weights."""

    name = "marlin_wna16_batched"
    stock_class = "BatchedMarlinExperts"
    limits = limits(formats=("batched",), ungated=("silu", "gelu", "gelu_tanh", "relu2"))

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's, directly behind the other Marlin class."""
        return wna16_place("marlin_batched", device)


BACKEND = MarlinBatched()
