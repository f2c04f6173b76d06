"""MXFP4 over FlashInfer and DeepGEMM: what the backends say, what their conversions make of an expert, and what vLLM's
classes are given."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib import stock_rules
from tests.lib.built_experts import built
from tests.lib.cases import SILU, problem
from tests.lib.stock_rules import GPT_OSS, HALVES, backend, gpu, home
from vllm_moe_oracle.core.problem import Device, Parallel, Problem, Routing, Scheme, satisfies_precision
from vllm_moe_oracle.core.sharding import shard_by_blocks
from vllm_moe_oracle.errors import NoBackendError, OracleError
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings

TRTLLM = ("trtllm_mxfp4", "trtllm_mxfp4_monolithic", "trtllm_mxfp4_a8", "trtllm_mxfp4_a8_monolithic")
ROUTES = ("trtllm_mxfp4_monolithic", "trtllm_mxfp4_a8_monolithic")
CUTLASS = ("cutlass_mxfp4", "cutlass_mxfp4_a8")
NAMES = (*TRTLLM, *CUTLASS, "deep_gemm_mxfp4")
each_backend = pytest.mark.parametrize("name", NAMES)


def at_home(name: str, **packages: str) -> Device:
    return gpu(home(name), **packages)


def usual(name: str, **changes: Any) -> Problem:
    """A layer that the backend takes, with what it consumes declared."""
    silu = name == "deep_gemm_mxfp4"
    given = {
        "routing": Routing("renormalize"),
        "activation": SILU if silu else GPT_OSS,
        "has_bias": not silu,
        **changes,
    }
    made = problem(**({"scheme": Scheme("mxfp4", 4, 32, "mxfp4" if silu else "gpt_oss")} | given))
    consumed = backend(name).activations(made)
    return dataclasses.replace(made, scheme=dataclasses.replace(made.scheme, activations=consumed))


def reasons(name: str, device: Device | None = None, **changes: Any) -> dict[str, str]:
    verdict = backend(name).check(usual(name, **changes), device or at_home(name))
    return {reason.code: str(reason) for reason in verdict.reasons}


# --- What they take -------------------------------------------------------------------------------------------------


@each_backend
def test_limits_that_vllms_class_does_not_name(name: str) -> None:
    assert reasons(name, dtype="float16").keys() == {"dtype"}
    assert "2880 / 4 = 720" in reasons(name, tp=4, intermediate_size=720)["group.intermediate"]
    on_input = Routing("renormalize", apply_router_weight_on_input=True)
    code = "apply_router_weight_on_input" + ("" if name.endswith("monolithic") else ".top_k")
    assert reasons(name, routing=on_input).keys() == {code}


@pytest.mark.parametrize("name", [*TRTLLM, *CUTLASS, "trtllm_mxfp8", "trtllm_mxfp8_monolithic", "trtllm_mxint4"])
def test_ranks_without_a_map_of_experts_have_equal_runs_of_neighbors(name: str) -> None:
    """vLLM's classes give the kernel a rank's first expert as its rank times its number of experts. With
    --expert-placement-strategy round_robin no rank's experts are neighbors; a self-check of one rank's experts by
    themselves could not see it."""
    usual_layer = stock_rules.usual(name)

    def refused(local: int, parallel: Parallel) -> dict[str, str]:
        layer = dataclasses.replace(usual_layer, num_experts=128, local_experts=local, parallel=parallel)
        assert ("round-robin expert placement" in str(layer)) == (parallel.placement == "round_robin")
        return {each.code: str(each) for each in backend(name).check(layer, at_home(name)).reasons}

    assert refused(16, Parallel(ep=8)) == {}
    assert refused(16, Parallel(ep=8, placement="round_robin")).keys() == {"expert_parallel.placement"}
    assert "128 mod 3 = 2" in refused(43, Parallel(ep=3))["expert_parallel.uneven"]


def test_deep_gemm_has_a_map_of_experts() -> None:
    assert reasons("deep_gemm_mxfp4", num_experts=128, local_experts=43, ep=3) == {}


@pytest.mark.parametrize("name", ROUTES)
def test_the_kernels_that_route_say_what_by(name: str) -> None:
    grouped = Routing("deepseekv3", "sigmoid", True, num_groups=8, top_k_groups=4, correction_bias=True)
    assert reasons(name, routing=grouped) == {}
    assert "0.27.1" in reasons(name, at_home(name, vllm="0.26.0"), routing=grouped)["routing.vllm_version"]
    assert "minimax2" in reasons(name, routing=Routing("minimax2"))["routing"]
    assert "token ids" in reasons(name, routing=Routing("renormalize", hash_routing=True))["routing.hashed"]
    assert "2 data-parallel" in reasons(name, dp=2)["data_parallel"]
    assert reasons(name.removesuffix("_monolithic"), routing=Routing("custom", hash_routing=True), dp=2) == {}


@pytest.mark.parametrize("name", TRTLLM)
def test_trtllm_takes_swigluoai_from_alternating_rows_only(name: str) -> None:
    assert "two halves" in reasons(name, activation=HALVES)["activation.rows"]
    assert reasons(name, activation=dataclasses.replace(GPT_OSS, alpha=1.5, beta=0.5, limit=None)) == {}
    assert reasons(name, activation=dataclasses.replace(SILU, limit=10.0)) == {}


@pytest.mark.parametrize("name", CUTLASS)
def test_cutlass_has_gpt_oss_s_constants_before_0_28(name: str) -> None:
    old = at_home(name, vllm="0.27.1")
    assert reasons(name, old) == {}
    for other in (SILU, dataclasses.replace(GPT_OSS, alpha=1.5), dataclasses.replace(GPT_OSS, beta=0.0)):
        assert "alpha 1.702 and beta 1" in reasons(name, old, activation=other)["activation.parameters.vllm_version"]
        assert reasons(name, activation=other) == {}
    assert "activation.rows.vllm_version" in reasons(name, old, activation=HALVES)
    assert reasons(name, activation=HALVES) == {}
    # A limit of the model's own went before the class's.
    assert reasons(name, old, activation=dataclasses.replace(GPT_OSS, limit=3.0)) == {}


def test_deep_gemm_passes_the_limit_alone() -> None:
    assert reasons("deep_gemm_mxfp4", activation=dataclasses.replace(SILU, limit=10.0)) == {}
    assert (
        "alpha=1.5"
        in reasons("deep_gemm_mxfp4", activation=dataclasses.replace(SILU, alpha=1.5))["activation.parameters"]
    )
    assert "bias" in reasons("deep_gemm_mxfp4", has_bias=True)
    assert "package" in reasons("deep_gemm_mxfp4", at_home("deep_gemm_mxfp4", vllm="0.23.0"))


# --- Activations: what is declared, what is consumed ----------------------------------------------------------------


@pytest.mark.parametrize("declared", ["16bit", "mxfp8", "fp8", "mxfp4"])
@each_backend
def test_a_backend_that_quantizes_undeclared_activations_is_not_chosen(name: str, declared: Any) -> None:
    layer = usual(name)
    consumed = backend(name).activations(layer)
    layer = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, activations=declared))
    asked = consumed == "16bit" or consumed == declared or (consumed, declared) == ("mxfp8", "fp8")
    assert satisfies_precision(consumed, declared) == asked
    candidates = decide(layer, at_home(name), Settings()).candidates
    (found,) = [each for each in candidates if each.backend == name]
    assert found.accepted == asked
    if not asked:
        (reason,) = found.reasons
        assert reason.code == "activation_quantization" and consumed in reason.detail and declared in reason.detail
        with pytest.raises(NoBackendError, match="would quantize activations"):
            decide(layer, at_home(name), Settings(backend=name))
    allowed = decide(layer, at_home(name), Settings(backend=name, allow_activation_quantization=True))
    assert allowed.backend == name
    said = {"16bit": "left in bfloat16", "mxfp8": "quantized to MXFP8", "fp8": "quantized to e4m3"}[consumed]
    assert said in str(allowed.numerics)


def test_the_decision_says_what_is_done_to_activations() -> None:
    deepseek = usual("deep_gemm_mxfp4")
    decision = decide(deepseek, gpu(100), Settings())
    assert decision.backend == "trtllm_mxfp4_a8_monolithic"
    assert "activations fp8" in str(decision.problem) and "quantized to MXFP8 per token" in decision.summary()


# --- Padding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "sizes"),
    [
        ("trtllm_mxfp4", 1, (3072, 2944)), ("trtllm_mxfp4", 4, (3072, 768)), ("trtllm_mxfp4", 8, (3072, 384)),
        ("cutlass_mxfp4", 1, (2944, 2944)), ("cutlass_mxfp4", 2, (2944, 1536)), ("cutlass_mxfp4", 4, (2944, 768)),
    ],
)  # fmt: skip
def test_gpt_oss_is_padded_and_the_decision_says_so(name: str, tp: int, sizes: tuple[int, int]) -> None:
    cut = usual(name, hidden_size=2880, intermediate_size=2880 // tp, tp=tp)
    layer = shard_by_blocks(cut)
    plan = backend(name).plan(layer, at_home(name))
    assert (plan.hidden_size, plan.intermediate_size) == sizes
    assert f"2880 is zero-padded to {sizes[0]}" in " ".join(plan.notes)
    if tp > 2:
        assert f"{layer.intermediate_size} on each of {tp} ranks but the last" in plan.notes[0]
    assert backend(name).check(layer, at_home(name)).reasons == ()


def test_before_0_27_1_trtllm_rounds_to_256() -> None:
    layer = usual("trtllm_mxfp4", hidden_size=2880, intermediate_size=1440, tp=2)
    assert backend("trtllm_mxfp4").plan(layer, gpu(100, vllm="0.26.0")).intermediate_size == 1536
    assert backend("trtllm_mxfp4").plan(layer, gpu(100)).intermediate_size == 1536
    layer = usual("trtllm_mxfp4", hidden_size=2880, intermediate_size=640)
    assert backend("trtllm_mxfp4").plan(layer, gpu(100, vllm="0.26.0")).intermediate_size == 768
    assert backend("trtllm_mxfp4").plan(layer, gpu(100)).intermediate_size == 640


# --- What vLLM's classes are given ----------------------------------------------------------------------------------


class Recorder:
    """A builder that keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def stock(self, class_name: str, **given: Any) -> Any:
        self.asked = {"class_name": class_name, **given}
        return SimpleNamespace()


