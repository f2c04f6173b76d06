"""The roofline: measured rates, else the data sheet's."""

from __future__ import annotations

import msgspec
import pytest

from tests.lib.cases import problem
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.measurements.roofline import active_experts, expert_bytes, roofline_us


def test_one_token_takes_its_experts_bytes_at_the_measured_bandwidth() -> None:
    layer = problem()
    moved = active_experts(layer, 1) * expert_bytes(layer) + 4 * layer.hidden_size
    assert active_experts(layer, 1) == pytest.approx(layer.top_k)
    assert roofline_us(layer, 1, "NVIDIA H200") == pytest.approx(moved / 4300e9 * 1e6)


@pytest.mark.parametrize("tokens", [1, 16384])
def test_a_gpu_without_measured_rates_has_its_data_sheets(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = roofline_us(problem(), tokens, "nvidia-h200")
    sheet = msgspec.structs.replace(catalog.catalog()["nvidia-h200"], measured=None)
    monkeypatch.setitem(catalog.catalog(), "nvidia-h200", sheet)
    looser = roofline_us(problem(), tokens, "nvidia-h200")
    assert looser is not None and measured is not None and 0.7 * measured < looser < measured


@pytest.mark.parametrize("gpu", ["an unknown GPU", "cpu"])
def test_other_devices_have_none(gpu: str) -> None:
    assert roofline_us(problem(), 1, gpu) is None
