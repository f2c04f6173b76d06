"""DeepGEMM's FP8 x FP4 kernels for MXFP4 on sm_100 and sm_120: vLLM's class `DeepGemmFP4Experts`.

Activations are e4m3 with one scale per 128. Both sizes are zero-padded to multiples of 128, as in stock vLLM.
"""

from __future__ import annotations

from ..core.capabilities import Capabilities
from ..core.decision import Numerics
from ..releases import min_versions
from ._deep_gemm import ACTIVATED_APART, SIZE_MULTIPLE, DeepGemmBackend
from ._stock import EXPERTS, UNPROVEN_EPLB, StockDifference
from ._stock_rules import SILU_RULE


class DeepGemmMxfp4(DeepGemmBackend):
    """vLLM's DeepGEMM experts on MXFP4 weights and 8-bit activations."""

    name = "deep_gemm_mxfp4"
    schemes = ("mxfp4",)
    stock_class = f"{EXPERTS}.deep_gemm_moe:DeepGemmFP4Experts"
    stock_kernel = "DEEPGEMM_MXFP4"
    static_priority = 25.0
    activation_precision = "fp8"
    arithmetic = Numerics(
        "MXFP4, in block-scaled tensor cores", "quantized to e4m3 with one scale per 128, in both products"
    )
    padding = (SIZE_MULTIPLE, SIZE_MULTIPLE)
    quantize_inputs = "fp8_block128"
    padded_layer = True
    stock_differences = (
        *DeepGemmBackend.stock_differences,
        StockDifference(("situ",), ACTIVATED_APART),
        UNPROVEN_EPLB,
        StockDifference(
            (), "vLLM's scales are float32, which DeepGEMM packs at every call", min_versions.DEEP_GEMM_MXFP4_PACKED
        ),
    )
    capabilities = Capabilities(
        compute_capabilities=((100, 110), (120, 130)),
        packages={"vllm": min_versions.DEEP_GEMM_MXFP4_PACKED},
        dtypes=("bfloat16",),
        gated=("silu",),
        # Only the limit reaches the kernel.
        activation_params=True,
        # The class adds no biases.
        bias=False,
        hidden_multiple=SIZE_MULTIPLE,
        intermediate_multiple=SIZE_MULTIPLE,
        apply_router_weight_on_input=True,
    )
    rules = (SILU_RULE,)


BACKEND = DeepGemmMxfp4()
