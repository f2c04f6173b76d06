"""Which layers of a model have experts, and what these are called."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core.problem import Scheme
from ..errors import CheckpointError, LeftToStockError, short_repr
from ..quantization.types import (
    GATED_PROJECTIONS,
    NUMBERED_PROJECTION_MODELS,
    UNGATED_PROJECTIONS,
    ExpertFormat,
    LayerNames,
)
from ..releases.expert_names import projection_names
from .files import CheckpointFiles
from .missing_fields import FIRST_LAYER_FIELDS, states_first_layer
from .model_fields import (
    ERNIE_VL_MODELS,
    MAX_EXPERTS,
    MAX_LAYERS,
    NUM_EXPERTS_FIELDS,
    NUM_LAYERS_FIELDS,
    UNGATED_MODELS,
    count_experts,
    kinds_of_experts,
    num_layers,
    read_integer,
    read_optional_integer,
)

# Where vLLM keeps the experts inside a decoder layer; "mlp" unless listed, "" for the layer itself. MiniMax-M2's
# attribute is called block_sparse_moe, but the name that vLLM gives its experts says mlp.
_MOE_BLOCKS = {
    "deepseek_v4": "ffn",
    "deepseek_v41": "ffn",
    "gemma4_text": "",
    "granitemoe": "block_sparse_moe",
    "granitemoehybrid": "block_sparse_moe",
    "granitemoeshared": "block_sparse_moe",
    "minimax_m3": "block_sparse_moe",
    "minimax_m3_text": "block_sparse_moe",
    "mixtral": "block_sparse_moe",
    "phimoe": "block_sparse_moe",
    "jamba": "feed_forward",
    "kimi_linear": "block_sparse_moe",
    "lfm2_moe": "feed_forward",
    "llama4": "feed_forward",
    "llama4_text": "feed_forward",
    "nemotron_h": "mixer",
    "nemotron_h_puzzle": "mixer",
    "step3_text": "moe",
    "step3p5": "moe",
}
_NESTED_MODELS = frozenset({"ernie4_5_moe_vl"})
"""Models whose language model vLLM nests in another, and whose config has no part for it."""

_CHECKPOINT_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")

# Models whose modules for multi-token prediction are decoder layers like the others, after the last of them.
MTP_MODELS = frozenset({"deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe"})
MTP_COUNT_FIELDS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


_DENSE_MODEL_REMEDY = "Only experts are decided here; of all other layers vLLM chooses the kernels itself"


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayer:
    """A MoE layer of a model; of a model with two kinds of experts in a layer, one kind.

    Attributes:
        config: the checkpoint's, as it is for these experts (`kinds_of_experts`).
        index: the layer's number.
        names: the experts' names.
        is_mtp: the layer is one of a multi-token prediction module. A server that does not use it loads the rest.
        format: how the experts are stored, where it was looked up.
    """

    config: CheckpointFiles
    index: int
    names: LayerNames
    is_mtp: bool = False
    format: ExpertFormat = None

    @property
    def name(self) -> str:
        """vLLM's name."""
        return self.names.modules[0]

    @property
    def num_experts(self) -> int:
        """Experts by the config; 0 where it does not say."""
        return count_experts(self.config, self.index)

    @property
    def is_quantized(self) -> bool:
        """Whether the experts are in a scheme that this package reads when they serve."""
        return isinstance(self.format, Scheme)


