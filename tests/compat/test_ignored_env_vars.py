"""Variables that vLLM stopped reading are not ignored in silence."""

from __future__ import annotations

import logging

import pytest

from vllm_moe_oracle.compat import ignored_env_vars
from vllm_moe_oracle.releases.supported import NEWEST


def test_a_variable_that_the_release_ignores_is_named_with_its_successor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_MXFP4_USE_MARLIN", "1")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert ignored_env_vars.warn_ignored(NEWEST) == ["VLLM_MXFP4_USE_MARLIN"]
    assert f"VLLM_MXFP4_USE_MARLIN=1 has no effect on vLLM {NEWEST}" in caplog.text
    assert "--moe-backend marlin" in caplog.text


@pytest.mark.parametrize("version", ["0.23.0", "0.22.1", "not a version"])
def test_a_release_that_reads_it_is_left_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MXFP4_USE_MARLIN", "1")
    assert ignored_env_vars.warn_ignored(version) == []


def test_without_such_variables_nothing_is_said() -> None:
    assert ignored_env_vars.warn_ignored(NEWEST) == []


@pytest.mark.parametrize("name", ignored_env_vars.IGNORED_VARIABLES)
def test_an_ignored_variable_is_named_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule = ignored_env_vars.IGNORED_VARIABLES[name]
    for harmless in rule.harmless_values:
        monkeypatch.setenv(name, harmless)
        assert ignored_env_vars.warn_ignored(NEWEST) == []
    value = "0" if "1" in rule.harmless_values else "fp8"
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert ignored_env_vars.warn_ignored(NEWEST) == [name]
    assert f"{name}={value} has no effect on the experts that this plugin serves: {rule.explanation}" in caplog.text
