"""Times GEMMs on fp8 tensor cores that share x or weights between two multiprocessors, beside those that do not.

    python tests/gpu/multicast.py --json FILE [--only check|copy|time] [--variants single,weights,...]

Variants: `single` is `fp8_gemm.product`; `weights` (`multicast_gemm.py`) and `x` (`multicast_rows.py`) run on clusters
of two programs that share the weights, or x, by multicast. `weights-copied` and `x-copied` are the same without it:
each program copies all that it reads, which tells the gain of multicast from the cost of clusters and their tiles. They
run on the first layer only. All but `single` need Triton 3.8.

Each part runs in processes of its own, which are killed at a time limit, so that no part takes the others with it:

1. check: each variant's results of few tokens, bit for bit those of `single`, and `single` within 1 % of float32
   sums. Compiles all kernels at once, too.
2. copy (`multicast_copy.py`): copies alone, without a product, alone and in pairs that share x or weights or nothing.
3. time: both products of a layer for 512 to 16384 tokens, of random ids. CUDA graphs, cold L2 cache, in shuffled
   order. Here, too, bits must be equal.

FILE gets one line of JSON with the conditions, then one for each figure as it is found. A table comes last.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vllm_moe_oracle.kernels import fp8_gemm
from vllm_moe_oracle.kernels.fp8_weights import row_order
from vllm_moe_oracle.measuring.timing import CudaClock, time_interleaved

VARIANTS = ("single", "weights", "x", "weights-copied", "x-copied")
STAGES = 4
CHECKED_COUNTS = ([300, 1, 0, 129, 64, 257], [0, 0, 5, 0, 0, 0], [65, 128, 256, 130, 512, 31])
"""Positions of six experts."""
TOKENS = (512, 1024, 4096, 16384)
_LIMITS = {"check": 75, "warm": 75, "copy": 60, "time": 45}
"""Seconds after which a part's process is killed."""


@dataclass(frozen=True)
class Shape:
    """A layer.

    Attributes:
        experts: number of experts.
        top_k: experts of a token.
        hidden: columns of x.
        inner: columns of h.
        activation: as the kernels name it.
        bias: whether experts have biases.
        limit: limit of the activation's operands, or None.
    """

    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str
    bias: bool = False
    limit: float | None = None

    @property
    def gated(self) -> bool:
        """Whether gate and up rows alternate."""
        return self.activation != "relu2"


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "swiglu", bias=True, limit=7.0),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768, "swiglu"),
    "nemotron-3-nano": Shape(128, 6, 2688, 1856, "relu2"),
}


@dataclass
class Product:
    """The operands of one product of a layer, all on the GPU; see `fp8_gemm.product`."""

    shape: Shape
    down: bool
    rows: int
    columns: int
    width: int
    weights: torch.Tensor  # e4m3 [experts * rows, columns]
    row_scale: torch.Tensor  # float32 [experts, rows]
    bias: torch.Tensor | None  # float32 [experts, rows]


@dataclass
class Batch:
    """Tokens of a product in the order of experts."""

    x: torch.Tensor  # e4m3 [slots, columns]
    scale: torch.Tensor  # float32 [slots]
    order: torch.Tensor  # int32 [slots]
    routers: torch.Tensor  # float32 [slots]
    counts: list[int]  # positions of each expert


