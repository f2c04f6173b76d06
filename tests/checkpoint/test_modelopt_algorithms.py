"""ModelOpt's words for algorithms: which of them vLLM takes, in the sources of its releases."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.lib import stock_code
from tests.lib.configs import MODELOPT, mixed, quantized
from tests.lib.releases import every_release
from vllm_moe_oracle.errors import CheckpointError, DeploymentError
from vllm_moe_oracle.quantization import modelopt


@every_release
def test_vllm_takes_the_algorithms_of_the_list(release: str) -> None:
    tree = stock_code.tree(release, "vllm/model_executor/layers/quantization/modelopt.py")
    values: dict[str, ast.expr] = {}
    for node in tree.body:
        for target in [*getattr(node, "targets", ()), *filter(None, [getattr(node, "target", None)])]:
            values[ast.unparse(target)] = node.value  # type: ignore[attr-defined]
    listed = ast.unparse(values["QUANT_ALGOS"])
    if "LINEAR_ALGOS" in values:
        assert isinstance(values["LINEAR_ALGOS"], ast.Dict)
        listed += ast.unparse(ast.List([key for key in values["LINEAR_ALGOS"].keys if key]))
    words = {node.value for node in ast.walk(ast.parse(listed)) if isinstance(node, ast.Constant)}
    assert words == {*modelopt.ALGORITHMS}


@pytest.mark.parametrize("algo", modelopt._REFUSED_ALGORITHMS)
def test_others_are_refused_with_those_that_it_takes(algo: str, explain: Any) -> None:
    taken = "Quantize to one that it takes: FP8, FP8_PER_CHANNEL_PER_TOKEN, .*, MIXED_PRECISION"
    with pytest.raises(DeploymentError, match=f"quant_algo is {algo}, which vLLM refuses.*{taken}"):
        explain(quantized(quantization_config=MODELOPT | {"quant_algo": algo.lower()}))


def test_a_word_of_nobody_is_wrong_input(explain: Any) -> None:
    with pytest.raises(CheckpointError, match="unknown quant_algo 'MXFP12': vLLM refuses it") as found:
        explain(quantized(quantization_config=MODELOPT | {"quant_algo": "MXFP12"}))
    assert not isinstance(found.value, DeploymentError)


def test_a_layer_of_mixed_precision_has_one_word_more(explain: Any) -> None:
    read = explain(quantized(quantization_config=mixed(**{"*experts*": "fp8_block_scales"})))
    assert {*read.unsupported_formats.values()} == {"FP8_BLOCK_SCALES"}
