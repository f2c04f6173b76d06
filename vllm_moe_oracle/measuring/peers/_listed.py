"""Kernels of other projects that cannot be timed as a single layer of these formats on Hopper, as data.

Each reason was read in the named release, in its wheel's Python sources and metadata or the strings of its libraries,
unless it says what was tried.
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
        "turbomind/linear.py offers grouped products (MXFP4, int4); routing, gpt-oss's activation with biases and the "
        "sort of slots are inside its engine. With a sort of this project's, layers of int4 and MXFP4 were right when "
        "called on an H200 (errors 4e-3 and 1e-2). In a CUDA graph, which timing needs, replays after the first were "
        "wrong (errors up to 0.6), or met an illegal instruction. Tried with a library from which this project had cut "
        "the machine code of other GPUs",
    ),
    ListedPeer(
        "TokenSpeed's Marlin",
        "tokenspeed-kernel 0.1.4",
        "the Marlin kernel that vLLM has, too (thirdparty/cuda/marlin_moe.py), for MXFP4 without biases: see the "
        "backend marlin_mxfp4",
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
        "gemm_w4.py takes MXFP4, MXFP8 and int4 weights on sm_90 in dense products only: ragged rows and gathered "
        "inputs are refused (epilogue/frontend.py)",
    ),
    ListedPeer(
        "SonicMoE",
        "sonic-moe 0.1.2.post1",
        "weights in 16 bits: its sources name no quantized format. It asks for torch up to 2.9.1",
    ),
)
"""The table of the results' page and of a benchmark's conditions."""
