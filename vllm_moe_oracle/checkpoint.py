"""A checkpoint's config as problems: which layers have experts, of what shape, stored as what, and what a rank holds.

Only ``config.json`` is read (and ``hf_quant_config.json``, where older ModelOpt releases keep the quantisation): no
tensors, no torch, no vLLM. Fields are read by families of names, as models spell the same thing differently; what no
field says (a model type whose code decides it) stands in the few tables at the top. Names of layers are vLLM's.
"""

from __future__ import annotations

import dataclasses
import json
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import CheckpointError
from .oracle.planner import in_whole_blocks, in_whole_groups
from .oracle.problem import Activation, Parallel, Problem, Routing, Scheme
from .quantization import ONLINE, OTHER_NAMES, config_notes, in_bytes, reader, vllm_name
from .quantization.answers import GATED_PROJECTIONS, NUMBERED, PLAIN_PROJECTIONS, Foreign, LayerNames, SchemeOf
from .quantization.fields import shown

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k",
)  # fmt: skip
WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "intermediate_size")
LAYERS = ("num_hidden_layers", "n_layers", "num_layers")
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation")

# Largest values that are taken for a description of a model and not for a damaged or hostile file.
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_WIDTH = 1 << 24
MAX_BYTES = 64 << 20
MAX_RANKS = 1 << 16

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
    "lfm2_moe": "feed_forward",
    "llama4": "feed_forward",
    "llama4_text": "feed_forward",
    "nemotron_h": "mixer",
    "nemotron_h_puzzle": "mixer",
    "step3_text": "moe",
    "step3p5": "moe",
}
_CHECKPOINT_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "mixer", "moe")

# Experts without a gate, routers that score by sigmoid whatever the config says, routers with a bias for choosing, and
# routers that always renormalise: these models' code decides it, no field does.
_UNGATED = frozenset({"nemotron_h", "nemotron_h_puzzle"})
_SIGMOID = frozenset(
    {"nemotron_h", "nemotron_h_puzzle", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite", "mimo_v2", "mimo_v2_flash",
     "lfm2_moe", "exaone_moe", "hy_v3", "laguna", "llama4", "llama4_text"}
)  # fmt: skip
_CORRECTED = frozenset(
    {"nemotron_h", "nemotron_h_puzzle", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite", "mimo_v2", "mimo_v2_flash",
     "exaone_moe", "ernie4_5_moe"}
)  # fmt: skip
_RENORMALISED = frozenset(
    {"mixtral", "gpt_oss", "minimax_m2", "minimax_m3", "minimax_m3_text", "ernie4_5_moe", "laguna", "gemma4_text"}
)
_SOFTPLUS = frozenset({"deepseek_v4", "deepseek_v41"})
_CUSTOM = {"llama4": "llama4", "llama4_text": "llama4", "gemma4_text": "custom"}

# Models whose code computes gpt-oss's activation, whatever hidden_act says.
_SWIGLUOAI = frozenset({"gpt_oss", "minimax_m3", "minimax_m3_text"})

_GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""Parameters of gpt-oss's activation where a config names the activation and not its parameters."""

# Models whose FP8 config leaves the experts' own type to the model's config.
_FOUR_BIT_EXPERTS = frozenset({"deepseek_v4", "deepseek_v41"})

# Models whose modules for multi-token prediction are decoder layers like the others, after the last of them.
_PREDICTING = frozenset({"deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe"})
_PREDICTORS = ("num_nextn_predict_layers", "num_mtp_modules")

_DTYPES = frozenset({"bfloat16", "float16", "float32"})


