"""FP8 for activations: e4m3 with one float32 scale a token, its largest magnitude over 448.

What `kernels/fp8_quantise.py` does, and what compressed-tensors means by FP8 inputs with the strategy ``token``, which
it can have beside MXFP4. No weights in it are read here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mxfp8 import E4M3_MAX


def round_trip(values: Tensor) -> Tensor:
    """Activations quantised and back; float32 `[M, K]`. NaN and infinities make the whole token NaN or infinite."""
    scale = values.abs().amax(-1, keepdim=True) / E4M3_MAX
    scaled = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).to(torch.float32) * scale
