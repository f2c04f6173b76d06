"""What the Humming backends share: limits, layout, and how vLLM's classes are made.

Weights and scales are those of the package humming-kernels for MXFP8 weights and 16-bit activations: e4m3 codes in
register order, e8m0 scales. The library pads rows to a multiple of 256 and columns to one of 128, at the end of the
matrix and not of its halves, and knows the unpadded sizes: nobody outside sees padded ones. Its kernels fill inputs
beyond the columns with zeros and store no rows beyond, so that padding may hold anything finite.

Sources for the last: the package humming-kernels, ``memory/g2s_loader/loader_a.cuh`` and ``epilogue/gmem_writer.cuh``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, ClassVar

from ..compat import since
from ..compat.order import mxfp8_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import round_up
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem, SchemeName
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule, at_least
from ._stock import activation_rule

if TYPE_CHECKING:
    from torch import Tensor

_ONE_ORDER_SINCE = "0.1.17"
"""First release of humming-kernels whose wgmma kernels read codes in the order of its mma kernels."""

ROW_MULTIPLE, COLUMN_MULTIPLE = 256, 128
"""What the library pads rows and columns to."""

ONE = 127
"""The e8m0 code of 1.0, which padded scales get."""


def grouped(problem: Problem, device: Device) -> bool:
    """Whether vLLM runs the layer with Humming's grouped kernels rather than its indexed ones."""
    return problem.parallel.ep > 1 and since.reached(since.HUMMING_GROUPED, device)


def code_order(device: Device) -> str:
    """The order of a lane's codes that the installed kernels read; see `vllm_moe_oracle.layouts.pack`."""
    old = not at_least(device.packages.get("humming-kernels", _ONE_ORDER_SINCE), _ONE_ORDER_SINCE)
    return "transposed" if old and device.capability // 10 == 9 else "interleaved"


def sums(problem: Problem) -> str:
    """What sums have for a type.

    Where few tokens leave multiprocessors idle, the library gives a product's columns to several blocks, and each adds
    its rounded sum to the output; see `few_parts` for how many. Not with batch invariance. On sm_90 however few columns
    a product has, in every release that vLLM asked for; below sm_90 only from 1025 columns on, of which nothing is said
    here: hidden sizes are larger.

    Source: the package humming-kernels, ``get_heuristics_config`` (stream-K) and ``epilogue/gmem_writer.cuh``.
    """
    if problem.batch_invariant:
        return "float32"
    return f"float32, and those of parts of a product of few tokens in {problem.dtype}"


MOST_PARTS = 2
"""How many multiprocessors a block of a product gets at most."""


def few_parts(experts: Any, problem: Problem, multiprocessors: int) -> None:
    """Launches the library's kernels for few tokens on fewer multiprocessors, so that no sum is cut into many parts.

    By its own configurations the library cuts the columns of all blocks of a product into as many equal pieces as there
    are multiprocessors: up to ten for a block. Each piece's sum is rounded to 16 bits and added to the output, which is
    rounded again, from four pieces on in any order. With `MOST_PARTS` multiprocessors for a block there are as many
    parts, one more where pieces do not end with a block. The last wave of more blocks than multiprocessors is cut as
    the library has it: most blocks of such a product are whole. What is launched is the same kernel: how many
    multiprocessors it gets belongs to a configuration, and does not ask for compiling.

    On an H200, one token of Kimi-K2 over eight ranks in int4, groups of 32: an error of 5.3e-3 instead of 6.9e-3, in
    44.5 us instead of 37.0 (vLLM 0.33.0; 5.6e-3 instead of 6.3e-3 in 0.26.0). Of one part each, 4.5e-3 in 55 us.
    Experts of Nemotron without a gate, over two ranks in MXFP8: 5.9e-3 instead of 6.3e-3.

    A call's blocks are taken to be one for each of its choices and each step of rows, every choice another expert:
    where tokens share experts there are fewer, and more parts, as by the library's own. With expert parallelism a
    call's choices are the rank's share of all, by which vLLM looks up configurations; the rank that every other waits
    for has more (two standard deviations are counted), and all its blocks get a multiprocessor at once.

    Args:
        experts: an instance of one of vLLM's Humming classes; its configurations are replaced, not changed: the library
            keeps them for other layers.
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
                last = min(to or 1 << 30, (room * blocks - 1) // (MOST_PARTS * steps))
                for choices in range(above + 1, last + 1):
                    places = steps * max(MOST_PARTS * choices, _busiest(choices, problem.parallel.ep))
                    found.append((choices - 1, choices, {**config, "num_sms": min(-(-places // blocks), room)}))
            if last < (to or 1 << 30):
                found.append((max(above, last), to, config))
        # By name: all of vLLM's classes over the library have these, and read them at each call.
        setattr(experts, f"{name}_tuning_config", found)
        setattr(experts, f"{name}_tuning_config_str", json.dumps(found))


def _busiest(choices: int, ranks: int) -> int:
    """Choices of a rank that has many, where so many are the mean of all ranks'."""
    return math.ceil(choices + 2 * math.sqrt(choices * (1 - 1 / ranks)))


