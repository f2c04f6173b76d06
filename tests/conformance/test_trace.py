"""How the conformance tests follow bits through a conversion: moved, inverted, copied, computed and lost ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.lib.bit_moves import keeps_every_bit, undone
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.oracle.registry import Registry, default_registry
from vllm_moe_oracle.testing import cases, test_conversion
from vllm_moe_oracle.testing.bit_trace import trace_bits


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_bits_are_found_where_they_were_moved() -> None:
    inputs = [{"codes": random(4, 6, seed=seed), "zero": random(3, seed=64 + seed) & 15} for seed in range(64)]

    def convert(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        codes = given["codes"].T.clone()
        codes[0, 1] += codes[0, 0]  # row 1, column 0 is computed
        codes[5] ^= 0x80  # of column 5 the highest bits are inverted
        return {"zero": given["zero"].flip(0), "sums": codes.sum(0, dtype=torch.int32), "codes": codes[:, :3]}

    found = trace_bits(convert, inputs)
    first = 8 * (3 + 4 * 4)
    for row in range(4):
        for column in range(6):
            place, inverted, _ = (part[6 * row + column] for part in found["codes"])
            lost = row == 3 or (row, column) == (1, 0)
            assert place.tolist() == [-1 if lost else first + 8 * (3 * column + row) + bit for bit in range(8)]
            assert inverted[place >= 0].tolist() == ([] if lost else [False] * 7 + [column == 5])
    place, _, constant = found["zero"]
    assert place[:, :4].tolist() == [[8 * (2 - index) + bit for bit in range(4)] for index in range(3)]
    assert constant.tolist() == [[False] * 4 + [True] * 4] * 3


def test_the_way_back_is_found() -> None:
    matrix = random(6, 4)

    def turned(given: torch.Tensor, by: int) -> torch.Tensor:
        return (given.T.roll(by, 0) ^ 0x88).contiguous().view(torch.int16)

    assert torch.equal(undone(turned, turned(matrix, by=1), (6, 4), by=1), matrix)
    assert keeps_every_bit(turned, (6, 4), by=2)
    with pytest.raises(AssertionError, match="loses bits"):
        undone(lambda given: given & 15, matrix, (6, 4))


@pytest.mark.parametrize("name", ["marlin_mxfp4", "triton_wna16", "trtllm_mxfp8"])
@pytest.mark.parametrize("key", ["w13", "w2_scale"])
def test_one_lost_element_of_thousands_is_noticed(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The high nibble of one byte, where a byte has two codes."""
    faulty = copy.copy(default_registry()[name])
    own = faulty.convert

    def convert(expert: Mapping[str, torch.Tensor], layer: Problem, plan: Any) -> Any:
        changed = expert[key].clone()
        flat = changed.view(-1).view(torch.uint8) if changed.element_size() == 1 else changed.view(-1)
        flat[321] = flat[321] & 15 if key == "w13" and layer.scheme.bits == 4 else flat[320]
        return own({**expert, key: changed}, layer, plan)

    monkeypatch.setattr(faulty, "convert", convert)
    registry = Registry()
    registry.add(faulty, "a test")
    monkeypatch.setattr(cases, "default_registry", lambda: registry)
    monkeypatch.setattr(test_conversion, "distinct", lambda backend: cases.distinct(backend)[:2])
    with pytest.raises(AssertionError, match=rf"element 321 of {key}.* (is|are) lost"):
        test_conversion.test_every_element_matters(name)
