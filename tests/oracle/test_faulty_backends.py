"""Third parties' methods and attributes that raise, exit or answer nonsense: another backend runs, and the reason says
which method of which backend did what."""

from __future__ import annotations

import copy
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.lib.cases import CPU, Plain, backend, registry
from tests.lib.strange_backends import ALLOWED, ARGUMENTS, LAYER, RAISED, RETURNED, strange
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.core.decision import Accepted, Reason, Rejected, TokenRange
from vllm_moe_oracle.core.problem import ActivationPrecision
from vllm_moe_oracle.errors import BackendDefect, NoBackendError, RegistryError, is_interruption
from vllm_moe_oracle.oracle.checked_backend import ATTRIBUTES, METHODS, CheckedBackend, watched_calls
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide, evaluate_candidates
from vllm_moe_oracle.settings import load

AT_REGISTRATION = ("missing_attributes",)
CALLS = [name for name in METHODS if name not in AT_REGISTRATION]
PARAMETERS = {name: [*inspect.signature(getattr(Backend, name)).parameters][1:] for name in CALLS}
ASKED = [name for name, needed in PARAMETERS.items() if set(needed) <= {"problem", "device", "plan"}]
"""Methods that need neither weights nor tokens: a decision asks all of them."""

CASES = [
    pytest.param(method, act, words, id=f"{method}-{name}")
    for method in CALLS
    for name, act, words in (
        *((name, act, words) for name, (act, words) in RAISED.items()),
        *((name, act, "returned what") for name, act in RETURNED.items() if name not in ALLOWED.get(method, ())),
    )
]


def test_the_tables_cover_the_contract() -> None:
    assert {"plan", "check", "priority", "activations", "numerics", "layout"} <= set(ASKED)
    assert {"convert", "build_experts", "validate_weights", "tiles", "use_tile", "compile_keys", "hand_overs"} <= set(
        CALLS
    )
    assert {each for needed in PARAMETERS.values() for each in needed} <= ARGUMENTS.keys()
    assert {"name", "schemes", "capabilities", "rules", "static_priority"} <= ATTRIBUTES.keys()


@pytest.mark.parametrize(("method", "act", "words"), CASES)
def test_a_call_raises_one_error_that_names_it(method: str, act: Any, words: str) -> None:
    found = registry([strange(method, act)])["strange"]
    with pytest.raises(BackendDefect if method in ASKED else Exception) as caught:
        getattr(found, method)(**{name: ARGUMENTS[name] for name in PARAMETERS[method]})
    if isinstance(caught.value, MemoryError):  # a method with weights may run out of memory by no fault of its own
        assert method not in ASKED and words == "raised "
        return
    assert isinstance(caught.value, BackendDefect)
    assert f"backend strange: its method {method} {words}" in caught.value.rule
    assert len(str(caught.value)) < 3000 and str(caught.value).isprintable()
    assert "MOE_ORACLE_DISABLE=strange" in caught.value.remedy


@pytest.mark.parametrize(("method", "act", "words"), [case for case in CASES if case.values[0] in ASKED])
def test_another_backend_runs_and_an_explicit_choice_is_an_error(method: str, act: Any, words: str) -> None:
    backends = registry([strange(method, act), backend("sound")])
    decision = decide(LAYER, CPU, load({}), registry=backends)
    assert decision.backend == "sound"
    (verdict,) = (each for each in decision.candidates if each.backend == "strange")
    assert [reason.code for reason in verdict.reasons] == ["defect"]
    assert f"its method {method} {words}" in verdict.reasons[0].detail
    with pytest.raises(NoBackendError, match=f"its method {method} ") as caught:
        decide(LAYER, CPU, load({}, None, {"backend": "strange"}), registry=backends)
    assert "strange (assignments.backend) cannot run this layer" in str(caught.value)
    with pytest.raises(NoBackendError, match=f"its method {method} "):
        decide(LAYER, CPU, load({}), registry=registry([strange(method, act)]))


@pytest.mark.parametrize("method", ASKED)
def test_a_decision_asks_once_so_that_a_later_answer_cannot_change_it(method: str) -> None:
    answers = iter([getattr(Plain, method)])

    def once(self: Any, *args: Any) -> Any:
        return next(answers)(self, *args)  # raises StopIteration from the second call on

    accepting = {"check": lambda *args: Accepted()}  # the contract's own asks for the plan
    fickle = type("Fickle", (Plain,), {"name": "fickle", "rank": -5.0, **accepting, method: once})()
    assert decide(LAYER, CPU, load({}), registry=registry([fickle, backend("sound")])).backend == "fickle"


def change(value: Any, path: str, new: Any) -> None:
    """Changes a frozen value, or an entry of a dictionary in it, by the dotted name of the field."""
    *owners, name = path.split(".")
    for owner in owners:
        value = getattr(value, owner)
    if isinstance(value, dict):
        value[name] = new
    else:
        object.__setattr__(value, name, new)