@dataclass(frozen=True, slots=True)
class Layers:
    """The MoE layers of a checkpoint on one rank.

    Attributes:
        problems: one for each layer whose experts are stored in a scheme that this project reads, in order.
        unquantised: names of layers whose experts the quantisation config leaves out.
        foreign: names of layers whose experts are quantised in another format, with the format.
        method: vLLM's name for the checkpoint's quantisation, e.g. ``modelopt_mxfp8``.
        notes: what a reader of the answer should know about how it was made, one sentence each.
        predicting: as `problems`, of modules for multi-token prediction, which vLLM loads as a model of their own where
            speculative decoding asks for them.
    """

    problems: tuple[Problem, ...]
    unquantised: tuple[str, ...]
    foreign: Mapping[str, str]
    method: str
    notes: tuple[str, ...]
    predicting: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Config:
    """The files that describe a checkpoint.

    Attributes:
        path: the config.json.
        top: the whole of it.
        model: the part that describes the language model: `top`, or its ``text_config``.
        nested: whether `model` is a part.
        quantization: the quantisation config, and the file and field that it came from; None when there is none.
    """

    path: Path
    top: Mapping[str, Any]
    model: Mapping[str, Any]
    nested: bool
    quantization: tuple[Mapping[str, Any], str] | None


def read(path: Path) -> Config:
    """Reads the files that describe a checkpoint.

    Args:
        path: the checkpoint's folder, or its config.json under any name.

    Raises:
        CheckpointError: a file that is missing, cannot be read, is too large, or holds no JSON object.
    """
    try:
        found = path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or holds a null byte
        raise CheckpointError(f"cannot be a path: {error.strerror if isinstance(error, OSError) else error}") from error
    if not found:
        remedy = "Give a checkpoint's folder or its config.json; nothing is downloaded"
        raise CheckpointError("no such file or folder", remedy, str(path))
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise CheckpointError("the folder has no config.json", where=str(path))
    top = _object(file)
    model, nested = _language_model(top, file)
    return Config(file, top, model, nested, _quantization(top, model, file))


def layers(
    config: Config, tp: int = 1, expert_parallel: bool = False, ragged: bool = False, online: str = ""
) -> Layers:
    """The MoE layers of a checkpoint as one rank sees them.

    Args:
        config: from `read`.
        tp: tensor-parallel ranks.
        expert_parallel: the ranks hold different experts instead of parts of each (``--enable-expert-parallel``).
        ragged: the setting `ragged_shards`.
        online: vLLM's ``--quantization``: for a checkpoint in 16 bits a key of `ONLINE`; "" for none.

    Raises:
        CheckpointError: no MoE layers, no quantisation, an unknown one, another than `online`, a field that is missing
            or has a value that it cannot have, or a number of ranks that the model cannot be cut into.
    """
    where = str(config.path)
    if tp > MAX_RANKS:
        raise CheckpointError(f"{tp} ranks are more than {MAX_RANKS}, the most that are considered", where=where)
    names = _moe_layers(config)
    scheme_of, method = _quantised(config, online)
    predictors = _predictors(config)
    problems: list[Problem] = []
    predicting: list[Problem] = []
    unquantised, foreign = [], {}
    for index, layer in (names | predictors).items():
        answer = scheme_of(layer)
        name = layer.modules[0]
        if answer is None:
            unquantised.append(name)
        elif isinstance(answer, Foreign):
            foreign[name] = answer.format
        else:
            found = predicting if index in predictors else problems
            found.append(_problem(config, index, name, answer, tp, expert_parallel, ragged))
    if foreign and not problems:
        formats = ", ".join(dict.fromkeys(foreign.values()))
        rule = f"its experts are stored as {formats}, which this release does not read"
        raise CheckpointError(rule, "It reads MXFP8, MXFP4 and 16-bit-activation integer formats", where)
    notes = tuple(_notes(config, unquantised, foreign))
    return Layers(tuple(problems), tuple(unquantised), foreign, method, notes, tuple(predicting))


