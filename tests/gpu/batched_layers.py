"""Times experts on tokens that an all-to-all has sorted by expert, `[experts, rows, hidden]`: this project's kernels
beside every class of vLLM's for this format that takes the layer.

    python -m tests.gpu.batched_layers --json batched.json [--seconds 200] [--only WORDS]

One Hopper GPU with vLLM; the plugin must be installed and is not registered. Each layer is that of one rank of expert
parallelism. The buffer has a row for each token that all ranks may send, as DeepEP's low-latency kernels hand it over,
and counts on the device say how many rows of each expert hold tokens: 1 to 256 on average, the same for all experts
(uniform), or by Zipf's law over three quarters of the experts and none for the others (skewed). vLLM's modular kernel
runs the experts. A step that hands over the buffer replaces its all-to-all, which is not timed.

Kernels are compiled first, in a process for each layer. Rows without tokens hold NaN, and so do outputs before a call;
the first and the last row of every expert are then compared with a float32 reference, for each time in the table.
`own, for the tokens` runs the configuration that this project's kernels choose for as many rows as hold tokens, where
it is another than that for the rows of the buffer: no call can know it, since the counts are on the device.

``--cpu`` tries the tool without a GPU, on tiny layers with the emulation.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_PLUGINS", "")

import torch
from torch import Tensor

from tests.gpu.backend_table import FewKernels
from tests.gpu.unlisted_layers import GPT_OSS, INT4, MXFP4, MXFP8, SWIGLUOAI, layer_of
from tests.lib.cases import INT4_G32
from vllm_moe_oracle import schemes
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.decision import Rejected
from vllm_moe_oracle.core.problem import Parallel, Problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.layouts.byte_views import stack_bytes
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measuring import engine, random_weights, timing, worker_pool
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.verification import tolerances

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS_PER_RANK = 128
"""Most tokens that a rank sends: the rows of the buffer are as many times the ranks."""
EXPERTS = "vllm.model_executor.layers.fused_moe.experts"
STOCK_CLASSES = {
    "marlin": f"{EXPERTS}.marlin_moe:BatchedMarlinExperts",
    "humming": f"{EXPERTS}.fused_humming_moe:BatchedHummingGroupedExperts",
    "triton": f"{EXPERTS}.fused_batched_moe:BatchedTritonExperts",
    "deep_gemm": f"{EXPERTS}.batched_deep_gemm_moe:BatchedDeepGemmExperts",
    "cutlass": f"{EXPERTS}.cutlass_moe:CutlassBatchedExpertsFp8",
    "cutedsl": f"{EXPERTS}.flashinfer_cutedsl_batched_moe:FlashInferCuteDSLBatchedExperts",
}
"""vLLM 0.33's classes of experts for this format, by the words of this table."""
BFLOAT16 = "triton, bf16 weights"
"""The layer's weights in bfloat16, in the class that vLLM runs unquantized layers with: not the same layer."""
COUNTERS = 1 << 22
OWN, TUNED = "own", "own, for the tokens"
ROUTINGS = ("uniform", "skewed")
Ready = set[tuple[str, int]]


def _batched(
    name: str, scheme: Any, experts: int, top_k: int, hidden: int, inner: int, ep: int, **more: Any
) -> Problem:
    problem = layer_of(name, scheme, experts, top_k, hidden, inner, ep=ep, **more)
    return dataclasses.replace(problem, parallel=Parallel(dp=ep, ep=ep, format="batched"))


