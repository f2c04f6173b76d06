"""Every kernel once on a small problem under compute-sanitizer: memcheck and racecheck.

    python tests/gpu/sanitize.py                 # all cases, both tools, several processes at a time
    python tests/gpu/sanitize.py --case mxfp8    # runs one case plainly; what the tools run
    python tests/gpu/sanitize.py --shipped       # every configuration of the shipped table, on its layers' own sizes

Exit status 1 when a tool reports an error or does not end in its time. Racecheck's hazards in Triton's dispatch of
warps are counted apart and are none, where the machine code of the very kernels that ran proves it (`dispatch.py`).
Only our kernels are instrumented: torch's own take most of the time otherwise. Under memcheck every tensor is an
allocation of its own (`memcheck_control.py`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.dispatch import Dispatch, dispatch_of, verdict_of
from tests.gpu.kernel_cases import Case
from tests.gpu.memcheck_control import EXACT
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig

KERNELS = (
    "gate_up", "down", "down_loop_n", "down_fused_topk", "sum_topk", "sum_topk_strips", "sort_slots",
    "sort_slots_by_comparison",
    "mxfp8_round_trip_rows", "count_slots", "scan_chunks", "place_slots",
)  # fmt: skip
TILES = {
    "list": (17, LaunchConfig(TileConfig(16, 128, 128, num_stages=3), TileConfig(16, 64, 128))),
    "split_k": (
        3,
        LaunchConfig(
            TileConfig(16, 64, 128, split_k=2), TileConfig(16, 64, 128, split_k=2), per_slot=True, fuse_sum=True
        ),
    ),
    "k_parts": (
        3,
        LaunchConfig(
            TileConfig(8, 64, 128, k_parts=2),
            TileConfig(4, 32, 128, k_parts=4, num_stages=3),
            per_slot=True,
            prefetch=True,
        ),
    ),
    "no_k_loop": (
        3,
        LaunchConfig(
            TileConfig(4, 32, 128, k_parts=4, no_k_loop=True), TileConfig(8, 64, 64, k_parts=2, no_k_loop=True), True
        ),
    ),
    "merged": (
        2,
        LaunchConfig(
            TileConfig(8, 64, 128, k_parts=2), TileConfig(1, 32, 64, no_k_loop=True, fused_topk=True), per_slot=True
        ),
    ),
    "two-parts": (260, LaunchConfig(TileConfig(48, 128, 64, num_stages=3), TileConfig(48, 128, 64, num_stages=3))),
    "wide": (40, LaunchConfig(TileConfig(32, 128, 128, num_stages=3), TileConfig(32, 128, 64, num_stages=3))),
    "n_tiles": (17, LaunchConfig(TileConfig(16, 128, 64), TileConfig(16, 64, 64, n_tiles=2))),
    "quantized": (17, LaunchConfig(TileConfig(16, 64, 128), TileConfig(16, 64, 128))),
}
FP8 = ("product", "quantize_rows")
PREFILL = (3, 300, 600, 800)
"""Tokens for the persistent kernels of prefill.py: tiles of every size come up."""
PERSISTENT = ("prefill", "prefill-half", "fp8")
CASES = ("int4-g128", "int4-g32", "int8-g128-relu2", "mxfp4-fp16", "mxfp4-swigluoai", "mxfp8-wide-scales")
HALVES = ("int4-row", "int8-row-fp16", "mxfp4-swigluoai", "mxfp8", "mxfp8-relu2", "mxfp8-wide-scales")
"""Cases that can have half a step at the end: scales are of MX or one a row."""
SHIPPED = "shipped"
MOST_TOKENS = 70
"""Of a shipped configuration's call: two blocks of an expert's tokens."""
FEW_EXPERTS = 2
"""Experts of a token where a call has more than two: racecheck takes minutes for a layer's configurations otherwise."""


