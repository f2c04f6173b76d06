"""The boundary to a backend: every call of one of its methods goes through `CheckedBackend`.

A backend may come from anybody. Its methods may raise anything and return anything; what leaves this boundary is either
a value as the contract declares it, or a `BackendDefect`, which the decision turns into a rejection. A third party's
backend gets copies of the problem, the device and the plan, which it could change although they are frozen.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from .. import backends as builtin_package
from ..backends import Backend
from ..core import decision as decision_module
from ..core import problem as problem_module
from ..core.decision import Rejected, ShardPlan
from ..core.problem import Problem
from ..errors import BackendDefect, OracleError, RegistryError, describe_error, is_interruption, is_out_of_memory
from ..settings import env_var
from .watchdog import third_party_code

MAX_TEXT = 4096
"""Characters in one string of an answer: longer ones are no sentence for a log or a table."""
MAX_ENTRIES = 65536
"""Entries of a tuple, set or mapping of an answer."""
MAX_GROWTH, MAX_EXTRA_BYTES = 64, 1 << 28
"""Kernel tensors of an expert may have this many times its bytes, and this many bytes more: no padding or wider dtype
needs as much."""


class _IsTensor(type):
    """Asked quickly: each conversion of an expert has its tensors checked."""

    def __instancecheck__(cls, value: object) -> bool:
        torch = sys.modules.get("torch")  # whoever returns a tensor has imported it
        return torch is not None and isinstance(value, torch.Tensor)


class Tensor(metaclass=_IsTensor):
    """Stands for ``torch.Tensor`` here: torch is not imported for a decision."""


_Check = Callable[[Any], str]
"""A function of a value: how it departs from a type, "" if it does not."""


def mismatch(value: object, declared: Any) -> str:
    """How a value departs from a type of the contract; "" if it does not.

    Args:
        value: anything.
        declared: a type as the contract's annotations have it. ``Any`` stands for an object; None is none.
    """
    return _check_of(declared)(value)


@cache
def _check_of(declared: Any) -> _Check:
    """The check of a type. Types are taken apart once: a decision checks hundreds of values."""
    if declared is Any:
        return lambda value: "" if value is not None else "it is None"
    origin, args = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return _union_check(declared, args)
    if origin is Literal:
        words = " or ".join(map(repr, args))
        return lambda value: "" if type(value) is str and value in args else _expected(value, words)
    if declared is NoneType:
        return lambda value: "" if value is None else _expected(value, "None")
    if declared is str:
        return _text_mismatch
    if declared is float:
        return _number_mismatch
    if declared in (int, bool):
        return lambda value: "" if type(value) is declared else _expected(value, declared)
    if dataclasses.is_dataclass(declared) or (inspect.isclass(declared) and issubclass(declared, msgspec.Struct)):
        return _fields_check(declared)
    if origin in (tuple, frozenset, dict, list, Mapping):
        return _entries_check(origin, args)
    if origin is Callable:
        return lambda value: "" if callable(value) else _expected(value, "a function")
    return lambda value: "" if isinstance(value, origin or declared) else _expected(value, declared)


def _expected(value: object, declared: object) -> str:
    plain = isinstance(value, str | int | float | NoneType)
    words = reprlib.repr(value) if plain else f"of type {type(value).__name__}"
    name = declared.__name__ if inspect.isclass(declared) else str(declared)
    return f"it is {words}, expected {name}"


def _text_mismatch(value: object) -> str:
    if type(value) is not str:
        return _expected(value, str)
    if len(value) > MAX_TEXT:
        return f"it has {len(value)} characters, the limit is {MAX_TEXT}"
    if value.isprintable() or value.replace("\n", "").isprintable():
        return ""
    return f"it holds control characters: {reprlib.repr(value)}"


def _number_mismatch(value: object) -> str:
    finite = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    return "" if finite else _expected(value, "a finite number")


def _union_check(declared: Any, args: tuple[Any, ...]) -> _Check:
    kinds = [get_origin(each) or each for each in args]
    checks = [_check_of(each) for each in args]

    def check(value: object) -> str:
        # The member of the value's own type says more than that no member fits.
        members = [each for kind, each in zip(kinds, checks, strict=True) if kind is type(value)] or checks
        found = [each(value) for each in members]
        return "" if "" in found else found[0] if len(found) == 1 else _expected(value, declared)

    return check


def _fields_check(declared: Any) -> _Check:
    hints = {name: hint for name, hint in get_type_hints(declared).items() if get_origin(hint) is not ClassVar}
    checks = [(name, _check_of(hint)) for name, hint in hints.items()]

    def check(value: object) -> str:
        if type(value) is not declared:
            return _expected(value, declared)
        for name, each in checks:
            if words := each(getattr(value, name)):
                return f"in its field {name} {words}"
        return ""

    return check


def _entries_check(kind: Any, args: tuple[Any, ...]) -> _Check:
    checks = [_check_of(each) for each in args if each is not Ellipsis]
    keyed, fixed = kind in (dict, Mapping), kind is tuple and args[-1] is not Ellipsis

    def check(value: Any) -> str:
        if not isinstance(value, kind):
            return _expected(value, kind)
        if len(value) > MAX_ENTRIES:
            return f"it has {len(value)} entries, the limit is {MAX_ENTRIES}"
        if fixed and len(value) != len(args):
            return f"it has {len(value)} entries, expected {len(args)}"
        # Of a mapping each key and value, of a fixed tuple each entry has a check of its own.
        rows = value.items() if keyed else (value,) if fixed else ((each,) for each in value)
        for row in rows:
            for each, entry in zip(checks, row, strict=True):
                if words := each(entry):
                    return f"in an entry {words}"
        return ""

    return check


def _sizes_mismatch(plan: ShardPlan, problem: Problem) -> str:
    """A kernel gets at least the layer's own sizes, and no more than padding explains."""
    for name in ("hidden_size", "intermediate_size"):
        size, least = getattr(plan, name), getattr(problem, name)
        if not least <= size <= least + MAX_ENTRIES:
            return f"its {name} is {size}, the layer has {least}"
    return ""