@pytest.mark.parametrize("name", [*TRTLLM, *CUTLASS])
def test_stock_classes_are_asked_with_the_activation_precision(name: str) -> None:
    layer, recorder = usual(name), Recorder()
    plan = backend(name).plan(layer, at_home(name))
    backend(name).build_experts({}, layer, plan, recorder)  # type: ignore[arg-type]
    quantized = name.endswith(("_a8", "_a8_monolithic"))
    assert recorder.asked["class_name"] == backend(name).stock_class
    assert recorder.asked.get("inputs", "") == ("mxfp8" if quantized else "")
    assert recorder.asked.get("swizzled", False) == (name == "cutlass_mxfp4_a8")
    assert recorder.asked["plan"] is plan


@each_backend
def test_vllms_own_classes_are_built_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    silu = name == "deep_gemm_mxfp4"
    layer = usual(name, hidden_size=288, intermediate_size=96, num_experts=8, local_experts=8, top_k=2)
    made, tensors, plan, config = built(name, layer, at_home(name), monkeypatch)
    # What the base class's initializer sets, which two of the classes do not call.
    assert made.activation_config is not None and made.max_num_tokens is None
    assert (config.hidden_dim, config.intermediate_size_per_partition) == (plan.hidden_size, plan.intermediate_size)
    described = made.quant_config
    consumed = backend(name).activations(layer)
    assert described.weight_quant_dtype == "mxfp4"
    assert described.quant_dtype == {"16bit": None, "mxfp8": "mxfp8", "fp8": torch.float8_e4m3fn}[consumed]
    assert described.block_shape == ([128, 128] if consumed == "fp8" else None)
    assert described.is_scale_swizzled == (name == "cutlass_mxfp4_a8")
    assert described.gemm1_clamp_limit == (None if silu else 7.0)
    if not silu:
        assert torch.equal(made.w1_bias, tensors["w13_bias"]) and torch.equal(made.w2_bias, tensors["w2_bias"])
        assert made.gemm1_alpha.unique().tolist() == pytest.approx([1.702]) and made.gemm1_beta.unique().tolist() == [
            1.0
        ]
        assert made.gemm1_clamp_limit.unique().tolist() == [7.0]
    if name in TRTLLM:
        # vLLM's runner crops: what the class writes is as wide as what it was given.
        assert made.hidden_dim_unpadded == plan.hidden_size == made.hidden_dim
        assert made.routing_method_type == config.routing_method
    if silu:
        assert made.w1_scale.shape == (8, 256, 3) and made.w1_scale.stride() == (768, 1, 256)


