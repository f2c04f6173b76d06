"""Golden decisions for MXFP4: models, ranks, compute capabilities; beside each, what stock vLLM does.

Stock's choice is computed from its sources, not copied: `select_mxfp4_moe_backend` (for
gpt-oss) and `select_deepseek_v4_mxfp4_moe_backend` (for every other model) run from the sources, with the expert
classes that they ask, on a platform of the capability in question on which FlashInfer, Humming, DeepGEMM and
triton_kernels are installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.lib.cases import problem
from tests.lib.golden_decisions import RELEASE, GoldenTable, QuantKey, StockInstall, stock_config, stock_install
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, exists
from vllm_moe_oracle.core.problem import Activation, ActivationPrecision, Problem, Routing, Scheme
from vllm_moe_oracle.core.sharding import shard_by_blocks

_OAI = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, interleaved=True)
_CLAMPED = Activation("silu", limit=10.0)
_DEEPSEEK = (256, 6, 4096, 2048, _CLAMPED, False, "deepseekv4", "mxfp4")
_QWEN3 = (128, 8, 2048, 768, Activation("silu"), False, "renormalize")
# experts, top-k, hidden, intermediate of the whole layer, activation, biases, routing, packing, declared activations.
MODELS: dict[str, tuple[int, int, int, int, Activation, bool, str, str, ActivationPrecision]] = {
    "gpt-oss-20b": (32, 4, 2880, 2880, _OAI, True, "renormalize", "gpt_oss", "16bit"),
    "gpt-oss-120b": (128, 4, 2880, 2880, _OAI, True, "renormalize", "gpt_oss", "16bit"),
    "a model with halves and clamped SiLU": (*_DEEPSEEK, "16bit"),
    "DeepSeek-V4-Flash, within an FP8 checkpoint": (*_DEEPSEEK, "fp8"),
    "Qwen3-30B-A3B by llm-compressor, weights alone": (*_QWEN3, "compressed-tensors", "16bit"),
    "Qwen3-30B-A3B by llm-compressor, W4A4": (*_QWEN3, "compressed-tensors", "mxfp4"),
    "Qwen3-30B-A3B by Quark, W4A4": (*_QWEN3, "quark", "mxfp4"),
    "Qwen3-30B-A3B made while it loads": (*_QWEN3, "online", "mxfp4"),
}
RANKS = {"TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "TP8": (8, 1), "EP8": (1, 8)}
DIFFERENCES = {
    "unasked": (
        "stock quantizes activations to 8 bits, which neither the checkpoint nor the user asked for; here the first "
        "kernel that leaves them alone is taken, and allow_activation_quantization takes stock's"
    ),
    "unasked, no backend": (
        "stock quantizes activations to 4 bits, which neither the checkpoint nor the user asked for, by a kernel that "
        "is none of those here (vLLM's own over CUTLASS); the first that leaves them alone is taken"
    ),
    "no backend": (
        "stock's kernel with activations in MXFP4 (vLLM's own over CUTLASS) is none of those here; where it can load "
        "the layer, stock gets it (none), and elsewhere the first that leaves them in 16 bits is taken"
    ),
    "emulated": (
        "stock emulates what no kernel does with activations in MXFP4; here the first kernel that leaves them in "
        "16 bits is taken, which is more exact than what is declared"
    ),
}
"""Why a decision is not stock's."""


def layer(model: str, ranks: str) -> Problem:
    """The model's MoE layer on one rank, as its method sees it."""
    experts, top_k, hidden, inner, activation, bias, routing, packing, declared = MODELS[model]
    tp, ep = RANKS[ranks]
    whole = problem(
        scheme=Scheme("mxfp4", 4, 32, packing, activations=declared), num_experts=experts, local_experts=experts // ep,
        top_k=top_k, hidden_size=hidden, intermediate_size=inner // tp, activation=activation, has_bias=bias,
        routing=Routing(routing), tp=tp, ep=ep,
    )  # fmt: skip
    return shard_by_blocks(whole) if activation.interleaved else whole


CONSUMED = {"": "16bit", "kMxfp8Dynamic": "mxfp8", "kFp8Dynamic128Sym": "fp8"}
"""Our words for the types to which stock's classes quantize activations."""

_METHODS = {"renormalize": "Renormalize", "deepseekv4": "DeepseekV4"}
_KEYS = (
    "kMxfp4Static", "kMxfp4Dynamic", "kMxfp8Dynamic", "kFp8Dynamic128Sym", "kFp8StaticTensorSym", "kInt4Static32",
    "kMxfp8Static",
)  # fmt: skip


