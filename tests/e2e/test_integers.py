"""Tiny models with integer experts, as GPTQ's, AWQ's and llm-compressor's tools write them, served through vLLM and the
plugin equal float32 transformers with the numbers that the codes stand for.

The tolerance is derived in `tests.lib.served`; emulation dequantizes exactly, so the two
differ by the roundings of float32 alone. Files that are damaged, or say something else than their config, are refused
by vLLM's own way of loading them, or give other numbers, which the tolerance shows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.lib import checkpoints, integer_checkpoints, reference, vllm_runner
from tests.lib.cases import problem
from tests.lib.integer_checkpoints import Integers
from tests.lib.served import HIDDEN, LAYERS, PROMPT, Results, assert_says, difference, job, tolerance
from vllm_moe_oracle.core.problem import Scheme
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.oracle.registry import default_registry

TOLERANCE = tolerance("float32")
TOKENS = 3
EXPERT = "model.layers.1.mlp.experts.3."


def nested_modules(experts: int) -> list[list[str]]:
    """Modules of a block in the order of their quantization, as GPTQ's tools list them: each expert by name."""
    pairs = [f"mlp.experts.{expert}.{name}_proj" for expert in range(experts) for name in ("up", "gate")]
    return [["self_attn.nothing"], pairs, [f"mlp.experts.{expert}.down_proj" for expert in range(experts)]]


NESTED = {"modules_in_block_to_quantize": nested_modules(checkpoints.Size().experts)}
KINDS: dict[str, tuple[Integers, str | None]] = {
    "gptq": (Integers("gptq", config=NESTED), None),
    "gptq, act order, zero points": (Integers("gptq", zero_points=True, act_order="group"), None),
    "gptq v2, int8, per channel": (Integers("gptq_v2", bits=8, group=-1, zero_points=True), None),
    "gptq with biases": (Integers("gptq", bits=8, bias=True, act_order="static"), None),
    "gptq as moe_wna16": (
        Integers("gptq", zero_points=True, group=64, config=NESTED), "moe_wna16",
    ),
    "awq": (Integers("awq", zero_points=True), None),
    "awq as moe_wna16": (Integers("awq", group=64, zero_points=True), "moe_wna16"),
    "compressed-tensors": (Integers("compressed-tensors", group=64), None),
    "compressed-tensors, act order, zero points": (
        Integers("compressed-tensors", zero_points=True, act_order="group"), None,
    ),
    "compressed-tensors, int8, per channel": (Integers("compressed-tensors-int", bits=8, group=-1), None),
}  # fmt: skip
"""How a model is stored, and ``--quantization``."""

OPERATOR = ("gptq", "compressed-tensors")
"""Kinds that vLLM's int4 operator for CPUs runs too, with leave to quantize activations to int8."""
OPERATOR_MEAN = 0.08
"""Mean difference of a logprob that the operator's users have seen on whole models, with activations in int8."""

Edit = Callable[[dict[str, Any]], Any]


def drop(name: str) -> Edit:
    return lambda tensors: tensors.pop(EXPERT + name)


def put(name: str, make: Callable[[Any], Any]) -> Edit:
    return lambda tensors: tensors.update({EXPERT + name: make(tensors[EXPERT + name])})


def drop_layer(tensors: dict[str, Any]) -> None:
    for name in [each for each in tensors if each.startswith(EXPERT.removesuffix("3."))]:
        del tensors[name]


def drop_expert(tensors: dict[str, Any]) -> None:
    for name in [each for each in tensors if each.startswith(EXPERT)]:
        del tensors[name]


ABSENT = (
    "config.json, model.layers.1.mlp.experts: the files hold no expert of 1 of 2 MoE layers, and those of "
    "model.layers.0.mlp.experts. Fetch the files that belong to this config"
)
LACKING = "config.json, model.layers.1.mlp.experts: the files hold 7 experts, and the config says 8: they lack expert 3"


class Fault(NamedTuple):
    """What is wrong with a checkpoint of one of `KINDS`.

    Attributes:
        kind: the checkpoint.
        edit: what happens to its file.
        config: what its ``quantization_config`` says instead.
        said: the error; "" where nothing can see it, and the numbers must be others.
        layer: the first layer with the fault.
    """

    kind: str
    edit: Edit = lambda tensors: None
    config: Mapping[str, Any] = {}
    said: str = ""
    layer: int = 1


