"""A whole layer of integer experts between vLLM's parameters, in any packing, and canonical tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.core.sharding import has_act_order, has_group_index
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.schemes import wna16
from vllm_moe_oracle.schemes._packings import (
    Layout,
    codes_from_canonical,
    pack_codes,
    unpack_codes,
    zero_points_from_canonical,
)
from vllm_moe_oracle.schemes._wna16_parameters import MATRICES, packing_of


def to_canonical(
    parameters: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None
) -> dict[str, Tensor]:
    """A layer's loaded parameters as canonical tensors, a second copy of the layer.

    Args:
        parameters: parameters by the names in `wna16.canonical_names`.
        problem: the layer.
        is_transposed: see `wna16.read`.

    Raises:
        CheckpointError: see `wna16.read`.
    """
    raw = wna16.read(parameters, problem, is_transposed)
    experts = [
        wna16.canonical_expert({name: tensor[index] for name, tensor in raw.items()}, problem)
        for index in range(problem.local_experts)
    ]
    return {name: torch.stack([expert[name] for expert in experts]) for name in wna16.shapes(problem)}


def from_canonical(
    tensors: Mapping[str, Tensor], problem: Problem, is_transposed: bool | None = None
) -> dict[str, Tensor]:
    """Inverse of `to_canonical`: parameters by vLLM's names.

    Args:
        tensors: canonical tensors of the layer, in the shapes of `wna16.shapes`.
        problem: the layer, with the packing to write.
        is_transposed: the layout, if the packing has two; None for that of checkpoints, `[E, N, K]`.

    Raises:
        CheckpointError: the packing is unknown, or does not have this layout.
    """
    packing, bits = packing_of(problem), problem.scheme.bits
    names = wna16.parameter_names(problem)
    layout: Layout = packing.layouts[-1] if is_transposed is None else "k_first" if is_transposed else "n_first"
    if layout not in packing.layouts:
        raise CheckpointError(f"the packing {problem.scheme.packing} is never {layout}", where=problem.layer)
    written: dict[str, list[Tensor]] = {name: [] for name in names.values()}
    for index in range(problem.local_experts):
        expert = {name: tensor[index] for name, tensor in tensors.items()}
        for matrix in MATRICES:
            codes, scale = expert[matrix], expert[f"{matrix}_scale"]
            parts = {matrix: codes, f"{matrix}_scale": scale if layout == "n_first" else scale.T}
            if has_act_order(problem):
                order = expert[f"{matrix}_order"].long()
                groups = torch.arange(len(order), dtype=torch.int32) // problem.scheme.group_size
                if matrix == "w2" and has_group_index(problem):
                    groups = expert["w2_group_index"]
                back = order.argsort()
                parts[f"{matrix}_order"] = groups[back]
                parts[matrix] = pack_codes(unpack_codes(codes, bits)[:, back], bits)
            parts[matrix] = codes_from_canonical(parts[matrix], packing, layout, bits)
            if problem.scheme.zero_points:
                zeros = expert[f"{matrix}_zero_point"]
                parts[f"{matrix}_zero_point"] = zero_points_from_canonical(zeros, packing, layout, bits)
            if problem.has_bias:
                parts[f"{matrix}_bias"] = expert[f"{matrix}_bias"]
            for canonical, part in parts.items():
                written[names[canonical]].append(part)
    return {name: torch.stack(experts) for name, experts in written.items()}
