"""Tables of decisions that are kept in files, with what stock vLLM does beside each: how they are made and checked.

A test module describes its table by a `Golden` and keeps what only its format has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from releases import ReleaseUnavailable

from vllm_moe_oracle.compat.eras import BRINGS
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.oracle import decide
from vllm_moe_oracle.oracle.problem import Device, Problem
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.settings import Settings

FOLDER = Path(__file__).parent / "golden" / "decisions"
PACKAGES = BRINGS["cuda"]
RELEASE = PACKAGES["vllm"]
CARDS = {
    80: "NVIDIA A100",
    89: "NVIDIA L40S",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    103: "NVIDIA B300",
    120: "NVIDIA RTX PRO 6000",
    121: "NVIDIA GB10",
}

Row = dict[str, Any]


def machine(capability: int) -> Device:
    """A card of the capability with a stock install."""
    return Device("cuda", CARDS[capability], capability, packages=PACKAGES)


def whole(found: Any, kinds: Mapping[str, Any]) -> Any:
    """A stock class with the base class in another file that it has in vLLM."""
    base = kinds["FusedMoEExpertsMonolithic" if "Monolithic" in found.__name__ else "FusedMoEExpertsModular"]
    return type(found.__name__, (found, base), {})


def ours(problem: Problem, capability: int) -> Row:
    """The decision, with every candidate's every reason."""
    try:
        decision = decide(problem, machine(capability), Settings())
    except NoBackendError as error:
        found: Row = {"backend": "none", "class": ""}
        candidates = error.candidates
    else:
        plan = decision.plan
        found = {
            "backend": decision.backend,
            "class": default_registry()[decision.backend].stock_class,
            "why": decision.why,
            "kernel_sizes": [plan.hidden_size, plan.intermediate_size],
            "numerics": str(decision.numerics),
        }
        candidates = decision.candidates
    found["candidates"] = {each.backend: [str(reason) for reason in each.reasons] for each in candidates}
    return found


@dataclass(frozen=True)
class Golden:
    """A table for one format.

    Attributes:
        name: of the format.
        script: of the test module, which writes the file.
        models: names of models.
        part: a column's name: how the layer is cut.
        parts: its values.
        layer: a model's layer under one of these.
        stock: what stock does for a layer on a capability.
        difference: why a row's decision is not stock's; "" where it is.
        conditions: what the file says at its head beside the release, the packages and the cards.
        more: further columns.
    """

    name: str
    script: str
    models: Iterable[str]
    part: str
    parts: Iterable[Any]
    layer: Callable[[str, Any], Problem]
    stock: Callable[[Problem, int], dict[str, str]]
    difference: Callable[[Row], str]
    conditions: Mapping[str, Any]
    more: Callable[[Problem], Row] = lambda problem: {}

    @property
    def path(self) -> Path:
        """The file."""
        return FOLDER / f"{self.name}.json"

    def rows(self) -> list[Row]:
        """The rows of the file."""
        found: list[Row] = json.loads(self.path.read_text())["rows"]
        return found

    def table(self, with_stock: bool) -> list[Row]:
        """All rows as they are today; stock's part takes its sources, and longer."""
        rows = []
        for capability in CARDS:
            for model in self.models:
                for part in self.parts:
                    problem = self.layer(model, part)
                    row: Row = {"sm": capability, "model": model, self.part: part, **self.more(problem)}
                    row["ours"] = ours(problem, capability)
                    if with_stock:
                        row["stock"] = self.stock(problem, capability)
                        row["difference"] = self.difference(row)
                    rows.append(row)
        return rows

    def place(self, row: Row) -> tuple[Any, ...]:
        """What a row is about."""
        return row["sm"], row["model"], row[self.part]

    @property
    def again(self) -> str:
        """What to do about a difference that is meant."""
        return f"PYTHONPATH=.:tests python tests/cpu/{Path(self.script).name} --write shows and keeps the change"

    def check_ours(self) -> None:
        """Today's decisions are the file's."""
        expected = {self.place(row): row["ours"] for row in self.rows()}
        for row in self.table(with_stock=False):
            assert row["ours"] == expected.pop(self.place(row)), f"{self.place(row)}: {self.again}"
        assert not expected

    def check_stock(self, capability: int) -> None:
        """What stock's sources choose is what the file says."""
        of_it = [row for row in self.rows() if row["sm"] == capability]
        assert of_it
        for row in of_it:
            try:
                found = self.stock(self.layer(row["model"], row[self.part]), capability)
            except ReleaseUnavailable as error:
                pytest.skip(str(error))
            assert found == row["stock"], f"{self.place(row)}: {self.again}"

    def check_differences(self, reasons: Iterable[str]) -> None:
        """Every difference has its reason beside it, and every reason a difference."""
        for row in self.rows():
            assert row["difference"] == self.difference(row), self.place(row)
        assert {row["difference"] for row in self.rows()} == {"", *reasons}

    def check_reasons(self) -> None:
        """Every backend of the format is a candidate; every rejected one says why, and the winner has no reason."""
        for row in self.rows():
            scheme = self.layer(row["model"], row[self.part]).scheme.name
            candidates = row["ours"]["candidates"]
            assert candidates.keys() == {each.name for each in default_registry() if scheme in each.schemes}
            assert all(reason for reasons in candidates.values() for reason in reasons)
            accepted = [name for name, reasons in candidates.items() if not reasons]
            assert (row["ours"]["backend"] in accepted) or (row["ours"]["backend"] == "none" and not accepted)

    def write(self) -> None:
        """Writes the file, where the command line asks for that, and prints the decisions."""
        if sys.argv[1:] != ["--write"]:
            raise SystemExit(sys.modules["__main__"].__doc__)
        conditions = {"stock": f"vLLM {RELEASE}", "packages": PACKAGES, "cards": CARDS, **self.conditions}
        rows = self.table(with_stock=True)
        lines = ",\n".join(json.dumps(row) for row in rows)
        self.path.write_text(f'{{"conditions": {json.dumps(conditions)},\n"rows": [\n{lines}\n]}}\n')
        for row in rows:
            stock = " ".join(row["stock"].get(name, "") for name in ("class", "raises", "instead")).rstrip()
            print(*self.place(row), row["ours"]["backend"], "| stock:", stock, "|", row["difference"])
