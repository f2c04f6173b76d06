"""SiLU and product in Triton, for packages that fuse a function which they are given."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_and_multiply(x):  # type: ignore[no-untyped-def]  # a Triton block has no Python type
    """``silu(gate) * up`` of float32 `[M, 2 N]` whose columns alternate gate and up: `[M, N]`."""
    gate, up = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return gate * tl.sigmoid(gate) * up
