"""What a checkpoint's quantisation config says about the experts of a layer: one small reader a family of configs.

A reader takes the config once and returns a function from a layer's names to one of three answers: a `Scheme`; a
`Foreign` format, which is quantised but none of ours; or None, when the layer's experts are left in the model's dtype.
No reader needs torch or vLLM.

The fields are those that vLLM reads; how each family matches names is written at its reader.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from .errors import CheckpointError
from .expressions import Expression
from .oracle.problem import MX_BLOCK, ActivationPrecision, ActOrder, Scheme

GATED_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
PLAIN_PROJECTIONS = (("up_proj", "down_proj"), ("w1", "w2"))
"""Names of an expert's matrices in checkpoints, by one convention or the other: gate, up, down; and without a gate."""

NUMBERED = frozenset(
    {"deepseek_v4", "deepseek_v41", "kimi_k3", "kimi_linear", "lfm2_moe", "minimax_m2", "minimax_m3",
     "minimax_m3_text", "mixtral", "phimoe"}
)  # fmt: skip
"""Kinds of model (``model_type``) whose checkpoints follow the second convention, by the names that vLLM's loaders of
their weights look for."""

ONLINE = {
    "mxfp8": Scheme("mxfp8", 8, MX_BLOCK, "online", activations="mxfp8"),
    "mxfp4": Scheme("mxfp4", 4, MX_BLOCK, "online", activations="mxfp4"),
}
"""What experts of a checkpoint in 16 bits become while they load, by vLLM's ``--quantization``. vLLM's own methods ask
for kernels that quantise activations too."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A format that vLLM may know and this project does not.

    Attributes:
        format: its name as the checkpoint writes it.
    """

    format: str


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What the experts of one layer are called.

    Attributes:
        modules: names of the experts' module: vLLM's first, then those that checkpoints use for the same.
        projections: names of one expert's matrices; one tuple for each convention.
        own: the convention that the checkpoint follows; empty where nobody knows.
    """

    modules: tuple[str, ...]
    projections: tuple[tuple[str, ...], ...]
    own: tuple[str, ...] = ()

    def matrices(self, convention: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
        """For every name, the full names of an expert's matrices, those of expert 0, by one convention; without one, by
        every convention, and fused."""
        for module in self.modules:
            if not convention:
                yield (f"{module}.gate_up_proj", f"{module}.down_proj")
            for names in (convention,) if convention else self.projections:
                yield tuple(f"{module}.0.{name}" for name in names)

    def match(self, matches: Callable[[str], bool]) -> bool:
        """Whether the predicate holds for the module, or for every matrix of an expert."""
        return any(map(matches, self.modules)) or any(all(map(matches, names)) for names in self.matrices())


Answer = Scheme | Foreign | None
SchemeOf = Callable[[LayerNames], Answer]


OTHER_NAMES = {
    "gptq": ("gptq_marlin", "auto_gptq", "moe_wna16"),
    "awq": ("awq_marlin", "auto_awq", "moe_wna16"),
    "modelopt_mxfp8": ("modelopt",),
    "modelopt_mixed": ("modelopt",),
    "mxfp4": ("gpt_oss_mxfp4",),
    "deepseek_v4_fp8": ("fp8",),
}
"""Names that vLLM's ``--quantization`` also takes for a checkpoint, by its own; not every release has all. Those of
integers are methods of their own there; vLLM goes from the others to the checkpoint's own by itself."""


def in_bytes(scheme_of: SchemeOf) -> SchemeOf:
    """The same answers for ``--quantization moe_wna16``, which loads integers in bytes, outputs first."""

    def of(layer: LayerNames) -> Answer:
        found = scheme_of(layer)
        return dataclasses.replace(found, packing="moe_wna16") if isinstance(found, Scheme) else found

    return of


class _Unnamed:
    """That no entry of a config names a module: it is stored as modules usually are."""


_UNNAMED = _Unnamed()


