"""Builds a layer with each accepted backend as serving does, checks its output, and times it.

The backend converts canonical experts and builds its experts with vLLM's builder; vLLM's modular kernel runs them. Only
what an engine would set up around a layer is substituted, by `compat.standalone_layer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..backends import Backend
from ..backends.emulation import forward
from ..compat import current_adapter
from ..compat.experts_builder import VllmBuilder
from ..core.problem import Device, Problem
from ..errors import MeasurementError, describe_error
from ..measurements.kernel_shape import RoutingKind, Sample, Timing
from ..oracle.checked_backend import watched_calls, watched_kernel
from ..oracle.watchdog import doing
from ..verification import process_state, tolerances
from . import random_weights, timing
from .broken_context import how_to_leave_out, raise_if_broken
from .random_weights import TokenBatch
from .timing import Clock, Run

logger = logging.getLogger("vllm.moe_oracle")

ROTATION_BYTES = 128 << 20
"""A smaller layer exists in several copies that rotate, up to this total size: more than twice an H200's L2 cache."""
MAX_COPIES = 4
"""Most copies of a layer."""
TILE_MARGIN = 0.02
"""Fraction of the time of a backend's own choice that a tile configuration must save to replace it. Two runs of one
configuration differ by as much."""
CHECKED_TOKENS = 4
"""Tokens of a call whose output is compared with the reference."""

_NO_FIXED_TILES: Mapping[str, str] = MappingProxyType({})


def describe_method(replays: int) -> str:
    """How times are measured, for the conditions that are written beside them.

    Args:
        replays: most replays of a call.
    """
    return (
        f"CUDA graphs; {timing.FLUSH_BYTES >> 20} MiB written before each replay; layers under {ROTATION_BYTES >> 20} "
        "MiB in several copies that rotate; backends in shuffled order; medians and quartiles in microseconds of up to "
        f"{replays} replays; {CHECKED_TOKENS} tokens of each call compared with a float32 reference"
    )


OnBackend = Callable[[str], None]
"""Receives the name of the backend that is about to run, "" before several take turns. Who watches this process learns
by it which one took the process down."""


@contextmanager
def open_context(
    device: Device, max_num_tokens: int, on_backend: OnBackend = lambda name: None
) -> Iterator[BenchContext]:
    """A vLLM worker without a model in this process, for the duration of the context.

    Args:
        device: this machine.
        max_num_tokens: largest number of tokens of a call.
        on_backend: is told which backend runs.

    Raises:
        MeasurementError: vLLM cannot be imported.
    """
    try:
        from ..compat import standalone_layer
    except ImportError as error:
        raise MeasurementError(f"vLLM cannot be imported: {error}", "Install it beside this package") from error
    with standalone_layer.single_rank_worker(device.kind, max_num_tokens) as config:
        yield BenchContext(device, config, max_num_tokens, on_backend)


@dataclass
class BenchContext:
    """The worker in which layers are built and run.

    Attributes:
        device: this machine.
        config: vLLM's config that is in force.
        max_num_tokens: largest number of tokens of a call.
        on_backend: is told which backend runs.
        clock: times on the device.
    """

    device: Device
    config: Any
    max_num_tokens: int
    on_backend: OnBackend = lambda name: None
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = timing.CudaClock() if self.device.kind == "cuda" else timing.HostClock()

    def bench(self, problem: Problem, backends: Sequence[Backend], copies: int = MAX_COPIES) -> LayerBench:
        """Builds a layer with each backend. A backend that cannot build it becomes a failure.

        Args:
            problem: the layer.
            backends: the backends.
            copies: most copies of a small layer.
        """
        return LayerBench(self, problem, backends, copies)


