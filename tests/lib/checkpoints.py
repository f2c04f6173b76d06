"""Writes tiny random checkpoints of mixture-of-experts models, with a tokenizer, from nothing but a seed.

    python -m tests.lib.checkpoints OUT_DIR [--arch qwen3_moe] [--format mxfp8] [--tag modelopt] [--seed 0] ...

The folder can be served by vLLM and read by transformers. Nothing is downloaded.

The model recites its alphabet: after `c` comes `d`. Tests compare greedy tokens, so rounding must not change tokens and
a wrong expert must. A plain random model has neither property: the margin between its two best logits is often below
the error of bfloat16 arithmetic, and sometimes so is the margin between the last expert that the router selects and the
next. Therefore:

* The hidden space is split into two orthogonal halves (of a random rotation, so that no weight is zero). Embeddings are
  orthogonal vectors of the first half; attention and experts write into the second. The router reads the first half
  only, which no layer changes, so each token's experts are selected by a wide margin, in every layer and context.
* The experts' output is longer than the embedding, and the row of `lm_head` for a token is the final state of its
  predecessor, measured in a float32 run. The correct next token then leads the others by 2.5 or more, while bfloat16
  arithmetic changes a logit by less than 0.06. Faults in experts move logits by 0.3 (one scale of one expert, off by
  one exponent) to 6 (gate and up swapped: the text differs within a dozen tokens). Measured with seeds 0 to 6.
* Logits are scaled so that the best token has a probability well below 1: logprobs stay sensitive to small errors.

Weights are quantized by `reference`, which shares no code with the package under test.
"""

from __future__ import annotations

import argparse
import json
import math
import string
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tests.lib import configs, reference
from tests.lib.reference import BLOCK

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

Format = Literal["mxfp8", "bf16", "mxfp4"]
Tag = Literal[
    "modelopt", "modelopt_mxfp8", "mxfp8", "mixed", "compressed-tensors", "compressed-tensors-a16", "legacy",
    "legacy_producer",
]  # fmt: skip
Dtype = Literal["bfloat16", "float16", "float32"]


SPECIAL_TOKENS = ("<unk>", "</s>", "<pad>")
ALPHABET = string.ascii_lowercase + string.digits + " .,!?'\"-:;()/+*=%&@#$_<>\n"
VOCABULARY = (*SPECIAL_TOKENS, *ALPHABET)
"""64 tokens: three special ones, then single characters. The model's next token is the next one of ALPHABET, cyclic."""


@dataclass(frozen=True)
class Size:
    """Dimensions of a tiny model; ValueError if they do not fit blocks of 32, heads or experts."""

    layers: int = 2
    hidden: int = 128
    intermediate: int = 64
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32

    def __post_init__(self) -> None:
        attention = self.heads * self.head_dim
        for name, value in (
            ("hidden", self.hidden),
            ("intermediate", self.intermediate),
            ("heads * head_dim", attention),
        ):
            if value <= 0 or value % BLOCK:
                raise ValueError(f"{name} is {value}: not a multiple of {BLOCK}, the size of a block")
        if self.hidden < 2 * len(VOCABULARY):
            raise ValueError(f"hidden is {self.hidden}: at least {2 * len(VOCABULARY)} needed, twice the vocabulary")
        if not 0 < self.top_k <= self.experts:
            raise ValueError(f"top_k is {self.top_k}: must be from 1 to {self.experts}, the number of experts")
        if self.kv_heads <= 0 or self.heads % self.kv_heads:
            raise ValueError(f"heads is {self.heads}: not a multiple of {self.kv_heads}, the number of kv_heads")


@dataclass
class Model:
    """A model before quantization.

    config: contents of config.json, without dtype and quantization.
    tensors: checkpoint name -> float32 array; weights are [N, K]. `lm_head.weight` is filled in by `write_checkpoint`.
    experts, linears: modules (names without `.weight`) that a quantized checkpoint stores in blocks.
    fused: tensors [E, K, N] of all experts at once (gpt-oss), for the same.
    """

    config: dict[str, Any]
    tensors: dict[str, Array]
    experts: set[str] = field(default_factory=set)
    linears: set[str] = field(default_factory=set)
    fused: set[str] = field(default_factory=set)


