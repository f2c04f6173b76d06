"""A benchmark's times replace those of the same layer, backend and number of tokens in a profile, and no others."""

from __future__ import annotations

import msgspec
import pytest

from tests.tools import merge_times
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.kernel_shape import KernelShape, Sample

SHIPPED = profile.shipped()[0]
ENTRY = SHIPPED.entries[0]


def by_key(found: profile.Profile, shape: KernelShape) -> dict[tuple[str, str, int], Sample]:
    return {each.key: each for each in found.samples(shape)}


def test_new_times_replace_old_ones_and_everything_else_stays() -> None:
    before = by_key(SHIPPED, ENTRY.kernel_shape)
    old = next(each for each in before.values() if not each.failure)
    new = msgspec.structs.replace(old, us=old.us * 2, low=old.low * 2, high=old.high * 2)
    other = msgspec.structs.replace(new, tokens=3333)
    failed = msgspec.structs.replace(old, tokens=4444, us=0.0, low=0.0, high=0.0, replays=0, failure="no memory")
    made = merge_times.merged(SHIPPED, SHIPPED.environment, {ENTRY.kernel_shape: [new, other, failed]})
    after = by_key(made, ENTRY.kernel_shape)
    assert after[old.key].us == new.us and after[other.key].us == other.us and failed.key not in after
    assert {key: each for key, each in after.items() if key not in (old.key, other.key)} == {
        key: each for key, each in before.items() if key != old.key
    }
    rest = [each.kernel_shape for each in SHIPPED.entries[1:]]
    assert all(by_key(made, shape) == by_key(SHIPPED, shape) for shape in rest)
    assert [each.kernel_shape for each in made.entries] == [each.kernel_shape for each in SHIPPED.entries]


def test_times_of_other_kernels_are_refused() -> None:
    other = msgspec.structs.replace(SHIPPED.environment, kernels="0" * 16)
    with pytest.raises(ValueError, match="0000000000000000"):
        merge_times.merged(SHIPPED, other, {})
