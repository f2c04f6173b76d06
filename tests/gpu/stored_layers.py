"""Layers of `kernel_cases` as this project's kernels store them, and the comparison of an output with the reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from tests.gpu.kernel_cases import UNIT, Case, Layer, make_layer, poisoned
from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels import fused_moe as fm
from vllm_moe_oracle.kernels import launch_config
from vllm_moe_oracle.kernels.launch_config import LaunchConfig
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights, pack_expert


@cache
def layer_of(case: Case) -> tuple[Layer, PackedWeights]:
    """The case's layer, canonical and stored; stored tensors are poisoned before they are filled."""
    layer = make_layer(case)
    weights = allocate_weights(case.format, case.experts, case.hidden, case.inner, gated=case.gated, group=case.group,
                               dtype=case.dtype, zero_points=case.zero_points, bias=case.bias,
                               device="cuda")  # fmt: skip
    for matrix in (weights.w13, weights.w2):
        for tensor in matrix.tensors():
            tensor.view(torch.uint8).fill_(0xA5)
    for which in ("w13", "w2"):
        for expert in range(case.experts):
            parts = (layer.codes, layer.scales, layer.zeros, layer.bias)
            pack_expert(weights, which, expert, *(
                None if part[which] is None else part[which][expert].cuda() for part in parts
            ))  # fmt: skip
    return layer, weights


def call(weights: PackedWeights, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor, case: Case,
         config: LaunchConfig | PrefillConfig | None = None, **options: Any) -> torch.Tensor:  # fmt: skip
    """fused_moe with poisoned workspace and output, by default with the configuration that the kernels choose; asserts
    that the counters are left at zero."""
    quantize = options.get("quantize_activations", False)
    if options.get("batch_invariant"):
        config = launch_config.BATCH_INVARIANT_CONFIG
    config = config or configs.choose_config(weights, *ids.shape[::-1], quantize=quantize)
    plan = fm.workspace_layout(weights, ids.shape[0], ids.shape[1], config, quantize=quantize)
    workspace = poisoned(plan.nbytes, ids.shape[0])
    counters = torch.zeros(max(1, plan.counters), dtype=torch.int32, device="cuda")
    out = torch.full(x.shape, float("nan"), dtype=x.dtype, device="cuda")
    fm.fused_moe(x, weights, router, ids, activation=case.activation, limit=case.limit, workspace=workspace,
                 counters=counters, out=out, config=config, **options)  # fmt: skip
    assert not counters.any()
    return out


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that an output is within roundings of its dtype of the float32 reference."""
    assert torch.isfinite(out).all()
    error = (out.float() - expected).double()
    if not expected.any():
        assert not out.any()
        return
    assert error.norm() / expected.double().norm() <= 2.5 * UNIT[out.dtype]
    assert error.abs().max() <= 2 * torch.finfo(out.dtype).eps * expected.abs().max()