class Maker:
    """Random tensors with the properties that this module's docstring promises; the parts of any architecture."""

    def __init__(self, size: Size, rng: np.random.Generator) -> None:
        self.size = size
        self.rng = rng
        half = size.hidden // 2
        rotation, _ = np.linalg.qr(rng.standard_normal((size.hidden, size.hidden)))
        self._tokens = rotation[:, : len(VOCABULARY)]  # [hidden, V], orthonormal
        self._written = rotation[:, half:]  # [hidden, hidden - half], orthonormal: where layers write

    def model(self, architecture: str, model_type: str, **config: Any) -> Model:
        """A model without layers: what all architectures' configs have and `config`, the embedding, the last norm."""
        size = self.size
        common = {
            "architectures": [architecture],
            "model_type": model_type,
            "attention_dropout": 0.0,
            "head_dim": size.head_dim,
            "hidden_act": "silu",
            "hidden_size": size.hidden,
            "initializer_range": 0.02,
            "max_position_embeddings": 512,
            "num_attention_heads": size.heads,
            "num_experts_per_tok": size.top_k,
            "num_hidden_layers": size.layers,
            "num_key_value_heads": size.kv_heads,
            "tie_word_embeddings": False,
        }
        tensors = {"model.embed_tokens.weight": self.embedding(), "model.norm.weight": self.norm(size.hidden)}
        return Model(common | config, tensors)

    def add_norms(self, model: Model, layer: str) -> Array:
        """Adds the layer's norms in front of attention and experts to `model`, and returns the second."""
        router_norm = self.norm(self.size.hidden)
        model.tensors |= {
            f"{layer}.input_layernorm.weight": self.norm(self.size.hidden),
            f"{layer}.post_attention_layernorm.weight": router_norm,
        }
        return router_norm

    def embedding(self) -> Array:
        """[V, hidden]; elements have a root mean square of 1, so that rounding is far from subnormals."""
        return _f32(self._tokens.T * math.sqrt(self.size.hidden))

    def norm(self, width: int) -> Array:
        """[width] weights of an RMS norm, all different."""
        return _f32(self.rng.uniform(0.75, 1.25, width))

    def linear(self, n: int, k: int, gain: float = 1.0) -> Array:
        """[n, k]; inputs of unit root mean square give outputs of `gain`."""
        # Columns of different magnitude give neighboring blocks different scales: misordered scales are noticed.
        spread = np.exp2(self.rng.uniform(-1.5, 1.5, (1, k // BLOCK))).repeat(BLOCK, axis=1)
        weights = self.rng.standard_normal((n, k)) * spread
        return _f32(weights * gain / math.sqrt(np.square(weights).sum(axis=1).mean()))

    def writing(self, k: int, gain: float) -> Array:
        """[hidden, k] that writes into the second half; the output is `gain` times as long as an embedding."""
        weights = self.linear(self._written.shape[1], k, gain * math.sqrt(self.size.hidden / self._written.shape[1]))
        return _f32(self._written @ weights)

    def written_bias(self, gain: float) -> Array:
        """[hidden] in the second half, `gain` times as long as an embedding."""
        bias = self._written @ self.rng.standard_normal(self._written.shape[1])
        return _f32(bias * gain * math.sqrt(self.size.hidden) / np.linalg.norm(bias))

    def router(self, norm: Array) -> Array:
        """[experts, hidden]: each token has `top_k` experts of its own, with logits of 4, 3.5, 3, ..., the others 0.

        norm: weights of the RMS norm in front of the router, [hidden].
        """
        logits = np.zeros((self.size.experts, len(VOCABULARY)))
        for token in range(len(VOCABULARY)):
            for rank, expert in enumerate(self.rng.permutation(self.size.experts)[: self.size.top_k]):
                logits[expert, token] = max(4.0 - 0.5 * rank, 1.0) + self.rng.uniform(-0.2, 0.2)
        return _f32(logits @ self._tokens.T / norm / math.sqrt(self.size.hidden))

    def add_attention(self, model: Model, layer: str) -> None:
        """Adds `{layer}.self_attn.{q,k,v,o}_proj.weight` to `model`."""
        size, prefix = self.size, f"{layer}.self_attn"
        model.tensors |= {
            f"{prefix}.q_proj.weight": self.linear(size.heads * size.head_dim, size.hidden),
            f"{prefix}.k_proj.weight": self.linear(size.kv_heads * size.head_dim, size.hidden),
            f"{prefix}.v_proj.weight": self.linear(size.kv_heads * size.head_dim, size.hidden),
            # Attention mixes tokens, which the fitted lm_head does not know of: enough to see, too little to decide.
            f"{prefix}.o_proj.weight": self.writing(size.heads * size.head_dim, 0.15),
        }
        model.linears |= {f"{prefix}.{name}_proj" for name in "qkvo"}

    def add_experts(self, model: Model, prefix: str) -> None:
        """Adds `{prefix}.{expert}.{gate,up,down}_proj.weight` for all experts to `model`."""
        hidden, intermediate = self.size.hidden, self.size.intermediate
        for expert in range(self.size.experts):
            tensors = {
                "up_proj": self.linear(intermediate, hidden),
                "down_proj": self.writing(intermediate, 2.0),
                # A root mean square of 4 in front of the activation: far from both its linear part and its other half,
                # so that swapped gate and up give another result.
                "gate_proj": self.linear(intermediate, hidden, 4.0),
            }
            model.tensors |= {f"{prefix}.{expert}.{name}.weight": weight for name, weight in tensors.items()}
            model.experts |= {f"{prefix}.{expert}.{name}" for name in tensors}


def qwen3_moe(size: Size, rng: np.random.Generator) -> Model:
    """Qwen3-MoE as published (`Qwen3MoeForCausalLM`): gated SiLU experts without biases, normalized top-k weights."""
    make = Maker(size, rng)
    model = make.model(
        "Qwen3MoeForCausalLM", "qwen3_moe", attention_bias=False, decoder_sparse_step=1,
        intermediate_size=2 * size.intermediate, mlp_only_layers=[], moe_intermediate_size=size.intermediate,
        norm_topk_prob=True, num_experts=size.experts, rms_norm_eps=1e-06, rope_theta=10000.0, use_sliding_window=False,
    )  # fmt: skip
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        router_norm = make.add_norms(model, layer)
        model.tensors |= {f"{layer}.self_attn.{name}_norm.weight": make.norm(size.head_dim) for name in "qk"}
        make.add_attention(model, layer)
        model.tensors[f"{layer}.mlp.gate.weight"] = make.router(router_norm)
        make.add_experts(model, f"{layer}.mlp.experts")
    return model


def gpt_oss(size: Size, rng: np.random.Generator) -> Model:
    """gpt-oss as published (`GptOssForCausalLM`): SwiGLU-OAI experts with biases whose rows alternate gate and up, a
    biased router, attention sinks, and a sliding window in every other layer that a few tokens fill."""
    make = Maker(size, rng)
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(size.layers)]
    yarn = {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 64, "rope_type": "yarn",
        "truncate": False,
    }  # fmt: skip
    model = make.model(
        "GptOssForCausalLM", "gpt_oss", attention_bias=True, experts_per_token=size.top_k, initial_context_length=64,
        intermediate_size=size.intermediate, layer_types=kinds, num_local_experts=size.experts,
        output_router_logits=False, rms_norm_eps=1e-05, rope_scaling=yarn, rope_theta=150000, router_aux_loss_coef=0.9,
        sliding_window=4, swiglu_limit=7.0,
    )  # fmt: skip
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        router_norm = make.add_norms(model, layer)
        model.tensors |= {
            f"{layer}.self_attn.sinks": _f32(rng.uniform(-1, 1, size.heads)),
            f"{layer}.self_attn.o_proj.weight": make.writing(size.heads * size.head_dim, 0.15),
            f"{layer}.self_attn.o_proj.bias": make.written_bias(0.05),
            f"{layer}.mlp.router.weight": make.router(router_norm),
            f"{layer}.mlp.router.bias": _f32(rng.uniform(-0.2, 0.2, size.experts)),
        }
        for name, heads in (("q", size.heads), ("k", size.kv_heads), ("v", size.kv_heads)):
            rows = heads * size.head_dim
            model.tensors[f"{layer}.self_attn.{name}_proj.weight"] = make.linear(rows, size.hidden)
            model.tensors[f"{layer}.self_attn.{name}_proj.bias"] = _f32(rng.uniform(-0.5, 0.5, rows))
        model.linears |= {f"{layer}.self_attn.{name}_proj" for name in "qkvo"}
        # A root mean square of 4 in front of the activation, on both sides: one in twelve is beyond the limit of 7.
        rows = 2 * size.intermediate
        gate_up = [make.linear(rows, size.hidden, 4.0).T for _ in range(size.experts)]
        down = [make.writing(size.intermediate, 0.5).T for _ in range(size.experts)]
        experts = f"{layer}.mlp.experts"
        model.tensors |= {
            f"{experts}.gate_up_proj": np.ascontiguousarray(np.stack(gate_up)),
            f"{experts}.gate_up_proj_bias": _f32(rng.uniform(-2, 2, (size.experts, rows))),
            f"{experts}.down_proj": np.ascontiguousarray(np.stack(down)),
            f"{experts}.down_proj_bias": np.stack([make.written_bias(0.5) for _ in range(size.experts)]),
        }
        model.fused |= {f"{experts}.gate_up_proj", f"{experts}.down_proj"}
    return model


def glm4_moe(size: Size, rng: np.random.Generator) -> Model:
    """GLM-4.5 as published (`Glm4MoeForCausalLM`): sigmoid routing with a correction bias, a shared expert, and one
    more layer that drafts the token after the next (`Glm4MoeMTP`).

    The drafting layer is the first one again, of which the drafts' own input projection takes the token alone. So in a
    model of one layer drafts are what the model says, but for the attention's context: a drafting layer with another
    expert drafts other tokens.
    """
    make = Maker(size, rng)
    model = make.model(
        "Glm4MoeForCausalLM", "glm4_moe", attention_bias=False, first_k_dense_replace=0,
        intermediate_size=2 * size.intermediate, moe_intermediate_size=size.intermediate, n_group=1,
        n_routed_experts=size.experts, n_shared_experts=1, norm_topk_prob=True, num_nextn_predict_layers=1,
        partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_theta=10000.0, routed_scaling_factor=1.0, topk_group=1,
        use_qk_norm=False,
    )  # fmt: skip
    for index in range(size.layers):
        layer = f"model.layers.{index}"
        router_norm = make.add_norms(model, layer)
        shared = f"{layer}.mlp.shared_experts"
        make.add_attention(model, layer)
        model.tensors |= {
            f"{layer}.mlp.gate.weight": make.router(router_norm),
            # Much smaller than the distance of a chosen expert's score from the others'.
            f"{layer}.mlp.gate.e_score_correction_bias": _f32(rng.uniform(-0.05, 0.05, size.experts)),
            f"{shared}.gate_proj.weight": make.linear(size.intermediate, size.hidden, 4.0),
            f"{shared}.up_proj.weight": make.linear(size.intermediate, size.hidden),
            f"{shared}.down_proj.weight": make.writing(size.intermediate, 0.5),
        }
        model.linears |= {f"{shared}.{name}_proj" for name in ("gate", "up", "down")}
        make.add_experts(model, f"{layer}.mlp.experts")
    first, drafts = "model.layers.0.", f"model.layers.{size.layers}."
    for modules in (model.experts, model.linears):
        modules |= {drafts + name.removeprefix(first) for name in modules if name.startswith(first)}
    model.tensors |= {
        drafts + name.removeprefix(first): tensor.copy()
        for name, tensor in model.tensors.items()
        if name.startswith(first)
    }
    ones, embedding = _f32(np.ones(size.hidden)), model.tensors["model.embed_tokens.weight"]
    model.tensors |= {
        f"{drafts}enorm.weight": ones,
        f"{drafts}hnorm.weight": ones.copy(),
        f"{drafts}eh_proj.weight": _f32(np.eye(size.hidden, 2 * size.hidden)),
        f"{drafts}embed_tokens.weight": embedding.copy(),
        f"{drafts}shared_head.norm.weight": model.tensors["model.norm.weight"].copy(),
    }
    return model


ARCHITECTURES: Mapping[str, Callable[[Size, np.random.Generator], Model]] = {
    "qwen3_moe": qwen3_moe, "gpt_oss": gpt_oss, "glm4_moe": glm4_moe,
}  # fmt: skip
"""Name -> function; a new architecture is a function and a line here."""


# --- Files -----------------------------------------------------------------------------------------------------------


def write_checkpoint(
    path: Path | str, *, arch: str = "qwen3_moe", size: Size | None = None, seed: int = 0, **how: Any
) -> Path:
    """Writes config.json, model.safetensors and the tokenizer's files into the folder `path` and returns it.

    arch: a key of ARCHITECTURES.
    how: it is stored, as of `write_model`.

    Raises ValueError for an unknown choice, or a dimension that blocks of 32 do not divide.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}; valid: {', '.join(ARCHITECTURES)}")
    if arch == "gpt_oss" and how.get("format", "mxfp8") == "mxfp8":
        raise ValueError("format is 'mxfp8': nobody publishes gpt_oss so; valid: mxfp4, bf16")
    model = ARCHITECTURES[arch](size or Size(), np.random.default_rng(seed))
    model.config |= {
        "vocab_size": len(VOCABULARY),
        "bos_token_id": None,
        "eos_token_id": VOCABULARY.index("</s>"),
        "pad_token_id": VOCABULARY.index("<pad>"),
        "use_cache": True,
    }

    def fit(model: Model) -> None:
        model.tensors["lm_head.weight"] = _fit_head(model)

    path = write_model(path, model, complete=fit, **how)
    _write_json(path / "generation_config.json", {"eos_token_id": model.config["eos_token_id"], "do_sample": False})
    write_tokenizer(path)
    return path


def write_model(
    path: Path | str,
    model: Model,
    *,
    format: Format = "mxfp8",
    tag: Tag = "modelopt",
    dtype: Dtype = "bfloat16",
    quantize_linears: bool = True,
    kept: str = "",
    complete: Callable[[Model], None] = lambda model: None,
) -> Path:
    """Writes a model's config.json and model.safetensors, without a tokenizer, into the folder `path` and returns it.

    model: quantized in place where the format is MXFP4.
    format: "mxfp8" stores each quantized module as e4m3 `.weight` [N, K] and uint8 `.weight_scale` [N, K / 32];
        "mxfp4" quantizes experts only: gpt-oss's as OpenAI publishes them, uint8 `_blocks` [E, N, K / 32, 16] and
        `_scales` [E, N, K / 32], others as uint8 `.weight` [N, K / 2] and `.weight_scale` [N, K / 32], both under the
        method "mxfp4"; a `tag` of compressed-tensors makes it that method and names codes `.weight_packed`; "bf16"
        stores the same weights, not quantized, in `dtype`.
    tag: how the config says that it is MXFP8. "modelopt" is what ModelOpt writes into config.json, "modelopt_mxfp8"
        names vLLM's method, "mxfp8" is the form with `ignored_layers`, "mixed" is ModelOpt's mixed precision, in which
        the experts of the last layer are not quantized, the compressed-tensors ones are llm-compressor's (with
        activations in 16 bits, where the tag ends so), and the legacy ones use hf_quant_config.json:
        "legacy" as stock vLLM reads it, "legacy_producer" as ModelOpt writes it (stock 0.32 refuses that:
        "Unknown ModelOpt quant algo: MXFP8").
    dtype: of everything that is not quantized: router, norms, embeddings, lm_head, biases.
    quantize_linears: whether attention projections are quantized too, or only experts.
    kept: modules whose names start so stay in `dtype`; "" for none.
    complete: called with the model as it will be read, before it is written.

    Raises ValueError for an unknown choice.
    """
    import torch
    from safetensors.torch import save_file

    for name, value, valid in (("format", format, Format), ("tag", tag, Tag), ("dtype", dtype, Dtype)):
        if value not in get_args(valid):
            raise ValueError(f"{name} is {value!r}; valid: {', '.join(get_args(valid))}")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    compressed = tag.startswith("compressed-tensors")
    blocks = _to_mxfp4(model, "weight_packed" if compressed else "weight") if format == "mxfp4" else {}
    complete(model)

    quantized = model.experts | (model.linears if quantize_linears else set())
    if tag == "mixed":
        last = f"model.layers.{model.config['num_hidden_layers'] - 1}."
        quantized -= {module for module in model.experts if module.startswith(last)}
    if format != "mxfp8":
        quantized = set()
    if kept:
        quantized = {module for module in quantized if not module.startswith(kept)}
    tensors = _stored(model, blocks, quantized, getattr(torch, dtype))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    config = {**model.config, "dtype": dtype}
    legacy = path / "hf_quant_config.json"
    legacy.unlink(missing_ok=True)
    unquantized = [] if quantize_linears and format == "mxfp8" else sorted(model.linears)
    unquantized += [f"{kept}*"] if kept else []
    declared = _declared(model, format, tag, sorted(quantized), unquantized)
    if tag in ("legacy", "legacy_producer") and declared:
        _write_json(legacy, declared)
    elif declared:
        config["quantization_config"] = declared
    _write_json(path / "config.json", config)
    return path


def _stored(model: Model, blocks: Mapping[str, Bytes], quantized: set[str], dtype: Any) -> dict[str, Any]:
    """The checkpoint's tensors: `blocks` as they are, `quantized` modules in MXFP8, everything else in `dtype`."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in blocks.items()}
    for name, array in sorted(model.tensors.items()):
        module = name.removesuffix(".weight")
        if blocks and (name in model.fused or (module in model.experts and name != module)):
            continue
        if name != module and module in quantized:
            codes, scales = reference.quantize_mxfp8(array)
            tensors[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = torch.from_numpy(scales)
        else:
            tensors[name] = torch.from_numpy(array).to(dtype)
    return tensors


def _declared(model: Model, format: Format, tag: Tag, quantized: list[str], linears: list[str]) -> dict[str, Any]:
    """What a checkpoint says of its quantization; nothing in 16 bits. `linears` are left in 16 bits."""
    if format == "bf16":
        return {}
    if format == "mxfp4" and not tag.startswith("compressed-tensors"):
        # As OpenAI writes it, with what its models do not quantize.
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
    # What ModelOpt lists: the modules left in 16 bits that a quantizer could have taken.
    gates = (name.removesuffix(".weight") for name in sorted(model.tensors) if name.endswith(".gate.weight"))
    ignored = ["lm_head", *gates, *linears]
    if tag == "mixed":
        return _mixed_quantization(quantized, ignored)
    if tag.startswith("compressed-tensors"):
        return _compressed_quantization(ignored, tag, 4 if format == "mxfp4" else 8)
    return (_legacy_quantization if tag in ("legacy", "legacy_producer") else _quantization)(ignored, tag)


def _to_mxfp4(model: Model, ending: str) -> dict[str, Bytes]:
    """The experts' tensors as a checkpoint in MXFP4 stores them; `model` keeps what they mean.

    ending: of the names of single experts' codes.

    Elements beyond 6 times a block's scale saturate, as in the MX specification's section 6.3. The head is fitted to
    the model that is served: a step of e2m1 is so large that the original is another model.
    """
    found: dict[str, Bytes] = {}
    for name in sorted(model.fused):
        codes, scales = reference.quantize_mxfp4(np.ascontiguousarray(model.tensors[name].swapaxes(1, 2)), "floor")
        model.tensors[name] = _f32(reference.dequantize_mxfp4(codes, scales).swapaxes(1, 2))
        found[f"{name}_blocks"] = codes.reshape(*scales.shape, BLOCK // 2)
        found[f"{name}_scales"] = scales
    for module in sorted(model.experts):
        codes, scales = reference.quantize_mxfp4(model.tensors[f"{module}.weight"], "floor")
        model.tensors[f"{module}.weight"] = _f32(reference.dequantize_mxfp4(codes, scales))
        found |= {f"{module}.{ending}": codes, f"{module}.weight_scale": scales}
    return found


def write_tokenizer(path: Path) -> None:
    """One token for each character of ALPHABET (text is lowercased first), `<unk>` for any other; no BOS is added."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": 512,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_word_tokenizer(path: Path, size: int) -> None:
    """A word for each of so many tokens, in front of a space: for benchmarks, whose prompts are random tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w1", "pad_token": "w2"}
    _write_json(path / "tokenizer_config.json", words | {"model_max_length": 1 << 20})


def encode(text: str) -> list[int]:
    """Token ids of `text`, as the written tokenizer gives them."""
    return [VOCABULARY.index(c) if c in ALPHABET else VOCABULARY.index("<unk>") for c in text.lower()]


def recite(text: str, count: int) -> str:
    """The `count` characters that the model says after `text`, which must not be empty."""
    start = ALPHABET.index(text.lower()[-1])
    return "".join(ALPHABET[(start + 1 + i) % len(ALPHABET)] for i in range(count))


def rewrite_tensors(source: Path | str, target: Path | str, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Copies a checkpoint from `source` to `target` with `edit(tensors)` applied to its name -> torch tensor mapping.

    For tests that inject faults: swapped tensors, wrong scales, missing names, wrong dtypes or shapes.
    """
    import shutil

    from safetensors.torch import load_file, save_file

    source, target = Path(source), Path(target)
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def swap_gate_and_up(tensors: dict[str, Any]) -> None:
    """An edit for `rewrite_tensors`: gate for up and up for gate, in every expert."""
    for name in [each for each in tensors if ".experts." in each and ".gate_proj." in each]:
        other = name.replace(".gate_proj.", ".up_proj.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def _fit_head(model: Model) -> Array:
    """[V, hidden]: the row of a token is proportional to the model's final state after the token's predecessor."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    hidden = model.config["hidden_size"]
    head = torch.zeros(len(VOCABULARY), hidden)
    with tempfile.TemporaryDirectory() as folder:
        _write_json(Path(folder, "config.json"), {**model.config, "dtype": "float32"})
        drafts = f"model.layers.{model.config['num_hidden_layers']}."
        tensors = {
            name: torch.from_numpy(array) for name, array in model.tensors.items() if not name.startswith(drafts)
        }
        save_file({**tensors, "lm_head.weight": head}, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        fitted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            states = fitted.base_model(torch.arange(len(VOCABULARY))[:, None]).last_hidden_state[:, 0]
    first = len(SPECIAL_TOKENS)
    # A logit of 6 after the right predecessor: a probability of about 0.85 among logits of the others around 0 +- 0.6.
    head[first:] = torch.roll(states[first:], 1, dims=0) * 6.0 / states[first:].square().sum(-1).mean()
    # Special tokens have no predecessor: small logits, never the best.
    head[:first] = head[first:].mean(0) * torch.tensor([[0.9], [1.0], [1.1]])
    return head.numpy()


def _quantization(ignored: list[str], tag: Tag) -> dict[str, Any]:
    if tag == "mxfp8":
        return {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [1, BLOCK],
            "ignored_layers": ignored,
        }
    producer = {"producer": {"name": "modelopt", "version": "0.40.0"}} if tag == "modelopt" else {}
    return {"quant_method": tag, "quant_algo": "MXFP8", "ignore": ignored, **producer}


def _mixed_quantization(quantized: list[str], ignored: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {module: {"quant_algo": "MXFP8", "group_size": BLOCK} for module in quantized},
        "ignore": ignored,
        "producer": {"name": "modelopt", "version": "0.40.0"},
    }


def _compressed_quantization(ignored: list[str], tag: Tag, bits: int) -> dict[str, Any]:
    """What llm-compressor writes for its presets MXFP8, MXFP8A16, MXFP4 and MXFP4A16."""
    common = {"num_bits": bits, "type": "float", "symmetric": True, "group_size": BLOCK, "strategy": "group"}
    form = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    common |= {"block_structure": None, "actorder": None, "scale_dtype": "torch.uint8", "zp_dtype": None}
    weights = {**common, "dynamic": False, "observer": "memoryless_minmax", "observer_kwargs": {}}
    inputs = {**common, "dynamic": True, "observer": None, "observer_kwargs": {}}
    group = configs.group(weights, None if tag.endswith("-a16") else inputs)
    group |= {"output_activations": None, "format": form}
    more = {"quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None}
    return configs.compressed(group, format=form, ignore=ignored, **more)


def _legacy_quantization(ignored: list[str], tag: Tag) -> dict[str, Any]:
    body = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "group_size": BLOCK, "exclude_modules": ignored}
    if tag == "legacy_producer":
        return {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": body}
    return {"quant_method": "modelopt", "quantization": body}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _f32(array: npt.NDArray[np.float64]) -> Array:
    return np.ascontiguousarray(array, dtype=np.float32)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns an exit status."""
    parser = argparse.ArgumentParser(description="Writes a tiny random mixture-of-experts checkpoint.")
    parser.add_argument("path", type=Path, metavar="OUT_DIR")
    parser.add_argument("--arch", choices=sorted(ARCHITECTURES), default="qwen3_moe")
    parser.add_argument("--format", choices=get_args(Format), default="mxfp8")
    parser.add_argument("--tag", choices=get_args(Tag), default="modelopt", help="how the config says MXFP8")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16", help="of what is not quantized")
    parser.add_argument("--experts-only", action="store_true", help="leave attention projections unquantized")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    options = parser.parse_args(arguments)
    try:
        path = write_checkpoint(
            options.path,
            arch=options.arch,
            format=options.format,
            tag=options.tag,
            dtype=options.dtype,
            quantize_linears=not options.experts_only,
            size=replace(Size(), **{name: getattr(options, name) for name in vars(Size())}),
            seed=options.seed,
        )
    except ValueError as error:
        print(f"checkpoints.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {sum(f.stat().st_size for f in path.iterdir())} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
