"""vLLM's kernel for 16-bit experts on x86 CPUs, with weights that are dequantized once, as they load.

The kernel is the one that vLLM runs unquantized experts with, so a layer takes the time of the same layer in the
model's dtype, and its memory: twice a checkpoint's in 8 bits, four times one's in 4 bits. A model for which the
machine has too little memory is refused (`_too_large`).

On a processor without bfloat16 instructions the operator cuts numbers off where others round them: what enters the
second product, and the output. Both get smaller, which a factor on the routing weights, which stay in float32, makes up
for on average. The output is off by 2.3e-3 of its norm then, instead of 6.0e-3. One rounding to nearest costs 1.65e-3,
so two, as on other processors, cost about as much (SmolLM2-135M in MXFP4, random inputs, vLLM 0.32.0, AVX2).

vLLM's class over the operator cannot be used: it packs weights itself, for layers without quantization.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from ..core.activations import changed_parameters, with_defaults
from ..core.capabilities import Capabilities, Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import Device, Problem
from ..core.sharding import padded_plan
from ._contract import Backend, Builder, Tensors
from ._cpu import fill_empty_slots, require_operator, write_contiguous

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_ROWS = 16
"""Rows of a block of the layout for vector instructions."""
_MULTIPLE = 32
"""The operator's tiles have so many rows, and AMX's so many columns."""
_AMX = ("amx_tile", "amx_bf16")
_CUT_OFF = 2.0**-9 / math.log(2)
"""Part of a number that is lost on average when it is cut to the 8 bits of bfloat16: half of 2**-7 for a significand of
1, half of that for one close to 2, and logarithms of significands are spread evenly."""
_MEMORY_SHARE = 0.7
"""Part of the machine's memory that experts may take. The rest of the model, its cache and the system need theirs."""


def _memory_gib(problem: Problem) -> float:
    """Memory of the model's experts in the model's dtype, on all ranks."""
    # By the number of all experts: ranks may hold different numbers, and must come to one verdict.
    weights = (problem.w13_rows + problem.intermediate_size) * problem.hidden_size * problem.num_experts
    return weights * _itemsize(problem) * max(problem.num_layers, 1) * problem.parallel.tp / 2**30


def _itemsize(problem: Problem) -> int:
    return 4 if problem.dtype == "float32" else 2


def _too_large(problem: Problem, device: Device) -> bool:
    """Whether experts take more than their part of the memory. Ranks are taken to share one machine."""
    return device.memory_gib > 0 and _memory_gib(problem) > _MEMORY_SHARE * device.memory_gib