def _verdict_mismatch(verdict: object, problem: Problem) -> str:
    """A rejection says why."""
    if not isinstance(verdict, Rejected):
        return ""
    blank = any(not each.code.strip() or not each.detail.strip() for each in verdict.reasons)
    return "it rejects the layer without a reason" if blank else ""


def _kernel_tensors_mismatch(tensors: Mapping[str, Any], expert: Mapping[str, Any]) -> str:
    """Kernel tensors become parameters of vLLM's layer, `[experts, *shape]` each. Memory is reserved for them before
    weights are loaded, by the shapes of a conversion that computes nothing; then each expert's are copied there."""
    for name, tensor in tensors.items():
        # Asked first: a class of its own may do anything in every other answer, and when it is copied.
        if type(tensor) not in _plain_tensors():
            return f"its {name} is a {type(tensor).__name__}, expected a torch.Tensor"
        if not name.isidentifier() or name in _module_attributes():
            return f"{name!r} cannot be a parameter's name"
        if tensor.is_nested or tensor.is_quantized or str(tensor.layout) != "torch.strided":
            return f"its {name} is not a dense tensor of plain numbers"
        if not tensor.dim():
            return f"its {name} has no dimensions; an expert's scalar has shape [1]"
        if tensor.is_meta and not all(each.is_meta for each in expert.values()):
            return f"its {name} has no values: it is on the device meta, the expert is not"
        if words := _copy_failure(tensor.dtype, tensor.device):
            return f"its {name} cannot be copied: {words}"
    given, size = (sum(each.nbytes for each in some.values()) for some in (expert, tensors))
    if size > MAX_GROWTH * given + MAX_EXTRA_BYTES:
        return f"its tensors have {size} bytes, those of the expert that it got have {given}"
    return ""


@cache
def _plain_tensors() -> tuple[type, ...]:
    """Classes whose tensors behave as torch's. Asked where there are tensors, so that torch is imported."""
    torch = sys.modules["torch"]
    return torch.Tensor, torch.nn.Parameter


@cache
def _copy_failure(dtype: Any, device: Any) -> str:
    """Why tensors of a dtype cannot be copied on a device; "" where they can. torch has dtypes that it cannot copy."""
    torch = sys.modules["torch"]
    try:
        torch.empty(1, dtype=dtype, device=device).copy_(torch.empty(1, dtype=dtype, device=device))
    except Exception as error:  # of a type for each dtype
        if is_out_of_memory(error):
            raise
        return describe_error(error)
    return ""


@cache
def _module_attributes() -> frozenset[str]:
    """Names that every torch module has. Asked where there are tensors, so that torch is imported."""
    return frozenset(dir(sys.modules["torch"].nn.Module()))


_Rule = Callable[[Any, Any], str]

