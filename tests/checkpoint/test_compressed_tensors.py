"""What names in a compressed-tensors config mean for experts: `explain`'s reader against vLLM's own config object."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.models.utils import WeightsMapper

from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization import config_notes, parse_config
from vllm_moe_oracle.quantization.compressed_tensors import group_format
from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames, describe_format

PROJECTIONS = GATED_PROJECTIONS[0]
MX8 = {
    "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
MX4 = MX8 | {"num_bits": 4}
FORMATS = ("mxfp8-quantized", "mxfp4-pack-quantized")

# vLLM's name of the experts' module; the checkpoint's, where it is another; how vLLM goes from that to its own.
TEXT = ("model.layers.0.mlp.experts", "", {})
NESTED = (
    "language_model.model.layers.0.mlp.experts",
    "model.language_model.layers.0.mlp.experts",
    {"model.language_model.": "language_model.model.", "model.visual.": "visual."},
)
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class RoutedExperts(torch.nn.Module):
    """vLLM asks for the class's name."""


def entries(module: str) -> list[str]:
    """Names and expressions that mean all matrices of an expert, some, or others."""
    return [
        module, f"{module}.gate_up_proj", *(f"{module}.{n}.{name}" for n in (0, 1) for name in PROJECTIONS), "lm_head",
        module.replace("experts", "gate"), module.replace("layers.0", "layers.10"),
        "re:.*lm_head", r"re:.*mlp\.experts$", "re:.*experts", "re:.*mlp", "re:.*gate_proj", "re:.*up_proj",
        "re:.*down_proj", "re:.*gate_up_proj", "re:.*mlp.gate$", "re:.*layers.10", r"re:.*experts\.[0-9]+\..*",
        "re:.*self_attn.*", "re:" + module.replace(".", r"\."), "re:.*" + module.rpartition(".layers")[0] + r"\..*",
        r"re:model\..*experts.*", r"re:(model\.)?language_model\.layers\..*", r"re:language_model\.model\..*",
    ]  # fmt: skip


def config(ignore: list[str], *targets: list[str]) -> dict[str, Any]:
    """Experts in MXFP8, and those of the second group in MXFP4."""
    groups = {
        f"group_{index}": {"targets": names, "weights": weights, "format": form}
        for index, (names, weights, form) in enumerate(zip(targets, (MX8, MX4), FORMATS, strict=False))
    }
    return {"quant_method": "compressed-tensors", "format": FORMATS[0], "config_groups": groups, "ignore": ignore}


def by_vllm(quantization: dict[str, Any], module: str, mapped: dict[str, str]) -> str:
    """What vLLM takes a layer's experts for, as its `get_moe_method` asks."""
    found = CompressedTensorsConfig.from_config(copy.deepcopy(quantization))
    found.packed_modules_mapping = PACKED
    found.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=mapped))
    found._add_fused_moe_to_target_scheme_map()
    first, *others = [found.get_scheme_dict(RoutedExperts(), f"{module}.0.{name}") for name in PROJECTIONS]
    if any(other != first for other in others):
        return "different"
    return "not quantized" if first is None else f"{first['weights'].num_bits} bits"


def by_us(quantization: dict[str, Any], module: str, own: str) -> str:
    """The same from the reader."""
    names = tuple(name for name in (module, own, "backbone.layers.0.mlp.experts") if name)
    try:
        found = parse_config(quantization, "x")(LayerNames(names, GATED_PROJECTIONS, PROJECTIONS))
    except CheckpointError as error:
        if "expert 1 differs from others" in str(error):
            return "experts differ"
        assert "stored differently" in str(error)
        return "different"
    return "not quantized" if found is None else f"{found.bits} bits"


CLASSES = ("RoutedExperts", "experts", "routedexpert", "re:Routed.*", "re:.*Exp", "re:outed", "Experty")
"""Targets that vLLM compares with the class of the layer: parts of its name and expressions count, too."""


def test_a_target_that_means_the_class_of_the_layer_has_an_effect() -> None:
    module, _, mapped = TEXT
    for target, bits in {"experts": 4, "re:Routed.*": 4, "re:outed": 8, "Experty": 8}.items():
        quantization = config([], ["Linear"], [target])
        assert by_us(quantization, module, "") == by_vllm(quantization, module, mapped) == f"{bits} bits", target
        assert not list(config_notes(quantization, "x"))


