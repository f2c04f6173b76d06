"""What a config of integer experts says is the same to `explain` and to the method that serves; where it cannot be
served, both refuse it."""

from __future__ import annotations

import copy
import enum
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from vllm.model_executor.layers.quantization import get_quantization_config

from tests.lib import moe_wna16_layers as moe
from tests.lib.wna16_layers import checkpoint_of, layer_of
from vllm_moe_oracle import plugin
from vllm_moe_oracle.core.problem import Scheme
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods.base import OracleMoEMethod
from vllm_moe_oracle.quantization import config_notes, parse_config, refused_linear
from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames, UnsupportedFormat

SIZES = {"experts": 3, "top_k": 2, "hidden_size": 64, "intermediate_size": 128}
ABSENT: Any = enum.Enum("ABSENT", ["absent"]).absent
LAYER = LayerNames((moe.NAME,), GATED_PROJECTIONS, GATED_PROJECTIONS[0])


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    plugin.register()
    yield
    plugin.unregister()


def changed(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**fields, **changes}.items() if value is not ABSENT}


def config_of(packing: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint's config; changes of compressed-tensors are of the weights in its one group, unless they begin with
    ``/``."""
    found = copy.deepcopy(checkpoint_of(layer_of(packing, zero_points=packing == "awq", **SIZES)))
    if not packing.startswith("compressed"):
        return changed(found, changes)
    (group,) = found["config_groups"].values()
    group["weights"] = changed(group["weights"], {name: new for name, new in changes.items() if name[0] != "/"})
    return changed(found, {name[1:]: new for name, new in changes.items() if name[0] == "/"})


def served(packing: str, config: dict[str, Any], name: str = "") -> Scheme:
    """What the method of a layer is made for."""
    layer = layer_of(packing, **SIZES)
    with moe.engine():
        made = get_quantization_config(name or moe.vllm_name(layer)).from_config(copy.deepcopy(config))
        made.packed_modules_mapping = {}
        method = moe.made(layer, moe.moe_config(layer), name, made).quant_method
    assert isinstance(method, OracleMoEMethod), type(method)
    scheme = method.decision.problem.scheme
    assert method.file_packing in (scheme.packing, "gptq", "gptq_v2", "awq")
    return Scheme("wna16", scheme.bits, scheme.group_size, method.file_packing, scheme.zero_points, scheme.act_order)


OWN_NAMES = {"bits": ABSENT, "group_size": ABSENT, "w_bit": 4, "q_group_size": 64}
STATIC = {"desc_act": True, "static_groups": True}
V2 = {"dynamic": {"+:.*experts.*": {"checkpoint_format": "gptq_v2", "sym": False}}}

READ = [
    ("gptq", {}, Scheme("wna16", 4, 32, "gptq")),
    ("gptq", {"quant_method": "GPTQ"}, Scheme("wna16", 4, 32, "gptq")),
    ("gptq", STATIC, Scheme("wna16", 4, 32, "gptq", False, "static")),
    ("gptq", {"desc_act": True, "group_size": -1}, Scheme("wna16", 4, -1, "gptq")),
    ("gptq", {"checkpoint_format": ABSENT, "format": "gptq_v2", "sym": False}, Scheme("wna16", 4, 32, "gptq_v2", True)),
    ("gptq", V2, Scheme("wna16", 4, 32, "gptq_v2", True)),
    ("gptq", {"dynamic": None, "pack_dtype": "torch.int32"}, Scheme("wna16", 4, 32, "gptq")),
    ("gptq", {"dynamic": {"+:.*layers\\.3\\..*": {"sym": False}}}, Scheme("wna16", 4, 32, "gptq", True)),
    ("gptq", {"dynamic": {"+:.*layers\\.3\\..*": {"desc_act": True}}}, Scheme("wna16", 4, 32, "gptq", False, "group")),
    ("awq", {}, Scheme("wna16", 4, 32, "awq", True)),
    ("awq", {"quant_method": "AWQ", "version": "GEMM"}, Scheme("wna16", 4, 32, "awq", True)),
    ("awq", OWN_NAMES, Scheme("wna16", 4, 64, "awq", True)),
    ("awq", {"zero_point": False, "checkpoint_format": "gemm"}, Scheme("wna16", 4, 32, "awq")),
    ("compressed-tensors", {"strategy": ABSENT}, Scheme("wna16", 4, 32, "compressed-tensors")),
    ("compressed-tensors", {"strategy": ABSENT, "group_size": -1}, Scheme("wna16", 4, -1, "compressed-tensors")),
    ("compressed-tensors", {"strategy": "CHANNEL", "group_size": None}, Scheme("wna16", 4, -1, "compressed-tensors")),
    ("compressed-tensors", {"strategy": "channel", "group_size": 0}, Scheme("wna16", 4, -1, "compressed-tensors")),
    ("compressed-tensors", {"type": ABSENT}, Scheme("wna16", 4, 32, "compressed-tensors")),
    ("compressed-tensors", {"num_bits": ABSENT}, Scheme("wna16", 8, 32, "compressed-tensors")),
    ("compressed-tensors", {"actorder": True}, Scheme("wna16", 4, 32, "compressed-tensors", False, "group")),
    ("compressed-tensors-int", {"type": ABSENT}, Scheme("wna16", 4, 32, "compressed-tensors-int")),
    ("compressed-tensors-int", {"type": "INT"}, Scheme("wna16", 4, 32, "compressed-tensors-int")),
    ("compressed-tensors", {"/ignore": None}, Scheme("wna16", 4, 32, "compressed-tensors")),
]  # fmt: skip


def names_of(packing: str) -> tuple[str, ...]:
    return ("",) if packing.startswith("compressed") else ("", "moe_wna16")


@pytest.mark.parametrize(
    ("packing", "changes", "scheme", "name"),
    [(packing, changes, scheme, name) for packing, changes, scheme in READ for name in names_of(packing)],
    ids=str,
)
def test_explain_and_the_method_read_the_same(packing: str, changes: dict[str, Any], scheme: Scheme, name: str) -> None:
    config = config_of(packing, changes)
    assert parse_config(config, "x")(LAYER) == scheme
    assert served(packing, config, name) == scheme


@pytest.mark.parametrize("packing", ["gptq", "awq"])
@pytest.mark.parametrize("field", ["bits", "group_size"])
@pytest.mark.parametrize("value", [ABSENT, None], ids=["absent", "null"])
def test_a_width_or_group_size_that_is_missing_is_named(packing: str, field: str, value: Any) -> None:
    config = config_of(packing, {field: value})
    with pytest.raises(ValueError, match=re.escape(f"['{field}']")):
        get_quantization_config("moe_wna16").from_config(config)


@pytest.mark.parametrize(
    "transforms",
    [
        ["R4"],
        {"config_groups": ["R4"]},
        {"config_groups": {"R4": "hadamard"}},
        {"config_groups": {"R4": {"apply": 4}}},
        {"config_groups": {"R4": {"apply": {"location": "input"}}}},
        {"config_groups": {"R4": {"apply": ["input"]}}},
    ],
    ids=str,
)
def test_transforms_that_cannot_be_read_are_refused(transforms: Any) -> None:
    with pytest.raises(CheckpointError, match=r"transform_config: .* is .*, not "):
        parse_config(config_of("compressed-tensors", {"/transform_config": transforms}), "x")


INPUT = {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}
REFUSED = [
    ("gptq", {"sym": 1}, "sym is 1"),
    ("gptq", {"checkpoint_format": "gptq", "format": "gptq_v2"}, "checkpoint_format is gptq and format is gptq_v2"),
    ("gptq", {"checkpoint_format": "marlin"}, "unknown checkpoint_format 'marlin'"),
    ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
    ("gptq", {"pack_dtype": "int8"}, "pack_dtype is 'int8'"),
    ("gptq", {"pack_dtype": "int64"}, "pack_dtype is 'int64'"),
    ("gptq", {"group_size": 0}, "group_size is 0"),
    ("awq", {"version": "gemv"}, "version is 'gemv'"),
    ("awq", {"version": "GEMV_FAST"}, "version is 'gemv_fast'"),
    ("awq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ("compressed-tensors", {"strategy": "channel"}, "strategy"),
    ("compressed-tensors", {"group_size": None}, "group_size"),
    ("compressed-tensors", {"strategy": "channel", "group_size": None, "actorder": "group"}, "order"),
    ("compressed-tensors", {"actorder": "backwards"}, "actorder 'backwards'"),
    ("compressed-tensors", {"/transform_config": {"config_groups": {"R4": INPUT}}}, "the transform 'R4'"),
    ("compressed-tensors-int", {"/transform_config": {"config_groups": {"R4": INPUT}}}, "the transform 'R4'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("packing", "changes", "words", "name"),
    [(packing, changes, words, name) for packing, changes, words in REFUSED for name in names_of(packing)],
    ids=str,
)
def test_explain_and_the_method_refuse_the_same(packing: str, changes: dict[str, Any], words: str, name: str) -> None:
    config = config_of(packing, changes)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        parse_config(config, "x")(LAYER)
    with pytest.raises(ValueError, match=re.escape(words)):  # vLLM's own where it reads the field first
        served(packing, config, name)


@pytest.mark.parametrize("value", [ABSENT, None])
@pytest.mark.parametrize(("packing", "field"), [("gptq", "sym"), ("gptq", "desc_act"), ("awq", "zero_point")])
def test_what_vllm_will_not_guess_is_noted(packing: str, field: str, value: Any) -> None:
    config = config_of(packing, {field: value})
    usual = parse_config(config_of(packing, {}), "x")(LAYER)
    assert parse_config(config, "x")(LAYER) == usual
    assert not list(config_notes(config_of(packing, {}), "x"))
    if field == "desc_act" and value is None:  # vLLM takes it for false
        assert not list(config_notes(config, "x"))
        assert served(packing, config, "")
        return
    (note,) = config_notes(config, "x")
    assert note.startswith(f"x: {field} is not set: taken as ")
    for name in ("",) if field == "desc_act" else ("", "moe_wna16"):
        with pytest.raises(ValueError, match=field):
            served(packing, config, name)


@pytest.mark.parametrize("override", [None, 3, 0, "8", "", True, [], [{"bits": 8}]], ids=repr)
def test_an_exception_that_is_no_object_is_refused(override: object) -> None:
    for prefix in ("", "+:"):
        config = config_of("gptq", {"dynamic": {f"{prefix}.*experts.*": override}})
        with pytest.raises(
            CheckpointError, match=r"^x: dynamic: '.*experts\.\*' is .*, not an object\. Write the fields"
        ):
            parse_config(config, "x")
    parse_config(config_of("gptq", {"dynamic": {"-:.*experts.*": override}}), "x")  # excludes, whatever it says
    assert parse_config(config_of("gptq", {"dynamic": {".*experts.*": False}}), "x")(LAYER) is None


ATTENTION = "+:.*self_attn.*"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        ({"sym": False}, True),
        ({"bits": 8, "sym": False}, True),
        ({"bits": 2}, True),
        ({"sym": False, "dynamic": {"-:.*self_attn.*": {}}}, False),
        ({"sym": False, "dynamic": {ATTENTION: {"sym": True}}}, False),
        ({"dynamic": {ATTENTION: {"sym": False}}}, True),
        ({"sym": False, "modules_in_block_to_quantize": ["mlp.experts.0.up_proj", "mlp.experts.0.down_proj"]}, False),
        ({"sym": False, "modules_in_block_to_quantize": ["mlp.experts", "self_attn.o_proj"]}, True),
    ],
    ids=str,
)
def test_linear_layers_that_vllm_refuses_are_known(changes: dict[str, Any], refused: bool) -> None:
    """The same linear layer is asked of vLLM's own class, with the plugin."""
    from vllm.model_executor.layers.linear import ReplicatedLinear

    config = config_of("gptq", changes)
    assert bool(refused_linear(config, "x")) == refused
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    with pytest.raises(ValueError, match=r"Unsupported|does not support") if refused else nullcontext():
        made = get_quantization_config("gptq").from_config(config)
        made.get_quant_method(layer, "model.layers.0.self_attn.o_proj")


@pytest.mark.parametrize("name", ["", "moe_wna16"])
def test_widths_that_an_exception_gives_are_refused_with_reasons(name: str) -> None:
    config = config_of("gptq", {"dynamic": {"+:.*experts.*": {"bits": 3}}})
    with pytest.raises(ValueError, match="bits is 3; vLLM's classes for GPTQ refuse any width but 4 and 8"):
        served("gptq", config, name)


@pytest.mark.parametrize("changes", [{"dynamic": True}, {"num_bits": 5}, {"strategy": "tensor", "group_size": None}])
def test_integers_that_are_vllms_own_are_foreign(changes: dict[str, Any]) -> None:
    assert isinstance(parse_config(config_of("compressed-tensors", changes), "x")(LAYER), UnsupportedFormat)


@pytest.mark.parametrize(
    "part",
    [
        {"targets": ["Linear"], "location": "weight_input"},
        {"targets": ["re:.*q_proj$"], "location": "input"},
        {"targets": "Linear", "location": "output", "ignore": ["re:.*experts.*"]},
        {"targets": ["re:.*self_attn.*"], "location": "k_cache"},
    ],
    ids=str,
)
def test_transforms_of_weights_and_of_other_layers_are_ignored(part: dict[str, Any]) -> None:
    transforms = {"config_groups": {"u": {"type": "hadamard", "apply": [part]}}}
    config = config_of("compressed-tensors", {"/transform_config": transforms})
    assert parse_config(config, "x")(LAYER) == served("compressed-tensors", config)
    part = {"targets": ["Linear"], "location": "output"}
    with pytest.raises(CheckpointError, match="the transform 'u'"):
        parse_config(config | {"transform_config": {"config_groups": {"u": {"apply": [part]}}}}, "x")(LAYER)