@cache
def _oracle(capability: int, release: str) -> tuple[StockInstall, dict[str, Any]]:
    """An install of a release, and the names of its file that lists the kernels."""
    install = stock_install(capability, release, VLLM_B12X_MOE_FP4_FORCE_A16=False)
    given: dict[str, Any] = {
        **QuantKey.named(*_KEYS),
        "has_flashinfer": lambda: True, "has_flashinfer_cutlass_fused_moe": lambda: True,
        "has_triton_kernels": lambda: True, "get_triton_kernels_version": lambda: None,
        "ops": SimpleNamespace(mxfp4_experts_quant_supported=lambda capability: 100 <= capability < 120),
        # `CudaPlatform.support_deep_gemm` of releases from 0.24 on.
        "is_deep_gemm_supported": lambda: capability == 90 or capability // 10 in (10, 12),
        "triton_kernels_version": None,
    }  # fmt: skip
    cutlass = install.expert_class(f"{FUSED_MOE}/experts/cutlass_moe", "CutlassExpertsMxfp4", **given)
    oracle = install.oracle("mxfp4", CutlassExpertsMxfp4=cutlass, **given)
    oracle["_user_moe_activation_override"] = lambda: None
    return install, oracle


def stock(layer: Problem, capability: int, release: str = RELEASE) -> dict[str, str]:
    """What stock does for the layer: the backend and the class that it chooses, or what it raises. Nothing where the
    release has no such layers."""
    if layer.scheme.packing == "online" and not exists(release, f"{QUANTIZATION}/online/mxfp4.py"):
        return {}
    install, oracle = _oracle(capability, release)
    install.set_batch_invariant(layer)
    config = stock_config(
        layer, install.activation(layer.activation), getattr(install.methods, _METHODS[layer.routing.method])
    )
    if layer.scheme.packing == "compressed-tensors":
        return _compressed_tensors(layer, oracle, config, install)
    try:
        if layer.scheme.packing == "mxfp4":
            chosen, found = oracle["select_deepseek_v4_mxfp4_moe_backend"](config)
        else:
            declared = oracle["kMxfp4Dynamic"] if layer.scheme.activations == "mxfp4" else None
            chosen, found = oracle["select_mxfp4_moe_backend"](config, declared)
    except NotImplementedError as error:
        return {"backend": "", "class": "", "raises": f"NotImplementedError: {error}"}
    result = {"backend": chosen.value, "class": found.__name__}
    inputs = oracle["_backend_activation_key"](chosen)
    if inputs is not None:
        result["activations"] = next(name for name in _KEYS if oracle[name] is inputs)
    return result


def _compressed_tensors(
    layer: Problem, oracle: Mapping[str, Any], config: Any, install: StockInstall
) -> dict[str, str]:
    """`CompressedTensorsW4A4Mxfp4MoEMethod` asks no list: its weights are for CUTLASS, where that runs, or for Marlin,
    whatever is declared of activations. What comes of it is asked of the class, or said here where a kernel says it."""
    found = {"backend": "MARLIN", "class": "MarlinExperts"}
    words = "Marlin needs the hidden size"
    wrong = layer.hidden_size % 128 or layer.intermediate_size % 64
    if oracle["CutlassExpertsMxfp4"]._supports_current_device():
        found = {"backend": "CUTLASS", "class": "CutlassExpertsMxfp4", "activations": "kMxfp4Dynamic"}
        words, wrong = "scales are tiled by 128", layer.hidden_size % 128 or layer.intermediate_size % 128
    elif install.platform.is_cpu():
        return found | {"raises": "MarlinExperts, which its method takes without asking, needs a GPU"}
    elif not oracle["MarlinExperts"]._supports_activation(config.activation):
        return found | {"raises": "MarlinExperts does not take it, and its method does not ask"}
    if layer.lora and not oracle[found["class"]].supports_lora():
        return found | {"raises": f"AssertionError: {found['class']} does not support LoRA"}
    if not layer.activation.gated and found["backend"] == "MARLIN":
        # prepare_moe_fp4_layer_for_marlin in quantization/utils/marlin_utils_fp4.py takes the rows for two halves.
        return found | {"raises": "AssertionError: weight.shape == (e, size_n, size_k // 2): experts without"}
    # CUTLASS: tiles of scales in process_weights_after_loading. Marlin: tiles of its operator.
    return found | ({"raises": f"RuntimeError: {words}"} if wrong else {})


def difference(row: dict[str, Any]) -> str:
    """The key of `DIFFERENCES` for a row whose decision is not stock's; "" where it is, ``unknown`` where none fits."""
    if row["ours"]["class"] == row["stock"]["class"]:
        return ""
    asked = MODELS[row["model"]][-1] != "16bit"
    if row["stock"]["class"] == "CutlassExpertsMxfp4":
        return "no backend" if asked else "unasked, no backend"
    if row["stock"]["backend"] == "EMULATION":
        return "emulated"
    return "unasked" if not asked and "activations" in row["stock"] else "unknown"


GOLDEN = GoldenTable(
    "mxfp4", MODELS, "ranks", RANKS, layer, stock, difference, DIFFERENCES, {"scheme": "mxfp4"},
    extra_columns=lambda problem: {"intermediate": problem.intermediate_size},
)  # fmt: skip
