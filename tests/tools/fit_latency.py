"""Fits the latency model to measured times, and says how well it predicts layers that it did not see.

    python -m tests.tools.fit_latency            prints the errors
    python -m tests.tools.fit_latency --write    also writes profiles/latency_model.json; takes some minutes
    python -m tests.tools.fit_latency --transfer fits the times of one GPU only, and predicts those of the others
    python -m tests.tools.fit_latency --families leaves out one model family after the other, and decides its layers by
                                                 the rest

Reads the shipped profiles of `GPUS`, of the first one's Triton, and `tests/golden/h200/unlisted-*.jsonl`
(`tests.gpu.unlisted_layers`), without backends whose kernels or tiles have changed since. A profile's time of a tile
that was replaced counts divided by how many times as fast its successor was (`tests.tools.kernel_choices --accept`).
Parameters are positive, so their logarithms are fitted, by Levenberg-Marquardt with a Huber-like weight on the
logarithm of predicted over measured time. A weak prior holds parameters that a backend's times do not determine. Errors
are from fits that leave out one model family (number of experts and hidden size) at a time, on all GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tests.gpu.unlisted_layers import HELD_OUT, LAYERS, by_shape
from tests.tools.kernel_choices import UNLISTED, is_still_chosen, known_replaced
from tests.tools.restamp_profiles import earlier_fingerprints
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.devices.catalog import find_spec
from vllm_moe_oracle.measurements import latency_model as model
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.bench_records import read_samples
from vllm_moe_oracle.measurements.environment import Environment, kernel_sources_hash, same_kernel_code
from vllm_moe_oracle.measurements.kernel_shape import KernelShape, kernel_shape_of
from vllm_moe_oracle.measurements.lookup import release_errors
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import Settings

ROOT = Path(__file__).parents[2]
FREELY_ROUTED = ("unlisted-1-", "unlisted-2-")
"""Files of the benchmark from before `random_weights` gave a rank the slots that are expected."""
SETTLED_SLOTS = 32
"""Expected slots of a rank from which on a free draw is near enough to them."""
GPUS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
"""GPUs whose times are fitted. The parameters are those of the first."""
FLAGS = tuple(model.layer_flags(kernel_shape_of(LAYERS[0])))
SIZES = ("num_experts", "local_experts", "top_k", "hidden_size", "intermediate_size")
PRIOR = torch.tensor(
    [math.log(each) for each in (8.0, 3.5, 2.0, 30.0, 100.0, 1.0, 3.0, 0.2, 4.0, 3.0, 60.0, 120.0, 240.0, 400.0, 550.0)]
    + [0.0] * len(FLAGS),
    dtype=torch.float64,
)
"""Logarithms of the parameters in the order of `BackendLatency`: values of the right magnitude for a Hopper card."""
SCALARS = 10
"""How many parameters come before the rates."""
PRIOR_WEIGHT = 0.03
SIBLING_WEIGHT = 0.1
"""Weight of the prior of a backend with few layers, which is its sibling's fit."""
SIBLINGS = {f"humming_{scheme}_grouped": f"humming_{scheme}" for scheme in ("mxfp8", "mxfp4", "wna16")}
OUTLIER = 0.08
"""Logarithms of ratios beyond this count linearly, not squared."""
MIN_FAMILIES = 2
MAX_ERROR = 0.3
"""A backend whose layers' mean time is predicted worse is not predicted. Below, its error enters the choice."""


Layer = tuple[KernelShape, str]
"""A layer on a GPU."""


class Row(NamedTuple):
    """One measured time."""

    shape: KernelShape
    backend: str
    tokens: int
    us: float
    router: bool
    gpu: str = GPUS[0]

    @property
    def family(self) -> tuple[int, int]:
        return self.shape.num_experts, self.shape.hidden_size


