"""Tiny models of every format over one, two and four GPUs, through vLLM and the plugin, against float32 transformers.

    python -m tests.gpu.ranks --json ranks.json [--workers 6] [--only FORMATS] [--cases CASE ...] [--cpu]

Hopper cards of one host, vLLM and the plugin installed. Each format is served on one GPU, with its experts cut over
two (tensor parallelism), with whole experts on each of two (expert parallelism), and both with data parallelism; where
there are four cards, also over four, and over two data-parallel ranks of two each. It runs by this project's kernels,
eagerly and compiled with CUDA graphs as by default, and by the backend that is chosen without measurements. A format of
each scheme is also served with what people switch on: reloads, sleep, LoRA, expert load balancing and so on, over two
ranks. Every answer has to be the tokens of float32 transformers, with logprobs within the tolerance of
`tests.lib.served`, all layers through the oracle, and one decision on all ranks. Several engines start at once, since a
start is work of the host.

The cases ``..., stock`` are vLLM without the plugin, on one rank and over two with tensor and expert parallelism. Their
rows also say how far the plugin's answer is from theirs, where both ran in this call.

On a machine without a GPU, ``--cpu`` runs the same on processes with the CPU's backends. Exit status 1 when an
engine with the plugin differs from transformers; what stock does is a result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from tests.lib import adapters, checkpoints, integer_checkpoints, reference
from tests.lib.integer_checkpoints import Integers
from tests.lib.served import PROMPT, difference, tolerance
from vllm_moe_oracle.decision_records import ServerRecord, last_of_each_load

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 4
SIZE = replace(checkpoints.Size(), intermediate=256)
DRAFTED = replace(SIZE, layers=1)
"""Of models with a layer that drafts: `checkpoints.glm4_moe` says why one."""
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
DRAFTS = {"mxfp8 mtp": "", "mxfp8 mtp with 16-bit drafts": "model.layers.1."}
"""What of such a model is left in 16 bits."""
GPT_OSS = replace(checkpoints.Size(), intermediate=256, top_k=4, kv_heads=4)
"""vLLM's model of gpt-oss divides its heads of keys by the ranks, and has none left of two over four."""
SECONDS = 240
"""After which the process of one engine is ended."""
LONG_PROMPT = [*range(5, 25), *range(5, 25)]
"""Longer than a block of the cache and than a chunk; its second half repeats the first, for drafts by n-grams."""

TWO: dict[str, Any] = {"tensor_parallel_size": 2}
ONLINE = {"quantization": "mxfp8", "quantization_config": {"ignore": ["lm_head", "re:.*\\.mlp\\.gate$"]}}
EXPERTS = {"enable_expert_parallel": True}
DATA: dict[str, Any] = {"data_parallel_size": 2}
FOUR: dict[str, Any] = {"tensor_parallel_size": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "one": {}, "tp2": TWO, "tp2 ep": TWO | EXPERTS, "dp2": DATA, "dp2 ep": DATA | EXPERTS,
    "tp4": FOUR, "tp4 ep": FOUR | EXPERTS, "tp2 dp2": TWO | DATA, "tp2 dp2 ep": TWO | DATA | EXPERTS,
}  # fmt: skip
STOCK = ("one", "tp2", "tp2 ep")
"""Engines that are also served without the plugin."""
FEATURES: dict[str, dict[str, Any]] = {
    "reload": {"feature": "reload_and_back", "engine": TWO},
    "reload, ep": {"feature": "reload_and_back", "engine": TWO | EXPERTS},
    "sleep": {"feature": "sleep", "engine": TWO},
    "eplb": {"feature": "expert_load_balancing", "engine": TWO | EXPERTS, "eplb": {"use_async": False}},
    "eplb, async": {"feature": "expert_load_balancing", "engine": TWO | EXPERTS},
    "lora": {"feature": "lora", "engine": TWO},
    "expert lora": {"feature": "lora", "engine": TWO | {"lora_target_modules": None}, "of_experts": True},
    "expert lora, ep": {"feature": "lora", "engine": TWO | EXPERTS | {"lora_target_modules": None}, "of_experts": True},
    "ngram drafts": {"feature": "speculative_decoding", "engine": TWO},
    "prefix caching": {"feature": "prefix_caching", "engine": TWO},
    "chunked prefill": {"feature": "chunked_prefill", "engine": TWO},
    "async scheduling": {"feature": "async_engine", "engine": TWO | {"async_scheduling": True}},
    "batch invariance": {
        "feature": "in_a_batch", "engine": TWO, "environment": {"VLLM_BATCH_INVARIANT": "1"}, "oracle": {},
    },
    "pipeline": {"feature": "generate", "engine": {"pipeline_parallel_size": 2}},
    "tp2, http": {"feature": "over_http", "engine": TWO},
    "dp2 ep, http": {"feature": "over_http", "engine": DATA | EXPERTS},
    "batch invariance, http": {
        "feature": "over_http", "engine": TWO, "environment": {"VLLM_BATCH_INVARIANT": "1"}, "oracle": {},
    },
}  # fmt: skip
"""What people switch on, compiled with CUDA graphs as by default, by this project's kernels."""
FEATURED = ("mxfp8 modelopt", "mxfp4 gpt-oss", "mxfp4 compressed-tensors", "gptq g32")
CPU_LACKS = ("dp2", "tp2 dp2", "sleep", "eplb", "lora", "expert lora", "batch invariance", "pipeline")
"""Cases that start with these words fail in stock vLLM 0.32 on a CPU, or are refused there. Its `CpuCommunicator` has
neither `all_gatherv` nor `reduce_scatterv`, with which data-parallel ranks exchange tokens (NotImplementedError in the
first call; `tests/e2e/test_data_parallel.py` serves two such ranks with both), a request without an adapter gets its
neighbor's, later stages of a pipeline have no place for their input."""
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}

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


