"""Backends for integer weights: what they say, and what their conversions make of an expert. Kernels run elsewhere, but
for the CPU's; what a conversion means is undone here and compared with what went in."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.bit_moves import undone, undone_expert
from tests.lib.cases import CPU, GPT_OSS, RELU2, SILU
from tests.lib.stock_rules import backend, expert, gpu, home, usual
from tests.lib.stock_rules import wna16_scheme as scheme
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.problem import Activation, Device, Problem
from vllm_moe_oracle.core.sharding import has_act_order
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.layouts.mma_tiles import pack_nibbles
from vllm_moe_oracle.layouts.scales import permute_group_scales
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.schemes import wna16
from vllm_moe_oracle.settings import Settings
from vllm_moe_oracle.testing.bit_trace import random_inputs

NAMES = (
    "marlin_wna16",
    "marlin_wna16_batched",
    "humming_wna16",
    "humming_wna16_grouped",
    "triton_wna16",
    "trtllm_mxint4",
    "cpu_int4",
    "hopper_wna16",
)
AVX512 = dataclasses.replace(CPU, features=("avx2", "avx512f", "avx512_bf16"))


def at_home(name: str) -> Device:
    return AVX512 if name == "cpu_int4" else gpu(home(name))


def codes_of(name: str, device: Device | None = None, **changes: Any) -> set[str]:
    reasons = backend(name).check(usual(name, **changes), device or at_home(name)).reasons
    return {reason.code for reason in reasons}


# --- What they take ------------------------------------------------------------------------------------------------


# name: bits, groups, zero points of 4 and of 8 bits, act orders, bias
TAKES: dict[str, tuple[set[int], set[int], set[int], set[str], bool]] = {
    "marlin_wna16": ({4, 8}, {-1, 32, 64, 128}, {4}, {"none", "static"}, True),
    "marlin_wna16_batched": ({4, 8}, {-1, 32, 64, 128}, {4}, {"none", "static"}, True),
    "humming_wna16": ({4, 8}, {-1, 32, 64, 128}, {4, 8}, {"none", "static"}, True),
    "humming_wna16_grouped": ({4, 8}, {-1, 32, 64, 128}, {4, 8}, {"none", "static"}, True),
    "triton_wna16": ({4, 8}, {-1, 32, 64, 128}, {4, 8}, {"none", "static"}, False),
    "trtllm_mxint4": ({4}, {32}, set(), {"none", "static"}, False),
    "cpu_int4": ({4}, {32, 64, 128}, set(), {"none", "static"}, False),
    "hopper_wna16": ({4, 8}, {-1, 32, 64, 128}, {4, 8}, {"none", "static"}, True),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_of_the_format_they_take(name: str) -> None:
    """Every cell of bits, group, zero points, act order and bias is taken or refused with the reasons of that cell."""
    bits, groups, zeros, orders, bias = TAKES[name]
    for width in (4, 8):
        for group in (-1, 32, 64, 128):
            for zero in (False, True):
                for order in ("none", "static", "group"):
                    for biased in (False, True):
                        found = codes_of(name, scheme=scheme(width, group, zero, order), has_bias=biased)
                        expected = set()
                        expected |= set() if width in bits else {"bits"}
                        expected |= set() if group in groups else {"group"}
                        if zero and width not in zeros:
                            expected |= {"zero_points.bits"} if zeros else {"zero_points"}
                        if biased and not bias:
                            expected |= {"bias"}
                        # With one scale a row no order changes anything.
                        if order == "group" and group != -1 and name.startswith("marlin"):
                            expected |= {"act_order.vllm_version"} | ({"act_order.zero_points"} if zero else set())
                        elif order not in orders and group != -1:
                            expected |= {"act_order"}
                        assert found == expected, (width, group, zero, order, biased)


@pytest.mark.parametrize("name", ["marlin_wna16", "marlin_wna16_batched"])
def test_marlin_reorders_features_until_0_29(name: str) -> None:
    ordered = scheme(order="group")
    for release, taken in (("0.22.1", True), ("0.29.0", True), ("0.30.0", False), (NEWEST, False)):
        codes = codes_of(name, gpu(90, vllm=release), scheme=ordered)
        assert codes == (set() if taken else {"act_order.vllm_version"})
    assert codes_of(name, gpu(90, vllm="0.29.0"), scheme=scheme(order="group", zeros=True)) == {"act_order.zero_points"}


def test_marlin_reorders_features_of_several_groups_only() -> None:
    old, ordered = gpu(90, vllm="0.29.0"), scheme(order="group")
    for sizes in ({"hidden_size": 128}, {"intermediate_size": 128}):
        assert codes_of("marlin_wna16", old, scheme=ordered, **sizes) == {"act_order.groups"}
        assert codes_of("marlin_wna16", old, scheme=scheme(), **sizes) == set()
    # A rank of several has the scales of all groups, and an index into them.
    assert codes_of("marlin_wna16", old, scheme=ordered, intermediate_size=128, tp=2) == set()


def test_marlin_takes_bytes_since_0_23() -> None:
    assert codes_of("marlin_wna16", gpu(90, vllm="0.22.1"), scheme=scheme(8)) == {"bits.vllm_version"}
    assert codes_of("marlin_wna16", gpu(90, vllm="0.23.0"), scheme=scheme(8)) == set()


@pytest.mark.parametrize("packing", ["gptq", "gptq_v2", "awq", "moe_wna16", "compressed-tensors"])
@pytest.mark.parametrize("name", NAMES)
def test_how_the_file_packs_is_nothing_to_a_kernel(name: str, packing: str) -> None:
    group = 32 if name == "trtllm_mxint4" else 128
    assert codes_of(name, scheme=scheme(group=group, packing=packing)) == set()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("activation", "taken"),
    [
        (GPT_OSS, ("marlin", "humming", "triton", "hopper")),
        (Activation("silu", limit=7.0), ("marlin", "humming", "triton", "hopper")),
        (Activation("silu", alpha=1.702), ("hopper",)),
        (RELU2, ("marlin", "humming", "triton", "hopper")),
        (Activation("gelu_tanh"), ("marlin", "humming", "triton", "hopper")),
        (Activation("swigluoai", alpha=1.702, beta=1.0), ("hopper",)),
    ],
)
def test_activations_and_their_parameters(name: str, activation: Activation, taken: tuple[str, ...]) -> None:
    codes = codes_of(name, activation=activation)
    assert (not codes) == (name.partition("_")[0] in taken), codes
    assert codes <= {"activation", "activation.parameters", "activation.limit"}


def test_triton_passes_a_limit_since_0_28() -> None:
    clamped = Activation("silu", limit=7.0)
    for release, taken in (("0.27.1", False), ("0.28.0", True)):
        assert (not codes_of("triton_wna16", gpu(90, vllm=release), activation=clamped)) == taken


@pytest.mark.parametrize("name", NAMES)
def test_batched_activations_are_for_functions_and_one_class(name: str) -> None:
    """The all-to-alls that sort tokens by expert have one kernel of vLLM's here; other classes refuse them."""
    batched = codes_of(name, format="batched", **({} if name == "humming_wna16_grouped" else {"ep": 4}))
    taken = {"marlin_wna16_batched", "emulation", "hopper_wna16", "hopper_wna16_act_order"}
    assert ("format" in batched) == (name not in taken)
    assert ("format" in codes_of(name, format="standard")) == (name == "marlin_wna16_batched")


