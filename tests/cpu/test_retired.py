"""Variables that vLLM stopped reading are not ignored in silence."""

from __future__ import annotations

import logging

import pytest

from vllm_moe_oracle.compat import retired


def test_a_variable_that_the_release_ignores_is_named_with_its_successor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_MXFP4_USE_MARLIN", "1")
    logging.getLogger("vllm").propagate = True
    assert retired.warn("0.33.0") == ["VLLM_MXFP4_USE_MARLIN"]
    assert "VLLM_MXFP4_USE_MARLIN=1 has no effect on vLLM 0.33.0" in caplog.text
    assert "--moe-backend marlin" in caplog.text


@pytest.mark.parametrize("version", ["0.23.0", "0.22.1", "not a version"])
def test_a_release_that_reads_it_is_left_alone(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MXFP4_USE_MARLIN", "1")
    assert retired.warn(version) == []


def test_without_such_variables_nothing_is_said() -> None:
    assert retired.warn("0.33.0") == []


@pytest.mark.parametrize("name", retired.UNFOLLOWED)
def test_what_vllm_reads_and_our_experts_do_not_follow_is_named_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rule = retired.UNFOLLOWED[name]
    for harmless in rule.unless:
        monkeypatch.setenv(name, harmless)
        assert retired.warn("0.33.0") == []
    value = "0" if "1" in rule.unless else "fp8"
    monkeypatch.setenv(name, value)
    logging.getLogger("vllm").propagate = True
    assert retired.warn("0.33.0") == [name]
    assert f"{name}={value} has no effect on the experts that this plugin serves: {rule.because}" in caplog.text
