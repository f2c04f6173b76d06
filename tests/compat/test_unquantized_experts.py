"""``--moe-backend`` in a model whose experts are not all quantized: the name is for those that are."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_moe_oracle.compat import unquantized_experts
from vllm_moe_oracle.compat.unquantized_experts import UnquantizedChoice
from vllm_moe_oracle.methods import served_schemes


def model(quantization: str | None) -> Any:
    return SimpleNamespace(quantization=quantization)


def engine(target: Any, draft: Any = None, speculates: bool = True) -> Any:
    speculative = SimpleNamespace(draft_model_config=draft) if speculates else None
    return SimpleNamespace(model_config=target, speculative_config=speculative)


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
    logging.getLogger("vllm").propagate = True
    monkeypatch.setattr(unquantized_experts, "get_current_vllm_config_or_none", lambda: current)
    choose = UnquantizedChoice(served_schemes())
    seen = []
    for _ in range(2):
        moe = SimpleNamespace(moe_backend=asked)
        choose(lambda method, moe, **more: seen.append((method, moe.moe_backend, more)), "method", moe, more=1)
    assert seen == [("method", expected, {"more": 1})] * 2
    assert caplog.text.count(f"--moe-backend {asked} is for quantized experts") == (asked != expected)


def test_vllms_selector_refuses_the_names_of_quantized_kernels() -> None:
    """What the wrapped constructor would do otherwise."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import map_unquantized_backend

    with pytest.raises(ValueError, match="not supported for unquantized MoE"):
        map_unquantized_backend("deep_gemm")
