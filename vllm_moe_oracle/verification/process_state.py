"""What a backend may not change: settings of torch, and of the process, that the rest of the server works with.

A kernel that leaves another default dtype, or that seeds torch's random numbers, may give right outputs itself. What is
wrong is the rest of the server: layers that are built afterwards, tokens that are drawn, and a server that no signal
ends. The backend that is checked next may fail for it, too.
"""

from __future__ import annotations

import gc
import locale
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
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


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _autocast() -> tuple[bool, list[tuple[bool, torch.dtype]]]:
    """Whether casts are kept, and for each device whether operations cast their inputs, and to what."""
    devices = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _AUTOCAST_DEVICES]
    return torch.is_autocast_cache_enabled(), devices


def _set_autocast(state: tuple[bool, list[tuple[bool, torch.dtype]]]) -> None:
    keeps_casts, devices = state
    torch.set_autocast_cache_enabled(keeps_casts)
    for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.clear_autocast_cache()


def _deterministic() -> tuple[int, bool]:
    return torch.get_deterministic_debug_mode(), torch._C._get_deterministic_fill_uninitialized_memory()


def _set_deterministic(state: tuple[int, bool]) -> None:
    mode, fills = state
    torch.set_deterministic_debug_mode(mode)
    torch._C._set_deterministic_fill_uninitialized_memory(fills)


_LIBRARY_SWITCHES = (
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
)


def _library_switches() -> list[bool]:
    return [read() for read, _ in _LIBRARY_SWITCHES]


def _set_library_switches(switches: list[bool]) -> None:
    for (_, put), switch in zip(_LIBRARY_SWITCHES, switches, strict=True):
        put(switch)


def _anomaly_mode() -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


def _uses_cuda() -> bool:
    """Whether CUDA is initialized: questions about its state would initialize it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has no types here


def _cuda_stream() -> tuple[int, int, int]:
    """The current stream by its number, its device, and torch's number for CUDA: the first ones without CUDA."""
    if not _uses_cuda():
        return 0, 0, 1
    found: tuple[int, int, int] = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    return found


def _set_cuda_stream(stream: tuple[int, int, int]) -> None:
    """Makes the stream and its device current, by the function that vLLM replaces to know the stream itself."""
    number, device, kind = stream
    given: Any = torch.cuda.Stream  # torch has no types here
    torch.cuda.set_stream(given(stream_id=number, device_index=device, device_type=kind))


def _working_directory() -> str:
    """The working directory; "" where it was removed."""
    with suppress(OSError):
        return os.getcwd()
    return ""


def _umask() -> int:
    """The permissions that new files lack. Setting it would be quicker, and seen by files that other threads make."""
    with suppress(OSError), open("/proc/self/status", "rb", buffering=0) as status:
        _, found, rest = status.read(512).partition(b"\nUmask:")
        if found:
            return int(rest.split(maxsplit=1)[0], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _collection() -> tuple[bool, tuple[int, int, int]]:
    return gc.isenabled(), gc.get_threshold()


def _set_collection(state: tuple[bool, tuple[int, int, int]]) -> None:
    enabled, threshold = state
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()


_SIGNALS = tuple(
    getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "CHLD", "HUP", "PIPE", "ALRM", "USR1", "USR2")
)


def _signals() -> tuple[list[Any], set[int]]:
    """The handler of each of `_SIGNALS`, and the signals that this thread does not take."""
    return [signal.getsignal(number) for number in _SIGNALS], signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _set_signals(state: tuple[list[Any], set[int]]) -> None:
    handlers, blocked = state
    with suppress(ValueError):  # in another thread than the main one, which could not have changed them either
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            if handler is not None:  # one that was not installed from Python cannot be put back from there
                signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


_HOOKS = ((sys, "excepthook"), (sys, "unraisablehook"), (sys, "displayhook"), (threading, "excepthook"))
_STREAMS = ((sys, "stdin"), (sys, "stdout"), (sys, "stderr"))


def _attributes(places: Sequence[tuple[Any, str]]) -> tuple[Callable[[], list[Any]], Callable[[list[Any]], None]]:
    """How to read attributes of modules, and how to put them back."""

    def read() -> list[Any]:
        return [getattr(module, name) for module, name in places]

    def put(values: list[Any]) -> None:
        for (module, name), value in zip(places, values, strict=True):
            setattr(module, name, value)

    return read, put


