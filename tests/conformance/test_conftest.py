"""What holds for every conformance test holds where a third party starts them, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.lib.fresh_process import python

ROOT = Path(__file__).parents[2]


def test_every_conformance_test_has_one_thread(tmp_path: Path) -> None:
    plan = ("-m", "pytest", "-p", "no:cacheprovider", "--setup-plan", "--pyargs", "vllm_moe_oracle.testing")
    done = python(*plan, cwd=tmp_path, PYTHONPATH=str(ROOT))
    tests = [line for line in done.stdout.splitlines() if "::test_" in line]
    assert done.returncode == 0 and tests, done.stdout + done.stderr
    assert not [line for line in tests if "one_thread" not in line]


def test_so_have_the_tests_here(request: pytest.FixtureRequest) -> None:
    assert "one_thread" in request.fixturenames and torch.get_num_threads() == 1