@dataclass(frozen=True)
class Format:
    """A format's checkpoints.

    Attributes:
        path: what is served.
        exact: what transformers read: the weights that `path` stands for.
        scheme: of the experts.
        engine: more arguments of the engine.
        backend: this project's.
        other: another model in this format, and what transformers read of it, where features are tried.
        adapter: a LoRA adapter of the attention, and the exact checkpoint with it merged, likewise.
        expert_adapter: one of the experts; None for gpt-oss, whose experts have no names of their own.
        layers: quantized MoE layers, of drafts, too.
    """

    path: Path
    exact: Path
    scheme: str
    engine: dict[str, Any]
    backend: str
    other: tuple[Path, Path] | None = None
    adapter: tuple[Path, Path] | None = None
    expert_adapter: tuple[Path, Path] | None = None
    layers: int = SIZE.layers


def write_format(folder: Path, name: str, seed: int) -> tuple[Path, Path]:
    """Writes a model in a format: the checkpoint, and the one with the weights that it stands for."""
    folder = folder / f"{name.replace(' ', '-')}-{seed}"
    plain: dict[str, Any] = {"quantize_linears": False, "size": SIZE, "seed": seed}
    scheme, _, how = name.partition(" ")
    if name in DRAFTS:
        plain |= {"arch": "glm4_moe", "size": DRAFTED, "kept": DRAFTS[name]}
        how = "modelopt"
    if name in INTEGERS:
        bf16 = checkpoints.write_checkpoint(folder / "bf16", format="bf16", **plain)
        path = integer_checkpoints.write(bf16, folder / "quantized", INTEGERS[name])
        return path, path.with_name(f"{path.name}-exact")
    if how == "online":
        exact = checkpoints.write_checkpoint(folder / "exact", format="mxfp8", size=SIZE, seed=seed)
        return checkpoints.write_checkpoint(folder / "bf16", format="bf16", size=SIZE, seed=seed), exact
    if how == "gpt-oss":
        plain = {"arch": "gpt_oss", "size": GPT_OSS, "seed": seed}
    else:
        plain["tag"] = how + "-a16" * (scheme == "mxfp4")
    path = checkpoints.write_checkpoint(folder / "quantized", format=scheme, **plain)  # type: ignore[arg-type]
    return path, path


