"""`verify --report`: which layers a server runs through the oracle, by the report that it wrote."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib import cli
from tests.lib.checkpoints import Size, write_checkpoint
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.core.problem import Activation, Parallel, Problem

NAMES = [f"model.layers.{index}.mlp.experts" for index in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verify") / "mxfp8", size=Size(experts=6, top_k=2))


def report_line(layers: dict[str, str], stock: dict[str, str] | None = None, **more: Any) -> str:
    groups = [{"layers": [name], "decision": {"backend": backend}} for name, backend in layers.items()]
    fields = {"rank": 0, "ranks": 1, "host": "here", "process": 7, "vllm": "0.32.0"}
    return json.dumps({**fields, "groups": groups, "left_to_stock": stock or {}, **more}) + "\n"


Tell = Callable[..., cli.Result]


@pytest.fixture
def tell(run: cli.Run, model: Path, tmp_path: Path) -> Tell:
    """Compares a report of these lines with the model; options after `--report-only`."""

    def compare(*lines: str, more: tuple[str, ...] = ()) -> cli.Result:
        (tmp_path / "report.jsonl").write_bytes("".join(lines).encode())
        return run("verify", model, "--report", tmp_path / "report.jsonl", "--report-only", *more)

    return compare


def test_engagement_by_a_servers_report(run: cli.Run, model: Path, tmp_path: Path, tell: Tell) -> None:
    both = dict.fromkeys(NAMES, "emulation")
    found = tell(report_line(both))
    assert found.status == 0 and "2 of 2 MoE layers run through the oracle (here, process 7, vLLM 0.32.0)" in found.out
    assert "emulation: model.layers.0-1.mlp.experts" in found.out
    found = tell(report_line({NAMES[0]: "emulation"}, {NAMES[1]: "needs LoRA"}))
    assert found.status == 1 and f"{NAMES[1]}: not run through the oracle: left to stock vLLM: needs LoRA" in found.err
    found = tell(report_line({NAMES[0]: "emulation"}))
    assert found.status == 1 and "1 of 2 MoE layers" in found.out and "has not reported it" in found.err
    # An earlier start does not count, nor does another model's.
    found = tell(report_line({NAMES[0]: "emulation"}), report_line(both, process=9), report_line({"x": "emulation"}))
    assert found.status == 0
    found = tell(report_line(both, ranks=2))
    assert found.status == 1 and "1 of 2 ranks have reported" in found.err
    found = tell(report_line(both, ranks=2), report_line({**both, NAMES[1]: "other"}, rank=1, ranks=2))
    assert found.status == 1 and "ranks differ (rank 0: emulation, rank 1: other)" in found.err
    (tmp_path / "served.jsonl").write_text(report_line(dict.fromkeys(NAMES, "cpu_mxfp4")))
    found = run("verify", model, "--report", tmp_path / "served.jsonl")
    assert found.status == 0 and found.err.count("note: ") == 1  # for both layers
    assert "note: model.layers.0-1.mlp.experts: the server runs cpu_mxfp4, compared here was" in found.err
    assert "verify --set backend=cpu_mxfp4 compares that one, where it can run" in found.err


def two_ranks(backend: str = "emulation", began: float = 0.0, **more: Any) -> list[str]:
    """The lines of a load over two ranks, 10 s long, without times where it has none."""
    times = {"load_began": began, "load_ended": began + 10} if began else {}
    layers = dict.fromkeys(NAMES, backend)
    own = [{"process": int(began) + rank, "rank": rank, **more} for rank in range(2)]
    return [report_line(layers, ranks=2, **times, **each) for each in own]


@pytest.mark.parametrize("timed", [True, False], ids=["timed", "untimed"])
def test_ranks_of_an_earlier_load_do_not_count(tell: Tell, timed: bool) -> None:
    old = two_ranks("other", 100 if timed else 0, host="there")
    new = two_ranks(began=200 if timed else 0)
    new = [each.replace('"process": ', '"process": 7') for each in new]
    for half in new:
        found = tell(*old, half)
        assert found.status == 1 and "1 of 2 ranks have reported the last load" in found.err
        assert "ranks differ" not in found.err
    assert tell(*old, *new).status == tell(*old, *new[::-1]).status == 0
    if timed:  # the earlier start wrote one line, and ended
        for line in old:
            assert tell(line, new[1]).status == tell(line, new[0]).status == 1


def test_ranks_may_be_on_several_hosts_and_load_a_draft_later(tell: Tell) -> None:
    layers = dict.fromkeys(NAMES, "emulation")
    ranks = [{"host": f"host{rank}", "rank": rank, "ranks": 2, "load_began": 50 + rank} for rank in range(2)]
    model_lines = [report_line(layers, load_ended=60, **each) for each in ranks]
    draft_lines = [report_line({**layers, "draft": "emulation"}, load_ended=70, **each) for each in ranks]
    for lines in (model_lines, model_lines + draft_lines, [*model_lines, draft_lines[0]]):
        assert tell(*lines).status == 0


def test_stages_of_a_pipeline_report_layers_of_their_own(tell: Tell) -> None:
    def stages(count: int) -> list[str]:
        one = {"ranks": 2, "moe_layers": count}
        return [report_line({name: "emulation"}, rank=rank, process=rank, **one) for rank, name in enumerate(NAMES)]

    assert tell(*stages(1)).status == 0
    found = tell(*stages(2))  # each process has a layer that it does not name
    assert found.status == 1 and "ranks differ (rank 0: emulation, rank 1: none)" in found.err


def test_a_report_that_ends_within_a_line_is_read_but_not_complete(tell: Tell) -> None:
    line = report_line(dict.fromkeys(NAMES, "emulation"))
    for text, status in ((line + line[:40], 1), (line.rstrip("\n"), 0), (line.replace("\n", "\r\n"), 0)):
        found = tell(text)
        assert found.status == status and "2 of 2 MoE layers run through the oracle" in found.out
        assert ("the report ends within a line" in found.err) == bool(status)
    assert tell(line, more=("--json",)).json["engagement"]["unfinished"] is False


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"record_version": 99}, "record_version is 99; this release reads 1"),
        ({"rank": 5, "ranks": 2}, "rank is 5, ranks is 2"),
        ({"process": -1}, "Expected `int` >= 0 - at `$.process`"),
        ({"served": -5}, "Expected `int` >= 0 - at `$.served`"),
        ({"moe_layers": -9}, "Expected `int` >= 0 - at `$.moe_layers`"),
        ({"moe_layers": 10**30}, "Expected `int` <= 4294967295 - at `$.moe_layers`"),
        ({"served": 99, "moe_layers": 2}, "served is 99, more than the moe_layers, which are 2"),
        ({"groups": None}, "Give the file that MOE_ORACLE_REPORT names"),
        ({"load_began": 2.0, "load_ended": 1.0}, "the load ends before it begins"),
    ],
    ids=["version", "rank", "process", "served", "layers", "huge", "more", "groups", "times"],
)
def test_a_report_of_another_version_or_with_impossible_numbers(tell: Tell, fields: dict[str, Any], words: str) -> None:
    found = tell(json.dumps({**json.loads(report_line(dict.fromkeys(NAMES, "emulation"))), **fields}) + "\n")
    assert found.status == 2 and words in found.err and "Give the file" in found.err
    assert len(found.err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    ["", "{}\n", "[]\n", "nonsense", '{"groups": 1}', '{"groups": [{"layers": [3], "decision": {"backend": "x"}}]}',
     '{"groups": [], "left_to_stock": {"x": 1}}', report_line({"y": "emulation"}),
     report_line(dict.fromkeys(NAMES, "x"), ranks="two"), report_line(dict.fromkeys(NAMES, "x"), ranks=-1)],
)  # fmt: skip
def test_a_report_that_is_none(tell: Tell, tmp_path: Path, text: str) -> None:
    found = tell(text)
    assert found.status == 2 and str(tmp_path / "report.jsonl") in found.err and len(found.err.splitlines()) == 1


def test_options_that_need_each_other(run: cli.Run, model: Path, tmp_path: Path) -> None:
    assert "there is no report to compare" in run("verify", model, "--report-only").err
    assert run("verify", model, "--report", tmp_path / "none", "--report-only").status == 2


# --- A report of another model ----------------------------------------------------------------------------------------


def line_of(problem: Problem, layers: list[str] = NAMES, **more: Any) -> str:
    """A report's line with a problem as servers write it."""
    group = {"layers": layers, "decision": {"backend": "emulation"}, "problem": msgspec.to_builtins(problem)}
    return report_line({}, **{"groups": [group], **more})


