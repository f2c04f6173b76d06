"""The MoE layers of a checkpoint as one rank sees them: `find_moe_layers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..core.problem import EVEN_SPLIT_MODEL_TYPE, Problem, Scheme
from ..errors import (
    CheckpointError,
    DamagedCheckpointError,
    DeploymentError,
    LeftToStockError,
    did_you_mean,
    short_repr,
)
from ..quantization import (
    METHOD_ALIASES,
    ONLINE_SCHEMES,
    UNSUPPORTED_ONLINE,
    check_release,
    config_notes,
    parse_config,
    refused_linear,
    takes_modules_from_files,
    vllm_method_name,
    with_moe_wna16_packing,
)
from ..quantization.types import ExpertFormat, FormatLookup, LayerNames, UnsupportedFormat, describe_format
from ..releases import min_versions
from ..releases.all2all import effective_all2all
from ..releases.models import last_release_with
from ..settings import AUTO
from ..untrusted import boundary
from .dtypes import served_dtype
from .expert_counts import absent_layers, check_expert_counts, layer_errors, missing_files_note
from .files import CheckpointFiles
from .formats_in_files import FormatsInFiles
from .layer_names import (
    MTP_COUNT_FIELDS,
    MTP_MODELS,
    ExpertLayer,
    all_layer_names,
    compact_layer_names,
    expert_layers,
    mtp_layers,
    unread_experts,
)
from .layer_problem import (
    activation_note,
    check_attention_heads,
    groups_note,
    layer_problem,
    topk_method_note,
)
from .model_fields import MAX_RANKS, count_experts
from .ranks import Ranks
from .tensor_headers import (
    ExpertTensors,
    RefusedFileError,
    TensorKinds,
    are_floating_point,
    are_quantized,
    expert_tensors,
    indexed_names,
)

_ONE_RANK = Ranks()

_KIMI_K3_ARCHITECTURE = "KimiK3ForConditionalGeneration"

# Models whose FP8 config leaves the experts' own type to the model's config.
_FP4_EXPERT_MODELS = frozenset({"deepseek_v4", "deepseek_v41"})


@dataclass(frozen=True, slots=True)
class MoeLayers:
    """The MoE layers of a checkpoint on one rank.

    Attributes:
        problems: one for each layer whose experts are stored in a scheme that this project reads, in order.
        unquantized: names of layers whose experts the quantization config leaves out.
        unsupported_formats: the format of each layer whose experts this package leaves to stock vLLM, by name.
        method: vLLM's name for the checkpoint's quantization, e.g. ``modelopt_mxfp8``; "" for none.
        notes: what a user should know about how the layers were found, one sentence each.
        mtp_problems: the same for multi-token prediction modules, which vLLM loads as a model of their own for
            speculative decoding.
        refused: why vLLM refuses the model's other layers, so that a server does not start with or without this
            package unless the files leave them unquantized; "" where it does not.
        notes_on_files: those of `notes` that say what the files hold otherwise than the config says.
        architectures: the model's classes, as its config names them.
        absent_drafts: names of the layers of `mtp_problems` of which the files hold no expert.
        lacks_files: the folder lacks files of its index, without which no server starts.
    """

    problems: tuple[Problem, ...]
    unquantized: tuple[str, ...]
    unsupported_formats: Mapping[str, str]
    method: str
    notes: tuple[str, ...]
    mtp_problems: tuple[Problem, ...] = ()
    refused: str = ""
    notes_on_files: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    absent_drafts: tuple[str, ...] = ()
    lacks_files: bool = False


def find_moe_layers(
    config: CheckpointFiles,
    ranks: Ranks = _ONE_RANK,
    *,
    ragged_shards: bool = False,
    online: str = "",
    vllm: str | None = None,
    dtype: str = AUTO,
    capability: int = 0,
) -> MoeLayers:
    """The MoE layers of a checkpoint as one rank sees them.

    Args:
        config: from `files.read_checkpoint`.
        ranks: over how many ranks vLLM distributes the model, and how; `Ranks.all2all` is a value of
            ``--all2all-backend``, of which a release may make another one.
        ragged_shards: the setting `ragged_shards`.
        online: vLLM's ``--quantization``: for a checkpoint in 16 bits a key of `ONLINE_SCHEMES`; "" for none.
        vllm: the release of vLLM, which decides what names in a compressed-tensors config mean, and which experts are
            padded with zeros; None for the newest.
        dtype: the model's, from `dtypes.read_dtype_option`; "auto" for the one that vLLM takes by itself.
        capability: CUDA compute capability of the device, on which that depends; 0 for other devices.

    Raises:
        LeftToStockError: no MoE layers, or their sizes are not read and nothing of this package would run them.
        CheckpointError: an unknown quantization, or a field that is missing or has a value that it cannot have.
        DeploymentError: vLLM refuses the model with `online`, with numbers of ranks over which it cannot be sharded, or
            in the release.
        SettingError: a number of ranks below one, or an all-to-all that the release does not have.
    """
    ranks = replace(ranks, all2all=effective_all2all(ranks.all2all, vllm))
    ranks.check()
    # Fields that are not checked one by one may have any type.
    with boundary(CheckpointError, "is not the config of a model", where=config.where):
        return _find_moe_layers(config, ranks, ragged_shards, online, vllm, served_dtype(config, dtype, capability))


def _find_moe_layers(
    config: CheckpointFiles, ranks: Ranks, ragged_shards: bool, online: str, vllm: str | None, served: tuple[str, str]
) -> MoeLayers:
    """See `find_moe_layers`; `served` is from `served_dtype`."""
    dtype, dtype_note = served
    _check_readable(config, online, vllm)
    layers = expert_layers(config, vllm)
    format_of, method = _expert_formats(config, online, vllm)
    layers += mtp_layers(config, vllm)
    in_files, unread = _experts_in_files(config, layers)
    kinds = _kinds_in_files(in_files, layers)
    formats = FormatsInFiles(format_of, kinds)
    layers = _with_formats(config, layers, kinds, formats, method)
    problems, mtp_problems = (
        tuple(
            layer_problem(each, each.format, ranks, dtype, ragged_shards, vllm)
            for each in layers
            if each.is_mtp == is_mtp and isinstance(each.format, Scheme)
        )
        for is_mtp in (False, True)
    )
    if not problems and not mtp_problems:
        check_attention_heads(config, ranks)
    if ranks.total > MAX_RANKS:  # where the layers themselves do not say how many can share them
        rule = f"{ranks.total} ranks are more than {MAX_RANKS}, the most that are considered"
        raise CheckpointError(rule, "Use fewer: --tp times --dp are all ranks", config.where)
    counted = [] if unread else layers
    miscounted = check_expert_counts(config, counted, in_files)
    file_notes, packed = ([unread], False) if unread else _notes_on_files(config, layers, kinds)
    missing = missing_files_note(config)
    file_notes += [*miscounted, *filter(None, [missing])]
    file_notes += formats.notes()
    notes = (*_notes(config, layers, online, packed, dtype_note), *file_notes)
    if config.model_type == EVEN_SPLIT_MODEL_TYPE and any(problem.scheme.name == "wna16" for problem in problems):
        rule = "vLLM's loader of gpt-oss skips experts under the names of GPTQ, AWQ and compressed-tensors (qweight, "
        notes += (f"{rule}weight_packed): loading fails: the weights are reported as missing",)
    refused = _refused_linear(config, problems, vllm)
    if refused:  # whether linear layers are quantized at all is not looked at here: a note, and no more
        notes += (f"a server does not start, unless the files leave all layers but experts unquantized: {refused}",)
    return MoeLayers(
        problems=problems,
        unquantized=tuple(each.name for each in layers if each.format is None),
        unsupported_formats={
            each.name: each.format.format for each in layers if isinstance(each.format, UnsupportedFormat)
        },
        method=method,
        notes=notes,
        mtp_problems=mtp_problems,
        refused=refused,
        notes_on_files=tuple(file_notes),
        architectures=tuple(config.architectures),
        lacks_files=bool(missing) and not config.is_cached,
        absent_drafts=tuple(each.name for each in absent_layers(config, counted, in_files)),
    )


def _check_readable(config: CheckpointFiles, online: str, vllm: str | None) -> None:
    """Refuses a model that the release has no more, and experts in fields that are not read."""
    if removed := last_release_with(config.architectures, vllm):
        rule = "vLLM has {} until {}: a server does not start".format(*removed)
        raise DeploymentError(rule, f"Serve it with vLLM {removed[1]} or older", config.where)
    if words := unread_experts(config):
        raise _unread_experts_error(config, words, online, vllm)


def _refused_linear(config: CheckpointFiles, problems: Iterable[Problem], vllm: str | None) -> str:
    """Why vLLM refuses the model's linear layers, if they are quantized as its experts are; "" where it does not."""
    schemes = {problem.scheme for problem in problems}
    refused = refused_linear(*config.quantization) if config.quantization is not None and schemes else ""
    ordered = any(scheme.act_order == "group" and scheme.group_size != -1 for scheme in schemes)
    if not refused and ordered and min_versions.refuses_act_order_in_linear(vllm):
        return f"from {min_versions.LINEAR_WITHOUT_ACT_ORDER} on, vLLM refuses linear layers with act order in groups"
    return refused