def random_codes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random e4m3 numbers of a normal distribution, made in parts to save memory."""
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    for part in out.view(torch.uint8).split(65536):
        values = torch.randn(part.shape, device="cuda", generator=generator) * 16
        part.copy_(values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    return out


def make_product(shape: Shape, down: bool, experts: int) -> Product:
    """Random operands for that many experts."""
    generator = torch.Generator(device="cuda").manual_seed(int(down))
    rows = shape.hidden if down else shape.inner * (1 + shape.gated)
    columns, width = (shape.inner, shape.hidden) if down else (shape.hidden, shape.inner)
    options = {"device": "cuda", "generator": generator}
    bias = torch.randn(experts, rows, **options) if shape.bias else None
    scale = torch.rand(experts, rows, **options) * 2e-3
    return Product(
        shape, down, rows, columns, width, random_codes(generator, experts * rows, columns), scale, bias
    )  # fmt: skip


def make_batch(product: Product, counts: list[int]) -> Batch:
    """Random x of that many positions of each expert, with slots in random order."""
    slots = sum(counts)
    generator = torch.Generator(device="cuda").manual_seed(slots)
    options = {"device": "cuda", "generator": generator}
    return Batch(
        random_codes(generator, slots, product.columns), torch.rand(slots, **options) * 0.1,
        torch.randperm(slots, **options).int(), torch.rand(slots, **options), counts,
    )  # fmt: skip


def random_counts(tokens: int, experts: int, top_k: int) -> list[int]:
    """Positions of each expert, where each token has top_k different ones."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices.flatten()
    return torch.bincount(ids, minlength=experts).tolist()


def block_table(counts: list[int], size: int) -> tuple[torch.Tensor, int]:
    """The lists of `prefill_route.place_slots` for blocks of up to `size` positions, and `max_blocks`."""
    large, small, start = [], [], 0
    for expert, count in enumerate(counts):
        for first in range(0, count, size):
            rows = min(size, count - first)
            (large if rows > size // 2 else small).append([expert, start + first, rows, 0])
        start += count
    most = max(1, len(large), len(small))
    entries = [[len(large), len(small), 0, 0]]
    for blocks in (large, small):
        entries += blocks + [[0] * 4] * (most - len(blocks))
    return torch.tensor(entries, dtype=torch.int32, device="cuda"), most


def launcher(product: Product, batch: Batch, variant: str) -> Callable[[], torch.Tensor]:
    """A function that runs the product and returns its results, 16-bit [slots, width]."""
    shape, down, of = product.shape, product.down, TensorDescriptor.from_tensor
    variant, _, copied = variant.partition("-")
    table, most = block_table(batch.counts, 256 if variant == "weights" else 128)
    out = torch.zeros(batch.x.shape[0], product.width, dtype=torch.bfloat16, device="cuda")
    tall = 512 if variant == "x" else 256
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}
    if variant == "single":
        kernel, options["PDL"] = fp8_gemm.product, False
        operands = [of(batch.x, [64, 128], fp8_gemm.TILE_LAYOUT), of(product.weights, [128, 128], fp8_gemm.TILE_LAYOUT)]
    else:
        from tests.gpu import multicast_gemm, multicast_rows

        module = multicast_gemm if variant == "weights" else multicast_rows
        boxes = [128] if variant == "weights" else [512, 256]
        kernel, programs = module.product, programs // 2
        options |= {"num_ctas": 2, "MULTICAST": not copied}
        operands = [of(batch.x, [128 if variant == "weights" else 64, 128], module.X_LAYOUT)]
        operands += [of(product.weights, [rows, 128], module.W_LAYOUT) for rows in boxes]
    bias = product.bias
    limit = None if down else shape.limit

    def run() -> torch.Tensor:
        kernel[(programs,)](
            *operands, product.row_scale, table if bias is None else bias, out, batch.scale, batch.order,
            batch.routers, table, most, -(-product.rows // tall), product.columns, product.rows, product.width,
            1.702, 1.0, limit or 0.0, HAS_BIAS=bias is not None, ROUTER_WEIGHT=down, DOWN=down,
            GATED=shape.gated and not down, ACTIVATION="" if down else shape.activation, HAS_LIMIT=limit is not None,
            STAGES=STAGES, ROTATE=product.rows % tall > 0, **options,
        )  # fmt: skip
        return out

    return run


def expected(product: Product, batch: Batch) -> torch.Tensor:
    """The results by float32 sums and torch, for few tokens. Rows are stored in another order (`row_order`)."""
    out = torch.zeros(batch.x.shape[0], product.width, device="cuda")
    start = 0
    for expert, count in enumerate(batch.counts):
        at = slice(start, start + count)
        start += count
        codes = product.weights[expert * product.rows :][: product.rows].float()
        y = batch.x[at].float() @ codes.T * batch.scale[at, None] * product.row_scale[expert]
        if product.bias is not None:
            y = y + product.bias[expert]
        order = row_order("w2" if product.down else "w13", product.rows, product.shape.gated, y.device)
        y = torch.empty_like(y).index_copy_(1, order, y)
        if product.down:
            out[batch.order[at].long()] = y * batch.routers[at, None]
        elif product.shape.gated:
            gate, up = y[:, : product.width], y[:, product.width :]
            if product.shape.limit is not None:
                gate, up = gate.clamp(max=product.shape.limit), up.clamp(-product.shape.limit, product.shape.limit)
            out[at] = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1.0)
        else:
            out[at] = torch.relu(y) ** 2
    return out


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 error."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm())