class CpuDequantized(Backend):
    """All three families of weights. The operator accumulates in float32."""

    name = "cpu_dequantized"
    schemes = ("mxfp8", "mxfp4", "wna16")
    vllm_names = ("cpu",)
    static_priority = 90.0  # after kernels that keep the weights quantized
    activation_precision = "16bit"
    capabilities = Capabilities(
        devices=("cpu",),
        features=("avx2",),
        dtypes=("bfloat16", "float16", "float32"),
        gated=("silu", "gelu", "gelu_tanh", "swigluoai"),
        activation_params=True,
        bias=True,
        bits=(4, 8),
        zero_points=True,
        act_orders=("none", "group", "static"),
        hidden_multiple=_MULTIPLE,
        intermediate_multiple=_MULTIPLE,
        apply_router_weight_on_input=True,
        eplb=True,
    )
    rules = (
        Rule(
            "activation.parameters",
            lambda problem, device: bool(changed_parameters(with_defaults(problem.activation))),
            lambda problem, device: (
                f"has the parameters of {problem.activation.name} built in, and the layer has {problem.activation}"
            ),
        ),
        Rule(
            "dtype.range",
            lambda problem, device: problem.scheme.name != "wna16" and problem.dtype == "float16",
            lambda problem, device: f"float16 has not the range of {problem.scheme.name}'s block scales",
            "serve it with --dtype bfloat16",
        ),
        Rule(
            "memory",
            _too_large,
            lambda problem, device: (
                f"experts of {problem.num_layers or 1} layers take {_memory_gib(problem):.1f} GiB in {problem.dtype}; "
                f"{_MEMORY_SHARE:.0%} of the machine's memory are {_MEMORY_SHARE * device.memory_gib:.1f} GiB"
            ),
            "a machine with more memory; a backend that keeps weights quantized needs less",
        ),
    )

    def plan(self, problem: Problem, device: Device) -> ShardPlan:
        """The intermediate size is padded; the layout is AMX's where the machine has it and the dtype is bfloat16."""
        amx = problem.dtype == "bfloat16" and all(name in device.features for name in _AMX)
        return dataclasses.replace(padded_plan(problem, 1, _MULTIPLE), layout="amx" if amx else "vec")

    def numerics(self, problem: Problem) -> Numerics:
        """MX weights are exact in bfloat16 and float32; integers are rounded once."""
        exact = problem.scheme.name != "wna16"
        how = "exactly " if exact else ""
        rounded = "" if exact or problem.dtype == "float32" else ", rounded once"
        return Numerics(f"dequantized {how}to {problem.dtype} as they load{rounded}", f"left in {problem.dtype}")

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Dequantized weights in the operator's order; rows of ``swigluoai`` alternate gate and up.

        Returns:
            ``w13`` `[R, H]`, ``w2`` `[H, I]` and biases `[R]`, `[H]` in the model's dtype.
        """
        import torch

        from .. import schemes
        from ..layouts.gate_up import interleave_gate_up
        from ..layouts.padding import pad_columns, pad_rows

        scheme, dtype = schemes.module(problem.scheme.name), getattr(torch, problem.dtype)
        inner, alternate = plan.intermediate_size, problem.activation.name == "swigluoai"
        converted = {}
        for name in ("w13", "w2", "w13_bias", "w2_bias"):
            if name not in expert:
                continue
            bias = name.endswith("_bias")
            tensor = (expert[name] if bias else scheme.dequantize_expert(expert, name)).to(dtype)
            if name.startswith("w13"):
                tensor = pad_rows(tensor, inner, 2)
                tensor = interleave_gate_up(tensor) if alternate else tensor
            elif not bias:
                tensor = pad_columns(tensor, inner)
            converted[name] = tensor if bias else _pack(tensor, plan.layout)
        return converted

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """Experts over the operator.

        Raises:
            OracleError: this build of vLLM does not have it.
        """
        import torch

        operator = require_operator("cpu_fused_moe", problem.layer).default
        on_input = problem.routing.apply_router_weight_on_input
        # A bias of the second product is cut once, so it is as much too large as it would be too small.
        factor = None
        if problem.dtype == "bfloat16" and _cuts_off():
            # A tensor: torch would make one of a number in each call, which takes 4 us.
            factor = torch.tensor((1 + _CUT_OFF) ** 2, dtype=torch.float32, device="cpu")

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            if x.shape[0] == 0:
                return
            if on_input:  # as vLLM's prepare step does it: both factors and the product in the model's dtype
                x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
            weights, ids = fill_empty_slots(topk_weights, topk_ids, expert_map)
            weights = weights if factor is None else weights * factor
            others = (
                x.contiguous(), tensors["w13"], tensors["w2"], tensors.get("w13_bias"), tensors.get("w2_bias"),
                weights, ids, False, problem.activation.name, plan.layout,
            )  # fmt: skip
            write_contiguous(out, lambda target: operator(target, *others))

        return builder.from_function(run)


@cache
def _cuts_off() -> bool:
    """Whether the operator of this machine cuts to bfloat16 instead of rounding, by an output in the middle of two
    numbers' upper half: with it the number is the same as without."""
    import torch

    # Dtype and device are explicit: while vLLM loads a model, torch's defaults are the model's.
    plain: Any = {"dtype": torch.bfloat16, "device": "cpu"}
    size = _MULTIPLE
    w13, w2 = torch.zeros(2 * size, size, **plain), torch.eye(size, **plain)
    w13[:size, 0], w13[size:, 0] = 3.0, 1.0  # silu(3), with a significand of 1.43
    x = torch.zeros(1, size, **plain)
    x[0, 0] = 1.0
    packed = [_pack(each, "vec").unsqueeze(0) for each in (w13, w2)]
    ids = torch.zeros(1, 1, dtype=torch.int32, device="cpu")
    found = []
    for weight in (1.0, 1 + 2.0**-8):  # 0.71 of a step more
        out = torch.empty_like(x)
        weights = torch.full((1, 1), weight, dtype=torch.float32, device="cpu")
        torch.ops._C.cpu_fused_moe(out, x, *packed, None, None, weights, ids, False, "silu", "vec")
        found.append(out)
    return torch.equal(*found)


def _pack(matrix: Tensor, layout: str) -> Tensor:
    """A matrix `[N, K]` in the order of one of the operator's instruction sets."""
    import torch

    from ..layouts.row_blocks import pack_row_blocks

    if layout == "vec":
        return pack_row_blocks(matrix, _BLOCK_ROWS)
    packed = torch.empty_like(matrix)
    if matrix.device.type != "meta":
        # Of experts `[E, N, K]`. The order for AMX is the operator's own.
        torch.ops._C.prepack_moe_weight(matrix.contiguous().unsqueeze(0), packed.unsqueeze(0), layout)
    return packed


BACKEND = CpuDequantized()
