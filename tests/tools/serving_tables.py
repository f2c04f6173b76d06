"""Whole models with and without the plugin, beside what the kernels alone predict: ``python -m
tests.tools.serving_tables FILE...``.

Files of ``tests/gpu/serve.py --json`` become the newest tests/golden/h200/serve-vllm-VERSION.json; a later file's model
takes the place of an earlier one's. With ``--ranks`` the files are those of ``serve.py --ranks 2``; their models renew
or join serve-ranks-vllm-VERSION.json. With ``--turns`` a file with each mode several times, of one model over ranks,
joins serve-turns-vllm-VERSION.json. `tests.tools.generate` makes the tables in vllm_moe_oracle/kernels/RESULTS.md.

What a step over ranks should save is the difference of the layers' shipped times, of stock's kernel and of the chosen
backend.

A step is predicted to be shorter by the layers' number times the difference of the kernels' times at that number of
tokens: of stock's default and of the backend that was chosen, under uniform routing and over a cold cache, which is not
quite what a model has.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu import serve, unlisted_layers
from tests.lib import golden_files
from tests.lib.golden_files import read
from tests.lib.readme_sections import markdown_table
from tests.tools import merge_times
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices.catalog import find_spec
from vllm_moe_oracle.measurements import model_shapes
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.oracle.measured_choice import LatencyCurve
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings

GOLDEN = golden_files.newest("serve")
KERNELS = golden_files.newest("kernels")
RANKS = golden_files.newest("serve-ranks")
TURNS = golden_files.newest("serve-turns")
RESOLVED = 10
"""A step over ranks is shown if it is more than so many times its noise: medians are of two."""
ROUTING = golden_files.newest("serve-routing")

CELLS = {
    "qwen3-mxfp8": "mxfp8:qwen3-30b-a3b",
    "qwen3-gptq": "int4_g128:qwen3-30b-a3b",
    "gpt-oss": "mxfp4:gpt-oss-20b",
    "gpt-oss-120b": "mxfp4:gpt-oss-120b",
    "qwen3-235b-mxfp8": "mxfp8:qwen3-235b-a22b",
    "qwen3-235b-gptq": "int4_g128:qwen3-235b-a22b",
    "kimi-k2": "int4_g32:kimi-k2",
}
"""The kernels' cell of each model's layers; over ranks with ``@tpN`` or ``@epN``."""

KEPT = (
    "mode", "start_seconds", "decode_ms", "noise_ms", "tokens_per_second", "prefill_tokens_per_second", "served",
    "busy_ms", "busy_ms_of_ranks", "kernels_ms", "error",
)  # fmt: skip
WORDS = {"ended after": "was ended by its time limit while it shut down, after all numbers were there"}


def golden(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The committed form of runs: their numbers, and of each decision the backend and why.

    Raises:
        ValueError: they ran under other conditions, or one lacks a number.
    """
    shared = ("device", "vllm", "torch", "layers", "mixed", "prefill")
    conditions = {name: runs[0]["conditions"][name] for name in shared}
    models: dict[str, Any] = {}
    for run in runs:
        if {name: run["conditions"][name] for name in shared} != conditions:
            raise ValueError(f"runs under different conditions: {conditions} and {run['conditions']}")
        for model, rows in run["models"].items():
            models[model] = {
                "command": _command(run),
                "decode": run["conditions"]["decode"],  # of how many medians may differ
                "modes": [_row(row) for row in rows],
            }
    return {"conditions": conditions, "models": models}


def _command(run: dict[str, Any]) -> str:
    """A run's command, without the file of its results."""
    return str(run["conditions"]["command"]).partition(" --json")[0]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    if set(row.get("decode_ms", {})) != {"1", "8", "64"} or not row.get("prefill_tokens_per_second"):
        raise ValueError(f"{row.get('mode')} has no numbers: {row.get('error')}")
    kept = {name: row[name] for name in KEPT if name in row}
    if set(kept.get("busy_ms", ())) != set(kept["decode_ms"]):  # one that was ended has not all batches
        kept = {name: each for name, each in kept.items() if name not in ("busy_ms", "busy_ms_of_ranks", "kernels_ms")}
    if error := kept.pop("error", ""):
        kept["remark"] = next(words for begin, words in WORDS.items() if error.startswith(begin))
    if "groups" in row:
        kept["backends"] = {
            group["backend"]: {"layers": group["layers"], "why": group["why"]} for group in row["groups"]
        }
    return kept


