"""What fp8 activations cost and save: one MXFP4 layer with them beside the same layer with 16-bit activations.

    PYTHONPATH=.:tests/gpu:tests python tests/gpu/fp8_layer.py [--tokens 1024,4096,16384] [--json FILE]

gpt-oss-20b's layer (32 experts, 4 a token, 2880 x 2880), random weights, tokens drawn from a normal distribution and
the same with 1 % of the channels 50 times larger. Errors are relative L2 errors against float64 with 16-bit
activations, of up to 512 tokens. Times are of CUDA graphs, by turns, after 256 MiB were written: medians, quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from kernel_cases import E2M1, Case, Layer
from test_fp8 import error, reference

from vllm_moe_oracle.kernels import fp8_moe
from vllm_moe_oracle.kernels.fp8_weights import Fp8Matrix, Fp8Weights, convert_expert
from vllm_moe_oracle.kernels.fused_moe import fused_moe, plan_workspace
from vllm_moe_oracle.kernels.weights import OwnWeights, allocate, load_expert

CASE = Case("gpt-oss-20b", "mxfp4", 32, "swigluoai", bias=True, limit=7.0, experts=32, top_k=4, hidden=2880,
            inner=2880, spread=(119, 123))  # fmt: skip


class Dequantised:
    """A projection in float32, one expert at a time, from codes and scales as the format defines them."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self._codes, self._scales = codes, scales

    def __getitem__(self, expert: int) -> torch.Tensor:
        codes = self._codes[expert]
        table = torch.tensor(E2M1 + [-value for value in E2M1], device=codes.device)
        values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
        return torch.ldexp(values, self._scales[expert].int().repeat_interleave(32, -1) - 127)


def random_layer(case: Case) -> Layer:
    """As `kernel_cases.make_layer`, made on the GPU and in float32 only when an expert is asked for."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    layer = Layer()
    for which in ("w13", "w2"):
        rows, columns = (case.hidden, case.inner) if which == "w2" else (case.inner * 2, case.hidden)
        layer.codes[which] = torch.randint(0, 256, (case.experts, rows, columns // 2), dtype=torch.uint8, **options)
        shape = (case.experts, rows, columns // 32)
        layer.scales[which] = torch.randint(*case.spread, shape, dtype=torch.uint8, **options)
        layer.bias[which] = torch.randn(case.experts, rows, **options)
        layer.matrix[which] = Dequantised(layer.codes[which], layer.scales[which])  # type: ignore[assignment]
    return layer


def folded(case: Case, layer: Layer) -> Fp8Weights:
    """The layer as the kernels for fp8 activations store it."""
    matrices = []
    for which in ("w13", "w2"):
        parts = layer.codes[which], layer.scales[which], layer.bias[which]
        made = [convert_expert(which, *(part[expert] for part in parts)) for expert in range(case.experts)]
        matrices.append(Fp8Matrix(*(torch.stack(part) for part in zip(*made, strict=True))))
    return Fp8Weights(*matrices, case.dtype)


def sixteen_bit(case: Case, layer: Layer) -> OwnWeights:
    """The layer as the kernels for 16-bit activations store it."""
    weights = allocate("mxfp4", case.experts, case.hidden, case.inner, bias=case.bias, device="cuda")
    for which in ("w13", "w2"):
        for expert in range(case.experts):
            load_expert(weights, which, expert, layer.codes[which][expert], layer.scales[which][expert], None,
                        layer.bias[which][expert])  # fmt: skip
    return weights


def calls(case: Case, stored: OwnWeights, weights: Fp8Weights, x: torch.Tensor, router: torch.Tensor,
          ids: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """By name, functions that run the layer once; they return the output."""
    common = {"activation": case.activation, "limit": case.limit}
    plan = plan_workspace(stored, *ids.shape)
    nbytes = max(plan.nbytes, fp8_moe.workspace_bytes(weights, *ids.shape))
    workspace = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    counters = torch.zeros(max(1, plan.counters), dtype=torch.int32, device="cuda")
    outs = torch.empty_like(x), torch.empty_like(x)
    return {
        "16-bit": lambda: fused_moe(x, stored, router, ids, workspace=workspace, counters=counters, out=outs[0],
                                    **common),
        "fp8": lambda: fp8_moe.fused_moe_fp8(x, weights, router, ids, workspace=workspace, out=outs[1], **common),
    }  # fmt: skip


def inputs(case: Case, tokens: int, outliers: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, router weights, ids."""
    generator = torch.Generator(device="cuda").manual_seed(tokens)
    x = torch.randn(tokens, case.hidden, device="cuda", generator=generator)
    if outliers:
        x[:, torch.randperm(case.hidden, device="cuda", generator=generator)[: case.hidden // 100]] *= 50
    logits = torch.randn(tokens, case.experts, device="cuda", generator=generator)
    router, ids = torch.topk(torch.softmax(logits, -1), case.top_k, dim=-1)
    return x.to(case.dtype), router / router.sum(-1, keepdim=True), ids.to(torch.int32)


def times(functions: dict[str, Callable[[], torch.Tensor]], replays: int) -> dict[str, list[float]]:
    """Microseconds of each function, by turns in changing order."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    graphs = {}
    for name, function in functions.items():
        function()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            function()
    found: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(replays):
        for name in sorted(graphs, reverse=turn % 2 == 1):
            flush.fill_(turn)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graphs[name].replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(start.elapsed_time(end) * 1000)
    return found


def kernels_of(function: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Microseconds of each kernel of one call, the second in a row."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    function()
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events():
        name = f"{event.name} {len(found)}"
        found[name] = event.device_time
    return found


def main() -> None:
    """Prints a line of JSON for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096,16384")
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", action="store_true", help="each kernel's time, too")
    arguments = parser.parse_args()
    layer = random_layer(CASE)
    stored, weights = sixteen_bit(CASE, layer), folded(CASE, layer)
    for tokens in map(int, arguments.tokens.split(",")):
        row: dict[str, object] = {"device": torch.cuda.get_device_name(), "tokens": tokens}
        if arguments.kernels:
            x, router, ids = inputs(CASE, tokens, False)
            print(kernels_of(calls(CASE, stored, weights, x, router, ids)["fp8"]), flush=True)
        for kind in ("normal", "outliers"):
            x, router, ids = inputs(CASE, tokens, kind == "outliers")
            functions = calls(CASE, stored, weights, x, router, ids)
            some = slice(0, 512)
            expected = reference(CASE, layer, x[some], router[some], ids[some], quantise=False)
            same = reference(CASE, layer, x[some], router[some], ids[some])
            outs = {name: function()[some] for name, function in functions.items()}
            row[f"error_{kind}"] = {name: error(out, expected) for name, out in outs.items()}
            row[f"error_{kind}"]["fp8 against the same codes"] = error(outs["fp8"], same)  # type: ignore[index]
        for name, values in times(functions, arguments.replays).items():
            low, middle, high = statistics.quantiles(values, n=4)
            flops = 2 * ids.numel() * 3 * CASE.hidden * CASE.inner
            row[name] = {"us": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)],
                         "tflops": round(flops / middle / 1e6, 1)}  # fmt: skip
        row["ratio"] = round(row["16-bit"]["us"] / row["fp8"]["us"], 3)  # type: ignore[index]
        print(json.dumps(row), flush=True)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
