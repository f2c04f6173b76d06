"""vLLM's MXFP4 experts on x86 CPUs with AVX-512 and its bfloat16 instructions.

vLLM's class over the operator asks for AMX, and takes gpt-oss's rows only as they alternate; the operator itself needs
neither. It is compiled into vLLM's library for CPUs that have AVX512_BF16, picks AMX where there is any, and gives the
same numbers without (oneDNN limited to AVX512_CORE_BF16). So it is called here without the class; that it is right on
the machine at hand is what the self-check is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.activations import changed_parameters
from ..core.capabilities import Capabilities, Rule
from ..core.decision import Numerics, ShardPlan
from ..core.problem import MX_BLOCK, Device, Problem
from ..releases import min_versions
from ._contract import Backend, Builder, Tensors
from ._cpu import fill_empty_slots, require_operator, write_contiguous
from ._stock import schema_arguments
from ._stock_rules import lacks_parameters_of_swigluoai

if TYPE_CHECKING:
    from torch import Tensor

_QUANT_METHOD = 4
"""The operator's number of the format: ``CPUQuantMethod.MXFP4``."""
_SILU, _SWIGLU = 0, 1
"""Its numbers of activations: ``CPUActMethod``. Releases without the argument tell SwiGLU-OAI by alpha and limit."""


def _rejects_activation(problem: Problem, device: Device) -> bool:
    if problem.activation.name == "swigluoai":
        return lacks_parameters_of_swigluoai(problem.activation)
    return bool(changed_parameters(problem.activation, "silu"))


class CpuMxfp4(Backend):
    """Weights become bfloat16 in registers; the activation's output is rounded to bfloat16."""

    name = "cpu_mxfp4"
    schemes = ("mxfp4",)
    vllm_names = ("cpu",)
    static_priority = 80.0
    activation_precision = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    capabilities = Capabilities(
        devices=("cpu",),
        features=("avx512f", "avx512_bf16"),
        packages={"vllm": min_versions.CPU_MXFP4},
        # With float16 the operator aborts the process.
        dtypes=("bfloat16",),
        gated=("silu", "swigluoai"),
        activation_params=True,
        bias=True,
        hidden_multiple=MX_BLOCK,
        intermediate_multiple=MX_BLOCK,
    )
    rules = (
        Rule(
            "activation.parameters",
            _rejects_activation,
            lambda problem, device: (
                f"takes alpha and limit of swigluoai, whose beta is 1, and nothing of silu; the layer has "
                f"{problem.activation}"
            ),
        ),
    )

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Orders codes and scales; rows of ``swigluoai`` alternate gate and up, as the operator wants them.

        Returns:
            ``w13`` uint8 `[R, H/2]`, ``w2`` uint8 `[H, I/2]`, scales uint8 `[R, H/32]` and `[H, I/32]`, biases float32.
        """
        import torch

        from ..layouts.cpu_mxfp4 import BLOCK_ROWS, pack_row_pairs
        from ..layouts.gate_up import interleave_gate_up
        from ..layouts.row_blocks import pack_row_blocks

        alternate = problem.activation.name == "swigluoai"
        converted = {}
        for name, tensor in expert.items():
            rows = interleave_gate_up(tensor) if alternate and name.startswith("w13") else tensor
            if name.endswith("_bias"):
                converted[name] = rows.to(torch.float32)
            elif name.endswith("_scale"):
                converted[name] = pack_row_blocks(rows, BLOCK_ROWS)
            else:
                converted[name] = pack_row_pairs(rows)
        return converted

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """Experts over the operator.

        Raises:
            OracleError: this build of vLLM does not have it.
        """
        operator = require_operator("fused_experts_cpu", problem.layer).default
        activation = problem.activation
        swiglu = activation.name == "swigluoai"
        # By name: arguments come and go between releases. Without "out" the operator returns its output.
        known = schema_arguments(operator)
        constant: dict[str, Any] = {
            "inplace": False, "moe_comp_method": _QUANT_METHOD, "w1_zero": None, "w2_zero": None, "a1_scale": None,
            "block_size": None, "alpha": activation.alpha if swiglu else None,
            "limit": activation.limit if swiglu else None, "is_vnni": True, "act_method": _SWIGLU if swiglu else _SILU,
        }  # fmt: skip
        constant = {name: value for name, value in constant.items() if name in known}

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            if x.shape[0] == 0:
                return
            weights, ids = fill_empty_slots(topk_weights, topk_ids, expert_map)
            given = {
                "hidden_states": x.contiguous(), "w1": tensors["w13"], "w2": tensors["w2"], "topk_weights": weights,
                "topk_ids": ids, "w1_scale": tensors["w13_scale"], "w2_scale": tensors["w2_scale"],
                "w1_bias": tensors.get("w13_bias"), "w2_bias": tensors.get("w2_bias"),
            }  # fmt: skip
            if "out" not in known:
                out.copy_(operator(**given, **constant))
                return
            write_contiguous(out, lambda target: operator(out=target, **given, **constant))

        return builder.from_function(run)


BACKEND = CpuMxfp4()
