"""Golden decisions: a table for each scheme, with what stock vLLM chooses beside each decision.

A table is described by a `GoldenTable`; `tests/lib/stock_choice_<scheme>.py` has one for each scheme. The file keeps
the chosen backend and the reason codes of all candidates. The full text of ten decisions is in `full_text.json`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, Platform, UncachedFunctools, exists, load, tree
from vllm_moe_oracle.core.decision import Candidate, Decision
from vllm_moe_oracle.core.problem import Activation, Device, Problem
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.oracle.stock_choice import StockChoice
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
GENERATE = "python -m tests.tools.generate --write"
"""Writes this project's decisions; with ``--stock`` what stock vLLM chooses, too."""
SHOWN_CHANGES = 20
"""Decisions for another backend that are named one by one."""

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


_OF_AITER = ("is_enabled", "is_fused_moe_enabled")
"""Whether AMD's kernels are installed: never."""


class QuantKey(SimpleNamespace):
    """vLLM's type of quantized numbers: equal to itself alone."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    @classmethod
    def named(cls, *names: str) -> dict[str, QuantKey]:
        """One of each name, without a second scale."""
        return {name: cls(dtype=object(), scale=object(), scale2=None) for name in names}


@dataclass(frozen=True)
class StockInstall:
    """A stock install of a release on a GPU, or on a CPU without AMX.

    Attributes:
        release: vLLM's version.
        platform: vLLM's platform.
        kinds: names of the file of the modular kernels.
        activations: vLLM's enumeration of activations.
        methods: vLLM's enumeration of routing methods.
        names: what files of stock's expert classes import.
    """

    release: str
    platform: Platform
    kinds: Mapping[str, Any]
    activations: Any
    methods: Any
    names: dict[str, Any]

    def activation(self, activation: Activation) -> Any:
        """Stock's member for an activation."""
        name = f"{activation.name}{'' if activation.gated else '_no_mul'}"
        if name == "swigluoai" and not activation.interleaved:
            name = "swigluoai_uninterleave"
        return self.activations(name)

    def set_batch_invariant(self, layer: Problem) -> None:
        """Sets ``VLLM_BATCH_INVARIANT`` as the layer says."""
        self.names["envs"].VLLM_BATCH_INVARIANT = layer.batch_invariant

    def oracle(self, scheme: str, **given: Any) -> dict[str, Any]:
        """The names of stock's file that lists the kernels of a scheme, the expert classes among them.

        Args:
            scheme: the file, such as ``mxfp4``.
            given: what it and the files of the classes import, besides `names`.
        """
        path, given = f"{FUSED_MOE}/oracle/{scheme}.py", {**self.names, **given}
        classes = {
            alias.name: self.expert_class(node.module, alias.name, **given)
            for node in ast.walk(tree(self.release, path))
            if isinstance(node, ast.ImportFrom) and node.module and ".fused_moe.experts." in node.module
            for alias in node.names
            if "Experts" in alias.name
        }
        return load(self.release, path, **{**classes, **given})

    def expert_class(self, module: str, name: str, **given: Any) -> Any:
        """A stock expert class with the base class that it has in vLLM, which is in another file."""
        found = load(self.release, f"{module.replace('.', '/')}.py", **{**self.names, **given})[name]
        base = self.kinds["FusedMoEExpertsMonolithic" if "Monolithic" in name else "FusedMoEExpertsModular"]
        return type(name, (found, base), {})


