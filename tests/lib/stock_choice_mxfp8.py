"""Golden decisions for MXFP8: models, tensor-parallel sizes, compute capabilities; beside each, what stock vLLM does.

Stock's choice is computed from its sources, not copied: its function ``select_mxfp8_moe_backend`` and the expert
classes that it asks run from the sources of the newest release, on a platform of the capability in question on which
FlashInfer, Humming and DeepGEMM are installed, as a stock install has them. What stock raises later, when weights are
created or converted, stands in ``raises``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.lib.cases import MXFP8_W8A8, RELU2, SILU, problem
from tests.lib.golden_decisions import RELEASE, GoldenTable, QuantKey, StockInstall, stock_config, stock_install
from vllm_moe_oracle.core.problem import Activation, Problem, Routing

TP = (1, 2, 4, 8)

_NEMOTRON_ROUTING = Routing("deepseekv3", "sigmoid", True, num_groups=1, top_k_groups=1, correction_bias=True)
_DEEPSEEK_ROUTING = Routing("deepseekv3", "sigmoid", True, num_groups=8, top_k_groups=4, correction_bias=True)
# experts, top-k, hidden, intermediate of the whole layer, activation, routing: from the models' config.json.
MODELS: dict[str, tuple[int, int, int, int, Activation, Routing]] = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768, SILU, Routing("renormalize")),
    "MiniMax-M2": (256, 8, 3072, 1536, SILU, Routing("minimax2", "sigmoid", True, correction_bias=True)),
    "Nemotron-3-Nano": (128, 6, 2688, 1856, RELU2, _NEMOTRON_ROUTING),
    "DeepSeek-V3": (256, 8, 7168, 2048, SILU, _DEEPSEEK_ROUTING),
}
STOCK_ROUTING = {"renormalize": "Renormalize", "minimax2": "MiniMax2", "deepseekv3": "DeepSeekV3"}
DIFFERENCES = {
    "none": (
        "stock chooses this kernel and raises when the layer's weights are created: a scale group of 32 would be cut "
        "between ranks; here nothing is chosen and every candidate says so"
    ),
}
"""Why a decision is not stock's, by our backend."""


def layer(model: str, tp: int) -> Problem:
    """The model's MoE layer on one of `tp` ranks."""
    experts, top_k, hidden, inner, activation, routing = MODELS[model]
    return problem(
        scheme=MXFP8_W8A8, experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner // tp,
        activation=activation, routing=routing, tp=tp,
    )  # fmt: skip


@cache
def _oracle(capability: int, release: str) -> tuple[StockInstall, dict[str, Any]]:
    """An install of a release, and the names of its file that lists the kernels."""
    install = stock_install(capability, release)
    given: dict[str, Any] = {
        **QuantKey.named("kMxfp8Static", "kMxfp8Dynamic"),
        "has_flashinfer_trtllm_fused_moe": lambda: True, "is_deep_gemm_supported": install.platform.support_deep_gemm,
    }  # fmt: skip
    shared = install.oracle("fp8", **given)
    given |= {name: shared[name] for name in ("Fp8MoeBackend", "backend_to_kernel_cls")}
    return install, install.oracle("mxfp8", **given)


def stock(layer: Problem, capability: int, release: str = RELEASE) -> dict[str, str]:
    """What stock does for the layer: the backend and class it chooses, and what it raises, then or later."""
    install, oracle = _oracle(capability, release)
    install.set_batch_invariant(layer)
    method = getattr(install.methods, STOCK_ROUTING[layer.routing.method])
    config = stock_config(layer, install.activation(layer.activation), method, torch.float32)
    try:
        chosen, found = oracle["select_mxfp8_moe_backend"](config=config)
    except ValueError as error:
        return {"backend": "", "class": "", "raises": f"ValueError: {error}"}
    result = {"backend": chosen.value, "class": found.__name__}
    inner = layer.intermediate_size
    if inner % 32:
        # ModelOptMxFp8FusedMoE.create_weights in quantization/modelopt.py.
        result["raises"] = (
            f"ValueError: MXFP8 MoE requires intermediate_size_per_partition divisible by 32, got {inner}"
        )
    elif found.__name__ == "MarlinExperts" and not layer.activation.gated and inner % 64:
        # _moe_pad_shard_rows in quantization/utils/marlin_utils_fp8.py takes the rows for two halves.
        result["raises"] = f"RuntimeError: {inner} rows of non-gated experts are padded as if they were twice as many"
    return result


def difference(row: dict[str, Any]) -> str:
    """The key of `DIFFERENCES` for a row whose decision is not stock's; "" where it is."""
    return "" if row["ours"]["class"] == row["stock"]["class"] else row["ours"]["backend"]


GOLDEN = GoldenTable("mxfp8", MODELS, "tp", TP, layer, stock, difference, DIFFERENCES, {"scheme": str(MXFP8_W8A8)})
