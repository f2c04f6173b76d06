"""Known devices, one JSON file each, and devices from files that ``vllm-moe-oracle status --json`` wrote elsewhere.

A new GPU is one file in this directory. Its name in ``--device`` is the file's name; `DeviceSpec` describes its fields.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..core.problem import Device
from ..errors import SettingError, did_you_mean
from ..releases.supported import DEFAULT_PACKAGES, NEWEST, packages_of
from ..untrusted import boundary, check_fields_once, read_file

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
        kind: one of `core.problem.DEVICE_KINDS`.
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


def _comparable(name: str) -> str:
    """A name without what spellings of one product differ in: case, spaces, hyphens, and the names of the maker and of
    its series."""
    return re.sub(r"nvidia|geforce|tesla|[\s_-]+", "", name.lower())


@cache
def _names() -> dict[str, str]:
    """The catalog's name of a device by each of its comparable names."""
    return {_comparable(word): name for name, spec in catalog().items() for word in (name, spec.name, *spec.aliases)}


def find_spec(name: str) -> DeviceSpec | None:
    """The catalog's entry with a name, a product name or an alias; None for an unknown one. Case, spaces, hyphens and
    the words NVIDIA, GeForce and Tesla do not matter."""
    known = _names().get(_comparable(name))
    return None if known is None else catalog()[known]


def is_same_gpu(one: str, other: str) -> bool:
    """Whether two names are of one GPU: the driver's name of a product and the catalog's differ for some."""
    return one == other or ((spec := find_spec(one)) is not None and spec == find_spec(other))


_OTHER_DEVICES = {
    "an AMD GPU (ROCm)": re.compile(r"(amd[ -]|instinct|rocm|gfx\d|mi ?[1-4]\d\d|radeon)", re.IGNORECASE),
    "an Intel accelerator": re.compile(r"(intel[ -]|xpu|arc[ -]?[ab]\d|max[ -]?1[15]\d0|gaudi)", re.IGNORECASE),
    "a TPU": re.compile(r"(tpu|google[ -])", re.IGNORECASE),
}
"""Common names of devices for which vLLM has kernels and this plugin none."""


def _vendor(name: str) -> str:
    """The kind of device that a common name of another vendor's is of; "" for other names."""
    return next((each for each, names in _OTHER_DEVICES.items() if names.match(name.strip())), "")


def default_packages(kind: str) -> dict[str, str]:
    """The packages of an installation of the newest tested vLLM on a kind of device, by distribution."""
    return dict(DEFAULT_PACKAGES.get(kind) or packages_of(kind, NEWEST))


def known_device(name: str) -> Device:
    """A known device with the packages of an installation of the newest tested vLLM.

    Raises:
        SettingError: the name is unknown, or no text.
    """
    if not isinstance(name, str):
        raise SettingError(f"the name of a device is {name!r:.60}", "Give a text such as h200")
    spec = find_spec(name)
    if spec is None:
        if vendor := _vendor(name):
            rule = f"{name!r} is {vendor}: this plugin stands down there, and stock vLLM serves"
            raise SettingError(rule, "Name an NVIDIA GPU, or cpu")
        names = known_device_names()
        suggestion = did_you_mean(name, names, prefix="nvidia-", strict=True)
        raise SettingError(f"unknown device {name!r}", f"{suggestion}Valid are {', '.join(names)}")
    return Device(
        spec.kind,
        spec.name,
        spec.capability,
        spec.sm_count,
        spec.memory_gib,
        spec.features,
        packages=default_packages(spec.kind),
    )


def load_device(path: Path) -> Device:
    """A device from a JSON file: the fields of `Device`, or an object that has them under ``device``.

    What the file leaves out is as for the name of a device: figures and features are the catalog's, where it has the
    product, and packages those of an installation of the newest tested vLLM. Features bring those that they imply.

    Raises:
        SettingError: the file cannot be read, does not describe a device, or contradicts the catalog.
    """
    where = str(path)
    data = read_file(path, MAX_DEVICE_BYTES, SettingError)
    remedy = 'It needs at least "kind" and "name"; status --json prints a machine\'s own'
    with boundary(SettingError, "not a device", remedy, where):
        fields = msgspec.json.decode(data)
        check_fields_once(data, SettingError, where)
        inner = fields.get("device", fields) if isinstance(fields, dict) else fields
        device = msgspec.convert(inner, Device)
    _check_device(device, inner, where)
    spec = find_spec(device.name)
    if spec is not None:
        _check_product(device, inner, where)
        missing = [name for name in _FIGURES if name not in inner]
        device = dataclasses.replace(device, **{name: getattr(spec, name) for name in missing})
    elif device.kind == "cuda" and "capability" not in inner:
        rule = f"not a device: {device.name[:60]!r} is no GPU that is known, and its capability is missing"
        raise SettingError(rule, _CAPABILITY_REMEDY, where)
    packages = device.packages if "packages" in inner else default_packages(device.kind)
    implied = [each for name in device.features for each in _IMPLIED_FEATURES.get(name, ())]
    features = tuple(dict.fromkeys((*device.features, *implied)))
    return dataclasses.replace(device, packages=packages, features=features)


