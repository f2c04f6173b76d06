"""Tools that run on GPUs: their committed data, and their judgement."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.gpu import compare_tiles, kernel_cases, ranks, serve, tune_kernels
from tests.lib import golden_files, kernel_launches, reference
from tests.lib.served import PROMPT, tolerance
from tests.tools import gpu_tables
from vllm_moe_oracle.backends._hopper import BATCHED_SLOWER
from vllm_moe_oracle.kernels import heuristic, prefill_config

with mock.patch.dict(os.environ):  # the tool chooses its process's settings when it is imported
    from tests.gpu import batched_layers

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "vllm_moe_oracle/kernels"


def rows_of(name: str, part: str = "rows") -> list[dict[str, Any]]:
    """Rows of a committed measurement."""
    found: list[dict[str, Any]] = golden_files.read(golden_files.FOLDER / f"{name}.json")[part]
    return found


def test_what_is_said_of_the_tile_rule_is_what_was_measured() -> None:
    found = [rows_of(f"h100/tile-rule{end}") for end in ("", "-2")]
    ratios = [[row["before"] / row["after"] for row in rows] for rows in found]
    layers = {(row["scheme"], row["shape"]) for row in found[0]}
    means = [statistics.geometric_mean(each) for each in ratios]
    slower = [sum(each < 0.95 for each in run) for run in ratios]
    said = " ".join((KERNELS / "EXPERIMENTS.md").read_text().split())
    low, high = min(map(min, ratios)), max(map(max, ratios))
    assert all(f"{mean:.2f}" == "1.05" for mean in means) and len(ratios[0]) == len(ratios[1])
    words = f"is 1.05 times as fast as the one before it (geometric mean of {len(ratios[0])} choices that differ, "
    words += f"{len(layers)} layers, two H100s; {low:.2f} to {high:.2f}, {slower[0]} and {slower[1]} of the choices "
    assert words in said


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("h100/tile-rule-3", " calls of 4 to 4096 tokens"),
        ("h100/tile-rule-4", " calls"),
        ("h200/tile-rule-5", " calls"),
    ],
)
def test_tiles_of_few_experts_were_measured_as_they_are_chosen(file: str, what: str) -> None:
    rows = rows_of(file)
    said = (KERNELS / "EXPERIMENTS.md").read_text()
    assert _ratios([row for row in rows if "@ep" in row["shape"] and _is_chosen(row)], what) in said


def _is_chosen(row: dict[str, Any], quantize: bool = False) -> bool:
    """Whether the kernels still choose what a comparison has as the second configuration."""
    weights = tune_kernels.stored(row["scheme"], row["shape"], "meta")
    config = compare_tiles.chosen(weights, row["shape"], row["tokens"], quantize=quantize)
    return tune_kernels.describe(config).replace("  ", "") == row["configs"][1]


def _ratios(rows: list[dict[str, Any]], what: str = " calls", verb: str = "") -> str:
    """How many calls are how many times as fast, as the experiments' page says it."""
    ratios = [row["before"] / row["after"] for row in rows]
    mean = statistics.geometric_mean(ratios)
    return f"{len(ratios)}{what} {verb}{mean:.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"


def test_choices_survive_their_file() -> None:
    found = compare_tiles.choices(measured=False)
    assert len(found) >= 55 and {"persistent"} < {
        key for each in found.values() for one in each.values() for key in one
    }
    for cell in found.values():
        assert all(compare_tiles.encode(compare_tiles.decode(each)) == each for each in cell.values())


JOB: dict[str, Any] = {"feature": "generate", "prompt": PROMPT, "engine": {"tensor_parallel_size": 2}}


def served(**changes: Any) -> dict[str, Any]:
    """What an engine of two ranks gives."""
    expected = continuation()
    group = {"count": 2, "decision": {"backend": "hopper_mxfp8", "why": "user"}}
    said = {"tokens": expected.tokens, "logprobs": expected.logprobs[len(PROMPT) - 1 : -1].tolist()}
    plain = {"result": {"said": [said]}, "records": [{"groups": [group]}] * 2, "seconds": 1.0, "log": [], "moves": 3}
    return plain | changes


def continuation() -> reference.Continuation:
    """Two tokens after the prompt, over a vocabulary of four."""
    return reference.Continuation(PROMPT, [2, 3], np.zeros((len(PROMPT) + 2, 4), np.float32))


def other(backend: str = "hopper_mxfp8", count: int = 2) -> dict[str, Any]:
    return {"groups": [{"count": count, "decision": {"backend": backend, "why": "user"}}]}


