"""vLLM's side of making experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..backends import Forward

if TYPE_CHECKING:
    from ..compat.adapter import Adapter


class VllmBuilder:
    """The `vllm_moe_oracle.backends.Builder` of one layer."""

    def __init__(self, release: Adapter, moe: Any, quant_config: Any) -> None:
        self._release = release
        self._moe = moe
        self._quant_config = quant_config

    def from_function(self, forward: Forward) -> Any:
        """Experts over a plain function."""
        return self._release.function_experts(self._moe, self._quant_config, forward)

    def stock(self, class_name: str, **kwargs: Any) -> Any:
        """An instance of vLLM's own expert class of that name."""
        return self._release.stock_experts(class_name, self._moe, self._quant_config, **kwargs)
