"""Quantization configs of checkpoints: how the experts of each layer are stored.

`parse_config` reads a config once and returns a function from a layer's names to the format of its experts: a `Scheme`;
an `UnsupportedFormat`; or None where the experts are in the model's own dtype. Each module reads one family of configs,
matches module names as vLLM does for it, and declares itself as `FORMAT`. Nothing here needs torch or vLLM.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..core.problem import Scheme, mx_scheme
from ..errors import CheckpointError, DeploymentError, did_you_mean, short_repr
from ..releases import min_versions
from .fields import read_names, read_string, reject_nulls
from .types import ExpertFormat, FormatLookup, LayerNames, QuantConfigFormat
from .unsupported import UNSUPPORTED_ONLINE as UNSUPPORTED_ONLINE
from .unsupported import parse_unsupported


def _formats() -> Iterator[QuantConfigFormat]:
    """The formats that the modules of this package declare, by the modules' names."""
    for module in pkgutil.iter_modules(__path__):
        declared = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FORMAT", None)
        if isinstance(declared, QuantConfigFormat):
            yield declared


_BY_METHOD = {method: each for each in _formats() for method in each.parsers}
"""The format of each ``quant_method``, as vLLM spells it."""

_SPELLINGS = {method.replace("_", "-"): method for method in _BY_METHOD}
"""Each of these, by its spelling with hyphens."""

METHOD_ALIASES = {name: aliases for each in _BY_METHOD.values() for name, aliases in each.aliases.items()}
"""Names that vLLM's ``--quantization`` takes for a checkpoint besides vLLM's own name for it."""

FIRST_RELEASES = {
    **{case: release for each in _formats() for case, release in each.first_releases.items()},
    ("online", "mxfp4"): min_versions.ONLINE_MXFP4,
}
"""The first release of vLLM that loads experts of a scheme, by vLLM's name for the quantization (``online`` where it
quantizes at loading) and the scheme's name. What is not listed every supported release loads."""

ONLINE_SCHEMES = {
    "mxfp8": mx_scheme("mxfp8", "online", "mxfp8"),
    "mxfp4": mx_scheme("mxfp4", "online", "mxfp4"),
}
"""What the experts of a checkpoint in 16 bits become at loading, by vLLM's ``--quantization``. vLLM's own methods ask
for kernels that quantize activations too."""


def with_moe_wna16_packing(lookup: FormatLookup) -> FormatLookup:
    """The same formats for ``--quantization moe_wna16``, which loads integers as bytes, outputs first."""

    def repacked(layer: LayerNames) -> ExpertFormat:
        found = lookup(layer)
        return dataclasses.replace(found, packing="moe_wna16") if isinstance(found, Scheme) else found

    return repacked


_SCHEME_WORDS = {"mxfp8": "MXFP8", "mxfp4": "MXFP4", "wna16": "integers"}


def check_release(method: str, found: ExpertFormat, vllm: str | None, where: str) -> None:
    """Refuses experts that a release of vLLM does not load yet; see `FIRST_RELEASES` and
    `UnsupportedFormat.first_release`.

    Args:
        method: vLLM's name for the quantization.
        found: how the experts are stored.
        vllm: the release, as `min_versions.vllm_at_least` takes it.
        where: file and field, for messages.

    Raises:
        DeploymentError: it does not.
    """
    online = isinstance(found, Scheme) and found.packing == "online"
    if isinstance(found, Scheme):
        first = FIRST_RELEASES.get(("online" if online else method, found.name), "")
        words = _SCHEME_WORDS[found.name]
    else:
        first, words = ("", "") if found is None else (found.first_release, found.format)
    if not first or min_versions.vllm_at_least(vllm, minimum=first):
        return
    does = f"quantizes to {words} at loading" if online else f"loads experts in {words} of the quantization {method}"
    remedy = f"Serve it with vLLM {first} or newer{', or say mxfp8' * online}"
    raise DeploymentError(f"vLLM {does} from {first} on", remedy, where)


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """Parses a quantization config into a function that gives the format of a layer's experts.

    Args:
        config: the checkpoint's ``quantization_config``, or its ``hf_quant_config.json``.
        where: file and field, for messages.

    Raises:
        CheckpointError: no ``quant_method``, or one that checkpoints do not have; a field that is missing or has an
            invalid value.
    """
    method = _quant_method(config, where)
    reject_nulls(config, ("producer",), where)
    if method in _BY_METHOD:
        _check_spelling(config, method, where)
        return _BY_METHOD[method].parsers[method](config, where)
    remedy = f"{did_you_mean(method, _BY_METHOD)}Known are {', '.join(_BY_METHOD)}"
    if not method:
        raise CheckpointError("there is no quant_method", remedy, where)
    # Not unsupported: vLLM would take the class that this package replaces.
    if method == "moe-wna16":
        rule = "quant_method is moe_wna16, whose class in vLLM loads checkpoints of gptq and awq only"
        raise CheckpointError(rule, remedy, where)
    return parse_unsupported(config, where)


