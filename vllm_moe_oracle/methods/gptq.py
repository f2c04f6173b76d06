"""GPTQ's checkpoints: AutoGPTQ, GPTQModel, and whatever else writes their format."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import auto_gptq as stock
from vllm.model_executor.layers.quantization.utils import gptq_utils
from vllm.scalar_type import scalar_types

from ..compat.construction import under_construction
from ..errors import CheckpointError
from ..oracle.problem import Scheme
from ..quantization import reader
from ..quantization.answers import Answer
from ..quantization.fields import flattened, shown
from ..quantization.gptq import gptq_scheme
from . import storage
from .dtypes import with_emulated
from .wna16 import Wna16MoEMethod, experts_called, has_expert_biases, unquantised

_WHERE = "quantization_config"

refuse_act_order = getattr(gptq_utils, "normalize_and_validate_gptq_desc_act", None)
"""What refuses act order in releases whose own methods do not know it; None in those whose do."""


def fields_of(config: Any) -> dict[str, Any]:
    """A config object of vLLM's as the fields of a checkpoint's config.

    Args:
        config: vLLM's `AutoGPTQConfig`; others than a checkpoint's reader make them too (Intel's AutoRound).
    """
    told = ("checkpoint_format", "format", "static_groups", "pack_dtype", "is_marlin_format")
    static = config.full_config.get("static_groups") and config.full_config.get("desc_act")
    return {
        **{name: config.full_config.get(name) for name in told},
        "quant_method": "gptq",
        "bits": config.weight_bits,
        "group_size": config.group_size,
        "desc_act": bool(config.desc_act or static),
        "sym": config.is_sym,
        "dynamic": config.dynamic,
        "modules_in_block_to_quantize": config.modules_in_block_to_quantize,
    }


class AutoGPTQMoEMethod(Wna16MoEMethod, stock.AutoGPTQMoEMethod):
    """MoE layers. Takes the place of the stock class of the same name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance, or one of the stock class; see `OracleMoEMethod`."""
        made = super().__new__(cls, *args, **kwargs)
        if not isinstance(made, Wna16MoEMethod):
            # Group indices of experts are kept when a checkpoint is read, and some stock classes do not expect them.
            made.create_weights = functools.partial(_with_group_index, made.create_weights)
        return made

    @classmethod
    def beyond_stock(cls, quant_config: Any, moe: Any) -> str:
        """See `OracleMoEMethod.beyond_stock`."""
        scheme = gptq_scheme(fields_of(quant_config), _WHERE)
        ordered = scheme.act_order == "group" and scheme.group_size != -1
        return "does not know act order" if ordered and refuse_act_order is not None else ""

    def __init__(self, quant_config: Any, moe: Any) -> None:
        # Not the stock constructor: it would choose a backend by its own list, and raise where that has none.
        self.quant_config = quant_config
        scheme = gptq_scheme(fields_of(quant_config), _WHERE)
        self.file_packing = scheme.packing
        self.bias_in_file = getattr(quant_config, "expert_biases", False)
        self.decide(moe, scheme)


def _with_group_index(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """The stock class's parameters, and places for group indices that nobody reads."""
    original(layer, *args, **kwargs)
    for name in ("w13_g_idx", "w2_g_idx"):
        if not hasattr(layer, name):
            storage.replace(layer, name, torch.zeros(0), weight_loader=_ignore)


def _ignore(*args: Any, return_success: bool = False, **kwargs: Any) -> bool | None:
    return True if return_success else None


class AutoGPTQConfig(stock.AutoGPTQConfig):
    """The stock config with this project's MoE method; everything else in the checkpoint stays the stock classes'.

    The stock class refuses a checkpoint with zero points as a whole, and in newer releases one with act order. Here its
    experts are served, and a linear layer of that kind is refused as the stock class words it.
    """

    TYPE_MAP: ClassVar[Any] = {
        **stock.AutoGPTQConfig.TYPE_MAP,
        (4, False): scalar_types.uint4,
        (8, False): scalar_types.uint8,
    }
    expert_biases: bool = False
    """The checkpoint holds biases of experts."""

    def __init__(
        self,
        weight_bits: int,
        group_size: int,
        desc_act: bool,
        is_sym: bool,
        lm_head_quantized: bool,
        dynamic: dict[str, Any],
        full_config: dict[str, Any],
        modules_in_block_to_quantize: list[Any] | None = None,
    ) -> None:
        if not isinstance(dynamic or {}, Mapping):
            raise CheckpointError(f"dynamic is {shown(dynamic)}, not an object", where=_WHERE)
        dynamic = dynamic or {}
        modules = flattened(modules_in_block_to_quantize)
        super().__init__(
            weight_bits, group_size, False, is_sym, lm_head_quantized, without_act_order(dynamic), full_config, modules
        )
        self.dynamic = dynamic
        # In groups of neighbours, an order of quantising is nothing that anybody need know.
        self.desc_act = bool(desc_act and group_size != -1 and not full_config.get("static_groups"))

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of the model. On a CPU, where experts are emulated, also float32."""
        return with_emulated(super().get_supported_act_dtypes())

    @staticmethod
    def get_checkpoint_weight_mapper() -> Any:
        """Which of the checkpoint's tensors no layer reads: group indices, but for those of experts."""
        from vllm.model_executor.models.utils import WeightsMapper

        return WeightsMapper(orig_to_new_regex={re.compile(r"^(?!.*\bexperts\.\d+\.).*\.g_idx$"): None})

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Looks at the names of the checkpoint's tensors, for what the config does not say."""
        super().maybe_update_config(model_name, *args, **kwargs)
        self.expert_biases = has_expert_biases(model_name, kwargs.get("revision"))

    def scheme_of(self, prefix: str, layer: Any = None) -> Answer:
        """What the experts of a layer are stored as, by the rules that `explain` knows too; None for not quantised."""
        return reader(fields_of(self), _WHERE)(experts_called(prefix, layer))

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method for a layer.

        Raises:
            ValueError: a linear layer has zero points or act order, which vLLM's kernels do not know.
        """
        if isinstance(layer, RoutedExperts):
            found = self.scheme_of(prefix, layer)
            if not isinstance(found, Scheme):
                return unquantised(layer.moe_config)
            with under_construction(layer, prefix):
                return AutoGPTQMoEMethod(self._of(found), layer.moe_config)
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, stock.AutoGPTQLinearMethod):
            _check_linear(method, prefix)
        return method

    def _of(self, scheme: Scheme) -> AutoGPTQConfig:
        """The config of a layer with that scheme, which an exception in ``dynamic`` may have given it."""
        found = copy.copy(self)
        found.weight_bits, found.group_size = scheme.bits, scheme.group_size
        found.is_sym, found.desc_act = not scheme.zero_points, scheme.act_order == "group"
        found.pack_factor = 32 // scheme.bits
        # Widths that vLLM has no type for are refused by the oracle, with what every backend says.
        found.quant_type = self.TYPE_MAP.get((scheme.bits, not scheme.zero_points), self.quant_type)
        found.full_config = {**self.full_config, "checkpoint_format": scheme.packing, "format": None}
        return found


def _check_linear(method: stock.AutoGPTQLinearMethod, prefix: str) -> None:
    config = method.quant_config
    if (config.weight_bits, config.is_sym) not in stock.AutoGPTQConfig.TYPE_MAP:
        found = f"bits={config.weight_bits}, sym={config.is_sym}"
        raise ValueError(f"{prefix}: Unsupported quantization config: {found}")
    if refuse_act_order is not None:
        refuse_act_order(config.desc_act, config.group_size, {})


def without_act_order(dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Exceptions of a GPTQ config without what they say of act order, which newer stock classes refuse altogether."""
    return {
        pattern: {name: value for name, value in rule.items() if name != "desc_act"} if isinstance(rule, dict) else rule
        for pattern, rule in dynamic.items()
    }
