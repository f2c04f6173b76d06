"""Quantisation configs and methods that take the place of vLLM's own, and the life cycle of their layers."""

CONFIGS = {
    "gpt_oss_mxfp4": "vllm_moe_oracle.methods.mxfp4:GptOssMxfp4Config",
    "modelopt_mxfp8": "vllm_moe_oracle.methods.modelopt:ModelOptMxFp8Config",
    "modelopt_mixed": "vllm_moe_oracle.methods.modelopt:ModelOptMixedPrecisionConfig",
    "mxfp4": "vllm_moe_oracle.methods.mxfp4:Mxfp4Config",
    "mxfp8": "vllm_moe_oracle.methods.modelopt:Mxfp8Config",
}
"""Config class by quantisation name, imported when vLLM first asks for it."""

METHODS = {
    "vllm.model_executor.layers.quantization.modelopt:ModelOptMxFp8FusedMoE": (
        "vllm_moe_oracle.methods.modelopt:ModelOptMxFp8FusedMoE"
    ),
    "vllm.model_executor.layers.quantization.online.mxfp8:Mxfp8OnlineMoEMethod": (
        "vllm_moe_oracle.methods.online:Mxfp8OnlineMoEMethod"
    ),
    "vllm.model_executor.layers.quantization.online.mxfp8:Mxfp8OnlineLinearMethod": (
        "vllm_moe_oracle.methods.online:Mxfp8OnlineLinearMethod"
    ),
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
    ".compressed_tensors_moe_w8a8_mxfp8:CompressedTensorsW8A8Mxfp8MoEMethod": (
        "vllm_moe_oracle.methods.compressed_tensors:CompressedTensorsW8A8Mxfp8MoEMethod"
    ),
}
"""Our method by the stock one that vLLM constructs in places where it never asks its registry."""

SERVED = {
    "compressed-tensors": ("mxfp8",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "modelopt_mixed": ("mxfp8",),
    "modelopt_mxfp8": ("mxfp8",),
    "mxfp4": ("mxfp4",),
    "mxfp8": ("mxfp8",),
}
"""Schemes whose MoE layers get our methods, by vLLM's name for the checkpoint's quantisation; through `CONFIGS`
or, where vLLM keeps its own config class, through `METHODS`."""
