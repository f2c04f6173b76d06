"""MXFP4 and MXFP8 folded into e4m3: the powers of two of a row's blocks go into its codes, but for one of the row.

MXFP4 exactly, or not at all: e4m3 holds e2m1's significands from 2**-9 to 448, so a row fits when its largest number's
exponent and its last bit's (that of the number with the smallest one) lie within 17 of each other. Numbers of MXFP8 are
e4m3's already: those of blocks with smaller scales lose bits where they become subnormal, by at most 2**-10 where the
row's largest number is 448; how much that is of a block is known (`fold_codes`). Also the order in which
`kernels/fp8_products.py` wants a matrix's rows.
"""

from __future__ import annotations

import torch

_LARGEST = 8  # exponent of the largest e2m1 significand that e4m3 holds: 1.5 * 2**8 = 384
_LEAST = -9  # exponent of e4m3's last subnormal bit
SPREAD = _LARGEST - _LEAST
"""By how much the exponents of a row's largest number and of its last bit may differ."""

_BIAS = 127  # of e8m0
_NAN = 255
_NORMAL = -126  # a smaller row scale is subnormal, which kernels flush to zero
_BLOCK = 32
_PART = 1 << 20  # numbers folded at a time: what is in memory in between is a multiple of it
_NONE = 1 << 10  # the exponent of nothing
_FAR = -40  # a number times a smaller power of two is nothing to e4m3
_SHIFTS = (-16, 10)  # powers of two beyond, times a number, are none of e4m3's; those within are float16's

_LAST = (_NONE, -1, 0, -1, 1, 0, 2, 1)
"""Exponents of the last bits of e2m1's eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
_TOP = (-_NONE, -1, 0, 0, 1, 1, 2, 2)
"""Exponents of the magnitudes."""
_ORDER = (4, 0, 1, 0, 2, 1, 3, 2)
"""The magnitudes' places by the exponent of the last bit, zero last."""
_PACKED = sum(place << 4 * magnitude for magnitude, place in enumerate(_ORDER))
_LAST_BY_PLACE = tuple(_LAST[_ORDER.index(place)] for place in range(5))


def _two_to(exponents: torch.Tensor) -> torch.Tensor:
    """float32 powers of two of int32 from -126 to 127, by their bits: a GPU's `pow` promises no exact ones."""
    return (exponents + _BIAS << 23).view(torch.float32)