def formats(folder: Path, words: list[str]) -> dict[str, Format]:
    """The formats whose names contain one of some words."""
    found = {}
    for name in (
        "mxfp8 modelopt", "mxfp8 compressed-tensors", "mxfp8 online", "mxfp4 gpt-oss", "mxfp4 compressed-tensors",
        *DRAFTS, *INTEGERS,
    ):  # fmt: skip
        if not any(word in name for word in words):
            continue
        path, exact = write_format(folder, name, 0)
        scheme = "wna16" if name in INTEGERS else name.partition(" ")[0]
        backend = ACT_ORDER if "act order" in name else BACKENDS[scheme]
        engine = ONLINE if "online" in name else MTP if name in DRAFTS else {}
        layers = DRAFTED.layers + (not DRAFTS[name]) if name in DRAFTS else SIZE.layers
        found[name] = Format(path, exact, scheme, engine, backend, layers=layers)
        if name in FEATURED:
            merged = exact.with_name(f"{exact.name}-merged")
            adapter = adapters.write(exact, exact.with_name(f"{exact.name}-adapter"), merged)
            found[name] = replace(found[name], other=write_format(folder, name, 1), adapter=(adapter, merged))
            if "gpt-oss" not in name:
                merged = exact.with_name(f"{exact.name}-merged-experts")
                adapter = adapters.write_experts(exact, exact.with_name(f"{exact.name}-expert-adapter"), merged)
                found[name] = replace(found[name], expert_adapter=(adapter, merged))
    return found


def feature_jobs(name: str, format: Format, cpu: bool, common: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The engines of one format with a feature of `FEATURES` switched on, by feature; `common` is of all jobs."""
    found: dict[str, dict[str, Any]] = {}
    paths = {"other": str(format.other[0]), "adapter": str(format.adapter[0])}
    for feature, job in FEATURES.items():
        if job["feature"] == "expert_load_balancing" and name == "mxfp4 gpt-oss":
            continue  # vLLM 0.33's model of gpt-oss has no experts that move
        if job.get("of_experts"):
            if not format.expert_adapter:
                continue
            job = job | {"adapter": str(format.expert_adapter[0])}
        arguments = format.engine | ({} if cpu else {"enforce_eager": False} | GRAPHS) | job["engine"]
        found[feature] = common | paths | {"prompt": LONG_PROMPT} | job | {"engine": arguments}
    return found


def size_of(job: dict[str, Any]) -> int:
    """The GPUs of an engine."""
    return math.prod(count for name, count in job["engine"].items() if name.endswith("_parallel_size"))


def jobs_of(name: str, format: Format, cpu: bool, gpus: int) -> dict[str, dict[str, Any]]:
    """The engines of one format by case: how it is cut, by which backend it runs, and what is switched on.

    Args:
        name: of the format.
        format: its checkpoints.
        cpu: whether the ranks are processes of a CPU.
        gpus: of this machine, or processes; engines of more are left out.
    """
    own = {} if cpu else {"backend": format.backend}
    common = {"checkpoint": str(format.path), "dtype": "bfloat16", "tokens": TOKENS, "layers": format.layers}
    found: dict[str, dict[str, Any]] = {}
    for engine, options in ENGINES.items():
        for how, oracle, eager in (
            ("own", own, True), ("own, graphs", own, False), ("static", {"use_measurements": 0}, True),
            ("stock", None, True), ("stock, graphs", None, False),
        ):  # fmt: skip
            if oracle is None and engine not in STOCK:
                continue
            if cpu and (how not in ("own", "stock") or (DRAFTS.get(name) and "ep" in engine)):
                continue  # vLLM's operator for CPUs ends the process of a rank with whole experts in 16 bits
            if format.backend == ACT_ORDER and engine != "one" and "ep" not in engine:
                continue  # a rank's features are of parts of groups, which every kernel refuses
            arguments = options | format.engine | {"enforce_eager": eager} | ({} if eager else GRAPHS)
            feature = "async_engine" if "data_parallel_size" in options else "generate"
            found[f"{engine}, {how}"] = common | {
                "feature": feature, "prompt": PROMPT, "oracle": oracle or {}, "plugin": oracle is not None,
                "engine": arguments,
            }  # fmt: skip
    if format.other and format.adapter:
        found |= feature_jobs(name, format, cpu, common | {"oracle": own})
    return {
        case: job for case, job in found.items() if size_of(job) <= gpus and not (cpu and case.startswith(CPU_LACKS))
    }


def serve(folder: Path, job: dict[str, Any], first: int = 0) -> dict[str, Any]:
    """One engine's result and its ranks' reports; what its process printed where it failed.

    It has a process of its own, which a failure may take down.

    Args:
        folder: of its files.
        job: what is served.
        first: the first of its GPUs, of those that are visible here; the others follow.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(first + size_of(job))))
    devices = ",".join(visible.split(",")[first : first + size_of(job)])
    files = [folder / "jobs.json", folder / "results.json", folder / "report.jsonl"]
    for path in files:
        path.unlink(missing_ok=True)
    files[0].write_text(json.dumps([job]))
    # No plugin at all, not one that is switched off: "" names none.
    plugins = "moe_oracle" if job.get("plugin", True) else ""
    env = os.environ | {"VLLM_PLUGINS": plugins, "MOE_ORACLE_REPORT": str(files[2])}
    cores = "|".join(str(rank % 2) for rank in range(size_of(job)))
    env |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "MOE_ORACLE_CACHE": str(folder / "cache")}
    env |= {"VLLM_LOGGING_LEVEL": "INFO", "CUDA_VISIBLE_DEVICES": devices} | job.get("environment", {})
    command = [sys.executable, "-m", "tests.e2e.run_features", *map(str, files[:2])]
    begin = time.monotonic()
    # A group of its own: ranks of an engine that is ended must not go on.
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output = process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends a server, which has a group of its own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=15)
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        output = f"{process.communicate()[0]}\nerror: ended after {SECONDS} s"
    result = json.loads(files[1].read_text())[0] if files[1].exists() else {"error": "no result"}
    lines = files[2].read_text().splitlines() if files[2].exists() else []
    records = last_of_each_load(
        map(json.loads, lines), lambda each: msgspec.convert(each, ServerRecord).process_and_layers()
    )
    log = first_traceback(output) if "error" in result else []
    moves = output.count("Rearranging experts") - output.count("Skip rearrange")
    return {"result": result, "records": records, "seconds": time.monotonic() - begin, "log": log, "moves": moves}


