"""Marlin for integer weights on activations sorted by expert, as all-to-alls for few tokens deliver them."""

from __future__ import annotations

import dataclasses

from ._stock import EXPERTS
from .marlin_wna16 import MarlinWna16


class MarlinWna16Batched(MarlinWna16):
    """vLLM's `BatchedMarlinExperts` on integer weights."""

    name = "marlin_wna16_batched"
    stock_class = f"{EXPERTS}.marlin_moe:BatchedMarlinExperts"
    stock_kernel = "BATCHED_MARLIN"
    static_priority = 35.0
    capabilities = dataclasses.replace(
        MarlinWna16.capabilities, formats=("batched",), apply_router_weight_on_input=False, lora=False
    )


BACKEND = MarlinWna16Batched()