def _quantised(config: Config, online: str) -> tuple[SchemeOf, str]:
    """What each layer's experts are stored as, or become while they load, and vLLM's name for the quantisation."""
    where = str(config.path)
    if config.quantization is None:
        if online in ONLINE:
            return lambda layer: ONLINE[online], online
        if online:
            rule = f"--quantization {shown(online)} is none of those that are decided here"
            raise CheckpointError(rule, f"For a checkpoint in 16 bits these are {', '.join(ONLINE)}", where)
        remedy = (
            "Its experts are in the model's own dtype, for which vLLM chooses kernels itself; "
            f"--quantization {' or '.join(ONLINE)} would quantise them while they load"
        )
        raise CheckpointError("there is no quantization_config and no hf_quant_config.json", remedy, where)
    quantization, source = config.quantization
    if _model_type(config) in _FOUR_BIT_EXPERTS:
        quantization = {"expert_dtype": config.model.get("expert_dtype") or "fp4", **quantization}
    scheme_of, method = reader(quantization, source), vllm_name(quantization)
    others = OTHER_NAMES.get(method, ())
    if _model_type(config) != "gpt_oss":
        others = tuple(name for name in others if not name.startswith("gpt_oss"))
    if online not in ("", method, *others):
        rule = f"it is quantised already, as {method}, and --quantization is {shown(online)}"
        also = f"Leave --quantization out, or say {' or '.join(others)}" if others else "Leave --quantization out"
        raise CheckpointError(rule, also, where)
    named = online if method in ("gptq", "awq") and online else method
    return (in_bytes(scheme_of) if online == "moe_wna16" else scheme_of), named


# --- files ------------------------------------------------------------------------------------------------------------


def _object(file: Path) -> Mapping[str, Any]:
    """The JSON object in a file. Python's own parser: model configs hold Infinity, which is no JSON but usual."""
    try:
        status = file.stat()
        # A pipe or a device would block, or never end.
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("is no regular file", where=str(file))
        if status.st_size > MAX_BYTES:
            rule = f"has {status.st_size} bytes; a config of more than {MAX_BYTES} is not read"
            raise CheckpointError(rule, where=str(file))
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=str(file)) from error
    except RecursionError as error:
        raise CheckpointError("is nested too deeply to be a model's config", where=str(file)) from error
    except ValueError as error:
        # Not JSON, not text, or a number of more digits than Python reads.
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"is not JSON: {_line(error)}", where=str(file)) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"holds {shown(data)}, not a JSON object", where=str(file))
    return data


