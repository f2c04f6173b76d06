"""What the self-check at load takes: milliseconds, operations and waits of the host by part, before and after the
conversion.

    python tests/gpu/check_price.py --json price.json            three layers, each in a process of its own, timed alone
    python tests/gpu/check_price.py --layer mxfp8:qwen3_silu:hopper_mxfp8         one of them, in this process
    python tests/gpu/check_price.py --device cpu --layer mxfp8:tiny_silu:cpu_dequantized      without a GPU

A layer is ``SCHEME:CASE:BACKEND``, with a case of ``table_SCHEME.py``. Printed are

* the duration of the check before the conversion: the first one, which compiles kernels while the other layers'
  processes do so, too, and then the least and the median of `--count` more;
* each part's own milliseconds, without the parts inside it, in medians: as the check runs, where a part that waits has
  the work of earlier ones, and with a wait for the device after each part;
* operations that torch dispatched in each part, kernels and copies of the device, and places at which the host waits;
* the same parts of conversions with their checks: of the first layer of a kind, and of a later one. Kernels that only
  serve are not compiled there.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import itertools
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu import backend_table  # noqa: E402

LAYERS = ("mxfp8:qwen3_silu:hopper_mxfp8", "wna16:qwen3_g128:hopper_wna16", "mxfp4:gpt_oss_20b:hopper_mxfp4")
MiB = 2**20
GARBAGE = "garbage"
"""What `backend_table.Built.convert` does before it converts: not reported."""


class Parts:
    """Times of the check's parts, while `timed` is entered.

    Attributes:
        seconds: by part, the parts inside it left out.
        calls: likewise.
        operations: that torch has dispatched, likewise, while `counted` is entered.
        waits: of the host for the device, likewise, by place, while `watched` is entered.
        on_end: called when a part ends, before its time does.
    """

    def __init__(self, on_end: Callable[[], object] = lambda: None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.on_end = on_end
        self._stack: list[str] = ["rest"]
        self._since = 0.0

    @property
    def current(self) -> str:
        """The innermost part."""
        return self._stack[-1]

    def _switch(self) -> None:
        self.on_end()
        now = time.perf_counter()
        self.seconds[self.current] += now - self._since
        self._since = now

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Times all parts. What is in none of them is the part ``rest``."""
        undo = []
        for owner, name, label in places():
            original = getattr(owner, name)
            undo.append((owner, name, vars(owner).get(name, original), name in vars(owner)))
            setattr(owner, name, self._wrapped(original, label))
        self._since = time.perf_counter()
        try:
            yield
            self._switch()
        finally:
            for owner, name, original, own in undo:
                if own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)

    def _wrapped(self, function: Any, label: str) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._stack.append(label)
            self.calls[label] += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._switch()
                self._stack.pop()

        return run

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what torch dispatches."""
        parts = self

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                parts.operations[parts.current] += 1
                return func(*args, **(kwargs or {}))

        with Count():
            yield

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts the host's waits."""

        def show(message: Any, *more: Any, **options: Any) -> None:
            if "synchroniz" in str(message):
                frames = [each for each in traceback.extract_stack() if "vllm_moe_oracle/" in each.filename]
                where = "elsewhere"
                if frames:
                    where = f"{frames[-1].filename.partition('vllm_moe_oracle/')[2]}:{frames[-1].lineno}"
                self.waits[self.current, where] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


def places() -> list[tuple[Any, str, str]]:
    """Functions that are parts: where each is looked up, its name there, and the part's."""
    from vllm_moe_oracle import schemes
    from vllm_moe_oracle.compat import weight_storage
    from vllm_moe_oracle.compat.adapter import Adapter
    from vllm_moe_oracle.methods import backend_check
    from vllm_moe_oracle.verification import bounds, converted_layer, inputs, self_check

    found: list[tuple[Any, str, str]] = [
        (inputs, "canonical_experts", "experts"),
        (inputs, "make_discriminating", "scales and biases"),
        (inputs, "make_inputs", "inputs"),
        (bounds, "reference_output", "reference"),
        (self_check, "_within_range", "reference finite?"),
        (self_check, "_plan_calls", "plan of calls"),
        (self_check, "_build_small_layer", "small layer built"),
        (weight_storage, "convert_in_place", "conversion"),
        (Adapter, "run_single_rank", "kernel calls"),
        (gc, "collect", GARBAGE),
        (bounds, "excesses", "comparisons"),
        (self_check.Calls, "make", "rest of calls"),
        (self_check.Calls, "result", "result"),
        (converted_layer.WeightParts, "add", "after: parts kept"),
        (converted_layer.InstalledLayer, "__init__", "after: inputs, reference"),
        (converted_layer.InstalledLayer, "compare", "after: calls"),
        (converted_layer.InstalledLayer, "compare_again", "after: once more"),
        (backend_check, "check_weights", "check of weights"),
        (backend_check, "check_kernel", "check before"),
    ]
    for name in ("mxfp8", "mxfp4", "wna16"):
        found += [(schemes.module(name), "read", "read"), (schemes.module(name), "check_values", "values checked")]
    return [each for each in found if hasattr(each[0], each[1])]


