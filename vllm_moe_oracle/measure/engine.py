"""Layers to measure: each accepted backend's, built from a problem as serving does it, and checked before it is timed.

The backend converts canonical experts and makes its experts with vLLM's builder; vLLM's modular kernel runs them. Only
what an engine would have around a layer is made up (`compat.alone`).
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
from ..errors import MeasurementError, plain
from ..methods import selfcheck
from ..methods.builder import VllmBuilder
from ..oracle.problem import Device, Problem
from . import timing, weights
from .cells import RoutingKind, Sample
from .timing import Clock, Run
from .weights import Tokens

logger = logging.getLogger("vllm.moe_oracle")

ROTATED_BYTES = 128 << 20
"""Layers smaller than this exist several times, up to this size together: more than twice an H200's second-level
cache."""
MOST_COPIES = 4
"""How often such a layer exists, at most."""
TILE_MARGIN = 0.02
"""By what part a tile configuration must be faster than a backend's own choice to go before it."""
CHECKED = 4
"""Tokens of a call whose output is compared with the reference."""


_NO_TILES: Mapping[str, str] = MappingProxyType({})

_BROKEN = ("CUDA error", "illegal memory access", "device-side assert", "unspecified launch failure")
"""In the message of an error after which no kernel of the process runs any more."""


class BrokenContext(MeasurementError):
    """A kernel broke the process: whatever runs after it fails too, and says nothing about itself.

    Args:
        backend: the name of the one that ran.
        failure: the error, in a line.
    """

    def __init__(self, backend: str, failure: str) -> None:
        super().__init__(
            f"it broke the GPU's context: {failure}", "Run the command again: it goes on without it", backend
        )
        self.backend, self.failure = backend, failure


@contextmanager
def ready(device: Device, most_tokens: int) -> Iterator[Engine]:
    """An engine without a model in this process, for as long as the context lasts.

    Args:
        device: this machine.
        most_tokens: most tokens of a call.

    Raises:
        MeasurementError: the machine has no GPU, or no vLLM that can be served.
    """
    try:
        from ..compat import alone
    except ImportError as error:
        raise MeasurementError(f"vLLM cannot be imported: {error}", "Install it beside this package") from error
    with alone.worker(device.kind, most_tokens) as config:
        yield Engine(device, config, most_tokens)


@dataclass
class Engine:
    """What layers are built in.

    Attributes:
        device: this machine.
        config: vLLM's config, in force.
        most_tokens: most tokens of a call.
    """

    device: Device
    config: Any
    most_tokens: int
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = timing.CudaClock() if self.device.kind == "cuda" else timing.HostClock()

    def bench(self, problem: Problem, backends: Sequence[Backend], copies: int = MOST_COPIES) -> Bench:
        """A layer with each of some backends, ready to be timed. One that cannot be built is a failure of its own.

        Args:
            problem: the layer.
            backends: the backends.
            copies: how often a small layer exists, at most.
        """
        return Bench(self, problem, backends, copies)


