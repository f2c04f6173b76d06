"""What the backends over OpenAI's package triton_kernels share: layouts, and tensors as the package wants to see them.

vLLM brings one generation of the package (that of Triton 3.5.1) in every supported release, and prefers another one
that is installed beside it, whose layouts and interface differ: with such a one these backends are refused.

Weights are e2m1 with e8m0 scales per 32 and stay so in memory. On Hopper codes and scales have the register order of
`layouts.triton_kernels`; on Blackwell codes are rows, and scales tiles of 128 rows x 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ..compat import since
from ..compat.order import mxfp4_place
from ..oracle.decision import Numerics, Plan
from ..oracle.planner import padded, round_up
from ..oracle.problem import MX_BLOCK, ActivationPrecision, Device, Problem
from ._contract import Backend, Builder, Tensors
from ._limits import Limits, Rule
from ._mxfp4 import padded_expert

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "triton-kernels"
_MULTIPLE = 64
"""Columns of one block of ordered codes; stock pads the intermediate size to it too."""
_TILE_ROWS, _TILE_GROUPS = 128, 8
"""Blocks of scales on Blackwell."""
_ROW_BYTES = 128
"""Bytes of a row of codes on Blackwell, of which a copy engine reads whole multiples."""

_CONSTRAINTS: dict[str, dict[str, Any]] = {
    "hopper": {"split_k": 1},
    "blackwell": {"is_persistent": True, "epilogue_subtile": 1},
}
"""What vLLM tells the package about its choice of tiles, by layout."""


class TritonKernels(Backend):
    """MXFP4 weights through one of vLLM's classes over triton_kernels.

    Attributes:
        place: its key in stock's order.
    """

    place: ClassVar[str]
    # On Blackwell the scales of all experts are one tensor of tiles.
    dense = True
    schemes = ("mxfp4",)
    limits = Limits(
        capabilities=((90, 110), (120, 130)),
        dtypes=("bfloat16",),
        gated=("swigluoai",),
        parameters=True,
        bias=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=_MULTIPLE,
        intermediate_multiple=_MULTIPLE,
    )

    def plan(self, problem: Problem, device: Device) -> Plan:
        """The intermediate size, zero-padded to whole blocks of codes."""
        found = padded(problem, intermediate_multiple=_MULTIPLE)
        layout = "hopper" if device.capability // 10 == 9 else "blackwell"
        return Plan(found.hidden_size, found.intermediate_size, found.notes, layout)

    def estimate(self, problem: Problem, device: Device) -> float:
        """Stock's place."""
        return mxfp4_place(self.place, problem, device)

    def activations(self, problem: Problem) -> ActivationPrecision:
        """The model's own dtype."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights; scales of 2**-127 count as zero. The router's weights are rounded too."""
        kind = f"left in {problem.dtype}; the router's weights rounded to it"
        return Numerics("converted exactly to bfloat16, scaled there", kind)

    def layout(self, problem: Problem, plan: Plan) -> str:
        """One for all classes over the package."""
        return f"triton_kernels {plan.layout} {plan.hidden_size}x{plan.intermediate_size}"

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads, orders codes and scales, and makes biases float32.

        Returns:
            On Hopper ``w13`` uint8 `[R/4, 2 H]` and ``w13_scale`` uint8 `[R/32, H]`; on Blackwell `[R, H/2]` with rows
            of whole 128 bytes, and `[R, H/32]` in tiles. R and the number of groups are padded to whole blocks. The
            same of ``w2``; biases float32 `[R]` and `[H]` with the plan's sizes.
        """
        import torch

        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import tile_scales
        from ..layouts.triton_kernels import order_hopper_scales, pack_hopper_codes

        full = padded_expert(expert, problem, plan)
        converted = {}
        for name in ("w13", "w2"):
            codes, scales = full[name], full[f"{name}_scale"]
            if plan.layout == "hopper":
                converted[name], converted[f"{name}_scale"] = pack_hopper_codes(codes), order_hopper_scales(scales)
            else:
                converted[name] = pad_columns(codes, round_up(codes.shape[1], _ROW_BYTES))
                groups, rows = round_up(scales.shape[1], _TILE_GROUPS), round_up(scales.shape[0], _TILE_ROWS)
                converted[f"{name}_scale"] = tile_scales(pad_rows(pad_columns(scales, groups), rows))
            if f"{name}_bias" in full:
                converted[f"{name}_bias"] = full[f"{name}_bias"].to(torch.float32)
        return converted

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """The stock class, which is given the package's own tensors over the layer's memory in place of the layer's."""
        # Known under this name since vLLM imported its class, which was asked whether it takes the layer.
        from triton_kernels.matmul_ogs_details.opt_flags import update_opt_flags_constraints

        update_opt_flags_constraints(_CONSTRAINTS[plan.layout])
        sizes = {"w13": (plan.hidden_size, _rows(problem, plan)), "w2": (plan.intermediate_size, plan.hidden_size)}
        weights, scales = {}, []
        for name, (columns, rows) in sizes.items():
            weights[name], precision = _described(tensors, name, rows, columns, plan.layout)
            scales.append(precision)
        experts = builder.stock(self.stock_class, scales=tuple(scales))
        run = experts.apply
        experts.apply = lambda **arguments: run(**arguments | {"w1": weights["w13"], "w2": weights["w2"]})
        if not self.monolithic:
            size = experts.moe_problem_size
            experts.moe_problem_size = lambda x, w1, w2, ids: size(x, weights["w13"], weights["w2"], ids)
        return experts


def _rows(problem: Problem, plan: Plan) -> int:
    return plan.intermediate_size * (2 if problem.activation.gated else 1)


def _described(tensors: Tensors, name: str, rows: int, columns: int, layout: str) -> tuple[Any, Any]:
    """The package's tensor of a matrix's codes, and its precision config with the scales.

    Both stand for `[E, columns, rows]` and share memory with `tensors`.
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


def _power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


RULES = (
    Rule(
        "triton_kernels.generation",
        lambda problem, device: PACKAGE in device.packages,
        lambda problem, device: (
            f"knows the triton_kernels that vLLM brings; {device.packages[PACKAGE]} is installed, which vLLM prefers"
        ),
        "pip uninstall triton_kernels",
    ),
    Rule(
        "capability.since",
        lambda problem, device: device.capability >= 120 and not since.reached(since.TRITON_KERNELS_CONSUMER, device),
        lambda problem, device: f"runs on sm_{device.capability} since vLLM {since.TRITON_KERNELS_CONSUMER}",
    ),
    Rule(
        "top_k.power",
        lambda problem, device: (
            not _power_of_two(problem.top_k) and not since.reached(since.TRITON_KERNELS_LOCAL_IDS, device)
        ),
        lambda problem, device: (
            f"takes {problem.top_k} experts per token, which is no power of two, since vLLM "
            f"{since.TRITON_KERNELS_LOCAL_IDS}"
        ),
    ),
)
"""Rules of all forms."""

LOCAL_IDS = Rule(
    "expert_parallel.since",
    lambda problem, device: problem.parallel.ep > 1 and not since.reached(since.TRITON_KERNELS_LOCAL_IDS, device),
    lambda problem, device: (
        f"takes an empty slot for the last expert before vLLM {since.TRITON_KERNELS_LOCAL_IDS}; experts are "
        f"spread over {problem.parallel.ep} ranks"
    ),
    "tensor parallelism",
)
"""Of the forms that are given routed ids."""