def first_traceback(output: str) -> list[str]:
    """The first traceback's last lines, without what vLLM puts in front of each; else the last lines with an error."""
    lines = output.splitlines()
    start = next((index for index, line in enumerate(lines) if "Traceback (most" in line), None)
    if start is None:
        return [line[-300:] for line in lines if "rror" in line][-12:]
    prefix = lines[start].partition("Traceback")[0]
    words = [line.removeprefix(prefix) for line in lines[start + 1 :] if line.startswith(prefix)]
    end = next((index for index, line in enumerate(words) if line and line[0] != " "), len(words) - 1)
    return [line[-200:] for line in words[: end + 1] if "^^^" not in line][-24:]


def judge(
    job: dict[str, Any], served: dict[str, Any], expected: reference.Continuation, other: reference.Continuation | None
) -> dict[str, Any]:
    """One row of the table.

    Args:
        job: what was served.
        served: by `serve`.
        expected: of the checkpoint.
        other: of what the feature says in ``said_other``.
    """
    result, records = served["result"], served["records"]
    row: dict[str, Any] = {"seconds": round(served["seconds"], 1)}
    if "error" in result:
        return row | {"ok": False, "error": result["error"][:400], "log": served["log"]}
    decisions = {
        (group["decision"]["backend"], group["decision"]["why"]) for record in records for group in record["groups"]
    }
    layers = sum(group["count"] for record in records for group in record["groups"])
    pairs = [(said, expected) for said in result["said"]]
    pairs += [(said, other) for said in result.get("said_other", ()) if other is not None]
    largest = max(difference(said, theirs, job["prompt"]) for said, theirs in pairs)
    tokens_equal = all(said["tokens"] == theirs.tokens for said, theirs in pairs)
    ranks = len(records)
    stages = job["engine"].get("pipeline_parallel_size", 1)
    if job.get("plugin", True):
        engaged = len(decisions) == 1 and layers * stages == job.get("layers", SIZE.layers) * ranks > 0
    else:
        engaged = not records  # a layer through the oracle would be none of stock's
    ok = (
        largest <= tolerance("bfloat16")
        and tokens_equal
        and engaged
        and ("said_other" not in result or other is not None)
        and result.get("same_bits", True)
    )
    if job["feature"] == "expert_load_balancing":
        row["rearrangements"] = served["moves"]
        ok &= served["moves"] > 0
    if "same_bits" in result:
        row["same_bits"] = result["same_bits"]
    if "draft" in result:
        row |= {"drafted": result["draft"], "accepted": result["accepted"]}
        ok &= 0 < result["draft"] == result["accepted"]
    return row | {
        "ok": ok, "logprob_difference": round(largest, 4), "tokens_equal": tokens_equal, "answers": len(pairs),
        "ranks": ranks, "layers": layers, "backends": sorted(name for name, _ in decisions),
    }  # fmt: skip


