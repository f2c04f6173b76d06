"""The correction bias of a layer's router, which models register and checkpoints may lack.

A bias that no tensor of the checkpoint fills stays what the model's code has made it: zeros in some models, whatever
the memory held in most. vLLM serves quantized models so, and says nothing. NaN and infinities that a checkpoint brings
are damage: they choose the same experts for every token.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from ..errors import CheckpointError

logger = logging.getLogger("vllm.moe_oracle")


@dataclass
class _Bias:
    """The bias of one layer.

    Attributes:
        layer: the layer's name.
        brought: a loader has brought a tensor for it, at the start or in a reload.
    """

    layer: str
    brought: bool = False


_watched: WeakKeyDictionary[Any, _Bias] = WeakKeyDictionary()
"""Layers whose bias is a parameter that vLLM's loaders fill by its weight loader."""


def watch(layer: Any, name: str) -> None:
    """Notes from now on what loaders bring into a layer's correction bias; for a layer without one does nothing, and
    where the model passes a part of a parameter or its data, whose loading nobody sees.

    Args:
        layer: vLLM's layer; None where there is none.
        name: its name.
    """
    bias: Any = getattr(layer, "e_score_correction_bias", None)
    if type(bias) is not nn.Parameter:
        return
    _watched[layer] = found = _Bias(name)
    load: Callable[..., Any] = getattr(bias, "weight_loader", default_weight_loader)

    @functools.wraps(load)
    def load_noted(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.brought = found.brought or not param.is_meta  # there vLLM only counts elements
        return load(param, loaded_weight, *args, **kwargs)

    bias.weight_loader = load_noted  # type: ignore[attr-defined]  # vLLM sets it on any parameter


def check_all() -> None:
    """Checks the watched biases, once all tensors are loaded. The host waits for the device once for each.

    Raises:
        CheckpointError: one that a checkpoint has brought has NaN or infinities; the message names layer and expert.
    """
    for layer, bias in _watched.items():
        values = layer.e_score_correction_bias.detach().flatten()
        if values.is_meta:
            continue
        bad = ~torch.isfinite(values)
        if count := int(bad.sum()):
            rule = f"{count} of {len(values)} values of the router's correction bias are NaN or infinite"
            if bias.brought:
                expert = int(bad.nonzero()[0])
                rule += f"; the first is {float(values[expert]):g} of expert {expert}"
                raise CheckpointError(rule, "The checkpoint is damaged", bias.layer)
            lacks = "the checkpoint has no tensor for it, and vLLM serves what its memory held"
            logger.warning("moe_oracle: %s: %s: %s", bias.layer, rule, lacks)