def read_rows(gpus: Sequence[str] = GPUS) -> list[Row]:
    """The measured times of some GPUs, each once: a profile may have taken the times of a benchmark."""
    rows: dict[tuple[str, KernelShape, str, int], Row] = {}

    def add(row: Row) -> None:
        if _is_fitted(row.shape):
            rows.setdefault((row.gpu, row.shape, row.backend, row.tokens), row)

    fitted, known = _fitted_stack(), known_replaced()
    for path in sorted(profile.SHIPPED_FOLDER.glob("nvidia_*.json")):
        each = profile.read(path)
        if each.environment.gpu not in gpus or not same_kernel_code(each.environment, fitted):
            continue
        for entry in each.entries:
            for name, times in entry.backends.items():
                gone = known.get(path.name, {}).get(f"{entry.kernel_shape}: {name}", {})
                for tokens, (us, *_) in times.times.get("uniform", {}).items():
                    us /= gone.get(tokens, 1.0)  # what the tile that is chosen takes
                    add(Row(entry.kernel_shape, name, int(tokens), us, times.router, each.environment.gpu))
    for path in UNLISTED if GPUS[0] in gpus else ():
        there, _, found = read_samples(path)
        present = kernel_sources_hash()
        if there.kernels in earlier_fingerprints(present):
            there = msgspec.structs.replace(there, kernels=present)
        here = msgspec.structs.replace(there, kernels=present)
        changed, _ = release_errors({each.backend for samples in found.values() for each in samples}, there, here)
        for shape, samples in found.items():
            for sample in samples:
                row = Row(shape, sample.backend, sample.tokens, sample.us, sample.router)
                free = path.name.startswith(FREELY_ROUTED) and shape.expert_parallel
                if (
                    not sample.failure
                    and sample.backend not in changed
                    and is_still_chosen(path, shape, sample.backend, sample.tokens)
                    and not (free and model.call_work(shape, row.tokens).slots < SETTLED_SLOTS)
                ):
                    add(row)
    return list(rows.values())


def _fitted_stack() -> Environment:
    """Of the first GPU's first profile. Under another Triton some kernels take other times (`triton_release_error`)."""
    return next(each.environment for each in profile.shipped() if each.environment.gpu == GPUS[0])


_HELD_OUT = frozenset(map(kernel_shape_of, HELD_OUT))


def _is_fitted(shape: KernelShape) -> bool:
    return not (shape.act_order or shape.batch_invariant) and shape not in _HELD_OUT


@cache
def gpu_scaling(gpu: str) -> tuple[float, float]:
    """Bandwidth and rate of one of `GPUS`, as multiples of the first one's."""
    here, there = find_spec(gpu), find_spec(GPUS[0])
    assert here is not None and there is not None
    return model.scaling(here, there)


class Design:
    """The columns of a fit: what the times of some rows depend on."""

    def __init__(self, rows: Sequence[Row]) -> None:
        work = [model.call_work(row.shape, row.tokens) for row in rows]
        tensor = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
        self.log_us = tensor([math.log(row.us) for row in rows])
        self.router = tensor([float(row.router) for row in rows])
        self.expert_parallel = tensor([float(row.shape.expert_parallel) for row in rows])
        self.active, self.slots = tensor([each.active for each in work]), tensor([each.slots for each in work])
        self.weight_bytes = tensor([each.weight_bytes for each in work])
        self.tiles = tensor([each.tiles for each in work])
        self.products = tensor([each.products for each in work])
        self.scaling = tensor([gpu_scaling(row.gpu) for row in rows])
        self.flags = tensor([[float(model.layer_flags(row.shape)[name]) for name in FLAGS] for row in rows])

    def log_ratio(self, parameters: Tensor) -> Tensor:
        """Logarithms of predicted over measured time: `latency_model.predict_us` for all rows at once."""
        scalars = torch.exp(parameters[:SCALARS])
        launch, bandwidth, ramp, strips, waves, sharpness, traffic, expert, router, expert_parallel = scalars
        memory, rate = self.scaling.unbind(-1)
        heights = len(model.TILE_ROWS)
        rates, factors = torch.exp(parameters[SCALARS : SCALARS + heights]), parameters[SCALARS + heights :]
        height = torch.tensor(model.TILE_ROWS, dtype=torch.float64)
        power, tile_power = 1.0 + sharpness, model.SHARPNESS_OF_TILE_CHOICE
        products = torch.zeros_like(self.active)
        for index in range(2):
            rows, columns = self.products[:, index].unbind(-1)
            read_rows = self.active * rows + strips * model.STRIP_ROWS
            reading = read_rows * columns * self.weight_bytes / (bandwidth * memory * 1e6) + ramp
            multiplied = height * (self.tiles * rows[:, None] + waves * model.STRIP_ROWS) * columns[:, None]
            costs = 2.0 * multiplied / (rates * rate[:, None] * 1e6)
            multiplying = torch.exp(-torch.logsumexp(-tile_power * torch.log(costs), -1) / tile_power)
            products = products + (reading**power + multiplying**power) ** (1.0 / power)
        rows, hidden = self.products[:, 0, 0], self.products[:, 0, 1]
        traffic_us = 2.0 * self.slots * (1.5 * rows + 2.0 * hidden) / (traffic * memory * 1e6)
        total = products * torch.exp(self.flags @ factors) + launch + expert * self.active.sqrt()
        total = total + router * self.router + expert_parallel * self.expert_parallel
        return torch.log(total + traffic_us) - self.log_us


