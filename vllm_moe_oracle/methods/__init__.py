"""Quantisation configs and methods that take the place of vLLM's own, and the life cycle of their layers."""

_GPTQ = "vllm_moe_oracle.methods.gptq:AutoGPTQConfig"
_AWQ = "vllm_moe_oracle.methods.awq:AutoAWQConfig"
_AWQ_MARLIN = "vllm_moe_oracle.methods.awq_marlin:AWQMarlinConfig"

CONFIGS: dict[str, str | tuple[str, ...]] = {
    "auto_awq": _AWQ,
    "auto_gptq": _GPTQ,
    "awq": _AWQ,
    "awq_marlin": (_AWQ, _AWQ_MARLIN),
    "compressed-tensors": "vllm_moe_oracle.methods.compressed_tensors:CompressedTensorsConfig",
    "gpt_oss_mxfp4": "vllm_moe_oracle.methods.mxfp4:GptOssMxfp4Config",
    "gptq": _GPTQ,
    "gptq_marlin": _GPTQ,
    "modelopt_mxfp8": "vllm_moe_oracle.methods.modelopt:ModelOptMxFp8Config",
    "modelopt_mixed": "vllm_moe_oracle.methods.modelopt:ModelOptMixedPrecisionConfig",
    "moe_wna16": "vllm_moe_oracle.methods.moe_wna16:MoeWNA16Config",
    "mxfp4": "vllm_moe_oracle.methods.mxfp4:Mxfp4Config",
    "mxfp8": "vllm_moe_oracle.methods.modelopt:Mxfp8Config",
}
"""Config class by quantisation name, imported when vLLM first asks for it; of several, the one for the release."""

_STOCK = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_STOCK}.compressed_tensors.compressed_tensors_moe"

METHODS = {
    f"{_STOCK}.auto_awq:AutoAWQConfig": _AWQ,
    f"{_STOCK}.auto_awq:AutoAWQMoEMethod": "vllm_moe_oracle.methods.awq:AutoAWQMoEMethod",
    f"{_STOCK}.auto_gptq:AutoGPTQConfig": _GPTQ,
    f"{_STOCK}.auto_gptq:AutoGPTQMoEMethod": "vllm_moe_oracle.methods.gptq:AutoGPTQMoEMethod",
    f"{_STOCK}.awq_marlin:AWQMarlinConfig": _AWQ_MARLIN,
    f"{_STOCK}.awq_marlin:AWQMarlinMoEMethod": "vllm_moe_oracle.methods.awq_marlin:AWQMarlinMoEMethod",
    f"{_STOCK}.inc.schemes.inc_mxfp4_moe:INCMxfp4MoEMethod": "vllm_moe_oracle.methods.inc_mxfp4:INCMxfp4MoEMethod",
    f"{_STOCK}.inc.schemes.inc_mxfp8_moe:INCMxfp8MoEMethod": "vllm_moe_oracle.methods.inc_mxfp8:INCMxfp8MoEMethod",
    f"{_STOCK}.mxfp4:GptOssMxfp4MoEMethod": "vllm_moe_oracle.methods.mxfp4:GptOssMxfp4MoEMethod",
    f"{_STOCK}.mxfp4:Mxfp4MoEMethod": "vllm_moe_oracle.methods.mxfp4:Mxfp4MoEMethod",
    f"{_STOCK}.online.mxfp4:Mxfp4OnlineMoEMethod": "vllm_moe_oracle.methods.online_mxfp4:Mxfp4OnlineMoEMethod",
    f"{_STOCK}.quark.quark_moe:QuarkOCP_MX_MoEMethod": "vllm_moe_oracle.methods.quark:QuarkOCP_MX_MoEMethod",
    f"{_STOCK}.moe_wna16:MoeWNA16Config": "vllm_moe_oracle.methods.moe_wna16:MoeWNA16Config",
    f"{_STOCK}.moe_wna16:MoeWNA16Method": "vllm_moe_oracle.methods.moe_wna16:MoeWNA16Method",
    f"{_COMPRESSED}.compressed_tensors_moe_w4a4_mxfp4:CompressedTensorsW4A4Mxfp4MoEMethod": (
        "vllm_moe_oracle.methods.compressed_tensors_mxfp4:CompressedTensorsW4A4Mxfp4MoEMethod"
    ),
    f"{_COMPRESSED}.compressed_tensors_moe_w4a8_mxfp4:CompressedTensorsW4A8Mxfp4MoEMethod": (
        "vllm_moe_oracle.methods.compressed_tensors_mxfp4_fp8:CompressedTensorsW4A8Mxfp4MoEMethod"
    ),
    f"{_COMPRESSED}.compressed_tensors_moe:CompressedTensorsMoEMethod.get_moe_method": (
        "vllm_moe_oracle.methods.compressed_tensors:get_moe_method"
    ),
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
"""Our class by the stock one that vLLM constructs in places where it never asks its registry; and our function, which
gets the stock one, by a stock function."""

NEEDS = {
    "vllm_moe_oracle.methods.awq": f"{_STOCK}.auto_awq",
    "vllm_moe_oracle.methods.awq_marlin": f"{_STOCK}.awq_marlin",
    "vllm_moe_oracle.methods.compressed_tensors_mxfp4_fp8": f"{_COMPRESSED}.compressed_tensors_moe_w4a8_mxfp4",
    "vllm_moe_oracle.methods.inc_mxfp4": f"{_STOCK}.inc.schemes.inc_mxfp4_moe",
    "vllm_moe_oracle.methods.inc_mxfp8": f"{_STOCK}.inc.schemes.inc_mxfp8_moe",
    "vllm_moe_oracle.methods.online_mxfp4": f"{_STOCK}.online.mxfp4",
}
"""Stock module by those of ours that are for releases which have it."""

SERVED = {
    "auto_awq": ("wna16",),
    "auto_gptq": ("wna16",),
    "awq": ("wna16",),
    "awq_marlin": ("wna16",),
    "compressed-tensors": ("mxfp4", "mxfp8", "wna16"),
    "gptq": ("wna16",),
    "gptq_marlin": ("wna16",),
    "deepseek_v4_fp8": ("mxfp4",),
    "gpt_oss_mxfp4": ("mxfp4",),
    "inc": ("mxfp4", "mxfp8", "wna16"),
    "quark": ("mxfp4",),
    "modelopt_mixed": ("mxfp8",),
    "modelopt_mxfp8": ("mxfp8",),
    "moe_wna16": ("wna16",),
    "mxfp4": ("mxfp4",),
    "mxfp8": ("mxfp8",),
}
"""Schemes whose MoE layers get our methods, by vLLM's name for the checkpoint's quantisation; through `CONFIGS`
or, where vLLM keeps its own config class, through `METHODS`."""
