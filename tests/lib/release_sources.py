"""A vLLM release's Python sources as syntax trees: modules, classes, functions, and what their attributes are.

Nothing of vLLM is imported. What the trees do not say is declared in `tests/lib/stock_names.py`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tests.lib import stock_names as stock

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Missing(Exception):
    """A release lacks a name."""


def kept_per_tree(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers what a function says of a tree for as long as there is the tree: changed ones are many, and go."""
    found: WeakKeyDictionary[ast.AST, dict[Any, Any]] = WeakKeyDictionary()

    @wraps(function)
    def kept(tree: ast.AST, *args: Any) -> Any:
        said = found.setdefault(tree, {})
        if args not in said:
            said[args] = function(tree, *args)
        return said[args]

    return kept


# --- Things of vLLM -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Module:
    """A module of the release."""

    name: str
    file: str
    tree: ast.Module = field(compare=False, repr=False)

    @property
    def names(self) -> dict[str, tuple[ast.stmt, bool]]:
        """The last definition of each top-level name, and whether only type checkers see it."""
        return _names(self.tree)

    @property
    def strings(self) -> frozenset[str]:
        """Every string and identifier in the module."""
        return words_of(self.tree)


@dataclass(frozen=True)
class Class:
    """A class of the release."""

    module: Module
    node: ast.ClassDef = field(compare=False, repr=False)
    name: str

    def __str__(self) -> str:
        return f"{self.module.name}.{self.name}"


@dataclass(frozen=True)
class Callable_:
    """A function of the release; `bound` when its first parameter is already given."""

    module: Module
    node: Function = field(compare=False, repr=False)
    name: str
    bound: bool


@dataclass(frozen=True)
class Instance:
    """An object of a class of the release."""

    of: Class


@dataclass(frozen=True)
class Foreign:
    """A class, or an object of it, of another package, by dotted name."""

    name: str


@dataclass(frozen=True)
class Unknown:
    """Something of vLLM whose class cannot be read off the sources."""

    what: str


@dataclass(frozen=True)
class Undeclared:
    """Something of ours that is annotated with Any and not declared."""

    name: str


@dataclass(frozen=True)
class Own:
    """A class of ours, with what it inherits."""

    name: str
    super_only: bool = False


OTHER = Foreign("")
"""Nothing of vLLM's."""

Thing = Module | Class | Callable_ | Instance | Foreign | Unknown | Undeclared | Own