def expert_layers(config: CheckpointFiles, vllm: str | None = None) -> list[ExpertLayer]:
    """The layers that have experts, without multi-token prediction modules.

    Args:
        config: the checkpoint's.
        vllm: the release of vLLM; None for the newest.

    Raises:
        LeftToStockError: no layer has any.
        CheckpointError: the file is no model's config, or a field has a value that it cannot have.
    """
    model, where = config.model_config, config.where
    if not any(config.full_config.get(name) for name in _MODEL_FIELDS):
        rule = f"is not the config of a model: none of {', '.join(_MODEL_FIELDS)} is set"
        remedy = (
            "Give the config.json of the adapter's base model"
            if "peft_type" in model
            else "Give the model's config.json"
        )
        raise CheckpointError(rule, remedy, where)
    _check_lists_of_layers(config)
    if not any(model.get(name) for name in NUM_EXPERTS_FIELDS):
        none = next((f"{name} is {model[name]}" for name in NUM_EXPERTS_FIELDS if name in model), "")
        rule = none or f"none of {', '.join(NUM_EXPERTS_FIELDS)} is set"
        raise LeftToStockError(f"it has no MoE layers ({rule})", _DENSE_MODEL_REMEDY, where)
    if config.model_type in _WITHOUT_MOE_LAYERS:
        rule = f"vLLM's code of {config.model_type} computes its experts itself, without a MoE layer"
        raise LeftToStockError(rule, "Kernels are chosen for vLLM's MoE layers only", where)
    total, kinds = num_layers(config), kinds_of_experts(config)
    found = [
        ExpertLayer(part, index, _layer_names(config, index, vllm, kind))
        for index in range(total)
        for kind, part in kinds
        if _is_moe_layer(part, index)
    ]
    if not found:
        rule = f"it has no MoE layers (by its config, none of the {total} layers has experts)"
        raise LeftToStockError(rule, _DENSE_MODEL_REMEDY, where)
    return found


_WITHOUT_MOE_LAYERS = frozenset({"arctic", "minicpm", "minicpm3", "moondream3", "moondream3_text", "nomic_bert"})
_MODEL_FIELDS = ("architectures", "model_type", *NUM_LAYERS_FIELDS)


def unread_experts(config: CheckpointFiles) -> str:
    """Why experts that the model has by its config cannot be counted; "" where they can, or it has none."""
    model = config.model_config
    if any(model.get(name) for name in NUM_EXPERTS_FIELDS):
        own = isinstance(model.get("block_configs"), list)
        return "block_configs gives every layer a shape of its own, which this release does not read" if own else ""
    if any(name in model for name in NUM_EXPERTS_FIELDS):
        return ""
    if field := _field_of_experts(config.full_config):
        return f"{field} describes its experts, which this release does not read"
    kinds = [config.model_type, *config.architectures]
    kind = next((each for each in kinds if "moe" in each.lower()), "")
    names = ", ".join(NUM_EXPERTS_FIELDS)
    return f"{short_repr(kind)} is a name of models with experts, and none of {names} is set" if kind else ""


_MAX_DEPTH = 8


def _field_of_experts(part: object, path: str = "", depth: int = _MAX_DEPTH) -> str:
    """The first field, in a part of a config, that states a number of experts, with those that it is in."""
    if isinstance(part, list):
        parts = [(f"{path}.{index}", each) for index, each in enumerate(part) if isinstance(each, Mapping | list)]
    elif isinstance(part, Mapping):
        parts = [(f"{path}.{name}", each) for name, each in part.items() if name not in _QUANTIZATION_FIELDS]
    else:
        return ""
    for name, value in parts:
        word = name.rpartition(".")[2].lower()
        if isinstance(value, int) and value > 1 and "expert" in word and not ("_per_" in word or "shared" in word):
            return name[1:]
        if depth and (found := _field_of_experts(value, name, depth - 1)):
            return found
    return ""


_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


def all_layer_names(config: CheckpointFiles, vllm: str | None = None) -> list[LayerNames]:
    """Names that experts of every layer would have, whether or not a layer has any."""
    return [_layer_names(config, index, vllm) for index in range(num_layers(config))]


def mtp_layers(config: CheckpointFiles, vllm: str | None = None) -> list[ExpertLayer]:
    """The same for the layers of multi-token prediction (MTP) modules."""
    if config.model_type not in MTP_MODELS or not config.model_config.get(MTP_COUNT_FIELDS[0]):
        return []
    count, total = (read_integer(config, names, MAX_LAYERS) for names in (MTP_COUNT_FIELDS[:1], NUM_LAYERS_FIELDS))
    indices = [index for index in range(total, total + count) if _is_moe_layer(config, index, is_mtp=True)]
    return [ExpertLayer(config, index, _layer_names(config, index, vllm), is_mtp=True) for index in indices]


