"""Each field of `Capabilities` refuses what it should, says it with numbers, and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib.cases import CPU, GPT_OSS, H200, INT4_G32, INT4_G128, RELU2, backend, problem
from vllm_moe_oracle.backends import Capabilities, Rule
from vllm_moe_oracle.core.capabilities import violations
from vllm_moe_oracle.core.decision import Candidate, Reason, Rejected, ShardPlan
from vllm_moe_oracle.core.problem import Activation, Device, Parallel, Problem, Routing, Scheme
from vllm_moe_oracle.core.sharding import padded_plan
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.schemes._packings import PACKINGS
from vllm_moe_oracle.schemes._wna16_checkpoint import split_gate_up

GPTQ = Scheme("wna16", 4, 128, "gptq", zero_points=True, act_order="group")


def broken(
    capabilities: Capabilities, layer: Problem, device: Device = H200, rules: tuple[Rule, ...] = ()
) -> tuple[Reason, ...]:
    return violations(
        capabilities, rules, layer, device, lambda other: ShardPlan(other.hidden_size, other.intermediate_size)
    )


def whole_tiles(layer: Problem) -> ShardPlan:
    return padded_plan(layer, 128, 128)


def gpu(capability: int, **packages: str) -> Device:
    return Device(
        "cuda", f"a GPU of {capability}", capability, packages={k.replace("_", "-"): v for k, v in packages.items()}
    )


# Capabilities, problem, device, reason code, and words that the detail or the remedy must contain.
REFUSED: list[tuple[Capabilities, Problem, Device, str, tuple[str, ...]]] = [
    (Capabilities(), problem(), CPU, "device", ("cuda", "a CPU (cpu)")),
    (Capabilities(devices=("cpu",)), problem(), H200, "device", ("cpu", "NVIDIA H200 (sm_90)")),
    (Capabilities(compute_capabilities=((80, 90),)), problem(),
     H200, "capability", ("sm_80 to below sm_90", "sm_90", "NVIDIA H200")),
    (Capabilities(compute_capabilities=((90, 91), (100, 110))), problem(),
     gpu(120), "capability", ("sm_90, sm_100 to below sm_110", "sm_120")),
    (Capabilities(packages={"deep-gemm": ""}), problem(),
     H200, "package", ("needs deep-gemm, which is not installed", "pip install 'deep-gemm'")),
    (Capabilities(packages={"deep-gemm": "2.1"}), problem(),
     H200, "package", ("deep-gemm>=2.1", "not installed", "pip install 'deep-gemm>=2.1'")),
    (Capabilities(packages={"torch": "2.15"}), problem(), H200, "package", ("torch>=2.15", "2.14.0 is installed")),
    (Capabilities(packages={"odd": "1.0"}), problem(),
     gpu(90, odd="no version"), "package", ("odd>=1.0", "no version is installed")),
    (Capabilities(devices=("cpu",), features=("avx2", "amx_bf16")), problem(), CPU, "feature", ("amx_bf16", "a CPU")),
    (Capabilities(), problem(dtype="float32"), H200, "dtype", ("bfloat16, float16", "float32", "--dtype bfloat16")),
    (Capabilities(bits=(4,)), problem(), H200, "bits", ("4-bit", "8")),
    (Capabilities(groups=(-1, 64)), problem(scheme=INT4_G128), H200, "group", ("-1, 64", "128")),
    (Capabilities(act_orders=("group",)), problem(scheme=INT4_G128), H200, "act_order", ("no act order",)),
    (Capabilities(zero_points=True), problem(scheme=GPTQ), H200, "act_order", ("act order group", "only none")),
    (Capabilities(act_orders=("none", "group")), problem(scheme=GPTQ), H200, "zero_points", ("zero points",)),
    (Capabilities(), problem(activation=Activation("gelu")), H200, "activation", ("gated silu", "gelu")),
    (Capabilities(), problem(activation=RELU2), H200, "activation", ("takes gated activations only", "relu2")),
    (Capabilities(ungated=("relu2",)), problem(activation=Activation("relu2")),
     H200, "activation", ("gated silu", "relu2")),
    (Capabilities(gated=("swigluoai",)), problem(activation=GPT_OSS),
     H200, "activation.parameters", ("alpha=1.702, beta=1, limit=7",)),
    (Capabilities(), problem(activation=Activation("silu", limit=7.0)), H200, "activation.parameters", ("limit=7",)),
    (Capabilities(), problem(activation=Activation("silu", beta=0.0)), H200, "activation.parameters", ("beta=0",)),
    (Capabilities(), problem(has_bias=True), H200, "bias", ("biases",)),
    (Capabilities(experts_multiple=48), problem(), H200, "experts.multiple", ("128", "48")),
    (Capabilities(max_experts=127), problem(), H200, "experts.max", ("127", "128")),
    (Capabilities(max_top_k=4), problem(), H200, "top_k.max", ("4", "8")),
    (Capabilities(), problem(format="batched"), H200, "format", ("standard", "batched", "--all2all-backend")),
    (Capabilities(formats=("batched",)), problem(), H200, "format", ("batched", "standard")),
    (Capabilities(expert_parallel=False), problem(ep=4, local_experts=32), H200, "expert_parallel", ("4 ranks",)),
    (Capabilities(routing_methods=("deepseek_v3",)), problem(routing=Routing("llama4")),
     H200, "routing", ("deepseek_v3", "llama4")),
    (Capabilities(), problem(routing=Routing(apply_router_weight_on_input=True), top_k=1),
     H200, "apply_router_weight_on_input", ("input",)),
    (Capabilities(), problem(lora=True), H200, "lora", ("LoRA", "--enable-lora")),
    (Capabilities(), problem(eplb=True), H200, "eplb", ("EPLB", "--enable-eplb")),
    (Capabilities(), problem(batch_invariant=True),
     H200, "batch_invariant", ("batch invariance", "VLLM_BATCH_INVARIANT")),
    (Capabilities(hidden_multiple=4096), problem(), H200, "alignment.hidden", ("2048 mod 4096 = 2048",)),
    (Capabilities(intermediate_multiple=512), problem(), H200, "alignment.intermediate", ("768 mod 512 = 256",)),
    (Capabilities(intermediate_multiple=256), problem(intermediate_size=192, tp=4),
     H200, "alignment.intermediate", ("768 / 4 = 192", "TP 1 or expert")),
    (Capabilities(), problem(hidden_size=2050), H200, "group.hidden", ("2050 mod 32 = 2",)),
    (Capabilities(), problem(scheme=INT4_G32, intermediate_size=80, tp=2),
     H200, "group.intermediate", ("160 / 2 = 80", "80 mod 32 = 16", "TP 1 or expert")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("capabilities", "layer", "device", "code", "words"),
    REFUSED,
    ids=[f"{i}-{row[3]}" for i, row in enumerate(REFUSED)],
)
def test_a_limit_refuses_with_its_numbers_and_alone(
    capabilities: Capabilities, layer: Problem, device: Device, code: str, words: tuple[str, ...]
) -> None:
    reasons = broken(capabilities, layer, device)
    assert [reason.code for reason in reasons] == [code]
    for word in words:
        assert word in str(reasons[0])


def test_every_field_is_tested_above() -> None:
    changed = {
        field.name for field in dataclasses.fields(Capabilities) for row in REFUSED
        if getattr(row[0], field.name) != getattr(Capabilities(), field.name)
    }  # fmt: skip
    # The defaults of these refuse: the rows above ask for what a plain Capabilities() does not support.
    refusing_by_default = {
        "dtypes",
        "activation_params",
        "bias",
        "apply_router_weight_on_input",
        "lora",
        "eplb",
        "batch_invariant",
    }
    assert changed | refusing_by_default == {field.name for field in dataclasses.fields(Capabilities)}


ABLE: list[tuple[Capabilities, Problem, Device]] = [
    (Capabilities(), problem(), H200),
    (Capabilities(), problem(dtype="float16"), H200),
    (
        Capabilities(devices=("cpu", "cuda"), compute_capabilities=((100, 110),)),
        problem(),
        CPU,
    ),  # capabilities are CUDA's alone
    (Capabilities(compute_capabilities=((80, 90), (90, 100))), problem(), gpu(99)),
    (Capabilities(packages={"torch": "2.14"}), problem(), H200),
    (Capabilities(packages={"torch": "2.13.0"}), problem(), gpu(90, torch="2.13.0+cpu")),
    (Capabilities(packages={"vllm": "0.9"}), problem(), gpu(90, vllm="0.10.0")),  # versions, not strings
    (Capabilities(dtypes=("float32",)), problem(dtype="float32"), H200),
    (Capabilities(bits=(4, 8), groups=(32, 128)), problem(), H200),
    (Capabilities(zero_points=True, act_orders=("none", "group")), problem(scheme=GPTQ), H200),
    (Capabilities(ungated=("relu2",)), problem(activation=RELU2), H200),
    (Capabilities(gated=("swigluoai",), activation_params=True), problem(activation=GPT_OSS), H200),
    (Capabilities(bias=True), problem(has_bias=True), H200),
    (Capabilities(experts_multiple=64, max_experts=128, max_top_k=8), problem(), H200),
    (Capabilities(formats=("standard", "batched")), problem(format="batched"), H200),
    (Capabilities(expert_parallel=False), problem(), H200),
    (Capabilities(routing_methods=("llama4",)), problem(routing=Routing("llama4")), H200),
    (
        Capabilities(apply_router_weight_on_input=True),
        problem(routing=Routing(apply_router_weight_on_input=True), top_k=1),
        H200,
    ),
    (
        Capabilities(lora=True, eplb=True, batch_invariant=True),
        problem(lora=True, eplb=True, batch_invariant=True),
        H200,
    ),
    (Capabilities(hidden_multiple=128, intermediate_multiple=256), problem(), H200),
]


@pytest.mark.parametrize(("capabilities", "layer", "device"), ABLE)
def test_a_limit_lets_through_what_it_allows(capabilities: Capabilities, layer: Problem, device: Device) -> None:
    assert broken(capabilities, layer, device) == ()


def test_a_release_candidate_is_older_than_its_release() -> None:
    assert [
        r.code for r in broken(Capabilities(packages={"vllm": NEWEST}), problem(), gpu(90, vllm=f"{NEWEST}rc1"))
    ] == ["package"]


def test_alignment_is_judged_on_padded_sizes_and_groups_on_real_ones() -> None:
    limits = Capabilities(hidden_multiple=128, intermediate_multiple=128)
    layer = problem(hidden_size=2688, intermediate_size=1856)
    assert violations(limits, (), layer, H200, whole_tiles) == ()
    odd = problem(hidden_size=2688, intermediate_size=1860)
    assert [reason.code for reason in violations(limits, (), odd, H200, whole_tiles)] == ["group.intermediate"]


def test_own_rules_see_the_problem_and_the_device() -> None:
    rule = Rule(
        "smem",
        lambda layer, device: layer.top_k > 4 and device.sm_count > 100,
        lambda layer, device: f"top-{layer.top_k} on {device.sm_count} multiprocessors",
        "fewer",
    )
    assert broken(Capabilities(), problem(), H200, (rule,)) == (
        Reason("smem", "top-8 on 132 multiprocessors", "fewer"),
    )
    assert broken(Capabilities(), problem(top_k=4), H200, (rule,)) == ()


def test_a_backend_checks_its_limits_and_its_rules_on_its_own_plan() -> None:
    rule = Rule("never", lambda layer, device: True, lambda layer, device: "never")
    padding = backend(
        "padding",
        capabilities=Capabilities(intermediate_multiple=512, max_top_k=2),
        rules=(rule,),
        plan=lambda self, layer, device: padded_plan(layer, 1, 512),
    )
    verdict = padding.check(problem(), H200)
    assert isinstance(verdict, Rejected)
    assert [reason.code for reason in verdict.reasons] == ["top_k.max", "never"]


FLAGS = ("bias", "apply_router_weight_on_input", "lora", "eplb", "batch_invariant")


@given(st.lists(st.booleans(), min_size=10, max_size=10))
def test_every_failing_rule_is_reported_whatever_else_fails(bits: list[bool]) -> None:
    asked, able = dict(zip(FLAGS, bits[:5], strict=True)), dict(zip(FLAGS, bits[5:], strict=True))
    layer = problem(
        has_bias=asked["bias"],
        routing=Routing(apply_router_weight_on_input=asked["apply_router_weight_on_input"]),
        top_k=1,
        **{name: asked[name] for name in ("lora", "eplb", "batch_invariant")},
    )
    options: dict[str, Any] = able
    expected = {name for name in FLAGS if asked[name] and not able[name]}
    assert {reason.code for reason in broken(Capabilities(**options), layer)} == expected


def test_rules_that_fail_for_one_cause_are_one_sentence() -> None:
    """Scale groups and the kernel's alignment are the same multiple: each rule has its code, people read it once."""
    reasons = tuple(broken(Capabilities(intermediate_multiple=32), problem(intermediate_size=48, tp=16)))
    assert [reason.code for reason in reasons] == ["group.intermediate", "alignment.intermediate"]
    (sentence,) = Candidate("any", Rejected(reasons), 0.0).sentences
    assert sentence.startswith(
        "intermediate size 768 / 16 = 48 is not a multiple of the scale group 32 (48 mod 32 = 16)"
    )


