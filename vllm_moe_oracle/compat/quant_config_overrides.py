"""Changes to vLLM's `FusedMoEQuantConfig` that its own expert classes require."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantDesc
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

from ..core.problem import MX_BLOCK

_TORCH_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Types that vLLM's quant config holds as torch dtypes. It holds the others as strings."""

_ACTIVATION_TYPES: dict[str, tuple[Any, tuple[int, int] | None]] = {
    "mxfp8": ("mxfp8", (1, MX_BLOCK)),
    "fp8_block128": (torch.float8_e4m3fn, (128, 128)),
}
"""Type and block shape of activations, by the names that `Builder.stock` takes."""


def override_quant_config(
    quant_config: Any,
    weights: str,
    inputs: str,
    scales: tuple[Tensor, ...] = (),
    swizzled: bool = False,
    group: int = 0,
) -> Any:
    """A copy of a quant config with other types. The tensors stay the same.

    Args:
        quant_config: vLLM's `FusedMoEQuantConfig`.
        weights: type of the weights; "" keeps it.
        inputs: type to which vLLM's prepare step quantizes activations; "" for none.
        scales: those of w13 and w2; empty keeps them.
        swizzled: vLLM's prepare step stores the activations' scales in the tiled layout.
        group: group size of the weights' scales; 0 keeps it.
    """
    changes: dict[str, Any] = {}
    for index, name in enumerate(("_w1", "_w2")):
        replaced: dict[str, Any] = {"dtype": _TORCH_DTYPES.get(weights, weights)} if weights else {}
        if scales:
            replaced["scale"] = scales[index]
        if group:
            replaced["shape"] = GroupShape(0, group)
        if replaced:
            changes[name] = dataclasses.replace(getattr(quant_config, name), **replaced)
    if group:
        # Stock classes read the weights' group size from the activations' shape.
        for name in ("_a1", "_a2"):
            changes[name] = dataclasses.replace(getattr(quant_config, name), shape=GroupShape(0, group))
    if inputs:
        dtype, block = _ACTIVATION_TYPES[inputs]
        # Stock classes take the activations' shape for the weights' too. MXFP4 weights have another type.
        shape = (
            None if block is None or (dtype == "mxfp8" and quant_config._w1.dtype == "mxfp4") else GroupShape(*block)
        )
        for name in ("_a1", "_a2"):
            changes[name] = FusedMoEQuantDesc(dtype=dtype, shape=shape)
    if swizzled:
        changes["is_scale_swizzled"] = True
    return dataclasses.replace(quant_config, **changes) if changes else quant_config