def _experts_in_files(
    config: CheckpointFiles, layers: Iterable[ExpertLayer]
) -> tuple[Mapping[str, ExpertTensors], str]:
    """What the files hold of each layer's experts, by the modules' names in files; nothing where there is no folder.
    Where a file cannot be read, such as one that is not fetched yet, nothing but a note that says so.

    Raises:
        CheckpointError: as by `indexed_names`, and for a file that vLLM's reader refuses: no server starts with these.
    """
    if config.folder is None:
        return {}, ""
    indexed_names(config.folder)
    try:
        return expert_tensors(config.folder, {name for each in layers for name, _ in each.names.modules_in_files()}), ""
    except RefusedFileError:
        raise
    except CheckpointError as error:
        return {}, f"whether the files hold the experts as the config says is not known: {error}"


def _kinds_in_files(found: Mapping[str, ExpertTensors], layers: Iterable[ExpertLayer]) -> Mapping[str, TensorKinds]:
    """The kinds of tensors of each layer's experts, by vLLM's name of the layer."""
    return {
        layer.name: {kind for name, _ in layer.names.modules_in_files() if name in found for kind in found[name].kinds}
        for layer in layers
    }


def refused_layers(config: CheckpointFiles, vllm: str | None = None) -> Mapping[str, DamagedCheckpointError]:
    """The layers that `find_moe_layers` refuses for the experts that a checkpoint's files hold, each with the error.
    For a server: it takes some formats' quantized layers from the files, and a layer without experts for an unquantized
    one.

    Args:
        config: the checkpoint's.
        vllm: the release of vLLM; None for the newest.

    Returns:
        By vLLM's name of the layer, without multi-token prediction modules.

    Raises:
        CheckpointError: the config or the files cannot be read.
    """
    layers = expert_layers(config, vllm)
    in_files, unread = _experts_in_files(config, layers)
    if unread:
        return {}
    format_of, method = _expert_formats(config, "", vllm)
    kinds = _kinds_in_files(in_files, layers)
    layers = _with_formats(config, layers, kinds, FormatsInFiles(format_of, kinds), method)
    return layer_errors(config, layers, in_files)


