"""The activations of `core/activations.py` in torch, for the reference of the kernels and for the emulation.

The kernels' own formulas are in `epilogue.py`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, relu

from ..core.activations import alpha_beta
from ..core.problem import Activation


def activate(y: torch.Tensor, activation: Activation) -> torch.Tensor:
    """The function between the products.

    Args:
        y: float32 `[..., R]`: gate columns then up columns when gated.
        activation: which function, with its parameters. ``swigluoai`` is
            ``gate * sigmoid(alpha * gate) * (up + beta)`` after clamping gate from above and up from both sides to
            ``limit`` (gpt-oss's modeling code); a limit on any other gated function clamps the same way, but on
            ``swiglustep``, which clamps ``silu(gate)`` (Step-3.5's modeling code). ``situ`` is
            ``alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta)`` (Kimi-K3).

    Returns:
        float32 `[..., I]`.

    Raises:
        ValueError: there is no formula of this name.
    """
    name, limit = activation.name, activation.limit
    alpha, beta = alpha_beta(activation)
    if not activation.gated:
        return _of_one(y, name, alpha)
    gate, up = y.chunk(2, dim=-1)
    if name == "situ":
        gate = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
        return gate * (up if activation.beta is None else beta * torch.tanh(up / beta))
    if name == "swiglustep":
        gate = _of_one(gate, "silu", alpha)
        return gate * up if limit is None else gate.clamp(max=limit) * up.clamp(-limit, limit)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _of_one(gate, name, alpha) * (up + beta)


def _of_one(x: torch.Tensor, name: str, alpha: float) -> torch.Tensor:
    """The function of the gate, or of what has no gate."""
    if name in ("silu", "swigluoai"):  # which differ in their default parameters
        return x * torch.sigmoid(alpha * x)
    if name == "gelu":
        return gelu(x)
    if name == "gelu_tanh":
        return gelu(x, approximate="tanh")
    if name == "relu2":
        return relu(x).square()
    raise ValueError(f"no formula for the activation {name!r}")
