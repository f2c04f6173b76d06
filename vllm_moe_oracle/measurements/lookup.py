"""Finds the measurements of a layer that are valid on a machine.

Sources are searched in this order: the profile of the setting `profile`, the cache, the shipped profiles. The first
source answers whose measurements are valid here and sufficient for a choice, by those of the closest environment that
are: an unfinished run of `tune` does not hide a complete one. Times of two environments are never combined. The few
times that a backend lacks are filled in (`missing_times`). Where no source suffices, times are predicted
(`latency_model`). What cannot be read becomes a remark, not an error: serving does not depend on measurements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..backends import Backend
from ..core.decision import Candidate
from ..core.measurement_set import MeasurementSet
from ..core.objectives import parse_objective
from ..core.problem import Device, Problem
from ..errors import BackendDefect, MeasurementError, SettingError, mentions_out_of_memory, sanitize
from ..oracle.checked_backend import is_own
from ..oracle.measured_choice import LatencyCurve, choose_fastest
from ..oracle.registry import REFERENCE_BACKEND, default_registry
from ..oracle.selection import equivalent_backends, evaluate_candidates
from ..settings import Settings, cache_dir
from ..untrusted import boundary
from . import environment, latency_model, profile
from .bench_records import may_be_slow
from .environment import Environment
from .kernel_shape import KernelShape, Sample, kernel_shape_of
from .missing_times import Predict, fill_missing
from .store import shared_store

_EnvironmentSamples = tuple[Environment, list[Sample]]

_MAX_ENVIRONMENTS = 4
"""Environments of a source that are asked for a sufficient answer: each costs a comparison of all backends."""


@dataclass(frozen=True, slots=True)
class _ValidSamples:
    """Samples that are valid here, where they were taken, and the soft differences between there and here."""

    environment: Environment
    samples: list[Sample]
    differences: tuple[str, ...]


def find_measurements(problem: Problem, device: Device, settings: Settings) -> MeasurementSet | None:
    """The measurements of a layer on a machine; None if the setting `use_measurements` is off.

    Args:
        problem: the layer.
        device: the machine.
        settings: names the sources.

    Returns:
        Times of the first sufficient source; of the first valid source if none is sufficient; no times if none is
        valid. Remarks say why other sources are not used.
    """
    if not settings.use_measurements:
        return None
    if problem.parallel.is_batched:
        return MeasurementSet(remarks=("times are of tokens in rows, and this layer's are sorted by expert",))
    shape, here = kernel_shape_of(problem), Environment.of(device)
    judged = evaluate_candidates(problem, device, settings, default_registry())
    router = any(default_registry()[each.backend].monolithic for each in judged if each.accepted)

    def predicted_here(names: Sequence[str], counts: Sequence[int] = latency_model.TOKENS) -> MeasurementSet:
        if device.kind != "cuda":
            return MeasurementSet()
        try:
            with boundary(MeasurementError, "cannot be used", "Install vllm-moe-oracle again"):
                return latency_model.predict(shape, device, names, router, None, counts)
        except MeasurementError as error:
            return MeasurementSet(remarks=(sanitize(f"the shipped latency model is not used: {error}"),))

    remarks: list[str] = []
    first: MeasurementSet | None = None
    earlier = MeasurementSet()
    registry = default_registry()  # of a third party's disabled backend no method is called
    disabled = [each for name in settings.disable for each in registry.selected(name)]
    uncalled = {each for each in disabled if not is_own(registry[each])}
    for name, read in _sources(settings, device):
        try:
            with boundary(MeasurementError, "cannot be used"):
                for valid in _valid_samples(name, read(shape), here, remarks):
                    samples = [each for each in valid.samples if each.backend not in uncalled]
                    measured = _measurement_set(f"{name} ({valid.environment})", samples, problem, settings)
                    measured = _usable_here(measured, valid, here, earlier, remarks)
                    measured = _completed(measured, _compared_backends(judged), settings, predicted_here)
                    why = _why_undecided(measured, judged, settings)
                    earlier = measured
                    if not why:
                        return measured
                    remarks.append(why)
                    first = first or measured
        except (MeasurementError, SettingError) as error:
            remarks.append(sanitize(f"{name} is not used: {error}"))
    accepted = [each.backend for each in judged if each.accepted and each.backend not in earlier.failures]
    predicted = dataclasses.replace(predicted_here(accepted), failures=earlier.failures, slow=earlier.slow)
    if predicted.times and not _why_undecided(predicted, judged, settings):
        return dataclasses.replace(predicted, remarks=(*remarks, *predicted.remarks))
    return first or MeasurementSet(remarks=(*remarks, *predicted.remarks))


def _usable_here(
    measured: MeasurementSet, valid: _ValidSamples, here: Environment, earlier: MeasurementSet, remarks: list[str]
) -> MeasurementSet:
    """A source's times, with what is said of them on this machine.

    Args:
        measured: the source's times.
        valid: where they were taken.
        here: this machine.
        earlier: of the source before, with the failures of all before: a backend that failed there is not chosen by the
            times of this one.
        remarks: on earlier sources.
    """
    times = {backend: each for backend, each in measured.times.items() if backend not in earlier.failures}
    errors, changed = release_errors(times, valid.environment, here)
    said = [f"measured with {', '.join(valid.differences)}"] * bool(valid.differences) + changed + remarks
    # Other code may have another defect, or none.
    outdated = [name for name in measured.failures if _code_changes(name, valid.environment, here)]
    found = {name: failure for name, failure in measured.failures.items() if name not in outdated}
    said += [f"{name} failed when its kernels were other code, which counts for nothing here" for name in outdated]
    tiles = measured.tiles
    if tiles and not environment.same_kernel_code(valid.environment, here):
        tiles = {}
        said.append("measured tile configurations are ignored: other kernel sources or another Triton")
    has_failed = earlier.failures.keys() - earlier.slow
    return MeasurementSet(
        times,
        measured.source,
        {**earlier.failures, **found},
        tuple(said),
        tiles,
        errors,
        slow=(earlier.slow - found.keys()) | (measured.slow & found.keys()) - has_failed,
    )


def release_errors(names: Iterable[str], there: Environment, here: Environment) -> tuple[dict[str, float], list[str]]:
    """Which backends' kernels are other code here than where they were measured.

    Args:
        names: registered backends.
        there: where their times were measured.
        here: where the times are to be used.

    Returns:
        The errors of the times by backend, root mean squares of the logarithm, without those whose kernels are the
        same; and what changed, in words, once for all backends for which it is the same.
    """
    errors: dict[str, float] = {}
    causes: dict[str, list[str]] = {}
    for name in names:
        if changes := _code_changes(name, there, here):
            errors[name] = math.hypot(*changes.values())
            causes.setdefault(", ".join(changes), []).append(name)
    verb = {True: "was", False: "were"}
    return errors, [f"{', '.join(own)} {verb[len(own) == 1]} measured with {why}" for why, own in causes.items()]


def _code_changes(name: str, there: Environment, here: Environment) -> dict[str, float]:
    """What changed in the code of a registered backend's kernels, as `environment.kernel_changes`."""
    backend = default_registry()[name]
    packages, jit = _kernel_packages(backend)
    return environment.kernel_changes(there, here, packages, backend.triton_release_error if jit else 0.0)


