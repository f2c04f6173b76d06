"""The script that measures backends on a GPU: what its rules say of a row, how its processes keep quiet, how its tables
become one."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.backend_tables import backend_table
from vllm_moe_oracle.backends import MAX_CHECK_TOKENS
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.verification import inputs, self_check

FOLDER = Path(__file__).parents[1] / "gpu"
TABLE = backend_table.table_of("mxfp8")
FewKernels, Quiet, broken, merge = (
    backend_table.FewKernels, backend_table.Quiet, backend_table.broken, backend_table.merge
)  # fmt: skip


def row(backend: str = "emulation", **changed: Any) -> dict[str, Any]:
    """One that keeps every rule."""
    check = {"passed": True, "missed": [], "raised": {}, "seconds": 0.05, "alone": True}
    return {
        "layer": "qwen3_silu", "backend": backend, "one_expert_mib": 4.5, "convert_peak_mib": 68.0,
        "error": {"1": {"eager": 5e-3, "graph": 5e-3}}, "stock_error": {"1": 4.5e-3}, "spread_error": 5e-3,
    } | {"self_check": check | changed.pop("self_check", {})} | changed  # fmt: skip


def test_a_row_within_every_bound_is_not_broken() -> None:
    assert broken(row()) == []


@pytest.mark.parametrize(
    ("changed", "rule"),
    [
        ({"convert_peak_mib": 69.0}, "conversion's peak"),
        ({"error": {"1": {"eager": 6.1e-3, "graph": 1e-3}}, "stock_error": {"1": 6e-3}}, "eager at 1"),
        ({"error": {"1": {"eager": 1e-3, "graph": float("nan")}}}, "graph at 1"),
        ({"stock_error": {"1": 4e-3}, "error": {"1": {"eager": 4e-3, "graph": 5e-3}}}, "graph at 1"),
        ({"spread_error": 0.5}, "spread experts"),
        ({"self_check": {"passed": False}}, "self-check"),
        ({"self_check": {"missed": ["gate and up exchanged"]}}, "self-check misses: gate and up exchanged"),
        ({"self_check": {"raised": {"beta ignored": "ValueError: no"}}}, "not self-checked, raised: beta ignored"),
        ({"self_check": {"seconds": 0.151}}, "self-check's time"),
        ({"self_check": {"kept_mib": 0.001}}, "self-check's memory"),
    ],
)
def test_each_rule_is_named(changed: dict[str, Any], rule: str) -> None:
    assert broken(row(**changed)) == [rule]


HOLDS = "import backend_table, sys; lock = backend_table.Quiet(sys.argv[1]); print('in', flush=True); sys.stdin.read()"


@pytest.mark.full
def test_times_are_taken_when_no_other_process_works(tmp_path: Path) -> None:
    """The second process works until its standard input ends; nobody is alone before that."""
    file = str(tmp_path / "quiet")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, file], cwd=FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    assert other.stdout.readline() == "in\n"
    wants = "import backend_table, sys\nlock = backend_table.Quiet(sys.argv[1])\nwith lock.alone(): print('alone')"
    waiting = subprocess.Popen([sys.executable, "-c", wants, file], cwd=FOLDER, stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=15)
    other.stdin.close()
    assert other.wait(timeout=30) == 0
    assert waiting.communicate(timeout=30)[0] == "alone\n"
    other.stdout.close()


def test_a_row_that_failed_after_its_self_check_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that refuses the loaded weights passed its self-check before: its row has no other numbers."""
    built: list[str] = []

    def build(*args: Any, own: str) -> Any:
        built.append(own)
        method = SimpleNamespace(backend=None, adapter=None)
        return SimpleNamespace(method=method, close=lambda: None)

    monkeypatch.setattr(backend_table, "build", build)
    monkeypatch.setattr(backend_table, "_checked", lambda *args: SimpleNamespace(seconds=0.02))
    monkeypatch.setattr("vllm_moe_oracle.plugin.register", lambda: None)
    monkeypatch.setattr("vllm_moe_oracle.plugin.unregister", lambda: None)
    check = {"passed": True, "missed": [], "raised": {}, "seconds": 0.1}
    failed = {"backend": "refuses", "failure": "NoBackendError: no", "pass": False, "self_check": check}
    rows = [dict(failed), row("runs", self_check={"seconds": 0.3})]
    backend_table.time_self_checks(TABLE, TABLE.cases["qwen3_silu"], None, "cpu", rows, Quiet(""))
    assert rows[0] == failed and "alone" not in check
    assert built == ["runs"] and rows[1]["pass"] and rows[1]["self_check"]["each"] == [0.02] * 3


