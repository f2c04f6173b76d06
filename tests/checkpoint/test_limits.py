"""What a config may cost is bounded by its size: nested lists, long names, large tensors, many layers."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib.configs import AUTO_ROUND, CT_INPUTS, CT_MXFP8, GPTQ, MODELOPT, compressed, config, group, quantized
from vllm_moe_oracle import untrusted
from vllm_moe_oracle.checkpoint import tensor_headers
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization.fields import any_at_or_below, flatten_names, names_below

MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
QUARK = {"quant_method": "quark", "global_quant_config": {"weight": None}}


def nested(depth: int, of: str = "x") -> Any:
    value: Any = of
    for _ in range(depth):
        value = [value]
    return value


def with_names(name: str) -> dict[str, dict[str, Any]]:
    """Quantization configs of every family with a name where it lists modules."""
    return {
        "compressed-tensors": compressed(group(CT_MXFP8, CT_INPUTS), ignore=[name]),
        "targets": compressed(group(CT_MXFP8, CT_INPUTS, (name, "Linear"))),
        "modelopt": {**MODELOPT, "ignore": [name]},
        "mixed": {**MIXED, "quantized_layers": {name: {"quant_algo": "MXFP8"}}},
        "quark": {**QUARK, "exclude": [name], "layer_quant_config": {name: {"weight": None}}},
        "gptq": {**GPTQ, "dynamic": {name: {}}, "modules_in_block_to_quantize": [name]},
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": [name]},
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": [name]},
        "auto-round": {**AUTO_ROUND, "extra_config": {name: {"bits": 8}}},
    }


@pytest.fixture
def explain(tmp_path: Path) -> Callable[[dict[str, Any]], object]:
    """Reads a config from a file; an error is returned. Its memory must not exceed a hundred times the file's size."""

    def run(content: dict[str, Any]) -> object:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        tracemalloc.start()
        try:
            return find_moe_layers(read_checkpoint(path))
        except CheckpointError as error:
            assert len(str(error)) < 1000 and "\n" not in str(error)
            return error
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < (8 << 20) + 100 * path.stat().st_size

    return run


NAMES = {
    "components": "model.layers.0" + ".a" * 30_000,
    "experts": "model." + "experts." * 8000,
    "letters": "x" * 60_000,
    "stars": "a*" * 9_000,
    "expression": "re:" + "a.*" * 20_000,
    "flags": "re:(?a)(?u)x",
    "digits": "re:a{" + "9" * 5000 + "}",
}


@pytest.mark.parametrize("family", with_names(""))
@pytest.mark.parametrize("kind", NAMES)
def test_a_long_name_costs_no_more_than_its_length(family: str, kind: str, explain: Callable[..., object]) -> None:
    explain(quantized(quantization_config=with_names(NAMES[kind])[family]))


@pytest.mark.parametrize("depth", [51, 330, 970, 100_000])
def test_nesting_is_limited(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(quantized(quantization_config={**MODELOPT, "ignore": "HERE"}))
    path.write_text(text.replace('"HERE"', "[" * depth + "]" * depth))
    with pytest.raises(CheckpointError, match="is nested more than 50 levels deep"):
        read_checkpoint(path)


def test_nesting_below_the_limit_is_read(explain: Callable[..., object]) -> None:
    answer = explain(quantized(quantization_config={**GPTQ, "modules_in_block_to_quantize": nested(45, "mlp.experts")}))
    assert not isinstance(answer, CheckpointError)
    assert flatten_names(nested(5000)) == ["x"]  # a server's own parser has no limit


@pytest.mark.parametrize("field", ["hidden_act", "scoring_func", "model_type", "torch_dtype"])
def test_strings_are_limited(field: str, explain: Callable[..., object]) -> None:
    answer = explain(quantized(**{field: "x" * (untrusted.MAX_STRING_CHARS + 1)}))
    assert f"has a string of {untrusted.MAX_STRING_CHARS + 1} characters" in str(answer)


def test_numbers_of_values_are_limited_before_parsing(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" + "{}," * (untrusted.MAX_VALUES // 2) + "0]")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="a file of more than 1000000 is not read"):
            read_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_only_layers": list(range(5000))},
        {"moe_layer_freq": [1] * 5000},
        {"layers_block_type": ["x"] * 5000},
        {"moe_layers_enum": "1," * 20_000},
        {"moe_layers_enum": [1] * 20_000},
        {"num_hidden_layers": 5000},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_lists_of_layers_are_limited(changes: dict[str, Any], explain: Callable[..., object]) -> None:
    assert "more than" in str(answer := explain(quantized(**changes))) or "not between" in str(answer)


@pytest.mark.parametrize("value", [[], {}, [[]], {"a": []}, 1e308, True, "x", -1], ids=repr)
@pytest.mark.parametrize("field", sorted({*config(), "quantization_config", "mlp_only_layers", "moe_layers_enum"}))
def test_any_type_in_any_field_is_read_or_refused(field: str, value: object, explain: Callable[..., object]) -> None:
    explain(quantized(**{field: value}))


def test_names_below_a_module() -> None:
    names = sorted(["a", "a-b", "a.b", "a.b.c", "a/b", "ab", "b.a", "a.b2"])
    for module in (*names, "", "a.b.c.d", "b"):
        below = [name for name in names if name.startswith(f"{module}.")]
        assert list(names_below(names, module)) == below
        assert any_at_or_below(names, module) == (module in names or bool(below))


def tensors(path: Path, size: int, count: int = 1) -> None:
    """A safetensors file with biases of experts, all zero and sparse, in the same place."""
    header = {
        f"model.layers.0.mlp.experts.{index}.w1.bias": {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}
        for index in range(count)
    }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)


@pytest.mark.parametrize(("size", "count"), [(6 << 30, 1), (1 << 20, 1000)], ids=["large", "a thousand in one place"])
def test_a_sparse_bias_is_refused_unread(size: int, count: int, tmp_path: Path) -> None:
    tensors(tmp_path / "model.safetensors", size, count)
    rule = f"biases of experts have more than {tensor_headers.MAX_BIAS_BYTES} bytes"
    with pytest.raises(CheckpointError, match=rule):
        tensor_headers.has_nonzero_expert_biases(tmp_path)


def test_tensors_are_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors(path, 24 << 20)
    tracemalloc.start()
    try:
        assert not tensor_headers.has_nonzero_expert_biases(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert tensor_headers.has_nonzero_expert_biases(tmp_path)