def _kernel_packages(backend: Backend) -> tuple[tuple[str, ...], bool]:
    """The packages that hold a backend's kernels, empty for this project's own, and whether Triton compiles them.

    A wrapper's kernels are in the library that its capabilities name, or in vLLM. A third party's may be anywhere.
    """
    libraries = tuple(name for name in backend.capabilities.packages if name in environment.KERNEL_PACKAGES[1:])
    if libraries:
        return libraries, False
    if backend.stock_class:
        return ("vllm",), not backend.precompiled
    return (() if is_own(backend) else environment.KERNEL_PACKAGES), True


def _why_undecided(measured: MeasurementSet, judged: tuple[Candidate, ...], settings: Settings) -> str:
    """Why measurements are not sufficient for a choice; "" if they are."""
    names = _compared_backends(judged)
    if not names:
        return ""
    choice = choose_fastest(measured, names, parse_objective(settings.objective), settings.min_time_saving)
    if choice.comparison is not None:
        return ""
    return choice.explanation or f"{measured.source} has no times of these backends"


def _completed(measured: MeasurementSet, names: Sequence[str], settings: Settings, predict: Predict) -> MeasurementSet:
    """Measurements with the missing times that can be filled in. Of a backend with too few times all are, if by them it
    is faster than the choice without it, by more than their error: it would lose to what happened to be measured."""
    found, objective = fill_missing(measured, names, predict), parse_objective(settings.objective)
    incomplete = {
        name
        for name in names
        if name in found.times and LatencyCurve(found.known_times(name), found.filled.get(name)).coverage_gap(objective)
    }
    if not incomplete:
        return found
    winner = choose_fastest(found, names, objective, settings.min_time_saving).backend
    whole = fill_missing(measured, names, predict, incomplete)
    rivals = [winner, *(name for name in names if name != winner)]
    return whole if choose_fastest(whole, rivals, objective, settings.min_time_saving).backend in incomplete else found