def _quant_method(config: Mapping[str, Any], where: str) -> str:
    """The ``quant_method`` as vLLM spells it; one that is not known, with hyphens. The hf_quant_config.json of older
    ModelOpt releases has none: vLLM knows it by its producer, and by ``quantization``."""
    method = _spelled(read_string(config, "quant_method", where))
    producer = config.get("producer")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return "modelopt" if not method and by_modelopt and isinstance(config.get("quantization"), Mapping) else method


def _spelled(word: str) -> str:
    """A ``quant_method`` in lower case as vLLM spells it; one that is not known, with hyphens."""
    word = word.replace("_", "-")
    return _SPELLINGS.get(word, word)


def _check_spelling(config: Mapping[str, Any], method: str, where: str) -> None:
    """Refuses a ``quant_method`` that vLLM does not take for the method. It ignores case, takes every word for ModelOpt
    that begins so, and an underscore in compressed-tensors."""
    word = str(config.get("quant_method") or method).lower()
    if word.replace("compressed_tensors", "compressed-tensors") != method and not word.startswith("modelopt"):
        rule = f"quant_method is {short_repr(word)}, which vLLM does not know: a server does not start"
        raise CheckpointError(rule, f"Write {method}", where)


def _unknown_notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    named = f"quant_method {short_repr(config['quant_method'])} is unknown here"
    hint = did_you_mean(_quant_method(config, where), _BY_METHOD)
    yield f"{named}: a server needs a vLLM, or a plugin, that has it. {hint}".rstrip(". ")


_UNKNOWN = QuantConfigFormat({}, _unknown_notes)
"""Of a ``quant_method`` that no format declares."""


def _format(config: Mapping[str, Any], where: str) -> QuantConfigFormat:
    return _BY_METHOD.get(_quant_method(config, where), _UNKNOWN)


def config_notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """What a user should know about a config that `parse_config` accepted, one sentence each.

    Of notes that differ only in a quoted name, the first `MAX_SIMILAR_NOTES` are given, and how many more there are.
    """
    return _shortened_notes(_format(config, where).notes(config, where))


MAX_SIMILAR_NOTES = 5
"""Notes that differ in a quoted name alone, of which more are counted instead."""
_MAX_COUNTED = 10_000
"""Notes after which no more are counted."""


def _shortened_notes(notes: Iterable[str]) -> Iterable[str]:
    """The first notes of each kind; of its others their number, exact up to `_MAX_COUNTED` notes in all."""
    counts: Counter[str] = Counter()
    for note in itertools.islice(notes, _MAX_COUNTED):
        kind = re.sub(r"'[^']*'|\"[^\"]*\"", "", note)
        counts[kind] += 1
        if counts[kind] <= MAX_SIMILAR_NOTES:
            yield note
    for kind, count in counts.items():
        if count > MAX_SIMILAR_NOTES:
            more = f"{count - MAX_SIMILAR_NOTES}{' or more' if counts.total() == _MAX_COUNTED else ''}"
            yield f"{more} other names: {' '.join(kind.split())}"


def has_expert_biases(config: Mapping[str, Any]) -> bool:
    """Whether experts of a config's format may have biases that only the checkpoint's tensors declare."""
    method = _spelled(str(config.get("quant_method")).lower())
    return _BY_METHOD.get(method, _UNKNOWN).expert_biases


def takes_modules_from_files(config: Mapping[str, Any], where: str, vllm_method: str) -> bool:
    """Whether vLLM takes modules to be quantized exactly if their tensors are, since the config names none.

    Args:
        config: that `parse_config` accepted.
        where: file and field, for messages.
        vllm_method: vLLM's name of the quantization. The class of ``moe_wna16`` reads the config alone.
    """
    field = _format(config, where).module_list
    return bool(field) and vllm_method != "moe_wna16" and not read_names(config, (field,), where)


def refused_linear(config: Mapping[str, Any], where: str) -> str:
    """Why vLLM refuses the linear layers of a model, as far as a config says that `parse_config` accepted; "" where it
    does not."""
    return _format(config, where).refused_linear(config, where)


def vllm_method_name(config: Mapping[str, Any]) -> str:
    """vLLM's name for the quantization of a config that `parse_config` accepted."""
    return _format(config, "").vllm_method(config, _quant_method(config, ""))
