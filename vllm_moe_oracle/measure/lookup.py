"""Finding the measurements that hold for a layer on a machine: the user's profile, the cache, the shipped profiles.

The first place whose measurements of the layer's cell hold here and decide answers alone: times from two places are not
compared with each other, and a run of `tune` that was ended early hides no other place's. Whatever cannot be read is a
remark, never an error: serving does not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from ..errors import MeasurementError, SettingError, plain
from ..oracle.measured import Evidence, choose
from ..oracle.objectives import parse
from ..oracle.oracle import REFERENCE, candidates, comparable
from ..oracle.problem import Device, Problem
from ..oracle.registry import default_registry
from ..settings import Settings, cache_folder
from . import environment, profile
from .cells import Cell, Sample, cell_of
from .environment import Environment
from .store import Store

_Found = tuple[Environment, list[Sample]]


def evidence(problem: Problem, device: Device, settings: Settings) -> Evidence | None:
    """What was measured of a layer and holds on a machine; None when measurements are switched off.

    Args:
        problem: the layer.
        device: the machine.
        settings: where to look.

    Returns:
        Times from one place, or none with remarks that say why what was found is not used. Where no place's decide, the
        first one's.
    """
    if not settings.measured:
        return None
    cell, here = cell_of(problem), environment.of(device)
    remarks: list[str] = []
    first: Evidence | None = None
    failed: dict[str, str] = {}
    for name, look in _places(settings):
        try:
            found = look(cell)
        except (MeasurementError, SettingError) as error:
            remarks.append(plain(f"{name} is not used: {error}"))
            continue
        best = _closest(name, found, here, remarks)
        if best is None:
            continue
        there, samples, soft = best
        made = _evidence(f"{name} ({there})", samples, problem)
        # What failed in a place that was passed over is not chosen by the next one's times.
        times = {backend: each for backend, each in made.times.items() if backend not in failed}
        failed |= made.failures
        why = _decides_nothing(Evidence(times, made.source, failed), problem, device, settings)
        said = [f"measured with {', '.join(soft)}"] * bool(soft) + remarks
        tiles = made.tiles
        if tiles and not environment.same_code(there, here):
            tiles = {}
            said.append("tile configurations measured there are left out: here they are compiled to something else")
        made = Evidence(times, made.source, dict(failed), tuple(said), tiles)
        if not why:
            return made
        remarks.append(why)
        first = first or made
    return first or Evidence(remarks=tuple(remarks))


def _decides_nothing(found: Evidence, problem: Problem, device: Device, settings: Settings) -> str:
    """Why measurements from one place leave the static choice as it is without having judged it; "" where they do."""
    registry = default_registry()
    judged = candidates(problem, device, settings, registry)
    static = next((each for each in judged if each.accepted), None)
    if static is None or static.backend == REFERENCE:
        return ""
    names = comparable(static, judged, problem, registry)
    choice = choose(found, names, parse(settings.objective), settings.margin)
    return "" if choice.measured is not None else choice.because or f"{found.source} has no times of these backends"


def _places(settings: Settings) -> Iterator[tuple[str, Callable[[Cell], Iterable[_Found]]]]:
    if settings.profile:
        yield f"the profile {settings.profile}", lambda cell: _in([_read(settings.profile)], cell)
    yield "the cache", lambda cell: Store(cache_folder(settings)).samples(cell)
    yield "the shipped profile", lambda cell: _in(profile.shipped(), cell)


def profile_error(settings: Settings) -> str:
    """Why the profile of the setting `profile` is not used, for people; "" where it is, or none is set."""
    try:
        if settings.profile:
            _read(settings.profile)
    except MeasurementError as error:
        return plain(f"the profile of {settings.source('profile')} is not used: {error}")
    return ""


@lru_cache(maxsize=4)
def _read(path: str) -> profile.Profile:
    return profile.read(Path(path).expanduser())


def _in(profiles: Iterable[profile.Profile], cell: Cell) -> Iterator[_Found]:
    for each in profiles:
        if samples := each.samples(cell):
            yield each.environment, samples


def _closest(
    name: str, found: Iterable[_Found], here: Environment, remarks: list[str]
) -> tuple[Environment, list[Sample], tuple[str, ...]] | None:
    """The measurements from the place that is most like here, the newest of equals; notes those that are void."""
    best: tuple[Environment, list[Sample], tuple[str, ...]] | None = None
    void: list[str] = []
    for there, samples in found:
        differences = environment.differences(there, here)
        if differences.hard:
            void.append(", ".join(differences.hard))
        elif best is None or len(differences.soft) < len(best[2]):
            best = there, samples, differences.soft
    if best is None and void:
        remarks.append(f"measurements in {name} are ignored: {'; '.join(dict.fromkeys(void))}")
    return best


def _evidence(source: str, samples: Iterable[Sample], problem: Problem) -> Evidence:
    """Times by backend. One that takes activations in another precision than it would now was another kernel; so was
    one that chose experts itself, where the others did not."""
    registry = default_registry()
    kept: list[Sample] = []
    for sample in samples:
        known = sample.backend in registry
        if known and registry[sample.backend].activations(problem) == sample.activations:
            kept.append(sample)
    # What failed somewhere, be it at one number of tokens or under one routing, is not chosen for its times elsewhere.
    failed = dict.fromkeys(sample.backend for sample in kept if sample.failure)
    failures = {name: _failure([each for each in kept if each.backend == name]) for name in failed}
    timed = [sample for sample in kept if sample.backend not in failures]
    routed = {sample.backend for sample in timed if sample.router}
    if routed and len(routed) < len({sample.backend for sample in timed}):
        timed = [sample for sample in timed if sample.router]
    times: dict[str, dict[str, dict[int, float]]] = {}
    for sample in timed:
        times.setdefault(sample.backend, {}).setdefault(sample.routing, {})[sample.tokens] = sample.us
    tiles = {name: rows for name in times if (rows := _tiles([each for each in timed if each.backend == name]))}
    return Evidence(times, source, failures, tiles=tiles)


def _failure(samples: list[Sample]) -> str:
    """Why a backend is not to be chosen, and where it failed if it has times, too."""
    failed = sorted(
        (each for each in samples if each.failure), key=lambda each: (each.routing != "uniform", each.tokens)
    )
    first = failed[0]
    why = plain(first.failure)
    if len(failed) == len(samples):
        return why
    skewed = " under skewed routing" if first.routing == "skewed" else ""
    return f"failed with {first.tokens} tokens{skewed}: {why}"


def _tiles(samples: list[Sample]) -> tuple[tuple[int, str], ...]:
    """The fastest tile configurations of a backend: each up to the middle, in logarithms, of its number of tokens and
    the next. Empty where its own choice was the fastest everywhere."""
    found = sorted((each.tokens, each.tile) for each in samples if each.routing == "uniform")
    if not any(tile for _, tile in found):
        return ()
    following = [tokens for tokens, _ in found[1:]]
    return tuple(
        (math.isqrt(tokens * following[index]) if index < len(following) else tokens, tile)
        for index, (tokens, tile) in enumerate(found)
    )