def _compared_backends(judged: tuple[Candidate, ...]) -> tuple[str, ...]:
    """The backends among which times decide; empty if none can run the layer but the reference."""
    static = next((each for each in judged if each.accepted), None)
    if static is None or static.backend == REFERENCE_BACKEND:
        return ()
    return equivalent_backends(static, judged)


def _sources(
    settings: Settings, device: Device
) -> Iterator[tuple[str, Callable[[KernelShape], Iterable[_EnvironmentSamples]]]]:
    """The sources in order: name, and what reads the samples of a shape. The shipped profile has times of GPUs only, so
    it is not listed for other devices."""
    if settings.profile:
        yield f"the profile {settings.profile}", lambda shape: _samples_in([_read_profile(settings.profile)], shape)
    yield "the cache", lambda shape: shared_store(cache_dir(settings)).samples(shape)
    if device.kind == "cuda":
        yield "the shipped profile", lambda shape: _samples_in(profile.shipped(), shape)


def profile_error(settings: Settings) -> str:
    """Why the profile of the setting `profile` cannot be read; "" if it can, or none is set. A misspelled path is said
    whether or not times are asked."""
    try:
        if settings.profile:
            _read_profile(settings.profile)
    except MeasurementError as error:
        return sanitize(f"the profile of {settings.source('profile')} is not used: {error}")
    return ""


def profile_of_other_gpu(settings: Settings, device: Device) -> str:
    """Why nothing of the profile of the setting `profile` counts on a device; "" if something does, or `profile_error`
    says why it cannot be read."""
    if not (settings.profile and settings.use_measurements) or profile_error(settings):
        return ""
    found = environment.differences(_read_profile(settings.profile).environment, Environment.of(device)).hard
    rule = f"the profile of {settings.source('profile')} has no effect on this machine: {', '.join(found)}"
    return sanitize(rule) if found else ""


def cache_error(settings: Settings) -> str:
    """Why the cache of measurements cannot be read; "" if it can, there is none yet, or it is not asked."""
    try:
        if settings.use_measurements:
            shared_store(cache_dir(settings)).check_readable()
    except (MeasurementError, SettingError) as error:
        return sanitize(f"the cache is not used: {error}")
    return ""


def _read_profile(path: str) -> profile.Profile:
    found = _profile_or_error(path)
    if isinstance(found, profile.Profile):
        return found
    raise MeasurementError(*found)


@lru_cache(maxsize=4)
def _profile_or_error(path: str) -> profile.Profile | tuple[str, str, str]:
    """A file is read once for all layers, if it cannot be used, too: then the parts of the error."""
    try:
        return profile.read(Path(path))
    except MeasurementError as error:
        return error.rule, error.remedy, error.where


def _samples_in(profiles: Iterable[profile.Profile], shape: KernelShape) -> Iterator[_EnvironmentSamples]:
    for each in profiles:
        if samples := each.samples(shape):
            yield each.environment, samples


def _valid_samples(
    name: str, found: Iterable[_EnvironmentSamples], here: Environment, remarks: list[str]
) -> list[_ValidSamples]:
    """The samples of the environments closest to here, the newest first among equals: an unfinished measurement does
    not hide a complete one. Adds a remark if all are invalid."""
    valid: list[_ValidSamples] = []
    gpus: list[str] = []
    invalid: list[str] = []
    for there, samples in found:
        differences = environment.differences(there, here)
        if differences.gpu:
            gpus.append(differences.gpu)
        elif differences.hard:
            invalid.append(", ".join(differences.hard))
        else:
            valid.append(_ValidSamples(there, samples, differences.soft))
    if not valid and gpus:
        remarks.append(f"measurements in {name} are of {' and '.join(dict.fromkeys(gpus))}, not of {here.gpu}")
    if not valid and invalid:
        remarks.append(f"measurements in {name} are ignored: {'; '.join(dict.fromkeys(invalid))}")
    return sorted(valid, key=lambda each: environment.distance(each.environment, here))[:_MAX_ENVIRONMENTS]


