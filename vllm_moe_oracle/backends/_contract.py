"""The contract of a backend: what one file in this folder, or a third party's entry point, provides.

A backend is known without torch and without vLLM: `explain` and the tests ask it about any machine. Only the functions
that touch tensors import torch, and they do it when they are called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..oracle.decision import Accepted, Numerics, Plan, Rejected, Verdict
from ..oracle.problem import ActivationPrecision, Device, Problem, SchemeName
from ._limits import Limits, Rule, violations

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
"""Weights of one layer, or of one expert, by canonical name: ``w13``, ``w2``, ``w13_scale``, ``w2_scale``, and where
the checkpoint has them ``w13_bias``, ``w2_bias``, ``w13_zero_point``, ``w2_zero_point``, ``w13_order``, ``w2_order``,
``w2_group_index``. Each scheme's module says what is in them.
"""


class Forward(Protocol):
    """Runs the experts of a layer on routed tokens.

    Args:
        out: `[M, hidden]`, overwritten with the sum over each token's experts on this rank.
        x: `[M, hidden]` in the model's dtype; M may be 0.
        topk_weights: `[M, top_k]` float32.
        topk_ids: `[M, top_k]` integer, global expert ids; -1 for a slot without an expert.
        expert_map: `[num_experts]` int32, local slot of each global expert, -1 for one that lives elsewhere; None when
            all experts are here.
    """

    def __call__(
        self, out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None
    ) -> None: ...


class ScratchForward(Protocol):
    """As `Forward`, with scratch memory.

    Args:
        workspace: contiguous uint8, at least as many bytes as were asked for, any content, 16-byte aligned.
    """

    def __call__(
        self,
        out: Tensor,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
        workspace: Tensor,
    ) -> None: ...


class Builder(Protocol):
    """What vLLM's side offers a backend for making the object that vLLM's modular kernel runs."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that a call may have."""

    @property
    def serves(self) -> bool:
        """Whether the experts are for a layer that will serve, and not for trying them once."""

    def keep(self, tensor: Tensor) -> Tensor:
        """Makes a tensor that the experts hold on to beside the weights part of the layer, and returns it: vLLM's sleep
        gives the memory of everything else away."""

    def from_function(self, forward: Forward) -> Any:
        """Experts that call a plain function with routed tokens; vLLM prepares and finalises around it."""

    def from_scratch_function(self, forward: ScratchForward, nbytes: Callable[[int, int], int]) -> Any:
        """As `from_function`, for a function that needs scratch memory, which comes from vLLM's workspaces.

        Args:
            forward: the function.
            nbytes: bytes of scratch memory for a number of tokens and of experts per token.
        """

    def stock(
        self,
        class_name: str,
        *,
        weights: str = "",
        inputs: str = "",
        swizzled: bool = False,
        plan: Plan | None = None,
        scales: tuple[Tensor, ...] = (),
        problem: Problem | None = None,
        tensors: Tensors | None = None,
        group: int = 0,
    ) -> Any:
        """An instance of vLLM's own expert class of that name, built for this layer.

        Args:
            class_name: e.g. ``MarlinExperts``, or ``module:Class`` of one that no backend here wraps.
            weights: what the class must believe of the weights' type, in vLLM's words (``fp8``, ``mxfp8``...); "" for
                the scheme's own name.
            inputs: the type to which vLLM's prepare step quantises activations before the class gets them (``mxfp8``,
                ``fp8_block128``: one scale per 128); "" when it must leave them alone.
            swizzled: the prepare step orders the activations' scales in tiles of 128 rows x 4.
            plan: given when the class, and the layer that calls it, must see padded sizes.
            scales: of both weights as the class wants to see them; empty when they are what `tensors` has.
            problem: given to classes that read sizes from elsewhere than vLLM's two configs.
            tensors: kernel tensors of the layer, given to the same classes.
            group: input features that share one scale, for classes that cannot tell it from their tensors.
        """


