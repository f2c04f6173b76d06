"""A whole model with random weights through vLLM's own benchmarks, without the plugin and with it.

    python tests/gpu/serve.py --model qwen3-mxfp8 --model qwen3-gptq --model gpt-oss --json serve.json

Shapes of Qwen3-30B-A3B and gpt-oss-20b with fewer layers, weights that vLLM makes up (``--load-format dummy``),
compiled as by default, CUDA graphs of the batch sizes that are timed. Each mode runs in a process of its own:
``stock`` is vLLM without the plugin, ``auto`` with it, and any other name is a backend of ours for every layer. The
modes of a model share vLLM's compile cache, so that all but the first start warm.

What is timed is what ``vllm bench latency`` and ``vllm bench throughput`` run: their `main`, with their arguments and
their files of results. Only the engine is made once for all of them, since a start takes half a minute and more: the
options that describe it are the same each time. A decode step is the difference of the medians of two latency
benchmarks over that of their output lengths; prefill is a throughput benchmark with one token to generate. The JSON
file is written after each mode; one that is ended keeps what it has measured.

Nothing else should run on the machine's GPU and cores: a start compiles for half a minute, on every core.

``--ranks 2`` serves larger models over two GPUs (``CUDA_VISIBLE_DEVICES`` says which), tensor-parallel or, with
``--expert-parallel``, with whole experts on each rank:

    python tests/gpu/serve.py --ranks 2 --model gpt-oss-120b --steps --routing uniform --routing skewed --json FILE

Weights that vLLM makes up route as no model does: a router's bias that is larger than all its products sends every
token to the same experts. ``--routing`` writes other routers, on all ranks the same, before anything is timed:
``uniform``, where each layer's choice depends on the token alone, and ``skewed``, where the busiest of 128 experts gets
three times the mean. With several, each is timed on the same engine.

``--busy`` also finds how long the GPU of each rank works in a decode step, and on what, from the intervals of its
kernels, after the steps of a routing were timed. What a step takes beyond that is vLLM's host side, and the exchange
between ranks: a kernel that exchanges waits for the other ranks, and is left out.

A mode can be named several times: ``--mode stock --mode auto --mode stock --mode auto`` are turns.

On a CPU a tiny model goes the same way: add ``--tiny``. ``--write FOLDER`` only writes the models, which
``vllm-moe-oracle ab`` serves with ``--load-format dummy``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.lib import checkpoints  # noqa: E402

CONFIGS = ROOT / "tests" / "golden" / "configs"

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False}
PLAIN_ROUTERS = {"dynamic": {r"-:.*\.mlp\.gate$": {}}}
"""Of a GPTQ config: `write_routers` cannot write quantized ones."""
MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "model.layers.*.mlp.gate"]}
MODELS: dict[str, tuple[Path, dict[str, Any]]] = {
    "qwen3-mxfp8": (ROOT / "examples" / "qwen3-30b-a3b-mxfp8.json", {}),
    "qwen3-gptq": (CONFIGS / "qwen3-30b-a3b.json", {"quantization_config": GPTQ, "torch_dtype": "bfloat16"}),
    "gpt-oss": (CONFIGS / "gpt-oss-20b.json", {"torch_dtype": "bfloat16"}),
    "gpt-oss-120b": (CONFIGS / "gpt-oss-20b.json", {"torch_dtype": "bfloat16", "num_local_experts": 128}),
    "qwen3-235b-mxfp8": (CONFIGS / "qwen3-235b-a22b.json", {"quantization_config": MXFP8, "torch_dtype": "bfloat16"}),
    "qwen3-235b-gptq": (
        CONFIGS / "qwen3-235b-a22b.json",
        {"quantization_config": GPTQ | PLAIN_ROUTERS, "torch_dtype": "bfloat16"},
    ),
    "kimi-k2": (CONFIGS / "kimi-k2-thinking.json", {"torch_dtype": "bfloat16"}),
}
"""Config and what is changed in it, by the name of `--model`."""
MOST_LAYERS = {"kimi-k2": 8}
"""Of models whose layers take 10 GB each."""
ALONE = ("qwen3-mxfp8", "qwen3-gptq", "gpt-oss")
"""Models that are served by default."""

TINY: dict[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 16384, "intermediate_size": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip
"""What makes a config one for a CPU; each family's own names of the rest are found in it."""
_TINY_SIZES = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_local_experts": 8,
               "num_experts_per_tok": 2, "experts_per_token": 2}  # fmt: skip

