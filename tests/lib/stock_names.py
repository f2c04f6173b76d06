"""What this project uses of vLLM that its code does not name: types behind ``Any``, names in strings.

`tests.lib.surface` follows every use of vLLM in the package through the sources of each supported release. Where a
syntax tree does not say what a thing is, these tables do. A use that is neither found nor declared is a problem.
"""

from __future__ import annotations

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_TRTLLM_MXFP4 = f"{_FUSED_MOE}.experts.trtllm_mxfp4_moe:TrtLlmMxfp4ExpertsModular"
_MODELOPT = "vllm.model_executor.layers.quantization.modelopt"

LAYER = "LAYER"
"""Stands for the class of MoE layers of the release."""

TYPES = {
    "moe": f"{_FUSED_MOE}.config:FusedMoEConfig",
    "moe_config": f"{_FUSED_MOE}.config:FusedMoEConfig",
    "layer": LAYER,
    "kernel": f"{_FUSED_MOE}.modular_kernel:FusedMoEKernel",
    "experts": f"{_FUSED_MOE}.modular_kernel:FusedMoEExpertsModular",
    "quant_config": f"{_FUSED_MOE}.config:FusedMoEQuantConfig",
    "expert_tokens_meta": f"{_FUSED_MOE}.modular_kernel:ExpertTokensMetadata",
    "lora_context": f"{_FUSED_MOE}.experts.lora_context:MoELoRAContext",
    "punica_wrapper": "vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU",
    "key": "vllm.model_executor.layers.quantization.utils.quant_utils:QuantKey",
    "hf_to_vllm_mapper": "vllm.model_executor.models.utils:WeightsMapper",
    "linear": "vllm.model_executor.kernels.linear",
    "loader": f"{LAYER}.weight_loader",
    "select_experts": (
        f"{_FUSED_MOE}.experts.cpu_moe:select_experts",
        f"{_FUSED_MOE}.cpu_fused_moe:select_experts",
    ),
}
"""Class, ``module:Class``, of parameters and variables that are annotated with ``Any``, by their name; of several the
first that is there."""

VALUES = {
    "vllm.platforms:current_platform": "vllm.platforms.interface:Platform",
}
"""Class of values that vLLM does not annotate."""

NARROWED_TYPES: dict[str, str] = {
    "compat/experts_adapter.py:keep_padded_output:experts": _TRTLLM_MXFP4,
    "compat/legacy_adapters.py:keep_padded_output:experts": _TRTLLM_MXFP4,
    "compat/lora_experts.py:_any_adapter:punica_wrapper.token_mapping_meta": (
        "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta"
    ),
    "methods/compressed_tensors.py:declared_activations:layer.quant_config": (
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig"
    ),
    "methods/compressed_tensors.py:_integer_arguments:quant_config": (
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig"
    ),
    "methods/quark.py:get_quant_method:quant_config": "vllm.model_executor.layers.quantization.quark.quark:QuarkConfig",
    "methods/compressed_tensors.py:get_moe_method:quant_config": (
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig"
    ),
    "methods/dtypes.py:refuse_linear_dtype:layer": "vllm.model_executor.layers.linear:LinearBase",
    "methods/online.py:process_weights_after_loading:self.kernel": (
        "vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel:Mxfp8LinearKernel"
    ),
}
"""Class of an expression in one function, where it is narrower than or other than elsewhere: file, function, text."""

NOT_STOCK = {
    "arguments": "the QuantizationArgs of the package compressed-tensors",
    "operator": "an overload of a torch operator",
    "param": "torch.nn.Parameter",
    "config": "a Hugging Face config, or a dict from a checkpoint",
    "self": "of a wrapped stock method; only handed on",
    "original": "a wrapped stock function; called with what it was called with",
    "stock_class": "one of vLLM's expert classes; the backends' `stock_class` names them",
    "backend": "one of ours",
    "problem": "one of ours",
}
"""Names annotated with ``Any`` that are none of vLLM's objects, and what they are."""