_RULES: dict[str, _Rule] = {
    "plan": _sizes_mismatch,
    "check": _verdict_mismatch,
    "convert": _kernel_tensors_mismatch,
    "hand_overs": lambda counts, problem: (
        "" if [*counts] == sorted({*counts}) and min(counts, default=1) > 0 else f"{counts} do not ascend from 1"
    ),
    "few_tokens": lambda found, problem: (
        "" if found is None or (found.max_tokens or 0) > 0 else f"its largest number of tokens is {found.max_tokens}"
    ),
    "layout": lambda name, problem: "" if name.strip() else "it is empty",
}
"""What the contract says of a method's result besides its type, given the method's first argument: mostly the
problem."""


_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(inspect.signature(kind).parameters)
    for module in (decision_module, problem_module)
    for kind in vars(module).values()
    if inspect.isclass(kind) and (dataclasses.is_dataclass(kind) or issubclass(kind, msgspec.Struct))
}
"""The fields of the dataclasses and of the verdicts that backends get and return."""


def _copied(value: Any) -> Any:
    """A value without a part that somebody else can change: dataclasses, verdicts, and the tuples and dictionaries in
    them, are copied. Values of other types stay themselves."""
    kind: Any = type(value)
    if kind in _FIELDS:
        return kind(**{name: _copied(getattr(value, name)) for name in _FIELDS[kind]})
    if kind is tuple:
        return tuple(map(_copied, value))
    return {key: _copied(each) for key, each in value.items()} if kind is dict else value


_MAX_COPIES = 16
"""Copies of arguments that are kept for a backend's next calls: a decision has three or four."""


def _changed_fields(before: Any, after: Any) -> Iterator[str]:
    """The fields of a dataclass, and of those in it, by their dotted names, that differ between two of a type."""
    for name in _FIELDS[type(before)]:
        old, new = getattr(before, name), getattr(after, name)
        if type(old) in _FIELDS and type(old) is type(new):
            yield from (f"{name}.{each}" for each in _changed_fields(old, new))
        elif old != new:
            yield name


METHODS = tuple(
    name for name, member in vars(Backend).items() if inspect.isfunction(member) and not name.startswith("_")
)
"""The methods of the contract."""

_RULE_ARGUMENTS = {name: [*inspect.signature(getattr(Backend, name)).parameters][1] for name in _RULES}
"""The name of the first argument, which a method's rule gets."""

ATTRIBUTES: dict[str, Any] = {
    name: get_args(hint)[0] for name, hint in get_type_hints(Backend).items() if get_origin(hint) is ClassVar
}
"""Attributes of the contract, with their types."""

_WITH_WEIGHTS = ("validate_weights", "convert", "build_experts")
"""Methods that get tensors: a damaged checkpoint or a full memory that they report is not their own defect."""


def _result_type(method: str) -> Any:
    return get_type_hints(getattr(Backend, method), localns={"Tensor": Tensor})["return"]


