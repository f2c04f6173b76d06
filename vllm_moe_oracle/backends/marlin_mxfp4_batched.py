"""Marlin for MXFP4 on activations sorted by expert, as all-to-alls for few tokens deliver them."""

from __future__ import annotations

import dataclasses

from ._stock import EXPERTS
from .marlin_mxfp4 import MarlinMxfp4


class MarlinMxfp4Batched(MarlinMxfp4):
    """vLLM's `BatchedMarlinExperts` on MXFP4 weights."""

    name = "marlin_mxfp4_batched"
    stock_class = f"{EXPERTS}.marlin_moe:BatchedMarlinExperts"
    stock_kernel = "BATCHED_MARLIN"
    static_priority = 61.0
    capabilities = dataclasses.replace(
        MarlinMxfp4.capabilities, formats=("batched",), apply_router_weight_on_input=False, lora=False
    )


BACKEND = MarlinMxfp4Batched()
