"""What vLLM says of the engine that is being built or runs."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed import parallel_state


class Engine:
    """The engine of this process."""

    _engine: VllmConfig | None = None

    def engine(self) -> VllmConfig:
        """vLLM's config of the engine; the last one where none is current: some releases reload weights so."""
        return self._last_engine() or get_current_vllm_config()

    def _last_engine(self) -> VllmConfig | None:
        self._engine = get_current_vllm_config_or_none() or self._engine
        return self._engine

    def version(self) -> str:
        """vLLM's version."""
        return str(vllm.__version__)

    def additional_config(self) -> object:
        """``--additional-config`` of the engine that is being built."""
        return self.engine().additional_config

    def model_type(self) -> str:
        """The kind of model that is being built, as its config.json says (``model_type``); "" where nothing says so."""
        engine = self._last_engine()
        if engine is None or engine.model_config is None:
            return ""
        return str(getattr(engine.model_config.hf_text_config, "model_type", ""))

    def activations_asked(self) -> Any:
        """vLLM's `QuantKey` that ``--quantization-config`` gives for the experts' inputs; None without one."""
        config = self.engine().model_config
        given = None if config is None else config.quantization_config
        if not isinstance(given, QuantizationConfigArgs) or given.moe is None:
            return None
        return given.moe.activation

    def weights_are_made_up(self) -> bool:
        """Whether no checkpoint will be read (``--load-format dummy``)."""
        return str(self.engine().load_config.load_format) == "dummy"

    def moe_layer_names(self) -> list[str]:
        """Names of every MoE layer that the model being loaded has, ours or not."""
        return list(self.engine().compilation_config.static_all_moe_layers)

    def peers(self) -> Any:
        """torch's CPU group of the ranks that hold parts of this process's layers, data-parallel ones included; None
        where there are no others, or where ranks join while others serve (elastic expert parallelism)."""
        if not parallel_state.model_parallel_is_initialized():
            return None
        if self.engine().parallel_config.enable_elastic_ep:
            return None
        group = parallel_state._EP or parallel_state.get_tp_group()
        return group.cpu_group if group.world_size > 1 else None

    def batch_invariant(self) -> bool:
        """Whether the user asked for batch invariance."""
        import vllm.envs as envs

        return bool(envs.VLLM_BATCH_INVARIANT)