def median_parts(runs: list[Parts]) -> dict[str, float]:
    """Milliseconds by part: the median of several runs."""
    names = dict.fromkeys(name for each in runs for name in each.seconds)
    return {name: 1e3 * statistics.median(each.seconds[name] for each in runs) for name in names}


def synchronize(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(layer: str, device: str, count: int, profile: bool, quiet: backend_table.Quiet) -> dict[str, Any]:
    """Everything of one layer; prints it."""
    from vllm_moe_oracle import plugin
    from vllm_moe_oracle.backends._hopper import HopperBackend

    os.environ["MOE_ORACLE_SELF_CHECK"] = "group"  # the table of backends is made without
    scheme, case_name, name = layer.split(":")
    table = backend_table.table_of(scheme)
    case = table.cases[case_name]
    backend_table.join_alone(device)
    plugin.register()
    HopperBackend._warm_up = lambda *args, **kwargs: []  # type: ignore[method-assign]
    checkpoint = table.checkpoint(case, device)

    def build() -> backend_table.Built:
        return backend_table.build(table, case, checkpoint, device, "auto", own=name)

    made = build()
    wait = functools.partial(synchronize, device)

    def check(parts: Parts | None = None) -> Any:
        wait()
        if parts is None:
            return backend_table._checked(made, made.method.backend, made.method.adapter)
        with parts.timed():
            return backend_table._checked(made, made.method.backend, made.method.adapter)

    first = check()
    found: dict[str, Any] = {"layer": layer, "first_ms": 1e3 * first.seconds, "passed": first.passed}
    check()
    with quiet.alone():
        check()
        each = [1e3 * check().seconds for _ in range(count)]
        found |= {"least_ms": min(each), "median_ms": statistics.median(each), "each_ms": each}
        print(f"\n== {layer}: {first}")
        print(
            f"check before the conversion: first {found['first_ms']:.0f} ms, then least {min(each):.1f}, median "
            f"{statistics.median(each):.1f} of {', '.join(f'{value:.1f}' for value in each)}"
        )
        found |= parts_of_check(check, device, max(count, 3))
        if device == "cuda":
            found |= {"device": device_work(check), "peak_mib": peak_memory(check)}
        if profile:
            print_profile(check)
        made.close()
        found |= parts_of_conversions(build, wait, profile)
    plugin.unregister()
    backend_table.leave()
    return found


def parts_of_check(check: Callable[[Parts], object], device: str, count: int) -> dict[str, Any]:
    """A check by parts, as medians of `count` runs; prints it."""
    runs = [Parts() for _ in range(count)]
    alone = [Parts(functools.partial(synchronize, device)) for _ in range(count)]
    for parts in itertools.chain.from_iterable(zip(runs, alone, strict=True)):  # in turn
        check(parts)
    plain = Parts()
    with plain.counted():
        check(plain)
    if device == "cuda":
        watched = Parts()
        with watched.watched():
            check(watched)
        plain.waits = watched.waits
    return table_of_parts(median_parts(runs), median_parts(alone), plain)


def peak_memory(check: Callable[[], object]) -> float:
    """MiB that a check takes at most; prints them."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    check()
    found = (torch.cuda.max_memory_allocated() - before) / MiB
    print(f"peak memory of the check: {found:.0f} MiB")
    return found


def parts_of_conversions(
    build: Callable[[], backend_table.Built], wait: Callable[[], object], profile: bool
) -> dict[str, Any]:
    """Conversions with their checks by parts, after two that compile; prints them, and a later layer's profile."""
    from vllm_moe_oracle.methods import load_caches, load_summary

    found: dict[str, Any] = {}
    # A later layer's call is of a few tokens, with a kernel that a first layer's may not need. What has no title is not
    # reported: it compiles.
    for title, is_new in (("", True), ("", False), ("first layer of a kind", True), ("later layer", False)):
        if is_new:
            load_caches.end_load()
        # With its last layer a load ends, and what was checked is forgotten: here every layer is the last one.
        with mock.patch.object(load_summary, "end_load"):
            made = build()
            wait()
            parts = Parts()
            with parts.timed():
                made.convert()
        method = made.method
        again = 0.0
        if method.installed is not None:
            start = time.perf_counter()
            method.installed.compare_again()
            again = time.perf_counter() - start
        if title:
            milliseconds = {each: 1e3 * value for each, value in parts.seconds.items() if each != GARBAGE}
            found[title] = {"all": 1e3 * made.seconds, **milliseconds, "after: once more": 1e3 * again}
            print(f"-- conversion and checks, {title}: {1e3 * made.seconds:.1f} ms")
            print("   " + ", ".join(f"{each} {value:.1f}" for each, value in found[title].items()))
        made.close()
    if profile:
        with mock.patch.object(load_summary, "end_load"):
            made = build()
            wait()
            print_profile(made.convert)
        made.close()
    return found


def table_of_parts(plain: dict[str, float], alone: dict[str, float], counts: Parts) -> dict[str, Any]:
    """Prints a line for each part, and returns the figures."""
    print(f"{'part':22} {'ms':>8} {'waited':>8} {'calls':>6} {'ops':>6} {'waits':>6}")
    waits: Counter[str] = Counter()
    for (part, _), number in counts.waits.items():
        waits[part] += number
    for name in sorted(plain, key=plain.__getitem__, reverse=True):
        print(
            f"{name:22} {plain[name]:8.2f} {alone.get(name, 0.0):8.2f} {counts.calls[name]:6} "
            f"{counts.operations[name]:6} {waits[name]:6}"
        )
    print(
        f"{'all':22} {sum(plain.values()):8.2f} {sum(alone.values()):8.2f} {'':6} {sum(counts.operations.values()):6} "
        f"{sum(waits.values()):6}"
    )
    for (part, where), number in counts.waits.most_common(14):
        print(f"   {number:4} waits in {part}: {where}")
    return {
        "parts_ms": plain, "waited_parts_ms": alone, "operations": dict(counts.operations),
        "waits": {f"{part} at {where}": number for (part, where), number in counts.waits.items()},
    }  # fmt: skip


def device_work(check: Callable[[], object]) -> dict[str, Any]:
    """Calls of CUDA's interface and kernels in one check, by torch's profiler; prints them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        check()
        torch.cuda.synchronize()
    rows = traced.key_averages()
    calls = {each.key: each.count for each in rows if each.key.startswith(("cuda", "cu")) and each.count > 1}
    kernels = [each for each in rows if each.self_device_time_total > 0]
    total = sum(each.self_device_time_total for each in kernels) / 1e3
    print(f"device: {total:.2f} ms of kernels and copies; calls: {calls}")
    for each in sorted(kernels, key=lambda row: row.self_device_time_total, reverse=True)[:14]:
        print(f"   {each.self_device_time_total / 1e3:7.3f} ms {each.count:5} x {each.key[:80]}")
    return {"device_ms": total, "calls": calls}


def print_profile(called: Callable[[], object]) -> None:
    """The functions that take the host's time in a call."""
    profiler = cProfile.Profile()
    profiler.enable()
    called()
    profiler.disable()
    for order, lines in (("tottime", 40), ("cumulative", 60)):
        pstats.Stats(profiler).sort_stats(order).print_stats(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", help="SCHEME:CASE:BACKEND")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="also print the functions that take the host's time")
    parser.add_argument("--json", help="file to write")
    parser.add_argument("--quiet", default="", help="of a process: the lock that they share while they work")
    args = parser.parse_args()
    layers = args.layer or list(LAYERS)
    if len(layers) == 1:
        results = [measure(layers[0], args.device, args.count, args.profile, backend_table.Quiet(args.quiet))]
        status = 0 if results[0]["passed"] else 1
    else:
        results, status = in_processes(layers, args)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(status)


def in_processes(layers: list[str], args: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """Each layer in a process of its own: they compile at once, and are timed one after the other."""
    folder = Path(tempfile.mkdtemp())
    processes = []
    for place, layer in enumerate(layers):
        command = [sys.executable, __file__, "--layer", layer, "--device", args.device, "--count", str(args.count)]
        command += ["--json", str(folder / f"{place}.json"), "--quiet", str(folder / "quiet")]
        log = (folder / f"{place}.log").open("w")
        processes.append(subprocess.Popen(command + ["--profile"] * args.profile, stdout=log, stderr=subprocess.STDOUT))
    statuses = [process.wait() for process in processes]
    results = []
    for place, status in enumerate(statuses):
        print((folder / f"{place}.log").read_text()[-24000 if args.profile else -9000 :], flush=True)
        file = folder / f"{place}.json"
        results += json.loads(file.read_text()) if file.exists() else [{"layer": layers[place], "status": status}]
    return results, max(abs(status) for status in statuses)


if __name__ == "__main__":
    main()
