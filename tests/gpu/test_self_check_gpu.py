"""The self-check of kernels on a GPU: right ones pass, in a small layer and in the converted one, and faults are found
that show in a few columns, in some calls, in one expert or only with many tokens.

    python -m pytest -m "gpu and not full" tests/gpu/test_self_check_gpu.py           five minutes on 16 cores
    python -m pytest -m gpu tests/gpu/test_self_check_gpu.py                          every layer of the tables
    python -m pytest tests/gpu/test_self_check_gpu.py -k many_tokens -s     what it makes of kernels for many tokens

Right backends are checked in worker processes (`parallel_checks`), all of them before the first result is looked at.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu import backend_table, parallel_checks, table_mxfp4, table_mxfp8, table_wna16
from tests.gpu.backend_table import Case, Table
from tests.gpu.parallel_checks import Check, Outcome
from vllm_moe_oracle import plugin
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.backends._hopper import HopperBackend
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import SelfCheckError

TABLES = {"mxfp8": table_mxfp8.TABLE, "mxfp4": table_mxfp4.TABLE, "wna16": table_wna16.TABLE}
MANY = {"mxfp8": "qwen3_silu", "mxfp4": "gpt_oss_20b", "wna16": "qwen3_g128"}
"""A layer of each scheme whose persistent kernels take over at 257 tokens or more, and at fewer than vLLM's default for
the most tokens of a step."""

LAYERS = [(kind, case) for kind, table in TABLES.items() for case in table.cases.values() if case.hidden <= 2880]
Change = Callable[[torch.Tensor, torch.Tensor], object]


def is_first(kind: str, case: Case) -> bool:
    """Whether a layer is among those that are always checked: the tiny ones have every format, bias, activation and
    placement of experts but ungated ones, the others are of real sizes."""
    return case.name.startswith("tiny") or case.name in (MANY[kind], "nemotron_relu2_tp2")


@pytest.fixture(scope="module", autouse=True)
def registered(one_rank: None) -> Iterator[None]:
    mode = os.environ["MOE_ORACLE_SELF_CHECK"]
    os.environ["MOE_ORACLE_SELF_CHECK"] = "group"  # the table of backends is made without
    plugin.register()
    with pytest.MonkeyPatch.context() as patch:
        # Kernels that only serve take most of the time, and are not called here.
        patch.setattr(HopperBackend, "_warm_up", lambda *arguments: [])
        yield
    plugin.unregister()
    os.environ["MOE_ORACLE_SELF_CHECK"] = mode


@pytest.fixture(scope="module", autouse=True)
def outcomes(registered: None, request: pytest.FixtureRequest) -> dict[Check, Outcome]:
    """The checks of right backends that the selected tests ask for. The other tests need kernels of these, too, and
    come after them."""
    checks: list[Check] = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec"):
            checks += checks_of(**item.callspec.params)
    return parallel_checks.run_all(checks)


def checks_of(kind: str, case: Case | None = None) -> list[Check]:
    """The checks of right backends: of one layer, or of the layer with many tokens of a scheme."""
    if case is not None:
        return [Check(kind, case.name, name) for name in accepted(case)]
    many = TABLES[kind].cases[MANY[kind]]
    names = [each for each in accepted(many) if each.startswith(("hopper", "marlin", "humming"))]
    found = [Check(kind, many.name, name, how) for name in names for how in ("int32", "int64")]
    return [*found, Check(kind, few(kind).name, f"hopper_{kind}", "batched")]


class Wrong:
    """A backend whose function's arguments or output are changed; for those over functions of this project."""

    def __init__(self, backend: Any, before: Change, after: Change) -> None:
        self._backend, self._before, self._after = backend, before, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    validate_weights = Backend.validate_weights

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        outer = self

        class Builder:
            def __getattr__(self, name: str) -> Any:
                return getattr(builder, name)

            def from_workspace_function(self, forward: Any, nbytes: Any) -> Any:
                return builder.from_workspace_function(outer._wrapped(forward), nbytes)

            def from_function(self, forward: Any) -> Any:
                return builder.from_function(outer._wrapped(forward))

        return self._backend.build_experts(tensors, problem, plan, Builder())

    def _wrapped(self, forward: Any) -> Any:
        def run(out: Any, x: Any, weights: Any, ids: Any, *more: Any) -> None:
            ids = ids.clone()
            self._before(x, ids)
            forward(out, x, weights, ids, *more)
            self._after(x, out)

        return run


def nothing(x: torch.Tensor, other: torch.Tensor) -> None:
    return None


