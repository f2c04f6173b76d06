"""What `fused_moe` refuses before it launches anything; no kernel runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_moe_oracle.kernels.config import choose_config
from vllm_moe_oracle.kernels.fused_moe import check_arguments, workspace_layout
from vllm_moe_oracle.kernels.weights import allocate_weights

TOKENS, TOP_K, HIDDEN = 3, 2, 128
WEIGHTS = allocate_weights("mxfp8", 4, HIDDEN, 64, device="cpu")


def call(**changes: Any) -> dict[str, Any]:
    """Arguments that fit, but for the changes."""
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    fits = {"x": x, "weights": WEIGHTS, "topk_weights": ids.float(), "topk_ids": ids, "activation": "silu"}
    return {**fits, "out": torch.empty_like(x)} | changes


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"activation": "sin"}, "'sin' of experts with a gate; the kernels implement .*silu"),
    "ungated": ({"activation": "relu2"}, "'relu2' of experts with a gate; the kernels implement silu"),
    "columns": ({"x": torch.zeros(TOKENS, 64, dtype=torch.bfloat16)}, r"expected \[tokens, 128\]"),
    "strides": ({"x": torch.zeros(HIDDEN, TOKENS, dtype=torch.bfloat16).T}, "with contiguous rows"),
    "dtype": ({"x": torch.zeros(TOKENS, HIDDEN)}, "x is torch.float32, .* stored for torch.bfloat16"),
    "out": ({"out": torch.zeros(TOKENS + 1, HIDDEN, dtype=torch.bfloat16)}, "out has shape"),
    "ids": ({"topk_ids": torch.zeros(TOKENS, TOP_K + 1, dtype=torch.int32)}, "must both be"),
    "contiguous": ({"topk_ids": torch.zeros(TOP_K, TOKENS, dtype=torch.int32).T}, "must be contiguous"),
    "ids' dtype": ({"topk_ids": torch.zeros(TOKENS, TOP_K, dtype=torch.int16)}, "topk_ids are torch.int16"),
    "router's dtype": ({"topk_weights": torch.zeros(TOKENS, TOP_K, dtype=torch.int32)}, "topk_weights torch.int32"),
    "device": ({"topk_ids": torch.zeros(TOKENS, TOP_K, dtype=torch.int32, device="meta")}, "x is on cpu.*: meta"),
    "weights' device": ({"weights": allocate_weights("mxfp8", 4, HIDDEN, 64, device="meta")}, "x is on cpu.*: meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        check_arguments(**call(**changes))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("router", [torch.float32, torch.bfloat16, torch.float16])
def test_what_fits_is_accepted(dtype: torch.dtype, router: torch.dtype) -> None:
    ids = torch.zeros(TOKENS, TOP_K, dtype=dtype)
    check_arguments(**call(topk_ids=ids, topk_weights=ids.to(router)))


def test_no_tokens_need_no_memory() -> None:
    for quantize in (False, True):
        assert choose_config(WEIGHTS, TOP_K, 0, quantize=quantize)
        layout = workspace_layout(WEIGHTS, 0, TOP_K, quantize=quantize)
        assert layout.nbytes == 0 and layout.counters == 0
