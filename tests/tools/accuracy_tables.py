"""The tables of vllm_moe_oracle/ACCURACY.md, from what `accuracy`, `real_weights` and `cpu_serving` wrote.

`python -m tests.tools.generate --write` puts them into the page.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.lib.golden_files import read
from tests.lib.readme_sections import markdown_table, paragraph
from vllm_moe_oracle.core.problem import Device

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = GOLDEN / "accuracy" / "cpu-avx2.json"
ON_GPU = GOLDEN / "accuracy" / "nvidia-h100-80gb-hbm3.json"
ON_AMX = GOLDEN / "accuracy" / "cpu-amx.json"
SELF_CHECK = GOLDEN / "accuracy" / "self_check.json"
SERVING = GOLDEN / "cpu-serving.json"
INSTRUCTIONS = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}
RIGHT = ("none", "last router weight is the first's")
"""Faults of `tests.tools.accuracy` that change nothing: the model's routing weights are all alike."""
PARTS = {"bfloat16": "formats", "float16": "formats, float16"}
"""Parts of `MODEL` by the layers' dtype."""
PARTS_ELSEWHERE = {"formats": "bfloat16", "formats, float16": "float16", "formats, tp 2": "bfloat16, TP 2"}
"""Parts of the other machines' files by what the layers are."""
BASELINES, WHOLE = {"bfloat16": "MLPs in bfloat16", "float16": "MLPs in float16"}, "model in bfloat16"
"""Names of `tests.lib.accuracy`, which needs vLLM."""


def machine(device: Device) -> str:
    """The name of a machine's file: the GPU, or the best instructions that a CPU has for these backends."""
    if device.kind != "cpu":
        return device.name.lower().replace(" ", "-")
    return "cpu-" + next(words for feature, words in INSTRUCTIONS.items() if feature in device.features).lower()


def figures(part: str, path: Path = MODEL) -> dict[str, dict[str, dict[str, Any]]]:
    """Figures of a part of a file by format and backend."""
    return {name: entry["figures"] for name, entry in read(path).get(part, {}).items()}


def served() -> list[tuple[str, str, str, dict[str, Any]]]:
    """The layers' dtype, the format, the backend or baseline, and its figures."""
    return [
        (dtype, name, backend, each)
        for dtype, part in PARTS.items()
        for name, found in figures(part).items()
        for backend, each in found.items()
    ]


def _change(each: dict[str, Any]) -> str:
    """Relative difference of the perplexity, in percent, with its half-width."""
    return f"{100 * math.expm1(each['nll']):+.3f} ± {100 * each['nll_half_width']:.3f} %"


def _mean(each: dict[str, Any]) -> str:
    """KL divergence with its half-width, in 1e-4 nats."""
    return f"{1e4 * each['kl']:.2f} ± {1e4 * (each['kl_limit'] - each['kl']):.2f}"


def _cells(each: dict[str, Any], backend: str) -> tuple[str, list[str]]:
    """Who computed the figures, and their cells up to the one of the gate."""
    cells = [_mean(each), "", _change(each), f"{each['top1']:.2%}"]
    if each["is_backend"]:
        cells[1] = f"{1e4 * each['excess']:+.2f} ± {1e4 * each['excess_half_width']:.2f}"
    return backend if each["is_backend"] else "transformers' MLPs", cells


_HEADS = ("KL, 1e-4 nats", "of it beyond the MLPs'", "perplexity", "same top token", "gate")
"""Of `_cells`, and of the gate."""


