"""What is known of vLLM's all-to-alls, against the sources of every release."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.lib.releases import every_release, sources
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.releases import all2all
from vllm_moe_oracle.releases.all2all import (
    DEFAULT_ALL2ALL,
    all2all_names,
    effective_all2all,
    rounded_hidden_size,
    why_vllm_refuses,
)
from vllm_moe_oracle.releases.supported import NEWEST

_EXPERTS = "model_executor/layers/fused_moe"


@cache
def root(release: str) -> Path:
    return sources(release) / "vllm"


def functions(path: Path, *names: str) -> dict[str, ast.FunctionDef]:
    """Functions of a file by name, methods included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    return {node.name: node for node in reversed(found)}  # the first of a name


@every_release
def test_the_names_are_the_releases(release: str) -> None:
    text = (root(release) / "config/parallel.py").read_text(encoding="utf-8")
    (values,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "All2AllBackend"
    )
    assert isinstance(values, ast.Subscript)
    theirs = set(ast.literal_eval(values.slice))
    ours = {*all2all_names(release), *all2all.REMOVED_ALL2ALL}
    assert theirs - {all2all.BOUND_ALL2ALL} == ours
    assert f'all2all_backend: All2AllBackend = "{DEFAULT_ALL2ALL}"' in text
    assert f"""self.all2all_backend in {str(sorted(all2all.REMOVED_ALL2ALL, reverse=True)).replace("'", '"')}""" in text
    assert "ALL2ALL_BACKEND" not in (root(release) / "envs.py").read_text(encoding="utf-8")
    bound = all2all.BOUND_ALL2ALL in theirs
    refused = "PASSTHROUGH_ALL2ALL_BACKEND" in (root(release) / "engine/arg_utils.py").read_text(encoding="utf-8")
    assert bound == refused


@every_release
def test_batched_ones_are_those_that_the_releases_code_asks_for(release: str) -> None:
    path = root(release) / _EXPERTS / "config.py"
    asked = ast.unparse(functions(path, "use_batched_activation_format")["use_batched_activation_format"].body[-1])
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (parallel,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "FusedMoEParallelConfig"
    )
    batched = set()
    for node in parallel.body:
        if isinstance(node, ast.FunctionDef) and f"self.{node.name}" in asked:
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            batched |= {each for each in texts if each in all2all_names(release)}
    assert batched == {name for name in all2all_names(release) if all2all.is_batched(name)}


@every_release
def test_ids_are_as_wide_as_the_releases_code_asks_for(release: str) -> None:
    modules = {
        "deepep_high_throughput": "deepep_ht", "deepep_low_latency": "deepep_ll", "deepep_v2": "deepep_v2",
        "nixl_ep": "nixl_ep", "moonep": "moonep", "flashinfer_nvlink_one_sided": "flashinfer_nvlink_one_sided",
        "allgather_reducescatter": "naive_dp_ep",
    }  # fmt: skip
    asked = {}
    for name in modules.keys() & set(all2all_names(release)):
        (path,) = (root(release) / _EXPERTS).rglob(f"prepare_finalize/{modules[name]}.py")
        text = path.read_text(encoding="utf-8")
        method = ast.unparse(functions(path, "topk_indices_dtype")["topk_indices_dtype"])
        # NIXL's own type, or int64.
        asked[name] = "int64" in method or ("NIXL_EP_TOPK_INDICES_DTYPE" in method and "torch.int64" in text)
    assert asked == {name: all2all.delivers_wide_ids(name) for name in asked} and any(asked.values())
    assert not all2all.delivers_wide_ids("naive") and not all2all.delivers_wide_ids("passthrough")


class _DType:
    def __init__(self, itemsize: int) -> None:
        self.itemsize = itemsize