class CheckedBackend(Backend):
    """A backend whose methods raise nothing but `BackendDefect` and return what the contract declares.

    The attributes are read and checked once. Ctrl-C and this process's signal handlers pass through all methods; a
    typed error and a lack of memory pass through those that get weights.
    """

    def __init__(self, backend: Backend, origin: str) -> None:
        """
        Args:
            backend: the backend.
            origin: where it comes from, for messages.

        Raises:
            RegistryError: an attribute is not what the contract declares.
        """
        self._backend, self._origin = backend, origin
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._watched = not origin.startswith(f"{builtin_package.__name__}.")
        for name, declared in ATTRIBUTES.items():
            if not hasattr(backend, name):  # a method replaces it; see `missing_attributes`
                continue
            value = getattr(backend, name)
            if words := mismatch(value, declared):
                raise RegistryError(f"the attribute {name} is not as the contract declares: {words}", where=origin)
            self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        # What a backend has beyond the contract.
        if name.startswith("__") or name in ("_backend", "_origin"):
            raise AttributeError(name)
        return getattr(self._backend, name)

    def _defect(self, part: str, words: str) -> BackendDefect:
        rule = f"backend {self.name}: its {part} {words}"
        return BackendDefect(rule, f"Report it to the maintainers of {self._origin}; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"{env_var('disable')}={self.name} leaves it out"

    def _call(
        self, method: str, check: _Check, rule: _Rule | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            changed = ""
            if self._watched:
                value, changed = self._call_third_party(method, args, kwargs)
            else:
                value = getattr(self._backend, method)(*args, **kwargs)
            if isinstance(value, dict):  # what is checked is what the caller gets: a class of its own may change it
                value = dict(value)
            words = check(value)
            if not words and self._watched:  # it may have kept the answer, and change it later
                value = _copied(value)
            if not words and rule is not None:
                words = rule(value, args[0] if args else kwargs[_RULE_ARGUMENTS[method]])
        # A third party's method can raise anything; a decision must be able to take another backend.
        except BaseException as error:
            known = method in _WITH_WEIGHTS and (isinstance(error, OracleError) or is_out_of_memory(error))
            if known or is_interruption(error):
                raise
            raise self._defect(f"method {method}", f"raised {describe_error(error)}") from error
        if changed:
            raise self._defect(f"method {method}", changed)
        if words:
            raise self._defect(f"method {method}", f"returned what the contract does not allow: {words}")
        return value

    def _call_third_party(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        """Calls a method with copies of the values that it gets. Tensors and builders are theirs to use.

        Returns:
            The answer, and how the method has changed a value; "" if it has not.
        """
        copies = [self._copy_for_it(each) for each in args]
        named = {name: self._copy_for_it(each) for name, each in kwargs.items()}
        intact = False
        try:
            with third_party_code(f"backend {self.name}: its method {method}", self._remedy):
                value = getattr(self._backend, method)(*copies, **named)
            for before, after in zip((*args, *kwargs.values()), (*copies, *named.values()), strict=True):
                if type(before) in _FIELDS and before != after:
                    names = ", ".join(_changed_fields(before, after))
                    return value, f"changed the {type(before).__name__} that it got: {names}"
            intact = True
            return value, ""
        finally:
            if not intact:
                self._copies.clear()

    def _copy_for_it(self, argument: Any) -> Any:
        """What a third party gets for an argument: a copy of a dataclass, the same one in each call; anything else
        itself."""
        if type(argument) not in _FIELDS:
            return argument
        kept = self._copies.get(id(argument))  # which stays its own as long as the entry holds it
        if kept is None:
            if len(self._copies) >= _MAX_COPIES:
                self._copies.clear()
            kept = self._copies[id(argument)] = argument, _copied(argument)
        return kept[1]


@contextlib.contextmanager
def watched_calls(
    backend: Backend | None,
    part: str,
    allowed: tuple[type[Exception], ...] = (Exception,),
    refused: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Watches calls of what a third party's backend built or named, experts of any class and its stock class, as its
    methods are watched: what they print goes to standard error, and ``SystemExit`` does not end the process.

    It takes 0.1 ms: for calls at load and of tools, not for those of a layer that serves.

    Args:
        backend: a registry's; nothing is done for None, and for one of this package.
        part: what is called, for messages.
        allowed: exceptions that pass as they are: who calls a kernel names the call, and the backend.
        refused: those among them that do not pass.

    Raises:
        BackendDefect: the code inside raised something else that is no interruption.
    """
    if not isinstance(backend, CheckedBackend) or is_own(backend):
        yield
        return
    try:
        with third_party_code(f"backend {backend.name}: its {part}", backend._remedy):
            yield
    except BaseException as error:
        passes = isinstance(error, allowed) and not isinstance(error, refused)
        if passes or isinstance(error, BackendDefect) or is_interruption(error):
            raise
        raise backend._defect(part, f"raised {describe_error(error)}") from error


def watched_kernel(backend: Backend | None) -> contextlib.AbstractContextManager[None]:
    """`watched_calls` of a call of the kernel that a backend built.

    A kernel sees no file and no setting: this project's own errors, which blame the checkpoint or the machine, are its
    defects. A lack of memory that Python or torch reports passes.

    Args:
        backend: see `watched_calls`.
    """
    return watched_calls(backend, "kernel", refused=(OracleError,))


def unchecked(backend: Backend) -> Backend:
    """The backend behind the boundary."""
    return backend._backend if isinstance(backend, CheckedBackend) else backend


def overrides(backend: Backend, method: str) -> bool:
    """Whether a backend has a method of its own in place of the contract's."""
    return getattr(type(unchecked(backend)), method) is not getattr(Backend, method)


def _checked(name: str) -> Callable[..., Any]:
    check, rule = _check_of(_result_type(name)), _RULES.get(name)

    @wraps(getattr(Backend, name))
    def method(self: CheckedBackend, *args: Any, **kwargs: Any) -> Any:
        return self._call(name, check, rule, args, kwargs)

    method.__dict__.pop("__isabstractmethod__", None)
    return method


for _name in METHODS:
    if _name not in vars(CheckedBackend):
        setattr(CheckedBackend, _name, _checked(_name))
abc.update_abstractmethods(CheckedBackend)  # type: ignore[type-abstract]  # until this line it is


def is_own(backend: Backend) -> bool:
    """Whether a backend of a registry is one of this package, and no third party's, which may be an instance of a class
    of ours."""
    return isinstance(backend, CheckedBackend) and not backend._watched
