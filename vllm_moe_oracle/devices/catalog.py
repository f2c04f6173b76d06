"""Known devices, one JSON file each, and devices from files that ``vllm-moe-oracle status --json`` wrote elsewhere.

A new GPU is one file in this directory. Its name in ``--device`` is the file's name; `DeviceSpec` describes its fields.
"""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path

import msgspec

from ..core.problem import Device
from ..errors import SettingError, did_you_mean
from ..releases.supported import DEFAULT_PACKAGES
from ..untrusted import boundary, check_fields_once, read_file

DEVICE_KINDS = ("cuda", "cpu", "rocm", "xpu")
"""Kinds of device that rules distinguish."""

MAX_DEVICE_BYTES = 1 << 20
"""Size of the largest file that is taken for the description of a device."""

_DIRECTORY = Path(__file__).parent


class MeasuredRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a GPU reaches, as measured.

    Attributes:
        copy_gb_s: GB/s of a device-to-device copy of 1 GiB, reads and writes together.
        bf16_tflops: TFLOPS of cuBLAS for two bfloat16 matrices of 8192 x 8192.
    """

    copy_gb_s: float
    bf16_tflops: float


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of the catalog. Figures are from the product's data sheet, without sparsity.

    Attributes:
        kind: one of `DEVICE_KINDS`.
        name: the product's name.
        aliases: other names in ``--device``, and names that drivers report for the product.
        capability: CUDA compute capability: 90 for sm_90.
        sm_count: streaming multiprocessors.
        memory_gib: memory in GiB.
        features: instruction sets of a CPU.
        memory_bandwidth_gb_s: memory bandwidth in GB/s.
        peak_tflops: dense peak of the tensor cores in TFLOPS (TOPS for integers) by input dtype.
        measured: measured rates, when there are any. The roofline (`measurements.roofline`) uses them, else the data
            sheet's bandwidth and bfloat16 peak.
    """

    kind: str
    name: str
    aliases: tuple[str, ...] = ()
    capability: int = 0
    sm_count: int = 0
    memory_gib: float = 0.0
    features: tuple[str, ...] = ()
    memory_bandwidth_gb_s: float = 0.0
    peak_tflops: dict[str, float] = {}
    measured: MeasuredRates | None = None


def known_device_names() -> list[str]:
    """The names that `known_device` takes, without aliases."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.json"))


@cache
def catalog() -> dict[str, DeviceSpec]:
    """All known devices by name.

    Raises:
        SettingError: a file of the package does not describe a device.
    """
    return {name: _read_spec(_DIRECTORY / f"{name}.json") for name in known_device_names()}


def _read_spec(path: Path) -> DeviceSpec:
    try:
        return msgspec.json.decode(path.read_bytes(), type=DeviceSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # a ValidationError names the field
        known = ", ".join(each.name for each in msgspec.structs.fields(DeviceSpec))
        raise SettingError(
            f"the file of a device cannot be read: {error}", f"Its fields are {known}", str(path)
        ) from error


def find_spec(name: str) -> DeviceSpec | None:
    """The catalog's entry with a name, a product name or an alias, case-insensitively; None for an unknown one."""
    wanted = name.strip().lower()
    for key, spec in catalog().items():
        if wanted in (key, spec.name.lower(), *(alias.lower() for alias in spec.aliases)):
            return spec
    return None


def is_same_gpu(one: str, other: str) -> bool:
    """Whether two names are of one GPU: the driver's name of a product and the catalog's differ for some."""
    return one == other or ((spec := find_spec(one)) is not None and spec == find_spec(other))


_OTHER_DEVICES = {
    "an AMD GPU (ROCm)": re.compile(r"(amd[ -]|instinct|rocm|gfx\d|mi ?[1-4]\d\d|radeon)", re.IGNORECASE),
    "an Intel accelerator": re.compile(r"(intel[ -]|xpu|arc[ -]?[ab]\d|max[ -]?1[15]\d0|gaudi)", re.IGNORECASE),
    "a TPU": re.compile(r"(tpu|google[ -])", re.IGNORECASE),
}
"""Common names of devices for which vLLM has kernels and this plugin none."""


