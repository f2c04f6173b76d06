"""The example that follows one tensor runs on a CPU, uses the public API alone, and restores the checkpoint's bytes."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.lib.fresh_process import python

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "follow_one_tensor.py"


def test_it_shows_the_way_and_comes_back() -> None:
    done = python("-W", "error", EXAMPLE, cwd=ROOT, timeout=600, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert [line[0] for line in done.stdout.splitlines() if line[1:2] == "."] == list("123456")
    assert "all 65536 codes of w13 are the checkpoint's" in done.stdout


def test_it_imports_the_public_api_alone() -> None:
    nodes = [node for node in ast.walk(ast.parse(EXAMPLE.read_text())) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in nodes} - {"__future__", "typing", "torch"}
    assert modules == {"vllm_moe_oracle.api"}
