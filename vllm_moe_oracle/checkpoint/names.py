"""Which layers of a model have experts, and what these are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..compat.expert_names import asked
from ..errors import CheckpointError
from ..quantization.answers import GATED_PROJECTIONS, NUMBERED, PLAIN_PROJECTIONS, LayerNames
from .fields import EXPERTS, LAYERS, MAX_LAYERS, UNGATED, model_type, read_integer
from .files import Config

# Where vLLM keeps the experts inside a decoder layer; "mlp" unless listed, "" for the layer itself. MiniMax-M2's
# attribute is called block_sparse_moe, but the name that vLLM gives its experts says mlp.
_BLOCKS = {
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
_CHECKPOINT_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")

# Models whose modules for multi-token prediction are decoder layers like the others, after the last of them.
PREDICTING = frozenset({"deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe"})
PREDICTORS = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")


_DENSE = "Only experts are decided here; of all other layers vLLM chooses the kernels itself"


def moe_layers(config: Config, vllm: str | None = None) -> dict[int, LayerNames]:
    """Names of the layers that have experts, by index, for a release of vLLM; None for the newest."""
    model, where = config.model, str(config.path)
    if isinstance(model.get("block_configs"), list):
        rule = "block_configs gives every layer a shape of its own, which this release does not read"
        raise CheckpointError(rule, where=where)
    parts = model.get("ffn_config")
    if isinstance(parts, Mapping) and parts.get("moe_num_experts"):  # DBRX's
        rule = "ffn_config describes its experts, which this release does not read"
        raise CheckpointError(rule, "vLLM's loader of DBRX takes experts in 16 bits or FP8", where)
    pattern = model.get("hybrid_override_pattern")
    total = len(pattern) if isinstance(pattern, str) else read_integer(model, LAYERS, where, MAX_LAYERS)
    if total > MAX_LAYERS:
        raise CheckpointError(f"hybrid_override_pattern has {total} layers, more than {MAX_LAYERS}", where=where)
    if all(not model.get(name) for name in EXPERTS) and any(model.get(name) == 0 for name in EXPERTS):
        name = next(name for name in EXPERTS if model.get(name) == 0)
        raise CheckpointError(f"it has no MoE layers: {name} is 0", _DENSE, where)
    if not any(model.get(name) for name in EXPERTS):
        raise CheckpointError(f"it has no MoE layers: none of {', '.join(EXPERTS)} is set", _DENSE, where)
    indices = [index for index in range(total) if _has_experts(model, index, where)]
    if not indices:
        rule = f"it has no MoE layers: by its config, none of the {total} layers has experts"
        raise CheckpointError(rule, _DENSE, where)
    return {index: _layer_names(config, index, vllm) for index in indices}


def predictors(config: Config, vllm: str | None = None) -> dict[int, LayerNames]:
    """The same for the layers of modules for multi-token prediction."""
    model, where = config.model, str(config.path)
    if model_type(config) not in PREDICTING or not model.get(PREDICTORS[0]):
        return {}
    count, total = (read_integer(model, names, where, MAX_LAYERS) for names in (PREDICTORS[:1], LAYERS))
    indices = [index for index in range(total, total + count) if _has_experts(model, index, where, beyond=True)]
    return {index: _layer_names(config, index, vllm) for index in indices}


def _has_experts(model: Mapping[str, Any], index: int, where: str, beyond: bool = False) -> bool:
    """Whether a layer has experts: every rule that the config states must allow it. Layers `beyond` the last, which
    predict further tokens, are in no list of layers: other rules hold for them, as vLLM's classes have it."""
    for field, words in (
        ("hybrid_override_pattern", ("E",)),
        ("mlp_layer_types", ("sparse", "moe")),
        ("is_moe_layer", (True, 1)),
    ):
        kinds = model.get(field)
        if isinstance(kinds, list | str) and kinds and not (beyond and index >= len(kinds)):
            return index < len(kinds) and kinds[index] in words
    kinds = model.get("layers_block_type")
    if isinstance(kinds, list) and "moe" in kinds:
        return index < len(kinds) and kinds[index] == "moe"
    enumerated = model.get("moe_layers_enum")
    if isinstance(enumerated, str):
        return str(index) in {part.strip() for part in enumerated.split(",")}
    frequency = model.get("moe_layer_freq")
    if isinstance(frequency, list) and not (beyond and index >= len(frequency)):
        return index < len(frequency) and frequency[index] not in (0, False, None)

    def every(field: str) -> int | None:
        if model.get(field) is None:
            return None
        return read_integer(model, (field,), where, MAX_LAYERS, least=0)

    first = every("first_k_dense_replace") or every("num_dense_layers") or every("moe_layer_start_index") or 0
    last = every("moe_layer_end_index")
    if index < first or (last is not None and index > last):
        return False
    dense = model.get("mlp_only_layers")
    if isinstance(dense, list) and index in dense:
        return False
    step = None if isinstance(frequency, list) else every("moe_layer_freq")
    if step is not None and (step == 0 or index % step):
        return False
    for field in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"):
        step = every(field)
        if step is not None and (step == 0 or (index + 1) % step):
            return False
    period = every("expert_layer_period")
    return not period or index % period == (every("expert_layer_offset") or 0)


def _layer_names(config: Config, index: int, vllm: str | None) -> LayerNames:
    """vLLM's name of a layer's experts, then those under which checkpoints may speak of them."""
    kind = model_type(config)
    block = _BLOCKS.get(kind, "mlp")
    root = "language_model.model" if config.nested else "model"
    roots = ["model.language_model", "language_model", "model"] if config.nested else ["backbone"]
    inside = f"{index}.{block}.experts" if block else f"{index}.experts"
    modules = [f"{place}.layers.{inside}" for place in (root, *roots)]
    modules += [f"{root}.layers.{index}.{other}.experts" for other in _CHECKPOINT_BLOCKS if other != block]
    projections = PLAIN_PROJECTIONS if kind in UNGATED else GATED_PROJECTIONS
    return LayerNames(tuple(modules), projections, projections[kind in NUMBERED], asked(kind, vllm))


def compact(names: Iterable[str]) -> str:
    """Names of layers as ranges: ``model.layers.0-2,5.mlp.experts``; names that differ elsewhere are listed apart."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, _, rest = name.partition(".layers.")
        number, _, after = rest.partition(".")
        groups.setdefault((before, after), []).append(int(number))
    return ", ".join(f"{before}.layers.{_ranges(found)}.{after}" for (before, after), found in groups.items())


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)