def known_device(name: str) -> Device:
    """A known device with the packages of an installation of the newest tested vLLM.

    Raises:
        SettingError: the name is unknown.
    """
    spec = find_spec(name)
    if spec is None:
        if vendor := next((each for each, names in _OTHER_DEVICES.items() if names.match(name.strip())), ""):
            rule = f"{name!r} is {vendor}: this plugin stands down there, and stock vLLM serves"
            raise SettingError(rule, "Name an NVIDIA GPU, or cpu")
        names = known_device_names()
        suggestion = did_you_mean(name, names, prefix="nvidia-", strict=True)
        raise SettingError(f"unknown device {name!r}", f"{suggestion}Valid are {', '.join(names)}")
    packages = dict(DEFAULT_PACKAGES[spec.kind])
    return Device(
        spec.kind, spec.name, spec.capability, spec.sm_count, spec.memory_gib, spec.features, packages=packages
    )


def load_device(path: Path) -> Device:
    """A device from a JSON file: the fields of `Device`, or an object that has them under ``device``. A GPU of the
    catalog needs no more than its kind and name.

    Raises:
        SettingError: the file cannot be read, or does not describe a device.
    """
    where = str(path)
    data = read_file(path, MAX_DEVICE_BYTES, SettingError)
    with boundary(SettingError, "not a device", 'It needs at least "kind" and "name"', where):
        fields = msgspec.json.decode(data)
        check_fields_once(data, SettingError, where)
        inner = fields.get("device", fields) if isinstance(fields, dict) else fields
        device = msgspec.convert(inner, Device)
    valid = [field.name for field in dataclasses.fields(Device)]
    unknown = [key for key in inner if key not in valid]
    if unknown:
        rule = f"not a device: unknown field {', '.join(f'{key[:60]!r}' for key in unknown[:5])}"
        raise SettingError(rule, f"Valid are {', '.join(valid)}", where)
    texts = (device.name, device.driver, *device.features, *device.packages, *device.packages.values())
    if unprintable := [text for text in texts if not text.isprintable()]:
        raise SettingError(f"not a device: {unprintable[0][:60]!a} is not printable", where=where)
    if device.kind not in DEVICE_KINDS:
        raise SettingError(f"not a device: kind is {device.kind[:60]!r}", f"Valid are {', '.join(DEVICE_KINDS)}", where)
    if not device.name.strip():
        raise SettingError(f"not a device: name is {device.name!r}", "Give the product's name", where)
    for field, (least, most, kind) in _RANGES.items():
        value, other = getattr(device, field), kind not in ("", device.kind)
        if field in inner and not (value == 0 if other else least <= value <= most):
            rule = f"not a device: {field} is {value:g}, for {device.kind} "
            rule += "only 0 is possible" if other else f"possible are {least} to {most}"
            raise SettingError(rule, "Leave it out where it is unknown; status --json prints a machine's own", where)
    if device.kind == "cuda" and "capability" not in inner:
        spec = find_spec(device.name)
        if spec is None or spec.kind != "cuda":
            rule = f"not a device: {device.name[:60]!r} is no GPU that is known, and its capability is missing"
            raise SettingError(rule, 'Add "capability": 90 for sm_90', where)
        known = {name: getattr(spec, name) for name in ("capability", "sm_count", "memory_gib") if name not in inner}
        device = dataclasses.replace(device, **known)
    return device


_RANGES = {"capability": (50, 199, "cuda"), "sm_count": (1, 1024, "cuda"), "memory_gib": (0, 1 << 16, "")}
"""Least and greatest values of a device that exists, and the kind that alone has the field; "" for all."""
