"""Decisions for common models, shards and GPUs are the golden ones; each difference from stock vLLM has a reason."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.lib import golden_decisions
from tests.lib.golden_decisions import FULL_TEXT_FILE, GENERATE, GPUS, GoldenTable, count_changes, device_of, full_text
from tests.lib.golden_tables import TABLES
from tests.lib.stock_choice_mxfp4 import CONSUMED, MODELS
from tests.lib.stock_choice_mxfp4 import GOLDEN as MXFP4
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings

each_table = pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)


@each_table
def test_decisions_are_the_golden_ones(table: GoldenTable) -> None:
    expected = {table.place(row): row for row in table.rows()}
    for row in table.compute():
        kept = expected.pop(table.place(row))
        assert row == {name: kept[name] for name in row}, f"{table.place(row)}: {GENERATE}"
    assert not expected


def test_every_sentence_of_ten_decisions() -> None:
    assert full_text(TABLES) == FULL_TEXT_FILE.read_text(), GENERATE


@pytest.mark.matrix  # runs code from the sources of the newest release
@each_table
@pytest.mark.parametrize("capability", GPUS)
def test_stock_choices_are_the_golden_ones(table: GoldenTable, capability: int) -> None:
    rows = [row for row in table.rows() if row["sm"] == capability]
    assert rows
    for row in rows:
        found = table.stock(table.layer_of(row), capability)
        assert found == row["stock"], f"{table.place(row)}: {GENERATE} --stock"


@each_table
def test_every_difference_from_stock_has_a_reason(table: GoldenTable) -> None:
    for row in table.rows():
        assert row["difference"] == table.difference(row), table.place(row)
    assert {row["difference"] for row in table.rows()} == {"", *table.differences}


@each_table
def test_renewed_decisions_keep_stocks_choices_and_need_reasons(
    table: GoldenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = table.path.read_text()
    assert table.renewed(text) == text
    backend = table.rows()[0]["ours"]["backend"]
    stale = text.replace(f'"backend": "{backend}"', '"backend": "another"', 1)
    assert stale != text and table.renewed(stale) == text
    monkeypatch.setattr(golden_decisions, "codes_of", lambda *_: {"backend": "another", "class": "Another"})
    with pytest.raises(ValueError, match=f"another is chosen, .* tests/lib/stock_choice_{table.name}.py"):
        table.renewed(text)


def test_stocks_choices_are_computed_where_the_file_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a row that it lacks, for a file of another release, and on request."""
    asked = []

    def stock(problem: Problem, capability: int) -> dict[str, str]:
        asked.append((problem, capability))
        return {"backend": "computed", "class": ""}

    table = dataclasses.replace(MXFP4, stock=stock, difference=lambda row: "")
    monkeypatch.setattr(golden_decisions, "codes_of", lambda *_: {"backend": "one"})
    text = table.renewed("")
    count = len(golden_decisions.rows_of(text))
    assert len(asked) == count and table.renewed(text) == text and len(asked) == count
    held = json.loads(text)
    lacking = json.dumps(held | {"rows": held["rows"][1:]})
    assert table.renewed(lacking) == text and len(asked) == count + 1
    older = text.replace(held["conditions"]["stock"], "vLLM 0.1.0")
    assert table.renewed(older) == text and len(asked) == 2 * count + 1
    assert table.renewed(text, stock=True) == text and len(asked) == 3 * count + 1
    assert count_changes(lacking, text) == f"1 of {count} decisions"
    assert count_changes(text, lacking) == f"0 of {count - 1} decisions, 1 gone"


@each_table
def test_every_rejection_has_a_reason(table: GoldenTable) -> None:
    for row in table.rows():
        ours, scheme = row["ours"], table.layer_of(row).scheme.name
        rejected = " ".join(ours["rejected"].values()).split()
        assert sorted([*ours["accepted"], *rejected]) == sorted(
            each.name for each in default_registry().for_scheme(scheme)
        )
        assert "" not in ours["rejected"]
        assert ours["backend"] in (ours["accepted"] or ["none"])


def test_mxfp4_differs_where_stock_quantizes_activations_unasked() -> None:
    for row in MXFP4.rows():
        unasked = "activations" in row["stock"] and MODELS[row["model"]][-1] == "16bit"
        assert unasked == row["difference"].startswith("unasked"), MXFP4.place(row)
        if not row["difference"]:
            # One class may take activations in several precisions: these are the same, too.
            consumed = default_registry()[row["ours"]["backend"]].activations(MXFP4.layer_of(row))
            assert consumed == CONSUMED[row["stock"].get("activations", "")], MXFP4.place(row)
        emulated = row["stock"]["backend"] == "EMULATION"
        assert emulated == (row["difference"] == "emulated"), MXFP4.place(row)


def test_mxfp4_follows_stock_where_activations_may_be_quantized() -> None:
    row = next(row for row in MXFP4.rows() if row["difference"] == "unasked")
    settings = Settings(allow_activation_quantization=True)
    allowed = decide(MXFP4.layer_of(row), device_of(row["sm"]), settings)
    assert default_registry()[allowed.backend].stock_class_name == row["stock"]["class"]


def test_a_rank_of_gpt_oss_holds_whole_blocks() -> None:
    found = {(row["ranks"], row["intermediate"]) for row in MXFP4.rows() if row["model"].startswith("gpt-oss")}
    assert found == {("TP1", 2880), ("TP2", 1440), ("TP4", 736), ("TP8", 384), ("EP8", 2880)}
