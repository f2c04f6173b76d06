"""What can be read from a kernel's machine code (sm_90a, as cuobjdump prints it)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

WITHOUT_RESULT = (
    "ACQBULK", "BAR", "BRA", "BSSY", "BSYNC", "CALL", "CCTL", "DEPBAR", "ERRBAR", "EXIT", "FENCE", "LDGDEPBAR",
    "LDGSTS", "MEMBAR", "NOP", "PREEXIT", "R2UR", "RED", "RET", "ST", "SYNCS", "UBLKPF", "UTMA", "WARPGROUP",
    "WARPSYNC", "YIELD",
)  # fmt: skip
"""Beginnings of instructions that write no register of a thread's own."""

Instruction = tuple[int, str]


def instructions(code: str) -> list[Instruction]:
    """Addresses and texts."""
    return [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;/]+?)\s*;", code)]


def written(text: str) -> range:
    """The registers that an instruction writes, but for a product's sums."""
    operation, _, operands = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
    if operation.startswith((*WITHOUT_RESULT, "U", "HGMMA", "QGMMA")) or "SETP" in operation:
        return range(0)
    first = next((each.strip() for each in operands.split(",") if not re.match(r"\s*!?U?P(T|\d)", each)), "")
    register = re.fullmatch(r"R(\d+)(\.\w+)?", first)
    if register is None:
        return range(0)
    width = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
    return range(int(register[1]), int(register[1]) + width)


def loops(found: Sequence[Instruction]) -> Iterable[Sequence[Instruction]]:
    """The instructions from the target of a branch back to the branch."""
    places = {at: index for index, (at, _) in enumerate(found)}
    for index, (at, text) in enumerate(found):
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at and int(target[1], 16) in places:
            yield found[places[int(target[1], 16)] : index + 1]


def overwritten_in_flight(code: str) -> list[str]:
    """Instructions that write a register which a product (wgmma with its first operand in registers) may still read.

    Products are asynchronous: until a wait covers their group their operand must stay (PTX ISA, wgmma.wait_group).
    Straight through the code, and once around every loop.
    """
    found = instructions(code)
    passes = [[], *([*loop] for loop in loops(found))]
    bad: dict[str, None] = {}
    for before, after in [([], found), *((loop, loop) for loop in passes if any("GMMA" in text for _, text in loop))]:
        groups: list[set[int]] = []
        group: set[int] = set()
        for index, (at, text) in enumerate([*before, *after]):
            product = re.search(r"[HQ]GMMA\S*\s+R\d+, R(\d+),", text)
            wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text)
            if product:
                group |= set(range(int(product[1]), int(product[1]) + 4))
                if "gsb0" in text:
                    groups.append(group)
                    group = set()
            elif wait:
                left = int(wait[1], 16)
                groups = groups[len(groups) - left :] if 0 < left < len(groups) else groups if left else []
            elif index >= len(before) and set(written(text)) & set.union(group, *groups):
                bad[f"{at:#x} {text}"] = None
    return list(bad)
