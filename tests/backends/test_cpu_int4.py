"""vLLM's int4 experts on this CPU agree with the reference, and its check finds each fault: with AMX or without it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from tests.lib import forked
from tests.lib.cases import INT4_G128, problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.oracle.registry import default_registry

SMALL: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 128}

SCRIPT = """
from tests.gpu import backend_table
from tests.gpu.backend_table import Case
from tests.gpu.table_wna16 import CT, TABLE
from tests.lib.cases import int_scheme
from vllm_moe_oracle import plugin
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.verification import self_check
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.schemes import wna16

backend_table.join_alone("cpu")
backend = default_registry()["cpu_int4"]
plugin.register()
for case in (
    Case("g32", int_scheme(CT, 4, 32), 8, 2, 256, 96),
    Case("g64", int_scheme("awq", 4, 64), 8, 2, 256, 128),
    Case("g128", int_scheme("gptq", 4, 128), 8, 2, 256, 128),
):
    built = backend_table.build(TABLE, case, TABLE.checkpoint(case, "cpu"), "cpu", "auto", own="emulation")
    method = built.method
    problem = method.decision.problem
    assert not backend.check(problem, detect.detect()).reasons
    raw = wna16.read(dict(built.layer.named_parameters(recurse=False)), problem)
    plan = backend.plan(problem, detect.detect())

    def run(tried):
        return self_check.compare_with_reference(tried, problem, plan, raw, method.moe, method.adapter)

    result = run(backend)
    assert result.passed and not result.skip_reason, str(result)
    for name, fault in backend_table.faults(case).items():
        assert not run(backend_table._Faulty(backend, fault)).passed, name
    built.close()
print("done")
"""


def test_it_agrees_with_the_reference_and_faults_show() -> None:
    pytest.importorskip("vllm._custom_ops")
    layer = problem(**SMALL, scheme=INT4_G128, dtype="bfloat16")
    layer = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, group_size=64, activations="int8"))
    missing = [str(each) for each in default_registry()["cpu_int4"].check(layer, detect.detect()).reasons]
    if missing:
        pytest.skip(f"here it is refused: {missing}")
    done = forked.python(SCRIPT, dict(os.environ))
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr
