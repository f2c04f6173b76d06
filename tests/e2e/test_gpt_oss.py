"""A tiny gpt-oss in MXFP4, as OpenAI publishes it, served through vLLM and the plugin equals float32 transformers.

Real config class, biases, sinks, sliding window, yarn; and a model whose rows of gate and up stand apart (the method
``mxfp4``). `tests.lib.served` derives the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import PROMPT, Expected, Results, assert_says, difference, job, tolerance
from vllm_moe_oracle.devices.detect import detect

SIZE = replace(checkpoints.Size(), top_k=4)
TOKENS = 4


Edit = Callable[[str, Any], Any]


def only(suffixes: tuple[str, ...], change: Callable[[Any], Any]) -> Edit:
    """Changes the experts' tensors whose name has one of the endings."""
    return lambda name, tensor: change(tensor) if name.endswith(suffixes) else tensor


def swap_neighbors(rows: Any) -> Any:
    """Gate for up and up for gate."""
    return rows.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)


def shift_one_expert(scales: Any) -> Any:
    scales[3] += 1
    return scales


FAULTS: dict[str, Edit] = {
    "gate and up swapped": only(("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"), swap_neighbors),
    "a scale off by one exponent": only(("down_proj_scales",), shift_one_expert),
}
"""More of them, on one layer, in tests/verification/test_self_check.py."""


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    right = checkpoints.write_checkpoint(folder / "right", arch="gpt_oss", format="mxfp4", size=SIZE)
    halves = checkpoints.write_checkpoint(folder / "halves", format="mxfp4", size=SIZE)
    made = {"right": right, "halves": halves}
    for fault, edit in FAULTS.items():

        def change(tensors: dict[str, Any], edit: Edit = edit) -> None:
            for name in tensors:
                tensors[name] = edit(name, tensors[name])

        made[fault] = checkpoints.rewrite_tensors(right, folder / fault.replace(" ", "_"), change)
    return made


@pytest.fixture(scope="module")
def served(models: dict[str, Path], folder: Path) -> Results:
    """Every job of this file in one process: importing vLLM is most of the time."""
    jobs = {
        "float32": job(models["right"]),
        "bfloat16": job(models["right"], "bfloat16"),
        "halves": job(models["halves"]),
        **{fault: job(models[fault], tokens=1) for fault in FAULTS},
    }
    return vllm_runner.run("run_generate.py", jobs, folder)


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Expected:
    return {
        name: reference.greedy(reference.load_transformers(models[name]), PROMPT, TOKENS)
        for name in ("right", "halves")
    }


@pytest.mark.parametrize(
    ("name", "model", "dtype"),
    [("float32", "right", "float32"), ("bfloat16", "right", "bfloat16"), ("halves", "halves", "float32")],
)
def test_tokens_and_logprobs_equal_transformers(
    served: Results, expected: Expected, name: str, model: str, dtype: str
) -> None:
    assert_says(served[name], expected[model], tolerance(dtype))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_does_not_go_unnoticed(served: Results, expected: Expected, fault: str) -> None:
    assert difference(served[fault], expected["right"]) > tolerance("float32")


@pytest.mark.parametrize("name", ["float32", "halves"])
def test_every_moe_layer_runs_through_the_oracle(served: Results, name: str) -> None:
    record = served[name]["layers"]
    assert record["served"] == SIZE.layers
    (group,) = record["groups"]
    assert group["decision"]["backend"] == "cpu_dequantized"
    problem = group["problem"]
    assert problem["scheme"]["name"] == "mxfp4" and problem["scheme"]["activations"] == "16bit"
    assert problem["has_bias"] == (name == "float32")
    assert problem["activation"]["interleaved"] == (name == "float32")
    assert (problem["hidden_size"], problem["intermediate_size"]) == (SIZE.hidden, SIZE.intermediate)


def test_bfloat16_runs_vllms_cpu_kernel_where_the_cpu_can(served: Results) -> None:
    """Its class in stock vLLM asks for AMX, the operator does not."""
    (group,) = served["bfloat16"]["layers"]["groups"]
    able = {"avx512f", "avx512_bf16"} <= set(detect().features)
    assert group["decision"]["backend"] == ("cpu_mxfp4" if able else "cpu_dequantized")


@pytest.fixture(scope="module")
def stock(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The same checkpoint in vLLM without plugins."""
    jobs = {dtype: job(models["right"], dtype, tokens=1) for dtype in ("float32", "bfloat16")}
    return vllm_runner.run("run_generate.py", jobs, tmp_path_factory.mktemp("stock"), VLLM_PLUGINS="")


@pytest.mark.parametrize(
    ("dtype", "said"),
    [("float32", "not supported for quantization method gpt_oss_mxfp4"), ("bfloat16", "No MXFP4 MoE backend supports")],
)
def test_stock_vllm_refuses_it_on_this_machine(stock: dict[str, dict[str, Any]], dtype: str, said: str) -> None:
    """Where the CPU has AMX, stock has experts for it in bfloat16."""
    if dtype == "bfloat16" and "amx_tile" in detect().features:
        pytest.skip("stock vLLM serves it on CPUs with AMX")
    assert said in stock[dtype].get("error", ""), stock[dtype]


def test_the_limit_of_the_activation_is_reached(models: dict[str, Path]) -> None:
    """Otherwise a kernel that ignores it would pass."""
    model = reference.load_transformers(models["right"])
    seen: list[float] = []

    def watch(module: Any, inputs: Any) -> None:
        first = inputs[0] @ module.gate_up_proj[0] + module.gate_up_proj_bias[0]
        seen.append(float(first.abs().max()))

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(watch)
    reference.greedy(model, PROMPT)
    assert len(seen) == SIZE.layers and min(seen) > 7.0
