"""What stock vLLM takes, by this package's rules, is what its code takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.lib.cases import CPU, H200, INT4_G128, MXFP8_W8A8, problem
from tests.lib.golden_decisions import GoldenTable, agrees, device_of
from tests.lib.golden_tables import TABLES
from vllm_moe_oracle import cli
from vllm_moe_oracle.core.problem import Parallel, Scheme
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.stock_choice import choose_stock
from vllm_moe_oracle.releases import min_versions


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