@every_release
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_hidden_sizes_are_rounded_as_the_releases_code_does(release: str, element_bytes: int) -> None:
    folder = root(release) / _EXPERTS
    modules = {
        "deepep_high_throughput": "deepep_ht", "deepep_low_latency": "deepep_ll", "deepep_v2": "deepep_v2",
        "nixl_ep": "nixl_ep",
    }  # fmt: skip
    name = "maybe_roundup_layer_hidden_size"
    asked = ast.unparse(functions(folder / "all2all_utils.py", name)[name])
    rounding = {each for each in all2all_names(release) if rounded_hidden_size(each, 2881, 2) != 2881}
    assert asked.count("if moe_parallel_config") == len(rounding) and rounding == set(modules) & set(
        all2all_names(release)
    )
    for each in rounding:
        (path,) = folder.rglob(f"prepare_finalize/{modules[each]}.py")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        function = functions(path, name)[name]
        (owner,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and function_in(node, name))
        sizes = [
            node.value
            for node in owner.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED_HIDDEN_SIZES"
        ]
        stock: dict[str, Any] = {"round_up": lambda value, multiple: -(-value // multiple) * multiple}
        stock[owner.name] = type("Class", (), {"SUPPORTED_HIDDEN_SIZES": ast.literal_eval(sizes[0]) if sizes else []})
        function.decorator_list, function.returns = [], None
        for argument in function.args.args:
            argument.annotation = None
        exec(compile(ast.Module([function], []), str(path), "exec"), stock)
        arguments = (_DType(element_bytes),) if len(function.args.args) == 2 else ()
        for hidden in (64, 2048, 2049, 2880, 4096, 5000, 7168, 8192):
            assert rounded_hidden_size(each, hidden, element_bytes) == stock[name](hidden, *arguments), (each, hidden)
        if sizes:
            with pytest.raises(ValueError, match="greater than"):
                stock[name](8193, *arguments)
            assert rounded_hidden_size(each, 8193, element_bytes) == 0


def function_in(node: ast.ClassDef, name: str) -> bool:
    return any(isinstance(each, ast.FunctionDef) and each.name == name for each in node.body)


@every_release
def test_round_robin_needs_a_batched_all_to_all_where_one_runs(release: str) -> None:
    name = "determine_expert_placement_strategy"
    code = ast.unparse(functions(root(release) / _EXPERTS / "expert_map_manager.py", name)[name])
    assert "use_all2all_kernels and (not moe_parallel_config.needs_round_robin_routing_tables)" in code
    config = root(release) / _EXPERTS / "config.py"
    both = functions(config, "needs_round_robin_routing_tables", "use_batched_activation_format")
    text = config.read_text(encoding="utf-8")
    assert text.count("return self.use_deepep_ll_kernels or self.use_nixl_ep_kernels") == 2 and len(both) == 2


@every_release
def test_what_vllm_refuses_is_in_the_releases_code(release: str) -> None:
    text = (root(release) / _EXPERTS / "config.py").read_text(encoding="utf-8")
    # Older ones fail later, in a kernel that there is not.
    assert ("assert self.rocm_aiter_fmoe_enabled" in text) == (release not in ("0.22.1", "0.23.0"))
    use = ast.unparse(functions(root(release) / _EXPERTS / "config.py", "use_mori_kernels")["use_mori_kernels"])
    named = {name for name in all2all_names(release) if f"'{name}'" in use}
    refused = {name for name in all2all_names(release) if why_vllm_refuses(name, "cuda", True)}
    assert named == {name for name in refused if not why_vllm_refuses(name, "rocm", True)} and named
    assert not {name for name in named if why_vllm_refuses(name, "cuda", False)}
    cpu = (root(release) / "distributed/device_communicators/cpu_communicator.py").read_text(encoding="utf-8")
    lacks = not any(f"def {name}(" in cpu for name in ("all_gatherv", "reduce_scatterv"))
    assert [bool(why_vllm_refuses(DEFAULT_ALL2ALL, "cpu", False, dp)) for dp in (1, 2)] == [False, lacks]
    assert not why_vllm_refuses(DEFAULT_ALL2ALL, "cuda", True, 2)
    config = (root(release) / "config/vllm.py").read_text(encoding="utf-8")
    only = {name for name in all2all_names(release) if f'all2all_backend == "{name}":' in config}
    assert only == refused - named


@pytest.mark.parametrize(
    ("word", "release", "words"),
    [
        ("deepep_low_latncy", NEWEST, "Did you mean deepep_low_latency?"),
        ("DeepEP-low-latency", None, "Did you mean deepep_low_latency?"),
        ("mori", "0.23.0", "vLLM 0.23.0 no longer has it: 0.23.0 has others"),
        ("mori_low_latency", "0.22.1", "vLLM 0.22.1 does not have it: it came with 0.23.0"),
        ("moonep", "0.30.0", "it came with 0.31.0"),
        ("passthrough", NEWEST, "is set by vLLM itself"),
        ("", NEWEST, "is not an all-to-all of vLLM"),
    ],
)
def test_other_words_are_refused(word: str, release: str | None, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        effective_all2all(word, release)
    assert words in str(caught.value) and "--all2all-backend" in str(caught.value)


def test_removed_ones_stand_for_the_default() -> None:
    assert {effective_all2all(word, NEWEST) for word in ("naive", "pplx", DEFAULT_ALL2ALL)} == {DEFAULT_ALL2ALL}
    assert effective_all2all("mori", "0.22.1") == "mori" and effective_all2all("moonep", "unreadable") == "moonep"
