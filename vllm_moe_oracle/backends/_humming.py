"""What the Humming backends share: padding, layouts, and how many parts a product's sums have.

Weights and scales have the layouts of the package humming-kernels for 16-bit activations. The library pads rows to a
multiple of 256 and columns to one of 128, at the end of the matrix and not of its halves. It knows the unpadded sizes:
vLLM never sees padded ones. Its kernels read zeros for inputs beyond the columns and store no rows beyond the end, so
that padding may hold anything finite.

Source: the package humming-kernels, ``memory/g2s_loader/loader_a.cuh`` and ``epilogue/gmem_writer.cuh``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..core.capabilities import Capabilities, Rule, package_at_least
from ..core.decision import Numerics, ShardPlan
from ..core.problem import E8M0_BIAS, Device, Problem, SchemeName
from ..core.sharding import loaded_group_size, round_up
from ..releases import min_versions
from ._contract import Builder, Tensors
from ._padding import order_rows_for_stock
from ._stock import EXPERTS, SM75_DIFFERENCE, StockBackend, StockDifference
from ._stock_priority import prefers_humming
from ._stock_rules import FROM_SM75, STOCK_UNGATED, activation_rule, integer_weights, swigluoai_rule

if TYPE_CHECKING:
    from torch import Tensor

_SINGLE_CODE_LAYOUT_SINCE = "0.1.17"
"""First release of humming-kernels whose wgmma kernels read codes in the order of its mma kernels."""

ROW_MULTIPLE, COLUMN_MULTIPLE = 256, 128
"""Multiples to which the library pads rows and columns of both matrices; vLLM passes them to it."""

_MX = Capabilities(
    compute_capabilities=((80, 100),),
    # Its float16 kernels keep five bits of a scale.
    dtypes=("bfloat16",),
    packages={"humming-kernels": "0.1.10", "vllm": min_versions.HUMMING},
    gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
    ungated=STOCK_UNGATED,
    activation_params=True,
    bias=True,
    apply_router_weight_on_input=True,
    eplb=True,
)

KernelKind = Literal["indexed", "grouped"]
"""How kernels find the rows of an expert's tokens."""

_DIFFERENCES_OF_KIND: dict[KernelKind, tuple[StockDifference, ...]] = {
    "indexed": (),
    "grouped": (
        StockDifference(
            (),
            "the grouped kernels run only where an environment variable asks for them",
            before=min_versions.HUMMING_GROUPED,
        ),
    ),
}
"""Which releases backends over these kernels refuse, whatever the weights."""


def uses_grouped_kernels(problem: Problem, device: Device) -> bool:
    """Whether vLLM runs the layer with Humming's grouped kernels rather than its indexed ones."""
    return problem.parallel.ep > 1 and min_versions.vllm_at_least_on(device, min_versions.HUMMING_GROUPED)


def _kernel_kind_rule(kind: KernelKind) -> Rule:
    """vLLM runs the layer with this kind of kernels, and not with the other."""

    def detail(problem: Problem, device: Device) -> str:
        if problem.parallel.ep == 1:
            return "for expert parallelism only; without it vLLM runs Humming's indexed kernels"
        if kind == "grouped":
            return f"vLLM runs Humming's grouped kernels since {min_versions.HUMMING_GROUPED}; before, its indexed ones"
        return f"not for expert parallelism: over {problem.parallel.ep} ranks vLLM runs Humming's grouped kernels"

    return Rule(
        "humming.kernel_kind",
        lambda problem, device: uses_grouped_kernels(problem, device) == (kind == "indexed"),
        detail,
        has_sibling=True,
    )


@dataclass(frozen=True, slots=True)
class HummingWeights:
    """What backends for one scheme declare, whichever kernels they run.

    Attributes:
        scheme: the scheme.
        capabilities: layers that the library supports.
        rules: conditions on layers and releases.
        stock_differences: what the classes claim and the backends refuse; see `StockBackend`.
    """

    scheme: SchemeName
    capabilities: Capabilities
    rules: tuple[Rule, ...]
    stock_differences: tuple[StockDifference, ...]


