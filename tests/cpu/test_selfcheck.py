"""The self-check: backends with one fault each are caught, faultless ones are not, and the next candidate is taken.

The faulty backends are the emulation with something done to its weights, its problem, its inputs or its output. They
run through vLLM's modular kernel, as any backend does when it is checked.
"""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from cases import CPU, GPT_OSS, MXFP8, MXFP8_W8A8, RELU2, SILU, problem, registry
from torch import Tensor

pytest.importorskip("vllm", reason="checked kernels run through vLLM's modular kernel")

from vllm_moe_oracle.backends.emulation import Emulation, forward
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.errors import SelfCheckError
from vllm_moe_oracle.methods import choice, selfcheck
from vllm_moe_oracle.methods.agreement import Group
from vllm_moe_oracle.oracle.oracle import decide
from vllm_moe_oracle.oracle.problem import Activation, Problem
from vllm_moe_oracle.schemes import mxfp8
from vllm_moe_oracle.settings import Settings

OAI = dataclasses.replace(GPT_OSS, interleaved=False)
SMALL: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 64}

LAYERS = {
    "silu": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU),
    "silu, 16 bit": problem(**SMALL, scheme=MXFP8, activation=SILU),
    "silu, float32": problem(**SMALL, scheme=MXFP8, activation=SILU, dtype="float32"),
    "silu, biases": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU, has_bias=True),
    "gpt-oss": problem(**SMALL, scheme=MXFP8_W8A8, activation=OAI, has_bias=True),
    "gpt-oss, 16 bit": problem(**SMALL, scheme=MXFP8, activation=OAI, has_bias=True, dtype="float16"),
    "relu2": problem(**SMALL, scheme=MXFP8_W8A8, activation=RELU2),
    "relu2, biases": problem(**SMALL, scheme=MXFP8, activation=RELU2, has_bias=True),
    "situ": problem(**SMALL, scheme=MXFP8, activation=Activation("situ", alpha=4.0, beta=25.0)),
    "swiglustep": problem(**SMALL, scheme=MXFP8, activation=Activation("swiglustep", limit=7.0)),
}
GATED = [name for name, layer in LAYERS.items() if layer.activation.gated]
BIASED = [name for name, layer in LAYERS.items() if layer.has_bias]
SOME = ["silu", "silu, 16 bit", "gpt-oss", "relu2, biases"]
PARAMETERS = [name for name in LAYERS if name.startswith("gpt-oss")]


def moe_config(layer: Problem) -> Any:
    """vLLM's description of the layer, as a model on one rank has it."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    name = {"swigluoai": "swigluoai_uninterleave", "relu2": "relu2_no_mul"}.get(layer.activation.name, "silu")
    config = FusedMoEConfig(
        num_experts=layer.num_experts,
        num_local_experts=layer.local_experts,
        num_logical_experts=layer.num_experts,
        experts_per_token=layer.top_k,
        hidden_dim=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=getattr(torch, layer.dtype),
        has_bias=layer.has_bias,
    )
    config.activation = MoEActivation(name)  # vLLM's constructor refuses experts without a gate on a CPU
    return config


def weights(layer: Problem, size: float = 0.05, biases: float = 0.0) -> dict[str, Tensor]:
    """Loaded weights; biases are zeros, as where a model has them and never trained them, unless a size is given."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name in ("w13", "w2"):
        shape = mxfp8.shapes(layer)[name]
        found[name], found[f"{name}_scale"] = mxfp8.quantise(torch.randn(shape, generator=generator) * size)
    if layer.has_bias:
        for name in ("w13_bias", "w2_bias"):
            shape = mxfp8.shapes(layer)[name]
            found[name] = (torch.randn(shape, generator=generator) * biases).to(getattr(torch, layer.dtype))
    return found


# --- Faults -----------------------------------------------------------------------------------------------------------

Convert = Callable[[dict[str, Tensor], Problem], dict[str, Tensor]]
Understand = Callable[[Problem], Problem]
Compute = Callable[..., None]