def fit(design: Design, prior: Tensor = PRIOR, prior_weight: float = PRIOR_WEIGHT) -> Tensor:
    """Logarithms of the parameters that minimize the weighted squares."""

    def residuals(parameters: Tensor) -> Tensor:
        ratio = design.log_ratio(parameters)
        weight = (1.0 + (ratio.detach() / OUTLIER) ** 2) ** -0.25
        return torch.cat([ratio * weight, (parameters - prior) * prior_weight])

    jacobian: Callable[[Tensor], Tensor] = torch.func.jacfwd(residuals)
    parameters, damping = prior.clone(), 1e-2
    cost = residuals(parameters).square().sum()
    for _ in range(60):
        slope, value = jacobian(parameters), residuals(parameters)
        normal, gradient = slope.T @ slope, slope.T @ value
        for _ in range(8):
            scaled = normal + damping * torch.diag(normal.diagonal() + 1e-6)
            candidate = parameters - torch.linalg.solve(scaled, gradient).clamp(-1.0, 1.0)
            new_cost = residuals(candidate).square().sum()
            if torch.isfinite(new_cost) and new_cost < cost:
                break
            damping *= 4.0
        else:
            return parameters
        parameters, damping = candidate, max(damping / 3.0, 1e-8)
        if cost - new_cost < 1e-7 * cost:
            return parameters
        cost = new_cost
    return parameters


class Fitted(NamedTuple):
    """A backend's parameters, and how far its times are from predictions.

    Attributes:
        latency: the parameters from all of its times.
        unseen: logarithms of predicted over measured time by layer and number of tokens, each by a fit that left out
            the layer's family.
        seen: the same by the fit to all.
    """

    latency: model.BackendLatency
    unseen: dict[Layer, dict[int, float]]
    seen: dict[Layer, dict[int, float]]


def fit_backend(rows: Sequence[Row], prior: Tensor, prior_weight: float) -> Fitted:
    """The parameters from all rows, and the errors of families that a fit did not see.

    A layer's error is at least that of the layers that the fit did see: outliers count little in a fit, in full here.
    """
    unseen: dict[Layer, dict[int, float]] = {}
    for family in sorted({row.family for row in rows}):
        inside = [row for row in rows if row.family == family]
        unseen |= _log_ratios(inside, fit(Design([row for row in rows if row.family != family]), prior, prior_weight))
    parameters = fit(Design(rows), prior, prior_weight)
    seen = _log_ratios(rows, parameters)
    error = max(_mean_error(each.values()) for each in (unseen, seen))
    cell_error = _rms([value for layer in unseen.values() for value in layer.values()])
    latency = _latency(parameters, _rounded_up(error), round(cell_error, 4), len({row.shape for row in rows}))
    return Fitted(latency, unseen, seen)


def ratio_errors(fitted: dict[str, Fitted]) -> tuple[tuple[str, str, float], ...]:
    """The errors of the ratios of two backends' times, of pairs with common layers of `MIN_FAMILIES` families."""
    found = []
    for (one, here), (other, there) in itertools.combinations(sorted(fitted.items()), 2):
        families = {(shape.num_experts, shape.hidden_size) for shape, _ in here.unseen.keys() & there.unseen.keys()}
        if len(families) >= MIN_FAMILIES:
            errors = [
                _mean_error(
                    {
                        count: first[layer][count] - second[layer][count]
                        for count in first[layer].keys() & second[layer].keys()
                    }
                    for layer in first.keys() & second.keys()
                )
                for first, second in ((here.unseen, there.unseen), (here.seen, there.seen))
            ]
            found.append((one, other, _rounded_up(max(errors))))
    return tuple(found)


