"""A whole model with random weights through vLLM, without the plugin and with it: start, decode step, prefill.

    python tests/gpu/serve.py --model qwen3-mxfp8 --model qwen3-gptq --model gpt-oss --json serve.json

Shapes of Qwen3-30B-A3B and gpt-oss-20b with fewer layers, weights that vLLM makes up (``--load-format dummy``),
compiled as by default, CUDA graphs of the batch sizes that are timed. Each mode runs in a process of its own:
``stock`` is vLLM without the plugin, ``auto`` with it, and any other name is a backend of ours for every layer. The
modes of a model share vLLM's compile cache, so that all but the first start warm. A decode step is the slope of the
time over the number of generated tokens, at each batch size; prefill is 32 prompts of 1024 tokens. The JSON file is
written after each mode; one that is ended keeps what it has measured.

Nothing else should run on the machine: a start compiles for half a minute, on every core. Two minutes a model on an
H200; with other compilations beside it a start alone took longer than 75 s.

``--busy`` finds how long the GPU works in a decode step: with the engine in the measuring process, from the intervals
of its kernels. What a step takes beyond that is vLLM's host side.

On a CPU a tiny model goes the same way: add ``--tiny``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests" / "golden" / "configs"

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
MODELS: dict[str, tuple[Path, dict[str, Any]]] = {
    "qwen3-mxfp8": (ROOT / "examples" / "qwen3-30b-a3b-mxfp8.json", {}),
    "qwen3-gptq": (CONFIGS / "qwen3-30b-a3b.json", {"quantization_config": GPTQ, "torch_dtype": "bfloat16"}),
    "gpt-oss": (CONFIGS / "gpt-oss-20b.json", {"torch_dtype": "bfloat16"}),
}
"""Config and what is changed in it, by the name of `--model`."""

TINY: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "intermediate_size": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""What makes a config one for a CPU; each family's own names of the rest are found in it."""
_TINY_SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_local_experts": 8,
               "num_experts_per_tok": 2, "experts_per_token": 2}  # fmt: skip

PREFILL = (32, 1024)
BATCHES = (1, 8, 64)
SHORT, LONG = 16, 144
LAST_WORDS, ERRORS = 1500, 12
"""Characters of the end of a log, and lines with an error's name, that are kept of a mode that failed."""


def config_of(model: str, layers: int, tiny: bool) -> dict[str, Any]:
    """The model's config.json with so many layers."""
    path, changes = MODELS[model]
    config: dict[str, Any] = json.loads(path.read_text()) | changes | {"num_hidden_layers": layers}
    if tiny:
        config |= TINY | {key: value for key, value in _TINY_SIZES.items() if key in config}
    if model == "gpt-oss":  # every other layer attends to a window
        config["layer_types"] = ["sliding_attention" if index % 2 == 0 else "full_attention" for index in range(layers)]
        config |= {"sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000}
    return config


def measure(folder: str, mode: str, tiny: bool, busy: bool = False) -> dict[str, Any]:
    """Loads the model and times it; in a process of its own.

    Args:
        folder: the model's.
        mode: see the module.
        tiny: on a CPU.
        busy: also the time in which the GPU works.
    """
    from vllm import LLM, SamplingParams

    oracle = {} if mode in ("stock", "auto") else {"backend": mode}
    memory = {"kv_cache_memory_bytes": 256 << 20} if tiny else {"gpu_memory_utilization": 0.6}
    begin = time.perf_counter()
    llm: Any = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        # The batch sizes that are timed, and no others: every size is compiled and captured while the engine starts.
        compilation_config={} if tiny else {"cudagraph_capture_sizes": list(BATCHES)},
        **({"additional_config": {"moe_oracle": oracle}} if oracle else {}),
        **memory,
    )
    found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - begin, 1), "decode_ms": {}}
    print("FOUND " + json.dumps(found), flush=True)

    def run(batch: int, prompt: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [(7 * row + at) % 500 for at in range(prompt)]} for row in range(batch)]
        parameters = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - begin

    repeats = 1 if tiny else 3
    for batch in BATCHES:
        run(batch, 16, 8)
        short, long = (min(run(batch, 16, tokens) for _ in range(repeats)) for tokens in (SHORT, LONG))
        found["decode_ms"][str(batch)] = round((long - short) / (LONG - SHORT) * 1e3, 3)
        if busy:
            worked = [busy_ms(lambda tokens=tokens, batch=batch: run(batch, 16, tokens)) for tokens in (SHORT, LONG)]
            found.setdefault("busy_ms", {})[str(batch)] = round((worked[1] - worked[0]) / (LONG - SHORT), 3)
        print("FOUND " + json.dumps(found), flush=True)
    run(*PREFILL, 1)
    found["prefill_tokens_per_second"] = round(PREFILL[0] * PREFILL[1] / min(run(*PREFILL, 1) for _ in range(repeats)))
    return found


