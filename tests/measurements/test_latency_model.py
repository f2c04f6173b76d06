"""Predicted times: the formula, the errors it states, and what the oracle makes of them."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy
import pytest
import torch

from tests.gpu.unlisted_layers import LAYERS
from tests.tools import fit_latency
from vllm_moe_oracle.core.measurement_set import MeasurementSet
from vllm_moe_oracle.core.objectives import parse_objective
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.measurements import environment, latency_model, lookup
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.oracle.measured_choice import choose_fastest, required_saving
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import Settings

H200 = known_device("nvidia-h200")
PLAIN = next(each for each in LAYERS if each.layer == "mxfp8:olmoe")
INT4 = dataclasses.replace(next(each for each in LAYERS if each.layer == "int4_g128:qwen1.5-moe"), top_k=6)


@pytest.fixture(scope="module")
def rows() -> list[fit_latency.Row]:
    return fit_latency.read_rows()


def parameters(backend: latency_model.BackendLatency) -> torch.Tensor:
    values = [getattr(backend, name) for name in backend.__struct_fields__[: fit_latency.SCALARS]]
    factors = [backend.factors[name] for name in fit_latency.FLAGS]
    return torch.tensor([*values, *backend.tile_tflops, *factors], dtype=torch.float64).log()


def test_the_fit_and_the_prediction_are_one_formula(rows: list[fit_latency.Row]) -> None:
    for name, backend in latency_model.shipped().backends.items():
        own = [row for row in rows if row.backend == name][::7]
        fitted = fit_latency.Design(own).log_ratio(parameters(backend)).exp()
        for row, ratio in zip(own, fitted.tolist(), strict=True):
            us = latency_model.predict_us(backend, row.shape, row.tokens, row.router, *fit_latency.gpu_scaling(row.gpu))
            assert us / row.us == pytest.approx(ratio, rel=1e-9)


def test_stated_errors_cover_the_layers_that_were_fitted(rows: list[fit_latency.Row]) -> None:
    for name, backend in latency_model.shipped().backends.items():
        own = [row for row in rows if row.backend == name]
        ratio = fit_latency.Design(own).log_ratio(parameters(backend))
        layers = [(row.shape, row.gpu) for row in own]
        assert len({row.shape for row in own}) == backend.layers
        means = [ratio[torch.tensor([each == layer for each in layers])].mean() for layer in set(layers)]
        assert torch.stack(means).square().mean().sqrt() <= backend.error, name


def test_stated_errors_of_ratios_cover_the_layers_that_were_fitted(rows: list[fit_latency.Row]) -> None:
    found = latency_model.shipped()
    ratios: dict[str, dict[tuple[object, str, int], float]] = {}
    for name, backend in found.backends.items():
        own = [row for row in rows if row.backend == name]
        values = fit_latency.Design(own).log_ratio(parameters(backend)).tolist()
        ratios[name] = {(row.shape, row.gpu, row.tokens): each for row, each in zip(own, values, strict=True)}
    assert len(found.ratio_errors) > len(found.backends)
    for one, other, error in found.ratio_errors:
        layers: dict[tuple[object, str], list[float]] = {}
        for cell in ratios[one].keys() & ratios[other].keys():
            layers.setdefault(cell[:2], []).append(ratios[one][cell] - ratios[other][cell])
        means = torch.tensor([sum(each) / len(each) for each in layers.values()])
        assert means.square().mean().sqrt() <= error, (one, other)


def test_expert_parallelism_adds_its_microseconds_once() -> None:
    backend = latency_model.shipped().backends["hopper_mxfp8"]
    shape = kernel_shape_of(PLAIN)
    spread = msgspec.structs.replace(shape, expert_parallel=True)
    for tokens in (1, 64, 4096):
        times = [latency_model.predict_us(backend, each, tokens, False) for each in (shape, spread)]
        assert times[1] - times[0] == pytest.approx(backend.expert_parallel_us, rel=1e-6)


@pytest.mark.parametrize("height", latency_model.TILE_ROWS)
@pytest.mark.parametrize(
    ("draws", "chance"), [(1, 0.01), (3, 0.25), (1, 1.0), (70, 1.0), (64, 0.9), (900, 0.07), (4096, 0.03125)]
)
def test_expected_tiles_are_those_of_a_binomial_distribution(draws: int, chance: float, height: int) -> None:
    counts = torch.arange(draws + 1, dtype=torch.float64)
    chances = torch.distributions.Binomial(draws, torch.tensor(chance, dtype=torch.float64)).log_prob(counts).exp()
    exact = (chances * torch.ceil(counts / height)).sum().item()
    assert latency_model._expected_tiles(draws, chance, height) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    ("experts", "local", "top_k"),
    [(8, 1, 2), (8, 2, 2), (16, 2, 1), (128, 16, 8), (64, 64, 6), (160, 1, 8), (160, 2, 8), (512, 32, 10)],
)
@pytest.mark.parametrize("tokens", [1, 4, 16, 200])
def test_active_experts_are_those_of_routings_that_give_a_rank_its_slots(
    experts: int, local: int, top_k: int, tokens: int
) -> None:
    shape = kernel_shape_of(dataclasses.replace(PLAIN, num_experts=experts, local_experts=local, top_k=top_k))
    work = latency_model.call_work(shape, tokens)
    assert work.slots == max(1, round(tokens * top_k * local / experts))
    generator, found = numpy.random.default_rng(0), []
    while len(found) < 300:
        # How many of a token's experts are the rank's; then which ones, in the calls that give the rank its slots.
        own = generator.hypergeometric(local, experts - local, top_k, (2048, tokens))
        own = own[own.sum(1) == work.slots][:300]
        places = generator.random((*own.shape, local)).argsort(-1).argsort(-1)
        found += (places < own[..., None]).any(1).sum(-1).tolist()
    # Three hundred draws know the mean to 6 % of a deviation, which is at most half of the experts.
    assert work.active == pytest.approx(sum(found) / len(found), abs=0.1 + 0.05 * local)


def test_a_rank_that_expects_less_than_a_slot_is_timed_with_one() -> None:
    one = dataclasses.replace(PLAIN, num_experts=8, local_experts=1, top_k=2)
    work = latency_model.call_work(kernel_shape_of(one), 1)  # a quarter of a slot is expected
    assert work.slots == work.active == pytest.approx(1.0) and work.tiles == (1.0,) * len(latency_model.TILE_ROWS)
    plenty = latency_model.call_work(kernel_shape_of(dataclasses.replace(one, local_experts=8)), 1)
    assert plenty.slots == plenty.active == pytest.approx(2.0)


def test_a_product_starts_in_proportion_to_the_length_of_its_rows() -> None:
    backend = latency_model.shipped().backends["marlin_mxfp8"]
    # Reading takes all of the time; nothing else does.
    reading = msgspec.structs.replace(
        backend, launch_us=0.0, ramp_us=0.0, expert_us=0.0, traffic_tb_s=1e9, tile_tflops=(1e9,) * 5, factors={}
    )
    shape = kernel_shape_of(PLAIN)
    times = [
        latency_model.predict_us(msgspec.structs.replace(reading, strips=each), shape, 1, False) for each in (0, 9)
    ]
    columns = shape.hidden_size + shape.intermediate_size
    expected = 9 * 64 * columns * (1 + 1 / 32) / (backend.bandwidth_tb_s * 1e6)
    assert times[1] - times[0] == pytest.approx(expected, rel=1e-6)


def test_a_wave_takes_as_long_on_a_part_of_a_card() -> None:
    backend = latency_model.shipped().backends["hopper_mxfp8"]
    # Waves take all of the time but some millionths, which tiles take. An eighth of the multiprocessors has an eighth
    # of the blocks, each as fast as before.
    waves = msgspec.structs.replace(
        backend, launch_us=0.0, ramp_us=0.0, expert_us=0.0, strips=0.0, traffic_tb_s=1e9, bandwidth_tb_s=1e9, waves=1e9
    )
    shape = kernel_shape_of(PLAIN)
    whole = latency_model.predict_us(waves, shape, 1, False)
    assert latency_model.predict_us(waves, shape, 1, False, rate=1 / 8, sms=1 / 8) == pytest.approx(whole, rel=1e-4)
    assert latency_model.predict_us(waves, shape, 1, False, rate=1 / 8) == pytest.approx(8 * whole, rel=1e-4)


@pytest.mark.parametrize("name", sorted(latency_model.shipped().backends))
def test_more_work_takes_longer(name: str) -> None:
    backend = latency_model.shipped().backends[name]
    shape = kernel_shape_of(PLAIN)
    times = [latency_model.predict_us(backend, shape, tokens, False) for tokens in latency_model.TOKENS]
    assert times == sorted(times) and times[0] > 0
    wide = kernel_shape_of(dataclasses.replace(PLAIN, intermediate_size=2 * PLAIN.intermediate_size))
    assert latency_model.predict_us(backend, wide, 64, False) > latency_model.predict_us(backend, shape, 64, False)
    slow = latency_model.predict_us(backend, shape, 64, False, bandwidth=0.7, rate=0.7)
    assert slow > latency_model.predict_us(backend, shape, 64, False)


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"batch_invariant": True}, H200, "batch invariance"),
        ({"dtype": "float32"}, H200, "float32"),
        ({"num_experts": 4096, "local_experts": 4096}, H200, "num_experts 4096 is far outside"),
        ({}, dataclasses.replace(H200, sm_count=16), "has 16 multiprocessors here, and 132 as a whole"),
        ({}, known_device("nvidia-b200"), "sm_90 only"),
        ({}, dataclasses.replace(H200, name="NVIDIA GH999"), "does not have NVIDIA GH999"),
    ],
)
def test_nothing_is_predicted_without_grounds(changes: dict[str, object], device: Device, words: str) -> None:
    shape = kernel_shape_of(dataclasses.replace(PLAIN, **changes))  # type: ignore[arg-type]
    found = latency_model.predict(shape, device, ["hopper_mxfp8"], False)
    assert not found.times and words in found.remarks[0]


def test_a_layer_without_measurements_is_decided_by_prediction() -> None:
    for problem in (PLAIN, INT4):
        measurements = lookup.find_measurements(problem, H200, Settings(cache="none"))
        decision = decide(problem, H200, Settings(cache="none"), measurements=measurements)
        assert decision.why == "predicted" and decision.backend.startswith("hopper_")
        assert "takes about" in decision.explanation and "latency model" in decision.explanation
        assert not decision.token_ranges


def test_another_card_of_the_family_is_predicted_with_more_error() -> None:
    shape, names = kernel_shape_of(PLAIN), ["hopper_mxfp8", "humming_mxfp8"]
    here = latency_model.predict(shape, H200, names, False)
    fitted = latency_model.predict(shape, known_device("nvidia-h100"), names, False)
    there = latency_model.predict(shape, known_device("nvidia-h100-pcie"), names, False)
    assert fitted.errors == here.errors and all(there.errors[name] > here.errors[name] for name in names)
    assert 0 < here.ratio_error(*names) == fitted.ratio_error(*names) < there.ratio_error(*names)
    times = [each.times["hopper_mxfp8"]["uniform"][1] for each in (here, fitted, there)]
    assert times == sorted(times) and len(set(times)) == 3  # the less bandwidth, the slower


def test_a_prediction_must_exceed_its_error() -> None:
    assert required_saving(0.03, 0.0) == pytest.approx(0.03)
    assert required_saving(0.03, 0.05) == pytest.approx(1 - 0.97 * math.exp(-0.05))
    independent = MeasurementSet(errors={"a": 0.03, "b": 0.04})
    assert independent.ratio_error("a", "b") == pytest.approx(0.05)
    assert independent.ratio_error("b", "c") == 0.04 and independent.ratio_error("c", "d") == 0.0
    counts = latency_model.TOKENS
    times = {"a": {"uniform": dict.fromkeys(counts, 100.0)}, "b": {"uniform": dict.fromkeys(counts, 90.0)}}
    for error, winner in ((0.0, "b"), (0.05, "b"), (0.1, "a")):
        found = MeasurementSet(times, "somewhere", errors={"b": error} if error else {})
        assert choose_fastest(found, ["a", "b"], parse_objective("balanced"), 0.03).backend == winner


@pytest.mark.parametrize(("ratio_error", "winner"), [(0.05, "b"), (0.1, "a")])
def test_the_error_of_a_ratio_is_that_of_the_pair(ratio_error: float, winner: str) -> None:
    counts = latency_model.TOKENS
    times = {name: {"uniform": dict.fromkeys(counts, us)} for name, us in (("a", 100.0), ("b", 90.0))}
    found = MeasurementSet(
        times, "somewhere", errors={"a": 0.07, "b": 0.07}, ratio_errors={frozenset("ab"): ratio_error}
    )
    choice = choose_fastest(found, ["a", "b"], parse_objective("balanced"), 0.03)
    assert choice.backend == winner and choice.comparison is not None and choice.comparison.ratio_error == ratio_error


def test_a_large_error_does_not_hide_a_sure_gain() -> None:
    counts = latency_model.TOKENS
    times = {name: {"uniform": dict.fromkeys(counts, us)} for name, us in (("a", 100.0), ("b", 80.0), ("c", 85.0))}
    found = MeasurementSet(times, "somewhere", errors={"a": 0.01, "b": 0.3, "c": 0.01})
    assert choose_fastest(found, ["a", "b", "c"], parse_objective("balanced"), 0.03).backend == "c"


THERE = environment.Environment(
    "NVIDIA H200", 90, 132, {"vllm": NEWEST, "humming-kernels": "0.1.19", "triton": "3.6.0"}, kernels="abc"
)


@pytest.mark.parametrize(
    ("packages", "kernels", "of", "error"),
    [
        ({"vllm": "0.26.0"}, "abc", ((), 0.07), 0.0),
        ({"vllm": "0.26.0"}, "abc", (("vllm",), 0.0), environment.VLLM_RELEASE_ERROR),
        ({"vllm": "0.26.0"}, "abc", (("humming-kernels",), 0.0), 0.0),
        ({"humming-kernels": "0.1.16"}, "abc", (("humming-kernels",), 0.0), 3 * environment.HUMMING_RELEASE_ERROR),
        ({"humming-kernels": "0.2.0"}, "abc", (("humming-kernels",), 0.0), environment.UNKNOWN_RELEASE_ERROR),
        ({"humming-kernels": "nonsense"}, "abc", (("humming-kernels",), 0.0), environment.UNKNOWN_RELEASE_ERROR),
        ({"triton": "3.6.1"}, "abc", ((), 0.07), 0.0),
        ({"triton": "3.8.0"}, "abc", ((), 0.07), 0.07),
        ({"triton": "3.8.0"}, "abc", (("vllm",), 0.0), 0.0),
        ({}, "def", ((), 0.07), environment.UNKNOWN_RELEASE_ERROR),
        ({}, "def", (("vllm",), 0.0), 0.0),
    ],
)
def test_a_time_belongs_to_the_code_that_ran(
    packages: dict[str, str], kernels: str, of: tuple[tuple[str, ...], float], error: float
) -> None:
    here = environment.Environment("NVIDIA H200", 90, 132, {**THERE.packages, **packages}, kernels=kernels)
    changes = environment.kernel_changes(THERE, here, *of)
    assert math.hypot(*changes.values()) == pytest.approx(error)
