"""Experts that move while serving: a layer's tensors as vLLM lists and moves them, in the layout of every backend that
says it can; and what backends say to LoRA, batched activations, batch invariance and the router's weight on the input.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lib.cases import B200, CPU, H200, problem
from vllm_moe_oracle import schemes
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.compat import weight_storage
from vllm_moe_oracle.core.problem import MX_BLOCK, Activation, Device, Parallel, Problem, Routing, Scheme
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import DEFAULT_PACKAGES
from vllm_moe_oracle.schemes import mxfp4, mxfp8

EXPERTS = 6
DEVICES = (CPU, H200, B200)
SCHEMES = {
    "mxfp8": Scheme("mxfp8", 8, MX_BLOCK, "modelopt"),
    "mxfp4": Scheme("mxfp4", 4, MX_BLOCK, "modelopt"),
    "wna16": Scheme("wna16", 4, 128, "compressed-tensors"),
}
BACKENDS = [
    pytest.param(backend.name, scheme, id=f"{backend.name}-{scheme}")
    for backend in default_registry()
    for scheme in backend.schemes
    if backend.capabilities.eplb
]


def layer(scheme: str, bias: bool, **changes: Any) -> Problem:
    return problem(
        scheme=SCHEMES[scheme],
        experts=EXPERTS,
        top_k=2,
        hidden_size=256,
        intermediate_size=128,
        has_bias=bias,
        activation=Activation("silu"),
        eplb=True,
        **changes,
    )


def canonical(case: Problem) -> dict[str, Tensor]:
    """Random canonical tensors, `[EXPERTS, ...]` each."""
    generator = torch.Generator().manual_seed(0)
    quantize = {"mxfp8": mxfp8.quantize, "mxfp4": mxfp4.quantize}
    found: dict[str, Tensor] = {}
    for name, (rows, columns) in {"w13": (case.w13_rows, case.hidden_size), "w2": (case.hidden_size, 128)}.items():
        weights = torch.randn(EXPERTS, rows, columns, generator=generator)
        if case.scheme.name == "wna16":
            found[name] = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator, dtype=torch.uint8)
            scales = torch.rand(EXPERTS, rows, columns // 128, generator=generator) + 0.5
            found[f"{name}_scale"] = scales.to(torch.bfloat16)
        else:
            found[name], found[f"{name}_scale"] = quantize[case.scheme.name](weights)
        if case.scheme.act_order != "none":
            orders = [torch.randperm(columns, generator=generator, dtype=torch.int32) for _ in range(EXPERTS)]
            found[f"{name}_order"] = torch.stack(orders)
        if case.has_bias:
            found[f"{name}_bias"] = torch.randn(EXPERTS, rows, generator=generator).to(torch.bfloat16)
    return found


def machine(backend: Backend, case: Problem) -> Device | None:
    """A machine on which the backend takes the layer; None when there is none."""
    packages = {**DEFAULT_PACKAGES["cuda"], "triton": "3.6.0"}
    for device in DEVICES:
        there = dataclasses.replace(device, packages=packages)
        if not backend.check(case, there).reasons:
            return there
    return None


def converted(backend: Backend, case: Problem, device: Device, raw: dict[str, Tensor]) -> nn.Module:
    """A layer with the backend's kernel tensors, converted in place as the method does it."""
    made = nn.Module()
    plan = backend.plan(case, device)

    def convert(expert: Any) -> dict[str, Tensor]:
        return backend.convert(expert, case, plan)

    kinds = weight_storage.converted_specs(convert, raw)
    for name, tensor in raw.items():
        parameter = nn.Parameter(tensor.clone(), requires_grad=False)
        if name in kinds:
            weight_storage.reserve_expert_buffers(parameter, kinds[name])
            parameter.data.copy_(tensor)
        made.register_parameter(name, parameter)
    weight_storage.convert_in_place(made, {name: name for name in raw}, convert)
    return made


