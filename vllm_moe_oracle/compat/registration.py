"""The patches that make vLLM use this project's quantization methods."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..releases.supported import check_platform, release_group
from . import ignored_env_vars, metrics, models_with_experts
from .layer_context import set_current_layer
from .models_with_experts import is_current_model_served
from .patches import DeferredPatch, Patch, redirect_class, wrap_function, wrap_function_lazily
from .quantization_registry import LazyQuantizationConfigs, available_configs, matches_release
from .unquantized_experts import UnquantizedChoice

_INT4_SMALL_BATCH = "Triton's configuration for few tokens of int4 experts"


def patches_for(
    version: str,
    configs: Mapping[str, Sequence[str]],
    methods: Mapping[str, str],
    needs: Mapping[str, str],
    served: Collection[str] = (),
) -> Iterator[Patch | DeferredPatch]:
    """Every patch for a vLLM release.

    Args:
        version: vLLM's version.
        configs: ``module:Class`` of our quantization configs by name; of several, a release has one.
        methods: ``module:Class`` of our class by that of the stock class that it replaces, and ``module:function`` of
            our wrapper by ``module:Class.method`` of the stock method.
        needs: stock module that a module of ours requires, where not every release has it.
        served: names of the quantizations whose experts get our methods.

    Raises:
        StandDown: vLLM runs on a platform that stock vLLM serves alone. It comes before the first patch, as the warning
            about vLLM's variables that change nothing here does.
    """
    from vllm.platforms import current_platform

    kind = "rocm" if current_platform.is_rocm() else "xpu" if current_platform.is_xpu() else ""
    check_platform(kind, current_platform.device_name)
    ignored_env_vars.warn_ignored(version)
    yield _registry_patch(available_configs(configs, needs))
    yield wrap_function("name of the layer under construction", f"{release_group(version).layer}.__init__", _init_layer)
    for stock, ours in methods.items():
        if matches_release(ours, needs):
            name = stock.partition(":")[2]
            if "." in name:
                yield wrap_function_lazily(f"every {name}", stock, ours)
            elif name.endswith("Config"):  # its linear layers, too, are constructed from it
                yield redirect_class(f"every {name}", stock, ours, is_current_model_served)
            else:
                yield redirect_class(f"every {name}", stock, ours)
    yield wrap_function(
        "--moe-backend and unquantized experts",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.__init__",
        UnquantizedChoice(served),
    )
    yield wrap_function(
        "quantization configs without experts",
        "vllm.config.vllm:VllmConfig._get_quantization_config",
        models_with_experts.read_quantization_config,
    )
    yield wrap_function(
        "names of quantizations without experts",
        "vllm.config.model:ModelConfig._verify_quantization",
        models_with_experts.read_quantization_config,
    )
    yield wrap_function(
        "MXFP8 in ModelOpt's hf_quant_config.json",
        "vllm.transformers_utils.model_arch_config_convertor:ModelArchConfigConvertorBase._normalize_quantization_config",
        _normalize_modelopt_mxfp8,
    )
    yield wrap_function(
        "decisions on the metrics endpoint",
        "vllm.v1.metrics.prometheus:get_prometheus_registry",
        metrics.with_decision_collector,
    )
    yield DeferredPatch("MXFP8 linear on CPU", "vllm.model_executor.kernels.linear", _cpu_mxfp8_linear)
    yield DeferredPatch(_INT4_SMALL_BATCH, "vllm.model_executor.layers.fused_moe.fused_moe", _int4_small_batch)


def _registry_patch(configs: dict[str, str]) -> Patch:
    from vllm.model_executor.layers import quantization

    table = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    return Patch(
        "quantization registry",
        quantization,
        "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG",
        LazyQuantizationConfigs(table, configs, is_current_model_served),
    )


def _init_layer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Makes the layer known to quantization methods that its constructor makes."""
    with set_current_layer(self):
        original(self, *args, **kwargs)


def _normalize_modelopt_mxfp8(original: Any, self: Any, config: Any) -> Any:
    """Accepts ModelOpt's hf_quant_config.json with MXFP8: vLLM's check rejects it, though its config class reads it."""
    try:
        return original(self, config)
    except ValueError:
        found = getattr(config, "quantization_config", None)
        if not isinstance(found, dict):
            raise
        nested = found.get("quantization")
        if not isinstance(nested, dict) or str(nested.get("quant_algo")).upper() != "MXFP8":
            raise
        found["quant_method"] = "modelopt_mxfp8"
        return found


def _cpu_mxfp8_linear(linear: ModuleType) -> Patch | None:
    """Offers vLLM's emulation of MXFP8 linear layers on a CPU: it runs there, but is not in vLLM's table for CPUs."""
    from vllm.platforms import PlatformEnum, current_platform

    table = linear._POSSIBLE_MXFP8_KERNELS
    if not current_platform.is_cpu() or PlatformEnum.CPU in table:
        return None
    kernels = _MoeModelKernels([linear.EmulationMxfp8LinearKernel])
    return Patch("MXFP8 linear on CPU", table, PlatformEnum.CPU, kernels)


class _MoeModelKernels(list[Any]):
    """Kernels that vLLM finds for the linear layers of a model with experts only."""

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if is_current_model_served() else iter(())


def _int4_small_batch(fused_moe: ModuleType) -> Patch | None:
    """Completes the Triton configuration of int4 experts with few tokens.

    Up to 0.26 that configuration is for vLLM's CUDA kernel. The expert class runs the Triton kernel for any number of
    tokens, which cannot be launched with it.
    """
    original = fused_moe.get_default_config
    if "GROUP_SIZE_M" in original(1, 128, 768, 2048, 8, "int4_w4a16", [0, 128]):
        return None

    @functools.wraps(original)
    def complete(*args: Any, **kwargs: Any) -> dict[str, int]:
        found: dict[str, int] = original(*args, **kwargs)
        if "GROUP_SIZE_M" in found:
            return found
        # As in 0.27. Triton requires a power of two of tokens in a tile.
        return {**found, "BLOCK_SIZE_M": 1 << (found["BLOCK_SIZE_M"] - 1).bit_length(), "GROUP_SIZE_M": 1}

    return Patch(_INT4_SMALL_BATCH, fused_moe, "get_default_config", complete)
