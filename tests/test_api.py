"""The public API: every exported name exists, is documented and light to import."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        "api.decide, api.Problem, api.Backend, api.discover, api.known_device('nvidia-h200')\n"
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


def test_explaining_takes_what_the_command_takes(tmp_path: Path) -> None:
    config = json.loads((Path(__file__).parent / "golden" / "configs" / "qwen3-30b-a3b.json").read_text())
    config |= {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = api.load_settings({}, assignments={"disable": "emulation,cpu_dequantized", "activations": "16bit"})

    def explained(**options: Any) -> api.Decision:
        return api.explain_checkpoint(str(tmp_path), "nvidia-h200", settings=settings, **options)[0]

    assert explained(ep=True, tp=2, eplb=True).problem.eplb
    with pytest.raises(api.NoBackendError, match="checkpoints in bfloat16, and the model's dtype is float16"):
        explained(dtype="half")
    assert explained(batch_invariant=True).problem.batch_invariant
    assert explained().problem.scheme.activations == "16bit"
    assert explained(moe_backend="marlin").backend == "marlin_mxfp8"
    for modules, adapted in (((), True), (("q_proj",), False), (("experts",), True)):
        failures: list[api.NoBackendError] = []
        found = api.explain_checkpoint(
            tmp_path, "cpu", settings=api.load_settings({}), lora=True, lora_target_modules=modules, failures=failures
        )
        assert [len(found), len(failures)] == ([0, 2] if adapted else [2, 0])
    failures = []
    with pytest.raises(api.NoBackendError):
        api.explain_checkpoint(tmp_path, "cpu", settings=settings)
    assert api.explain_checkpoint(tmp_path, "cpu", settings=settings, failures=failures) == []
    assert [failure.where for failure in failures] == [f"model.layers.{n}.mlp.experts" for n in range(2)]
    for options, said in (
        ({"eplb": True}, "eplb: this needs expert parallelism"),
        ({"expert_placement_strategy": "robin"}, "'robin' is not one of linear, round_robin"),
        ({"dtype": "fp16"}, "'fp16' is not a dtype. Valid are auto, half"),
        ({"moe_backend": "marlni"}, "'marlni' is not a backend. Did you mean marlin?"),
    ):
        with pytest.raises(api.OracleError, match=re.escape(said)):
            explained(**options)
    with pytest.raises(api.OracleError, match=r"^unknown device 'h30'\. Valid are cpu"):
        api.explain_checkpoint(tmp_path, "h30")


def _case() -> api.Problem:
    scheme = api.Scheme("mxfp8", 8, 32, "modelopt")
    return api.Problem("layer", scheme, 8, 8, 2, 256, 256, api.Activation("silu"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": "2"}, "tp is '2'; it must be int"),
        ({"tp": 2.0}, "tp is 2.0; it must be int"),
        ({"dp": True}, "dp is True; it must be int"),
        ({"ep": 1}, "ep is 1; it must be bool"),
        ({"device": None}, "the name of a device is None. Give a text such as h200"),
        ({"quantization": 5}, "quantization is 5; it must be str"),
        ({"all2all_backend": 5}, "all2all is 5; it must be str"),
        ({"moe_backend": None}, "moe_backend is None; it must be str"),
        ({"draft_moe_backend": 5}, "draft_moe_backend is 5; it must be str"),
        ({"dtype": None}, "dtype is None; it must be str"),
        ({"lora": "no"}, "lora is 'no'; it must be bool"),
        ({"lora_target_modules": "experts"}, "lora_target_modules is 'experts'; it must be tuple"),
        ({"lora_target_modules": [5]}, "lora_target_modules has 5; it must be str"),
        ({"lora_target_modules": 5}, "lora_target_modules is 5; it must be tuple"),
        ({"eplb": 0}, "eplb is 0; it must be bool"),
        ({"batch_invariant": None}, "batch_invariant is None; it must be bool"),
        ({"expert_placement_strategy": 5}, "5 is not one of linear, round_robin"),
        ({"settings": {}}, "settings is {}; it must be Settings"),
        ({"failures": ()}, "failures is (); it must be list or None"),
        ({"path": 5}, "5: cannot be read"),
    ],
)
def test_arguments_of_another_type_are_named(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = Path(__file__).parent / "golden" / "configs" / "gpt-oss-20b.json"
    arguments = {"path": config, "device": "nvidia-h200", "settings": api.load_settings({}), **options}
    with pytest.raises(api.OracleError, match=re.escape(message)) as caught:
        api.explain_checkpoint(**arguments)
    assert isinstance(caught.value, ValueError) and not isinstance(caught.value, api.NoBackendError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dataclasses.replace(_case(), hidden_size=-1), "layer: hidden_size is -1; it must be at least 1"),
        (lambda: dataclasses.replace(_case(), num_layers=-1), "layer: num_layers is -1; it must be at least 0"),
        (lambda: dataclasses.replace(_case(), dtype="int8"), "dtype is 'int8'. Valid are bfloat16, float16, float32"),
        (lambda: dataclasses.replace(_case(), top_k=9), "layer: 9 experts for each token, of 8 in all"),
        (lambda: dataclasses.replace(_case(), scheme="mxfp8"), "scheme is 'mxfp8'; it must be Scheme"),
        (lambda: api.Device("foo", "x"), "kind is 'foo'. Valid are cuda, cpu, rocm, xpu"),
        (lambda: api.Device("cuda", "x", "90"), "capability is '90'; it must be int"),
        (lambda: api.Device("cuda", "x", -1), "capability is -1; it must be at least 0"),
        (lambda: api.Device("cpu", "x", features=("avx2", 5)), "features has 5; it must be str"),
        (lambda: api.Device("cpu", "x", packages={"vllm": 5}), "packages has 5; it must be str"),
        (lambda: api.Activation("silu", alpha="1"), "alpha is '1'; it must be float or None or int"),
        (lambda: api.Routing(num_groups="2"), "num_groups is '2'; it must be int or None"),
        (lambda: api.Parallel(tp=0), "tp is 0; it must be at least 1"),
        (lambda: api.Parallel(format="x"), "format is 'x'. Valid are standard, batched"),
        (lambda: api.Scheme("wna16", 0, 32, "gptq"), "0 bits in groups of 32"),
        (lambda: api.known_device(5), "the name of a device is 5"),
        (lambda: api.scheme_functions(None), "name is None; it must be str"),
        (lambda: api.decide(_case(), "h200", api.load_settings({})), "device is 'h200'; it must be Device"),
        (lambda: api.decide(_case(), api.known_device("cpu"), None), "settings is None; it must be Settings"),
        (lambda: api.discover()["marlin"], "'marlin' is not a backend"),
        (lambda: api.load_settings(5), "environment is 5; it must be Mapping or None"),
        (lambda: api.load_settings({}, assignments=5), "assignments is 5; it must be Mapping or None"),
        (lambda: api.load_settings({"MOE_ORACLE_BACKEND": 5}), "MOE_ORACLE_BACKEND is 5; it must be str"),
    ],
)
def test_values_that_are_not_possible_are_the_projects_errors(call: Callable[[], object], message: str) -> None:
    with pytest.raises(api.OracleError, match=re.escape(message)):
        call()


def test_misspelled_names_are_errors_that_list_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"name is 'fp8'\. Valid are mxfp8, wna16, mxfp4"):
        api.Scheme("fp8", 8, 32, "modelopt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"act_order is 'yes'\. Valid are none, group, static"):
        api.Scheme("wna16", 4, 32, "gptq", act_order="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'mxpf8' is not one of the schemes\. Did you mean mxfp8\?"):
        api.scheme_functions("mxpf8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'foo' is not one of the layouts\. Valid are "):
        api.layout_functions("foo")
    with pytest.raises(KeyError, match=r"'marlin' is not a backend\..*Valid are cpu_dequantized, cpu_int4, "):
        api.discover()["marlin"]
    with pytest.raises(api.OracleError, match=r"'backend' is not an environment variable.*MOE_ORACLE_BACKEND"):
        api.load_settings({"backend": "emulation"})
    assert api.load_settings({}, assignments={"backend": "emulation"}).backend == "emulation"


def _measurements(problem: api.Problem, settings: api.Settings) -> object:
    from vllm_moe_oracle.measurements.lookup import find_measurements

    return find_measurements(problem, api.known_device("nvidia-h200"), settings)
