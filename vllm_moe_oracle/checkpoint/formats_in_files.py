"""Formats of layers' experts, of which a config says different things."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..quantization.single_experts import OtherExpertsError
from ..quantization.types import ExpertFormat, FormatLookup, LayerNames
from .layer_names import compact_layer_names
from .tensor_headers import TensorKinds, are_floating_point, are_quantized


class FormatsInFiles:
    """The formats of layers' experts by the config. Where it says of some experts what it does not say of expert 0,
    which alone vLLM looks up (compressed-tensors), expert 0's, if no expert in the files is stored otherwise."""

    def __init__(self, format_of: FormatLookup, kinds: Mapping[str, TensorKinds]) -> None:
        """
        Args:
            format_of: the formats by the config.
            kinds: what the files hold of each layer's experts, by vLLM's name of the layer; nothing where there are no
                files.
        """
        self._format_of = format_of
        self._kinds = kinds
        self._layers: dict[str, list[str]] = {}

    def __call__(self, layer: LayerNames) -> ExpertFormat:
        """The format of a layer's experts.

        Raises:
            CheckpointError: a field has an invalid value, or entries differ between experts and the files do not tell
                that vLLM loads them.
        """
        try:
            return self._format_of(layer)
        except OtherExpertsError as error:
            kinds = self._kinds.get(layer.modules[0], ())
            if not (are_floating_point if error.first is None else are_quantized)(kinds):
                raise
            self._layers.setdefault(error.rule, []).append(layer.modules[0])
            return error.first

    def notes(self) -> Iterator[str]:
        """What a user should know of the layers that were looked up, one sentence each."""
        for rule, names in self._layers.items():
            yield (
                f"the quantization config says of {compact_layer_names(names)} that {rule}. It has no effect: vLLM "
                "looks up expert 0 alone, loads all experts of a layer as that one, and ends at one that is stored "
                "otherwise"
            )