PREFILL = (32, 1024)
BATCHES = (1, 8, 64)
"""`--batch`'s default."""
PROMPT, SHORT, LONG = 32, 16, 144
"""Tokens of a latency benchmark's prompts, and what two of them generate."""
MIXED = (128, 128)
"""Tokens of a throughput benchmark's prompts, and what it generates."""
WARMUPS, ITERATIONS = 2, 9
"""Of a latency benchmark; the second is `--iterations`'s default."""
ROUTINGS = ("given", "uniform", "skewed")
"""Of `--routing`; the first leaves the routers as they are."""
BUSY_SHORT, BUSY_LONG = 8, 40
"""Tokens that are generated under the profiler, which keeps every kernel."""
SKEW = 0.25
"""Deviation of the logarithm of an expert's logits' size, where routing is skewed. Of 128 experts and top-8, the
busiest gets 3.2 times the mean, and two get less than a tenth; of 384 experts 6.6 times, and 61 (20,000 tokens)."""
NAMED = 14
"""Kernels, those that take the longest, whose times are kept."""
EXCHANGES = ("cross_device_reduce", "nccl", "multimem", "all_reduce", "allreduce")
"""Parts of the names of kernels that wait for other ranks."""
LAST_WORDS, ERRORS = 1500, 12
"""Characters of the end of a log, and lines with an error's name, that are kept of a mode that failed."""


@dataclasses.dataclass(frozen=True)
class Run:
    """How a model is served and timed.

    Attributes:
        tiny: on a CPU.
        ranks: GPUs.
        expert_parallel: whether a rank has whole experts.
        batches: prompts of the latency benchmarks.
        iterations: of each.
        steps: decode steps and prefill alone, without the mixed throughput.
        routings: of `ROUTINGS`, one after the other.
        busy: the time in which the GPU works, too.
    """

    tiny: bool = False
    ranks: int = 1
    expert_parallel: bool = False
    batches: tuple[int, ...] = BATCHES
    iterations: int = 2
    steps: bool = False
    routings: tuple[str, ...] = ROUTINGS[:1]
    busy: bool = False


def config_of(model: str, layers: int, tiny: bool) -> dict[str, Any]:
    """The model's config.json with so many layers."""
    path, changes = MODELS[model]
    layers = min(layers, MOST_LAYERS.get(model, layers))
    config: dict[str, Any] = json.loads(path.read_text()) | changes | {"num_hidden_layers": layers}
    if tiny:
        config |= TINY | {key: value for key, value in _TINY_SIZES.items() if key in config}
    if model.startswith("gpt-oss"):  # every other layer attends to a window
        config["layer_types"] = ["sliding_attention" if index % 2 == 0 else "full_attention" for index in range(layers)]
        config |= {"sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150000}
    return config


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """The model's files: its config, and a tokenizer of all its tokens, which benchmarks make their prompts with."""
    (folder / "config.json").write_text(json.dumps(config))
    checkpoints.write_word_tokenizer(folder, config["vocab_size"])


def engine_options(folder: str, mode: str, run: Run) -> list[str]:
    """The engine, as vLLM's benchmarks are told about it on their command lines."""
    # The batch sizes that are timed, and no others: every size is compiled and captured while the engine starts.
    graphs = json.dumps({"cudagraph_capture_sizes": list(run.batches)})
    oracle = {} if mode in ("stock", "auto") else {"backend": mode}
    return [
        "--model", folder, "--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048",
        "--max-num-seqs", str(max(run.batches)), "--max-num-batched-tokens", "8192", "--no-enable-prefix-caching",
        *([] if run.tiny else ["--compilation-config", graphs]),
        *(["--kv-cache-memory-bytes", str(256 << 20)] if run.tiny else ["--gpu-memory-utilization", "0.6"]),
        *(["--tensor-parallel-size", str(run.ranks)] if run.ranks > 1 else []),
        *(["--enable-expert-parallel"] if run.expert_parallel else []),
        *(["--additional-config", json.dumps({"moe_oracle": oracle})] if oracle else []),
    ]  # fmt: skip


def one_engine(options: list[str]) -> Any:
    """An engine, which is from now on what vLLM's benchmarks get when they make theirs."""
    from vllm import LLM
    from vllm.benchmarks import latency
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    latency.add_cli_args(parser)
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(options)))
    LLM.from_engine_args = classmethod(lambda cls, *_, **__: llm)  # type: ignore[method-assign]
    return llm


