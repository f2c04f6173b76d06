"""Golden decisions for integer weights: formats, ranks, compute capabilities; beside each, what stock vLLM does.

Stock's choice is computed from its sources, not copied: `select_wna16_moe_backend` and
the expert classes that it asks run from the sources, on a platform of the capability in question on which FlashInfer
and Humming are installed. What stock's config classes do before it is asked (GPTQ and AWQ fall back to MoeWNA16 where
Marlin does not fit, act order is refused), and what its methods refuse afterwards, stands here in words.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.lib.cases import int_scheme, problem
from tests.lib.golden_decisions import RELEASE, GoldenTable, StockInstall, stock_config, stock_install
from tests.lib.stock_code import QUANTIZATION, load
from vllm_moe_oracle.core.problem import Problem, Routing, Scheme

TP = (1, 2, 4, 8)


_QWEN3 = (128, 8, 2048, 768)
# experts, top-k, hidden, intermediate of the whole layer; what the checkpoint holds; expert biases.
MODELS: dict[str, tuple[tuple[int, int, int, int], Scheme, bool]] = {
    "Qwen3-30B-A3B int4 g128": (_QWEN3, int_scheme("compressed-tensors", 4, 128), False),
    "Qwen3-30B-A3B int4 g128, GPTQ": (_QWEN3, int_scheme("gptq", 4, 128), False),
    "Qwen3-30B-A3B int8 g128, GPTQ": (_QWEN3, int_scheme("gptq", 8, 128), False),
    "Qwen3-30B-A3B int4 per channel": (_QWEN3, int_scheme("compressed-tensors", 4, -1), False),
    "Qwen3-30B-A3B int8 per channel": (_QWEN3, int_scheme("compressed-tensors", 8, -1), False),
    "Qwen3-30B-A3B int4 g128 with zero points, AWQ": (_QWEN3, int_scheme("awq", 4, 128, zeros=True), False),
    "Qwen3-30B-A3B int4 g128 with zero points": (_QWEN3, int_scheme("compressed-tensors", 4, 128, zeros=True), False),
    "Qwen3-30B-A3B int4 g128, MoeWNA16": (_QWEN3, int_scheme("moe_wna16", 4, 128), False),
    "Qwen3-30B-A3B int8 g128 with zero points, MoeWNA16": (_QWEN3, int_scheme("moe_wna16", 8, 128, zeros=True), False),
    "Qwen3-30B-A3B int4 g128 with act order, GPTQ": (_QWEN3, int_scheme("gptq", 4, 128, order="group"), False),
    "Qwen3-30B-A3B int4 g128 with biases, GPTQ": (_QWEN3, int_scheme("gptq", 4, 128), True),
    "Kimi-K2 int4 g32": ((384, 8, 7168, 2048), int_scheme("compressed-tensors", 4, 32), False),
}
DIFFERENCES = {
    "cut": (
        "stock chooses a kernel and raises when the layer's weights are created: a scale group would be cut between "
        "ranks; here nothing is chosen and every candidate says so"
    ),
    "packing": (
        "stock forbids Marlin for MoeWNA16 checkpoints, and for those that fall back to it; how a file packs is "
        "nothing to the kernel, and stock prefers it everywhere else"
    ),
    "channel": "stock chooses this kernel and refuses one scale a row in its method; the kernel takes it",
    "zero points": "stock's name for such weights is not among those that Humming's class knows; its kernels are",
    "act order": (
        "stock refuses act order as a whole; here this project's kernels serve the layer on sm_90 where ranks hold "
        "whole groups; elsewhere nothing is chosen, and the error offers the emulation by name"
    ),
}
"""Why a decision is not stock's."""


def layer(model: str, tp: int) -> Problem:
    """The model's MoE layer on one of `tp` ranks."""
    (experts, top_k, hidden, inner), scheme, bias = MODELS[model]
    return problem(
        scheme=scheme, experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner // tp, has_bias=bias,
        routing=Routing("renormalize"), tp=tp,
    )  # fmt: skip


class _ScalarType:
    """vLLM's type of an unsigned integer code."""

    def __init__(self, size_bits: int) -> None:
        self.size_bits = size_bits

    def is_integer(self) -> bool:
        """It is."""
        return True

    def is_signed(self) -> bool:
        """Never."""
        return False


_INT4, _INT8, _UINT4 = _ScalarType(4), _ScalarType(8), _ScalarType(4)


def _key(dtype: Any, group: int) -> Any:
    scale = SimpleNamespace(group_shape=SimpleNamespace(row=1, col=group))
    return SimpleNamespace(dtype=dtype, scale=scale, scale2=None)


_KEYS = {
    "kInt4Static": _key(_INT4, -1), "kInt4Static32": _key(_INT4, 32), "kInt4StaticAsym": _key(_UINT4, -1),
    "kInt4Static32Asym": _key(_UINT4, 32), "kInt8Static": _key(_INT8, -1),
}  # fmt: skip