@pytest.fixture(scope="module")
def problem(model: Path) -> Problem:
    return find_moe_layers(read_checkpoint(model)).problems[0]


def replaced(problem: Problem, **fields: Any) -> Problem:
    return dataclasses.replace(problem, **fields)


MXFP4 = {"name": "mxfp4", "bits": 4}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "scheme": ({"scheme": MXFP4}, "format mxfp4 in the report and mxfp8 in the checkpoint, bits 4 in the report and 8"),
    "experts": ({"num_experts": 8}, "experts 8 in the report and 6 in the checkpoint"),
    "fewer experts with EPLB": ({"num_experts": 4, "local_experts": 4, "eplb": True}, "experts 4 in the report and 6"),
    "top-k": ({"top_k": 3}, "top-k 3 in the report and 2 in the checkpoint"),
    "hidden": ({"hidden_size": 256}, "hidden size 256 in the report and 128 in the checkpoint"),
    "shard": ({"parallel": Parallel(tp=4)}, "intermediate size 256 in the report and 64 in the checkpoint"),
    "ragged": ({"ragged_intermediate_size": 96}, "intermediate size 96 in the report and 64 in the checkpoint"),
    "activation": ({"activation": Activation("gelu")}, "activation gelu in the report and silu in the checkpoint"),
    "limit": ({"activation": Activation("silu", limit=7)}, "activation silu (limit=7) in the report and silu in the"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_report_of_another_model_with_the_same_names(tell: Tell, problem: Problem, name: str) -> None:
    fields, words = OTHERS[name]
    if "scheme" in fields:
        fields = {"scheme": dataclasses.replace(problem.scheme, **fields["scheme"])}
    found = tell(line_of(problem), line_of(replaced(problem, **fields), process=8))
    assert found.status == 2 and found.out == "" and len(found.err.splitlines()) == 1
    assert f"the model that it reports last is another one: {NAMES[0]} has {words}" in found.err


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"intermediate_size": 16, "parallel": Parallel(tp=4)},
        {"intermediate_size": 32, "parallel": Parallel(tp=3), "ragged_intermediate_size": 64},
        {"local_experts": 3, "parallel": Parallel(ep=2, dp=2)},
        {"num_experts": 8, "local_experts": 4, "parallel": Parallel(ep=2), "eplb": True},
        {"dtype": "float16", "lora": True, "batch_invariant": True},
    ],
    ids=["same", "shard", "ragged", "ep", "redundant", "options"],
)
def test_what_vllms_options_change_makes_no_other_model(tell: Tell, problem: Problem, fields: dict[str, Any]) -> None:
    found = tell(line_of(replaced(problem, **fields)))
    assert found.status == 0 and "2 of 2 MoE layers run through the oracle" in found.out, found.err


def test_a_draft_with_the_models_names_and_an_earlier_start_do_not_count(tell: Tell, problem: Problem) -> None:
    other = replaced(problem, top_k=1)
    assert tell(line_of(problem), line_of(other, NAMES[:1])).status == 0  # of one process
    assert tell(line_of(other, process=3), line_of(problem)).status == 0
    assert tell(line_of(other, process=3), line_of(problem), line_of(other, process=3)).status == 2


def test_zero_points_and_groups_are_compared() -> None:
    from vllm_moe_oracle.core.problem import Scheme
    from vllm_moe_oracle.decision_records import RecordedProblem

    here = Problem("x", Scheme("wna16", 4, 128, "awq", zero_points=True), 8, 8, 2, 128, 128, Activation("silu"))
    there = replaced(here, scheme=Scheme("wna16", 4, 32, "gptq"))
    recorded = msgspec.convert(msgspec.to_builtins(there), RecordedProblem)
    assert recorded.differences(here) == [("group size", 32, 128), ("zero points", "no", "yes")]
    assert RecordedProblem().differences(here) == []