def expert_weights(made: nn.Module) -> list[Tensor]:
    """vLLM's own list of what it moves, `[EXPERTS, bytes]` each."""
    routed = pytest.importorskip("vllm.model_executor.layers.fused_moe.routed_experts", reason="vLLM's layer")
    made.local_num_experts = EXPERTS  # type: ignore[assignment]
    return list(routed.RoutedExperts.get_expert_weights(made))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("name", "scheme"), BACKENDS)
def test_moved_experts_are_converted_experts_that_were_moved(name: str, scheme: str, bias: bool) -> None:
    backend, case = default_registry()[name], layer(scheme, bias)
    spread = dataclasses.replace(case, local_experts=3, parallel=dataclasses.replace(case.parallel, ep=2))
    batched = dataclasses.replace(case, parallel=dataclasses.replace(case.parallel, format="batched"))
    device = next(filter(None, (machine(backend, each) for each in (case, spread, batched))), None)
    if device is None and backend.capabilities.act_orders != ("none",):
        case = dataclasses.replace(case, scheme=dataclasses.replace(case.scheme, act_order="group"))
        device = machine(backend, case)
    if device is None:
        assert bias and not backend.capabilities.bias, f"{name} takes no such layer anywhere"
        return
    raw = canonical(case)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    made = converted(backend, case, device, raw)
    for row in expert_weights(made):
        row.copy_(row.view(torch.uint8)[order].view(row.dtype) if row.dtype.itemsize == 1 else row[order])
    expected = converted(backend, case, device, {key: _moved(each, order) for key, each in raw.items()})
    found = dict(made.named_parameters())
    assert found.keys() == dict(expected.named_parameters()).keys()
    for key, tensor in expected.named_parameters():
        assert torch.equal(_bytes(found[key]), _bytes(tensor)), key


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _moved(tensor: Tensor, order: Tensor) -> Tensor:
    return tensor.view(torch.uint8)[order].view(tensor.dtype) if tensor.dtype.itemsize == 1 else tensor[order]


def test_padded_slots_are_closed_up() -> None:
    raw = {"w13": torch.randint(0, 256, (EXPERTS, 5, 8), dtype=torch.uint8)}

    def shorten(expert: Any) -> dict[str, Tensor]:
        return {"w13": expert["w13"][:3].flip(0)}

    made = nn.Module()
    made.w13 = nn.Parameter(raw["w13"].clone(), requires_grad=False)
    weight_storage.convert_in_place(made, {"w13": "w13"}, shorten)
    assert torch.equal(made.w13, raw["w13"][:, :3].flip(1))
    assert made.w13.is_contiguous()


# --- What is asked of a backend besides -------------------------------------------------------------------------------

ASKED: dict[str, dict[str, Any]] = {
    "lora": {"lora": True},
    "eplb": {"eplb": True},
    "batch_invariant": {"batch_invariant": True},
    "format": {"format": "batched"},
    "apply_router_weight_on_input": {"routing": Routing("llama4", apply_router_weight_on_input=True), "top_k": 1},
}
EVERY = [pytest.param(backend, id=backend.name) for backend in default_registry()]


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("asked", ASKED)
def test_what_a_backend_cannot_do_is_a_reason(backend: Backend, asked: str) -> None:
    limits = backend.capabilities
    able = {
        "lora": limits.lora,
        "eplb": limits.eplb,
        "batch_invariant": limits.batch_invariant,
        "format": "batched" in limits.formats,
        "apply_router_weight_on_input": limits.apply_router_weight_on_input,
    }[asked]
    case = problem(scheme=SCHEMES[backend.schemes[0]], **ASKED[asked])
    found = [reason for device in DEVICES for reason in backend.check(case, device).reasons if reason.code == asked]
    assert bool(found) != able
    assert all(reason.detail for reason in found)


