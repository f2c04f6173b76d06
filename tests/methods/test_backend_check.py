"""A backend that fails its check loses the layer to the next candidate, or the server does not start."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib import faulty_backends as lib
from tests.lib import gloo_ranks
from tests.lib.cases import registry
from tests.lib.faulty_backends import (
    LAYERS,
    SWAPPED,
    Faulty,
    Method,
    raises,
    second,
    swap_halves,
    weights,
)
from tests.lib.strange_backends import RAISED, RETURNED
from vllm_moe_oracle.core.overrides import Override
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.errors import (
    BackendDefect,
    CheckpointError,
    HostMemoryError,
    NoBackendError,
    RankSyncError,
    SelfCheckError,
    asked_memory,
    describe_traceback,
    is_out_of_memory,
)
from vllm_moe_oracle.methods import backend_check, rank_sync
from vllm_moe_oracle.methods.rank_sync import RankGroup
from vllm_moe_oracle.verification import inputs

FAULTS_OF_CONVERSION = {name: RAISED[name] for name in ("error", "exit", "own signal")} | {
    name: (RETURNED[name], "returned what the contract does not allow") for name in ("none", "generator", "dict of one")
}


def test_the_next_candidate_is_taken_and_the_decision_says_why(caplog: pytest.LogCaptureFixture) -> None:
    first = Faulty(*SWAPPED)
    layer = LAYERS["silu"]
    method = Method.over(first, second())
    assert method.decision.backend == "swapped"
    with caplog.at_level("ERROR", "vllm.moe_oracle"):
        method.check()
    assert method.backend.name == method.decision.backend == "second"
    assert "swapped" in method.decision.explanation and "self-check" in method.decision.explanation
    failed = next(each for each in method.decision.candidates if each.backend == "swapped")
    assert not failed.accepted
    assert [reason.code for reason in failed.reasons] == ["self_check"]
    assert "relative error" in failed.reasons[0].detail
    assert f"{layer.layer}: swapped fails its self-check" in caplog.text and "taking second instead" in caplog.text


def test_a_kernel_that_ends_the_process_is_named_before(caplog: pytest.LogCaptureFixture) -> None:
    layer, said = LAYERS["silu"], []
    backend = Faulty("ends", compute=lib.sets(lambda: said.append(caplog.text)))
    with caplog.at_level("INFO", "vllm.moe_oracle"):
        backend_check.check_kernel(Method.over(backend), weights(layer))
    assert f"{layer.layer}: checking ends; if the process ends here, MOE_ORACLE_DISABLE=ends leaves it out" in said[0]


def test_candidates_are_tried_until_one_passes() -> None:
    third = second(3.0)
    third.name = "third"  # type: ignore[misc]
    broken = Faulty("broken", compute=raises)
    broken.rank = 2.0
    method = Method.over(Faulty(*SWAPPED), broken, third)
    method.check()
    assert method.decision.backend == "third"
    failed = {each.backend: each.reasons[0].detail for each in method.decision.candidates if not each.accepted}
    assert failed.keys() == {"swapped", "broken"}
    assert "RuntimeError: CUDA error: no kernel image is available" in failed["broken"]


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def rejection_of_a_kernel_that_raises(error: BaseException) -> str:
    """Why a backend whose kernel raises an error loses a layer to the next candidate, which runs it."""

    def compute(*arguments: Any) -> None:
        raise error

    method = Method.over(Faulty("broken", compute=compute), second())
    method.check()
    assert method.decision.backend == method.backend.name == "second"
    return next(each for each in method.decision.candidates if each.backend == "broken").reasons[0].detail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (Unreadable(), "Unreadable: a message that cannot be read (ValueError)"),
        (RuntimeError("bad\x1b[2J\nINFO all is well"), "RuntimeError: bad"),
        (RuntimeError("x" * 1_000_000), "RuntimeError: xxx"),
    ],
    ids=["exit", "generator exit", "unreadable", "control characters", "long"],
)
def test_whatever_a_kernel_raises_costs_it_the_layer(error: BaseException, words: str) -> None:
    detail = rejection_of_a_kernel_that_raises(error)
    assert words in detail
    assert len(detail) < 10_000 and "\x1b" not in detail and "\n" not in detail


HOSTILE = "bad\x1b[2J\x1b]0;title\x07\nINFO 01-01 all is well\r\u2028" + "x" * 1_000_000


@pytest.mark.parametrize("chained", [False, True])
def test_the_traceback_of_an_error_is_printable_and_short(chained: bool, caplog: pytest.LogCaptureFixture) -> None:
    def compute(*arguments: Any) -> None:
        try:
            raise RuntimeError(HOSTILE)
        except RuntimeError as error:
            if not chained:
                raise
            failure = ValueError("\n".join(["line\x1b[31m"] * 5000))
            failure.add_note(HOSTILE)
            raise failure from error

    Method.over(Faulty("broken", compute=compute), second()).check()
    assert "broken raised in its self-check" in caplog.text
    said = [record.getMessage() for record in caplog.records]
    assert all(record.exc_info is None for record in caplog.records)
    for text in said:
        assert len(text) < 100_000 and text.replace("\n", "").isprintable()
        assert not any(line.startswith("INFO") for line in text.splitlines())
    if not chained:
        assert "in compute" in caplog.text and "RuntimeError: bad" in caplog.text


def test_a_traceback_whose_error_cannot_be_read() -> None:
    class Hostile(Exception):
        def __getattribute__(self, name: str) -> Any:
            raise SystemError(name)

    assert describe_traceback(Unreadable()).startswith("  ")
    assert "cannot be read" in describe_traceback(Hostile())


@pytest.mark.parametrize(
    "settings",
    [{"self_check": "strict"}, {"backend": "swapped"}, {"overrides": (Override("experts", "swapped"),)}],
    ids=["strict", "explicit", "override"],
)
def test_a_strict_check_and_an_explicit_choice_refuse_to_start(settings: dict[str, Any]) -> None:
    method = Method.over(Faulty(*SWAPPED), second(), **settings)
    with pytest.raises(SelfCheckError) as caught:
        method.check()
    for word in (LAYERS["silu"].layer, "swapped fails its self-check", "relative error", "allowed", "SELF_CHECK=off"):
        assert word in str(caught.value)
    assert method.decision.backend == "swapped"


def test_a_damaged_checkpoint_is_not_the_backends_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*args: Any) -> None:
        raise CheckpointError("the group index is no permutation")

    method = Method.over(Faulty("none"), second())
    monkeypatch.setattr(inputs, "canonical_experts", damaged)
    with pytest.raises(CheckpointError, match="no permutation"):
        method.check()
    assert method.decision.backend == "none"


def test_nan_weights_are_a_checkpoint_error() -> None:
    """No backend would pass; each one that fails would take the blame, and the next its place."""
    layer = LAYERS["silu"]
    other = second()
    loaded = weights(layer)
    loaded["w2"].view(torch.uint8)[0, 3, 5] = 0x7F  # e4m3's NaN
    method = Method.over(Faulty("none"), other)
    rule = r"the float32 reference is NaN or infinite for [1-9][0-9]* of 16 tokens on the weights of local experts 0, "
    with pytest.raises(CheckpointError, match=rule) as caught:
        method.check(loaded)
    assert caught.value.where == layer.layer and caught.value.remedy
    assert method.decision.backend == "none" and other.runs == 0


def test_weights_too_small_for_float16_are_a_checkpoint_error() -> None:
    layer = dataclasses.replace(LAYERS["silu, 16 bit"], dtype="float16")
    loaded = weights(layer)
    for name in ("w13_scale", "w2_scale"):
        loaded[name] = torch.full_like(loaded[name], 127 - 30)
    with pytest.raises(CheckpointError, match="or too small or too large for float16"):
        Method.over(Faulty("none"), second(), layer=layer).check(loaded)


def test_an_explicit_choice_gives_way_where_that_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    method = Method.over(Faulty(*SWAPPED), second(), backend="swapped", on_unavailable="fallback")
    method.check()
    assert method.decision.backend == method.backend.name == "second" and method.decision.degraded
    assert "swapped, which was asked for, failed its self-check" in method.decision.explanation
    assert "taking second instead" in caplog.text
    strict = Method.over(Faulty(*SWAPPED), second(), backend="swapped", on_unavailable="fallback", self_check="strict")
    with pytest.raises(SelfCheckError):
        strict.check()


def test_an_explicit_choice_that_is_right_starts() -> None:
    method = Method.over(Faulty(*SWAPPED), second(), backend="second")
    method.check()
    assert method.decision.why == "user"


def test_when_nothing_is_left_the_layer_is_refused() -> None:
    method = Method.over(Faulty(*SWAPPED), Faulty("broken", compute=raises))
    with pytest.raises(SelfCheckError, match="fails its self-check"):
        method.check()


def test_a_reload_cannot_take_another_candidate() -> None:
    method = Method.over(Faulty(*SWAPPED), second())
    with pytest.raises(SelfCheckError):
        method.check(kernel_built=True)
    assert method.backend.name == "swapped"


@pytest.mark.parametrize(("mode", "runs"), [("off", 0), ("group", 1), ("all", 3), ("strict", 1)])
def test_how_often_layers_of_a_group_are_checked(mode: str, runs: int) -> None:
    backend = Faulty("good")
    for index in range(3):
        layer = dataclasses.replace(LAYERS["silu"], layer=f"model.layers.{index}.mlp.experts")
        Method.over(backend, layer=layer, self_check=mode).check()
    assert backend.runs == runs


def test_a_failure_is_remembered_for_the_group_and_not_for_another() -> None:
    first, other = Faulty(*SWAPPED), second()
    for index in range(3):
        layer = dataclasses.replace(LAYERS["silu"], layer=f"model.layers.{index}.mlp.experts")
        method = Method.over(first, other, layer=layer)
        method.check()
        assert method.decision.backend == "second"
    assert (first.runs, other.runs) == (1, 1)
    Method.over(first, other, layer=LAYERS["silu, 16 bit"]).check()
    assert (first.runs, other.runs) == (2, 2)


# --- Before weights are loaded ---------------------------------------------------------------------------------------


def reserve(method: Any) -> None:
    """Reserves buffers, for which the method asks its backend what it converts to."""
    meta = {name: tensor[0].to("meta") for name, tensor in weights(LAYERS["silu"]).items()}
    backend_check.reserve_or_fallback(
        method, lambda: method.backend.convert(meta, method.decision.problem, method.decision.plan)
    )


@pytest.mark.parametrize("fault", FAULTS_OF_CONVERSION)
def test_a_conversion_that_fails_takes_the_next_candidate(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    act, words = FAULTS_OF_CONVERSION[fault]
    method = Method.over(Faulty("first", lambda expert, layer: act()), second())
    for _ in range(2):  # the second layer of the kind asks nobody else
        reserve(method)
    assert method.backend.name == method.decision.backend == "second"
    failed = next(each for each in method.decision.candidates if each.backend == "first")
    assert [reason.code for reason in failed.reasons] == ["defect"]
    assert f"its method convert {words}" in failed.reasons[0].detail and "taking second instead" in caplog.text
    explicit = Method.of(method.registry, LAYERS["silu"], backend="first")
    with pytest.raises(NoBackendError, match="its method convert"):
        reserve(explicit)
    allowed = Method.of(method.registry, LAYERS["silu"], backend="first", on_unavailable="fallback")
    reserve(allowed)
    assert allowed.backend.name == "second" and allowed.decision.degraded


def converted(processes: Any, faulty: list[int]) -> Any:
    """What a rank takes when the first backend's conversion fails on some ranks only."""
    group = RankGroup(processes, 60.0)

    def convert(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
        return None if group.rank in faulty else expert  # type: ignore[return-value]

    method = Method.over(Faulty("first", convert), second(), group=group)
    reserve(method)
    return method.backend.name


@pytest.mark.full
def test_a_conversion_that_fails_on_one_rank_is_left_by_all(tmp_path: Path) -> None:
    assert gloo_ranks.run(converted, 2, tmp_path, [1]) == ["second", "second"]


MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1610612736 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize("error", [RuntimeError(MEMORY), MemoryError("no room")], ids=["torch", "python"])
def test_too_little_memory_is_no_fault_of_the_backend(error: Exception) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    method = Method.over(Faulty("first", compute=fail), second())
    with pytest.raises(MemoryError) as caught:
        method.check()
    asked = "1.50 GiB" if "alloc_cpu" in str(error) else "some"
    assert f"the self-check of first asked for {asked} of memory that is not free" in str(caught.value)
    assert method.backend.name == "first" and LAYERS["silu"].layer in str(caught.value)


BLAMES = {
    "the checkpoint": (
        CheckpointError("it is damaged", "Load it again"),
        "BackendDefect: .*CheckpointError: it is damaged",
    ),
    "the machine": (HostMemoryError("the memory is full"), "BackendDefect: .*HostMemoryError: the memory is full"),
    "another rank": (RankSyncError("rank 3 died"), "BackendDefect: .*RankSyncError: rank 3 died"),
    "a GPU, on a CPU": (
        RuntimeError("CUDA out of memory. Tried to allocate 5 GiB"),
        "RuntimeError: CUDA out of memory",
    ),
}


@pytest.mark.parametrize("blamed", BLAMES)
def test_a_third_partys_kernel_blames_nobody_else(blamed: str) -> None:
    error, words = BLAMES[blamed]
    assert re.search(words, rejection_of_a_kernel_that_raises(error))


def test_words_about_a_devices_memory_count_where_a_device_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("Triton Error [CUDA]: out of memory")
    assert not is_out_of_memory(error)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert is_out_of_memory(error) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    # A defect that repeats them is a defect.
    assert not is_out_of_memory(BackendDefect("its kernel raised SystemExit: CUDA out of memory"))


def test_torchs_own_error_of_the_cpu_allocator_is_recognized() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value) and asked_memory(caught.value) == "1073741824.00 GiB"
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