class Layer:
    """One backend's layer, in as many copies as keep their weights out of the cache."""

    def __init__(
        self, engine: Engine, problem: Problem, backend: Backend, experts: Mapping[str, Tensor], copies: int
    ) -> None:
        from ..compat import alone

        release = current_adapter()
        self._release, self._problem, self._backend = release, problem, backend
        plan = backend.plan(problem, engine.device)
        few = next(iter(experts.values())).shape[0]
        converted = [
            backend.convert({name: each[index] for name, each in experts.items()}, problem, plan)
            for index in range(few)
        ]
        self.copies: list[tuple[Any, Any, int]] = []
        size = sum(each.nbytes for each in converted[0].values()) * problem.local_experts
        for _ in range(max(1, min(copies, math.ceil(ROTATED_BYTES / max(size, 1))))):
            tensors = {
                name: weights.repeated(weights.stacked(tuple(each[name] for each in converted)), problem.local_experts)
                for name in converted[0]
            }
            moe = alone.layer_config(problem, engine.device.kind, engine.most_tokens)
            quant_config = release.quant_config(problem, tensors)
            # Not to serve: what serving compiles for every number of tokens is compiled here as it is measured.
            builder = VllmBuilder(release, moe, quant_config, serves=False)
            made = backend.experts(tensors, problem, plan, builder)
            layer = alone.layer_of(problem, moe, tensors)
            kernel = release.kernel(moe, quant_config, layer, made)
            self.copies.append((kernel, layer, int(moe.hidden_dim)))

    def runs(self, engine: Engine, tokens: Tokens, routed: bool) -> list[Run]:
        """Functions that run a copy each.

        Args:
            engine: where.
            tokens: the inputs.
            routed: experts are chosen from logits on the clock, by a kernel before the experts' where these do not.
        """
        return [self._run(engine, copy, tokens, routed) for copy in self.copies]

    def _run(self, engine: Engine, copy: tuple[Any, Any, int], tokens: Tokens, routed: bool) -> Run:
        from ..compat import alone

        kernel, layer, width = copy
        hidden = self._problem.hidden_size

        def run() -> Tensor:
            x = tokens.x if width <= hidden else torch.nn.functional.pad(tokens.x, (0, width - hidden))
            with alone.forward(engine.config, x.shape[0]):
                if self._backend.monolithic:
                    result = self._release.apply_monolithic(kernel, layer, x, tokens.logits, {})
                else:
                    chosen = tokens.weights, tokens.ids
                    if routed:
                        chosen = alone.route(self._problem, tokens.x, tokens.logits)
                    result = self._release.apply(kernel, layer, x, *chosen, {})
            found: Tensor = result[..., :hidden]
            return found

        return run


@dataclass(frozen=True, slots=True)
class Variant:
    """A backend with a tile configuration that it would not choose."""

    backend: str
    tile: str


