"""Measures a layer while a server starts: with the tuning that `tune` uses, in a process beside the server.

The server has read no weights yet, so that its GPU is nearly free. What a kernel breaks, it breaks in the other
process, on the same GPU; one that hangs is killed with it. Both are recorded as failures of the backend, as in `tune`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time

from ..core.objectives import Objective, parse_objective
from ..core.problem import Device, Problem
from ..devices import detect
from ..errors import MeasurementError
from ..measurements.bench_records import may_be_slow, needs_longer, silence_limits
from ..measurements.environment import Environment
from ..measurements.kernel_shape import kernel_shape_of
from ..measurements.roofline import expert_bytes
from ..measurements.store import Store
from ..methods.measure_hook import Measured, Progress
from ..oracle.measured_choice import MAX_TOKEN_RATIO
from ..settings import VISIBLE_GPUS_VAR, Settings, cache_dir, get_env
from . import engine, timing, tuning

logger = logging.getLogger("vllm.moe_oracle")

LARGEST_COUNT = 4096
"""Largest number of tokens that is measured, unless the objective goes beyond what can be extrapolated from it."""

REPLAYS = 10
SECONDS_PER_COUNT = 0.5
"""Timed replays of each backend at one number of tokens, and the seconds after which no more start: half of what `tune`
takes."""

COMPILE_SHARES = (0.75, 0.9)
"""Shares of the time in which each backend has to come back from its first call: at first, and where one did not at an
earlier start. About 10 s of it pass until processes run; measuring compiled kernels took 8 to 16 s on H200s."""

COMPILE_PROCESS_GIB = 3.0
"""Host memory of a process that compiles, with vLLM, a CUDA context and compilers, somewhat more than less."""

_WRITER_SECONDS = 5.0
"""What each step waits for other processes that write the cache: the other ranks wait for this one."""

CONTEXT_BYTES = 2 << 30
"""Device memory of a process beside its tensors: the CUDA context, libraries and kernels."""
OTHERS_BYTES = 4 << 30
"""Device memory that this server may hold outside torch before weights are loaded: its context, and communication
libraries' buffers. More belongs to another process, whose kernels would be on the clock."""
PADDING = 1.25
"""Bytes of a kernel's tensors over the checkpoint's, at most."""


def token_counts(objective: Objective) -> tuple[int, ...]:
    """Powers of four from the objective's smallest number of tokens or below to its largest: the fewest from which a
    choice is made."""
    ratio = int(MAX_TOKEN_RATIO)
    counts = [1]
    while counts[-1] * ratio <= objective.weights[0][0]:
        counts[-1] *= ratio
    while counts[-1] < objective.largest and (counts[-1] < LARGEST_COUNT or counts[-1] * ratio < objective.largest):
        counts.append(counts[-1] * ratio)
    return tuple(counts)