def benchmark(name: str, options: list[str], **more: Any) -> dict[str, Any]:
    """What ``vllm bench NAME`` writes with these options.

    Args:
        name: ``latency`` or ``throughput``.
        options: that describe the engine.
        more: the benchmark's own, by name.
    """
    from importlib import import_module

    from vllm.utils.argparse_utils import FlexibleArgumentParser

    module = import_module(f"vllm.benchmarks.{name}")
    parser = FlexibleArgumentParser()
    module.add_cli_args(parser)
    words = [word for key, value in more.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found.json")
        module.main(parser.parse_args([*options, *words, "--disable-detokenize", "--output-json", str(path)]))
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def latencies(options: list[str], batch: int, tokens: int, iterations: int) -> list[float]:
    """Quartiles of the seconds that vLLM's latency benchmark takes for a batch."""
    found = benchmark(
        "latency", options, input_len=PROMPT, output_len=tokens, batch_size=batch,
        num_iters_warmup=WARMUPS, num_iters=iterations,
    )  # fmt: skip
    return [round(found["percentiles"][part], 6) for part in ("25", "50", "75")]


def throughput(options: list[str], prompts: int, prompt: int, tokens: int) -> int:
    """Tokens a second, of prompts and generated ones, by vLLM's throughput benchmark."""
    found = benchmark(
        "throughput", options, dataset_name="random", random_input_len=prompt, random_output_len=tokens,
        num_prompts=prompts, num_warmups=prompts,
    )  # fmt: skip
    if found["total_num_tokens"] != prompts * (prompt + tokens):
        raise ValueError(f"{found['total_num_tokens']} tokens, not {prompts} times {prompt} and {tokens}")
    return round(found["tokens_per_second"])


def write_routers(model: Any, routing: str) -> int:
    """Gives the model routers that choose by the token: the tokens of a batch go to different experts.

    Called in every rank's process; all write the same numbers.

    Args:
        model: the module that a rank serves.
        routing: ``uniform`` or ``skewed``, see the module.

    Returns:
        How many routers it has.

    Raises:
        ValueError: its routers are not there as they are in a file.
    """
    import torch

    written = 0
    for name, parameter in model.named_parameters():
        part = name.rsplit(".", 2)[-2]
        if "norm" in part and name.endswith(".weight"):
            parameter.data.fill_(1.0)  # normalized inputs, and logits of about one
        elif part in ("gate", "router"):
            if not name.endswith(".weight"):
                parameter.data.zero_()  # biases
                continue
            if parameter.dim() != 2:
                raise ValueError(f"{name} was packed: vLLM's linear layers on a CPU keep no weights to write")
            experts, hidden = parameter.shape
            numbers = torch.Generator().manual_seed(written)
            rows = torch.nn.functional.normalize(torch.randn(experts, hidden, generator=numbers))
            if routing == "skewed":
                rows *= (SKEW * torch.randn(experts, 1, generator=numbers)).exp()
            parameter.data.copy_(rows)
            written += 1
    return written


def measure(folder: str, mode: str, run: Run) -> Iterator[dict[str, Any]]:
    """Loads the model and times it; in a process of its own. Each time all that is known.

    Args:
        folder: the model's.
        mode: see the module.
        run: how.

    Raises:
        ValueError: a rank has no router.
    """
    options = engine_options(folder, mode, run)
    begin = time.perf_counter()
    llm = one_engine(options)
    found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - begin, 1)}
    yield found
    for routing in run.routings:
        timed = found
        if routing != ROUTINGS[0]:
            routers = llm.apply_model(functools.partial(write_routers, routing=routing))
            if not all(routers):
                raise ValueError(
                    f"ranks wrote {routers} routers: a quantized router has no weight to write; --routing {ROUTINGS[0]}"
                )
            timed = found.setdefault("routing", {}).setdefault(routing, {"routers": routers})
        for _ in time_model(llm, options, run, timed):
            yield found