def test_who_is_alone_shares_again_afterwards(tmp_path: Path) -> None:
    first, second = Quiet(str(tmp_path / "quiet")), None
    with first.alone():
        pass
    second = Quiet(str(tmp_path / "quiet"))  # does not wait
    assert second is not None


def written(tmp_path: Path, name: str, rows: list[dict[str, Any]], **conditions: Any) -> str:
    file = tmp_path / name
    file.write_text(json.dumps({"conditions": {"gpu": "NVIDIA H200", "limit": 6e-3} | conditions, "rows": rows}))
    return str(file)


def test_tables_become_one_in_the_order_of_layers_and_the_later_row_holds(tmp_path: Path) -> None:
    first = written(tmp_path, "a.json", [row(layer="qwen3_relu2"), row("hopper_mxfp8"), row()])
    second = written(tmp_path, "b.json", [row(spread_error=1e-3)])
    merged = merge("mxfp8", [first, second])
    assert [(each["layer"], each["backend"]) for each in merged["rows"]] == [
        ("qwen3_silu", "emulation"),
        ("qwen3_silu", "hopper_mxfp8"),
        ("qwen3_relu2", "emulation"),
    ]
    assert merged["rows"][0]["spread_error"] == 1e-3
    assert merged["conditions"] == {"gpu": "NVIDIA H200", "limit": 6e-3}


def test_a_row_without_figures_does_not_replace_one_with_figures(tmp_path: Path) -> None:
    late = {"layer": "qwen3_silu", "backend": "emulation", "failure": "ended, being late: ", "pass": False}
    later, first = written(tmp_path, "a.json", [late]), written(tmp_path, "b.json", [row()])
    assert merge("mxfp8", [first, later])["rows"] == [row()] == merge("mxfp8", [later, first])["rows"]
    again = written(tmp_path, "c.json", [late | {"failure": "not begun"}])
    assert merge("mxfp8", [later, again])["rows"] == [late | {"failure": "not begun"}]


def test_what_is_said_of_runs_and_packages_is_put_together(tmp_path: Path) -> None:
    packages = {"vllm": "0.27.1", "triton": "3.6.0"}
    first = written(tmp_path, "a.json", [], date="2026-11-22", runs={"1": "alone"}, packages=packages)
    more = packages | {"flashinfer-python": "0.7.2"}
    second = written(tmp_path, "b.json", [], date="2026-11-21", runs={"2": "beside others"}, packages=more)
    assert merge("mxfp8", [first, second])["conditions"] == {
        "gpu": "NVIDIA H200", "limit": 6e-3, "date": "2026-11-22", "runs": {"1": "alone", "2": "beside others"},
        "packages": more,
    }  # fmt: skip
    other = written(tmp_path, "c.json", [], date="2026-11-22", runs={"1": "other"}, packages={"vllm": "0.26.0"})
    with pytest.raises(ValueError, match=r"c\.json was made with another packages: vllm, runs: 1 than"):
        merge("mxfp8", [first, other])