class Backend(ABC):
    """One way to run the experts of a layer. Instances are stateless.

    Attributes:
        name: unique name; what `backend` settings and decisions say.
        schemes: the schemes whose layers it may be offered.
        limits: what it can take.
        rules: what `limits` cannot say.
        vllm_names: values of vLLM's ``--moe-backend`` that mean this backend.
        stock_class: name of the vLLM expert class that it wraps, which is asked too before it runs, or ``module:Class``
            of one that no backend here wraps; "" when none.
        asks_stock: False when that class is known to ask for more than its kernel needs; the self-check decides then.
        monolithic: it routes inside its kernel: given router logits instead of routed ids.
        dense: its kernel wants experts to follow one another in memory without room between them.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[SchemeName, ...]]
    limits: ClassVar[Limits]
    rules: ClassVar[tuple[Rule, ...]] = ()
    vllm_names: ClassVar[tuple[str, ...]] = ()
    stock_class: ClassVar[str] = ""
    asks_stock: ClassVar[bool] = True
    monolithic: ClassVar[bool] = False
    dense: ClassVar[bool] = False

    def plan(self, problem: Problem, device: Device) -> Plan:
        """How the shard meets the kernel. Without padding unless a backend says otherwise."""
        return Plan(problem.hidden_size, problem.intermediate_size)

    def check(self, problem: Problem, device: Device) -> Verdict:
        """Whether this backend can run the layer on the machine, with every rule that fails."""
        reasons = violations(self.limits, self.rules, problem, device, lambda other: self.plan(other, device))
        return Rejected(reasons) if reasons else Accepted()

    def tiles(self, problem: Problem, tokens: int, most: int) -> tuple[str, ...]:
        """Tile configurations (JSON) that may be faster at a number of tokens than its own choice, at most so many, the
        likeliest first; empty for a backend that has none to choose from."""
        return ()

    def tiled(self, problem: Problem, tile: str) -> AbstractContextManager[None]:
        """While the context lasts, calls run with a configuration of `tiles`: for measuring it."""
        return nullcontext()

    def compiled(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable] | None:
        """What must have been compiled before a call with so many tokens runs. Kernels of one name are the same for all
        layers, so each is compiled once. Empty for a backend whose kernels come compiled; None where it is not known.

        Args:
            problem: the layer.
            tokens: number of tokens.
            tile: a configuration of `tiles`; "" for its own choice.
        """
        return None

    @abstractmethod
    def estimate(self, problem: Problem, device: Device) -> float:
        """Static place in the order of candidates, lower first: where nothing was measured, the order of the newest
        stock vLLM."""

    @abstractmethod
    def activations(self, problem: Problem) -> ActivationPrecision:
        """Precision in which the experts' inputs enter the products."""

    @abstractmethod
    def numerics(self, problem: Problem) -> Numerics:
        """What the backend computes with, in words."""

    def layout(self, problem: Problem, plan: Plan) -> str:
        """Name of what `convert` makes: two backends that give the same name make the same tensors, to the bit, and can
        run the same layer by turns. Its own, unless a backend says otherwise."""
        return f"{self.name} {plan.hidden_size}x{plan.intermediate_size} {plan.layout}".rstrip()

    def objection(self, expert: Tensors, problem: Problem) -> str:
        """What of an expert's loaded weights the backend cannot hold; "" when it can hold them.

        Asked of every local expert before any is converted, where a backend has an answer of its own. With an objection
        the next candidate is taken, or the start refused where the backend was chosen explicitly or the self-check is
        strict. Unlike `convert` it may look at values.

        Args:
            expert: canonical tensors of one expert, without the leading expert dimension. Not modified.
            problem: the layer.

        Returns:
            Where, with numbers, and what would help.
        """
        return ""

    @abstractmethod
    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Kernel tensors of one expert from its canonical ones.

        Called once with meta tensors before weights are loaded, to learn the storage that the layer needs, and once for
        each expert afterwards: no shape, and no branch, may depend on values.

        Args:
            expert: canonical tensors of one expert, without the leading expert dimension. Not modified.
            problem: the layer.
            plan: this backend's own plan for it.

        Returns:
            Tensors by name, of the same shape and dtype for every expert. One that the kernel takes as it is may be the
            very one that came in. What the kernel does not need is left out; names that were not there are added.
        """

    @abstractmethod
    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The object that vLLM's modular kernel runs, made by `builder`.

        Args:
            tensors: kernel tensors of the layer, `[local_experts, ...]` each. They may be refilled in place by a weight
                reload, never moved.
            problem: the layer.
            plan: this backend's own plan for it.
            builder: vLLM's side.
        """
