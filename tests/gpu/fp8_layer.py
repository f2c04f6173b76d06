"""What fp8 activations cost and save: a layer with them beside the same layer with 16-bit activations.

    python tests/gpu/fp8_layer.py [--layer NAME] [--tokens 1024,4096,16384] [--json FILE]

One of `CASES`, in MXFP4 or MXFP8. Kernels for MXFP4 read the same stored weights. Random weights, tokens drawn from
a normal distribution and the same with 1 % of the channels 50 times larger. Errors are relative L2 errors
against float64 with 16-bit activations, of up to 512 tokens. Times are of CUDA graphs, by turns, after 256 MiB were
written: medians, quartiles. A JSON file begins with its conditions, which all runs that add to it must share.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.fp8_reference import codes_of, error, reference
from tests.gpu.kernel_cases import E2M1, Case, Layer, e4m3_table
from vllm_moe_oracle.devices.detect import detect
from vllm_moe_oracle.kernels import fp8_moe
from vllm_moe_oracle.kernels.fp8_weights import Fp8Matrix, Fp8Weights, pack_fp8_expert
from vllm_moe_oracle.kernels.fused_moe import fused_moe, workspace_layout
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights, pack_expert
from vllm_moe_oracle.measurements.environment import Environment

CASES = {
    case.name: case
    for case in (
        Case("gpt-oss-20b", "mxfp4", 32, "swigluoai", bias=True, limit=7.0, experts=32, top_k=4, hidden=2880,
             inner=2880, spread=(119, 123)),
        Case("qwen3-30b-a3b-mxfp4", "mxfp4", 32, experts=128, top_k=8, hidden=2048, inner=768, spread=(119, 123)),
        Case("qwen3-30b-a3b", "mxfp8", 32, experts=128, top_k=8, hidden=2048, inner=768, spread=(113, 115)),
        Case("nemotron-3-nano", "mxfp8", 32, "relu2", experts=128, top_k=6, hidden=2688, inner=1856,
             spread=(113, 115)),
    )
}  # fmt: skip


class Dequantized:
    """A projection in float32, one expert at a time, from codes and scales as the format defines them."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self._codes, self._scales = codes, scales

    def __getitem__(self, expert: int) -> torch.Tensor:
        codes = self._codes[expert]
        if codes.shape[1] == 32 * self._scales.shape[2]:
            values = e4m3_table().float().to(codes.device)[codes.long()]
            return torch.ldexp(values, self._scales[expert].int().repeat_interleave(32, -1) - 127)
        table = torch.tensor(E2M1 + [-value for value in E2M1], device=codes.device)
        values = table[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
        return torch.ldexp(values, self._scales[expert].int().repeat_interleave(32, -1) - 127)


def random_layer(case: Case) -> Layer:
    """As `kernel_cases.make_layer`, made on the GPU and in float32 only when an expert is asked for."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    options = {"device": "cuda", "generator": generator}
    layer = Layer()
    for which in ("w13", "w2"):
        rows, columns = (case.hidden, case.inner) if which == "w2" else (case.inner * (1 + case.gated), case.hidden)
        if case.format == "mxfp8":
            # Of normal numbers, of which the largest of a block is about 448.
            numbers = torch.randn(case.experts, rows, columns, **options) * 128
            codes = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = torch.randint(0, 256, (case.experts, rows, columns // 2), dtype=torch.uint8, **options)
        layer.codes[which] = codes
        shape = (case.experts, rows, columns // 32)
        layer.scales[which] = torch.randint(*case.spread, shape, dtype=torch.uint8, **options)
        layer.bias[which] = torch.randn(case.experts, rows, **options) if case.bias else None
        layer.matrix[which] = Dequantized(layer.codes[which], layer.scales[which])  # type: ignore[assignment]
    return layer


def folded(case: Case, layer: Layer) -> Fp8Weights:
    """The layer as the kernels for fp8 activations store it."""
    matrices = []
    for which in ("w13", "w2"):
        stored, factors, bias = codes_of(case, layer, which), layer.scales[which], layer.bias[which]
        made = [
            pack_fp8_expert(which, stored[expert], factors[expert], None if bias is None else bias[expert], case.gated)
            for expert in range(case.experts)
        ]
        codes, scales, biases = zip(*made, strict=True)
        biases = torch.stack(biases) if case.bias else None
        codes = torch.stack([each.view(torch.uint8) for each in codes]).view(torch.float8_e4m3fn)
        matrices.append(Fp8Matrix(codes, torch.stack(scales), biases))
    return Fp8Weights(matrices[0], matrices[1], case.dtype, case.gated)


def sixteen_bit(case: Case, layer: Layer) -> PackedWeights:
    """The layer as the kernels for 16-bit activations store it."""
    weights = allocate_weights(case.format, case.experts, case.hidden, case.inner, gated=case.gated, bias=case.bias,
                       device="cuda")  # fmt: skip
    for which in ("w13", "w2"):
        codes, bias = codes_of(case, layer, which), layer.bias[which]
        for expert in range(case.experts):
            pack_expert(weights, which, expert, codes[expert], layer.scales[which][expert], None,
                        None if bias is None else bias[expert])  # fmt: skip
    return weights


def calls(case: Case, stored: PackedWeights, weights: Fp8Weights | PackedWeights, x: torch.Tensor, router: torch.Tensor,
          ids: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:  # fmt: skip
    """By name, functions that run the layer once; they return the output."""
    common = {"activation": case.activation, "limit": case.limit}
    plan = workspace_layout(stored, *ids.shape)
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


def conditions(replays: int) -> dict[str, object]:
    """What the figures depend on."""
    where = msgspec.to_builtins(Environment.of(detect()))
    method = f"medians of {replays} replays of CUDA graphs, by turns in changing order; 256 MiB written before each"
    return {"environment": where, "cuda": torch.version.cuda, "method": method}


def begin(path: Path, replays: int) -> None:
    """Starts a file of results, or adds to one.

    Raises:
        SystemExit: what is there was measured under other conditions.
    """
    mine = conditions(replays)
    if not path.exists() or not path.stat().st_size:
        command = shlex.join(["python", *sys.argv])
        path.write_text(
            json.dumps({"conditions": mine | {"command": command, "date": time.strftime("%Y-%m-%d")}}) + "\n"
        )
        return
    there = json.loads(path.read_text().splitlines()[0]).get("conditions", {})
    if different := [key for key, value in mine.items() if there.get(key) != value]:
        raise SystemExit(f"{path} was measured under other conditions ({', '.join(different)}): name another file")


def main() -> None:
    """Prints a line of JSON for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096,16384")
    parser.add_argument("--replays", type=int, default=21)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernels", action="store_true", help="each kernel's time, too")
    parser.add_argument("--layer", default="gpt-oss-20b", choices=CASES)
    arguments = parser.parse_args()
    if arguments.json:
        begin(arguments.json, arguments.replays)
    case = CASES[arguments.layer]
    layer = random_layer(case)
    stored = sixteen_bit(case, layer)
    weights = stored if case.format == "mxfp4" else folded(case, layer)
    for tokens in map(int, arguments.tokens.split(",")):
        row: dict[str, object] = {"device": torch.cuda.get_device_name(), "layer": case.name, "tokens": tokens}
        if arguments.kernels:
            x, router, ids = inputs(case, tokens, False)
            print(kernels_of(calls(case, stored, weights, x, router, ids)["fp8"]), flush=True)
        for kind in ("normal", "outliers"):
            x, router, ids = inputs(case, tokens, kind == "outliers")
            functions = calls(case, stored, weights, x, router, ids)
            some = slice(0, 512)
            expected = reference(case, layer, x[some], router[some], ids[some], quantize=False)
            same = reference(case, layer, x[some], router[some], ids[some])
            outs = {name: function()[some] for name, function in functions.items()}
            row[f"error_{kind}"] = {name: error(out, expected) for name, out in outs.items()}
            row[f"error_{kind}"]["fp8 against the same codes"] = error(outs["fp8"], same)  # type: ignore[index]
        for name, values in times(functions, arguments.replays).items():
            low, middle, high = statistics.quantiles(values, n=4)
            flops = 2 * ids.numel() * (2 + case.gated) * case.hidden * case.inner
            row[name] = {"us": round(middle, 1), "quartiles": [round(low, 1), round(high, 1)],
                         "tflops": round(flops / middle / 1e6, 1)}  # fmt: skip
        row["ratio"] = round(row["16-bit"]["us"] / row["fp8"]["us"], 3)  # type: ignore[index]
        print(json.dumps(row), flush=True)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