def holds(given: dict[str, Any], another: reference.Continuation | None = None, **job: Any) -> bool:
    return bool(ranks.judge(JOB | job, given, continuation(), another)["ok"])


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"result": {"error": "RuntimeError: no"}}, False),
        ({"records": []}, False),
        ({"records": [other(), other("marlin_mxfp8")]}, False),
        ({"records": [other(), other(count=1)]}, False),
    ],
)
def test_ranks_are_judged_by_layers_and_decisions(changes: dict[str, Any], right: bool) -> None:
    assert holds(served(**changes)) is right


def test_ranks_are_judged_by_tokens_and_logprobs_of_every_answer() -> None:
    said = served()["result"]["said"][0]
    moved = (np.array(said["logprobs"]) + 1.01 * tolerance("bfloat16")).tolist()
    for wrong in ({**said, "tokens": [2, 1]}, {**said, "logprobs": moved}):
        assert not holds(served(result={"said": [said, wrong]}))
        assert not holds(served(result={"said": [said], "said_other": [wrong]}), continuation())
        assert holds(served(result={"said": [said], "said_other": [said]}), continuation())
    assert not holds(served(result={"said": [said], "said_other": [said]}))  # nothing to compare it with


def test_features_are_judged_by_what_they_promise() -> None:
    said, records = served()["result"]["said"], [other(count=1)] * 2
    for same in (True, False):
        assert holds(served(result={"said": said, "same_bits": same}), feature="in_a_batch") is same
    assert holds(served(), feature="expert_load_balancing")
    assert not holds(served(moves=0), feature="expert_load_balancing")
    assert holds(served(records=records), engine={"pipeline_parallel_size": 2}) and not holds(served(records=records))


def test_stock_over_ranks_runs_no_layer_through_the_oracle() -> None:
    assert holds(served(records=[]), plugin=False)
    assert not holds(served(), plugin=False)  # the plugin was there
    assert not holds(served(records=[]))  # it was not
    rows: list[dict[str, Any]] = [{"format": "f", "case": case} for case in ("tp2, own", "tp2, stock")]
    other = {"tokens": [1], "logprobs": [[-1.0, -2.0]]}
    said = {("f", "tp2, own"): other, ("f", "tp2, stock"): {"tokens": [2], "logprobs": [[-1.0, -1.5]]}}
    ranks.compare_with_stock(rows, said)
    assert rows[1]["plugin_difference"] == 0.5 and rows[1]["plugin_tokens_equal"] is False
    assert rows[0] == {"format": "f", "case": "tp2, own"}


@pytest.mark.parametrize("experts", [1, 4, 16, 20])
@pytest.mark.parametrize("tokens", [1, 7, 256])
def test_batches_of_experts_have_the_mean_that_is_asked_for(experts: int, tokens: int) -> None:
    rows = 1024
    assert batched_layers.counts_of(experts, tokens, rows, "uniform") == [tokens] * experts
    skewed = batched_layers.counts_of(experts, tokens, rows, "skewed")
    assert len(skewed) == experts and max(skewed) <= rows
    # What no expert has room for is not sent; here there is room.
    assert sum(skewed) == experts * tokens
    assert skewed.count(0) >= experts // 4 and (experts == 1 or max(skewed) > tokens)


def test_a_full_batch_overflows_to_the_next_expert() -> None:
    skewed = batched_layers.counts_of(4, 48, 64, "skewed")
    assert sorted(skewed) == [0, 64, 64, 64]


def test_the_first_traceback_is_kept_without_its_prefix() -> None:
    log = ["INFO a", "(W pid=1) ERROR Traceback (most recent call last):", "(W pid=1) ERROR   File x", "INFO b"]
    log += ["(W pid=1) ERROR     call()", "(W pid=1) ERROR     ^^^^^^", "(W pid=1) ERROR ValueError: no", "later error"]
    assert ranks.first_traceback("\n".join(log)) == ["  File x", "    call()", "ValueError: no"]
    assert ranks.first_traceback("INFO a\nan error\nb") == ["an error"]


