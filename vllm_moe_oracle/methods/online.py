"""Online quantization to MXFP8 while a 16-bit checkpoint loads: vLLM's ``--quantization mxfp8``.

vLLM holds a layer's checkpoint tensors back until all have arrived. Then its 16-bit weights are materialized, quantized
here one tensor at a time, and freed. From there on the layer is like one of an MXFP8 checkpoint. Linear layers stay
vLLM's, with a better error message and the choice of scale rules.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.online import mxfp8 as stock
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.model_executor.utils import replace_parameter, set_weight_attrs

from .. import settings
from ..compat import current_adapter, weight_storage
from ..compat.layer_context import current_layer
from ..core.problem import MX_BLOCK, Scheme
from ..errors import CheckpointError
from ..quantization import ONLINE_SCHEMES
from ..schemes import mxfp8
from ..schemes._checks import require_loaded
from . import backend_check, rank_comparison, rank_sync, weight_loading
from .base import PROCESSED_ATTRIBUTE, OracleMoEMethod

SERVES = {
    "replaces": ["online.mxfp8:Mxfp8OnlineMoEMethod", "online.mxfp8:Mxfp8OnlineLinearMethod"],
}

_NAN_BYTE = 0xFF
"""A floating-point number of these bytes is NaN: the sentinel of weights that are never loaded."""


def validate_input_sizes(name: str, format: str = "MXFP8", **sizes: int) -> None:
    """Checks that input sizes are multiples of the block size.

    Args:
        name: the layer's name.
        format: the format that the layer is quantized to.
        sizes: input features of its matrices on this rank, by name with underscores.

    Raises:
        CheckpointError: some sizes are not multiples of 32; it names all of them.
    """
    wrong = {what.replace("_", " "): size for what, size in sizes.items() if size % MX_BLOCK}
    if wrong:
        numbers = ", ".join(f"{what} {size} (remainder {size % MX_BLOCK})" for what, size in wrong.items())
        rule = f"{format} needs input sizes that are multiples of {MX_BLOCK}, and has {numbers} on this rank"
        remedy = "Serve it with fewer tensor-parallel ranks, or leave it out by quantization_config's ignore"
        raise CheckpointError(rule, remedy, name)


class Mxfp8OnlineLinearMethod(stock.Mxfp8OnlineLinearMethod):
    """Linear layers of a 16-bit checkpoint: vLLM's method and kernels with the scale rule of the settings."""

    scale_rule: mxfp8.ScaleRule

    def create_weights(self, layer: Any, input_size_per_partition: int, *args: Any, **kwargs: Any) -> None:
        """As the stock method, whose error for a wrong input size does not name the layer.

        Raises:
            CheckpointError: the input size is not a multiple of 32.
            RankSyncError: ranks have different settings or versions.
        """
        validate_input_sizes(_linear_name(layer), input_size=input_size_per_partition)
        chosen = settings.load(additional_config=current_adapter().additional_config())
        rank_comparison.require_same_process(chosen)
        self.scale_rule = chosen.mxfp8_scale_rule
        super().create_weights(layer, input_size_per_partition, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """As the stock method, which has a single scale rule. A second call does nothing."""
        if self.scale_rule == "ceil" or getattr(layer, PROCESSED_ATTRIBUTE, False):
            super().process_weights_after_loading(layer)
            return
        # From 0.33 on: a layer whose checkpoint has another quantization.
        read = getattr(self, "get_weight_for_quantization", lambda layer: layer.weight)
        weight = read(layer).data
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
        scales = weight.new_empty(_scales_shape(weight), dtype=torch.uint8)
        mxfp8.quantize_into(weight[None], codes[None], scales[None], self.scale_rule)
        layer.input_scale = None
        replace_parameter(layer, "weight", codes)
        replace_parameter(layer, "weight_scale", scales)
        self.kernel.process_weights_after_loading(layer)
        getattr(self, "release_requantization_source_weights", lambda layer: None)(layer)
        setattr(layer, PROCESSED_ATTRIBUTE, True)


class OnlineMoEMethod(OracleMoEMethod, OnlineMoEMethodBase):
    """The mix-in in front of a stock class for online quantization.

    Attributes:
        scheme: the scheme of the quantized weights.
        codes_dtype: dtype of the codes.
        codes_per_element: codes in one element of that dtype.
        padded_by_stock: the stock class pads weights before it quantizes them, and so takes all sizes.
    """

    scheme: ClassVar[Scheme]
    codes_dtype: ClassVar[torch.dtype]
    codes_per_element: ClassVar[int] = 1
    converts_on_arrival: ClassVar[bool] = True
    padded_by_stock: ClassVar[bool] = False
    requantization_source_parameters: Any

    def __init__(self, *, moe: Any = None, layer: Any = None) -> None:
        """
        Args:
            moe: vLLM's `FusedMoEConfig`; releases before 0.30 give the layer instead.
            layer: the layer.

        Raises:
            CheckpointError: an input size is not a multiple of 32.
        """
        config = layer.moe_config if moe is None else moe
        if not self.padded_by_stock:
            validate_input_sizes(
                current_layer()[1],
                self.scheme.name.upper(),
                hidden_size=config.hidden_dim,
                intermediate_size=config.intermediate_size_per_partition,
            )
        # The stock constructor would choose a backend by its own rules.
        OnlineMoEMethodBase.__init__(self, config)
        self.weight_block_size = [1, MX_BLOCK]
        self.weight_scale_name = "weight_scale"
        self.decide(config, self.scheme)

    @abstractmethod
    def quantize_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Quantizes a layer's matrices in bounded memory.

        Args:
            values: `[E, N, K]`, 16-bit.
            codes: `[E, N, K / codes_per_element]`, overwritten; any stride between experts.
            scales: uint8 `[E, N, K/32]`, overwritten; likewise.
        """

    def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers 16-bit weights on the meta device; vLLM materializes them once it has all their tensors.

        For requantization, a checkpoint with another quantization, it registers that checkpoint's parameters.
        """
        if self._requantization_source() is not None:
            super(OracleMoEMethod, self).create_weights(layer, num_experts, *args, **kwargs)
            self._set_state(layer, "raw")
            return
        self._keep_load_order()
        problem = self.decision.problem
        dtype = kwargs.get("params_dtype", getattr(torch, problem.dtype))
        layer.num_experts = num_experts
        layer.orig_dtype = layer.params_dtype = dtype
        layer.weight_block_size = self.weight_block_size
        layer.w13_input_scale = layer.w2_input_scale = None
        if "weight_loader" in kwargs:
            kwargs["weight_loader"] = weight_loading.validating_loader(
                kwargs["weight_loader"], problem, self.rank_group, self.adapter.local_expert
            )
        shapes = self._scheme().shapes(problem)
        for own in ("w13", "w2"):
            *outer, columns = shapes[own]
            data = torch.empty(*outer, columns * self.codes_per_element, dtype=dtype, device="meta")
            parameter = weight_storage.replace_parameter(layer, f"{own}_weight", data)
            set_weight_attrs(parameter, {name: value for name, value in kwargs.items() if name != "params_dtype"})
        if problem.has_bias:
            self._register_biases(layer, kwargs)
        registered = {
            own: getattr(layer, name) for own, name in self._parameter_names(shapes).items() if hasattr(layer, name)
        }
        weight_loading.set_sentinel(registered, self._sentinels() | {"w13": _NAN_BYTE, "w2": _NAN_BYTE})
        self._set_state(layer, "raw")
        weights = {own: getattr(layer, f"{own}_weight") for own in ("w13", "w2")}
        backend_check.reserve_or_fallback(self, lambda: self._require_convertible(layer, weights))
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantizes the loaded weights, then converts them like those of a checkpoint. A second call does nothing.

        Raises:
            CheckpointError: a weight or bias is NaN or infinite, or was never loaded. Nothing has been converted.
        """
        if self._is_processed(layer):
            return
        self._set_state(layer, "converting")
        with rank_sync.notify_on_failure(self.rank_group, f"the quantization of {self.decision.problem.layer}"):
            self._quantize(layer, self._loaded_weights(layer))
            if self._requantization_source() is not None:
                self._retain_kernel_parameters()
        super().process_weights_after_loading(layer)
        if self._requantization_source() is not None:
            self.release_requantization_source_weights(layer)

    def _loaded_weights(self, layer: Any) -> dict[str, Tensor]:
        """The weights to quantize, by canonical name."""
        if self._requantization_source() is not None:
            return dict(zip(("w13", "w2"), self.get_weights_for_quantization(layer), strict=True))
        names = {own: f"{own}_weight" for own in ("w13", "w2")}
        weights = {own: getattr(layer, name) for own, name in names.items()}
        if self.moe_kernel is not None or not self.adapter.uses_dummy_weights():
            parameters = dict(layer.named_parameters(recurse=False))
            weight_loading.check_all_loaded(parameters, self.decision.problem.layer)
            weight_loading.fill_unloaded(parameters.values())
            was_loaded = functools.partial(super()._was_loaded, layer)
            require_loaded(weights, names, dict.fromkeys(names, _NAN_BYTE), self.decision.problem, was_loaded)
        return weights

    def _was_loaded(self, layer: Any, name: str, shard: str, expert: int) -> bool:
        """As for other methods; codes and scales were not loaded, but computed from weights that were."""
        return not name.endswith("_bias") or super()._was_loaded(layer, name, shard, expert)

    def _retain_kernel_parameters(self) -> None:
        """Takes the kernel's parameters, the biases, off vLLM's list of those that requantization deletes."""
        kept = set(self._scheme().parameter_names(self.decision.problem).values())
        deleted = self.requantization_source_parameters
        self.requantization_source_parameters = {name: each for name, each in deleted.items() if name not in kept}

    def _requantization_source(self) -> Any:
        """The method of the checkpoint's own quantization, or None; vLLM has requantization since 0.33."""
        return getattr(self, "requantization_source", None)

    def _quantize(self, layer: Any, weights: dict[str, Tensor]) -> None:
        """Replaces the weights by codes and scales, in buffers that can hold the kernel's tensors."""
        specs = self._kernel_specs(layer, weights)
        for own in list(weights):
            values = weights.pop(own)
            codes, scales = (
                weight_storage.allocate(values.shape[0], raw, specs.get(name), values.device)
                for name, raw in (
                    (own, weight_storage.TensorSpec(self._codes_shape(values), self.codes_dtype)),
                    (f"{own}_scale", weight_storage.TensorSpec(_scales_shape(values), torch.uint8)),
                )
            )
            self.quantize_into(values.data, codes, scales)
            weight_storage.replace_parameter(layer, f"{own}_weight", codes)
            weight_storage.replace_parameter(layer, f"{own}_weight_scale", scales)
            if isinstance(values, torch.nn.Parameter):
                # vLLM keeps a reference to the parameter; its memory is needed now.
                values.data = values.data.new_empty(0)

    def _require_convertible(self, layer: Any, weights: Mapping[str, Tensor]) -> None:
        """Raises `BackendDefect` where the backend cannot convert: once weights are loaded, no other one is taken."""
        self._kernel_specs(layer, weights)

    def _kernel_specs(self, layer: Any, weights: Mapping[str, Tensor]) -> dict[str, weight_storage.TensorSpec]:
        """Specs of one expert's kernel tensors."""
        tensors = {name: getattr(layer, name) for name in ("w13_bias", "w2_bias") if hasattr(layer, name)}
        for own, values in weights.items():
            tensors[own] = torch.empty(
                (values.shape[0], *self._codes_shape(values)), dtype=self.codes_dtype, device="meta"
            )
            tensors[f"{own}_scale"] = torch.empty(
                (values.shape[0], *_scales_shape(values)), dtype=torch.uint8, device="meta"
            )
        return self._converted_specs(layer, tensors)

    def _codes_shape(self, values: Tensor) -> tuple[int, int]:
        """Shape of the codes of one expert's `[N, K]` matrix."""
        return values.shape[-2], values.shape[-1] // self.codes_per_element


class Mxfp8OnlineMoEMethod(OnlineMoEMethod, stock.Mxfp8OnlineMoEMethod):
    """MoE layers of a 16-bit checkpoint; replaces the stock class of the same name."""

    scheme = ONLINE_SCHEMES["mxfp8"]
    codes_dtype = torch.float8_e4m3fn

    def quantize_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """To MXFP8; see `OnlineMoEMethod.quantize_into`."""
        mxfp8.quantize_into(values, codes, scales, self.settings.mxfp8_scale_rule)


def _scales_shape(values: Tensor) -> tuple[int, int]:
    """Shape of the scales of one expert's `[N, K]` matrix."""
    return values.shape[-2], values.shape[-1] // MX_BLOCK


def _linear_name(linear: Any) -> str:
    """A linear layer's name."""
    return str(getattr(linear, "prefix", ""))
