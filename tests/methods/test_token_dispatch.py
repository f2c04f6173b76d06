"""Two backends of one layer by turns, through the method that vLLM calls: who runs, on which tensors, after reloads.

The backends are the emulation, each with a mark that it leaves in the output, and a layout of its own or a shared one.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import faulty_backends
from tests.lib.cases import registry
from tests.lib.method_layers import Layer, created, loader, moe_config, use_backends
from vllm_moe_oracle.backends.emulation import Emulation, forward
from vllm_moe_oracle.core.decision import TokenRange
from vllm_moe_oracle.core.measurement_set import MeasurementSet
from vllm_moe_oracle.errors import SelfCheckError
from vllm_moe_oracle.methods import backend_check, declarations, load_caches
from vllm_moe_oracle.methods.base import PROCESSED_ATTRIBUTE, OracleMoEMethod
from vllm_moe_oracle.verification.self_check import Comparison

EXPERTS, HIDDEN, INNER = 4, 64, 96
SWITCH = 22
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Marked(Emulation):
    """The emulation with weights in an order of its own, which multiplies its output by a factor."""

    def __init__(self, name: str, rank: float, factor: float, reverses: bool = False, weights: str = "") -> None:
        self.name = name  # type: ignore[misc]
        self.rank, self.factor, self.reverses, self.weights = rank, factor, reverses, weights
        self.calls: list[int] = []

    def priority(self, problem: Any, device: Any) -> float:
        return self.rank

    def only_by_name(self, problem: Any, device: Any) -> str:
        return ""  # it stands for a kernel, on a GPU too

    def layout(self, problem: Any, plan: Any) -> str:
        return self.weights or super().layout(problem, plan)

    def convert(self, expert: Any, problem: Any, plan: Any) -> dict[str, Tensor]:
        if not self.reverses:
            return dict(expert)
        return {name: tensor.flip(0) for name, tensor in expert.items()}

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        def run(out: Tensor, x: Tensor, *rest: Any) -> None:
            self.calls.append(x.shape[0])
            straight = {name: tensor.flip(1) if self.reverses else tensor for name, tensor in tensors.items()}
            forward(straight, problem, out, x, *rest)
            out.mul_(self.factor)

        return builder.from_function(run)


@contextmanager
def inside(
    monkeypatch: pytest.MonkeyPatch, backends: list[Marked], config: dict[str, Any], evidence: MeasurementSet
) -> Iterator[Any]:
    """vLLM's config of a MoE layer, in a process with these backends and this evidence."""
    from vllm_moe_oracle.measurements import lookup

    use_backends(backends, monkeypatch)
    monkeypatch.setattr(lookup, "find_measurements", lambda problem, device, settings: evidence)
    load_caches.end_load()
    with moe_config(config, EXPERTS, HIDDEN, INNER) as made:
        yield made


class Running(Layer):
    """What vLLM's kernel asks of a layer in addition."""

    activation = None
    global_num_experts = EXPERTS
    expert_map = None


def made(config: Any, layer: Running, seed: int = 0) -> Any:
    """A method with loaded and converted weights."""
    layer.activation = config.activation
    method = created(config, layer)
    fill(layer, seed)
    method.process_weights_after_loading(layer)
    return method


def fresh(method: Any, layer: Running) -> None:
    """Gives the layer new parameters with other weights, as a reload does."""
    method.create_weights(layer, EXPERTS, HIDDEN, INNER, torch.bfloat16, weight_loader=loader)
    fill(layer, seed=1)
    setattr(layer, PROCESSED_ATTRIBUTE, False)


