"""The interface of a backend: what a file in this folder, or a third party's entry point, provides.

What a decision asks works without torch and without vLLM, so that `explain` and the tests can ask about any machine.
`convert`, `validate_weights` and `build_experts` import torch when they are called. So may `tiles`, `use_tile`,
`compile_keys` and `hand_overs`, which are called where kernels run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ..core import lora
from ..core.capabilities import Capabilities, Rule, violations
from ..core.decision import Accepted, Numerics, Rejected, ShardPlan, TokenRange, Verdict
from ..core.problem import ActivationPrecision, Device, Problem, SchemeName
from ..core.sharding import padded_plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
"""Weights of one layer, or of one expert, by canonical name: ``w13``, ``w2``, ``w13_scale``, ``w2_scale``, and where
the checkpoint has them ``w13_bias``, ``w2_bias``, ``w13_zero_point``, ``w2_zero_point``, ``w13_order``, ``w2_order``,
``w2_group_index``. The modules in `vllm_moe_oracle.schemes` document shapes and dtypes.
"""

MAX_CHECK_TOKENS = 1024
"""Most tokens of a call that checks a layer which will serve, and of a call of `verify`. What a check builds for itself
gets more: `Builder.max_tokens` says how many."""


class Forward(Protocol):
    """Runs the experts of a layer on routed tokens.

    Args:
        out: `[M, hidden]`, overwritten with the weighted sum over each token's experts on this rank.
        x: `[M, hidden]` in the model's dtype; M may be 0.
        topk_weights: `[M, top_k]` float32.
        topk_ids: `[M, top_k]` integer, global expert ids; -1 for a slot without an expert.
        expert_map: `[num_experts]` int32, local index of each global expert, -1 for an expert of another rank, in any
            order; None when all experts are local.
    """

    def __call__(
        self, out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None
    ) -> None: ...


class Adapters(Protocol):
    """The LoRA adapters of one call's tokens.

    A backend whose capabilities include ``lora`` passes functions to its builder that take ``adapters``, a keyword
    argument with the default None: no token of the call has an adapter.
    """

    def gate_up(self) -> Tensor:
        """What adapters add to the first product, after its bias and before the activation.

        Returns:
            x's dtype, contiguous `[M * top_k, R]`: gate columns, then up columns, of token ``slot // top_k``'s choice
            ``slot % top_k``. Zeros where a token has no adapter, or its expert is not on this rank.
        """

    def add_down(self, out: Tensor, h: Tensor) -> None:
        """Adds to a call's output what adapters make of the activation's results, times the router's weights.

        Args:
            out: `[M, hidden]`, complete but for this.
            h: x's dtype, contiguous `[M * top_k, I]`, by slot. Rows of slots without an expert on this rank may hold
                anything.
        """


class WorkspaceForward(Protocol):
    """As `Forward`, with a workspace.

    Args:
        workspace: contiguous uint8, 16-byte aligned, at least the requested number of bytes, uninitialized.
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
    """Builds the object that vLLM's modular kernel runs; `Backend.build_experts` gets one for the layer."""

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of one call."""

    @property
    def for_serving(self) -> bool:
        """Whether the layer will serve requests; False for experts that are only tried once, as by the self-check."""

    @property
    def ids_dtype(self) -> torch.dtype:
        """Dtype of the expert ids of a call: an all-to-all may deliver int64. Triton compiles kernels for each."""

    def register_buffer(self, tensor: Tensor) -> Tensor:
        """Registers a tensor that the experts keep besides the weights (counters, tables) as part of the layer.

        vLLM's sleep mode frees the memory of every other tensor.

        Returns:
            The tensor.
        """

    def from_function(self, forward: Forward) -> Any:
        """Experts that call a function with routed tokens, between vLLM's prepare and finalize steps."""

    def from_workspace_function(self, forward: WorkspaceForward, nbytes: Callable[[int, int], int]) -> Any:
        """As `from_function`, for a function that needs a workspace, which comes from vLLM's workspace manager.

        Args:
            forward: the function.
            nbytes: size of the workspace in bytes, from the number of tokens and of experts per token.
        """

    def stock(
        self,
        class_name: str,
        *,
        weights: str = "",
        inputs: str = "",
        swizzled: bool = False,
        plan: ShardPlan | None = None,
        scales: tuple[Tensor, ...] = (),
        problem: Problem | None = None,
        tensors: Tensors | None = None,
        group: int = 0,
        apply_router_weight_on_input: bool = False,
    ) -> Any:
        """An instance of one of vLLM's own expert classes, built for this layer.

        Args:
            class_name: ``module:Class``, as in `Backend.stock_class`.
            weights: the weight type in the class's quant config, named as in vLLM (``fp8``, ``int4``, ...); "" for
                the scheme's own name.
            inputs: the type to which vLLM's prepare step quantizes activations before the class gets them (``mxfp8``,
                ``fp8_block128``: one scale per 128); "" to leave them alone.
            swizzled: the prepare step orders the scales of activations in tiles of 128 rows x 4.
            plan: set when the class, and the layer that calls it, must see padded sizes.
            scales: scales of both weights as the class takes them; empty when they are those in `tensors`.
            problem: for classes that need sizes besides those in vLLM's two configs.
            tensors: kernel tensors of the layer, for the same classes.
            group: input features that share one scale, for classes that cannot tell it from their tensors.
            apply_router_weight_on_input: vLLM's prepare step multiplies the input by the router's weight. The class
                then gets weights of one, because some classes multiply once more.
        """


