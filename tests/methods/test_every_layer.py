"""Every layer of a kind is called after its conversion: a backend may compute with another layer's weights."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib import faulty_backends as lib
from tests.lib import method_layers
from tests.lib.faulty_backends import Faulty, Method
from tests.lib.method_layers import HIDDEN, INNER, Layer, created, load_random
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.errors import SelfCheckError
from vllm_moe_oracle.methods import backend_check, load_caches
from vllm_moe_oracle.methods.rank_sync import RankGroup
from vllm_moe_oracle.oracle import watchdog
from vllm_moe_oracle.verification.converted_layer import InstalledLayer
from vllm_moe_oracle.verification.self_check import Comparison

EXPERTS = 12


class Shares(Faulty):
    """Computes with what `choose` makes of the tensors of all layers so far that will serve."""

    def __init__(self, choose: Any) -> None:
        super().__init__("shares")
        self._choose = choose
        self._held: list[Any] = []

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        held, own = self._held, dict(tensors)
        if builder.for_serving:
            held.append(own)
        return builder.from_function(
            lambda *arguments: forward(self._choose(held, own) if builder.for_serving else own, problem, *arguments)
        )


class ConvertsOnce(Faulty):
    """Converts the experts of the first layer, and returns them for all others."""

    def __init__(self) -> None:
        super().__init__("converts_once")
        self._made: list[dict[str, torch.Tensor]] = []
        self._calls = 0

    def convert(self, expert: Any, problem: Any, plan: Any) -> Any:
        if expert["w13"].is_meta or problem.num_experts != EXPERTS:
            return dict(expert)
        if len(self._made) < EXPERTS:
            self._made.append({name: tensor.clone() for name, tensor in expert.items()})
            return dict(expert)
        self._calls += 1
        return self._made[(self._calls - 1) % EXPERTS]


FAULTS: dict[str, Any] = {
    "the first layer's": lambda: Shares(lambda held, own: held[0]),
    "the last layer's": lambda: Shares(lambda held, own: held[-1]),
    "the last layer's scales": lambda: Shares(lambda held, own: own | {"w2_scale": held[-1]["w2_scale"]}),
    "two layers'": lambda: Shares(lambda held, own: own | {"w2": held[0]["w2"]}),
    "converted once": ConvertsOnce,
}


class Ring(Faulty):
    """Holds the weights of the last `slots` layers: the next one takes the place of the first."""

    def __init__(self, slots: int) -> None:
        super().__init__("ring")
        self._slots: list[Any] = [None] * slots
        self._layers = 0

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        own, slots = dict(tensors), self._slots
        if not builder.for_serving:
            return builder.from_function(lambda *arguments: forward(own, problem, *arguments))
        slot, self._layers = self._layers % len(slots), self._layers + 1
        slots[slot] = {name: tensor.clone() for name, tensor in own.items()}
        return builder.from_function(lambda *arguments: forward(slots[slot], problem, *arguments))


@pytest.fixture(params=["group", "all", "off"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads layers of one kind until one fails; returns the mode of the check and how many went well."""

    def loads(backend: Any, count: int = 3) -> tuple[list[Any], int]:
        method_layers.use_backends([backend], monkeypatch)
        methods = []
        for seed in range(count):
            layer = Layer()
            layer.layer_name = f"model.layers.{seed}.mlp.experts"
            methods.append((created(config, layer), layer))
        for seed, (method, layer) in enumerate(methods):
            load_random(layer, seed)
            try:
                method.process_weights_after_loading(layer)
            except SelfCheckError as error:
                assert "MOE_ORACLE_DISABLE" in str(error)
                return methods, seed
        return methods, count

    with method_layers.moe_config({"self_check": request.param}, EXPERTS, HIDDEN // 4, INNER // 4) as config:
        yield request.param, loads


@pytest.mark.parametrize("name", FAULTS)
def test_a_layer_that_computes_with_anothers_weights(run: Any, name: str) -> None:
    mode, loads = run
    assert loads(FAULTS[name]())[1] == (3 if mode == "off" else 1)


@pytest.mark.parametrize(("slots", "layers", "passes"), [(2, 3, False), (3, 4, False), (3, 5, False), (4, 4, True)])
def test_layers_that_share_a_few_places(
    run: Any, slots: int, layers: int, passes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The first layer is called once more after the last conversion of the load."""
    mode, loads = run
    with caplog.at_level("DEBUG", "vllm.moe_oracle"):
        assert loads(Ring(slots), layers)[1] == (layers if passes or mode == "off" else layers - 1)
    said = "model.layers.0.mlp.experts: check of ring after the last conversion: relative error"
    assert (said in caplog.text) is (passes and mode != "off")


def test_the_first_layer_is_called_once_more_and_an_only_one_is_not(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, loads = run
    again: list[int] = []
    original = InstalledLayer.compare_again

    def counts(self: InstalledLayer) -> Comparison:
        again.append(1)
        return original(self)

    monkeypatch.setattr(InstalledLayer, "compare_again", counts)
    for count, calls in ((1, 0), (2, 2), (3, 3)):  # of the layer before, and of the first one
        again.clear()
        assert loads(Faulty("right"), count)[1] == count
        assert len(again) == (0 if mode == "off" else calls)


def test_right_layers_pass_and_no_check_outlives_the_load_or_its_layer(run: Any) -> None:
    _, loads = run
    methods, count = loads(Faulty("right"))
    assert count == 3
    assert [method.installed for method, _ in methods] == [None] * 3
    layers = [weakref.ref(layer) for _, layer in methods]
    methods.clear()
    gc.collect()
    assert [each() for each in layers] == [None] * 3


class Converted:
    """As much of a layer's method as `check_installed` needs; its check finds nothing wrong."""

    def __init__(self, layer: str, again: list[str]) -> None:
        self.decision: Any = SimpleNamespace(problem=SimpleNamespace(layer=layer, key=lambda: "kind"))
        self.backend: Any = SimpleNamespace(name="one")
        self.settings: Any = SimpleNamespace(self_check="group")
        self.installed: Any = None
        self.rank_group = RankGroup()
        self._again = again

    def prepare(self) -> Any:
        def compare_again() -> Comparison:
            self._again.append(self.decision.problem.layer)
            return Comparison(0.0, 1.0, 0.0)

        return SimpleNamespace(compare=lambda: Comparison(0.0, 1.0, 0.0), compare_again=compare_again)


def test_a_layer_that_comes_again_begins_another_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded in an earlier pass may be gone: its layers are not called after the first one of this."""
    monkeypatch.setattr(backend_check, "_converted_outcomes", {("kind", "one"): backend_check._PASSED})
    again: list[str] = []
    first, second = (Converted(name, again) for name in ("first", "second"))
    for layer in (first, second, first, second):
        backend_check.check_installed(layer, layer.prepare)
    assert again == ["first", "first"] and first.installed is not None and second.installed is not None
    backend_check.check_first_layers()
    assert again == ["first"] * 3
    load_caches.end_load()
    assert first.installed is second.installed is None


def test_tensors_that_vllm_has_moved_are_not_read(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As offloading to the CPU does between layers; the kernel must not run over them."""
    mode, loads = run
    original = backend_check._check_previous
    seen = []

    def moves(method: Any, last: Any, first: Any) -> str:
        if last is not None:
            layer = last().installed._layer
            layer.w2_weight.data = layer.w2_weight.data.clone()
            seen.append(last().installed.compare_again().skip_reason)
        return original(method, last, first)

    monkeypatch.setattr(backend_check, "_check_previous", moves)
    assert loads(FAULTS["the last layer's"]())[1] == 3  # nothing else sees this fault
    assert loads(Faulty("right"))[1] == 3
    assert set(seen) == (set() if mode == "off" else {"its tensors were moved"})


@pytest.mark.parametrize("experts", [1, 2, 12])
@pytest.mark.parametrize("top_k", [1, 2])
def test_a_few_experts_are_the_last_and_others(experts: int, top_k: int) -> None:
    from tests.lib.cases import problem
    from vllm_moe_oracle.verification.converted_layer import WeightParts

    chosen = set()
    for number in range(20):
        layer = problem(experts=experts, top_k=min(top_k, experts), layer=f"model.layers.{number}.mlp.experts")
        few = WeightParts(layer, every=False).experts
        assert len(few) == len(set(few)) == min(experts, 2) and few[-1] == experts - 1 and few == sorted(few)
        assert WeightParts(layer).experts == list(range(experts))
        chosen |= set(few)
    assert len(chosen) > min(experts, 2) or experts <= 2


# --- A check that takes long ------------------------------------------------------------------------------------------


def test_a_slow_kernel_is_named_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel returns only when the log has named its check twice: nothing here depends on how fast the machine is,
    or on when the call of the kernel, which is watched as well, is named."""
    lines: list[str] = []
    named = threading.Event()

    class Listens(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "is being checked in" in (message := record.getMessage()):
                lines.append(message)
            if len(lines) == 2:
                named.set()

    def compiles(tensors: Any, layer: Any, out: Any, *more: Any) -> None:
        assert named.wait(60)
        forward(tensors, layer, out, *more)

    monkeypatch.setattr(watchdog, "FIRST_SECONDS", 0.01)
    handler = Listens()
    watchdog.logger.addHandler(handler)
    before = threading.active_count()
    try:
        layer = lib.LAYERS["silu"]
        Method.over(Faulty("slow", compute=compiles)).check()
    finally:
        watchdog.logger.removeHandler(handler)
    assert threading.active_count() == before
    assert lines[0].startswith("moe_oracle: slow is being checked in ") and " for 0 s; " in lines[0]
    assert layer.layer in lines[0] or "8 experts" in lines[0]
    assert "MOE_ORACLE_SELF_CHECK=off skips the check, MOE_ORACLE_DISABLE=slow the backend" in lines[1]