def flattened(body: Iterable[ast.stmt], checking: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Statements of a body and of the branches in it."""
    for statement in body:
        yield statement, checking
        if isinstance(statement, ast.If):
            only = checking or "TYPE_CHECKING" in ast.unparse(statement.test)
            yield from flattened(statement.body, only)
            yield from flattened(statement.orelse, checking)
        elif isinstance(statement, ast.Try):
            for part in (statement.body, *(handler.body for handler in statement.handlers), statement.orelse):
                yield from flattened(part, checking)
        elif isinstance(statement, ast.With):
            yield from flattened(statement.body, checking)


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(statement, Function | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0]
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Name):
                    yield part.id
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    elif isinstance(statement, ast.TypeAlias if hasattr(ast, "TypeAlias") else ()):
        yield statement.name.id  # type: ignore[attr-defined]


@kept_per_tree
def _names(tree: ast.Module) -> dict[str, tuple[ast.stmt, bool]]:
    found: dict[str, tuple[ast.stmt, bool]] = {}
    for statement, checking in flattened(tree.body):
        for name in bound_names(statement):
            if name not in found or found[name][1] or not checking:
                found[name] = (statement, checking)
    return found


@kept_per_tree
def words_of(tree: ast.AST) -> frozenset[str]:
    """Every string and identifier in a tree."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
    return frozenset(found)


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Sources:
    """The Python sources of one release."""

    def __init__(self, root: Path, changed: Mapping[str, str] | None = None) -> None:
        """
        Args:
            root: folder with the package ``vllm``.
            changed: other contents, by path below `root`.
        """
        self.root = root
        self.changed = changed or {}
        self._modules: dict[str, Module | None] = {}
        self._mro: dict[Class, list[Class | Foreign]] = {}
        self.used: set[tuple[str, str]] = set()
        self._passed: list[tuple[str, str]] = []

    def module(self, name: str) -> Module | None:
        """A module by its dotted name."""
        if name not in self._modules:
            base = name.replace(".", "/")
            self._modules[name] = None
            for file in (f"{base}/__init__.py", f"{base}.py"):
                if file in self.changed:
                    self._modules[name] = Module(name, file, ast.parse(self.changed[file]))
                elif (self.root / file).is_file():
                    self._modules[name] = Module(name, file, _parsed(self.root / file))
        return self._modules[name]

    def find(self, module_name: str) -> Thing:
        """A module, or Missing."""
        module = self.module(module_name)
        if module is None:
            raise Missing(f"no module {module_name}")
        return module

    def path(self, path: str) -> Thing:
        """What ``module`` or ``module:Class.attribute`` names."""
        module, _, attributes = path.partition(":")
        thing = self.find(module)
        for name in filter(None, attributes.split(".")):
            thing = self.use(thing, name)
        return thing

    def use(self, thing: Thing, name: str) -> Thing:
        """An attribute that we name ourselves; `used` remembers where it is defined.

        Raises:
            Missing: there is none of that name.
        """
        self._passed.clear()
        found = self.attribute(thing, name)
        self.used.update(each for each in self._passed if each[1] == name)
        return found

    # --- attributes -----------------------------------------------------------------------------------

    def attribute(self, thing: Thing, name: str) -> Thing:
        """An attribute of a thing.

        Raises:
            Missing: it has none of that name.
        """
        if isinstance(thing, Module):
            return self._of_module(thing, name)
        if isinstance(thing, Class | Instance):
            return self._of_class(thing, name)
        if isinstance(thing, Callable_) and not hasattr(_example, name):
            raise Missing(f"function {thing.name} has no attribute {name}")
        return OTHER

    def _of_module(self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Thing:
        key = f"{module.name}:{name}"
        if (module.name, name) in seen:
            raise Missing(f"{module.file} imports {name} from itself")
        found = module.names.get(name)
        if found is not None and found[1] and isinstance(found[0], ast.AnnAssign) and name not in module.strings:
            found = None
        if found is None:
            below = self.module(f"{module.name}.{name}")
            if below is None:
                raise Missing(f"{module.file} has no {name}")
            return below
        self._passed.append((module.file, name))
        statement = found[0]
        if key in stock.VALUES:
            return Instance(self.class_at(stock.VALUES[key]))
        if isinstance(statement, ast.Import | ast.ImportFrom):
            return self._imported(module, statement, name, seen | {(module.name, name)})
        if isinstance(statement, ast.ClassDef):
            return Class(module, statement, name)
        if isinstance(statement, Function):
            return Callable_(module, statement, name, bound=False)
        if isinstance(statement, ast.AnnAssign):
            return self.annotated(module, statement.annotation)
        if isinstance(statement, ast.Assign):
            return self._value(module, statement.value, key)
        return Unknown(key)

    def _value(self, module: Module, value: ast.expr, key: str) -> Thing:
        """What a constant is: another name, a call of a class, or something built in."""
        if isinstance(value, ast.Name | ast.Attribute):
            try:
                return self._expression(module, value)
            except Missing:
                return Unknown(key)
        if isinstance(value, ast.Call):
            try:
                made = self._expression(module, value.func)
            except Missing:
                return Unknown(key)
            return Instance(made) if isinstance(made, Class) else Unknown(key)
        return OTHER if isinstance(value, ast.Constant | ast.Dict | ast.List | ast.Set | ast.Tuple) else Unknown(key)

    def _expression(self, module: Module, node: ast.expr) -> Thing:
        if isinstance(node, ast.Name):
            if hasattr(builtins, node.id) and node.id not in module.names:
                return Foreign(f"builtins.{node.id}")
            return self._of_module(module, node.id)
        if isinstance(node, ast.Attribute):
            value = self._expression(module, node.value)
            if isinstance(value, Foreign):
                return Foreign(f"{value.name}.{node.attr}")
            return self.attribute(value, node.attr)
        raise Missing(f"{module.file}: {ast.unparse(node)} is no name")

    def _imported(
        self, module: Module, statement: ast.Import | ast.ImportFrom, name: str, seen: frozenset[tuple[str, str]]
    ) -> Thing:
        for alias in statement.names:
            if (alias.asname or alias.name.partition(".")[0]) != name:
                continue
            if isinstance(statement, ast.Import):
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                return self.module(target) or Foreign(target)
            source = statement.module or ""
            if statement.level:
                package = module.name if module.file.endswith("__init__.py") else module.name.rpartition(".")[0]
                for _ in range(statement.level - 1):
                    package = package.rpartition(".")[0]
                source = f"{package}.{source}".rstrip(".")
            if source.partition(".")[0] != "vllm":
                return Foreign(f"{source}.{alias.name}")
            found = self.module(source)
            if found is None:
                raise Missing(f"{module.file} imports {alias.name} from {source}, which is not there")
            return self._of_module(found, alias.name, seen)
        raise Missing(f"{module.file} has no {name}")

    # --- classes --------------------------------------------------------------------------------------

    def class_at(self, path: str) -> Class:
        """The class at ``module:Class``."""
        found = self.path(path)
        if not isinstance(found, Class):
            raise Missing(f"{path} is no class")
        return found

    def mro(self, cls: Class) -> list[Class | Foreign]:
        """A class and everything that it inherits from; other packages' classes by name."""
        if cls not in self._mro:
            found: list[Class | Foreign] = [cls]
            for base in cls.node.bases:
                node = base.value if isinstance(base, ast.Subscript) else base
                try:
                    thing = self._expression(cls.module, node)
                except Missing:  # what is looked for in it will be missed
                    continue
                found += self.mro(thing) if isinstance(thing, Class) else []
                found += [thing] if isinstance(thing, Foreign) else []
            self._mro[cls] = list(dict.fromkeys(found))
        return self._mro[cls]

    def member(self, cls: Class, name: str) -> tuple[Class, ast.stmt | None] | None:
        """The class that defines a member, and the statement; no statement for what methods set on ``self``."""
        for each in self.mro(cls):
            if isinstance(each, Class):
                members = class_members(each.node)
                if name in members:
                    self._passed.append((each.module.file, name))
                    return each, members[name]
                if name in set_on_self(each.node):
                    self._passed.append((each.module.file, name))
                    return each, None
        return None

    def _of_class(self, thing: Class | Instance, name: str) -> Thing:
        cls = thing if isinstance(thing, Class) else thing.of
        found = self.member(cls, name)
        if found is None:
            for each in self.mro(cls):
                if isinstance(each, Foreign) and foreign_has(each.name, name):
                    return OTHER
            if name.startswith("__") and hasattr(type, name):
                return OTHER
            raise Missing(f"{cls} ({cls.module.file}) has no {name}")
        owner, statement = found
        what = f"{owner}.{name}"
        if isinstance(statement, Function):
            decorators = {ast.unparse(each) for each in statement.decorator_list}
            if any("property" in each for each in decorators):
                return self.annotated(owner.module, statement.returns, what)
            bound = "staticmethod" not in decorators and (isinstance(thing, Instance) or "classmethod" in decorators)
            return Callable_(owner.module, statement, what, bound)
        if isinstance(statement, ast.AnnAssign):
            return self.annotated(owner.module, statement.annotation, what)
        if isinstance(statement, ast.Assign):
            if any(isinstance(each, Foreign) and "Enum" in each.name for each in self.mro(owner)):
                return Instance(owner)
            return self._value(owner.module, statement.value, what)
        if isinstance(statement, ast.ClassDef):
            return Class(owner.module, statement, statement.name)
        return self._set_value(owner, name, what)

    def _set_value(self, owner: Class, name: str, what: str) -> Thing:
        for method, node in set_on_self(owner.node)[name]:
            if isinstance(node, ast.AnnAssign):
                return self.annotated(owner.module, node.annotation, what)
            if not isinstance(node, ast.Assign):
                return OTHER
            value = node.value
            if isinstance(value, ast.Name):
                for parameter in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs):
                    if parameter.arg == value.id and parameter.annotation is not None:
                        return self.annotated(owner.module, parameter.annotation, what)
            if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
                for parameter in method.args.args:
                    if parameter.arg == value.value.id and parameter.annotation is not None:
                        base = self.annotated(owner.module, parameter.annotation, what)
                        if isinstance(base, Instance):
                            return self.attribute(base, value.attr)
            return self._value(owner.module, value, what)
        return Unknown(what)

    # --- annotations ----------------------------------------------------------------------------------

    def annotated(self, module: Module, node: ast.expr | None, what: str = "") -> Thing:
        """What an annotation stands for."""
        if node is None:
            return Unknown(what)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                return self.annotated(module, ast.parse(node.value, mode="eval").body, what)
            return OTHER
        if isinstance(node, ast.BinOp):
            sides = [self.annotated(module, side, what) for side in (node.left, node.right)]
            return next((side for side in sides if isinstance(side, Instance | Class)), sides[0])
        if isinstance(node, ast.Subscript):
            outer = ast.unparse(node.value)
            if outer in ("Optional", "ClassVar", "Final", "Annotated", "SkipValidation"):
                inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                return self.annotated(module, inner, what)
            if outer == "type":
                found = self.annotated(module, node.slice, what)
                return found.of if isinstance(found, Instance) else found
            return OTHER
        try:
            found = self._expression(module, node)
        except Missing:
            return Unknown(what)
        if isinstance(found, Class):
            return Instance(found)
        return found if isinstance(found, Foreign) else OTHER


def _example() -> None:
    """Stands for any function."""


@kept_per_tree
def attributes_asked_of(node: ast.ClassDef, who: str) -> frozenset[str]:
    """Attributes that a class reads or sets on ``self`` or another variable."""
    return frozenset(
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == who
    )


@cache
def foreign_has(path: str, name: str) -> bool:
    """Whether another package's class has an attribute; its package decides when it is installed."""
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module or "builtins"), attribute)
        # Not hasattr: an enumeration's `name` and `value` are there for members only.
        return any(name in vars(each) for each in found.__mro__)
    except (ImportError, AttributeError):
        return False


