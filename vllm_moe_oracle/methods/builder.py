"""vLLM's side of making experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..backends import Forward, ScratchForward

if TYPE_CHECKING:
    from ..compat.adapter import Adapter


_TRIED = 64
"""At most so many tokens are given to experts that are only tried: planning for more takes longer than trying."""


class VllmBuilder:
    """The `vllm_moe_oracle.backends.Builder` of one layer."""

    def __init__(self, release: Adapter, moe: Any, quant_config: Any, serves: bool = True) -> None:
        self.serves = serves
        """Whether the experts are for a layer that will serve, and not for trying them once."""
        self._release = release
        self._moe = moe
        self._quant_config = quant_config
        self.kept: list[Tensor] = []
        """Tensors beside the layer's weights that what was built holds on to."""

    def keep(self, tensor: Tensor) -> Tensor:
        """Makes a tensor part of the layer."""
        self.kept.append(tensor)
        return tensor

    def from_function(self, forward: Forward) -> Any:
        """Experts over a plain function."""
        return self._release.function_experts(self._moe, self._quant_config, forward)

    @property
    def max_tokens(self) -> int:
        """Most tokens that a call may have."""
        most = self._release.max_tokens(self._moe)
        return most if self.serves else min(most, _TRIED)

    def from_scratch_function(self, forward: ScratchForward, nbytes: Callable[[int, int], int]) -> Any:
        """Experts over a function with scratch memory."""
        return self._release.function_experts(self._moe, self._quant_config, forward, nbytes)

    def stock(self, class_name: str, **kwargs: Any) -> Any:
        """An instance of vLLM's own expert class of that name."""
        made = self._release.stock_experts(class_name, self._moe, self._quant_config, **kwargs)
        # What stock constructors make for themselves, alpha and beta of each expert for one, is no part of the layer.
        self.kept += [value for value in vars(made).values() if isinstance(value, Tensor)]
        return made
