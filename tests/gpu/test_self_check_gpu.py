"""The self-check of kernels on a GPU: right ones pass, in a small layer and in the converted one, and faults are found
that show in a few columns, in some calls, in one expert or only with many tokens.

    python -m pytest tests/gpu/test_self_check_gpu.py -k many_tokens -s     what it makes of kernels for many tokens
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.gpu import backend_table, table_mxfp4, table_mxfp8, table_wna16
from tests.gpu.backend_table import Case, Table
from vllm_moe_oracle import plugin
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import SelfCheckError
from vllm_moe_oracle.methods import backend_check
from vllm_moe_oracle.oracle.registry import default_registry

pytestmark = pytest.mark.gpu

TABLES = {"mxfp8": table_mxfp8.TABLE, "mxfp4": table_mxfp4.TABLE, "wna16": table_wna16.TABLE}
LAYERS = [(table, case) for table in TABLES.values() for case in table.cases.values() if case.hidden <= 2880]
Change = Callable[[torch.Tensor, torch.Tensor], object]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    mode = os.environ["MOE_ORACLE_SELF_CHECK"]
    os.environ["MOE_ORACLE_SELF_CHECK"] = "group"  # the table of backends is made without
    backend_table.join_alone("cuda")
    plugin.register()
    # vLLM's logger hands nothing on to the root logger, where pytest listens.
    propagate, logging.getLogger("vllm").propagate = logging.getLogger("vllm").propagate, True
    yield
    logging.getLogger("vllm").propagate = propagate
    plugin.unregister()
    backend_table.leave()
    os.environ["MOE_ORACLE_SELF_CHECK"] = mode


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
    backend_check.reset()
    return backend_table.build(table, case, table.checkpoint(case, "cuda"), "cuda", "auto", own=name)


@pytest.mark.parametrize(("table", "case"), LAYERS, ids=[f"{case.scheme.name}-{case.name}" for _, case in LAYERS])
def test_right_kernels_pass_before_and_after_the_conversion(
    table: Table, case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    for name in accepted(case):
        made = built(table, case, name)
        results = [backend_table._checked(made, made.method.backend, made.method.adapter) for _ in range(2)]
        print(f"{case.name:24} {name:28} {results[1].error / results[1].tolerance:.3f} of the bound; {results[1]}")
        assert all(each.passed for each in results), results
        with caplog.at_level("INFO", "vllm.moe_oracle"):
            made.convert()
        print("\n".join(each for each in caplog.text.splitlines() if "after the conversion" in each))
        if not made.method.is_monolithic:
            assert f"check of {name} after the conversion: relative error" in caplog.text
        caplog.clear()
        made.close()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", TABLES)
def test_faults_of_hoppers_kernels_are_found(kind: str, fault: str) -> None:
    table = TABLES[kind]
    case = next(each for each in table.cases.values() if f"hopper_{kind}" in accepted(each) and each.hidden <= 2880)
    made = built(table, case, f"hopper_{kind}")
    result = backend_table._checked(made, Wrong(made.method.backend, *FAULTS[fault]), made.method.adapter)
    assert not result.passed and result.fault, result
    made.close()


@pytest.mark.parametrize("kind", TABLES)
def test_hoppers_kernels_are_right_on_tokens_sorted_by_expert(kind: str) -> None:
    table = TABLES[kind]
    case = next(each for each in table.cases.values() if f"hopper_{kind}" in accepted(each) and each.hidden <= 2880)
    made = built(table, case, f"hopper_{kind}")
    backend, adapter = made.method.backend, made.method.adapter
    result = backend_table._checked(made, backend, adapter, batched=True)
    assert result.passed and not result.skip_reason, result
    wrong = Wrong(backend, *FAULTS["last 16 columns"])
    assert not backend_table._checked(made, wrong, adapter, batched=True).passed
    made.close()


@pytest.mark.parametrize("kind", TABLES)
def test_a_wrong_expert_of_the_converted_layer_is_found(kind: str) -> None:
    table = TABLES[kind]
    cases = (each for each in table.cases.values() if f"hopper_{kind}" in accepted(each) and each.ep == 1)
    case = max(cases, key=lambda each: each.experts)
    made = built(table, case, f"hopper_{kind}")
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

MANY = {"mxfp8": "qwen3_silu", "mxfp4": "gpt_oss_20b", "wna16": "qwen3_g128"}
"""A layer of each scheme whose persistent kernels take over at 257 tokens or more, and at fewer than vLLM's default for
the most tokens of a step."""

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
def test_right_backends_pass_with_many_tokens_and_wide_ids(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Marlin, Humming and this project's kernels: with many tokens, on memory full of NaN, and with ids in int64, which
    some all-to-alls deliver. For vLLM's own classes the latter is only printed: most servers never give them such
    ids."""
    made, _, _ = many(kind)
    adapter, problem = made.method.adapter, made.method.decision.problem
    names = [
        each for each in accepted(TABLES[kind].cases[MANY[kind]]) if each.startswith(("hopper", "marlin", "humming"))
    ]
    refused = []
    for wide in (False, True):
        with monkeypatch.context() as patch:
            if wide:
                patch.setattr(type(adapter), "ids_dtype", lambda self, moe: torch.int64)
            for name in names:
                backend = default_registry()[name]
                plan = backend.plan(problem, detect.detect())
                try:
                    result = str(found := backend_table._checked(made, backend, adapter, plan))
                    passed = found.passed
                except Exception as error:  # of one backend, which must not hide what the others do
                    result, passed = f"{type(error).__name__}: {error}"[:300], False
                print(f"  {name}, {'int64' if wide else 'int32'}: {'passes' if passed else 'REFUSED'}: {result}")
                if not passed and (not wide or name.startswith("hopper")):
                    refused.append((name, wide))
    assert f"hopper_{kind}" in names and not refused
    made.close()


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