_LISTS_OF_LAYERS = (
    "mlp_layer_types", "is_moe_layer", "layers_block_type", "moe_layer_freq", "mlp_only_layers", "moe_layers_enum",
)  # fmt: skip
PLACE_FIELDS = (
    *_LISTS_OF_LAYERS, "hybrid_override_pattern", *FIRST_LAYER_FIELDS, "moe_layer_end_index", "decoder_sparse_step",
    "interleave_moe_layer_step", "moe_layer_interval", "expert_layer_period", "expert_layer_offset",
)  # fmt: skip
"""Fields that say which layers have experts."""
_CHARS_OF_AN_INDEX = 6  # with comma and space


def _check_lists_of_layers(config: CheckpointFiles) -> None:
    """Refuses fields that list more layers than a model has: every layer is looked up in them."""
    model, where = config.model_config, config.where
    for name in _LISTS_OF_LAYERS:
        if isinstance(model.get(name), list) and len(model[name]) > MAX_LAYERS:
            raise CheckpointError(f"{name} lists {len(model[name])} layers, more than {MAX_LAYERS}", where=where)
    enumerated = model.get("moe_layers_enum")
    if isinstance(enumerated, str) and len(enumerated) > (most := MAX_LAYERS * _CHARS_OF_AN_INDEX):
        raise CheckpointError(f"moe_layers_enum has {len(enumerated)} characters, more than {most}", where=where)


def _is_moe_layer(config: CheckpointFiles, index: int, is_mtp: bool = False) -> bool:
    """Whether a layer has experts.

    Args:
        config: the checkpoint's.
        index: the layer's index.
        is_mtp: the layer is one of an MTP module, after the decoder layers. Lists of layers that end before it do not
            apply, as in vLLM's classes.
    """
    listed = _listed_as_moe(config, index, is_mtp)
    return _has_experts_by_interval(config, index) if listed is None else listed


def _listed_as_moe(config: CheckpointFiles, index: int, is_mtp: bool) -> bool | None:
    """What the first field that lists the layers says; None where no field lists them."""
    model = config.model_config
    for field, words in (
        ("hybrid_override_pattern", ("E",)),
        ("mlp_layer_types", ("sparse", "moe")),
        ("is_moe_layer", (True, 1)),
    ):
        kinds = model.get(field)
        if isinstance(kinds, list | str) and kinds and not (is_mtp and index >= len(kinds)):
            return index < len(kinds) and kinds[index] in words
    kinds = model.get("layers_block_type")
    if isinstance(kinds, list) and "moe" in kinds:
        return index < len(kinds) and kinds[index] == "moe"
    enumerated = model.get("moe_layers_enum")
    if isinstance(enumerated, str):
        enumerated = [part.strip() for part in enumerated.split(",")]
    if isinstance(enumerated, list):
        return index in enumerated or str(index) in enumerated
    frequency = model.get("moe_layer_freq")
    if isinstance(frequency, list) and not (is_mtp and index >= len(frequency)):
        return index < len(frequency) and frequency[index] not in (0, False, None)
    return None


_FIRST_DENSE = {"sarvam_moe": 1, "sarvam_mla": 1, "param2moe": 1}
"""Dense layers at the beginning by model type, where vLLM's code has a default for ``first_k_dense_replace``."""
_COUNTED_FROM_FIRST = ("sarvam_moe", "sarvam_mla")
"""Model types whose ``moe_layer_freq`` counts from the first layer with experts."""


def _has_experts_by_interval(config: CheckpointFiles, index: int) -> bool:
    """Whether every range and every interval that the config states includes the layer."""
    model = config.model_config

    def number(field: str) -> int | None:
        return read_optional_integer(config, field, MAX_LAYERS)

    by_default = 0 if states_first_layer(model) else _FIRST_DENSE.get(str(model.get("model_type")), 0)
    first = next(filter(None, map(number, FIRST_LAYER_FIELDS)), by_default)
    last = number("moe_layer_end_index")
    if index < first or (last is not None and index > last):
        return False
    dense_layers = model.get("mlp_only_layers")
    if isinstance(dense_layers, list) and index in dense_layers:
        return False
    step = None if isinstance(model.get("moe_layer_freq"), list) else number("moe_layer_freq")
    start = first if model.get("model_type") in _COUNTED_FROM_FIRST else 0
    if step is not None and (step == 0 or (index - start) % step):
        return False
    for field in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"):
        step = number(field)
        if step is not None and (step == 0 or (index + 1) % step):
            return False
    period = number("expert_layer_period")
    return not period or index % period == (number("expert_layer_offset") or 0)


