"""The whole product of bits, group, zero points, act order, bias, packing and gating: every cell is a decision with
reasons on sm_80, sm_90 and sm_100, and emulation of it equals a reference that shares no code with the scheme."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from tests.lib import wna16_product as product
from tests.lib.cases import CPU, problem
from tests.lib.tiers import sampled
from tests.lib.wna16_canonical import to_canonical
from tests.lib.wna16_layers import contents_of, emulation_error, layer_of
from tests.lib.wna16_product import Cell
from vllm_moe_oracle.backends.emulation import BACKEND
from vllm_moe_oracle.core.decision import Accepted, Candidate
from vllm_moe_oracle.core.problem import Device, Scheme
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings
from vllm_moe_oracle.testing.conftest import one_thread  # noqa: F401  # a fixture

CELLS = list(product.cells())
KERNELS = {backend.name for backend in default_registry().for_scheme("wna16")} - {"emulation"}


@functools.cache
def decided(cell: Cell, capability: int) -> tuple[str, tuple[Candidate, ...]]:
    """Several tests read the same decisions."""
    return product.decided(cell, product.DEVICES[capability])


def test_the_product_is_whole() -> None:
    assert len(CELLS) == len(set(CELLS))
    assert {cell.packing: sum(each.packing == cell.packing for each in CELLS) for cell in CELLS} == {
        "gptq": 192, "gptq_v2": 192, "awq": 32, "moe_wna16": 192,
        "compressed-tensors": 160, "compressed-tensors-int": 160,
    }  # fmt: skip


@pytest.mark.parametrize("capability", product.DEVICES)
def test_every_cell_is_a_decision_with_reasons(capability: int) -> None:
    device = product.DEVICES[capability]
    for cell in CELLS:
        chosen, candidates = decided(cell, capability)
        assert {each.backend for each in candidates} == KERNELS | {"emulation"}, cell
        for candidate in candidates:
            assert candidate.accepted or all(each.code and each.detail for each in candidate.reasons), (cell, candidate)
        if chosen:
            assert candidates[0].accepted and candidates[0].backend == chosen in KERNELS, cell
        else:
            assert not any(each.accepted for each in candidates), cell
            by_name = [each.backend for each in candidates if each.reasons[0].code == "by_name"]
            assert by_name == ["emulation"], cell
            named = decide(cell.layer(), device, Settings(), moe_backend="emulation")
            assert (named.backend, named.why) == ("emulation", "user"), cell


@pytest.mark.parametrize("capability", product.DEVICES)
def test_how_a_file_packs_decides_nothing(capability: int) -> None:
    found: dict[Cell, dict[str, str]] = {}
    for cell in CELLS:
        found.setdefault(dataclasses.replace(cell, packing=""), {})[cell.packing] = decided(cell, capability)[0]
    for cell, backends in found.items():
        assert len(set(backends.values())) == 1, (cell, backends)


@pytest.mark.parametrize("capability", product.DEVICES)
def test_only_features_out_of_order_have_no_kernel(capability: int) -> None:
    for cell in CELLS:
        ordered = cell.order == "group" and cell.group != -1
        assert (decided(cell, capability)[0] == "") <= ordered, cell


@pytest.mark.parametrize(("bits", "packing"), sampled(itertools.product([4, 8], product.PACKINGS), 4))
def test_emulation_of_every_cell_equals_the_reference(packing: str, bits: int) -> None:
    for number, cell in enumerate(each for each in CELLS if (each.packing, each.bits) == (packing, bits)):
        layer = layer_of(
            packing, bits, cell.group, cell.zero_points, cell.order, cell.bias, cell.gated,
            experts=3, top_k=2, hidden_size=128, intermediate_size=128, dtype="float32" if number % 2 else "bfloat16",
        )  # fmt: skip
        assert BACKEND.check(layer, product.DEVICES[90]) == Accepted()
        made = contents_of(layer, seed=number)
        transposed = bool(number % 2) if packing.startswith("compressed") else None
        tensors = to_canonical(made.parameters(transposed), layer, transposed)
        assert emulation_error(made, layer, tensors, seed=number) == "", cell


# --- Older releases --------------------------------------------------------------------------------------------------


def card(capability: int, release: str) -> Device:
    """A described GPU with a release of vLLM."""
    return dataclasses.replace(product.DEVICES[capability], packages={**product.INSTALLED, "vllm": release})


@pytest.mark.parametrize("release", ["0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0"])
@pytest.mark.parametrize("packing", ["gptq", "moe_wna16"])
def test_releases_whose_stock_does_not_select_get_the_selection(packing: str, release: str) -> None:
    """Up to 0.26 MoeWNA16 layers run vLLM's Triton kernel and GPTQ's run Marlin, whatever the user asks for."""
    layer = problem(scheme=Scheme("wna16", 4, 128, packing))
    accepted = {each.backend for each in decide(layer, card(90, release), Settings()).candidates if each.accepted}
    assert {"marlin_wna16", "triton_wna16", "hopper_wna16"} <= accepted, accepted
    for wish in ("marlin", "triton"):
        chosen = decide(layer, card(90, release), Settings(), moe_backend=wish)
        assert (chosen.backend, chosen.why) == (f"{wish}_wna16", "user")


@pytest.mark.parametrize("packing", ["gptq", "moe_wna16"])
def test_humming_can_run_as_soon_as_vllm_has_its_experts(packing: str) -> None:
    """It comes behind the other kernels, as in stock vLLM, until vLLM puts it first."""
    layer = problem(scheme=Scheme("wna16", 4, 64, packing))
    for release, wish, chosen in (
        ("0.25.1", "auto", "marlin_wna16"),
        ("0.26.0", "humming", "humming_wna16"),
        ("0.32.0", "auto", "humming_wna16"),
    ):
        assert decide(layer, card(90, release), Settings(), moe_backend=wish).backend == chosen
    candidates = decide(layer, card(90, "0.24.0"), Settings()).candidates
    assert not any(each.accepted for each in candidates if each.backend == "humming_wna16")


# --- Cases -----------------------------------------------------------------------------------------------------------


def test_a_shard_of_split_groups_is_refused_with_both_remedies() -> None:
    layer = problem(scheme=Scheme("wna16", 4, 32, "compressed-tensors"), intermediate_size=80, tp=2, experts=64)
    with pytest.raises(NoBackendError) as error:
        decide(layer, product.DEVICES[90], Settings())
    for words in ("160 / 2 = 80", "80 mod 32 = 16", "TP 1", "expert parallelism over the 2 ranks"):
        assert words in str(error.value)
    whole = problem(scheme=layer.scheme, intermediate_size=160, ep=2, experts=64)
    assert decide(whole, product.DEVICES[90], Settings()).problem.intermediate_size == 160


@pytest.mark.parametrize("packing", ["compressed-tensors", "compressed-tensors-int", "gptq", "awq"])
def test_qwen3_over_four_ranks_has_halved_groups_over_sixteen_is_refused(packing: str) -> None:
    scheme = Scheme("wna16", 4, 128, packing)
    halved = problem(scheme=scheme, intermediate_size=192, tp=4)
    assert decide(halved, product.DEVICES[90], Settings()).backend != "emulation"
    words = r"768 / 16 = 48 is not a multiple of the scale group 32, halved from 128"
    with pytest.raises(NoBackendError, match=words):
        decide(problem(scheme=scheme, intermediate_size=48, tp=16), product.DEVICES[90], Settings())


def test_an_explicit_triton_is_triton_where_marlin_could_run() -> None:
    layer = problem(scheme=Scheme("wna16", 4, 128, "compressed-tensors"))
    found = decide(layer, product.DEVICES[90], Settings(), moe_backend="triton")
    assert (found.backend, found.why) == ("triton_wna16", "user")


@pytest.mark.parametrize(("packing", "group"), [("gptq", 128), ("compressed-tensors", 32)])
def test_int8_with_groups_is_served(packing: str, group: int) -> None:
    for device in product.DEVICES.values():
        assert decide(problem(scheme=Scheme("wna16", 8, group, packing)), device, Settings()).backend != "emulation"


def test_batched_activations_get_a_class_for_them_or_a_refusal() -> None:
    layer = problem(scheme=Scheme("wna16", 4, 128, "compressed-tensors"), format="batched", ep=2)
    found = decide(layer, product.DEVICES[90], Settings(), moe_backend="marlin")
    assert found.backend == "marlin_wna16_batched"
    with pytest.raises(NoBackendError, match="batched"):
        decide(layer, product.DEVICES[90], Settings(), moe_backend="triton")


def test_a_kernel_of_another_architecture_is_refused_at_construction() -> None:
    layer = problem(scheme=Scheme("wna16", 4, 32, "compressed-tensors"))
    with pytest.raises(NoBackendError, match="sm_100"):
        decide(layer, product.DEVICES[90], Settings(), moe_backend="flashinfer_trtllm")


def test_on_a_cpu_every_cell_that_vllm_builds_a_layer_for_is_served() -> None:
    for cell in CELLS:
        if cell.gated:
            assert decide(cell.layer(), CPU, Settings()).backend == "cpu_dequantized", cell
