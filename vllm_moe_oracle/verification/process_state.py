"""What a backend may not change: settings of torch, and of the process, that the rest of the server works with.

A kernel that leaves another default dtype, or that seeds torch's random numbers, may give right outputs itself. What is
wrong is the rest of the server: layers that are built afterwards, tokens that are drawn, and a server that no signal
ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..backends.emulation import fp32_precisions, set_fp32_precisions

_SEED = 0x6D6F656F7261636C
"""A seed that no other code sets."""

_SUBNORMAL = 5e-324
"""The smallest positive number of Python."""


def _flushes_subnormals() -> bool:
    """Whether this thread takes subnormal numbers for 0, in torch and in Python. torch has no function."""
    return _SUBNORMAL * 1.0 == 0.0


def _default_device() -> torch.device | None:
    """What `torch.set_default_device` has set; not the device of a context, as vLLM loads a model in."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    return None if context is None else context.device


def _float32_precisions() -> tuple[str, list[str]]:
    """The precision for all libraries, "" where torch raises since a library's own was set; and the libraries'."""
    try:
        common = torch.get_float32_matmul_precision()
    except RuntimeError:
        common = ""
    return common, fp32_precisions()


def _set_float32_precisions(precisions: tuple[str, list[str]]) -> None:
    common, own = precisions
    if common:  # else torch would raise from now on where others read it
        torch.set_float32_matmul_precision(common)
    set_fp32_precisions(own)


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _signal_handlers() -> list[Any]:
    return [signal.getsignal(number) for number in _SIGNALS]


def _set_signal_handlers(handlers: list[Any]) -> None:
    with suppress(ValueError):  # in another thread than the main one, which could not have changed them either
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_default_device, torch.set_default_device),
    "gradient mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "precision of float32 products": (_float32_precisions, _set_float32_precisions),
    "flushing of subnormal numbers": (_flushes_subnormals, torch.set_flush_denormal),
    "working directory": (os.getcwd, os.chdir),
    "handlers of SIGTERM and SIGINT": (_signal_handlers, _set_signal_handlers),
}
"""How to read a setting, and how to put it back."""


@contextmanager
def kept() -> Iterator[list[str]]:
    """Keeps the settings, and torch's random numbers on the host, as they are: what is changed meanwhile is put back.

    Yields:
        The names of the settings that were changed, once the context has ended without an exception. Drawing random
        numbers is no change, seeding them is.
    """
    changed: list[str] = []
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    random = torch.default_generator
    numbers = random.get_state()
    random.manual_seed(_SEED)
    try:
        yield changed
        changed += ["seed of random numbers"] * (random.initial_seed() != _SEED)
    finally:
        random.set_state(numbers)
        for name, (read, put) in _SETTINGS.items():
            if read() != before[name]:
                changed.append(name)
                put(before[name])
