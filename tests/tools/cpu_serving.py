"""Times a model on this machine's CPU, unquantized and in each format, through vLLM and the plugin.

    python -m tests.tools.cpu_serving [--formats mxfp8,gptq-int4-g32] [--write]

The model is `tests.lib.smollm2`, whose experts alone are quantized; attention and the rest stay in bfloat16. Each
format is a process of its own, with one engine in eager mode. Prompts are all different, and `TOKENS` tokens are
generated after each, whatever the model says. A figure is the median of `ROUNDS` rounds: seconds of a round over its
decode steps, the prompts' step among them. Formats take turns, twice (`--turns`), and the best turn counts: other work
on the machine only slows.
`--write` puts the figures into tests/golden/cpu-serving.json, in place of those of a processor of the same name with
the same instructions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.lib import smollm2
from vllm_moe_oracle.devices import detect

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "cpu-serving.json"
FORMATS = ("bf16", "mxfp8", "mxfp4-compressed-a16", "gptq-int4-g32", "gptq-int8", "awq")
TOKENS, ROUNDS, BATCHES = 48, 3, (1, 8)


def time_steps(path: str) -> dict[str, Any]:
    """Milliseconds of a decode step by number of prompts, and the backends that ran the layers."""
    from vllm import LLM, SamplingParams

    report = Path(path) / "report.jsonl"
    report.unlink(missing_ok=True)  # records are added to those of earlier runs
    os.environ["MOE_ORACLE_REPORT"] = str(report)
    engine = LLM(model=path, enforce_eager=True, max_model_len=256, max_num_seqs=max(BATCHES), seed=0)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    steps: dict[str, float] = {}
    for batch in BATCHES:
        seconds = []
        for turn in range(ROUNDS + 1):
            prompts = [f"Question {turn * 100 + number}: why is the sky blue?" for number in range(batch)]
            start = time.perf_counter()
            engine.generate(prompts, sampling, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        steps[str(batch)] = round(statistics.median(seconds[1:]) / TOKENS * 1e3, 2)
    records = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    backends = sorted({group["decision"]["backend"] for record in records for group in record["groups"]})
    return {"ms_per_step": steps, "backends": backends}


def run(path: Path) -> dict[str, Any]:
    """`time_steps` in a process of its own."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"  # vLLM's processes write to the standard output, too
        command = [sys.executable, "-m", "tests.tools.cpu_serving", "--child", str(path), str(answer)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode or not answer.exists():
            raise SystemExit(f"{path.name}: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _processor(conditions: dict[str, Any]) -> tuple[str, list[str]]:
    return conditions["device"]["name"], list(conditions["device"]["features"])


def main() -> int:
    """The command line; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="names of tests.lib.smollm2.FORMATS")
    parser.add_argument("--turns", type=int, default=2, help="of each format (default 2)")
    parser.add_argument("--checkpoints", type=Path, help="where checkpoints are, and are made")
    parser.add_argument("--write", action="store_true", help="write the figures")
    parser.add_argument("--child", nargs=2, metavar=("PATH", "ANSWER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        path, answer = options.child
        Path(answer).write_text(json.dumps(time_steps(path)))
        return 0
    if reason := smollm2.missing():
        print(reason, file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        place = options.checkpoints or Path(folder)
        for _ in range(options.turns):
            for name in options.formats.split(","):
                path = place / name
                if not (path / "tokenizer_config.json").exists():
                    smollm2.write(path, name)
                made = run(path)
                first = {**made, "ms_per_step": dict(made["ms_per_step"]), "turns": []}
                kept = found.setdefault(name, first)
                best = kept["ms_per_step"]
                best |= {batch: min(best[batch], ms) for batch, ms in made["ms_per_step"].items()}
                kept["turns"].append(made["ms_per_step"])
                print(f"{name}: {made}", flush=True)
    device = detect.detect()
    conditions = {"command": " ".join(sys.argv[1:]), "device": dataclasses.asdict(device), "cores": os.cpu_count()}
    conditions |= {"threads": os.environ.get("OMP_NUM_THREADS", ""), "load": [load, os.getloadavg()[0]]}
    if options.write:
        processor = _processor(conditions)
        runs = [each for each in json.loads(GOLDEN.read_text()) if _processor(each["conditions"]) != processor]
        GOLDEN.write_text(json.dumps([*runs, {"conditions": conditions, "formats": found}], indent=1) + "\n")
    for name, each in found.items():
        steps = ", ".join(f"{ms:.1f} ms with {batch} prompts" for batch, ms in each["ms_per_step"].items())
        print(f"{name:22s} {steps} {' '.join(each['backends'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
