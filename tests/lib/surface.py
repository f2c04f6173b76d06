"""Proves from Python sources alone that a vLLM release has everything of vLLM that this project uses.

Every function of `compat/`, `methods/` and the backends is read as a tree and followed through the release's own
sources: imports, attributes, the classes behind annotations, the keywords of calls, overridden methods, names in
strings. What the trees do not say is declared in `tests/lib/stock_names.py`. Nothing of vLLM is imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from tests.lib import stock_names as stock
from tests.lib.release_sources import (
    OTHER,
    Callable_,
    Class,
    Foreign,
    Function,
    Instance,
    Missing,
    Module,
    Own,
    Sources,
    Thing,
    Undeclared,
    Unknown,
    attributes_asked_of,
    bound_names,
    class_members,
    flattened,
    foreign_has,
    set_on_self,
    words_of,
)
from vllm_moe_oracle.methods import required_modules
from vllm_moe_oracle.releases.supported import release_group

PACKAGE = Path(__file__).resolve().parents[2] / "vllm_moe_oracle"
FOLDERS = ("compat", "methods", "verification", "backends", "releases")


# --- Our code -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Problem:
    """A use of vLLM that a release does not bear out."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True)
class OurFile:
    """One file of ours."""

    name: str
    tree: ast.Module = field(compare=False, repr=False)


@cache
def our_files() -> tuple[OurFile, ...]:
    """Every file of ours that may speak of vLLM."""
    return tuple(file for folder in FOLDERS for file in _files(folder))


@cache
def _files(folder: str) -> tuple[OurFile, ...]:
    return tuple(
        OurFile(path.relative_to(PACKAGE.parent).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for path in sorted((PACKAGE / folder).glob("*.py"))
    )


@cache
def _our_classes() -> dict[str, tuple[OurFile, ast.ClassDef]]:
    return {
        node.name: (file, node)
        for file in our_files()
        for node in file.tree.body
        if isinstance(node, ast.ClassDef)
    }  # fmt: skip


@cache
def _our_bases(name: str) -> tuple[str, ...]:
    """A class of ours and the classes of ours that it inherits from."""
    classes = _our_classes()
    found = [name]
    for base in classes[name][1].bases:
        if ast.unparse(base) in classes:
            found += _our_bases(ast.unparse(base))
    return tuple(dict.fromkeys(found))


@cache
def _own_types(name: str) -> dict[str, int]:
    """What a class of ours, or one that it inherits from, declares as its own, and the line: names annotated, in a
    class or where a method sets them, with a type. Those annotated with Any are vLLM's."""
    return {
        ast.unparse(node.target).removeprefix("self."): node.lineno
        for each in _our_bases(name)
        for node in ast.walk(_our_classes()[each][1])
        if isinstance(node, ast.AnnAssign)
        and (node in _our_classes()[each][1].body or ast.unparse(node.target).startswith("self."))
        and ast.unparse(node.annotation) not in ("Any", "ClassVar[Any]")
    }


@cache
def _heirs(name: str) -> tuple[str, ...]:
    """The classes of ours that inherit from one and from which none of ours inherits; itself when there are none."""
    heirs = [each for each in _our_classes() if each != name and name in _our_bases(each)]
    return tuple(each for each in heirs if _heirs(each) == (each,)) or (name,)


@cache
def _called_on_self() -> frozenset[str]:
    """Names that our classes ask of themselves, or of one another."""
    return frozenset(
        node.attr
        for file in our_files()
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "method")
    )


def check(release: str, sources: Sources) -> list[Problem]:
    """Everything that the sources of a release do not bear out."""
    return sorted(set(_Check(release, sources).run()))


def finds_fault(release: str, sources: Sources) -> bool:
    """Whether there is anything of the kind; quicker, as it stops at the first."""
    return any(True for _ in _Check(release, sources).run())


