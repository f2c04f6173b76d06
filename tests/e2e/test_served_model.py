"""A tiny MXFP8 model served through vLLM and the plugin equals float32 transformers with dequantized weights.

`tests.lib.served` derives the tolerance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import LAYERS, PROMPT, Expected, Results, assert_says, difference, job, tolerance

TOKENS = 6
OAI = {"alpha": 1.702, "beta": 1.0, "limit": 2.0}


def experts_of(name: str) -> bool:
    return ".mlp.experts." in name


def shift_scales(tensors: dict[str, Any]) -> None:
    """Every scale of the down projections of one expert a layer is one exponent too large."""
    for name in tensors:
        if experts_of(name) and ".experts.3.down_proj.weight_scale" in name:
            tensors[name] += 1


def drop_down_bias(tensors: dict[str, Any]) -> None:
    for name in tensors:
        if experts_of(name) and name.endswith("down_proj.bias"):
            tensors[name].zero_()


def add_biases(tensors: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(7)
    for name in [each for each in tensors if experts_of(each) and each.endswith("_proj.weight")]:
        rows = tensors[name].shape[0]
        tensors[name.removesuffix("weight") + "bias"] = torch.randn(rows, generator=generator) * 0.5


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    plain = folder / "plain"
    checkpoints.write_checkpoint(plain)
    made = {"plain": plain}
    edits = {"swapped": checkpoints.swap_gate_and_up, "shifted": shift_scales, "biased": add_biases}
    for name, edit in edits.items():
        made[name] = checkpoints.rewrite_tensors(plain, folder / name, edit)
    made["unbiased"] = checkpoints.rewrite_tensors(made["biased"], folder / "unbiased", drop_down_bias)
    return made


def served_job(
    checkpoint: Path, dtype: str = "float32", activations: str = "16bit", backend: str = "emulation", **more: Any
) -> dict[str, Any]:
    return job(checkpoint, dtype, TOKENS, oracle={"activations": activations, "backend": backend}, **more)


def oai(**changes: float) -> dict[str, Any]:
    values = {**OAI, **changes}
    return {
        "experts": {
            "has_bias": True,
            "activation": "swigluoai_uninterleave",
            "swiglu_alpha": values["alpha"],
            "swiglu_beta": values["beta"],
            "swiglu_limit": values["limit"],
        }
    }


@pytest.fixture(scope="module")
def served(models: dict[str, Path], folder: Path) -> Results:
    """Every job of this file in one process: importing vLLM is most of the time."""
    jobs = {
        "float32": served_job(models["plain"]),
        "float32 swapped": served_job(models["swapped"]),
        "float32 shifted": served_job(models["shifted"]),
        "float32 mxfp8": served_job(models["plain"], activations="checkpoint"),
        "float32 mxfp8 swapped": served_job(models["swapped"], activations="checkpoint"),
        "float32 mxfp8 shifted": served_job(models["shifted"], activations="checkpoint"),
        "bfloat16": served_job(models["plain"], "bfloat16"),
        "bfloat16 swapped": served_job(models["swapped"], "bfloat16"),
        "bfloat16 shifted": served_job(models["shifted"], "bfloat16"),
        "compiled": served_job(models["plain"], "bfloat16", "checkpoint", eager=False),
        "dequantized": served_job(models["plain"], backend="auto"),
        "dequantized swapped": served_job(models["swapped"], backend="auto"),
        "dequantized compiled": served_job(models["plain"], "bfloat16", "checkpoint", "auto", eager=False),
        "oai": served_job(models["biased"], **oai()),
        "oai without bias": served_job(models["unbiased"], **oai()),
        "oai wrong alpha": served_job(models["biased"], **oai(alpha=1.5)),
        "oai wrong beta": served_job(models["biased"], **oai(beta=0.0)),
        "oai wrong limit": served_job(models["biased"], **oai(limit=7.0)),
    }
    return vllm_runner.run("run_generate.py", jobs, folder)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Expected:
    exact = {
        "16bit": reference.load_transformers(models["plain"]),
        "mxfp8": reference.load_transformers(models["plain"], quantize_activations="ceil"),
        "oai": reference.load_transformers(models["biased"], activation="swigluoai", **OAI),
    }
    return {name: reference.greedy(model, PROMPT, TOKENS) for name, model in exact.items()}


RIGHT = {
    "float32": ("16bit", "float32"),
    "float32 mxfp8": ("mxfp8", "float32"),
    "bfloat16": ("16bit", "bfloat16"),
    "compiled": ("mxfp8", "bfloat16"),
    "oai": ("oai", "float32"),
}
"""What a job must say, and its dtype."""

FAULTS = {
    "float32": ("swapped", "shifted"),
    "float32 mxfp8": ("swapped", "shifted"),
    "bfloat16": ("swapped", "shifted"),
    "oai": ("without bias", "wrong alpha", "wrong beta", "wrong limit"),
}
"""Jobs with a fault, by the job without."""


@pytest.mark.parametrize("name", RIGHT)
def test_tokens_and_logprobs_equal_transformers_and_faults_show(served: Results, expected: Expected, name: str) -> None:
    kind, dtype = RIGHT[name]
    allowed = tolerance(dtype, kind == "mxfp8")
    assert_says(served[name], expected[kind], allowed)
    for fault in FAULTS.get(name, ()):
        assert difference(served[f"{name} {fault}"], expected[kind]) > allowed, fault


def test_every_moe_layer_runs_through_the_oracle(served: Results) -> None:
    record = served["float32"]["layers"]
    assert record["served"] == LAYERS
    assert [group["decision"]["backend"] for group in record["groups"]] == ["emulation"]


def test_dequantized_weights_are_right_and_a_fault_shows(served: Results, expected: Expected) -> None:
    for name, dtype in (("dequantized", "float32"), ("dequantized compiled", "bfloat16")):
        assert_says(served[name], expected["16bit"], tolerance(dtype))
        assert {group["decision"]["backend"] for group in served[name]["layers"]["groups"]} == {"cpu_dequantized"}
    assert difference(served["dequantized swapped"], expected["16bit"]) > tolerance("float32")


def test_what_the_layers_compute_with_is_said(served: Results) -> None:
    declared = served["float32 mxfp8"]["layers"]["groups"][0]
    overridden = served["float32"]["layers"]["groups"][0]
    assert declared["problem"]["scheme"]["activations"] == "mxfp8"
    assert overridden["problem"]["scheme"]["activations"] == "16bit"
    assert "MXFP8" in declared["decision"]["numerics"]
    assert "MXFP8" not in overridden["decision"]["numerics"]
