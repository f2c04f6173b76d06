"""Times of backends at single numbers of tokens at which they were not measured and other backends of the layer were.

Such a cell is missing where the time belongs to a tile that the kernel does not choose there, or where memory did not
suffice. Without it a curve would have a gap too wide to be compared, or its neighbors would stand for it.

A missing time is the latency model's, times the ratio of measured to predicted time at the next numbers of tokens below
and above, interpolated in logarithms; beyond the last one it is that one's ratio. Its error is the model's of a single
time (`latency_model.BackendLatency.cell_error`). Where the model predicts nothing, a time between two measured ones is
interpolated. ``python -m tests.tools.oracle_quality --left-out`` leaves measured times out, and says how far those that
are filled in are off, which choices that changes, and what it costs.

What is filled in:

* Cells at which at least half of the compared backends were measured: elsewhere all are interpolated alike.
* Cells whose neighbors were measured, at most a factor of `MAX_TOKEN_RATIO` away: kernels change their tiles at every
  such step, so that farther times say nothing of this one. Where steps are so wide, of two missing cells side by side
  none is filled in.
* At most `MAX_SHARE` of a backend's cells. More of them are an unfinished run, whose layer is to be measured. But where
  such a backend would be chosen with all its cells predicted, by more than their error, the others' times do not decide
  against it (`measurements.lookup`): then they are filled in, however far its measured ones are.
* No cell of a backend that failed at any number of tokens (`MeasurementSet.failures`): it is not chosen at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from ..core.measurement_set import Latencies, MeasurementSet
from ..oracle.measured_choice import MAX_TOKEN_RATIO, LatencyCurve

MAX_SHARE = 0.25
"""The largest share of a backend's cells that is filled in."""

INTERPOLATION_ERROR = 0.2
"""Standard deviation of the logarithm of a time that is interpolated between times a factor of four away on both sides:
the root mean square of an H100's shipped times that were left out. With neighbors a factor of two away it is half."""

Predict = Callable[[Sequence[str], Sequence[int]], MeasurementSet]
"""Predicted times of backends at numbers of tokens, as `latency_model.predict` returns them."""


def fill_missing(
    measured: MeasurementSet, names: Sequence[str], predict: Predict, incomplete: Collection[str] = ()
) -> MeasurementSet:
    """Measurements with the missing times that can be filled in, and a remark on each backend that has some.

    Args:
        measured: what was measured.
        names: backends that are compared with each other.
        predict: called once, where times are missing.
        incomplete: backends of which every cell is filled in that the model predicts.
    """
    compared = {name: measured.times[name] for name in names if name in measured.times}
    missing = {name: found for name, found in _missing_cells(compared, incomplete).items() if found}
    if not missing:
        return measured
    counts = {count for times in compared.values() for known in times.values() for count in known}
    predicted = predict(list(missing), sorted(counts))
    filled: dict[str, Latencies] = {}
    errors: dict[str, float] = {}
    remarks: list[str] = []
    for name, cells in missing.items():
        model = predicted.times.get(name, {}).get("uniform", {})
        found = {
            routing: _filled_times(compared[name][routing], wanted, model, any_distance=name in incomplete)
            for routing, wanted in cells.items()
        }
        if found := {routing: times for routing, times in found.items() if times}:
            filled[name] = found
            errors[name] = predicted.cell_errors[name] if model else INTERPOLATION_ERROR
            remarks.append(_remark(name, compared[name], cells, found, "predicted" if model else "interpolated"))
    return dataclasses.replace(measured, filled=filled, cell_errors=errors, remarks=(*measured.remarks, *remarks))


def _missing_cells(compared: Mapping[str, Latencies], incomplete: Collection[str]) -> dict[str, dict[str, list[int]]]:
    """By backend and routing the numbers of tokens at which it has no time and at least half of the others have one."""
    found: dict[str, dict[str, list[int]]] = {name: {} for name in compared}
    for routing in sorted({each for times in compared.values() for each in times}):
        known = {name: set(times[routing]) for name, times in compared.items() if times.get(routing)}
        cells = {
            count
            for count in set().union(*known.values())
            if 2 * sum(count in own for own in known.values()) >= len(known)
        }
        for name, own in known.items():
            missing = sorted(cells - own)
            if missing and (name in incomplete or len(missing) <= MAX_SHARE * len(cells)):
                found[name][routing] = missing
    return found


def _filled_times(
    known: Mapping[int, float], missing: Sequence[int], model: Mapping[int, float], any_distance: bool
) -> dict[int, float]:
    """The missing times whose neighbors are near enough, in microseconds by number of tokens.

    Args:
        known: measured times.
        missing: numbers of tokens.
        model: predicted times at all of these; empty if there are none.
        any_distance: neighbors may be any distance away, if there is a model.
    """
    ratios = LatencyCurve({"uniform": {count: us / model.get(count, 1.0) for count, us in known.items()}})
    found = {}
    for count in missing:
        below = max((each for each in known if each < count), default=None)
        above = min((each for each in known if each > count), default=None)
        near = [each for each in (below, above) if each is not None]
        too_far = any(max(count / each, each / count) > MAX_TOKEN_RATIO for each in near)
        if (too_far and not (any_distance and model)) or not (model or len(near) == 2):
            continue
        # Beyond the last measured time its ratio holds: the model has what more tokens take.
        found[count] = model.get(count, 1.0) * ratios.time_at("uniform", count if len(near) == 2 else near[0])
    return found


def _remark(name: str, known: Latencies, missing: Mapping[str, Sequence[int]], filled: Latencies, how: str) -> str:
    """For example ``a was measured at 6 of 7 numbers of tokens, 1 predicted (1024)``."""
    routing = "uniform" if "uniform" in filled else "skewed"
    measured, listed = len(known[routing]), ", ".join(map(str, sorted(filled[routing])))
    words = f"{name} was measured at {measured} of {measured + len(missing[routing])} numbers of tokens"
    words += " under skewed routing" if routing == "skewed" else ""
    return f"{words}, {len(filled[routing])} {how} ({listed})"
