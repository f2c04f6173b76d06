"""MXFP4 backends that leave activations alone (Marlin, Humming, triton_kernels, CPU, our own): what they say, and what
their conversions make of an expert."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_moe_oracle.backends as builtin_package
from tests.lib.built_experts import built, inside_vllm
from tests.lib.cases import RELU2, SILU
from tests.lib.function_recorder import FunctionRecorder
from tests.lib.peak_memory import Peak
from tests.lib.stock_rules import (
    CLASSES,
    GPT_OSS,
    HALVES,
    TRITON,
    at_home,
    backend,
    converted,
    expert,
    gpt_oss_layer,
    gpu,
    machine,
    stacked,
    usual,
)
from vllm_moe_oracle.backends._padding import pad_expert
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Activation, Routing
from vllm_moe_oracle.devices.detect import detect
from vllm_moe_oracle.errors import NoBackendError, OracleError
from vllm_moe_oracle.oracle.registry import discover
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import CPU_RELEASES
from vllm_moe_oracle.schemes import mxfp4
from vllm_moe_oracle.settings import Settings

CPU = machine(CPU_RELEASES[-1], 0)
STOCK = ("marlin_mxfp4", "marlin_mxfp4_batched", "humming_mxfp4", "humming_mxfp4_grouped", *TRITON)
NAMES = (*STOCK, "cpu_mxfp4", "hopper_mxfp4")
BUILT_IN = ("marlin_mxfp4", "humming_mxfp4", "triton_mxfp4", "triton_mxfp4_monolithic")
"""vLLM's kernels for alternating rows that have gpt-oss's constants built in."""


def codes_of(verdict: Any) -> set[str]:
    return {reason.code for reason in verdict.reasons}


# --- What they take ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRITON)
def test_triton_kernels_run_on_consumer_cards_since(name: str) -> None:
    for capability, version, codes in (
        (120, "0.31.0", {"capability.vllm_version"}),
        (120, "0.32.0", set()),
        (90, "0.31.0", set()),
    ):
        assert codes_of(backend(name).check(usual(name), gpu(capability, vllm=version))) == codes


@pytest.mark.parametrize("name", TRITON)
def test_another_generation_of_triton_kernels_is_refused_with_its_version(name: str) -> None:
    reason = backend(name).check(usual(name), gpu(90, **{"triton-kernels": "3.8.0"})).reasons[0]
    assert reason.code == "triton_kernels.version" and "3.8.0 is installed" in str(reason)


@pytest.mark.parametrize(
    ("name", "activation", "taken"),
    [
        *((name, GPT_OSS, True) for name in NAMES),
        *((name, dataclasses.replace(GPT_OSS, alpha=1.5), False) for name in BUILT_IN),
        *((name, dataclasses.replace(GPT_OSS, limit=6.0), False) for name in BUILT_IN),
        *((name, dataclasses.replace(GPT_OSS, beta=0.5), name == "hopper_mxfp4") for name in NAMES),
        ("triton_mxfp4_unfused", dataclasses.replace(GPT_OSS, alpha=1.5, limit=6.0), True),
        ("cpu_mxfp4", dataclasses.replace(GPT_OSS, alpha=1.5, limit=6.0), True),
        ("hopper_mxfp4", dataclasses.replace(GPT_OSS, alpha=1.5, limit=6.0), True),
        *((name, HALVES, name not in TRITON[:2]) for name in NAMES),
        *((name, Activation("silu", limit=7.0), name not in (*TRITON[:2], "cpu_mxfp4")) for name in NAMES),
        *((name, Activation("silu", alpha=1.702), name == "hopper_mxfp4") for name in NAMES),
    ],
)  # fmt: skip
def test_parameters_reach_the_kernel_or_the_layer_is_refused(name: str, activation: Activation, taken: bool) -> None:
    codes = codes_of(backend(name).check(usual(name, activation=activation, has_bias=False), at_home(name)))
    assert codes <= {"activation", "activation.parameters"} and (not codes) == taken


def test_non_gated_experts_are_taken_by_some() -> None:
    for name in ("marlin_mxfp4", "humming_mxfp4", "hopper_mxfp4", *TRITON, "cpu_mxfp4"):
        codes = codes_of(backend(name).check(usual(name, activation=RELU2, has_bias=False), at_home(name)))
        assert ("activation" in codes) if name in (*TRITON, "cpu_mxfp4") else codes == set(), name


@pytest.mark.parametrize(
    ("routing", "codes"),
    [
        (Routing("renormalizenaive"), set()),
        (Routing("default"), {"routing"}),
        (Routing("topk"), {"routing"}),
        (Routing("renormalize", scoring="sigmoid"), {"routing.softmax"}),
        (Routing("renormalize", correction_bias=True), {"routing.softmax"}),
        (Routing("renormalize", num_groups=8, top_k_groups=4), {"routing.softmax"}),
        (Routing("renormalize", hash_routing=True), {"routing.softmax"}),
        (Routing("renormalize", apply_router_weight_on_input=True), {"apply_router_weight_on_input"}),
    ],
)
def test_only_monolithic_backends_route_inside_the_kernel(routing: Routing, codes: set[str]) -> None:
    assert codes_of(backend("triton_mxfp4_monolithic").check(gpt_oss_layer(routing=routing), gpu(90))) == codes
    given_ids = backend("triton_mxfp4").check(gpt_oss_layer(routing=routing), gpu(90))
    assert codes_of(given_ids) == codes & {"apply_router_weight_on_input"}


def test_data_parallel_ranks_exchange_routed_tokens() -> None:
    spread = gpt_oss_layer(dp=2, ep=2)
    assert codes_of(backend("triton_mxfp4_monolithic").check(spread, gpu(90))) == {"data_parallel"}
    assert backend("triton_mxfp4").check(spread, gpu(90)).reasons == ()


@pytest.mark.parametrize("name", ["triton_mxfp4", "triton_mxfp4_unfused"])
def test_minimum_version_for_empty_slots(name: str) -> None:
    for version, codes in (("0.24.0", {"expert_parallel.vllm_version"}), ("0.25.1", set())):
        assert codes_of(backend(name).check(gpt_oss_layer(ep=4), gpu(90, vllm=version))) == codes
    assert backend(name).check(gpt_oss_layer(), gpu(90, vllm="0.24.0")).reasons == ()


@pytest.mark.parametrize("name", TRITON)
def test_six_experts_per_token_since(name: str) -> None:
    for version, codes in (("0.24.0", {"top_k.power_of_two"}), ("0.25.1", set())):
        assert codes_of(backend(name).check(gpt_oss_layer(top_k=6), gpu(90, vllm=version))) == codes


def test_the_cpu_kernel_needs_bfloat16_instructions_and_no_amx() -> None:
    without = dataclasses.replace(CPU, features=("avx2", "avx512f"))
    reason = backend("cpu_mxfp4").check(gpt_oss_layer(), without).reasons[0]
    assert reason.code == "feature" and "avx512_bf16" in str(reason)


# --- Rounding: each backend's own, visible, and in numbers where it does not help -----------------------------------


@pytest.mark.parametrize(
    ("name", "inner", "plan"),
    [
        ("marlin_mxfp4", 1440, (2944, 1472)),
        ("triton_mxfp4", 736, (2880, 768)),
        *((name, 736, (2880, 736)) for name in ("humming_mxfp4", "hopper_mxfp4", "cpu_mxfp4")),
    ],
)
def test_plans_are_padded_to_the_kernels_multiples(name: str, inner: int, plan: tuple[int, int]) -> None:
    chosen = gpt_oss_layer(intermediate_size=inner)
    found = backend(name).plan(chosen, at_home(name))
    assert (found.hidden_size, found.intermediate_size) == plan
    assert backend(name).check(chosen, at_home(name)).reasons == ()


def test_rounding_is_in_the_decision() -> None:
    decision = decide(gpt_oss_layer(intermediate_size=736), gpu(80), Settings(), moe_backend="marlin")
    assert decision.backend == "marlin_mxfp4"
    for words in ("hidden size 2880 is zero-padded to 2944", "intermediate size 736 is zero-padded to 768"):
        assert words in decision.summary()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tp", "inner"), [(4, 720), (8, 360)])
def test_a_cut_through_a_block_of_scales_is_refused_with_numbers(name: str, tp: int, inner: int) -> None:
    reasons = backend(name).check(usual(name, tp=tp, intermediate_size=inner), at_home(name)).reasons
    words = next(str(reason) for reason in reasons if reason.code == "group.intermediate")
    assert f"2880 / {tp} = {inner}" in words and f"{inner} mod 32 = {inner % 32}" in words


# --- Choices --------------------------------------------------------------------------------------------------


def test_our_own_kernels_come_after_stocks_however_they_were_timed() -> None:
    """By measurements that hold on the machine they may win; a place in the order is none."""
    h200 = dataclasses.replace(gpu(90), name="NVIDIA H200")
    for changes in ({}, {"experts": 128}, {"intermediate_size": 1440}):
        decision = decide(gpt_oss_layer(**changes), h200, Settings())
        assert (decision.backend, decision.why) == ("triton_mxfp4_monolithic", "static")
        accepted = [each.backend for each in decision.candidates if each.accepted]
        assert accepted[-2:] == ["hopper_mxfp4", "emulation"]


def test_batch_invariance_gets_a_proven_kernel_or_an_error() -> None:
    assert (
        decide(gpt_oss_layer(batch_invariant=True), gpu(90), Settings(disable=("emulation",))).backend == "hopper_mxfp4"
    )
    with pytest.raises(NoBackendError) as caught:
        decide(gpt_oss_layer(batch_invariant=True), gpu(80), Settings(disable=("emulation",)))
    lines = [line for line in str(caught.value).splitlines() if "batch invariance" in line]
    assert len(lines) >= len(STOCK)


# --- What they make of an expert ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, *(name for name in CLASSES if "_mxfp4" in name and name not in NAMES)])
def test_converting_one_expert_takes_less_than_an_expert_and_64_mib(name: str) -> None:
    """One of gpt-oss, or of its size."""
    each = usual(name)
    raw = expert(each)
    plan = backend(name).plan(each, at_home(name))
    with Peak(*raw.values()) as found:
        made = backend(name).convert(mxfp4.canonical_expert(raw, each), each, plan)
    assert sum(tensor.nbytes for tensor in made.values()) < found.peak
    assert found.peak <= sum(tensor.nbytes for tensor in raw.values()) + 64 * 2**20


@pytest.mark.parametrize("activation", [SILU, GPT_OSS, HALVES, RELU2])
def test_padding_changes_nothing_whatever_is_in_the_padded_inputs(activation: Activation) -> None:
    """Zeros in the weights alone must make it so: a kernel's padded activations may hold anything finite."""
    small = gpt_oss_layer(hidden_size=64, intermediate_size=96, experts=1, top_k=1, activation=activation)
    plan = ShardPlan(128, 160)
    large = dataclasses.replace(small, hidden_size=128, intermediate_size=160)
    original = expert(small)
    for key in ("w13_scale", "w2_scale"):
        original[key] = original[key] % 8 + 120
    padded = pad_expert(original, small, plan)
    x = torch.randn(5, 64)
    garbage = torch.cat((x, torch.full((5, 64), 3e4)), dim=-1)
    results = []
    for tensors, shape, inputs in ((original, small, x), (padded, large, garbage)):
        out = torch.empty(5, shape.hidden_size)
        stacked = {key: tensor[None] for key, tensor in tensors.items()}
        exact = dataclasses.replace(shape, dtype="float32")
        forward(stacked, exact, out, inputs, torch.ones(5, 1), torch.zeros(5, 1, dtype=torch.int32))
        results.append(out)
    # Sums of float32 in another order.
    assert (results[1][:, :64] - results[0]).norm() <= 1e-6 * results[0].norm()
    assert torch.equal(results[1][:, 64:], torch.zeros(5, 64))