def _activations(name: str, problem: Problem) -> str:
    """The precision that a backend takes; "" for one that this process does not have, or that cannot say it."""
    registry = default_registry()
    try:
        return registry[name].activations(problem) if name in registry else ""
    except BackendDefect:  # the decision rejects it with the reason
        return ""


def _measurement_set(source: str, samples: Iterable[Sample], problem: Problem, settings: Settings) -> MeasurementSet:
    """The times of the backends of this process.

    Left out are backends that quantize activations differently here than where they were measured, failures for lack of
    memory, and times without top-k if other backends' times include it.
    """
    known = [each for each in samples if _says_something(each, problem)]
    # A backend that failed at one number of tokens, or under one routing, is not chosen for its times elsewhere.
    failed = dict.fromkeys(sample.backend for sample in known if sample.failure)
    failures = {name: _summarize_failures([each for each in known if each.backend == name]) for name in failed}
    timed = [sample for sample in known if sample.backend not in failures]
    with_router = {sample.backend for sample in timed if sample.router}
    if with_router and len(with_router) < len({sample.backend for sample in timed}):
        timed = [sample for sample in timed if sample.router]
    times: dict[str, dict[str, dict[int, float]]] = {}
    for sample in timed:
        times.setdefault(sample.backend, {}).setdefault(sample.routing, {})[sample.tokens] = sample.us
    counts = sorted({each.tokens for each in timed if each.routing == "uniform"})
    own = {name: [each for each in timed if each.backend == name] for name in times}
    tiles = {name: rows for name, found in own.items() if (rows := _tile_ranges(found, counts))}
    return MeasurementSet(times, source, failures, tiles=tiles, slow=_slow_backends(known, settings))


def _slow_backends(samples: Iterable[Sample], settings: Settings) -> set[str]:
    """The backends that failed by nothing but silence for which a start's second attempt has more time."""
    failed = [each for each in samples if each.failure]
    rest = {each.backend for each in failed if not may_be_slow(each.silent_seconds, settings.measure_at_start)}
    return {each.backend for each in failed} - rest


def _says_something(sample: Sample, problem: Problem) -> bool:
    """Whether a sample is of a backend of this process as it computes now, and no failure for lack of memory."""
    return (
        sample.backend in default_registry()
        and _activations(sample.backend, problem) == sample.activations
        and not mentions_out_of_memory(sample.failure)
    )


def _first_failure(failed: Iterable[Sample]) -> Sample:
    """The failure that is reported: under uniform routing, if there is one, with the fewest tokens."""
    return min(failed, key=lambda each: (each.routing != "uniform", each.tokens))


def _summarize_failures(samples: list[Sample]) -> str:
    """Why a backend must not be chosen. Names the number of tokens if it did not fail everywhere."""
    failed = [each for each in samples if each.failure]
    first = _first_failure(failed)
    why = sanitize(first.failure)
    if len(failed) == len(samples):
        return why
    skewed = " under skewed routing" if first.routing == "skewed" else ""
    return f"failed with {first.tokens} tokens{skewed}: {why}"


def _tile_ranges(samples: list[Sample], counts: list[int]) -> tuple[tuple[int, str], ...]:
    """The fastest tile configurations of a backend: (largest number of tokens, configuration), ascending.

    Each range ends at the geometric mean of its number of tokens and the next. Where only other backends were measured
    the backend's own choice runs. Empty if that was the fastest everywhere.

    Args:
        samples: the backend's.
        counts: numbers of tokens at which any backend was measured, ascending.
    """
    known = {each.tokens: each.tile for each in samples if each.routing == "uniform"}
    found = [(count, known.get(count, "")) for count in counts]
    if not any(known.values()):
        return ()
    following = [tokens for tokens, _ in found[1:]]
    return tuple(
        (math.isqrt(tokens * following[index]) if index < len(following) else tokens, tile)
        for index, (tokens, tile) in enumerate(found)
    )
