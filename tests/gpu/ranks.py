"""Tiny models of every format on one and on two GPUs, through vLLM and the plugin, against float32 transformers.

    python -m tests.gpu.ranks --json ranks.json [--workers 6] [--only WORDS]

Two Hopper cards of one host, vLLM and the plugin installed. Each format is served on one GPU, with its experts cut over
two (tensor parallelism), and with whole experts on each of two (expert parallelism): by this project's kernels, eagerly
and compiled with CUDA graphs as by default, and by the backend that is chosen without measurements. Every one of them
has to say the tokens of float32 transformers, with logprobs within the tolerance of `tests.lib.served`, all layers
through the oracle, and one decision on all ranks. Several engines start at once, since a start is work of the host.

On a machine without a GPU, ``--cpu`` runs the same on two processes with the CPU's backends. Exit status 1 when one
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.lib import checkpoints, integer_checkpoints, reference
from tests.lib.integer_checkpoints import Integers
from tests.lib.served import PROMPT, difference, tolerance

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 4
SIZE = replace(checkpoints.Size(), intermediate=256)
GPT_OSS = replace(checkpoints.Size(), intermediate=256, top_k=4)
SECONDS = 240
"""After which a process with the engines of one format is ended."""

TWO: dict[str, Any] = {"tensor_parallel_size": 2}
ONLINE = {"quantization": "mxfp8", "quantization_config": {"ignore": ["lm_head", "re:.*\\.mlp\\.gate$"]}}
ENGINES: dict[str, dict[str, Any]] = {"one": {}, "tp2": TWO, "tp2 ep": TWO | {"enable_expert_parallel": True}}
GRAPHS = {"cudagraph_capture_sizes": [1, 2]}

INTEGERS = {
    "gptq g32": Integers("gptq", group=32),
    "gptq g64": Integers("gptq", group=64),
    "gptq g32 act order": Integers("gptq", group=32, act_order="group"),
    "gptq int8 g128": Integers("gptq", bits=8, group=128),
    "awq g32": Integers("awq", group=32, zero_points=True),
    "compressed-tensors int4 g32": Integers("compressed-tensors", group=32),
    "compressed-tensors int4 g64": Integers("compressed-tensors", group=64),
}
BACKENDS = {"mxfp8": "hopper_mxfp8", "mxfp4": "hopper_mxfp4", "wna16": "hopper_wna16"}
ACT_ORDER = "hopper_wna16_act_order"


def models(folder: Path, words: list[str]) -> dict[str, tuple[Path, Path, str, dict[str, Any]]]:
    """Checkpoint, the one whose weights it stands for, scheme and more engine arguments, by format."""
    plain = {"quantize_linears": False, "size": SIZE}
    found: dict[str, tuple[Path, Path, str, dict[str, Any]]] = {}

    def wanted(name: str) -> bool:
        return any(word in name for word in words)

    for name, tag in (("mxfp8 modelopt", "modelopt"), ("mxfp8 compressed-tensors", "compressed-tensors")):
        if wanted(name):
            path = checkpoints.write_checkpoint(folder / tag, format="mxfp8", tag=tag, **plain)  # type: ignore[arg-type]
            found[name] = (path, path, "mxfp8", {})
    if wanted("mxfp8 online"):
        exact = checkpoints.write_checkpoint(folder / "online-exact", format="mxfp8", size=SIZE)
        path = checkpoints.write_checkpoint(folder / "online", format="bf16", size=SIZE)
        found["mxfp8 online"] = (path, exact, "mxfp8", ONLINE)
    if wanted("mxfp4 gpt-oss"):
        path = checkpoints.write_checkpoint(folder / "gpt-oss", arch="gpt_oss", format="mxfp4", size=GPT_OSS)
        found["mxfp4 gpt-oss"] = (path, path, "mxfp4", {})
    if wanted("mxfp4 compressed-tensors"):
        path = checkpoints.write_checkpoint(
            folder / "mxfp4", format="mxfp4", tag="compressed-tensors-a16", **plain  # type: ignore[arg-type]
        )  # fmt: skip
        found["mxfp4 compressed-tensors"] = (path, path, "mxfp4", {})
    bf16 = checkpoints.write_checkpoint(folder / "bf16", format="bf16", **plain)  # type: ignore[arg-type]
    for name, how in INTEGERS.items():
        if wanted(name):
            path = integer_checkpoints.write(bf16, folder / name.replace(" ", "-"), how)
            found[name] = (path, path.with_name(f"{path.name}-exact"), "wna16", {})
    return found


def jobs_of(checkpoint: Path, backend: str, more: dict[str, Any], cpu: bool) -> dict[str, dict[str, Any]]:
    """The engines of one format, by name. backend: this project's."""
    found: dict[str, dict[str, Any]] = {}
    for engine, options in ENGINES.items():
        for name, oracle, eager in (
            ("own", {} if cpu else {"backend": backend}, True),
            ("own, graphs", {} if cpu else {"backend": backend}, False),
            ("static", {"use_measurements": 0}, True),
        ):
            if cpu and name != "own":
                continue
            compiled = {} if eager else {"compilation_config": GRAPHS}
            found[f"{engine}, {name}"] = {
                "checkpoint": str(checkpoint), "dtype": "bfloat16", "prompt": PROMPT, "tokens": TOKENS,
                "oracle": oracle, "eager": eager, "engine": options | more | compiled,
            }  # fmt: skip
    return found


