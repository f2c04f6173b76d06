"""Errors after which a process must end, because its CUDA context is broken."""

from __future__ import annotations

from ..errors import MeasurementError

_CONTEXT_ERRORS = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")
"""Parts of messages after which no kernel of the process runs any more."""


class BrokenContextError(MeasurementError):
    """A kernel broke the CUDA context. Whatever runs later in the process fails, too.

    Args:
        backend: name of the backend that ran.
        failure: the error, on one line.
    """

    def __init__(self, backend: str, failure: str) -> None:
        remedy = "Run the command again: it continues without this backend"
        super().__init__(f"it broke the GPU's context: {failure}", remedy, backend)
        self.backend, self.failure = backend, failure


def breaks_context(failure: str) -> bool:
    """Whether an error's message says that the CUDA context is broken."""
    return any(words in failure for words in _CONTEXT_ERRORS)
