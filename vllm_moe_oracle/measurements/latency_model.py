"""Predicted times of a layer, for backends that were not measured on it.

The time of a call is a sum over both products, each a smooth maximum of two times, plus what a call costs at any size:

* reading the codes and scales of the experts that are expected to get a token, at a bandwidth that the backend reaches,
  and a start of each product that is in proportion to the length of its rows;
* multiplying, in tiles of 8 to 128 rows: under uniform routing an expert's rows are binomially distributed, an expert
  computes whole tiles, a wave of blocks takes its time however few they are, and the backend takes the cheapest height;
* activations written and read between the products; launches; a cost that grows with the square root of the experts;
  with expert parallelism, finding this rank's experts.

Parameters are fitted per backend (``python -m tests.tools.fit_latency``) to measured times of GPUs of one capability.
They are those of the first; on another one bandwidths scale with its memory's and rates with its bfloat16 peak. Each
backend's error is the root mean square, over layers of model families that the fit did not see, of the mean logarithm
of predicted over measured time. Predictions of two backends are often wrong together, for example where a timed call
reached more experts than expected. The error of the ratio of their times is therefore fitted, too, and is smaller than
that of independent errors. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, lru_cache

import msgspec

from ..core.measurement_set import MeasurementSet
from ..core.problem import MX_BLOCK, Device
from ..devices.catalog import DeviceSpec, find_spec
from . import profile
from .environment import Environment
from .kernel_shape import KernelShape

TILE_ROWS = (8, 16, 32, 64, 128)
"""Heights of the tiles whose rates are fitted: rows of one expert that a block computes at once."""

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of tokens for which times are predicted where none was measured: powers of two for decode batches, and
prefill chunks up to vLLM's default limits."""

MAX_EXTRAPOLATION = 2.0
"""How far, as a factor, a size may lie outside the fitted layers' before nothing is predicted."""

STRIP_ROWS = 64
"""The unit of `BackendLatency.strips` and `BackendLatency.waves`."""

SHARPNESS_OF_TILE_CHOICE = 8.0
"""Exponent of the smooth minimum over tile heights. The fit needs a derivative; at 8 two equal costs count as 8 % less
than one."""

_FILE = profile.SHIPPED_FOLDER / "latency_model.json"


class BackendLatency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fitted parameters of one backend.

    Attributes:
        launch_us: microseconds of a call without work.
        bandwidth_tb_s: TB/s at which weights are read.
        ramp_us: microseconds of each product before it reads at that rate.
        strips: the start of each product, as the time of reading so many times `STRIP_ROWS` rows at that rate.
        waves: what each product multiplies beside its tiles, as one more tile of so many times `STRIP_ROWS` rows of
            weights: a card's worth of blocks, most of which few tiles leave idle.
        sharpness: exponent, less one, of the smooth maximum of reading and multiplying.
        traffic_tb_s: TB/s of activations.
        expert_us: microseconds times the square root of the experts with a token.
        router_us: microseconds of top-k, where the compared times include it.
        expert_parallel_us: microseconds of a call with expert parallelism beside the work of the rank's own experts.
        tile_tflops: TFLOPS by height of a tile, see `TILE_ROWS`.
        factors: factor of both products' time for layers with a property, see `layer_flags`.
        error: root mean square of the mean logarithm of predicted over measured time of a layer, of unseen families or
            of the fitted ones, whichever is larger.
        cell_error: the same of a single number of tokens.
        layers: number of layers that were fitted.
    """

    launch_us: float
    bandwidth_tb_s: float
    ramp_us: float
    strips: float
    waves: float
    sharpness: float
    traffic_tb_s: float
    expert_us: float
    router_us: float
    expert_parallel_us: float
    tile_tflops: tuple[float, ...]
    factors: dict[str, float]
    error: float
    cell_error: float
    layers: int


class LatencyModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of fitted parameters.

    Attributes:
        environment: where the fitted times were measured, of the GPU that the parameters are of.
        gpus: every GPU with fitted times.
        conditions: the command that fitted, and what it read.
        sizes: smallest and largest fitted value of each size of a `KernelShape`.
        backends: parameters by backend.
        ratio_errors: two backends and the error of the ratio of their times, as `BackendLatency.error`.
    """

    environment: Environment
    gpus: tuple[str, ...]
    conditions: dict[str, str]
    sizes: dict[str, tuple[int, int]]
    backends: dict[str, BackendLatency]
    ratio_errors: tuple[tuple[str, str, float], ...]

    @property
    def source(self) -> str:
        """Where predicted times come from, in words; a `MeasurementSet` has it."""
        return f"the latency model that was fitted to times of {' and '.join(self.gpus)}"


