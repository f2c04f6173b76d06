"""Our kernels against stock vLLM's in one run: same GPU, cold L2, CUDA graphs, order interleaved, medians.

    VLLM_PLUGINS= python tests/gpu/bench_kernels.py --cell mxfp8:qwen3_30b --tokens 1,16,256 --json out.json

A cell is scheme:shape, as in tune_kernels.py. Each stock backend (`--stock auto,marlin`; names of --moe-backend) gets
random weights in the checkpoint's format, goes through vLLM's own conversion, and its `apply` is timed with routed ids
given, as ours is; a monolithic backend is given logits and does the routing itself, which costs it a few microseconds.
`--warm` builds and runs everything once and times nothing (compiles; several such processes may run at once).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch
import triton
import tune_kernels
from tune_kernels import SHAPES

from vllm_moe_oracle.kernels import config as configs

COPY_RATE = 4.3e12  # bytes per second, device-to-device copy, read and written

Run = Callable[[], Any]


def floor_us(scheme: str, shape: str, tokens: int) -> float:
    """Microseconds to read the distinct experts' codes and scales, expected under uniform routing, at COPY_RATE."""
    experts, top_k, hidden, inner, activation, _ = SHAPES[shape]
    format, _, group = scheme.partition("_")
    bits = 4 if format in ("int4", "mxfp4") else 8
    per_weight = bits / 8 + (1 / 32 if format.startswith("mx") else 2 / int(group))
    weights = hidden * inner * (2 if activation == "relu2" else 3)
    return configs.active_experts(experts, top_k, tokens) * weights * per_weight / COPY_RATE * 1e6


def start_vllm() -> None:
    """A process group of one and a workspace, as a worker has them."""
    import vllm.model_executor.layers.fused_moe.oracle.mxfp4 as mxfp4_oracle
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    # It asks the model's config, which a layer by itself has not.
    mxfp4_oracle._user_moe_activation_override = lambda: None
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cuda"))):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{20000 + os.getpid() % 20000}", 0, "nccl")
        initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device("cuda:0"))


def checkpoint_config(scheme: str) -> Any:
    """vLLM's quantisation config of a checkpoint in this scheme."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    if scheme == "mxfp8":
        inner = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "exclude_modules": []}
        return get_quantization_config("modelopt_mxfp8").from_config({"quantization": inner})
    if scheme == "mxfp4":
        return get_quantization_config("gpt_oss_mxfp4").from_config({"quant_method": "mxfp4"})
    bits, group = scheme.removeprefix("int").split("_")
    fields = {"bits": int(bits), "group_size": int(group), "desc_act": False, "sym": True, "lm_head": False}
    fields |= {"quant_method": "gptq", "checkpoint_format": "gptq", "dynamic": {}}
    return get_quantization_config("auto_gptq").from_config(fields)


class Stock:
    """One stock backend's layer for a cell."""

    def __init__(self, scheme: str, shape: str, backend: str) -> None:
        from vllm.config import DeviceConfig, KernelConfig, VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import layer as moe

        experts, top_k, hidden, inner, activation, bias = SHAPES[shape]
        self.config = VllmConfig(
            device_config=DeviceConfig(device="cuda"), kernel_config=KernelConfig(moe_backend=backend)
        )
        self.context = set_current_vllm_config(self.config)
        self.context.__enter__()
        torch.set_default_dtype(torch.bfloat16)
        make = getattr(moe, "FusedMoEFactory", None) or moe.FusedMoE
        plain = activation == "relu2"
        with torch.device("cuda"):
            runner = make(
                num_experts=experts, top_k=top_k, hidden_size=hidden, intermediate_size=inner, renormalize=True,
                params_dtype=torch.bfloat16, quant_config=checkpoint_config(scheme), has_bias=bias,
                prefix="model.layers.0.mlp.experts", activation="relu2_no_mul" if plain else activation,
                ckpt_names=("up_proj", "down_proj", None) if plain else ("gate_proj", "down_proj", "up_proj"),
                swiglu_limit=7.0 if activation == "swigluoai" else None,
            )  # fmt: skip
        self.layer = getattr(runner, "routed_experts", runner)
        self.fill()
        with torch.device("cuda"):
            self.layer.quant_method.process_weights_after_loading(self.layer)
        kernel = getattr(self.layer.quant_method, "moe_kernel", None)
        self.name = type(kernel.fused_experts if kernel is not None else self.layer.quant_method).__name__

    def fill(self) -> None:
        for name, parameter in self.layer.named_parameters():
            data = parameter.data
            if data.dtype == torch.uint8:
                data.random_(*((116, 121) if "scale" in name else (0, 256)))
            elif data.dtype == torch.int32:
                data.random_(-(2**31), 2**31 - 1)
            elif data.dtype == torch.float8_e4m3fn:
                data.view(torch.uint8).random_(0, 120)
            elif "scale" in name:
                data.uniform_(0.001, 0.01)
            else:
                data.normal_(0, 0.02)

    def prepare(self, shape: str, tokens: int) -> Run:
        """A function that runs the layer once."""
        from vllm.forward_context import set_forward_context

        layer, config, method = self.layer, self.config, self.layer.quant_method
        x, router, ids = tune_kernels.routed(tokens, shape)
        width = layer.moe_config.hidden_dim
        if width > x.shape[1]:  # vLLM's runner pads x where the backend asks for it
            x = torch.nn.functional.pad(x, (0, width - x.shape[1]))
        logits = torch.randn(tokens, SHAPES[shape][0], device="cuda", dtype=torch.bfloat16)

        def run() -> Any:
            with set_forward_context(None, config, num_tokens=tokens):
                if method.is_monolithic:
                    return method.apply_monolithic(layer, x, logits)
                return method.apply(layer, x, router, ids, None, None)

        if not torch.isfinite(run().float()).all():
            raise ValueError("the output is not finite")
        return run

    def close(self) -> None:
        self.context.__exit__(None, None, None)
        del self.layer