def _tracers() -> list[Any]:
    """The functions that Python calls at each line and call, of this thread and of those that start."""
    return [sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()]


def _set_tracers(tracers: list[Any]) -> None:
    for put, function in zip(
        (sys.settrace, sys.setprofile, threading.settrace, threading.setprofile), tracers, strict=True
    ):
        put(function)


@dataclass(frozen=True)
class _WarningFilters:
    """Filters of Python's warnings. Modules that are imported late add some; only those that raise warnings as
    exceptions, which nobody catches, are compared."""

    raising: list[Any]
    filters: list[Any] = field(compare=False)


def _warning_filters() -> _WarningFilters:
    return _WarningFilters([each for each in warnings.filters if each[0] == "error"], [*warnings.filters])


def _set_warning_filters(state: _WarningFilters) -> None:
    warnings.resetwarnings()  # clears the list, and what Python remembers of it
    warnings.filters[:] = state.filters  # type: ignore[index]  # a list, in all releases


_LOGGERS = tuple(map(logging.getLogger, ("", "vllm", "vllm.moe_oracle")))


def _silencing() -> tuple[int, list[bool]]:
    """The level up to which nothing is logged, and whether a logger is switched off."""
    return logging.root.manager.disable, [each.disabled for each in _LOGGERS]


def _set_silencing(state: tuple[int, list[bool]]) -> None:
    level, disabled = state
    logging.disable(level)
    for each, off in zip(_LOGGERS, disabled, strict=True):
        each.disabled = off


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_default_device, torch.set_default_device),
    "gradient mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "autocast": (_autocast, _set_autocast),
    "anomaly detection": (_anomaly_mode, lambda mode: torch.set_anomaly_enabled(*mode)),
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (_deterministic, _set_deterministic),
    "switches of mkldnn and cuDNN": (_library_switches, _set_library_switches),
    "precision of float32 products": (_float32_precisions, _set_float32_precisions),
    "flushing of subnormal numbers": (_flushes_subnormals, torch.set_flush_denormal),
    "CUDA device and stream": (_cuda_stream, _set_cuda_stream),
    "CPU affinity": (lambda: os.sched_getaffinity(0), lambda cpus: os.sched_setaffinity(0, cpus)),
    "working directory": (_working_directory, os.chdir),
    "umask": (_umask, os.umask),
    "signal handlers": (_signals, _set_signals),
    "garbage collection": (_collection, _set_collection),
    "disabled logging": (_silencing, _set_silencing),
    "recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "thread switch interval": (sys.getswitchinterval, sys.setswitchinterval),
    "exception hooks": _attributes(_HOOKS),
    "trace and profile functions": (_tracers, _set_tracers),
    "standard streams": _attributes(_STREAMS),
    "warnings raised as errors": (_warning_filters, _set_warning_filters),
    "locale": (lambda: locale.setlocale(locale.LC_ALL), lambda name: locale.setlocale(locale.LC_ALL, name)),
}
"""How to read a setting, and how to put it back. Reading all of them takes about 50 µs, most of it for the umask."""


def _generators() -> list[torch.Generator]:
    """torch's random numbers on the host, and those of the current GPU."""
    gpu = [torch.cuda.default_generators[torch._C._cuda_getDevice()]] if _uses_cuda() else []
    return [torch.default_generator, *gpu]


@contextmanager
def kept() -> Iterator[list[str]]:
    """Keeps the settings, and torch's random numbers, as they are: what is changed meanwhile is put back.

    Yields:
        The names of the settings that were changed, once the context has ended without an exception. Drawing random
        numbers does not count as a change, seeding them does.
    """
    changed: list[str] = []
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    random = [(each, each.get_state()) for each in _generators()]
    for each, _ in random:
        each.manual_seed(_SEED)
    try:
        yield changed
        changed += ["seed of random numbers"] * any(each.initial_seed() != _SEED for each, _ in random)
    finally:
        for each, numbers in random:
            each.set_state(numbers)
        for name, (read, put) in _SETTINGS.items():
            if read() != before[name]:
                changed.append(name)
                with suppress(OSError):  # a folder that was removed, or a CPU that went away
                    put(before[name])
