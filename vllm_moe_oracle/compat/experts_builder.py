"""The `Builder` of vLLM: how a backend gets experts that vLLM's kernels can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends import MAX_CHECK_TOKENS, Forward, WorkspaceForward

if TYPE_CHECKING:
    from .adapter import Adapter


class VllmBuilder:
    """The `vllm_moe_oracle.backends.Builder` of one layer.

    Attributes:
        for_serving: the experts will serve; False for experts that run once, such as those of a self-check.
        buffers: tensors beside the layer's weights that the built experts hold on to.
    """

    def __init__(
        self,
        adapter: Adapter,
        moe: Any,
        quant_config: Any,
        for_serving: bool = True,
        trial_tokens: int = MAX_CHECK_TOKENS,
        batched: bool = False,
    ) -> None:
        """
        Args:
            adapter: vLLM's side.
            moe: vLLM's `FusedMoEConfig` of the layer.
            quant_config: vLLM's `FusedMoEQuantConfig` of the layer.
            for_serving: see the class.
            trial_tokens: most tokens of a call of experts that do not serve.
            batched: an all-to-all sorts tokens by expert. Functions see each row as a token with one expert.
        """
        self.for_serving = for_serving
        self.buffers: list[Tensor] = []
        self._trial_tokens, self._batched = trial_tokens, batched
        self._adapter = adapter
        self._moe = moe
        self._quant_config = quant_config

    def register_buffer(self, tensor: Tensor) -> Tensor:
        """Makes a tensor part of the layer, and returns it."""
        self.buffers.append(tensor)
        return tensor

    def from_function(self, forward: Forward) -> Any:
        """Experts over a function."""
        return self._adapter.function_experts(self._moe, self._quant_config, forward, batched=self._batched)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a call; rows in the batched format, whose calls all have that many."""
        if self._batched:
            return self._adapter.batched_rows(self._moe)
        most = self._adapter.max_tokens(self._moe)
        return most if self.for_serving else min(most, self._trial_tokens)

    @property
    def ids_dtype(self) -> torch.dtype:
        """Dtype of a call's expert ids."""
        return self._adapter.ids_dtype(self._moe)

    def from_workspace_function(self, forward: WorkspaceForward, nbytes: Callable[[int, int], int]) -> Any:
        """Experts over a function with a workspace."""
        return self._adapter.function_experts(self._moe, self._quant_config, forward, nbytes, self._batched)

    def stock(self, class_name: str, **kwargs: Any) -> Any:
        """An instance of vLLM's own expert class of that name."""
        built = self._adapter.stock_experts(class_name, self._moe, self._quant_config, **kwargs)
        # Tensors that stock constructors create, such as alpha and beta of each expert, are registered nowhere else.
        self.buffers += [value for value in vars(built).values() if isinstance(value, Tensor)]
        return built
