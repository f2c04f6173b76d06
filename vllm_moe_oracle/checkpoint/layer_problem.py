"""One layer of a model as a problem."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ..core import activations
from ..core.problem import EVEN_SPLIT_MODEL_TYPE, Activation, Problem, Routing, Scheme, are_groups_ignored
from ..core.sharding import loader_shards_by_blocks, pads_experts, shard_by_blocks, shard_by_scale_groups
from ..errors import CheckpointError, DeploymentError, short_repr, shortened
from ..quantization.fields import read_boolean, read_string
from ..quantization.gpt_oss import reject_compressed_tensors
from ..releases.expert_names import min_expert_width
from .files import CheckpointFiles
from .layer_names import ExpertLayer
from .missing_fields import has_known_defaults
from .model_fields import (
    ERNIE_VL_MODELS,
    MAX_EXPERTS,
    MAX_FEATURES,
    MAX_RANKS,
    NUM_EXPERTS_FIELDS,
    UNGATED_MODELS,
    num_layers,
    positive_integer,
    read_float,
    read_integer,
    read_optional_integer,
)
from .ranks import Ranks

TOP_K_FIELDS = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k",
)  # fmt: skip
INTERMEDIATE_SIZE_FIELDS = (
    "moe_intermediate_size",
    "expert_intermediate_size",
    "moe_ffn_hidden_size",
    "expert_ffn_hidden_size",
    "intermediate_size",
)
_DENSE_WIDTH_MODELS = frozenset(
    {"arctic", "grok-1", "hunyuan", "minimax_m1", "minimax_m3", "minimax_m3_text", "minimax_text_01", "MiniMaxM1",
     "MiniMaxText01"}
)  # fmt: skip
"""Models with no class in `config_defaults` whose experts vLLM's code makes ``intermediate_size`` wide."""
HIDDEN_SIZE_FIELDS = ("moe_latent_size", "routed_expert_hidden_size", "hidden_size", "n_embd", "d_model")
ACTIVATION_FIELDS = ("mlp_hidden_act", "hidden_act", "hidden_activation")

# Routers that score by sigmoid whatever the config says, routers with a bias for choosing, routers that always or never
# renormalize, and routers with one group of experts: these models' code decides it, no field does.
_SIGMOID_MODELS = frozenset(
    {"nemotron_h", "nemotron_h_puzzle", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite", "mimo_v2", "mimo_v2_flash",
     "lfm2_moe", "exaone_moe", "hy_v3", "laguna", "llama4", "llama4_text", "dots1",
     "pangu_ultra_moe"}
)  # fmt: skip
_CORRECTION_BIAS_MODELS = frozenset(
    {"nemotron_h", "nemotron_h_puzzle", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite", "mimo_v2", "mimo_v2_flash",
     "exaone_moe", "ernie4_5_moe", "afmoe", "step3p5", "longcat_flash", "dots1", *ERNIE_VL_MODELS}
)  # fmt: skip
_RENORMALIZING_MODELS = frozenset(
    {"mixtral", "gpt_oss", "minimax_m2", "minimax_m3", "minimax_m3_text", "ernie4_5_moe", "laguna", "gemma4_text",
     *ERNIE_VL_MODELS}
)  # fmt: skip
_NON_RENORMALIZING_MODELS = frozenset({"jamba", "olmoe", "phimoe", "longcat_flash"})
_SINGLE_GROUP_MODELS = frozenset({"lfm2_moe"})
_SQRTSOFTPLUS_MODELS = frozenset({"deepseek_v4", "deepseek_v41"})
# What scores where the config does not say; in all other models softmax does.
_SCORING_IF_UNSET = {
    **dict.fromkeys(_SQRTSOFTPLUS_MODELS, "sqrtsoftplus"),
    **dict.fromkeys(("axk1", "param2moe", "sarvam_mla"), "sigmoid"),
}
_CUSTOM_ROUTING = {"llama4": "llama4", "llama4_text": "llama4", "gemma4_text": "custom"}