def _with_formats(
    config: CheckpointFiles,
    layers: Sequence[ExpertLayer],
    kinds: Mapping[str, TensorKinds],
    format_of: FormatLookup,
    method: str,
) -> list[ExpertLayer]:
    """The layers with how their experts are stored: by the config, and by the files where it leaves that to them.

    Args:
        config: the checkpoint's.
        layers: the layers.
        kinds: what the files hold of each, by vLLM's name.
        format_of: see `_expert_formats`.
        method: vLLM's name for the quantization.
    """
    plain = set()
    if config.quantization is not None and takes_modules_from_files(*config.quantization, method):
        plain = {name for name, each in kinds.items() if are_floating_point(each)}
    return [replace(each, format=None if each.name in plain else format_of(each.names)) for each in layers]


def _notes_on_files(
    config: CheckpointFiles, layers: Iterable[ExpertLayer], kinds: Mapping[str, TensorKinds]
) -> tuple[list[str], bool]:
    """What is to be known of layers whose files say otherwise than the quantization config, and whether some are
    quantized although the config does not say so.

    Tools leave layers in 16 bits, such as those for multi-token prediction, and not all of them write so. The config of
    a model that drafts for another may not say what its tensors are.

    Args:
        config: the checkpoint's.
        layers: all of them.
        kinds: what the files hold of each, by vLLM's name.
    """
    where = "" if config.quantization is None else config.quantization.where
    compared = [each for each in layers if not isinstance(each.format, UnsupportedFormat)]
    plain = [each for each in compared if where and each.is_quantized and are_floating_point(kinds[each.name])]
    packed = [each for each in compared if not (where and each.is_quantized) and are_quantized(kinds[each.name])]
    notes = []
    for found, effect in (
        ([each.name for each in plain if not each.is_mtp], "a server does not load them"),
        ([each.name for each in plain if each.is_mtp], "speculative decoding with them does not load"),
    ):
        if found:
            notes.append(
                f"the files hold the experts of {compact_layer_names(found)} in 16 bits, and {where} does not leave "
                f"them out: {effect}. Add them to the layers that the config ignores"
            )
    if packed:
        said = f"{where} leaves them out" if where else f"{config.path} has no quantization_config"
        notes.append(
            f"the files hold the experts of {compact_layer_names(each.name for each in packed)} quantized, and {said}: "
            "a server does not load them. The config has to say how they are quantized"
        )
    return notes, bool(packed)


