"""MXFP4 and MXFP8 folded into e4m3: the powers of two of a row's blocks go into its codes, but for one of the row.

MXFP4 exactly, or not at all: e4m3 holds e2m1's significands from 2**-9 to 448, so a row fits when its largest number's
exponent and its last bit's (that of the number with the smallest one) lie within 17 of each other. Numbers of MXFP8 are
e4m3's already: those of blocks with smaller scales lose bits where they become subnormal, by at most 2**-10 where the
row's largest number is 448; how much that is of a block is known (`fold_codes`). Also the order in which
`kernels/fp8_products.py` wants a matrix's rows.
"""

from __future__ import annotations

import functools

import torch

_LARGEST = 8  # exponent of the largest e2m1 significand that e4m3 holds: 1.5 * 2**8 = 384
_LEAST = -9  # exponent of e4m3's last subnormal bit
SPREAD = _LARGEST - _LEAST
"""By how much the exponents of a row's largest number and of its last bit may differ."""

_BIAS = 127  # of e8m0
_NAN = 255
_NORMAL = -126  # a smaller row scale is subnormal, which kernels flush to zero
_BLOCK = 32
_PART = 1 << 22
"""Numbers of MXFP4 folded at a time; three bytes for each are in memory in between."""
_PART_OF_CODES = 1 << 20
"""Numbers of MXFP8 folded at a time; some float32 numbers for each are in memory in between."""
_NONE = 1 << 10  # the exponent of nothing
_FAR = -40  # a number times a smaller power of two is nothing to e4m3
_SHIFTS = (-16, 10)
"""Powers of two between a block and its row; those beyond, times a number, are none of e4m3's."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1's codes without their signs."""
_LAST = (_NONE, -1, 0, -1, 1, 0, 2, 1)
"""Exponents of the last bits of the magnitudes."""
_TOP = (-_NONE, -1, 0, 0, 1, 1, 2, 2)
"""Exponents of the magnitudes."""


def _two_to(exponents: torch.Tensor) -> torch.Tensor:
    """float32 powers of two of int32 from -126 to 127, by their bits: a GPU's `pow` promises no exact ones."""
    return (exponents + _BIAS << 23).view(torch.float32)


def _parts(rows: int, columns: int, most: int) -> list[slice]:
    step = max(1, most // columns)
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


@functools.cache
def _tables_on_host() -> torch.Tensor:
    """int16 `[2 + shifts, 256]`, for every byte of two codes: the exponent of its larger number, that of its lowest
    last bit, and for each power of two of `_SHIFTS` the two codes of e4m3, the first in the low byte.

    A look-up is one operation where the arithmetic is a dozen, each of which a GPU has to be told to start. The tables
    stay on the host: memory of a GPU that is taken while weights are loaded is gone when vLLM sleeps.
    """
    # The device is named: while it loads a model, vLLM sets torch's default to the model's.
    with torch.device("cpu"):
        byte = torch.arange(256)
        low, high = byte & 15, byte >> 4
        top, last = (torch.tensor(each, dtype=torch.int16) for each in (_TOP, _LAST))
        magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float32)
        shifts = torch.arange(_SHIFTS[0], _SHIFTS[1] + 1, dtype=torch.int32)
        values = _two_to(shifts)[:, None] * torch.cat((magnitudes, -magnitudes))
        codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        pairs = torch.stack((codes[:, low], codes[:, high]), dim=-1).view(torch.int16).squeeze(-1)
        tops = torch.maximum(top[low & 7], top[high & 7])
        lasts = torch.minimum(last[low & 7], last[high & 7])
        return torch.cat((tops[None], lasts[None], pairs))


