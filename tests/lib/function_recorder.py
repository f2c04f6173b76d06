"""Stands for vLLM's side where a backend builds experts over a function."""

from __future__ import annotations

from typing import Any

import torch


class FunctionRecorder:
    """A `Builder` that hands back the function that a backend gives it, and the size of its scratch memory."""

    def __init__(self, max_tokens: int = 64, for_serving: bool = True) -> None:
        self.ids_dtype = torch.int32
        self.max_tokens = max_tokens
        self.for_serving = for_serving

    def register_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        return tensor

    def from_function(self, forward: Any) -> Any:
        """The function."""
        return forward

    def from_workspace_function(self, forward: Any, nbytes: Any) -> Any:
        """Both."""
        return forward, nbytes