def formats() -> str:
    """What backends do to the predictions of each format."""
    held, exact, whole = read(MODEL), figures("formats, float32"), figures("whole model")
    sure, near_enough, likely = 1 - held["alpha"], held["max_kl"], 100 * held["max_perplexity"]
    rows = []
    for dtype, name, backend, each in served():
        gate = in_float32 = ""
        if each["is_backend"]:
            how = "within 1e-4" if each["kl_limit"] <= near_enough else f"no farther than {dtype}"
            gate = f"passes, {how}" if each["passes"] else "not shown to pass"
            if dtype == "bfloat16" and backend in exact.get(name, {}):
                kl = exact[name][backend]["kl"]
                in_float32 = f"{kl:.0e}" if kl > 1e-8 else "below 1e-8"
        by, cells = _cells(each, backend)
        rows.append([name, dtype, by, *cells, gate, in_float32])
    backends = [each for _, _, _, each in served() if each["is_backend"]]
    (name,) = whole
    model = whole[name][WHOLE]
    widths = sorted(200 * each["nll_half_width"] for each in backends)
    nears = sorted(2e4 * each["excess_half_width"] for each in backends)
    words = paragraph(
        f"{served_windows()} windows of {held['window']} tokens, {backends[0]['tokens']} predicted tokens of",
        f"{len(held['text'])} texts. After ± stands the half-width of a one-sided confidence limit of {sure:.1%}.",
        f"A backend that is beyond a limit of the gate passes at most once in {1 / held['alpha']:.0f} times, for",
        "each limit. One that is two half-widths within the limits passes with the same certainty, and one that",
        f"is two half-widths beyond is shown to be beyond. Two half-widths are {widths[0]:.2f} to",
        f"{widths[-1]:.2f} % of perplexity, where the limit is {likely:.1f} %, and {nears[0]:.1g} to",
        f"{nears[-1]:.2g}e-4 nats. Student's t is exact for normal means; those of KL divergences are skewed. The",
        f"whole model in bfloat16, with attention and the output layer, has a KL of {_mean(model)} ({name},",
        f"{model['tokens']} tokens).",
    )
    heads = ("format", "layers in", "computed by", *_HEADS, "KL with layers in float32")
    return f"{markdown_table(heads, rows)}\n\n{words}"


def elsewhere(path: Path) -> str:
    """What backends do to the predictions of each format on a machine of its own, by its file."""
    held = read(path)
    rows = []
    for part, layers in PARTS_ELSEWHERE.items():
        for name, found in figures(part, path).items():
            for backend, each in found.items():
                gate = ""
                if each["is_backend"]:
                    stated = each["activations"] != "16bit"
                    gate = "stated" if stated else "passes" if each["passes"] else "not shown to pass"
                by, cells = _cells(each, backend)
                rows.append([name, layers, by, each["activations"], *cells, gate])
    entry = next(iter(held["formats"].values()))
    packages = ", ".join(f"{name} {version}" for name, version in entry["packages"].items())
    windows = max(each["windows"] for found in figures("formats", path).values() for each in found.values())
    words = paragraph(
        f"{entry['device']}, {packages}; {windows} windows of {held['window']} tokens of {len(held['text'])} texts:",
        "`python -m tests.tools.accuracy --write`, with `--dtype float16` and `--tp 2` for the rows that say so.",
    )
    return f"{markdown_table(('format', 'layers in', 'computed by', 'activations', *_HEADS), rows)}\n\n{words}"


def on_gpu() -> str:
    """A Hopper card's."""
    return elsewhere(ON_GPU)


def on_amx() -> str:
    """Those of a CPU with AMX."""
    return elsewhere(ON_AMX)


def cut_off() -> str:
    """What the factor of `cpu_dequantized` is worth where vLLM's operator cuts numbers off."""
    ((name, found),) = figures("cut off").items()
    without, baseline = found["cpu_dequantized"], found[BASELINES["bfloat16"]]
    return paragraph(
        "On the processor of the first table vLLM's operator truncates numbers where others round them, and outputs",
        "are 0.56 % too small. `cpu_dequantized` corrects that by a factor. Without the factor its KL is",
        f"{_mean(without)}, where MLPs in bfloat16 have {_mean(baseline)} ({name}, the first {without['windows']}",
        f"windows, 1e-4 nats), and its perplexity is off by {_change(without)}.",
    )


def served_windows() -> int:
    """Windows of the formats."""
    return max(each["windows"] for _, _, _, each in served())


def faults() -> str:
    """What each injected fault does to the predictions, and which gates see it."""
    (found,) = figures("faults").values()
    heads = ("fault", "KL, nats", "perplexity", "accuracy of the next token", "this gate", "a gate of 8 points")
    rows = []
    for name, each in found.items():
        seen = "caught" if each["caught"] else "passes" if each["passes"] else "neither"
        change = math.expm1(each["nll"]) if each["nll"] < 50 else math.inf
        shown = f"{change:+.2%}" if change < 10 else f"{change + 1:.3g} times"
        scored = "passes" if each["passes_score_gate"] else "caught"
        points = f"{-each['points_lost']:+.2f} points"
        rows.append((name, f"{max(each['kl'], 0):.1e}", shown, points, seen, scored))
    faulty = {name: each for name, each in found.items() if name not in RIGHT}
    caught = [name for name, each in faulty.items() if each["caught"]]
    passed = [name for name, each in faulty.items() if each["passes_score_gate"]]
    tokens = found["none"]["tokens"]
    words = paragraph(
        f"{tokens} tokens; each fault in every layer of the emulation. Of {len(faulty)} faults this gate catches",
        f"{len(caught)} and lets {sum(each['passes'] for each in faulty.values())} pass. *Neither* means that more",
        f"windows are needed, also for what is right: `cpu_dequantized` passes with {served_windows()}. A gate",
        f"that allows a loss of 8 points, as one on GSM8K's score does, lets {len(passed)} pass,",
        f"{len(set(passed) & set(caught))} of which this gate catches. The last fault changes nothing here,",
        "because all routing weights are alike.",
    )
    return f"{markdown_table(heads, rows)}\n\n{words}"


