"""Devices of other vendors."""

from __future__ import annotations

import pytest

from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.errors import SettingError


@pytest.mark.parametrize("name", ["mi300x", "MI355X", "gfx942", "xpu", "tpu", "tpu-v6e", "gaudi3"])
def test_the_plugin_stands_down_on_other_vendors_devices(name: str) -> None:
    with pytest.raises(SettingError, match="this plugin stands down there, and stock vLLM serves"):
        known_device(name)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match="unknown device 'h2000'"):
        known_device("h2000")