def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`_tables_on_host` on a device, int16: tops `[256]`, lasts `[256]`, pairs of codes `[shifts * 256]`."""
    # The source is never changed or freed: nobody has to wait until it has been read.
    tables = _tables_on_host().to(device, non_blocking=True)
    return tables[0], tables[1], tables[2:].view(-1)


def _exponents(
    codes: torch.Tensor, scales: torch.Tensor, tops: torch.Tensor, lasts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `exponents`."""

    def part(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        places, blocks = codes[rows].to(torch.int32).view(-1), (*scales[rows].shape, _BLOCK // 2)
        top = (tops.index_select(0, places).view(blocks).amax(-1) + scales[rows]).amax(-1)
        return top, (lasts.index_select(0, places).view(blocks).amin(-1) + scales[rows]).amin(-1)

    parts = zip(*map(part, _parts(codes.shape[0], 2 * codes.shape[1], _PART)), strict=True)
    top, last = (torch.cat(each).to(torch.int32) - _BIAS for each in parts)
    return top, last


def exponents(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 `[N]` each: exponents of a row's largest number and of its last bit, the lowest that a number of it has.

    Args:
        codes: uint8 `[N, K/2]`, e2m1, low nibble first.
        scales: uint8 `[N, K/32]`, e8m0.

    A row of zeros has a last bit that is above its largest number.
    """
    tops, lasts, _ = _tables(codes.device)
    return _exponents(codes, scales, tops, lasts)


def fold(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn `[N, K]` and float32 `[N]`, powers of two, whose products are exactly what was folded.

    Args:
        codes: uint8 `[N, K/2]`, e2m1, low nibble first; meta tensors too.
        scales: uint8 `[N, K/32]`, e8m0.

    A row with a scale of 255, which is NaN, and one that does not fit (`exponents`, `SPREAD`) have NaN for a scale.
    """
    pairs = torch.empty(codes.shape, dtype=torch.int16, device=codes.device)
    if codes.is_meta:
        return pairs.view(torch.float8_e4m3fn), codes.new_empty(codes.shape[0], dtype=torch.float32)
    tops, lasts, folded = _tables(codes.device)
    top, last = _exponents(codes, scales, tops, lasts)
    lost = (scales == _NAN).any(-1) | (top - last > SPREAD)
    # As low as it may be, so that most numbers are normal; a row of zeros may have any.
    exponent = (top - _LARGEST).clamp(min=_NORMAL, max=_BIAS)
    lowest = exponent + (_BIAS + _SHIFTS[0])
    table = (scales - lowest[:, None]).clamp_(0, _SHIFTS[1] - _SHIFTS[0]).mul_(256)
    for rows in _parts(codes.shape[0], 2 * codes.shape[1], _PART):
        blocks = codes[rows].view(*table[rows].shape, _BLOCK // 2)
        torch.index_select(folded, 0, (blocks + table[rows, :, None]).view(-1), out=pairs[rows].view(-1))
    return pairs.view(torch.float8_e4m3fn), _two_to(exponent).masked_fill(lost, float("nan"))


def fold_codes(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8_e4m3fn `[N, K]`, float32 `[N]`, powers of two, whose products are what was folded, but for what is lost:
    float32 `[N]`, the largest relative L2 error of a row's blocks of 32, 0 where all are exact.

    Args:
        codes: float8_e4m3fn `[N, K]`; meta tensors too.
        scales: uint8 `[N, K/32]`, e8m0.

    A row with a NaN, be it a code or a scale of 255, has NaN for a scale and an error of 0.
    """
    folded = torch.empty(codes.shape, dtype=torch.float8_e4m3fn, device=codes.device)
    factors = torch.empty(codes.shape[0], dtype=torch.float32, device=codes.device)
    errors = torch.empty_like(factors)
    for rows in [] if codes.is_meta else _parts(codes.shape[0], codes.shape[1], _PART_OF_CODES):
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
    # By gate or up, block of 64, t of 4, b of 8; stored by block, b, t, gate or up.
    return torch.arange(rows, device=device).view(2, -1, 4, 8).permute(1, 3, 2, 0).reshape(rows)


def lanes_of_rows(rows: int, device: torch.device | None = None) -> torch.Tensor:
    """int64 `[rows]`: which row is stored in each place, so that a lane holds eight neighbours; rows: whole 32s."""
    # By block of 32, t of 4, b of 4, r of 2; stored by block, b, t, r.
    return torch.arange(rows, device=device).view(-1, 4, 4, 2).transpose(1, 2).reshape(rows)
