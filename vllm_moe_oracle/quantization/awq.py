"""AWQ, as AutoAWQ writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..core.patterns import MatchBudget, NameParts
from ..core.problem import Scheme
from ..errors import CheckpointError, short_repr
from ..releases import min_versions
from .fields import read_boolean, read_integer, read_names, read_string
from .single_experts import ExpertEntries, same_for_all
from .types import UNLISTED, ExpertFormat, FormatLookup, LayerNames, QuantConfigFormat, Unlisted, shared_format

_UNSUPPORTED_PACKINGS = ("gemv", "gemv_fast", "llm-awq", "marlin")
"""AutoAWQ's and GPTQModel's words for packings that nothing in vLLM reads."""

SUPPORTED_BITS = 4
"""The one width for which vLLM has a type of AWQ's codes, in every supported release."""


def parse_config(config: Mapping[str, Any], where: str) -> FormatLookup:
    """An entry of ``modules_to_not_convert`` excludes every module whose name holds it.

    vLLM looks up the experts' module. Entries for matrices must say the same of all that a layer has; ``gate``, which
    is a part of ``gate_proj``, too, means the router.
    """
    scheme, budget = awq_scheme(config, where), MatchBudget(where)
    names = read_names(config, ("modules_to_not_convert",), where)
    excluded = NameParts(names, budget)
    matrices = NameParts([name for name in names if "experts." in name], budget)
    singles = ExpertEntries(dict.fromkeys(names), {}, budget)

    def matrix_format(name: str) -> ExpertFormat | Unlisted:
        return None if matrices.any_within(name) else UNLISTED

    def lookup(layer: LayerNames) -> ExpertFormat:
        def expert_format(expert: int) -> ExpertFormat:
            if layer.matches(excluded.any_within, expert):
                return None
            return shared_format(layer, matrix_format, scheme, where, expert)

        return same_for_all(layer, expert_format, singles, where)

    return lookup


def notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """Notes for the user about a config that `parse_config` accepted, one sentence each."""
    if config.get("zero_point") is None:
        yield f"{where}: zero_point is not set: taken as true; vLLM refuses to serve without it"
    if read_string(config, "quant_method", where) == "auto_awq":
        yield f"{where}: vLLM before {min_versions.AUTO_AWQ} does not know quant_method auto_awq"


def awq_scheme(config: Mapping[str, Any], where: str) -> Scheme:
    """What an AWQ config says of every module that it does not exclude.

    ``version`` (GPTQModel: ``checkpoint_format`` or ``format``) says for which kernel codes are packed. vLLM reads what
    ``gemm`` has; some words are of those who load the same packing (``exllama``, ``ipex``).

    Raises:
        CheckpointError: a field that is missing or has a value that it cannot have, another width than 4 bits, or
            another packing.
    """
    for name in ("version", "checkpoint_format", "format"):
        if (word := read_string(config, name, where)) in _UNSUPPORTED_PACKINGS:
            rule = f"{name} is {short_repr(word)}: its packing is not read, only that of gemm"
            raise CheckpointError(rule, "Quantize again with version gemm", where)
    field = "w_bit" if "w_bit" in config else "bits"
    bits = read_integer(config, field, where)
    if bits != SUPPORTED_BITS:
        rule = f"{field} is {bits}; vLLM's classes for AWQ refuse any width but {SUPPORTED_BITS} bits"
        raise CheckpointError(rule, f"Quantize again with {SUPPORTED_BITS} bits, or to GPTQ, which has 8 too", where)
    group = read_integer(config, "q_group_size" if "q_group_size" in config else "group_size", where)
    return Scheme("wna16", bits, group, "awq", zero_points=read_boolean(config, "zero_point", where, default=True))


FORMAT = QuantConfigFormat(
    dict.fromkeys(("awq", "awq_marlin", "auto_awq"), parse_config),
    notes,
    aliases={"awq": ("awq_marlin", "auto_awq", "moe_wna16")},
    module_list="modules_to_not_convert",
    expert_biases=True,
    first_releases={("auto_awq", "wna16"): min_versions.AUTO_AWQ},
)
