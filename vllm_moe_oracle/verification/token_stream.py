"""Realistic inputs of a checkpoint's MoE layers: its own embeddings, norms and routers, without its attention.

Real hidden states have channels that are far larger than the others, and tokens crowd on some experts; random numbers
have neither. Here some rows of the embedding pass through the model's MoE layers: each layer's norm scales them, its
router distributes them, and what the layer's experts add goes on to the next. Attention and dense layers are left out:
they would have to be built for each architecture. What the files do not have under a known name is replaced, and so is
what would make a token nearly zero, which shows no error of a kernel. The words of the inputs say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.problem import Problem, Routing
from ..errors import DamagedCheckpointError
from ..schemes._checks import dtype_name
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
_CORRECTIONS = (
    "gate.e_score_correction_bias", "e_score_correction_bias", "gate.bias", "expert_bias", "gate.expert_bias",
    "experts.e_score_correction_bias", "router.e_score_correction_bias", "moe_statics.e_score_correction_bias",
    "router_bias",
)  # fmt: skip

_EPSILON = 1e-6

_LEAST, _MOST = 2.0**-12, 2.0**16
"""Root mean squares of a token, and for the second one sizes of routing weights, too. Less is subnormal in float16 for
many features, and hides a kernel's errors behind its rounding. With more the fourth powers in the bounds leave float32,
whatever the experts' weights are."""

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

    def __init__(self, files: TensorFiles, hidden_size: int, gemma_norms: bool) -> None:
        """
        Args:
            files: the checkpoint's.
            hidden_size: of the inputs of its experts.
            gemma_norms: the model's norms multiply by 1 + weight (`releases.gemma_norms`).

        Raises:
            DamagedCheckpointError: the embedding is NaN or infinite.
        """
        self._files, self._hidden_size = files, hidden_size
        self._norm_offset = 1.0 if gemma_norms else 0.0
        self._generator = torch.Generator("cpu").manual_seed(0)
        named = sorted((name for name in files.names() if name.endswith(_EMBEDDINGS)), key=len)
        found = [name for name in named if self._is_matrix(name, hidden_size)]
        self._source = "embedding" if found else f"random numbers{self._misfit(named, [None, hidden_size])}"
        if not found:
            self._states = self._random_states(TOKENS)
            return
        name = found[0]
        rows = int(files.meta(name).shape[0])
        tokens = torch.randint(rows, (TOKENS,), generator=self._generator).tolist()
        self._states = torch.stack([files.read(name, row).float() for row in tokens])
        _require_finite(self._states, files.stored(name))
        empty = _sizes(_normalized(self._states)) < _LEAST
        if count := int(empty.sum()):
            self._states[empty] = self._random_states(count)
            self._source = f"embedding (random numbers for {count} of {TOKENS} tokens: their rows are nearly 0)"

    def _random_states(self, count: int) -> Tensor:
        """float32 `[count, hidden]` with some large channels."""
        channels = torch.rand(self._hidden_size, generator=self._generator) < _OUTLIERS
        sizes = torch.where(channels, _OUTLIER_SIZE, 1.0)
        return torch.randn(count, self._hidden_size, generator=self._generator) * sizes

    def _is_matrix(self, name: str, columns: int) -> bool:
        found = self._files.meta(name)
        is_table = found.ndim == 2 and found.shape[0] > 0 and found.shape[1] == columns
        return is_table and found.dtype.is_floating_point and found.itemsize > 1

    def _misfit(self, names: Iterable[str], expected: Sequence[int | None]) -> str:
        """In words, how the first of some tensors that the files have differs from 16 or 32-bit floats of a shape; ""
        if they have none. None is any number, of tokens."""
        name = next((each for each in names if each in self._files), None)
        if name is None:
            return ""
        tensor = self._files.meta(name)
        shape = list(tensor.shape)
        turned = ": it is transposed" if not _fits(shape, expected) and _fits(shape[::-1], expected) else ""
        words = ", ".join("tokens" if each is None else str(each) for each in expected)
        return f" ({name} is {dtype_name(tensor.dtype)} {shape}, not floats [{words}]{turned})"

    def inputs(self, layer: StoredExperts) -> LayerInputs:
        """The inputs of a layer.

        Raises:
            DamagedCheckpointError: the layer's norm or router is NaN or infinite, or so large that what it computes is.
        """
        x, normed = self._normed(layer)
        weights, ids, routed = self._route(layer, x)
        return LayerInputs(x, weights, ids, ", ".join((self._source, normed, routed)))

    def _normed(self, layer: StoredExperts) -> tuple[Tensor, str]:
        """The states through the layer's norm, `[TOKENS, hidden]` in the model's dtype, and what norm that was."""
        dtype = getattr(torch, layer.problem.dtype)
        states = _normalized(self._states)
        name = self._norm_name(layer.module, layer.problem)
        norm = self._vector(name, "norm")
        if norm is None:
            misfit = self._misfit(self._norm_names(layer.module), [layer.problem.hidden_size])
            return states.to(dtype), f"no norm{misfit}"
        x = (states * (norm + self._norm_offset)).to(dtype)
        sizes = _sizes(x)
        if not bool((sizes <= _MOST).all()):  # NaN is not
            rule = f"it makes inputs whose root mean square is {float(sizes.amax()):.3g}, more than {_MOST:.0f}"
            raise DamagedCheckpointError(rule, _DAMAGED, f"{name} (norm)")
        empty = sizes < _LEAST
        x[empty] = states[empty].to(dtype)
        count = int(empty.sum())
        left_out = f" (not for {count} of {len(x)} tokens: it makes them nearly 0)" if count else ""
        return x, f"the layer's norm{left_out}"

    def advance(self, outputs: Tensor) -> None:
        """Adds a layer's outputs, float32 `[TOKENS, hidden]`, to the states; NaN adds nothing."""
        self._states = self._states + outputs.to("cpu").nan_to_num(0.0, 0.0, 0.0)

    def _norm_names(self, module: str) -> list[str]:
        """Names that the norm before a layer of experts may have, the likeliest first."""
        parts = module.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
        decoder = ".".join(parts[: number + 1])
        return [f"{decoder}.{each}.weight" for each in _NORMS]

    def _norm_name(self, module: str, problem: Problem) -> str:
        """The norm before the experts; "" where it has another shape, and where the files have none."""
        found = next((name for name in self._norm_names(module) if name in self._files), "")
        return found if found and self._files.meta(found).shape == (problem.hidden_size,) else ""

    def _vector(self, name: str, what: str) -> Tensor | None:
        """A floating-point tensor as float32; None for no name."""
        if not name or not self._files.meta(name).dtype.is_floating_point:
            return None
        values = self._files.read(name).float()
        _require_finite(values, f"{self._files.stored(name)}, {what}")
        return values

    def _route(self, layer: StoredExperts, x: Tensor) -> tuple[Tensor, Tensor, str]:
        """Weights, ids, and by what tokens were routed."""
        problem = layer.problem
        block = layer.module.rpartition(".")[0]
        name, router = self._router(block, layer)
        if router is None:
            logits = torch.randn(len(x), problem.num_experts, generator=self._generator)
            misfit = self._misfit(self._router_names(block, layer), self._router_shape(layer))
            words = f"random routing{misfit}"
        else:
            logits, words = x.float() @ router.T, "the layer's router"
            bias = self._vector_of(f"{name.removesuffix('weight')}bias", problem)
            logits = logits if bias is None or problem.routing.correction_bias else logits + bias
            _require_finite(logits, f"{name} (router), logits of {len(x)} tokens")
        how = problem.routing
        reference = routing.routing_reference(how)
        if reference is None:
            how, words = Routing("renormalize"), f"{words} by softmax"
            reference = routing.ROUTING_REFERENCES[how.method]
        correction = None
        if reference.uses_bias or problem.routing.correction_bias:  # one that is not used may be damaged, too
            places = (f"{block}.{each}" for each in _CORRECTIONS)
            correction = next((found for each in places if (found := self._vector_of(each, problem)) is not None), None)
        weights, ids = routing.route(how, problem.top_k, logits, correction)
        if not bool((weights.abs() <= _MOST).all()):  # NaN is not
            rule = f"it makes routing weights that are NaN, infinite or larger than {_MOST:.0f}"
            raise DamagedCheckpointError(rule, _DAMAGED, f"{name or block} (router)")
        return weights, ids, words

    def _router(self, block: str, layer: StoredExperts) -> tuple[str, Tensor | None]:
        """The router's name, and its weights float32 `[experts, hidden]`; None where no tensor has name and shape.

        ERNIE-4.5-VL's files hold routers as `[hidden, experts]`, and that of a layer's second kind of experts as
        ``weight_1``; vLLM's loader transposes them. Those of all other models it takes as they are.
        """
        for name in self._router_names(block, layer):
            if name in self._files and tuple(self._files.meta(name).shape) == self._router_shape(layer):
                router = self._vector(name, "router")
                return name, router.T if router is not None and layer.transposed_router else router
        return "", None

    def _router_shape(self, layer: StoredExperts) -> tuple[int, int]:
        """The shape that a layer's router has in the files."""
        shape = layer.problem.num_experts, layer.problem.hidden_size
        return shape[::-1] if layer.transposed_router else shape

    def _router_names(self, block: str, layer: StoredExperts) -> list[str]:
        ending = "weight_1" if layer.first else "weight"
        return [f"{block}.{each}.{ending}" for each in _ROUTERS]

    def _vector_of(self, name: str, problem: Problem) -> Tensor | None:
        """A value for each expert; None where the files have none of that name and shape. ERNIE-4.5's have a leading
        dimension of 1, which vLLM's loader takes away."""
        shapes = (problem.num_experts,), (1, problem.num_experts)
        if name not in self._files or tuple(self._files.meta(name).shape) not in shapes:
            return None
        found = self._vector(name, "router")
        return None if found is None else found.flatten()


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Whether a shape is the expected one, in which None is any number."""
    return len(shape) == len(expected) and all(want in (None, own) for own, want in zip(shape, expected, strict=True))


def _normalized(states: Tensor) -> Tensor:
    """Tokens divided by their root mean square, float32 `[M, hidden]`; also those whose squares leave float32."""
    largest = states.abs().amax(-1, keepdim=True).clamp(min=1.0)
    parts = states / largest
    return parts / (parts.square().mean(-1, keepdim=True) + _EPSILON / largest.square()).sqrt()


def _sizes(x: Tensor) -> Tensor:
    """The root mean square of each token, float64 `[M]`."""
    return x.double().square().mean(-1).sqrt()


_DAMAGED = "The checkpoint is damaged"


def _require_finite(values: Tensor, name: str) -> None:
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        raise DamagedCheckpointError(f"{bad} of {values.numel()} values are NaN or infinite", _DAMAGED, name)