def fill(layer: Running, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in layer.named_parameters():
        if name.endswith("_scale"):
            parameter.data.view(torch.uint8).random_(118, 122, generator=generator)
        else:
            parameter.data.view(torch.uint8).random_(0, 100, generator=generator)


def run(method: Any, layer: Running, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    weights, ids = torch.rand(count, EXPERTS, generator=generator).topk(2)
    result: Tensor = method.apply(layer, x, weights, ids.to(torch.int32))
    return result


def times(few: float, many: float) -> dict[str, dict[int, float]]:
    return {"uniform": {count: few if count <= 16 else many for count in COUNTS}}


EVIDENCE = MeasurementSet({"decoder": times(10, 40), "prefiller": times(20, 20)}, "a test")
CONFIG = {"self_check": "off", "objective": "1:1,128:1"}


def backends(**changes: Any) -> tuple[Marked, Marked]:
    return Marked("prefiller", 1.0, 1.0), Marked("decoder", 2.0, 2.0, reverses=True, **changes)


def test_who_runs_is_decided_by_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    prefiller, decoder = backends()
    layer = Running()
    with inside(monkeypatch, [prefiller, decoder], CONFIG | {"allow_second_layout": True}, EVIDENCE) as config:
        method = made(config, layer)
        assert method.decision.token_ranges == (TokenRange("decoder", SWITCH), TokenRange("prefiller", None))
        big = run(method, layer, 64)  # the largest call comes first, as in vLLM: everybody has run then
        assert (prefiller.calls, decoder.calls) == ([64], [SWITCH])
        for count in (1, SWITCH, SWITCH + 1, 50):
            run(method, layer, count)
        assert prefiller.calls == [64, SWITCH + 1, 50] and decoder.calls == [SWITCH, 1, SWITCH]
        small = run(method, layer, 5)
    with inside(monkeypatch, [Marked("one", 1.0, 1.0)], CONFIG, MeasurementSet()) as config:
        alone = Running()
        reference = made(config, alone)
        assert torch.equal(big, run(reference, alone, 64))
        assert torch.equal(small, run(reference, alone, 5) * 2)


def test_a_second_copy_is_made_only_when_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Running()
    with inside(monkeypatch, list(backends()), CONFIG, EVIDENCE) as config:
        method = made(config, layer)
        assert method.decision.token_ranges == () and method.token_dispatch is None and method.weight_copies == {}
        assert method.decision.backend in ("decoder", "prefiller") and method.decision.why == "measured"


def test_backends_of_one_layout_share_the_layers_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    prefiller, decoder = (
        Marked(name, rank, factor, weights="the same")
        for name, rank, factor in (("prefiller", 1.0, 1.0), ("decoder", 2.0, 2.0))
    )
    layer = Running()
    with inside(monkeypatch, [prefiller, decoder], CONFIG, EVIDENCE) as config:
        method = made(config, layer)
        assert [step.backend for step in method.decision.token_ranges] == ["decoder", "prefiller"]
        assert method.weight_copies == {}
        run(method, layer, 64)
        run(method, layer, 3)
        assert prefiller.calls == [64] and decoder.calls == [SWITCH, 3]


def test_a_reload_refills_both_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    prefiller, decoder = backends()
    layer = Running()
    with inside(monkeypatch, [prefiller, decoder], CONFIG | {"allow_second_layout": True}, EVIDENCE) as config:
        method = made(config, layer)
        ((_, copy),) = method.weight_copies.items()
        addresses = {name: tensor.data_ptr() for name, tensor in copy.items()}
        before = {count: run(method, layer, count) for count in (4, 40)}
        # As vLLM's layer-wise reload: fresh parameters, conversion, then what came out is copied to the old places.
        old = {name: parameter.data for name, parameter in layer.named_parameters()}
        fresh(method, layer)
        method.process_weights_after_loading(layer)
        for name, data in old.items():
            data.copy_(getattr(layer, name).data)
            getattr(layer, name).data = data
        after = {count: run(method, layer, count) for count in (4, 40)}
        assert {name: tensor.data_ptr() for name, tensor in copy.items()} == addresses
        assert method.weight_copies["decoder" if method.backend.name == "prefiller" else "prefiller"] is copy
    with inside(monkeypatch, [Marked("one", 1.0, 1.0)], CONFIG, MeasurementSet()) as config:
        alone = Running()
        reference = made(config, alone, seed=1)
        assert torch.equal(after[4], run(reference, alone, 4) * 2) and torch.equal(after[40], run(reference, alone, 40))
    assert not torch.equal(before[4], after[4]) and not torch.equal(before[40], after[40])


@pytest.mark.parametrize("allow_second_layout", [False, True])
def test_a_backend_that_fails_its_self_check_takes_no_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allow_second_layout: bool
) -> None:
    """`decoder` doubles its output: alone it would never be taken, and by turns neither."""
    layer = Running()
    config = CONFIG | {"self_check": "group", "allow_second_layout": allow_second_layout, "objective": "1:1,128:10"}
    with inside(monkeypatch, list(backends()), config, EVIDENCE) as moe:
        method = made(moe, layer)
        assert (
            method.backend.name == "prefiller" and method.token_dispatch is None and method.decision.token_ranges == ()
        )
        assert method.weight_copies == {}
    assert ("cannot run beside" in caplog.text) == allow_second_layout


def test_a_backend_that_cannot_convert_takes_no_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even where no check would show it."""
    own, beside = backends()
    monkeypatch.setattr(Marked, "convert", lambda self, expert, *_: dict(expert) if self is own else None)
    with inside(monkeypatch, [own, beside], CONFIG | {"allow_second_layout": True}, EVIDENCE) as moe:
        method = made(moe, Running())
        assert method.backend.name == "prefiller" and method.token_dispatch is None and method.weight_copies == {}
    assert "decoder cannot run beside prefiller" in caplog.text and "its method convert returned" in caplog.text


def test_a_second_backend_is_checked_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes over at 700 tokens and is wrong from there on; those of a check at load are fewer otherwise."""

    class Late(Marked):
        def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
            def run(out: Tensor, x: Tensor, *rest: Any) -> None:
                forward(tensors, problem, out, x, *rest)
                if x.shape[0] > self.factor:
                    out.zero_()

            return builder.from_function(run)

    counts = [2**power for power in range(12)]
    few, many = ({"uniform": {count: fast if (count <= 512) is early else 40 for count in counts}} for early, fast in (
        (True, 10), (False, 20)
    ))  # fmt: skip
    evidence = MeasurementSet({"decoder": few, "prefiller": many}, "a test")
    config = {"self_check": "group", "objective": "1:1,2048:1"}
    for switch, names in ((600.0, ["decoder"]), (1e9, ["decoder", "prefiller"])):
        late, early = Late("prefiller", 2.0, switch), Marked("decoder", 1.0, 1.0)
        late.weights = early.weights = "one layout"
        with inside(monkeypatch, [early, late], config, evidence) as moe:
            method = made(moe, Running())
            assert method.backend.name == "decoder"
            assert [each.backend for each in method.decision.token_ranges] == (names if len(names) > 1 else [])


def test_a_strict_check_holds_for_the_second_backend_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIG | {"self_check": "strict", "allow_second_layout": True, "objective": "1:1,128:10"}
    refused = pytest.raises(SelfCheckError, match=r"decoder, which was to run beside prefiller, .*self-check")
    with inside(monkeypatch, list(backends()), config, EVIDENCE) as moe, refused:
        made(moe, Running())


def test_each_backend_runs_the_tiles_that_were_measured_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: dict[str, Any] = {}
    first, other = backends()

    def remembering(backend: Marked) -> Any:
        build = backend.build_experts

        def remember(tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
            plans[backend.name] = plan.tiles
            return build(tensors, problem, plan, builder)

        return remember

    for backend in (first, other):
        backend.build_experts = remembering(backend)  # type: ignore[method-assign]
    tiles = {"decoder": ((16, "few"), (128, "")), "prefiller": ((128, "many"),), "absent": ((1, "x"),)}
    evidence = dataclasses.replace(EVIDENCE, tiles=tiles)
    with inside(monkeypatch, [first, other], CONFIG | {"allow_second_layout": True}, evidence) as config:
        method = made(config, Running())
        assert len(method.decision.token_ranges) == 2
    assert plans == {name: tiles[name] for name in ("decoder", "prefiller")}


def test_where_ranks_join_later_a_backend_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank decides for itself there, and experts move between ranks as bytes."""
    from vllm_moe_oracle.compat import current_adapter
    from vllm_moe_oracle.errors import NoBackendError

    monkeypatch.setattr(type(current_adapter()), "adds_ranks_later", lambda self: True)
    refused = pytest.raises(
        NoBackendError, match=r"--enable-elastic-ep each rank decides for itself.*\n?.*Name a backend"
    )
    for config in ({}, {"backend": "decoder", "on_unavailable": "fallback"}):
        chosen: dict[str, Any] = CONFIG | config
        with inside(monkeypatch, list(backends()), chosen, EVIDENCE) as moe, refused:
            made(moe, Running())
    with inside(monkeypatch, list(backends()), CONFIG | {"backend": "decoder"}, EVIDENCE) as moe:
        assert made(moe, Running()).backend.name == "decoder"


def test_a_reload_that_one_of_the_turns_fails_on_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is built and may be captured: it must not go on with the weights from before."""
    prefiller, decoder = Marked("prefiller", 1.0, 1.0), Marked("decoder", 2.0, 1.0, reverses=True)
    layer = Running()
    config = CONFIG | {"allow_second_layout": True, "self_check": "group"}
    with inside(monkeypatch, [prefiller, decoder], config, EVIDENCE) as moe:
        method = made(moe, layer)
        assert len(method.decision.token_ranges) == 2
        other = decoder if method.backend.name == "prefiller" else prefiller
        fresh(method, layer)
        load_caches.end_load()
        other.factor = 3.0
        with pytest.raises(SelfCheckError, match=rf"{other.name}, which runs beside .* reloaded weights: .*self-check"):
            method.process_weights_after_loading(layer)
        assert layer.moe_oracle_state == "converting"


def test_a_copy_without_memory_is_reported_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_oracle.methods import rank_sync, token_dispatch

    told: list[str] = []
    monkeypatch.setattr(rank_sync, "notify_failure", lambda group, topic, error: told.append(f"{topic}: {error}"))

    def no_room(*args: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(token_dispatch, "_convert_copy", no_room)
    config = CONFIG | {"allow_second_layout": True}
    with inside(monkeypatch, list(backends()), config, EVIDENCE) as moe, pytest.raises(MemoryError):
        made(moe, Running())
    assert len(told) == 1 and told[0].startswith("the copy for ") and told[0].endswith(": no room")


def test_turns_need_no_padding_of_the_input_and_no_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.lib.cases import H200, problem
    from vllm_moe_oracle import settings
    from vllm_moe_oracle.core.decision import ShardPlan
    from vllm_moe_oracle.oracle.selection import decide

    prefiller, decoder = backends()
    found = registry([prefiller, decoder])
    chosen = settings.load({}, assignments={"allow_second_layout": "1", "objective": "1:1,128:1"})

    def steps(**changes: Any) -> int:
        return len(decide(problem(**changes), H200, chosen, registry=found, measurements=EVIDENCE).token_ranges)

    assert steps() == 2
    assert steps(dp=2) == 0 and steps(eplb=True) == 0
    monkeypatch.setattr(Marked, "plan", lambda self, problem, device: ShardPlan(4096, 768), raising=False)
    assert steps() == 0
    assert dataclasses.replace(problem(), eplb=True).eplb


class WithWrongExpert(Marked):
    """Wrong for the last expert alone, which the small layer of a check before the conversion may not have."""

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        wrong = faulty_backends.wrong_experts(lambda expert: expert == EXPERTS - 1)
        return builder.from_function(lambda *arguments: wrong(tensors, problem, *arguments))


@pytest.mark.parametrize("shared", [True, False], ids=["one layout", "two layouts"])
@pytest.mark.parametrize("faulty", ["prefiller", "decoder"])
def test_every_expert_is_checked_through_both_backends(
    faulty: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = CONFIG | {"self_check": "all", "allow_second_layout": True}
    monkeypatch.setattr(backend_check, "compare_with_reference", lambda *arguments: Comparison(0.0, 0.0, 1.0))
    for kind in (Marked, WithWrongExpert):
        both = [
            (kind if name == faulty else Marked)(name, rank, 1.0, weights="same" if shared else name)
            for name, rank in (("prefiller", 1.0), ("decoder", 2.0))
        ]
        with inside(monkeypatch, both, chosen, EVIDENCE) as config:
            if kind is Marked:
                assert len(made(config, Running()).decision.token_ranges) == 2
                continue
            with pytest.raises(SelfCheckError, match=f": {faulty}.* disagrees with the reference after"):
                made(config, Running())


def test_every_method_can_be_copied() -> None:
    """The kernel of each further backend gets a copy of the layer's method; some classes choose their own instances."""
    found = set()
    for each in declarations():
        with suppress(ImportError):  # of a class that the installed vLLM does not have
            module = importlib.import_module(each.module)
            found |= {value for _, value in inspect.getmembers(module, inspect.isclass)}
    found = {each for each in found if issubclass(each, OracleMoEMethod) and not inspect.isabstract(each)}
    assert len(found) > 15
    for method in found:
        made = object.__new__(method)
        made.marked = True
        assert type(copy.copy(made)) is method and copy.copy(made).marked
