"""Kernels of other projects that cannot be timed as a single layer of these formats on Hopper, as data.

Each reason was read in the named release: its wheel's Python sources and metadata, or the strings of its libraries.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ListedPeer:
    """A kernel that is not timed.

    Attributes:
        name: what it is called.
        package: the distribution and the release in which the reason was found.
        reason: why it is not timed.
    """

    name: str
    package: str
    reason: str


LISTED = (
    ListedPeer(
        "TurboMind",
        "lmdeploy 0.18.0",
        "turbomind/linear.py offers grouped products (MXFP4, int4) alone. Routing, gpt-oss's activation with biases and "
        "the sum over experts are inside its engine, so that a layer would be timed with somebody else's kernels",
    ),
    ListedPeer(
        "TokenSpeed's Marlin",
        "tokenspeed-kernel 0.1.4",
        "a copy of vLLM's kernel for MXFP4 without biases (thirdparty/cuda/marlin_moe.py): the backend marlin_mxfp4",
    ),
    ListedPeer(
        "SGLang",
        "sglang-kernel 0.4.10",
        "on sm_90 it takes int4 weights with activations in fp8 only (cutlass_w4a8_moe_mm, a grouped product), and "
        "MXFP8 on sm_100 only; no MXFP4, no Marlin. It asks for torch 2.14.1. Its copy of triton_kernels is a peer",
    ),
    ListedPeer(
        "QuACK",
        "quack-kernels 0.6.5",
        "gemm_w4.py takes MXFP4, MXFP8 and int4 weights on sm_90, for dense products only: with ragged rows or gathered "
        "inputs it refuses them (epilogue/frontend.py)",
    ),
    ListedPeer(
        "SonicMoE",
        "not on the registry",
        "weights in 16 bits only",
    ),
)
"""The table of the results' page and of a benchmark's conditions."""
