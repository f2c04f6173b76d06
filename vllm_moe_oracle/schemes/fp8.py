"""FP8 activations: e4m3 with one power-of-two scale per token and 128 input features.

DeepGEMM quantizes activations like this on Blackwell, and DeepSeek's code does for MXFP4 experts: the scale is the
smallest power of two with which no value of the group saturates. This module reads no weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.problem import E8M0_BIAS
from .mxfp8 import E4M3_MAX, e8m0_from_amax

GROUP_SIZE = 128


def fake_quantize(values: Tensor) -> Tensor:
    """Activations quantized and dequantized: float32 `[..., K]`. The last group may have fewer than 128 features."""
    columns = values.shape[-1]
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, -columns % GROUP_SIZE))
    groups = padded.reshape(*padded.shape[:-1], padded.shape[-1] // GROUP_SIZE, GROUP_SIZE)
    codes = e8m0_from_amax(groups.abs().amax(-1), "ceil").to(torch.int32).unsqueeze(-1)
    # ldexp instead of a division: 1 / 2**127 is subnormal, and some devices flush it to zero.
    scaled = torch.ldexp(groups, E8M0_BIAS - codes).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.ldexp(scaled.to(torch.float32), codes - E8M0_BIAS).flatten(-2)[..., :columns]