@pytest.mark.parametrize("name", [each for each in NAMES if each != "trtllm_mxint4"])
def test_expert_parallelism(name: str) -> None:
    codes = codes_of(name, ep=4, local_experts=32)
    assert codes == {"cpu_int4": {"expert_parallel"}, "humming_wna16": {"humming.kernel_kind"}}.get(name, set())


@pytest.mark.parametrize(
    ("name", "hidden", "inner", "group", "plan"),
    [
        ("marlin_wna16", 2048, 768, 128, (2048, 768)),
        ("marlin_wna16", 2688, 928, 32, (2688, 960)),
        ("marlin_wna16_batched", 2688, 928, 32, (2688, 960)),
        ("triton_wna16", 2688, 928, 32, (2688, 960)),
        ("humming_wna16", 2688, 928, 32, (2688, 928)),
        ("hopper_wna16", 2688, 928, 32, (2688, 928)),
        ("trtllm_mxint4", 7168, 256, 32, (7168, 256)),
        ("trtllm_mxint4", 2880, 352, 32, (3072, 512)),
    ],
)
def test_padding_is_shown(name: str, hidden: int, inner: int, group: int, plan: tuple[int, int]) -> None:
    chosen = usual(name, hidden_size=hidden, intermediate_size=inner, scheme=scheme(group=group))
    found = backend(name).plan(chosen, at_home(name))
    assert (found.hidden_size, found.intermediate_size) == plan
    assert backend(name).check(chosen, at_home(name)).reasons == ()


