"""A profile of the settings that cannot be read: serving says so once a load, and does without, unless it is strict."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.lib.cases import H200, problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.errors import SettingError
from vllm_moe_oracle.methods import backend_selection, load_caches
from vllm_moe_oracle.settings import load

LAYERS = [problem(), problem(tp=2)]


@pytest.fixture(autouse=True)
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect", lambda: H200)


def test_one_warning_per_load_and_serving_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = load({"MOE_ORACLE_PROFILE": str(tmp_path / "nope"), "MOE_ORACLE_CACHE": str(tmp_path)})
    with caplog.at_level(logging.WARNING, "vllm.moe_oracle"):
        for layer in LAYERS * 2:
            found = backend_selection.measurements_for(layer, chosen)
            # Every decision has it besides.
            assert found is not None and any("nope" in remark and "not used" in remark for remark in found.remarks)
        (only,) = (each for each in caplog.records if "profile" in each.getMessage())
        assert only.levelno == logging.WARNING
        assert "the profile of environment variable MOE_ORACLE_PROFILE is not used" in only.getMessage()
        assert "nope: cannot be read: No such file or directory" in only.getMessage()
        load_caches.end_load()
        backend_selection.measurements_for(LAYERS[0], chosen)
        assert sum("profile of" in each.getMessage() for each in caplog.records) == 2


def test_strict_it_ends_the_start_before_a_weight_is_read(tmp_path: Path) -> None:
    chosen = load({"MOE_ORACLE_PROFILE": str(tmp_path), "MOE_ORACLE_STRICT": "1"})
    for layer in LAYERS:
        with pytest.raises(SettingError, match=r"is not used.*: is a directory. Correct the setting, or leave it out"):
            backend_selection.measurements_for(layer, chosen)
    assert (
        backend_selection.measurements_for(
            LAYERS[0], load({"MOE_ORACLE_STRICT": "1", "MOE_ORACLE_CACHE": str(tmp_path)})
        )
        is not None
    )