REGISTERED_PARAMETERS = {
    name: f"{_MODELOPT}:ModelOptMxFp8FusedMoE.create_weights"
    for name in ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
}
"""Attributes of a layer that a stock method registers there: where the name stands."""

_NEWEST = "9999"

OPTIONAL_ATTRIBUTES = {
    "use_deferred_moe_finalize": (("0.28", _NEWEST),),
    "routing_sink": (("0.32", _NEWEST),),
    "hash_indices_table": (("0.22", "0.23"), ("0.33", _NEWEST)),
    "quant_config": (("0.22", _NEWEST),),
    "prefix": (("0.22", _NEWEST),),
    "params_dtype": (("0.22", _NEWEST),),
    "target_modules": (("0.22", _NEWEST),),
    "use_grouped_topk": (("0.22", _NEWEST),),
    "e_score_correction_bias": (("0.22", _NEWEST),),
    "ckpt_down_proj_name": (("0.25", _NEWEST),),
    "requantization_source": (("0.33", _NEWEST),),
    "requantization_source_parameters": (("0.33", _NEWEST),),
    "get_weight_for_quantization": (("0.32", _NEWEST),),
    "get_weights_for_quantization": (("0.33", _NEWEST),),
    "release_requantization_source_weights": (("0.33", _NEWEST),),
}
"""Attributes that are asked for with a default, or behind a question: first and last minor release that have them."""

STRING_NAMES = {
    "_already_called_process_weights_after_loading": ("vllm.model_executor.model_loader.reload.layerwise",),
    "shared_experts": (
        f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.apply",
        f"{_FUSED_MOE}.modular_kernel:FusedMoEKernel.apply",
    ),
    "shared_experts_input": (
        f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.apply",
        f"{_FUSED_MOE}.modular_kernel:FusedMoEKernel.apply",
    ),
    "input_ids": (f"{_FUSED_MOE}.fused_moe_method_base:FusedMoEMethodBase.apply_monolithic",),
    "weight_loader": (f"{_MODELOPT}:ModelOptMxFp8FusedMoE.create_weights",),
    "modelopt_mxfp8": ("vllm.model_executor.layers.quantization",),
    "mxfp8": ("vllm.model_executor.layers.quantization",),
    "swigluoai": (f"{_FUSED_MOE}.activation:MoEActivation",),
    "sqrtsoftplus": (f"{_FUSED_MOE}.config",),
}
"""Strings in our code that are names in vLLM's: the modules, classes or functions in which each must stand."""

FORWARDED_KEYWORDS = {
    "FusedMoEKernel.apply": ("shared_experts", "shared_experts_input"),
    "FusedMoEKernel.apply_monolithic": ("input_ids", "routing_sink", "hash_indices_table"),
}
"""Keywords that a call with ``**`` may add."""

OPTIONAL_PATHS = {
    "vllm.model_executor.layers.quantization.utils.humming_utils": (("0.22", "0.30"),),
    "vllm.model_executor.layers.quantization.utils.humming": (("0.31", _NEWEST),),
    f"{_FUSED_MOE}.experts.cpu_moe:CPUExpertsInt4": (("0.24", _NEWEST),),
    f"{_FUSED_MOE}.experts.trtllm_mxint4_moe:TrtLlmMxint4ExpertsMonolithic": (("0.23", _NEWEST),),
}
"""Modules and classes that not every release has: the ranges that have them. Modules are looked for before they are
imported; of classes, the backend's own rule says from which release on it is there."""

OPTIONAL_HOOKS = {
    "get_checkpoint_weight_mapper": (("0.30", _NEWEST),),
    "supports_expert_map": (("0.22", "0.22"),),
    "supports_pre_processed_weights": (("0.30", _NEWEST),),
    "has_unpadded_output": (("0.24", _NEWEST),),
}
"""Methods and attributes of vLLM's classes that we define and that not every release calls: the ranges that do."""

OUR_ATTRIBUTES = {
    "weight_block_size": "read from the method by stock conversions of later releases",
}
"""Attributes that we set on our subclasses of stock classes, and that the oldest releases do not know."""