def _in_common(layer: LayerNames, of: Callable[[str], Answer | _Unnamed], usual: Answer, where: str) -> Answer:
    """What all matrices of a layer's experts are stored as.

    Args:
        layer: the layer's names.
        of: what the config's entries say of a matrix.
        usual: what is true of a matrix that they do not name.
        where: file and field, for messages.

    Raises:
        CheckpointError: entries store matrices of one layer differently.
    """
    conventions = (layer.own,) if layer.own else layer.projections
    for alternatives in zip(*map(layer.matrices, conventions), strict=True):
        mixed = []
        for names in alternatives:
            said = [of(name) for name in names]
            answers = [usual if isinstance(each, _Unnamed) else each for each in said]
            if any(each != answers[0] for each in answers):
                mixed.append(zip(names, answers, strict=True))
            elif not any(isinstance(each, _Unnamed) for each in said):
                return answers[0]
        # Of conventions of which one may be the checkpoint's, an entry that hits names of another means nothing.
        if len(mixed) == len(alternatives):
            words = "; ".join(f"{name.rpartition('.')[2]}: {in_words(answer)}" for name, answer in mixed[0])
            rule = f"the matrices of one layer's experts are stored differently ({words})"
            raise CheckpointError(rule, "vLLM's kernels take one format for a layer", f"{where}, {layer.modules[0]}")
    for names in layer.matrices():
        said = [of(name) for name in names]
        if not isinstance(said[0], _Unnamed) and all(each == said[0] for each in said):
            return said[0]
    return usual


def in_words(answer: Answer) -> str:
    """An answer for a message."""
    if answer is None:
        return "not quantised"
    return answer.format if isinstance(answer, Foreign) else str(answer)


def reader(config: Mapping[str, Any], where: str) -> SchemeOf:
    """The function that says what the experts of a layer are stored as.

    Args:
        config: the checkpoint's ``quantization_config``, or its ``hf_quant_config.json``.
        where: file and field, for messages.

    Raises:
        CheckpointError: an unknown method, or a field that is missing or has a value that it cannot have.
    """
    method = _method(config, where)
    if not method:
        raise CheckpointError("there is no quant_method", f"Known are {', '.join(METHODS)}", where)
    if method not in METHODS:
        rule = f"unknown quant_method {shown(config['quant_method'])}"
        raise CheckpointError(rule, f"Known are {', '.join(METHODS)}", where)
    return METHODS[method](config, where)


def _method(config: Mapping[str, Any], where: str) -> str:
    """The quant_method, with hyphens. hf_quant_config.json, which older ModelOpt releases write, carries none."""
    method = _word(config, "quant_method", where).replace("_", "-")
    producer = config.get("producer")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return "modelopt" if not method and (by_modelopt or isinstance(config.get("quantization"), Mapping)) else method


def vllm_name(config: Mapping[str, Any]) -> str:
    """vLLM's name for the quantisation of a config that `reader` took."""
    method = _method(config, "")
    if not method.startswith("modelopt"):
        if method == "fp8" and config.get("expert_dtype"):
            return "deepseek_v4_fp8"
        return {"auto-round": "inc"}.get(method, method)
    nested = config.get("quantization")
    algo = _word(nested if isinstance(nested, Mapping) else config, "quant_algo", "").upper()
    names = {"MXFP8": "modelopt_mxfp8", "": method.replace("-", "_"), "MIXED_PRECISION": "modelopt_mixed"}
    return names.get(algo, "modelopt_fp4" if "NVFP4" in algo else "modelopt")


# --- ModelOpt, and MiniMax's tag for the same tensors -----------------------------------------------------------------


def _modelopt(config: Mapping[str, Any], where: str) -> SchemeOf:
    """NVIDIA ModelOpt: fields at the top (config.json) or under ``quantization`` (hf_quant_config.json).

    Exclusions are names or wildcards over modules; a name also excludes everything below it.
    """
    nested = config.get("quantization")
    if nested is not None and not isinstance(nested, Mapping):
        raise CheckpointError(f"quantization is {shown(nested)}, not an object", where=where)
    fields = config if nested is None else nested
    method = _word(config, "quant_method", where)
    algo = _word(fields, "quant_algo", where).upper() or ("MXFP8" if method == "modelopt_mxfp8" else "")
    excluded = _excluded(_names(fields, ("ignore", "exclude_modules", "ignored_layers"), where), where)
    if algo == "MIXED_PRECISION":
        return _modelopt_mixed(fields, excluded, where)
    if not algo:
        raise CheckpointError("there is no quant_algo", "ModelOpt writes it beside quant_method", where)
    activations = modelopt_activations(config, where)
    scheme = _modelopt_scheme(algo, activations)
    if isinstance(scheme, Foreign) and algo not in _MODELOPT_OTHERS:
        known = ", ".join(("MXFP8", "MIXED_PRECISION", *_MODELOPT_OTHERS))
        raise CheckpointError(f"unknown quant_algo {shown(algo)}", f"Known are {known}", where)
    return lambda layer: None if layer.match(excluded) else scheme