REFUSED = {
    "no group index": Fault(
        "gptq, act order, zero points", drop("up_proj.g_idx"),
        said="w13_g_idx of the up projection of local expert 3 was never loaded. The checkpoint lacks it, or names it "
        "differently (1 such in w13_g_idx)",
    ),
    "no zero points": Fault(
        "awq", drop("down_proj.qzeros"),
        said="w2_qzeros of the down projection of local expert 3 was never loaded",
    ),
    "codes of another type": Fault(
        "compressed-tensors", put("gate_proj.weight_packed", lambda tensor: tensor.to(torch.int64)),
        said="the checkpoint stores it as int64, the packing compressed-tensors as int32",
    ),
    "transposed codes": Fault(
        "gptq", put("up_proj.qweight", lambda tensor: tensor.T.contiguous()),
        said="an expert's tensor has shape [64, 16], expected [16, 64]",
    ),
    "scales of another group": Fault(
        "compressed-tensors", put("up_proj.weight_scale", lambda tensor: tensor.repeat_interleave(2, 1)),
        said="an expert's tensor has shape [64, 4], expected [64, 2]",
    ),
    "no expert of a layer that the config names": Fault("gptq", drop_layer, said=ABSENT),
    "no expert of a layer that only files name": Fault("gptq v2, int8, per channel", drop_layer, said=ABSENT),
    "no expert of a layer in awq": Fault("awq", drop_layer, said=ABSENT),
    "an expert of a layer that the config names": Fault("gptq", drop_expert, said=LACKING),
    "an expert of a layer that only files name": Fault("gptq v2, int8, per channel", drop_expert, said=LACKING),
    "an expert of a layer in awq": Fault("awq", drop_expert, said=LACKING),
    "one expert is named": Fault(
        "gptq", config={"modules_in_block_to_quantize": nested_modules(1)},
        said="expert 1 differs from others: it is stored as not quantized, and expert 0 as int4 symmetric, groups of",
        layer=0,
    ),
}  # fmt: skip

WRONG = {
    "gate and up swapped": Fault("awq", checkpoints.swap_gate_and_up),
    "gate and up swapped in gptq": Fault("gptq", checkpoints.swap_gate_and_up),
    "zero points off by one": Fault("gptq as moe_wna16", config={"checkpoint_format": "gptq_v2"}),
    "features in another order": Fault(
        "gptq, act order, zero points",
        lambda tensors: [tensors[name].copy_(tensors[name].roll(1)) for name in tensors if name.endswith(".g_idx")],
    ),
}
FAULTS = REFUSED | WRONG


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    plain = checkpoints.write_checkpoint(folder / "plain", format="bf16", dtype="float32")
    made = {
        name: integer_checkpoints.write(plain, folder / f"kind{number}", how, number)
        for number, (name, (how, _)) in enumerate(KINDS.items())
    }
    for number, (name, fault) in enumerate(FAULTS.items()):
        target = folder / f"fault{number}"
        made[name] = checkpoints.rewrite_tensors(made[fault.kind], target, fault.edit)
        text = json.loads((target / "config.json").read_text())
        text["quantization_config"] |= fault.config
        (target / "config.json").write_text(json.dumps(text))
    return made


@pytest.fixture(scope="module")
def served(models: dict[str, Path], folder: Path) -> Results:
    """Every job of this file in one process: importing vLLM is most of the time."""
    jobs = {}
    for name, path in models.items():
        kind = name if name in KINDS else FAULTS[name].kind
        quantization = KINDS[kind][1]
        engine = {"engine": {"quantization": quantization}} if quantization else {}
        tokens = TOKENS if name in KINDS else 1
        jobs[name] = job(path, tokens=tokens, oracle={"backend": "emulation"}, **engine)
    if not operator_missing():
        oracle = {"backend": "cpu_int4", "allow_activation_quantization": True, "self_check": "strict"}
        for kind in OPERATOR:
            jobs[f"{kind} by the operator"] = {**jobs[kind], "dtype": "bfloat16", "oracle": oracle}
        swapped = {**jobs["gate and up swapped in gptq"], "dtype": "bfloat16", "oracle": oracle}
        jobs["gate and up swapped in gptq by the operator"] = swapped
    return vllm_runner.run("run_generate.py", jobs, folder)


def operator_missing() -> list[str]:
    """Why vLLM's int4 operator cannot run here; nothing where it can."""
    layer = problem(scheme=Scheme("wna16", 4, 32, "gptq"), hidden_size=HIDDEN, intermediate_size=HIDDEN)
    allowed = dataclasses.replace(layer, scheme=dataclasses.replace(layer.scheme, activations="int8"))
    return [str(each) for each in default_registry()["cpu_int4"].check(allowed, detect.detect()).reasons]


def expected(checkpoint: Path) -> reference.Continuation:
    return reference.greedy(
        reference.load_transformers(checkpoint.with_name(f"{checkpoint.name}-exact")), PROMPT, TOKENS
    )


