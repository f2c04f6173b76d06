"""The tiny checkpoints: vLLM's format, and tokens that faults move and rounding does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.lib import checkpoints, reference
from tests.lib.checkpoints import Size, encode, recite, rewrite_tensors, write_checkpoint

PROMPTS = ["hello", "a", "the quick brown fox jumps over the lazy dog", "42 + 1 = ", "?!", "zzzzzzzz"]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def runs(checkpoint: Path) -> list[reference.Continuation]:
    return reference.transformers_logits(checkpoint, [encode(p) for p in PROMPTS], max_new_tokens=NEW_TOKENS)


# --- The files -------------------------------------------------------------------------------------------------------


def test_tensors_have_the_formats_dtypes_and_shapes(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    size = Size()
    layer = "model.layers.1"
    expected = {
        f"{layer}.mlp.experts.7.gate_proj": (size.intermediate, size.hidden),
        f"{layer}.mlp.experts.7.up_proj": (size.intermediate, size.hidden),
        f"{layer}.mlp.experts.7.down_proj": (size.hidden, size.intermediate),
        f"{layer}.self_attn.k_proj": (size.kv_heads * size.head_dim, size.hidden),
    }
    for module, (n, k) in expected.items():
        weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
        assert (weight.dtype, tuple(weight.shape)) == (torch.float8_e4m3fn, (n, k))
        assert (scale.dtype, tuple(scale.shape)) == (torch.uint8, (n, k // 32))
        assert len(scale.unique()) > 2, "scales that are all alike would hide a wrong order"
    for name in (f"{layer}.mlp.gate.weight", "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert tensors[name].dtype == torch.bfloat16
        assert f"{name}_scale" not in tensors


def test_config_is_transformers_own(checkpoint: Path) -> None:
    from transformers import AutoConfig, Qwen3MoeConfig

    config = AutoConfig.from_pretrained(checkpoint)
    assert isinstance(config, Qwen3MoeConfig)
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 64)
    assert config.norm_topk_prob


@pytest.mark.parametrize(
    ("tag", "method", "ignored_key"),
    [
        ("modelopt", "modelopt", "ignore"),
        ("modelopt_mxfp8", "modelopt_mxfp8", "ignore"),
        ("mxfp8",) * 2 + ("ignored_layers",),
    ],
)
def test_tags_in_config(tag: Any, method: str, ignored_key: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tag=tag)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == method
    assert config[ignored_key] == ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert ("quant_algo" in config) == (tag != "mxfp8")
    assert not (tmp_path / "hf_quant_config.json").exists()


@pytest.mark.parametrize("tag", ["legacy", "legacy_producer"])
def test_legacy_tags(tag: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tag=tag)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    legacy = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert legacy["quantization"]["quant_algo"] == "MXFP8"
    assert {"kv_cache_quant_algo", "exclude_modules"} <= legacy["quantization"].keys()
    assert ("quant_method" in legacy, "producer" in legacy) == (tag == "legacy", tag == "legacy_producer")
    write_checkpoint(tmp_path, tag="modelopt")
    assert not (tmp_path / "hf_quant_config.json").exists(), "a second write must not leave the first one's tag"


def test_experts_only_and_other_dtypes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, quantize_linears=False, dtype="float16")
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float16
    assert tensors["model.layers.0.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignored


def test_bf16_checkpoint_is_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, format="bf16")
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    plain, quantized = reference.read_weights(tmp_path), reference.read_weights(checkpoint)
    assert plain.keys() == quantized.keys()
    for name, array in plain.items():
        scale = np.abs(array).max()
        assert np.abs(array - quantized[name]).max() <= scale * 2**-4, name


def test_same_seed_same_bytes_and_another_seed_another_model(checkpoint: Path, tmp_path: Path) -> None:
    same = load_file(write_checkpoint(tmp_path / "same") / "model.safetensors")
    other = load_file(write_checkpoint(tmp_path / "other", seed=1) / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    first = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(tensor.view(torch.uint8), first[n].view(torch.uint8)) for n, tensor in same.items())
    assert not torch.equal(first[name].view(torch.uint8), other[name].view(torch.uint8))


def test_tokenizer(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = "Hello, world! (1+1)\nok"
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(encode(text)) == text.lower()
    assert tokenizer("é")["input_ids"] == [tokenizer.unk_token_id] == [0]
    assert tokenizer.eos_token_id == 1 and len(tokenizer) == 64


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layers", "1", "--experts", "4", "--intermediate", "96", "--tag", "mxfp8", "--experts-only"]
    assert checkpoints.main([str(tmp_path), *arguments]) == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_experts"], config["moe_intermediate_size"]) == (1, 4, 96)
    assert checkpoints.main([str(tmp_path), "--intermediate", "40"]) == 2
    assert "intermediate is 40" in capsys.readouterr().err


# --- The model -------------------------------------------------------------------------------------------------------


def test_model_recites_its_alphabet_by_a_wide_margin(runs: list[reference.Continuation]) -> None:
    for prompt, run in zip(PROMPTS, runs, strict=True):
        assert "".join(checkpoints.VOCABULARY[t] for t in run.tokens) == recite(prompt, NEW_TOKENS)
        assert run.margins.min() > 2.0
        # Neither certain (a logprob that nothing moves) nor unlikely.
        assert (run.token_logprobs > -1.5).all() and (run.token_logprobs < -0.05).all()


def test_bf16_arithmetic_moves_logits_little(checkpoint: Path, runs: list[reference.Continuation]) -> None:
    model = reference.load_transformers(checkpoint).bfloat16()
    for exact in runs:
        rounded = reference.greedy(model, exact.prompt, NEW_TOKENS)
        assert rounded.tokens == exact.tokens
        assert np.abs(rounded.logits - exact.logits).max() < 0.1


Edit = Callable[[dict[str, torch.Tensor]], None]


def raise_one_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.5.down_proj.weight_scale"] += 1


def roll_scales(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("down_proj.weight_scale")]:
        tensors[name] = tensors[name].roll(1, -1)


@pytest.mark.parametrize(
    ("edit", "least"), [(checkpoints.swap_gate_and_up, 3.0), (raise_one_expert, 0.3), (roll_scales, 1.0)]
)
def test_faults_move_logits_far(
    edit: Edit, least: float, checkpoint: Path, runs: list[reference.Continuation], tmp_path: Path
) -> None:
    broken = rewrite_tensors(checkpoint, tmp_path / "broken", edit)
    faulty = reference.transformers_logits(broken, [run.prompt for run in runs], max_new_tokens=NEW_TOKENS)
    pairs = list(zip(faulty, runs, strict=True))
    # Over the prompts alone, which both runs share.
    moved = [np.abs(f.logits - r.logits)[: len(r.prompt)].max() for f, r in pairs]
    assert max(moved) > least
    if edit is checkpoints.swap_gate_and_up:
        assert sum(f.tokens != r.tokens for f, r in pairs) > len(pairs) / 2, "swapped halves should change tokens too"