class Backend(ABC):
    """One way to run the experts of a layer. Instances hold no state.

    A backend declares most of itself as class attributes. Where an answer depends on the layer or on the machine, it
    overrides the method of the same meaning instead: `priority`, `plan`, `activations`, `numerics`.

    Attributes:
        name: unique name, used by the setting `backend` and in decisions.
        schemes: weight formats of the layers that it can run.
        capabilities: the layers and machines that it supports, as data.
        rules: conditions that `capabilities` cannot express.
        static_priority: rank among the candidates of a layer while nothing has been measured; the lowest goes first.
        activation_precision: precision in which the experts' inputs enter both products.
        arithmetic: what it computes with, in words; ``{dtype}`` stands for the model's dtype.
        padding: the hidden and the intermediate size are zero-padded to multiples of these two; None for no padding.
        vllm_names: values of vLLM's ``--moe-backend`` that select this backend.
        stock_class: the vLLM expert class that it wraps, ``module:Class``; "" when it wraps none.
        stock_weight_key: vLLM's name of the weight format (a constant of ``quant_utils``) in questions to that class;
            "" for the usual one of the scheme.
        check_stock_class: ask that class too before the backend runs. False when the class demands more than its
            kernel needs; the self-check decides then.
        monolithic: the kernel routes tokens itself: it takes router logits instead of routed ids.
        precompiled: the kernels come compiled, so that no call compiles anything.
        triton_release_error: how far its times move with another minor release of Triton: root mean square of the
            logarithm of their ratio. Measured from 3.6 to 3.8 on an H200 where a backend sets it; the default is the
            largest that was measured, vLLM's kernel for integers.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[SchemeName, ...]]
    capabilities: ClassVar[Capabilities]
    rules: ClassVar[tuple[Rule, ...]] = ()
    static_priority: ClassVar[float]
    activation_precision: ClassVar[ActivationPrecision]
    arithmetic: ClassVar[Numerics]
    padding: ClassVar[tuple[int, int] | None] = None
    vllm_names: ClassVar[tuple[str, ...]] = ()
    stock_class: ClassVar[str] = ""
    stock_weight_key: ClassVar[str] = ""
    check_stock_class: ClassVar[bool] = True
    monolithic: ClassVar[bool] = False
    precompiled: ClassVar[bool] = False
    triton_release_error: ClassVar[float] = 1.2

    def missing_attributes(self) -> list[str]:
        """Names of the required attributes that are neither set nor replaced by a method."""
        methods = {"static_priority": "priority", "activation_precision": "activations", "arithmetic": "numerics"}
        missing = [name for name in ("name", "schemes", "capabilities") if not hasattr(self, name)]
        for attribute, method in methods.items():
            if not hasattr(self, attribute) and getattr(type(self), method) is getattr(Backend, method):
                missing.append(attribute)
        return missing

    @property
    def stock_class_name(self) -> str:
        """Name of the vLLM expert class that it wraps, without its module; "" when it wraps none."""
        return self.stock_class.rpartition(":")[2]

    def plan(self, problem: Problem, device: Device) -> ShardPlan:
        """The sizes that the kernel sees: the layer's own, padded as `padding` says."""
        if self.padding is None:
            return ShardPlan(problem.hidden_size, problem.intermediate_size)
        return padded_plan(problem, *self.padding)

    def check(self, problem: Problem, device: Device) -> Verdict:
        """Whether this backend can run the layer on the machine, with every rule that fails."""
        rules = (*lora.LORA_RULES, *self.rules) if self.capabilities.lora else self.rules
        reasons = violations(self.capabilities, rules, problem, device, lambda other: self.plan(other, device))
        return Rejected(reasons) if reasons else Accepted()

    def priority(self, problem: Problem, device: Device) -> float:
        """Rank among the candidates while nothing has been measured, lowest first: `static_priority`."""
        return self.static_priority

    def only_by_name(self, problem: Problem, device: Device) -> str:
        """Why a backend that can run a layer runs it only when it is asked for by name; "" if it may be chosen.

        Where nothing else is left, stock vLLM gets the layer, or the start ends with an error that says how to ask.
        """
        return ""

    def activations(self, problem: Problem) -> ActivationPrecision:
        """Precision in which the experts' inputs enter both products: `activation_precision`."""
        return self.activation_precision

    def numerics(self, problem: Problem) -> Numerics:
        """What the backend computes with: `arithmetic`, with the model's dtype filled in."""
        weights, activations, sums = (
            text.format(dtype=problem.dtype)
            for text in (self.arithmetic.weights, self.arithmetic.activations, self.arithmetic.accumulate)
        )
        return Numerics(weights, activations, sums)

    def tiles(self, problem: Problem, tokens: int, most: int) -> tuple[str, ...]:
        """Tile configurations that may be faster than the backend's own choice.

        Args:
            problem: the layer.
            tokens: number of tokens of a call.
            most: the largest number of configurations to return.

        Returns:
            JSON of each configuration, the most promising first; empty for a backend without configurations.
        """
        return ()

    def use_tile(self, problem: Problem, tile: str) -> AbstractContextManager[None]:
        """A context in which calls run with one configuration of `tiles`, to time it."""
        return nullcontext()

    def compile_keys(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable] | None:
        """The kernels that must be compiled before a call runs, so that tuning compiles each once for all layers.

        Args:
            problem: the layer.
            tokens: number of tokens of the call.
            tile: a configuration of `tiles`; "" for the backend's own choice.

        Returns:
            A key for each kernel; equal keys mean the same compiled kernel. Empty when nothing is compiled, None when
            the backend does not know.
        """
        return frozenset() if self.precompiled else None

    def hand_overs(self, problem: Problem, most: int) -> tuple[int, ...]:
        """Numbers of tokens after which another of the backend's kernels takes over.

        The check of a layer at load calls what takes over last, unless the layer's calls are too small for it. On a GPU
        it makes one call with many tokens in any case.

        Args:
            problem: the layer.
            most: most tokens of a call.

        Returns:
            Numbers from 1 to ``most - 1``, ascending; empty for a single kernel, and where the backend does not know.
        """
        return ()

    def few_tokens(self, problem: Problem) -> TokenRange | None:
        """Which backend runs a layer's calls with few tokens, and up to how many, where this one was asked for by name.

        That backend must have this one's `layout`, so that both run on the same tensors, and lose no more than this one
        in `numerics`.

        Returns:
            The backend and the largest number of tokens; None where this backend runs all calls.
        """
        return None

    def layout(self, problem: Problem, plan: ShardPlan) -> str:
        """Name of the layout that `convert` produces.

        Two backends that return the same name convert to the same tensors, bit for bit, and can share them.
        """
        return f"{self.name} {plan.hidden_size}x{plan.intermediate_size} {plan.layout}".rstrip()

    def validate_weights(self, expert: Tensors, problem: Problem) -> str:
        """Why the backend cannot represent an expert's loaded weights; "" when it can.

        Called for every local expert before any is converted, by backends that override it. After a refusal the next
        candidate is taken; the start fails if the backend was chosen explicitly or the self-check is strict. Unlike
        `convert` it may depend on values.

        Args:
            expert: canonical tensors of one expert, without the leading expert dimension. Not modified.
            problem: the layer.

        Returns:
            Where the weights do not fit, with numbers, and what would help.
        """
        return ""

    @abstractmethod
    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Kernel tensors of one expert from its canonical tensors.

        Called once with meta tensors before weights are loaded, to learn the storage that the layer needs, and then
        once for each expert: no shape and no branch may depend on values.

        Args:
            expert: canonical tensors of one expert, without the leading expert dimension. Not modified.
            problem: the layer.
            plan: this backend's own plan for it.

        Returns:
            Tensors by name, of the same shape and dtype for every expert. They are of torch's own class, dense, of a
            dtype that torch can copy, and on the expert's device. A tensor that the kernel takes as it is may be
            returned itself. Tensors that the kernel does not need are left out; new names may be added.
        """

    @abstractmethod
    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """The object that vLLM's modular kernel runs, made by `builder`.

        Args:
            tensors: kernel tensors of the layer, `[local_experts, ...]` each. A weight reload refills them in place;
                they never move.
            problem: the layer.
            plan: this backend's own plan for it.
            builder: vLLM's side.
        """
