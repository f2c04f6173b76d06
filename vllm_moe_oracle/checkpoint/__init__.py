"""A checkpoint's config as problems: which layers have experts, of what shape, stored as what, and what a rank holds.

Only ``config.json`` is read (and ``hf_quant_config.json``, where older ModelOpt releases keep the quantisation), and in
a folder of GPTQ's or AWQ's the biases of experts, of which no config tells: no torch, no vLLM. Fields are read by
families of names, as models spell the same thing differently; what no field says (a model type whose code decides it)
stands in tables of `names` and `problem`. Names of layers are vLLM's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..compat import since
from ..errors import CheckpointError
from ..oracle.problem import EQUAL_EXPERTS, Problem
from ..quantization import ONLINE, OTHER_NAMES, config_notes, in_bytes, reader, vllm_name
from ..quantization.answers import Foreign, SchemeOf
from ..quantization.fields import shown
from .fields import MAX_RANKS, model_type
from .files import Config, read
from .names import PREDICTING, PREDICTORS, compact, moe_layers, predictors
from .problem import dtype_of, problem_of

__all__ = ["Config", "Layers", "layers", "read"]

_KIMI_K3 = "KimiK3ForConditionalGeneration"

# Models whose FP8 config leaves the experts' own type to the model's config.
_FOUR_BIT_EXPERTS = frozenset({"deepseek_v4", "deepseek_v41"})


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


def layers(
    config: Config,
    tp: int = 1,
    expert_parallel: bool = False,
    ragged: bool = False,
    online: str = "",
    vllm: str | None = None,
) -> Layers:
    """The MoE layers of a checkpoint as one rank sees them.

    Args:
        config: from `read`.
        tp: tensor-parallel ranks.
        expert_parallel: the ranks hold different experts instead of parts of each (``--enable-expert-parallel``).
        ragged: the setting `ragged_shards`.
        online: vLLM's ``--quantization``: for a checkpoint in 16 bits a key of `ONLINE`; "" for none.
        vllm: the release of vLLM, which decides what names in a compressed-tensors config mean, and which experts are
            filled up with zeros; None for the newest.

    Raises:
        CheckpointError: no MoE layers, no quantisation, an unknown one, another than `online`, a field that is missing
            or has a value that it cannot have, or a number of ranks that the model cannot be cut into.
    """
    where = str(config.path)
    if tp > MAX_RANKS:
        raise CheckpointError(f"{tp} ranks are more than {MAX_RANKS}, the most that are considered", where=where)
    names = moe_layers(config, vllm)
    scheme_of, method = _quantised(config, online)
    further = predictors(config, vllm)
    problems: list[Problem] = []
    predicting: list[Problem] = []
    unquantised, foreign = [], {}
    for index, layer in (names | further).items():
        answer = scheme_of(layer)
        name = layer.modules[0]
        if answer is None:
            unquantised.append(name)
        elif isinstance(answer, Foreign):
            foreign[name] = answer.format
        else:
            found = predicting if index in further else problems
            found.append(problem_of(config, index, name, answer, tp, expert_parallel, ragged, vllm))
    if foreign and not problems:
        formats = ", ".join(dict.fromkeys(foreign.values()))
        rule = f"its experts are stored as {formats}, which this release does not read"
        raise CheckpointError(rule, "It reads MXFP8, MXFP4 and 16-bit-activation integer formats", where)
    notes = tuple(_notes(config, unquantised, foreign))
    if model_type(config) == EQUAL_EXPERTS and any(problem.scheme.name == "wna16" for problem in problems):
        rule = "vLLM's loader of gpt-oss skips experts under the names of GPTQ, AWQ and compressed-tensors (qweight, "
        notes += (f"{rule}weight_packed): such a checkpoint ends while it loads, as weights that never came",)
    ordered = any(problem.scheme.act_order == "group" and problem.scheme.group_size != -1 for problem in problems)
    if ordered and since.reached_by(since.LINEAR_UNORDERED, vllm):
        rule = f"from {since.LINEAR_UNORDERED} on, vLLM refuses linear layers with act order in groups: a server "
        notes += (f"{rule}starts only if the checkpoint leaves attention unquantised, or without act order",)
    return Layers(tuple(problems), tuple(unquantised), foreign, method, notes, tuple(predicting))


def _quantised(config: Config, online: str) -> tuple[SchemeOf, str]:
    """What each layer's experts are stored as, or become while they load, and vLLM's name for the quantisation."""
    where = str(config.path)
    if config.quantization is None:
        if online in ONLINE and model_type(config) == EQUAL_EXPERTS:
            rule = "vLLM's loader of gpt-oss copies experts in 16 bits past the loader that would quantise them"
            raise CheckpointError(rule, "Serve the checkpoint in MXFP4 that OpenAI publishes", where)
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
    if model_type(config) in _FOUR_BIT_EXPERTS:
        quantization = {"expert_dtype": config.model.get("expert_dtype") or "fp4", **quantization}
    names = config.top.get("architectures")
    if isinstance(names, list) and _KIMI_K3 in names and quantization.get("format") == "mxfp4-pack-quantized":
        # vLLM reads what compressed-tensors stored as a checkpoint that is tagged so.
        quantization = {**quantization, "quant_method": "mxfp4"}
    scheme_of, method = reader(quantization, source), vllm_name(quantization)
    if model_type(config) == "gpt_oss" and method == "mxfp4":  # for which vLLM has a config class of its own
        scheme_of = reader({**quantization, "quant_method": "gpt_oss_mxfp4"}, source)
    others = OTHER_NAMES.get(method, ())
    if model_type(config) != "gpt_oss":
        others = tuple(name for name in others if not name.startswith("gpt_oss"))
    if online not in ("", method, *others):
        rule = f"it is quantised already, as {method}, and --quantization is {shown(online)}"
        also = f"Leave --quantization out, or say {' or '.join(others)}" if others else "Leave --quantization out"
        raise CheckpointError(rule, also, where)
    named = online if method in ("gptq", "awq") and online else method
    return (in_bytes(scheme_of) if online == "moe_wna16" else scheme_of), named


def _notes(config: Config, unquantised: list[str], foreign: Mapping[str, str]) -> Iterable[str]:
    if unquantised:
        yield f"{_count_words(len(unquantised))} unquantised experts, which vLLM serves itself: {compact(unquantised)}"
    for format, count in Counter(foreign.values()).items():
        names = compact([name for name, other in foreign.items() if other == format])
        yield f"{_count_words(count)} experts in {format}, which this release does not read: {names}"
    if config.quantization is not None:
        yield from config_notes(*config.quantization)
    note = dtype_of(config)[1]
    if note:
        yield note
    predicted = next((config.model[name] for name in PREDICTORS if config.model.get(name)), 0)
    if isinstance(predicted, int) and predicted > 0 and model_type(config) not in PREDICTING:
        yield f"layers of the {predicted} multi-token-prediction module(s) are not listed"


def _count_words(count: int) -> str:
    return "1 MoE layer has" if count == 1 else f"{count} MoE layers have"
