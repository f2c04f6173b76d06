"""OpenAI's triton_kernels in the generation with `matmul`, MXFP4 with activations in bfloat16.

vLLM brings an older generation (`matmul_ogs`), which the backend `triton_mxfp4` wraps. The package is part of Triton's
repository (``python/triton_kernels``) and of SGLang's wheel ``sglang-kernel``; the registry's ``triton-kernels`` is
another project. It takes names from ``triton.language.target_info`` that exist since Triton 3.8.

Weights keep the order of `layouts.triton_kernels`, padded as the package pads them. A call packs the ids into a bit
matrix with vLLM's kernel, sorts slots by expert with the package's kernels, gathers in the first product, applies the
activation in its epilogue, scatters in the second, and adds up a token's experts with the package's `reduce`. The
package chooses its tiles itself. Its own benchmark orders scales for four warps up to 512 tokens and for eight beyond;
both orders are peers here, because a layer's weights have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ...backends import Builder, Tensors
from ...core.activations import alpha_beta, changed_parameters
from ...core.capabilities import Capabilities, Rule
from ...core.decision import Numerics, ShardPlan
from ...core.problem import MX_BLOCK, Device, Problem
from ._contract import PeerBackend

if TYPE_CHECKING:
    from torch import Tensor

_ROWS, _BYTES = 256, 64
"""Blocks of codes to which the package pads: rows, and bytes of a row."""
_EXPERTS_PER_WORD = 32


def _rejects_activation(problem: Problem, device: Device) -> bool:
    if problem.activation.name == "swigluoai":
        return "beta" in changed_parameters(problem.activation)
    return bool(changed_parameters(problem.activation, "silu"))


def _is_not_power_of_two(problem: Problem, device: Device) -> bool:
    return problem.top_k & (problem.top_k - 1) != 0


class TritonKernelsMxfp4(PeerBackend):
    """Scales ordered for eight warps.

    Attributes:
        warps: warps of the kernel for which scales are ordered.
    """

    name = "peer:triton_kernels"
    schemes = ("mxfp4",)
    package = "triton_kernels"
    generation = "matmul"
    activation_precision = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    capabilities = Capabilities(
        compute_capabilities=((90, 100),),
        packages={"triton": "3.8"},
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
            lambda problem, device: f"computes silu, and swigluoai with beta 1; the layer has {problem.activation}",
        ),
        Rule(
            "top_k.power_of_two",
            _is_not_power_of_two,
            lambda problem, device: f"sorts slots of a power of two of experts; a token has {problem.top_k}",
        ),
    )
    warps: ClassVar[int] = 8

    def load(self) -> None:
        """Imports the package's modules that a layer needs."""
        for name in ("matmul", "reduce", "swiglu", "tensor", "tensor_details.layout"):
            self.module(name)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Alternates gate and up rows, orders codes and scales, and makes biases float32.

        Returns:
            ``w13`` uint8 `[R/4, 2 H]` and ``w13_scale`` uint8 `[R/32, H]`, with R padded to whole blocks of 256 and H
            to whole blocks of 128; the same of ``w2``; biases float32 `[R]` and `[H]` without padding.
        """
        import torch

        from ...layouts.gate_up import interleave_gate_up
        from ...layouts.padding import pad_columns, pad_rows
        from ...layouts.triton_kernels import swizzle_hopper_codes, swizzle_hopper_scales

        converted = {}
        for name in ("w13", "w2"):
            parts = {part: expert[f"{name}{part}"] for part in ("", "_scale", "_bias") if f"{name}{part}" in expert}
            if name == "w13":
                parts = {part: interleave_gate_up(each) for part, each in parts.items()}
            codes = parts[""]
            rows, columns = (
                -(-size // block) * block for size, block in zip(codes.shape, (_ROWS, _BYTES), strict=True)
            )
            converted[name] = swizzle_hopper_codes(pad_rows(pad_columns(codes, columns), rows))
            converted[f"{name}_scale"] = swizzle_hopper_scales(parts["_scale"], self.warps)
            if "_bias" in parts:
                converted[f"{name}_bias"] = parts["_bias"].to(torch.float32)
        return converted

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """A function of routed tokens over the package's tensors, which share memory with the layer's."""
        matmul, reduce = self.module("matmul").matmul, self.module("reduce").reduce
        make_metadata = self.module("tensor").make_ragged_tensor_metadata
        hidden, inner = problem.hidden_size, problem.intermediate_size
        up, up_precision = self._wrap_matrix(tensors, "w13", 2 * inner, hidden)
        down, down_precision = self._wrap_matrix(tensors, "w2", hidden, inner)
        activation = self._fused_activation(problem)

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            top_k = topk_ids.shape[1]
            ids, present = topk_ids.int(), None
            if expert_map is not None:  # only then may a slot have no expert
                ids = expert_map[ids.clamp(min=0).long()].where(ids >= 0, -1).int()
                present = (ids >= 0).int()[:, :, None].expand(-1, -1, hidden)
            sizes, slots = self._sort_slots(ids, problem.local_experts)
            ragged = make_metadata(sizes, slots.shape[0])
            tokens = slots // top_k
            h = matmul(
                x, up, tensors.get("w13_bias"), a_ragged_metadata=ragged, gather_indx=tokens,
                precision_config=up_precision, fused_activation=activation,
            )  # fmt: skip
            results = matmul(
                h, down, tensors.get("w2_bias"), a_ragged_metadata=ragged, scatter_indx=slots,
                precision_config=down_precision,
            )  # fmt: skip
            weights = topk_weights[:, :, None].expand(-1, -1, hidden)
            reduce(results.view(-1, top_k, hidden), dim=1, mask=present, scale=weights, y=out)

        return builder.from_function(run)

    def _sort_slots(self, ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Slots by expert.

        Args:
            ids: int32 `[M, top_k]`, local experts; -1 for none.
            experts: number of local experts.

        Returns:
            Number of slots of each expert, int32 `[experts]`, and the slots in order of their experts, int32
            `[M * top_k]`, with -1 at the end for slots without an expert.
        """
        import torch
        from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import pack_bitmatrix

        package = self.module("tensor")
        rows, words = ids.shape[0], -(-experts // _EXPERTS_PER_WORD)
        bits = torch.empty(rows, words, dtype=torch.uint32, device=ids.device)
        # The block sizes of vLLM's own calls.
        pack_bitmatrix[(-(-rows // 512),)](bits, ids, rows, words, ids.shape[1], BLOCK_SIZE_M=512, BLOCK_SIZE_K=32)
        bit = self.module("tensor_details.dtype").BIT
        mask = package.wrap_torch_tensor(bits, dtype=bit, shape=[rows, experts], shape_max=[rows, experts])
        sorted_slots = package.make_bitmatrix_metadata(ids, mask)
        return sorted_slots.col_sum, sorted_slots.col_sorted_indx

    def _wrap_matrix(self, tensors: Tensors, name: str, rows: int, columns: int) -> tuple[Any, Any]:
        """The package's tensor of a matrix's codes and its precision config, both `[E, columns, rows]`."""
        package, layouts = self.module("tensor"), self.module("tensor_details.layout")
        codes, scales = tensors[name], tensors[f"{name}_scale"]
        experts = codes.shape[0]
        values = package.Storage(codes.mT, layouts.HopperMXValueLayout(mx_axis=-2, mma_version=3))
        factors = package.Storage(scales.mT, layouts.HopperMXScaleLayout(mx_axis=-2, num_warps=self.warps))
        precision = self.module("matmul").PrecisionConfig(
            b_mx_scale=package.Tensor(factors, dtype=package.UINT8, shape=[experts, columns // MX_BLOCK, rows]),
            b_microblock_size=MX_BLOCK,
        )
        return package.Tensor(values, dtype=package.FP4, shape=[experts, columns, rows]), precision

    def _fused_activation(self, problem: Problem) -> Any:
        """The package's description of the activation that the first product applies."""
        package, activation = self.module("matmul"), problem.activation
        if activation.name == "swigluoai":
            specs = package.FnSpecs("swiglu", self.module("swiglu").swiglu_fn, ("alpha", "limit"), reduction_n=2)
            return package.FusedActivation(specs, (alpha_beta(activation)[0], activation.limit))
        from ._silu import silu_and_multiply

        return package.FusedActivation(package.FnSpecs("silu", silu_and_multiply, (), reduction_n=2), ())


class TritonKernelsMxfp4FourWarps(TritonKernelsMxfp4):
    """Scales ordered for four warps, as the package's benchmark orders them for few tokens."""

    name = "peer:triton_kernels_4_warps"
    static_priority = 9001.0
    warps = 4


PEERS = (TritonKernelsMxfp4, TritonKernelsMxfp4FourWarps)
