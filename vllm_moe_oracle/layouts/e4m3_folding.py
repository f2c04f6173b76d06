"""Folds MXFP4 and MXFP8 into e4m3 with one scale per row: each block's power of two moves into its codes.

MXFP4 folds exactly or not at all. e4m3 represents e2m1's significands from 2**-9 to 448, so a row can be folded if the
exponent of its largest value and the exponent of its lowest last bit differ by at most 17. MXFP8 codes are e4m3
already; codes of blocks with smaller scales lose bits when they become subnormal, at most 2**-10 if the row's largest
code is 448. `fold_mxfp8` returns the resulting error of each row. This module also has the row orders that
`kernels/fp8_gemm.py` reads.
"""

from __future__ import annotations

import functools

import torch

from ..core.problem import E8M0_BIAS, E8M0_NAN, MX_BLOCK

_MAX_EXPONENT = 8  # exponent of the largest e2m1 significand that e4m3 holds: 1.5 * 2**8 = 384
_MIN_EXPONENT = -9  # exponent of e4m3's last subnormal bit
MAX_EXPONENT_SPREAD = _MAX_EXPONENT - _MIN_EXPONENT
"""Largest difference between the exponents of a row's largest value and of its lowest last bit."""

_MIN_NORMAL_EXPONENT = -126  # a smaller row scale is subnormal, which kernels flush to zero
_CHUNK_ELEMENTS_MXFP4 = 1 << 22
"""MXFP4 values folded per pass, with three bytes of temporaries each."""
_CHUNK_ELEMENTS_MXFP8 = 1 << 20
"""MXFP8 values folded per pass, with several float32 temporaries each."""
_NO_EXPONENT = 1 << 10  # used as the exponent of zero
_UNDERFLOW_EXPONENT = -40  # every code times a smaller power of two rounds to zero in e4m3
_SHIFT_RANGE = (-16, 10)
"""Smallest and largest exponent by which a block's scale differs from its row's; products beyond are not in e4m3."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the e2m1 codes 0 to 7."""
_LAST_BIT_EXPONENTS = (_NO_EXPONENT, -1, 0, -1, 1, 0, 2, 1)
"""Exponents of the last bits of `_MAGNITUDES`."""
_TOP_EXPONENTS = (-_NO_EXPONENT, -1, 0, 0, 1, 1, 2, 2)
"""Exponents of `_MAGNITUDES`."""


def _exp2(exponents: torch.Tensor) -> torch.Tensor:
    """float32 powers of two of int32 from -126 to 127, assembled from bits: `pow` is not exact on every GPU."""
    return (exponents + E8M0_BIAS << 23).view(torch.float32)


def _row_slices(rows: int, columns: int, max_elements: int) -> list[slice]:
    step = max(1, max_elements // columns)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


@functools.cache
def _tables_on_host() -> torch.Tensor:
    """int16 `[2 + shifts, 256]`. For every byte of two codes: the exponent of the larger value, the exponent of the
    lowest last bit, and for each power of two in `_SHIFT_RANGE` the two e4m3 codes, the first in the low byte.

    A lookup is one kernel launch; the arithmetic would be a dozen. The tables stay on the host because GPU memory that
    is allocated while weights load is lost when vLLM sleeps.
    """
    # An explicit device: while vLLM loads a model, torch's default device is the model's.
    with torch.device("cpu"):
        byte = torch.arange(256)
        low, high = byte & 15, byte >> 4
        top, last = (torch.tensor(each, dtype=torch.int16) for each in (_TOP_EXPONENTS, _LAST_BIT_EXPONENTS))
        magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float32)
        shifts = torch.arange(_SHIFT_RANGE[0], _SHIFT_RANGE[1] + 1, dtype=torch.int32)
        values = _exp2(shifts)[:, None] * torch.cat((magnitudes, -magnitudes))
        codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        pairs = torch.stack((codes[:, low], codes[:, high]), dim=-1).view(torch.int16).squeeze(-1)
        tops = torch.maximum(top[low & 7], top[high & 7])
        lasts = torch.minimum(last[low & 7], last[high & 7])
        return torch.cat((tops[None], lasts[None], pairs))


