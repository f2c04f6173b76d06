"""Settings without effect in a server: a warning, or with the setting `strict` the end of the start; names that may be
another program's are a warning alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.lib.method_layers import EXPERTS, HIDDEN, INNER, Layer, created, moe_config
from vllm_moe_oracle.errors import SettingError

IN_VAIN: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {"on_unavailable": "fallback"}, "--additional-config moe_oracle.on_unavailable: has no effect"),
    ({"MOE_ORACLE_USE_MEASUREMENTS": "0"}, {"objective": "decode"}, "moe_oracle.objective: has no effect"),
]


@pytest.mark.parametrize(("variables", "section", "words"), IN_VAIN)
def test_a_warning_or_the_end_of_the_start(
    variables: dict[str, str],
    section: dict[str, Any],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with moe_config(section, EXPERTS, HIDDEN, INNER) as config:
        with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
            created(config, Layer())
        assert words in caplog.text
        monkeypatch.setenv("MOE_ORACLE_STRICT", "1")
        with pytest.raises(SettingError) as caught:
            created(config, Layer())
        assert words in str(caught.value)


def test_a_variable_that_may_be_anothers_is_a_warning_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOEORACLE_BACKEND", "emulation")
    monkeypatch.setenv("MOE_ORACLE_STRICT", "1")
    with moe_config({}, EXPERTS, HIDDEN, INNER) as config, caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        created(config, Layer())
    assert "Did you mean MOE_ORACLE_BACKEND?" in caplog.text
