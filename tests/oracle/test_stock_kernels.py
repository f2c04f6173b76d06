"""On a GPU the emulation is never an automatic choice: a kernel runs a layer, stock vLLM does, or it is an error."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tests.lib.cases import CPU, H200, INT4_G128, MXFP8_W8A8, SILU, problem
from tests.lib.golden_decisions import GPUS, device_of
from vllm_moe_oracle.core.problem import Activation, Device, Parallel, Problem, Routing, Scheme
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import automatic_choices, decide, evaluate_candidates
from vllm_moe_oracle.oracle.stock_choice import choose_stock, is_loadable, stock_wrappers
from vllm_moe_oracle.releases.min_versions import HUMMING_FIRST, release_before
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES, packages_of
from vllm_moe_oracle.settings import Settings

SCHEMES = {
    "mxfp8": MXFP8_W8A8,
    "mxfp8 weights only": Scheme("mxfp8", 8, 32, "modelopt"),
    "mxfp4": Scheme("mxfp4", 4, 32, "mxfp4"),
    "mxfp4 w4a4": Scheme("mxfp4", 4, 32, "compressed-tensors", activations="mxfp4"),
    "int4": INT4_G128,
    "int4 channel": Scheme("wna16", 4, -1, "compressed-tensors"),
    "int4 awq": Scheme("wna16", 4, 128, "awq", True),
    "int8": Scheme("wna16", 8, 128, "gptq"),
    "int4 act order": Scheme("wna16", 4, 128, "gptq", act_order="group"),
}


def llama4(name: str) -> Problem:
    """Llama-4-Scout's MoE layer: one expert a token, whose input the router's weight multiplies."""
    routing = Routing("llama4", "sigmoid", renormalize=False, apply_router_weight_on_input=True)
    return problem(scheme=SCHEMES[name], experts=16, top_k=1, hidden_size=5120, intermediate_size=8192, routing=routing)


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("name", [name for name in SCHEMES if "order" not in name])
def test_router_weights_on_the_input_have_a_kernel_on_every_gpu(name: str, capability: int) -> None:
    if name == "mxfp4 w4a4" and 100 <= capability < 120:
        with pytest.raises(NoBackendError):
            decide(llama4(name), device_of(capability), Settings())
        found = choose_stock(llama4(name), device_of(capability), default_registry())
        assert found.runs and found.stock_class == "CutlassExpertsMxfp4"
        return
    decision = decide(llama4(name), device_of(capability), Settings())
    assert (
        decision.backend != "emulation"
        and default_registry()[decision.backend].capabilities.apply_router_weight_on_input
    )
    if name.startswith("int4 a") or name == "int4":
        assert {"marlin_wna16", "triton_wna16"} <= {each.backend for each in decision.candidates if each.accepted}


@pytest.mark.parametrize(
    "release",
    [pytest.param(each, marks=() if each in (RELEASES[0], NEWEST) else pytest.mark.full) for each in RELEASES],
)
def test_no_gpu_gets_the_emulation_unasked(release: str) -> None:
    """Over layers with features that some backend refuses; every release between is in the full tier."""
    changes = [
        {}, {"dtype": "float32"}, {"dtype": "float16"}, {"has_bias": True}, {"lora": True}, {"eplb": True},
        {"batch_invariant": True}, {"hidden_size": 2050}, {"intermediate_size": 96}, {"format": "batched"},
        {"activation": Activation("gelu", limit=7.0)}, {"activation": Activation("relu2", gated=False)},
        {"activation": dataclasses.replace(SILU, alpha=1.7)}, {"activation": Activation("unknown")},
        {"top_k": 1, "routing": Routing("llama4", apply_router_weight_on_input=True)},
    ]  # fmt: skip
    outcomes = set()
    for capability, scheme, change in itertools.product(GPUS, SCHEMES.values(), changes):
        device = dataclasses.replace(device_of(capability), packages=device_of(capability).packages | {"vllm": release})
        made = problem(scheme=scheme, **change)  # type: ignore[arg-type]
        try:
            decision = decide(made, device, Settings())
        except NoBackendError as error:
            assert not any(each.accepted for each in error.candidates)
            outcomes.add("stock" if choose_stock(made, device, default_registry()).may_run else "none")
            emulated = [each for each in error.candidates if each.backend == "emulation"]
            able = emulated and emulated[0].reasons[0].code == "by_name"
            assert ("emulation runs it slowly" in error.remedy) == bool(able)
            continue
        outcomes.add("kernel")
        assert decision.backend != "emulation" and "emulation" not in automatic_choices(decision.candidates)
    assert outcomes == {"kernel", "stock", "none"}


@pytest.mark.parametrize(("release", "first"), [(NEWEST, "humming"), (release_before(HUMMING_FIRST), "marlin")])
@pytest.mark.parametrize("name", ["mxfp8", "int4", "int4 awq", "int8"])
def test_the_static_order_is_that_of_the_machines_release(name: str, release: str, first: str) -> None:
    layer, device = problem(scheme=SCHEMES[name]), dataclasses.replace(H200, packages=packages_of("cuda", release))
    candidates = evaluate_candidates(layer, device, Settings())
    found = [each.backend for each in stock_wrappers(candidates, default_registry()) if each.accepted]
    assert found[0] == next(each.backend for each in candidates if each.accepted) == f"{first}_{layer.scheme.name}"
    assert {"humming", "marlin"} <= {each.partition("_")[0] for each in found}


def test_stock_is_named_for_what_its_class_does_not_ask_alone() -> None:
    layer = problem(activation=Activation("gelu", limit=7.0))
    for change, expected in ((layer, True), (dataclasses.replace(layer, dtype="float32"), False)):
        with pytest.raises(NoBackendError):
            decide(change, device_of(80), Settings())
        assert choose_stock(change, device_of(80), default_registry()).runs == expected
        assert not choose_stock(change, CPU, default_registry()).runs
    assert decide(layer, CPU, Settings()).backend == "emulation"
    assert decide(layer, H200, Settings(backend="emulation")).backend == "emulation"


@pytest.mark.parametrize("device", [*map(device_of, GPUS), CPU], ids=lambda device: device.name)
def test_what_vllms_loader_cannot_fill_is_not_left_to_stock(device: Device) -> None:
    """gpt-oss's loader gives each of two ranks three of seven experts."""
    layer = problem(
        scheme=Scheme("mxfp4", 4, 32, "gpt_oss"), num_experts=7, local_experts=4, top_k=4, parallel=Parallel(ep=2),
        activation=Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, interleaved=True), has_bias=True,
        even_expert_split=True,
    )  # fmt: skip
    for each, loadable in ((layer, False), (dataclasses.replace(layer, num_experts=8), True)):
        candidates = evaluate_candidates(each, device, Settings())
        assert is_loadable(candidates) == loadable
        stock = choose_stock(each, device, default_registry())
        assert loadable or "gives each of 2 ranks 3 of 7 experts" in stock.refusal