def test_a_group_across_ranks_is_refused_with_its_arithmetic() -> None:
    layer = usual("marlin_wna16", intermediate_size=80, tp=2, scheme=scheme(packing="compressed-tensors", group=32))
    for name in ("marlin_wna16", "humming_wna16", "triton_wna16", "hopper_wna16"):
        words = str([reason for reason in backend(name).check(layer, gpu(90)).reasons if "group" in reason.code])
        assert "160 / 2 = 80" in words and "80 mod 32 = 16" in words
        assert "TP 1" in words and "--enable-expert-parallel" in words


def test_hidden_sizes_with_a_partial_tile() -> None:
    reasons = backend("marlin_wna16").check(usual("marlin_wna16", hidden_size=2880, scheme=scheme(group=32)), gpu(90))
    assert str(reasons.reasons[0]) == "hidden size 2880 is not a multiple of 128 (2880 mod 128 = 64)"


def test_the_cpu_operator_needs_permission_to_quantize_activations() -> None:
    layer = usual("cpu_int4")
    assert "feature" in codes_of("cpu_int4", CPU)
    assert "package" in codes_of("cpu_int4", dataclasses.replace(AVX512, packages={"vllm": "0.29.0"}))
    assert decide(layer, AVX512, Settings()).backend == "cpu_dequantized"
    assert decide(layer, AVX512, Settings(allow_activation_quantization=True)).backend == "cpu_int4"
    with pytest.raises(NoBackendError, match="would quantize activations to int8"):
        decide(layer, AVX512, Settings(backend="cpu_int4"))


# --- Choices --------------------------------------------------------------------------------------------------------


KIMI_TP8 = {"experts": 384, "hidden_size": 7168, "intermediate_size": 256, "tp": 8}


@pytest.mark.parametrize(
    ("changes", "capability", "chosen"),
    [
        ({}, 90, "humming_wna16"),
        ({"scheme": scheme(8)}, 90, "humming_wna16"),
        ({"scheme": scheme(group=32)}, 90, "humming_wna16"),
        ({"scheme": scheme(group=32), **KIMI_TP8}, 90, "humming_wna16"),
        ({"scheme": scheme(zeros=True)}, 90, "humming_wna16"),
        ({"has_bias": True}, 90, "humming_wna16"),
        ({"batch_invariant": True}, 90, "hopper_wna16"),
        ({}, 80, "marlin_wna16"),
        ({}, 100, "marlin_wna16"),
        ({"scheme": scheme(group=32), **KIMI_TP8}, 100, "marlin_wna16"),
        ({"scheme": scheme(8, zeros=True)}, 80, "triton_wna16"),
        ({"scheme": scheme(order="group")}, 90, "hopper_wna16_act_order"),
        ({"scheme": scheme(order="group"), "tp": 2, "intermediate_size": 384}, 90, ""),
        ({"scheme": scheme(order="group")}, 80, ""),
    ],
)
def test_choices(changes: dict[str, Any], capability: int, chosen: str) -> None:
    layer = usual("marlin_wna16", **changes)
    if not chosen:
        with pytest.raises(NoBackendError, match="emulation runs it slowly: MOE_ORACLE_BACKEND=emulation"):
            decide(layer, gpu(capability), Settings())
        return
    decision = decide(layer, gpu(capability), Settings())
    assert (decision.backend, decision.why) == (chosen, "static")


def test_an_explicit_choice_is_kept_where_another_would_win() -> None:
    """Stock takes Marlin for a layer that Marlin can run, whatever the user asked for."""
    decision = decide(usual("triton_wna16"), gpu(90), Settings(), moe_backend="triton")
    assert (decision.backend, decision.why) == ("triton_wna16", "user")


# --- What they make of an expert -----------------------------------------------------------------------------------


# Where the scale of row 8 i + j of 64 goes when it multiplies codes, and of row 2 i + j of 32 when it multiplies sums:
# humming-kernels, ``transform_humming_weight_scale``; vLLM, ``get_scale_perms``.
ON_CODES = [8 * j + i for i in range(8) for j in range(8)]
ON_SUMS = [2 * i + 8 * j + k for i in range(4) for j in range(4) for k in (0, 1)]