def predicted_ms(kernels: dict[str, Any], model: str, batch: str, layers: int, backend: str) -> float:
    """By how much a step should be shorter, by the kernels alone.

    Args:
        kernels: of `tests.tools.kernel_tables`.
        model: a key of `CELLS`.
        batch: tokens of a step.
        layers: of the model.
        backend: that was chosen for them.
    """
    row = next(row for row in kernels["rows"] if row["layer"] == CELLS[model])
    times = row["us"][batch]
    return float((times["auto"] - times["ours" if backend.startswith("hopper") else backend]) * layers / 1e3)


def resolved(mode: dict[str, Any], batch: str, times: float = 4) -> bool:
    """Whether a step's time is more than a few times what its two medians leave open."""
    return bool(mode["decode_ms"][batch] > times * mode["noise_ms"][batch])


def step_words(stock: dict[str, Any], ours: dict[str, Any], batch: str) -> str:
    """A decode step in both modes, where the noise of their medians does not cover it or the difference."""
    before, after = (mode["decode_ms"][batch] for mode in (stock, ours))
    if not (resolved(stock, batch) and resolved(ours, batch)):
        return "covered by noise"
    if abs(before - after) <= stock["noise_ms"][batch] + ours["noise_ms"][batch]:
        return f"no difference shown ({before:.2f}, {after:.2f} ms)"
    return f"{before:.2f} → {after:.2f} ms ({after / before - 1:+.0%})"


def _chosen(mode: dict[str, Any]) -> str:
    """The one backend of a mode's layers.

    Raises:
        ValueError: there are several.
    """
    (backend,) = mode["backends"]
    return str(backend)


def table(found: dict[str, Any], kernels: dict[str, Any]) -> str:
    """The tables: steps beside what is predicted, tokens a second, and the GPU's own part of a step."""
    heads = ["model", "batch", "stock, ms a step", "with the plugin", "shorter by", "noise", "the kernels predict"]
    rows = []
    layers = found["conditions"]["layers"]
    for model, run in found["models"].items():
        stock, ours = run["modes"]
        for batch, ms in stock["decode_ms"].items():
            own, aim = ours["decode_ms"][batch], predicted_ms(kernels, model, batch, layers, _chosen(ours))
            noise = sum(mode["noise_ms"][batch] for mode in (stock, ours))
            cells = [f"{mode['decode_ms'][batch]:.3f}" if resolved(mode, batch) else "-" for mode in (stock, ours)]
            cells.append("-" if "-" in cells else f"{ms - own:+.3f}")
            rows.append([model, batch, *cells, f"{noise:.3f}", f"{aim:+.3f}"])
    tables = [markdown_table(heads, rows)]
    if any(busy_of(mode) for run in found["models"].values() for mode in run["modes"]):
        tables.append(_busy(found, kernels))
    both = (f"{what}, stock" for what in ("tokens/s at batch 1, 8, 64", "prompts, tokens/s", "start, s"))
    heads, rows = ["model", *(head for stock in both for head in (stock, "with the plugin"))], []
    for model, run in found["models"].items():
        stock, ours = run["modes"]
        numbers = [" / ".join(str(each) for each in mode["tokens_per_second"].values()) for mode in (stock, ours)]
        numbers += [f"{each['prefill_tokens_per_second']}" for each in (stock, ours)]
        numbers += [f"{each['start_seconds']:.0f}" for each in (stock, ours)]
        rows.append([model, *numbers])
    return "\n\n".join([*tables, markdown_table(heads, rows)])


def busy_of(mode: dict[str, Any]) -> dict[str, Any] | None:
    """A mode's times with the GPU's own among them, None where those were not measured: its own, or those of another
    start with the engine in the measuring process, as ``serve.py --busy`` once measured them."""
    found: dict[str, Any] = mode.get("inside", mode)
    return found if "busy_ms" in found else None


def _busy(found: dict[str, Any], kernels: dict[str, Any]) -> str:
    """The GPU's own time of a step, where it was measured."""
    heads = ["model", "batch", "GPU ms of a step's ms, stock", "with the plugin", "GPU shorter by"]
    rows = []
    for model, run in found["models"].items():
        both = [busy_of(mode) for mode in run["modes"]]
        known = [each for each in both if each]
        for batch in known[0]["busy_ms"] if known else ():
            cells = [
                f"{each['busy_ms'][batch]:.3f} of {each['decode_ms'][batch]:.3f}" if each else "-" for each in both
            ]
            difference = known[0]["busy_ms"][batch] - known[-1]["busy_ms"][batch]
            cells.append(f"{difference:+.3f}" if len(known) == len(both) else "-")
            aim = predicted_ms(kernels, model, batch, found["conditions"]["layers"], _chosen(run["modes"][1]))
            rows.append([model, batch, *cells, f"{aim:+.3f}"])
    return markdown_table([*heads, "the kernels predict"], rows)


