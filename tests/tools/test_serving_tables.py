"""Whole models beside what the kernels predict: the table in the README is that of the committed numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import serve
from tests.lib import golden_files
from tests.tools import serving_tables


def run(**changes: Any) -> dict[str, Any]:
    conditions = {"device": "a card", "vllm": "1", "torch": "2", "layers": 2}
    conditions |= {"decode": "d", "mixed": "m", "prefill": "p"}
    each = {"1": 2.0, "8": 3.0, "64": 4.0}
    busy = {"busy_ms": {"1": 1.0, "8": 2.5, "64": 3.5}, "end": "words"}
    row = {
        "decode_ms": each, "noise_ms": dict.fromkeys(each, 0.01), "tokens_per_second": dict.fromkeys(each, 7),
        "prefill_tokens_per_second": 10, "start_seconds": 5.0, **busy,
    }  # fmt: skip
    groups = [{"backend": "hopper_mxfp8", "layers": 2, "why": "measured", "measured": "much more"}]
    modes = [
        {"mode": "stock", **row},
        {"mode": "auto", **row, "groups": groups, "decode_ms": {**row["decode_ms"], "1": 1.5}},
    ]
    made = {
        "conditions": {**conditions, "command": "python serve.py --json /tmp/x.json"},
        "models": {"qwen3-mxfp8": modes},
    }
    made["conditions"] |= changes
    return made


TIMES = {"auto": 40.0, "ours": 20.0, "marlin_mxfp8": 30.0}
KERNELS = {"rows": [{"layer": "mxfp8:qwen3-30b-a3b", "us": {n: TIMES for n in ("1", "8", "64")}}]}


def test_a_step_is_held_against_the_kernels_difference_times_the_layers() -> None:
    made = serving_tables.golden([run()])
    text = serving_tables.table(made, KERNELS)
    assert "| qwen3-mxfp8 | 1 | 2.000 | 1.500 | +0.500 | 0.020 | +0.040 |" in text
    assert "| qwen3-mxfp8 | 8 | 3.000 | 3.000 | +0.000 | 0.020 | +0.040 |" in text
    assert "| qwen3-mxfp8 | 8 | 2.500 of 3.000 | 2.500 of 3.000 | +0.000 | +0.040 |" in text
    assert "| qwen3-mxfp8 | 7 / 7 / 7 | 7 / 7 / 7 | 10 | 10 | 5 | 5 |" in text
    assert "words" not in json.dumps(made)
    assert made["models"]["qwen3-mxfp8"]["modes"][1]["backends"] == {"hopper_mxfp8": {"layers": 2, "why": "measured"}}
    assert "/tmp" not in json.dumps(made)


def test_what_noise_hides_or_was_not_timed_is_no_number() -> None:
    made = run()
    stock, ours = made["models"]["qwen3-mxfp8"]
    stock["noise_ms"] = {**stock["noise_ms"], "8": 0.8}  # compiling while it was timed, say
    stock["decode_ms"] = {**stock["decode_ms"], "64": -0.2}
    ours |= {"busy_ms": {"1": 1.0}, "error": "ended after 150 s"}
    text = serving_tables.table(serving_tables.golden([made]), KERNELS)
    assert "| qwen3-mxfp8 | 8 | - | 3.000 | - | 0.810 | +0.040 |" in text
    assert "| qwen3-mxfp8 | 64 | - | 4.000 | - | 0.020 | +0.040 |" in text
    assert "| qwen3-mxfp8 | 1 | 1.000 of 2.000 | - | - | +0.040 |" in text


def test_the_prediction_is_of_the_backend_that_was_chosen() -> None:
    assert serving_tables.predicted_ms(KERNELS, "qwen3-mxfp8", "8", 2, "marlin_mxfp8") == pytest.approx(0.02)
    with pytest.raises(KeyError):
        serving_tables.predicted_ms(KERNELS, "qwen3-mxfp8", "8", 2, "humming_mxfp8")


def test_each_model_says_of_how_many_runs_its_medians_are() -> None:
    other = {
        "models": {"gpt-oss": run()["models"]["qwen3-mxfp8"]},
        "conditions": run(decode="medians of 15")["conditions"],
    }
    found = serving_tables.golden([run(), other])["models"]
    assert {name: each["decode"] for name, each in found.items()} == {"qwen3-mxfp8": "d", "gpt-oss": "medians of 15"}


def test_what_has_no_numbers_or_other_conditions_is_refused() -> None:
    with pytest.raises(ValueError, match="different conditions"):
        serving_tables.golden([run(), run(layers=3)])
    broken = run()
    del broken["models"]["qwen3-mxfp8"][0]["decode_ms"]["64"]
    with pytest.raises(ValueError, match="has no numbers"):
        serving_tables.golden([broken])
    ended = run()
    ended["models"]["qwen3-mxfp8"][0]["error"] = "ended after 150 s"
    (stock, _) = serving_tables.golden([ended])["models"]["qwen3-mxfp8"]["modes"]
    assert "after all numbers were there" in stock["remark"] and "error" not in stock


def test_a_process_without_kernels_worked_for_no_time() -> None:
    model = torch.nn.Linear(2, 2)
    serve.start_profiler(model)
    model(torch.zeros(1, 2))
    assert serve.stop_profiler(model) == (0.0, {})


def test_every_model_was_served_both_ways() -> None:
    found = json.loads(serving_tables.GOLDEN.read_text())
    assert set(found["models"]) == set(serve.ALONE) and set(serving_tables.CELLS) == set(serve.MODELS)
    for each in found["models"].values():
        assert [mode["mode"] for mode in each["modes"]] == ["stock", "auto"]
        assert each["modes"][1]["served"] == "16 of 16"


def test_steps_over_ranks_are_held_against_the_layers_times() -> None:
    found = json.loads(serving_tables.RANKS.read_text())
    row = next(each for each in found["rows"] if each["model"] == "kimi-k2" and each["parallel"] == "ep")
    # 7 layers; microseconds at 256 tokens, of the committed benchmark.
    _, records = golden_files.records(golden_files.newest("unlisted-3").read_text().splitlines())
    cell = "int4_g32:kimi-k2@ep2", 256
    (us,) = (each["us"] for each in records if (each["layer"]["name"], each["tokens"]) == cell)
    saved = 7 * (us["humming_wna16_grouped"] - us["hopper_wna16"]) / 1e3
    assert serving_tables.saved_by_layers(row, 256, found["conditions"]) == pytest.approx(saved, rel=1e-3)


def test_turns_over_ranks_say_what_the_experts_kernels_take() -> None:
    """The exchange between ranks waits for the other rank, and is counted apart."""
    kernels = {"gate_up": 0.2, "down": 0.1, "nvjet": 0.3, "void vllm::cross_device_reduce_1stage<bf16>": 2.0}
    timed = {"decode_ms": {"1": 3.0, "8": 4.0}, "noise_ms": {"1": 0.1, "8": 0.2}, "kernels_ms": {"1": kernels}}
    runs = [{"model": "kimi-k2", "turns": [{"mode": "stock", "routing": {"uniform": timed}}, {"mode": "auto"}]}]
    assert serving_tables.turns_table({"runs": runs}).splitlines()[2:] == [
        "| 1, kimi-k2 | stock | 1 | 3.00 | 0.10 | 0.30 | 0.30 | 2.00 |",
        "| 1, kimi-k2 | stock | 8 | 4.00 | 0.20 | - | - | - |",
    ]


def test_the_page_says_of_turns_what_the_layers_times_save() -> None:
    page = " ".join((Path(__file__).parents[2] / "vllm_moe_oracle/kernels/RESULTS.md").read_text().split())
    found = json.loads(serving_tables.RANKS.read_text())
    row = next(each for each in found["rows"] if (each["model"], each["parallel"]) == ("gpt-oss-120b", "tp"))
    saved = [serving_tables.saved_by_layers(row, batch, found["conditions"]) for batch in (1, 8)]
    assert f"less than the {saved[0]:.2f} and {saved[1]:.2f} ms of the layers' times" in page
    turns = json.loads(serving_tables.TURNS.read_text())["runs"][1]["turns"]
    timed = [(turn["mode"], turn["routing"]["uniform"]) for turn in turns]
    spans = []
    for batch in ("1", "8"):
        experts = {True: [], False: []}
        for mode, found in timed:
            experts[mode == "auto"].append(float(serving_tables._shares(found["kernels_ms"][batch])[0]))
        (ours,) = experts[True]
        spans.append(" to ".join(f"{each - ours:.2f}" for each in sorted(experts[False])))
    assert f"by {spans[0]} ms a step at one prompt and by {spans[1]} at 8" in page
    steps = [found["decode_ms"]["1"] for _, found in timed]
    assert f"of a step of {min(steps):.1f} to {max(steps):.1f}." in page
    kernels = [sum(map(float, serving_tables._shares(found["kernels_ms"]["1"])[:2])) for _, found in timed]
    assert f"take {min(kernels):.1f} to {max(kernels):.1f} ms" in page


def test_turns_are_kept_as_far_as_they_came() -> None:
    conditions = {"command": "python tests/gpu/serve.py --ranks 2 --json /tmp/x.json"}
    timed = {"decode_ms": {"1": 2.0}}
    modes = [{"mode": "stock", "routing": {"uniform": timed}, "error": "ended", "log": "words"}, {"mode": "auto"}]
    made = serving_tables.golden_turns({"conditions": conditions, "models": {"kimi-k2": modes}})
    assert made["turns"] == [{"mode": "stock", "routing": {"uniform": timed}, "error": "ended"}, {"mode": "auto"}]
    assert made["model"] == "kimi-k2" and "/tmp" not in json.dumps(made)
    with pytest.raises(ValueError, match="unpack"):
        serving_tables.golden_turns({"conditions": conditions, "models": {"a": [], "b": []}})


def test_the_gpus_time_of_a_step_is_told_by_routing() -> None:
    def inside(ms: float) -> dict[str, Any]:
        return {"busy_ms": {"8": ms}, "routing": {"skewed": {"busy_ms": {"8": ms / 2}}}}

    # The first was measured in a start of its own.
    modes = [{"inside": inside(3.0), "backends": []}, {**inside(2.0), "backends": ["hopper_mxfp8"]}]
    found = {"conditions": {"layers": 2}, "models": {"qwen3-mxfp8": modes}}
    lines = serving_tables.routing_table(found, KERNELS).splitlines()[2:]
    assert lines == [
        "| qwen3-mxfp8 | given | 8 | 3.000 | 2.000 | +1.000 | +0.040 |",
        "| qwen3-mxfp8 | skewed | 8 | 1.500 | 1.000 | +0.500 | +0.040 |",
    ]


def run_over_ranks(expert_parallel: bool, step: float, noise: float = 0.1, **more: str) -> dict[str, Any]:
    conditions: dict[str, Any] = dict.fromkeys(("device", "vllm", "torch", "decode", "prefill"), "") | {"ranks": 2}
    conditions |= {"expert_parallel": expert_parallel, "command": "python tests/gpu/serve.py --json /tmp/x.json"}
    timed = {"decode_ms": {"8": step}, "noise_ms": {"8": noise}, "prefill_tokens_per_second": 5}
    modes = [{"mode": name, "routing": {"skewed": timed}} for name in ("stock", "auto")]
    return {"conditions": conditions | more, "models": {"kimi-k2": modes}}


def test_a_model_over_ranks_without_one_modes_numbers_is_left_out() -> None:
    found = run_over_ranks(True, 2.0, noise=0.3)
    found["models"]["gpt-oss-120b"] = [found["models"]["kimi-k2"][0], {"mode": "auto", "error": "ended"}]
    made = serving_tables.golden_ranks([found])
    assert [each["model"] for each in made["rows"]] == ["kimi-k2"] and "/tmp" not in json.dumps(made)
    text = serving_tables.ranks_table(made)
    assert "| kimi-k2 | EP 2 | skewed | 8 | - | - | - | 0.60 |  |" in text and "| EP 2 | skewed | 5 | 5 |" in text


def test_runs_over_ranks_join_committed_ones_of_equal_conditions() -> None:
    first = serving_tables.golden_ranks([run_over_ranks(True, 2.0), run_over_ranks(False, 3.0)])
    joined = serving_tables.golden_ranks([run_over_ranks(True, 4.0)], first)
    steps = {row["parallel"]: row["modes"][0]["routing"]["skewed"]["decode_ms"]["8"] for row in joined["rows"]}
    assert steps == {"ep": 4.0, "tp": 3.0}
    with pytest.raises(ValueError, match="different conditions"):
        serving_tables.golden_ranks([run_over_ranks(True, 4.0, torch="2.14")], first)


def test_what_stock_takes_while_it_compiles_is_as_the_page_says() -> None:
    kept = json.loads(golden_files.newest("serve-settling").read_text())
    stock, ours = (mode["routing"]["uniform"] for mode in kept["modes"])
    (low, _, high), (least, _, most) = (each["latency_s"]["64"]["16"] for each in (stock, ours))
    page = (serve.ROOT / "vllm_moe_oracle" / "kernels" / "RESULTS.md").read_text().replace("\n  ", " ")
    assert f"took stock {low:.2f} to {high:.2f} s, and the plugin {least:.2f} to {most:.2f} s" in page
    assert "256" not in stock["decode_ms"] and stock["decode_ms"]["64"] < 0 < ours["decode_ms"]["256"]