def built(backend: Backend, tensors: Tensors, problem: Problem, builder: Builder) -> Any:
    """The stock class of a Humming backend; on a GPU its sums have few parts, see `few_parts`."""
    import torch

    experts = builder.stock(backend.stock_class, problem=problem, tensors=tensors)
    weights = tensors["w13"]
    if weights.is_cuda:
        card = torch.cuda.get_device_properties(weights.device)
        few_parts(experts, problem, card.multi_processor_count)
    return experts


def all_at_once(name: str, problem: Problem) -> frozenset[Hashable]:
    """What a layer's first call compiles: the library has kernels for ranges of numbers of tokens, and makes all."""
    return frozenset({(name, dataclasses.replace(problem, layer=""))})


class Humming(Backend):
    """MXFP8 weights through one of vLLM's classes over Humming.

    Attributes:
        kind: ``indexed`` or ``grouped``: how the kernel finds a token's rows.
    """

    kind = "indexed"
    schemes: ClassVar[tuple[SchemeName, ...]] = ("mxfp8",)
    vllm_names = ("humming",)
    limits = Limits(
        # From sm_100 on, the order of the codes depends on the CUDA compiler that the library finds.
        capabilities=((80, 100),),
        # Its float16 kernels squeeze the scales into five bits.
        dtypes=("bfloat16",),
        packages={"humming-kernels": "0.1.10", "vllm": since.HUMMING},
        gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
        ungated=("silu", "gelu", "gelu_tanh", "relu2"),
        parameters=True,
        bias=True,
        bits=(8,),
        groups=(MX_BLOCK,),
        eplb=True,
    )

    def plan(self, problem: Problem, device: Device) -> Plan:
        """The problem's own sizes: the kernels know what their tensors are padded with."""
        return Plan(problem.hidden_size, problem.intermediate_size, layout=code_order(device))

    def estimate(self, problem: Problem, device: Device) -> float:
        """Directly before Marlin on sm_90, behind it elsewhere, as in stock."""
        return mxfp8_place("humming" if self.kind == "indexed" else "humming_grouped", device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights."""
        return Numerics("converted exactly to bfloat16, scaled there", f"left in {problem.dtype}", sums(problem))

    def compiled(self, problem: Problem, tokens: int, tile: str = "") -> frozenset[Hashable]:
        """All that any number of tokens needs, with the first call."""
        return all_at_once(self.name, problem)

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads and orders codes, scales and biases.

        Returns:
            ``w13`` int32 `[K/16, 4 N]`, ``w13_scale`` float8_e8m0fnu `[K/32, N]`, ``w13_bias`` `[N]` in the model's
            dtype, and the same of ``w2``, with N and K padded.
        """
        import torch

        from ..layouts.pack import pack_tiles
        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import order_bias, order_group_scales

        converted = {}
        for name in ("w13", "w2"):
            codes, scales = expert[name], expert[f"{name}_scale"]
            rows, columns = round_up(codes.shape[0], ROW_MULTIPLE), round_up(codes.shape[1], COLUMN_MULTIPLE)
            codes = pad_rows(pad_columns(codes, columns), rows)
            converted[name] = pack_tiles(codes, "transposed" if plan.layout == "transposed" else "interleaved")
            scales = pad_rows(pad_columns(scales, columns // MX_BLOCK, ONE), rows, value=ONE)
            converted[f"{name}_scale"] = order_group_scales(scales).view(torch.float8_e8m0fnu)
            if f"{name}_bias" in expert:
                bias = expert[f"{name}_bias"].to(getattr(torch, problem.dtype))
                converted[f"{name}_bias"] = order_bias(pad_rows(bias, rows))
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class, with the library's description of both matrices, and sums of few parts."""
        return built(self, tensors, problem, builder)


def kind_rule(kind: str) -> Rule:
    """vLLM itself decides between the indexed and the grouped kernels."""
    return Rule(
        "humming.kind",
        lambda problem, device: grouped(problem, device) == (kind == "indexed"),
        lambda problem, device: (
            f"vLLM runs Humming's {'grouped' if grouped(problem, device) else 'indexed'} kernels where experts are "
            + (f"spread over {problem.parallel.ep} ranks" if problem.parallel.ep > 1 else "not spread over ranks")
        ),
    )


UNGATED = Rule(
    "activation.since",
    lambda problem, device: not problem.activation.gated and not since.reached(since.HUMMING_UNGATED, device),
    lambda problem, device: (
        f"vLLM runs Humming's kernels on experts without a gate ({problem.activation.name}) since "
        f"{since.HUMMING_UNGATED}; before, its own conversion takes their first matrix for one of twice as many rows, "
        "and no layer of its own is there to compare with"
    ),
)
"""For MXFP8."""

RULES = (activation_rule(swigluoai_since=since.HUMMING_HALVES),)
"""Rules of both kinds."""