def self_check() -> str:
    """Where each fault is caught on the model's weights, what right backends get, and the price."""
    held = read(SELF_CHECK)
    found, seeds, price = (held[f"{part}, cpu"]["figures"] for part in ("faults", "seeds", "price"))
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    by_fault = markdown_table(
        ["fault", *found], ([name, *(each.get(name, "") for each in found.values())] for name in names)
    )
    where = [place for each in found.values() for place in each.values()]
    at_load = sum(place.startswith("load") for place in where)
    said = f"{len(where)} faults of layouts: {at_load} are caught at load, {where.count('verify')} by `verify`, "
    said += f"{where.count('missed')} by none."
    heads = ["right backend", "checks", "refused", "largest error, of what is allowed", "processor time of a check"]
    rows = []
    for name, each in seeds.items():
        costs = price.get(name)
        shown = [f"{costs['thread_seconds']:.2f} s", f"{costs['mebibytes']:.0f} MiB"] if costs else ["", ""]
        rows.append([name, each["seeds"], each["refused"], f"{each['worst']:.0%}", *shown])
    checks, refused = (sum(each[key] for each in seeds.values()) for key in ("seeds", "refused"))
    devices = [f"{part} on {held[f'{part}, cpu']['device']}" for part in ("faults", "seeds", "price")]
    right = f"{checks} checks of right backends, {refused} of them refused{_bound(checks, refused)}"
    by_backend = markdown_table([*heads, "memory"], rows)
    return "\n\n".join([by_fault, said, by_backend, f"{right}; {', '.join(devices)}."])


def _bound(checks: int, refused: int) -> str:
    """The rule of three: with none in n, at most 3 / n with a confidence of 95 %."""
    return "" if refused else f": fewer than one in {checks // 3} with a confidence of 95 %"


def serving() -> str:
    """Tokens a second by format, through vLLM on CPUs."""
    return "\n\n".join(_serving(held) for held in read(SERVING))


def _serving(held: dict[str, Any]) -> str:
    batches = list(held["formats"]["bf16"]["ms_per_step"])
    heads = [f"{batch} prompt{'s' * (batch != '1')}" for batch in batches]
    device, cores, threads = (held["conditions"][name] for name in ("device", "cores", "threads"))
    most = next(words for feature, words in INSTRUCTIONS.items() if feature in device["features"])
    rows = []
    plain = held["formats"]["bf16"]["ms_per_step"]
    for name, each in held["formats"].items():
        cells = []
        for batch, ms in each["ms_per_step"].items():
            ratio = f"{plain[batch] / ms:.2f}"
            if each is not held["formats"]["bf16"] and "times_as_fast" in each:
                ratio = "{:.2f}, {:.2f} to {:.2f}".format(*each["times_as_fast"][batch])
            cells.append(f"{int(batch) * 1e3 / ms:.1f} tokens/s ({ratio})")
        rows.append([name, ", ".join(each["backends"]) or "stock vLLM", *cells])
    words = f"`OMP_NUM_THREADS`: {threads or 'not set'}."
    if load := held["conditions"].get("load"):
        words += f" Load: {load[0]:.1f} processes at the start, {load[1]:.1f} at the end."
    machine = f"{device['name']} with {most}, {cores} cores:"
    parts = [machine, markdown_table(["format", "backend", *heads], rows), words]
    if rounds := held["formats"]["bf16"].get("rounds"):
        spread = [f"{min(each):.0f} to {max(each):.0f} ms" for each in rounds.values()]
        parts.append(f"bf16's own {len(rounds[batches[0]])} rounds: {' and '.join(spread)} a step.")
    return "\n\n".join(parts)
