"""What the method modules declare: classes that exist, under names that vLLM has."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

from vllm_moe_oracle import methods, quantization
from vllm_moe_oracle.quantization.types import QuantConfigFormat


def names_in(module: str) -> set[str]:
    """Classes and functions of a module, from its source."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


def test_declared_classes_exist() -> None:
    for each in methods.declarations():
        missing = {*each.quantizations.values(), *each.replaces.values()} - {None} - names_in(each.module)
        assert not missing, f"{each.module}: {missing}"


def test_every_format_that_is_read_is_served() -> None:
    served = {name for each in methods.declarations() for name in each.quantizations}
    for found in pkgutil.iter_modules(quantization.__path__):
        declared = getattr(importlib.import_module(f"{quantization.__name__}.{found.name}"), "FORMAT", None)
        if isinstance(declared, QuantConfigFormat) and found.name != "unsupported":
            names = {declared.vllm_method({}, method) for method in declared.parsers}
            names |= {*declared.aliases, *(alias for each in declared.aliases.values() for alias in each)}
            assert names & served, f"{found.name}: no method serves {sorted(names)}"


def test_every_module_that_replaces_a_stock_class_declares_it() -> None:
    declared = {each.module: set(each.replaces.values()) for each in methods.declarations()}
    for path in sorted(Path(methods.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        replacing = {
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            and node.name.endswith(("Method", "FusedMoE"))
            and any(ast.unparse(base) == f"stock.{node.name}" for base in node.bases)
        }
        assert replacing <= declared.get(f"{methods.__name__}.{path.stem}", set()), path.name


def test_a_quantization_may_have_a_config_for_each_release() -> None:
    awq = "vllm_moe_oracle.methods.awq"
    assert methods.configs()["awq_marlin"] == (f"{awq}:AutoAWQConfig", f"{awq}_marlin:AWQMarlinConfig")
    assert methods.required_modules()[awq] == "vllm.model_executor.layers.quantization.auto_awq"


def test_replaced_modules_exist_in_the_installed_release() -> None:
    pytest.importorskip("vllm", reason="looks vLLM's modules up")
    from vllm_moe_oracle.compat.quantization_registry import matches_release

    required = methods.required_modules()
    for stock, ours in methods.replacements().items():
        if matches_release(ours, required):
            module, _, name = stock.partition(":")
            assert hasattr(importlib.import_module(module), name.partition(".")[0]), stock
