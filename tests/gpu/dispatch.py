"""Racecheck's hazards, and which of them are Triton's dispatch of warps: proven from a kernel's machine code.

A warp-specialized kernel starts with all of its warps. Those beyond the first group wait at named barrier 1, then read
one byte each, which names the part of the kernel to run, or the end; the first group stores these bytes before the
same barrier. racecheck reports some of these pairs of a store and a load as hazards although the barrier is between
them. What it reports is put aside only where `dispatch_of` has shown for the very instructions that it cannot be:

* barrier 1 is used by all threads of a program at once and never by some, so every thread counts the same barriers;
* on every way through the code, with that count taken modulo 3, the bytes are stored in one part of the counts and
  loaded in another. A store and a load are then never between the same two barriers, whatever warps run first.

Two accesses between different barriers are ordered: a barrier waits for all threads, and orders shared memory of its
threads (PTX, `barrier.cta.sync`).
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

BARRIER = 1
"""The named barrier of the dispatch; 0 is the first group's own, those from 2 on are the others' own."""
RESERVED = 1024
"""Bytes of shared memory that CUDA keeps at the start of each program's on compute capability 8 and later."""
CYCLE = 3
"""Barriers of the dispatch from one load of the bytes to the next: before it, at a part's start and at its end."""


@dataclass(frozen=True)
class Dispatch:
    """One kernel's bytes that name the warps' parts, as addresses in shared memory, and the code that uses them."""

    kernel: str
    words: range
    writes: frozenset[int]
    reads: frozenset[int]


@dataclass(frozen=True)
class Hazard:
    """One report: RAW, WAR or WAW, an address in shared memory, and kernel and code address of write and read.

    The second write stands for the read in a WAW.
    """

    kind: str
    address: int
    write: tuple[str, int]
    read: tuple[str, int]

    def __str__(self) -> str:
        (writer, write), (reader, read) = self.write, self.read
        return f"{self.kind} {writer}+{write:#x} {reader}+{read:#x}"


def hazards_of(report: str) -> list[Hazard]:
    """All hazards in the text of `compute-sanitizer --tool racecheck --racecheck-report all`.

    Its summary counts each of them, and once more each group of them ("Race reported between"). Raises ValueError where
    it counts others than the text has, or there is no summary.
    """
    summary = re.search(r"RACECHECK SUMMARY: (\d+) hazards? ", report)
    if summary is None:
        raise ValueError("no summary of racecheck")
    access = r"=+\s+(Write|Read) Thread \S+ at (\S+?)\+(0x[0-9a-f]+)\b.*\n"
    found = []
    for match in re.finditer(rf"Potential (\w+) hazard detected at __shared__ (0x\w+) .*\n{access}{access}", report):
        kind, address, *parts = match.groups()
        first, second = (parts[0], (parts[1], int(parts[2], 16))), (parts[3], (parts[4], int(parts[5], 16)))
        if first[0] == "Read":
            first, second = second, first
        found.append(Hazard(kind, int(address, 16), first[1], second[1]))
    groups = len(re.findall(r"^=+ \w+: Race reported between ", report, re.M))
    if len(found) + groups != int(summary[1]):
        raise ValueError(f"{summary[0].strip()}, but {len(found)} with two places and {groups} groups are shown")
    return found


def is_of(hazard: Hazard, dispatches: Iterable[Dispatch]) -> bool:
    """Whether a hazard is between the store and the load of one kernel's dispatch, at its bytes."""
    return any(
        hazard.kind in ("RAW", "WAR")
        and hazard.write[0] == hazard.read[0] == each.kernel
        and hazard.address in each.words
        and hazard.write[1] in each.writes
        and hazard.read[1] in each.reads
        for each in dispatches
    )


def verdict_of(report: str, proven: Sequence[Dispatch], failed: Sequence[str] = ()) -> str:
    """What racecheck's report comes to: "ok" first where it has no hazards but those of the proven dispatches.

    failed: why nothing is proven of other kernels that ran; told where there are other hazards.
    """
    try:
        hazards = hazards_of(report)
    except ValueError as error:
        return str(error)
    if not hazards:
        return "ok"
    others = collections.Counter(str(hazard) for hazard in hazards if not is_of(hazard, proven))
    apart = f"{len(hazards) - others.total()} hazards of Triton's warp dispatch, proven for {len(proven)} kernels"
    if not others:
        return f"ok, {apart}"
    classes = [f"{count} x {where}" for where, count in others.most_common(8)]
    return "; ".join([f"{others.total()} hazards in {len(others)} classes", *classes, apart, *failed])


