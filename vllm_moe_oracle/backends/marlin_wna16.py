"""Marlin for integer weights: vLLM's first choice on CUDA devices, second after Humming on sm_90."""

from __future__ import annotations

from ..compat.order import wna16_place
from ..oracle.problem import Device, Problem
from ._marlin_wna16 import MarlinWna16, limits


class Marlin(MarlinWna16):
    """vLLM's `MarlinExperts` on integer weights."""

    name = "marlin_wna16"
    stock_class = "MarlinExperts"
    limits = limits(formats=("standard",), ungated=("silu", "gelu", "gelu_tanh", "relu2"))

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's second; third on sm_90."""
        return wna16_place("marlin", device)


BACKEND = Marlin()