@pytest.mark.parametrize("siblings", [False, True])
def test_no_remedy_leads_to_another_refusal(siblings: bool) -> None:
    """A rule that is broken over the ranks that a remedy proposes, and not now; unless a sibling takes such layers."""
    able = Capabilities(expert_parallel=True, intermediate_multiple=64)
    layer = dataclasses.replace(problem(tp=2), intermediate_size=96)
    rule = Rule("odd", lambda other, device: other.parallel.ep > 1, lambda *case: "odd", has_sibling=siblings)
    words = "expert parallelism over the 2 ranks"
    (free,) = broken(able, layer)
    (bound,) = broken(able, layer, rules=(rule,))
    assert words in free.remedy and (words in bound.remedy) == siblings and "TP 1" in bound.remedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("wna16", 4, 0, "gptq"), "groups of 0"),
        (("wna16", 4, -3, "gptq"), "groups of -3"),
        (("wna16", 0, 32, "gptq"), "0 bits"),
        (("mxfp4", 8, 32, "gpt_oss"), "mxfp4 has 4 bits in groups of 32"),
        (("mxfp4", 4, 16, "gpt_oss"), "mxfp4 has 4 bits in groups of 32"),
        (("mxfp8", 4, 32, "modelopt"), "mxfp8 has 8 bits in groups of 32"),
        (("mxfp8", 8, 32, "modelopt", True), "neither zero points nor act order"),
        (("mxfp8", 8, 32, "modelopt", False, "group"), "neither zero points nor act order"),
    ],
)
def test_a_format_that_does_not_exist_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scheme(*arguments)