class BackendLayer:
    """A layer built by one backend, in enough copies that their weights together exceed the L2 cache."""

    def __init__(
        self, context: BenchContext, problem: Problem, backend: Backend, experts: Mapping[str, Tensor], copies: int
    ) -> None:
        from ..compat import standalone_layer

        adapter = current_adapter()
        self._context, self._adapter, self._problem, self._backend = context, adapter, problem, backend
        plan = backend.plan(problem, context.device)
        with process_state.kept():
            converted = random_weights.convert_experts(backend, experts, problem, plan)
        self.copies: list[tuple[Any, Any, int]] = []
        size = sum(each[0].nbytes for each in converted.values()) * problem.local_experts
        for _ in range(max(1, min(copies, math.ceil(ROTATION_BYTES / max(size, 1))))):
            tensors = {
                name: random_weights.repeat_experts(each, problem.local_experts) for name, each in converted.items()
            }
            moe = standalone_layer.fused_moe_config(problem, context.device.kind, context.max_num_tokens)
            quant_config = adapter.quant_config(problem, tensors)
            # Not for serving, which would compile for every number of tokens. Here a number compiles when it is timed.
            most = context.max_num_tokens
            builder = VllmBuilder(adapter, moe, quant_config, for_serving=False, trial_tokens=most)
            layer = standalone_layer.layer_namespace(problem, moe, tensors)
            with process_state.kept(), watched_calls(backend, "experts"):
                fused_experts = backend.build_experts(tensors, problem, plan, builder)
                kernel = adapter.kernel(moe, quant_config, layer, fused_experts)
            self.copies.append((kernel, layer, int(moe.hidden_dim)))

    def runs(self, tokens: TokenBatch, routed: bool) -> list[Run]:
        """One function per copy, which runs it and returns `[M, hidden]`.

        Args:
            tokens: the inputs.
            routed: whether top-k over the logits is part of the call. A backend that does not compute it in its kernel
                is called after vLLM's routing kernel.
        """
        return [self._run(copy, tokens, routed) for copy in self.copies]

    def _run(self, copy: tuple[Any, Any, int], tokens: TokenBatch, routed: bool) -> Run:
        from ..compat import standalone_layer

        kernel, layer, padded_size = copy
        hidden_size = self._problem.hidden_size

        def run() -> Tensor:
            padding = max(padded_size - hidden_size, 0)
            x = torch.nn.functional.pad(tokens.x, (0, padding)) if padding else tokens.x
            # Inference mode, as in a server: what a kernel keeps there may not be written to outside of it.
            with (
                torch.inference_mode(),
                standalone_layer.forward_step(self._context.config, x.shape[0]),
                watched_kernel(self._backend),
            ):
                if self._backend.monolithic:
                    output = self._adapter.apply_monolithic(kernel, layer, x, tokens.logits, {})
                else:
                    topk = tokens.weights, tokens.ids
                    if routed:
                        topk = standalone_layer.route_tokens(self._problem, tokens.x, tokens.logits)
                    output = self._adapter.apply(kernel, layer, x, *topk, {})
            result: Tensor = output[..., :hidden_size]
            return result

        return run


@dataclass(frozen=True, slots=True)
class TileVariant:
    """A backend with a tile configuration.

    Attributes:
        backend: name of the backend or stock layer.
        tile: the configuration; "" for the backend's own choice.
        default: whether this is how the backend runs unless another variant is faster.
    """

    backend: str
    tile: str = ""
    default: bool = False