def when(calls: Callable[[int], object], change: Callable[[torch.Tensor], object]) -> Change:
    return lambda x, out: change(out) if calls(x.shape[0]) else None


FAULTS: dict[str, tuple[Change, Change]] = {
    "one token": (nothing, when(lambda tokens: tokens == 1, torch.Tensor.zero_)),
    "more than 8": (nothing, when(lambda tokens: tokens > 8, lambda out: out[-1].zero_())),
    "no multiple of 8": (nothing, when(lambda tokens: tokens % 8, lambda out: out[-1].zero_())),
    "last 16 columns": (nothing, when(lambda tokens: True, lambda out: out[:, -16:].zero_())),
    "empty slots": (lambda x, ids: ids.clamp_(min=0), nothing),
    "input changed": (nothing, lambda x, out: x[-1, -1].add_(1)),
}


def accepted(case: Case) -> list[str]:
    return [name for name in backend_table.accepted(case, detect.detect()) if name != "emulation"]


def built(table: Table, case: Case, name: str) -> Any:
    return parallel_checks.build(table, case, name)


def few(kind: str) -> Case:
    """The first layer of a scheme that this project's kernels run."""
    return next(each for kind_, each in LAYERS if kind_ == kind and f"hopper_{kind}" in accepted(each))


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind}-{case.name}", marks=[] if is_first(kind, case) else [pytest.mark.full])
        for kind, case in LAYERS
    ],
)
def test_right_kernels_pass_before_and_after_the_conversion(
    kind: str, case: Case, outcomes: dict[Check, Outcome]
) -> None:
    found = {each.backend: outcomes[each] for each in checks_of(kind, case)}
    for name, outcome in found.items():
        print(f"{case.name:24} {name:28} {outcome.failure}{'; '.join(map(str, (*outcome.before, *outcome.after)))}")
    assert found and [name for name, each in found.items() if not each.passed] == []


@pytest.mark.parametrize("kind", TABLES)
def test_faults_of_hoppers_kernels_are_found(kind: str) -> None:
    made = built(TABLES[kind], few(kind), f"hopper_{kind}")
    method = made.method
    results = {
        fault: backend_table._checked(made, Wrong(method.backend, *changes), method.adapter)
        for fault, changes in FAULTS.items()
    }
    assert [str(each) for each in results.values() if each.passed or not each.fault] == []
    made.close()


@pytest.mark.parametrize("kind", TABLES)
def test_hoppers_kernels_are_right_on_tokens_sorted_by_expert(kind: str, outcomes: dict[Check, Outcome]) -> None:
    right = outcomes[Check(kind, few(kind).name, f"hopper_{kind}", "batched")]
    assert right.passed and not right.before[0].skip_reason, right
    made = built(TABLES[kind], few(kind), f"hopper_{kind}")
    wrong = Wrong(made.method.backend, *FAULTS["last 16 columns"])
    assert not backend_table._checked(made, wrong, made.method.adapter, batched=True).passed
    made.close()


@pytest.mark.parametrize("kind", TABLES)
def test_a_wrong_expert_of_the_converted_layer_is_found(kind: str) -> None:
    case = TABLES[kind].cases[MANY[kind]]
    made = built(TABLES[kind], case, f"hopper_{kind}")
    wrong = case.experts - 2

    def other(x: torch.Tensor, ids: torch.Tensor) -> None:
        if x.shape[0] == case.experts:  # in the converted layer's call only
            ids[ids == wrong] = 0

    method = made.method
    method.backend = Wrong(method.backend, other, nothing)
    method.settings = dataclasses.replace(method.settings, self_check="all")
    with pytest.raises(SelfCheckError, match="after the conversion"):
        made.convert()
    made.close()


# --- Many tokens ------------------------------------------------------------------------------------------------------

Edit = Callable[[torch.Tensor, torch.Tensor], object]


class Beyond(Wrong):
    """A backend that is wrong in calls with more tokens than some number.

    Attributes:
        calls: tokens of each call, and whether its output held NaN before.
    """

    def __init__(self, backend: Any, more_than: float = float("inf"), edit: Edit | None = None) -> None:
        super().__init__(backend, nothing, nothing)
        self._more_than, self._edit = more_than, edit
        self.calls: list[tuple[int, bool]] = []

    def _wrapped(self, forward: Any) -> Any:
        def run(out: Any, x: Any, weights: Any, ids: Any, *more: Any) -> None:
            self.calls.append((x.shape[0], bool(out.isnan().all())))
            forward(out, x, weights, ids, *more)
            if self._edit is not None and x.shape[0] > self._more_than:
                self._edit(out, ids)

        return run


