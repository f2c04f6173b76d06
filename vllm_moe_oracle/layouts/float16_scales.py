"""Whether float16 holds the weights of an MX row exactly, rebased by the row's largest scale.

A stored weight is the code times its block's scale over the row's largest scale, times 2**1 (e2m1) or 2**7 (e4m3): as
large as float16 allows with scales that are float16's normal powers of two, 2**-14 to 2**15. e2m1 values are multiples
of 2**-1, e4m3 values of 2**-9, and float16 has multiples of 2**-24. So nothing is lost down to a scale that is 24
binades below the row's largest (e2m1), or 22 (e4m3), whatever the codes are. Blocks of zeros may have any scale.
"""

from __future__ import annotations

import torch

MAX_SPREAD = {"mxfp4": 24, "mxfp8": 22}
"""Binades below a row's largest scale in which float16 holds every weight exactly, by format."""
TOP = 30
"""What a row's largest scale is stored as (`wgmma_fragments.shuffle_mx_scales`): float16's exponent of 2**15."""

_MAGNITUDES = {"mxfp4": 0x77, "mxfp8": 0x7F}


def row_spreads(format: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Binades from each row's largest scale down to the smallest one of a block that is not all zeros.

    Args:
        format: "mxfp4" or "mxfp8".
        codes: two e2m1 codes a byte, uint8 `[N, K/2]`, or e4m3, one byte each, `[N, K]`.
        scales: e8m0, one byte each, `[N, K/32]`.

    Returns:
        int32 `[N]`, 0 for rows of zeros.
    """
    exponents = scales.view(torch.uint8).to(torch.int32)
    blocks = codes.view(torch.uint8).view(*exponents.shape, -1)
    used = (blocks & _MAGNITUDES[format]).amax(-1) != 0
    below = exponents.amax(-1, keepdim=True) - exponents
    return below.masked_fill(~used, 0).amax(-1)
