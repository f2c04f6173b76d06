"""Dtypes of models with quantized experts."""

from __future__ import annotations

import torch
from vllm.platforms import current_platform

_EMULATED_DTYPES = (torch.float16, torch.float32)
"""Dtypes that the emulation supports on a CPU beside those of the stock classes."""


class EmulatedDtypesMixin:
    """The mix-in in front of a stock config class whose experts can be emulated on a CPU."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the model: the stock class's; on a CPU also float16 and float32."""
        found = list(super().get_supported_act_dtypes())  # type: ignore[misc]
        if current_platform.is_cpu():
            found += [each for each in _EMULATED_DTYPES if each not in found]
        return found