def golden_ranks(runs: list[dict[str, Any]], before: dict[str, Any] | None = None) -> dict[str, Any]:
    """The committed form of runs over ranks, without models of which a mode has no numbers.

    Args:
        runs: files of ``serve.py --ranks``.
        before: committed runs; those of a model over the same kind of ranks are replaced, the others stay.

    Raises:
        ValueError: they ran under other conditions.
    """
    shared = ("device", "vllm", "torch", "ranks", "prefill")
    conditions = before["conditions"] if before else {name: runs[0]["conditions"][name] for name in shared}
    rows = {(row["model"], row["parallel"]): row for row in (before["rows"] if before else ())}
    for run in runs:
        if {name: run["conditions"][name] for name in shared} != conditions:
            raise ValueError(f"runs under different conditions: {conditions} and {run['conditions']}")
        for model, modes in run["models"].items():
            kept = [
                {name: mode[name] for name in (*KEPT, "routing") if name in mode}
                | {"layers": sum(group["layers"] for group in mode.get("groups", []))}
                | {"backends": sorted({group["backend"] for group in mode.get("groups", [])})}
                for mode in modes
                if "routing" in mode
            ]
            if len(kept) == len(modes):
                parallel = "ep" if run["conditions"]["expert_parallel"] else "tp"
                rows[model, parallel] = {
                    "model": model, "parallel": parallel, "command": _command(run),
                    "decode": run["conditions"]["decode"],  # of how many medians may differ
                    "modes": kept,
                }  # fmt: skip
    return {"conditions": conditions, "rows": [rows[key] for key in sorted(rows)]}


def golden_turns(run: dict[str, Any]) -> dict[str, Any]:
    """The committed form of a run in which a model over ranks was served by turns, with what of each turn is there.

    Raises:
        ValueError: there are several models.
    """
    (model,) = run["models"]
    kept = ("mode", "start_seconds", "served", "routing", "error")
    turns = [{name: turn[name] for name in kept if name in turn} for turn in run["models"][model]]
    return {"conditions": run["conditions"] | {"command": _command(run)}, "model": model, "turns": turns}


def saved_by_layers(row: dict[str, Any], batch: int, conditions: dict[str, Any]) -> float | None:
    """Milliseconds by which a step should be shorter, by the GPU's shipped times of the layers: of the static choice,
    which is stock's kernel, and of the backend that was chosen. None below the fewest tokens that one was timed at.

    Args:
        row: of `golden_ranks`.
        batch: tokens of a step.
        conditions: of the runs.
    """
    name = f"{CELLS[row['model']]}@{row['parallel']}{conditions['ranks']}"
    known = {each.layer: each for each in (*unlisted_layers.LAYERS, *model_shapes.served_problems())}
    spec = find_spec(conditions["device"])
    assert spec is not None
    packages = {"vllm": conditions["vllm"], "torch": conditions["torch"].partition("+")[0]}
    profiles = list(merge_times.shipped_for(conditions["device"], packages).values())
    for shipped in profiles:
        packages |= shipped.environment.packages
    device = Device("cuda", spec.name, spec.capability, spec.sm_count, spec.memory_gib, packages=packages)
    stock = decide(known[name], device, Settings(cache="none", use_measurements=False)).backend
    times: dict[str, dict[int, float]] = {}
    for shipped in profiles:
        for each in shipped.samples(kernel_shape_of(known[name])):
            if each.routing == "uniform" and not each.failure:
                times.setdefault(each.backend, {})[each.tokens] = each.us
    ours = row["modes"][1]
    (backend,) = ours["backends"]
    if batch < max(min(times[each]) for each in (stock, backend)):
        return None
    before, after = (LatencyCurve({"uniform": times[each]}).time_at("uniform", batch) for each in (stock, backend))
    return (before - after) * ours["layers"] / 1e3