class _Check:
    """One release against all of our files."""

    def __init__(self, release: str, sources: Sources) -> None:
        self.release = release
        self.sources = sources
        self.group = release_group(release)
        self.problems: list[Problem] = []
        # Ours that are for other releases are never imported in this one.
        self.files = [file for file in our_files() if self._is_for_release(file)]
        names = {file.name for file in self.files}
        self.absent = {name for name, (file, _) in _our_classes().items() if file.name not in names}
        self.file = our_files()[0]
        self.globals: dict[str, Thing] = {}
        self.own: str | None = None
        self.function = ""
        self._bases: dict[str, list[Class]] = {}
        self._imports: dict[OurFile, dict[str, Thing]] = {}

    def run(self) -> Iterator[Problem]:
        """All problems, file by file."""
        self._group_line()
        self._strings()
        yield from self.problems
        for file in self.files:
            self.file = file
            self.problems = []
            if not file.name.endswith("releases/supported.py"):
                self._follow(file)
            yield from self.problems

    def _is_for_release(self, file: OurFile) -> bool:
        needed = required_modules().get(file.name.removesuffix(".py").replace("/", "."))
        return needed is None or self.sources.module(needed) is not None

    def _bases_of_heirs(self, name: str) -> list[Class]:
        """vLLM's classes behind those of ours in which a mix-in ends up in this release."""
        heirs = [each for each in _heirs(name) if each not in self.absent] or [name]
        return list(dict.fromkeys(base for heir in heirs for base in self._stock_bases(heir)))

    def report(self, node: ast.AST | int, message: str) -> None:
        """Notes a problem at a place in the current file."""
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        self.problems.append(Problem(self.file.name, line, f"vLLM {self.release}: {message}"))

    # --- declarations ---------------------------------------------------------------------------------

    def _group_line(self) -> None:
        supported = next(file for file in our_files() if file.name.endswith("releases/supported.py"))
        self.file = supported
        for node in ast.walk(supported.tree):
            if isinstance(node, ast.Constant) and node.value == self.group.layer:
                try:
                    self.sources.path(f"{self.group.layer}.__init__")
                except Missing as error:
                    self.report(node, str(error))

    def _strings(self) -> None:
        for text, places in {
            **stock.STRING_NAMES,
            **{name: (path,) for name, path in stock.REGISTERED_PARAMETERS.items()},
        }.items():
            for place in places:
                try:
                    found = self.sources.path(place)
                except Missing as error:
                    message = str(error)
                else:
                    assert isinstance(found, Module | Class | Callable_)
                    tree = found.tree if isinstance(found, Module) else found.node
                    if text in words_of(tree):
                        self.sources.used.add(((found if isinstance(found, Module) else found.module).file, text))
                        continue
                    message = f"{place} does not speak of {text!r}"
                for file, line in uses_of_string(text):
                    self.file = file
                    self.report(line, message)

    def declared(self, name: str) -> Thing:
        """The type of something annotated with Any."""
        paths = stock.TYPES.get(name)
        if paths is None:
            return OTHER if name in stock.NOT_STOCK else Undeclared(name)
        found: Thing = Unknown(name)
        for path in paths if isinstance(paths, tuple) else (paths,):
            found = self._declared_at(path.replace(stock.LAYER, self.group.layer))
            if not isinstance(found, Unknown):
                break
        return found

    def _declared_at(self, path: str) -> Thing:
        try:
            module, _, attributes = path.partition(":")
            found = self.sources.find(module)
            for part in filter(None, attributes.split(".")):
                found = self.sources.attribute(found, part)
        except Missing as error:
            return Unknown(str(error))
        if isinstance(found, Callable_):
            return Callable_(found.module, found.node, found.name, bound="." in attributes)
        return Instance(found) if isinstance(found, Class) else found

    # --- walking --------------------------------------------------------------------------------------

    def _follow(self, file: OurFile) -> None:
        self.globals = {}
        self.own = None
        self._body(file.tree.body, self.globals)
        for node in file.tree.body:
            if isinstance(node, Function):
                self._function(node, self.globals)
            elif isinstance(node, ast.ClassDef):
                self._class(node)

    def _class(self, node: ast.ClassDef) -> None:
        if "Adapter" in _our_bases(node.name) and node.name not in self._adapters():
            return
        self.own = node.name
        bases = self._stock_bases(node.name) or self._bases_of_heirs(node.name)
        if any(isinstance(base, ast.Attribute) or ast.unparse(base) in self.globals for base in node.bases):
            self._abstract(node)
        for statement in node.body:
            if isinstance(statement, Function):
                if bases:
                    self._override(node, statement, bases)
                if self._live(node.name, statement.name):
                    self._function(statement, self.globals)
            elif not isinstance(statement, ast.Expr):
                self._body([statement], dict(self.globals))
                for name in bound_names(statement) if bases else ():
                    if name not in _own_types(node.name):
                        self._spoken_of(statement, name, self._bases_of_heirs(node.name))
        self._own_alone(node)
        self.own = None

    def _own_alone(self, node: ast.ClassDef) -> None:
        """What a class of ours declares as its own is no attribute of vLLM's classes behind it."""
        for name, line in _own_types(node.name).items():
            speaks = self._speaking_of(name, self._bases_of_heirs(node.name))
            if speaks and node.lineno <= line <= (node.end_lineno or line):
                self.report(line, f"{node.name}.{name} is declared as ours, but {speaks[0]} has it; annotate with Any")

    def _adapters(self) -> tuple[str, ...]:
        """The release's adapter and what it is made of; nothing where other files than ours are read."""
        name = self.group.adapter.partition(":")[2]
        return _our_bases(name) if name in _our_classes() else ()

    def _live(self, cls: str, method: str) -> bool:
        """Whether a method of an adapter runs in this release: no later class replaces it without calling it."""
        if cls not in self._adapters():
            return True
        for each in self._adapters():
            if each == cls:
                return True
            for statement in _our_classes()[each][1].body:
                replaced = isinstance(statement, Function) and statement.name == method
                if replaced and f"super().{method}(" not in ast.unparse(statement):
                    return False
        return True

    def _stock_bases(self, name: str) -> list[Class]:
        """vLLM's classes that a class of ours inherits from."""
        if name in self._bases:
            return self._bases[name]
        found = []
        for each in _our_bases(name):
            file, node = _our_classes()[each]
            names = self._imports_of(file)
            for base in node.bases:
                root = ast.unparse(base).partition(".")[0]
                thing = names.get(root)
                try:
                    for part in ast.unparse(base).split(".")[1:]:
                        thing = self.sources.attribute(thing, part) if thing is not None else None
                except Missing:
                    continue  # reported where the class is followed
                if isinstance(thing, Class):
                    found.append(thing)
        self._bases[name] = list(dict.fromkeys(found))
        return self._bases[name]

    def _imports_of(self, file: OurFile) -> dict[str, Thing]:
        if file in self._imports:
            return self._imports[file]
        names = self._imports[file] = {}
        for statement, _ in flattened(file.tree.body):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._import(statement, names, quiet=True)
        return names

    def _abstract(self, node: ast.ClassDef) -> None:
        """Every abstract method of the stock classes is defined, by us or by one of them."""
        ours = {
            name
            for each in _our_bases(node.name)
            for statement in _our_classes()[each][1].body
            for name in bound_names(statement)
        }
        if node.name in ("OracleMoEMethod", "StockFallback"):  # mixed in before a class that defines the rest
            return
        concrete: set[str] = set()
        abstract: set[str] = set()
        for base in self._stock_bases(node.name):
            for each in self.sources.mro(base):
                for name, statement in class_members(each.node).items() if isinstance(each, Class) else ():
                    if isinstance(statement, Function):
                        is_abstract = any("abstractmethod" in ast.unparse(d) for d in statement.decorator_list)
                        (abstract if is_abstract else concrete).add(name)
        for name in sorted(abstract - concrete - ours):
            self.report(node, f"{node.name} does not define the abstract {name}")

    def _override(self, node: ast.ClassDef, method: Function, bases: list[Class]) -> None:
        """A method of ours that stock code calls: there, and with parameters that we take."""
        name = method.name
        if name.startswith("__"):
            return
        found = next((member for base in bases if (member := self.sources.member(base, name))), None)
        if found is None:
            foreign = [each for base in bases for each in self.sources.mro(base) if isinstance(each, Foreign)]
            if any(foreign_has(each.name, name) for each in foreign) or name in _called_on_self():
                return
            if self._within(stock.OPTIONAL_HOOKS.get(name, _ALWAYS)):
                self.report(method, f"{node.name}.{name} overrides nothing in {', '.join(map(str, bases))}")
            return
        statement = found[1]
        every = (*bases, *self._bases_of_heirs(node.name))
        defining = [each for base in every for each in self.sources.mro(base) if isinstance(each, Class)]
        defining = [each for each in defining if name in class_members(each.node)]
        # Where a class of another file defines it too, that one is overridden when this one is renamed.
        if len({each.module.file for each in defining}) == 1:
            self.sources.used.add((found[0].module.file, name))
        if not isinstance(statement, Function):
            return
        self._override_parameters(method, _Signature(statement, True), f"{node.name}.{name}", found[0])

    def _override_parameters(self, method: Function, theirs: _Signature, name: str, owner: Class) -> None:
        """A method of ours must take what the overridden one takes, which is a class's."""
        ours = _Signature(method, True)
        for position, parameter in enumerate(theirs.positional):
            if position < len(ours.positional):
                if ours.positional[position] != parameter and not ours.keywords:
                    self.report(method, f"{name} calls parameter {position} other than {owner}: {parameter}")
            elif not (ours.rest or ours.keywords or parameter in ours.named):
                self.report(method, f"{name} does not take {parameter} of {owner}")
        for parameter in theirs.only_named:
            if not ours.keywords and parameter not in ours.named:
                self.report(method, f"{name} does not take {parameter} of {owner}")

    def _function(self, node: Function, outer: Mapping[str, Thing]) -> None:
        names = dict(outer)
        outside, self.function = self.function, node.name
        for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            names[parameter.arg] = self._parameter(parameter)
        for rest in filter(None, (node.args.vararg, node.args.kwarg)):
            names[rest.arg] = OTHER
        if self.own and node.args.args and node.args.args[0].arg in ("self", "cls"):
            names[node.args.args[0].arg] = Own(self.own)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.decorator_list):
            self._value(default, names)
        self._body(node.body, names)
        self.function = outside

    def _narrowed(self, expression: str) -> Thing | None:
        """What is declared of an expression in the function that is being followed."""
        path = stock.NARROWED_TYPES.get(f"{self.file.name.partition('/')[2]}:{self.function}:{expression}")
        if path is None:
            return None
        try:
            found = self.sources.path(path)
        except Missing as error:
            return Unknown(str(error))
        return Instance(found) if isinstance(found, Class) else found

    def _parameter(self, parameter: ast.arg) -> Thing:
        annotation = ast.unparse(parameter.annotation) if parameter.annotation else ""
        narrowed = self._narrowed(parameter.arg)
        if narrowed is not None:
            return narrowed
        if annotation in ("Any", "Any | None", "object"):
            return self.declared(parameter.arg)
        return self.declared(parameter.arg) if annotation == "ModuleType" and parameter.arg in stock.TYPES else OTHER

    def _body(self, body: Iterable[ast.stmt], names: dict[str, Thing]) -> None:
        for statement in body:
            self._statement(statement, names)

    def _statement(self, statement: ast.stmt, names: dict[str, Thing]) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._import(statement, names)
        elif isinstance(statement, Function):
            if names is not self.globals:
                self._function(statement, names)
                names[statement.name] = OTHER
        elif isinstance(statement, ast.ClassDef):
            names[statement.name] = Own(statement.name) if statement.name in _our_classes() else OTHER
            for base in statement.bases:
                self._value(base, names)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            value = self._value(statement.value, names) if statement.value is not None else OTHER
            for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
                self._target(target, value, names)
        elif isinstance(statement, ast.For):
            self._value(statement.iter, names)
            self._target(statement.target, OTHER, names)
            self._body((*statement.body, *statement.orelse), names)
        elif isinstance(statement, ast.With):
            for item in statement.items:
                self._value(item.context_expr, names)
                if item.optional_vars is not None:
                    self._target(item.optional_vars, OTHER, names)
            self._body(statement.body, names)
        elif isinstance(statement, ast.Try):
            for part in (statement.body, *(each.body for each in statement.handlers), statement.orelse):
                self._body(part, names)
            self._body(statement.finalbody, names)
        elif isinstance(statement, ast.If | ast.While):
            self._value(statement.test, names)
            self._body((*statement.body, *statement.orelse), names)
        else:
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr):
                    self._value(child, names)

    def _import(self, statement: ast.Import | ast.ImportFrom, names: dict[str, Thing], quiet: bool = False) -> None:
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            try:
                if isinstance(statement, ast.Import):
                    root = alias.name.partition(".")[0]
                    names[name] = self.sources.find(alias.name if alias.asname else root) if root == "vllm" else OTHER
                elif (statement.module or "").partition(".")[0] == "vllm" and not statement.level:
                    names[name] = self.sources.use(self.sources.find(statement.module or ""), alias.name)
                else:
                    names[name] = Own(name) if statement.level and name in _our_classes() else OTHER
            except Missing as error:
                names[name] = Unknown(str(error))
                if not quiet:
                    self.report(statement, str(error))

    def _target(self, target: ast.expr, value: Thing, names: dict[str, Thing]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._target(part, OTHER, names)
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, names)
            if isinstance(owner, Own):
                self._set_on_own(target, owner)
            elif not (self._is_layer(owner) and self._stock_sets(target.attr)):
                self._attribute(owner, target.attr, target)
        elif isinstance(target, ast.Starred):
            self._target(target.value, OTHER, names)
        else:
            self._value(target, names)

    def _is_layer(self, owner: Thing) -> bool:
        return isinstance(owner, Instance) and f"{owner.of.module.name}:{owner.of.name}" == self.group.layer

    def _stock_sets(self, name: str) -> bool:
        """Whether the stock classes behind the class that is being followed set an attribute on the layer too."""
        bases = self._bases_of_heirs(self.own) if self.own else []
        sets = {
            each
            for base in bases
            for each in self.sources.mro(base)
            if isinstance(each, Class) and name in attributes_asked_of(each.node, "layer")
        }
        if len({each.module.file for each in sets}) == 1:
            self.sources.used.update((each.module.file, name) for each in sets)
        return bool(sets)

    def _set_on_own(self, target: ast.Attribute, owner: Own) -> None:
        """What we set on an object that stock code looks at: stock code speaks of it, or we do."""
        name = target.attr
        declared = any(name in class_members(_our_classes()[each][1]) for each in _our_bases(owner.name))
        # What is declared beside a stock class of its own is that class's; a mix-in without one speaks to its heirs'.
        bases = (self._stock_bases(owner.name) if declared else []) or self._bases_of_heirs(owner.name)
        if bases and name not in stock.OUR_ATTRIBUTES and not self._own_member(owner.name, name):
            self._spoken_of(target, name, bases)

    def _speaking_of(self, name: str, bases: list[Class]) -> list[Class]:
        """Which of some stock classes, and of those behind them, have or ask for an attribute of that name."""
        classes = dict.fromkeys(each for base in bases for each in self.sources.mro(base) if isinstance(each, Class))
        return [
            each
            for each in classes
            if name in attributes_asked_of(each.node, "self") or name in class_members(each.node)
        ]

    def _spoken_of(self, node: ast.AST, name: str, bases: list[Class]) -> None:
        """Stock code asks for an attribute that we set and do not declare as ours."""
        if not self._within(stock.OPTIONAL_HOOKS.get(name, stock.OPTIONAL_ATTRIBUTES.get(name, _ALWAYS))):
            return
        speaks = self._speaking_of(name, bases)
        if len({each.module.file for each in speaks}) == 1:
            self.sources.used.add((speaks[0].module.file, name))
        if not speaks:
            those = ", ".join(map(str, bases))
            self.report(node, f"{those} does not speak of {name}; if it is ours alone, annotate it with its type")

    @staticmethod
    def _own_member(cls: str, name: str) -> bool:
        """Whether a class of ours has an attribute of its own: a method, a value, or one that it declares as such."""
        members = [class_members(_our_classes()[each][1]).get(name) for each in _our_bases(cls)]
        return name in _own_types(cls) or any(isinstance(each, Function | ast.Assign) for each in members)

    # --- expressions ----------------------------------------------------------------------------------

    def _value(self, node: ast.expr, names: dict[str, Thing]) -> Thing:
        if isinstance(node, ast.Name):
            return names.get(node.id, OTHER)
        if isinstance(node, ast.Attribute):
            found = self._attribute(self._value(node.value, names), node.attr, node)
            return self._narrowed(ast.unparse(node)) or found
        if isinstance(node, ast.Call):
            return self._call(node, names)
        if isinstance(node, ast.Constant):
            self._literal(node)
            return OTHER
        if isinstance(node, ast.Lambda):
            inner = {**names, **{each.arg: OTHER for each in node.args.args}}
            self._value(node.body, inner)
            return OTHER
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            inner = dict(names)
            for generator in node.generators:
                self._value(generator.iter, inner)
                self._target(generator.target, OTHER, inner)
                for condition in generator.ifs:
                    self._value(condition, inner)
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self._value(part, inner)
            return OTHER
        if isinstance(node, ast.IfExp):
            self._value(node.test, names)
            sides = [self._value(node.body, names), self._value(node.orelse, names)]
            return next((side for side in sides if side != OTHER), OTHER)
        if isinstance(node, ast.BoolOp):
            sides = [self._value(each, names) for each in node.values]
            return next((side for side in sides if side != OTHER), OTHER)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._value(child, names)
        return OTHER

    def _literal(self, node: ast.Constant) -> None:
        """``vllm.module:Class.attribute`` in a string."""
        if isinstance(node.value, str) and _PATH.fullmatch(node.value):
            if not self._within(stock.OPTIONAL_PATHS.get(node.value, _ALWAYS)):
                return
            try:
                self.sources.path(node.value)
            except Missing as error:
                self.report(node, str(error))

    def _attribute(self, owner: Thing, name: str, node: ast.AST) -> Thing:
        if isinstance(owner, Own):
            return self._of_own(owner, name, node)
        if isinstance(owner, Undeclared):
            self.report(node, f"{owner.name} is annotated with Any; declare its type in stock_names, for .{name}")
            return OTHER
        if isinstance(owner, Unknown):
            self.report(node, f"cannot tell what {owner.what} is; declare it in stock_names, for .{name}")
            return OTHER
        if self._is_layer(owner) and name in stock.REGISTERED_PARAMETERS:
            return OTHER
        try:
            return self.sources.use(owner, name)
        except Missing as error:
            # A stock class method that was called through a class of ours made one of ours.
            bases = self._stock_bases(self.own) if self.own else []
            made = isinstance(owner, Instance) and any(owner.of in self.sources.mro(base) for base in bases)
            if not (made and self.own and self._own_member(self.own, name)):
                self.report(node, str(error))
            return OTHER

    def _note(self, bases: list[Class], cls: str, name: str) -> None:
        """Remembers an inherited name that we use, unless a class of another file would answer for it."""
        defining = {each for base in bases for each in self.sources.mro(base) if isinstance(each, Class)}
        defining = {each for each in defining if name in class_members(each.node) or name in set_on_self(each.node)}
        ours = any(name in set_on_self(_our_classes()[each][1]) for each in _our_bases(cls))
        files = {each.module.file for each in defining}
        if len(files) == 1 and not ours:
            self.sources.used.update((file, name) for file in files)

    def _of_own(self, owner: Own, name: str, node: ast.AST) -> Thing:
        if not owner.super_only and self._own_member(owner.name, name):
            return OTHER
        if not self._within(stock.OPTIONAL_ATTRIBUTES.get(name, _ALWAYS)):
            return OTHER  # behind a question whether it is there
        result: Thing = OTHER
        # What is mixed in before stock classes finds them behind itself only in the classes that mix it in.
        for cls in _heirs(owner.name) if owner.super_only else (owner.name,):
            if cls in self.absent:
                continue
            bases = self._stock_bases(cls)
            if not bases:
                continue
            for base in bases:
                try:
                    result = self.sources.attribute(base if owner.super_only else Instance(base), name)
                    self._note(bases, cls, name)
                    if owner.super_only and isinstance(result, Callable_) and _is_abstract(result.node):
                        self.report(node, f"{result.name} ({result.module.file}) is abstract, nothing overrides it")
                    break
                except Missing:
                    continue
            else:
                ours = class_members if owner.super_only else set_on_self
                behind = _our_bases(cls)
                if owner.super_only and owner.name in behind:
                    behind = behind[behind.index(owner.name) + 1 :]
                if not any(name in ours(_our_classes()[each][1]) for each in behind):
                    self.report(node, f"{', '.join(map(str, bases))} has no {name}")
        return result

    def _call(self, node: ast.Call, names: dict[str, Thing]) -> Thing:
        text = ast.unparse(node.func)
        if text == "super" and self.own:
            after = self._value(node.args[0], names) if node.args else OTHER
            if isinstance(after, Class):  # of a stock class: what it inherits from
                return next((Instance(each) for each in self.sources.mro(after)[1:] if isinstance(each, Class)), OTHER)
            return Own(self.own, super_only=True)
        arguments = [self._value(each, names) for each in node.args]
        for keyword in node.keywords:
            self._value(keyword.value, names)
        if text in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            return self._by_name(node, text, arguments[0])
        if text in ("copy.copy", "copy.deepcopy") and arguments:
            return arguments[0]
        function = self._value(node.func, names)
        if isinstance(node.func, ast.Name) and isinstance(function, Callable_):
            self.sources.used.add((function.module.file, function.name.rpartition(".")[2]))
        if isinstance(function, Undeclared | Unknown) and isinstance(node.func, ast.Name):
            what = function.name if isinstance(function, Undeclared) else function.what
            self.report(node, f"{node.func.id} is called, but cannot be followed; see stock_names: {what}")
            return OTHER
        if isinstance(function, Callable_ | Class):
            return self._result(node, text, function)
        if function == OTHER and self.own and text.startswith("self."):
            return self._result_of_own(text.removeprefix("self."))
        return function if isinstance(function, Unknown) else OTHER

    def _result(self, node: ast.Call, text: str, function: Callable_ | Class) -> Thing:
        """What a call of vLLM's function or class gives, after a look at its arguments."""
        if isinstance(function, Class):
            signature = self._constructor(function)
            if signature is not None:
                self._signature(node, signature, function)
            return Instance(function)
        bound = function.bound or (text.startswith("super(") and not _is_static(function.node))
        self._signature(node, _Signature(function.node, bound), function)
        if text == "super().from_config" and self.own:  # alternative constructors make the class they are called on
            return Own(self.own)
        return self.sources.annotated(function.module, function.node.returns, function.name)

    def _result_of_own(self, name: str) -> Thing:
        """What a method of the class that is being followed returns, where its annotation names a class of vLLM's."""
        for each in _our_bases(self.own or ""):
            file, node = _our_classes()[each]
            for method in node.body:
                if isinstance(method, Function) and method.name == name and method.returns is not None:
                    found = self._imports_of(file).get(ast.unparse(method.returns).partition(" ")[0])
                    return Instance(found) if isinstance(found, Class) else OTHER
        return OTHER

    def _by_name(self, node: ast.Call, how: str, owner: Thing) -> Thing:
        name = node.args[1]
        if not isinstance(name, ast.Constant) or not isinstance(owner, Instance | Class | Module | Undeclared | Own):
            return OTHER  # names in variables stand in stock.STRINGS
        if how == "getattr" and len(node.args) == 2:
            return self._attribute(owner, name.value, node)
        if how == "getattr" and isinstance(owner, Instance | Own):
            ranges = stock.OPTIONAL_ATTRIBUTES.get(name.value)
            if ranges is None:
                own = isinstance(owner, Own) and (
                    not self._stock_bases(owner.name)
                    or any(name.value in set_on_self(_our_classes()[each][1]) for each in _our_bases(owner.name))
                )
                if own or any(self._own_member(each, name.value) for each in _our_classes()):
                    return OTHER
                self.report(node, f"{name.value} is asked for with a default; declare in stock_names who has it")
                return OTHER
            if self._within(ranges):
                return self._attribute(owner, name.value, node)
        return OTHER

    def _within(self, ranges: Iterable[tuple[str, str]]) -> bool:
        """Whether the release lies in one of some ranges of minor releases."""
        minor = Version(".".join(map(str, Version(self.release).release[:2])))
        return any(Version(first) <= minor <= Version(last) for first, last in ranges)

    def _constructor(self, cls: Class) -> _Signature | None:
        if any("dataclass" in ast.unparse(each) for each in cls.node.decorator_list):
            return _Signature.of_dataclass(cls.node)
        found = self.sources.member(cls, "__init__")
        if found is None or not isinstance(found[1], Function):
            return None
        return _Signature(found[1], True)

    def _signature(self, node: ast.Call, signature: _Signature, of: Class | Callable_) -> None:
        given = [each for each in node.args if not isinstance(each, ast.Starred)]
        starred = len(given) != len(node.args)
        named = {each.arg for each in node.keywords if each.arg is not None}
        expanded = any(each.arg is None for each in node.keywords)
        if len(given) > len(signature.positional) and not signature.rest:
            self.report(node, f"{of.name} ({of.module.file}) takes no {len(given)} positional arguments")
        for name in sorted(named):
            if name in signature.named:
                self.sources.used.add((of.module.file, name))
            elif not signature.keywords:
                self.report(node, f"{of.name} ({of.module.file}) has no parameter {name}")
        short = ".".join(of.name.rsplit(".", 2)[-2:])
        named |= set(stock.FORWARDED_KEYWORDS.get(short, ())) if expanded else set()
        if starred or (expanded and short not in stock.FORWARDED_KEYWORDS):
            return
        for name in signature.required:
            if name not in named and name not in signature.positional[: len(given)]:
                self.report(node, f"{of.name} ({of.module.file}) needs {name}, which is not given")