@pytest.mark.parametrize(
    ("scheme", "capability", "found"),
    [
        (Scheme("mxfp4", 4, 32, "mxfp4"), 90, "from feature 32 on for weights from feature 48 on"),
        (Scheme("mxfp4", 4, 32, "quark"), 100, "from feature 32 on for weights from feature 48 on"),
        (Scheme("mxfp4", 4, 32, "compressed-tensors"), 90, "from feature 32 on for weights from feature 48 on"),
        (Scheme("mxfp8", 8, 32, "compressed-tensors"), 90, "from feature 32 on for weights from feature 48 on"),
        (Scheme("mxfp8", 8, 32, "online", activations="mxfp8"), 90, "ValueError: Online MXFP8 MoE requires"),
        (Scheme("mxfp4", 4, 32, "online", activations="mxfp4"), 100, "CutlassExpertsMxfp4"),
        (Scheme("mxfp4", 4, 32, "online", activations="mxfp4"), 90, "Emulation"),
        (Scheme("wna16", 4, 32, "gptq"), 80, "AssertionError: group_size >= 32"),
        (Scheme("wna16", 4, 32, "compressed-tensors"), 80, "its method needs whole groups of 32 features"),
    ],
)  # fmt: skip
def test_what_stock_does_with_shards_that_cut_scale_groups(scheme: Scheme, capability: int, found: str) -> None:
    """768 features over 16 ranks. Weights in 16 bits alone are padded before they are quantized."""
    layer = problem(scheme=scheme, intermediate_size=48, tp=16)
    with pytest.raises(NoBackendError):
        decide(layer, device_of(capability), Settings())
    for release in RELEASES:
        device = dataclasses.replace(device_of(capability), packages=packages_of("cuda", release))
        stock = choose_stock(layer, device, default_registry())
        assert stock.runs == (release == NEWEST and found.startswith("Cutlass")) or scheme.packing == "online"
        assert bool(stock.refusal) or scheme.packing == "online"
    assert found in str(stock)


