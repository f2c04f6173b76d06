"""Every kind of integer experts that a checkpoint can hold, and the decision for each: the README's table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tests.lib.cases import RELU2, SILU, problem
from tests.lib.readme_sections import markdown_table
from vllm_moe_oracle.core.decision import Candidate
from vllm_moe_oracle.core.problem import ActOrder, Device, Problem, Scheme
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import Settings

PACKINGS = ("gptq", "gptq_v2", "awq", "moe_wna16", "compressed-tensors", "compressed-tensors-int")
GROUPS = (32, 64, 128, -1)
ORDERS: tuple[ActOrder, ...] = ("none", "static", "group")
INSTALLED = {"vllm": NEWEST, "torch": "2.14.0", "humming-kernels": "0.1.19", "flashinfer-python": "0.7.2.post1"}
DEVICES = {
    80: Device("cuda", "NVIDIA A100", 80, 108, 80.0, packages=INSTALLED),
    90: Device("cuda", "NVIDIA H200", 90, 132, 141.0, packages=INSTALLED),
    100: Device("cuda", "NVIDIA B200", 100, 148, 180.0, packages=INSTALLED),
}


@dataclass(frozen=True)
class Cell:
    """One kind of experts."""

    packing: str
    bits: int
    group: int
    zero_points: bool
    order: ActOrder
    bias: bool
    gated: bool

    @property
    def scheme(self) -> Scheme:
        """What its checkpoint holds."""
        return Scheme("wna16", self.bits, self.group, self.packing, self.zero_points, self.order)

    def layer(self) -> Problem:
        """Qwen3-30B-A3B's MoE layer of this kind."""
        return problem(scheme=self.scheme, has_bias=self.bias, activation=SILU if self.gated else RELU2)


def cells() -> Iterator[Cell]:
    """All combinations that tools write: AWQ has 4 bits and no act order; compressed-tensors has no act order without
    groups."""
    yes_no = (False, True)
    for each in itertools.product(PACKINGS, (4, 8), GROUPS, yes_no, ORDERS, yes_no, yes_no):
        cell = Cell(*each)
        if cell.packing == "awq" and (cell.bits != 4 or cell.order != "none"):
            continue
        if cell.packing.startswith("compressed") and cell.group == -1 and cell.order != "none":
            continue
        yield cell


def decided(cell: Cell, device: Device) -> tuple[str, tuple[Candidate, ...]]:
    """The backend for a cell with default settings and without measurements, "" where none runs without being asked
    for by name; and the candidates."""
    try:
        decision = decide(cell.layer(), device, Settings())
    except NoBackendError as error:
        return "", error.candidates
    return decision.backend, decision.candidates


def table() -> str:
    """Which backend runs which kind of experts of `Cell.layer`'s shape without measurements, in Markdown; a row for all
    kinds with the same answers. How a file packs them does not matter."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for bits, zero_points, order, bias in itertools.product((4, 8), (False, True), ("none", "group"), (False, True)):
        words = [f"int{bits}", *["zero points"] * zero_points, *["act order"] * (order == "group"), *["biases"] * bias]
        answers = []
        for device in DEVICES.values():
            # With one scale per output row there is no order.
            groups = GROUPS[:-1] if order == "group" else GROUPS
            kinds = [Cell("gptq", bits, group, zero_points, order, bias, True) for group in groups]  # type: ignore[arg-type]
            answers.append(_summary({kind.group: decided(kind, device)[0] for kind in kinds}))
        rows.setdefault(tuple(answers), []).append(", ".join(words))
    for kinds in rows.values():
        ordered = [kind for kind in kinds if "act order" in kind]
        if len(ordered) == _ORDERED:
            kinds[:] = [each for each in kinds if each not in ordered]
            kinds.append("act order, whatever else")
    lines = ([" <br> ".join(kinds), *answers] for answers, kinds in rows.items())
    return markdown_table(["weights", *(f"sm_{each}" for each in DEVICES)], lines)


_ORDERED = 8
"""Kinds with act order: of 4 and 8 bits, with and without zero points and biases."""


def _summary(by_group: dict[int, str]) -> str:
    """The backends by group, the one of most groups last."""
    backends = list(by_group.values())
    usual = max(dict.fromkeys(backends), key=backends.count)
    parts = []
    for backend in dict.fromkeys(backends):
        if backend != usual:
            groups = [
                "per channel" if group == -1 else str(group) for group, each in by_group.items() if each == backend
            ]
            parts.append(f"{', '.join(groups)}: {_cell_text(backend)}")
    return "; ".join([*parts, f"else {_cell_text(usual)}" if parts else _cell_text(usual)])


def _cell_text(backend: str) -> str:
    return f"`{backend}`" if backend else "none; `emulation` by name"