def compare_with_stock(rows: list[dict[str, Any]], said: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Adds to stock's rows the largest difference of a logprob from the plugin's answer by the same engine.

    Args:
        rows: the table.
        said: the first answer of an engine by format and case.
    """
    for row in rows:
        case = row["case"].replace(", stock", ", own")
        pair = said.get((row["format"], row["case"])), said.get((row["format"], case))
        if case != row["case"] and pair[0] and pair[1]:
            logprobs = [np.array(each["logprobs"]) for each in pair]
            row["plugin_difference"] = round(float(np.abs(logprobs[0] - logprobs[1]).max()), 4)
            row["plugin_tokens_equal"] = pair[0]["tokens"] == pair[1]["tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=6, help="engines that start at once")
    parser.add_argument("--only", default="", help="formats that contain one of these words, comma-separated")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="CASE", help="cases that start with one of these")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further engine after these seconds")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    gpus = 4 if args.cpu else torch.cuda.device_count()
    rows: list[dict[str, Any]] = []
    said: dict[tuple[str, str], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = formats(folder, args.only.split(","))
        starts = tuple(args.cases)
        jobs = [
            (format, case, job)
            for format, how in found.items()
            for case, job in jobs_of(format, how, args.cpu, gpus).items()
            if case.startswith(starts)
        ]
        # What is switched on comes first, then how people serve; then all formats of one case.
        jobs.sort(key=lambda each: (each[1] not in FEATURES, "graphs" not in each[1], each[1]))

        @cache
        def says(checkpoint: Path, prompt: tuple[int, ...]) -> reference.Continuation:
            return reference.greedy(reference.load_transformers(checkpoint), list(prompt), TOKENS)

        def theirs(format: str, job: dict[str, Any]) -> tuple[reference.Continuation, reference.Continuation | None]:
            adapter = found[format].expert_adapter if job.get("of_experts") else found[format].adapter
            pair = {"lora": adapter, "reload_and_back": found[format].other}.get(job["feature"])
            prompt = tuple(job["prompt"])
            return says(found[format].exact, prompt), says(pair[1], prompt) if pair else None

        if not jobs:
            parser.error(f"no engine has these words and at most {gpus} GPUs; --cpu needs none")
        expected = [theirs(format, job) for format, _, job in jobs]
        print(f"{len(found)} formats, {len(jobs)} engines after {time.monotonic() - begin:.0f} s", flush=True)

        def one(index: int) -> None:
            format, case, job = jobs[index]
            if time.monotonic() - begin > args.seconds:
                print(f"{format}, {case}: not started", flush=True)
                return
            own = folder / f"run-{index}"
            own.mkdir()
            size = size_of(job)
            served = serve(own, job, size * (index % (gpus // size)))
            if served["result"].get("said"):
                said[format, case] = served["result"]["said"][0]
            row = {"format": format, "case": case} | judge(job, served, *expected[index])
            rows.append(row)
            compare_with_stock(rows, said)
            words = {key: each for key, each in row.items() if key not in ("format", "case", "ok", "log")}
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {format}, {case}: {words}", flush=True)
            write(args.json, rows)

        with ThreadPoolExecutor(args.workers) as pool:
            list(pool.map(one, range(len(jobs))))
    for row in rows:
        if "plugin_difference" in row:
            words = "the same tokens" if row["plugin_tokens_equal"] else "OTHER TOKENS"
            print(f"{row['format']}, {row['case']}: plugin {row['plugin_difference']} from stock, {words}")
    failed = [row for row in rows if not row["ok"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} hold, {time.monotonic() - begin:.0f} s")
    for row in failed:
        print(row["format"], row["case"], *row.get("log", ())[-6:], sep="\n   ")
    return 1 if any(", stock" not in row["case"] for row in failed) else 0


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes the table with its conditions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    conditions = {
        "gpu": gpu, "gpus": torch.cuda.device_count(), "torch": torch.__version__,
        "command": "python -m tests.gpu.ranks " + shlex.join(sys.argv[1:]).replace(str(path), path.name),
        "tolerance": tolerance("bfloat16"),
    }  # fmt: skip
    ordered = sorted(rows, key=lambda row: (row["format"], row["case"]))
    path.write_text(json.dumps({"conditions": conditions, "rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