def _language_model(top: Mapping[str, Any], file: Path) -> tuple[Mapping[str, Any], bool]:
    """The part of a config that describes the language model."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        part = top.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise CheckpointError(f"{name} is {shown(part)}, not an object", where=str(file))
        inner = part.get("text_config")
        return (inner if isinstance(inner, Mapping) else part), True
    return top, False


def _quantization(top: Mapping[str, Any], model: Mapping[str, Any], file: Path) -> tuple[Mapping[str, Any], str] | None:
    """The quantisation config, from the place where vLLM would take it."""
    beside = file.with_name("hf_quant_config.json") if file.name == "config.json" else None
    for part, field in (
        (top, "quantization_config"),
        (model, "quantization_config"),
        (top, "compression_config"),
    ):
        found = part.get(field)
        if found is None:
            continue
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{field} is {shown(found)}, not an object", where=str(file))
        mixed = str(found.get("quant_algo", "")).upper() == "MIXED_PRECISION"
        if mixed and "quantized_layers" not in found and beside is not None and beside.exists():
            # Older ModelOpt releases write the algorithm into config.json and its layers into the other file only.
            break
        return found, f"{file}, {field}"
    if beside is not None and beside.exists():
        return _object(beside), str(beside)
    return None


# --- which layers -----------------------------------------------------------------------------------------------------


def _moe_layers(config: Config) -> dict[int, LayerNames]:
    """Names of the layers that have experts, by index."""
    model, where = config.model, str(config.path)
    if isinstance(model.get("block_configs"), list):
        rule = "block_configs gives every layer a shape of its own, which this release does not read"
        raise CheckpointError(rule, where=where)
    pattern = model.get("hybrid_override_pattern")
    total = len(pattern) if isinstance(pattern, str) else _integer(model, LAYERS, where, MAX_LAYERS)
    if total > MAX_LAYERS:
        raise CheckpointError(f"hybrid_override_pattern has {total} layers, more than {MAX_LAYERS}", where=where)
    if all(not model.get(name) for name in EXPERTS) and any(model.get(name) == 0 for name in EXPERTS):
        name = next(name for name in EXPERTS if model.get(name) == 0)
        raise CheckpointError(f"it has no MoE layers: {name} is 0", where=where)
    if not any(model.get(name) for name in EXPERTS):
        raise CheckpointError(f"it has no MoE layers: none of {', '.join(EXPERTS)} is set", where=where)
    indices = [index for index in range(total) if _has_experts(model, index, where)]
    if not indices:
        rule = f"it has no MoE layers: by its config, none of the {total} layers has experts"
        raise CheckpointError(rule, where=where)
    return {index: _layer_names(config, index) for index in indices}


def _predictors(config: Config) -> dict[int, LayerNames]:
    """Names of the layers of modules for multi-token prediction that have experts, by index."""
    model, where = config.model, str(config.path)
    if _model_type(config) not in _PREDICTING or not model.get(_PREDICTORS[0]):
        return {}
    count, total = (_integer(model, names, where, MAX_LAYERS) for names in (_PREDICTORS[:1], LAYERS))
    indices = [index for index in range(total, total + count) if _has_experts(model, index, where, beyond=True)]
    return {index: _layer_names(config, index) for index in indices}


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
        return _integer(model, (field,), where, MAX_LAYERS, least=0)

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


def _layer_names(config: Config, index: int) -> LayerNames:
    """vLLM's name of a layer's experts, then those under which checkpoints may speak of them."""
    kind = _model_type(config)
    block = _BLOCKS.get(kind, "mlp")
    root = "language_model.model" if config.nested else "model"
    roots = ["model.language_model", "language_model", "model"] if config.nested else ["backbone"]
    inside = f"{index}.{block}.experts" if block else f"{index}.experts"
    modules = [f"{place}.layers.{inside}" for place in (root, *roots)]
    modules += [f"{root}.layers.{index}.{other}.experts" for other in _CHECKPOINT_BLOCKS if other != block]
    projections = PLAIN_PROJECTIONS if kind in _UNGATED else GATED_PROJECTIONS
    return LayerNames(tuple(modules), projections, projections[kind in NUMBERED])


# --- one layer --------------------------------------------------------------------------------------------------------


def _problem(
    config: Config, index: int, name: str, scheme: Scheme, tp: int, expert_parallel: bool, ragged: bool
) -> Problem:
    model, where = config.model, str(config.path)
    if scheme.packing == "gpt_oss" and _model_type(config) != "gpt_oss":
        scheme = dataclasses.replace(scheme, packing="mxfp4")
    experts = _integer(model, EXPERTS, where, MAX_EXPERTS, index)
    width = _integer(model, WIDTH, where, MAX_WIDTH, index)
    # Experts of Nemotron-3-Super work in a latent space that is smaller than the hidden state.
    hidden = _integer(model, ("moe_latent_size", "hidden_size", "n_embd", "d_model"), where, MAX_WIDTH)
    heads = model.get("num_attention_heads")
    heads = heads if isinstance(heads, int) and heads > 0 else 0
    _check_cut(where, tp, expert_parallel, experts, width, heads)
    # The fullest rank: vLLM gives the first ranks one expert more where the split is uneven.
    local = -(-experts // tp) if expert_parallel else experts
    parallel = Parallel(ep=tp) if expert_parallel else Parallel(tp=tp)
    try:
        problem = Problem(
            layer=name,
            scheme=scheme,
            num_experts=experts,
            local_experts=local,
            top_k=_integer(model, TOP_K, where, MAX_EXPERTS, index),
            hidden_size=hidden,
            intermediate_size=width // parallel.tp,
            activation=_activation(config, index),
            has_bias=_model_type(config) == "gpt_oss",
            dtype=_dtype(config)[0],
            routing=_routing(config, index),
            parallel=parallel,
        )
        if scheme.name == "wna16":  # as the methods do: rows that alternate are put apart when they are loaded
            problem = replace(problem, activation=replace(problem.activation, interleaved=False))
            return in_whole_groups(problem) if ragged else problem
        # As the method does: gpt-oss's loader cuts between blocks.
        cut = scheme.name == "mxfp4" and problem.activation.interleaved
        return in_whole_blocks(problem) if cut else problem
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(error), where=where) from error


def _check_cut(where: str, tp: int, expert_parallel: bool, experts: int, width: int, heads: int) -> None:
    """Refuses ranks that a layer cannot be spread over.

    vLLM's `verify_with_parallel_config` wants whole attention heads on every rank, with expert parallelism too.

    Args:
        where: the file, for messages.
        tp: tensor-parallel ranks.
        expert_parallel: they hold different experts.
        experts: experts of the layer.
        width: features between the two products.
        heads: attention heads of the model; 0 when unknown.
    """
    if expert_parallel and tp > experts:
        rule = f"expert parallelism over {tp} ranks leaves ranks without one of the {experts} experts"
        raise CheckpointError(rule, where=where)

    def fits(size: int) -> bool:
        return not heads % size and (size <= experts if expert_parallel else not width % size)

    if fits(tp):
        return
    remedy = f"TP {next(size for size in range(tp - 1, 0, -1) if fits(size))}"
    if heads % tp:
        rule = f"vLLM refuses {tp} ranks, which do not divide the {heads} attention heads ({heads} mod {tp} = "
        raise CheckpointError(f"{rule}{heads % tp})", f"{remedy} would do", where)
    rule = f"tensor parallelism over {tp} ranks does not divide the experts' intermediate size {width}"
    by_experts = ", or cut by experts with --ep" if tp <= experts else ""
    raise CheckpointError(f"{rule} ({width} mod {tp} = {width % tp})", f"{remedy} divides it{by_experts}", where)


def _activation(config: Config, index: int) -> Activation:
    model, where, kind = config.model, str(config.path), _model_type(config)
    word = next((model[name] for name in ACTIVATION if model.get(name) is not None), "silu")
    if not isinstance(word, str):
        raise CheckpointError(f"the activation is {shown(word)}, not a name", where=where)
    aliases = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu_squared": "relu2"}
    name = word.strip().lower().removesuffix("_no_mul")
    if not re.fullmatch("[a-z0-9_]+", name):
        raise CheckpointError(f"the activation {shown(word)!a} is not a name", where=where)
    name = aliases.get(name, name).removesuffix("_uninterleave")
    alpha, beta, limit = (
        _real(model, (f"swiglu_{part}", f"swiglu_{part}s"), where, index) for part in ("alpha", "beta", "limit")
    )
    if kind in _UNGATED:
        return Activation(name, gated=False)
    if kind in _SWIGLUOAI or name == "swigluoai":
        return Activation(
            "swigluoai",
            alpha=_GPT_OSS["alpha"] if alpha is None else alpha,
            beta=_GPT_OSS["beta"] if beta is None else beta,
            limit=_GPT_OSS["limit"] if limit is None else limit,
            interleaved=kind == "gpt_oss",
        )
    # A limit of zero switches the clamp of a layer off (Step-3.5).
    return Activation(name, alpha=alpha, beta=beta, limit=limit or None)


def _routing(config: Config, index: int) -> Routing:
    model, where, kind = config.model, str(config.path), _model_type(config)
    fields = ("scoring_func", "score_func", "score_function", "moe_router_activation")
    word = next((model[name] for name in fields if isinstance(model.get(name), str)), "")
    word = word or ("sqrtsoftplus" if kind in _SOFTPLUS else "softmax")
    if not re.fullmatch("[A-Za-z0-9_-]+", word):
        raise CheckpointError(f"the scoring function {shown(word)!a} is not a name", where=where)
    scoring = "sigmoid" if kind in _SIGMOID else word.lower()
    renormalised = next((model[name] for name in ("norm_topk_prob", "route_norm") if name in model), True)
    renormalise = (kind in _RENORMALISED or renormalised is not False) and not kind.startswith("llama4")
    corrected = (
        kind in _CORRECTED
        or model.get("topk_method") == "noaux_tc"
        or any(model.get(name) is True for name in ("use_routing_bias", "moe_router_enable_expert_bias"))
    )
    groups = _count(model, "n_group", where)
    hashed = index < (_count(model, "num_hash_layers", where) or 0)
    return Routing(
        method=_routing_method(kind, scoring, renormalise, groups, corrected),
        scoring=scoring,
        renormalize=renormalise,
        num_groups=groups,
        top_k_groups=_count(model, "topk_group", where) if groups else None,
        # Experts from a table are not chosen by score.
        correction_bias=corrected and not hashed,
        weight_on_input=kind.startswith("llama4"),
        hashed=hashed,
    )


def _routing_method(kind: str, scoring: str, renormalise: bool, groups: int | None, corrected: bool) -> str:
    """vLLM's name for the routing, lower case."""
    if kind in _CUSTOM:
        return _CUSTOM[kind]
    if scoring == "sqrtsoftplus":
        return "deepseekv4" if renormalise else "unspecified"
    if corrected:
        if scoring != "sigmoid" or not renormalise:
            return "unspecified"
        return "deepseekv3" if groups else "minimax2"
    plain = {
        ("sigmoid", True): "sigmoidrenorm",
        ("sigmoid", False): "sigmoid",
        ("softmax", True): "renormalizenaive",
        ("softmax", False): "default",
    }
    return plain.get((scoring, renormalise), "unspecified")