def stock_install(capability: int, release: str = RELEASE, **variables: bool) -> StockInstall:
    """A stock install on a GPU of a compute capability, on which every library of kernels is installed.

    Args:
        capability: the compute capability times ten; 0 for a CPU.
        release: vLLM's version.
        variables: environment variables as `vllm.envs` has them, besides those that every scheme's code reads.
    """
    platform = Platform(capability)
    variables |= {"VLLM_BATCH_INVARIANT": False, "VLLM_CPU_INT4_W4A8": False}
    env = SimpleNamespace(VLLM_HUMMING_MOE_GEMM_TYPE=None, **variables)
    activation = load(release, f"{FUSED_MOE}/activation.py", current_platform=platform)
    kinds = load(release, f"{FUSED_MOE}/modular_kernel.py", current_platform=platform, envs=env)
    methods = load(release, f"{FUSED_MOE}/config.py")["RoutingMethodType"]
    gemms = {each: SimpleNamespace(value=each.lower()) for each in ("INDEXED", "GROUPED_CONTIGUOUS", "GROUPED_MASKED")}
    asked = ("MoEActivation", "apply_moe_activation_supported", "apply_moe_activation_masked_supported")
    names = {
        "current_platform": platform, "mk": SimpleNamespace(**kinds), "envs": env, "RoutingMethodType": methods,
        "CpuArchEnum": SimpleNamespace(**{each: each for each in ("X86", "ARM", "POWERPC", "S390X", "RISCV")}),
        "rocm_aiter_ops": MagicMock(**{f"{each}.return_value": False for each in _OF_AITER}),
        "has_humming": lambda: True, "HummingGemmType": SimpleNamespace(**gemms), "functools": UncachedFunctools,
        **{name: activation[name] for name in asked if name in activation},
    }  # fmt: skip
    priority = f"{QUANTIZATION}/utils/humming/priority.py"
    if exists(release, priority):  # older releases list it first themselves
        names["prioritize_humming"] = load(release, priority, current_platform=platform)["prioritize_humming"]
    return StockInstall(release, platform, kinds, activation["MoEActivation"], methods, names)


def stock_config(problem: Problem, activation: Any, method: Any, logits: torch.dtype = torch.bfloat16) -> Any:
    """The fields of vLLM's `FusedMoEConfig` that its classes ask; no data parallelism."""
    spread = problem.parallel.ep > 1
    parallel = SimpleNamespace(
        use_ep=spread, use_all2all_kernels=False, use_ag_rs_all2all_kernels=False, enable_eplb=problem.eplb,
        is_sequence_parallel=False, use_fi_nvl_two_sided_kernels=False, use_fi_nvl_one_sided_kernels=False,
        use_batched_activation_format=problem.parallel.is_batched, use_deepep_v2_kernels=False, dp_size=1,
        ep_size=problem.parallel.ep, tp_size=problem.parallel.tp, use_deepep_ht_kernels=False,
        use_deepep_ll_kernels=False, use_naive_all2all_kernels=False, use_mori_kernels=False,
        use_nixl_ep_kernels=False,
    )  # fmt: skip
    return SimpleNamespace(
        moe_backend="auto", activation=activation, is_act_and_mul=problem.activation.gated,
        moe_parallel_config=parallel, has_hash_routing=False, require_decomposed_backend=False, routing_method=method,
        router_logits_dtype=logits, hidden_dim=problem.hidden_size, hidden_dim_unpadded=problem.hidden_size,
        is_lora_enabled=problem.lora, num_experts=problem.num_experts, num_local_experts=problem.local_experts,
        has_bias=problem.has_bias, experts_per_token=problem.top_k,
        intermediate_size_per_partition=problem.intermediate_size,
        intermediate_size_per_partition_unpadded=problem.intermediate_size, in_dtype=getattr(torch, problem.dtype),
        swiglu_limit=problem.activation.limit, swiglu_alpha=None, swiglu_beta=None, activation_situ_beta=None,
        activation_situ_linear_beta=None,
    )  # fmt: skip


