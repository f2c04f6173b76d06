"""Page one follows the data: a GPU or a served model appears with its file, and noise is not sold as a gain."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.tools import page_one, recipes, serving_tables
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.measurements import model_shapes, profile
from vllm_moe_oracle.measurements.lookup import find_measurements
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import load


def served(folder: Path, model: str, verdict: str = "better") -> Path:
    """What ``vllm-moe-oracle ab --json`` prints, as far as page one reads it."""
    rows = [
        ("output", "tokens/s", [1000.0, 1010.0, 990.0], [1250.0, 1240.0, 1300.0], 1.26, verdict, 16),
        ("time to first token", "ms", [40.0], [30.0], 0.75, "better", 16),
        ("output", "tokens/s", [3000.0], [3300.0], 1.1, "better", 64),
        ("time to first token", "ms", [60.0], [66.0], 1.1, "worse", 64),
        ("start", "s", [50.0], [40.0], 0.8, "better", None),
    ]
    names = ("name", "unit", "stock", "plugin", "ratio", "verdict", "concurrency")
    metrics = [dict(zip(names, row, strict=True)) for row in rows]
    data = {
        "model": model, "packages": {"vllm": NEWEST}, "turns": 5, "turns_measured": 3, "metrics": metrics,
        "options": ["--load-format", "dummy"],
        "loads": [
            {"prompts": 200, "input_len": 512, "output_len": 128, "concurrency": each, "seed": 0} for each in (16, 64)
        ],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ab-{model.replace('/', '-')}.json"
    path.write_text(json.dumps(data))
    return path


def test_each_served_model_has_its_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_one, "GOLDEN", tmp_path)
    served(tmp_path / "h200", "openai/gpt-oss-20b")
    served(tmp_path / "h100", "some-model", "no difference shown")
    text = page_one.end_to_end()
    assert "| stock → plugin | output, tokens/s | time to first token, ms |" in text
    assert "| gpt-oss-20b, 16 at a time | 1,000 → 1,250 (+26%) | 40 → 30 (-25%) |" in text
    assert "| gpt-oss-20b, 64 at a time | 3,000 → 3,300 (+10%) | 60 → 66 (+10%) |" in text
    assert "| some-model, 16 at a time | 1,000 → 1,250 (≈) | 40 → 30 (-25%) |" in text
    assert (
        "NVIDIA H200" in text
        and "NVIDIA H100" in text
        and "medians of 3 turns; random weights" in " ".join(text.split())
    )


def test_what_noise_covers_is_no_gain() -> None:
    def mode(ms: float, noise: float) -> dict[str, object]:
        return {"decode_ms": {"1": ms}, "noise_ms": {"1": noise}}

    words = serving_tables.step_words
    assert words(mode(2.0, 0.1), mode(1.5, 0.1), "1") == "2.00 → 1.50 ms (-25%)"
    assert words(mode(2.0, 0.1), mode(2.5, 0.1), "1") == "2.00 → 2.50 ms (+25%)"
    assert words(mode(2.0, 0.3), mode(1.5, 0.3), "1") == "no difference shown (2.00, 1.50 ms)"
    assert words(mode(2.0, 0.6), mode(1.0, 0.1), "1") == "covered by noise"


def test_a_second_gpu_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tuple(each for each in recipes.panels() if each.environment.startswith("NVIDIA H200"))
    own = tuple(each for each in own if each.environment == own[0].environment)
    monkeypatch.setattr(recipes, "panels", lambda: own)
    others = tuple(dataclasses.replace(each, environment=f"NVIDIA H100, vLLM {NEWEST}") for each in own[:4])
    before = page_one.gain()
    monkeypatch.setattr(recipes, "panels", lambda: own + others)
    text = page_one.gain()
    assert "No other GPU has been measured" in before and "No other GPU" not in text
    assert f"\n| NVIDIA H100, vLLM {NEWEST} | **" in text


@pytest.mark.parametrize("device", ["nvidia-h200", "nvidia-h100"])
def test_what_flashinfer_leaves_without_times(device: str) -> None:
    """vLLM's list for these packings begins with FlashInfer's kernel, which was timed for gpt-oss's layers alone."""
    machine, chosen = known_device(device), load({}, assignments={"cache": str(Path(__file__).parent / "no cache")})
    others = {name: version for name, version in machine.packages.items() if not name.startswith("flashinfer")}
    layer = next(each for each in model_shapes.served_problems() if each.layer == "mxfp4:qwen3-30b-a3b")
    for packing, static in (("compressed-tensors", False), ("auto-round", False), ("quark", True), ("online", True)):
        scheme = dataclasses.replace(layer.scheme, packing=packing, activations="mxfp4")
        problem = dataclasses.replace(layer, scheme=scheme)
        for each, expected in ((machine, static), (dataclasses.replace(machine, packages=others), False)):
            measured = find_measurements(problem, each, chosen)
            assert (decide(problem, each, chosen, measurements=measured).why == "static") is expected, packing


def test_what_decides_is_what_the_oracle_says() -> None:
    """Cells of the table against the kinds of decisions that are known of three machines."""
    rows = {line.split(" | ")[0].strip("| "): line for line in page_one.help_table().splitlines() if line[:1] == "|"}
    h200, hopper, ampere = (
        next(line for names, line in rows.items() if gpu in names.split(", ")) for gpu in ("H200", "H100 NVL", "A100")
    )
    # Under a newer release than the shipped times', those of vLLM's own kernels count as predictions.
    release = profile.read(profile.SHIPPED_FOLDER / "nvidia_h200.json").environment.packages["vllm"]
    assert h200.count("measured: 1.") == (4 if release == NEWEST else 0)
    assert hopper.count("predicted") == 4 and ampere.count("static") == 4
    blackwell = next(line for names, line in rows.items() if "B200" in names.split(", "))
    assert "W4A4" in blackwell and not any("W4A4" in each for each in (h200, hopper, ampere))
    assert rows["ROCm, XPU"].count("stands down") == 4