LAYERS = (
    _batched("mxfp8:qwen3-30b@ep8", MXFP8, 128, 8, 2048, 768, 8),
    _batched("int4_g128:qwen3-30b@ep8", INT4, 128, 8, 2048, 768, 8),
    _batched("mxfp4:gpt-oss-120b@ep8", GPT_OSS, 128, 4, 2880, 2880, 8, activation=SWIGLUOAI, has_bias=True),
    _batched("mxfp8:deepseek-v3@ep16", MXFP8, 256, 8, 7168, 2048, 16),
    _batched("int4_g32:deepseek-v3@ep16", INT4_G32, 256, 8, 7168, 2048, 16),
    _batched("int4_g128:deepseek-v3@ep16", INT4, 256, 8, 7168, 2048, 16),
    _batched("mxfp4:qwen3-30b@ep8", MXFP4, 128, 8, 2048, 768, 8),
    _batched("int4_g32:qwen3-30b@ep8", INT4_G32, 128, 8, 2048, 768, 8),
    _batched("mxfp4:deepseek-v3@ep16", MXFP4, 256, 8, 7168, 2048, 16),
)
TINY = (
    _batched("mxfp8:tiny@ep2", MXFP8, 8, 2, 128, 64, 2),
    _batched("int4_g32:tiny@ep2", INT4_G32, 8, 2, 128, 64, 2),
    _batched("mxfp4:tiny@ep2", GPT_OSS, 8, 2, 128, 64, 2, activation=SWIGLUOAI, has_bias=True),
)