def serve(folder: Path, job: dict[str, Any], device: int) -> dict[str, Any]:
    """One engine's result and its ranks' reports; what its process printed where it failed.

    It has a process of its own, which a failure may take down.
    """
    files = [folder / "jobs.json", folder / "results.json", folder / "report.jsonl"]
    for path in files:
        path.unlink(missing_ok=True)
    files[0].write_text(json.dumps([job]))
    env = os.environ | {"VLLM_PLUGINS": "moe_oracle", "MOE_ORACLE_REPORT": str(files[2])}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "MOE_ORACLE_CACHE": str(folder / "cache")}
    if "tensor_parallel_size" not in job["engine"]:
        env |= {"CUDA_VISIBLE_DEVICES": str(device)}
    command = [sys.executable, "-m", "tests.e2e.run_generate", *map(str, files[:2])]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
        )
        output = done.stdout
    except subprocess.TimeoutExpired as error:
        output = f"{(error.stdout or b'').decode(errors='replace')}\nerror: ended after {SECONDS} s"
    result = json.loads(files[1].read_text())[0] if files[1].exists() else {"error": "no result"}
    records = [json.loads(line) for line in files[2].read_text().splitlines()] if files[2].exists() else []
    log = [line[-300:] for line in output.splitlines() if "rror" in line][-12:] if "error" in result else []
    return {"result": result, "records": records, "seconds": time.monotonic() - begin, "log": log}


def judge(served: dict[str, Any], expected: reference.Continuation) -> dict[str, Any]:
    """One row of the table."""
    result, records = served["result"], served["records"]
    row: dict[str, Any] = {"seconds": round(served["seconds"], 1)}
    if "error" in result:
        return row | {"ok": False, "error": result["error"][:400], "log": served["log"]}
    decisions = {
        (group["decision"]["backend"], group["decision"]["why"]) for record in records for group in record["groups"]
    }
    layers = sum(group["count"] for record in records for group in record["groups"])
    largest = difference(result, expected)
    ranks = len(records)
    ok = (
        largest <= tolerance("bfloat16")
        and result["tokens"] == expected.tokens
        and len(decisions) == 1
        and layers == SIZE.layers * ranks > 0
    )
    return row | {
        "ok": ok, "logprob_difference": round(largest, 4), "tokens_equal": result["tokens"] == expected.tokens,
        "ranks": ranks, "layers": layers, "backends": sorted(name for name, _ in decisions),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=6, help="formats that are served at once")
    parser.add_argument("--only", default="", help="formats that contain one of these words, comma-separated")
    parser.add_argument("--engines", default="", help="engines that contain one of these words, comma-separated")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further format after these seconds")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        formats = models(folder, args.only.split(","))
        expected = {
            format: reference.greedy(reference.load_transformers(exact), PROMPT, TOKENS)
            for format, (_, exact, _, _) in formats.items()
        }
        print(f"{len(formats)} formats after {time.monotonic() - begin:.0f} s", flush=True)

        def one(item: tuple[int, str]) -> None:
            index, format = item
            if time.monotonic() - begin > args.seconds:
                print(f"{format}: not started", flush=True)
                return
            checkpoint, _, scheme, more = formats[format]
            own = folder / f"run-{index}"
            own.mkdir()
            backend = ACT_ORDER if "act order" in format else BACKENDS[scheme]
            jobs = jobs_of(checkpoint, backend, more, args.cpu)
            wanted = args.engines.split(",")
            for engine, job in jobs.items():
                if not any(word in engine for word in wanted):
                    continue
                row = {"format": format, "engine": engine}
                row |= judge(serve(own, job, index % 2), expected[format])
                rows.append(row)
                words = {key: each for key, each in row.items() if key not in ("format", "engine", "ok", "log")}
                print(f"{'ok  ' if row['ok'] else 'FAIL'} {format}, {engine}: {words}", flush=True)
                write(args.json, rows)

        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(one, enumerate(formats)))
    failed = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} hold, {time.monotonic() - begin:.0f} s")
    for row in failed:
        print(row["format"], row["engine"], *row.get("log", ())[-4:], sep="\n   ")
    return 1 if failed else 0


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the table with its conditions."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    conditions = {
        "gpu": gpu, "gpus": torch.cuda.device_count(), "torch": torch.__version__,
        "command": "python -m tests.gpu.ranks " + " ".join(sys.argv[1:]), "tolerance": tolerance("bfloat16"),
    }  # fmt: skip
    ordered = sorted(rows, key=lambda row: (row["format"], row["engine"]))
    path.write_text(json.dumps({"conditions": conditions, "rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