def run_case(name: str, tiles: list[str]) -> None:
    """These of the tile configurations, as far as they fit the case, once; "prefill" are the persistent kernels,
    "prefill-half" the same on layers with half a step at the end, "fp8" those for fp8 activations."""
    import torch

    from tests.gpu import test_kernels
    from tests.gpu.kernel_cases import by_name
    from tests.gpu.stored_layers import layer_of

    (case,) = by_name(name)
    _, weights = layer_of(case)
    for kind in tiles:
        if kind in PERSISTENT:
            ran = run_fp8(case) if kind == "fp8" else run_prefill(prefill_layers(case, kind))
            print(f"{name}: {kind} {'ended' if ran else 'does not run it'}", flush=True)
            continue
        tokens, config = TILES[kind]
        if kind == "quantized" and case.format != "mxfp8":
            continue
        if kind == "n_tiles" and case.inner % config.down.bk:
            continue
        x, router, ids = test_kernels.inputs(case, tokens, "negative")
        options = {"quantize_activations": True} if kind == "quantized" else {}
        test_kernels.call(weights, x, router, ids, case, config, **options)
        torch.cuda.synchronize()
        print(f"{name}: {kind} ended", flush=True)
    print(f"{name} ran")


def run_shipped(layer: str) -> None:
    """What ships for a layer of `kernel_launches`, each configuration once: random bytes as the weights of as many
    experts as a token chooses, rows and columns as the layer has them, for no more than `MOST_TOKENS` and, beyond two
    tokens, `FEW_EXPERTS` of them."""
    import torch

    from tests.lib.kernel_launches import LAYERS, MEASURED, shipped
    from vllm_moe_oracle.kernels.fused_moe import fused_moe, workspace_layout
    from vllm_moe_oracle.kernels.weights import allocate_weights

    format, group, hidden, inner, _, top_k, activation, bias = (LAYERS | MEASURED)[layer]
    weights = allocate_weights(format, top_k, hidden, inner, gated=activation != "relu2", group=group, bias=bias,
                               device="cuda")  # fmt: skip
    for matrix in (weights.w13, weights.w2):
        for tensor in matrix.tensors():
            tensor.view(torch.uint8).random_(0, 256)
    for tokens, config in ((tokens, config) for name, tokens, config in shipped() if name == layer):
        tokens = min(tokens, MOST_TOKENS)
        chosen = top_k if tokens <= 2 else FEW_EXPERTS
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        ids = torch.stack([torch.randperm(chosen, device="cuda") for _ in range(tokens)]).int()
        ids[-1, -1] = -1
        layout = workspace_layout(weights, tokens, chosen, config)
        fused_moe(x, weights, torch.rand(tokens, chosen, device="cuda"), ids, activation=activation, config=config,
                  limit=7.0 if activation == "swigluoai" else None, out=torch.empty_like(x),
                  workspace=torch.empty(layout.nbytes, dtype=torch.uint8, device="cuda"),
                  counters=torch.zeros(max(1, layout.counters), dtype=torch.int32, device="cuda"))  # fmt: skip
        torch.cuda.synchronize()
        print(f"{layer}: {config.to_json()} ended", flush=True)
    print(f"{layer} ran")


def prefill_layers(case: Case, kind: str) -> list[Case]:
    """The case in whole steps of columns, or with half a step at the end of h; nothing where the kernels for many
    tokens cannot run that."""
    from tests.gpu import test_prefill

    layer = test_prefill.whole_steps(case)
    if kind == "prefill-half":
        layer = test_prefill.half_steps(layer)
    return [layer] if layer.inner % max(1, layer.group) == 0 and test_prefill.supported(layer) else []


def run_prefill(cases: list[Case]) -> bool:
    """Layers by the kernels for many tokens; whether there are any."""
    import torch

    from tests.gpu import test_prefill
    from tests.gpu.stored_layers import layer_of
    from vllm_moe_oracle.kernels import prefill_launch

    for each in cases:
        _, weights = layer_of(each)
        for tokens in PREFILL:
            # The second product in one launch, and in two.
            for beside in (1 << 62, 0):
                with mock.patch.object(prefill_launch, "_MIN_OVERLAPPED_BYTES", beside):
                    test_prefill.call(weights, *test_prefill.inputs(each, tokens, "negative"), each)
                torch.cuda.synchronize()
    return bool(cases)


