"""FP8 activations: e4m3 with one float32 scale per token, its largest magnitude / 448.

`kernels/fp8_quantize.py` quantizes like this. So do compressed-tensors checkpoints whose FP8 inputs have the strategy
``token``, MXFP4 checkpoints among them. This module reads no weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .mxfp8 import E4M3_MAX


def fake_quantize(values: Tensor) -> Tensor:
    """Activations quantized and dequantized: float32 `[..., K]`. A NaN or an infinity makes the whole token NaN
    or infinite."""
    scale = values.abs().amax(-1, keepdim=True) / E4M3_MAX
    scaled = (values / scale.clamp(min=torch.finfo(torch.float32).tiny)).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).to(torch.float32) * scale
