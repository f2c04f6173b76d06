"""A layer with fp8 activations in float64, which shares no code with the kernels."""

from __future__ import annotations

import torch

from tests.gpu.kernel_cases import Case, Layer, activated, e4m3


def codes_of(case: Case, layer: Layer, which: str) -> torch.Tensor:
    """Canonical codes in the type of the format."""
    return layer.codes[which].view(torch.float8_e4m3fn) if case.format == "mxfp8" else layer.codes[which]


def quantized(rows: torch.Tensor) -> torch.Tensor:
    """float32 rows as e4m3 times amax / 448, as float64."""
    rows = rows.float()
    amax = rows.abs().amax(-1, keepdim=True)
    scale, inverse = scales_of(amax)
    return e4m3((rows * inverse).clamp(-448, 448)) * scale.double()


def scales_of(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """amax / 448 and its inverse, each rounded once: divided by a number, torch multiplies by its reciprocal."""
    largest = torch.full_like(amax, 448)
    return amax / largest, torch.where(amax > 0, largest / amax, 0)


def reference(case: Case, layer: Layer, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor, *,
              apply_router_weight_on_input: bool = False, quantize: bool = True) -> torch.Tensor:  # fmt: skip
    """The layer in float64 for local ids (negative: nothing); quantize=False: activations in their dtype."""
    rows = quantized(x) if quantize else x.double()
    out = torch.zeros_like(rows)
    for expert in range(case.experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        scale = router[token, choice].double()[:, None]
        y = rows[token] @ layer.matrix["w13"][expert].cuda().double().T
        y = y * scale if apply_router_weight_on_input else y
        if case.bias:
            y = y + layer.bias["w13"][expert].cuda()
        h = activated(case, y).to(case.dtype)
        y = (quantized(h) if quantize else h.double()) @ layer.matrix["w2"][expert].cuda().double().T
        if case.bias:
            y = y + layer.bias["w2"][expert].cuda()
        out.index_add_(0, token, y if apply_router_weight_on_input else y * scale)
    return out


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 error."""
    return ((out.double() - expected).norm() / expected.norm()).item()
