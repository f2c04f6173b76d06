"""Self-checks of right backends in worker processes, many at once: what takes their time is compiling kernels.

What a worker compiles is on disk afterwards, where this process finds it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch

from tests.gpu import backend_table
from tests.gpu.backend_table import Built, Case, Table
from vllm_moe_oracle import plugin
from vllm_moe_oracle.backends import MAX_CHECK_TOKENS
from vllm_moe_oracle.backends._hopper import HopperBackend
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import describe_error
from vllm_moe_oracle.measuring import worker_pool
from vllm_moe_oracle.measuring.broken_context import BrokenContextError, breaks_context
from vllm_moe_oracle.methods import load_caches
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.verification import converted_layer, inputs
from vllm_moe_oracle.verification.self_check import Comparison

WORKERS = max(2, min(14, (os.cpu_count() or 2) - 2))
"""Processes at once: each compiles on one core, and holds a CUDA context and one layer."""

How = Literal["served", "int32", "int64", "batched"]


@dataclass(frozen=True)
class Check:
    """What a worker does.

    Attributes:
        scheme: whose table.
        case: name of the layer there.
        backend: what is checked.
        how: ``served``, twice before the conversion and once after it; ``int32`` or ``int64``, before the conversion,
            with ids of that type; ``batched``, with tokens that an all-to-all has sorted by expert.
    """

    scheme: str
    case: str
    backend: str
    how: How = "served"


@dataclass
class Outcome:
    """What came of a check.

    Attributes:
        before: comparisons before the conversion.
        after: those after it; none for kernels that route tokens.
        monolithic: whether the backend's kernel routes tokens.
        failure: what was raised, or why the worker ended; "" for nothing.
    """

    before: list[Comparison] = field(default_factory=list)
    after: list[Comparison] = field(default_factory=list)
    monolithic: bool = False
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether something was compared before and, but for kernels that route, after, and nothing was wrong."""
        compared = self.monolithic or (bool(self.after) and not any(each.skip_reason for each in self.after))
        return (
            not self.failure
            and bool(self.before)
            and compared
            and all(each.passed for each in self.before + self.after)
        )


def run_all(checks: Iterable[Check]) -> dict[Check, Outcome]:
    """The outcomes of checks, which run in `WORKERS` processes. What compiles the longest comes first."""
    ordered = sorted(dict.fromkeys(checks), key=lambda each: not each.backend.startswith(("hopper", "humming")))
    found: dict[Check, Outcome] = {}
    for event in worker_pool.run_tasks(run, ordered, [None] * WORKERS):
        if event.kind == "done":
            found[ordered[event.task]] = event.value
        elif event.kind == "lost":
            found[ordered[event.task]] = Outcome(failure=event.value)
    return found


@functools.cache
def _join() -> None:
    """What a worker needs once."""
    os.environ["MOE_ORACLE_SELF_CHECK"] = "group"  # the table of backends is made without
    backend_table.join_alone("cuda")
    plugin.register()


def run(check: Check, send: worker_pool.SendProgress) -> Outcome:
    """Runs a check in a worker; see `worker_pool.run_tasks`."""
    _join()
    found = Outcome()
    try:
        _run(check, found)
    except Exception as error:  # of one backend, which must not hide what the others do
        found.failure = describe_error(error)[:300]
        if breaks_context(found.failure):
            raise BrokenContextError(check.backend, found.failure) from error
    return found


def _run(check: Check, found: Outcome) -> None:
    table = backend_table.table_of(check.scheme)
    case = table.cases[check.case]
    backend = default_registry()[check.backend]
    with few_kernels(case, check.backend):
        if check.how == "served":
            made = build(table, case, check.backend)
            found.monolithic = made.method.is_monolithic
            found.before += [backend_table._checked(made, backend, made.method.adapter) for _ in range(2)]
            compare = converted_layer.InstalledLayer.compare

            def kept(layer: converted_layer.InstalledLayer) -> Comparison:
                found.after.append(compare(layer))
                return found.after[-1]

            with mock.patch.object(converted_layer.InstalledLayer, "compare", kept):
                made.convert()
        else:
            made = build(table, case, f"hopper_{check.scheme}")
            adapter = made.method.adapter
            plan = backend.plan(made.method.decision.problem, detect.detect())
            ids = {"int64": mock.patch.object(type(adapter), "ids_dtype", lambda self, moe: torch.int64)}
            with ids.get(check.how, nullcontext()):
                found.before.append(
                    backend_table._checked(made, backend, adapter, plan, batched=check.how == "batched")
                )
            found.monolithic = True  # nothing is converted
        made.close()


def build(table: Table, case: Case, name: str) -> Built:
    """A layer with one of the plugin's backends, the first one of a load."""
    load_caches.end_load()
    return backend_table.build(table, case, table.checkpoint(case, "cuda"), "cuda", "auto", own=name)


@contextmanager
def few_kernels(case: Case, name: str) -> Iterator[None]:
    """While it is entered, only kernels are compiled that a check calls: not those that this project's backends compile
    for serving, and of Humming's only those for the checks' numbers of rows."""
    counts = {*inputs.REPEATED_COUNTS, inputs.NUM_TOKENS, inputs.WHOLE_BLOCKS, inputs.LARGE_CALL, MAX_CHECK_TOKENS}
    rows = backend_table.rows_called(case, counts) | {count * case.top_k for count in counts}
    humming: Any = backend_table.FewKernels(rows) if name.startswith("humming") else nullcontext()
    with mock.patch.object(HopperBackend, "_warm_up", lambda *arguments: []), humming:
        yield
