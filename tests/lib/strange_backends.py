"""What a third party's method or attribute may do instead of its work, as one table of faults."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from tests.lib.cases import CPU, Plain, problem
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.core.decision import Numerics, Reason, Rejected, ShardPlan

LAYER = problem()


class Stop(BaseException):
    """A third party's own signal."""


class Interrupt(KeyboardInterrupt):
    """A third party's own kind of Ctrl-C."""


class Unspeakable(Exception):
    """Its message cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


def _raises(error: Any) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


def _recurse() -> Any:
    return _recurse()


def _allocate() -> Any:
    return bytearray(1 << 62)


RAISED: dict[str, tuple[Callable[[], Any], str]] = {
    "error": (_raises(RuntimeError("broken")), "raised RuntimeError: broken"),
    "assertion": (_raises(AssertionError()), "raised AssertionError"),
    "exit": (lambda: sys.exit(3), "raised SystemExit: 3"),
    "exit raised": (_raises(SystemExit("bye")), "raised SystemExit: bye"),
    "interrupt raised": (_raises(KeyboardInterrupt()), "raised KeyboardInterrupt"),
    "own interrupt": (_raises(Interrupt()), "raised Interrupt"),
    "own signal": (_raises(Stop("now")), "raised Stop: now"),
    "generator exit": (_raises(GeneratorExit()), "raised GeneratorExit"),
    "unspeakable": (_raises(Unspeakable()), "raised Unspeakable: a message that cannot be read"),
    "controls": (_raises(ValueError("a\x1b[2Jb\nc")), "raised ValueError: a [2Jb c"),
    "long": (_raises(ValueError("x" * 10**7)), "raised ValueError: xxx"),
    "recursion": (_recurse, "raised RecursionError"),
    "memory": (_allocate, "raised "),
}
"""What to do, and what the reason says of it."""


class Text(str):
    """A string of a class of its own, whose methods are its own."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


RETURNED: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "nan": lambda: math.nan,
    "infinite": lambda: -math.inf,
    "minus one": lambda: -1,
    "true": lambda: True,
    "complex": lambda: 1j,
    "text": lambda: "16bits",
    "blank": lambda: " ",
    "huge text": lambda: "x" * 10**7,
    "controls": lambda: "\x1b[2J",
    "own text": lambda: Text("16bit"),
    "bytes": lambda: b"16bit",
    "object": object,
    "class": lambda: Backend,
    "generator": lambda: (each for each in ()),
    "coroutine": lambda: lambda: None,
    "list": lambda: [1],
    "empty list": list,
    "dict of one": lambda: {1: 1},
    "tuple of numbers": lambda: (1, 2),
    "wrong reasons": lambda: Rejected(("no",)),  # type: ignore[arg-type]
    "long reason": lambda: Rejected((Reason("code", "x" * 10**6),)),
    "reason of bytes": lambda: Rejected((Reason("code", b"no"),)),  # type: ignore[arg-type]
    "plan of text": lambda: ShardPlan("128", "64"),  # type: ignore[arg-type]
    "plan too small": lambda: ShardPlan(LAYER.hidden_size - 1, LAYER.intermediate_size),
    "plan below zero": lambda: ShardPlan(-LAYER.hidden_size, -LAYER.intermediate_size),
    "plan too large": lambda: ShardPlan(10**18, 10**18),
    "plan of floats": lambda: ShardPlan(float(LAYER.hidden_size), math.nan),  # type: ignore[arg-type]
    "plan with notes": lambda: ShardPlan(LAYER.hidden_size, LAYER.intermediate_size, notes=(None,)),  # type: ignore[arg-type]
    "numerics of none": lambda: Numerics(None, "16bit"),  # type: ignore[arg-type]
}

ALLOWED: dict[str, tuple[str, ...]] = {
    "priority": ("minus one",),
    "tiles": (),
    "compile_keys": ("none",),
    "hand_overs": ("tuple of numbers",),
    "few_tokens": ("none",),
    "layout": ("text",),
    "only_by_name": ("text", "blank"),
    "validate_weights": ("text", "blank"),
    "build_experts": tuple(name for name in RETURNED if name != "none"),  # whatever vLLM's kernel takes
}
"""Values of `RETURNED` that the contract allows, by method."""

ARGUMENTS: dict[str, Any] = {
    "problem": LAYER,
    "device": CPU,
    "plan": ShardPlan(LAYER.hidden_size, LAYER.intermediate_size),
    "tokens": 1,
    "most": 4,
    "tile": "",
    "expert": {},
    "tensors": {},
    "builder": SimpleNamespace(for_serving=True),
}
"""A value for each argument of the contract's methods."""


def strange(method: str, act: Callable[[], Any]) -> Backend:
    """A backend that comes first everywhere, with one method that acts so."""
    return type("Strange", (Plain,), {"name": "strange", "rank": -5.0, method: lambda self, *args, **kwargs: act()})()
