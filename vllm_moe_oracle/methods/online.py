"""MXFP8 made while a 16-bit checkpoint loads: vLLM's ``--quantization mxfp8``.

vLLM holds a layer's checkpoint tensors back until it has them all; then its 16-bit weights exist, are quantised here,
tensor by tensor, and are gone. From there on the layer is one of an MXFP8 checkpoint. Linear layers stay vLLM's, with a
better message and the same choice of scale rules.
"""

from __future__ import annotations

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
from ..compat import current_adapter
from ..compat.construction import current_layer
from ..errors import CheckpointError
from ..oracle.problem import MX_BLOCK, Scheme
from ..quantization import ONLINE
from ..schemes import mxfp8
from . import agreement, loading, storage
from .base import _PROCESSED, OracleMoEMethod

_NAN = 0xFF
"""In every byte of a floating-point number it is NaN: what was never loaded."""


def require_blocks(name: str, format: str = "MXFP8", **sizes: int) -> None:
    """Refuses input sizes that blocks do not divide.

    Args:
        name: the layer's name.
        format: what the layer is quantised to.
        sizes: input features of its matrices on this rank, by what they are, with underscores for blanks.

    Raises:
        CheckpointError: one is no multiple of 32; all that are not are named.
    """
    wrong = {what.replace("_", " "): size for what, size in sizes.items() if size % MX_BLOCK}
    if wrong:
        numbers = ", ".join(f"{what} {size} (remainder {size % MX_BLOCK})" for what, size in wrong.items())
        rule = f"{format} needs input sizes that are multiples of {MX_BLOCK}, and has {numbers} on this rank"
        remedy = "Serve it with fewer tensor-parallel ranks, or leave it out by quantization_config's ignore"
        raise CheckpointError(rule, remedy, name)