class Bench:
    """A problem's layers by backend.

    Attributes:
        failures: why a backend is not timed, by name.
        routed: experts are chosen on the clock, because one of the backends does it in its kernel.
        extra: functions of x, weights, ids and logits that are timed beside the backends, by name.
        spent: seconds by what they went into: ``building NAME``, ``first calls NAME``, which compile what is not
            compiled, ``tiles NAME`` for those of tile configurations, ``graphs``, ``checking``, and ``timing``.
    """

    def __init__(self, engine: Engine, problem: Problem, backends: Sequence[Backend], copies: int) -> None:
        self.engine, self.problem = engine, problem
        self.spent: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.routed = any(backend.monolithic for backend in backends)
        few = min(weights.DISTINCT, problem.local_experts)
        self._layers: dict[str, Layer] = {}
        self._backends = {backend.name: backend for backend in backends}
        self.extra: dict[str, Callable[..., Tensor]] = {}
        self.experts = weights.canonical_experts(problem, engine.device.kind, few)
        for backend in backends:
            with self._spending(f"building {backend.name}"):
                try:
                    self._layers[backend.name] = Layer(engine, problem, backend, self.experts, copies)
                except Exception as error:  # whatever a kernel's library raises is why it is not timed
                    self.fail(backend.name, error)

    @contextmanager
    def _spending(self, words: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.spent[words] = self.spent.get(words, 0.0) + time.monotonic() - begin

    def fail(self, name: str, error: Exception) -> None:
        """Notes that a backend cannot be timed.

        Raises:
            BrokenContext: nothing can, from now on.
        """
        self.failures[name] = plain(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
        if any(word in self.failures[name] for word in _BROKEN):
            raise BrokenContext(name, self.failures[name]) from error
        self._layers.pop(name, None)
        self.extra.pop(name, None)
        free(self.engine.device)

    @property
    def names(self) -> list[str]:
        """Backends that can be timed so far."""
        return [*self._layers, *self.extra]

    def compile(self, count: int, tile: str = "") -> str:
        """Runs everything once at a number of tokens, which compiles what has to be compiled.

        Args:
            count: tokens.
            tile: a configuration to run instead of a backend's own choice.

        Returns:
            Why one of them could not; "" when all could. It is tried again at other numbers of tokens.

        Raises:
            BrokenContext: nothing runs in this process any more.
        """
        tokens = weights.tokens(self.problem, count, "uniform", self.engine.device.kind)
        failure = ""
        for name in self.names:
            try:
                with self._backends[name].tiled(self.problem, tile) if tile else contextlib.nullcontext():
                    self._run_once(name, tokens)()
                _wait(self.engine.device)
            except Exception as error:
                failure = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                if any(word in failure for word in _BROKEN):
                    raise BrokenContext(name, failure) from error
        return failure

    def _warm(self, tokens: Tokens) -> None:
        for name in self.names:
            with self._spending(f"first calls {name}"):
                try:
                    self._run_once(name, tokens)()
                    _wait(self.engine.device)
                except Exception as error:
                    self.fail(name, error)

    def _variants(self, count: int, tiles: int) -> list[Variant]:
        """Backends with other tile configurations than their own, at a number of tokens."""
        return [
            Variant(name, tile)
            for name in self._layers
            for tile in (self._backends[name].tiles(self.problem, count, tiles) if tiles else ())
        ]

    def _try(self, variant: Variant, tokens: Tokens) -> bool:
        """Runs a variant once. One that fails is left out, for it is only a suggestion.

        Raises:
            BrokenContext: nothing runs in this process any more.
        """
        try:
            with (
                self._spending(f"tiles {variant.backend}"),
                self._backends[variant.backend].tiled(self.problem, variant.tile),
            ):
                self._run_once(variant.backend, tokens)()
                _wait(self.engine.device)
        except Exception as error:
            if any(word in str(error) for word in _BROKEN):
                raise BrokenContext(variant.backend, f"{error}".splitlines()[0][:300]) from error
            logger.info("%s with %s: %s", variant.backend, variant.tile, error)
            return False
        return True

    def _run_once(self, name: str, tokens: Tokens) -> Run:
        if name in self._layers:
            return self._layers[name].runs(self.engine, tokens, self.routed)[0]
        layer = self.extra[name]
        return lambda: layer(tokens.x, tokens.weights, tokens.ids, tokens.logits)

    def measure(
        self,
        count: int,
        routing: RoutingKind,
        replays: int,
        seconds: float = math.inf,
        tiles: int = 0,
        fixed: Mapping[str, str] = _NO_TILES,
    ) -> list[Sample]:
        """Checks and times every backend at one number of tokens.

        Args:
            count: tokens.
            routing: how they choose experts.
            replays: how often each is timed, at most.
            seconds: see `timing.compare`.
            tiles: how many tile configurations are timed beside a backend's own choice; the fastest is its sample.
            fixed: tile configurations, by backend, that are timed instead of its own choice.
        """
        # First everything without a graph: a workspace that grows afterwards would leave graphs with the old one.
        before = set(self.failures)
        tokens = weights.tokens(self.problem, count, routing, self.engine.device.kind)
        self._warm(tokens)
        prepared: dict[str | Variant, list[Run]] = {}
        errors: dict[str | Variant, float] = {}
        failed = [self._failed(name, count, routing) for name in self.failures if name not in before]
        references: dict[str, Tensor] = {}
        fixed = {
            name: tile
            for name, tile in fixed.items()
            if name in self._layers and self._try(Variant(name, tile), tokens)
        }
        variants = [each for each in self._variants(count, tiles) if self._try(each, tokens)]
        todo: list[str | Variant] = [*self.names, *variants]
        for name in todo:
            owner = name.backend if isinstance(name, Variant) else name
            tile = name.tile if isinstance(name, Variant) else fixed.get(name, "")
            backend = self._backends.get(owner)
            if owner not in self.names:
                continue
            try:
                if backend is None:
                    with self._spending("graphs"):
                        replay, output = self.engine.clock.prepare(self._run_once(owner, tokens))
                    prepared[name] = [replay]
                    replay()
                    if not bool(torch.isfinite(output.float()).all()):
                        raise MeasurementError("its output is not finite")
                    errors[name] = 0.0
                    continue
                with self._spending("graphs"), backend.tiled(self.problem, tile) if tile else contextlib.nullcontext():
                    runs = self._layers[owner].runs(self.engine, tokens, self.routed)
                    graphs = [self.engine.clock.prepare(run) for run in runs]
                prepared[name] = [replay for replay, _ in graphs]
                with self._spending("checking"):
                    precision = backend.activations(self.problem)
                    if precision not in references:
                        references[precision] = self._reference(tokens, backend)
                    errors[name] = self._check(graphs[0], references[precision], backend)
            except Exception as error:
                prepared.pop(name, None)
                if isinstance(name, Variant) and not any(word in str(error) for word in _BROKEN):
                    logger.info("%s with %s: %s", owner, tile, error)
                    continue
                self.fail(owner, error)
                failed.append(self._failed(owner, count, routing))
        with self._spending("timing"):
            times = timing.compare(self.engine.clock, prepared, replays, seconds) if prepared else {}
        best = {name: self._fastest(name, times) for name in times if isinstance(name, str)}
        return failed + [
            Sample(
                backend=name,
                activations=self._precision(name),
                tokens=count,
                routing=routing,
                us=found.us,
                low=found.low,
                high=found.high,
                replays=found.replays,
                error=errors[key],
                router=self.routed,
                tile=fixed.get(name, "") if key == name else key.tile,
            )
            for name, key in best.items()
            for found in [times[key]]
        ]

    def _fastest(self, name: str, times: Mapping[str | Variant, timing.Timing]) -> Any:
        """A backend, or its variant that is faster by more than what two runs differ by."""
        mine = [key for key in times if isinstance(key, Variant) and key.backend == name]
        fastest = min(mine, key=lambda key: times[key].us, default=name)
        return fastest if times[fastest].us < (1 - TILE_MARGIN) * times[name].us else name

    def _failed(self, name: str, count: int, routing: RoutingKind) -> Sample:
        return Sample(name, self._precision(name), count, routing, failure=self.failures[name])

    def failed(self, count: int, routing: RoutingKind) -> list[Sample]:
        """One sample for each backend that could not be built, at a number of tokens."""
        return [self._failed(name, count, routing) for name in self.failures]

    def _precision(self, name: str) -> str:
        backend = self._backends.get(name)
        return "" if backend is None else backend.activations(self.problem)

    def _rows(self, count: int) -> list[int]:
        """The tokens that are checked: the first, the last, and some evenly between."""
        few = min(CHECKED, count)
        return sorted({round(index * (count - 1) / max(few - 1, 1)) for index in range(few)})

    def _reference(self, tokens: Tokens, backend: Backend) -> Tensor:
        """What the checked tokens' outputs should be, with activations in the precision that a backend takes."""
        problem, rows = self.problem, self._rows(tokens.x.shape[0])
        few = next(iter(self.experts.values())).shape[0]
        ids = tokens.ids[rows].long()
        ids = torch.where(ids < problem.local_experts, ids % few, torch.full_like(ids, -1))
        scheme = dataclasses.replace(problem.scheme, activations=backend.activations(problem))
        small = dataclasses.replace(problem, scheme=scheme, num_experts=max(few, problem.top_k), local_experts=few)
        expected = torch.empty(len(rows), problem.hidden_size, dtype=torch.float32, device=tokens.x.device)
        forward(self.experts, small, expected, tokens.x[rows], tokens.weights[rows], ids.to(torch.int32))
        return expected

    def _check(self, graph: tuple[Run, Tensor], expected: Tensor, backend: Backend) -> float:
        """The largest relative error of the checked tokens, after a replay over poisoned memory.

        Raises:
            MeasurementError: it is more than the formats allow, or an output is not a number.
        """
        replay, output = graph
        if self.engine.device.kind == "cuda":
            output.fill_(math.nan)  # what is not written stays so
        replay()
        error = selfcheck.token_error(output[self._rows(output.shape[0])], expected)
        allowed = selfcheck.tolerance(backend, self.problem)
        if not error <= allowed:
            raise MeasurementError(f"relative error {error:.2e}, allowed {allowed:.2e}")
        return error

    def close(self) -> None:
        """Gives the memory back."""
        self._layers.clear()
        self.extra.clear()
        self.experts = {}
        free(self.engine.device)


def free(device: Device) -> None:
    """Gives memory back that nothing refers to."""
    gc.collect()
    if device.kind == "cuda":
        torch.cuda.empty_cache()


def _wait(device: Device) -> None:
    if device.kind == "cuda":
        torch.cuda.synchronize()