def ranks_table(found: dict[str, Any]) -> str:
    """Decode steps and prefill over ranks, stock beside the plugin, by routing."""
    rows, fills = [], []
    ranks = found["conditions"]["ranks"]
    for row in found["rows"]:
        where = [row["model"], f"{row['parallel'].upper()} {ranks}"]
        for routing in row["modes"][0]["routing"]:
            stock, ours = (mode["routing"].get(routing, {}) for mode in row["modes"])
            for batch in ours["decode_ms"]:
                both = [mode if batch in mode.get("decode_ms", {}) else None for mode in (stock, ours)]
                cells = [
                    f"{mode['decode_ms'][batch]:.2f}" if mode and resolved(mode, batch, RESOLVED) else "-"
                    for mode in both
                ]
                noise = sum(mode["noise_ms"][batch] for mode in both if mode)
                saved = f"{stock['decode_ms'][batch] - ours['decode_ms'][batch]:+.2f}" if "-" not in cells else "-"
                aim = saved_by_layers(row, int(batch), found["conditions"]) if routing == "uniform" else None
                aim = "" if aim is None else f"{aim:+.2f}"
                rows.append([*where, routing, batch, *cells, saved, f"{noise:.2f}", aim])
            both = [str(mode.get("prefill_tokens_per_second", "-")) for mode in (stock, ours)]
            fills.append([*where, routing, *both])
    heads, own = ["model", "ranks", "routing"], "with the plugin"
    steps = markdown_table([*heads, "batch", "stock, ms a step", own, "shorter by", "noise", "by layers"], rows)
    return f"{steps}\n\n{markdown_table([*heads, 'prompts, tokens/s, stock', own], fills)}"


OF_EXPERTS = (
    "gate_up", "down", "sum_topk", "sort_slots", "topkGating", "_matmul_ogs", "_reduce_grouped", "_combined_routing",
    "_topk_forward",
)  # fmt: skip
"""Parts of the names of kernels that a layer with experts launches, the router's top-k among them: this project's and
OpenAI's. Other backends' count as other kernels."""


def turns_table(found: dict[str, Any]) -> str:
    """Decode steps of each turn, with what the first rank's longest kernels take where that was measured."""
    heads = ["run", "turn", "prompts", "ms a step", "noise", "experts' kernels, ms", "other kernels"]
    rows = []
    for number, run in enumerate(found["runs"], 1):
        for turn in run["turns"]:
            times = turn.get("routing", {}).get("uniform", {})
            for batch, step in times.get("decode_ms", {}).items():
                cells = [f"{number}, {run['model']}", turn["mode"], batch, f"{step:.2f}"]
                cells.append(f"{times['noise_ms'][batch]:.2f}")
                rows.append([*cells, *_shares(times.get("kernels_ms", {}).get(batch))])
    return markdown_table([*heads, "exchange between ranks"], rows)


def _shares(kernels: dict[str, float] | None) -> list[str]:
    """Milliseconds of the experts' kernels, of all others, and of those that wait for other ranks."""
    if kernels is None:
        return ["-"] * 3
    experts, waits = (
        sum(ms for name, ms in kernels.items() if any(part in name for part in parts))
        for parts in (OF_EXPERTS, serve.EXCHANGES)
    )
    others = sum(kernels.values()) - experts - waits
    # Each is the difference of two runs. An exchange is not kept if it waited longer in the shorter run.
    return [f"{experts:.2f}", f"{others:.2f}", f"{waits:.2f}" if waits > 0 else "-"]


def routing_table(found: dict[str, Any], kernels: dict[str, Any]) -> str:
    """The GPU's own time of a step by what routers do, stock beside the plugin."""
    heads = ["model", "routing", "batch", "GPU ms of a step, stock", "with the plugin", "shorter by"]
    rows = []
    for model, modes in found["models"].items():
        timed = [each for mode in modes if (each := busy_of(mode))]
        stock, ours = ({"given": each, **each["routing"]} for each in timed)
        (backend,) = modes[1]["backends"]
        for routing, times in stock.items():
            for batch, before in times["busy_ms"].items():
                after = ours[routing]["busy_ms"][batch]
                aim = predicted_ms(kernels, model, batch, found["conditions"]["layers"], backend)
                cells = (f"{before:.3f}", f"{after:.3f}", f"{before - after:+.3f}", f"{aim:+.3f}")
                rows.append([model, routing, batch, *cells])
    return markdown_table([*heads, "the kernels predict"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "serving": lambda: table(read(GOLDEN), read(KERNELS)),
    "serving over ranks": lambda: ranks_table(read(RANKS)),
    "serving by turns": lambda: turns_table(read(TURNS)),
    "serving by routing": lambda: routing_table(read(ROUTING), read(KERNELS)),
}
"""The tables of the committed numbers by their names in RESULTS.md."""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--ranks", action="store_true", help="the runs were over ranks")
    parser.add_argument("--turns", action="store_true", help="the one run was over ranks and by turns")
    args = parser.parse_args()
    runs = [read(path) for path in args.runs]
    if args.turns:
        if len(runs) > 1:
            parser.error("--turns takes one file")
        before = read(TURNS)["runs"] if TURNS.exists() else []
        path, made = TURNS, {"runs": [*before, golden_turns(runs[0])]}
    elif args.ranks:
        path, made = RANKS, golden_ranks(runs, read(RANKS) if RANKS.exists() else None)
    else:
        path, made = GOLDEN, golden(runs)
    path.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