_ALWAYS = (("0", "9999"),)
_PATH = re.compile(r"vllm(\.[A-Za-z_]\w*){2,}|vllm(\.[A-Za-z_]\w*)*:[A-Za-z_][\w.]*", re.ASCII)


def _is_abstract(node: Function) -> bool:
    return any("abstractmethod" in ast.unparse(each) for each in node.decorator_list)


def _is_static(node: Function) -> bool:
    return any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)


class _Signature:
    """What a function takes.

    Attributes:
        positional: names that may be given by position, in order.
        named: names that may be given by keyword.
        only_named: names that can only be given by keyword.
        required: names without a default.
        rest, keywords: it has ``*args``, ``**kwargs``.
    """

    def __init__(self, node: Function, bound: bool) -> None:
        positional = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        with_default = positional[len(positional) - len(node.args.defaults) :]
        skip = 1 if bound and not _is_static(node) else 0
        self.positional = positional[skip:]
        self.only_named = [each.arg for each in node.args.kwonlyargs]
        self.named = {*self.positional, *self.only_named}
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        self.required = [name for name in self.positional if name not in with_default]
        self.required += [each.arg for each, default in pairs if default is None]
        self.rest = node.args.vararg is not None
        self.keywords = node.args.kwarg is not None

    @classmethod
    def of_dataclass(cls, node: ast.ClassDef) -> _Signature:
        """The constructor that a dataclass gets."""
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
        signature: Any = cls.__new__(cls)
        signature.positional = [each.target.id for each in fields if "ClassVar" not in ast.unparse(each.annotation)]
        signature.only_named = []
        signature.named = set(signature.positional)
        signature.required = [each.target.id for each in fields if each.value is None]
        signature.rest = signature.keywords = False
        found: _Signature = signature
        return found


def uses_of_string(text: str) -> list[tuple[OurFile, int]]:
    """Where a declared string, or attribute, stands in our code."""
    return _uses().get(text, [])


@cache
def _uses() -> dict[str, list[tuple[OurFile, int]]]:
    found: dict[str, list[tuple[OurFile, int]]] = {}
    for file in (*our_files(), *_files("schemes")):
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.setdefault(node.value, []).append((file, node.lineno))
            elif isinstance(node, ast.Attribute):
                found.setdefault(node.attr, []).append((file, node.lineno))
    return found
