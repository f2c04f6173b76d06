"""The public API: every exported name exists, is documented and light to import."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_moe_oracle.api as api

SOURCE = Path(api.__file__)


def test_all_names_what_can_be_imported() -> None:
    assert sorted(api.__all__) == sorted(set(api.__all__)) == sorted(dir(api))
    for name in api.__all__:
        assert getattr(api, name) is getattr(importlib.import_module(api.__name__), name)
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = api.no_such_name


def test_every_exported_name_is_documented() -> None:
    for name in set(api.__all__) - {"ENTRY_POINT_GROUP", "Tensors"}:
        assert inspect.getdoc(getattr(api, name)), name
    assert all(f"`{name}`" in (api.__doc__ or "") for name in set(api.__all__) - {"OracleError"})


def test_type_checkers_see_the_names_that_are_imported_lazily() -> None:
    tree = ast.parse(SOURCE.read_text())
    typed = {
        (node.module, alias.name): alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    lazy = {source: name for name, source in api._MODULES.items()}
    assert {source: name for source, name in typed.items() if name in api.__all__} == lazy
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert set(api.__all__) == set(api._MODULES) | {name for name in defined if not name.startswith("_")}


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import json, sys; import vllm_moe_oracle.api as api; before = sorted(sys.modules)\n"
        "api.decide, api.Problem, api.Backend, api.find_moe_layers, api.known_device('nvidia-h200')\n"
        "print(json.dumps([before, sorted(sys.modules)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    at_import, after_use = (set(modules) for modules in json.loads(done.stdout))
    assert not {"torch", "vllm", "triton", "numpy"} & after_use
    assert {name for name in at_import if name.startswith("vllm_moe_oracle")} == {"vllm_moe_oracle", api.__name__}


def test_a_checkpoint_is_explained(tmp_path: Path) -> None:
    path = Path(__file__).parent / "golden" / "configs" / "qwen3-30b-a3b.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = api.load_settings({})
    decisions = api.explain_checkpoint(tmp_path, api.known_device("nvidia-h200"), tp=2, settings=settings)
    assert len(decisions) == config["num_hidden_layers"]
    assert {decision.problem.intermediate_size for decision in decisions} == {config["moe_intermediate_size"] // 2}
    one = decisions[0]
    assert one == api.decide(
        one.problem, api.known_device("nvidia-h200"), settings, measurements=_measurements(one.problem, settings)
    )


def _measurements(problem: api.Problem, settings: api.Settings) -> object:
    from vllm_moe_oracle.measurements.lookup import find_measurements

    return find_measurements(problem, api.known_device("nvidia-h200"), settings)