@cache
def shipped() -> LatencyModel:
    """The model that comes with the package."""
    return msgspec.json.decode(_FILE.read_bytes(), type=LatencyModel)


def layer_flags(shape: KernelShape) -> dict[str, bool]:
    """Properties of a layer that change a kernel's time by a factor."""
    integers = shape.scheme == "wna16"
    return {
        "zero_points": shape.zero_points,
        "float16": shape.dtype == "float16",
        "int8": integers and shape.bits == 8,
        "small_groups": integers and 0 < shape.group_size <= MX_BLOCK,
        "bias": shape.has_bias,
        "ungated": not shape.gated,
    }


class CallWork(msgspec.Struct, frozen=True):
    """What a call has to do, whatever kernel runs it.

    Attributes:
        active: expected experts with a token.
        slots: (token, expert) pairs on this rank.
        products: rows and columns of the weights of both products.
        weight_bytes: bytes of one weight with its share of scales and zero points.
        tiles: expected tiles of all experts, by height; see `TILE_ROWS`.
    """

    active: float
    slots: int
    products: tuple[tuple[int, int], tuple[int, int]]
    weight_bytes: float
    tiles: tuple[float, ...]


def call_work(shape: KernelShape, tokens: int) -> CallWork:
    """The work of one call under uniform routing.

    A rank gets as many whole slots as are expected, and one at least, as calls are timed (`measuring.random_weights`).
    One token's experts differ, those of different tokens are independent. So the rows of an expert are binomially
    distributed, over tokens where a token is expected to go to more than one expert of the rank, else over its slots.
    """
    rows = (2 if shape.gated else 1) * shape.intermediate_size
    if shape.scheme == "wna16":
        per_group = 2.0 + (shape.bits / 8 if shape.zero_points else 0.0)
        scale_bytes = per_group / shape.group_size if shape.group_size > 0 else 0.0
    else:
        scale_bytes = 1.0 / MX_BLOCK
    local = shape.local_experts
    per_token = shape.top_k * local / shape.num_experts
    slots = max(1, round(tokens * per_token))
    draws = tokens if per_token > 1.0 else slots
    chance = min(1.0, slots / draws / local)
    return CallWork(
        active=local * (1.0 - (1.0 - chance) ** draws),
        slots=slots,
        products=((rows, shape.hidden_size), (shape.hidden_size, shape.intermediate_size)),
        weight_bytes=shape.bits / 8 + scale_bytes,
        tiles=tuple(local * _expected_tiles(draws, chance, height) for height in TILE_ROWS),
    )