def busy_ms(run: Callable[[], Any]) -> float:
    """Milliseconds in which at least one kernel or copy ran on the GPU."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    cuda = torch.profiler.DeviceType.CUDA
    spans = sorted((each.time_range.start, each.time_range.end) for each in seen.events() if each.device_type == cuda)
    total, until = 0.0, 0.0
    for begin, end in spans:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total / 1e3


def run_mode(folder: Path, mode: str, tiny: bool, seconds: float, busy: bool = False) -> dict[str, Any]:
    """One mode in a process of its own; what it found, or the end of what it said.

    Args:
        folder: the model's.
        mode: see the module.
        tiny: on a CPU.
        seconds: after which it is ended, with every process that it started.
        busy: see `measure`.
    """
    report = folder / f"{mode}.jsonl"
    environment = (
        os.environ
        | {
            "VLLM_PLUGINS": "" if mode == "stock" else "moe_oracle",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "MOE_ORACLE_REPORT": str(report),
        }
        | ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if busy else {})
    )
    command = [sys.executable, __file__, "--inner", str(folder), "--mode", mode, *(["--tiny"] if tiny else [])]
    command += ["--busy"] * busy
    log = folder / f"{mode}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            process.wait(seconds)
            over = ""
        except subprocess.TimeoutExpired:
            over = f"ended after {seconds:.0f} s"
        finally:
            if process.poll() is None:  # its own session: nothing else is in it
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = log.read_text(errors="replace")
    found = [line.removeprefix("FOUND ") for line in said.splitlines() if line.startswith("FOUND ")]
    row: dict[str, Any] = {"mode": mode, **(json.loads(found[-1]) if found else {})}
    if over or process.returncode:
        row["error"] = over or f"exit status {process.returncode}"
        row["end"] = "\n".join([*_errors(said)[:ERRORS], said[-LAST_WORDS:]])
    if report.exists():
        record = json.loads(report.read_text().splitlines()[-1])
        row["served"] = f"{record['served']} of {record['moe_layers']}"
        row["groups"] = [
            {"layers": group["count"], **group["decision"], "problem": group["problem"]["scheme"]}
            for group in record["groups"]
        ]
    # With their times: what a start spends them on.
    row["start"] = [
        line[:160]
        for line in said.splitlines()
        if re.search(r" took |Loading|Graph captur|compil", line, re.IGNORECASE)
    ]
    row["said"] = [line.split("moe_oracle: ", 1)[1][:300] for line in said.splitlines() if "moe_oracle: " in line]
    return row


def _errors(said: str) -> list[str]:
    return [line[:400] for line in said.splitlines() if re.search(r"\b[A-Za-z]*Error\b", line)]


def conditions(chosen: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    import torch
    import vllm

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "layers": chosen.layers,
        "decode": f"slope between {SHORT} and {LONG} tokens after prompts of 16, best of repeats, in ms per step",
        "prefill": f"{PREFILL[0]} prompts of {PREFILL[1]} tokens, 8192 tokens a step at most",
        "command": "python " + " ".join(["tests/gpu/serve.py", *sys.argv[1:]]),
    }


def line(model: str, row: dict[str, Any]) -> str:
    """One row of the table that is printed last."""
    steps = "  ".join(f"{row.get('decode_ms', {}).get(str(batch), float('nan')):8.3f}" for batch in BATCHES)
    backends = ", ".join(sorted({group["backend"] for group in row.get("groups", [])}))
    return (
        f"{model:<12} {row['mode']:<16} {row.get('start_seconds', float('nan')):7.1f} s  {steps} ms  "
        f"{row.get('prefill_tokens_per_second', 0):>8} tok/s  {backends} {row.get('error', '')}"
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all")
    parser.add_argument("--mode", action="append", help="stock, auto or a backend's name; default: stock and auto")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=240.0, help="for each mode, after which it is ended")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--busy", action="store_true", help="also the GPU's time in a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inner:
        print("FOUND " + json.dumps(measure(chosen.inner, chosen.mode[0], chosen.tiny, chosen.busy)), flush=True)
        return 0
    found: dict[str, Any] = {"conditions": conditions(chosen), "models": {}}
    lines = []
    for model in chosen.model or MODELS:
        rows = found["models"][model] = []
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(model, chosen.layers, chosen.tiny)
            Path(folder, "config.json").write_text(json.dumps(config))
            for mode in chosen.mode or ("stock", "auto"):
                begin = time.perf_counter()
                row = run_mode(Path(folder), mode, chosen.tiny, chosen.seconds, chosen.busy)
                row["wall_seconds"] = round(time.perf_counter() - begin, 1)
                rows.append(row)
                lines.append(line(model, row))
                print(lines[-1], flush=True)
                if "error" in row:
                    print(row["end"], flush=True)
                if chosen.json:
                    chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(["", f"{'model':<12} {'mode':<16}     start    decode step at {BATCHES}  prefill", *lines]))
    return int(any("error" in row for rows in found["models"].values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
