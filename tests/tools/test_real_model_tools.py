"""The tools that measure on the real model, on its first two layers: what is right passes, and faults are caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lib import faulty_backends, smollm2
from tests.tools import accuracy, real_weights
from vllm_moe_oracle.devices import detect

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(smollm2.missing()), reason=smollm2.missing() or "everything is there"),
]


def test_the_gate_tells_right_backends_from_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = smollm2.write(tmp_path / "model", accuracy.FAULT_FORMAT, smollm2.mixture(2))
    tokens, _ = accuracy.accuracy.windows(3)
    found = accuracy.measure(path, accuracy.FAULT_FORMAT, [], tokens, detect.detect(), dtype="float32")
    assert "emulation" in found
    for name, each in found.items():
        assert each["activations"] == "16bit" and each["kl"] < 1e-4 and each["top1"] > 0.97, (name, each)
    some = ("none", "gate and up swapped", "scales of w2 one exponent up")
    monkeypatch.setattr(accuracy, "FAULTS", tuple(each for each in accuracy.FAULTS if each.name in some))
    faults = accuracy.inject(path, tokens, detect.detect())
    assert faults["none"]["kl"] < 1e-4 and not faults["none"]["caught"]
    assert all(faults[name]["kl"] > 1e-2 for name in some[1:])


def test_faults_are_caught_on_real_weights_and_right_kernels_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_weights, "LAYERS", 1)
    monkeypatch.setattr(real_weights, "LAYOUTS", {"gpt-oss": "mxfp4"})
    chosen = ("no bias of w2", "limit ignored", "last column", "one expert")
    faults = {name: fault for name, fault in faulty_backends.FAULTS.items() if name in chosen}
    assert len(faults) == len(chosen)
    monkeypatch.setattr(faulty_backends, "FAULTS", faults)
    found = real_weights.try_faults(tmp_path, detect.detect())
    assert set(found["gpt-oss"].values()) <= {"load", "verify"} and len(found["gpt-oss"]) == len(chosen)
    seeds = real_weights.try_seeds(tmp_path, detect.detect(), 2, 1e9)
    assert seeds and all(each["refused"] == 0 and each["seeds"] == 2 for each in seeds.values()), seeds