_MODELOPT_OTHERS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ",
    "W4A16_AWQ", "W4A8_AWQ", "W8A16", "W8A8_SQ_PER_CHANNEL", "MXFP4", "W4A8_MXFP4_FP8",
)  # fmt: skip


def _modelopt_scheme(algo: str, activations: ActivationPrecision) -> Scheme | Foreign:
    if algo == "MXFP8":
        return Scheme("mxfp8", 8, MX_BLOCK, "modelopt", activations=activations)
    return Foreign(algo)


def modelopt_activations(config: Mapping[str, Any], where: str = "quantization_config") -> ActivationPrecision:
    """Precision of activations that a ModelOpt MXFP8 config declares.

    Newer releases of ModelOpt list what they quantised in ``config_groups``; without it, its MXFP8 is W8A8.

    Raises:
        CheckpointError: ``config_groups`` is not what ModelOpt writes.
    """
    groups = _groups(config, where)
    if groups and all("input_activations" in group and group["input_activations"] is None for group in groups):
        return "16bit"
    return "mxfp8"


def _modelopt_mixed(fields: Mapping[str, Any], excluded: Callable[[str], bool], where: str) -> SchemeOf:
    """One algorithm per module; see `MixedAlgorithms`."""
    algorithms = MixedAlgorithms.read(fields.get("quantized_layers"), where)

    def of(layer: LayerNames) -> Answer:
        if layer.match(excluded):
            return None
        algo = algorithms.of(layer)
        return _modelopt_scheme(algo, "mxfp8") if algo else None

    return of


@dataclass(frozen=True, slots=True)
class MixedAlgorithms:
    """Which algorithm ModelOpt's mixed precision gives a layer's experts: by their module's name, by the name of one of
    their matrices, or by a wildcard.

    Attributes:
        algos: algorithm, in upper case, by name.
        below: algorithms of everything below a name.
        wildcards: names with wildcards, as expressions, with their algorithms.
        where: file and field, for messages.
    """

    algos: Mapping[str, str]
    below: Mapping[str, set[str]]
    wildcards: tuple[tuple[re.Pattern[str], str], ...]
    where: str

    @classmethod
    def read(cls, recipes: object, where: str) -> MixedAlgorithms:
        """From the field ``quantized_layers``.

        Raises:
            CheckpointError: it is not what ModelOpt writes.
        """
        if not isinstance(recipes, Mapping) or not recipes:
            raise CheckpointError("quant_algo MIXED_PRECISION needs an object quantized_layers", where=where)
        algos: dict[str, str] = {}
        for name, recipe in recipes.items():
            if not isinstance(recipe, Mapping):
                raise CheckpointError(f"quantized_layers.{name} is {shown(recipe)}, not an object", where=where)
            algos[name] = _word(recipe, "quant_algo", where).upper()
            if not algos[name]:
                raise CheckpointError(f"quantized_layers.{name} has no quant_algo", where=where)
        below: dict[str, set[str]] = {}
        for name, algo in algos.items():
            parts = name.split(".")
            for end in range(1, len(parts)):
                below.setdefault(".".join(parts[:end]), set()).add(algo)
        wildcards = ((re.compile(translate(name)), algo) for name, algo in algos.items() if _is_wildcard(name))
        return cls(algos, below, tuple(wildcards), where)

    def of(self, layer: LayerNames) -> str | None:
        """The layer's algorithm; None when its experts are not quantised.

        Raises:
            CheckpointError: matrices of the layer have different ones.
        """
        found = self._named(layer) or {algo for expression, algo in self.wildcards if layer.match(_matches(expression))}
        if len(found) > 1:
            rule = f"the matrices of one layer have different quant_algo: {', '.join(sorted(found))}"
            raise CheckpointError(rule, where=f"{self.where}, {layer.modules[0]}")
        return found.pop() if found else None

    def _named(self, layer: LayerNames) -> set[str]:
        """Algorithms under the layer's name, below it, or under its matrices' names beside it (``mlp.gate_proj``)."""
        for found in (
            {self.algos[name] for name in layer.modules if name in self.algos},
            {algo for name in layer.modules for algo in self.below.get(name, ())},
        ):
            if found:
                return found
        parents = [name.removesuffix("experts") for name in layer.modules]
        beside = [f"{parent}{name}" for parent in parents for names in layer.projections for name in names]
        return {self.algos[name] for name in beside if name in self.algos}


