"""What `profile.make` packs comes back, and what a profile has once for each backend must not differ."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lib.samples import HERE, SHAPE
from vllm_moe_oracle.errors import MeasurementError
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.kernel_shape import Sample

BACKENDS = ("marlin_mxfp8", "hopper_mxfp8")


def made(backend: str, activations: str, tokens: int, routing: Any, router: bool, failure: str) -> Sample:
    if failure:
        return Sample(backend, activations, tokens, routing, failure=failure)
    return Sample(backend, activations, tokens, routing, 50.0, 49.0, 51.0, 20, 0.001, router)


SAMPLES = st.lists(
    st.builds(
        made,
        st.sampled_from(BACKENDS),
        st.sampled_from(("16bit", "mxfp8")),
        st.integers(1, 64),
        st.sampled_from(("uniform", "skewed")),
        st.booleans(),
        st.sampled_from(("", "", "too slow")),
    ),
    max_size=6,
    unique_by=lambda each: each.key,
)


def mixed(samples: Iterable[Sample]) -> list[str]:
    """The backends of which a profile cannot hold all samples, in their order, with how many kinds of which thing."""
    found = []
    for backend in sorted(BACKENDS):
        own = [each for each in samples if each.backend == backend]
        if len({each.activations for each in own}) > 1:
            found.append(f"{backend} has measurements of 2 precisions of activations")
        elif len({each.router for each in own if not each.failure}) > 1:
            found.append(f"{backend} has measurements of 2 kinds of times, with the router and without it")
    return found


@given(SAMPLES)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_samples_of_one_kind_come_back_and_others_are_refused(samples: list[Sample]) -> None:
    refused = mixed(samples)
    if refused:
        with pytest.raises(MeasurementError, match=f"^{re.escape(refused[0])}") as caught:
            profile.make(HERE, {SHAPE: samples}, {})
        assert caught.value.remedy == "Keep those of each kind in a profile of their own"
        for backend in BACKENDS:  # as the remedy says
            for kind in {each.activations for each in samples}:
                for router in (True, False):
                    own = [each for each in samples if (each.backend, each.activations) == (backend, kind)]
                    own = [each for each in own if each.failure or each.router == router]
                    assert came_back(own)
    else:
        assert came_back(samples)


def came_back(samples: list[Sample]) -> bool:
    found = profile.make(HERE, {SHAPE: samples}, {}).samples(SHAPE)
    return sorted(found, key=repr) == sorted(samples, key=repr)


def test_a_file_is_not_written_of_mixed_samples(tmp_path: Path) -> None:
    """As `tune --export` does it."""
    file = tmp_path / "profile.json"
    both = [
        made("marlin_mxfp8", kind, 1 + number, "uniform", False, "") for number, kind in enumerate(("16bit", "mxfp8"))
    ]
    with pytest.raises(MeasurementError, match="precisions of activations"):
        profile.write(profile.make(HERE, {SHAPE: both}, {}), file)
    assert not file.exists()