@pytest.mark.parametrize("names", [TEXT, NESTED], ids=["text", "nested"])
def test_names_mean_what_they_mean_for_vllm(names: tuple[str, str, dict[str, str]]) -> None:
    module, own, mapped = names
    chance = random.Random(module)
    known = entries(own or module)
    seen: Counter[str] = Counter()
    for _ in range(600):
        ignore = chance.sample(known, chance.choice((0, 0, 1, 2)))
        targets = [chance.sample(["Linear", *known], chance.choice((1, 2)))]
        if chance.random() < 0.6:
            targets.append(chance.sample(["Linear", *CLASSES, *known], chance.choice((1, 2))))
        quantization = config(ignore, *targets)
        expected = by_vllm(quantization, module, mapped)
        found = by_us(quantization, module, own)
        if found == "experts differ":  # vLLM looks expert 0 up, for all
            assert any(".experts.1." in entry for entry in (*ignore, *itertools.chain(*targets))), (ignore, targets)
        else:
            assert found == expected, (ignore, targets)
        seen[found] += 1
    assert min(seen[each] for each in ("8 bits", "4 bits", "not quantized", "different", "experts differ")) >= 20, seen


@pytest.mark.parametrize("field", ["ignore", "targets"])
def test_the_name_of_the_experts_module_means_nothing_and_a_note_says_so(field: str) -> None:
    module = TEXT[0]
    quantization = config([module], ["Linear"]) if field == "ignore" else config([], ["Linear", module])
    assert by_us(quantization, module, "") == by_vllm(quantization, module, {}) == "8 bits"
    (note,) = config_notes(quantization, "config.json, quantization_config")
    assert note.startswith(f"config.json, quantization_config.{field}: '{module}' has no effect")
    without = config([f"{module}.0.{name}" for name in PROJECTIONS], ["Linear", "re:.*experts"])
    assert not list(config_notes(without, "x")) and describe_format(None) == by_us(without, module, "")


STRATEGIES = {
    "channel": {"strategy": "channel", "dynamic": False},
    "token": {"strategy": "token", "dynamic": True},
    "tensor": {"strategy": "tensor", "dynamic": False},
    "group": {"strategy": "group", "dynamic": True},
    "": {},
}
BOOLEANS = ("yes", "NO", "True", "f", "On", "off", "t", "n", "y", "1", "0", " yes", "", "maybe", 1, 0, 1.0, 0.0, 2, [])
VALUES = [
    *(("group_size", value, each) for value in (0, 0.0, 32, 32.0, 32.5, -1.0, -2, "0", "32") for each in STRATEGIES),
    *(
        ("num_bits", value, "token")
        for value in (8.0, "8", "8.0", " 8 ", "+8", "08", "4", 8.5, "8.5", "8e0", "abc", [8])
    ),
    *(("symmetric", value, "token") for value in BOOLEANS),
    *(("dynamic", value, "") for value in (1, 0, 1.0, 0.0, "yes", 2, [])),
]


@pytest.mark.parametrize(("field", "value", "strategy"), VALUES)
def test_values_mean_what_the_library_makes_of_them(field: str, value: Any, strategy: str) -> None:
    part = {"num_bits": 8, "type": "float"} | STRATEGIES[strategy] | {field: value}
    group = {"weights": MX8, "input_activations": MX8 | {"dynamic": True}}
    try:
        taken = QuantizationArgs.model_validate(part)
    except (ValueError, TypeError):
        if field in ("num_bits", "symmetric"):
            with pytest.raises(CheckpointError, match=f"{field} is "):
                group_format(group | {"input_activations": part}, "", "x")
        return
    plain = {"num_bits": taken.num_bits, "symmetric": taken.symmetric, "dynamic": taken.dynamic}
    plain |= {
        "type": "float",
        "strategy": QuantizationStrategy(taken.strategy).value,
        "group_size": taken.group_size or None,
    }
    for name in group:
        assert group_format(group | {name: part}, "", "x") == group_format(group | {name: plain}, "", "x")