class LayerBench:
    """A layer built by several backends, ready to be timed.

    Attributes:
        context: where it runs.
        problem: the layer.
        failures: why a backend is not timed, by name.
        routed: whether calls include top-k over the logits, because one of the backends computes it in its kernel.
        stock_layers: functions of x, weights, ids and logits that are timed beside the backends, by name.
        experts: canonical tensors of the distinct experts.
        phase_seconds: seconds by phase: ``building NAME``; ``first calls NAME``, which compile what is not compiled;
            ``tiles NAME``, first calls with tile configurations; ``graphs``, ``checking`` and ``timing``.
    """

    def __init__(self, context: BenchContext, problem: Problem, backends: Sequence[Backend], copies: int) -> None:
        self.context, self.problem = context, problem
        self.phase_seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.routed = any(backend.monolithic for backend in backends)
        distinct = min(random_weights.DISTINCT_EXPERTS, problem.local_experts)
        self._layers: dict[str, BackendLayer] = {}
        self._backends = {backend.name: backend for backend in backends}
        self.stock_layers: dict[str, Callable[..., Tensor]] = {}
        self.experts = random_weights.random_experts(problem, context.device.kind, distinct)
        for backend in backends:
            with self._timed_phase(f"building {backend.name}", backend.name):
                try:
                    self._layers[backend.name] = BackendLayer(context, problem, backend, self.experts, copies)
                except Exception as error:  # a kernel library may raise anything, which is why it is not timed
                    self.fail(backend.name, error)

    @contextmanager
    def _timed_phase(self, phase: str, backend: str = "") -> Iterator[None]:
        """Adds the time of what runs inside to a phase; `backend` is the one that runs, "" where several do."""
        self.context.on_backend(backend)
        begin = time.monotonic()
        remedy = how_to_leave_out(backend) if backend else ""
        try:
            with doing(f"the phase {phase!r} of {self.problem.layer}", remedy):
                yield
        finally:
            self.phase_seconds[phase] = self.phase_seconds.get(phase, 0.0) + time.monotonic() - begin

    def fail(self, name: str, error: Exception) -> None:
        """Records that a backend or stock layer cannot be timed, and frees its memory.

        Raises:
            BrokenContextError: nothing runs in this process any more.
        """
        self.failures[name] = describe_error(error)
        raise_if_broken(name, error)
        self._layers.pop(name, None)
        self.stock_layers.pop(name, None)
        free_memory(self.context.device)

    @property
    def names(self) -> list[str]:
        """Backends and stock layers that have not failed."""
        return [*self._layers, *self.stock_layers]

    def compile(self, count: int, tile: str = "") -> str:
        """Runs everything once, so that it is compiled.

        Args:
            count: number of tokens.
            tile: tile configuration of the backends; "" for their own choice.

        Returns:
            Why a backend failed; "" if none did. It is not excluded: other numbers of tokens may work.

        Raises:
            BrokenContextError: nothing runs in this process any more.
        """
        tokens = random_weights.random_tokens(self.problem, count, "uniform", self.context.device.kind)
        failure = ""
        for name in self.names:
            try:
                self._call(TileVariant(name, tile), tokens)
            except Exception as error:  # whatever a kernel raises is the answer
                failure = describe_error(error)
                raise_if_broken(name, error)
        return failure

    def _call(self, variant: TileVariant, tokens: TokenBatch) -> None:
        """Runs a variant once without a graph, and waits for it."""
        with self._tile(variant):
            self._runs(variant.backend, tokens)[0]()
            _synchronize(self.context.device)

    def _tile(self, variant: TileVariant) -> contextlib.AbstractContextManager[None]:
        """A context in which the variant's backend runs with its tile configuration."""
        if not variant.tile or variant.backend not in self._backends:
            return contextlib.nullcontext()
        return self._backends[variant.backend].use_tile(self.problem, variant.tile)

    def _runs(self, name: str, tokens: TokenBatch) -> list[Run]:
        if name in self._layers:
            return self._layers[name].runs(tokens, self.routed)
        layer = self.stock_layers[name]
        return [lambda: layer(tokens.x, tokens.weights, tokens.ids, tokens.logits)]

    def _warm_up(self, tokens: TokenBatch) -> None:
        for name in self.names:
            with self._timed_phase(f"first calls {name}", name):
                try:
                    self._call(TileVariant(name), tokens)
                except Exception as error:  # whatever a kernel raises is why it is not timed
                    self.fail(name, error)

    def _tile_variants(self, count: int, limit: int) -> list[TileVariant]:
        """Backends with tile configurations other than their own choice, at most `limit` each."""
        if not limit:
            return []
        return [
            TileVariant(name, tile)
            for name in self._layers
            for tile in self._backends[name].tiles(self.problem, count, limit)
        ]

    def _try_tile(self, variant: TileVariant, tokens: TokenBatch) -> bool:
        """Runs a variant once. A variant that fails is skipped: it is only a suggestion.

        Raises:
            BrokenContextError: nothing runs in this process any more.
        """
        try:
            with self._timed_phase(f"tiles {variant.backend}", variant.backend):
                self._call(variant, tokens)
        except Exception as error:  # whatever a kernel raises is why the tile is skipped
            raise_if_broken(variant.backend, error)
            logger.info("moe_oracle: %s with %s: %s", variant.backend, variant.tile, error)
            return False
        return True

    def measure(
        self,
        count: int,
        routing: RoutingKind,
        replays: int,
        seconds: float = math.inf,
        tiles: int = 0,
        fixed_tiles: Mapping[str, str] = _NO_FIXED_TILES,
    ) -> list[Sample]:
        """Checks and times every backend at one number of tokens.

        Args:
            count: number of tokens.
            routing: how they are routed to experts.
            replays: timed replays of each backend, at most.
            seconds: see `timing.time_interleaved`.
            tiles: tile configurations timed beside each backend's own choice. The fastest is the backend's sample.
            fixed_tiles: tile configurations by backend that replace its own choice.

        Returns:
            A sample for each backend that was timed or failed in this call.
        """
        before = set(self.failures)
        tokens = random_weights.random_tokens(self.problem, count, routing, self.context.device.kind)
        # First everything runs without a graph: a workspace that grew later would leave graphs with the freed one.
        self._warm_up(tokens)
        fixed_tiles = {
            name: tile
            for name, tile in fixed_tiles.items()
            if name in self._layers and self._try_tile(TileVariant(name, tile), tokens)
        }
        variants = [TileVariant(name, fixed_tiles.get(name, ""), default=True) for name in self.names]
        variants += [each for each in self._tile_variants(count, tiles) if self._try_tile(each, tokens)]
        graphs: dict[TileVariant, list[Run]] = {}
        errors: dict[TileVariant, float] = {}
        references: dict[str, Tensor] = {}
        for variant in variants:
            if variant.backend not in self.names:
                continue
            try:
                graphs[variant], errors[variant] = self._capture(variant, tokens, references)
            except Exception as error:  # whatever a kernel raises is why it is not timed
                raise_if_broken(variant.backend, error)
                if not variant.default:
                    logger.info("moe_oracle: %s with %s: %s", variant.backend, variant.tile, error)
                    continue
                self.fail(variant.backend, error)
        with self._timed_phase("timing"):
            times = timing.time_interleaved(self.context.clock, graphs, replays, seconds) if graphs else {}
        failed = [self._failed_sample(name, count, routing) for name in self.failures if name not in before]
        return failed + [
            Sample(
                backend=fastest.backend,
                activations=self._activation_precision(fastest.backend),
                tokens=count,
                routing=routing,
                us=times[fastest].us,
                low=times[fastest].low,
                high=times[fastest].high,
                replays=times[fastest].replays,
                error=errors[fastest],
                router=self.routed,
                tile=fastest.tile,
            )
            for fastest in (self._fastest_variant(default, times) for default in times if default.default)
        ]

    def _capture(
        self, variant: TileVariant, tokens: TokenBatch, references: dict[str, Tensor]
    ) -> tuple[list[Run], float]:
        """Captures a variant's copies as graphs and checks the output of the first.

        Args:
            variant: what to run.
            tokens: the inputs.
            references: outputs of the checked tokens by activation precision, filled as needed.

        Returns:
            Functions that replay the graphs, and the relative error; 0 for a stock layer, which need only be finite.

        Raises:
            MeasurementError: the output is wrong.
        """
        with self._timed_phase("graphs", variant.backend), self._tile(variant):
            graphs = [self.context.clock.prepare(run) for run in self._runs(variant.backend, tokens)]
        replays = [replay for replay, _ in graphs]
        backend = self._backends.get(variant.backend)
        if backend is None:
            replay, output = graphs[0]
            replay()
            if not bool(torch.isfinite(output.float()).all()):
                raise MeasurementError("its output contains NaN or infinity")
            return replays, 0.0
        with self._timed_phase("checking", variant.backend):
            precision = backend.activations(self.problem)
            if precision not in references:
                references[precision] = self._reference(tokens, backend)
            return replays, self._check(graphs[0], references[precision], backend)

    def _fastest_variant(self, default: TileVariant, times: Mapping[TileVariant, Timing]) -> TileVariant:
        """A backend's default, or its fastest variant if that saves more of the time than `TILE_MARGIN`."""
        others = [each for each in times if each.backend == default.backend and not each.default]
        fastest = min(others, key=lambda each: times[each].us, default=default)
        return fastest if times[fastest].us < (1 - TILE_MARGIN) * times[default].us else default

    def _failed_sample(self, name: str, count: int, routing: RoutingKind) -> Sample:
        return Sample(name, self._activation_precision(name), count, routing, failure=self.failures[name])

    def failed_samples(self, count: int, routing: RoutingKind) -> list[Sample]:
        """The failures so far, as samples at a number of tokens."""
        return [self._failed_sample(name, count, routing) for name in self.failures]

    def _activation_precision(self, name: str) -> str:
        backend = self._backends.get(name)
        return "" if backend is None else backend.activations(self.problem)

    def _checked_rows(self, count: int) -> list[int]:
        """Indices of the checked tokens: the first, the last, and some evenly between."""
        checked = min(CHECKED_TOKENS, count)
        return sorted({round(index * (count - 1) / max(checked - 1, 1)) for index in range(checked)})

    def _reference(self, tokens: TokenBatch, backend: Backend) -> Tensor:
        """Outputs of the checked tokens, `[CHECKED_TOKENS, hidden]` float32, with activations in the backend's
        precision."""
        problem, rows = self.problem, self._checked_rows(tokens.x.shape[0])
        distinct = next(iter(self.experts.values())).shape[0]
        ids = tokens.ids[rows].long()
        ids = torch.where(ids < problem.local_experts, ids % distinct, torch.full_like(ids, -1))
        small = dataclasses.replace(problem, num_experts=max(distinct, problem.top_k), local_experts=distinct)
        small = small.with_activations(backend.activations(problem))
        expected = torch.empty(len(rows), problem.hidden_size, dtype=torch.float32, device=tokens.x.device)
        forward(self.experts, small, expected, tokens.x[rows], tokens.weights[rows], ids.to(torch.int32))
        return expected

    def _check(self, graph: tuple[Run, Tensor], expected: Tensor, backend: Backend) -> float:
        """The largest relative error of the checked tokens, after a replay over an output of NaN.

        Raises:
            MeasurementError: the error exceeds the tolerance of the formats, or is not a number.
        """
        replay, output = graph
        if self.context.clock.overwrites_output:
            with torch.inference_mode():  # in which the output was made
                output.fill_(math.nan)  # an element that the kernel does not write stays NaN
        replay()
        error = tolerances.token_error(output[self._checked_rows(output.shape[0])], expected)
        allowed = tolerances.error_tolerance(backend, self.problem)
        if not error <= allowed:
            raise MeasurementError(f"relative error {error:.2e}, allowed {allowed:.2e}")
        return error

    def close(self) -> None:
        """Frees the layers' memory."""
        self._layers.clear()
        self.stock_layers.clear()
        self.experts = {}
        free_memory(self.context.device)


def free_memory(device: Device) -> None:
    """Frees memory that nothing refers to."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()


def _synchronize(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize()
