"""One layer of a model as a problem."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ..compat.expert_names import least_width
from ..errors import CheckpointError
from ..oracle.planner import in_whole_blocks, in_whole_groups
from ..oracle.problem import EQUAL_EXPERTS, Activation, Parallel, Problem, Routing, Scheme
from ..quantization.fields import shown
from ..quantization.gpt_oss import refuse_packed
from .fields import EXPERTS, MAX_EXPERTS, MAX_WIDTH, UNGATED, model_type, read_count, read_integer, read_real
from .files import Config

TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k",
)  # fmt: skip
WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "intermediate_size")
HIDDEN = ("moe_latent_size", "routed_expert_hidden_size", "hidden_size", "n_embd", "d_model")
ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation")

# Routers that score by sigmoid whatever the config says, routers with a bias for choosing, routers that always or never
# renormalise, and routers with one group of experts: these models' code decides it, no field does.
_SIGMOID = frozenset(
    {"nemotron_h", "nemotron_h_puzzle", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite", "mimo_v2", "mimo_v2_flash",
     "lfm2_moe", "exaone_moe", "hy_v3", "laguna", "llama4", "llama4_text"}
)  # fmt: skip
_CORRECTED = frozenset(
    {"nemotron_h", "nemotron_h_puzzle", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite", "mimo_v2", "mimo_v2_flash",
     "exaone_moe", "ernie4_5_moe", "afmoe", "step3p5"}
)  # fmt: skip
_RENORMALISED = frozenset(
    {"mixtral", "gpt_oss", "minimax_m2", "minimax_m3", "minimax_m3_text", "ernie4_5_moe", "laguna", "gemma4_text"}
)
_NEVER_RENORMALISED = frozenset({"jamba", "phimoe"})
_ONE_GROUP = frozenset({"lfm2_moe"})
_SOFTPLUS = frozenset({"deepseek_v4", "deepseek_v41"})
_CUSTOM = {"llama4": "llama4", "llama4_text": "llama4", "gemma4_text": "custom"}

_RENORMALISING = ("norm_topk_prob", "route_norm", "moe_renormalize", "norm_expert_weight")
_BIASED = ("use_routing_bias", "moe_router_enable_expert_bias", "use_expert_bias")
# Models whose code computes gpt-oss's activation, whatever hidden_act says.
_SWIGLUOAI = frozenset({"gpt_oss", "minimax_m3", "minimax_m3_text"})

# Models whose code clamps SiLU's result in layers with a limit, whatever hidden_act says.
_STEP = frozenset({"step3p5", "step5"})

_GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""Parameters of gpt-oss's activation where a config names the activation and not its parameters."""

_DTYPES = frozenset({"bfloat16", "float16", "float32"})