def run_fp8(case: Case) -> bool:
    """Layers of the case's format and activation by the kernels for fp8 activations; whether there are any."""
    import torch

    from tests.gpu import test_fp8

    cases = [each for each in test_fp8.CASES if (each.format, each.activation) == (case.format, case.activation)]
    cases = [each for each in cases if each.hidden < 1024]
    for each in cases:
        _, weights = test_fp8.layer_of(each)
        for tokens in PREFILL:
            test_fp8.call(each, weights, *test_fp8.inputs(each, tokens, "negative"))
            torch.cuda.synchronize()
    return bool(cases)


def keep_dispatching(folder: Path) -> None:
    """Writes what `dispatches` reads: machine code and sizes of every warp-specialized kernel that this process ran."""
    from vllm_moe_oracle.kernels import fp8_gemm, fp8_mxfp4_gemm, prefill

    for function in (prefill.gate_up, prefill.down, fp8_gemm.product, fp8_mxfp4_gemm.product):
        module = function.fn.__module__.rpartition(".")[2]
        for caches in function.device_caches.values():
            for number, kernel in enumerate(caches[0].values()):
                # Triton's metadata have all of a program's warps, not the four that a launch asks for.
                sizes = {
                    "kernel": kernel.name,
                    "shared": kernel.metadata.shared,
                    "num_warps": kernel.metadata.num_warps,
                }
                file = folder / f"{module}-{kernel.name}-{number}.cubin"
                file.write_bytes(kernel.asm["cubin"])
                file.with_suffix(".json").write_text(json.dumps(sizes))