def dispatch_of(kernel: str, code: str, shared: int, warps: int, group: int = 4) -> Dispatch:
    """The proven dispatch of a kernel.

    Args:
        kernel: its name in racecheck's report.
        code: what `nvdisasm -c` prints of it.
        shared: bytes of shared memory of a program, as Triton counts them: the bytes in question are the last ones.
        warps: all warps of a program.
        group: warps of the first group.

    Raises ValueError, with what was found, where the proof does not hold or the code has jumps that are not understood.
    """
    start = shared - (warps - group)
    code_of = _instructions(code)
    # Stores name the bytes themselves, the load is the byte of this warp's number in the program.
    stores = re.compile(r"STS(\.\S+)? \[U?R\d+\+(0x[0-9a-f]+)\]")
    writes, reads = set(), set()
    for index, (_, text) in enumerate(code_of.lines):
        if (found := stores.search(text)) and start <= int(found[2], 16) < shared:
            writes.add(index)
        if re.search(rf"LDS\.U8 R\d+, \[R\d+(\+UR\d+)?\+{start - group:#x}\]", text):
            reads.add(index)
    counts = _barriers_before(code_of, warps * 32)
    written = {count for index in writes for count in counts[index]}
    read = {count for index in reads for count in counts[index]}
    if not written or not read or written & read:
        raise ValueError(
            f"{kernel}: {len(writes)} stores and {len(reads)} loads of the bytes from {start:#x} on, behind "
            f"{sorted(written)} and {sorted(read)} barriers modulo {CYCLE}"
        )
    places = [address for address, _ in code_of.lines]
    return Dispatch(
        kernel,
        range(RESERVED + start, RESERVED + shared),
        frozenset(places[index] for index in writes),
        frozenset(places[index] for index in reads),
    )


@dataclass(frozen=True)
class _Code:
    """A kernel's instructions, (address, text), and the index of the one behind each label."""

    lines: list[tuple[int, str]]
    labels: dict[str, int]


def _instructions(code: str) -> _Code:
    lines: list[tuple[int, str]] = []
    labels = {}
    for label, address, text in re.findall(r"^(\.L\w+):|^\s+/\*([0-9a-f]+)\*/\s+(\S.*?)\s*;", code, re.M):
        if label:
            labels[label] = len(lines)
        else:
            lines.append((int(address, 16), text))
    if not lines:
        raise ValueError("no instructions")
    return _Code(lines, labels)


@dataclass(frozen=True)
class _Thread:
    """Where a thread can be: instruction, count, where each BSYNC register takes it, and a guard known to be so."""

    index: int
    count: int = 0
    rejoins: frozenset[tuple[str, int]] = frozenset()
    guard: tuple[str, bool] | None = None


def _barriers_before(code: _Code, threads: int) -> list[set[int]]:
    """For each instruction, how many of the dispatch's barriers, modulo CYCLE, a thread can have behind it there."""
    behind: list[set[int]] = [set() for _ in code.lines]
    todo = [_Thread(0)]
    seen = set(todo)
    while todo:
        thread = todo.pop()
        if thread.index == len(code.lines):
            raise ValueError("the code runs over its end")
        behind[thread.index].add(thread.count)
        for following in _after(thread, code, threads):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return behind


def _after(thread: _Thread, code: _Code, threads: int) -> list[_Thread]:
    """Where a thread can be behind its instruction."""
    address, text = code.lines[thread.index]
    guard, bare = re.fullmatch(r"(?:@(!?U?P\w+) +)?(.*)", text).groups()  # type: ignore[union-attr]
    if guard is None:
        return _done(replace(thread, guard=None), address, bare, code, threads)
    # Behind a barrier its guard is known for the next instruction: two barriers and a jump under one, or none of them.
    stays = bare.startswith("BAR.")
    found = []
    if thread.guard != (guard, True):
        found.append(replace(thread, index=thread.index + 1, guard=(guard, False) if stays else None))
    if thread.guard != (guard, False):
        done = _done(replace(thread, guard=None), address, bare, code, threads)
        found += [replace(each, guard=(guard, True) if stays else None) for each in done]
    return found


def _done(thread: _Thread, address: int, text: str, code: _Code, threads: int) -> list[_Thread]:
    """Where a thread can be that has executed an instruction."""
    name, *operands = re.split(r"[ ,]+", text)
    name = name.split(".")[0]
    found = re.search(r"`\((\.L\w+)\)", text)
    target = code.labels.get(found[1]) if found else None
    following = replace(thread, index=thread.index + 1)
    if name == "BAR":
        return [replace(following, count=(thread.count + _is_dispatch(text, address, threads)) % CYCLE)]
    if name == "BRA" and target is not None:
        jump = replace(thread, index=target)
        return [jump] if text.startswith("BRA `(") else [jump, following]
    if name == "BSSY" and target is not None:
        others = {each for each in thread.rejoins if each[0] != operands[0]}
        return [replace(following, rejoins=frozenset(others | {(operands[0], target)}))]
    if name == "BSYNC" and operands[-1] in dict(thread.rejoins):
        return [replace(thread, index=dict(thread.rejoins)[operands[-1]])]
    if name == "EXIT":
        return []
    if found or name in _JUMPS:
        raise ValueError(f"{address:#x}: {text} is not understood")
    return [following]


_JUMPS = frozenset(
    ("BRA", "BRX", "BRXU", "JMP", "JMPU", "JMX", "JMXU", "CALL", "RET", "RTT", "BPT", "KILL", "BSSY", "BSYNC", "BMOV")
)


def _is_dispatch(text: str, address: int, threads: int) -> bool:
    """Whether a BAR is one of the dispatch; raises ValueError on one that may be, but not of all threads."""
    found = re.fullmatch(r"BAR\.SYNC(?:\.DEFER_BLOCKING)? (0x[0-9a-f]+)(?:, (0x[0-9a-f]+))?", text)
    if found and int(found[1], 16) != BARRIER:
        return False
    if found is None or (found[2] and int(found[2], 16) != threads):
        raise ValueError(f"{address:#x}: {text} may be barrier {BARRIER}, and not of all {threads} threads")
    return True
