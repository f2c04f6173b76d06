"""Patches: applied once, when their module is there, undone to the very object."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_moe_oracle.compat.patches import DeferredPatch, Patch, PatchManager, redirect_class, wrap_function
from vllm_moe_oracle.errors import OracleError

STOCK = """
from abc import ABC, abstractmethod

class Base(ABC):
    def __init__(self, one, *, two=2):
        self.made = ("stock", one, two)

    @abstractmethod
    def work(self): ...

class Method(Base):
    def work(self):
        return "stock"

class Child(Method):
    pass

TABLE = {"a": 1}

def make(*args, **kwargs):
    return Method(*args, **kwargs)

def double(value):
    return 2 * value
"""

OURS = """
import stock_example

class Mixin:
    __slots__ = ("layout",)

class Method(Mixin, stock_example.Method):
    def __init__(self, one, *, two=2):
        self.made = ("ours", one, two)

    def work(self):
        return "ours"
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two modules that can be imported and are not yet."""
    (tmp_path / "stock_example.py").write_text(STOCK)
    (tmp_path / "ours_example.py").write_text(OURS)
    monkeypatch.syspath_prepend(tmp_path)
    path = list(sys.meta_path)
    yield
    assert sys.meta_path == path
    for name in ("stock_example", "ours_example"):
        sys.modules.pop(name, None)


def stock() -> Any:
    return importlib.import_module("stock_example")


def test_attributes_and_entries_come_back_as_they_were() -> None:
    module = stock()
    before = {**vars(module)}, dict(module.TABLE), dict(vars(module.Method))
    manager = PatchManager()
    patches = [
        Patch("function", module, "double", lambda value: 3 * value),
        Patch("new name", module, "fresh", 1),
        Patch("entry", module.TABLE, "a", 2),
        Patch("new entry", module.TABLE, "b", 3),
        Patch("method", module.Method, "work", lambda self: "patched"),
        Patch("inherited", module.Child, "work", lambda self: "child"),
    ]
    for patch in patches:
        manager.apply(patch)
    assert manager.names == tuple(each.name for each in patches)
    assert (module.double(1), module.fresh, module.TABLE) == (3, 1, {"a": 2, "b": 3})
    assert module.Method(0).work() == "patched"
    assert module.Child(0).work() == "child"
    manager.undo()
    assert manager.names == ()
    assert ({**vars(module)}, dict(module.TABLE), dict(vars(module.Method))) == before
    assert "work" not in vars(module.Child)


def test_a_patch_of_the_same_name_is_applied_once() -> None:
    module = stock()
    manager = PatchManager()
    first, second = Patch("x", module.TABLE, "a", 2), Patch("x", module.TABLE, "a", 3)
    manager.apply(first)
    manager.apply(second)
    assert module.TABLE == {"a": 2}
    manager.undo()
    manager.undo()
    assert module.TABLE == {"a": 1}


def test_what_somebody_else_patched_over_is_left_and_named() -> None:
    module = stock()
    manager = PatchManager()
    manager.apply(Patch("lost", module.TABLE, "a", 2))
    manager.apply(Patch("kept", module, "fresh", 1))
    module.TABLE["a"] = 99
    with pytest.raises(OracleError, match="another package patched over them: lost"):
        manager.undo()
    assert module.TABLE == {"a": 99}
    assert not hasattr(module, "fresh")


def test_a_patch_waits_for_its_module() -> None:
    manager = PatchManager()
    manager.apply(DeferredPatch("entry", "stock_example", lambda module: Patch("entry", module.TABLE, "a", 2)))
    assert "stock_example" not in sys.modules
    assert (manager.names, manager.deferred) == ((), ("entry",))
    module = stock()
    assert module.TABLE == {"a": 2}
    assert (manager.names, manager.deferred) == (("entry",), ())
    loader = module.__spec__.loader
    assert type(loader).__module__.startswith(("importlib", "_frozen")) and "exec_module" not in vars(loader)
    manager.undo()
    assert module.TABLE == {"a": 1}


def test_a_patch_that_waits_is_taken_back_before_its_module_comes() -> None:
    manager = PatchManager()
    manager.apply(DeferredPatch("entry", "stock_example", lambda module: Patch("entry", module.TABLE, "a", 2)))
    manager.undo()
    assert manager.deferred == ()
    assert stock().TABLE == {"a": 1}


def test_a_patch_may_find_nothing_to_do() -> None:
    manager = PatchManager()
    manager.apply(DeferredPatch("nothing", "stock_example", lambda module: None))
    stock()
    assert (manager.names, manager.deferred, manager.failed) == ((), (), {})


def test_a_patch_that_cannot_be_made_later_does_not_break_the_import(caplog: pytest.LogCaptureFixture) -> None:
    manager = PatchManager()
    manager.apply(wrap_function("gone", "stock_example:Method.no_such_method", lambda original: original()))
    manager.apply(wrap_function("there", "stock_example:double", lambda original, value: original(value) + 1))
    module = stock()
    assert module.double(1) == 3
    assert manager.names == ("there",)
    assert "AttributeError" in manager.failed["gone"]
    assert "'gone' could not be applied" in caplog.text
    manager.undo()
    assert manager.failed == {}
    assert module.double(1) == 2


def test_a_patch_that_cannot_be_made_now_is_an_error() -> None:
    stock()
    with pytest.raises(AttributeError, match="no_such_method"):
        PatchManager().apply(wrap_function("gone", "stock_example:Method.no_such_method", lambda original: original()))


@pytest.mark.parametrize("imported_before", [True, False])
def test_a_transplant_serves_every_construction(imported_before: bool) -> None:
    if imported_before:
        stock()
    manager = PatchManager()
    manager.apply(redirect_class("method", "stock_example:Method", "ours_example:Method"))
    assert "ours_example" not in sys.modules
    module = stock()
    method, metaclass, members = module.Method, type(module.Base), dict(vars(module.Method))
    assert "ours_example" not in sys.modules, "imported at the first construction"
    made = module.make(1, two=3)
    assert made.made == ("ours", 1, 3) and made.work() == "ours"
    assert isinstance(made, method) and type(made).__name__ == "Method"
    assert module.Child(1).made == ("stock", 1, 2), "a subclass is its own class"
    later = type("Later", (method,), {})
    assert later(1).made == ("stock", 1, 2) and type(later) is metaclass
    assert module.Method is method and dict(vars(method)) == members
    manager.undo()
    assert type(method) is metaclass
    again = module.make(1, two=3)
    assert type(again) is method and again.made == ("stock", 1, 3)
    assert importlib.import_module("ours_example").Method(1).made == ("ours", 1, 2)


def test_modules_without_import_hooks_are_imported_normally(tmp_path: Path) -> None:
    (tmp_path / "other_example.py").write_text("VALUE = 1\n")
    manager = PatchManager()
    manager.apply(DeferredPatch("entry", "stock_example", lambda module: Patch("entry", module.TABLE, "a", 2)))
    other: ModuleType = importlib.import_module("other_example")
    assert other.VALUE == 1 and manager.deferred == ("entry",)
    del sys.modules["other_example"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("stock_example_that_is_not_there")
    manager.undo()