class BeyondServing(Beyond):
    """As `Beyond`, only in the experts that serve."""

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        if builder.for_serving:
            return super().build_experts(tensors, problem, plan, builder)
        return self._backend.build_experts(tensors, problem, plan, builder)


def scaled(factor: float, columns: slice) -> Edit:
    """Changes some columns of the last expert's tokens."""

    def edit(out: torch.Tensor, ids: torch.Tensor) -> None:
        mine = (ids == ids.amax()).any(-1, keepdim=True)
        out[:, columns] = torch.where(mine, out[:, columns] * factor, out[:, columns])

    return edit


def exchanged(rows: int) -> Edit:
    """Blocks of so many tokens change places."""

    def edit(out: torch.Tensor, ids: torch.Tensor) -> None:
        whole = out[: out.shape[0] // rows * rows].view(-1, rows, out.shape[1])
        whole.copy_(whole.roll(1, 0))

    return edit


BEYOND: dict[str, Edit] = {
    "last 32 columns of the last expert, 10 %": scaled(1.1, slice(-32, None)),
    "last 8 columns of the last expert, 20 %": scaled(1.2, slice(-8, None)),
    "all columns of the last expert, 10 %": scaled(1.1, slice(None)),
    "last token": lambda out, ids: out[-1].mul_(0.5),
    "last column": lambda out, ids: out[:, -1].zero_(),
    "blocks of 128 tokens": exchanged(128),
}


def many(kind: str) -> tuple[Any, Any, int]:
    """A layer, its backend, and the number of tokens up to which that runs its small tiles."""
    table = TABLES[kind]
    made = built(table, table.cases[MANY[kind]], f"hopper_{kind}")
    backend, problem = made.method.backend, made.method.decision.problem
    most = made.method.adapter.trial_tokens(made.method.moe)
    (hand_over,) = backend.hand_overs(problem, min(most, 4096))
    print(f"\n{kind}: {problem}: persistent kernels from {hand_over + 1} tokens on; calls have up to {most}")
    return made, backend, hand_over


@pytest.mark.parametrize("kind", MANY)
def test_faults_with_many_tokens_are_found(kind: str) -> None:
    made, backend, hand_over = many(kind)
    adapter = made.method.adapter
    for attempt in ("compiling", "compiled"):
        right = Beyond(backend)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = backend_table._checked(made, right, adapter)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"  right, {attempt}: {result}; {peak:.0f} MiB; calls of {[tokens for tokens, _ in right.calls][:9]}")
        assert result.passed, result
    most, poisoned = max(right.calls)
    assert most > hand_over and poisoned and not all(nan for _, nan in right.calls)
    missed = []
    for name, edit in {**BEYOND, "last 32 columns of the last expert, 5 %": scaled(1.05, slice(-32, None))}.items():
        found = backend_table._checked(made, Beyond(backend, hand_over, edit), adapter)
        print(f"  {name}: {'MISSED' if found.passed else 'found'}: {found.fault or found}")
        if name in BEYOND and (found.passed or f"{most} tokens" not in found.fault):
            missed.append(name)
    assert not missed
    made.close()


@pytest.mark.parametrize("kind", MANY)
def test_right_backends_pass_with_many_tokens_and_wide_ids(kind: str, outcomes: dict[Check, Outcome]) -> None:
    """Marlin, Humming and this project's kernels: with many tokens, on memory full of NaN, and with ids in int64, which
    some all-to-alls deliver. For vLLM's own classes the latter is only printed: most servers never give them such
    ids."""
    found = {(each.backend, each.how): outcomes[each] for each in checks_of(kind) if each.how != "batched"}
    for (name, how), outcome in found.items():
        print(f"  {name}, {how}: {'passes' if outcome.passed else 'REFUSED'}: {outcome}")
    refused = [key for key, each in found.items() if not each.passed]
    assert (f"hopper_{kind}", "int64") in found
    assert not [(name, how) for name, how in refused if how == "int32" or name.startswith("hopper")]


@pytest.mark.parametrize("kind", MANY)
def test_a_fault_with_many_tokens_in_the_converted_layer_is_found(kind: str) -> None:
    made, backend, hand_over = many(kind)
    method = made.method
    method.backend = wrong = BeyondServing(backend, hand_over, scaled(1.5, slice(None)))
    method.settings = dataclasses.replace(method.settings, self_check="all")
    with pytest.raises(SelfCheckError, match="after the conversion") as caught:
        made.convert()
    print(f"  calls of {wrong.calls}: {str(caught.value)[:300]}")
    assert any(tokens > hand_over and nan for tokens, nan in wrong.calls)
    made.close()
