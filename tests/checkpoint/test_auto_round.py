"""What AutoRound's configs say about experts; in the sources of every supported release, which releases read entries on
single matrices, and that an entry on the experts' module, as `explain` advises, is read by all."""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.configs import AUTO_ROUND, quantized
from tests.lib.stock_code import QUANTIZATION, load
from tests.lib.stock_rules import every_release, number
from vllm_moe_oracle.checkpoint.moe_layers import MoeLayers
from vllm_moe_oracle.core.problem import Scheme
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization import parse_config
from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames
from vllm_moe_oracle.releases.supported import release_group

# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        ({"packing_format": "auto_round:auto_gptq"}, Scheme("wna16", 4, 128, "gptq")),
        ({"data_type": "int", "bits": 8, "sym": False}, Scheme("wna16", 8, 128, "gptq", True)),
        ({"packing_format": "auto_round:auto_awq", "sym": False}, Scheme("wna16", 4, 128, "awq", True)),
    ],
)
def test_auto_rounds_integers(changes: dict[str, Any], scheme: Scheme, explain: Any) -> None:
    found = explain(quantized(quantization_config=AUTO_ROUND | changes))
    assert {problem.scheme for problem in found.problems} == {scheme} and found.method == "inc"


def test_auto_round_gives_modules_other_widths(explain: Any) -> None:
    entries = {
        "model.layers.0.mlp.experts": {"bits": 16},
        r".*layers\.1\.mlp\.experts.*": {"bits": 8, "sym": False},
        "model.layers.2.mlp.gate": {"bits": 16},
    }
    found = explain(quantized(quantization_config=AUTO_ROUND | {"extra_config": entries}))
    assert found.unquantized == ("model.layers.0.mlp.experts",)
    assert {(each.scheme.bits, each.scheme.zero_points) for each in found.problems[:1]} == {(8, True)}
    assert {(each.scheme.bits, each.scheme.zero_points) for each in found.problems[1:]} == {(4, False)}


def widths(found: MoeLayers) -> set[int]:
    return {problem.scheme.bits for problem in found.problems}