def _parts(rows: int, columns: int) -> list[slice]:
    step = max(1, _PART // columns)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _split(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 `[N, K/32, 32]` of packed ones, uint8 `[N, K/2]`, low nibble first."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).view(codes.shape[0], -1, _BLOCK)


def _looked_up(values: tuple[int, ...], places: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=places.device)[places.long()]


def _exponents(magnitudes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `exponents`, of e2m1's codes without their signs, uint8 `[N, K/32, 32]`."""
    exponents = scales.to(torch.int32) - _BIAS
    # Magnitudes are in the order of their codes; those of last bits are looked up in the nibbles of a number.
    packed = torch.full((), _PACKED, dtype=torch.int32, device=magnitudes.device)
    places = (packed >> (magnitudes.to(torch.int32) << 2) & 7).amin(-1)
    top, last = _looked_up(_TOP, magnitudes.amax(-1)), _looked_up(_LAST_BY_PLACE, places)
    return (top + exponents).amax(-1), (last + exponents).amin(-1)


def _values(nibbles: torch.Tensor) -> torch.Tensor:
    """float16 of e2m1's codes: two bits of exponent and one of mantissa, in their places there, are 2**14 too small."""
    codes = nibbles.to(torch.int16)
    return ((codes & 7) << 9 | (codes & 8) << 12).view(torch.float16) * 2.0**14


def exponents(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 `[N]` each: exponents of a row's largest number and of its last bit, the lowest that a number of it has.

    Args:
        codes: uint8 `[N, K/2]`, e2m1, low nibble first.
        scales: uint8 `[N, K/32]`, e8m0.

    A row of zeros has a last bit that is above its largest number.
    """
    parts = [_exponents(_split(codes[rows]) & 7, scales[rows]) for rows in _parts(codes.shape[0], 2 * codes.shape[1])]
    top, last = zip(*parts, strict=True)
    return torch.cat(top), torch.cat(last)


def fold(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn `[N, K]` and float32 `[N]`, powers of two, whose products are exactly what was folded.

    Args:
        codes: uint8 `[N, K/2]`, e2m1, low nibble first.
        scales: uint8 `[N, K/32]`, e8m0.

    A row with a scale of 255, which is NaN, and one that does not fit (`exponents`, `SPREAD`) have NaN for a scale.
    """
    folded = torch.empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.float8_e4m3fn, device=codes.device)
    factors = torch.empty(codes.shape[0], dtype=torch.float32, device=codes.device)
    for rows in _parts(*folded.shape):
        nibbles = _split(codes[rows])
        top, last = _exponents(nibbles & 7, scales[rows])
        lost = (scales[rows] == _NAN).any(-1) | (top - last > SPREAD)
        # As low as it may be, so that most numbers are normal; a row of zeros may have any.
        exponent = (top - _LARGEST).clamp(min=_NORMAL, max=_BIAS)
        shift = scales[rows].to(torch.int32) - _BIAS - exponent[:, None]
        factor = _two_to(shift.clamp(*_SHIFTS)).to(torch.float16)
        values = _values(nibbles).mul_(factor[:, :, None]).clamp_(-448.0, 448.0)
        folded[rows] = values.flatten(1).to(torch.float8_e4m3fn)
        factors[rows] = _two_to(exponent).masked_fill(lost, float("nan"))
    return folded, factors


def fold_codes(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8_e4m3fn `[N, K]`, float32 `[N]`, powers of two, whose products are what was folded, but for what is lost:
    float32 `[N]`, the largest relative L2 error of a row's blocks of 32, 0 where all are exact.

    Args:
        codes: float8_e4m3fn `[N, K]`.
        scales: uint8 `[N, K/32]`, e8m0.

    A row with a NaN, be it a code or a scale of 255, has NaN for a scale and an error of 0.
    """
    folded = torch.empty(codes.shape, dtype=torch.float8_e4m3fn, device=codes.device)
    factors = torch.empty(codes.shape[0], dtype=torch.float32, device=codes.device)
    errors = torch.empty_like(factors)
    for rows in _parts(*codes.shape):
        values = codes[rows].float().view(-1, codes.shape[1] // _BLOCK, _BLOCK)
        power = scales[rows].to(torch.int32) - _BIAS
        largest = values.abs().amax(-1)
        nan = ((scales[rows] == _NAN) | largest.isnan()).any(-1)
        # The largest number becomes 448 or less, as little less as a power of two allows: 448 is 0.875 * 2**9.
        mantissa, exponent = torch.frexp(largest)
        needed = power + exponent.to(torch.int32) - 9 + (mantissa > 0.875).to(torch.int32)
        exponent = needed.masked_fill(largest == 0, _NORMAL).amax(-1).masked_fill(nan, 0).clamp(min=_NORMAL, max=_BIAS)
        # A block of zeros may have any scale.
        scaled = (values * _two_to((power - exponent[:, None]).clamp(_FAR, _BIAS))[:, :, None]).nan_to_num()
        folded[rows] = scaled.clamp(-448.0, 448.0).flatten(1).to(torch.float8_e4m3fn)
        lost = (folded[rows].float().view(values.shape) - scaled).norm(dim=-1)
        size = scaled.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        errors[rows] = (lost / size).amax(-1).masked_fill(nan, 0)
        factors[rows] = _two_to(exponent).masked_fill(nan, float("nan"))
    return folded, factors, errors


def unfold(folded: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Inverse of `fold`, in the numbers: float32 `[N, K]`. Which block had which exponent is not kept where the numbers
    do not tell."""
    return folded.to(torch.float32) * factors[:, None]


def lanes_of_pairs(rows: int, device: torch.device | None = None) -> torch.Tensor:
    """int64 `[rows]`: which row of gate rows, then up rows, is stored in each place; rows a multiple of 64.

    64 stored rows are 32 gate and 32 up rows. An accumulator's lane holds columns 8 b + 2 t and 8 b + 2 t + 1 for all
    b: a gate row and its up row, and for eight b the rows of eight neighbours.
    """
    place = torch.arange(rows, device=device)  # block of 64, b of 8, t of 4, gate or up
    block, b, t, part = place // 64, place // 8 % 8, place // 2 % 4, place % 2
    return part * (rows // 2) + 32 * block + 8 * t + b


def lanes_of_rows(rows: int, device: torch.device | None = None) -> torch.Tensor:
    """int64 `[rows]`: which row is stored in each place, so that a lane holds eight neighbours; rows: whole 32s."""
    place = torch.arange(rows, device=device)  # block of 32, b of 4, t of 4, r of 2
    block, b, t, r = place // 32, place // 8 % 4, place // 2 % 4, place % 2
    return 32 * block + 8 * t + 2 * b + r
