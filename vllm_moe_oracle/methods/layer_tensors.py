"""A layer's kernel tensors by canonical name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class LayerTensors(Mapping[str, Tensor]):
    """The kernel tensors of a layer by canonical name, looked up at each access: a reload may replace parameters."""

    def __init__(self, layer: torch.nn.Module, names: Mapping[str, str]) -> None:
        """
        Args:
            layer: the layer.
            names: parameter name by canonical name.
        """
        self._layer = layer
        self._parameter_names = dict(names)

    def __getitem__(self, name: str) -> Tensor:
        tensor = getattr(self._layer, self._parameter_names[name])
        assert isinstance(tensor, Tensor)
        return tensor

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor, or `default`. `Mapping.get` raises and catches an exception for a name that is not there, and
        kernels ask for biases at each call."""
        return self[name] if name in self._parameter_names else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameter_names)

    def __len__(self) -> int:
        return len(self._parameter_names)
