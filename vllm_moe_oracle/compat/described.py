"""The types of weights and activations in the words of vLLM's own expert classes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantDesc
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from ..oracle.problem import MX_BLOCK

_TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Types that vLLM's quant config knows as torch dtypes; the others go by their names."""

_INPUTS: dict[str, tuple[Any, tuple[int, int] | None]] = {
    "mxfp8": ("mxfp8", (1, MX_BLOCK)),
    "fp8_block128": (torch.float8_e4m3fn, (128, 128)),
}
"""Type and group of activations by the names that `Builder.stock` knows."""


def described_for_stock(
    quant_config: Any,
    weights: str,
    inputs: str,
    scales: tuple[Tensor, ...] = (),
    swizzled: bool = False,
    group: int = 0,
) -> Any:
    """A quant config with the same tensors under another description of types.

    Args:
        quant_config: vLLM's `FusedMoEQuantConfig`.
        weights: type of the weights; "" leaves it.
        inputs: type that activations are quantised to before the experts; "" leaves them alone.
        scales: of both weights; empty leaves them.
        swizzled: vLLM's prepare step orders the activations' scales in tiles.
        group: input features that share one scale of the weights; 0 leaves it.
    """
    changes: dict[str, Any] = {}
    for index, name in enumerate(("_w1", "_w2")):
        replaced: dict[str, Any] = {"dtype": _TYPES.get(weights, weights)} if weights else {}
        if scales:
            replaced["scale"] = scales[index]
        if group:
            replaced["shape"] = GroupShape(0, group)
        if replaced:
            changes[name] = dataclasses.replace(getattr(quant_config, name), **replaced)
    if group:
        # Where stock's classes look for it, though it is the weights'.
        for name in ("_a1", "_a2"):
            changes[name] = dataclasses.replace(getattr(quant_config, name), shape=GroupShape(0, group))
    if inputs:
        dtype, block = _INPUTS[inputs]
        # A group says to stock's classes that the weights have the same one; MXFP4's have another type.
        told = None if block is None or (dtype == "mxfp8" and quant_config._w1.dtype == "mxfp4") else GroupShape(*block)
        for name in ("_a1", "_a2"):
            changes[name] = FusedMoEQuantDesc(dtype=dtype, shape=told)
    if swizzled:
        changes["is_scale_swizzled"] = True
    return dataclasses.replace(quant_config, **changes) if changes else quant_config
