"""Which dtypes a model with quantised experts may have."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.platforms import current_platform

_EMULATED = (torch.float16, torch.float32)
"""What emulation takes on a CPU, and stock's kernels there do not all take."""


def with_emulated(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """A stock config class's dtypes; on a CPU, where experts can be emulated, with float16 and float32."""
    found = list(dtypes)
    if current_platform.is_cpu():
        found += [each for each in _EMULATED if each not in found]
    return found
