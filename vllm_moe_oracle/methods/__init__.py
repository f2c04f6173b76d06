"""Quantisation configs and methods that take the place of vLLM's own, and the life cycle of their layers."""

CONFIGS = {
    "modelopt_mxfp8": "vllm_moe_oracle.methods.modelopt:ModelOptMxFp8Config",
    "mxfp8": "vllm_moe_oracle.methods.modelopt:Mxfp8Config",
}
"""Config class by quantisation name, imported when vLLM first asks for it."""

METHODS = {
    "vllm.model_executor.layers.quantization.modelopt:ModelOptMxFp8FusedMoE": (
        "vllm_moe_oracle.methods.modelopt:ModelOptMxFp8FusedMoE"
    ),
}
"""Our method by the stock one that vLLM constructs in places where it never asks its registry."""