_IMPLIED_FEATURES = {
    "amx_bf16": ("amx_tile",),
    "avx512_bf16": ("avx512f", "avx2"),
    "avx512f": ("avx2",),
}
"""Instruction sets that a CPU with another one has, as compilers take it for granted (``gcc -mavx512bf16``)."""


_FIGURES = ("capability", "sm_count", "memory_gib", "features")
"""Fields of a device that the catalog has, too."""

_CAPABILITY_REMEDY = (
    'Add "capability", the digits that nvidia-smi --query-gpu=compute_cap --format=csv prints: 70 for V100, 75 for '
    "Turing, 80 for A100 and A30, 86 for other Ampere (A10, RTX 30), 89 for Ada (L4, L40S, RTX 40), 90 for Hopper, 100 "
    "for B200, 103 for B300, 110 for Thor, 120 for RTX 50 and RTX PRO, 121 for DGX Spark"
)


def _check_device(device: Device, inner: Mapping[str, Any], where: str) -> None:
    """Refuses fields that are unknown, and values that no device has.

    Raises:
        SettingError: there are such.
    """
    valid = [field.name for field in dataclasses.fields(Device)]
    unknown = [key for key in inner if key not in valid]
    if unknown:
        rule = f"not a device: unknown field {', '.join(f'{key[:60]!r}' for key in unknown[:5])}"
        raise SettingError(rule, f"Valid are {', '.join(valid)}", where)
    texts = (device.name, device.driver, *device.features, *device.packages, *device.packages.values())
    if unprintable := [text for text in texts if not text.isprintable()]:
        raise SettingError(f"not a device: {unprintable[0][:60]!a} is not printable", where=where)
    if not device.name.strip():
        raise SettingError(f"not a device: name is {device.name!r}", "Give the product's name", where)
    for field, (least, most, kind) in _RANGES.items():
        value, other = getattr(device, field), kind not in ("", device.kind)
        if field in inner and not (value == 0 if other else least <= value <= most):
            rule = f"not a device: {field} is {value:g}, for {device.kind} "
            rule += "only 0 is possible" if other else f"possible are {least} to {most}"
            raise SettingError(rule, "Leave it out where it is unknown; status --json prints a machine's own", where)
    if device.kind == "cuda" and (vendor := _vendor(device.name)):
        rule = f"not a device: {device.name[:60]!r} is {vendor}, and kind is cuda"
        raise SettingError(rule, "Give the kind of device that it is", where)


def _check_product(device: Device, inner: Mapping[str, Any], where: str) -> None:
    """Refuses what neither the product of that name nor a variant of it has (``nvidia-a100-40gb`` of ``nvidia-a100``).
    Memory is not compared: boards of one name have different memory (an RTX 4090 with 24 or 48 GB).

    Raises:
        SettingError: kind, compute capability or number of multiprocessors are of another product.
    """
    own = _names()[_comparable(device.name)]
    variants = [spec for name, spec in catalog().items() if name == own or name.startswith(f"{own}-")]
    for field in ("kind", "capability", "sm_count"):
        given, known = getattr(device, field), [getattr(each, field) for each in variants]
        if field in inner and given not in known:
            has = " or ".join(dict.fromkeys(map(str, known)))
            rule = f"not a device: {field} is {given}, and {variants[0].name} has {has}"
            raise SettingError(rule, "Give what the product has, or the name of the product that has this", where)


_RANGES = {"capability": (50, 199, "cuda"), "sm_count": (1, 1024, "cuda"), "memory_gib": (0, 1 << 16, "")}
"""Least and greatest values of a device that exists, and the kind that alone has the field; "" for all."""