def test_two_gpus_say_what_transformers_say() -> None:
    runs = golden_files.read(gpu_tables.RANKS[0])["runs"]
    rows = [row for run in runs for row in run["rows"]]
    assert all(row["logprob_difference"] <= run["conditions"]["tolerance"] for run in runs for row in run["rows"])
    assert all(row["ok"] and row["tokens_equal"] and row["layers"] for row in rows)
    cells = [(row["format"], row["case"]) for row in rows]
    assert len(cells) == len(set(cells))
    wanted = {(format, case) for format in ranks.FEATURED for case in ranks.FEATURES if "http" not in case}
    # vLLM's gpt-oss moves no experts, and its experts have no names of their own for an adapter.
    lacks = ("eplb", "eplb, async", "expert lora", "expert lora, ep")
    assert wanted - set(cells) == {("mxfp4 gpt-oss", case) for case in lacks}
    drafting = [row for row in rows if row["format"] in ranks.DRAFTS]
    assert len(drafting) == 6 and all(0 < row["accepted"] == row["drafted"] for row in drafting)
    own = [row for row in rows if "static" not in row["case"]]
    assert all(name.startswith("hopper_") for row in own for name in row["backends"])


def rows_of_two_h200s() -> list[dict[str, Any]]:
    return [row for run in golden_files.read(gpu_tables.RANKS[1])["runs"] for row in run["rows"]]


def test_stock_over_ranks_answers_as_the_plugin_or_fails_as_the_page_says() -> None:
    rows = rows_of_two_h200s()
    own = [row for row in rows if "stock" not in row["case"]]
    assert all(row["ok"] and row["tokens_equal"] and row["logprob_difference"] <= tolerance("bfloat16") for row in own)
    stock = [row for row in rows if "stock" in row["case"]]
    assert len({(row["format"], row["case"]) for row in stock}) == len(stock)
    compared = [row for row in stock if "plugin_difference" in row]
    assert all(row["plugin_tokens_equal"] for row in compared)
    page = " ".join((ROOT / "vllm_moe_oracle/OPERATIONS.md").read_text().split())
    largest = max(row["plugin_difference"] for row in compared)
    words = (
        f"In {len(compared)} engines its logprobs were compared with the plugin's own of the same run: they are within"
    )
    assert f"{words} {largest:.3f}." in page
    causes = {"gptq g32 act order": "no longer supported", "mxfp4 gpt-oss": "CompileTimeAssertionFailure",
              "mxfp8 online": "AttributeError"}  # fmt: skip
    failed = {
        (row["format"], row["case"].removesuffix(", stock, graphs")): row["cause"] for row in stock if not row["ok"]
    }
    assert set(failed) == {(format, "tp2 ep") for format in causes} | {("mxfp4 gpt-oss", "tp2")}
    assert all(causes[format] in cause for (format, _), cause in failed.items())


def test_servers_over_two_gpus_answer_over_http() -> None:
    rows = {(row["format"], row["case"]): row for row in rows_of_two_h200s() if "http" in row["case"]}
    assert set(rows) == set(itertools.product(ranks.FEATURED, (case for case in ranks.FEATURES if "http" in case)))
    # One request alone and four among 60 others.
    assert all(row["ok"] and row["answers"] == 5 and row["ranks"] == 2 for row in rows.values())
    assert all(row["same_bits"] for (_, case), row in rows.items() if "invariance" in case)


def test_a_later_layers_first_call_is_said_as_it_was_timed() -> None:
    rows = golden_files.rows(golden_files.newest("check-price-later"))
    page = " ".join((ROOT / "vllm_moe_oracle/ACCURACY.md").read_text().split())
    int4, gpt_oss = (row["later layer"]["kernel calls"] / 1e3 for row in rows)
    assert f"with nothing cached {int4:.1f} s in int4 and {gpt_oss:.1f} s in gpt-oss's layout" in page


def test_the_kernels_reference_gives_h_by_slot_in_16_bits() -> None:
    (case,) = kernel_cases.by_name("mxfp8")
    layer = kernel_cases.make_layer(case)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, case.hidden, generator=generator).to(case.dtype)
    ids = torch.tensor([[0, 1, 2, -1]] * 3)
    router = torch.ones(3, case.top_k)
    h = x.new_full((ids.numel(), case.inner), torch.nan)
    kernel_cases.reference(case, layer, x, router, ids, addend=x.new_zeros(ids.numel(), 2 * case.inner), slot_h=h)
    assert torch.equal(h.isnan().all(1), ids.flatten() < 0) and h.isfinite().all(1).sum() == 9


def test_the_price_of_the_self_check_is_what_was_measured() -> None:
    rows = json.loads(golden_files.newest("check-price").read_text())
    said = (ROOT / "vllm_moe_oracle" / "ACCURACY.md").read_text()
    assert len(rows) == 3 and all(row["passed"] and row["median_ms"] <= 150 for row in rows)
    for row in rows:
        assert f"| {row['least_ms']:.0f} ms, {row['median_ms']:.0f} ms | " in said
        assert f" | {sum(row['operations'].values()):,} |" in said


