"""Dtypes of models with quantized experts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from vllm.platforms import current_platform

_EMULATED_DTYPES = (torch.float16, torch.float32)
"""Dtypes that the emulation supports on a CPU beside those of the stock classes."""


def with_emulated_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Dtypes of a stock config class; on a CPU, where experts can be emulated, with float16 and float32."""
    found = list(dtypes)
    if current_platform.is_cpu():
        found += [each for each in _EMULATED_DTYPES if each not in found]
    return found