def capture(run: Run) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_all(graphs: dict[str, torch.cuda.CUDAGraph], flush: torch.Tensor, replays: int) -> dict[str, list[float]]:
    """Microseconds of each replay, the graphs taking turns; the first three rounds are dropped."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays + 3):
        for name, graph in graphs.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: values[3:] for name, values in times.items()}


def bench_cell(cell: str, tokens: list[int], backends: list[str], replays: int, warm: bool) -> dict[str, Any]:
    """One row of results; a backend that refuses is a result too."""
    scheme, shape = cell.split(":")
    top_k = SHAPES[shape][1]
    row: dict[str, Any] = {"cell": cell, "experts": {}, "errors": {}, "us": {}, "spread": {}, "config": {}, "floor": {}}
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    ours = tune_kernels.stored(scheme, shape)
    layers: dict[str, Stock] = {}
    for backend in backends:
        try:
            layers[backend] = Stock(scheme, shape, backend)
            row["experts"][backend] = layers[backend].name
        except Exception as error:
            row["errors"][backend] = f"{type(error).__name__}: {error}"[:300]
    for count in tokens:
        config = configs.choose(ours, top_k, count)
        runs: dict[str, Run] = {"ours": tune_kernels.prepare(ours, shape, count, config)}
        graphs = {}
        for backend, layer in layers.items():
            try:
                runs[backend] = layer.prepare(shape, count)
            except Exception as error:
                row["errors"][f"{backend} {count}"] = f"{type(error).__name__}: {error}"[:300]
        if warm:
            continue
        graphs = {name: capture(run) for name, run in runs.items()}
        times = time_all(graphs, flush, replays)
        row["us"][count] = {name: round(statistics.median(values), 1) for name, values in times.items()}
        row["spread"][count] = {
            name: [round(q, 1) for q in statistics.quantiles(values, n=4)[::2]] for name, values in times.items()
        }
        row["config"][count] = tune_kernels.describe(config)
        row["floor"][count] = round(floor_us(scheme, shape, count), 1)
    for layer in layers.values():
        layer.close()
    return row


def mean_ratio(rows: list[dict[str, Any]], counts: list[int], pick: Callable[[str], bool], best: bool) -> float | None:
    """Geometric mean of stock's time over ours: the default's, or the fastest stock backend's."""
    ratios = []
    for row in rows:
        for count, us in row["us"].items():
            stock = [value for name, value in us.items() if name != "ours" and (best or name == "auto")]
            if int(count) in counts and pick(row["cell"]) and stock:
                ratios.append(min(stock) / us["ours"])
    return math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None


def table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        parts = []
        for count, us in row["us"].items():
            stock = [value for name, value in us.items() if name != "ours"]
            against = f"{us.get('auto', math.nan) / us['ours']:.2f}/{min(stock) / us['ours']:.2f}" if stock else "-"
            parts.append(f"{count}: {us['ours']:.0f} {against}")
        lines.append(f"{row['cell']:24s} " + "  ".join(parts))
    lines.append("(tokens: our us, default's time / ours, best stock's time / ours)")
    for name, counts in (("1", [1]), ("2-4", [2, 4]), ("8-64", [8, 16, 32, 64]), ("128-512", [128, 256, 512])):
        for bits, pick in (
            ("4-bit", lambda c: "4" in c[:5]),
            ("8-bit", lambda c: "8" in c[:5]),
            ("all", lambda c: True),
        ):
            default, best = (mean_ratio(rows, counts, pick, flag) for flag in (False, True))
            if default and best:
                lines.append(f"{name:8s} {bits:6s} against the default {default:.2f}, against the best {best:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", required=True)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--stock", default="auto,marlin")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no further cell after this long")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.time()
    start_vllm()
    import vllm

    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "vllm": vllm.__version__,
        "torch": torch.__version__, "triton": triton.__version__, "replays": args.replays,
        "conditions": "CUDA graphs, 256 MiB written before each replay, backends taking turns, medians in microseconds",
        "rows": [],
    }  # fmt: skip
    for cell in args.cell:
        if time.time() - start > args.seconds:
            break
        tokens = [int(count) for count in args.tokens.split(",")]
        row = bench_cell(cell, tokens, args.stock.split(","), args.replays, args.warm)
        torch.cuda.empty_cache()
        report["rows"].append(row)
        print(f"{time.time() - start:5.0f} s  {cell} {row['experts']} {row['errors']}"[:400], flush=True)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if not args.warm:
        print(table(report["rows"]))


if __name__ == "__main__":
    main()