def test_sanitizers_find_nothing_in_what_ships() -> None:
    verdicts = json.loads((ROOT / "tests/golden/racecheck/shipped-h200.json").read_text())["verdicts"]
    page = " ".join((ROOT / "vllm_moe_oracle/kernels/EXPERIMENTS.md").read_text().split())
    for tool in ("racecheck", "memcheck"):
        assert {*verdicts[tool]} == {*kernel_launches.MEASURED}, f"{tool}: layers are missing or were renamed"
        ended = [re.fullmatch(r"ok; (\d+) configurations", each) for each in verdicts[tool].values()]
        assert all(ended), f"{tool}: not all configurations ended without a report"
        count = sum(int(each[1]) for each in ended if each)
        assert f"shipped table's {count} configurations of {len(ended)} layers" in page


class Layer(torch.nn.Module):
    """A decoder layer's norm and its router with a bias that outweighs every product, as made-up weights have."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.input_norm = torch.nn.LayerNorm(hidden, bias=False)
        self.router = torch.nn.Linear(hidden, experts)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -1e-3, 1e-3)


def busiest(layer: Layer, tokens: torch.Tensor) -> float:
    """The share of the expert with the most tokens, of the mean share."""
    chosen = layer.router(layer.input_norm(tokens)).topk(8, dim=-1).indices
    counts = torch.bincount(chosen.flatten(), minlength=layer.router.out_features)
    return float(counts.max() / counts.double().mean())


def test_written_routers_spread_tokens_over_the_experts() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Layer(128, 256), Layer(128, 256))
    tokens = torch.randn(4096, 256)
    with torch.no_grad():
        assert busiest(model[0], tokens) == 16  # all tokens go to the same 8 of 128
        assert serve.write_routers(model, "uniform") == 2
        # 256 tokens an expert: five deviations of a count are 0.31 of the mean.
        assert all(busiest(layer, tokens) < 1.31 for layer in model)
        assert not torch.equal(model[0].router.weight, model[1].router.weight)
        first = model[0].router.weight.clone()
        serve.write_routers(model, "skewed")
        assert all(2 < busiest(layer, tokens) < 8 for layer in model)
        serve.write_routers(model, "uniform")
        assert torch.equal(model[0].router.weight, first)  # every rank writes the same


def test_routers_that_were_packed_are_named() -> None:
    model = Layer(8, 16)
    model.router.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ValueError, match=r"router\.weight was packed"):
        serve.write_routers(torch.nn.Sequential(model), "uniform")


def test_what_is_said_of_tokens_sorted_by_expert_was_measured() -> None:
    every = golden_files.rows(gpu_tables.BATCHED)
    rows = [row for row in every if "marlin" in row["us"]]
    assert {row["layer"].partition(":")[0] for row in rows} == {"mxfp4", "int4_g32", "int4_g128"}
    for few, words in ((True, "{:.2f} to {:.2f} times as long"), (False, "{:.2f} to {:.2f} times from 128 tokens")):
        times = [row["us"]["own"] / row["us"]["marlin"] for row in rows if (row["tokens"] <= 64) == few]
        assert words.format(min(times), max(times)) in BATCHED_SLOWER
    assert all("marlin" not in row["us"] for row in every if row["layer"].startswith("mxfp8"))
    page = (KERNELS / "RESULTS.md").read_text()
    gains = [1 / (row["us"]["own"] / row["us"]["marlin"]) for row in rows if row["tokens"] >= 128]
    assert f"ours are {min(gains):.2f} to {max(gains):.2f} times as fast as Marlin" in page
    for row in every:
        assert not row["failures"] and set(row["us"]) <= set(row["errors"])


@pytest.mark.parametrize("gpu", gpu_tables.GPUS)
def test_the_rules_tiles_were_searched_as_they_are_chosen_now(gpu: str) -> None:
    rows = gpu_tables.tile_rows(gpu)
    assert len({(row["scheme"], row["shape"]) for row in rows}) >= 12
    for row in rows:
        weights = tune_kernels.stored(row["scheme"], row["shape"], "meta")
        config = compare_tiles.chosen(weights, row["shape"], row["tokens"])
        assert " ".join(tune_kernels.describe(config).split()) == row["configs"][0], row
        assert row["best_us"] <= row["rule_us"] and row["searched"] > 1


def test_the_rules_tiles_of_few_tokens_are_those_that_were_searched() -> None:
    ratios = gpu_tables.few_ratios()
    assert len({layer for layer, _ in ratios}) >= 12 and len(ratios) == 3 * len({layer for layer, _ in ratios})
    found = golden_files.read(golden_files.FOLDER / "h200/tile-search-few.json")
    timed = {f"{row['scheme']}:{row['shape']}:{row['tokens']}": row["configs"][1] for row in found["rows"]}
    for cell, best in found["searched"].items():
        scheme, shape, tokens = cell.split(":")
        weights = tune_kernels.stored(scheme, shape, "meta")
        config = compare_tiles.chosen(weights, shape, int(tokens), rule=True)
        # Where no row has times, the rule's choice is the best one.
        assert "".join(tune_kernels.describe(config).split()) == "".join(timed.get(cell, best).split()), cell


def test_what_is_said_of_few_tokens_was_measured() -> None:
    rows = rows_of("h200/tile-rule-6")
    few = [row for row in rows if row["configs"][1].strip().endswith("p")]
    kept = [row for row in rows if _is_chosen(row)]
    assert all(row in kept for row in few)

    longer = "16x64x256w4s3"
    short = [row for row in kept if row["scheme"] == "mxfp8" and longer in row["configs"][0] and row not in few]
    left = list(filter(_is_chosen, rows_of("h200/tile-table")))
    said = (KERNELS / "EXPERIMENTS.md").read_text()
    assert [words for words in map(_ratios, (few, short, left)) if words not in said] == []


def test_what_is_said_of_the_present_rule_was_measured() -> None:
    """Every row of its comparisons is a choice that the kernels still make."""
    rows, rejected = rows_of("h200/tile-rule-7"), rows_of("h200/tile-rule-7", "rejected")
    assert not any(map(_is_chosen, rejected))
    activations = rows_of("h200/tile-rule-7-w8a8")
    assert all(map(_is_chosen, rows)) and all(_is_chosen(row, quantize=True) for row in activations)
    few = [row for row in rows if row["rows"] <= 14]
    middle = [row for row in rows if row["rows"] > 14]
    zero_points = [row for row in middle if row["scheme"].endswith("z")]
    mxfp8 = [row for row in middle if row["scheme"] == "mxfp8"]
    assert len(middle) == len(zero_points) + len(mxfp8)
    many = [row for row in activations if row["rows"] > 28]
    said = (KERNELS / "EXPERIMENTS.md").read_text()
    words = [_ratios(few), _ratios(zero_points), _ratios(mxfp8), _ratios(many)]
    table = rows_of("h200/tile-table-zero-points")
    for row in table:  # the table's tiles are chosen
        assert _is_chosen({**row, "configs": row["configs"][::-1]})
    words += [_ratios(table), _ratios(rejected)]
    assert [each for each in words if each not in said] == []


def test_what_is_said_of_the_hand_over_was_measured() -> None:
    """How much the rule and the one before it lose to the better kernels, without the table."""
    before = ((40, 0, 10e9), (28, 0, 60e9), (15, 5000, 0))
    logs: dict[bool, list[float]] = {False: [], True: []}
    layers = set()
    for row in rows_of("h200/hand-over"):
        weights = tune_kernels.stored(row["scheme"], row["shape"], "meta")
        layers.add((row["scheme"], row["shape"]))
        (_, top_k, *_), _ = tune_kernels.sizes_of(row["shape"])
        load = heuristic.expected_load(weights.experts, weights.num_experts, top_k, row["tokens"])
        times = dict(zip(("Prefill" in each for each in row["configs"]), (row["before"], row["after"]), strict=True))
        for now, rule in ((False, before), (True, prefill_config._PERSISTENT_FROM)):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prefill_config, "_PERSISTENT_FROM", rule)
                small = heuristic.prefers_small_tiles(weights, load)
                chosen = prefill_config.choose_prefill_config(
                    weights, "", "", row["tokens"], rows=load.rows, slots=load.slots, small_tiles=small
                )
            logs[now].append(math.log(times[chosen is not None] / min(times.values())))
    mean = {now: math.fsum(each) / len(each) for now, each in logs.items()}
    wrong = {now: sum(each > math.log(1.05) for each in found) for now, found in logs.items()}
    said = (KERNELS / "EXPERIMENTS.md").read_text()
    words = (
        f"{len(logs[True])} calls of {len(layers)} layers: the better one is missed by {100 * mean[True]:.1f} % in the "
    )
    words += f"mean, not {100 * mean[False]:.1f}; by more than 5 % in {wrong[True]}, not {wrong[False]} calls"
    assert words in said, words
