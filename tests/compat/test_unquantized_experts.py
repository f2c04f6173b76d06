"""``--moe-backend`` in a model whose experts are not all quantized: the name is for those that are."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_moe_oracle.compat import unquantized_experts
from vllm_moe_oracle.compat.unquantized_experts import UnquantizedChoice
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods import served_schemes


def model(quantization: str | None) -> Any:
    return SimpleNamespace(quantization=quantization)


def engine(target: Any, draft: Any = None, speculates: bool = True, load_format: str = "auto") -> Any:
    speculative = SimpleNamespace(draft_model_config=draft) if speculates else None
    load = SimpleNamespace(load_format=load_format)
    return SimpleNamespace(model_config=target, speculative_config=speculative, load_config=load)


@pytest.mark.parametrize(
    ("current", "asked", "expected"),
    [
        (engine(model("auto_gptq"), speculates=False), "marlin", "auto"),
        (engine(model("modelopt_mxfp8"), model(None)), "deep_gemm", "auto"),
        (engine(model(None), model("inc")), "humming", "auto"),
        (engine(model("auto_gptq")), "triton", "triton"),
        (engine(model("auto_gptq")), "auto", "auto"),
        (engine(model(None), speculates=False), "triton", "triton"),
        (engine(model("fp8"), model(None)), "triton", "triton"),
        (engine(None), "triton", "triton"),
        (None, "triton", "triton"),
    ],
)
def test_unquantized_experts_beside_ours_get_vllms_own_choice(
    current: Any, asked: str, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.moe_oracle")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(unquantized_experts, "get_current_vllm_config_or_none", lambda: current)
    choose = UnquantizedChoice(served_schemes())
    seen = []
    for _ in range(2):
        moe = SimpleNamespace(moe_backend=asked)
        choose(lambda method, moe, **more: seen.append((method, moe.moe_backend, more)), "method", moe, more=1)
    assert seen == [("method", expected, {"more": 1})] * 2
    assert caplog.text.count(f"--moe-backend {asked} is for quantized experts") == (asked != expected)


@pytest.mark.parametrize(
    ("quantization", "load_format", "dtype", "refused"),
    [
        ("auto_gptq", "sharded_state", torch.int32, True),
        ("auto_gptq", "sharded_state", torch.bfloat16, False),  # experts that the config leaves out
        ("auto_gptq", "auto", torch.int32, False),
        (None, "sharded_state", torch.int32, False),
    ],
)
def test_a_saved_state_of_quantized_experts_is_refused_by_its_files(
    quantization: str | None, load_format: str, dtype: torch.dtype, refused: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """vLLM takes GPTQ's experts for 16-bit ones there, and would end with a KeyError."""
    tensors = {"a.experts.routed_experts.w13": torch.zeros(1, dtype=dtype)}
    save_file(tensors, tmp_path / "model-rank-0-part-0.safetensors")
    target = SimpleNamespace(quantization=quantization, model=str(tmp_path))
    current = engine(target, speculates=False, load_format=load_format)
    monkeypatch.setattr(unquantized_experts, "get_current_vllm_config_or_none", lambda: current)
    monkeypatch.setattr(unquantized_experts, "current_layer", lambda: (None, "a.experts"))
    made: list[Any] = []
    choose = UnquantizedChoice(served_schemes())
    with pytest.raises(CheckpointError, match=r"^a\.experts: a saved state") if refused else nullcontext():
        choose(lambda method, moe: made.append(method), "method", SimpleNamespace(moe_backend="auto"))
    assert bool(made) is not refused


def test_vllms_selector_refuses_the_names_of_quantized_kernels() -> None:
    """What the wrapped constructor would do otherwise."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import map_unquantized_backend

    with pytest.raises(ValueError, match="not supported for unquantized MoE"):
        map_unquantized_backend("deep_gemm")