def matrices_of(layer: int, experts: int = 128) -> list[str]:
    names = ("gate", "up", "down")
    return [f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj" for expert in range(experts) for name in names]


@pytest.mark.parametrize(
    ("entries", "entry", "words"),
    [
        # What follows the experts' module is never asked for, by name or by an expression that needs it.
        ({name: {"bits": 16} for name in matrices_of(1)}, "model.layers.1.mlp.experts.0.gate_proj", "not quantized"),
        ({"model.layers.1.mlp.experts.77.up_proj": {"bits": 4}}, "model.layers.1.mlp.experts.77.up_proj", "int4"),
        ({r".*mlp\.experts\..*": {"bits": 4}}, r".*mlp", "int4"),
        ({r".*\.down_proj": {"bits": 4}}, r".*", "int4"),
        ({"down_proj": {"bits": 4}}, "down_proj", "int4"),
        ({"model.layers.1.mlp.experts": {"bits": 4}, r".*_proj": {"bits": 16}}, ".*_proj", "not quantized"),
    ],
)
def test_auto_round_refuses_entries_on_matrices_that_vllm_does_not_read(
    entries: dict[str, Any], entry: str, words: str, explain: Any
) -> None:
    with pytest.raises(CheckpointError) as error:
        explain(quantized(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": entries}))
    message = str(error.value)
    assert entry in message and f"stores matrices of experts as {words}" in message
    assert "their module is int8" in message and "reads only the entries of the experts' module" in message


def test_entries_on_matrices_may_repeat_what_the_module_has(explain: Any) -> None:
    same = {name: {"bits": 8} for name in matrices_of(1)} | {r".*\.down_proj": {"bits": 8}}
    found = explain(quantized(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": same}))
    assert widths(found) == {8} and found.unquantized == ()
    router = {r".*gate.*": {"bits": 16}}
    found = explain(quantized("mixtral-8x7b", quantization_config=AUTO_ROUND | {"extra_config": router}))
    assert widths(found) == {4} and found.unquantized == ()


def test_auto_round_reads_ends_of_names_before_expressions(explain: Any) -> None:
    entries = {r".*experts.*": {"bits": 16}, "mlp.experts": {"bits": 4}}
    with pytest.raises(CheckpointError, match="their module is int4"):  # the expression finds matrices too
        explain(quantized(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": entries}))
    entries = {r".*experts$": {"bits": 16}, "mlp.experts": {"bits": 4}, "p.experts": {"bits": 16}}
    found = explain(quantized(quantization_config=AUTO_ROUND | {"bits": 8, "extra_config": entries}))
    assert widths(found) == {4} and found.unquantized == ()
    assert any("'mlp.experts' is the end of a name" in note for note in found.notes)


def test_auto_round_takes_a_full_name_without_a_width_for_one_of_16_bits(explain: Any) -> None:
    entries = {"model.layers.0.mlp.experts": {"group_size": 64}, r".*layers\.1\..*": {"group_size": 64}}
    found = explain(quantized(quantization_config=AUTO_ROUND | {"extra_config": entries}))
    assert found.unquantized == ("model.layers.0.mlp.experts",)
    assert [problem.scheme.group_size for problem in found.problems[:2]] == [64, 128]
    assert not any("end of a name" in note for note in found.notes)


@pytest.mark.parametrize(
    ("blocks", "quantized_layers"),
    [
        ({"block_name_to_quantize": "model.layers.0."}, {0}),
        ({"block_name_to_quantize": "model.layers.0.,model.layers.7."}, {0, 7}),
        ({"block_name_to_quantize": "model.layers.0., model.layers.7."}, {0}),  # nothing is stripped
        ({"to_quant_block_names": ["model.layers.1"]}, {1, *range(10, 20)}),
        ({"block_name_to_quantize": None, "to_quant_block_names": "model.layers.1"}, set(range(48))),
        ({"block_name_to_quantize": "model.layers"}, set(range(48))),
        # Entries that say a width are of modules outside too; without one, an expression means 16 bits there.
        (
            {
                "block_name_to_quantize": "model.layers.0.",
                "extra_config": {r".*layers\.5\..*": {"bits": 4}, r".*layers\.6\..*": {"sym": True}},
            },
            {0, 5},
        ),
    ],
)
def test_auto_round_leaves_other_blocks_in_16_bits(
    blocks: dict[str, Any], quantized_layers: set[int], explain: Any
) -> None:
    found = explain(quantized(quantization_config=AUTO_ROUND | blocks))
    assert {int(problem.layer.split(".")[2]) for problem in found.problems} == quantized_layers
    assert len(found.unquantized) == 48 - len(quantized_layers)


@pytest.mark.parametrize("name", ["*.gate(", "*.gate", "("])
def test_auto_round_skips_broken_expressions_with_a_note(name: str, explain: Any) -> None:
    entries = {name: {"bits": 16}, r".*layers\.1\..*": {"bits": 8}}
    found = explain(quantized(quantization_config=AUTO_ROUND | {"extra_config": entries}))
    assert [problem.scheme.bits for problem in found.problems[:3]] == [4, 8, 4]
    (note,) = [note for note in found.notes if "is not a regular expression" in note]
    assert repr(name) in note and "vLLM skips it" in note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_config": {r"(.|..)+\d$": {"bits": 16}}}, "take more than"),
        *(
            ({"block_name_to_quantize": blocks}, "block_name_to_quantize is")
            for blocks in (3, [["model.layers.0"]], {"model.layers.0": True})
        ),
    ],
)
def test_expressions_without_a_bound_and_blocks_without_names_are_refused(
    changes: dict[str, Any], words: str, explain: Any
) -> None:
    with pytest.raises(CheckpointError, match=words):
        explain(quantized(quantization_config=AUTO_ROUND | changes))


@pytest.mark.parametrize("changes", [{"act_bits": 8}, {"bits": 2}, {"packing_format": "auto_round:llm_compressor"}])
def test_what_vllm_reads_otherwise_of_auto_round_is_foreign(changes: dict[str, Any], explain: Any) -> None:
    found = explain(quantized(quantization_config=AUTO_ROUND | changes))
    assert not found.problems and all(each.startswith("auto-round") for each in found.unsupported_formats.values())


# --- linear layers ----------------------------------------------------------------------------------------------------

LINEAR = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        ({"bits": 8}, False),
        ({"sym": False}, True),
        ({"bits": 8, "sym": False}, True),
        ({"sym": False, "packing_format": "auto_round:auto_awq"}, False),
        ({"sym": False, "extra_config": {LINEAR: {"bits": 16}}}, False),
        ({"sym": False, "extra_config": {LINEAR: {"bits": 4, "sym": True}}}, False),
        ({"extra_config": {LINEAR: {"bits": 4, "sym": False}}}, True),
        ({"sym": False, "block_name_to_quantize": "model.other"}, False),
    ],
    ids=str,
)
def test_linear_layers_that_vllm_refuses_are_known(
    changes: dict[str, Any], refused: bool, explain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same linear layer is asked of vLLM's own class, as on a GPU."""
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization import auto_gptq, get_quantization_config
    from vllm.model_executor.layers.quantization.inc.schemes import inc_wna16_linear, inc_wna16_scheme

    config = AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"} | changes
    found = explain(quantized(quantization_config=config))
    said = [note for note in found.notes if "a server does not start" in note and "GPTQ" in note]
    assert bool(said) == bool(found.refused) == refused
    gpu = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, is_xpu=lambda: False)
    monkeypatch.setattr(inc_wna16_scheme, "current_platform", gpu)
    monkeypatch.setattr(inc_wna16_linear, "check_marlin_supported", lambda *_, **__: True)
    monkeypatch.setattr(auto_gptq, "verify_marlin_supported", lambda *_, **__: None)
    layer = ReplicatedLinear.__new__(ReplicatedLinear)
    with pytest.raises(NotImplementedError, match="symmetric quantization") if refused else nullcontext():
        get_quantization_config("inc").from_config(config).get_quant_method(layer, LINEAR)


# --- releases ---------------------------------------------------------------------------------------------------------

MODULE = "model.layers.1.mlp.experts"
PROJECTIONS = GATED_PROJECTIONS[0]
CONFIG: dict[str, Any] = {"bits": 4, "group_size": 128, "sym": True}


def bits(release: str, entries: dict[str, Any]) -> int:
    """Width that a release's own INC takes a layer's experts for."""
    layer = type(release_group(release).layer.rpartition(":")[2], (), {})()
    config = SimpleNamespace(
        weight_bits=4, extra_config=entries, block_name_to_quantize=None, packed_modules_mapping={}, packing_format="",
        backend="auto", data_type="int", **{name: CONFIG[name] for name in ("group_size", "sym")},
    )  # fmt: skip
    given = {"re": re, "ParallelLMHead": type("ParallelLMHead", (), {})}
    if number(release) < (0, 24):
        found = load(release, f"{QUANTIZATION}/inc.py", **given)["INCConfig"].get_layer_config
        answer = found(config, layer, MODULE)
    else:
        names = load(release, f"{QUANTIZATION}/inc/config_parser.py", **given)
        answer = names["INCConfigParser"](config)._resolve_raw(layer, MODULE)
    return int(answer[0])


@every_release
def test_who_reads_entries_on_matrices(release: str) -> None:
    matrices = {f"{MODULE}.0.{name}": {"bits": 8} for name in PROJECTIONS}
    assert bits(release, matrices) == (8 if number(release) < (0, 24) else 4)
    assert bits(release, {MODULE: {"bits": 8}}) == bits(release, matrices | {MODULE: {"bits": 8}}) == 8
    assert bits(release, {"model.layers.2.mlp.experts": {"bits": 8}}) == 4


def test_the_refusal_names_the_way_that_every_release_reads() -> None:
    layer = LayerNames((MODULE,), GATED_PROJECTIONS, PROJECTIONS)
    quantization = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", **CONFIG}
    entries = {f"{MODULE}.0.{name}": {"bits": 8} for name in PROJECTIONS}
    with pytest.raises(CheckpointError, match="give the module an entry of its own, which every release reads"):
        parse_config(quantization | {"extra_config": entries}, "x")(layer)
    found = parse_config(quantization | {"extra_config": entries | {MODULE: {"bits": 8}}}, "x")(layer)
    assert getattr(found, "bits", None) == 8