def _unread_experts_error(config: CheckpointFiles, words: str, online: str, vllm: str | None) -> CheckpointError:
    """What the experts are stored as decides: only those in a scheme of this package could be run by it."""
    where = config.where
    if config.quantization is None and not online:
        return LeftToStockError(f"{words}; the experts are not quantized", _SERVED, where)
    format_of, _ = _expert_formats(config, online, vllm)
    found = list(dict.fromkeys(format_of(each) for each in all_layer_names(config, vllm)))
    stored = f"{words}; the experts are in {' and '.join(map(describe_format, found[:3]))}"
    if any(isinstance(each, Scheme) for each in found):
        dbrx = config.model_type == "dbrx"
        remedy = "A server knows their sizes: its log says what runs them"
        return CheckpointError(stored, _DBRX_REMEDY if dbrx else remedy, where)
    return LeftToStockError(stored, _SERVED, where)


_DBRX_REMEDY = "vLLM's loader of DBRX takes experts in 16 bits or FP8"
_SERVED = "This plugin serves experts in MXFP8, MXFP4 and integers with 16-bit activations"


def _expert_formats(config: CheckpointFiles, online: str, vllm: str | None) -> tuple[FormatLookup, str]:
    """What each layer's experts are stored as, or become while they load, and vLLM's name for the quantization. The
    lookup raises DeploymentError for a format that the release does not load."""
    if config.quantization is None:
        format_of, method = _formats_at_loading(config, online), online
    else:
        format_of, method = _stored_formats(config, *config.quantization, online)

    def loaded(layer: LayerNames) -> ExpertFormat:
        found = format_of(layer)
        check_release(method, found, vllm, config.where)
        return found

    return loaded, method


def _formats_at_loading(config: CheckpointFiles, online: str) -> FormatLookup:
    """What experts of a checkpoint in 16 bits become while they load."""
    if online in ONLINE_SCHEMES and config.model_type == EVEN_SPLIT_MODEL_TYPE:
        rule = "vLLM's loader of gpt-oss copies experts in 16 bits past the loader that would quantize them"
        raise DeploymentError(rule, "Serve the checkpoint in MXFP4 that OpenAI publishes", config.where)
    if online in ONLINE_SCHEMES:
        return lambda layer: ONLINE_SCHEMES[online]
    if online in UNSUPPORTED_ONLINE:
        return lambda layer: UnsupportedFormat(online)
    if online:
        rule = f"--quantization {short_repr(online)} is not supported"
        valid = f"{did_you_mean(online, ONLINE_SCHEMES)}For a checkpoint in 16 bits, valid are "
        raise CheckpointError(rule, valid + ", ".join((*ONLINE_SCHEMES, *UNSUPPORTED_ONLINE)), config.where)
    return lambda layer: None


