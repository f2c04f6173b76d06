"""The ways to MXFP4 experts beside gpt-oss's: made while a 16-bit checkpoint loads, llm-compressor's files, Quark's.

All hold the same weights as one checkpoint that is tagged ``mxfp4``, which this file quantizes by the exact quantizer
of `reference`: what a layer holds must be the same to the bit, and what is served too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import PROMPT, Results, assert_says, job, tolerance

TOKENS = 4
EXACT = {"activations": "16bit", "backend": "emulation"}
GROUP = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
OTHERS = ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.gate$"]
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**GROUP, "dynamic": False},
            "input_activations": None,
            "format": "mxfp4-pack-quantized",
        }
    },
    "ignore": OTHERS,
}
TAGGED = {"quant_method": "mxfp4", "modules_to_not_convert": OTHERS}
SECOND = "model.layers.1.mlp.experts"
QUARK = {
    "quant_method": "quark", "quant_mode": "eager_mode", "exclude": OTHERS, "layer_quant_config": {},
    "layer_type_quant_config": {}, "algo_config": None, "kv_cache_quant_config": {}, "kv_cache_post_rope": False,
    "softmax_quant_spec": None,
    "export": {"kv_cache_group": [], "pack_method": "order", "weight_format": "real_quantized"},
    "global_quant_config": {
        "input_tensors": None, "output_tensors": None, "bias": None, "target_device": None,
        "weight": {
            "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": False, "ch_axis": -1,
            "scale_format": "e8m0", "scale_type": "float", "symmetric": None, "observer_cls": "PerBlockMXObserver",
            "round_method": "half_even",
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    plain = checkpoints.write_checkpoint(folder / "plain", format="bf16")

    def quantized(tensors: dict[str, Any], names: Callable[[str], tuple[str, str]], without: str) -> None:
        for name in [each for each in tensors if ".mlp.experts." in each and not (without and without in each)]:
            codes, scales = reference.quantize_mxfp4(tensors.pop(name).float().numpy(), "floor")
            for key, array in zip(names(name), (codes, scales), strict=True):
                tensors[key] = torch.from_numpy(array)

    def written(target: str, config: dict[str, Any], weight: str, without: str = "") -> Path:
        def names(name: str) -> tuple[str, str]:
            stem = name.removesuffix("weight")
            return f"{stem}{weight}", f"{stem}weight_scale"

        made = checkpoints.rewrite_tensors(plain, folder / target, lambda tensors: quantized(tensors, names, without))
        described = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**described, "quantization_config": config}))
        return made

    return {
        "plain": plain,
        "tagged": written("tagged", TAGGED, "weight"),
        "tagged but for a layer": written(
            "but", {**TAGGED, "modules_to_not_convert": [*OTHERS, SECOND]}, "weight", SECOND
        ),
        "compressed": written("compressed", COMPRESSED, "weight_packed"),
        "quark": written("quark", QUARK, "weight"),
    }


@pytest.fixture(scope="module")
def served(models: dict[str, Path], folder: Path) -> Results:
    """Every job of this file in one process: importing vLLM is most of the time."""
    online: dict[str, Any] = {"online_experts": "kMxfp4Static", "dtype": "bfloat16"}
    jobs = {
        **{name: job(models[name], oracle=EXACT) for name in ("tagged", "tagged but for a layer", "compressed")},
        "quark": job(models["quark"], "bfloat16", oracle=EXACT),
        "tagged in bfloat16": job(models["tagged"], "bfloat16", oracle=EXACT),
        "online": job(models["plain"], oracle={**EXACT, "mxfp4_scale_rule": "floor"}, **online),
        "online as vLLM": job(models["plain"], oracle=EXACT, **online),
        "online W4A4": job(models["plain"], oracle={"backend": "emulation"}, **online),
    }
    return vllm_runner.run("run_generate.py", jobs, folder)


@pytest.mark.parametrize(
    ("name", "other"), [("compressed", "tagged"), ("quark", "tagged in bfloat16"), ("online", "tagged in bfloat16")]
)
def test_layers_hold_and_say_what_the_tagged_checkpoint_s_do(served: Results, name: str, other: str) -> None:
    for each in (name, other):
        assert "error" not in served[each], served[each]["error"]
        assert served[each]["layers"]["served"] == 2
    digests = [
        {key: value for key, value in served[each]["digests"].items() if "weight" in key} for each in (name, other)
    ]
    assert len(digests[0]) == 8 and digests[0] == digests[1]
    assert served[name]["tokens"] == served[other]["tokens"]
    np.testing.assert_array_equal(served[name]["logprobs"], served[other]["logprobs"])


@pytest.mark.parametrize("name", ["tagged", "tagged but for a layer"])
def test_the_tagged_checkpoint_says_what_transformers_says(models: dict[str, Path], served: Results, name: str) -> None:
    assert served[name]["layers"]["served"] == (1 if "but" in name else 2)
    model = reference.load_transformers(models[name])
    assert_says(served[name], reference.greedy(model, PROMPT, TOKENS), tolerance("float32"))


def test_vllm_s_scale_rule_and_quantized_activations_give_something_else(served: Results) -> None:
    assert served["online as vLLM"]["digests"] != served["online"]["digests"]
    assert served["online W4A4"]["digests"] == served["online as vLLM"]["digests"]
    assert served["online W4A4"]["logprobs"] != served["online as vLLM"]["logprobs"]
    (group,) = served["online W4A4"]["layers"]["groups"]
    assert group["problem"]["scheme"]["activations"] == "mxfp4"