WNA16 = HummingWeights(
    "wna16",
    dataclasses.replace(
        _MX,
        compute_capabilities=FROM_SM75,
        dtypes=("bfloat16", "float16"),
        bits=(4, 8),
        groups=(-1, 32, 64, 128),
        zero_points=True,
        act_orders=("none", "static"),
    ),
    (activation_rule(swigluoai_since=min_versions.HUMMING_UNINTERLEAVED),),
    (StockDifference(("situ", "swiglustep"), "the library has a kernel of its own for it, which nobody has run"),),
)
"""Integer weights."""

MXFP4 = HummingWeights(
    "mxfp4",
    _MX,
    (swigluoai_rule(halves_since=min_versions.HUMMING_UNINTERLEAVED),),
    (
        *WNA16.stock_differences,
        SM75_DIFFERENCE,
        StockDifference(
            ("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
            "the order of the codes depends on the CUDA compiler that the library finds",
        ),
    ),
)
"""MXFP4 weights."""

MXFP8 = HummingWeights(
    "mxfp8",
    _MX,
    (
        *WNA16.rules,
        Rule(
            "activation.vllm_version",
            lambda problem, device: (
                not problem.activation.gated
                and not min_versions.vllm_at_least_on(device, min_versions.HUMMING_NON_GATED)
            ),
            lambda problem, device: (
                f"vLLM runs Humming's kernels on experts without a gate ({problem.activation.name}) since "
                f"{min_versions.HUMMING_NON_GATED}; before, its own conversion takes their first matrix for one of "
                "twice as many rows, and no layer of its own is there to compare with"
            ),
        ),
    ),
    (
        *MXFP4.stock_differences,
        StockDifference(
            tuple(f"{name}_no_mul" for name in STOCK_UNGATED),
            "vLLM's conversion takes their first matrix for one of twice as many rows",
            before=min_versions.HUMMING_NON_GATED,
        ),
    ),
)
"""MXFP8 weights."""


def code_layout(device: Device) -> Literal["interleaved", "transposed"]:
    """The order of a lane's codes that the installed kernels read; see `vllm_moe_oracle.layouts.mma_tiles`."""
    installed = device.packages.get("humming-kernels", _SINGLE_CODE_LAYOUT_SINCE)
    old = not package_at_least(installed, _SINGLE_CODE_LAYOUT_SINCE)
    return "transposed" if old and device.capability // 10 == 9 else "interleaved"


def accumulation(problem: Problem) -> str:
    """Type of the sums, in words.

    When few tokens leave multiprocessors idle, the library splits K over several blocks, and each adds its rounded sum
    to the output; see `limit_k_splits`. It does not with batch invariance. It does on sm_90 for any K, in every release
    of the library that vLLM asks for; below sm_90 only from 1025 columns on. This text ignores that limit: hidden sizes
    are larger.

    Source: the package humming-kernels, ``get_heuristics_config`` (stream-K) and ``epilogue/gmem_writer.cuh``.
    """
    if problem.batch_invariant:
        return "float32"
    return f"float32; for few tokens, split-K partial sums in {problem.dtype}"


MAX_K_SPLITS = 2
"""The largest number of multiprocessors that share a tile of a product."""


def limit_k_splits(experts: Any, problem: Problem, multiprocessors: int) -> None:
    """Launches the library's kernels for few tokens on fewer multiprocessors, so that no sum is split into many parts.

    By default the library cuts the K columns of all tiles of a product into as many equal parts as there are
    multiprocessors: up to ten for a tile. Each part's sum is rounded to 16 bits and added to the output, which is
    rounded again; from four parts on, in any order. Here a product gets `MAX_K_SPLITS` multiprocessors for each tile,
    so that a tile has as many parts, or one more where parts do not end with a tile. With more tiles than
    multiprocessors the last wave is cut as the library does it: most tiles of such a product are whole. The kernel is
    the same: the number of multiprocessors belongs to its launch configuration and needs no compilation.

    On an H200, one token of Kimi-K2 over eight ranks in int4 with groups of 32 has an error of 5.3e-3 instead of 6.9e-3
    and takes 44.5 us instead of 37.0 us. With one part for each tile it is 4.5e-3 and 55 us. Nemotron's experts without
    a gate, over two ranks in MXFP8, have an error of 5.9e-3 instead of 6.3e-3.

    A call is assumed to have one tile for each routed token and step of rows, every token with experts of its own.
    Where tokens share experts there are fewer tiles and more parts, as with the library's configuration. With expert
    parallelism vLLM looks configurations up by the rank's share of all routed tokens. The busiest rank, for which the
    others wait, has more (two standard deviations are counted): each of its tiles gets one multiprocessor at once.

    Args:
        experts: an instance of one of vLLM's Humming classes. Its configurations are replaced, not modified: the
            library keeps them for other layers.
        problem: the layer.
        multiprocessors: of the GPU.
    """
    for name, rows in (("w13", problem.w13_rows), ("w2", problem.hidden_size)):
        found: list[tuple[int, int, dict[str, Any]]] = []
        for above, to, config in getattr(experts, f"{name}_tuning_config"):
            last = above
            if config.get("use_stream_k", True):  # as the library takes a configuration that does not say
                steps = -(-round_up(rows, ROW_MULTIPLE) // config["block_shape"][1])
                blocks = config.get("num_ctas_per_sm", 1)
                room = min(config.get("num_sms") or multiprocessors, multiprocessors)
                last = min(to or 1 << 30, (room * blocks - 1) // (MAX_K_SPLITS * steps))
                for choices in range(above + 1, last + 1):
                    places = steps * max(MAX_K_SPLITS * choices, _busiest_rank_slots(choices, problem.parallel.ep))
                    found.append((choices - 1, choices, {**config, "num_sms": min(-(-places // blocks), room)}))
            if last < (to or 1 << 30):
                found.append((max(above, last), to, config))
        # By name: all of vLLM's classes over the library have these, and read them at each call.
        setattr(experts, f"{name}_tuning_config", found)
        setattr(experts, f"{name}_tuning_config_str", json.dumps(found))


def _busiest_rank_slots(choices: int, ranks: int) -> int:
    """Routed tokens of a busy rank when `choices` is the mean of all ranks: two standard deviations more."""
    return math.ceil(choices + 2 * math.sqrt(choices * (1 - 1 / ranks)))


class HummingBackend(StockBackend):
    """A backend over one of vLLM's classes over Humming. Weights convert exactly.

    A subclass names its weights and its kind of kernels, from which the rest follows:
    ``class HummingMxfp8(HummingBackend, weights=MXFP8, kernels="indexed")``. One that names neither has those of its
    base.

    Attributes:
        preferred_priority: its `priority` on devices where vLLM moves Humming directly before Marlin.
        more_differences: those of this backend alone.
    """

    vllm_names = ("humming",)
    stock_kernel = "HUMMING"
    activation_precision = "16bit"
    preferred_priority: ClassVar[float]
    more_differences: ClassVar[tuple[StockDifference, ...]] = ()

    def __init_subclass__(cls, weights: HummingWeights | None = None, kernels: KernelKind | None = None) -> None:
        super().__init_subclass__()
        if weights is None or kernels is None:
            return
        cls.schemes = (weights.scheme,)
        cls.stock_class = f"{EXPERTS}.fused_humming_moe:Humming{kernels.title()}Experts"
        cls.capabilities = weights.capabilities
        cls.rules = (*weights.rules, _kernel_kind_rule(kernels))
        cls.stock_differences = (*weights.stock_differences, *_DIFFERENCES_OF_KIND[kernels], *cls.more_differences)

    def priority(self, problem: Problem, device: Device) -> float:
        """Directly before Marlin on sm_90, as in stock vLLM; in releases that do not move it, behind Marlin."""
        moved = prefers_humming(device) and min_versions.vllm_at_least_on(device, min_versions.HUMMING_FIRST)
        return self.preferred_priority if moved else self.static_priority

    def plan(self, problem: Problem, device: Device) -> ShardPlan:
        """The layer's own sizes: only the library sees the padding."""
        return ShardPlan(problem.hidden_size, problem.intermediate_size, layout=code_layout(device))

    def numerics(self, problem: Problem) -> Numerics:
        """With integers the group scale multiplies in 16 bits, so that a weight is rounded once."""
        weights = "converted exactly to bfloat16 and scaled in bfloat16"
        if problem.scheme.name == "wna16":
            weights = integer_weights(problem)
        return Numerics(weights, f"left in {problem.dtype}", accumulation(problem))

    def compile_keys(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """One key for the layer: its first call compiles the kernels for all numbers of tokens."""
        return frozenset({(self.name, dataclasses.replace(problem, layer=""))})

    def layout(self, problem: Problem, plan: ShardPlan) -> str:
        """The same for both kinds of kernels."""
        sizes = f"{plan.hidden_size}x{plan.intermediate_size}"
        return f"humming_{problem.scheme.name} {sizes} {plan.layout}".rstrip()

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads to the library's multiples and repacks codes, scales, zero points and biases.

        Returns:
            ``w13`` int32 `[K/16, N * bits / 2]`; ``w13_scale`` `[K/g, N]`, float8_e8m0fnu or the model's dtype;
            ``w13_zero_point`` int32 `[K/g, N * bits / 32]`; ``w13_bias`` `[N]` in the model's dtype; the same of
            ``w2``. N and K are padded.
        """
        import torch

        from ..layouts.mma_tiles import distances_from_zero_point, pack_nibbles, pack_tiles
        from ..layouts.padding import pad_columns, pad_rows
        from ..layouts.scales import pack_zero_points, permute_bias, permute_group_scales, permute_scales

        bits, group, dtype = problem.scheme.bits, loaded_group_size(problem), getattr(torch, problem.dtype)
        order: Literal["interleaved", "transposed"] = "transposed" if plan.layout == "transposed" else "interleaved"
        integers = problem.scheme.name == "wna16"
        ordered = order_rows_for_stock(expert, problem) if problem.scheme.name == "mxfp4" else expert
        converted = {}
        for name in ("w13", "w2"):
            codes, scales = ordered[name], ordered[f"{name}_scale"]
            rows = round_up(codes.shape[0], ROW_MULTIPLE)
            columns = round_up(codes.shape[1] * 8 // bits, COLUMN_MULTIPLE)
            groups = 1 if group == -1 else columns // group

            def pad(tensor: Tensor, columns: int, value: int = 0, rows: int = rows) -> Tensor:
                return pad_rows(pad_columns(tensor, columns, value), rows, value=value)

            codes, zeros = pad(codes, columns * bits // 8), None
            if problem.scheme.zero_points:
                zeros = pad(ordered[f"{name}_zero_point"], groups)
                converted[f"{name}_zero_point"] = pack_zero_points(zeros, bits, marlin=False)
            if integers and bits == 8 and problem.dtype == "bfloat16":
                # The kernel converts bytes to bfloat16 through unsigned numbers.
                codes = distances_from_zero_point(codes, zeros)
            converted[name] = pack_nibbles(codes, order) if bits == 4 else pack_tiles(codes, order)
            if integers:
                # The library needs the group size: with one group for all columns it still scales codes.
                converted[f"{name}_scale"] = permute_scales(pad(scales.to(dtype), groups), on_accumulators=group == -1)
            else:
                padded = pad(scales, groups, E8M0_BIAS)
                converted[f"{name}_scale"] = permute_group_scales(padded).view(torch.float8_e8m0fnu)
            if f"{name}_bias" in ordered:
                converted[f"{name}_bias"] = permute_bias(pad_rows(ordered[f"{name}_bias"].to(dtype), rows))
        return converted

    def stock_arguments(self, tensors: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Any]:
        """The library's own description of both matrices comes from the layer and its tensors."""
        return super().stock_arguments(tensors, problem, plan) | {"problem": problem, "tensors": tensors}

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """An instance of the stock class; on a GPU its sums have few parts, see `limit_k_splits`."""
        import torch

        experts = super().build_experts(tensors, problem, plan, builder)
        weights = tensors["w13"]
        if weights.is_cuda:
            limit_k_splits(experts, problem, torch.cuda.get_device_properties(weights.device).multi_processor_count)
        return experts
