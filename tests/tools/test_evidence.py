"""What the counts of `evidence` say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.lib import configs
from tests.tools import evidence
from vllm_moe_oracle import settings
from vllm_moe_oracle.devices.catalog import known_device


def test_the_aim_is_met_and_answers_were_given_for_enough_models() -> None:
    held = json.loads(evidence.GOLDEN.read_text())
    assert held["configs"] >= 60
    for gpu in held["gpus"]:
        of_gpu = [each for key, each in evidence.total(held["counts"]).items() if key.startswith(f"{gpu},")]
        added = {kind: sum(each.get(kind, 0) for each in of_gpu) for kind in evidence.ORDER}
        assert evidence.share(added) >= 0.95


@pytest.mark.parametrize("model", ["gpt-oss-20b"])
def test_counts_are_those_of_today(model: str) -> None:
    """Those of one config; `--write` makes all of them again, which takes minutes."""
    counts = evidence.count([model])["counts"][model]
    assert counts == json.loads(evidence.GOLDEN.read_text())["counts"][model]
    answers = len(evidence.GPUS) * len(evidence.RELEASES) * len(evidence.RANKS)
    assert sum(sum(each.values()) for each in counts.values()) == answers


def test_the_least_certain_layer_counts() -> None:
    assert evidence.share({"measured": 1, "predicted": 1, "static": 2, "stock": 4}) == 0.5
    assert evidence.share({"stock": 4}) == 1.0
    assert {name for name, _, _ in evidence.cases(["gpt-oss-20b"])} == {"gpt-oss-20b"}
    assert len(evidence.cases(["mixtral-8x7b"])) == len(evidence.FORMATS)
    assert set(evidence.PUBLISHED) <= {each.stem for each in configs.CONFIGS.glob("*.json")}


def test_what_nobody_runs_is_not_called_stocks(tmp_path: Path) -> None:
    """Nemotron-3-Nano over four ranks, whose shards cut scale groups; and a limit of gelu, which stock ignores."""
    path = tmp_path / "config.json"
    here, chosen = known_device("a100"), settings.load({}, assignments={"cache": f"{tmp_path}/none"})
    cut = configs.quantized("nemotron-3-nano-30b-a3b", quantization_config=configs.MODELOPT)
    gelu = {"model_type": "interns2_mobius", "hidden_act": "gelu", "swiglu_limit": 7.0}
    left = configs.quantized("qwen3-30b-a3b", quantization_config=configs.MODELOPT, **gelu)
    for data, tp, kind in ((cut, 4, "none"), (left, 1, "stock")):
        path.write_text(json.dumps(data))
        assert evidence.kind_of(path, here, tp, False, chosen)[0] == kind


def test_counts_rest_on_todays_times_configs_and_releases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not evidence.is_stale(), "run: python -m tests.tools.generate --write"
    monkeypatch.setattr(evidence, "RELEASES", ("0.27.1",))
    assert evidence.is_stale()
    monkeypatch.undo()
    (tmp_path / "one.json").write_text("{}")
    monkeypatch.setattr(evidence.configs, "CONFIGS", tmp_path)
    assert evidence.is_stale()
