"""Random damage to files, with a seed, and the limits that reading a damaged file must keep.

A fuzz target runs sixty inputs in the default tier. ``FUZZ_INPUTS=5000`` runs that many of each target;
``FUZZ_SEED`` chooses others than the default ones.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import json
import os
import random
import resource
import string
import time
from collections.abc import Callable, Iterator
from typing import Any

DEFAULT_INPUTS = 60
MAX_SECONDS = 2.0
"""Processor time that one input may take."""
MAX_BYTES = 500 << 20
"""Memory that the process may take more than before the first input."""


def number_of_inputs() -> int:
    """How many inputs each target runs."""
    return int(os.environ.get("FUZZ_INPUTS", DEFAULT_INPUTS))


def seeds() -> range:
    """The seed of each input."""
    first = int(os.environ.get("FUZZ_SEED", "0")) * 1_000_000
    return range(first, first + number_of_inputs())


class Statistics:
    """What a target's inputs did.

    Attributes:
        outcomes: number of inputs by outcome: ``read``, or the type of the error.
        slowest: processor time of the slowest input, in seconds.
        peak: largest growth of the process's largest memory by one input, in bytes.
    """

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.slowest = 0.0
        self.peak = 0

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return f"{counts}; slowest {self.slowest:.2f} s, largest +{self.peak >> 20} MiB"


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """A process that takes `MAX_BYTES` more gets MemoryError; one that hangs dies with its traceback."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MAX_BYTES, before[1]))
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(make: Callable[[random.Random], Any], read: Callable[[Any], str]) -> Statistics:
    """Runs a target.

    Objects that exist already are hidden from the garbage collector, and stay so. An input with 400,000 nested lists
    starts collections of all generations, and each would walk what thousands of earlier tests have left: 2 s instead of
    0.2 s.

    Args:
        make: an input from a source of random numbers.
        read: reads it, and returns the outcome in a word. Any exception is a failure of the target.

    Raises:
        AssertionError: an input raised, or exceeded a limit; the message has its seed.
    """
    found = Statistics()
    gc.freeze()
    for seed in seeds():
        made = make(random.Random(seed))
        peak, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        try:
            with _limits():
                outcome = read(made)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}"[:2000]) from error
        seconds = time.process_time() - begin
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
        assert seconds < MAX_SECONDS, f"seed {seed}: {seconds:.1f} s ({outcome})"
        found.outcomes[outcome] = found.outcomes.get(outcome, 0) + 1
        assert grown < MAX_BYTES, f"seed {seed}: {grown >> 20} MiB ({outcome})"
        found.slowest, found.peak = max(found.slowest, seconds), max(found.peak, grown)
    return found


WORDS = (
    "", " ", "x", "silu", "mxfp8", "re:", "re:.*", "re:(", "re:(a|aa)+$", "re:(?a)(?u)x", "re:(?R)", "*", "*.mlp.*",
    "[", "model.layers.1", "model.layers.0.mlp.experts.0.gate_proj", "-:.*", "\x00", "\x1b[2J", "\ud800", "é", "‮",
    "9" * 5000, "a." * 30_000, "experts." * 5000, "re:" + "(" * 3000, "re:a{9}{9}{9}{9}{9}{9}", "re:" + "(.*a){9}" * 9,
    "re:" + "a*" * 9000, "x" * 70_000, "*a" * 400, "$\\frac", "../..", "/dev/zero", "NaN", "inf", "{}", "~nobody",
)  # fmt: skip


def word(random: random.Random) -> str:
    """A text that has caused trouble, or random letters."""
    if random.random() < 0.7:
        return random.choice(WORDS)
    letters = string.printable if random.random() < 0.8 else "".join(map(chr, range(0x80, 0x3000, 7)))
    return "".join(random.choices(letters, k=random.randint(0, 40)))


