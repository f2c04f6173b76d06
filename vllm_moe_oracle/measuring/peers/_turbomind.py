"""LMDeploy's TurboMind (``lmdeploy`` 0.18.0): what its peers share.

``turbomind/linear.py`` offers grouped products for rows in order of their experts, which gather their input and apply
SiLU in the first product's epilogue. The extension `_turbomind` offers the weighted sum over a token's experts. Its
engine calls both. The engine's sort of slots is bound for tests of its router alone, which takes logits; a kernel of
this project's sorts here (`_by_expert`), in one launch instead of the engine's two and two fills. Biases and gpt-oss's
activation are left to a kernel that is not bound.

The package chooses kernels by measuring them, as its engine does at a start: the first call with a number of tokens
measures, later ones repeat the choice. Its own memory holds the packed weights, beside the layer's.

The modules are imported without the ``__init__`` of their packages, which import the rest of LMDeploy. The extension
needs libcudart.so.12, libcublas.so.12 and libcublasLt.so.12, which it also finds in a folder ``nvidia`` beside
``lmdeploy`` (``nvidia/cuda_runtime/lib``, ``nvidia/cublas/lib``, as wheels unpack there), and a libnccl.so.2, of which
torch's is loaded already.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from ...backends import Builder, Tensors
from ...core.capabilities import Rule
from ...core.decision import ShardPlan
from ...core.problem import Device, Problem
from ._contract import PeerBackend

if TYPE_CHECKING:
    from torch import Tensor

_EXTENSION = "turbomind._turbomind"
_TOP_K = (1, 2, 4, 6, 8, 10)
"""Experts per token for which the weighted sum is compiled; another number ends the process."""


def minimum_rule(least: int) -> Rule:
    """A rule for the smallest number of input features of a product."""
    return Rule(
        "shape.minimum",
        lambda problem, device: min(problem.hidden_size, problem.intermediate_size) < least,
        lambda problem, device: (
            f"products have at least {least} input features; the layer has {problem.hidden_size} and "
            f"{problem.intermediate_size}"
        ),
    )


def _rejects_top_k(problem: Problem, device: Device) -> bool:
    return problem.top_k not in _TOP_K


TOP_K_RULE = Rule(
    "top_k.compiled",
    _rejects_top_k,
    lambda problem, device: f"sums over {', '.join(map(str, _TOP_K))} experts; a token has {problem.top_k}",
)
SUMS = "float32, rounded to {dtype} for each slot; slots are sorted by this project's kernel"


class TurboMindBackend(PeerBackend):
    """A layer of two grouped products.

    Attributes:
        input_dtype: torch's name of the dtype to which the products quantize activations; "" for none.
    """

    package = "lmdeploy"
    generation = "turbomind.linear"
    runs_parents = False
    input_dtype: ClassVar[str] = ""

    @abstractmethod
    def weight_format(self, problem: Problem) -> Any:
        """The package's description of the weights' format."""

    @abstractmethod
    def sources(self, tensors: Tensors, name: str, problem: Problem) -> dict[str, Tensor]:
        """A matrix as the package's format reads it from checkpoints: ``weight``, ``scales`` and maybe ``zeros``.

        Args:
            tensors: the layer's tensors.
            name: ``w13`` or ``w2``.
            problem: the layer.

        Returns:
            Tensors `[E, rows, ...]`.
        """

    def load(self) -> None:
        """Imports the extension, and the modules that call it."""
        import torch  # noqa: F401  # loads NCCL, which the extension needs

        # The package's __init__, which does not run, binds the extension to this name.
        self.module("turbomind")._tm = self.module(_EXTENSION)  # type: ignore[attr-defined]
        for name in ("turbomind.linear", "turbomind.weight_format"):
            self.module(name)

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """A function of routed tokens over weights that the package packs into memory of its own.

        Raises:
            NotImplementedError: the package has no kernel for the layer on this GPU.
        """
        from . import _by_expert

        native, linear = self.module(_EXTENSION), self.module("turbomind.linear").get_linear()
        up, down = (_Product(linear, weight) for weight in self._pack(linear, tensors, problem))

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            if x.shape[0] == 0:
                return
            slots = _by_expert.sort_slots(topk_ids, topk_weights, expert_map, problem.local_experts)
            h, scales = up(x, slots.offsets, slots.tokens)
            results, _ = down(h, slots.offsets, scales=scales)
            share = native.from_dlpack
            with native.create_device_context(_current_stream(x)):
                native.invokeMoeCombine(
                    out=share(out), src=share(results), scales=share(slots.weights), en2f=share(slots.rows),
                    experts_per_token=topk_ids.shape[1],
                )  # fmt: skip

        return builder.from_function(run)

    def _pack(self, linear: Any, tensors: Tensors, problem: Problem) -> tuple[Any, Any]:
        """The package's weights of both products; gate and up rows alternate in blocks as its kernel wants them."""
        import torch

        kinds = {
            "weight_format": self.weight_format(problem),
            "dtype": getattr(torch, problem.dtype),
            "input_dtype": getattr(torch, self.input_dtype) if self.input_dtype else None,
            "grouped": True,
        }
        # Two plans, because the first keeps the activation of `fuse_weight`.
        first, second = (linear.get_weight_plan(**kinds, fusion_type=each) for each in ("silu", None))
        inner = problem.intermediate_size
        gate_up = {
            kind: (each[:, :inner], each[:, inner:]) for kind, each in self.sources(tensors, "w13", problem).items()
        }
        up = linear.fuse_weight(gate_up.pop("weight"), plan=first, **gate_up)
        rest = self.sources(tensors, "w2", problem)
        return up, linear.prepare_weight(rest.pop("weight"), plan=second, **rest)


class _Product:
    """A grouped product, with the kernel that was fastest at the first call with as many rows of input."""

    def __init__(self, linear: Any, weight: Any) -> None:
        """A product of the package's executor and its packed weight."""
        self._linear, self._weight = linear, weight
        self._plans: dict[int, Any] = {}

    def __call__(
        self, x: Tensor, offsets: Tensor, indices: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rows in order of their experts, `[M * top_k, rows of the weight]`, and scales where they are quantized.

        Args:
            x: the input, `[M, columns]`; with ``scales`` quantized.
            offsets: int32 `[experts + 1]`, the first row of each expert.
            indices: int32 `[M * top_k]`, the row of x of each row; None if x is in order.
            scales: scales of x.
        """
        import torch

        plan = self._plans.get(x.shape[0])
        if plan is None:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing can be measured
                plan = self._linear.get_exec_plan(x, self._weight, offsets=offsets, indices=indices)
            else:
                plan, _, _ = self._linear.tune(x, self._weight, offsets=offsets, indices=indices, input_scales=scales)
                self._plans[x.shape[0]] = plan
        result: tuple[Tensor, Tensor | None] = self._linear.forward_moe(
            x, self._weight, exec_plan=plan, offsets=offsets, indices=indices, input_scales=scales
        )
        return result


def _current_stream(x: Tensor) -> int:
    """The current stream of a tensor's device, as the package takes it; 0 on a CPU."""
    import torch

    return int(torch.cuda.current_stream(x.device).cuda_stream) if x.is_cuda else 0