def counts_of(experts: int, tokens: int, rows: int, routing: str) -> list[int]:
    """Tokens of each expert: `tokens` on average, at most `rows`. Skewed: a quarter of the experts has none.

    Args:
        experts: of this rank.
        tokens: mean over its experts.
        rows: of the buffer, for each expert.
        routing: ``uniform`` or ``skewed``.
    """
    if routing == "uniform":
        return [tokens] * experts
    held = max(1, experts - experts // 4)
    left = experts * tokens
    found = [0] * experts
    shares = [1 / (index + 1) for index in range(held)]
    # The largest first; what an expert cannot hold goes to the next ones. Neighbors in order are not neighbors here.
    for index, share in enumerate(shares):
        mine = min(rows, left, math.ceil(left * share / sum(shares[index:])))
        found[(index * 5 + 3) % experts if math.gcd(5, experts) == 1 else index] = mine
        left -= mine
    return found


class Buffer:
    """What an all-to-all hands over, and what the experts make of it. Replaces vLLM's prepare and finalize steps.

    Attributes:
        x: `[experts, rows, hidden]`, hidden as wide as the experts want it; NaN in rows without tokens.
        counts: int32 `[experts]`.
        output: of the last call, `[experts, rows, hidden]`.
    """

    def __init__(self, problem: Problem, rows: int, hidden: int, device: str) -> None:
        from vllm.model_executor.layers.fused_moe import modular_kernel as mk
        from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

        experts, dtype = problem.local_experts, getattr(torch, problem.dtype)
        generator = torch.Generator(device=device).manual_seed(0)
        self.values = torch.randn(experts, rows, problem.hidden_size, device=device, generator=generator).to(dtype)
        self.x = torch.zeros(experts, rows, hidden, dtype=dtype, device=device)
        self.counts = torch.zeros(experts, dtype=torch.int32, device=device)
        self.output = self.x
        held = mk.ExpertTokensMetadata(expert_num_tokens=self.counts, expert_num_tokens_cpu=None)
        buffer = self

        class HandOver(BatchedPrepareAndFinalize):  # type: ignore[misc]
            def prepare(self, *args: Any, **kwargs: Any) -> Any:
                return buffer.x, None, held, None, None

            def finalize(self, output: Any, fused_expert_output: Tensor, *args: Any, **kwargs: Any) -> None:
                buffer.output = fused_expert_output

        self.step = HandOver(rows, experts, num_dispatchers=1, rank=0)

    def fill(self, counts: list[int]) -> None:
        """Puts tokens into the first rows of each expert."""
        self.counts.copy_(torch.tensor(counts, dtype=torch.int32))
        held = torch.arange(self.x.shape[1], device=self.x.device) < self.counts[:, None]
        self.x[..., : self.values.shape[-1]] = self.values.masked_fill(~held[..., None], math.nan)


class Experts:
    """One way of running the layer: copies of converted weights, and a buffer of its own width.

    Args:
        context: where it runs.
        problem: the layer.
        backend: converts canonical experts, and builds; of `BFLOAT16` only the numbers.
        canonical: a few distinct experts.
        rows: of the buffer, for each expert.
        stock_class: builds this class of vLLM's over the backend's tensors, not what the backend builds.
        buffers: shared by hidden size.
    """

    def __init__(
        self, context: engine.BenchContext, problem: Problem, backend: Backend, canonical: dict[str, Tensor], rows: int,
        buffers: dict[int, Buffer], stock_class: str = "",
    ) -> None:  # fmt: skip
        from vllm_moe_oracle.compat import current_adapter, standalone_layer
        from vllm_moe_oracle.compat.experts_builder import VllmBuilder

        self.adapter = current_adapter()
        self._context, self.problem, self.backend = context, problem, backend
        plan, device = backend.plan(problem, context.device), context.device.kind
        few = [{name: each[index] for name, each in canonical.items()} for index in range(len(canonical["w13"]))]
        if stock_class.endswith("BatchedTritonExperts"):
            converted = [_in_bfloat16(each, problem) for each in few]
        else:
            converted = [backend.convert(each, problem, plan) for each in few]
        size = sum(each.nbytes for each in converted[0].values()) * problem.local_experts
        self.kernels: list[tuple[Any, Any]] = []
        for _ in range(max(1, min(engine.MAX_COPIES, math.ceil(engine.ROTATION_BYTES / size)))):
            tensors = {
                name: random_weights.repeat_experts(
                    stack_bytes([each[name] for each in converted]), problem.local_experts
                )
                for name in converted[0]
            }
            moe = standalone_layer.fused_moe_config(problem, device, rows)
            described = self.adapter.quant_config(problem, tensors)
            if stock_class:
                built = self._stock(stock_class, moe, described, tensors)
            else:
                builder = VllmBuilder(self.adapter, moe, described, for_serving=False, batched=True)
                # Counters for every configuration: `own, for the tokens` needs others than the layer allocates.
                vars(builder)["register_buffer"] = _with_more_counters
                built = backend.build_experts(tensors, problem, plan, builder)
            hidden = int(moe.hidden_dim)
            if hidden not in buffers:
                buffers[hidden] = Buffer(problem, rows, hidden, device)
            self.buffer = buffers[hidden]
            kernel = self.adapter.modular_kernel(self.buffer.step, built)
            self.kernels.append((kernel, standalone_layer.layer_namespace(problem, moe, tensors)))

    def _stock(self, name: str, moe: Any, described: Any, tensors: dict[str, Tensor]) -> Any:
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

        from vllm_moe_oracle.compat import humming

        found = self.adapter.stock_class(name)
        humming_config = "humming" in name
        config = humming.quant_config(described, self.problem) if humming_config else FUSED_MOE_UNQUANTIZED_CONFIG
        return found(moe, config, **self.adapter.batched_kwargs(found, moe))

    def runs(self, tokens: int) -> list[timing.Run]:
        """A function for each copy, which returns `[experts, rows, hidden]`.

        Args:
            tokens: mean over the experts: some of vLLM's classes take a number of tokens on all ranks from the ids.
        """
        problem, device = self.problem, self._context.device.kind
        count = max(1, tokens * problem.num_experts // problem.top_k)
        x = torch.zeros(count, self.buffer.x.shape[-1], dtype=self.buffer.x.dtype, device=device)
        weights = torch.ones(count, problem.top_k, dtype=torch.float32, device=device)
        ids = torch.zeros(count, problem.top_k, dtype=torch.int32, device=device)
        return [self._run(*kernel, x, weights, ids) for kernel in self.kernels]

    def _run(self, kernel: Any, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> timing.Run:
        from vllm_moe_oracle.compat import standalone_layer

        def run() -> Tensor:
            with standalone_layer.forward_step(self._context.config, x.shape[0]):
                self.adapter.apply(kernel, layer, x, weights, ids, {})
            return self.buffer.output

        return run


def _with_more_counters(buffer: Tensor) -> Tensor:
    return buffer.new_zeros(max(buffer.numel(), COUNTERS)) if buffer.dtype == torch.int32 else buffer


def _in_bfloat16(expert: dict[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    dtype = getattr(torch, problem.dtype)
    scheme = schemes.module(problem.scheme.name)
    return {name: scheme.dequantize_expert(expert, name).to(dtype) for name in ("w13", "w2")}


@contextmanager
def chosen_for(tokens: int) -> Iterator[None]:
    """Inside, this project's kernels run the configuration that they choose for that many rows in all."""
    from vllm_moe_oracle.backends import _hopper

    launches = _hopper._LayerLaunches
    before, needs = launches.config, dict(_hopper._memory_needs)
    _hopper._memory_needs.clear()
    launches.config = lambda self, rows: before(self, tokens)  # type: ignore[method-assign]
    try:
        yield
    finally:
        launches.config = before  # type: ignore[method-assign]
        _hopper._memory_needs.clear()
        _hopper._memory_needs.update(needs)


def own_config(problem: Problem, rows: int) -> str:
    """The configuration of this project's kernels for that many rows in all, in words."""
    from vllm_moe_oracle.kernels.config import choose_config

    backend: Any = default_registry()[f"hopper_{problem.scheme.name}"]
    backend = getattr(backend, "_backend", backend)
    called = problem.as_called()
    blank = backend._allocate(called, called.local_experts, "meta")
    return str(choose_config(blank, 1, rows, quantize=False))


def candidates(problem: Problem, device: Any, rows: int) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """What can run the layer, as (backend, class of vLLM's or ""), and why the others cannot, by name."""
    from vllm.model_executor.layers.quantization.utils import quant_utils

    from vllm_moe_oracle.compat import current_adapter, experts_adapter, standalone_layer

    scheme, registry, adapter = problem.scheme.name, default_registry(), current_adapter()
    if device.kind == "cpu":
        return {OWN: ("emulation", "")}, {}
    found: dict[str, tuple[str, str]] = {}
    skipped: dict[str, str] = {}

    def take(name: str, backend: str, stock_class: str = "") -> None:
        if backend not in registry:
            skipped[name] = f"no backend {backend} wraps it"
            return
        verdict = registry[backend].check(problem, device)
        if isinstance(verdict, Rejected) and not stock_class:
            skipped[name] = "; ".join(f"{each.code}: {each.detail}" for each in verdict.reasons)
        else:
            found[name] = (backend, stock_class)

    take(OWN, f"hopper_{scheme}")
    moe = standalone_layer.fused_moe_config(problem, "cuda", rows)
    parallel = dict(tp_size=1, pcp_size=1, dp_size=problem.parallel.ep, ep_size=problem.parallel.ep, use_ep=True)
    known = {each.name for each in dataclasses.fields(moe.moe_parallel_config)}
    ranks = {name: value for name, value in parallel.items() if name in known}
    moe.moe_parallel_config = dataclasses.replace(
        moe.moe_parallel_config, **ranks, all2all_backend="deepep_low_latency"
    )
    for name, path in STOCK_CLASSES.items():
        backend = registry[f"hopper_{scheme}"]
        weights = getattr(quant_utils, experts_adapter._weight_quant_key(backend, problem))
        inputs = quant_utils.kMxfp8Dynamic if scheme == "mxfp8" else None
        try:
            stock = adapter.stock_class(path)
            supported, reason = stock.is_supported_config(stock, moe, weights, inputs, stock.activation_format())
        except Exception as error:  # whatever it raises is why stock does not choose it
            supported, reason = False, f"{type(error).__name__}: {error}"
        if not supported:
            skipped[name] = f"stock refuses: {' '.join(str(reason).split())[:160]}"
        elif name == "marlin":
            take(name, f"marlin_{scheme}_batched")
        elif name == "humming":
            take(name, f"humming_{scheme}_grouped", path)
        else:
            skipped[name] = "stock would take it; this tool cannot convert the weights"
    if problem.has_bias:
        skipped[BFLOAT16] = "BatchedTritonExperts adds no biases"
    else:
        found[BFLOAT16] = (f"hopper_{scheme}", STOCK_CLASSES["triton"])
    return found, skipped


class Layer:
    """A layer in every way that can run it.

    Args:
        context: where it runs.
        problem: the layer.
        rows: of the buffer, for each expert.
        ready: what was compiled, as (name, mean number of tokens); None for everything.
        part: ``own`` or ``stock``: of the ways, only those.
    """

    def __init__(
        self, context: engine.BenchContext, problem: Problem, rows: int, ready: Ready | None = None, part: str = ""
    ) -> None:
        self.context, self.problem, self.rows, self.ready = context, problem, rows, ready
        device = context.device.kind
        self.canonical = random_weights.random_experts(problem, device, min(4, problem.local_experts))
        found, self.skipped = candidates(problem, context.device, rows)
        self.buffers: dict[int, Buffer] = {}
        self.experts: dict[str, Experts] = {}
        self.configs: dict[str, str] = {}
        for name, (backend, stock_class) in found.items():
            if part and (name == OWN) != (part == "own"):
                continue
            if ready is not None and not any(name == each for each, _ in ready):
                self.skipped[name] = "its kernels failed, or were not compiled in time"
                continue
            try:
                registered: Any = default_registry()[backend]
                self.experts[name] = Experts(
                    context, problem, registered, self.canonical, rows, self.buffers, stock_class
                )
            except Exception as error:  # what it raises is why it is not timed
                self.skipped[name] = f"{type(error).__name__}: {error}"[:300]

    def variants(self, tokens: int) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """Contexts in which each way runs at a mean number of tokens, by name."""
        found: dict[str, Callable[[], AbstractContextManager[None]]] = dict.fromkeys(self.experts, nullcontext)
        held = tokens * self.problem.local_experts
        if OWN in self.experts and self.context.device.kind == "cuda":
            self.configs = {OWN: own_config(self.problem, self.rows * self.problem.local_experts)}
            wanted = own_config(self.problem, held)
            if wanted != self.configs[OWN]:
                self.configs[TUNED] = wanted
                found[TUNED] = lambda: chosen_for(held)
        return {name: how for name, how in found.items() if self.ready is None or (name, tokens) in self.ready}

    def fill(self, counts: list[int]) -> None:
        """Puts tokens into all buffers."""
        for buffer in self.buffers.values():
            buffer.fill(counts)

    def places(self, counts: list[int]) -> tuple[Tensor, Tensor]:
        """Experts and rows of the first and last token of each expert, `[n]` each."""
        found = sorted({(index, row) for index, count in enumerate(counts) if count for row in (0, count - 1)})
        expert, row = (torch.tensor(each, device=self.context.device.kind) for each in zip(*found, strict=True))
        return expert, row

    def reference(self, expert: Tensor, row: Tensor, activations: Any) -> Tensor:
        """Outputs of some rows, float32 `[n, hidden]`, with activations in a precision."""
        problem, distinct = self.problem, self.canonical["w13"].shape[0]
        few = dataclasses.replace(
            problem, scheme=dataclasses.replace(problem.scheme, activations=activations), num_experts=distinct,
            local_experts=distinct, top_k=1, parallel=Parallel(),
        )  # fmt: skip
        x = next(iter(self.buffers.values())).values[expert, row]
        expected = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        ids = (expert % distinct).to(torch.int32)[:, None]
        forward(self.canonical, few, expected, x, torch.ones(ids.shape, device=x.device), ids)
        return expected

    def first_calls(self, tokens: tuple[int, ...]) -> Iterator[tuple[str, int, str]]:
        """Calls everything: name, mean number of tokens, and why it failed, "" where it did not. `TUNED` comes last."""
        for name in (*self.experts, TUNED):
            for count in tokens:
                how = self.variants(count).get(name)
                if how is None:
                    continue
                failure = ""
                try:
                    with how():
                        for routing in ROUTINGS:
                            self.fill(counts_of(self.problem.local_experts, count, self.rows, routing))
                            self.experts[OWN if name == TUNED else name].runs(count)[0]()
                        if self.context.device.kind == "cuda":
                            torch.cuda.synchronize()
                except Exception as error:  # what it raises is why it is not timed
                    failure = f"{type(error).__name__}: {error}"[:300]
                yield name, count, failure

    def measure(self, tokens: int, replays: int, seconds: float) -> Iterator[dict[str, Any]]:
        """A row of the table for each routing, at a mean number of tokens."""
        graphs: dict[str, list[tuple[timing.Run, Tensor]]] = {}
        failures: dict[str, str] = {}
        clock = self.context.clock
        self.fill(counts_of(self.problem.local_experts, tokens, self.rows, "uniform"))
        for name, how in self.variants(tokens).items():
            runs = self.experts[OWN if name == TUNED else name].runs(tokens)
            try:
                with how():
                    graphs[name] = [clock.prepare(run) for run in runs]
            except Exception as error:  # what it raises is why it is not timed
                failures[name] = f"{type(error).__name__}: {error}"[:300]
        for routing in ROUTINGS:
            counts = counts_of(self.problem.local_experts, tokens, self.rows, routing)
            self.fill(counts)
            expert, row = self.places(counts)
            expected: dict[str, Tensor] = {}
            errors: dict[str, float] = {}
            wrong = dict(failures)
            for name, copies in graphs.items():
                backend = self.experts[OWN if name == TUNED else name].backend
                replay, output = copies[0]
                output.fill_(math.nan)
                result = replay()
                found = output if result is None else result
                precision = backend.activations(self.problem)
                if precision not in expected:
                    expected[precision] = self.reference(expert, row, precision)
                distance = tolerances.token_error(found[expert, row, : self.problem.hidden_size], expected[precision])
                errors[name] = float(f"{distance:.3g}")
                allowed = tolerances.error_tolerance(backend, self.problem)
                if not distance <= allowed:
                    wrong[name] = f"relative error {distance:.2e}, allowed {allowed:.2e}"
            timed = {name: [run for run, _ in each] for name, each in graphs.items() if name not in wrong}
            times = timing.time_interleaved(clock, timed, replays, seconds)
            yield {
                "layer": self.problem.layer, "tokens": tokens, "routing": routing, "counts": counts, "rows": self.rows,
                "us": {name: round(each.us, 2) for name, each in times.items()},
                "quartiles": {name: [round(each.low, 2), round(each.high, 2)] for name, each in times.items()},
                "replays": {name: each.replays for name, each in times.items()},
                "errors": errors, "failures": wrong, "configs": dict(self.configs),
            }  # fmt: skip


def rows_of(problem: Problem) -> int:
    """Rows of the buffer, for each expert."""
    return TOKENS_PER_RANK * problem.parallel.ep


def compile_layer(task: tuple[Problem, str, tuple[int, ...], int], send: worker_pool.SendProgress) -> str:
    """Calls a part of a layer's ways in a worker, and sends what `Layer.first_calls` says; what ended it, if anything.

    Args:
        task: the layer, the part, mean numbers of tokens, and most rows of a buffer.
        send: see `worker_pool.run_tasks`.
    """
    problem, part, tokens, most = task
    try:
        with engine.open_context(detect.detect(), most) as context, few_kernels(problem, tokens):
            for said in Layer(context, problem, rows_of(problem), part=part).first_calls(tokens):
                send(said)
    except Exception as error:  # of one layer, which must not end the others
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def compile_layers(layers: list[Problem], tokens: tuple[int, ...], most: int, seconds: float) -> dict[str, Ready]:
    """Compiles each layer in two processes, one of them for vLLM's classes; what was ready in time, by layer.

    On a machine with several GPUs they are spread over these.
    """
    from tests.gpu import batched_layers  # workers know the function by the module's name

    gpus = [str(index) for index in range(torch.cuda.device_count())]
    visible: list[str | None] = [*os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(gpus)).split(",")] if gpus else [None]
    tasks = [(problem, part, tokens, most) for part in ("own", "stock") for problem in layers]
    ready: dict[str, Ready] = {problem.layer: set() for problem in layers}
    for event in worker_pool.run_tasks(
        batched_layers.compile_layer, tasks, [visible[index % len(visible)] for index in range(len(tasks))],
        quiet=True, limits=worker_pool.Limits(until=time.monotonic() + seconds),
    ):  # fmt: skip
        problem, part = tasks[event.task][:2]
        name, count, failure = event.value if event.kind == "progress" else (part, 0, event.value)
        if failure:
            print(f"{problem.layer}: {name}: {failure}", flush=True)
        elif event.kind == "progress":
            ready[problem.layer].add((name, count))
    return ready


def few_kernels(problem: Problem, tokens: tuple[int, ...]) -> AbstractContextManager[Any]:
    """Humming compiles only kernels that are called; nothing where there is no Humming."""
    if importlib.util.find_spec("humming") is None:
        return nullcontext()
    return FewKernels(count * problem.local_experts for count in tokens)


def conditions(args: argparse.Namespace, device: Any) -> dict[str, Any]:
    """What the times belong to."""
    here, words = Environment.of(device), shlex.join(sys.argv[1:]).replace(str(args.json), args.json.name)
    return {
        "command": f"python -m tests.gpu.batched_layers {words}",
        "gpu": here.gpu, "driver": here.driver, "packages": here.packages, "kernels": here.kernels,
        "rows": f"{TOKENS_PER_RANK} for each rank, of each expert", "tokens": "mean over this rank's experts",
        "skewed": "Zipf's law over three quarters of the experts, at most all rows; the other experts have none",
        "method": (
            f"the experts of vLLM's modular kernel without its all-to-all; CUDA graphs; {timing.FLUSH_BYTES >> 20} MiB "
            f"written before each replay; layers under {engine.ROTATION_BYTES >> 20} MiB in several copies that "
            f"rotate; shuffled order; medians and quartiles in microseconds of up to {args.replays} replays; first and "
            "last row of each expert compared with a float32 reference before each time"
        ),
    }  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    """One line of the table: times, and what they are of the best stock class for the same layer."""
    us = row["us"]
    stock = {name: each for name, each in us.items() if name not in (OWN, TUNED, BFLOAT16)}
    words = "  ".join(f"{name} {each:.1f}" for name, each in us.items())
    if stock and OWN in us:
        best = min(stock, key=lambda name: stock[name])
        words += f"  | {best}/own {stock[best] / us[OWN]:.2f}"
    print(f"{row['layer']:28} {row['tokens']:4} {row['routing']:8} {words}", flush=True)
    for name, failure in row["failures"].items():
        print(f"    {name}: {failure}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default="", help="layers whose names contain one of these words, comma-separated")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="mean numbers of tokens an expert")
    parser.add_argument("--seconds", type=float, default=190.0, help="start no further layer after these seconds")
    parser.add_argument(
        "--compile-seconds", type=float, default=110.0, help="end the processes that compile after these"
    )
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    begin = time.monotonic()
    device, tokens = detect.detect(), tuple(map(int, args.tokens.split(",")))
    layers = [
        each for each in (TINY if args.cpu else LAYERS) if any(word in each.layer for word in args.only.split(","))
    ]
    most = max(map(rows_of, layers)) * max(each.local_experts for each in layers)
    found: dict[str, Any] = {"conditions": conditions(args, device), "skipped": {}, "rows": []}
    ready = compile_layers(layers, tokens, most, args.compile_seconds)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    failed = False
    with engine.open_context(device, most) as context:
        for problem in layers:
            if time.monotonic() - begin > args.seconds:
                print(f"{problem.layer}: not started", flush=True)
                failed = True
                continue
            with few_kernels(problem, tokens):
                layer = Layer(context, problem, rows_of(problem), ready[problem.layer])
                found["skipped"][problem.layer] = layer.skipped
                for name, reason in layer.skipped.items():
                    print(f"{problem.layer}: without {name}: {reason}", flush=True)
                for _ in layer.first_calls(tokens):  # a workspace that grew later would leave graphs with the freed one
                    pass
                for count in tokens:
                    for row in layer.measure(count, args.replays, seconds=1.0):
                        failed |= OWN not in row["us"]
                        found["rows"].append(row)
                        print_row(row)
                    args.json.write_text(json.dumps(found, indent=1) + "\n")
            del layer
            engine.free_memory(device)
    print(f"{len(found['rows'])} rows in {time.monotonic() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
