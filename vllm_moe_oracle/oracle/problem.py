"""What is to be decided: one MoE layer on one rank (`Problem`) and the machine that it runs on (`Device`).

Both are frozen, comparable, hashable and JSON: a laptop can ask about an H200, and a decision can be repeated from the
record that a server wrote.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

SchemeName = Literal["mxfp8", "wna16", "mxfp4"]
ActivationPrecision = Literal["16bit", "mxfp8", "mxfp4", "fp8", "fp8_token", "int8"]
ActOrder = Literal["none", "group", "static"]
ActivationFormat = Literal["standard", "batched"]
Placement = Literal["linear", "round_robin"]

_NO_COARSER: dict[ActivationPrecision, tuple[ActivationPrecision, ...]] = {"fp8": ("mxfp8",)}
"""What answers a declared precision as well: the same numbers, with scales for smaller groups."""


def answers(consumed: ActivationPrecision, declared: ActivationPrecision) -> bool:
    """Whether a backend that takes activations in one precision does what a layer that declares another asked for.

    Leaving activations in the model's own dtype always does: nobody loses what quantising would have cost.
    """
    return consumed in ("16bit", declared, *_NO_COARSER.get(declared, ()))


EQUAL_EXPERTS = "gpt_oss"
"""The kind of model (``model_type``) whose loader in vLLM cuts experts over ranks into equal parts."""

MX_BLOCK = 32
"""Elements that share one e8m0 scale in every OCP microscaling (MX) format, specification v1.0, table 1."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """What the checkpoint holds for the experts of a layer.

    Attributes:
        name: the family of formats.
        bits: width of one weight code.
        group_size: input features that share one scale; -1 for one scale per output row.
        zero_points: whether the checkpoint has explicit zero points that must be applied (asymmetric).
        act_order: whether input features were reordered before grouping (GPTQ's ``desc_act``), and how.
        packing: the layout of the checkpoint's tensors, as the scheme's reader calls it.
        activations: the precision of the experts' inputs that the checkpoint declares; ``16bit`` is the model's own
            dtype, ``mxfp8`` is e4m3 with one e8m0 scale per 32, ``fp8`` with one per 128, ``fp8_token`` with one
            float32 scale a token, ``int8`` one scale a token, all computed from each token as it comes.
    """

    name: SchemeName
    bits: int
    group_size: int
    packing: str
    zero_points: bool = False
    act_order: ActOrder = "none"
    activations: ActivationPrecision = "16bit"

    def __str__(self) -> str:
        if self.name != "wna16":
            return f"{self.name} ({self.packing}, activations {self.activations})"
        group = "per channel" if self.group_size == -1 else f"groups of {self.group_size}"
        zero = "with zero points" if self.zero_points else "symmetric"
        order = "" if self.act_order == "none" else f", act order {self.act_order}"
        return f"int{self.bits} {zero}, {group}{order} ({self.packing})"


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the two products of an expert.

    Attributes:
        name: vLLM's name without its ``_no_mul`` suffix: ``silu``, ``gelu``, ``gelu_tanh``, ``swigluoai``, ``relu2``,
            ``situ`` (Kimi-K3), ``swiglustep`` (Step-3.5)...
        gated: True: ``f(gate) * up`` over two halves of the first product; False: ``f`` alone over one.
        alpha: factor inside the sigmoid of ``swigluoai``: ``gate * sigmoid(alpha * gate)``. Of ``situ`` the value that
            gate does not pass: ``alpha * tanh(gate / alpha) * sigmoid(gate)``. None where it has none.
        beta: added to ``up`` in ``swigluoai``. Of ``situ`` the value that up does not pass: ``beta * tanh(up / beta)``;
            None leaves up as it is. None where the activation has none.
        limit: gate is clamped from above, up from both sides, to this value; in ``swiglustep`` not gate, but
            ``silu(gate)``. None: no clamp.
        interleaved: the rows of the checkpoint's first product alternate gate, up, gate, up (gpt-oss).
    """

    name: str
    gated: bool = True
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    interleaved: bool = False

    def __str__(self) -> str:
        parts = [
            f"{key}={getattr(self, key):g}" for key in ("alpha", "beta", "limit") if getattr(self, key) is not None
        ]
        kind = self.name if self.gated else f"{self.name}, not gated"
        return f"{kind} ({', '.join(parts)})" if parts else kind


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts; matters to backends that route inside their kernel.

    Attributes:
        method: vLLM's ``RoutingMethodType`` member by name, lower case (its numbers move between releases).
        scoring: ``softmax`` or ``sigmoid``.
        renormalize: the chosen weights are scaled to sum to one.
        num_groups: expert groups of grouped top-k; None when routing is not grouped.
        top_k_groups: groups that a token may choose from; None when routing is not grouped.
        correction_bias: a bias is added to the scores for choosing (DeepSeek-V3).
        weight_on_input: the router's weight multiplies the expert's input instead of its output.
        hashed: experts come from a table over token ids.
    """

    method: str = "unspecified"
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int | None = None
    top_k_groups: int | None = None
    correction_bias: bool = False
    weight_on_input: bool = False
    hashed: bool = False


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the layer is spread over ranks.

    Attributes:
        tp: ranks that cut the intermediate size. 1 under expert parallelism, as in vLLM.
        ep: ranks that hold different experts; 1 without expert parallelism.
        dp: data-parallel ranks.
        format: ``batched`` when the all-to-all delivers `[experts, tokens, hidden]` (DeepEP low latency and alike).
        placement: how experts are dealt out to ranks: ``linear`` gives each neighbours, ``round_robin`` each in turn.
    """

    tp: int = 1
    ep: int = 1
    dp: int = 1
    format: ActivationFormat = "standard"
    placement: Placement = "linear"


@dataclass(frozen=True, slots=True)
class Problem:
    """One MoE layer on one rank.

    Attributes:
        layer: the module's name, e.g. ``model.layers.3.mlp.experts``; not part of `key`.
        scheme: what the checkpoint holds.
        num_experts: experts of the layer over all ranks.
        local_experts: experts that this rank holds.
        top_k: experts per token.
        hidden_size: features of the model's hidden state, unpadded.
        intermediate_size: features between the two products on this rank, unpadded.
        activation: the function between the two products.
        has_bias: both products of every expert add a bias.
        dtype: the model's dtype: ``bfloat16``, ``float16`` or ``float32``.
        routing: how tokens choose experts.
        parallel: how the layer is spread over ranks.
        lora: LoRA adapters may be applied to the experts.
        eplb: experts may move between ranks while serving (expert-parallel load balancing).
        batch_invariant: a token's output must not depend, to the bit, on what else is in the batch.
        whole_intermediate_size: features between the two products over all ranks, where the ranks' shares are not
            equal: `intermediate_size` is then the largest share, and the last rank has less. 0 where they are.
        equal_experts: the model's own loader cuts the experts into equal parts under expert parallelism, whatever they
            are stored as (gpt-oss's).
    """

    layer: str
    scheme: Scheme
    num_experts: int
    local_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    has_bias: bool = False
    dtype: str = "bfloat16"
    routing: Routing = field(default_factory=Routing)
    parallel: Parallel = field(default_factory=Parallel)
    lora: bool = False
    eplb: bool = False
    batch_invariant: bool = False
    whole_intermediate_size: int = 0
    equal_experts: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "local_experts", "top_k", "hidden_size", "intermediate_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.layer}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.local_experts > self.num_experts:
            raise ValueError(f"{self.layer}: {self.local_experts} local experts of {self.num_experts} in all")
        if self.top_k > self.num_experts:
            raise ValueError(f"{self.layer}: top-{self.top_k} of {self.num_experts} experts")

    @property
    def w13_rows(self) -> int:
        """Rows of the first product on this rank: twice the intermediate size when gated."""
        return self.intermediate_size * (2 if self.activation.gated else 1)

    @property
    def full_intermediate_size(self) -> int:
        """Intermediate size over all tensor-parallel ranks."""
        return self.whole_intermediate_size or self.intermediate_size * self.parallel.tp

    def key(self) -> Problem:
        """The problem without its layer's name: equal keys get equal decisions, unless an override names a layer."""
        return dataclasses.replace(self, layer="")

    def __str__(self) -> str:
        words = [
            str(self.scheme),
            f"{self.num_experts} experts" + (f" ({self.local_experts} here)" if self.parallel.ep > 1 else ""),
            f"top-{self.top_k}",
            f"hidden {self.hidden_size}",
            f"intermediate {self.intermediate_size}"
            + (f" of {self.full_intermediate_size}" if self.parallel.tp > 1 else ""),
            str(self.activation),
        ]
        flags = [("biases", self.has_bias), ("LoRA", self.lora), ("EPLB", self.eplb)]
        flags += [("batch invariant", self.batch_invariant), ("batched activations", self.parallel.format == "batched")]
        flags += [("experts dealt out by turns", self.parallel.placement == "round_robin")]
        return ", ".join(words + [self.dtype] + [name for name, on in flags if on])


@dataclass(frozen=True, slots=True)
class Device:
    """The machine that a decision is for.

    Attributes:
        kind: ``cuda``, ``cpu``, ``rocm`` or ``xpu``.
        name: the product's name, e.g. ``NVIDIA H200``.
        capability: CUDA compute capability times ten (90 is sm_90); 0 where there is none.
        sm_count: streaming multiprocessors; 0 where there are none.
        memory_gib: memory of one device in GiB; 0 when unknown.
        features: instruction sets that rules ask for, e.g. ``amx_bf16``, ``avx512f``.
        packages: versions of installed packages that backends need, by distribution name. A package that is not
            installed is absent.
        driver: version of the GPU's driver; "" when unknown.
    """

    kind: str
    name: str
    capability: int = 0
    sm_count: int = 0
    memory_gib: float = 0.0
    features: tuple[str, ...] = ()
    packages: dict[str, str] = field(default_factory=dict, hash=False)
    driver: str = ""

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability})" if self.kind == "cuda" else f"{self.name} ({self.kind})"