@pytest.mark.parametrize(
    ("capability", "scheme", "said"),
    [
        (70, INT4_G128, "have kernels from sm_75 on, none for sm_70"), (75, MXFP8_W8A8, "which needs sm_80"),
        (75, INT4_G128, "MarlinExperts"),
    ],
)  # fmt: skip
def test_what_stock_runs_on_old_gpus(capability: int, scheme: Scheme, said: str) -> None:
    layer, device = problem(scheme=scheme, dtype="float16"), dataclasses.replace(H200, capability=capability)
    stock = choose_stock(layer, device, default_registry())
    assert said in str(stock) and stock.runs == ("Marlin" in said)


@pytest.mark.parametrize(
    ("packing", "activations", "capability", "is_left"),
    [
        ("compressed-tensors", "16bit", 100, False), ("compressed-tensors", "mxfp4", 103, True),
        ("auto-round", "mxfp4", 100, True), ("auto-round", "mxfp4", 90, False),
        ("compressed-tensors", "16bit", 90, False), ("compressed-tensors", "16bit", 120, False),
        ("quark", "mxfp4", 100, True), ("quark", "16bit", 100, False), ("mxfp4", "16bit", 100, False),
    ],
)  # fmt: skip
def test_four_bits_on_both_sides_are_left_to_stocks_kernel(
    packing: str, activations: Any, capability: int, is_left: bool
) -> None:
    """On Blackwell, where nothing shows that a kernel which leaves activations in 16 bits is as fast."""
    layer = problem(scheme=Scheme("mxfp4", 4, 32, packing, activations=activations))
    device = device_of(capability)
    if not is_left:
        assert decide(layer, device, Settings()).backend != "emulation"
        return
    with pytest.raises(NoBackendError) as caught:
        decide(layer, device, Settings())
    assert "no backend wraps" in str(caught.value)
    assert choose_stock(layer, device, default_registry()).stock_class == "CutlassExpertsMxfp4"
    named = decide(layer, device, Settings(backend="marlin_mxfp4", allow_activation_quantization=True))
    assert (named.backend, named.why) == ("marlin_mxfp4", "user")


@pytest.mark.parametrize(
    "change",
    [
        {"intermediate_size": 192}, {"hidden_size": 2080}, {"lora": True}, {"eplb": True}, {"has_bias": True},
        {"batch_invariant": True},
        {"parallel": Parallel(dp=2, ep=2)}, {"activation": dataclasses.replace(SILU, limit=7.0)}, {"release": "0.22.1"},
    ],
    ids=str,
)  # fmt: skip
def test_what_stocks_kernel_cannot_load_is_not_left_to_it(change: dict[str, Any]) -> None:
    """Its method asks the GPU alone, and the load ends later."""
    release = change.get("release", NEWEST)
    fields = {name: value for name, value in change.items() if name != "release"}
    layer = problem(scheme=Scheme("mxfp4", 4, 32, "compressed-tensors", activations="mxfp4"), **fields)
    device = dataclasses.replace(device_of(100), packages=device_of(100).packages | {"vllm": release})
    candidates = evaluate_candidates(layer, device, Settings())
    assert not [each for each in candidates if each.accepted and "Cutlass" in each.answers.only_by_name]
