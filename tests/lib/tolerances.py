"""Error bounds of correct kernels against the float64 reference, per element, derived from the formats.

No number here is fitted. Every bound is a running error analysis (Higham, Accuracy and Stability of Numerical
Algorithms, chapter 3): each operation adds its own rounding and propagates the errors of its inputs, in absolute
values. A kernel outside the bound has a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.lib import reference

Array = npt.NDArray[np.float64]

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to nearest: 2**-p with p significand bits, including the hidden one."""

TINY = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150}
"""Largest absolute error of rounding a subnormal: half of the smallest."""

ELEMENTARY = 8 * UNIT["float32"]
"""Error of an activation in float32, relative to |gate| (|up| + |beta|), besides that of its inputs: four operations of
half a unit in the last place each, and an exponential, erf or tanh of at most four units (the libraries behind torch
promise one to four)."""

STEEPEST = 1.13
"""Largest slope of silu, of swish with any alpha (1.0998), of gelu (1.129) and of its tanh form (1.1285)."""


@dataclass(frozen=True)
class Layer:
    """Exact weights of a layer's experts in float64, and the function between the products; names as in `reference`."""

    w13: Array
    w2: Array
    activation: str
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    b13: Array | None = None
    b2: Array | None = None


def gamma(terms: int) -> float:
    """Error of a float32 sum of `terms` products in any order, relative to the sum of absolute values."""
    return terms * UNIT["float32"] / (1 - terms * UNIT["float32"])


def quantized(values: Array, error: Array) -> tuple[Array, Array]:
    """MXFP8 (ceil rule) of values that are known up to `error`: the result for the exact values, and its error.

    For a given scale rounding is monotone, so the result lies between the results of both ends. This is evaluated for
    each scale that the block can have. Away from rounding boundaries the error is 0.
    """
    exact = reference.fake_quantize_mxfp8(values)
    worst = np.zeros_like(exact)
    blocks = (*values.shape[:-1], -1, reference.BLOCK)
    size, slack = np.abs(values).reshape(blocks), error.reshape(blocks)
    lowest = np.maximum(size - slack, 0.0).max(-1)
    highest = (size + slack).max(-1)
    for amax in (lowest, highest):
        scale = np.exp2(reference.mxfp8_exponent(amax).astype(np.float64))[..., None]
        for end in (values - error, values + error):
            codes = reference.encode_e4m3(end.reshape(blocks) / scale)
            worst = np.maximum(worst, np.abs((reference.decode_e4m3(codes) * scale).reshape(values.shape) - exact))
    return exact, worst


def moe_bound(
    x: Array,
    layer: Layer,
    ids: npt.NDArray[np.int64],
    weights: Array,
    *,
    dtype: str,
    apply_router_weight_on_input: bool = False,
    expert_map: Sequence[int] | None = None,
    quantize: bool = False,
) -> tuple[Array, Array]:
    """The layer's output in float64 and the error bound of a kernel that accumulates in float32.

    Args:
        x: `[M, H]`, exact in `dtype`.
        layer: weights and activation.
        ids: `[M, K]`, -1 for no expert.
        weights: `[M, K]`, exact in float32.
        dtype: the model's dtype, used for the hidden state between the GEMMs and for the output.
        apply_router_weight_on_input: the weight, and its product with x, are rounded to `dtype`, as vLLM does it.
        expert_map: local slot of each expert, or -1.
        quantize: inputs of both products are rounded to MXFP8 (the second then skips `dtype`).

    Returns:
        `[M, H]` values and `[M, H]` bounds.
    """
    unit, tiny = UNIT[dtype], TINY[dtype]
    hidden, inner = layer.w2.shape[1:]
    total, error, absolute = (np.zeros_like(x) for _ in range(3))
    for token, slot in np.ndindex(*ids.shape):
        expert = int(ids[token, slot])
        if expert >= 0 and expert_map is not None:
            expert = expert_map[expert]
        if expert < 0:
            continue
        weight = weights[token, slot]
        state, slack = x[token], np.zeros(hidden)
        if apply_router_weight_on_input:
            state = state * weight
            slack = (2 * unit + unit**2) * np.abs(state) + tiny * (1 + np.abs(x[token]))
        if quantize:
            state, slack = quantized(state, slack)

        w13, w2 = layer.w13[expert], layer.w2[expert]
        b13 = np.zeros(len(w13)) if layer.b13 is None else layer.b13[expert]
        b2 = np.zeros(hidden) if layer.b2 is None else layer.b2[expert]
        first = w13 @ state + b13
        slack = np.abs(w13) @ slack + gamma(hidden + 1) * (np.abs(w13) @ (np.abs(state) + slack) + np.abs(b13))

        state, slack = _activated(first, slack, layer)
        if quantize:
            state, slack = quantized(state, slack)
        else:
            slack = slack + unit * (np.abs(state) + slack) + tiny

        second = w2 @ state + b2
        slack = np.abs(w2) @ slack + gamma(inner + 1) * (np.abs(w2) @ (np.abs(state) + slack) + np.abs(b2))
        if not apply_router_weight_on_input:
            second = second * weight
            slack = np.abs(weight) * slack * (1 + UNIT["float32"]) + UNIT["float32"] * np.abs(second)
        total[token] += second
        error[token] += slack
        absolute[token] += np.abs(second) + slack
    error += gamma(ids.shape[1]) * absolute
    return total, error + unit * (np.abs(total) + error) + tiny


def _activated(first: Array, slack: Array, layer: Layer) -> tuple[Array, Array]:
    """The activation's value, and its error from that of its inputs and from its own arithmetic."""
    value = reference.activate(layer.activation, first, alpha=layer.alpha, beta=layer.beta, limit=layer.limit)
    if not reference.is_gated(layer.activation):
        size = np.abs(first)
        if layer.activation == "relu2_no_mul":
            # (g + e)**2 - g**2
            return value, 2 * size * slack + slack**2 + UNIT["float32"] * (size + slack) ** 2
        return value, STEEPEST * slack + ELEMENTARY * (size + slack)
    half = len(first) // 2
    # Clamping brings points closer together: bounds without it hold with it.
    gate, up = np.abs(first[:half]), np.abs(first[half:])
    default = 1.0 if layer.activation == "swigluoai" else 0.0
    up = up + abs(default if layer.beta is None else layer.beta)
    gate_slack, up_slack = slack[:half], slack[half:]
    moved = STEEPEST * gate_slack * (up + up_slack) + gate * up_slack
    return value, moved + ELEMENTARY * (gate + gate_slack) * (up + up_slack)


def outside(found: Array, expected: Array, bound: Array) -> str:
    """The worst element of `found`, in words; empty if every element is within its bound."""
    if found.shape != expected.shape:
        return f"shape {found.shape}, expected {expected.shape}"
    distance = np.abs(found - expected)
    bad = ~(distance <= bound)  # NaN is bad
    if not bad.any():
        return ""
    ratio = np.where(np.isnan(distance), np.inf, distance / bound)
    at = np.unravel_index(int(ratio.argmax()), found.shape)
    return f"{bad.sum()} of {bad.size} outside; at {at}: {found[at]:g}, expected {expected[at]:g} to {bound[at]:g}"
