"""What the backends over OpenAI's package triton_kernels share: layouts, and the package's own tensor types.

Every supported vLLM vendors one version of the package, that of Triton 3.5.1, but prefers an installed one, whose
layouts and interface differ. These backends are rejected when one is installed.

Weights stay e2m1 with e8m0 scales per 32 in memory. On Hopper codes and scales have the register order of
`layouts.triton_kernels`. On Blackwell codes are rows, and scales are tiles of 128 rows x 4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.capabilities import Capabilities, Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import MX_BLOCK, Device, Problem
from ..core.sharding import round_up
from ..releases import min_versions
from ._contract import Builder, Tensors
from ._padding import order_rows_for_stock, pad_expert
from ._stock import StockBackend, StockDifference
from ._stock_priority import gpt_oss_priority

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "triton-kernels"
_INTERMEDIATE_MULTIPLE = 64
"""Columns of one block of ordered codes; stock pads the intermediate size to it too."""
_TILE_ROWS, _TILE_GROUPS = 128, 8
"""Blocks of scales on Blackwell."""
_ROW_BYTES = 128
"""Bytes of a row of codes on Blackwell, of which a copy engine reads whole multiples."""

_OPT_FLAGS_CONSTRAINTS: dict[str, dict[str, Any]] = {
    "hopper": {"split_k": 1},
    "blackwell": {"is_persistent": True, "epilogue_subtile": 1},
}
"""What vLLM tells the package about its choice of tiles, by layout."""


class TritonKernelsBackend(StockBackend):
    """A backend over one of vLLM's classes over triton_kernels. Scales of 2**-127 count as zero.

    Attributes:
        gpt_oss_only: only vLLM's list for gpt-oss has the class.
        sm120_priority: its `priority` in that list on sm_120, whose little shared memory puts it behind Marlin; None
            for no change.
    """

    schemes = ("mxfp4",)
    stock_kernel = "TRITON"
    stock_differences: ClassVar[tuple[StockDifference, ...]] = (
        StockDifference(("sm_110",), "nobody has run the package on it"),
    )
    activation_precision = "16bit"
    triton_release_error = 0.1
    arithmetic = Numerics(
        "converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}; the router's weights rounded to it"
    )
    padding = (1, _INTERMEDIATE_MULTIPLE)
    capabilities = Capabilities(
        compute_capabilities=((90, 110), (120, 130)),
        dtypes=("bfloat16",),
        gated=("swigluoai",),
        activation_params=True,
        bias=True,
        hidden_multiple=_INTERMEDIATE_MULTIPLE,
        intermediate_multiple=_INTERMEDIATE_MULTIPLE,
    )
    gpt_oss_only: ClassVar[bool] = True
    sm120_priority: ClassVar[float | None] = None

    def plan(self, problem: Problem, device: Device) -> ShardPlan:
        """The intermediate size, zero-padded to whole blocks of codes, and the layout of the device."""
        layout = "hopper" if device.capability // 10 == 9 else "blackwell"
        return dataclasses.replace(super().plan(problem, device), layout=layout)

    def priority(self, problem: Problem, device: Device) -> float:
        """The position in vLLM's lists; see `gpt_oss_priority` and `sm120_priority`."""
        priority = gpt_oss_priority(self.static_priority, problem, device, only=self.gpt_oss_only, quantizes=False)
        on_sm120 = device.kind == "cuda" and device.capability // 10 == 12
        if on_sm120 and self.sm120_priority is not None and priority == self.static_priority:
            return self.sm120_priority
        return priority

    def layout(self, problem: Problem, plan: ShardPlan) -> str:
        """The same for all classes over the package."""
        return f"triton_kernels {plan.layout} {plan.hidden_size}x{plan.intermediate_size}"

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Pads, orders codes and scales, and makes biases float32.

        Returns:
            On Hopper ``w13`` uint8 `[R/4, 2 H]` and ``w13_scale`` uint8 `[R/32, H]`; on Blackwell `[R, H/2]` with rows
            of whole 128 bytes, and `[R, H/32]` in tiles. R and the number of groups are padded to whole blocks. The
            same of ``w2``; biases float32 `[R]` and `[H]` with the plan's sizes.
        """
        import torch

        from ..layouts.padding import pad_columns, pad_rows
        from ..layouts.scales import swizzle_scales
        from ..layouts.triton_kernels import swizzle_hopper_codes, swizzle_hopper_scales

        full = order_rows_for_stock(pad_expert(expert, problem, plan), problem)
        converted = {}
        for name in ("w13", "w2"):
            codes, scales = full[name], full[f"{name}_scale"]
            if plan.layout == "hopper":
                converted[name], converted[f"{name}_scale"] = swizzle_hopper_codes(codes), swizzle_hopper_scales(scales)
            else:
                converted[name] = pad_columns(codes, round_up(codes.shape[1], _ROW_BYTES))
                groups, rows = round_up(scales.shape[1], _TILE_GROUPS), round_up(scales.shape[0], _TILE_ROWS)
                converted[f"{name}_scale"] = swizzle_scales(pad_rows(pad_columns(scales, groups), rows))
            if f"{name}_bias" in full:
                converted[f"{name}_bias"] = full[f"{name}_bias"].to(torch.float32)
        return converted

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """An instance of the stock class that gets the package's tensor types over the layer's memory."""
        # vLLM registers the package under this name when it imports the class.
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints

        update_opt_flags_constraints(_OPT_FLAGS_CONSTRAINTS[plan.layout])
        sizes = {"w13": (plan.hidden_size, _w13_rows(problem, plan)), "w2": (plan.intermediate_size, plan.hidden_size)}
        weights, scales = {}, []
        for name, (columns, rows) in sizes.items():
            weights[name], precision = _wrap_matrix(tensors, name, rows, columns, plan.layout)
            scales.append(precision)
        experts = builder.stock(self.stock_class, scales=tuple(scales))
        run = experts.apply
        experts.apply = lambda **arguments: run(**arguments | {"w1": weights["w13"], "w2": weights["w2"]})
        if not self.monolithic:
            size = experts.moe_problem_size
            experts.moe_problem_size = lambda x, w1, w2, ids: size(x, weights["w13"], weights["w2"], ids)
        return experts


def _w13_rows(problem: Problem, plan: ShardPlan) -> int:
    return plan.intermediate_size * (2 if problem.activation.gated else 1)


def _wrap_matrix(tensors: Tensors, name: str, rows: int, columns: int, layout: str) -> tuple[Any, Any]:
    """The package's tensor of a matrix's codes, and its precision config with the scales.

    Both are `[E, columns, rows]` and share memory with `tensors`.
    """
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, Storage, Tensor
    from triton_kernels.tensor_details import layout as layouts

    codes, scales = tensors[name], tensors[f"{name}_scale"]
    experts = codes.shape[0]
    in_memory, groups = [experts, columns // 2, rows], columns // MX_BLOCK
    if layout == "hopper":
        groups = scales.shape[2] // 32
        values = Storage(codes.mT, layouts.HopperMXValueLayout(in_memory, mx_axis=1))
        factors = Storage(scales.mT, layouts.HopperMXScaleLayout([experts, groups, rows], mx_axis=1))
    else:
        values = Storage(codes.mT, layouts.BlackwellMXValueLayout(in_memory))
        tiles = scales.view(1, experts * scales.shape[1] // _TILE_ROWS, scales.shape[2] // 4, 2, 256)
        factors = Storage(tiles, layouts.BlackwellMXScaleLayout([experts, groups, rows]))
    precision = PrecisionConfig(
        weight_scale=Tensor(factors, dtype=factors.data.dtype, shape=[experts, groups, rows]),
        flex_ctx=FlexCtx(rhs_data=InFlexData()),
    )
    return Tensor(values, dtype=FP4, shape=[experts, columns, rows]), precision


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


RULES = (
    Rule(
        "triton_kernels.version",
        lambda problem, device: PACKAGE in device.packages,
        lambda problem, device: (
            f"knows the triton_kernels that vLLM brings; {device.packages[PACKAGE]} is installed, which vLLM prefers"
        ),
        "pip uninstall triton_kernels",
    ),
    Rule(
        "capability.vllm_version",
        lambda problem, device: (
            device.capability >= 120 and not min_versions.vllm_at_least_on(device, min_versions.TRITON_KERNELS_SM120)
        ),
        lambda problem, device: f"runs on sm_{device.capability} since vLLM {min_versions.TRITON_KERNELS_SM120}",
    ),
    Rule(
        "top_k.power_of_two",
        lambda problem, device: (
            not _is_power_of_two(problem.top_k)
            and not min_versions.vllm_at_least_on(device, min_versions.TRITON_KERNELS_LOCAL_IDS)
        ),
        lambda problem, device: (
            f"takes {problem.top_k} experts per token, which is not a power of two, since vLLM "
            f"{min_versions.TRITON_KERNELS_LOCAL_IDS}"
        ),
    ),
)
"""Rules of all classes."""

EMPTY_SLOTS_RULE = Rule(
    "expert_parallel.vllm_version",
    lambda problem, device: (
        problem.parallel.ep > 1 and not min_versions.vllm_at_least_on(device, min_versions.TRITON_KERNELS_LOCAL_IDS)
    ),
    lambda problem, device: (
        f"takes an empty slot for the last expert before vLLM {min_versions.TRITON_KERNELS_LOCAL_IDS}; experts are "
        f"spread over {problem.parallel.ep} ranks"
    ),
    "tensor parallelism",
)
"""A rule of the classes that take routed ids."""