class Mxfp8OnlineLinearMethod(stock.Mxfp8OnlineLinearMethod):
    """Linear layers of a 16-bit checkpoint: vLLM's own method and kernels, and the scale rule that was asked for."""

    scale_rule: mxfp8.ScaleRule

    def create_weights(self, layer: Any, input_size_per_partition: int, *args: Any, **kwargs: Any) -> None:
        """As the stock method, which refuses input sizes that blocks do not divide without saying where.

        Raises:
            CheckpointError: the input size is no multiple of 32.
        """
        require_blocks(_linear_name(layer), input_size=input_size_per_partition)
        chosen = settings.load(additional_config=current_adapter().additional_config())
        self.scale_rule = chosen.mxfp8_scale_rule
        super().create_weights(layer, input_size_per_partition, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """As the stock method, which knows one rule only. A second call changes nothing."""
        if self.scale_rule == "ceil" or getattr(layer, _PROCESSED, False):
            super().process_weights_after_loading(layer)
            return
        # Of a layer whose checkpoint is quantised otherwise, which releases before 0.33 do not know.
        read = getattr(self, "get_weight_for_quantization", lambda layer: layer.weight)
        weight = read(layer).data
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
        scales = weight.new_empty(_scales(weight), dtype=torch.uint8)
        mxfp8.quantise_into(weight[None], codes[None], scales[None], self.scale_rule)
        layer.input_scale = None
        replace_parameter(layer, "weight", codes)
        replace_parameter(layer, "weight_scale", scales)
        self.kernel.process_weights_after_loading(layer)
        getattr(self, "release_requantization_source_weights", lambda layer: None)(layer)
        setattr(layer, _PROCESSED, True)


class OnlineMoEMethod(OracleMoEMethod, OnlineMoEMethodBase):
    """Mixed in before a stock class whose weights are quantised here, while they load.

    Attributes:
        scheme: what they become.
        codes: dtype of the codes.
        per_byte: codes in one element of that dtype.
    """

    scheme: ClassVar[Scheme]
    codes: ClassVar[torch.dtype]
    per_byte: ClassVar[int] = 1
    requantization_source_parameters: Any

    def __init__(self, *, moe: Any = None, layer: Any = None) -> None:
        """
        Args:
            moe: vLLM's `FusedMoEConfig`; releases before 0.30 give the layer instead.
            layer: the layer.

        Raises:
            CheckpointError: an input size that blocks of 32 do not divide.
        """
        config = layer.moe_config if moe is None else moe
        require_blocks(
            current_layer()[1],
            self.scheme.name.upper(),
            hidden_size=config.hidden_dim,
            intermediate_size=config.intermediate_size_per_partition,
        )
        # Not the stock class's constructor: it would choose a backend by its own list.
        OnlineMoEMethodBase.__init__(self, config)
        self.weight_block_size = [1, MX_BLOCK]
        self.weight_scale_name = "weight_scale"
        self.decide(config, self.scheme)

    @abstractmethod
    def quantise_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Quantises a layer's matrices in bounded memory.

        Args:
            values: `[E, N, K]`, 16-bit.
            codes: `[E, N, K / per_byte]`, overwritten; experts may lie any distance apart.
            scales: uint8 `[E, N, K/32]`, overwritten; likewise.
        """

    def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Registers 16-bit weights without data, which vLLM fills, and hands back here, when it has them all.

        A layer whose checkpoint is quantised otherwise (vLLM calls this requantisation) gets that checkpoint's
        parameters instead.
        """
        if self._source() is not None:
            super(OracleMoEMethod, self).create_weights(layer, num_experts, *args, **kwargs)
            self._enter(layer, "raw")
            return
        problem = self.decision.problem
        dtype = kwargs.get("params_dtype", getattr(torch, problem.dtype))
        layer.num_experts = num_experts
        layer.orig_dtype = layer.params_dtype = dtype
        layer.weight_block_size = self.weight_block_size
        layer.w13_input_scale = layer.w2_input_scale = None
        if "weight_loader" in kwargs:
            kwargs["weight_loader"] = loading.checked(kwargs["weight_loader"], problem, self.group)
        shapes = self._scheme().shapes(problem)
        for own in ("w13", "w2"):
            *outer, columns = shapes[own]
            data = torch.empty(*outer, columns * self.per_byte, dtype=dtype, device="meta")
            parameter = storage.replace(layer, f"{own}_weight", data)
            set_weight_attrs(parameter, {name: value for name, value in kwargs.items() if name != "params_dtype"})
        if problem.has_bias:
            self._register_biases(layer, kwargs)
        registered = {own: getattr(layer, name) for own, name in self._names(shapes).items() if hasattr(layer, name)}
        loading.remember(registered, {"w13": _NAN, "w2": _NAN})
        self._enter(layer, "raw")
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantises the loaded weights, then converts them as those of a checkpoint. A second call changes nothing.

        Raises:
            CheckpointError: a weight is NaN or infinite, or was never loaded. Nothing has been converted.
        """
        if self._is_processed(layer):
            return
        self._enter(layer, "converting")
        if self._source() is None:
            weights = {own: getattr(layer, f"{own}_weight") for own in ("w13", "w2")}
            if self.moe_kernel is not None or not self.release.weights_are_made_up():
                name = self.decision.problem.layer
                with agreement.telling(self.group, f"the loaded weights of {name}"):
                    loading.refuse_untouched({f"{own}_weight": each for own, each in weights.items()}, name)
        else:
            weights = dict(zip(("w13", "w2"), self.get_weights_for_quantization(layer), strict=True))
        self._quantise(layer, weights)
        if self._source() is not None:
            self._keep_what_is_ours()
        super().process_weights_after_loading(layer)
        if self._source() is not None:
            self.release_requantization_source_weights(layer)

    def _keep_what_is_ours(self) -> None:
        """Takes what the kernel needs, the biases, off vLLM's list of parameters to be dropped after requantisation."""
        ours = set(self._scheme().parameters_of(self.decision.problem).values())
        theirs = self.requantization_source_parameters
        self.requantization_source_parameters = {name: each for name, each in theirs.items() if name not in ours}

    def _source(self) -> Any:
        """The method of the checkpoint's own quantisation, or None; releases before 0.33 know no such thing."""
        return getattr(self, "requantization_source", None)

    def _quantise(self, layer: Any, weights: dict[str, Tensor]) -> None:
        """Puts codes and scales in the weights' place, in storage that has room for the kernel's layout."""
        kinds = self._kernel_kinds(layer, weights)
        for own in list(weights):
            values = weights.pop(own)
            codes, scales = (
                storage.allocate(values.shape[0], raw, kinds.get(name), values.device)
                for name, raw in (
                    (own, storage.Kind(self._packed(values), self.codes)),
                    (f"{own}_scale", storage.Kind(_scales(values), torch.uint8)),
                )
            )
            self.quantise_into(values.data, codes, scales)
            storage.replace(layer, f"{own}_weight", codes)
            storage.replace(layer, f"{own}_weight_scale", scales)
            if isinstance(values, torch.nn.Parameter):
                # vLLM holds on to the parameter for a while longer; its memory is needed now.
                values.data = values.data.new_empty(0)

    def _kernel_kinds(self, layer: Any, weights: Mapping[str, Tensor]) -> dict[str, storage.Kind]:
        """What the backend's conversion will make of one expert."""
        empty = {name: getattr(layer, name) for name in ("w13_bias", "w2_bias") if hasattr(layer, name)}
        for own, values in weights.items():
            empty[own] = torch.empty((values.shape[0], *self._packed(values)), dtype=self.codes, device="meta")
            empty[f"{own}_scale"] = torch.empty((values.shape[0], *_scales(values)), dtype=torch.uint8, device="meta")
        return storage.kinds_after(self._convert, empty)

    def _packed(self, values: Tensor) -> tuple[int, int]:
        """Shape of the codes of one expert's `[N, K]` matrix."""
        return values.shape[-2], values.shape[-1] // self.per_byte


class Mxfp8OnlineMoEMethod(OnlineMoEMethod, stock.Mxfp8OnlineMoEMethod):
    """MoE layers of a 16-bit checkpoint. Takes the place of the stock class of the same name."""

    scheme = ONLINE["mxfp8"]
    codes = torch.float8_e4m3fn

    def quantise_into(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        """To MXFP8; see `OnlineMoEMethod.quantise_into`."""
        mxfp8.quantise_into(values, codes, scales, self.settings.mxfp8_scale_rule)


def _scales(values: Tensor) -> tuple[int, int]:
    """Shape of the scales of one expert's `[N, K]` matrix."""
    return values.shape[-2], values.shape[-1] // MX_BLOCK


def _linear_name(linear: Any) -> str:
    """A linear layer's name."""
    return str(getattr(linear, "prefix", ""))