def _stored_formats(
    config: CheckpointFiles, quantization: Mapping[str, Any], source: str, online: str
) -> tuple[FormatLookup, str]:
    """What a quantized checkpoint's experts are stored as, and vLLM's name for the quantization."""
    if config.model_type in _FP4_EXPERT_MODELS:
        quantization = {"expert_dtype": config.model_config.get("expert_dtype") or "fp4", **quantization}
    is_kimi_k3 = _KIMI_K3_ARCHITECTURE in config.architectures
    if is_kimi_k3 and quantization.get("format") == "mxfp4-pack-quantized":
        # vLLM reads what compressed-tensors stored as a checkpoint that is tagged so.
        quantization = {**quantization, "quant_method": "mxfp4"}
    format_of, method = parse_config(quantization, source), vllm_method_name(quantization)
    is_gpt_oss = config.model_type == "gpt_oss"
    if is_gpt_oss and method == "mxfp4":  # for which vLLM has a config class of its own
        format_of = parse_config({**quantization, "quant_method": "gpt_oss_mxfp4"}, source)
    others = [name for name in METHOD_ALIASES.get(method, ()) if is_gpt_oss or not name.startswith("gpt_oss")]
    if online not in ("", method, *others):
        rule = f"it is quantized already, as {method}, and --quantization is {short_repr(online)}"
        raise DeploymentError(rule, f"Leave --quantization out, or say {' or '.join((method, *others))}", config.where)
    named = online if method in ("gptq", "awq") and online else method
    return (with_moe_wna16_packing(format_of) if online == "moe_wna16" else format_of), named


def _notes(
    config: CheckpointFiles, layers: Sequence[ExpertLayer], online: str, packed: bool, dtype_note: str
) -> Iterable[str]:
    """Notes on the config; `packed`: the files of layers that it leaves out hold quantized experts; `dtype_note`: from
    `served_dtype`."""
    yield from config.notes
    left = "which are left to stock vLLM, unaffected by this plugin"
    if unquantized := [each for each in layers if each.format is None]:
        yield f"{_count_layers(len(unquantized))} unquantized experts, {left}: {_name_layers(unquantized)}"
    if config.quantization is None and not online and not packed:
        if config.model_type == EVEN_SPLIT_MODEL_TYPE:
            yield "the plugin serves gpt-oss in MXFP4, as OpenAI publishes it; vLLM cannot quantize it at loading"
        else:
            yield f"--quantization {' or '.join(ONLINE_SCHEMES)} would quantize the experts at loading, for this plugin"
    foreign: dict[str, list[ExpertLayer]] = {}
    for layer in layers:
        if isinstance(layer.format, UnsupportedFormat):
            foreign.setdefault(layer.format.format, []).append(layer)
    for format, found in foreign.items():
        yield f"{_count_layers(len(found))} experts in {format}, {left}: {_name_layers(found)}"
    if foreign:
        yield f"{_SERVED[:1].lower()}{_SERVED[1:]}"
    if config.quantization is not None:
        yield from config_notes(*config.quantization)
    routing = topk_method_note(config), groups_note(config, count_experts(config, 0))
    yield from filter(None, (dtype_note, activation_note(config), *routing))
    mtp_count = next((config.model_config[name] for name in MTP_COUNT_FIELDS if config.model_config.get(name)), 0)
    if isinstance(mtp_count, int) and mtp_count > 0 and config.model_type not in MTP_MODELS:
        yield f"layers of the {mtp_count} multi-token-prediction module(s) are not listed"


def _name_layers(layers: Iterable[ExpertLayer]) -> str:
    """Names of layers, and which of them are for multi-token prediction."""
    predicting = [each.name for each in layers if each.is_mtp]
    also = f" (for multi-token prediction: {compact_layer_names(predicting)})" if predicting else ""
    return f"{compact_layer_names(each.name for each in layers)}{also}"


def _count_layers(count: int) -> str:
    return "1 MoE layer has" if count == 1 else f"{count} MoE layers have"
