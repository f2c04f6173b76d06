"""Discovery of backends, and strangers that cannot be loaded."""

from __future__ import annotations

import re
import textwrap
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cases import H200, Plain, backend, problem, registry
from vllm_moe_oracle import backends as builtin_package
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.errors import NoBackendError, RegistryError
from vllm_moe_oracle.oracle.registry import ENTRY_POINT_GROUP, Registry, default_registry, discover
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import load

GOOD = """
from tests.lib.cases import Plain

class Theirs(Plain):
    name = "{name}"

BACKEND = Theirs()
"""


def write(folder: Path, module: str, text: str) -> None:
    (folder / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name=name, value=value, group=ENTRY_POINT_GROUP)


# --- This project's own files ----------------------------------------------------------------------------------------


def test_every_file_of_the_folder_is_a_backend_and_named_after_itself() -> None:
    files = {p.stem for p in Path(builtin_package.__path__[0]).glob("*.py") if not p.stem.startswith("_")}
    found = discover()
    assert {found.origin(item.name).rpartition(".")[2] for item in found} == files
    assert "emulation" in found and found["emulation"].name == "emulation"
    assert len(found) == len(files)


def test_a_new_file_is_found_and_nothing_else_is_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_package, "__path__", [*builtin_package.__path__, str(tmp_path)])
    write(tmp_path, "dropped_in_one", GOOD.format(name="dropped_in_one"))
    write(tmp_path, "_private", "raise RuntimeError('not a backend: its name begins with an underscore')")
    found = discover()
    assert "dropped_in_one" in found
    assert found.origin("dropped_in_one") == "vllm_moe_oracle.backends.dropped_in_one"
    assert "dropped_in_one" in found.names("mxfp8")
    assert decide(problem(), H200, load({}), registry=found).backend == "dropped_in_one"


def test_a_file_without_a_backend_is_a_defect_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_package, "__path__", [*builtin_package.__path__, str(tmp_path)])
    write(tmp_path, "dropped_in_two", "something = 1")
    with pytest.raises(RegistryError, match=r"dropped_in_two: the module exports no BACKEND.*BACKEND = Class\(\)"):
        discover()


def test_a_file_that_takes_a_name_is_a_defect_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_package, "__path__", [*builtin_package.__path__, str(tmp_path)])
    write(tmp_path, "dropped_in_three", GOOD.format(name="emulation"))
    with pytest.raises(RegistryError, match=r"'emulation' is taken by"):
        discover()


# --- Third parties ---------------------------------------------------------------------------------------------------


def test_entry_points_may_name_an_instance_or_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "stranger_good", GOOD.format(name="instance") + "class Other(Theirs):\n    name = 'class'\n")
    found = discover([point("a", "stranger_good:BACKEND"), point("b", "stranger_good:Other")])
    assert not found.load_errors
    assert "instance" in found and "class" in found
    assert found.origin("class") == "entry point 'b' = stranger_good:Other"


STRANGERS = {
    "absent": (
        "stranger_that_is_not_there:BACKEND",
        "ModuleNotFoundError: No module named 'stranger_that_is_not_there'",
    ),
    "failing": ("strangers:NoSuchName", "AttributeError"),
    "raising": ("stranger_raises:BACKEND", "RuntimeError: CUDA driver too old"),
    "quitting": ("stranger_quits:BACKEND", "SystemExit: 3"),
    "number": ("strangers:NUMBER", "expected an instance of vllm_moe_oracle.backends.Backend, got int"),
    "stranger": ("strangers:NotABackend", "expected an instance of vllm_moe_oracle.backends.Backend, got NotABackend"),
    "abstract": ("strangers:Abstract", "the backend cannot be instantiated: Can't instantiate abstract class Abstract"),
    "picky": ("strangers:Picky", "the backend cannot be instantiated: "),
    "nameless": ("strangers:Nameless", "the backend does not set name, capabilities"),
    "duplicate": ("strangers:Duplicate", "the name 'emulation' is taken by vllm_moe_oracle.backends.emulation"),
    "auto": ("strangers:Auto", "'auto' cannot be a backend's name"),
    "blank": ("strangers:Blank", "' ' cannot be a backend's name"),
    "letters": (
        "strangers:Letters",
        "the attribute schemes is not as the contract declares: it is 'mxfp8', expected tuple",
    ),
    "aliases": (
        "strangers:Aliases",
        "the attribute vllm_names is not as the contract declares: it is 'marlin', expected tuple",
    ),
    "scheme": ("strangers:UnknownScheme", "in an entry it is 'int3', expected 'mxfp8' or 'wna16' or 'mxfp4'"),
    "schemeless": ("strangers:NoScheme", "schemes holds nothing; valid are"),
    "unlimited": (
        "strangers:Unlimited",
        "the attribute capabilities is not as the contract declares: it is of type dict, expected Capabilities",
    ),
}
MODULE = """
from tests.lib.cases import Plain
from vllm_moe_oracle.backends import Backend

NUMBER = 5

class NotABackend: ...

class Abstract(Plain):
    convert = Backend.convert

class Picky(Plain):
    name = "picky"
    def __init__(self, gpu): ...

class Nameless(Backend):
    schemes = ("mxfp8",)
    priority = Plain.priority
    activations = Plain.activations
    numerics = Plain.numerics
    convert = Plain.convert
    build_experts = Plain.build_experts

class Duplicate(Plain):
    name = "emulation"

class Auto(Plain):
    name = "auto"

class Blank(Plain):
    name = " "

class Letters(Plain):
    name = "letters"
    schemes = "mxfp8"

class Aliases(Plain):
    name = "aliases"
    vllm_names = "marlin"

class UnknownScheme(Plain):
    name = "unknown_scheme"
    schemes = ("mxfp8", "int3")

class NoScheme(Plain):
    name = "no_scheme"
    schemes = ()

class Unlimited(Plain):
    name = "unlimited"
    capabilities = {}
"""


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("strangers", "stranger_raises", "stranger_quits", "stranger_fine"):
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    write(tmp_path, "strangers", MODULE)
    write(tmp_path, "stranger_raises", "raise RuntimeError('CUDA driver too old')")
    write(tmp_path, "stranger_quits", "raise SystemExit(3)")
    write(tmp_path, "stranger_fine", GOOD.format(name="fine"))
    points = [point(name, value) for name, (value, _) in STRANGERS.items()]
    return discover([*points, point("fine", "stranger_fine:BACKEND")])


