"""Facts about the engine that this process builds or runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import vllm
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.config.quantization import QuantizationConfigArgs
from vllm.distributed import parallel_state

from ..core.lora import targets_experts
from ..errors import CheckpointError


@cache
def _default_engine() -> VllmConfig:
    return VllmConfig()


def models_of(engine: VllmConfig) -> list[ModelConfig]:
    """The engine's model and the one that drafts for it, as far as it has them."""
    draft = None if engine.speculative_config is None else engine.speculative_config.draft_model_config
    return [each for each in (engine.model_config, draft) if each is not None]


def loads_saved_state(engine: VllmConfig) -> bool:
    """Whether vLLM loads what its ``save_sharded_state`` wrote."""
    return str(engine.load_config.load_format) in ("sharded_state", "runai_streamer_sharded")


def saved_state_error(layer: str) -> CheckpointError:
    """The refusal of a saved state in a layer with quantized experts."""
    rule = "a saved state holds the kernels' tensors, which would be converted a second time"
    return CheckpointError(rule, "Load the original checkpoint, with another --load-format", layer)


class EngineAdapter:
    """The engine of this process."""

    _engine: VllmConfig | None = None

    def engine(self) -> VllmConfig:
        """vLLM's config of the engine. Where none is current, the last one: some releases reload weights outside it.

        A layer may be made without any engine, where its stock method asks for none: then it is vLLM's default config.
        """
        return self._last_engine() or _default_engine()

    def _last_engine(self) -> VllmConfig | None:
        self._engine = get_current_vllm_config_or_none() or self._engine
        return self._engine

    def version(self) -> str:
        """vLLM's version."""
        return str(vllm.__version__)

    def has_draft(self) -> bool:
        """Whether another model drafts for the engine's."""
        return len(models_of(self.engine())) > 1

    def additional_config(self) -> object:
        """``--additional-config`` of the engine."""
        return self.engine().additional_config

    def model_type(self) -> str:
        """``model_type`` of the model that is being built; "" where it is unknown."""
        return str(self._model_field("model_type", ""))

    def num_layers(self) -> int:
        """Layers of the model that is being built, on all pipeline stages; 0 where it is unknown."""
        found = self._model_field("num_hidden_layers", 0)
        return found if isinstance(found, int) else 0

    def is_pipeline_stage(self) -> bool:
        """Whether other processes hold other layers of the model that is being built."""
        engine = self._last_engine()
        return engine is not None and int(engine.parallel_config.pipeline_parallel_size) > 1

    def _model_field(self, name: str, default: Any) -> Any:
        engine = self._last_engine()
        if engine is None or engine.model_config is None:
            return default
        return getattr(engine.model_config.hf_text_config, name, default)

    def checkpoint_quantization(self) -> Mapping[str, Any]:
        """``quantization_config`` of the checkpoint of the model that is being built; empty where it is unknown."""
        engine = self._last_engine()
        model = None if engine is None else engine.model_config
        found = None if model is None else getattr(model.hf_config, "quantization_config", None)
        return found if isinstance(found, Mapping) else {}

    def served_model(self) -> tuple[str, int] | None:
        """The model that is being built, as vLLM was told it, and its number of tensor-parallel ranks; None where no
        engine is known."""
        engine = self._last_engine()
        if engine is None or engine.model_config is None:
            return None
        return str(engine.model_config.model), int(engine.parallel_config.tensor_parallel_size)

    def requested_activations(self) -> Any:
        """vLLM's `QuantKey` that ``--quantization-config`` sets for the experts' inputs; None if it sets none."""
        config = self.engine().model_config
        given = None if config is None else config.quantization_config
        if not isinstance(given, QuantizationConfigArgs) or given.moe is None:
            return None
        return given.moe.activation

    def lora_reaches_experts(self, moe: Any, name: str) -> bool:
        """Whether LoRA adapters may be applied to a layer's experts: unless ``--lora-target-modules`` names others.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            name: the layer's name.
        """
        engine = self._last_engine()
        if not moe.is_lora_enabled or engine is None or engine.lora_config is None:
            return bool(moe.is_lora_enabled)
        targets = getattr(engine.lora_config, "target_modules", None)
        return targets is None or targets_experts(targets, name)

    def uses_dummy_weights(self) -> bool:
        """Whether vLLM loads no checkpoint (``--load-format dummy``)."""
        return str(self.engine().load_config.load_format) == "dummy"

    def loads_no_checkpoint(self) -> bool:
        """Whether vLLM loads no checkpoint's tensors: none, or what its ``save_sharded_state`` wrote."""
        return self.uses_dummy_weights() or loads_saved_state(self.engine())

    def stop_multithread_load(self) -> bool:
        """Makes vLLM's loaders that are made from now on read one file after another, in the same order on every rank;
        returns whether they would have read several at once."""
        chosen = self.engine().load_config.model_loader_extra_config
        if not isinstance(chosen, dict) or not chosen.get("enable_multithread_load"):
            return False
        chosen["enable_multithread_load"] = False
        return True

    def require_original(self, layer: str) -> None:
        """Nothing, where vLLM loads a checkpoint.

        Args:
            layer: the name of a layer with quantized experts.

        Raises:
            CheckpointError: vLLM loads what its ``save_sharded_state`` wrote, the kernels' tensors.
        """
        if loads_saved_state(self.engine()):
            raise saved_state_error(layer)

    def moe_layer_names(self) -> list[str]:
        """Names of all MoE layers of the model, including those that stock vLLM serves."""
        return list(self.engine().compilation_config.static_all_moe_layers)

    def adds_ranks_later(self) -> bool:
        """Whether expert-parallel ranks may join a running server (``--enable-elastic-ep``)."""
        engine = self._last_engine()
        return engine is not None and bool(engine.parallel_config.enable_elastic_ep)

    def peer_group(self) -> Any:
        """torch's CPU process group of the ranks that share this process's layers, data-parallel ranks included.

        None where there is only this rank, with elastic expert parallelism, where ranks join later, and before an
        engine is known.
        """
        engine = self._last_engine()
        if engine is None or not parallel_state.model_parallel_is_initialized():
            return None
        if self.adds_ranks_later():
            return None
        group = parallel_state._EP or parallel_state.get_tp_group()
        return group.cpu_group if group.world_size > 1 else None

    def batch_invariant(self) -> bool:
        """Whether the user requests batch-invariant results (``VLLM_BATCH_INVARIANT``)."""
        import vllm.envs as envs

        return bool(envs.VLLM_BATCH_INVARIANT)
