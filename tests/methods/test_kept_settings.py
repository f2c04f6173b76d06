"""What a backend's methods set in the process is put back, whichever of them sets it while a layer is loaded.

A class of experts is watched likewise: vLLM's kernel is built over it, and it is called to be checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="methods are vLLM's")

from tests.lib import faulty_backends, method_layers
from tests.lib.cases import registry
from tests.lib.faulty_backends import Faulty
from tests.lib.method_layers import Layer, created, load_random, loaded
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.errors import BackendDefect, SelfCheckError
from vllm_moe_oracle.oracle.checked_backend import METHODS
from vllm_moe_oracle.verification import process_state

EXPERTS = 4
STEPS = {
    "decision": ("check", "plan", "priority", "activations", "numerics", "layout"),
    "convert": ("convert",),
    "check": ("validate_weights", "build_experts", "hand_overs"),
}
CASES = [(step, name) for step, names in STEPS.items() for name in names]


def sets(method: str, calls: list[str]) -> Any:
    """A right backend, one method of which leaves other settings of torch behind."""
    original = getattr(Faulty, method)

    def leaves(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        torch.set_default_dtype(torch.float16)
        torch.set_grad_enabled(False)
        calls.append(method)
        return found

    return type("Sets", (Faulty,), {method: leaves})("sets")


@pytest.fixture
def config() -> Iterator[Any]:
    with method_layers.moe_config({"self_check": "group"}, EXPERTS, 128, 128) as found:
        yield found


@pytest.mark.parametrize(("step", "method"), CASES)
def test_a_method_leaves_no_setting_behind(
    config: Any, step: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert method in METHODS
    calls: list[str] = []
    method_layers.use_backends([sets(method, calls)], monkeypatch)
    layer = Layer()
    with process_state.kept() as changed:
        made = created(config, layer)
    assert not changed and made.backend.name == "sets" and (calls or step == "check")
    load_random(layer, 0)
    with process_state.kept() as changed:
        made.process_weights_after_loading(layer)
    assert not changed and calls


# --- Classes of experts -----------------------------------------------------------------------------------------------

PLACES = ("kernel", "check", "check after the conversion")


def own_class(place: str, act: Callable[[], object]) -> Any:
    """A right backend with experts of a class of its own, which acts when vLLM's kernel is built or it is called."""

    class Built(Faulty):
        def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
            experts = super().build_experts(tensors, problem, plan, builder)
            called = PLACES[1 + builder.for_serving]

            class Own(type(experts)):  # type: ignore[misc]  # whatever class it is
                def is_monolithic(self) -> bool:
                    if builder.for_serving and place == "kernel":
                        act()
                    return False

                def apply(self, *args: Any, **kwargs: Any) -> Any:
                    if place == called:
                        act()
                    return super().apply(*args, **kwargs)

            experts.__class__ = Own
            return experts

    return Built("theirs")


@pytest.mark.parametrize("place", PLACES)
def test_an_own_class_that_exits_is_named(config: Any, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server would end with the status 0, as if it had been stopped."""

    def exits() -> None:
        raise SystemExit(0)

    method_layers.use_backends([own_class(place, exits)], monkeypatch)
    layer, made = loaded(config)
    error = BackendDefect if place == "kernel" else SelfCheckError
    with pytest.raises(error, match=r"backend theirs: its (kernel|experts) raised SystemExit: 0") as caught:
        made.process_weights_after_loading(layer)
    assert "MOE_ORACLE_DISABLE=theirs" in str(caught.value)


@pytest.mark.parametrize("place", PLACES)
def test_an_own_class_prints_to_standard_error(
    config: Any, place: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def prints() -> None:
        print("printed")
        os.write(1, b"written")

    method_layers.use_backends([own_class(place, prints)], monkeypatch)
    layer, made = loaded(config)
    made.process_weights_after_loading(layer)
    written = capfd.readouterr()
    assert "printed" in written.err and "written" in written.err
    assert "printed" not in written.out and "written" not in written.out


def test_settings_that_an_own_class_leaves_are_put_back(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method_layers.use_backends([own_class("kernel", lambda: torch.set_default_dtype(torch.float16))], monkeypatch)
    layer, made = loaded(config)
    with process_state.kept() as changed:
        made.process_weights_after_loading(layer)
    assert not changed


@pytest.mark.parametrize("act", ["raise SystemExit(0)", "raise KeyError('no')", "raise NotImplementedError"])
@pytest.mark.parametrize("when", ["imported", "asked"])
def test_a_stock_class_of_a_third_party_is_watched(
    act: str, when: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def acts(*args: Any) -> tuple[bool, None]:
        print("printed")
        exec(act)
        return True, None

    class Theirs(Faulty):
        stock_class = "moe_theirs:Experts"

    class Lazy(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return acts()

    asked = SimpleNamespace(Experts=SimpleNamespace(is_supported_config=acts))
    monkeypatch.setitem(sys.modules, "moe_theirs", asked if when == "asked" else Lazy())  # type: ignore[arg-type]
    layer = faulty_backends.LAYERS["silu"]
    found = registry([Theirs("theirs")])["theirs"]
    words = current_adapter().stock_class_rejection(found, faulty_backends.moe_config(layer), layer)
    if when == "asked" and "NotImplemented" in act:  # a class may leave the question open
        assert words == ""
    else:
        assert "backend theirs: its stock class raised" in words and "MOE_ORACLE_DISABLE=theirs" in words
    written = capfd.readouterr()
    assert "printed" in written.err and not written.out