def compile_processes(backends: int, layers: int) -> int:
    """Number of processes that compile at once: two for each backend, on half of the cores and in half of the host's
    memory; 0 where one process does it.

    Args:
        backends: number of backends.
        layers: number of layers that fit into free device memory, one a process.
    """
    room = detect.host_memory_gib() / 2 // COMPILE_PROCESS_GIB
    count = min(2 * backends, layers, detect.usable_cores() // 2, int(room))
    return count if count > 1 else 0


def required_bytes(problem: Problem, backends: int, tokens: int) -> int:
    """Device memory that measuring a layer takes, in bytes, somewhat more than less.

    Args:
        problem: the layer.
        backends: number of backends, whose layers are held together.
        tokens: largest number of tokens.
    """
    layer = PADDING * expert_bytes(problem) * problem.local_experts
    layer *= max(1, min(engine.MAX_COPIES, math.ceil(engine.ROTATION_BYTES / layer)))
    # The products' inputs and outputs of every slot, in 32 bits at most, twice for graphs.
    slot = 4 * (problem.w13_rows + problem.intermediate_size + 2 * problem.hidden_size)
    calls = 2 * tokens * (problem.top_k * slot + 4 * problem.hidden_size)
    return int(backends * layer + calls) + timing.FLUSH_BYTES + CONTEXT_BYTES


def measure(
    problem: Problem, names: tuple[str, ...], settings: Settings, seconds: float, progress: Progress
) -> Measured:
    """Measures what the cache does not have yet, and stores it. The cache is prepared as by `tune`. Where another start
    measures on the same device with the same cache, this one waits, within its own time, and measures what is missing
    then.

    Args:
        problem: the layer.
        names: the backends, which compute the same numbers.
        settings: they name the cache, the objective and the whole start's limit.
        seconds: what is left of that limit.
        progress: receives a line, the steps done and the number of steps.

    Raises:
        MeasurementError: the cache cannot be written, device memory does not suffice, another process uses the GPU, or
            another start measures for longer than this one waits. Samples that were stored before are kept.
    """
    end = time.monotonic() + seconds
    store = Store(cache_dir(settings), _log_wait, _WRITER_SECONDS)
    if note := store.prepare():
        logger.warning("moe_oracle: %s", note)
    device = detect.detect()
    alone: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if tuning.is_incomplete(problem, device, settings, store, _options(problem, names, settings, device, store)):
        alone = store.measuring_alone(detect.device_id(), max(0.0, end - time.monotonic()))
    with alone:  # what another start has stored meanwhile changes the options
        options = _options(problem, names, settings, device, store)
        fitting = 0  # on a CPU nothing of weight compiles
        if device.kind == "cuda" and tuning.is_incomplete(problem, device, settings, store, options):
            most = max(options.token_counts)
            fitting = _check_memory(required_bytes(problem, len(names), most)) // required_bytes(problem, 1, most)
        jobs = compile_processes(len(names), fitting)
        options = dataclasses.replace(options, jobs=jobs, budget=max(0.0, end - time.monotonic()))
        ((_, outcome),) = tuning.tune([problem], device, settings, store, options, (), progress).items()
    failed = {each.backend: each for each in outcome.samples if each.failure}
    failures = {name: failed[name].failure for name in names if name in failed}
    slow = [name for name in failures if may_be_slow(failed[name].silent_seconds, settings.measure_at_start)]
    times = sum(each.backend in names and not each.failure for each in outcome.samples)
    return Measured(times, outcome.unfinished, failures, {name: failures.pop(name) for name in slow}, str(store.path))


def _options(
    problem: Problem, names: tuple[str, ...], settings: Settings, device: Device, store: Store
) -> tuning.TuneOptions:
    """What is measured of a layer, and how long a backend has, by what earlier starts have stored: without jobs and a
    budget."""
    gpu = detect.current_gpu_name(get_env(VISIBLE_GPUS_VAR)) if device.kind == "cuda" else None
    first, last = silence_limits(settings.measure_at_start)
    here = Environment.of(device)
    waited = [
        each.silent_seconds
        for there, samples in store.samples(kernel_shape_of(problem))
        if there == here
        for each in samples
        if each.backend in names
    ]
    again = any(needs_longer(each, last) for each in waited)
    return tuning.TuneOptions(
        token_counts(parse_objective(settings.objective)),
        ("uniform",),
        REPLAYS,
        SECONDS_PER_COUNT,
        compile_share=COMPILE_SHARES[again],
        gpus=(gpu,),
        backends=names,
        silence=last if again else first,
    )


def _log_wait(words: str) -> None:
    logger.info("moe_oracle: %s", words)


def _check_memory(needed: int) -> int:
    """Checks that times taken now would be right.

    Args:
        needed: device memory that measuring takes, in bytes.

    Returns:
        The free device memory, in bytes.

    Raises:
        MeasurementError: they would not be.
    """
    memory = detect.gpu_memory()
    if memory.by_others > OTHERS_BYTES:
        rule = f"another process uses the GPU: {_gib(memory.by_others)} are in use, and not by this one's tensors"
        raise MeasurementError(rule, "End it, or measure with vllm-moe-oracle tune while the GPU is free")
    if memory.free < needed:
        rule = f"a layer and its copies need {_gib(needed)} of device memory, of which {_gib(memory.free)} are free"
        raise MeasurementError(rule, "Measure with vllm-moe-oracle tune on a GPU with more free memory")
    return memory.free


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