def check(layer: str, down: bool, variant: str) -> list[dict[str, Any]]:
    """Compares a variant's bits with those of `single`, and those with float32 sums."""
    product = make_product(SHAPES[layer], down, len(CHECKED_COUNTS[0]))
    found = []
    for counts in CHECKED_COUNTS:
        batch = make_batch(product, counts)
        single, wanted = launcher(product, batch, "single")().clone(), expected(product, batch)
        run = launcher(product, batch, variant)
        equal = [torch.equal(run(), single) for _ in range(3)]
        torch.cuda.synchronize()
        found.append({"part": "check", "layer": layer, "down": down, "variant": variant, "counts": counts,
                      "equal_to_single": equal, "wrong_values": int((run() != single).sum()),
                      "single_error": difference(single, wanted), "error": difference(run(), wanted)})  # fmt: skip
    return found


def timed(runs: dict[str, Callable[[], Any]], replays: int, seconds: float) -> dict[str, dict[str, float]]:
    """Medians and quartiles in microseconds of each function as a CUDA graph."""
    clock = CudaClock()
    graphs = {name: [clock.prepare(run)[0]] for name, run in runs.items()}
    return {
        name: {"us": round(each.us, 2), "low": round(each.low, 2), "high": round(each.high, 2), "replays": each.replays}
        for name, each in time_interleaved(clock, graphs, replays, seconds).items()
    }


def time_layer(layer: str, variants: list[str], emit: Callable[[dict[str, Any]], None]) -> None:
    """Times both products of a layer, and compares bits once more."""
    shape = SHAPES[layer]
    for down in (False, True):
        product = make_product(shape, down, shape.experts)
        for tokens in TOKENS:
            batch = make_batch(product, random_counts(tokens, shape.experts, shape.top_k))
            runs = {variant: launcher(product, batch, variant) for variant in variants}
            results = {variant: run() for variant, run in runs.items()}
            torch.cuda.synchronize()
            equal = {name: torch.equal(result, results["single"]) for name, result in results.items()}
            times = timed(runs, 21, 1.5)
            flops = 2 * batch.x.shape[0] * product.rows * product.columns
            emit({"part": "time", "layer": layer, "down": down, "tokens": tokens, "equal_to_single": equal,
                  "times": times, "tflops": {name: round(flops / each["us"] / 1e6, 1) for name, each in times.items()},
                  })  # fmt: skip


COPIES = {
    "e4m3: x of 128 tokens, 256 rows": (128, 256, 4, 22, 32, 22, 4),
    "bfloat16 and 4 bits: x of 128 tokens, 256 rows": (128, 64, 4, 22, 32, 45, 8),
    "bfloat16 and 4 bits: x of 64 tokens, 256 rows": (64, 64, 2, 22, 32, 45, 8),
    "bfloat16 and 4 bits: x of 32 tokens, 128 rows": (32, 32, 1, 12, 128, 32, 16),
}
"""Lines of 128 bytes of x and of weights that one program copies in a step; blocks of an expert; tiles of a block;
experts; steps; stages."""