@pytest.mark.parametrize("name", ["marlin_wna16", "marlin_wna16_batched", "humming_wna16", "humming_wna16_grouped"])
def test_a_matrix_as_wide_as_its_group_has_its_scales_in_order(name: str) -> None:
    """Marlin's operator takes a single group for one scale a row, which multiplies sums. Humming's kernels are compiled
    for the group's size: a single group's scales multiply codes."""
    for group, hidden, inner, bits in itertools.product((-1, 32, 64, 128), (128, 256), (32, 64, 128, 256), (4, 8)):
        if inner % max(group, 1):
            continue
        layer = usual(name, hidden_size=hidden, intermediate_size=inner, scheme=scheme(bits, group))
        plan = backend(name).plan(layer, gpu(90))
        one = expert(layer)
        converted = backend(name).convert(one, layer, plan)
        for which in ("w13", "w2"):
            found, original = converted[f"{which}_scale"], one[f"{which}_scale"]
            single = found.shape[0] == 1 if name.startswith("marlin") else group == -1
            places = torch.tensor(ON_SUMS if single else ON_CODES)
            if which == "w13" and plan.pads(layer):
                original = torch.cat([torch.nn.functional.pad(half, (0, 0, 0, 32)) for half in original.chunk(2)])
            rows = torch.nn.functional.pad(original, (0, 0, 0, found.shape[1] - original.shape[0]))
            expected = rows.unflatten(0, (-1, len(places)))[:, places].flatten(0, 1).T
            assert torch.equal(found[: expected.shape[0]], expected), (which, group, hidden, inner, bits)


def test_biases_and_scales_come_in_the_models_dtype() -> None:
    layer = usual("marlin_wna16", hidden_size=128, intermediate_size=128, has_bias=True)
    source = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in expert(layer).items()}
    for name in ("marlin_wna16", "humming_wna16"):
        converted = backend(name).convert(source, layer, backend(name).plan(layer, gpu(90)))
        floats = {tensor.dtype for tensor in converted.values() if tensor.is_floating_point()}
        assert floats == {torch.bfloat16}


def _padded_layers() -> list[tuple[str, Problem]]:
    """Layers that backends take whose kernels know no padding."""
    layers = [
        (name, usual(
            name, hidden_size=128, intermediate_size=96, experts=2, top_k=2, activation=activation,
            scheme=scheme(bits, group, zeros, packing="compressed-tensors"), has_bias=name == "marlin_wna16",
        ))
        for name in ("marlin_wna16", "triton_wna16", "trtllm_mxint4")
        for bits, group, zeros in itertools.product((4, 8), (32, -1), (False, True))
        for activation in (SILU, GPT_OSS, RELU2)
    ]  # fmt: skip
    widened = [
        (name, dataclasses.replace(each, num_experts=8, local_experts=8)) if name == "trtllm_mxint4" else (name, each)
        for name, each in layers
    ]
    return [(name, each) for name, each in widened if not backend(name).check(each, at_home(name)).reasons]


def test_layers_with_padding_are_of_every_backend_that_pads() -> None:
    found = [name for name, _ in _padded_layers()]
    assert {name: found.count(name) for name in found} == {"marlin_wna16": 18, "triton_wna16": 24, "trtllm_mxint4": 1}
    pads = {
        name
        for name in NAMES
        for inner in (96, 160, 352)
        for hidden in (128, 384)
        for each in [usual(name, hidden_size=hidden, intermediate_size=inner, scheme=scheme(group=32))]
        if backend(name).plan(each, at_home(name)).pads(each)
    }
    assert pads == {*found, "marlin_wna16_batched"}  # whose conversion is Marlin's


