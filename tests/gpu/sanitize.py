"""Every kernel once on a small problem under compute-sanitizer: memcheck and racecheck.

    python tests/gpu/sanitize.py                 # all cases, both tools, several processes at a time
    python tests/gpu/sanitize.py --case mxfp8    # runs one case plainly; what the tools run

Exit status 1 when a tool reports an error or does not end in its time. Only our kernels are instrumented: torch's own
take most of the time otherwise.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from vllm_moe_oracle.kernels.config import Config, Tile

KERNELS = ("gate_up", "down", "down_sweep", "down_merged", "sum_slots", "sort_slots", "list_blocks", "round_trip_rows")
TILES = {
    "list": (17, Config(Tile(16, 128, 128, stages=3), Tile(16, 64, 128))),
    "split": (3, Config(Tile(16, 64, 128, split=2), Tile(16, 64, 128, split=2), per_slot=True, fuse_sum=True)),
    "fold": (3, Config(Tile(8, 64, 128, fold=2), Tile(4, 32, 128, fold=4, stages=3), per_slot=True, prefetch=True)),
    "straight": (3, Config(Tile(4, 32, 128, fold=4, straight=True), Tile(8, 64, 64, fold=2, straight=True), True)),
    "merged": (2, Config(Tile(8, 64, 128, fold=2), Tile(1, 32, 64, straight=True, merge=True), per_slot=True)),
    "merged-loop": (2, Config(Tile(8, 64, 128, fold=2), Tile(1, 32, 64, merge=True), per_slot=True)),
    "two-parts": (90, Config(Tile(48, 128, 64, stages=3), Tile(48, 128, 64, stages=3))),
    "wide": (40, Config(Tile(32, 128, 128, stages=3), Tile(32, 128, 64, stages=3))),
    "sweep": (17, Config(Tile(16, 128, 64), Tile(16, 64, 64, sweep=2))),
    "quantised": (17, Config(Tile(16, 64, 128), Tile(16, 64, 128))),
}
CASES = ("int4-g128", "int4-g32", "int8-g128-relu2", "mxfp4-fp16", "mxfp4-swigluoai", "mxfp8-wide-scales")


def run_case(name: str) -> None:
    """Every tile configuration that fits the case, once."""
    import test_kernels
    import torch
    from kernel_cases import by_name

    (case,) = by_name(name)
    _, weights = test_kernels.layer_of(case)
    for kind, (tokens, config) in TILES.items():
        if kind == "quantised" and case.format != "mxfp8":
            continue
        if kind == "sweep" and case.inner % config.down.bk:
            continue
        x, router, ids = test_kernels.inputs(case, tokens, "negative")
        options = {"quantise_activations": True} if kind == "quantised" else {}
        test_kernels.call(weights, x, router, ids, case, config, **options)
        torch.cuda.synchronize()
    print(f"{name} ran")


def sanitise(name: str, tool: str, limit: float) -> tuple[str, str, str, float]:
    """(case, tool, "ok" or what went wrong, seconds)."""
    filters = [f"--kernel-name=kernel_name={kernel}" for kernel in KERNELS]
    command = ["compute-sanitizer", "--tool", tool, *filters, sys.executable, __file__, "--case", name]
    start = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return name, tool, f"did not end in {limit:.0f} s", time.time() - start
    text = done.stdout + done.stderr
    summary = re.search(r"(ERROR|RACECHECK) SUMMARY: .*", text)
    clean = summary is not None and re.search(r"SUMMARY: 0 (errors|hazards)", summary[0]) and f"{name} ran" in text
    return name, tool, "ok" if clean else (summary[0] if summary else text[-600:]), time.time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--tool", action="append", choices=("memcheck", "racecheck"))
    parser.add_argument("--seconds", type=float, default=240, help="for one case with one tool")
    args = parser.parse_args()
    if args.case:
        run_case(args.case)
        return 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        plain = [[sys.executable, __file__, "--case", name] for name in CASES]
        list(pool.map(lambda command: subprocess.run(command, check=True), plain))  # compiles
        jobs = [(name, tool, args.seconds) for tool in args.tool or ("racecheck", "memcheck") for name in CASES]
        results = list(pool.map(lambda job: sanitise(*job), jobs))
    for name, tool, verdict, seconds in results:
        print(f"{tool:9s} {name:20s} {seconds:5.0f} s  {verdict}")
    return int(any(verdict != "ok" for _, _, verdict, _ in results))


if __name__ == "__main__":
    sys.exit(main())
