"""Terminals of 60 to 100 columns: no table and no help breaks a name or a number."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.lib.cli import CONFIGS, Run
from vllm_moe_oracle.cli import output
from vllm_moe_oracle.cli.commands import bench
from vllm_moe_oracle.oracle.registry import default_registry

WIDTHS = (60, 80, 100)
NAMES = ["triton_mxfp4_monolithic", "humming_mxfp4", "marlin_mxfp4", "triton_mxfp4_unfused", "hopper_mxfp4", "auto"]
COUNTS = [str(1 << power) for power in range(14)]
TABLES: list[tuple[Sequence[str], list[list[str]]]] = [
    (
        ("tokens", "roofline", *NAMES, "choice"),
        [[count, f"{index}1.5", *(f"{each}7{index}.3{output.GLUE}(3{each}%)" for each in range(6)), "hopper_mxfp4"]
         for index, count in enumerate(COUNTS)],
    ),
    (("us by tokens", *COUNTS), [[name, *(f"{index}{count}" for count in COUNTS)] for index, name in enumerate(NAMES)]),
    (
        ("layer", "verdict", "error", "worst", "allowed", "beyond", "experts", "seconds"),
        [["24", "stock vLLM's", "1.2e-03", "2.3e-03", "4.5e-02", "0", "128/128", "12.3"]],
    ),
    (
        ("", "stock", "plugin", "change (95% interval)"),
        [["time to first token, ms", f"123.4{output.GLUE}(120.1{output.GLUE}to{output.GLUE}130.2)", "103.4", "-12.3%"]],
    ),
    (("setting", "value", "from"), [["allow_activation_quantization", "0", "environment variable " + "X" * 50]]),
    (("setting", "value", "from"), [["", "", "continued"], ["a", "b", ""]]),
]  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("table", range(len(TABLES)))
def test_no_table_breaks_a_word_or_loses_a_cell(
    table: int, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    columns, rows = TABLES[table]
    output.show_table(columns, rows, indent=2)
    out = capsys.readouterr().out
    assert all(len(line) <= width for line in out.splitlines())
    said = out.replace(":", " ").split()
    cells = [cell.replace(output.GLUE, " ") for row in rows for cell in row]
    assert {word for cell in cells for word in cell.split()} <= set(said)


def test_a_table_in_parts_repeats_its_first_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    output.show_table(*TABLES[1])
    parts = capsys.readouterr().out.strip().split("\n\n")
    assert len(parts) > 1 and all(part.split("\n")[0].startswith("us by tokens ") for part in parts)
    assert [count for part in parts for count in part.split("\n")[0].split()[3:]] == COUNTS


@pytest.mark.parametrize("width", [1, 8, 20])
def test_no_width_fails(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for columns, rows in TABLES:
        output.show_table(columns, rows, indent=2)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["gpt-oss-20b", "kimi-k2-thinking"])
def test_explanations_and_status_break_no_name(
    name: str, width: int, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("MOE_ORACLE_CACHE", str(tmp_path))
    monkeypatch.setenv("MOE_ORACLE_ENABLED", "0")  # status then imports no vLLM
    out = run("explain", CONFIGS / f"{name}.json", "--device", "nvidia-h200", "--verbose").out
    monkeypatch.setenv("COLUMNS", "1000")
    wide = run("explain", CONFIGS / f"{name}.json", "--device", "nvidia-h200", "--verbose").out
    words = {word.strip(":,;()") for word in wide.split()}
    assert {word for word in words if not word.startswith("─")} <= {word.strip(":,;()") for word in out.split()}


COMMANDS = ("ab", "bench", "explain", "report", "status", "tune", "verify")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_breaks_no_name_and_fits(command: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERMINAL_WIDTH", str(width))  # what some releases of typer ask
        lines = run(command, "--help").out.splitlines()
        commands = [line for line in lines if line.startswith("    vllm-moe-oracle ")]
        assert all(len(line) <= width for line in lines if line not in commands)
        assert not [line for line in lines if line.endswith("-") and not line.endswith(" --")]
        found[width] = " ".join(lines).split()
    assert found[60] == found[80] == found[100]


def test_help_keeps_long_defaults_and_exit_statuses_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = run("bench", "--help").out
    assert f"{bench.DEFAULT_SCHEMES}]" in out.split() and "--data-parallel-size." in out.split()
    assert "    2  the input or this machine cannot be used; one line\n       on standard error says what\n" in out


def test_every_backend_is_named_whole_on_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_ORACLE_ENABLED", "0")
    monkeypatch.setenv("COLUMNS", "60")
    shown: Callable[[str], bool] = set(run("status", "--verbose").out.replace(":", " ").split()).__contains__
    assert all(map(shown, (each.name for each in default_registry())))


def test_eighty_columns_hold_the_table_of_candidates(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = run("explain", CONFIGS / "gpt-oss-20b.json", "--device", "nvidia-h200").out
    assert re.search(r"^ *candidate +verdict +reasons", out, re.MULTILINE)


@pytest.mark.parametrize(("columns", "least", "most"), [("0", 60, 80), ("1", 10, 20), ("99999999", 60, 1000)])
def test_a_width_that_no_terminal_has_is_not_followed(
    columns: str, least: int, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    output.show(" ".join(["word"] * 500))
    output.show_table(*TABLES[1])
    lines = capsys.readouterr().out.splitlines()
    assert least <= max(map(len, lines)) <= most
    assert sum(line.count("word") for line in lines) == 500