def dispatches(folder: Path) -> tuple[list[Dispatch], list[str]]:
    """What is proven of the kernels in a folder, and of which ones nothing is."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    proven, failed = [], []
    for file in sorted(folder.glob("*.cubin")):
        code = subprocess.run([tool, "-c", file], capture_output=True, text=True, check=True).stdout
        sizes = json.loads(file.with_suffix(".json").read_text())
        try:
            proven.append(dispatch_of(code=code, **sizes))
        except ValueError as error:
            failed.append(str(error))
    return proven, failed


def plain(name: str, tiles: list[str]) -> list[str]:
    """The command that runs one case without a tool."""
    return [sys.executable, __file__, "--case", name, *(part for tile in tiles for part in ("--tiles", tile))]


def sanitize(name: str, tiles: list[str], tool: str, limit: float, reports: Path | None) -> tuple[str, str, str, float]:
    """(case, tool, "ok" or what went wrong, seconds)."""
    filters = [f"--kernel-name=kernel_name={kernel}" for kernel in (*KERNELS, *FP8)]
    # It shows no more than 100 by default.
    report = ["--racecheck-report", "all", "--print-limit", "100000"] if tool == "racecheck" else []
    memory = EXACT if tool == "memcheck" else {}
    with tempfile.TemporaryDirectory() as folder:
        command = ["compute-sanitizer", "--tool", tool, *report, *filters, *plain(name, tiles), "--keep", folder]
        start = time.time()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=os.environ | memory)
        except subprocess.TimeoutExpired as cut:
            text = (cut.stdout or b"").decode(errors="replace")
            names = re.findall(rf"{re.escape(name)}: (.+) ended", text)
            ended = f"{len(names)} configurations" if SHIPPED in tiles else ", ".join(names) or "nothing"
            found = len(re.findall(r"^=+ (?:Error|Warning|Invalid|Potential|Race)", text, re.M))
            return name, tool, f"did not end in {limit:.0f} s; ended: {ended}; {found} reports", time.time() - start
        text, seconds = done.stdout + done.stderr, time.time() - start
        if reports:
            reports.mkdir(parents=True, exist_ok=True)
            file_name = re.sub(r"[^\w.-]+", "-", f"{tool}-{name}-{'-'.join(tiles)}")
            with gzip.open(reports / f"{file_name}.txt.gz", "wt") as file:
                file.write(text)
        if f"{name} ran" not in text:
            return name, tool, f"did not run to its end: {text[-600:]}", seconds
        idle = "".join(
            f"; {tile} does not run it" for tile in re.findall(rf"{re.escape(name)}: (\S+) does not run it", text)
        )
        if SHIPPED in tiles:
            idle += f"; {len(re.findall(rf'^{re.escape(name)}: .+ ended$', text, re.M))} configurations"
        if tool == "racecheck":
            return name, tool, verdict_of(text, *dispatches(Path(folder))) + idle, seconds
    summary = re.search(r"ERROR SUMMARY: (\d+) errors?.*", text)
    if summary is None:
        return name, tool, f"no summary: {text[-600:]}", seconds
    return name, tool, ("ok" if summary[1] == "0" else summary[0]) + idle, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=f"one of {', '.join(sorted({*CASES, *HALVES}))}; with --tiles {SHIPPED} a layer")
    kinds = (*TILES, *PERSISTENT, SHIPPED)
    parser.add_argument("--tiles", action="append", choices=kinds, help=f"only these; by default all but {SHIPPED}")
    parser.add_argument("--shipped", action="store_true", help="what ships, and nothing else")
    parser.add_argument("--tool", action="append", choices=("memcheck", "racecheck"))
    parser.add_argument("--seconds", type=float, default=240, help="for one case with one tool")
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="with --shipped, every N-th layer from the I-th on"
    )
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keeps what the tools said there, compressed")
    parser.add_argument("--json", type=Path, help="keeps verdicts and conditions")
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    tiles = args.tiles or [*TILES, *PERSISTENT]
    if args.case:
        run_shipped(args.case) if tiles == [SHIPPED] else run_case(args.case, tiles)
        if args.keep:
            keep_dispatching(args.keep)
        return 0
    if args.shipped:
        from tests.lib.kernel_launches import MEASURED

        first, step = map(int, args.part.split("/"))
        runs = [(layer, [SHIPPED]) for layer in [*MEASURED][first::step]]
    else:
        others = [tile for tile in tiles if tile != "prefill-half"]
        runs = [(name, others) for name in CASES if others]
        runs += [(name, ["prefill-half"]) for name in HALVES if "prefill-half" in tiles]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda run: subprocess.run(plain(*run), check=True, stdout=subprocess.DEVNULL), runs))  # compiles
        tools = args.tool or ("racecheck", "memcheck")
        jobs = [(*run, tool, args.seconds, args.reports) for tool in tools for run in runs]
        results = []
        for done in concurrent.futures.as_completed([pool.submit(sanitize, *job) for job in jobs]):
            results.append(done.result())
            name, tool, verdict, seconds = results[-1]
            print(f"{tool:9s} {name:40s} {seconds:5.0f} s  {verdict}", flush=True)
            if args.json:
                write_results(args.json, results)
    return int(any(not verdict.startswith("ok") for _, _, verdict, _ in results))


def write_results(path: Path, results: list[tuple[str, str, str, float]]) -> None:
    """Verdicts so far, with what they depend on."""
    import torch
    import triton

    from vllm_moe_oracle.measurements.environment import kernel_sources_hash

    conditions = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "kernels": kernel_sources_hash(), "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", "tests/gpu/sanitize.py", *sys.argv[1:]]),
    }  # fmt: skip
    verdicts = {tool: {name: verdict for name, each, verdict, _ in sorted(results) if each == tool} for tool in
                sorted({tool for _, tool, _, _ in results})}  # fmt: skip
    path.write_text(json.dumps({"conditions": conditions, "verdicts": verdicts}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
