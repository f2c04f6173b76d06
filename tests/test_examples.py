"""The examples run, and the page that explains backends shows the example's very code."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.lib import smollm2
from tests.lib.fresh_process import python
from vllm_moe_oracle.backends import Backend, Rule

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "add_a_backend.py"
PAGE = ROOT / "vllm_moe_oracle" / "backends" / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_backend_is_chosen_and_matches_the_emulation() -> None:
    done = python("-W", "error", EXAMPLE, cwd=ROOT, timeout=600, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "dequantized_once (static: " in done.stdout
    assert re.search("dequantized_once +does not add expert biases, the layer has them", done.stdout)
    found = re.search(r"emulation: ([\d.]+); tolerance ([\d.]+)", done.stdout)
    assert found and 0 < float(found[1]) <= float(found[2])


def test_the_page_shows_the_code_of_the_example() -> None:
    complete = blocks("python")[-1]
    assert complete.rstrip() in EXAMPLE.read_text(encoding="utf-8")
    (backend,) = (node for node in ast.parse(complete).body if isinstance(node, ast.ClassDef))
    assert backend.name == "DequantizedOnce" and "BACKEND = DequantizedOnce()" in complete


def test_the_page_names_everything_in_the_contract() -> None:
    text = PAGE.read_text(encoding="utf-8")
    members = {name for name in vars(Backend) if not name.startswith("_")} | set(Backend.__annotations__)
    for name in members:
        assert f"| `{name}`" in text or f"| `{name}(" in text, name


def test_the_pages_rule_is_a_rule() -> None:
    (text,) = (each for each in blocks("python") if each.startswith("Rule("))
    rule = eval(text, {"Rule": Rule})
    assert isinstance(rule, Rule) and rule.code == "shared_memory"


def served(*options: str) -> str:
    """What `examples/serve.sh` prints."""
    command = ["bash", str(ROOT / "examples" / "serve.sh"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "stopped the server" in done.stdout
    return done.stdout


@pytest.mark.full
@pytest.mark.skipif(not (ROOT / ".venv").is_dir(), reason="would make the environment first")
def test_a_tiny_checkpoint_is_served_and_the_decisions_are_shown() -> None:
    assert "2 of 2 MoE layers" in served("--tiny")


@pytest.mark.full
@pytest.mark.skipif(bool(smollm2.missing()), reason=smollm2.missing())
@pytest.mark.parametrize("format", ["mxfp8", pytest.param("gptq-int4-g32", marks=pytest.mark.matrix)])
def test_a_real_model_answers_in_english(format: str) -> None:
    printed = served("--format", format)
    assert "30 of 30 MoE layers" in printed and "cpu_dequantized" in printed
    found = re.search(r"(\d+) tokens, [\d.]+ tokens/s, first token after [\d.]+ s", printed)
    assert found and 40 <= int(found[1]) <= 96  # the model may end before the limit; it depends on the CPU's rounding
    assert "sky" in printed.partition("asking: Why is the sky blue?")[2]