def time_model(llm: Any, options: list[str], run: Run, found: dict[str, Any]) -> Iterator[None]:
    """Times the engine as it is, and puts each number into `found`."""
    found["prefill_tokens_per_second"] = throughput(options, *PREFILL, 1)
    yield
    for batch in run.batches:
        short, long = (latencies(options, batch, tokens, run.iterations) for tokens in (SHORT, LONG))
        step = (long[1] - short[1]) / (LONG - SHORT) * 1e3
        # Half of what lies between the quartiles: a median's own spread is less.
        noise = sum((each[2] - each[0]) / 2 for each in (short, long)) / (LONG - SHORT) * 1e3
        found.setdefault("latency_s", {})[str(batch)] = {str(SHORT): short, str(LONG): long}
        found.setdefault("decode_ms", {})[str(batch)] = round(step, 4)
        found.setdefault("noise_ms", {})[str(batch)] = round(noise, 4)
        if not run.steps:
            found.setdefault("tokens_per_second", {})[str(batch)] = throughput(options, batch, *MIXED)
        yield
    for batch in run.batches if run.busy else ():
        ranks = list(zip(*(kernels_ms(llm, batch, tokens) for tokens in (BUSY_SHORT, BUSY_LONG)), strict=True))
        steps = BUSY_LONG - BUSY_SHORT
        found.setdefault("busy_ms", {})[str(batch)] = round((ranks[0][1][0] - ranks[0][0][0]) / steps, 4)
        found.setdefault("busy_ms_of_ranks", {})[str(batch)] = [
            round((more - some) / steps, 4) for (some, _), (more, _) in ranks
        ]
        (_, first), (_, names) = ranks[0]
        each = {name: round((ms - first.get(name, 0.0)) / steps, 4) for name, ms in names.items()}
        longest = sorted(each.items(), key=lambda pair: -pair[1])[:NAMED]
        found.setdefault("kernels_ms", {})[str(batch)] = dict(longest)
        yield


def start_profiler(model: Any) -> None:
    """Records this process's kernels from now on; called in every rank's process. A CPU has none."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    model.kernels_seen = torch.profiler.profile(activities=[activity])
    model.kernels_seen.start()


def stop_profiler(model: Any) -> tuple[float, dict[str, float]]:
    """Milliseconds since `start_profiler` in which at least one kernel or copy of this process ran, and each kernel's
    own. Kernels of `EXCHANGES` count in the second alone."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seen, model.kernels_seen = model.kernels_seen, None
    seen.stop()
    cuda = torch.profiler.DeviceType.CUDA
    events = [each for each in seen.events() if each.device_type == cuda]
    total, until = 0.0, 0.0
    names: dict[str, float] = {}
    for begin, end, name in sorted((each.time_range.start, each.time_range.end, each.name) for each in events):
        if not any(part in name for part in EXCHANGES):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        names[name[:80]] = names.get(name[:80], 0.0) + (end - begin) / 1e3
    return total / 1e3, names