@pytest.mark.parametrize(("name", "each"), _padded_layers(), ids=lambda value: str(getattr(value, "scheme", value)))
def test_garbage_in_padded_codes_and_zero_points_changes_nothing(name: str, each: Problem) -> None:
    """Padding is scales of zero. The padded layer is computed by the reference, its padded codes set to anything, and
    its inputs beyond the layer's own too."""
    plan = backend(name).plan(each, at_home(name))
    assert plan.intermediate_size > 96
    wide = dataclasses.replace(each, hidden_size=plan.hidden_size, intermediate_size=plan.intermediate_size)
    whole = dataclasses.replace(plan, hidden_size=wide.hidden_size, intermediate_size=wide.intermediate_size)
    inputs = random_inputs(wide, expert(wide), 64)
    experts, padded = [], []
    for index in range(2):
        one = expert(each, index)
        made = backend(name).convert(one, each, plan)
        full = undone_expert(lambda given: backend(name).convert(given, wide, whole), made, inputs)
        generator = torch.Generator().manual_seed(index)
        for key in ("w13", "w2", "w13_zero_point", "w2_zero_point"):
            if key not in full:
                continue
            high = 16 if "zero" in key and each.scheme.bits == 4 else 256
            garbage = torch.randint(0, high, full[key].shape, generator=generator).to(torch.uint8)
            inside = torch.ones_like(one[key], dtype=torch.bool)
            placed = _placed(inside, full[key].shape, each, key)
            assert not placed.all() or key == "w2_zero_point"
            full[key] = torch.where(placed, full[key], garbage)
        experts.append(one)
        padded.append(full)
    broken = [{**one, "w13_scale": one["w13_scale"].clamp(min=0.01)} for one in padded]
    expected, found, wrong = (
        _output(shape, tensors)[:, : each.hidden_size]
        for shape, tensors in ((each, experts), (wide, padded), (wide, broken))
    )
    # Sums of more columns run in another order: a rounding of the activations to bfloat16 may fall differently.
    assert float((found - expected).norm() / expected.norm()) < 2.0**-9
    assert float((wrong - expected).norm() / expected.norm()) > 2.0**-4


def _output(each: Problem, experts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(9))
    beyond = torch.full((5, each.hidden_size - 128), 1e3)
    out = torch.empty(5, each.hidden_size)
    stacked = {key: torch.stack([one[key] for one in experts]) for key in experts[0]}
    two = dataclasses.replace(each, num_experts=2, local_experts=2)
    forward(
        stacked, two, out, torch.cat((x, beyond), 1).bfloat16(), torch.full((5, 2), 0.5), torch.tensor([[0, 1]] * 5)
    )
    return out


def _placed(inside: torch.Tensor, shape: torch.Size, each: Problem, key: str) -> torch.Tensor:
    """Where the unpadded tensor is in the padded one."""
    found = torch.zeros(shape, dtype=torch.bool)
    halves = 2 if key.startswith("w13") and each.activation.gated else 1
    for room, part in zip(found.chunk(halves), inside.chunk(halves), strict=True):
        room[: part.shape[0], : part.shape[1]] = part
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_marlin_receives_feature_order_and_groups(ranks: int) -> None:
    """What its kernel does with them: column k has input feature ``order[k]`` and the scales of ``group_index[k]``."""
    layer = usual("marlin_wna16", hidden_size=128, intermediate_size=96, tp=ranks, scheme=scheme(4, 32, order="group"))
    assert has_act_order(layer)
    plan = backend("marlin_wna16").plan(layer, gpu(90, vllm="0.29.0"))
    one = expert(layer)
    converted = backend("marlin_wna16").convert(one, layer, plan)
    for which, inner in (("w13", 128), ("w2", 96)):
        words, ordered = converted[which], converted[f"{which}_scale"]
        codes = wna16.unpack_codes(undone(pack_nibbles, words, (words.shape[1] // 2, 8 * len(words))), 4).float() - 8
        plain = undone(permute_group_scales, ordered, ordered.shape[::-1], ordered.dtype)
        values = codes * plain.float()[:, converted[f"{which}_group_index"].long()]
        weights = torch.empty_like(values)
        weights[:, converted[f"{which}_order"].long()] = values
        rows = layer.intermediate_size if which == "w13" else layer.hidden_size
        found = weights[:, :inner].unflatten(0, (2 if which == "w13" else 1, -1))[:, :rows]
        assert torch.equal(found.flatten(0, 1), wna16.dequantize_expert(one, which))


@pytest.mark.parametrize("name", ["marlin_wna16", "marlin_wna16_batched"])
def test_marlin_leaves_activations_alone_whatever_its_own_variable_says(name: str) -> None:
    """VLLM_MARLIN_INPUT_DTYPE=fp8 made a model repeat itself; the class reads it when it is made."""
    given: dict[str, Any] = {}

    class Stock:
        def stock(self, class_name: str, **kwargs: Any) -> Any:
            given.update(kwargs, class_name=class_name)
            return SimpleNamespace(input_dtype=torch.float8_e4m3fn)

    layer = usual(name)
    plan = backend(name).plan(layer, at_home(name))
    made = backend(name).build_experts({}, layer, plan, Stock())  # type: ignore[arg-type]
    assert made.input_dtype is None
    assert given["class_name"] == backend(name).stock_class and not given.get("inputs")
