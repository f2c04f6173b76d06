"""Folds MXFP8 into e4m3 with one scale per row: each block's power of two moves into its codes.

Codes of blocks with smaller scales lose bits when they become subnormal, at most 2**-10 if the row's largest code is
448. `fold_mxfp8` returns the resulting error of each row. This module also has the row orders that
`kernels/fp8_gemm.py` reads.
"""

from __future__ import annotations

import torch

from ..core.problem import E8M0_BIAS, E8M0_NAN, MX_BLOCK

_MIN_NORMAL_EXPONENT = -126  # a smaller row scale is subnormal, which kernels flush to zero
_CHUNK_ELEMENTS = 1 << 20
"""Values folded per pass, with several float32 temporaries each."""
_UNDERFLOW_EXPONENT = -40  # every code times a smaller power of two rounds to zero in e4m3


def _exp2(exponents: torch.Tensor) -> torch.Tensor:
    """float32 powers of two of int32 from -126 to 127, assembled from bits: `pow` is not exact on every GPU."""
    return (exponents + E8M0_BIAS << 23).view(torch.float32)


def _row_slices(rows: int, columns: int, max_elements: int) -> list[slice]:
    step = max(1, max_elements // columns)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def fold_mxfp8(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Folds MXFP8 into e4m3 with one scale per row.

    Args:
        codes: float8_e4m3fn `[N, K]`; meta tensors too.
        scales: uint8 `[N, K/32]`, e8m0.

    Returns:
        Codes float8_e4m3fn `[N, K]`; row scales float32 `[N]`, powers of two; and errors float32 `[N]`, the largest
        relative L2 error among a row's blocks of 32, 0 if the row is exact. A row with a NaN code or scale has a NaN
        scale and the error 0.
    """
    folded = torch.empty(codes.shape, dtype=torch.float8_e4m3fn, device=codes.device)
    factors = torch.empty(codes.shape[0], dtype=torch.float32, device=codes.device)
    errors = torch.empty_like(factors)
    for rows in [] if codes.is_meta else _row_slices(codes.shape[0], codes.shape[1], _CHUNK_ELEMENTS):
        values = codes[rows].float().view(-1, codes.shape[1] // MX_BLOCK, MX_BLOCK)
        power = scales[rows].to(torch.int32) - E8M0_BIAS
        largest = values.abs().amax(-1)
        nan = ((scales[rows] == E8M0_NAN) | largest.isnan()).any(-1)
        # The power of two that brings the largest value closest to 448 from below: 448 is 0.875 * 2**9.
        mantissa, exponent = torch.frexp(largest)
        needed = power + exponent.to(torch.int32) - 9 + (mantissa > 0.875).to(torch.int32)
        exponent = (
            needed.masked_fill(largest == 0, _MIN_NORMAL_EXPONENT)
            .amax(-1)
            .masked_fill(nan, 0)
            .clamp(min=_MIN_NORMAL_EXPONENT, max=E8M0_BIAS)
        )
        # A block of zeros may have any scale.
        scaled = (
            values * _exp2((power - exponent[:, None]).clamp(_UNDERFLOW_EXPONENT, E8M0_BIAS))[:, :, None]
        ).nan_to_num()
        folded[rows] = scaled.clamp(-448.0, 448.0).flatten(1).to(torch.float8_e4m3fn)
        lost = (folded[rows].float().view(values.shape) - scaled).norm(dim=-1)
        size = scaled.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        errors[rows] = (lost / size).amax(-1).masked_fill(nan, 0)
        factors[rows] = _exp2(exponent).masked_fill(nan, float("nan"))
    return folded, factors, errors


def gated_row_order(rows: int, device: torch.device | None = None) -> torch.Tensor:
    """int64 `[rows]`: for each stored row of a gated w13, its canonical row; `rows` a multiple of 64.

    64 stored rows are 32 gate rows and 32 up rows. A lane of the accumulator holds columns 8 b + 2 t and 8 b + 2 t + 1
    for every b: a gate row and its up row, and over eight b the rows of eight neighbors.
    """
    # Canonical: (gate/up, block of 64, t 4, b 8). Stored: (block, b, t, gate/up).
    return torch.arange(rows, device=device).view(2, -1, 4, 8).permute(1, 3, 2, 0).reshape(rows)


def row_order(rows: int, device: torch.device | None = None) -> torch.Tensor:
    """int64 `[rows]`: for each stored row, its canonical row, so that a lane holds eight neighbors; `rows` a
    multiple of 32."""
    # Canonical: (block of 32, t 4, b 4, r 2). Stored: (block, b, t, r).
    return torch.arange(rows, device=device).view(-1, 4, 4, 2).transpose(1, 2).reshape(rows)