def test_one_weight_cannot_multiply_the_input_of_several_experts() -> None:
    case = problem(routing=Routing("default", apply_router_weight_on_input=True), top_k=2)
    for backend in default_registry().for_scheme("mxfp8"):
        codes = {reason.code for reason in backend.check(case, DEVICES[0]).reasons}
        assert ("apply_router_weight_on_input.top_k" in codes) == backend.capabilities.apply_router_weight_on_input


@pytest.mark.parametrize("backend", EVERY)
def test_lora_is_offered_where_vllms_class_has_it(backend: Backend) -> None:
    pytest.importorskip("vllm", reason="its classes are asked")
    from vllm_moe_oracle.compat import current_adapter

    if not backend.stock_class:  # over a function; see tests/compat/test_lora_experts.py
        takes_adapters = backend.name in ("emulation", "hopper_mxfp4", "hopper_mxfp8", "hopper_wna16")
        assert backend.capabilities.lora == takes_adapters
        return
    try:
        found = current_adapter().stock_class(backend.stock_class)
    except ImportError:
        assert not backend.capabilities.lora or "Humming" in backend.stock_class
        return
    assert not backend.capabilities.lora or found.supports_lora()


def test_lora_is_refused_on_padded_sizes() -> None:
    backend = default_registry()["marlin_mxfp8"]
    reasons = backend.check(problem(lora=True, intermediate_size=96), H200).reasons
    assert [reason.code for reason in reasons] == ["lora.padding"]
    assert "intermediate size 128; adapters have 2048 and 96" in reasons[0].detail
    assert not backend.check(problem(lora=True), H200).reasons


@pytest.mark.parametrize(
    "backend", [backend for backend in default_registry() if backend.capabilities.lora], ids=lambda each: each.name
)
def test_what_keeps_adapters_from_every_backend_that_takes_them(backend: Backend) -> None:
    def codes(device: Device = H200, **changes: Any) -> set[str]:
        case = problem(scheme=SCHEMES[backend.schemes[0]], lora=True, **changes)
        return {reason.code for reason in backend.check(case, device).reasons}

    plain = codes()
    assert not any(code.startswith("lora") for code in plain)
    assert "lora.device" in codes(CPU)
    assert codes(format="batched") - plain >= {"lora.format"}
    assert codes(ep=2, eplb=True) - plain == {"lora.eplb"}
    assert codes(ep=2, dp=2) - plain == {"lora.dp"} == codes(tp=2, dp=2) - plain and codes(ep=2) == plain
    assert "lora.batch_invariant" in codes(batch_invariant=True)
    in_turn = Parallel(ep=2, placement="round_robin")
    assert "lora.placement" in codes(parallel=in_turn) & codes(experts=127, ep=2)
    ragged = {"intermediate_size": 384, "tp": 2, "ragged_intermediate_size": 640}
    assert "lora.shards" in codes(**ragged)


def test_the_words_about_shards_of_different_sizes() -> None:
    ragged = problem(intermediate_size=384, tp=2, ragged_intermediate_size=640)
    backend = default_registry()["hopper_mxfp8"]
    assert not backend.check(ragged, H200).reasons
    (reason,) = backend.check(dataclasses.replace(ragged, lora=True), H200).reasons
    assert "equal shards; 640 features over 2 ranks are 384 and less on the last" in reason.detail


def test_the_scheme_modules_know_the_layers_of_this_file() -> None:
    for name in SCHEMES:
        case = layer(name, True)
        assert schemes.module(name).shapes(case).keys() >= {"w13", "w2", "w13_scale", "w2_scale"}


def test_vllm_asks_the_method() -> None:
    pytest.importorskip("vllm", reason="methods subclass vLLM's")
    from vllm_moe_oracle.methods.base import OracleMoEMethod

    for backend in default_registry():
        method = SimpleNamespace(backend=backend)
        assert OracleMoEMethod.supports_eplb.fget(method) is backend.capabilities.eplb
