"""The input of a decision: one MoE layer on one rank (`Problem`) and the machine that it runs on (`Device`).

Both are frozen, comparable, hashable and serializable as JSON: a laptop can decide for an H200, and a decision can be
repeated from the record that a server wrote.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ..errors import FieldError
from .field_checks import AtLeast, OneOf, check_fields

SchemeName = Literal["mxfp8", "wna16", "mxfp4"]
ActivationPrecision = Literal["16bit", "mxfp8", "mxfp4", "fp8", "fp8_token", "int8"]
ActOrder = Literal["none", "group", "static"]
ActivationFormat = Literal["standard", "batched"]
Placement = Literal["linear", "round_robin"]
_Count = Annotated[int, AtLeast(1)]
_Size = Annotated[int, AtLeast(0)]

_FINER_SCALES: dict[ActivationPrecision, tuple[ActivationPrecision, ...]] = {"fp8": ("mxfp8",)}
"""Precisions that satisfy a declared one as well: the same dtype, with scales for smaller groups."""


def satisfies_precision(consumed: ActivationPrecision, declared: ActivationPrecision) -> bool:
    """Whether a backend's activation precision satisfies the one that the checkpoint declares.

    The model's own dtype always does, because it is at least as accurate.

    Args:
        consumed: precision in which the backend takes activations.
        declared: precision that the checkpoint declares.
    """
    return consumed in ("16bit", declared, *_FINER_SCALES.get(declared, ()))


EVEN_SPLIT_MODEL_TYPE = "gpt_oss"
"""The ``model_type`` whose loader in vLLM splits experts evenly over ranks."""

MX_BLOCK = 32
"""Elements per e8m0 scale in every OCP microscaling (MX) format, specification v1.0, table 1."""

E8M0_BIAS = 127
"""The bias of e8m0 scale codes, which stand for 2**(code - bias); also the code of 1.0."""
E8M0_MAX = 254
"""Largest e8m0 code that is a number: 2**127."""
E8M0_NAN = 255
"""The e8m0 code of NaN."""

_MX_BITS: dict[str, int] = {"mxfp8": 8, "mxfp4": 4}
"""Bits of an element of the MX schemes."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The weight format of a layer's experts in the checkpoint.

    Attributes:
        name: the family of formats.
        bits: bits per weight.
        group_size: input features per scale; -1 for one scale per output row.
        packing: the layout of the checkpoint's tensors, by the name that the scheme's reader uses.
        zero_points: the checkpoint has explicit zero points (asymmetric quantization).
        act_order: whether and how input features were reordered before grouping (GPTQ's ``desc_act``).
        activations: the precision that the checkpoint declares for the experts' inputs. ``16bit`` is the model's own
            dtype. The others are quantized dynamically, per token: ``mxfp8`` and ``mxfp4`` with one e8m0 scale per 32
            features, ``fp8`` (e4m3) with one scale per 128, ``fp8_token`` and ``int8`` with one scale per token.
    """

    name: SchemeName
    bits: int
    group_size: int
    packing: str
    zero_points: bool = False
    act_order: ActOrder = "none"
    activations: ActivationPrecision = "16bit"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.name == "wna16":
            if self.bits < 1 or (self.group_size < 1 and self.group_size != -1):
                raise FieldError(f"{self.bits} bits in groups of {self.group_size}; a group of -1 is a whole row")
        elif (self.bits, self.group_size) != (_MX_BITS[self.name], MX_BLOCK):
            expected = f"{self.name} has {_MX_BITS[self.name]} bits in groups of {MX_BLOCK}"
            raise FieldError(f"{self.bits} bits in groups of {self.group_size}; {expected}")
        elif self.zero_points or self.act_order != "none":
            raise FieldError(f"{self.name} has neither zero points nor act order")

    @property
    def rows_are_separable(self) -> bool:
        """Whether a WNA16 loader can put alternating rows of gate and up apart: no word holds codes or zero points of
        several rows."""
        return self.packing != "awq" and (not self.zero_points or self.packing == "compressed-tensors-int")

    def __str__(self) -> str:
        if self.name != "wna16":
            return f"{self.name} ({self.packing}, activations {self.activations})"
        group = "per channel" if self.group_size == -1 else f"groups of {self.group_size}"
        zero = "with zero points" if self.zero_points else "symmetric"
        order = "" if self.act_order == "none" else f", act order {self.act_order}"
        return f"int{self.bits} {zero}, {group}{order} ({self.packing})"


def mx_scheme(name: Literal["mxfp8", "mxfp4"], packing: str, activations: ActivationPrecision = "16bit") -> Scheme:
    """An MX scheme; its name decides bits and groups. Arguments are attributes of `Scheme`."""
    return Scheme(name, _MX_BITS[name], MX_BLOCK, packing, activations=activations)


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation of an expert, between w13 and w2. `core.activations` has the formula of each name.

    Attributes:
        name: vLLM's name without its suffixes, e.g. ``silu``, ``swigluoai``, ``relu2``. Other names are allowed, since
            a checkpoint may have any; no backend accepts them.
        gated: w13 has gate and up rows, and the result is ``f(gate) * up``; otherwise ``f`` of one half.
        alpha: parameter of the formula; None when the layer states none.
        beta: the same.
        limit: clamp of gate from above and of up from both sides; None for no clamp.
        interleaved: the checkpoint's rows of w13 alternate gate, up, gate, up (gpt-oss).
    """

    name: str
    gated: bool = True
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        parts = [
            f"{key}={getattr(self, key):g}" for key in ("alpha", "beta", "limit") if getattr(self, key) is not None
        ]
        kind = self.name if self.gated else f"{self.name}, not gated"
        return f"{kind} ({', '.join(parts)})" if parts else kind


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens are routed to experts. It matters to monolithic backends, which route inside their kernel.

    Attributes:
        method: name of vLLM's ``RoutingMethodType`` member in lower case (its values differ between releases).
        scoring: ``softmax`` or ``sigmoid``.
        renormalize: the top-k weights are scaled to sum to one.
        num_groups: expert groups of grouped top-k; None without grouping.
        top_k_groups: groups from which a token's experts come; None without grouping.
        correction_bias: a bias is added to the scores for selection only (DeepSeek-V3).
        apply_router_weight_on_input: the router's weight multiplies the expert's input instead of its output.
        hash_routing: a table maps token ids to experts.
    """

    method: str = "unspecified"
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int | None = None
    top_k_groups: int | None = None
    correction_bias: bool = False
    apply_router_weight_on_input: bool = False
    hash_routing: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def of_routed_tokens(self) -> Routing:
        """The part that concerns kernels that get routed tokens."""
        return Routing(apply_router_weight_on_input=self.apply_router_weight_on_input)


def are_groups_ignored(groups: int, experts: int) -> bool:
    """Whether vLLM's `GroupedTopKRouter` chooses among all experts: groups do not divide them, or have one each. (A CPU
    server fails in its first call.)"""
    return groups > 1 and (experts % groups != 0 or experts <= groups)


PADDED_EXPERTS = "experts that the model's code pads with zeros"
"""The last of the features of `features_for_stock`."""


def features_for_stock(lora: bool, batched: bool, padded: bool) -> list[str]:
    """What a layer needs that no or few backends here support, in words: stock vLLM serves it where none does.

    Args:
        lora: adapters reach its experts.
        batched: its all-to-all delivers tokens by expert.
        padded: the model's code pads its experts with zeros.
    """
    words = ("LoRA on experts", "a batched all-to-all", PADDED_EXPERTS)
    return [each for each, needed in zip(words, (lora, batched, padded), strict=True) if needed]


@dataclass(frozen=True, slots=True)
class Parallel:
    """How the layer is distributed over ranks.

    Attributes:
        tp: ranks that shard the intermediate size, as vLLM counts them: tensor-parallel ranks times data-parallel ones;
            1 under expert parallelism.
        ep: expert-parallel ranks, which hold different experts: all of them; 1 without expert parallelism.
        dp: data-parallel ranks.
        format: ``batched`` when the all-to-all delivers `[experts, tokens, hidden]` (e.g. DeepEP low latency).
        placement: vLLM's expert placement: ``linear`` gives a rank contiguous experts, ``round_robin`` every ep-th.
    """

    tp: _Count = 1
    ep: _Count = 1
    dp: _Count = 1
    format: ActivationFormat = "standard"
    placement: Placement = "linear"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def is_batched(self) -> bool:
        """Whether experts get tokens that an all-to-all has sorted by expert."""
        return self.format == "batched"

    @property
    def exchanges_tokens(self) -> bool:
        """Whether an all-to-all moves tokens between data-parallel ranks with different experts."""
        return self.ep > 1 and self.dp > 1

    @property
    def splits_over_dp(self) -> bool:
        """Whether data-parallel ranks take part in sharding the intermediate size."""
        return self.dp > 1 and self.ep == 1 and self.tp % self.dp == 0

    @property
    def shard_words(self) -> str:
        """The ranks that shard the intermediate size, by vLLM's options: ``TP 4``, ``TP 2 x DP 2``."""
        return f"TP {self.tp // self.dp} x DP {self.dp}" if self.splits_over_dp else f"TP {self.tp}"


DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes in which vLLM serves models."""

RANK_LOCAL_FIELDS = ("layer", "local_experts")
"""Fields of a `Problem` that ranks of one layer may differ in, or that are compared otherwise: experts need not divide
evenly among ranks, and layers are compared by name."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One MoE layer on one rank.

    Attributes:
        layer: the module's name, e.g. ``model.layers.3.mlp.experts``; not part of `key`.
        scheme: the weight format in the checkpoint.
        num_experts: experts of the layer on all ranks.
        local_experts: experts on this rank.
        top_k: experts per token.
        hidden_size: the model's hidden size, unpadded.
        intermediate_size: intermediate size of an expert on this rank, unpadded.
        activation: the activation between w13 and w2.
        has_bias: w13 and w2 of every expert have a bias.
        dtype: the model's dtype, one of `DTYPES`.
        routing: how tokens are routed to experts.
        parallel: how the layer is distributed over ranks.
        lora: LoRA adapters may be applied to the experts.
        eplb: expert-parallel load balancing may move experts between ranks while serving.
        batch_invariant: the bits of a token's output must not depend on the rest of the batch.
        ragged_intermediate_size: intermediate size on all ranks together if the shards are not equal:
            `intermediate_size` is then the largest shard, and the last rank has less. 0 for equal shards.
        even_expert_split: the model's loader splits experts evenly over expert-parallel ranks, in every format
            (gpt-oss's).
        num_layers: layers of the model, with experts or without; 0 when unknown.
        unpadded_intermediate_size: intermediate size on all ranks together in the checkpoint, where the model's code in
            vLLM pads experts with zeros (Kimi's): `intermediate_size` is then a padded shard. 0 without padding.
    """

    layer: str
    scheme: Scheme
    num_experts: _Count
    local_experts: _Count
    top_k: _Count
    hidden_size: _Count
    intermediate_size: _Count
    activation: Activation
    has_bias: bool = False
    dtype: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    routing: Routing = field(default_factory=Routing)
    parallel: Parallel = field(default_factory=Parallel)
    lora: bool = False
    eplb: bool = False
    batch_invariant: bool = False
    ragged_intermediate_size: _Size = 0
    even_expert_split: bool = False
    num_layers: _Size = 0
    unpadded_intermediate_size: _Size = 0

    def __post_init__(self) -> None:
        check_fields(self, str(self.layer))
        if self.local_experts > self.num_experts:
            raise FieldError(f"{self.local_experts} local experts of {self.num_experts} in all", where=self.layer)
        if self.top_k > self.num_experts:
            rule = f"{self.top_k} experts for each token, of {self.num_experts} in all"
            raise FieldError(rule, where=self.layer)

    @property
    def w13_rows(self) -> int:
        """Rows of w13 on this rank: twice the intermediate size when gated."""
        return self.intermediate_size * (2 if self.activation.gated else 1)

    @property
    def unsharded_intermediate_size(self) -> int:
        """Intermediate size over all tensor-parallel ranks, without padding."""
        uneven = self.unpadded_intermediate_size or self.ragged_intermediate_size
        return uneven or self.intermediate_size * self.parallel.tp

    def with_activations(self, precision: ActivationPrecision) -> Problem:
        """The layer with inputs in another precision than the checkpoint declares."""
        return dataclasses.replace(self, scheme=dataclasses.replace(self.scheme, activations=precision))

    def as_called(self) -> Problem:
        """The layer as a function over routed tokens sees it. Where an all-to-all sorts tokens by expert, each row is a
        token with one of this rank's experts."""
        if not self.parallel.is_batched:
            return self
        parallel = dataclasses.replace(self.parallel, ep=1, format="standard")
        return dataclasses.replace(self, num_experts=self.local_experts, top_k=1, parallel=parallel)

    def _describe_shard(self) -> str:
        """The intermediate size on this rank and where it comes from: ``48 (768 / TP 16)``, ``736 (of 2880, TP 4)``."""
        if self.parallel.tp == 1:
            return str(self.intermediate_size)
        sign = "of {}," if self.ragged_intermediate_size else "{} /"
        if self.unpadded_intermediate_size:
            sign = "padded, {} /"
        whole = sign.format(self.unsharded_intermediate_size)
        return f"{self.intermediate_size} ({whole} {self.parallel.shard_words})"

    def common_fields(self) -> dict[str, Any]:
        """What the ranks of the layer have in common: every field by its dotted name (``scheme.bits``), without
        `RANK_LOCAL_FIELDS`."""
        found: dict[str, Any] = {}
        for name, value in dataclasses.asdict(self).items():
            if name not in RANK_LOCAL_FIELDS:
                parts = value if isinstance(value, dict) else {"": value}
                found |= {f"{name}.{part}".removesuffix("."): each for part, each in parts.items()}
        return found

    def key(self) -> Problem:
        """The problem without its layer's name. Equal keys get equal decisions, unless an override names a layer."""
        return dataclasses.replace(self, layer="")

    def __str__(self) -> str:
        words = [
            str(self.scheme),
            f"{self.num_experts} experts" + (f" ({self.local_experts} per rank)" if self.parallel.ep > 1 else ""),
            f"top-{self.top_k}",
            f"hidden {self.hidden_size}",
            f"intermediate {self._describe_shard()}",
            str(self.activation),
        ]
        flags = [("biases", self.has_bias), ("LoRA", self.lora), ("EPLB", self.eplb)]
        flags += [("batch invariant", self.batch_invariant), ("batched activations", self.parallel.is_batched)]
        flags += [("round-robin expert placement", self.parallel.placement == "round_robin")]
        return ", ".join(words + [self.dtype] + [name for name, on in flags if on])


DEVICE_KINDS = ("cuda", "cpu", "rocm", "xpu")
"""Kinds of device that rules distinguish."""


@dataclass(frozen=True, slots=True)
class Device:
    """The machine that a decision is for.

    Attributes:
        kind: one of `DEVICE_KINDS`.
        name: the product's name, e.g. ``NVIDIA H200``.
        capability: CUDA compute capability, 90 for sm_90; 0 for other devices.
        sm_count: streaming multiprocessors; 0 for other devices.
        memory_gib: memory of one device in GiB, of a CPU what this process may use; 0 when unknown.
        features: instruction sets that rules depend on, e.g. ``amx_bf16``, ``avx512f``.
        packages: versions of the installed packages that rules depend on, by distribution name.
        driver: version of the GPU's driver; "" when unknown.
    """

    kind: Annotated[str, OneOf(DEVICE_KINDS)]
    name: str
    capability: _Size = 0
    sm_count: _Size = 0
    memory_gib: Annotated[float, AtLeast(0)] = 0.0
    features: tuple[str, ...] = ()
    packages: dict[str, str] = field(default_factory=dict, hash=False)
    driver: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability})" if self.kind == "cuda" else f"{self.name} ({self.kind})"
