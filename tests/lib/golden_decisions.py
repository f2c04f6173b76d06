"""Golden decisions: a table for each scheme, with what stock vLLM chooses beside each decision.

A table is described by a `GoldenTable`; `tests/lib/stock_choice_<scheme>.py` has one for each scheme. The file keeps
the chosen backend and the reason codes of all candidates. The full text of ten decisions is in `full_text.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_moe_oracle.core.decision import Candidate, Decision
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import DEFAULT_PACKAGES
from vllm_moe_oracle.settings import Settings

FOLDER = Path(__file__).parents[1] / "golden" / "decisions"
FULL_TEXT_FILE = FOLDER / "full_text.json"
PACKAGES = DEFAULT_PACKAGES["cuda"]
RELEASE = PACKAGES["vllm"]
GPUS = {
    80: "NVIDIA A100",
    89: "NVIDIA L40S",
    90: "NVIDIA H200",
    100: "NVIDIA B200",
    103: "NVIDIA B300",
    120: "NVIDIA RTX PRO 6000",
    121: "NVIDIA GB10",
}
REGENERATE = "python -m tests.tools.golden_decisions --write"

FULL_TEXT_CASES = (
    ("mxfp8", 90, "Qwen3-30B-A3B", 1),
    ("mxfp8", 100, "DeepSeek-V3", 8),
    ("mxfp8", 80, "Nemotron-3-Nano", 8),
    ("mxfp4", 90, "gpt-oss-120b", "TP4"),
    ("mxfp4", 100, "gpt-oss-20b", "EP8"),
    ("mxfp4", 90, "Qwen3-30B-A3B by llm-compressor, W4A4", "TP1"),
    ("mxfp4", 120, "DeepSeek-V4-Flash, within an FP8 checkpoint", "TP2"),
    ("wna16", 90, "Kimi-K2 int4 g32", 8),
    ("wna16", 90, "Qwen3-30B-A3B int4 g128 with act order, GPTQ", 4),
    ("wna16", 89, "Qwen3-30B-A3B int4 g128 with zero points, AWQ", 4),
)
"""The cases of which the file has every sentence: table, compute capability, model, shard."""

Row = dict[str, Any]
Place = tuple[Any, ...]


def device_of(capability: int) -> Device:
    """A GPU of the compute capability with a stock install."""
    return Device("cuda", GPUS[capability], capability, packages=PACKAGES)


def with_base_class(found: Any, kinds: Mapping[str, Any]) -> Any:
    """A stock expert class with the base class that it has in vLLM, which is in another file."""
    base = kinds["FusedMoEExpertsMonolithic" if "Monolithic" in found.__name__ else "FusedMoEExpertsModular"]
    return type(found.__name__, (found, base), {})


def _decide(problem: Problem, capability: int) -> tuple[Decision | None, tuple[Candidate, ...]]:
    try:
        decision = decide(problem, device_of(capability), Settings())
    except NoBackendError as error:
        return None, error.candidates
    return decision, decision.candidates


def codes_of(problem: Problem, capability: int) -> Row:
    """The decision: the backend, accepted candidates in order, and rejected ones by their reason codes."""
    decision, candidates = _decide(problem, capability)
    found: Row = {"backend": "none", "class": ""}
    if decision is not None:
        found = {
            "backend": decision.backend,
            "class": default_registry()[decision.backend].stock_class_name,
            "why": decision.why,
            "kernel_sizes": [decision.plan.hidden_size, decision.plan.intermediate_size],
        }
    found["accepted"] = [each.backend for each in candidates if each.accepted]
    rejected: dict[str, list[str]] = {}
    for each in candidates:
        if not each.accepted:
            rejected.setdefault(" ".join(reason.code for reason in each.reasons), []).append(each.backend)
    found["rejected"] = {codes: " ".join(names) for codes, names in rejected.items()}
    return found


def full_text_of(problem: Problem, capability: int) -> Row:
    """Every sentence of a decision."""
    decision, candidates = _decide(problem, capability)
    return {
        "problem": str(problem),
        "decision": decision.summary() if decision is not None else "none",
        "candidates": {each.backend: [str(reason) for reason in each.reasons] for each in candidates},
    }


@dataclass(frozen=True)
class GoldenTable:
    """The decisions for one scheme.

    Attributes:
        name: the scheme's.
        models: names of models.
        shard_column: name of the column that says how the layer is sharded.
        shards: its values.
        layer: a model's layer on one rank of such a shard.
        stock: what stock vLLM does for a layer on a compute capability.
        difference: the key in `differences` of why a row's decision is not stock's; "" where it is.
        differences: the reasons.
        conditions: further entries of the file's head.
        extra_columns: further columns of a row.
    """

    name: str
    models: Iterable[str]
    shard_column: str
    shards: Iterable[Any]
    layer: Callable[[str, Any], Problem]
    stock: Callable[[Problem, int], dict[str, str]]
    difference: Callable[[Row], str]
    differences: Mapping[str, str]
    conditions: Mapping[str, Any]
    extra_columns: Callable[[Problem], Row] = lambda problem: {}

    @property
    def path(self) -> Path:
        """The file."""
        return FOLDER / f"{self.name}.json"

    def rows(self) -> list[Row]:
        """The rows of the file."""
        found: list[Row] = json.loads(self.path.read_text())["rows"]
        return found

    def place(self, row: Row) -> Place:
        """The compute capability, the model and the shard of a row."""
        return row["sm"], row["model"], row[self.shard_column]

    def layer_of(self, row: Row) -> Problem:
        """The layer of a row."""
        return self.layer(row["model"], row[self.shard_column])

    def compute(self) -> Iterator[Row]:
        """All rows by today's code, without stock's part."""
        for capability in GPUS:
            for model in self.models:
                for shard in self.shards:
                    problem = self.layer(model, shard)
                    row: Row = {"sm": capability, "model": model, self.shard_column: shard}
                    yield row | self.extra_columns(problem) | {"ours": codes_of(problem, capability)}

    def write(self) -> list[str]:
        """Writes the file; stock's part needs its sources.

        Returns:
            A line for each row that changed.
        """
        before = {self.place(row): row for row in self.rows()} if self.path.exists() else {}
        rows, changed = [], []
        for row in self.compute():
            row["stock"] = self.stock(self.layer_of(row), row["sm"])
            row["difference"] = self.difference(row)
            rows.append(row)
            if row != before.get(self.place(row)):
                changed.append(f"{self.name} {self.place(row)}: {row['ours']['backend']} {row['difference']}".rstrip())
        head = {"stock": f"vLLM {RELEASE}", "packages": PACKAGES, "gpus": GPUS, **self.conditions}
        head["differences"] = self.differences
        lines = ",\n".join(json.dumps(row) for row in rows)
        self.path.write_text(f'{{"conditions": {json.dumps(head, indent=1)},\n"rows": [\n{lines}\n]}}\n')
        return changed


def full_text(tables: Iterable[GoldenTable]) -> list[Row]:
    """The cases of `FULL_TEXT_CASES` by today's code."""
    by_name = {table.name: table for table in tables}
    return [
        {"table": name, "sm": sm, "model": model, "shard": shard, **full_text_of(by_name[name].layer(model, shard), sm)}
        for name, sm, model, shard in FULL_TEXT_CASES
    ]
