"""Marlin for MXFP4 whose activations come sorted by expert, as all-to-alls for few tokens deliver them."""

from __future__ import annotations

import dataclasses

from .marlin_mxfp4 import MarlinMxfp4


class MarlinMxfp4Batched(MarlinMxfp4):
    """vLLM's `BatchedMarlinExperts` on MXFP4 weights."""

    name = "marlin_mxfp4_batched"
    stock_class = "BatchedMarlinExperts"
    place = "marlin_batched"
    limits = dataclasses.replace(MarlinMxfp4.limits, formats=("batched",), lora=False)


BACKEND = MarlinMxfp4Batched()