# --- Experts over functions -----------------------------------------------------------------------------------------


def cpu_operator_is_there() -> bool:
    pytest.importorskip("vllm._custom_ops")
    return hasattr(torch.ops._C, "fused_experts_cpu") and hasattr(torch.ops._C, "convert_scale_packed")


@pytest.mark.parametrize("activation", [SILU, GPT_OSS, HALVES, dataclasses.replace(GPT_OSS, alpha=1.0, limit=3.0)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), [(32, 32), (288, 96), (320, 736)])
@pytest.mark.parametrize("spread", [False, True])
def test_the_cpu_kernel_is_right(activation: Activation, has_bias: bool, hidden: int, inner: int, spread: bool) -> None:
    """Against the emulation. bfloat16 rounds at five places, each by 2**-9 on average less."""
    if not cpu_operator_is_there():
        pytest.skip("this build of vLLM has no MXFP4 experts for this CPU")
    each = gpt_oss_layer(
        hidden_size=hidden, intermediate_size=inner, experts=8, top_k=2, activation=activation, has_bias=has_bias
    )
    chosen = backend("cpu_mxfp4")
    plan = chosen.plan(each, CPU)
    originals = [expert(each, seed) for seed in range(8)]
    for one in originals:
        for key in ("w13_scale", "w2_scale"):
            one[key] = one[key] % 4 + 119
    canonical = stacked(originals)
    tensors = converted("cpu_mxfp4", canonical, each, CPU)
    run = chosen.build_experts(tensors, each, plan, FunctionRecorder())  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(21, hidden, generator=generator).bfloat16()
    weights = torch.rand(21, 2, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(21)]).int()
    ids[0, 1], ids[1] = -1, -1
    places = torch.tensor([3, -1, 0, 1, -1, 2, 5, 4], dtype=torch.int32) if spread else None
    out, expected = torch.full_like(x, float("nan")), torch.empty(21, hidden)
    run(out, x, weights, ids, places)
    forward(canonical, each, expected, x, weights, ids, places)
    assert not out[1].any()
    assert (out.float() - expected).norm() / expected.norm() < 5 * 2.0**-9
    run(out[:0], x[:0], weights[:0], ids[:0], places)


