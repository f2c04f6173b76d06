"""The other ways to MXFP8 experts: quantized while a 16-bit checkpoint loads, llm-compressor's files, mixed precision.

Online quantization is compared to the bit with checkpoints that hold the same weights, quantized by code that is not
ours: the exact quantizer of `reference`, which follows vLLM's rule, and the compressed-tensors package's own
compressor. What is served is compared with float32 transformers as in `test_served_model`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib import checkpoints, reference, vllm_runner
from tests.lib.served import PROMPT, Results, assert_says, job, tolerance

TOKENS = 6

IGNORED = ["lm_head", "re:.*\\.mlp\\.gate$"]
"""vLLM's online frontend quantizes the router too, which no checkpoint of these tests does."""


def quantize_offline(source: Path, target: Path, name: str) -> Path:
    """The 16-bit checkpoint as an MXFP8 one, made by the compressor of that name."""
    tag: Any = "compressed-tensors" if name == "compressed-tensors" else "modelopt"
    written = checkpoints.write_checkpoint(target.with_name(f"{target.name}-first"), tag=tag)
    from safetensors.torch import load_file

    weights = load_file(source / "model.safetensors")
    compress = {"exact": by_definition, "compressed-tensors": by_compressed_tensors}[name]

    def edit(tensors: dict[str, Any]) -> None:
        for scales in [each for each in tensors if each.endswith(".weight_scale")]:
            weight = scales.removesuffix("_scale")
            tensors[weight], tensors[scales] = compress(weights[weight])

    return checkpoints.rewrite_tensors(written, target, edit)


def by_definition(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = reference.quantize_mxfp8(weight.float().numpy())
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)


def by_compressed_tensors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from compressed_tensors.compressors import MXFP8QuantizationCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP8", ["Linear"])
    assert scheme.weights is not None
    blocks = weight.unflatten(-1, (-1, 32))
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    made = MXFP8QuantizationCompressor.compress(state, scheme)
    return made["weight"], made["weight_scale"]


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    plain = checkpoints.write_checkpoint(folder / "plain", format="bf16")
    return {
        "plain": plain,
        "exact": quantize_offline(plain, folder / "exact", "exact"),
        "compressed": quantize_offline(plain, folder / "compressed", "compressed-tensors"),
        "weight only": checkpoints.write_checkpoint(folder / "weight-only", tag="compressed-tensors-a16"),
        "mixed": checkpoints.write_checkpoint(folder / "mixed", tag="mixed"),
    }


def online_job(checkpoint: Path, engine: dict[str, Any] | None = None, **oracle: Any) -> dict[str, Any]:
    return job(checkpoint, "bfloat16", TOKENS, engine=engine or {}, oracle=oracle)


@pytest.fixture(scope="module")
def served(models: dict[str, Path], folder: Path) -> Results:
    """Every job of this file in one process: importing vLLM is most of the time."""
    online = {"quantization": "mxfp8", "quantization_config": {"ignore": IGNORED}}

    def narrow(**sizes: int) -> dict[str, Any]:
        return {**online, "hf_overrides": sizes, "load_format": "dummy"}

    jobs = {
        "online": online_job(models["plain"], online, backend="emulation"),
        "offline": online_job(models["exact"], backend="emulation"),
        "online llm-compressor": online_job(
            models["plain"], online, mxfp8_scale_rule="llm-compressor", backend="emulation"
        ),
        "compressed": online_job(models["compressed"], backend="emulation"),
        "weight only": online_job(models["weight only"]),
        "mixed": online_job(models["mixed"], activations="16bit"),
        "narrow experts": online_job(models["plain"], narrow(moe_intermediate_size=80)),
        "narrow heads": online_job(models["plain"], narrow(head_dim=20)),
    }
    return vllm_runner.run("run_generate.py", jobs, folder)


# --- Online -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("online", "offline"), [("online", "offline"), ("online llm-compressor", "compressed")], ids=["ceil", "llm"]
)
def test_online_weights_equal_the_checkpoints_bit_for_bit(served: Results, online: str, offline: str) -> None:
    assert "error" not in served[online] and "error" not in served[offline]
    assert len(served[online]["digests"]) == 8
    assert served[online]["digests"] == served[offline]["digests"]


def test_the_two_rules_make_different_weights(served: Results) -> None:
    assert served["online"]["digests"] != served["online llm-compressor"]["digests"]


@pytest.mark.parametrize(
    ("online", "offline"), [("online", "offline"), ("online llm-compressor", "compressed")], ids=["ceil", "llm"]
)
def test_a_model_quantized_while_loading_says_what_its_checkpoint_would(
    served: Results, online: str, offline: str
) -> None:
    assert served[online]["tokens"] == served[offline]["tokens"]
    np.testing.assert_array_equal(served[online]["logprobs"], served[offline]["logprobs"])


def test_online_experts_are_w8a8_as_vllm_has_them(served: Results) -> None:
    record = served["online"]["layers"]
    assert record["served"] == 2
    assert [group["problem"]["scheme"]["activations"] for group in record["groups"]] == ["mxfp8"]
    assert [group["problem"]["scheme"]["packing"] for group in record["groups"]] == ["online"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("narrow experts", ("model.layers.0.mlp.experts", "intermediate size 80 (remainder 16)")),
        ("narrow heads", ("model.layers.0.self_attn.o_proj", "input size 80 (remainder 16)")),
    ],
    ids=["experts", "linear"],
)
def test_sizes_that_blocks_do_not_divide_are_refused_before_loading(
    served: Results, name: str, words: tuple[str, ...]
) -> None:
    for word in (*words, "multiples of 32"):
        assert word in served[name]["error"]


# --- llm-compressor's files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule"), [("compressed", "ceil"), ("weight only", None), ("online", "ceil")], ids=["w8a8", "a16", "online"]
)
def test_tokens_and_logprobs_equal_transformers(served: Results, models: dict[str, Path], name: str, rule: Any) -> None:
    checkpoint = models["exact" if name == "online" else name]
    model = reference.load_transformers(checkpoint, quantize_activations=rule)
    expected = reference.greedy(model, PROMPT, TOKENS)
    assert_says(served[name], expected, tolerance("bfloat16", rule is not None))


@pytest.mark.parametrize(("name", "activations"), [("compressed", "mxfp8"), ("weight only", "16bit")])
def test_activations_are_what_the_checkpoint_declares(served: Results, name: str, activations: str) -> None:
    record = served[name]["layers"]
    assert record["served"] == 2
    assert [group["problem"]["scheme"] for group in record["groups"]] == [
        {
            "name": "mxfp8", "bits": 8, "group_size": 32, "packing": "compressed-tensors", "zero_points": False,
            "act_order": "none", "activations": activations,
        }
    ]  # fmt: skip


# --- Mixed precision --------------------------------------------------------------------------------------------------


def test_each_layer_of_a_mixed_checkpoint_decides_for_itself(served: Results) -> None:
    record = served["mixed"]["layers"]
    assert [group["layers"] for group in record["groups"]] == [["model.layers.0.mlp.experts"]]
    names = {name.rpartition(".")[2] for name in served["mixed"]["digests"] if ".layers.1." in name}
    assert names == {"w13_weight", "w2_weight"}


def test_a_mixed_checkpoint_says_what_transformers_say(served: Results, models: dict[str, Path]) -> None:
    expected = reference.greedy(reference.load_transformers(models["mixed"]), PROMPT, TOKENS)
    assert_says(served["mixed"], expected, tolerance("bfloat16"))