def kernels_ms(llm: Any, batch: int, tokens: int) -> list[tuple[float, dict[str, float]]]:
    """What `stop_profiler` finds in each rank's process while a batch is generated."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [(7 * row + at) % 500 for at in range(PROMPT)]} for row in range(batch)]
    parameters = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    llm.generate(prompts, parameters, use_tqdm=False)
    # A rank imports a function by its module's name. This module is `__main__` here, and another program is there.
    from tests.gpu import serve as importable

    llm.apply_model(importable.start_profiler)
    llm.generate(prompts, parameters, use_tqdm=False)
    found: list[tuple[float, dict[str, float]]] = llm.apply_model(importable.stop_profiler)
    return found


def run_mode(folder: Path, mode: str, run: Run, seconds: float) -> dict[str, Any]:
    """One mode in a process of its own; what it found, or the end of what it said.

    Args:
        folder: the model's.
        mode: see the module.
        run: how.
        seconds: after which it is ended, with every process that it started.
    """
    report = folder / f"{mode}.jsonl"
    environment = os.environ | {
        "VLLM_PLUGINS": "" if mode == "stock" else "moe_oracle",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions are sent to the ranks
        "MOE_ORACLE_REPORT": str(report),
    }
    command = [sys.executable, __file__, "--inner", str(folder), "--mode", mode]
    command += ["--run", json.dumps(dataclasses.asdict(run))]
    report.unlink(missing_ok=True)  # of an earlier turn
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
        "ranks": chosen.ranks,
        "expert_parallel": chosen.expert_parallel,
        "decode": (
            f"vllm bench latency, prompts of {PROMPT} tokens, medians of {chosen.iterations}: the difference between "
            f"{LONG} and {SHORT} generated tokens, in ms a step"
        ),
        "mixed": f"vllm bench throughput, as many prompts of {MIXED[0]} tokens as the batch, {MIXED[1]} generated",
        "prefill": (
            f"vllm bench throughput, {PREFILL[0]} prompts of {PREFILL[1]} tokens, one generated, 8192 tokens a step at "
            "most"
        ),
        "command": "python " + " ".join(["tests/gpu/serve.py", *sys.argv[1:]]),
    }


def write(found: dict[str, Any], path: Path | None) -> None:
    """What is known so far."""
    if path:
        path.write_text(json.dumps(found, indent=1) + "\n")


def line(model: str, row: dict[str, Any], batches: Sequence[int]) -> str:
    """One row of the table that is printed last."""
    timed = row.get("routing") or {ROUTINGS[0]: row}
    lists: list[str] = []
    prefill = []
    for routing, found in timed.items():
        own = [f"{found.get('decode_ms', {}).get(str(batch), float('nan')):8.3f}" for batch in batches]
        lists.append(f"{routing:<8}" + " ".join(own))
        if "busy_ms" in found:
            lists[-1] += " GPU" + "".join(f" {found['busy_ms'].get(str(batch), float('nan')):.3f}" for batch in batches)
        prefill.append(f"{found.get('prefill_tokens_per_second', 0):>8}")
    steps = "  ".join(lists)
    backends = ", ".join(sorted({group["backend"] for group in row.get("groups", [])}))
    return (
        f"{model:<12} {row['mode']:<16} {row.get('start_seconds', float('nan')):7.1f} s  {steps} ms  "
        f"{' '.join(prefill)} tok/s  {backends} {row.get('error', '')}"
    )


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS), help=f"default: {', '.join(ALONE)}")
    parser.add_argument("--mode", action="append", help="stock, auto or a backend's name; default: stock and auto")
    parser.add_argument("--layers", type=int, default=16, help="fewer, where a layer is too large for so many")
    parser.add_argument("--seconds", type=float, default=240.0, help="for each mode, after which it is ended")
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help="of each latency benchmark")
    parser.add_argument("--batch", type=int, action="append", help=f"prompts of a step; default: {BATCHES}")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each rank")
    parser.add_argument("--routing", action="append", choices=ROUTINGS, help=f"default: {ROUTINGS[0]}")
    parser.add_argument("--steps", action="store_true", help="decode steps and prefill alone, no mixed throughput")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--busy", action="store_true", help="also the GPU's time in a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="only write the models into folders in this one")
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inner:
        for known in measure(chosen.inner, chosen.mode[0], Run(**chosen.run)):
            print("FOUND " + json.dumps(known), flush=True)
        return 0
    # An engine has a session of its own: it outlives this process, and keeps its GPUs, unless `run_mode` ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    models = chosen.model or ALONE
    if chosen.write:
        for model in models:
            folder = chosen.write / model
            folder.mkdir(parents=True)
            write_model(folder, config_of(model, chosen.layers, chosen.tiny))
        return 0
    run = Run(
        chosen.tiny, chosen.ranks, chosen.expert_parallel, tuple(chosen.batch or BATCHES), chosen.iterations,
        chosen.steps, tuple(chosen.routing or ROUTINGS[:1]), chosen.busy,
    )  # fmt: skip
    found: dict[str, Any] = {"conditions": conditions(chosen), "models": {}}
    lines = []
    for model in models:
        rows = found["models"][model] = []
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(model, chosen.layers, chosen.tiny)
            write_model(Path(folder), config)
            for mode in chosen.mode or ("stock", "auto"):
                begin = time.perf_counter()
                row = run_mode(Path(folder), mode, run, chosen.seconds)
                row["wall_seconds"] = round(time.perf_counter() - begin, 1)
                if "error" in row:
                    print(row["end"], flush=True)
                rows.append(row)
                lines.append(line(model, row, run.batches))
                print(lines[-1], flush=True)
                write(found, chosen.json)
    title = f"{'model':<12} {'mode':<16}     start    decode step at {run.batches}  prefill"
    print("\n".join(["", title, *lines]))
    return int(any("error" in row for rows in found["models"].values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
