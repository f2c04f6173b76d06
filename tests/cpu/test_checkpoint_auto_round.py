"""AutoRound's entries on single matrices, in the sources of every supported release: which releases read them, and that
an entry on the experts' module, as `explain` advises, is read by all."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from stock_code import QUANTIZATION
from stock_rules import every_release, globals_of, number

from vllm_moe_oracle.compat import era_of
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.quantization import reader
from vllm_moe_oracle.quantization.answers import GATED_PROJECTIONS, LayerNames

MODULE = "model.layers.1.mlp.experts"
PROJECTIONS = GATED_PROJECTIONS[0]
CONFIG: dict[str, Any] = {"bits": 4, "group_size": 128, "sym": True}


def bits(release: str, entries: dict[str, Any]) -> int:
    """Width that a release's own INC takes a layer's experts for."""
    layer = type(era_of(release).layer.rpartition(":")[2], (), {})()
    config = SimpleNamespace(
        weight_bits=4, extra_config=entries, block_name_to_quantize=None, packed_modules_mapping={}, packing_format="",
        backend="auto", data_type="int", **{name: CONFIG[name] for name in ("group_size", "sym")},
    )  # fmt: skip
    given = {"re": re, "ParallelLMHead": type("ParallelLMHead", (), {})}
    if number(release) < (0, 24):
        found = globals_of(release, f"{QUANTIZATION}/inc.py", **given)["INCConfig"].get_layer_config
        answer = found(config, layer, MODULE)
    else:
        names = globals_of(release, f"{QUANTIZATION}/inc/config_parser.py", **given)
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
        reader(quantization | {"extra_config": entries}, "x")(layer)
    found = reader(quantization | {"extra_config": entries | {MODULE: {"bits": 8}}}, "x")(layer)
    assert getattr(found, "bits", None) == 8
