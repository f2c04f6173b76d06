"""Times a model on this machine's CPU, unquantized and in each format, through vLLM and the plugin.

    python -m tests.tools.cpu_serving [--formats mxfp8,gptq-int4-g32] [--write]

The model is `tests.lib.smollm2`, whose experts alone are quantized; attention and the rest stay in bfloat16. Every
format has an engine in eager mode, all in one process. In each of `--rounds` rounds every engine generates `TOKENS`
tokens after the same prompts, which are new ones, whatever the model says; who begins changes. A figure is the median
over the rounds of seconds over decode steps, the prompts' step among them. What other work on the machine takes differs
from round to round, but hardly within one: how many times as fast as unquantized a format is, is the median of the
rounds' own ratios, with a confidence interval of 95 % or more from their order.
`--write` puts the figures into tests/golden/cpu-serving.json, in place of those of a processor of the same name with
the same instructions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lib import smollm2
from vllm_moe_oracle.devices import detect

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "cpu-serving.json"
FORMATS = ("bf16", "mxfp8", "mxfp4-compressed-a16", "gptq-int4-g32", "gptq-int8", "awq")
TOKENS, ROUNDS, BATCHES = 16, 12, (1, 8)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """A median and its bounds: the closest pair of the sorted values, as far from both ends, between which a
    distribution's median lies with at least this confidence, whatever the distribution.

    Raises:
        ValueError: too few values; six are needed for 95 %.
    """
    ordered, count = sorted(values), len(values)
    outside = 0.0
    place = -1
    while outside + 2 * math.comb(count, place + 1) / 2**count <= 1 - confidence:
        place += 1
        outside += 2 * math.comb(count, place) / 2**count
    if place < 0:
        raise ValueError(f"no interval of {confidence:.0%} from {count} values")
    return statistics.median(ordered), ordered[place], ordered[-1 - place]


def engine_of(path: Path) -> tuple[Any, list[str]]:
    """An engine in this process, and the backends that run its layers."""
    from vllm import LLM

    report = path / "report.jsonl"
    report.unlink(missing_ok=True)  # records are added to those of earlier runs
    os.environ["MOE_ORACLE_REPORT"] = str(report)
    engine = LLM(
        model=str(path), enforce_eager=True, max_model_len=256, max_num_seqs=max(BATCHES), seed=0,
        kv_cache_memory_bytes=128 << 20, enable_prefix_caching=False, gpu_memory_utilization=0.05,
    )  # fmt: skip
    records = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return engine, sorted({group["decision"]["backend"] for record in records for group in record["groups"]})


def seconds_of(engine: Any, batch: int, turn: int) -> float:
    """What one engine takes for its part of a round."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [f"Question {turn * 100 + number}: why is the sky blue?" for number in range(batch)]
    start = time.perf_counter()
    engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - start


def rounds_of(engines: dict[str, Any], batch: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a decode step by engine, one for each round; a first round is not counted."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(seconds_of(engines[name], batch, turn) / TOKENS * 1e3)
    return {name: each[1:] for name, each in found.items()}


def figures(steps: dict[str, dict[str, list[float]]], backends: dict[str, list[str]]) -> dict[str, Any]:
    """What is kept of each format.

    Args:
        steps: `rounds_of` by number of prompts.
        backends: of each format's layers.
    """
    found: dict[str, Any] = {}
    for name, own in backends.items():
        ratios = {
            batch: [plain / each for plain, each in zip(times["bf16"], times[name], strict=True)]
            for batch, times in steps.items()
        }
        found[name] = {
            "ms_per_step": {batch: round(statistics.median(times[name]), 2) for batch, times in steps.items()},
            "times_as_fast": {
                batch: [round(each, 3) for each in median_interval(each_round)] for batch, each_round in ratios.items()
            },
            "backends": own,
            "rounds": {batch: [round(each, 2) for each in times[name]] for batch, times in steps.items()},
        }
    return found


def _processor(conditions: dict[str, Any]) -> tuple[str, list[str]]:
    return conditions["device"]["name"], list(conditions["device"]["features"])


def main() -> int:
    """The command line; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS[1:]), help="names of tests.lib.smollm2.FORMATS")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}; at least six")
    parser.add_argument("--checkpoints", type=Path, help="where checkpoints are, and are made")
    parser.add_argument("--write", action="store_true", help="write the figures")
    options = parser.parse_args()
    if reason := smollm2.missing():
        print(reason, file=sys.stderr)
        return 2
    if options.rounds < 6:
        parser.error("--rounds must be six or more")
    # Engines in this process, whose turns are taken here.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    load = os.getloadavg()[0]
    engines, backends = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        place = options.checkpoints or Path(folder)
        for name in dict.fromkeys(["bf16", *options.formats.split(",")]):
            path = place / name
            if not (path / "tokenizer_config.json").exists():
                smollm2.write(path, name)
            engines[name], backends[name] = engine_of(path)
            print(f"{name}: {', '.join(backends[name]) or 'stock vLLM'}", flush=True)
        steps = {str(batch): rounds_of(engines, batch, options.rounds) for batch in BATCHES}
    found = figures(steps, backends)
    device = detect.detect()
    conditions = {"command": " ".join(sys.argv[1:]), "device": dataclasses.asdict(device), "cores": os.cpu_count()}
    conditions |= {"threads": os.environ.get("OMP_NUM_THREADS", ""), "load": [load, os.getloadavg()[0]]}
    if options.checkpoints:
        conditions["command"] = conditions["command"].replace(str(options.checkpoints), "DIR")
    if options.write:
        processor = _processor(conditions)
        runs = [each for each in json.loads(GOLDEN.read_text()) if _processor(each["conditions"]) != processor]
        GOLDEN.write_text(json.dumps([*runs, {"conditions": conditions, "formats": found}], indent=1) + "\n")
    for name, each in found.items():
        cells = [
            f"{ms:.1f} ms with {batch} prompts, {' '.join(map(str, each['times_as_fast'][batch]))} times as fast"
            for batch, ms in each["ms_per_step"].items()
        ]
        print(f"{name:22s} {'; '.join(cells)} {' '.join(each['backends'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
