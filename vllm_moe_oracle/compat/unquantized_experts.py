"""Unquantized experts in a model that has quantized ones: ``--moe-backend``, and saved states.

vLLM has one name for all layers of a model. A kernel of quantized experts may have none for unquantized ones: its
selector would end the server. Such a name is for the layers that this plugin serves; vLLM chooses for the others. A
name that vLLM has for unquantized experts, too, is followed there. Such experts are those of a multi-token prediction
head, and those that vLLM takes for unquantized because a saved state has other names than a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config_or_none

from ..checkpoint.tensor_headers import expert_tensors, has_quantized_tensor
from ..settings import AUTO
from .engine_adapter import loads_saved_state, models_of, saved_state_error
from .layer_context import current_layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

logger = logging.getLogger("vllm.moe_oracle")


def _is_for_unquantized(name: str) -> bool:
    """Whether vLLM has a kernel of that name for unquantized experts."""
    try:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import map_unquantized_backend

        map_unquantized_backend(name)
    except (ImportError, ValueError):  # a release without such a list has no names for unquantized experts
        return False
    return True


class UnquantizedChoice:
    """Wraps the constructor of vLLM's method for unquantized experts.

    Attributes:
        served: vLLM's names of the quantizations that this plugin serves.
    """

    def __init__(self, served: Collection[str]) -> None:
        self.served = served
        self._logged: set[str] = set()

    def __call__(self, original: Any, self_: Any, moe: FusedMoEConfig, *args: Any, **kwargs: Any) -> None:
        """Constructs the method. In a model with quantized experts of ours vLLM chooses, if the name that was asked for
        is none of a kernel for unquantized ones.

        Args:
            original: the stock constructor.
            self_: the method.
            moe: vLLM's config of the layer; its `moe_backend` may become ``auto``.
            args: other arguments of the constructor.
            kwargs: likewise.

        Raises:
            CheckpointError: vLLM loads what its ``save_sharded_state`` wrote of quantized experts. From such files
                vLLM reads that GPTQ's experts are not quantized: it looks for a checkpoint's names in them.
        """
        engine, name = get_current_vllm_config_or_none(), current_layer()[1]
        if engine is not None and self._serves_model(engine):
            self._refuse_saved_state(engine, name)
            asked = moe.moe_backend
            if asked != AUTO and not _is_for_unquantized(asked):
                moe.moe_backend = AUTO
                if asked not in self._logged:
                    self._logged.add(asked)
                    rule = "is for quantized experts; these are not quantized, and vLLM chooses their kernel"
                    logger.warning("moe_oracle: %s: --moe-backend %s %s", name or "experts", asked, rule)
        original(self_, moe, *args, **kwargs)

    @staticmethod
    def _refuse_saved_state(engine: VllmConfig, name: str) -> None:
        """Raises where vLLM loads quantized experts of this layer from a saved state."""
        if name and loads_saved_state(engine):
            folder = Path(engine.model_config.model)
            held = expert_tensors(folder, [name]).get(name) if folder.is_dir() else None
            if held is not None and has_quantized_tensor(held.kinds):
                raise saved_state_error(name)

    def _serves_model(self, engine: VllmConfig) -> bool:
        """Whether the plugin serves the engine's model or the one that drafts for it."""
        return any(each.quantization in self.served for each in models_of(engine))