@lru_cache(maxsize=16384)
def _expected_tiles(draws: int, chance: float, height: int) -> float:
    """Expected whole tiles of an expert whose number of rows is binomially distributed."""
    rows, spread = draws * chance, math.sqrt(draws * chance * (1.0 - chance))
    if chance == 1.0:
        return float(-(-draws // height))
    if spread >= height:  # what the last tile lacks is 0 to height - 1 rows, one as likely as another
        return (rows + (height - 1) / 2) / height
    low, high = max(0, int(rows - 9.0 * spread - 9.0)), min(draws, int(rows + 9.0 * spread + 9.0))
    odds = chance / (1.0 - chance)
    log_ways = math.lgamma(draws + 1) - math.lgamma(low + 1) - math.lgamma(draws - low + 1)
    share = math.exp(log_ways + low * math.log(chance) + (draws - low) * math.log1p(-chance))
    total = 0.0
    for count in range(low, high + 1):
        total += share * -(-count // height)
        share *= odds * (draws - count) / (count + 1)
    return total


def predict_us(
    backend: BackendLatency,
    shape: KernelShape,
    tokens: int,
    router: bool,
    bandwidth: float = 1.0,
    rate: float = 1.0,
    sms: float = 1.0,
) -> float:
    """The predicted time of a call in microseconds.

    Args:
        backend: its parameters.
        shape: the layer.
        tokens: rows of the input.
        router: add top-k over the router's logits.
        bandwidth: the GPU's memory bandwidth, as a multiple of the fitted GPU's.
        rate: its arithmetic rate, likewise.
        sms: its streaming multiprocessors, likewise: a wave has as many blocks.
    """
    work = call_work(shape, tokens)
    factor = math.prod(backend.factors.get(name, 1.0) for name, on in layer_flags(shape).items() if on)
    power, tile_power = 1.0 + backend.sharpness, SHARPNESS_OF_TILE_CHOICE
    total = backend.launch_us + backend.expert_us * math.sqrt(work.active)
    total += (backend.router_us if router else 0.0) + (backend.expert_parallel_us if shape.expert_parallel else 0.0)
    for rows, columns in work.products:
        read_rows = work.active * rows + backend.strips * STRIP_ROWS
        reading = read_rows * columns * work.weight_bytes / (backend.bandwidth_tb_s * bandwidth * 1e6)
        costs = [
            2.0 * height * (tiles * rows + sms * backend.waves * STRIP_ROWS) * columns / (tflops * rate * 1e6)
            for tiles, height, tflops in zip(work.tiles, TILE_ROWS, backend.tile_tflops, strict=True)
        ]
        least = min(costs)
        multiplying = least * math.fsum((cost / least) ** -tile_power for cost in costs) ** (-1.0 / tile_power)
        product = ((reading + backend.ramp_us) ** power + multiplying**power) ** (1.0 / power)
        total += factor * product
    (rows, hidden_size), _ = work.products
    activation_bytes = 2.0 * work.slots * (1.5 * rows + 2.0 * hidden_size)
    return total + activation_bytes / (backend.traffic_tb_s * bandwidth * 1e6)


def scaling(here: DeviceSpec, there: DeviceSpec) -> tuple[float, float]:
    """Memory bandwidth and arithmetic rate of a GPU, as multiples of another one's.

    The rate is the peak's, not that of the number of multiprocessors: an H20 has 59 % of an H200's, and 15 % of its
    rate.
    """
    rate = here.peak_tflops["bf16"] / there.peak_tflops["bf16"]
    return here.memory_bandwidth_gb_s / there.memory_bandwidth_gb_s, rate


def why_unpredictable(model: LatencyModel, shape: KernelShape, device: Device) -> str:
    """Why nothing is predicted for a layer on a machine; "" when something can be."""
    here, there = find_spec(device.name), find_spec(model.environment.gpu)
    if device.capability != model.environment.capability:
        return f"times are predicted for sm_{model.environment.capability} only"
    if here is None or there is None or not (here.memory_bandwidth_gb_s and here.peak_tflops.get("bf16")):
        return f"the catalog of GPUs does not have {device.name}"
    if device.sm_count not in (0, here.sm_count):  # its share of the bandwidth is not known
        return f"{device.name} has {device.sm_count} multiprocessors here, and {here.sm_count} as a whole (MIG)"
    if shape.act_order or shape.batch_invariant or shape.dtype == "float32":
        return "times of layers with act order, batch invariance or float32 are not predicted"
    for name, (smallest, largest) in model.sizes.items():
        size = getattr(shape, name)
        if not smallest / MAX_EXTRAPOLATION <= size <= largest * MAX_EXTRAPOLATION:
            return f"{name} {size} is far outside the fitted layers ({smallest} to {largest})"
    return ""


def predict(
    shape: KernelShape,
    device: Device,
    names: Iterable[str],
    router: bool,
    model: LatencyModel | None = None,
    counts: Iterable[int] = TOKENS,
) -> MeasurementSet:
    """Predicted times of backends, as measurements with an error.

    Args:
        shape: the layer.
        device: the machine.
        names: backends; those that were not fitted are left out.
        router: a compared backend computes top-k inside its kernel, so that the others' times include it.
        model: the parameters; None for those that come with the package.
        counts: numbers of tokens.

    Returns:
        Times under uniform routing; a remark and no times where nothing is predicted.
    """
    model = model or shipped()
    why = why_unpredictable(model, shape, device)
    if why:
        return MeasurementSet(remarks=(why,))
    here, there = _required_spec(device.name), _required_spec(model.environment.gpu)
    fitted = here.name in {_required_spec(each).name for each in model.gpus}
    bandwidth, rate = scaling(here, there)
    sms = here.sm_count / there.sm_count
    known = {name: model.backends[name] for name in names if name in model.backends}
    times = {
        name: {"uniform": {tokens: predict_us(each, shape, tokens, router, bandwidth, rate, sms) for tokens in counts}}
        for name, each in known.items()
    }
    # A card that was not fitted: its scaling is one more thing that may be wrong, as much as the model itself.
    farther = 1.0 if fitted else math.sqrt(2.0)
    errors = {name: each.error * farther for name, each in known.items()}
    cell_errors = {name: each.cell_error * farther for name, each in known.items()}
    ratio_errors = {
        frozenset((one, other)): error * farther
        for one, other, error in model.ratio_errors
        if one in known and other in known
    }
    return MeasurementSet(times, model.source, errors=errors, ratio_errors=ratio_errors, cell_errors=cell_errors)


def _required_spec(name: str) -> DeviceSpec:
    spec = find_spec(name)
    assert spec is not None
    return spec