def test_strangers_that_cannot_be_loaded_are_recorded_and_harm_no_other(strangers: Registry) -> None:
    assert set(strangers.load_errors) == set(STRANGERS)
    for name, (_, reason) in STRANGERS.items():
        assert reason in strangers.load_errors[name], name
    assert {item.name for item in strangers} == {item.name for item in discover()} | {"fine"}
    assert strangers.origin("emulation") == "vllm_moe_oracle.backends.emulation"
    assert decide(problem(), H200, load({}), registry=strangers).backend == "fine"


@pytest.mark.parametrize("name", ["raising", "abstract", "nameless", "letters"])
def test_choosing_a_broken_one_says_why_it_is_broken(strangers: Registry, name: str) -> None:
    with pytest.raises(NoBackendError) as caught:
        decide(problem(), H200, load({}, None, {"backend": name}), registry=strangers)
    assert f"{name} (assignments.backend) could not be loaded: " in str(caught.value)
    assert STRANGERS[name][1] in str(caught.value)


# --- The container ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a,b", "a;b", "x=y", " x", "a\nb", "", "AUTO", "auto", "marlin", "triton"])
def test_a_name_that_settings_cannot_tell_is_refused(name: str) -> None:
    with pytest.raises(RegistryError, match="cannot be a backend's name"):
        registry([backend(name)])


def test_names_are_the_backends_and_vllms_of_one_scheme() -> None:
    some = registry([
        backend("b", vllm_names=("z", "a")),
        backend("c", vllm_names=("z",), schemes=("mxfp8", "wna16")),
        backend("d", schemes=("wna16",)),
    ])  # fmt: skip
    assert some.names("mxfp8") == ["a", "b", "c", "z"]
    assert some.names("wna16") == ["c", "d", "z"]
    assert [item.name for item in some.for_scheme("wna16")] == ["c", "d"]
    assert some.for_scheme("mxfp4") == [] and len(some) == 3 and "e" not in some


def test_a_class_is_as_good_as_an_instance() -> None:
    found = Registry()
    found.add(Plain, "here")
    assert isinstance(found["plain"], Backend) and found.origin("plain") == "here"


def test_the_default_registry_is_discovered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "vllm_moe_oracle.oracle.registry.logger.warning", lambda text, *parts: said.append(text % parts)
    )
    asked: list[dict[str, Any]] = []

    def installed(**selection: Any) -> list[EntryPoint]:
        asked.append(selection)
        return [point("b", "nowhere_b:X"), point("a", "nowhere_a:X")]

    monkeypatch.setattr("vllm_moe_oracle.oracle.registry.entry_points", installed)
    default_registry.cache_clear()
    try:
        assert default_registry() is default_registry()
        assert list(default_registry().load_errors) == ["a", "b"]
        assert asked == [{"group": "vllm_moe_oracle.backends"}]
        assert [line.split(" could not be loaded: ")[0][-1] for line in said] == ["a", "b"]
    finally:
        default_registry.cache_clear()


def test_the_readme_names_the_whole_contract() -> None:
    text = (Path(builtin_package.__path__[0]) / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    contract = {name for name in (*vars(Backend), *Backend.__annotations__) if not name.startswith("_")}
    assert contract - named == set()