@pytest.mark.parametrize("conditions", [{"gpu": "NVIDIA H100"}, {"more": 1}])
def test_tables_of_other_conditions_do_not_become_one(tmp_path: Path, conditions: dict[str, Any]) -> None:
    files = [written(tmp_path, "a.json", []), written(tmp_path, "b.json", [], **conditions)]
    with pytest.raises(ValueError, match=r"b\.json was made with another (gpu|more) than .*a\.json"):
        merge("mxfp8", files)


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 6, 4), (2, 4, 6), (2, 8, 4)])
def test_a_parameter_is_filled_as_it_is_transposed_or_padded(shape: tuple[int, ...]) -> None:
    """A square matrix as it is: its transposed shape is its own."""
    tensor = torch.arange(2 * shape[1] * 4).reshape(2, shape[1], 4) if shape[2] == 4 else torch.arange(48).view(2, 6, 4)
    target = torch.full(shape, -1)
    backend_table._fill(target, tensor, "w2_weight", 1)
    assert torch.equal(target, tensor if shape[2] == 4 else tensor.transpose(1, 2))
    wider = torch.full((2, shape[1] + 2, shape[2] + 1), -1)
    backend_table._fill(wider, target, "w2_weight", 2)
    half = shape[1] // 2
    assert torch.equal(wider[:, :half, :-1], target[:, :half])
    assert torch.equal(wider[:, half + 1 : -1, :-1], target[:, half:])
    assert not wider[:, half].any() and not wider[:, -1].any() and not wider[:, :, -1].any()


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_an_expert_map_that_no_rank_has_names_each_place_once(ep: int) -> None:
    case = dataclasses.replace(TABLE.cases["qwen3_silu"], ep=ep)
    places = backend_table.spread_places(case, "cpu").tolist()
    taken = [place for place in places if place >= 0]
    assert len(places) == 128 and len(taken) == len(set(taken)) == min(64, 128 // ep)
    assert set(places[::2]) == {-1} and max(taken) == case.local_experts - 1
    assert taken == sorted(taken, reverse=True) and case.problem().local_experts == 128 // ep


def test_a_rank_sees_its_own_experts() -> None:
    case = TABLE.cases["tiny_silu_ep2"]
    call = backend_table.inputs(case, 7, "cpu")
    x, weights, ids = backend_table.seen(case, call)
    assert x is call[0] and weights is call[1] and ids.max() == 3 and (ids == -1).any()
    assert torch.equal(ids >= 0, call[2] < 4)
    raw = backend_table.here(case, TABLE.checkpoint(case, "cpu"))
    assert {len(each) for each in raw.values()} == {4}


def test_every_named_fault_is_among_those_of_mxfp8() -> None:
    case = TABLE.cases["qwen3_swigluoai_bias"]
    faults = {*backend_table.faults(case), *TABLE.faults(case), *TABLE.ignored(case)}
    assert faults == {
        "gate and up exchanged", "scales of rows moved", "rows of w2 moved", "scales of groups moved",
        "w13's biases left out", "w2's biases left out", "scales of w13 column by column",
        "scales of w2 column by column", "scales of w13 one exponent up", "scales of w2 one exponent down",
        "alpha ignored", "beta ignored", "limit ignored",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3_silu", "nemotron_relu2"])
def test_normal_weights_fit_one_scale_a_row_and_random_codes_do_not(name: str) -> None:
    """One expert of a whole layer: what is rare comes up in its millions of numbers."""
    case = dataclasses.replace(TABLE.cases[name], experts=1, top_k=1)
    said = []
    for table, binades in ((TABLE, 5), (backend_table.table_of("mxfp8_normal"), 8)):
        made = table.checkpoint(case, "cpu")
        for which in ("w13", "w2"):
            codes, scales = made.raw[f"{which}_weight"][0], made.raw[f"{which}_weight_scale"][0]
            assert codes.float().isfinite().all() and len(scales.unique()) == binades
            blocks = codes.double().unflatten(-1, (-1, 32)) * torch.exp2(scales.double() - 127)[..., None]
            assert torch.equal(made.matrix(which, 0).double(), blocks.flatten(-2))
        expert = {name.replace("_weight", ""): tensor[0] for name, tensor in made.raw.items()}
        said.append(default_registry()["hopper_mxfp8_w8a8_token"].validate_weights(expert, case.problem()))
    assert said[0].startswith("row ") and "hopper_mxfp8 takes such weights" in said[0]
    assert said[1] == ""


def test_humming_compiles_the_kernels_of_the_rows_that_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its launcher chooses them: more than the first number, up to the second. Both releases' ways to call it."""
    prepared: list[tuple[Any, ...]] = []

    class HummingKernel:
        @classmethod
        def prepare_kernels(cls, *args: Any) -> None:
            prepared.append(args)

    module = types.ModuleType("humming.kernel.humming")
    module.HummingKernel = HummingKernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "humming.kernel.humming", module)
    ranges = [[0, 8, "a"], [8, 56, "b"], [56, 57, "c"], [57, 4103, "d"], [4103, 1 << 30, "e"]]
    with FewKernels({56, 4104}):
        HummingKernel.prepare_kernels("layer", "compute", json.dumps(ranges))
        HummingKernel.prepare_kernels("layer", "compute", json.dumps({"one": "for all"}), "device")
        HummingKernel.prepare_kernels("layer", None, None)
    HummingKernel.prepare_kernels("layer", "compute", json.dumps(ranges))
    # That of one row is always there: a launch looks at it.
    assert prepared[0] == ("layer", "compute", json.dumps([ranges[0], ranges[1], ranges[4]]))
    assert prepared[1] == ("layer", "compute", json.dumps({"one": "for all"}), "device")
    assert prepared[2] == ("layer", None, None)
    assert prepared[3] == ("layer", "compute", json.dumps(ranges))


@pytest.mark.parametrize(
    ("layer", "rows"),
    [
        ("qwen3_silu", {8, 56, 512, 4104} | {1024}),
        ("qwen3_silu_ep2", {4, 28, 256, 2052} | {512, 256}),
    ],
)
def test_the_rows_that_choose_hummings_kernels(layer: str, rows: set[int]) -> None:
    """Of the table's calls, a rank's share of them, and of the self-check's calls."""
    case = TABLE.cases[layer]
    problem = case.problem()
    chosen = inputs.sample_experts(problem)
    top_k = min(case.top_k, len(chosen))
    small = dataclasses.replace(problem, num_experts=len(chosen), local_experts=len(chosen), top_k=top_k)
    weights: Any = {"w13": SimpleNamespace(is_cuda=True)}
    humming = default_registry()["humming_mxfp8"]
    plan = ShardPlan(problem.hidden_size, problem.intermediate_size)
    # All that a GPU's check calls, repeated and large calls among them, and the largest call of late hand-overs.
    planned = self_check._plan_calls(humming, problem, small, plan, (), 1 << 20, weights, [0], inputs.NUM_TOKENS)
    tokens = {len(each) for each, _ in planned}
    assert {1, 2, 4, 8, 32, 64, 65, inputs.LARGE_CALL} <= tokens
    tokens |= set(inputs.call_counts([], 1 << 20)) | {inputs.MAX_LARGE_CALL}
    # The converted layer: a token for each expert, many tokens, two of them once more; and a rank's share of the rows.
    whole = {count * case.top_k for count in (case.local_experts, MAX_CHECK_TOKENS, 2)}
    whole |= {-(-each * case.local_experts // case.experts) for each in whole}
    assert backend_table.rows_called(case, (1, 7, 64, 513)) == rows | {count * top_k for count in tokens} | whole


def test_a_part_is_counted_without_the_parts_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gpu import check_price  # which imports backend_table, and must do so after tests.lib

    clock = iter(float(each) for each in (0, 1, 3, 10, 20, 100))
    monkeypatch.setattr(check_price.time, "perf_counter", lambda: next(clock))

    class Check:
        def whole(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + 1

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 * 3

    monkeypatch.setattr(check_price, "places", lambda: [(Check, "whole", "whole"), (Check, "inner", "inner")])
    parts, own = check_price.Parts(), Check.whole
    with parts.counted(), parts.timed():
        Check().whole(torch.ones(1))
    assert parts.seconds == {"rest": 1.0 + 80.0, "whole": 2.0 + 10.0, "inner": 7.0} and Check.whole is own
    assert parts.operations == {"rest": 1, "whole": 1, "inner": 2} and parts.calls == {"whole": 1, "inner": 1}


LAYER = """#!/usr/bin/env bash
# A process of a table: `ready` has its row at once and its time later, `slow` never has one.
while [ $# -gt 0 ]; do
  case $1 in --json) file=$2;; --backend) backend=$2;; esac
  shift
done
[ "$backend" = slow ] && exec sleep 60
echo '{"rows": [{"layer": "a", "backend": "ready", "self_check": {"passed": true}}]}' >"$file.part"
mv "$file.part" "$file"
sleep 3.5
echo '{"rows": [{"layer": "a", "backend": "ready", "self_check": {"passed": true, "alone": true}}]}' >"$file.part"
mv "$file.part" "$file"
"""


@pytest.mark.full
def test_what_is_ready_is_timed_beside_what_is_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tmp_path / "layer"
    layer.write_text(LAYER)
    layer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(layer))
    monkeypatch.setattr(backend_table, "TIMING_SECONDS", 1.25)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    tasks = {name: backend_table._Task("a", (name,), tmp_path) for name in ("slow", "ready", "next")}
    kept: list[list[str]] = []

    def run(names: str, processes: int, seconds: float) -> dict[str, dict[str, Any]]:
        waiting, deadline = [tasks[name] for name in names.split()], time.monotonic() + seconds
        rows = backend_table._run_tasks(
            "mxfp8", waiting, [], processes, deadline, lambda rows: kept.append([row["backend"] for row in rows])
        )
        return {row["backend"]: row for row in rows}

    found = run("slow ready next", 1, 7)
    assert {name: row["failure"] for name, row in found.items()} == {
        "slow": "ended, being late: ", "ready": "not begun", "next": "not begun"
    }  # fmt: skip
    monkeypatch.setattr(backend_table, "KEEP_SECONDS", 0.5)
    found = run("slow ready", 2, 5)
    assert ["ready"] in kept, kept
    assert found["slow"]["failure"].startswith("ended, being late")
    assert found["ready"]["self_check"]["alone"] is True


def test_the_exit_of_a_process_without_a_result_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = tmp_path / "layer"
    layer.write_text("#!/usr/bin/env bash\necho its last words\nkill -ILL $$\n")
    layer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(layer))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    task = backend_table._Task("a", ("dies",), tmp_path)
    (found,) = backend_table._run_tasks("mxfp8", [task], [], 1, time.monotonic() + 60, lambda rows: None)
    assert found["failure"] == "no result, exit status -4: its last words\n" and not found["pass"]


@pytest.mark.full
def test_every_script_for_a_gpu_starts_as_documented() -> None:
    """From the repository's root, with nothing on the path; their imports are all that runs here."""
    root, environment = FOLDER.parents[1], {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for script in sorted(FOLDER.glob("*.py")):
        command = f"python {script.relative_to(root)}"
        if f"    {command}" in (text := script.read_text()) and "argparse" in text:
            words = [sys.executable, *command.split()[1:], "--help"]
            done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
            assert done.returncode == 0 and "usage:" in done.stdout, (command, done.stderr)


@pytest.mark.full
def test_the_price_of_a_check_is_found_without_a_gpu(tmp_path: Path) -> None:
    """Parts before the conversion, and of the conversions of a first and a later layer."""
    command = ["tests/gpu/check_price.py", "--device", "cpu", "--count", "1", "--json", str(tmp_path / "price.json")]
    done = subprocess.run(
        [sys.executable, *command, "--layer", "mxfp8:tiny_silu:cpu_dequantized"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads((tmp_path / "price.json").read_text())
    assert min(found[title]["all"] for title in ("first layer of a kind", "later layer")) > 0
