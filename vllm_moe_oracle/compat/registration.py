"""The patches that make vLLM use this project's methods: through its registry, and where it never asks the registry."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from ..errors import StandDown
from . import metrics, retired
from .construction import under_construction
from .eras import era_of
from .patches import Deferred, Patch, around, transplant, wrapped_by
from .quantizations import LazyConfigs, is_for_release, offered

_FEW_TOKENS = "Triton's configuration for few tokens of int4 experts"


def patches_for(
    version: str,
    configs: Mapping[str, str | tuple[str, ...]],
    methods: Mapping[str, str],
    needs: Mapping[str, str],
) -> Iterator[Patch | Deferred]:
    """Every patch for a vLLM release.

    Args:
        version: vLLM's version.
        configs: ``module:Class`` of our quantisation configs by name.
        methods: ``module:Class`` of our classes by that of the stock class that it takes the place of, and
            ``module:function`` of our functions by ``module:Class.method`` of the stock one that each wraps.
        needs: stock module by module of ours, of those that are not for every release.
    """
    from vllm.platforms import current_platform

    if current_platform.is_rocm() or current_platform.is_xpu():
        rule = f"no backend knows {current_platform.device_name or 'this platform'}'s own kernels for these formats"
        raise StandDown(rule, "Stock vLLM serves them there")
    retired.warn(version)
    yield _registry(offered(configs, needs))
    yield around("name of the layer under construction", f"{era_of(version).layer}.__init__", _construct_layer)
    for stock, ours in methods.items():
        if is_for_release(ours, needs):
            name = stock.partition(":")[2]
            yield (wrapped_by if "." in name else transplant)(f"every {name}", stock, ours)
    yield around(
        "MXFP8 in ModelOpt's hf_quant_config.json",
        "vllm.transformers_utils.model_arch_config_convertor:ModelArchConfigConvertorBase._normalize_quantization_config",
        _nested_mxfp8,
    )
    yield around(
        "decisions on the metrics endpoint",
        "vllm.v1.metrics.prometheus:get_prometheus_registry",
        metrics.with_decisions,
    )
    yield Deferred("MXFP8 linear on CPU", "vllm.model_executor.kernels.linear", _cpu_linear)
    yield Deferred(_FEW_TOKENS, "vllm.model_executor.layers.fused_moe.fused_moe", _few_tokens)


def _registry(configs: dict[str, str]) -> Patch:
    from vllm.model_executor.layers import quantization

    table = quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG
    return Patch(
        "quantization registry", quantization, "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG", LazyConfigs(table, configs)
    )


def _construct_layer(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Methods that vLLM constructs itself, past the registry, are told which layer they are for."""
    with under_construction(self):
        original(self, *args, **kwargs)


def _nested_mxfp8(original: Any, self: Any, config: Any) -> Any:
    """vLLM refuses the file that ModelOpt writes when its algorithm is MXFP8, which its config class can read."""
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


def _cpu_linear(linear: ModuleType) -> Patch | None:
    """vLLM's emulation of MXFP8 linear layers runs on a CPU, but its table for CPUs does not offer it."""
    from vllm.platforms import PlatformEnum, current_platform

    table = linear._POSSIBLE_MXFP8_KERNELS
    if not current_platform.is_cpu() or PlatformEnum.CPU in table:
        return None
    return Patch("MXFP8 linear on CPU", table, PlatformEnum.CPU, [linear.EmulationMxfp8LinearKernel])


def _few_tokens(fused_moe: ModuleType) -> Patch | None:
    """Until 0.26 the configuration for few tokens of int4 experts is one for vLLM's CUDA kernel, and its Triton kernel,
    which the class for these experts runs at any number of tokens, cannot be launched with it."""
    original = fused_moe.get_default_config
    if "GROUP_SIZE_M" in original(1, 128, 768, 2048, 8, "int4_w4a16", [0, 128]):
        return None

    @functools.wraps(original)
    def whole(*args: Any, **kwargs: Any) -> dict[str, int]:
        found: dict[str, int] = original(*args, **kwargs)
        if "GROUP_SIZE_M" in found:
            return found
        # What 0.27 says there; a tile of Triton's has a power of two of tokens.
        return {**found, "BLOCK_SIZE_M": 1 << (found["BLOCK_SIZE_M"] - 1).bit_length(), "GROUP_SIZE_M": 1}

    return Patch(_FEW_TOKENS, fused_moe, "get_default_config", whole)