@pytest.mark.parametrize("name", KINDS)
def test_tokens_and_logprobs_equal_transformers(served: Results, models: dict[str, Path], name: str) -> None:
    how = KINDS[name][0]
    assert_says(served[name], expected(models[name]), TOLERANCE)
    layers = served[name]["layers"]
    assert layers["served"] == LAYERS
    (group,) = layers["groups"]
    assert group["problem"]["has_bias"] is how.bias, "as the file has it, not as the model's config says"
    scheme = group["problem"]["scheme"]
    assert (scheme["bits"], scheme["group_size"], scheme["zero_points"]) == (how.bits, how.group, how.zero_points)


@pytest.mark.parametrize("fault", REFUSED)
def test_a_wrong_checkpoint_is_refused_with_what_differs(served: Results, fault: str) -> None:
    assert REFUSED[fault].said in served[fault]["error"]
    assert f"model.layers.{REFUSED[fault].layer}.mlp.experts" in served[fault]["error"]


@pytest.mark.parametrize("fault", WRONG)
def test_an_injected_fault_does_not_go_unnoticed(served: Results, models: dict[str, Path], fault: str) -> None:
    assert difference(served[fault], expected(models[WRONG[fault].kind])) > TOLERANCE


@pytest.mark.parametrize("kind", OPERATOR)
def test_vllms_int4_operator_serves_them_without_amx(served: Results, models: dict[str, Path], kind: str) -> None:
    if missing := operator_missing():
        pytest.skip(f"here it is refused: {missing}")
    result = served[f"{kind} by the operator"]
    assert mean_difference(result, expected(models[kind])) <= OPERATOR_MEAN
    (group,) = result["layers"]["groups"]
    assert group["decision"]["backend"] == "cpu_int4" and "int8 per token" in group["decision"]["numerics"]


def test_a_fault_shows_with_the_operator_too(served: Results, models: dict[str, Path]) -> None:
    if missing := operator_missing():
        pytest.skip(f"here it is refused: {missing}")
    result = served["gate and up swapped in gptq by the operator"]
    assert mean_difference(result, expected(models["gptq"])) > OPERATOR_MEAN


def mean_difference(result: dict[str, Any], continuation: reference.Continuation) -> float:
    """Mean difference of a logprob at the first position that is generated, over the whole vocabulary."""
    assert "error" not in result, result["error"]
    wanted = continuation.logprobs[len(PROMPT) - 1]
    mean = float(np.abs(np.array(result["logprobs"][0]) - wanted).mean())
    print(f"mean difference of a logprob {mean:.4f}, allowed {OPERATOR_MEAN}")
    return mean


# --- Reload ----------------------------------------------------------------------------------------------------------

RELOADED = {
    "gptq": Integers("gptq", zero_points=True, act_order="group"),
    "awq": Integers("awq", zero_points=True),
    "compressed-tensors": Integers("compressed-tensors", group=64),
}


@pytest.fixture(scope="module")
def reloaded(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What happens to a model of each kind: loaded, reloaded from another one, loaded past the reload, and back."""
    plain = [checkpoints.write_checkpoint(folder / f"seed{seed}", format="bf16", seed=seed) for seed in range(2)]
    jobs = []
    for kind, how in RELOADED.items():
        first, second = (
            str(integer_checkpoints.write(path, folder / f"reload-{kind}-{seed}", how, seed))
            for seed, path in enumerate(plain)
        )
        for start, steps in (
            (first, [["process"], ["reload", second], ["load", first], ["reload", first]]),
            (second, [["process"]]),
        ):
            jobs.append({"checkpoint": start, "backend": "emulation", "engine": {}, "steps": steps})
    results = vllm_runner.run("run_lifecycle.py", dict(enumerate(jobs)), folder)
    return {kind: [*results[2 * index], *results[2 * index + 1]] for index, kind in enumerate(RELOADED)}


@pytest.mark.parametrize("kind", RELOADED)
def test_a_reload_gives_what_a_fresh_load_gives_at_the_same_addresses(
    reloaded: dict[str, list[dict[str, Any]]], kind: str
) -> None:
    loaded, again, refused, back, fresh = reloaded[kind]
    for step in (loaded, again, back, fresh):
        assert "error" not in step, step["error"]
        assert step["states"] == ["converted"] * LAYERS
    assert again["digests"] == fresh["digests"] != loaded["digests"] == back["digests"]
    assert again["addresses"] == loaded["addresses"] == back["addresses"]
    # By this project, or by vLLM, which knows no parameter of that name.
    assert "LifecycleError" in refused["error"] or "has no parameter" in refused["error"]