def _dtype(config: Config) -> tuple[str, str]:
    """The dtype that vLLM serves the model in by default, and a note where that is not the checkpoint's."""
    parts = (config.top, config.model)
    found = next((part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name)), None)
    word = str(found).removeprefix("torch.")
    if found is None or word == "float32":
        said = "names no dtype" if found is None else "says float32"
        return "bfloat16", f"the config {said}: taken as bfloat16, as vLLM does on its own"
    if word not in _DTYPES:
        raise CheckpointError(f"unknown dtype {shown(found)}", where=str(config.path))
    return word, ""


def _notes(config: Config, unquantised: list[str], foreign: Mapping[str, str]) -> Iterable[str]:
    if unquantised:
        yield f"{_count_words(len(unquantised))} unquantised experts, which vLLM serves itself: {compact(unquantised)}"
    for format, count in Counter(foreign.values()).items():
        names = compact([name for name, other in foreign.items() if other == format])
        yield f"{_count_words(count)} experts in {format}, which this release does not read: {names}"
    if config.quantization is not None:
        yield from config_notes(*config.quantization)
    note = _dtype(config)[1]
    if note:
        yield note
    predicted = next((config.model[name] for name in _PREDICTORS if config.model.get(name)), 0)
    if isinstance(predicted, int) and predicted > 0 and _model_type(config) not in _PREDICTING:
        yield f"layers of the {predicted} multi-token-prediction module(s) are not listed"


