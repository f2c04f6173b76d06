"""Whole models with and without the plugin, beside what the kernels alone predict: ``python -m
tests.tools.serving_tables``.

With files of ``tests/gpu/serve.py --json`` it renews the newest tests/golden/h200/serve-vllm-VERSION.json; a later
file's model takes the place of an earlier one's. The table in vllm_moe_oracle/kernels/RESULTS.md comes from that file
and from the kernels' numbers (tests.tools.kernel_tables); ``--write`` brings it up to date, and without it the exit
status is 1 where it is stale.

A step is predicted to be shorter by the layers' number times the difference of the kernels' times at that number of
tokens: of stock's default and of the backend that was chosen, under uniform routing and over a cold cache, which is not
quite what a model has.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.lib import golden_files

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = golden_files.newest("serve")
KERNELS = golden_files.newest("kernels")
README = ROOT / "vllm_moe_oracle" / "kernels" / "RESULTS.md"
MARK = "serving"

CELLS = {
    "qwen3-mxfp8": "mxfp8:qwen3-30b-a3b",
    "qwen3-gptq": "int4_g128:qwen3-30b-a3b",
    "gpt-oss": "mxfp4:gpt-oss-20b",
}
"""The kernels' cell of each model's layers."""

KEPT = (
    "mode", "start_seconds", "decode_ms", "noise_ms", "tokens_per_second", "prefill_tokens_per_second", "served",
    "inside", "error",
)  # fmt: skip
INSIDE = ("start_seconds", "decode_ms", "noise_ms", "busy_ms", "kernels_ms")
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
        command = " ".join(word for word in run["conditions"]["command"].split() if "/tmp" not in word)
        for model, rows in run["models"].items():
            models[model] = {
                "command": command.removesuffix(" --json"),
                "decode": run["conditions"]["decode"],  # of how many medians may differ
                "modes": [_row(row) for row in rows],
            }
    return {"conditions": conditions, "models": models}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    if set(row.get("decode_ms", {})) != {"1", "8", "64"} or not row.get("prefill_tokens_per_second"):
        raise ValueError(f"{row.get('mode')} has no numbers: {row.get('error')}")
    kept = {name: row[name] for name in KEPT if name in row}
    inside = kept.pop("inside", {})
    if "busy_ms" in inside and "error" not in inside:  # one that was ended has not all batches
        kept["inside"] = {name: inside[name] for name in INSIDE if name in inside}
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


def resolved(mode: dict[str, Any], batch: str) -> bool:
    """Whether a step's time is more than a few times what its two medians leave open."""
    return bool(mode["decode_ms"][batch] > 4 * mode["noise_ms"][batch])


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
    lines = [
        "| model | batch | stock, ms a step | with the plugin | shorter by | noise | the kernels predict |",
        "|---|---|---|---|---|---|---|",
    ]
    layers = found["conditions"]["layers"]
    for model, run in found["models"].items():
        stock, ours = run["modes"]
        for batch, ms in stock["decode_ms"].items():
            own, aim = ours["decode_ms"][batch], predicted_ms(kernels, model, batch, layers, _chosen(ours))
            noise = sum(mode["noise_ms"][batch] for mode in (stock, ours))
            cells = [f"{mode['decode_ms'][batch]:.3f}" if resolved(mode, batch) else "-" for mode in (stock, ours)]
            cells.append("-" if "-" in cells else f"{ms - own:+.3f}")
            lines.append(f"| {model} | {batch} | {' | '.join(cells)} | {noise:.3f} | {aim:+.3f} |")
    if any("inside" in mode for run in found["models"].values() for mode in run["modes"]):
        lines += ["", *_busy(found, kernels)]
    lines += ["", "| model | tokens/s at batch 1, 8, 64, stock | with the plugin | prompts, tokens/s, stock |"]
    lines[-1] += " with the plugin | start, s, stock | with the plugin |"
    lines += ["|---" * 7 + "|"]
    for model, run in found["models"].items():
        stock, ours = run["modes"]
        numbers = [" / ".join(str(each) for each in mode["tokens_per_second"].values()) for mode in (stock, ours)]
        numbers += [f"{each['prefill_tokens_per_second']}" for each in (stock, ours)]
        numbers += [f"{each['start_seconds']:.0f}" for each in (stock, ours)]
        lines.append(f"| {model} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def _busy(found: dict[str, Any], kernels: dict[str, Any]) -> list[str]:
    """The GPU's own time of a step with the engine in the measuring process, where it was measured."""
    lines = [
        "| model | batch | GPU ms of a step's ms, stock | with the plugin | GPU shorter by | the kernels predict |",
        "|---|---|---|---|---|---|",
    ]
    for model, run in found["models"].items():
        inside = [mode.get("inside") for mode in run["modes"]]
        known = [each for each in inside if each]
        for batch in known[0]["busy_ms"] if known else ():
            cells = [
                f"{each['busy_ms'][batch]:.3f} of {each['decode_ms'][batch]:.3f}" if each else "-" for each in inside
            ]
            both = len(known) == len(inside)
            cells.append(f"{known[0]['busy_ms'][batch] - known[1]['busy_ms'][batch]:+.3f}" if both else "-")
            aim = predicted_ms(kernels, model, batch, found["conditions"]["layers"], _chosen(run["modes"][1]))
            lines.append(f"| {model} | {batch} | {' | '.join(cells)} | {aim:+.3f} |")
    return lines


def with_table(readme: str, text: str) -> str:
    """The README with the table between its marks.

    Raises:
        ValueError: it has no marks.
    """
    begin, end = f"<!-- {MARK} -->\n", f"<!-- /{MARK} -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"there is no one {begin.strip()} ... {end}")
    head, _, rest = readme.partition(begin)
    return f"{head}{begin}{text}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.runs:
        made = golden([json.loads(path.read_text()) for path in args.runs])
        GOLDEN.write_text(json.dumps(made, indent=1) + "\n")
    text = with_table(README.read_text(), table(json.loads(GOLDEN.read_text()), json.loads(KERNELS.read_text())))
    if args.write:
        README.write_text(text)
    elif README.read_text() != text:
        sys.exit(f"{README.name} is stale")


if __name__ == "__main__":
    main()