def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_tables_on_host` on a device, int16: tops `[256]`, lasts `[256]`, pairs of codes `[shifts * 256]`."""
    # non_blocking is safe: the source is neither changed nor freed.
    tables = _tables_on_host().to(device, non_blocking=True)
    return tables[0], tables[1], tables[2:].view(-1)


def _row_exponents(
    codes: torch.Tensor, scales: torch.Tensor, tops: torch.Tensor, lasts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_exponents` with the tables of `_tables`."""

    def part(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        places, blocks = codes[rows].to(torch.int32).view(-1), (*scales[rows].shape, MX_BLOCK // 2)
        top = (tops.index_select(0, places).view(blocks).amax(-1) + scales[rows]).amax(-1)
        return top, (lasts.index_select(0, places).view(blocks).amin(-1) + scales[rows]).amin(-1)

    parts = zip(*map(part, _row_slices(codes.shape[0], 2 * codes.shape[1], _CHUNK_ELEMENTS_MXFP4)), strict=True)
    top, last = (torch.cat(each).to(torch.int32) - E8M0_BIAS for each in parts)
    return top, last


def row_exponents(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents of each row's largest value and of its lowest last bit.

    Args:
        codes: uint8 `[N, K/2]`, e2m1, low nibble first.
        scales: uint8 `[N, K/32]`, e8m0.

    Returns:
        int32 `[N]` each. For a row of zeros the last bit's exponent exceeds the largest value's.
    """
    tops, lasts, _ = _tables(codes.device)
    return _row_exponents(codes, scales, tops, lasts)


def fold_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Folds MXFP4 into e4m3 exactly.

    Args:
        codes: uint8 `[N, K/2]`, e2m1, low nibble first; meta tensors too.
        scales: uint8 `[N, K/32]`, e8m0.

    Returns:
        Codes float8_e4m3fn `[N, K]` and row scales float32 `[N]`, powers of two. The scale is NaN for a row with a NaN
        scale (255), and for one whose exponents differ by more than `MAX_EXPONENT_SPREAD`.
    """
    pairs = torch.empty(codes.shape, dtype=torch.int16, device=codes.device)
    if codes.is_meta:
        return pairs.view(torch.float8_e4m3fn), codes.new_empty(codes.shape[0], dtype=torch.float32)
    tops, lasts, folded = _tables(codes.device)
    top, last = _row_exponents(codes, scales, tops, lasts)
    lost = (scales == E8M0_NAN).any(-1) | (top - last > MAX_EXPONENT_SPREAD)
    # The lowest possible scale, so that most codes are normal; a row of zeros may have any.
    exponent = (top - _MAX_EXPONENT).clamp(min=_MIN_NORMAL_EXPONENT, max=E8M0_BIAS)
    lowest = exponent + (E8M0_BIAS + _SHIFT_RANGE[0])
    table = (scales - lowest[:, None]).clamp_(0, _SHIFT_RANGE[1] - _SHIFT_RANGE[0]).mul_(256)
    for rows in _row_slices(codes.shape[0], 2 * codes.shape[1], _CHUNK_ELEMENTS_MXFP4):
        blocks = codes[rows].view(*table[rows].shape, MX_BLOCK // 2)
        torch.index_select(folded, 0, (blocks + table[rows, :, None]).view(-1), out=pairs[rows].view(-1))
    return pairs.view(torch.float8_e4m3fn), _exp2(exponent).masked_fill(lost, float("nan"))


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
    for rows in [] if codes.is_meta else _row_slices(codes.shape[0], codes.shape[1], _CHUNK_ELEMENTS_MXFP8):
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


def unfold(folded: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The folded values, float32 `[N, K]`: inverse of `fold_mxfp4` up to the choice of block scales."""
    return folded.to(torch.float32) * factors[:, None]


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