def problem_of(
    config: Config,
    index: int,
    name: str,
    scheme: Scheme,
    tp: int,
    expert_parallel: bool,
    ragged: bool,
    vllm: str | None = None,
) -> Problem:
    """A layer as one rank sees it.

    Args:
        config: the checkpoint's.
        index: the layer's.
        name: the layer's.
        scheme: what its experts are stored as.
        tp: ranks.
        expert_parallel: they hold different experts.
        ragged: the setting `ragged_shards`.
        vllm: the release of vLLM; None for the newest.

    Raises:
        CheckpointError: a field that is missing or has a value that it cannot have, or ranks that cannot share it.
    """
    model, where = config.model, str(config.path)
    if scheme.packing == "gpt_oss" and model_type(config) != "gpt_oss":
        scheme = replace(scheme, packing="mxfp4")
    if model_type(config) == EQUAL_EXPERTS:
        refuse_packed(scheme, f"{where}, quantization_config, {name}")
    experts = read_integer(model, EXPERTS, where, MAX_EXPERTS, index)
    width = read_integer(model, WIDTH, where, MAX_WIDTH, index)
    # Experts of Nemotron-3-Super and Kimi-K3 work in a latent space that is smaller than the hidden state.
    hidden = read_integer(model, HIDDEN, where, MAX_WIDTH)
    heads = model.get("num_attention_heads")
    heads = heads if isinstance(heads, int) and heads > 0 else 0
    others = [model.get(name) for name in _CUT]
    sizes = [size for size in others if isinstance(size, int) and size > 0]
    key_heads = model.get("num_key_value_heads")
    key_heads = key_heads if isinstance(key_heads, int) and key_heads > 0 else 0
    _check_cut(where, tp, expert_parallel, experts, width, heads, _least_width(config, vllm), key_heads, sizes)
    # The fullest rank: vLLM gives the first ranks one expert more where the split is uneven.
    local = -(-experts // tp) if expert_parallel else experts
    parallel = Parallel(ep=tp) if expert_parallel else Parallel(tp=tp)
    try:
        problem = Problem(
            layer=name,
            scheme=scheme,
            num_experts=experts,
            local_experts=local,
            top_k=read_integer(model, TOP_K, where, MAX_EXPERTS, index),
            hidden_size=hidden,
            intermediate_size=width // parallel.tp,
            activation=_activation(config, index),
            has_bias=model_type(config) == "gpt_oss" or config.expert_biases,
            dtype=dtype_of(config)[0],
            routing=_routing(config, index),
            parallel=parallel,
            equal_experts=model_type(config) == EQUAL_EXPERTS,
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


_CUT = ("intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
"""Widths of layers that vLLM cuts over ranks beside the experts, some of which not every model has."""


def _least_width(config: Config, vllm: str | None) -> int:
    """Columns of an expert on one rank below which vLLM fills experts up with zeros; 0 where it does not."""
    name = "min_moe_intermediate_per_partition"
    least = least_width(model_type(config), vllm)
    if not least or config.model.get(name) is None:
        return least
    return read_integer(config.model, (name,), str(config.path), MAX_WIDTH, least=0)


def _check_cut(
    where: str,
    tp: int,
    expert_parallel: bool,
    experts: int,
    width: int,
    heads: int,
    least: int = 0,
    key_heads: int = 0,
    others: Sequence[int] = (),
) -> None:
    """Refuses ranks that a layer cannot be spread over.

    vLLM's `verify_with_parallel_config` wants whole attention heads on every rank, with expert parallelism too.

    Args:
        where: the file, for messages.
        tp: tensor-parallel ranks.
        expert_parallel: they hold different experts.
        experts: experts of the layer.
        width: features between the two products.
        heads: attention heads of the model; 0 when unknown.
        least: features between the two products on one rank below which vLLM fills experts up with zeros.
        key_heads: heads of keys and values, which a remedy cuts or copies evenly; 0 when unknown.
        others: widths of other layers, which a remedy cuts evenly.
    """
    if expert_parallel and tp > experts:
        rule = f"expert parallelism over {tp} ranks leaves ranks without one of the {experts} experts"
        raise CheckpointError(rule, where=where)

    def fits(size: int) -> bool:
        if expert_parallel:
            return not heads % size and size <= experts
        return not heads % size and not width % size and (size == 1 or width // size >= least)

    def serves(size: int) -> bool:
        copied = not key_heads or not key_heads % size or not size % key_heads
        # Shared experts, as wide as one or several routed ones, are cut with expert parallelism too.
        return fits(size) and copied and not any(other % size for other in (width, *others))

    if fits(tp):
        return
    remedy = f"TP {next(size for size in range(tp - 1, 0, -1) if serves(size))}"
    if heads % tp:
        rule = f"vLLM refuses {tp} ranks, which do not divide the {heads} attention heads ({heads} mod {tp} = "
        raise CheckpointError(f"{rule}{heads % tp})", f"{remedy} would do", where)
    if not width % tp:
        rule = f"vLLM fills experts of fewer than {least} columns a rank up with zeros ({width} over {tp} ranks: "
        also = ", or cut by experts with --ep" if tp <= experts else ""
        raise CheckpointError(f"{rule}{width // tp}), which the loaders here refuse", f"{remedy} would do{also}", where)
    rule = f"tensor parallelism over {tp} ranks does not divide the experts' intermediate size {width}"
    by_experts = ", or cut by experts with --ep" if tp <= experts else ""
    raise CheckpointError(f"{rule} ({width} mod {tp} = {width % tp})", f"{remedy} divides it{by_experts}", where)


def _activation(config: Config, index: int) -> Activation:
    model, where, kind = config.model, str(config.path), model_type(config)
    word = next((model[name] for name in ACTIVATION if model.get(name) is not None), "silu")
    if not isinstance(word, str):
        raise CheckpointError(f"the activation is {shown(word)}, not a name", where=where)
    aliases = {"swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu_squared": "relu2"}
    name = word.strip().lower().removesuffix("_no_mul")
    if not re.fullmatch("[a-z0-9_]+", name):
        raise CheckpointError(f"the activation {shown(word)!a} is not a name", where=where)
    name = aliases.get(name, name).removesuffix("_uninterleave")
    alpha, beta, limit = (
        read_real(model, (f"swiglu_{part}", f"swiglu_{part}s", f"expert_swiglu_{part}_list"), where, index)
        for part in ("alpha", "beta", "limit")
    )
    if kind in UNGATED:
        return Activation(name, gated=False)
    if name == "situ":
        fields = ("activation_situ_beta", "activation_situ_linear_beta")
        alpha, beta = (read_real(model, (field,), where, index) for field in fields)
        return Activation(name, alpha=alpha, beta=beta if beta and beta > 0 else None)
    if kind in _STEP and limit:
        return Activation("swiglustep", limit=limit)
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
    model, where, kind = config.model, str(config.path), model_type(config)
    fields = ("scoring_func", "score_func", "score_function", "moe_router_activation", "moe_router_activation_func")
    word = next((model[name] for name in fields if isinstance(model.get(name), str)), "")
    word = word or ("sqrtsoftplus" if kind in _SOFTPLUS else "softmax")
    if not re.fullmatch("[A-Za-z0-9_-]+", word):
        raise CheckpointError(f"the scoring function {shown(word)!a} is not a name", where=where)
    scoring = "sigmoid" if kind in _SIGMOID else word.lower()
    renormalised = next(
        (model[name] for name in _RENORMALISING if model.get(name) is not None),
        True,
    )
    never = kind in _NEVER_RENORMALISED or kind.startswith("llama4")
    renormalise = (kind in _RENORMALISED or renormalised is not False) and not never
    corrected = (
        kind in _CORRECTED or model.get("topk_method") == "noaux_tc" or any(model.get(name) is True for name in _BIASED)
    )
    grouped = "n_group" if model.get("use_grouped_topk") is not True else "num_expert_group"  # as Kimi's are called
    groups = 1 if kind in _ONE_GROUP else read_count(model, grouped, where)
    chosen = 1 if kind in _ONE_GROUP else read_count(model, "topk_group", where)
    hashed = index < (read_count(model, "num_hash_layers", where) or 0)
    return Routing(
        method=_routing_method(kind, scoring, renormalise, groups, corrected),
        scoring=scoring,
        renormalize=renormalise,
        num_groups=groups,
        top_k_groups=chosen if groups else None,
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


def dtype_of(config: Config) -> tuple[str, str]:
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