def _log_ratios(rows: Sequence[Row], parameters: Tensor) -> dict[Layer, dict[int, float]]:
    found: dict[Layer, dict[int, float]] = {}
    for row, ratio in zip(rows, Design(rows).log_ratio(parameters).tolist(), strict=True):
        found.setdefault((row.shape, row.gpu), {})[row.tokens] = ratio
    return found


def _mean_error(layers: Iterable[dict[int, float]]) -> float:
    """The root mean square of the layers' means."""
    return _rms([math.fsum(each.values()) / len(each) for each in layers if each])


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def _rounded_up(value: float) -> float:
    return math.ceil(1e4 * value) / 1e4


def _latency(parameters: Tensor, error: float, cell_error: float, layers: int) -> model.BackendLatency:
    values = [round(each, 5) for each in torch.exp(parameters).tolist()]
    heights = len(model.TILE_ROWS)
    return model.BackendLatency(
        *values[:SCALARS],
        tile_tflops=tuple(values[SCALARS : SCALARS + heights]),
        factors=dict(zip(FLAGS, values[SCALARS + heights :], strict=True)),
        error=error,
        cell_error=cell_error,
        layers=layers,
    )


def _prior_of(name: str, rows: Sequence[Row]) -> tuple[Tensor, float]:
    """The prior of a backend's parameters, and its weight."""
    if name not in SIBLINGS:
        return PRIOR, PRIOR_WEIGHT
    return fit(Design([row for row in rows if row.backend == SIBLINGS[name]])), SIBLING_WEIGHT


def fit_all(rows: Sequence[Row]) -> dict[str, Fitted]:
    fitted = {}
    for name in sorted({row.backend for row in rows}):
        own = [row for row in rows if row.backend == name]
        if len({row.family for row in own}) < MIN_FAMILIES:
            continue
        found = fit_backend(own, *_prior_of(name, rows))
        used = "" if found.latency.error <= MAX_ERROR else "   not used"
        print(
            f"{name:26s} {found.latency.layers:3d} layers, {len(own):4d} times: layer {found.latency.error:.1%}, "
            f"time {found.latency.cell_error:.1%}{used}",
            flush=True,
        )
        if not used:
            fitted[name] = found
    return fitted


Cell = tuple[float, float]
"""Of a predicted choice at one number of tokens: its time over the fastest backend's, and the static choice's over its
own."""


def compare_choices(
    found: model.LatencyModel, problems: Iterable[Problem], rows: Sequence[Row], gpu: str
) -> list[Cell]:
    """Compares a model's choices with measured times that it never saw, and prints them."""
    device, settings = _device(found, gpu), Settings(cache="none", use_measurements=False)
    cells: list[Cell] = []
    for problem in problems:
        behind = 1.0
        measured = {(row.backend, row.tokens): row.us for row in rows if row.shape == kernel_shape_of(problem)}
        names = [each.backend for each in decide(problem, device, settings).candidates if each.accepted]
        router = any(default_registry()[name].monolithic for name in names)
        predicted = model.predict(kernel_shape_of(problem), device, names, router, found)
        decision = decide(problem, device, settings, measurements=predicted)
        static = decide(problem, device, settings).backend
        precision = default_registry()[static].activations(problem)
        rivals = [name for name in names if default_registry()[name].activations(problem) == precision]
        for tokens in sorted({tokens for _, tokens in measured}):
            times = {name: measured[name, tokens] for name in rivals if (name, tokens) in measured}
            if decision.why == "predicted" and len(times) > 1 and times.keys() >= found.backends.keys() & set(rivals):
                us = times[decision.backend]
                cells.append((us / min(times.values()), times[static] / us))
                behind = max(behind, cells[-1][0])
        worst = f"at most {behind - 1:.0%} behind" if decision.why == "predicted" else ""
        print(f"{problem.layer:34s} {gpu:24s} {decision.backend:24s} {decision.why:10s} {worst}", flush=True)
    return cells