def agrees(choice: StockChoice, stock: Mapping[str, str]) -> bool:
    """Whether what the rules say of stock is what its code does.

    Args:
        choice: from `choose_stock`.
        stock: from `GoldenTable.stock`.
    """
    if choice.unknown:
        return False
    if choice.refusal.endswith("vLLM does not ask"):
        return choice.refusal.startswith(f"{stock.get('class')} takes ")
    if raises := stock.get("raises", ""):
        said = choice.refusal.partition(" (")[0]
        return bool(said) and (raises.startswith(said) or said.startswith(raises))
    return (choice.stock_class, choice.refusal) == (stock.get("class"), "")


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
        stock: what stock vLLM does for a layer on a compute capability (0 for a CPU), in a release.
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
    stock: Callable[..., dict[str, str]]
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
        return rows_of(self.path.read_text())

    def place(self, row: Row) -> Place:
        """The compute capability, the model and the shard of a row."""
        return row["sm"], row["model"], row[self.shard_column]

    def layer_of(self, row: Row) -> Problem:
        """The layer of a row."""
        return self.layer(row["model"], row[self.shard_column])

    def compute(self) -> Iterator[Row]:
        """All rows by the code, without stock's part."""
        for capability in GPUS:
            for model in self.models:
                for shard in self.shards:
                    problem = self.layer(model, shard)
                    row: Row = {"sm": capability, "model": model, self.shard_column: shard}
                    yield row | self.extra_columns(problem) | {"ours": codes_of(problem, capability)}

    def renewed(self, text: str, stock: bool = False) -> str:
        """The text of the file with the decisions of the code.

        Stock's choices stay, since only a release changes them. Where the file is of another release, or lacks a row,
        they are computed from the release's sources, which takes half a minute.

        Args:
            text: the file's; "" without one.
            stock: compute all of stock's choices, as after a change of `tests/lib/stock_choice_<scheme>.py`.

        Raises:
            ReleaseUnavailable: stock's sources are needed, and cannot be had.
            ValueError: a decision has become another than stock's, and nothing says why.
        """
        head = {"stock": f"vLLM {RELEASE}", "packages": PACKAGES, "gpus": GPUS, **self.conditions}
        held = json.loads(text) if text else {"conditions": {"stock": ""}, "rows": []}
        is_current = held["conditions"]["stock"] == head["stock"] and not stock
        kept = {self.place(row): row["stock"] for row in held["rows"]} if is_current else {}
        rows = []
        for row in self.compute():
            place = self.place(row)
            rows.append(self._beside(row, kept[place] if place in kept else self.stock(self.layer_of(row), row["sm"])))
        return _text(head | {"differences": self.differences}, rows)

    def other_backends(self, before: str, after: str) -> list[str]:
        """A line for each row of which another backend is chosen.

        Args:
            before: the text of the file.
            after: that which takes its place.
        """
        old = {self.place(row): row["ours"]["backend"] for row in rows_of(before)}
        return [
            f"{self.name} {self.place(row)}: {row['ours']['backend']}, was {old[self.place(row)]}"
            for row in rows_of(after)
            if old.get(self.place(row), row["ours"]["backend"]) != row["ours"]["backend"]
        ]

    def _beside(self, row: Row, stock: dict[str, str]) -> Row:
        """A row with stock's choice, and the reason where that is another."""
        row |= {"stock": stock}
        row["difference"] = self.difference(row)
        if row["difference"] not in ("", *self.differences):
            raise ValueError(
                f"{self.name} {self.place(row)}: {row['ours']['backend']} is chosen, stock vLLM takes {stock}, and "
                f"{row['difference']!r} is none of the reasons {sorted(self.differences)}. Give the backend another "
                f"priority, or add the reason to tests/lib/stock_choice_{self.name}.py"
            )
        return row


def _text(head: Mapping[str, Any], rows: Iterable[Row]) -> str:
    lines = ",\n".join(json.dumps(row) for row in rows)
    return f'{{"conditions": {json.dumps(head, indent=1)},\n"rows": [\n{lines}\n]}}\n'


def rows_of(text: str) -> list[Row]:
    """The decisions in the text of a file of golden decisions; empty without one."""
    held = json.loads(text) if text else []
    return list(held["rows"] if isinstance(held, dict) else held)


def count_changes(before: str, after: str) -> str:
    """How many decisions of a file change, in words: ``3 of 84 decisions``. New ones count, and those that go.

    Args:
        before: the text of the file; "" without one.
        after: that which takes its place.
    """
    old, new = rows_of(before), rows_of(after)
    places = [_place(row) for row in new]
    gone = sum(_place(row) not in places for row in old)
    changed = f"{sum(row not in old for row in new)} of {len(new)} decisions"
    return f"{changed}, {gone} gone" if gone else changed


def _place(row: Row) -> Row:
    """What a row is about, without what is decided."""
    decided = ("ours", "stock", "difference", "problem", "decision", "candidates")
    return {name: value for name, value in row.items() if name not in decided}


def full_text(tables: Iterable[GoldenTable]) -> str:
    """The text of `FULL_TEXT_FILE` by the code."""
    by_name = {table.name: table for table in tables}
    rows = [
        {"table": name, "sm": sm, "model": model, "shard": shard, **full_text_of(by_name[name].layer(model, shard), sm)}
        for name, sm, model, shard in FULL_TEXT_CASES
    ]
    return json.dumps(rows, indent=1) + "\n"