def test_a_build_without_the_cpu_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_C", object(), raising=False)
    with pytest.raises(OracleError, match="no operator fused_experts_cpu"):
        backend("cpu_mxfp4").build_experts({}, gpt_oss_layer(), ShardPlan(2880, 2880), FunctionRecorder())  # type: ignore[arg-type]


# --- Inside vLLM ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
def test_marlins_padded_sizes_are_set_in_vllms_config(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads them afterwards (vLLM's runner, which pads and crops, buffers of all-to-alls, LoRA) must agree with
    the tensors, under expert parallelism too."""
    each = gpt_oss_layer(hidden_size=288, intermediate_size=96, experts=8, top_k=2, ep=ranks)
    each = dataclasses.replace(each, local_experts=8 // ranks)
    made, tensors, plan, config = built("marlin_mxfp4", each, gpu(90), monkeypatch)
    assert (plan.hidden_size, plan.intermediate_size) == (384, 128)
    assert made.input_dtype is None
    assert (config.hidden_dim, config.intermediate_size_per_partition) == (384, 128)
    x, ids = torch.zeros(5, config.hidden_dim), torch.zeros(5, 2)
    assert made.moe_problem_size(x, tensors["w13"], tensors["w2"], ids) == (8 // ranks, 5, 128, 384, 2)
    assert made.w1_bias is tensors["w13_bias"] and made.w2_bias is tensors["w2_bias"]
    assert made.w1_scale.dtype == torch.float8_e8m0fnu and made.quant_config.use_mxfp4_w4a16


# --- One more backend is one more file ------------------------------------------------------------------------------

WRAPPER = '''
"""One of vLLM's expert classes that no other backend wraps."""

from vllm_moe_oracle.backends.cpu_mxfp4 import CpuMxfp4


class Wrapper(CpuMxfp4):
    name = "wrapper_mxfp4"
    stock_class = "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUExpertsMxfp4"
    check_stock_class = False

    def priority(self, problem, device):
        return 0.5

    def build_experts(self, tensors, problem, plan, builder):
        return builder.stock(self.stock_class)


BACKEND = Wrapper()
'''


def test_a_further_class_of_vllms_is_wrapped_by_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, chosen, converted, built with the layer's description, and right."""
    (tmp_path / "wrapper_mxfp4.py").write_text(WRAPPER)
    monkeypatch.setattr(builtin_package, "__path__", [*builtin_package.__path__, str(tmp_path)])
    found = discover()
    monkeypatch.delitem(sys.modules, f"{builtin_package.__name__}.wrapper_mxfp4")
    each = gpt_oss_layer(hidden_size=128, intermediate_size=64, experts=8, top_k=2)
    decision = decide(each, CPU, Settings(), registry=found)
    assert decision.backend == "wrapper_mxfp4"
    chosen = found["wrapper_mxfp4"]
    with inside_vllm(each) as config:
        from vllm_moe_oracle.compat import current_adapter
        from vllm_moe_oracle.compat.experts_builder import VllmBuilder
        from vllm_moe_oracle.verification import self_check

        release = current_adapter()
        loaded = [expert(each, seed) for seed in range(8)]
        for one in loaded:
            for key in ("w13_scale", "w2_scale"):
                one[key] = one[key] % 4 + 119
        raw = stacked(loaded)
        tensors = stacked([chosen.convert(one, each, decision.plan) for one in loaded])
        builder = VllmBuilder(release, config, release.quant_config(each, tensors))
        made = chosen.build_experts(tensors, each, decision.plan, builder)
        assert type(made).__name__ == "CPUExpertsMxfp4" and release.experts_class(chosen) is type(made)
        assert made.w1_bias is tensors["w13_bias"] and made.quant_config.gemm1_clamp_limit == 7.0
        if {"avx512f", "avx512_bf16"} <= set(detect().features):
            result = self_check.compare_with_reference(chosen, each, decision.plan, raw, config, release)
            assert result.passed and not result.skip_reason, str(result)
        with pytest.raises(OracleError, match="has no expert class vllm:Nothing"):
            release.stock_class("vllm:Nothing")
        with pytest.raises(OracleError, match="has no expert class NoSuchExperts"):
            release.stock_class("NoSuchExperts")