def _mxfp8(config: Mapping[str, Any], where: str) -> SchemeOf:
    """MiniMax's tag: ModelOpt's tensors, with the exclusions under ``ignored_layers``."""
    return _modelopt({"quant_algo": "MXFP8", **config}, where)


def _other_modelopt(config: Mapping[str, Any], where: str) -> SchemeOf:
    return _modelopt({"quant_algo": "NVFP4", **config}, where)


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _compressed_tensors(config: Mapping[str, Any], where: str) -> SchemeOf:
    """llm-compressor: groups of targets, each with its weights' and inputs' format.

    A name in ``ignore`` or ``targets`` is a module's full name, or a regular expression after ``re:`` that matches from
    the start; a target may also be a class, and ``Linear`` means experts too.
    """
    ignored = _compressed_predicate(_names(config, ("ignore",), where), where)
    groups = []
    for group in _groups(config, where):
        targets = _names(group, ("targets",), where)
        classes = {"Linear", "FusedMoE", "RoutedExperts"} & set(targets)
        predicate = _compressed_predicate(targets, where)
        groups.append((classes, predicate, _compressed_scheme(group, config.get("format"), where)))
    if not groups:
        raise CheckpointError("there are no config_groups", where=where)

    usual = next((scheme for classes, _, scheme in groups if classes), None)

    def of(layer: LayerNames) -> Answer:
        def of_matrix(name: str) -> Answer | _Unnamed:
            names = (name, *layer.modules)
            if any(map(ignored, names)):
                return None
            return next((scheme for _, predicate, scheme in groups if any(map(predicate, names))), _UNNAMED)

        return _in_common(layer, of_matrix, usual, where)

    return of


def _compressed_predicate(names: Iterable[str], where: str) -> Callable[[str], bool]:
    plain = {name for name in names if not name.startswith("re:")}
    expressions = [Expression(name[3:], where) for name in names if name.startswith("re:")]
    return lambda name: name in plain or any(expression.match(name) for expression in expressions)


def _compressed_scheme(group: Mapping[str, Any], common_format: object, where: str) -> Answer:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if weights is None:
        return None
    for name, part in (("weights", weights), ("input_activations", inputs)):
        if part is not None and not isinstance(part, Mapping):
            raise CheckpointError(f"config_groups: {name} is {shown(part)}, not an object", where=where)
    kind, bits = _word(weights, "type", where), _integer(weights, "num_bits", where)
    strategy = _word(weights, "strategy", where)
    layout = str(group.get("format") or common_format or "")
    group_size = -1 if strategy == "channel" else _integer(weights, "group_size", where, default=-1)
    symmetric = _boolean(weights, "symmetric", where, default=True)
    if kind == "float" and strategy == "group" and group_size == MX_BLOCK and symmetric:
        # A float8 of groups of 32 whose scales are no e8m0 is not MX; 4-bit scales have no other type in vLLM.
        if bits == 8 and _is_e8m0(weights.get("scale_dtype"), layout):
            return Scheme("mxfp8", 8, MX_BLOCK, "compressed-tensors", activations=compressed_activations(inputs))
        if bits == 4:
            return Scheme("mxfp4", 4, MX_BLOCK, "compressed-tensors", activations=compressed_activations(inputs))
    if kind == "int" and inputs is None and strategy in ("group", "channel") and layout in COMPRESSED_PACKINGS:
        order = compressed_order(weights.get("actorder"), where)
        return Scheme("wna16", bits, group_size, COMPRESSED_PACKINGS[layout], not symmetric, order)
    words = (layout or "compressed-tensors", f"{bits}-bit {kind or 'of no type'}", f"strategy {strategy or 'unknown'}")
    return Foreign(" ".join(words))


COMPRESSED_PACKINGS = {
    "pack-quantized": "compressed-tensors",
    "int-quantized": "compressed-tensors-int",
    "naive-quantized": "compressed-tensors-int",
}
"""The scheme's word for how integers are packed, by the format that compressed-tensors names."""