CHANGES = [
    ("problem", "top_k", 1, "Problem that it got: top_k"),
    ("problem", "scheme.group_size", 16, "Problem that it got: scheme.group_size"),
    ("problem", "scheme", None, "Problem that it got: scheme"),
    ("device", "name", "another", "Device that it got: name"),
    ("device", "packages.vllm", "0.1", "Device that it got: packages"),
    ("plan", "hidden_size", 7, "ShardPlan that it got: hidden_size"),
]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize(("argument", "path", "new", "words"), CHANGES)
def test_a_change_of_a_frozen_argument_is_named_and_lost(
    argument: str, path: str, new: Any, words: str, by_name: bool
) -> None:
    for method in [name for name in CALLS if argument in PARAMETERS[name]]:
        given = {name: copy.deepcopy(ARGUMENTS[name]) for name in PARAMETERS[method]}

        def change_it(self: Any, *args: Any, method: str = method, **named: Any) -> None:
            change((dict(zip(PARAMETERS[method], args, strict=False)) | named)[argument], path, new)

        found = registry([type("Strange", (Plain,), {"name": "strange", method: change_it})()])["strange"]
        with pytest.raises(BackendDefect, match=f"its method {method} changed the {re.escape(words)}") as caught:
            getattr(found, method)(**given) if by_name else getattr(found, method)(*given.values())
        assert "Report it to the maintainers of test" in caught.value.remedy
        assert given == {name: ARGUMENTS[name] for name in given}


def test_a_change_before_an_error_is_lost() -> None:
    """Of a method that gets weights, errors about these pass."""

    def damaged(self: Any, expert: Any, problem: Any, plan: Any) -> Any:
        change(problem, "top_k", 1)
        raise MemoryError

    layer = copy.deepcopy(LAYER)
    found = registry([type("Strange", (Plain,), {"name": "strange", "convert": damaged})()])["strange"]
    with pytest.raises(MemoryError):
        found.convert({}, layer, ARGUMENTS["plan"])
    assert layer == LAYER


def test_an_answer_that_is_changed_later_stays_as_it_was() -> None:
    kept: list[Any] = []

    class Later(Plain):
        name = "strange"

        def plan(self, problem: Any, device: Any) -> Any:
            kept.append(super().plan(problem, device))
            return kept[-1]

    found = registry([Later()])["strange"]
    plan = found.plan(LAYER, CPU)
    change(kept[-1], "hidden_size", 7)
    assert plan.hidden_size == LAYER.hidden_size


def test_a_verdict_that_is_changed_later_stays_as_it_was() -> None:
    kept = Rejected((Reason("test", "it is a test"),))
    answer = registry([strange("check", lambda: kept)])["strange"].check(LAYER, CPU)
    assert answer == kept
    change(kept.reasons[0], "detail", "it is another test")
    assert answer == Rejected((Reason("test", "it is a test"),))


class Trap:
    """An attribute that raises when it is read."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else self.act()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_raises_or_is_nonsense_is_refused(name: str) -> None:
    refused = 0
    for act in (*(act for act, _ in RAISED.values()), *RETURNED.values()):
        made = type("Strange", (Plain,), {"name": "strange", name: Trap(act)})()
        try:
            registry([made])
        except RegistryError as error:
            refused += 1
            assert len(str(error)) < 4000
    # Some values are legitimate for some attributes: a number, a word, True, None.
    assert refused >= len(RAISED) + len(RETURNED) - 8


@pytest.mark.parametrize("rule", ["violated", "detail"])
def test_a_rule_that_raises_rejects_its_backend(rule: str) -> None:
    from vllm_moe_oracle.core.capabilities import Rule

    for act, words in RAISED.values():
        parts: Any = {"violated": lambda *args: True, "detail": lambda *args: "no", rule: lambda *args, act=act: act()}
        backends = registry([backend("strange", rules=(Rule("odd", **parts),)), backend("sound")])
        assert decide(LAYER, CPU, load({}), registry=backends).backend == "sound"
        (verdict,) = (each for each in evaluate_candidates(LAYER, CPU, load({}), backends) if not each.accepted)
        assert f"its method check {words}" in verdict.reasons[0].detail


@pytest.mark.parametrize(
    ("method", "answer", "words"),
    [
        ("convert", {"w13": np.zeros(3)}, "of type ndarray, expected Tensor"),
        ("convert", {"w13": torch.tensor(1.0)}, "its w13 has no dimensions"),
        ("convert", {"w13.scale": torch.zeros(1)}, "'w13.scale' cannot be a parameter's name"),
        ("convert", {"training": torch.zeros(1)}, "'training' cannot be a parameter's name"),
        ("convert", {"forward": torch.zeros(1)}, "'forward' cannot be a parameter's name"),
        ("check", Rejected((Reason("odd", " "),)), "without a reason"),
        ("hand_overs", (8, 8), "do not ascend"),
        ("hand_overs", (0, 8), "do not ascend"),
        ("few_tokens", TokenRange("sound", None), "largest number of tokens is None"),
    ],
)
def test_an_answer_of_the_right_type_may_still_break_the_contract(method: str, answer: Any, words: str) -> None:
    found = registry([strange(method, lambda: answer)])["strange"]
    with pytest.raises(BackendDefect, match=re.escape(words)):
        getattr(found, method)(**{name: ARGUMENTS[name] for name in PARAMETERS[method]})


class Own(torch.Tensor):
    """A class whose every answer is its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise SystemExit(0)


