"""File permissions that hold for root, too."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_VERSION_3 = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2
_Header = ctypes.c_uint32 * 2
_Sets = ctypes.c_uint32 * 6
"""Effective, permitted and inheritable capabilities 0 to 31, then the same of 32 to 63; linux/capability.h."""


@contextlib.contextmanager
def enforced() -> Iterator[None]:
    """The calling thread may open only what the files' modes let their owner open. `os.access` still says yes to root,
    as it asks what the thread may take back."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION_3, 0), _Sets()

    def call(name: str) -> None:
        if getattr(libc, name)(header, sets) != 0:
            raise OSError(ctypes.get_errno(), name)

    call("capget")
    effective = sets[0]
    sets[0] = effective & ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    call("capset")
    try:
        yield
    finally:
        sets[0] = effective
        call("capset")