def _asked(scheme: Scheme) -> Any:
    """The key by which stock's method for the packing asks."""
    if scheme.bits == 8:
        return _KEYS["kInt8Static"]
    if scheme.packing == "compressed-tensors":
        return _KEYS[f"kInt4Static{'32' if scheme.group_size == 32 else ''}{'Asym' if scheme.zero_points else ''}"]
    return _KEYS["kInt4Static"]


_CONFIGS = {name: type(name, (SimpleNamespace,), {}) for name in
            ("AutoAWQConfig", "AutoGPTQConfig", "MoeWNA16Config", "QuantizationArgs")}  # fmt: skip
_OF_PACKING = {"awq": "AutoAWQConfig", "gptq": "AutoGPTQConfig", "moe_wna16": "MoeWNA16Config",
               "compressed-tensors": "QuantizationArgs"}  # fmt: skip


@cache
def _oracle(capability: int, release: str) -> tuple[StockInstall, dict[str, Any]]:
    """An install of a release, and the names of its file that lists the kernels."""
    install = stock_install(capability, release)
    marlin = load(
        release, f"{QUANTIZATION}/utils/marlin_utils.py", current_platform=install.platform,
        round_up=lambda a, b: -(-a // b) * b,
    )  # fmt: skip
    return install, install.oracle(
        "int_wna16", **_KEYS, **_CONFIGS, ScalarType=_ScalarType, INT4_DTYPE=_INT4, INT8_DTYPE=_INT8,
        GroupShape=SimpleNamespace(PER_CHANNEL=None),
        check_moe_marlin_supports_config=marlin["check_moe_marlin_supports_config"],
        # VLLM_USE_FLASHINFER_MOE_INT4, which is off.
        is_flashinfer_mxint4_moe_available=lambda: False,
    )  # fmt: skip


def stock(layer: Problem, capability: int, release: str = RELEASE) -> dict[str, str]:
    """What stock does for the layer: the backend and the class that it chooses, or what it raises."""
    scheme = layer.scheme
    if scheme.act_order == "group":
        return {
            "backend": "",
            "class": "",
            "raises": "ValueError: GPTQ group activation ordering (desc_act=True) is no longer supported",
        }
    install, oracle = _oracle(capability, release)
    install.set_batch_invariant(layer)
    fits = oracle["check_moe_marlin_supports_config"]
    config = stock_config(layer, install.activation(layer.activation), install.methods.Renormalize)
    name, padding, bias = _OF_PACKING[scheme.packing], True, scheme.packing in ("awq", "gptq")
    result = {}
    if scheme.packing in ("awq", "gptq") and not fits(config, scheme.group_size, True):
        result["instead"] = "falls back to MoeWNA16"
        name = "MoeWNA16Config"
    if name == "MoeWNA16Config":
        padding = bias = False
    kind = _CONFIGS[name](group_size=None if scheme.group_size == -1 else scheme.group_size, actorder=None,
                          desc_act=False, strategy="group")  # fmt: skip
    if name in ("AutoAWQConfig", "AutoGPTQConfig"):
        kind.group_size = scheme.group_size
    try:
        select = oracle["select_wna16_moe_backend"]
        chosen, found = select(config, _asked(scheme), kind, scheme.zero_points, bias, padding)
    except NotImplementedError as error:
        return {**result, "backend": "", "class": "", "raises": f"NotImplementedError: {error}"}
    result |= {"backend": chosen.value, "class": found.__name__}
    channel = scheme.packing == "compressed-tensors" and scheme.group_size == -1
    if channel and "Marlin" not in found.__name__:
        # CompressedTensorsWNA16MoEMethod.__init__: for what is not Marlin.
        result["raises"] = 'AssertionError: weight_quant.strategy == "group"'
    if scheme.packing == "compressed-tensors" and layer.intermediate_size % max(scheme.group_size, 1):
        # CompressedTensorsWNA16MoEMethod.create_weights.
        result["raises"] = "its method needs whole groups"
    if layer.has_bias and result.get("instead"):
        result["drops"] = "expert biases, without a word"
    return result


def difference(row: dict[str, Any]) -> str:
    """The key of `DIFFERENCES` for a row whose decision is not stock's; "" where it is, ``unknown`` where none fits."""
    ours, found = row["ours"], row["stock"]
    raises = found.get("raises", "")
    if ours["class"] == found["class"] and not raises:
        return ""
    if found["class"] and ours["class"] == found["class"]:
        return "channel"
    kinds = {
        ("", "ValueError: GPTQ"): "act order",
        (found["class"], "its method needs whole groups"): "cut",
        ("TritonWNA16Experts", ""): "packing",
        ("MarlinExperts", ""): "zero points",
    }
    return next(
        (
            kind
            for (class_name, start), kind in kinds.items()
            if found["class"] == class_name and raises.startswith(start) and bool(start) == bool(raises)
        ),
        "unknown",
    )


GOLDEN = GoldenTable(
    "wna16", MODELS, "tp", TP, layer, stock, difference, DIFFERENCES,
    {"schemes": {model: str(scheme) for model, (_, scheme, _) in MODELS.items()}},
)  # fmt: skip
