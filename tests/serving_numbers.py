"""Whole models with and without the plugin, beside what the kernels alone predict: ``python tests/serving_numbers.py``.

With files of ``tests/gpu/serve.py --json`` it makes tests/golden/h200/serve-vllm-0.33.0.json of them; a later file's
model takes the place of an earlier one's. The table in vllm_moe_oracle/kernels/README.md comes from that file and from
the numbers of the kernels that the models ran (a file of tests/kernel_numbers.py); ``--write`` brings it up to date,
and without it the exit status is 1 where it is stale.

A step is predicted to be shorter by the layers' number times the difference of the kernels' times at that number of
tokens: under uniform routing and over a cold cache, which is not what a model has.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "h200" / "serve-vllm-0.33.0.json"
KERNELS = ROOT / "tests" / "golden" / "h200" / "kernels-served-vllm-0.33.0.json"
"""Numbers of the kernels that the models were served with: tests/kernel_numbers.py's file of that tree."""
README = ROOT / "vllm_moe_oracle" / "kernels" / "README.md"
MARK = "serving"

CELLS = {
    "qwen3-mxfp8": "mxfp8:qwen3-30b-a3b",
    "qwen3-gptq": "int4_g128:qwen3-30b-a3b",
    "gpt-oss": "mxfp4:gpt-oss-20b",
}
"""The kernels' cell of each model's layers."""

KEPT = ("mode", "start_seconds", "decode_ms", "busy_ms", "prefill_tokens_per_second", "served", "error")
WORDS = {"ended after": "was ended by its time limit while it shut down, after all numbers were there"}


def golden(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The committed form of runs: their numbers, and of each decision the backend and why.

    Raises:
        ValueError: they ran under other conditions, or one lacks a number.
    """
    shared = ("device", "vllm", "torch", "layers", "decode", "prefill")
    conditions = {name: runs[0]["conditions"][name] for name in shared}
    models: dict[str, Any] = {}
    for run in runs:
        if {name: run["conditions"][name] for name in shared} != conditions:
            raise ValueError(f"runs under different conditions: {conditions} and {run['conditions']}")
        command = " ".join(word for word in run["conditions"]["command"].split() if "/tmp" not in word)
        for model, rows in run["models"].items():
            models[model] = {"command": command.removesuffix(" --json"), "modes": [_row(row) for row in rows]}
    return {"conditions": conditions, "models": models}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    if set(row.get("decode_ms", {})) != {"1", "8", "64"} or not row.get("prefill_tokens_per_second"):
        raise ValueError(f"{row.get('mode')} has no numbers: {row.get('error')}")
    kept = {name: row[name] for name in KEPT if name in row}
    if error := kept.pop("error", ""):
        kept["remark"] = next(words for begin, words in WORDS.items() if error.startswith(begin))
    if "groups" in row:
        kept["backends"] = {
            group["backend"]: {"layers": group["layers"], "why": group["why"]} for group in row["groups"]
        }
    return kept


def predicted_ms(kernels: dict[str, Any], model: str, batch: str, layers: int) -> float:
    """By how much a step should be shorter, by the kernels alone."""
    row = next(row for row in kernels["rows"] if row["cell"] == CELLS[model])
    times = row["us"][batch]
    return float((times["auto"] - times["ours"]) * layers / 1e3)


def table(found: dict[str, Any], kernels: dict[str, Any]) -> str:
    """The table, and what it says about the prediction."""
    lines = [
        "| model | batch | stock, ms a step | with the plugin | shorter by | the kernels predict |",
        "|---|---|---|---|---|---|",
    ]
    layers = found["conditions"]["layers"]
    for model, run in found["models"].items():
        stock, ours = run["modes"]
        for batch, ms in stock["decode_ms"].items():
            own, aim = ours["decode_ms"][batch], predicted_ms(kernels, model, batch, layers)
            lines.append(f"| {model} | {batch} | {ms:.3f} | {own:.3f} | {ms - own:+.3f} | {aim:+.3f} |")
    lines += ["", "| model | prompts, tokens/s, stock | with the plugin | start, s, stock | with the plugin |"]
    lines += ["|---|---|---|---|---|"]
    for model, run in found["models"].items():
        stock, ours = run["modes"]
        numbers = [f"{each['prefill_tokens_per_second']}" for each in (stock, ours)]
        numbers += [f"{each['start_seconds']:.0f}" for each in (stock, ours)]
        lines.append(f"| {model} | {' | '.join(numbers)} |")
    if any("busy_ms" in mode for run in found["models"].values() for mode in run["modes"]):
        lines += ["", *_busy(found)]
    return "\n".join(lines)


def _busy(found: dict[str, Any]) -> list[str]:
    """The GPU's own time of a step, where it was measured."""
    lines = ["| model | batch | stock, GPU ms of a step's ms | with the plugin |", "|---|---|---|---|"]
    for model, run in found["models"].items():
        if all("busy_ms" in mode for mode in run["modes"]):
            for batch in run["modes"][0]["busy_ms"]:
                cells = [f"{mode['busy_ms'][batch]:.3f} of {mode['decode_ms'][batch]:.3f}" for mode in run["modes"]]
                lines.append(f"| {model} | {batch} | {' | '.join(cells)} |")
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