def _layer_names(config: CheckpointFiles, index: int, vllm: str | None, experts: str = "experts") -> LayerNames:
    """vLLM's name of a layer's experts, then the names that checkpoints may use."""
    kind = config.model_type
    block = _MOE_BLOCKS.get(kind, "mlp")
    nested = config.has_text_config or kind in _NESTED_MODELS
    root = "language_model.model" if nested else "model"
    roots = ["model.language_model", "language_model", "model"] if nested else ["backbone"]
    inside = f"{index}.{block}.{experts}" if block else f"{index}.{experts}"
    modules = [f"{place}.layers.{inside}" for place in (root, *roots)]
    modules += [f"{root}.layers.{index}.{other}.{experts}" for other in _CHECKPOINT_BLOCKS if other != block]
    projections = UNGATED_PROJECTIONS if kind in UNGATED_MODELS else GATED_PROJECTIONS
    return LayerNames(
        tuple(modules),
        projections,
        projections[kind in NUMBERED_PROJECTION_MODELS],
        projection_names(kind, vllm),
        _file_modules(config, index, modules, block, experts),
        count_experts(config, index) if experts == "experts" else 0,  # ERNIE-4.5-VL's files number them otherwise
        kind in ERNIE_VL_MODELS,
    )


_FILE_ROOTS = ("thinker.model.layers", "language.model.layers", "layers")
"""What precedes a layer's number in the files of Qwen's omni models, of DeepSeek-VL2, and of DeepSeek-V4 and Mistral.
vLLM's loaders replace it."""


def _file_modules(
    config: CheckpointFiles, index: int, modules: Sequence[str], block: str, kind: str
) -> tuple[tuple[str, int], ...]:
    """Names that vLLM's loaders translate, and the number of the first expert under them.

    The files of ERNIE-4.5-VL number a layer's experts without a break: those for text, then those for images.
    """
    if kind == "experts":
        inside = [f"{block}.experts", "experts"] if block else ["experts"]
        return tuple((f"{root}.{index}.{each}", 0) for root in _FILE_ROOTS for each in inside)
    first = 0
    for other, part in kinds_of_experts(config):
        if other == kind:
            break
        first += read_integer(part, NUM_EXPERTS_FIELDS, MAX_EXPERTS)
    return tuple((f"{each.removesuffix(kind)}experts", first) for each in modules)


def compact_layer_names(names: Iterable[str]) -> str:
    """Names of layers as ranges: ``model.layers.0-2,5.mlp.experts``, ``model.layers.1-47 step 2.mlp.experts``.

    Names that differ elsewhere, or have no number, are listed apart.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    others = []
    for name in names:
        before, _, rest = f".{name}".partition(".layers.")  # a name may begin so
        number, _, after = rest.partition(".")
        if number.isdecimal():
            groups.setdefault((before, after), []).append(int(number))
        else:
            others.append(name)
    ranges = [f"{before}.layers.{index_ranges(found)}.{after}"[1:] for (before, after), found in groups.items()]
    return ", ".join(ranges + others)


def short_layer_names(names: Sequence[str]) -> list[str]:
    """The numbers of layers whose names differ in nothing else, ``24`` for ``model.layers.24.mlp.experts``; other names
    as they are."""
    parts = [name.split(".") for name in names]
    places = [index for index, word in enumerate(parts[0]) if word == "layers"] if parts else []
    if len(places) != 1 or len({(*each[: places[0] + 1], *each[places[0] + 2 :]) for each in parts}) != 1:
        return list(names)
    return [each[places[0] + 1] for each in parts]


def index_ranges(numbers: list[int]) -> str:
    """Numbers in words: ``0-2,5``, ``1-47 step 2``."""
    parts: list[list[int]] = []
    found = sorted(numbers)
    if len(found) > 2 and len(steps := {high - low for low, high in itertools.pairwise(found)}) == 1 and steps != {1}:
        return f"{found[0]}-{found[-1]} step {steps.pop()}"
    for number in found:
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
