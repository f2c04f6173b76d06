"""What a checkpoint's quantisation config says about the experts of a layer: one small reader a family of configs.

A reader takes the config once and returns a function from a layer's names to one of three answers: a `Scheme`; a
`Foreign` format, which is quantised but none of ours; or None, when the layer's experts are left in the model's dtype.
No reader needs torch or vLLM.

The fields are those that vLLM reads; how each family matches names is written at its reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import CheckpointError
from ..oracle.problem import MX_BLOCK, Scheme
from . import auto_round, awq, compressed_tensors, fp8, gpt_oss, gptq, modelopt, quark
from .answers import Answer, LayerNames, SchemeOf, foreign_reader
from .fields import read_word, shown

METHODS: Mapping[str, Callable[[Mapping[str, Any], str], SchemeOf]] = {
    "modelopt": modelopt.reader,
    "modelopt-mxfp8": modelopt.reader,
    "modelopt-mixed": modelopt.reader,
    "modelopt-fp4": modelopt.fp4_reader,
    "mxfp8": modelopt.minimax_reader,
    "compressed-tensors": compressed_tensors.reader,
    "gptq": gptq.reader,
    "awq": awq.reader,
    "mxfp4": gpt_oss.reader,
    "gpt-oss-mxfp4": gpt_oss.own_reader,
    "fp8": fp8.reader,
    "quark": quark.reader,
    "auto-round": auto_round.reader,
    # Formats that vLLM serves and that are none of ours: named, so that the answer is not "unknown".
    "fbgemm-fp8": foreign_reader,
    "bitsandbytes": foreign_reader,
    "experts-int8": foreign_reader,
    "torchao": foreign_reader,
}
"""The reader of each quant_method, with hyphens."""

ONLINE = {
    "mxfp8": Scheme("mxfp8", 8, MX_BLOCK, "online", activations="mxfp8"),
    "mxfp4": Scheme("mxfp4", 4, MX_BLOCK, "online", activations="mxfp4"),
}
"""What experts of a checkpoint in 16 bits become while they load, by vLLM's ``--quantization``. vLLM's own methods ask
for kernels that quantise activations too."""


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
    method = read_word(config, "quant_method", where).replace("_", "-")
    producer = config.get("producer")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return "modelopt" if not method and (by_modelopt or isinstance(config.get("quantization"), Mapping)) else method


def config_notes(config: Mapping[str, Any], where: str) -> Iterable[str]:
    """What to know of the answers for a config that `reader` took, one sentence each."""
    families = {
        "auto-round": auto_round,
        "awq": awq,
        "compressed-tensors": compressed_tensors,
        "gptq": gptq,
        "quark": quark,
    }
    method = _method(config, where)
    if (family := modelopt if method in modelopt.METHODS else families.get(method)) is not None:
        yield from family.notes(config, where)


def vllm_name(config: Mapping[str, Any]) -> str:
    """vLLM's name for the quantisation of a config that `reader` took."""
    method = _method(config, "")
    if not method.startswith("modelopt"):
        if method == "fp8" and config.get("expert_dtype"):
            return "deepseek_v4_fp8"
        return {"auto-round": "inc"}.get(method, method)
    nested = config.get("quantization")
    algo = read_word(nested if isinstance(nested, Mapping) else config, "quant_algo", "").upper()
    names = {"MXFP8": "modelopt_mxfp8", "": method.replace("-", "_"), "MIXED_PRECISION": "modelopt_mixed"}
    return names.get(algo, "modelopt_fp4" if "NVFP4" in algo else "modelopt")