def _count_words(count: int) -> str:
    return "1 MoE layer has" if count == 1 else f"{count} MoE layers have"


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


# --- fields -----------------------------------------------------------------------------------------------------------


def _model_type(config: Config) -> str:
    return str(config.model.get("model_type") or config.top.get("model_type") or "")


def _value(model: Mapping[str, Any], names: tuple[str, ...], index: int | None) -> tuple[str, Any]:
    """The first field that is set; of one that lists a value for each layer, the layer's."""
    name = next((name for name in names if model.get(name) is not None), "")
    value = model.get(name)
    if isinstance(value, list) and index is not None:
        value = value[index] if index < len(value) else None
    return name, value


def _integer(
    model: Mapping[str, Any], names: tuple[str, ...], where: str, most: int, index: int | None = None, least: int = 1
) -> int:
    name, value = _value(model, names, index)
    if not name:
        raise CheckpointError(f"none of {', '.join(names)} is set", where=where)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CheckpointError(f"{name} is {shown(value)}, not an integer", where=where)
    if not least <= value <= most:
        raise CheckpointError(f"{name} is {shown(value)}, not between {least} and {most}", where=where)
    return value


def _count(model: Mapping[str, Any], name: str, where: str) -> int | None:
    return _integer(model, (name,), where, MAX_EXPERTS, least=0) or None if model.get(name) is not None else None


def _real(model: Mapping[str, Any], names: tuple[str, ...], where: str, index: int) -> float | None:
    name, value = _value(model, names, index)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise CheckpointError(f"{name} is {shown(value)}, not a number", where=where)
    return float(value)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
