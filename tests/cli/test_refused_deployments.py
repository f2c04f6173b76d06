"""Exit statuses of refusals: 3 where vLLM refuses the deployment of a right checkpoint, 2 where the input is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.cli import Run, Write
from tests.lib.configs import mixed
from vllm_moe_oracle import cli
from vllm_moe_oracle.releases.vllm_names import REMOVED_MODELS

H200 = ("--device", "nvidia-h200")
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
PLAIN: dict[str, Any] = {"quantization_config": None}
GPT_OSS: dict[str, Any] = {"name": "gpt-oss-20b", **PLAIN}
REMOVED: dict[str, Any] = {"architectures": [next(iter(REMOVED_MODELS))]}

REFUSED: list[tuple[dict[str, Any], tuple[Any, ...], str]] = [
    ({}, ("--tp", 5), "do not divide the 32 attention heads (32 mod 5 = 2). Use TP 4"),
    ({}, ("--tp", 1000000000), "vLLM refuses 1000000000 ranks, which do not divide the 32 attention heads"),
    ({}, ("--tp", 24), "do not divide the 32 attention heads (32 mod 24 = 8). Use TP 16"),
    ({"num_attention_heads": 64}, ("--tp", 3), "do not divide the 64 attention heads (64 mod 3 = 1). Use TP 2"),
    (PLAIN, ("--tp", 3), "which do not divide the 32 attention heads (32 mod 3 = 2)"),
    (FP8, ("--tp", 3), "which do not divide the 32 attention heads (32 mod 3 = 2)"),
    ({}, ("--tp", 3, "--ep"), "which do not divide the 32 attention heads (32 mod 3 = 2)"),
    ({}, ("--dp", 5), "over 5 ranks (TP 1 x DP 5) does not divide the experts' intermediate size 768 (768 mod 5 = 3)"),
    ({}, ("--dp", 129, "--ep"), "over 129 ranks leaves ranks without one of the 128 experts"),
    ({}, ("--quantization", "awq"), "it is quantized already, as modelopt_mxfp8, and --quantization is 'awq'"),
    (GPT_OSS, ("--quantization", "mxfp8"), "vLLM's loader of gpt-oss copies experts in 16 bits past the loader"),
    *(
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": each}},
            (),
            f"quant_algo is {each}, which vLLM",
        )
        for each in ("MXFP4", "W4A16_AWQ", "W4A8_MXFP4_FP8")
    ),
    (
        {"quantization_config": mixed(**{"*experts*": "W4A16_AWQ"})},
        (),
        "quant_algo of experts is W4A16_AWQ, which vLLM takes for unquantized",
    ),
    (REMOVED, (), f"vLLM has {REMOVED['architectures'][0]} until "),
]
WRONG: list[tuple[dict[str, Any], tuple[Any, ...], str]] = [
    ({}, ("--tp", 0), "--tp: 0 ranks are not possible"),
    ({}, ("--dp", -1), "--dp: -1 ranks are not possible"),
    (PLAIN, ("--quantization", "mxpf8"), "--quantization 'mxpf8' is not supported. Did you mean mxfp8?"),
    ({"num_experts": "many"}, (), "num_experts is 'many', not an integer"),
    ({"num_experts_per_tok": 129}, (), "129 experts for each token, of 128 in all"),
    ({"n_group": 4, "topk_group": 5}, (), "topk_group 5 is more than the 4 groups of n_group"),
    ({"quantization_config": {"quant_method": "gptq", "bits": "four"}}, ("--tp", 3), "bits is 'four'"),
    ({"torch_dtype": "int3"}, ("--tp", 3), "unknown dtype 'int3'"),
]


@pytest.mark.parametrize("command", ["explain", "tune", "bench"])
@pytest.mark.parametrize(
    ("changes", "options", "said", "status"),
    [(*case, cli.EXIT_NO_BACKEND) for case in REFUSED] + [(*case, cli.EXIT_INVALID_INPUT) for case in WRONG],
)
def test_the_status_says_whether_the_input_is_wrong(
    command: str, changes: dict[str, Any], options: tuple[Any, ...], said: str, status: int, run: Run, write: Write
) -> None:
    result = run(command, write(**changes), *options, *(H200 if command == "explain" else ()))
    assert (result.status, result.out) == (status, "") and said in result.err and result.err.count("\n") == 1


@pytest.mark.parametrize("command", ["explain", "tune", "bench", "verify"])
def test_helps_promise_both_statuses(command: str, run: Run) -> None:
    shown = run(command, "--help").text.partition("Exit status:")[2]
    wrong, refused = shown.partition(" 2 the input")[2].split(" 3 ", 1)
    assert "one line on standard error says what" in wrong and "vLLM" not in wrong
    assert "vLLM" in refused.partition(" 4 ")[0].partition(" 130 ")[0]
