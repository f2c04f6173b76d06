"""What stock vLLM takes, by this package's rules, is what its code takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.lib.cases import CPU, H200, INT4_G128, MXFP8_W8A8, problem
from tests.lib.golden_decisions import GoldenTable, agrees, device_of
from tests.lib.golden_tables import TABLES
from tests.lib.releases import DEFAULT_RELEASE, sources
from tests.lib.stock_code import QUANTIZATION
from vllm_moe_oracle import cli
from vllm_moe_oracle.core.problem import Parallel, Scheme
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import evaluate_candidates
from vllm_moe_oracle.oracle.stock_choice import choose_stock
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import NEWEST, packages_of
from vllm_moe_oracle.settings import Settings


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_rules_choose_as_the_code_of_the_newest_release(table: GoldenTable) -> None:
    for row in table.rows():
        found = choose_stock(table.layer_of(row), device_of(row["sm"]), default_registry())
        assert agrees(found, row["stock"]), (table.place(row), found)


def test_stock_has_no_kernel_that_takes_tokens_by_expert() -> None:
    """Computed from the code of the newest release: Marlin alone has such a class, and not for MXFP8."""
    parallel = Parallel(ep=8, dp=8, format="batched")
    found = choose_stock(problem(scheme=MXFP8_W8A8, parallel=parallel), H200, default_registry())
    assert str(found) == "cannot run it: ValueError: No MXFP8 MoE backends available"
    found = choose_stock(problem(scheme=Scheme("mxfp4", 4, 32, "mxfp4"), parallel=parallel), H200, default_registry())
    assert found.stock_class == "BatchedMarlinExperts"


def test_stocks_class_for_mxfp4_on_cpus_needs_amx() -> None:
    layer = problem(scheme=Scheme("mxfp4", 4, 32, "gpt_oss"))
    found = choose_stock(layer, CPU, default_registry())
    assert "NotImplementedError: No MXFP4 MoE backend supports the deployment configuration" in found.refusal
    amx = dataclasses.replace(CPU, features=(*CPU.features, "amx_tile"))
    assert choose_stock(layer, amx, default_registry()).unknown


def test_what_the_rules_do_not_reach_is_not_known() -> None:
    old = dataclasses.replace(H200, packages={**H200.packages, "vllm": "0.23.0"})
    for device, options in ((old, {}), (H200, {"moe_backend": "marlin"})):
        assert choose_stock(problem(scheme=MXFP8_W8A8), device, default_registry(), **options).unknown
    assert choose_stock(problem(scheme=INT4_G128), H200, default_registry(), method="inc").unknown


@pytest.mark.parametrize("options", [{}, {"moe_backend": "marlin"}, {"method": "inc"}])
def test_what_no_kernel_changes_is_known_whatever_is_chosen(options: dict[str, str]) -> None:
    """Adapters that vLLM misapplies, and weights that its loaders cannot fill."""
    registry = default_registry()
    adapters = problem(scheme=INT4_G128, lora=True, parallel=Parallel(dp=2))
    assert "the adapters" in choose_stock(adapters, H200, registry, **options).refusal
    cut = problem(scheme=Scheme("mxfp4", 4, 32, "compressed-tensors"), intermediate_size=48, tp=16)
    assert "ranks cut scale groups" in choose_stock(cut, H200, registry, **options).refusal
    moved = problem(scheme=INT4_G128, eplb=True, parallel=Parallel(ep=2))
    assert bool(choose_stock(moved, H200, registry, **options).refusal) == (not options)  # that is the class's


def test_llm_compressors_mxfp4_with_fp8_activations_got_a_list_later() -> None:
    """Its method is derived from that of experts in halves, and reads their list, from which Marlin's place follows."""
    layer = problem(scheme=Scheme("mxfp4", 4, 32, "compressed-tensors", activations="fp8_token"))
    old = dataclasses.replace(H200, packages=H200.packages | {"vllm": "0.30.0"})
    assert choose_stock(layer, old, default_registry()).stock_class == "MarlinExperts"
    halves = dataclasses.replace(layer, scheme=Scheme("mxfp4", 4, 32, "mxfp4"))
    for capability, name in ((80, "marlin"), (90, "humming"), (100, "trtllm")):
        found = choose_stock(layer, device_of(capability), default_registry())
        assert found == choose_stock(halves, device_of(capability), default_registry())
        assert found.backend.startswith(name)
    places = [dataclasses.replace(device_of(90), packages=packages_of("cuda", each)) for each in ("0.31.0", NEWEST)]
    order = [[each.backend for each in evaluate_candidates(layer, place, Settings())] for place in places]
    assert [names.index("marlin_mxfp4") < names.index("humming_mxfp4") for names in order] == [True, False]
    method = f"{QUANTIZATION}/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a8_mxfp4.py"
    assert "(Mxfp4MoEMethod):" in (sources(DEFAULT_RELEASE) / method).read_text()
    moved = dataclasses.replace(layer, eplb=True, parallel=Parallel(ep=2))
    assert not choose_stock(moved, H200, default_registry()).refusal
    assert "EPLB is not supported" in choose_stock(moved, old, default_registry()).refusal


def test_the_page_names_the_releases_that_the_rules_reach() -> None:
    page = " ".join((Path(cli.__file__).parent / "README.md").read_text().split())
    mxfp8, mxfp4, integers, cpu = (
        each.removesuffix(".0")
        for each in (
            min_versions.STOCK_RULES_MXFP8, min_versions.STOCK_RULES_MXFP4, min_versions.STOCK_RULES_WNA16,
            min_versions.STOCK_RULES_ON_CPU,
        )
    )  # fmt: skip
    gpus = f"known on GPUs for MXFP8 from {mxfp8}, MXFP4 from {mxfp4} and integers from {integers}"
    assert f"{gpus}, and on CPUs without AMX for MXFP4 from {cpu}" in page