def copies(name: str) -> dict[str, Callable[[], None]]:
    """Functions that copy the tiles of a shape, by how they share."""
    from tests.gpu.multicast_copy import copy_tiles

    x_lines, w_lines, per_expert, tiles, experts, steps, stages = COPIES[name]
    x = torch.zeros(experts * per_expert * x_lines, steps * 128, dtype=torch.uint8, device="cuda")
    w = torch.zeros(experts * tiles * w_lines, steps * 128, dtype=torch.uint8, device="cuda")
    programs = torch.cuda.get_device_properties(0).multi_processor_count

    def launch(x_pair: int, w_pair: int, shared: str) -> Callable[[], None]:
        """x_pair, w_pair: how many times the lines of one program a cluster copies."""
        pair = x_pair * w_pair > 1
        layouts = [
            gl.NVMMASharedLayout(128, 8, 2, cga_layout=[[times - 1, 0]] if pair else []) for times in (x_pair, w_pair)
        ]
        of = TensorDescriptor.from_tensor
        operands = of(x, [x_lines * x_pair, 128], layouts[0]), of(w, [w_lines * w_pair, 128], layouts[1])
        blocks = per_expert // x_pair
        total = experts * blocks * (tiles // w_pair)

        def run() -> None:
            copy_tiles[(programs // (1 + pair),)](
                *operands, total, tiles // w_pair, blocks, steps, STAGES=stages, PAIR=pair, X_MULTICAST=shared == "x",
                W_MULTICAST=shared == "weights", num_warps=4, num_ctas=1 + pair,
            )  # fmt: skip

        return run

    runs = {"single": launch(1, 1, ""), "pair": launch(1, 2, ""), "x": launch(1, 2, "x")}
    if per_expert % 2 == 0:
        runs["weights"] = launch(2, 1, "weights")
    return runs


def time_copies(emit: Callable[[dict[str, Any]], None]) -> None:
    """Times copies alone."""
    for name, (x_lines, w_lines, per_expert, tiles, experts, steps, _) in COPIES.items():
        try:
            times = timed(copies(name), 21, 1.5)
            nbytes = experts * per_expert * tiles * steps * (x_lines + w_lines) * 128
            emit({"part": "copy", "shape": name, "bytes_into_shared_memory": nbytes, "times": times,
                  "terabytes_per_second": {key: round(nbytes / each["us"] / 1e6, 2) for key, each in times.items()},
                  })  # fmt: skip
        except Exception:
            emit({"part": "copy", "shape": name, "failed": traceback.format_exc()})


def child(arguments: argparse.Namespace) -> None:
    """One part, which adds lines to the file."""

    def emit(row: dict[str, Any]) -> None:
        with arguments.json.open("a") as file:
            file.write(json.dumps(row) + "\n")

    part, *rest = arguments.child.split(",")
    if part == "check":
        for row in check(rest[0], rest[1] == "down", rest[2]):
            emit(row)
    elif part == "warm":
        for run in copies([*COPIES][int(rest[0])]).values():
            run()
        torch.cuda.synchronize()
    elif part == "copy":
        time_copies(emit)
    else:
        time_layer(rest[0], arguments.variants.split(","), emit)


def run_parts(arguments: argparse.Namespace, parts: list[str], at_once: int) -> set[str]:
    """Runs parts as processes, so many at once; returns those that failed, whose errors are printed whole."""
    failed, waiting, running = set(), list(parts), []
    while waiting or running:
        while waiting and len(running) < at_once:
            part = waiting.pop(0)
            command = [sys.executable, __file__, "--json", str(arguments.json), "--child", part]
            command += ["--variants", arguments.variants]
            # stdout and stderr go to a file: a full pipe would stop the process.
            log = Path(f"{arguments.json}.{part.replace(',', '-')}.log")
            with log.open("w") as file:
                running.append((part, subprocess.Popen(command, stdout=file, stderr=file), time.monotonic(), log))
        time.sleep(0.1)
        for each in list(running):
            part, process, begin, log = each
            late = time.monotonic() - begin > _LIMITS[part.split(",")[0]]
            if late:
                process.kill()
                process.wait()
            if late or process.poll() is not None:
                running.remove(each)
                words = f"{part}: {'killed' if late else f'exit {process.returncode}'}"
                print(f"{words} after {time.monotonic() - begin:.1f} s", flush=True)
                if late or process.returncode:
                    failed.add(part)
                    print(log.read_text(), flush=True)
    return failed


def conditions() -> dict[str, Any]:
    """What the figures depend on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True, check=False).stdout if shutil.which(query[0]) else ""
    return {
        "command": shlex.join(["python", *sys.argv]), "date": time.strftime("%Y-%m-%d"), "gpu": smi.splitlines()[:1],
        "packages": {"torch": torch.__version__, "triton": triton.__version__}, "cuda": torch.version.cuda,
        "method": "medians and quartiles of up to 21 replays of CUDA graphs, in shuffled order; 256 MiB written before "
                  "each; ids uniformly random, codes normally distributed; no programmatic dependent launch",
        "variants": list(VARIANTS), "stages": STAGES,
    }  # fmt: skip


def print_table(path: Path) -> None:
    """What was found, in short."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row.get("part") == "check":
            good = all(row["equal_to_single"])
            result = "equal bits" if good else f"DIFFERENT: {row['wrong_values']} values, error {row['error']:.1e}"
            print(f"{row['layer']} {'w2' if row['down'] else 'w13'} {row['variant']} {row['counts']}: {result}; "
                  f"single's error {row['single_error']:.1e}")  # fmt: skip
    for row in rows:
        if row.get("part") == "copy":
            print(f"{row['shape']}: " + row.get("failed", "") + ", ".join(
                f"{name} {each['us']:.0f} us ({row['terabytes_per_second'][name]} TB/s)"
                for name, each in row.get("times", {}).items()))  # fmt: skip
    for row in rows:
        if row.get("part") == "time":
            single, words = row["times"]["single"]["us"], []
            for name, each in row["times"].items():
                wrong = "" if row["equal_to_single"][name] else " WRONG"
                words.append(f"{name} {each['us']:.0f} ({single / each['us']:.2f}x{wrong})")
            print(f"{row['layer']} {'w2' if row['down'] else 'w13'} {row['tokens']} tokens: {', '.join(words)}")


def main() -> None:
    """Runs the parts and prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", choices=("check", "copy", "time"))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    arguments.json.write_text(json.dumps(conditions()) + "\n")
    shared = [variant for variant in arguments.variants.split(",") if variant != "single"]

    def of_layer(layer: str) -> list[str]:
        return [each for each in shared if layer == next(iter(SHAPES)) or not each.endswith("-copied")]

    failed: set[str] = set()
    if arguments.only in (None, "check"):
        checks = [f"check,{layer},{which},{variant}" for layer in SHAPES for which in ("up", "down")
                  for variant in of_layer(layer) or ["single"]]  # fmt: skip
        if shared:
            checks += [f"warm,{number}" for number in range(len(COPIES))]  # only compiles, so that `copy` need not
        failed |= run_parts(arguments, checks, 16)
    if shared and arguments.only in (None, "copy"):
        failed |= run_parts(arguments, ["copy"], 1)
    if arguments.only in (None, "time"):
        for layer in SHAPES:
            # A variant that could not even be checked would only cost time.
            bad = {part.split(",")[3] for part in failed if part.startswith(f"check,{layer},")}
            arguments.variants = ",".join(["single", *(each for each in of_layer(layer) if each not in bad)])
            failed |= run_parts(arguments, [f"time,{layer}"], 1)
    print_table(arguments.json)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
