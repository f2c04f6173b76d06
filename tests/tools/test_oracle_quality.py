"""The table of the oracle's choices: made from benchmarks that are kept, up to date, and honest about losses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gpu.unlisted_layers import HELD_OUT
from tests.tools import fit_latency, oracle_quality
from vllm_moe_oracle import measuring, settings
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.measurements import model_shapes, profile
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.releases.supported import NEWEST


def record(tokens: int, **us: float) -> str:
    named = {name.replace("stock_auto", "stock:auto"): value for name, value in us.items()}
    return json.dumps({"layer": {"name": "mxfp8:qwen3-30b-a3b"}, "tokens": tokens, "us": named})


CONDITIONS = json.dumps(
    {"conditions": {"gpu": "NVIDIA H200", "driver": "", "packages": {"vllm": NEWEST, "humming-kernels": "0.1.19"}}}
)


def read(*records: str, **assignments: str) -> list[oracle_quality.Row]:
    chosen = settings.load({}, assignments={"use_measurements": "0", **assignments})
    return oracle_quality.rows(iter([CONDITIONS, *records]), chosen)


def test_a_choice_is_held_against_the_best_of_its_kind() -> None:
    times: dict[str, Any] = {"humming_mxfp8": 50.0, "marlin_mxfp8": 60.0, "hopper_mxfp8": 40.0, "stock_auto": 51.0}
    (row,) = read(record(1, **times))
    chosen = {"humming_mxfp8": 0.25, "marlin_mxfp8": 0.5, "hopper_mxfp8": 0.0}
    assert row.best == "hopper_mxfp8" and row.behind == pytest.approx(chosen[row.choice])
    (forced,) = read(record(1, **times), backend="marlin_mxfp8")
    assert (forced.choice, forced.why) == ("marlin_mxfp8", "user") and forced.behind == pytest.approx(0.5)
    assert forced.stock_us == 51.0


def test_too_many_losses_are_not_good_enough() -> None:
    good = [oracle_quality.Row("l", 1, "a", "measured", 101.0, "b", 100.0, None)] * 19
    near = oracle_quality.Row("l", 1, "a", "measured", 107.0, "b", 100.0, None)
    far = oracle_quality.Row("l", 1, "a", "measured", 109.0, "b", 100.0, None)
    assert oracle_quality.good_enough([*good, near])
    assert not oracle_quality.good_enough([*good, near, near])
    assert not oracle_quality.good_enough([*good, far])


def test_a_choice_that_was_not_timed_is_an_error() -> None:
    with pytest.raises(SystemExit, match="was chosen and not timed"):
        read(record(1, marlin_mxfp8=1.0), backend="hopper_mxfp8")


def test_the_table_is_up_to_date() -> None:
    found, sources = oracle_quality.read()
    if not sources:
        assert not oracle_quality.TABLE.exists()
        pytest.skip("no benchmark is kept")
    assert Path(oracle_quality.TABLE).read_text() == oracle_quality.table(found, sources)


def test_what_a_profile_lacks_before_is_filled_in_on_both_sides() -> None:
    """Otherwise the choice of a profile with a gap is the static one, and filling it in would count as a change."""
    shipped = profile.read(profile.SHIPPED_FOLDER / "nvidia_h100.json")
    shape = kernel_shape_of(model_shapes.parse("mxfp8:qwen3-30b-a3b"))
    entry = next(each for each in shipped.entries if each.kernel_shape == shape)
    ours = entry.backends["hopper_mxfp8"]
    kept = {routing: {count: us for count, us in each.items() if count != "64"} for routing, each in ours.times.items()}
    assert kept != ours.times
    gap = msgspec.structs.replace(
        entry, backends={**entry.backends, "hopper_mxfp8": msgspec.structs.replace(ours, times=kept)}
    )
    names, card = ["humming_mxfp8", "hopper_mxfp8"], catalog.known_device("nvidia-h100")
    found = list(oracle_quality._left_out_of_layer(gap, names, card, settings.Settings(cache="none")))
    filled = [each for each in found if each.off]
    # Humming's seven but that at 64 tokens, where then no backend has a time; of ours, two of seven would be missing,
    # which is more than a quarter.
    assert sum(each.how == "predicted" for each in filled) == 6 and all(each.lost == 0.0 for each in filled)


def test_choices_are_within_the_allowed_slowdown() -> None:
    """All of them, and those whose shipped times are of another run than the benchmark alone."""
    every, _ = oracle_quality.read()
    found = [row for row in every if row.layer != oracle_quality.MISSED]
    assert {row.why for row in every if row not in found} == {oracle_quality.UNCERTAIN}  # a server measures it
    apart = [row for row in found if row.apart]
    assert len(apart) >= 200 and len({row.layer for row in apart}) >= 16
    assert oracle_quality.good_enough(found) and oracle_quality.good_enough(apart)


def test_predictions_choose_well_for_layers_that_nothing_was_fitted_to() -> None:
    held_out = {layer.layer: kernel_shape_of(layer) for layer in HELD_OUT}
    fitted = {row.shape for row in fit_latency.read_rows()}
    measured = {entry.kernel_shape for each in profile.shipped() for entry in each.entries}
    assert len(fitted) > 80 and not {*held_out.values()} & (fitted | measured)
    rows, _ = oracle_quality.read()
    found = [row for row in rows if row.layer in held_out]
    predicted = [row for row in found if row.why == "predicted"]
    assert {row.why for row in found} == {"predicted", oracle_quality.UNCERTAIN, "static"}
    assert {row.layer for row in found if row.why == oracle_quality.UNCERTAIN} == {oracle_quality.MISSED}
    assert all("act-order" in row.layer for row in found if row.why == "static")  # one backend alone runs it
    layers = {row.layer for row in predicted}
    assert oracle_quality.good_enough(predicted)
    said = (Path(measuring.__file__).parent / "ERRORS.md").read_text()
    near = sum(row.us <= 1.03 * row.best_us for row in predicted) / len(predicted)
    assert f"| {len(layers)} layers timed after the fit | H200 | {len(predicted)} | {100 * near:.1f} % |" in said
    # Of the third number format of a model of which two were fitted.
    assert {row.layer for row in rows if row.why == "predicted"} - held_out.keys() == {"mxfp8:nemotron-3-super@tp4"}


def test_times_that_are_taken_out_are_filled_in_and_judged() -> None:
    """One layer: each time, then each two; not those at the ends where nothing is predicted."""
    shipped = profile.read(profile.SHIPPED_FOLDER / "nvidia_h100.json")
    shape = kernel_shape_of(model_shapes.parse("mxfp8:qwen3-30b-a3b"))
    entry = next(each for each in shipped.entries if each.kernel_shape == shape)
    names, card = ["humming_mxfp8", "hopper_mxfp8"], catalog.known_device("nvidia-h100")
    found = list(oracle_quality._left_out_of_layer(entry, names, card, settings.Settings(cache="none")))
    assert len(found) == 2 * 2 * (7 + 21)
    filled = {how: [each for each in found if each.off and each.how == how] for how in ("predicted", "interpolated")}
    assert [len(each) for each in filled.values()] == [2 * 7, 2 * 5]  # two of seven are more than a quarter
    assert all(each.lost == 0.0 for each in filled["predicted"])
    assert max(each.lost_without for each in found) > 0.1
    table = oracle_quality.left_out_table(found)
    assert "| NVIDIA H100 | 1 | 14 of 14, predicted |" in table and "10 of 14, interpolated" in table
    worse = [dataclasses.replace(each, lost=0.25) for each in filled["predicted"][:2]]
    assert "| 2 (100.0%) | 25.0% |" in oracle_quality.left_out_table(worse)
