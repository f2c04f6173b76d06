"""Models whose decoder layers have Gemma's norm in vLLM: it multiplies by 1 + weight, not by the weight."""

from __future__ import annotations

from collections.abc import Iterable

MODEL_CODE = {
    "AliceAIForCausalLM": "model_executor/models/alice_ai.py",
    "InternS2MobiusForConditionalGeneration": "model_executor/models/interns2_mobius.py",
    "InternS2PreviewForConditionalGeneration": "model_executor/models/qwen3_5.py",
    "MiniMaxM3SparseForCausalLM": "models/minimax_m3",
    "MiniMaxM3SparseForConditionalGeneration": "models/minimax_m3",
    "Qwen3NextForCausalLM": "model_executor/models/qwen3_next.py",
    "Qwen3_5ForCausalLM": "model_executor/models/qwen3_5.py",
    "Qwen3_5ForConditionalGeneration": "model_executor/models/qwen3_5.py",
    "Qwen3_5MoeForCausalLM": "model_executor/models/qwen3_5.py",
    "Qwen3_5MoeForConditionalGeneration": "model_executor/models/qwen3_5.py",
    "Step3p5ForCausalLM": "model_executor/models/step3p5.py",
    "Step3p7ForConditionalGeneration": "model_executor/models/step3p5.py",
}
"""Architectures with experts whose decoder layers are built with ``GemmaRMSNorm``, or with a class of their own that
computes the same, and the file or folder of vLLM's package that does so. A test holds the table to vLLM's code."""


def has_gemma_norms(architectures: Iterable[object]) -> bool:
    """Whether vLLM builds the norms of a model's decoder layers as Gemma's.

    Args:
        architectures: those of its config, and of its language model's part.
    """
    return any(isinstance(each, str) and each in MODEL_CODE for each in architectures)
