"""The figures of a real model say what is claimed of them: enough text, right backends pass, faults do not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.lib import accuracy, smollm2
from tests.lib.integer_checkpoints import Integers
from tests.tools import accuracy_tables
from tests.tools.accuracy import FAULTS, FORMATS

HELD = accuracy_tables.read(accuracy_tables.MODEL)
SERVED = [each for each in accuracy_tables.served() if each[-1]["is_backend"]]


def test_each_family_was_measured_on_enough_named_text() -> None:
    assert {"mxfp8", "mxfp4-compressed-a16", "gptq-int4-g32"} <= set(HELD["formats"]) <= set(FORMATS)
    assert all(each["tokens"] >= 20_000 for *_, each in SERVED)
    assert (HELD["window"], HELD["context"], HELD["alpha"]) == (accuracy.WINDOW, accuracy.CONTEXT, accuracy.ALPHA)
    assert (HELD["max_kl"], HELD["max_perplexity"]) == (accuracy.MAX_KL, accuracy.MAX_PERPLEXITY)
    assert (accuracy_tables.BASELINES, accuracy_tables.WHOLE) == (accuracy.BASELINES, accuracy.WHOLE)
    assert len(HELD["text"]) > 10 and all(len(digest) == 64 for digest in HELD["text"].values())


@pytest.mark.parametrize(
    ("dtype", "name", "backend", "each"), SERVED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_verdicts_follow_from_the_figures(dtype: str, name: str, backend: str, each: dict[str, float]) -> None:
    low, high = each["nll"] - each["nll_half_width"], each["nll"] + each["nll_half_width"]
    likely = math.log1p(-accuracy.MAX_PERPLEXITY) <= low and high <= math.log1p(accuracy.MAX_PERPLEXITY)
    near = each["kl_limit"] <= accuracy.MAX_KL or each["excess"] + each["excess_half_width"] <= 0
    assert each["passes"] == (likely and near)
    # In bfloat16 integers are rounded, which takes all that the gate allows; in float16 all pass.
    form = smollm2.FORMATS[name]
    integers = isinstance(form, Integers) and dtype == "bfloat16"
    # With 8 bits the rounding of scales shows, beside that of their products: two errors of one size where the baseline
    # has one. A KL divergence is quadratic in an error, so it is at most twice the baseline's.
    more = each["kl"] - each["excess"] if isinstance(form, Integers) and form.bits == 8 else 0.0
    assert each["passes"] or (integers and each["excess"] - each["excess_half_width"] <= more)


def test_integers_in_float16_lose_less_than_a_tenth_of_the_gate() -> None:
    found = {name: each for dtype, name, _, each in SERVED if dtype == "float16"}
    assert len(found) == 4 and all(each["kl_limit"] < 0.1 * accuracy.MAX_KL for each in found.values())


def test_mx_weights_lose_nothing_but_by_rounding_to_16_bits() -> None:
    for name, found in accuracy_tables.figures("formats, float32").items():
        for backend, each in found.items():
            if each["activations"] == "16bit" and name.startswith("mx"):
                assert each["passes"] and each["kl_limit"] < 1e-2 * accuracy.MAX_KL, (name, backend)


def test_without_its_factor_the_cpus_backend_is_beyond_the_gate() -> None:
    (found,) = accuracy_tables.figures("cut off").values()
    each = found["cpu_dequantized"]
    assert each["excess"] - each["excess_half_width"] > 0 and 2 * each["kl"] - each["kl_limit"] > accuracy.MAX_KL


def test_the_gate_catches_faults_and_a_score_does_not() -> None:
    (found,) = accuracy_tables.figures("faults").values()
    assert set(found) == {fault.name for fault in FAULTS}
    right = {"none", "last router weight is the first's"}  # all weights of this model are alike
    rare = {"last token of a call is half", "every 20th call 50 % too large"}  # so few windows do not show these
    assert {name for name, each in found.items() if each["caught"]} == set(found) - right - rare
    assert not any(each["passes"] for name, each in found.items() if name not in right)
    assert sum(each["passes_score_gate"] for name, each in found.items() if name not in right) == 8


def test_the_checks_catch_every_fault_and_refuse_nothing_right() -> None:
    held = accuracy_tables.read(accuracy_tables.SELF_CHECK)
    faults, seeds = held["faults, cpu"]["figures"], held["seeds, cpu"]["figures"]
    assert {where.partition(" ")[0] for each in faults.values() for where in each.values()} <= {"load", "verify"}
    assert all(each["refused"] == 0 and each["worst"] < 1 for each in seeds.values())
    assert sum(each["seeds"] for each in seeds.values()) >= 1000


@pytest.mark.parametrize("path", [accuracy_tables.ON_GPU, accuracy_tables.ON_AMX], ids=lambda path: path.stem)
def test_verdicts_of_other_machines_follow_from_the_figures(path: Path) -> None:
    for part in accuracy_tables.PARTS_ELSEWHERE:
        for name, found in accuracy_tables.figures(part, path).items():
            for backend, each in found.items():
                low, high = each["nll"] - each["nll_half_width"], each["nll"] + each["nll_half_width"]
                likely = math.log1p(-accuracy.MAX_PERPLEXITY) <= low and high <= math.log1p(accuracy.MAX_PERPLEXITY)
                near = each["kl_limit"] <= accuracy.MAX_KL or each["excess"] + each["excess_half_width"] <= 0
                assert each["passes"] == (likely and near), (part, name, backend)
                assert each["tokens"] >= 20_000 and name in FORMATS
                if part == "formats, float16" and each["is_backend"]:
                    assert each["kl_limit"] < 0.1 * accuracy.MAX_KL, (name, backend)
