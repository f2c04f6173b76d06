"""Realistic inputs of a checkpoint's MoE layers: its own embeddings, norms and routers, without its attention.

Real hidden states have channels that are far larger than the others, and tokens crowd on some experts; random numbers
have neither. Here some rows of the embedding pass through the model's MoE layers: each layer's norm scales them, its
router distributes them, and what the layer's experts add goes on to the next. Attention and dense layers are left out:
they would have to be built for each architecture. What the files do not have under a known name is replaced, and the
words of the inputs say so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.problem import Problem, Routing
from ..errors import CheckpointError
from . import routing
from .checkpoint_tensors import StoredExperts, TensorFiles

TOKENS = 32
"""Number of different tokens."""

_EMBEDDINGS = (
    "embed_tokens.weight", "tok_embeddings.weight", "word_embeddings.weight", "embeddings.weight", "embedding.weight",
    "wte.weight", "embed.weight",
)  # fmt: skip
_NORMS = (
    "pre_feedforward_layernorm_2", "pre_feedforward_layernorm", "post_attention_layernorm", "ffn_norm",
    "pre_ff_layernorm", "pre_mlp_layernorm", "ln_2", "norm", "input_layernorm",
)  # fmt: skip
_ROUTERS = ("gate", "router", "router.layer", "router.proj", "gate.wg")
_CORRECTIONS = ("gate.e_score_correction_bias", "e_score_correction_bias", "gate.bias", "expert_bias")

_EPSILON = 1e-6

_OUTLIERS, _OUTLIER_SIZE = 0.01, 20.0
"""Fraction of channels that are larger where no embedding is found, and how much."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of one layer.

    Attributes:
        x: `[TOKENS, hidden]` in the model's dtype.
        weights: float32 `[TOKENS, top_k]`.
        ids: int64 `[TOKENS, top_k]`.
        source: what they are made of, in words.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    source: str


class TokenStream:
    """The hidden states of some tokens on their way through a model's MoE layers."""

    def __init__(self, files: TensorFiles, hidden_size: int) -> None:
        """
        Args:
            files: the checkpoint's.
            hidden_size: of the inputs of its experts.

        Raises:
            CheckpointError: the embedding is NaN or infinite.
        """
        self._files = files
        self._generator = torch.Generator("cpu").manual_seed(0)
        found = [name for name in files.names() if name.endswith(_EMBEDDINGS) and self._is_matrix(name, hidden_size)]
        self._source = "embedding" if found else "random numbers"
        if found:
            name = min(found, key=len)
            rows = int(files.meta(name).shape[0])
            tokens = torch.randint(rows, (TOKENS,), generator=self._generator).tolist()
            self._states = torch.stack([files.read(name, row).float() for row in tokens])
            _require_finite(self._states, name)
        else:
            channels = torch.rand(hidden_size, generator=self._generator) < _OUTLIERS
            sizes = torch.where(channels, _OUTLIER_SIZE, 1.0)
            self._states = torch.randn(TOKENS, hidden_size, generator=self._generator) * sizes

    def _is_matrix(self, name: str, columns: int) -> bool:
        found = self._files.meta(name)
        return found.ndim == 2 and found.shape[1] == columns and found.dtype.is_floating_point and found.itemsize > 1

    def inputs(self, layer: StoredExperts) -> LayerInputs:
        """The inputs of a layer.

        Raises:
            CheckpointError: the layer's norm or router is NaN or infinite.
        """
        problem = layer.problem
        norm = self._vector(self._norm_name(layer.module, problem), "norm")
        states = self._states / (self._states.square().mean(-1, keepdim=True) + _EPSILON).sqrt()
        x = (states if norm is None else states * norm).to(getattr(torch, problem.dtype))
        weights, ids, routed = self._route(layer, x)
        parts = (self._source, "the layer's norm" if norm is not None else "no norm", routed)
        return LayerInputs(x, weights, ids, ", ".join(parts))

    def advance(self, outputs: Tensor) -> None:
        """Adds a layer's outputs, float32 `[TOKENS, hidden]`, to the states; NaN adds nothing."""
        self._states = self._states + outputs.to("cpu").nan_to_num(0.0, 0.0, 0.0)

    def _norm_name(self, module: str, problem: Problem) -> str:
        parts = module.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        decoder = ".".join(parts[: number + 1])
        names = (f"{decoder}.{each}.weight" for each in _NORMS)
        shape = (problem.hidden_size,)
        return next((name for name in names if name in self._files and self._files.meta(name).shape == shape), "")

    def _vector(self, name: str, what: str) -> Tensor | None:
        """A floating-point tensor as float32; None for no name."""
        if not name or not self._files.meta(name).dtype.is_floating_point:
            return None
        values = self._files.read(name).float()
        _require_finite(values, f"{name} ({what})")
        return values

    def _route(self, layer: StoredExperts, x: Tensor) -> tuple[Tensor, Tensor, str]:
        """Weights, ids, and by what tokens were routed."""
        problem = layer.problem
        block = layer.module.rpartition(".")[0]
        name, router = self._router(block, layer)
        if router is None:
            logits = torch.randn(len(x), problem.num_experts, generator=self._generator)
            words = "random routing"
        else:
            logits, words = x.float() @ router.T, "the layer's router"
            bias = self._vector_of(f"{name.removesuffix('weight')}bias", problem)
            logits = logits if bias is None or problem.routing.correction_bias else logits + bias
        how = problem.routing
        reference = routing.routing_reference(how)
        if reference is None:
            how, words = Routing("renormalize"), f"{words} by softmax"
            reference = routing.ROUTING_REFERENCES[how.method]
        correction = None
        if reference.uses_bias:
            places = (f"{block}.{each}" for each in _CORRECTIONS)
            correction = next((found for each in places if (found := self._vector_of(each, problem)) is not None), None)
            correction = torch.zeros(problem.num_experts) if correction is None else correction
        weights, ids = routing.route(how, problem.top_k, logits, correction)
        return weights, ids, words

    def _router(self, block: str, layer: StoredExperts) -> tuple[str, Tensor | None]:
        """The router's name, and its weights float32 `[experts, hidden]`; None where no tensor has name and shape.

        ERNIE-4.5-VL's files hold routers as `[hidden, experts]`, and that of a layer's second kind of experts as
        ``weight_1``; vLLM's loader transposes them. As many experts as features leave the order open: `[experts,
        hidden]`, which all other models have, is taken then.
        """
        shape = (layer.problem.num_experts, layer.problem.hidden_size)
        ending = "weight_1" if layer.first else "weight"
        for name in (f"{block}.{each}.{ending}" for each in _ROUTERS):
            found = tuple(self._files.meta(name).shape) if name in self._files else ()
            if found in (shape, shape[::-1]):
                router = self._vector(name, "router")
                return name, router if router is None or found == shape else router.T
        return "", None

    def _vector_of(self, name: str, problem: Problem) -> Tensor | None:
        """A value for each expert; None where the files have none of that name and shape."""
        if name not in self._files or self._files.meta(name).shape != (problem.num_experts,):
            return None
        return self._vector(name, "router")


def _require_finite(values: Tensor, name: str) -> None:
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise CheckpointError(
            f"{bad} of {values.numel()} values are NaN or infinite", "The checkpoint is damaged", name
        )