@pytest.mark.parametrize("name", ["tp", "ep", "dp"])
def test_ranks_are_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Parallel(**{name: 0})


@pytest.mark.parametrize(
    "activation",
    [
        Activation("silu", limit=0.0),
        Activation("silu", limit=-1.0),
        Activation("swigluoai", alpha=float("nan")),
        Activation("silu", limit=float("inf")),
        # Beyond float32, in which kernels take them.
        Activation("swigluoai", limit=1e39),
        Activation("swigluoai", limit=1e-50),
        Activation("swigluoai", alpha=1e300),
        Activation("silu", beta=-1e39),
    ],
)
def test_parameters_without_a_meaning_are_refused(activation: Activation) -> None:
    able = Capabilities(gated=("silu", "swigluoai"), activation_params=True)
    (reason,) = broken(able, problem(activation=activation))
    assert reason.code == "activation.parameters.undefined" and "not defined for its" in reason.detail


def test_alternating_rows_are_separable_where_the_loader_separates_them() -> None:
    layer = problem(scheme=Scheme("wna16", 4, 32, "gptq"))
    for packing, zero_points in itertools.product(PACKINGS, (False, True)):
        suffixes = ("", "_scale") + ("_zero_point",) * zero_points
        try:
            for suffix in suffixes:
                split_gate_up(torch.zeros(8, 8), suffix, layer, packing, "here")
            able = True
        except CheckpointError:
            able = False
        scheme = Scheme("wna16", 4, 32, packing, zero_points=zero_points)
        assert scheme.rows_are_separable == able, (packing, zero_points)
        (reason,) = broken(
            Capabilities(bits=(4,), zero_points=True, gated=("swigluoai",), activation_params=True),
            problem(scheme=scheme, activation=dataclasses.replace(GPT_OSS, interleaved=True)),
        )
        assert reason.code == "rows"
