"""Errors after which a process must end, because its CUDA context is broken."""

from __future__ import annotations

from ..errors import MeasurementError, describe_error
from ..measurements.bench_records import PEER_PREFIX, STOCK_PREFIX
from ..settings import env_var

_CONTEXT_ERRORS = (
    "CUDA error",
    "CUDA driver error",
    "illegal memory access",
    "illegal address",
    "illegal instruction",
    "misaligned address",
    "invalid program counter",
    "shared address space",
    "device-side assert",
    "hardware stack error",
    "launch timed out",
    "unspecified launch failure",
    "uncorrectable ECC error",
)
"""Parts of messages after which no kernel of the process runs any more: torch's words for every error, and those of
`cudaGetErrorString` and `cuGetErrorString` for errors that end a context, which Triton and other libraries pass on.
"""


class BrokenContextError(MeasurementError):
    """A kernel broke the CUDA context. Whatever runs later in the process fails, too.

    Args:
        backend: name of the backend that ran.
        failure: the error, on one line.
    """

    def __init__(self, backend: str, failure: str) -> None:
        super().__init__(f"it broke the GPU's context: {failure}", how_to_leave_out(backend), backend)
        self.backend, self.failure = backend, failure


def how_to_leave_out(name: str) -> str:
    """What keeps a backend from running, as a sentence without its period.

    Args:
        name: of the backend, stock layer or peer.
    """
    if name.startswith(PEER_PREFIX):
        return "A run without --peers leaves it out"
    if name.startswith(STOCK_PREFIX):
        return f"A value of --stock other than {name.removeprefix(STOCK_PREFIX)} leaves it out"
    return f"{env_var('disable')}={name} leaves it out"


def breaks_context(failure: str) -> bool:
    """Whether an error's message says that the CUDA context is broken."""
    return any(words in failure for words in _CONTEXT_ERRORS)


def raise_if_broken(backend: str, error: Exception) -> None:
    """Raises if an exception says anywhere in its message that the CUDA context is broken.

    Args:
        backend: name of the backend that ran.
        error: what it raised.

    Raises:
        BrokenContextError: it does. Its cause is `error`.
    """
    try:
        text = str(error)
    except Exception:  # a third party's __str__
        return
    if breaks_context(text):
        raise BrokenContextError(backend, describe_error(error)) from error
