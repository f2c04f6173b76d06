"""FP8 for activations: e4m3 with one power of two per 128 input features of a token.

DeepGEMM's recipe for activations on Blackwell, and that of DeepSeek's own code for MXFP4 experts: the scale is the
smallest power of two with which no value of the group saturates. Weights in this format are not read here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mxfp8 import E4M3_MAX, E8M0_BIAS, scale_exponents

GROUP = 128


def round_trip(values: Tensor) -> Tensor:
    """Activations quantised and back; float32 `[..., K]`. The last group may be a part of one."""
    columns = values.shape[-1]
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, -columns % GROUP))
    groups = padded.reshape(*padded.shape[:-1], padded.shape[-1] // GROUP, GROUP)
    codes = scale_exponents(groups.abs().amax(-1), "ceil").to(torch.int32).unsqueeze(-1)
    # ldexp rather than a division: 1 / 2**127 is subnormal, and some devices flush it to zero.
    scaled = torch.ldexp(groups, E8M0_BIAS - codes).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.ldexp(scaled.to(torch.float32), codes - E8M0_BIAS).flatten(-2)[..., :columns]