def compressed_order(actorder: object, where: str) -> ActOrder:
    """The order of input features that a compressed-tensors config declares (its `ActivationOrdering`).

    Raises:
        CheckpointError: a word that is none of its.
    """
    orders: dict[object, ActOrder] = {None: "none", False: "none", "group": "group", "dynamic": "group", True: "group"}
    orders |= {"static": "static", "weight": "static"}
    word = actorder.lower() if isinstance(actorder, str) else actorder
    found = orders.get(word) if word is None or isinstance(word, str | bool) else None
    if found is None:
        raise CheckpointError(f"config_groups: unknown actorder {shown(actorder)}", where=where)
    return found


def _is_e8m0(scale_dtype: object, layout: str) -> bool:
    # Either "torch.uint8" or "uint8"; the format's name is enough where a release left the type out.
    return str(scale_dtype).removeprefix("torch.") == "uint8" or (scale_dtype is None and layout == "mxfp8-quantized")


def compressed_activations(inputs: Mapping[str, Any] | None) -> ActivationPrecision:
    """Precision of activations that a group of a compressed-tensors config declares.

    Args:
        inputs: its ``input_activations``; None for weights alone.
    """
    if inputs is None:
        return "16bit"
    if inputs.get("num_bits") == 4:
        return "mxfp4"
    return "mxfp8" if inputs.get("group_size") == MX_BLOCK else "fp8"


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def _gptq(config: Mapping[str, Any], where: str) -> SchemeOf:
    """AutoGPTQ and GPTQModel. ``dynamic`` overrides modules by regular expression; ``-:`` before it excludes them. Of
    ``modules_in_block_to_quantize``, where there is such a list, an entry is any part of a name."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise CheckpointError(f"dynamic is {shown(dynamic)}, not an object", where=where)
    rules = [
        (Expression(pattern.removeprefix("-:").removeprefix("+:"), where), pattern.startswith("-:"), override)
        for pattern, override in dynamic.items()
    ]
    quantised = _names(config, ("modules_in_block_to_quantize",), where)
    full_names = frozenset(quantised)
    scheme = gptq_scheme(config, where)

    def of(layer: LayerNames) -> Answer:
        def of_matrix(name: str) -> Answer | _Unnamed:
            names = (name, *layer.modules)
            for expression, excludes, override in rules:
                if any(map(expression.match, names)):
                    if excludes or override is False:
                        return None
                    if isinstance(override, Mapping):
                        return gptq_scheme({**config, **override}, where)
            return _UNNAMED

        listed = layer.match(lambda name: name in full_names or any(part in name for part in quantised))
        return _in_common(layer, of_matrix, scheme if listed or not quantised else None, where)

    return of


def gptq_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """What a GPTQ config says of every module that it names no exception for.

    With ``static_groups`` the groups are of neighbours, whatever the order in which features were quantised; with one
    scale per output row there is no order.
    ``checkpoint_format`` says how zero points are stored: ``gptq_v2`` as they are, everything else less one.

    Raises:
        CheckpointError: a field that is missing or has a value that it cannot have.
    """
    ordered = _boolean(config, "desc_act", where, default=False)
    static = _boolean(config, "static_groups", where, default=False)
    bits, group = _integer(config, "bits", where), _integer(config, "group_size", where)
    order: ActOrder = "none" if not ordered or group == -1 else "static" if static else "group"
    asymmetric = not _boolean(config, "sym", where, default=True)
    stored = _word(config, "checkpoint_format", where) or _word(config, "format", where) or "gptq"
    if stored not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"unknown checkpoint_format {shown(stored)}", "Known are gptq, gptq_v2", where)
    return Scheme("wna16", bits, group, stored, asymmetric, order)


def awq_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """What an AWQ config says of every module that it does not exclude.

    Raises:
        CheckpointError: a field that is missing or has a value that it cannot have.
    """
    bits = _integer(config, "w_bit" if "w_bit" in config else "bits", where)
    group = _integer(config, "q_group_size" if "q_group_size" in config else "group_size", where)
    return Scheme("wna16", bits, group, "awq", zero_points=_boolean(config, "zero_point", where, default=True))


def _awq(config: Mapping[str, Any], where: str) -> SchemeOf:
    """AutoAWQ; an entry of ``modules_to_not_convert`` excludes every module whose name holds it."""
    scheme = awq_scheme(config, where)
    excluded = _names(config, ("modules_to_not_convert",), where)
    return lambda layer: None if layer.match(lambda name: any(part in name for part in excluded)) else scheme


# --- MXFP4 of gpt-oss -------------------------------------------------------------------------------------------------


def _mxfp4(config: Mapping[str, Any], where: str) -> SchemeOf:
    """gpt-oss: only experts are quantised, and ``modules_to_not_convert`` lists everything else."""
    excluded = _excluded(_names(config, ("modules_to_not_convert", "ignored_layers"), where), where)
    scheme = Scheme("mxfp4", 4, MX_BLOCK, "gpt_oss")
    return lambda layer: None if layer.match(excluded) else scheme


def _fp8(config: Mapping[str, Any], where: str) -> SchemeOf:
    """FP8 configs, whose experts are none of ours unless the model stores them in 4 bits, as DeepSeek-V4 does.

    ``expert_dtype`` stands in the model's own config; `checkpoint` puts it here. Activations are FP8 for every layer.
    """
    if _word(config, "expert_dtype", where) != "fp4" or _word(config, "moe_quant_algo", where):
        return _foreign(config, where)
    excluded = _excluded(_names(config, ("modules_to_not_convert", "ignored_layers"), where), where)
    scheme = Scheme("mxfp4", 4, MX_BLOCK, "mxfp4", activations="fp8")
    return lambda layer: None if layer.match(excluded) else scheme


def _quark(config: Mapping[str, Any], where: str) -> SchemeOf:
    """AMD Quark: one entry for all modules, and others by wildcards over names in ``layer_quant_config``."""
    excluded = _excluded(_names(config, ("exclude",), where), where)
    entries = config.get("layer_quant_config") or {}
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"layer_quant_config is {shown(entries)}, not an object", where=where)
    special = [(_matches(re.compile(translate(name))), _quark_answer(entry, where)) for name, entry in entries.items()]
    usual = _quark_answer(config.get("global_quant_config"), where)

    def of(layer: LayerNames) -> Answer:
        if layer.match(excluded):
            return None
        return next((answer for matches, answer in special if layer.match(matches)), usual)

    return of


def _quark_answer(entry: object, where: str) -> Answer:
    """What one entry of a Quark config means for experts."""
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"an entry of Quark's config is {shown(entry)}, not an object", where=where)
    weights, inputs = entry.get("weight"), entry.get("input_tensors")
    if weights is None:
        return None
    parts = [part for part in (weights, inputs) if part is not None]
    if not all(isinstance(part, Mapping) for part in parts):
        return Foreign("quark in several steps")
    kinds = [(_word(part, "dtype", where), _word(part, "qscheme", where), part.get("group_size")) for part in parts]
    mxfp4 = ("fp4", "per_group", MX_BLOCK)
    if kinds == [mxfp4] or (kinds == [mxfp4, mxfp4] and parts[1].get("is_dynamic") is True):
        return Scheme("mxfp4", 4, MX_BLOCK, "quark", activations="mxfp4" if inputs is not None else "16bit")
    return Foreign(f"quark {' with inputs in '.join(kind[0] or 'no dtype' for kind in kinds)}")


def _auto_round(config: Mapping[str, Any], where: str) -> SchemeOf:
    """Intel AutoRound: MX formats, and integers as GPTQ's or AWQ's tools pack them.

    ``extra_config`` gives modules other widths: by full name, by the end of a name, or by an expression found in it, in
    this order. ``block_name_to_quantize`` holds how names of quantised modules begin; others have 16 bits unless an
    entry says how many. vLLM asks for the experts' module alone: what entries say of matrices must be the same.
    """
    bits, data_type = _integer(config, "bits", where), _word(config, "data_type", where) or "int"
    packing = _AUTO_ROUND_INTEGERS.get(_word(config, "packing_format", where) or "auto_round:auto_gptq")
    integers = data_type == "int" and packing is not None and (_integer(config, "act_bits", where, default=16) >= 16)
    if bits not in (4, 8) or not (integers or "mx_fp" in data_type):
        return _foreign(config, where)
    entries = config.get("extra_config") or {}
    if not isinstance(entries, Mapping) or not all(isinstance(entry, Mapping) for entry in entries.values()):
        raise CheckpointError(f"extra_config is {shown(entries)}, not an object of objects", where=where)
    blocks = _auto_round_blocks(config, where)

    def answer(entry: Mapping[str, Any]) -> Answer:
        fields = {**config, **entry}
        width = _integer(fields, "bits", where, default=bits)
        if width >= 16:
            return None
        if integers:
            group = _integer(fields, "group_size", where, default=128)
            zeros = not _boolean(fields, "sym", where, default=True)
            return Scheme("wna16", width, group, str(packing), zeros)
        if width not in (4, 8):
            return Foreign(f"{data_type} of {width} bits")
        if width == 4:
            return Scheme("mxfp4", width, MX_BLOCK, "auto-round", activations="mxfp4")
        return Scheme("mxfp8", width, MX_BLOCK, "auto-round", activations="mxfp8")

    usual = answer({})
    named = {name: answer(entry) for name, entry in entries.items()}
    places = {name: place for place, name in enumerate(named)}
    expressions = [(found, name) for name, found in _auto_round_expressions(named, where) if found is not None]
    below: dict[str, list[str]] = {}
    for name in named:
        head, sign, _ = name.rpartition(".experts.")
        if sign:
            below.setdefault(f"{head}.experts", []).append(name)

    def entry_of(names: Iterable[str]) -> str | None:
        """The entry that speaks of something with these names."""
        names = tuple(names)
        full = next((name for name in names if name in named), None)
        if full is not None:
            return full
        ends = {end for name in names for end in _ends(name) if end in named}
        if ends:
            return min(ends, key=places.__getitem__)
        return next((entry for found, entry in expressions if any(map(found.search, names))), None)

    def of_module(layer: LayerNames, entry: str | None) -> Answer:
        if entry in layer.modules and "bits" not in entries[entry]:
            return None  # vLLM takes an entry under the full name that says no width for one of 16 bits
        inside = not blocks or any(module.startswith(blocks) for module in layer.modules)
        by_name = entry is not None and any(entry in (name, *_ends(name)) for name in layer.modules)
        if not inside and not by_name and "bits" not in entries.get(entry, ()):
            return None
        return usual if entry is None else named[entry]

    def of(layer: LayerNames) -> Answer:
        own = entry_of(layer.modules)
        served = of_module(layer, own)
        by_name = {entry: named[entry] for name in layer.modules for entry in below.get(name, ())}
        conventions = []
        for convention in (layer.own,) if layer.own else layer.projections:
            found = {entry_of(names) for names in zip(*layer.matrices(convention), strict=True)} - {own, None}
            conventions.append({entry: named[entry] for entry in named if entry in found and named[entry] != served})
        # Which names the checkpoint has may be unknown: an expression that finds those of one convention may mean
        # something else, such as the router called gate.
        differing = {entry: said for entry, said in by_name.items() if said != served} or min(conventions, key=len)
        for entry, said in differing.items():
            rule = f"{shown(entry)} stores matrices of experts as {in_words(said)}, their module is {in_words(served)}"
            remedy = "vLLM's INC reads the entries of the experts' module only: give the module an entry of its own"
            raise CheckpointError(rule, remedy, f"{where}.extra_config, {layer.modules[0]}")
        return served

    return of


def _ends(name: str) -> Iterable[str]:
    """Everything that follows a dot of a name."""
    while name:
        name = name.partition(".")[2]
        yield name


def _auto_round_blocks(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """How names of quantised modules begin; nothing where all are. vLLM splits at commas and strips nothing."""
    field = "block_name_to_quantize" if "block_name_to_quantize" in config else "to_quant_block_names"
    stated = config.get(field)
    blocks = stated.split(",") if isinstance(stated, str) else stated or ()
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(block, str) for block in blocks):
        raise CheckpointError(f"{field} is {shown(stated)}, neither names nor a list of names", where=where)
    return tuple(blocks)


def _auto_round_expressions(names: Iterable[str], where: str) -> Iterable[tuple[str, Expression | None]]:
    """The names of entries that vLLM takes for expressions, with the expression; None for one that is broken.

    Raises:
        CheckpointError: an expression that cannot be matched in bounded time.
    """
    for name in names:
        if any(sign in name for sign in "*+?^$()[]{}|\\"):
            try:
                yield name, Expression(name, where)
            except CheckpointError as error:
                if not isinstance(error.__cause__, re.error):
                    raise
                yield name, None


def config_notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """What to know of the answers for a config that `reader` took, one sentence each."""
    if _method(config, where) != "auto-round":
        return
    entries = config.get("extra_config") or {}
    expressions = dict(_auto_round_expressions(entries, where))
    for name in entries:
        if name in expressions and expressions[name] is None:
            yield f"{where}.extra_config: {shown(name)} is no regular expression; vLLM skips it"
        first, last = name.partition(".")[0], name.rpartition(".")[2]
        if name not in expressions and last == "experts" and first not in ("model", "language_model", "backbone"):
            yield f"{where}.extra_config: {shown(name)} is the end of a name, which older releases of vLLM do not read"


_AUTO_ROUND_INTEGERS = {"auto_round:auto_gptq": "gptq", "auto_round:auto_awq": "awq"}
"""The scheme's word for how integers are packed, by AutoRound's."""


def _foreign(config: Mapping[str, Any], where: str) -> SchemeOf:
    method = Foreign(str(config["quant_method"]))
    return lambda layer: method


METHODS: Mapping[str, Callable[[Mapping[str, Any], str], SchemeOf]] = {
    "modelopt": _modelopt,
    "modelopt-mxfp8": _modelopt,
    "modelopt-mixed": _modelopt,
    "modelopt-fp4": _other_modelopt,
    "mxfp8": _mxfp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "gpt-oss-mxfp4": _mxfp4,
    "fp8": _fp8,
    "quark": _quark,
    "auto-round": _auto_round,
    # Formats that vLLM serves and that are none of ours: named, so that the answer is not "unknown".
    "fbgemm-fp8": _foreign,
    "bitsandbytes": _foreign,
    "experts-int8": _foreign,
    "torchao": _foreign,
}


# --- fields -----------------------------------------------------------------------------------------------------------


def _excluded(patterns: Iterable[str], where: str) -> Callable[[str], bool]:
    """A predicate over names: a wildcard must match all of a name; a plain name, itself and everything below it.

    A plain name may be abbreviated from the left (``mlp.experts``). It never matches part of a component:
    ``model.layers.1`` excludes nothing of layer 10, and neither does ``model.layers.1*``, ModelOpt's way of writing a
    module with everything below it.
    """
    plain: set[str] = set()
    expressions: list[Callable[[str], bool]] = []
    for pattern in patterns:
        stem = pattern.removesuffix("*")
        if pattern.startswith("re:"):
            expressions.append(Expression(pattern[3:], where).match)
        elif not _is_wildcard(stem) and stem[-1:].isdigit():
            plain.add(stem)
        elif _is_wildcard(pattern):
            expressions.append(_matches(re.compile(translate(pattern))))
        else:
            plain.add(pattern)

    def matches(name: str) -> bool:
        # Lists of tens of thousands of names are usual: every run of components is looked up, no name is scanned.
        parts = name.split(".")
        runs = (".".join(parts[start:end]) for start in range(len(parts)) for end in range(start + 1, len(parts) + 1))
        return any(run in plain for run in runs) or any(match(name) for match in expressions)

    return matches


def _matches(expression: re.Pattern[str]) -> Callable[[str], bool]:
    return lambda name: expression.match(name) is not None


def _is_wildcard(pattern: str) -> bool:
    return any(sign in pattern for sign in "*?[")


def shown(value: object) -> str:
    """A value for a message: short, whatever a file holds."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _word(config: Mapping[str, Any], name: str, where: str) -> str:
    value = config.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CheckpointError(f"{name} is {shown(value)}, not a word", where=where)
    return value.strip().lower()


def _boolean(config: Mapping[str, Any], name: str, where: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} is {shown(value)}, neither true nor false", where=where)
    return value


def _integer(config: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value < 1 << 20):
        raise CheckpointError(f"{name} is {shown(value)}, not a width or a group size", where=where)
    return value


def _names(config: Mapping[str, Any], fields: Iterable[str], where: str) -> list[str]:
    """The lists of names under any of the fields, joined; lists may be of lists."""
    names: list[str] = []
    for field in fields:
        value = flattened(config.get(field))
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise CheckpointError(f"{field} is {shown(value)}, not a list of names", where=where)
        names += value
    return names


def flattened(value: object) -> object:
    """A list of lists, as GPTQ's tools write the modules of a block, as one list; anything else as it is."""
    if not isinstance(value, list):
        return value
    inner = (flattened(item) for item in value)
    return [name for item in inner for name in (item if isinstance(item, list) else [item])]


def _groups(config: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    if groups is None:
        return []
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise CheckpointError("config_groups is not an object of objects", where=where)
    return list(groups.values())