def value(random: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = random.randrange(9 if depth < 3 else 6)
    if kind == 0:
        return random.choice((None, True, False))
    if kind == 1:
        return random.choice((0, 1, -1, 2, 31, 32, 64, 128, 2**31, 2**63, 10**300, -(2**70), random.randint(0, 5000)))
    if kind == 2:
        return random.choice((0.0, -0.0, 0.5, 1e308, -1e-308, float("inf"), float("nan")))
    if kind in (3, 4, 5):
        return word(random)
    if kind == 6:
        nested: Any = value(random, 3)
        for _ in range(random.choice((1, 20, 49, 60, 200))):
            nested = [nested] if random.random() < 0.9 else {"a": nested}
        return nested
    items = _repeated([value(random, depth + 1) for _ in range(random.randint(0, 4))], random.choice((1, 1, 1, 2000)))
    return items if kind == 7 else {f"{word(random)[:100]}{at}": item for at, item in enumerate(items)}


def _repeated(items: list[Any], times: int) -> list[Any]:
    """A list, repeated as often as leaves a text of it below a megabyte."""
    return items * max(1, min(times, _MAX_TEXT // (len(repr(items)) + 1)))


_MAX_TEXT = 1 << 20


def mutated(tree: Any, random: random.Random) -> Any:
    """JSON with a few changes: values replaced, removed, repeated, exchanged, multiplied, or put under other
    names."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return value(random)
        holder, key = random.choice(places)
        kind = random.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[word(random)] = holder.pop(key)
        elif kind == 2:
            other, its = random.choice(places)
            holder[key] = copy.deepcopy(other[its])
        elif kind == 3 and isinstance(holder[key], list):
            holder[key] = _repeated(holder[key], random.choice((2, 50, 5000)))
        elif kind >= 6 and isinstance(holder[key], int | float):  # often as valid as before
            holder[key] *= random.choice((1, 2, 3))
        else:
            holder[key] = value(random)
    return tree


def retyped(tree: Any, random: random.Random) -> Any:
    """JSON in which one to three values have another type with the same content: a list for an object, a text for a
    number, and so on."""
    tree = copy.deepcopy(tree)
    for _ in range(random.randint(1, 3)):
        if places := list(_places(tree)):
            holder, key = random.choice(places)
            holder[key] = random.choice(_other_types(holder[key]))
    return tree


def _other_types(value: Any) -> list[Any]:
    if isinstance(value, dict):
        pairs = [[name, item] for name, item in value.items()]
        return [pairs, list(value.values()), [value], json.dumps(value), {f"{name} ": item for name, item in pairs}]
    if isinstance(value, list):
        joined = ",".join(map(str, value))
        return [dict.fromkeys(map(str, value), True), joined, [value], [[item] for item in value], len(value), None]
    if isinstance(value, str):
        return [[value], {"name": value}, value.upper(), f"{value}\0", f"\ufeff{value}", value.replace("_", "-"), None]
    if isinstance(value, int | float):
        return [str(value), float(value), [value] * 48, {"value": value}, -value, value * 10**30, bool(value), None]
    return [[], {}, "", 0, "null"]


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    pending = [tree]
    for _ in range(5000):
        if not pending:
            return
        holder = pending.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, item in items:
            yield holder, key
            pending.append(item)


def damaged(data: bytes, random: random.Random) -> bytes:
    """Bytes with a few changes: single ones, runs, a shorter or longer file, and pieces of the file elsewhere."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5, 20))):
        at = random.randrange(max(len(changed), 1))
        kind = random.randrange(7)
        if not changed or kind == 0:
            changed = changed[:at]
        elif kind == 1:
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 2:
            changed[at] = random.choice((0, 0xFF, 0x80, 0x7F, random.randrange(256)))
        elif kind == 3:
            changed[at : at + 8] = random.randbytes(8)
        elif kind == 4:
            size, source = random.randint(1, 64), random.randrange(len(changed))
            changed[at : at + size] = changed[source : source + size]
        elif kind == 5:
            changed[at : at + 2] = random.choice((b"\x00\x00", b"\xff\xff", b"\x7f\xff"))
        else:
            changed += random.randbytes(random.choice((1, 100, 5000)))
    return bytes(changed)
