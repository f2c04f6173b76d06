"""Emulation against a float64 loop over tokens and experts; and faults that the comparison must notice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.lib import reference
from tests.lib.cases import CPU, H200, MXFP8, MXFP8_W8A8, problem
from tests.lib.tolerances import Layer, moe_bound, outside
from vllm_moe_oracle.backends.emulation import BACKEND, _tokens_by_expert, forward
from vllm_moe_oracle.core.decision import Accepted, ShardPlan
from vllm_moe_oracle.core.problem import Activation, Problem, Routing

H, I, E, M, K = 96, 64, 4, 7, 2  # noqa: E741 - the usual letters

ACTIVATIONS = {
    "silu": Activation("silu"),
    "silu with limit": Activation("silu", limit=2.0),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0),
    "swigluoai by default": Activation("swigluoai", limit=7.0),
    "swigluoai with other numbers": Activation("swigluoai", alpha=1.25, beta=0.5, limit=2.0),
    "situ": Activation("situ", alpha=1.5, beta=2.5),
    "situ without a bound of up": Activation("situ", alpha=1.5),
    "swiglustep": Activation("swiglustep", limit=0.5),
    "relu2, not gated": Activation("relu2", gated=False),
    "silu, not gated": Activation("silu", gated=False),
    "gelu, not gated": Activation("gelu", gated=False),
    "gelu_tanh, not gated": Activation("gelu_tanh", gated=False),
}
SWIGLU = ACTIVATIONS["swigluoai with other numbers"]


def layer_of(**changes: Any) -> Problem:
    fields: dict[str, Any] = {"experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I} | changes
    return problem(**fields)


@dataclasses.dataclass
class Case:
    """A layer with random weights, and routed tokens."""

    problem: Problem
    tensors: dict[str, Tensor]
    x: Tensor
    weights: Tensor
    ids: Tensor
    expert_map: list[int] | None = None

    @property
    def exact(self) -> Layer:
        """The same layer, decoded by the reference."""

        def numbers(name: str) -> Any:
            codes, scales = self.tensors[name].view(torch.uint8).numpy(), self.tensors[f"{name}_scale"].numpy()
            return reference.dequantize_mxfp8(codes, scales)

        def bias(name: str) -> Any:
            return self.tensors[name].double().numpy() if name in self.tensors else None

        act = self.problem.activation
        name = act.name if act.gated else f"{act.name}_no_mul"
        return Layer(
            numbers("w13"), numbers("w2"), name, act.alpha, act.beta, act.limit, bias("w13_bias"), bias("w2_bias")
        )

    def run(self, **changes: Any) -> Tensor:
        """The emulation's output, `[M, H]`; `changes` replace fields of the case, to inject a fault."""
        case = dataclasses.replace(self, **changes)
        out = torch.full(case.x.shape, torch.nan, dtype=case.x.dtype)
        mapped = None if case.expert_map is None else torch.tensor(case.expert_map, dtype=torch.int32)
        forward(case.tensors, case.problem, out, case.x, case.weights, case.ids, mapped)
        return out

    def verdict(self, out: Tensor) -> str:
        """What is wrong with an output; empty when it is right."""
        options: dict[str, Any] = {"expert_map": self.expert_map}
        quantize = self.problem.scheme.activations == "mxfp8"
        inputs = (self.x.double().numpy(), self.ids.numpy(), self.weights.double().numpy())
        x, ids, weights = inputs
        on_input = self.problem.routing.apply_router_weight_on_input
        exact = self.exact
        expected = reference.moe(
            x, exact.w13, exact.w2, ids, weights, activation=exact.activation, alpha=exact.alpha, beta=exact.beta,
            limit=exact.limit, b13=exact.b13, b2=exact.b2, router_weight_on_input=on_input,
            quantize_activations="ceil" if quantize else None, **options,
        )  # fmt: skip
        same, bound = moe_bound(
            x,
            exact,
            ids,
            weights,
            dtype=self.problem.dtype,
            apply_router_weight_on_input=on_input,
            quantize=quantize,
            **options,
        )
        # The bound was made for this very computation: its own walk through the layer ends where the reference does.
        np.testing.assert_allclose(same, expected, rtol=1e-9, atol=1e-9)
        return outside(out.double().numpy(), expected, bound)