@pytest.mark.parametrize("name", TRTLLM)
@pytest.mark.parametrize("routing", ["Renormalize", "RenormalizeNaive", "DeepSeekV3"])
def test_the_kernel_receives_the_layers_routing_method(
    name: str, routing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No constant: another layer, another method."""
    layer = usual(name, hidden_size=256, intermediate_size=128, num_experts=8, local_experts=8, top_k=2)
    assert built(name, layer, at_home(name), monkeypatch, routing).experts.routing_method_type.name == routing


def test_deep_gemm_with_float32_scales_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM's own switch is asked")
    monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: False)
    layer = usual("deep_gemm_mxfp4")
    plan = backend("deep_gemm_mxfp4").plan(layer, gpu(100))
    with pytest.raises(OracleError, match="VLLM_USE_DEEP_GEMM_E8M0"):
        backend("deep_gemm_mxfp4").build_experts({}, layer, plan, Recorder())  # type: ignore[arg-type]


# --- The order of candidates ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "activation", "first"),
    [
        ("gpt_oss", GPT_OSS, "trtllm_mxfp4_monolithic"), ("quark", GPT_OSS, "trtllm_mxfp4_monolithic"),
        ("online", SILU, "trtllm_mxfp4_monolithic"), ("mxfp4", SILU, "marlin_mxfp4"),
        ("compressed-tensors", SILU, "marlin_mxfp4"), ("auto-round", SILU, "marlin_mxfp4"),
    ],
)  # fmt: skip
def test_stock_has_two_lists_and_a_few_classes_without_one(packing: str, activation: Any, first: str) -> None:
    layer = usual("trtllm_mxfp4", scheme=Scheme("mxfp4", 4, 32, packing), activation=activation)
    assert decide(layer, gpu(100), Settings()).backend == first


@pytest.mark.parametrize("packing", ["gpt_oss", "mxfp4"])
def test_declared_mxfp8_goes_to_what_quantizes(packing: str) -> None:
    """In gpt-oss's list by stock's `_filter_by_activation`; the others' has no 16-bit kernels before these."""
    layer = usual("trtllm_mxfp4_a8_monolithic", scheme=Scheme("mxfp4", 4, 32, packing))
    assert layer.scheme.activations == "mxfp8"
    assert decide(layer, gpu(100), Settings()).backend == "trtllm_mxfp4_a8_monolithic"


@pytest.mark.parametrize(("packing", "first"), [("mxfp4", "humming_mxfp4"), ("compressed-tensors", "marlin_mxfp4")])
def test_compressed_tensors_gets_marlin_on_hopper_too(packing: str, first: str) -> None:
    layer = usual("cutlass_mxfp4", scheme=Scheme("mxfp4", 4, 32, packing), activation=SILU, has_bias=False)
    assert decide(layer, gpu(90), Settings()).backend == first