# --- Several ranks ----------------------------------------------------------------------------------------------------


def settled(processes: Any, faults: dict[str, list[int]], locals_: list[int], settings: dict[str, Any]) -> Any:
    """What a rank ends with whose layer has `locals_[rank]` experts of 5; `faults` names the ranks on which a backend's
    kernel is wrong, dies or runs out of memory."""
    group = RankGroup(processes, 60.0)

    def swap(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
        if group.rank in faults.get("dies", []) and expert["w13"].device.type != "meta":
            gloo_ranks.die()
        if group.rank in faults.get("memory", []):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return swap_halves(expert, layer) if group.rank in faults.get("first", []) else expert

    def swap_too(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
        return swap_halves(expert, layer) if group.rank in faults.get("second", []) else expert

    backends = [Faulty("first", swap), Faulty("second", swap_too), Faulty("third")]
    for rank, backend in enumerate(backends):
        backend.rank = rank
    found = []
    for index in range(3):
        base = LAYERS["silu"]
        layer = dataclasses.replace(
            base,
            layer=f"model.layers.{index}.mlp.experts",
            num_experts=5,
            local_experts=locals_[group.rank],
            parallel=dataclasses.replace(base.parallel, ep=len(locals_)),
        )
        method = Method.over(*backends, layer=layer, group=group, **settings)
        loaded = {name: tensor[: layer.local_experts] for name, tensor in weights(base).items()}
        method.check(loaded)
        reasons = {each.backend: each.reasons[0].detail for each in method.decision.candidates if not each.accepted}
        found.append([method.backend.name, reasons])
    return {"found": found, "runs": [backend.runs for backend in backends]}


@pytest.mark.parametrize("locals_", [[3, 2], pytest.param([2, 3], marks=pytest.mark.full)])
def test_a_fault_on_one_rank_takes_the_next_candidate_on_all(tmp_path: Path, locals_: list[int]) -> None:
    first, second = gloo_ranks.run(settled, 2, tmp_path, {"first": [1]}, locals_, {})
    assert [name for name, _ in first["found"]] == [name for name, _ in second["found"]] == ["second"] * 3
    for each in (first, second):
        assert each["runs"] == [1, 1, 0]
        for _, reasons in each["found"]:
            assert "rank 1: relative error" in reasons["first"] and "rank 0" not in reasons["first"]


@pytest.mark.full
def test_faults_of_different_candidates_on_different_ranks(tmp_path: Path) -> None:
    for each in gloo_ranks.run(
        settled, 3, tmp_path, {"first": [2], "second": [0, 1]}, [2, 2, 1], {"self_check": "all"}
    ):
        assert [name for name, _ in each["found"]] == ["third"] * 3
        assert "rank 0: " in each["found"][0][1]["second"] and "rank 1: " in each["found"][0][1]["second"]
        assert each["runs"] == [3, 3, 3]


@pytest.mark.full
def test_a_strict_check_that_fails_on_one_rank_refuses_on_all(tmp_path: Path) -> None:
    for each in gloo_ranks.run(settled, 2, tmp_path, {"first": [1]}, [3, 2], {"self_check": "strict"}):
        assert each["raised"] == "SelfCheckError"
        assert "first fails its self-check" in each["message"] and "rank 1: relative error" in each["message"]


@pytest.mark.full
def test_a_rank_that_dies_or_runs_out_of_memory_stops_the_others(tmp_path: Path) -> None:
    (tmp_path / "dies").mkdir()
    first, second = gloo_ranks.run(settled, 2, tmp_path / "dies", {"dies": [1]}, [3, 2], {})
    assert second is None
    assert first["raised"] == "RankSyncError" and "the connection to rank 1 was lost" in first["message"]
    (tmp_path / "memory").mkdir()
    first, second = gloo_ranks.run(settled, 2, tmp_path / "memory", {"memory": [0]}, [3, 2], {})
    assert first["raised"] == "OutOfMemoryError"
    assert second["raised"] == "RankSyncError" and "rank 0 gave up" in second["message"]


def test_it_never_becomes_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_oracle.errors import LifecycleError

    layer, backend = LAYERS["silu"], Faulty("good")
    method = Method.over(backend)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_card: Any = {name: SimpleNamespace(is_cuda=True) for name in weights(layer)}
    with pytest.raises(LifecycleError, match=f"{re.escape(layer.layer)}.*the capture of a CUDA graph"):
        method.check(on_card)
    assert backend.runs == 0
    method.check()  # a CPU captures nothing
    assert backend.runs == 1


# --- Ranks that come to layers in orders of their own -----------------------------------------------------------------

ORDERS = [[8, 9, 10], [8, 10, 9]]
"""As where layer 9 is in two files, and a rank's experts in the first of them."""


class Weighing(Faulty):
    """Looks at the weights of every expert, too."""

    refuses = ""

    def validate_weights(self, expert: Any, problem: Problem) -> str:
        return "too large" if problem.layer == self.refuses else ""


def check_in_order(processes: Any, orders: list[list[int]], in_own_order: bool, fault: str, faulty: list[int]) -> Any:
    """The layers that a rank has checked in its order, and their backends; with a fault one rank finds it in one layer,
    which `faulty` names."""
    group, found = RankGroup(processes, 20.0), {}
    for number in orders[group.rank]:
        layer = dataclasses.replace(LAYERS["silu"], layer=f"layers.{number}")
        backend, here = Weighing("weighing"), [group.rank, number] == faulty
        backend.refuses = layer.layer if here and fault == "weights" else ""
        if here and fault == "kernel":
            backend._convert = swap_halves
        method = Method.of(registry([backend, second()]), layer, group, self_check="all")
        method.in_own_order = in_own_order
        with rank_sync.notify_on_failure(group, f"the checks of {layer.layer}"):
            method.check()
        found[layer.layer] = method.backend.name
    rank_sync.all_gather(group, "the end", lambda: True)
    return found


def test_ranks_may_come_to_layers_in_orders_of_their_own(tmp_path: Path) -> None:
    """With expert parallelism, in a reload and where weights are quantized as they arrive."""
    found = gloo_ranks.run(check_in_order, 2, tmp_path, ORDERS, True, "", [])
    assert [[*each] for each in found] == [[f"layers.{number}" for number in order] for order in ORDERS]


def test_where_they_must_not_a_difference_is_an_error(tmp_path: Path) -> None:
    for each in gloo_ranks.run(check_in_order, 2, tmp_path, ORDERS, False, "", []):
        assert each["raised"] == "RankSyncError" and "layers.9" in each["message"] and "layers.10" in each["message"]


@pytest.mark.parametrize(("fault", "words"), [("weights", "too large"), ("kernel", "relative error")])
def test_a_later_layer_that_fails_on_one_rank_ends_all(fault: str, words: str, tmp_path: Path) -> None:
    """No rank takes another backend by itself."""
    other, failing = gloo_ranks.run(check_in_order, 2, tmp_path, ORDERS, True, fault, [1, 10])
    assert failing["raised"] == "SelfCheckError" and words in failing["message"]
    assert "layers.10" in failing["message"] and "MOE_ORACLE_DISABLE=weighing" in failing["message"]
    assert other["raised"] == "RankSyncError" and "rank 1 gave up" in other["message"] and words in other["message"]


@pytest.mark.parametrize("fault", ["weights", "kernel"])
def test_a_failure_in_the_first_layers_holds_for_the_kind_on_all_ranks(fault: str, tmp_path: Path) -> None:
    """Rank 1 finds a fault in the first layer to which it comes; rank 0 begins with another layer of the kind."""
    one, other = gloo_ranks.run(check_in_order, 2, tmp_path, [[8, 9, 10], [9, 8, 10]], True, fault, [1, 9])
    assert one == other == dict.fromkeys(["layers.8", "layers.9", "layers.10"], "second")
