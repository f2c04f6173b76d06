"""The correction bias of a layer's router, which models register and checkpoints may lack.

A bias that no tensor of the checkpoint fills stays what the model's code has made it: zeros in some models, whatever
the memory held in most. vLLM serves quantized models so, and says nothing. NaN and infinities that a checkpoint brings
are damage: they choose the same experts for every token. Whether a checkpoint brings them is told by the values alone,
which every loader of a model changes, whether or not it is vLLM's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..errors import CheckpointError

logger = logging.getLogger("vllm.moe_oracle")


@dataclass
class _Bias:
    """The bias of one layer.

    Attributes:
        layer: the layer's name.
        before: its values before the load or the reload, [experts] on the CPU, which no sleep of a server takes; None
            where it had none.
    """

    layer: str
    before: Tensor | None


_watched: WeakKeyDictionary[Any, _Bias] = WeakKeyDictionary()
"""Layers with a bias."""


def watch(layer: Any, name: str) -> None:
    """Notes what a layer's correction bias holds before tensors are loaded; for a layer without one does nothing.

    Args:
        layer: vLLM's layer; None where there is none.
        name: its name.
    """
    if isinstance(getattr(layer, "e_score_correction_bias", None), Tensor):
        _watched[layer] = _Bias(name, _values(layer))


def _values(layer: Any) -> Tensor | None:
    """What a layer's correction bias holds, [experts] on the CPU; None for one without values, or none at all."""
    bias = getattr(layer, "e_score_correction_bias", None)
    if not isinstance(bias, Tensor) or bias.is_meta:
        return None
    return bias.detach().flatten().to("cpu", copy=True)


def check_all() -> None:
    """Checks the watched biases, once all tensors are loaded. The host waits for the device once for each.

    Raises:
        CheckpointError: one that was loaded has NaN or infinities; the message names layer and expert.
    """
    for layer, bias in _watched.items():
        before, values = bias.before, _values(layer)
        bias.before = values
        if values is None:
            continue
        bad = ~torch.isfinite(values)
        if count := int(bad.sum()):
            rule = f"{count} of {len(values)} values of the router's correction bias are NaN or infinite"
            was_loaded = _differ(before, values)
            if was_loaded:
                expert = int(bad.nonzero()[0])
                rule += f"; the first is {float(values[expert]):g} of expert {expert}"
                raise CheckpointError(f"{rule}. Loading has changed them", "The checkpoint is damaged", bias.layer)
            logger.warning("moe_oracle: %s: %s: %s", bias.layer, rule, _UNKNOWN if was_loaded is None else _UNCHANGED)


_UNCHANGED = (
    "loading has not changed them, so that the checkpoint has no tensor for it, or one with these values, and vLLM "
    "serves what its memory held"
)
_UNKNOWN = "whether the checkpoint has brought them is not known, and vLLM serves them"


def _differ(before: Tensor | None, values: Tensor) -> bool | None:
    """Whether a bias has other values than before, whatever its dtype is now; None where that cannot be said."""
    if before is None or before.shape != values.shape:
        return None
    return not torch.allclose(before.to(values.dtype), values, rtol=0, atol=0, equal_nan=True)