def of_fake_mode() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4)


TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "own class": (lambda: torch.zeros(4).as_subclass(Own), "is a Own, expected a torch.Tensor"),
    "fake": (of_fake_mode, "is a FakeTensor, expected a torch.Tensor"),
    "uint7": (lambda: torch.empty(4, dtype=torch.uint7), "cannot be copied: NotImplementedError"),
    "meta": (lambda: torch.empty(4, device="meta"), "has no values: it is on the device meta"),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_conversion_returns_tensors_that_can_be_copied(kind: str) -> None:
    make, words = TENSORS[kind]
    found = registry([strange("convert", lambda: {"w13": make()})])["strange"]
    with pytest.raises(BackendDefect, match=re.escape(f"its w13 {words}")):
        found.convert({"w13": torch.zeros(4)}, LAYER, ARGUMENTS["plan"])
    for sound in (torch.zeros(4), torch.nn.Parameter(torch.zeros(4)), torch.zeros(4).to(torch.float8_e8m0fnu)):
        kept = registry([strange("convert", lambda value=sound: {"w13": value})])["strange"]
        assert kept.convert({"w13": torch.zeros(4)}, LAYER, ARGUMENTS["plan"])["w13"] is sound


def test_what_is_checked_is_what_the_caller_gets() -> None:
    class Fickle(dict[str, torch.Tensor]):
        asked = 0

        def items(self) -> Any:
            self.asked += 1
            return super().items() if self.asked < 5 else {"w13": None}.items()

    found = registry([strange("convert", lambda: Fickle(w13=torch.zeros(4)))])["strange"]
    assert type(found.convert({"w13": torch.zeros(4)}, LAYER, ARGUMENTS["plan"])) is dict


def test_sound_answers_pass_unchanged() -> None:
    own = backend("sound")
    found = registry([own])["sound"]
    assert isinstance(found, CheckedBackend) and found.rank == own.rank  # type: ignore[attr-defined]
    assert found.check(LAYER, CPU) == Accepted() and found.plan(LAYER, CPU) == own.plan(LAYER, CPU)
    assert found.activations(LAYER) in get_args(ActivationPrecision)
    reasons = registry([type("No", (Plain,), {"name": "no", "schemes": ("mxfp8",), "rules": ()})()])["no"]
    assert isinstance(reasons.check(LAYER, CPU), Accepted | Rejected)


@pytest.mark.parametrize(
    "raised", [SystemExit(0), KeyboardInterrupt(), type("Stop", (BaseException,), {})("now")], ids=repr
)
def test_what_a_backend_built_cannot_end_the_process(raised: BaseException, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor write to standard output, which may hold JSON; whatever class it is of."""
    limit = sys.getrecursionlimit()
    with (
        pytest.raises(BackendDefect, match=f"backend strange: its kernel raised {type(raised).__name__}") as caught,
        watched_calls(registry([backend("strange")])["strange"], "kernel"),
    ):
        print("a kernel's words")
        os.write(1, b"and those below Python")
        sys.setrecursionlimit(limit + 1)
        raise raised
    assert "MOE_ORACLE_DISABLE=strange" in caught.value.remedy and sys.getrecursionlimit() == limit
    written = capfd.readouterr()
    assert not written.out and "a kernel's words" in written.err and "below Python" in written.err


def test_what_a_call_may_raise_passes() -> None:
    """Who calls a kernel says which call it was; of a class that is asked, little may pass."""
    theirs = registry([backend("strange")])["strange"]
    with pytest.raises(ZeroDivisionError), watched_calls(theirs, "kernel"):
        _ = 1 / 0
    with (
        pytest.raises(BackendDefect, match="its stock class raised ZeroDivisionError"),
        watched_calls(theirs, "stock class", (NotImplementedError,)),
    ):
        _ = 1 / 0


@pytest.mark.parametrize("name", ["emulation", None])
def test_own_backends_are_not_watched(name: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    found = None if name is None else default_registry()[name]
    with pytest.raises(SystemExit), watched_calls(found, "kernel"):
        print("an answer")
        raise SystemExit(0)
    assert capfd.readouterr().out == "an answer\n"


# --- What must pass ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
def test_ctrl_c_and_signal_handlers_end_the_process(kind: signal.Signals) -> None:
    """vLLM's handler of SIGTERM raises SystemExit wherever the process is, in a backend's method as well."""

    def handler(*args: Any) -> None:
        raise SystemExit

    def send() -> Any:
        os.kill(os.getpid(), kind)
        return [each for each in range(10**6)]  # the handler runs here

    before = signal.signal(kind, signal.default_int_handler if kind == signal.SIGINT else handler)
    try:
        with pytest.raises(KeyboardInterrupt if kind == signal.SIGINT else SystemExit) as caught:
            decide(LAYER, CPU, load({}), registry=registry([strange("priority", send), backend("sound")]))
        assert is_interruption(caught.value)
    finally:
        signal.signal(kind, before)