@kept_per_tree
def class_members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """The last definition of each name in a class's body."""
    found: dict[str, ast.stmt] = {}
    for statement, _ in flattened(node.body):
        for name in bound_names(statement):
            found[name] = statement
    return found


@kept_per_tree
def set_on_self(node: ast.ClassDef) -> dict[str, list[tuple[Function, ast.AST]]]:
    """Where the methods of a class set attributes of ``self``, or register parameters and buffers on it."""
    found: dict[str, list[tuple[Function, ast.AST]]] = {}
    for method in ast.walk(node):
        if not isinstance(method, Function):
            continue
        for statement in ast.walk(method):
            targets: list[ast.expr] = []
            if isinstance(statement, ast.Assign):
                targets = [
                    part
                    for each in statement.targets
                    for part in (each.elts if isinstance(each, ast.Tuple) else [each])
                ]
            elif isinstance(statement, ast.AnnAssign):
                targets = [statement.target]
            for target in targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    tuple_ = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple)
                    found.setdefault(target.attr, []).append((method, target if tuple_ else statement))
            if (
                isinstance(statement, ast.Call)
                and ast.unparse(statement.func) in ("self.register_buffer", "self.register_parameter")
                and isinstance(statement.args[0], ast.Constant)
            ):
                found.setdefault(statement.args[0].value, []).append((method, statement))
    return found