_RENORMALIZE_FIELDS = ("norm_topk_prob", "route_norm", "moe_renormalize", "norm_expert_weight")
_SCORING_FIELDS = (
    "scoring_func", "score_func", "score_function", "moe_router_activation", "moe_router_activation_func",
    "router_score_func",
)  # fmt: skip
_SCORING_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
"""Those that vLLM has code for, as its `create_fused_moe_router` spells them."""
_TOPK_METHODS = ("noaux_tc", "greedy", "group_limited_greedy")
"""Values of ``topk_method`` in DeepSeek's configs. vLLM's code compares with the first alone."""
_CORRECTION_BIAS_FIELDS = ("use_routing_bias", "moe_router_enable_expert_bias", "use_expert_bias")
_SCALING_FIELDS = ("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor", "route_scale")
ROUTING_FIELDS = (
    *_RENORMALIZE_FIELDS, *_SCORING_FIELDS, *_CORRECTION_BIAS_FIELDS, "topk_method", "n_group", "topk_group",
    "use_grouped_topk", "num_expert_group", "num_hash_layers",
)  # fmt: skip
"""Fields that say how experts are chosen and weighted, but for factors: nothing depends on a finite one."""


def layer_problem(
    layer: ExpertLayer, scheme: Scheme, ranks: Ranks, dtype: str, ragged_shards: bool, vllm: str | None = None
) -> Problem:
    """A layer as one rank sees it.

    Args:
        layer: the layer.
        scheme: what its experts are stored as.
        ranks: vLLM's options of parallelism.
        dtype: the model's, from `dtypes.served_dtype`.
        ragged_shards: the setting `ragged_shards`.
        vllm: the release of vLLM; None for the newest.

    Raises:
        CheckpointError: a field that is missing or has a value that it cannot have.
        DeploymentError: ranks that cannot share it.
    """
    config, index = layer.config, layer.index
    kind = config.model_type
    if scheme.packing == "gpt_oss" and kind != "gpt_oss":
        scheme = replace(scheme, packing="mxfp4")
    if kind == EVEN_SPLIT_MODEL_TYPE:
        reject_compressed_tensors(scheme, f"{config.where}, quantization_config, {layer.name}")
    experts = read_integer(config, NUM_EXPERTS_FIELDS, MAX_EXPERTS, index)
    top_k = read_integer(config, TOP_K_FIELDS, MAX_EXPERTS, index)
    width = read_integer(config, _width_fields(kind), MAX_FEATURES, index)
    # Experts of Nemotron-3-Super and Kimi-K3 work in a latent space that is smaller than the hidden state.
    hidden = read_integer(config, HIDDEN_SIZE_FIELDS, MAX_FEATURES)
    least = _min_shard_width(config, vllm)
    padded = not ranks.spreads_experts and pads_experts(width, ranks.tp, least)
    built = least * ranks.tp if padded else width
    _check_shardable(config, ranks, experts, width, least)
    # The fullest rank: vLLM gives the first ranks one expert more where the split is uneven.
    parallel = ranks.parallel
    local = -(-experts // parallel.ep)
    try:
        problem = Problem(
            layer=layer.name,
            scheme=scheme,
            num_experts=experts,
            local_experts=local,
            top_k=top_k,
            hidden_size=hidden,
            intermediate_size=built // parallel.tp,
            unpadded_intermediate_size=width if padded else 0,
            activation=_activation(config, index),
            has_bias=kind == "gpt_oss" or config.expert_biases,
            dtype=dtype,
            routing=_routing(config, index, experts, top_k),
            parallel=parallel,
            even_expert_split=kind == EVEN_SPLIT_MODEL_TYPE,
            num_layers=num_layers(config),
        )
        if scheme.name == "wna16":
            if scheme.rows_are_separable:  # as the methods do: rows that alternate are put apart when they are loaded
                problem = replace(problem, activation=replace(problem.activation, interleaved=False))
            return shard_by_scale_groups(problem) if ragged_shards else problem
        return shard_by_blocks(problem) if loader_shards_by_blocks(problem) else problem
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(str(error), where=config.where) from error


def _width_fields(kind: str) -> tuple[str, ...]:
    """Fields that may say how wide an expert is. That of dense layers does in few models, of which the others' defaults
    say so."""
    return INTERMEDIATE_SIZE_FIELDS[: None if has_known_defaults(kind) or kind in _DENSE_WIDTH_MODELS else -1]


_SHARDED_WIDTH_FIELDS = (
    "intermediate_size",
    "ffn_hidden_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
"""Widths of the other layers that vLLM shards over ranks. Not every model has all of them."""


def _min_shard_width(config: CheckpointFiles, vllm: str | None) -> int:
    """Columns of an expert on one rank below which vLLM pads experts with zeros; 0 where it does not."""
    least = min_expert_width(config.model_type, vllm)
    own = read_optional_integer(config, "min_moe_intermediate_per_partition", MAX_FEATURES) if least else None
    return least if own is None else own


def _check_shardable(config: CheckpointFiles, ranks: Ranks, experts: int, width: int, least: int) -> None:
    """Refuses numbers of ranks over which a layer cannot be sharded.

    vLLM's `verify_with_parallel_config` needs whole attention heads on every tensor-parallel rank, with expert
    parallelism too.

    Args:
        config: the checkpoint's. A remedy shards or copies heads of keys and values evenly, too, and shards other
            layers' widths.
        ranks: vLLM's options of parallelism.
        experts: experts of the layer.
        width: features between the two products.
        least: features between the two products on one rank below which vLLM pads experts with zeros.

    Raises:
        DeploymentError: they cannot share it.
    """
    heads, key_heads = (positive_integer(config, f"num_{each}_heads") for each in ("attention", "key_value"))
    # Shared experts, as wide as one or several routed ones, are sharded with expert parallelism too.
    widths = (width, *(positive_integer(config, name) for name in _SHARDED_WIDTH_FIELDS))
    tp, dp, total = ranks.tp, ranks.dp, ranks.total

    def fits(size: int, copies: int = dp) -> bool:
        if ranks.ep:
            return not heads % size and size * copies <= experts
        built = least * size if pads_experts(width, size, least) else width
        return not heads % size and not built % (size * copies)

    def serves(size: int, copies: int = dp) -> bool:
        copied = not key_heads or not key_heads % size or not size % key_heads
        if not ranks.ep and pads_experts(width, size, least):
            return False
        return fits(size, copies) and copied and not any(each % size for each in widths)

    if fits(tp):
        return
    ways = _fewer_ranks(ranks, serves)
    if total <= experts and not ranks.ep and not heads % tp:
        ways.append("--ep")
    remedy = f"Use {', or '.join(ways)}" if ways else "Use fewer ranks"
    if ranks.ep and total > experts:
        rule = f"expert parallelism over {total} ranks leaves ranks without one of the {experts} experts"
        raise DeploymentError(rule, remedy, config.where)
    if heads % tp:
        raise DeploymentError(_heads_rule(heads, tp), remedy, config.where)
    over = f"{total} ranks" if dp == 1 else f"{total} ranks (TP {tp} x DP {dp})"
    rule = f"tensor parallelism over {over} does not divide the experts' intermediate size {width}"
    raise DeploymentError(f"{rule} ({width} mod {total} = {width % total})", remedy, config.where)


def _fewer_ranks(ranks: Ranks, serves: Callable[[int, int], bool]) -> list[str]:
    """The most ranks below those asked for over which a layer can be sharded: in one of the two directions, or else in
    both.

    Args:
        ranks: vLLM's options of parallelism.
        serves: whether that many tensor- and data-parallel ranks can share the layer.
    """
    sizes, copies = (range(min(count, MAX_RANKS), 0, -1) for count in (ranks.tp, ranks.dp))
    smaller = next((size for size in sizes if size < ranks.tp and serves(size, ranks.dp)), 0)
    fewer = next((count for count in copies if count < ranks.dp and serves(ranks.tp, count)), 0)
    if smaller or fewer:
        return [f"{name} {count}" for name, count in (("TP", smaller), ("DP", fewer)) if count]
    size = next((size for size in sizes if serves(size, 1)), 0)
    count = next((count for count in copies if serves(size, count)), 0) if size else 0
    return [f"TP {size} x DP {count}" if count > 1 else f"TP {size}, without --dp"] if count else []


def _heads_rule(heads: int, tp: int) -> str:
    return f"vLLM refuses {tp} ranks, which do not divide the {heads} attention heads ({heads} mod {tp} = {heads % tp})"


def check_attention_heads(config: CheckpointFiles, ranks: Ranks) -> None:
    """Refuses numbers of tensor-parallel ranks that vLLM refuses for any model, whatever its experts are.

    Raises:
        DeploymentError: they do not divide the attention heads.
    """
    heads, tp = positive_integer(config, "num_attention_heads"), ranks.tp
    if heads % tp:
        fewer = next(size for size in range(min(tp, heads), 0, -1) if not heads % size)
        raise DeploymentError(_heads_rule(heads, tp), f"Use TP {fewer}", config.where)


def _activation(config: CheckpointFiles, index: int) -> Activation:
    model, where, kind = config.model_config, config.where, config.model_type
    word = next((model[name] for name in ACTIVATION_FIELDS if model.get(name) is not None), "silu")
    if not isinstance(word, str):
        raise CheckpointError(f"the activation is {short_repr(word)}, not a name", where=where)
    if not re.fullmatch("[a-z0-9_]{1,64}", word.strip().lower()):
        raise CheckpointError(f"the activation {short_repr(word)!a} is not a name", where=where)
    if kind in UNGATED_MODELS:
        return Activation(activations.canonical_name(word), gated=False)
    from_code = activations.name_for_model_type(kind)
    name = from_code or activations.canonical_name(word)
    alpha, beta, limit = (
        read_float(config, activations.config_fields(name, part), index) for part in ("alpha", "beta", "limit")
    )
    if from_code == "swiglustep" and not limit:  # layers without a limit compute what the config says (Step-3.5)
        from_code, name = "", activations.canonical_name(word)
    known = activations.ACTIVATIONS.get(name)
    if known is not None and known.bounds_outputs:
        return activations.without_empty_bounds(Activation(name, alpha=alpha, beta=beta))
    # A limit of zero switches the clamp of a layer off (Step-3.5), but for a formula that has a limit built in.
    limit = limit if name == "swigluoai" else limit or None
    stated = Activation(name, alpha=alpha, beta=beta, limit=limit, interleaved=kind == "gpt_oss")
    return activations.with_defaults(stated) if from_code or name == "swigluoai" else stated


def _routing(config: CheckpointFiles, index: int, experts: int, top_k: int) -> Routing:
    model, where, kind = config.model_config, config.where, config.model_type
    renormalized = True
    for name in reversed(_RENORMALIZE_FIELDS):  # the first that is set counts, and all are read
        renormalized = read_boolean(model, name, where, renormalized)
    for name in _SCALING_FIELDS:  # a factor that is not finite makes every output so
        read_float(config, (name,), index)
    never = kind in _NON_RENORMALIZING_MODELS or kind.startswith("llama4")
    renormalize = (kind in _RENORMALIZING_MODELS or renormalized) and not never
    corrected = (
        kind in _CORRECTION_BIAS_MODELS
        or (read_string(model, "topk_method", where) != "" and model["topk_method"] == _TOPK_METHODS[0])
        or any([read_boolean(model, name, where, False) for name in _CORRECTION_BIAS_FIELDS])
    )
    grouped, groups, chosen = _groups(config)
    if groups and chosen:
        if are_groups_ignored(groups, experts):
            groups = chosen = None
        else:
            _check_groups(config, grouped, groups, chosen, experts, top_k)
    scoring = _scoring_function(config, grouped if groups and groups > 1 and chosen else "")
    hash_routing = index < (read_optional_integer(config, "num_hash_layers", MAX_EXPERTS) or 0)
    return Routing(
        method=_routing_method(kind, scoring, renormalize, groups, corrected),
        scoring=scoring,
        renormalize=renormalize,
        num_groups=groups,
        top_k_groups=chosen if groups else None,
        # Experts from a table are not chosen by score.
        correction_bias=corrected and not hash_routing,
        apply_router_weight_on_input=kind.startswith("llama4"),
        hash_routing=hash_routing,
    )


def _scoring_function(config: CheckpointFiles, grouped: str) -> str:
    """What makes scores of logits.

    Args:
        config: the checkpoint's.
        grouped: the field by which the layer has several groups of experts; "" where it has none.

    Raises:
        CheckpointError: the first field that is set names one that vLLM has no code for.
    """
    model, where, kind = config.model_config, config.where, config.model_type
    field = next((name for name in _SCORING_FIELDS if read_string(model, name, where)), "")
    if kind in _SIGMOID_MODELS:
        return "sigmoid"
    if not field:
        return _SCORING_IF_UNSET.get(kind, "softmax")
    word: str = model[field]
    # DeepSeek-V4's own code routes without groups.
    known = _SCORING_FUNCTIONS[:2] if grouped and kind not in _SQRTSOFTPLUS_MODELS else _SCORING_FUNCTIONS
    if word not in known:
        among = f" for groups of experts ({grouped})" if word in _SCORING_FUNCTIONS else ""
        rule = f"{field} is {shortened(ascii(word), 60)}, a scoring function that vLLM has no code for{among}"
        raise CheckpointError(rule, f"Write {', '.join(known[:-1])} or {known[-1]}", where)
    return word


def _groups(config: CheckpointFiles) -> tuple[str, int | None, int | None]:
    """The field with the number of groups of experts, that number, and how many of them a token's experts come from."""
    is_grouped = read_boolean(config.model_config, "use_grouped_topk", config.where, False)
    field = "num_expert_group" if is_grouped else "n_group"  # as Kimi's are called
    if config.model_type in _SINGLE_GROUP_MODELS:
        return field, 1, 1
    groups, chosen = (read_optional_integer(config, name, MAX_EXPERTS) or None for name in (field, "topk_group"))
    return field, groups, chosen


def groups_note(config: CheckpointFiles, experts: int) -> str:
    """A note where vLLM does not choose among groups of experts as the config says; "" elsewhere.

    Args:
        config: the checkpoint's.
        experts: of a layer; 0 where the config does not say.
    """
    field, groups, chosen = _groups(config)
    if not experts or not groups or not chosen or not are_groups_ignored(groups, experts):
        return ""
    why = f"{experts} mod {groups} = {experts % groups}" if experts % groups else "one expert each"
    taken = "vLLM chooses among all of them on a GPU, and a server on a CPU fails in its first call"
    return f"{field} {groups} makes no groups of {experts} experts ({why}): {taken}"


def _check_groups(config: CheckpointFiles, field: str, groups: int, chosen: int, experts: int, top_k: int) -> None:
    """Refuses groups among which no server chooses as the config says: more chosen groups than there are fail
    everywhere, and too few give experts of groups that were not chosen.

    Args:
        config: the checkpoint's.
        field: the name of the field with the number of groups.
        groups: groups of experts.
        chosen: groups that a token's experts come from (``topk_group``).
        experts: experts of the layer.
        top_k: experts of a token.
    """
    if chosen > groups:
        rule = f"topk_group {chosen} is more than the {groups} groups of {field}"
    elif top_k > chosen * (experts // groups):
        rule = f"a token chooses {top_k} experts from topk_group {chosen} of {groups} groups of {experts // groups}"
    else:
        return
    raise CheckpointError(rule, f"Correct {field} and topk_group as the model was trained", config.where)


def _routing_method(kind: str, scoring: str, renormalize: bool, groups: int | None, corrected: bool) -> str:
    """vLLM's name for the routing, lower case."""
    if kind in _CUSTOM_ROUTING:
        return _CUSTOM_ROUTING[kind]
    if scoring == "sqrtsoftplus":
        return "deepseekv4" if renormalize else "unspecified"
    if corrected:
        if scoring != "sigmoid" or not renormalize:
            return "unspecified"
        return "deepseekv3" if groups else "minimax2"
    plain = {
        ("sigmoid", True): "sigmoidrenorm",
        ("sigmoid", False): "sigmoid",
        ("softmax", True): "renormalizenaive",
        ("softmax", False): "default",
    }
    return plain.get((scoring, renormalize), "unspecified")


_PLAIN_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""Those for which configs have a word: beside another formula of a model's code, a config's word is no mistake."""


def activation_note(config: CheckpointFiles) -> str:
    """A note where the config's activation is null, or another than that of the model's code; "" elsewhere."""
    model, kind = config.model_config, config.model_type
    fields = [name for name in ACTIVATION_FIELDS if name in model]
    stated = next((name for name in fields if model[name] is not None), "")
    computed = activations.name_for_model_type(kind)
    if not fields or computed not in ("", *_PLAIN_ACTIVATIONS):
        return ""
    if not stated:
        taken = f"taken as {computed or 'silu'}; the code of most models in vLLM refuses to load without one"
        return f"the config's {fields[0]} is null: {taken}"
    if not computed or activations.canonical_name(str(model[stated])) == computed:
        return ""
    rule = f"the config's {stated} is {short_repr(model[stated])}, and experts compute {computed}: vLLM's code for"
    rest = "Where such a model has dense layers or shared experts, vLLM may refuse it"
    return f"{rule} {kind} does not read it for them. {rest}"


def topk_method_note(config: CheckpointFiles) -> str:
    """A note where ``topk_method`` is no word that a model has; "" elsewhere."""
    word = config.model_config.get("topk_method")
    if not isinstance(word, str) or word in _TOPK_METHODS or config.model_type in _CORRECTION_BIAS_MODELS:
        return ""
    said = f"topk_method is {shortened(ascii(word), 60)}, which is none of {', '.join(_TOPK_METHODS)}"
    return f"{said}: vLLM takes it for a router without a correction bias"
