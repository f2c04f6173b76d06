"""The committed times and errors of layers with activations in fp8 on an H200, as `tests/gpu/fp8_layer.py` printed
them, and what holds of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONDITIONS, *ROWS = map(json.loads, (ROOT / "tests/golden/h200/fp8-layers.jsonl").read_text().splitlines())
KINDS = ("error_normal", "error_outliers")


def row(layer: str, tokens: int) -> dict[str, Any]:
    (found,) = [each for each in ROWS if (each["layer"], each["tokens"]) == (layer, tokens)]
    return found


def test_the_conditions_come_first() -> None:
    kept = CONDITIONS["conditions"]
    assert {"environment", "cuda", "method", "command", "date"} <= kept.keys()
    environment = kept["environment"]
    assert environment["gpu"] == "NVIDIA H200" and environment["packages"].keys() >= {"torch", "triton"}
    assert re.fullmatch("[0-9a-f]{16}", environment["kernels"]) and environment["driver"]
    assert {each["device"] for each in ROWS} == {environment["gpu"]}
    asked = re.findall(r"--layer (\S+) --tokens (\S+)", kept["command"])
    wanted = {(layer, int(count)) for layer, counts in asked for count in counts.split(",")}
    assert {(each["layer"], each["tokens"]) for each in ROWS} == wanted and len(ROWS) == len(wanted)


def test_fp8_products_pay_with_many_tokens() -> None:
    """Not by chance: the faster quarter of one against the slower of the other."""
    for layer, tokens, least in (
        ("gpt-oss-20b", 2048, 1.3), ("gpt-oss-20b", 16384, 1.3), ("qwen3-30b-a3b-mxfp4", 2048, 1.0),
        ("qwen3-30b-a3b-mxfp4", 16384, 1.0), ("nemotron-3-nano", 4096, 1.3), ("qwen3-30b-a3b", 4096, 1.3),
    ):  # fmt: skip
        found = row(layer, tokens)
        assert found["16-bit"]["quartiles"][0] / found["fp8"]["quartiles"][1] >= least, (layer, tokens)


def test_medians_lie_between_quartiles_and_make_the_ratio() -> None:
    for each in ROWS:
        for name in ("16-bit", "fp8"):
            low, high = each[name]["quartiles"]
            assert low <= each[name]["us"] <= high
        # Of medians that were rounded to a tenth, to a thousandth.
        assert abs(each["ratio"] - each["16-bit"]["us"] / each["fp8"]["us"]) <= 5e-4 + 1e-9


def test_what_it_costs_is_the_rounding_of_activations() -> None:
    """Two roundings whose root mean square is at most 2**-3 / sqrt(12) of a number, by both products' inputs, and the
    gate's and up's sums are of the same input; against float64 on the same codes it is a part of that."""
    for each in ROWS:
        for kind in KINDS:
            assert each[kind]["16-bit"] < 3e-3
            assert each[kind]["fp8"] <= 2 * 2**0.5 * 2.0**-3 / 12**0.5
            assert each[kind]["fp8 against the same codes"] < each[kind]["fp8"] / 2