def case(layer: Problem, seed: int = 0, tokens: int = M) -> Case:
    """Weights and tokens such that first products are of the order of 3: limits of 2 and 7 are reached."""
    rng = np.random.default_rng(seed)
    local, dtype = layer.local_experts, getattr(torch, layer.dtype)
    tensors: dict[str, Tensor] = {}
    for name, rows, width in (("w13", layer.w13_rows, H), ("w2", H, I)):
        spread = np.exp2(rng.integers(-2, 3, (local, rows, width // 32))).repeat(32, axis=-1)
        weights = rng.standard_normal((local, rows, width)) * spread / np.sqrt(width)
        codes, scales = reference.quantize_mxfp8(weights)
        tensors[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.from_numpy(scales)
        if layer.has_bias:
            tensors[f"{name}_bias"] = torch.from_numpy(rng.standard_normal((local, rows))).to(dtype)
    ids = np.argsort(rng.random((tokens, layer.num_experts)), axis=1)[:, : layer.top_k]
    return Case(
        layer,
        tensors,
        torch.from_numpy(rng.standard_normal((tokens, H)) * 1.5).to(dtype),
        torch.from_numpy(rng.uniform(0.1, 1.0, (tokens, layer.top_k)).astype(np.float32)),
        torch.from_numpy(ids.astype(np.int64)),
    )


# --- Right -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [MXFP8, MXFP8_W8A8], ids=["16bit", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_in_every_precision(name: str, bias: bool, dtype: str, scheme: Any) -> None:
    layer = layer_of(activation=ACTIVATIONS[name], has_bias=bias, dtype=dtype, scheme=scheme)
    assert BACKEND.check(layer, H200) == Accepted()
    made = case(layer)
    assert made.verdict(made.run()) == ""


@pytest.mark.parametrize("scheme", [MXFP8, MXFP8_W8A8], ids=["16bit", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_the_routers_weight_on_the_input(top_k: int, dtype: str, scheme: Any) -> None:
    layer = layer_of(
        routing=Routing(apply_router_weight_on_input=True),
        has_bias=True,
        dtype=dtype,
        scheme=scheme,
        top_k=top_k,
        activation=SWIGLU,
    )
    made = case(layer)
    assert made.verdict(made.run()) == ""


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_any_number_of_tokens(tokens: int) -> None:
    made = case(layer_of(), tokens=tokens)
    assert made.verdict(made.run()) == ""


def test_no_tokens() -> None:
    for scheme in (MXFP8, MXFP8_W8A8):
        made = case(layer_of(scheme=scheme, has_bias=True), tokens=0)
        assert made.run().shape == (0, H)


def test_slots_without_an_expert_add_nothing() -> None:
    made = case(layer_of(has_bias=True))
    made.ids[0, 1] = made.ids[3, 0] = -1
    made.ids[5] = -1
    out = made.run()
    assert made.verdict(out) == ""
    assert out[5].tolist() == [0.0] * H


def test_experts_of_other_ranks_add_nothing_and_ranks_sum_to_the_whole() -> None:
    whole = case(layer_of(experts=6, dtype="float32", has_bias=True, top_k=3))
    parts = []
    # Ranks need not hold neighbors, or keep their order.
    for mine in ([4, 0, 3], [5, 1, 2]):
        local = {name: tensor[mine] for name, tensor in whole.tensors.items()}
        expert_map = [mine.index(expert) if expert in mine else -1 for expert in range(6)]
        layer = dataclasses.replace(whole.problem, local_experts=3)
        part = dataclasses.replace(whole, problem=layer, tensors=local, expert_map=expert_map)
        part.ids[0, 0] = -1
        out = part.run()
        assert part.verdict(out) == ""
        parts.append(out)
    assert whole.verdict(parts[0] + parts[1]) == ""


def test_the_same_expert_twice_counts_twice() -> None:
    made = case(layer_of(dtype="float32"))
    made.ids[:, 1] = made.ids[:, 0]
    assert made.verdict(made.run()) == ""


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_types_of_ids_and_output_may_differ_from_the_models(integer: torch.dtype, out_dtype: torch.dtype) -> None:
    made = case(layer_of())
    out = torch.full((M, H), torch.nan, dtype=out_dtype)
    forward(made.tensors, made.problem, out, made.x, made.weights, made.ids.to(integer))
    assert made.verdict(out) == ""


@pytest.mark.parametrize("bad", [-2, E, 1000])
def test_an_invalid_expert_id_is_an_error_with_the_valid_range(bad: int) -> None:
    made = case(layer_of())
    made.ids[2, 1] = bad
    with pytest.raises(ValueError, match=rf"{made.problem.layer}: expert ids span .*{bad}.*; valid are -1 to {E - 1}"):
        made.run()


def test_nothing_but_the_output_is_changed() -> None:
    made = case(layer_of(has_bias=True, scheme=MXFP8_W8A8, routing=Routing(apply_router_weight_on_input=True)))
    held = [*made.tensors.values(), made.x, made.weights, made.ids]
    before = [tensor.clone() for tensor in held]
    made.run()
    for tensor, copy in zip(held, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


def test_the_same_call_gives_the_same_bits() -> None:
    made = case(layer_of(scheme=MXFP8_W8A8))
    assert torch.equal(made.run(), made.run())


# --- Wrong: each fault must be outside the bound ----------------------------------------------------------------------

Fault = Callable[[Case], dict[str, Any]]


def with_tensors(made: Case, **tensors: Tensor | None) -> dict[str, Any]:
    kept = {name: tensor for name, tensor in (made.tensors | tensors).items() if tensor is not None}
    return {"tensors": kept}


def with_activation(made: Case, **changes: Any) -> dict[str, Any]:
    activation = dataclasses.replace(made.problem.activation, **changes)
    return {"problem": dataclasses.replace(made.problem, activation=activation)}


def halves_swapped(made: Case) -> dict[str, Any]:
    return with_tensors(
        made, **{name: made.tensors[name].view(torch.uint8).roll(I, 1).view(made.tensors[name].dtype)
                 for name in ("w13", "w13_scale")}
    )  # fmt: skip


def scales_raised(name: str) -> Fault:
    return lambda made: with_tensors(made, **{name: made.tensors[name] + 1})


def scale_raised_once(name: str) -> Fault:
    def fault(made: Case) -> dict[str, Any]:
        scales = made.tensors[name].clone()
        scales[int(made.ids[0, 0]), 5, 1] += 1
        return with_tensors(made, **{name: scales})

    return fault


FAULTS: dict[str, Fault] = {
    "gate and up swapped": halves_swapped,
    "first bias dropped": lambda made: with_tensors(made, w13_bias=None),
    "second bias dropped": lambda made: with_tensors(made, w2_bias=None),
    "biases of gate and up swapped": lambda made: with_tensors(made, w13_bias=made.tensors["w13_bias"].roll(I, 1)),
    "first scales one exponent off": scales_raised("w13_scale"),
    "second scales one exponent off": scales_raised("w2_scale"),
    "scales in reverse order": lambda made: with_tensors(made, w13_scale=made.tensors["w13_scale"].flip(-1)),
    "experts in reverse order": lambda made: with_tensors(
        made, **{name: tensor.view(torch.uint8).flip(0).view(tensor.dtype) for name, tensor in made.tensors.items()}
    ),
    "alpha of gpt-oss": lambda made: with_activation(made, alpha=1.702),
    "alpha dropped": lambda made: with_activation(made, name="silu", alpha=None),
    "beta of gpt-oss": lambda made: with_activation(made, beta=1.0),
    "limit dropped": lambda made: with_activation(made, limit=None),
    "limit of gpt-oss": lambda made: with_activation(made, limit=7.0),
    "weights of a token's experts swapped": lambda made: {"weights": made.weights.flip(1)},
    "weight on the input": lambda made: {
        "problem": dataclasses.replace(made.problem, routing=Routing(apply_router_weight_on_input=True))
    },
    "ids off by one": lambda made: {"ids": (made.ids + 1) % E},
}


@pytest.mark.parametrize("scheme", [MXFP8, MXFP8_W8A8], ids=["16bit", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, dtype: str, scheme: Any) -> None:
    made = case(layer_of(activation=SWIGLU, has_bias=True, dtype=dtype, scheme=scheme))
    assert made.verdict(made.run()) == ""
    assert "outside" in made.verdict(made.run(**FAULTS[fault](made)))


@pytest.mark.parametrize("name", ["w13_scale", "w2_scale"])
def test_one_scale_of_one_block_one_exponent_off_is_noticed(name: str) -> None:
    made = case(layer_of(dtype="float32"))
    assert "outside" in made.verdict(made.run(**scale_raised_once(name)(made)))


def test_activations_that_are_quantized_against_the_scheme_are_noticed() -> None:
    for dtype in ("bfloat16", "float32"):
        for right, wrong in ((MXFP8, MXFP8_W8A8), (MXFP8_W8A8, MXFP8)):
            made = case(layer_of(dtype=dtype, scheme=right))
            fault = {"problem": dataclasses.replace(made.problem, scheme=wrong)}
            assert "outside" in made.verdict(made.run(**fault))


def test_a_nan_is_noticed() -> None:
    made = case(layer_of())
    out = made.run()
    out[3, 4] = torch.nan
    assert "1 of" in made.verdict(out)


# --- Memory ----------------------------------------------------------------------------------------------------------


def peak_of(call: Callable[[], None]) -> int:
    """Most bytes of torch's CPU allocator that the call held at once, beyond what was there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    assert watched.profiler is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in watched.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    held = peak = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        held += size
        peak = max(peak, held)
    return peak


def memory_case(experts: int, scheme: Any, hidden: int, inner: int, tokens: int) -> tuple[Problem, dict[str, Tensor]]:
    layer = problem(experts=experts, top_k=1, hidden_size=hidden, intermediate_size=inner, scheme=scheme)
    generator = torch.Generator().manual_seed(0)
    shapes = {"w13": (experts, 2 * inner, hidden), "w2": (experts, hidden, inner)}
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, generator=generator)
        tensors[name] = codes.view(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.full((*shape[:-1], shape[-1] // 32), 110, dtype=torch.uint8)
    tensors["x"] = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    return layer, tensors


@pytest.mark.parametrize("scheme", [MXFP8, MXFP8_W8A8], ids=["16bit", "mxfp8"])
@pytest.mark.parametrize(("hidden", "inner"), [(512, 512), (1024, 128)])
def test_one_matrix_of_one_expert_is_dequantized_at_a_time(hidden: int, inner: int, scheme: Any) -> None:
    tokens = 4
    peaks = {}
    for experts in (4, 64):
        layer, tensors = memory_case(experts, scheme, hidden, inner, tokens)
        x = tensors.pop("x")
        out, weights = torch.empty_like(x), torch.ones(tokens, 1)
        for name, ids in (("first", [0, 1, 2, 3]), ("last", [experts - 1 - i for i in range(tokens)])):
            topk_ids = torch.tensor(ids)[:, None]

            def call(
                layer: Problem = layer, tensors: dict[str, Tensor] = tensors, x: Tensor = x, ids: Tensor = topk_ids
            ) -> None:
                forward(tensors, layer, out, x, weights, ids)  # noqa: B023 - called before the next round

            call()  # what is made once, such as lazily loaded modules, does not count
            peaks[experts, name] = peak_of(call)
    # The larger matrix in float32, and one float32 scale for 32 of its elements.
    largest = 4 * max(2 * inner * hidden, hidden * inner)
    matrix = largest + largest // 32
    # Per token, float32: 1 sum, its inputs (3: gathered, float32, quantized), first product and what the activation
    # makes of it (6 of its size), second product (1); quantizing keeps up to 5 more copies of its input.
    per_token = 4 * ((1 + 3 + 1 + 5) * hidden + (6 + 5) * 2 * inner)
    small = 64 * 1024  # ids, masks, indices: 8 bytes a slot, in the allocator's smallest pieces
    # Every expert has one token; so many experts cannot matter, and a second matrix would not fit under the bound.
    assert len(set(peaks.values())) == 1, peaks
    peak = peaks[64, "last"]
    assert largest < peak <= matrix + tokens * per_token + small
    assert matrix + tokens * per_token + small < largest + 4 * hidden * inner


# --- As a backend ----------------------------------------------------------------------------------------------------


class Builder:
    """Stands in for vLLM's side."""

    def from_function(self, function: Any) -> Any:
        return function

    def stock(self, class_name: str, **kwargs: Any) -> Any:
        raise AssertionError(class_name)


def test_the_backend_runs_what_is_in_its_tensors_at_the_time_of_the_call() -> None:
    made, other = case(layer_of()), case(layer_of(), seed=1)
    plan = BACKEND.plan(made.problem, CPU)
    assert plan == ShardPlan(H, I)
    kernel = {name: tensor.clone() for name, tensor in made.tensors.items()}
    experts = BACKEND.build_experts(kernel, made.problem, plan, Builder())
    out = torch.full((M, H), torch.nan, dtype=torch.bfloat16)
    experts(out, made.x, made.weights, made.ids, None)
    assert torch.equal(out, made.run())
    for name, tensor in kernel.items():  # a reload refills in place
        tensor.copy_(other.tensors[name])
    experts(out, made.x, made.weights, made.ids, None)
    assert torch.equal(out, made.run(tensors=other.tensors)) and made.verdict(out) != ""


def test_conversion_changes_nothing_and_allocates_nothing() -> None:
    made = case(layer_of(has_bias=True))
    expert = {name: tensor[1] for name, tensor in made.tensors.items()}
    converted = BACKEND.convert(expert, made.problem, ShardPlan(H, I))
    assert set(converted) == set(expert) and all(converted[name] is expert[name] for name in expert)


def test_numerics_say_what_happens_to_activations() -> None:
    left, quantized = BACKEND.numerics(layer_of()), BACKEND.numerics(layer_of(scheme=MXFP8_W8A8))
    assert "model's dtype" in left.activations and "MXFP8" in quantized.activations
    assert BACKEND.activations(layer_of()) == "16bit" and BACKEND.activations(layer_of(scheme=MXFP8_W8A8)) == "mxfp8"
    assert left.accumulate == "float32"


def test_non_gated_experts_on_a_cpu_are_refused_as_vllm_refuses_them() -> None:
    layer = layer_of(activation=Activation("relu2", gated=False))
    assert [reason.code for reason in BACKEND.check(layer, CPU).reasons] == ["vllm.ungated"]
    assert BACKEND.check(layer, H200) == Accepted()


def test_ids_beyond_the_local_experts_are_refused() -> None:
    """Their tokens would silently get nothing: the expert map is missing."""
    ids, weights = torch.tensor([[0, 3], [5, -1]]), torch.ones(2, 2)
    with pytest.raises(ValueError, match="1 of 4 expert ids are beyond the 4 local experts"):
        list(_tokens_by_expert(ids, weights, 4))
    found = {index: token.tolist() for index, token, *_ in _tokens_by_expert(ids, weights, 6)}
    assert found == {0: [0], 3: [0], 5: [1]}
