"""The result of checking a layer of a checkpoint with one backend; torch is not imported for it."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["passed", "failed", "ended", "damaged", "no_backend", "stock"]
"""``passed`` and ``failed``: compared. ``ended``: the process of the check ended meanwhile. ``damaged``: the weights
cannot be computed with, or are 0 in all experts. ``no_backend``: no server starts. ``stock``: left to stock vLLM, not
compared."""


class LayerResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of checking one layer with one backend. Figures that are no finite numbers are None, and so are errors
    where no output was compared.

    Attributes:
        layer: the layer's name.
        backend: the backend; "" where none was compared.
        status: see `Status`.
        error: relative L2 error of all compared outputs together.
        worst: largest relative error of a block of 32 columns, a column or a token.
        allowed: largest error that the formats explain.
        outliers: blocks that are off by more.
        blocks: compared blocks.
        experts_checked: experts that were compared.
        experts: experts of the layer.
        calls: calls of the kernel.
        faulty_experts: experts that are wrong by themselves.
        fault: what is wrong, or why nothing was compared.
        warnings: what a server would warn of as it loads the layer.
        inputs: what the inputs are made of.
        peak: largest input value over the root mean square of its token.
        memory: bytes that the check of the layer held.
        seconds: duration.
    """

    layer: str
    backend: str
    status: Status
    error: float | None = None
    worst: float | None = None
    allowed: float | None = None
    outliers: int = 0
    blocks: int = 0
    experts_checked: int = 0
    experts: int = 0
    calls: int = 0
    faulty_experts: tuple[int, ...] = ()
    fault: str = ""
    warnings: tuple[str, ...] = ()
    inputs: str = ""
    peak: float | None = None
    memory: int = 0
    seconds: float = 0.0