class Faulty(Emulation):
    """The emulation with a fault in one place."""

    rank = 1.0
    runs = 0

    def __init__(
        self,
        name: str,
        convert: Convert = lambda expert, layer: expert,
        understand: Understand = lambda layer: layer,
        compute: Compute = forward,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self._convert = convert
        self._understand = understand
        self._compute = compute

    def estimate(self, problem: Problem, device: Any) -> float:
        return self.rank

    def convert(self, expert: Any, problem: Problem, plan: Any) -> dict[str, Tensor]:
        return self._convert(dict(expert), problem)

    def experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        self.runs += 1

        def run(*arguments: Any) -> None:
            self._compute(tensors, self._understand(problem), *arguments)

        return builder.from_function(run)


def swap_halves(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
    half = layer.intermediate_size
    swapped = {name: torch.cat([expert[name][half:], expert[name][:half]]) for name in expert if name[:3] == "w13"}
    return expert | swapped


def swizzle(name: str) -> Convert:
    """Scales column by column: what a kernel sees that expects another order."""
    return lambda expert, layer: expert | {name: expert[name].T.reshape(expert[name].shape)}


def shift(name: str, exponents: int) -> Convert:
    return lambda expert, layer: expert | {name: (expert[name].to(torch.int16) + exponents).to(torch.uint8)}


def drop(name: str) -> Convert:
    return lambda expert, layer: {each: tensor for each, tensor in expert.items() if each != name}


def transpose_codes(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
    codes = expert["w2"].view(torch.uint8)
    return expert | {"w2": codes.T.reshape(codes.shape).view(torch.float8_e4m3fn)}


def ignore(**changes: Any) -> Understand:
    return lambda layer: dataclasses.replace(layer, activation=dataclasses.replace(layer.activation, **changes))


def other_experts(
    tensors: Any, layer: Problem, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, *more: Any
) -> None:
    forward(tensors, layer, out, x, weights, (ids + 1) % layer.num_experts, *more)


def other_weights(
    tensors: Any, layer: Problem, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, *more: Any
) -> None:
    forward(tensors, layer, out, x, weights.flip(-1), ids, *more)


def one_nan(tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
    forward(tensors, layer, out, *more)
    out[-1, -1] = torch.nan


def raises(tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
    raise RuntimeError("CUDA error: no kernel image is available")


def nothing(tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
    out.zero_()


FAULTS: list[tuple[Faulty, list[str]]] = [
    (Faulty("swapped halves", swap_halves), GATED),
    (Faulty("swizzled scales of w13", swizzle("w13_scale")), SOME),
    (Faulty("swizzled scales of w2", swizzle("w2_scale")), SOME),
    (Faulty("scales of w13 one up", shift("w13_scale", 1)), SOME),
    (Faulty("scales of w13 one down", shift("w13_scale", -1)), SOME),
    (Faulty("scales of w2 one up", shift("w2_scale", 1)), SOME),
    (Faulty("scales of w2 one down", shift("w2_scale", -1)), SOME),
    (Faulty("codes of w2 transposed", transpose_codes), SOME),
    (Faulty("no bias of w13", drop("w13_bias")), BIASED),
    (Faulty("no bias of w2", drop("w2_bias")), BIASED),
    (Faulty("alpha ignored", understand=ignore(alpha=1.0)), PARAMETERS),
    (Faulty("beta ignored", understand=ignore(beta=0.0)), PARAMETERS),
    (Faulty("limit ignored", understand=ignore(limit=None)), PARAMETERS),
    (Faulty("situ's bound of gate ignored", understand=ignore(alpha=1e9)), ["situ"]),
    (Faulty("situ's bound of up ignored", understand=ignore(beta=None)), ["situ"]),
    (Faulty("swiglustep's limit ignored", understand=ignore(limit=1e9)), ["swiglustep"]),
    (Faulty("other experts", compute=other_experts), SOME),
    (Faulty("other router weights", compute=other_weights), SOME),
    (Faulty("one NaN", compute=one_nan), SOME),
    (Faulty("zeros", compute=nothing), SOME),
]


def check(backend: Emulation, layer: Problem, loaded: dict[str, Tensor]) -> selfcheck.Result:
    return selfcheck.run(backend, layer, backend.plan(layer, CPU), loaded, moe_config(layer), current_adapter())


CASES = [(fault, name) for fault, names in FAULTS for name in names]


@pytest.mark.parametrize(("fault", "name"), CASES, ids=[f"{fault.name}-{name}" for fault, name in CASES])
def test_a_fault_is_caught(fault: Faulty, name: str) -> None:
    result = check(fault, LAYERS[name], weights(LAYERS[name]))
    print(result)
    assert not result.passed, result
    assert not result.skipped


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("size", [1e-4, 0.05, 30.0])
@pytest.mark.parametrize("biases", [0.0, 1.0])
def test_a_faultless_backend_passes_whatever_the_weights_are_like(name: str, size: float, biases: float) -> None:
    layer = LAYERS[name]
    result = check(Faulty("none"), layer, weights(layer, size, biases))
    assert result.passed and not result.skipped, result
    # The emulation differs from the reference by one rounding of the output.
    assert result.error <= 2.0**-8


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (2, 1), (3, 3), (4, 4), (16, 8), (64, 6)])
def test_any_number_of_experts(experts: int, top_k: int) -> None:
    layer = problem(**{**SMALL, "experts": experts, "top_k": top_k}, scheme=MXFP8_W8A8)
    loaded = weights(layer)
    assert check(Faulty("none"), layer, loaded).passed
    assert not check(Faulty("shifted", shift("w13_scale", 1)), layer, loaded).passed


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("zeros", "dtype"), [((0,), "bfloat16"), ((0, 1), "float16"), (tuple(range(8)), "bfloat16")])
def test_experts_of_zeros_are_no_fault(name: str, zeros: tuple[int, ...], dtype: str) -> None:
    """As pruning leaves them."""
    layer = dataclasses.replace(LAYERS[name], dtype=dtype)
    loaded = weights(layer)
    for index in zeros:
        for each in ("w13", "w2"):
            loaded[each][index].view(torch.uint8).zero_()
    result = check(Faulty("none"), layer, loaded)
    assert result.passed and not result.skipped, result


ONCE = [(fault, names[0]) for fault, names in FAULTS]


@pytest.mark.parametrize(("fault", "name"), ONCE, ids=[fault.name for fault, _ in ONCE])
def test_and_hide_none_of_another_expert(fault: Faulty, name: str) -> None:
    layer = LAYERS[name]
    loaded = weights(layer)
    for each in ("w13", "w2"):
        loaded[each][0].view(torch.uint8).zero_()
    assert not check(fault, layer, loaded).passed


def test_experts_of_very_different_sizes_are_no_fault() -> None:
    layer = dataclasses.replace(LAYERS["silu"], dtype="float16")
    loaded = weights(layer)
    loaded["w13_scale"][0] -= 12  # 4096 times smaller: inputs sized for this one would overflow in the others
    result = check(Faulty("none"), layer, loaded)
    assert result.passed, result


def test_scales_in_another_order_are_caught_even_where_all_are_alike() -> None:
    layer = LAYERS["silu"]
    loaded = weights(layer)
    for name in ("w13_scale", "w2_scale"):
        loaded[name] = torch.full_like(loaded[name], 120)
    assert not check(Faulty("swizzled", swizzle("w13_scale")), layer, loaded).passed
    assert not check(Faulty("swizzled", swizzle("w2_scale")), layer, loaded).passed


def test_the_loaded_weights_are_not_changed() -> None:
    layer = LAYERS["gpt-oss"]
    loaded = weights(layer, biases=1.0)
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    check(Faulty("swapped", swap_halves), layer, loaded)
    for name, tensor in loaded.items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


def test_nothing_stays_in_memory() -> None:
    layer = LAYERS["gpt-oss"]
    loaded = weights(layer)

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects())

    check(Faulty("none"), layer, loaded)
    before = tensors()
    check(Faulty("none"), layer, loaded)
    assert tensors() == before


# --- What follows from it ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_results_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(selfcheck, "_results", {})
    monkeypatch.setattr(choice, "_agreed", {})
    yield


SWAPPED = ("swapped", swap_halves)


class Method(SimpleNamespace):
    """What `settle` sees of a layer's method."""

    @classmethod
    def of(cls, backends: Any, layer: Problem, group: Group | None = None, **settings: Any) -> Method:
        chosen = Settings(**settings)
        decision = decide(layer, CPU, chosen, registry=backends)
        return cls(
            decision=decision,
            backend=backends[decision.backend],
            settings=chosen,
            release=current_adapter(),
            moe=moe_config(layer),
            group=group or Group(),
        )


def second(rank: float = 2.0) -> Faulty:
    made = Faulty("second")
    made.rank = rank
    return made


def test_the_next_candidate_is_taken_and_the_decision_says_why(caplog: pytest.LogCaptureFixture) -> None:
    first = Faulty(*SWAPPED)
    layer = LAYERS["silu"]
    method = Method.of(registry([first, second()]), layer)
    assert method.decision.backend == "swapped"
    with caplog.at_level("ERROR", "vllm.moe_oracle"):
        selfcheck.settle(method, weights(layer), registry=registry([first, second()]))
    assert method.backend.name == method.decision.backend == "second"
    assert "swapped" in method.decision.because and "self-check" in method.decision.because
    failed = next(each for each in method.decision.candidates if each.backend == "swapped")
    assert not failed.accepted
    assert [reason.code for reason in failed.reasons] == ["self_check"]
    assert "relative error" in failed.reasons[0].detail
    assert f"{layer.layer}: swapped fails its self-check" in caplog.text and "taking second instead" in caplog.text


def test_candidates_are_tried_until_one_passes() -> None:
    third = second(3.0)
    third.name = "third"  # type: ignore[misc]
    broken = Faulty("broken", compute=raises)
    broken.rank = 2.0
    backends = registry([Faulty(*SWAPPED), broken, third])
    method = Method.of(backends, LAYERS["silu"])
    selfcheck.settle(method, weights(LAYERS["silu"]), registry=backends)
    assert method.decision.backend == "third"
    failed = {each.backend: each.reasons[0].detail for each in method.decision.candidates if not each.accepted}
    assert failed.keys() == {"swapped", "broken"}
    assert "RuntimeError: CUDA error: no kernel image is available" in failed["broken"]


@pytest.mark.parametrize("settings", [{"self_check": "strict"}, {"backend": "swapped"}], ids=["strict", "explicit"])
def test_a_strict_check_and_an_explicit_choice_refuse_to_start(settings: dict[str, Any]) -> None:
    backends = registry([Faulty(*SWAPPED), second()])
    method = Method.of(backends, LAYERS["silu"], **settings)
    with pytest.raises(SelfCheckError) as caught:
        selfcheck.settle(method, weights(LAYERS["silu"]), registry=backends)
    for word in (LAYERS["silu"].layer, "swapped fails its self-check", "relative error", "allowed", "SELF_CHECK=off"):
        assert word in str(caught.value)
    assert method.decision.backend == "swapped"


def test_a_damaged_checkpoint_is_not_the_backends_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_oracle.errors import CheckpointError

    def damaged(*args: Any) -> None:
        raise CheckpointError("the group index is no permutation")

    backends = registry([Faulty("none"), second()])
    method = Method.of(backends, LAYERS["silu"])
    monkeypatch.setattr(selfcheck, "canonical", damaged)
    with pytest.raises(CheckpointError, match="no permutation"):
        selfcheck.settle(method, weights(LAYERS["silu"]), registry=backends)
    assert method.decision.backend == "none"


def test_weights_that_are_no_numbers_are_not_the_backends_fault() -> None:
    """No backend would pass; each one that fails would take the blame, and the next its place."""
    from vllm_moe_oracle.errors import CheckpointError

    layer = LAYERS["silu"]
    other = second()
    backends, loaded = registry([Faulty("none"), other]), weights(layer)
    loaded["w2"].view(torch.uint8)[0, 3, 5] = 0x7F  # e4m3's NaN
    method = Method.of(backends, layer)
    rule = r"the float32 reference is NaN or infinite for [1-8] of 8 tokens on the weights of local experts 0, "
    with pytest.raises(CheckpointError, match=rule) as caught:
        selfcheck.settle(method, loaded, registry=backends)
    assert caught.value.where == layer.layer and caught.value.remedy
    assert method.decision.backend == "none" and other.runs == 0


def test_weights_too_small_for_float16_s_inputs_are_not_said_to_be_no_numbers() -> None:
    from vllm_moe_oracle.errors import CheckpointError

    layer = dataclasses.replace(LAYERS["silu, 16 bit"], dtype="float16")
    backends, loaded = registry([Faulty("none"), second()]), weights(layer)
    for name in ("w13_scale", "w2_scale"):
        loaded[name] = torch.full_like(loaded[name], 127 - 30)
    with pytest.raises(CheckpointError, match="or so small or large that float16 does not reach as far"):
        selfcheck.settle(Method.of(backends, layer), loaded, registry=backends)


def test_an_override_is_an_explicit_choice() -> None:
    from vllm_moe_oracle.oracle.overrides import parse

    backends = registry([Faulty(*SWAPPED), second()])
    method = Method.of(backends, LAYERS["silu"], overrides=(parse("experts", "swapped", "test"),))
    with pytest.raises(SelfCheckError):
        selfcheck.settle(method, weights(LAYERS["silu"]), registry=backends)


def test_an_explicit_choice_that_is_right_starts() -> None:
    backends = registry([Faulty(*SWAPPED), second()])
    method = Method.of(backends, LAYERS["silu"], backend="second")
    selfcheck.settle(method, weights(LAYERS["silu"]), registry=backends)
    assert method.decision.why == "user"


def test_when_nothing_is_left_the_layer_is_refused() -> None:
    backends = registry([Faulty(*SWAPPED), Faulty("broken", compute=raises)])
    method = Method.of(backends, LAYERS["silu"])
    with pytest.raises(SelfCheckError, match="fails its self-check"):
        selfcheck.settle(method, weights(LAYERS["silu"]), registry=backends)


def test_a_reload_cannot_take_another_candidate() -> None:
    backends = registry([Faulty(*SWAPPED), second()])
    method = Method.of(backends, LAYERS["silu"])
    with pytest.raises(SelfCheckError):
        selfcheck.settle(method, weights(LAYERS["silu"]), fixed=True, registry=backends)
    assert method.backend.name == "swapped"


@pytest.mark.parametrize(("mode", "runs"), [("off", 0), ("group", 1), ("all", 3), ("strict", 1)])
def test_how_often_layers_of_a_group_are_checked(mode: str, runs: int) -> None:
    backend = Faulty("good")
    backends = registry([backend])
    for index in range(3):
        layer = dataclasses.replace(LAYERS["silu"], layer=f"model.layers.{index}.mlp.experts")
        selfcheck.settle(Method.of(backends, layer, self_check=mode), weights(layer), registry=backends)
    assert backend.runs == runs


def test_a_failure_is_remembered_for_the_group_and_not_for_another() -> None:
    first, other = Faulty(*SWAPPED), second()
    backends = registry([first, other])
    for index in range(3):
        layer = dataclasses.replace(LAYERS["silu"], layer=f"model.layers.{index}.mlp.experts")
        method = Method.of(backends, layer)
        selfcheck.settle(method, weights(layer), registry=backends)
        assert method.decision.backend == "second"
    assert (first.runs, other.runs) == (1, 1)
    another = LAYERS["silu, 16 bit"]
    selfcheck.settle(Method.of(backends, another), weights(another), registry=backends)
    assert (first.runs, other.runs) == (2, 2)


# --- Several ranks ----------------------------------------------------------------------------------------------------


def settled(processes: Any, faults: dict[str, list[int]], locals_: list[int], settings: dict[str, Any]) -> Any:
    """What a rank ends with whose layer has `locals_[rank]` experts of 5; `faults` names the ranks on which a backend's
    kernel is wrong, dies or runs out of memory."""
    group = Group(processes, 60.0)

    def swap(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
        if group.rank in faults.get("dies", []) and expert["w13"].device.type != "meta":
            ranks.die()
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
        method = Method.of(registry(backends), layer, group, **settings)
        loaded = {name: tensor[: layer.local_experts] for name, tensor in weights(base).items()}
        selfcheck.settle(method, loaded, registry=registry(backends))
        reasons = {each.backend: each.reasons[0].detail for each in method.decision.candidates if not each.accepted}
        found.append([method.backend.name, reasons])
    return {"found": found, "runs": [backend.runs for backend in backends]}


@pytest.mark.parametrize("locals_", [[3, 2], [2, 3]])
def test_a_fault_on_one_rank_takes_the_next_candidate_on_all(tmp_path: Path, locals_: list[int]) -> None:
    first, second = ranks.run(settled, 2, tmp_path, {"first": [1]}, locals_, {})
    assert [name for name, _ in first["found"]] == [name for name, _ in second["found"]] == ["second"] * 3
    for each in (first, second):
        assert each["runs"] == [1, 1, 0]
        for _, reasons in each["found"]:
            assert "rank 1: relative error" in reasons["first"] and "rank 0" not in reasons["first"]


def test_faults_of_different_candidates_on_different_ranks(tmp_path: Path) -> None:
    for each in ranks.run(settled, 3, tmp_path, {"first": [2], "second": [0, 1]}, [2, 2, 1], {"self_check": "all"}):
        assert [name for name, _ in each["found"]] == ["third"] * 3
        assert "rank 0: " in each["found"][0][1]["second"] and "rank 1: " in each["found"][0][1]["second"]
        assert each["runs"] == [3, 3, 3]


def test_a_strict_check_that_fails_on_one_rank_refuses_on_all(tmp_path: Path) -> None:
    for each in ranks.run(settled, 2, tmp_path, {"first": [1]}, [3, 2], {"self_check": "strict"}):
        assert each["raised"] == "SelfCheckError"
        assert "first fails its self-check" in each["message"] and "rank 1: relative error" in each["message"]


def test_a_rank_that_dies_or_runs_out_of_memory_in_its_check_is_an_error_on_the_other(tmp_path: Path) -> None:
    (tmp_path / "dies").mkdir()
    first, second = ranks.run(settled, 2, tmp_path / "dies", {"dies": [1]}, [3, 2], {})
    assert second is None
    assert first["raised"] == "AgreementError" and "the connection to rank 1 was lost" in first["message"]
    (tmp_path / "memory").mkdir()
    first, second = ranks.run(settled, 2, tmp_path / "memory", {"memory": [0]}, [3, 2], {})
    assert first["raised"] == "OutOfMemoryError"
    assert second["raised"] == "AgreementError" and "rank 0 gave up" in second["message"]


def test_it_never_becomes_part_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_oracle.errors import LifecycleError

    layer, backend = LAYERS["silu"], Faulty("good")
    method = Method.of(registry([backend]), layer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    on_card: Any = {name: SimpleNamespace(is_cuda=True) for name in weights(layer)}
    with pytest.raises(LifecycleError, match=f"{re.escape(layer.layer)}.*CUDA graph was captured"):
        selfcheck.settle(method, on_card, registry=registry([backend]))
    assert backend.runs == 0
    selfcheck.settle(method, weights(layer), registry=registry([backend]))  # a CPU captures nothing
    assert backend.runs == 1


def test_off_checks_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    backends = registry([Faulty(*SWAPPED)])
    method = Method.of(backends, LAYERS["silu"], self_check="off")
    selfcheck.settle(method, weights(LAYERS["silu"]), registry=backends)
    assert method.decision.backend == "swapped" and not caplog.text


def test_the_log_says_what_was_found_and_what_it_took() -> None:
    said = str(check(Emulation(), LAYERS["silu"], weights(LAYERS["silu"])))
    assert re.fullmatch(r"relative error \d\.\d\de-\d\d, allowed \d\.\d\de-\d\d; took \d+\.\d\d s", said)


def test_the_tolerance_follows_from_the_formats() -> None:
    backend = Emulation()
    limits = {name: selfcheck.tolerance(backend, layer) for name, layer in LAYERS.items()}
    assert limits["silu, float32"] < 2e-4 < limits["silu, 16 bit"] < 0.03 < limits["silu"] < 0.1
