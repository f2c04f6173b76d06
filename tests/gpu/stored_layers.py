"""Layers of `kernel_cases` as this project's kernels store them, and the comparison of an output with the reference."""

from __future__ import annotations

from functools import cache

import torch

from tests.gpu.kernel_cases import UNIT, Case, Layer, make_layer
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


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts that an output is within roundings of its dtype of the float32 reference."""
    assert torch.isfinite(out).all()
    error = (out.float() - expected).double()
    if not expected.any():
        assert not out.any()
        return
    assert error.norm() / expected.double().norm() <= 2.5 * UNIT[out.dtype]
    assert error.abs().max() <= 2 * torch.finfo(out.dtype).eps * expected.abs().max()
