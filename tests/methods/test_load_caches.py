"""What a module keeps for one load ends with it, and no module keeps anything else between layers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm_moe_oracle import methods
from vllm_moe_oracle.methods import load_caches

FOLDER = Path(methods.__file__).parent

LONGER = {
    "correction_bias._watched": "ends with each layer",
    "first_start._start": "a server's start, with all models that it loads",
    "gptq._reject_act_order": "vLLM's function",
    "load_caches._caches": "the registry",
    "load_caches._kept_for_reload": "the registry",
    "load_summary._model": "reloads are of the same model; another one begins anew",
    "measure_hook._measure": "of the process",
    "weight_loading._brought": "ends with each tensor",
    "weight_loading._filled": "ends with each tensor",
    "weight_loading._loaded_places": "ends with each tensor",
}
"""Variables of modules that outlive a load, each with its reason."""


def variables(module: ast.Module) -> dict[str, ast.expr]:
    """Private variables of a module that are no constants, and what they are made of."""
    found = {}
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name) and target.id.startswith("_") and target.id.islower():
                assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
                found[target.id] = node.value
    return found


def joins(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "per_load"


def test_every_variable_of_a_module_ends_with_the_load_or_says_why_not() -> None:
    seen = {}
    for path in sorted(FOLDER.glob("*.py")):
        for name, value in variables(ast.parse(path.read_text(encoding="utf-8"))).items():
            seen[f"{path.stem}.{name}"] = joins(value)
    assert {name for name, joined in seen.items() if not joined} == {*LONGER}
    assert sum(seen.values()) >= 10


def test_a_load_ends_for_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_caches, "_caches", [])
    monkeypatch.setattr(load_caches, "_kept_for_reload", [])
    one = load_caches.per_load({1: 2})
    two = load_caches.per_load({3})
    kept = load_caches.per_load({4: 5}, kept_for_reload=True)
    load_caches.end_load(reloading=True)
    assert not one and not two and kept
    one[1] = 2
    load_caches.end_load()
    assert not one and not kept