def report(cells: Sequence[Cell]) -> None:
    """Prints how good predicted choices are."""
    behind = sorted(each for each, _ in cells)
    gain = statistics.geometric_mean(each for _, each in cells)
    within = sum(each <= 1.03 for each in behind) / len(behind)
    eight = sum(each > 1.08 for each in behind)
    print(f"{len(cells)} times of predicted choices: {within:.1%} within 3 % of the best backend")
    print(f"{eight} more than 8 % behind, the worst {behind[-1] - 1:.0%}")
    print(f"against the static choice: {gain:.2f} times as fast (geometric mean)")


def report_transfer(found: model.LatencyModel, rows: Sequence[Row]) -> None:
    """Prints how a model of one GPU predicts times of other ones."""
    for name in sorted({row.backend for row in rows} & found.backends.keys()):
        own = [row for row in rows if row.backend == name]
        ratios: dict[tuple[KernelShape, str], list[float]] = {}
        for row in own:
            us = model.predict_us(found.backends[name], row.shape, row.tokens, row.router, *gpu_scaling(row.gpu))
            ratios.setdefault((row.shape, row.gpu), []).append(math.log(us / row.us))
        means = [math.fsum(each) / len(each) for each in ratios.values()]
        cells = [value for each in ratios.values() for value in each]
        print(f"{name:26s} {len(means):3d} layers: layer {_rms(means):.1%}, time {_rms(cells):.1%}; "
              f"on the fitted GPU {found.backends[name].error:.1%}")  # fmt: skip
    problems = by_shape()
    for gpu in sorted({row.gpu for row in rows}):
        own = [row for row in rows if row.gpu == gpu]
        report(compare_choices(found, [problems[shape] for shape in dict.fromkeys(row.shape for row in own)], own, gpu))


def report_families(found: model.LatencyModel, rows: Sequence[Row]) -> None:
    """Prints how choices by a model that leaves out a family compare with the family's times. Errors, which decide
    whether a prediction is used, are those of all families."""
    problems = by_shape()
    by_gpu: dict[str, list[Cell]] = {gpu: [] for gpu in GPUS}
    for family in sorted({row.family for row in rows}):
        rest = [row for row in rows if row.family != family]
        backends = {
            name: _latency(
                fit(Design([row for row in rest if row.backend == name]), *_prior_of(name, rest)),
                each.error, each.cell_error, each.layers,
            )
            for name, each in found.backends.items()
        }  # fmt: skip
        blind = msgspec.structs.replace(found, backends=backends)
        for gpu, cells in by_gpu.items():
            own = [row for row in rows if row.family == family and row.gpu == gpu]
            asked = [problems[shape] for shape in dict.fromkeys(row.shape for row in own) if shape in problems]
            cells += compare_choices(blind, asked, own, gpu)
    for gpu, cells in by_gpu.items():
        print(f"\n{gpu}")
        report(cells)


def _device(found: model.LatencyModel, gpu: str) -> Device:
    spec = find_spec(gpu)
    assert spec is not None
    packages = dict(found.environment.packages)
    return Device("cuda", spec.name, spec.capability, spec.sm_count, spec.memory_gib, packages=packages)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--transfer", action="store_true")
    parser.add_argument("--families", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gpus = GPUS[:1] if options.transfer else GPUS
    rows = read_rows(gpus)
    shapes = {row.shape for row in rows}
    fitted = fit_all(rows)
    found = model.LatencyModel(
        environment=_fitted_stack(),
        gpus=gpus,
        conditions={
            "command": "python -m tests.tools.fit_latency --write",
            "times": f"{len(rows)} of {len(shapes)} layers, from the shipped profiles of Triton "
            f"{_fitted_stack().packages['triton']} and " + ", ".join(path.name for path in UNLISTED),
        },
        sizes={name: _range(getattr(shape, name) for shape in shapes) for name in SIZES},
        backends={name: each.latency for name, each in fitted.items()},
        ratio_errors=ratio_errors(fitted),
    )
    if options.families:
        report_families(found, rows)
    elif options.transfer:
        report_transfer(found, read_rows(GPUS[1:]))
    elif options.write:
        text = msgspec.json.format(msgspec.json.encode(found), indent=1)
        Path(model.__file__).parents[1].joinpath("profiles/latency_model.json").write_bytes(text + b"\n")
    return 0


def _range(values: object) -> tuple[int, int]:
    found = sorted(values)  # type: ignore[call-overload]
    return found[0], found[-1]


if __name__ == "__main__":
    sys.exit(main())
