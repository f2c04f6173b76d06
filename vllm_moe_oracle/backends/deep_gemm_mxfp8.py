"""DeepGEMM for MXFP8 on sm_100 and sm_103: vLLM's class `DeepGemmExperts` with the recipe 1 x 32."""

from __future__ import annotations

from ..core.capabilities import Capabilities
from ..core.decision import Numerics
from ..releases import min_versions
from ._deep_gemm import SIZE_MULTIPLE, DeepGemmBackend
from ._stock import EXPERTS
from ._stock_rules import activation_rule


class DeepGemmMxfp8(DeepGemmBackend):
    """vLLM's DeepGEMM experts on MXFP8 weights and activations."""

    name = "deep_gemm_mxfp8"
    schemes = ("mxfp8",)
    stock_class = f"{EXPERTS}.deep_gemm_moe:DeepGemmExperts"
    stock_kernel = "DEEPGEMM"
    static_priority = 20.0
    activation_precision = "mxfp8"
    arithmetic = Numerics("MXFP8, in block-scaled tensor cores", "quantized to MXFP8 per token, in both products")
    padding = (1, SIZE_MULTIPLE)
    quantize_inputs = "mxfp8"
    capabilities = Capabilities(
        compute_capabilities=((100, 110),),
        packages={"vllm": min_versions.DEEP_GEMM_MXFP8},
        dtypes=("bfloat16",),
        gated=("silu", "swigluoai"),
        activation_params=True,
        hidden_multiple=SIZE_MULTIPLE,
        intermediate_multiple=SIZE_MULTIPLE,
        apply_router_weight_on_input=True,
        eplb=True,
    )
    rules = (activation_rule(swigluoai_since=min_versions.DEEP_GEMM_MXFP8),)


BACKEND = DeepGemmMxfp8()
