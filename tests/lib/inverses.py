"""The way back from a backend's kernel tensors to canonical weights, through the inverses of the layouts.

What each library's kernels read is said here a second time, apart from the conversions. That an inverse undoes its
layout is in the tests of the layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tests.lib.stock_rules import backend
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.core.sharding import has_group_index, loaded_group_size
from vllm_moe_oracle.kernels.weights import unpack_expert
from vllm_moe_oracle.layouts import cpu_int4, cutlass_mixed, gate_up, mma_tiles, scales, trtllm
from vllm_moe_oracle.layouts.cpu_mxfp4 import unpack_row_pairs
from vllm_moe_oracle.layouts.padding import crop_columns, crop_rows
from vllm_moe_oracle.layouts.row_blocks import unpack_row_blocks
from vllm_moe_oracle.layouts.triton_kernels import unswizzle_hopper_codes, unswizzle_hopper_scales

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Part:
    """One tensor of an expert: codes, scales, zero points or biases of a matrix.

    Attributes:
        name: the backend's.
        layer: the layer.
        plan: the shard plan of the conversion.
        matrix: ``w13`` or ``w2``.
        kind: "" for codes, ``scale``, ``zero_point`` or ``bias``.
        zero_points: the kernel's zero points of the matrix, if it has any.
    """

    name: str
    layer: Problem
    plan: ShardPlan
    matrix: str
    kind: str
    zero_points: torch.Tensor | None

    @property
    def integers(self) -> bool:
        """Whether codes are integers."""
        return self.layer.scheme.name == "wna16"

    @property
    def columns(self) -> int:
        """Input features of the padded matrix."""
        return self.plan.hidden_size if self.matrix == "w13" else self.plan.intermediate_size

    @property
    def rows(self) -> int:
        """Output features of the padded matrix; of both halves."""
        halves = 2 if self.layer.activation.gated else 1
        return self.plan.intermediate_size * halves if self.matrix == "w13" else self.plan.hidden_size


def restored(name: str, converted: Mapping[str, torch.Tensor], layer: Problem, plan: ShardPlan) -> Tensors:
    """Canonical tensors of an expert from those that a backend made of them.

    Args:
        name: the backend's.
        converted: its kernel tensors, of one expert.
        layer: the layer.
        plan: the shard plan of the conversion. With the plan's sizes as the layer's, the padding is kept.
    """
    if name == "hopper_wna16":
        return _of_own_storage(converted, layer)
    library = name.partition("_")[0]
    halves = 2 if layer.activation.gated else 1
    found: Tensors = {}
    for key, tensor in converted.items():
        matrix, _, kind = key.partition("_")
        first = matrix == "w13"
        rows, columns = layer.intermediate_size, layer.hidden_size
        rows, columns = (rows, columns) if first else (columns, rows)
        if kind in ("order", "group_index"):
            if kind == "order" or (key == "w2_group_index" and has_group_index(layer)):
                found[key] = tensor[:columns]
            continue
        if key.endswith("_zero_point") and name == "cpu_int4":
            assert bool((tensor == 8).all()), "the operator's zero points are the middle of the codes"
            continue
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        part = Part(name, layer, plan, matrix, kind, converted.get(f"{matrix}_zero_point"))
        plain = _INVERSES[library](part, raw)
        if first and library == "humming":
            # It pads at the end of the matrix, not of its halves.
            plain = crop_rows(plain, layer.w13_rows)
        if first and _alternates(name, layer):
            plain = gate_up.deinterleave_gate_up(plain)
        plain = crop_rows(plain, rows, halves if first else 1)
        if kind == "":
            plain = crop_columns(plain, columns * layer.scheme.bits // 8)
        elif kind != "bias" and not (matrix == "w2" and has_group_index(layer)):
            group = loaded_group_size(layer)
            plain = crop_columns(plain, 1 if group == -1 else columns // group)
        found[key] = plain
    return found


def _alternates(name: str, layer: Problem) -> bool:
    """Whether the kernel reads gate and up rows by turns; TRTLLM's and CUTLASS's order is undone by `_INVERSES`."""
    if name.startswith(("trtllm", "cutlass")):
        return False
    return layer.activation.interleaved or (name == "cpu_mxfp4" and layer.activation.name == "swigluoai")


def _of_marlin(part: Part, raw: torch.Tensor) -> torch.Tensor:
    """Marlin's layouts, and Humming's, which differ in scales and in bytes."""
    marlin, bits = part.name.startswith("marlin"), part.layer.scheme.bits
    if part.kind == "bias":
        return scales.unpermute_bias(raw)
    if part.kind == "scale" and part.integers:
        # Marlin's kernel counts groups, Humming's is told their size.
        return scales.unpermute_scales(raw, raw.shape[0] == 1 if marlin else loaded_group_size(part.layer) == -1)
    if part.kind == "scale":
        return (scales.unpermute_marlin_mx_scales if marlin else scales.unpermute_group_scales)(raw)
    if part.kind == "zero_point":
        return scales.unpack_zero_points(raw, bits, marlin=marlin)
    order = "transposed" if part.plan.layout == "transposed" else "interleaved"
    if bits == 4:
        return mma_tiles.unpack_nibbles(raw, order)
    codes = mma_tiles.unpack_tiles(raw, order=order)
    if marlin or not part.integers or part.layer.dtype != "bfloat16":
        return codes
    points = part.zero_points
    return mma_tiles.codes_from_distances(
        codes, None if points is None else scales.unpack_zero_points(points, bits, marlin=False)
    )


def _of_triton(part: Part, raw: torch.Tensor) -> torch.Tensor:
    if part.integers:
        packed = part.kind == "zero_point" and part.layer.scheme.bits == 4
        return scales.unpack_adjacent_rows(raw) if packed else raw
    if part.kind == "bias":
        return raw
    if part.plan.layout == "hopper" and part.kind:
        return unswizzle_hopper_scales(raw, part.rows, part.columns // 32)
    if part.plan.layout == "hopper":
        return unswizzle_hopper_codes(raw, part.rows, part.columns)
    return crop_rows(scales.unswizzle_scales(raw), part.rows) if part.kind else raw


def _of_trtllm(part: Part, raw: torch.Tensor) -> torch.Tensor:
    if part.kind == "scale":
        raw = scales.unswizzle_scales(raw.view(-1, part.columns // 32))
    elif part.integers:
        raw = trtllm.from_block_layout(raw) ^ 0x88
    plain = trtllm.unshuffle_rows(raw)
    if part.matrix == "w13" and part.layer.activation.gated:
        plain = gate_up.swap_gate_up(gate_up.deinterleave_gate_up(plain))
    return plain


def _of_cutlass(part: Part, raw: torch.Tensor) -> torch.Tensor:
    plain: Any = raw
    if part.name == "cutlass_mxfp4_a8":
        plain = scales.unswizzle_scales(raw) if part.kind == "scale" else raw
    elif part.kind == "scale":
        plain = cutlass_mixed.deinterleave_scales(raw, part.plan.layout)  # type: ignore[arg-type]
    elif part.kind == "":
        plain = cutlass_mixed.deinterleave_codes(raw, part.plan.layout)  # type: ignore[arg-type]
    return gate_up.swap_gate_up(plain) if part.matrix == "w13" else plain


def _of_deep_gemm(part: Part, raw: torch.Tensor) -> torch.Tensor:
    return scales.unpack_ue8m0_scales(raw, part.columns // 32) if part.kind == "scale" else raw


def _of_cpu(part: Part, raw: torch.Tensor) -> torch.Tensor:
    if part.kind == "bias":
        return raw
    if part.integers:
        return cpu_int4.unblock_scales(raw) if part.kind else cpu_int4.unpack_blocks(raw)
    return unpack_row_blocks(raw, 32) if part.kind else unpack_row_pairs(raw)


_INVERSES = {
    "marlin": _of_marlin, "humming": _of_marlin, "triton": _of_triton, "trtllm": _of_trtllm, "cutlass": _of_cutlass,
    "deep": _of_deep_gemm, "cpu": _of_cpu,
}  # fmt: skip


def _of_own_storage(converted: Mapping[str, torch.Tensor], layer: Problem) -> Tensors:
    own: Any = backend("hopper_wna16")
    alone = dataclasses.replace(layer, num_experts=1, local_experts=1, top_k=1)
    stored = own._stored({key: tensor[None] for key, tensor in converted.items()}, own._allocate(alone, 1, "meta"))
    found = {}
    for which in ("w13", "w2"):
        parts = zip(("", "_scale", "_zero_point", "_bias"), unpack_expert(stored, which, 0), strict=True)
        found |= {f"{which}{part}": tensor for part, tensor in parts if tensor is not None}
    return found
