"""A backend for tests with a kernel layout that differs from the checkpoint's in every respect.

Rows are reversed and both dimensions padded with nonzero bytes, scales are transposed and one byte wider, and a tensor
is added that no checkpoint has. It restores the canonical tensors and runs the emulation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_moe_oracle.backends.emulation import Emulation, forward
from vllm_moe_oracle.core.problem import Problem

ROWS, COLUMNS = 3, 5
"""Padding of the weights."""
_DIRT = 0x55

HELD: list[Tensor] = []
"""Buffers that kernels of this process keep beside their layers' weights."""


class Permuted(Emulation):
    """See the module."""

    name = "permuted"
    vllm_names = ()

    def priority(self, problem: Problem, device: Any) -> float:
        """Before the emulation."""
        return 1.0

    def convert(self, expert: Any, problem: Problem, plan: Any) -> dict[str, Tensor]:
        """To the layout of this module."""
        made = dict(expert)
        for name in ("w13", "w2"):
            codes = expert[name].view(torch.uint8).flip(0)
            made[name] = pad(codes, (0, COLUMNS, 0, ROWS), value=_DIRT).view(torch.float8_e4m3fn)
            made[f"{name}_scale"] = expert[f"{name}_scale"].T.to(torch.int16).contiguous()
        made["w13_sums"] = expert["w13"].view(torch.uint8).to(torch.int64).sum(-1)
        return made

    def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        """Experts over the emulation's function."""

        key = builder.register_buffer(torch.full((4,), _DIRT, dtype=torch.int64))
        HELD.append(key)

        def run(*arguments: Any) -> None:
            assert key.tolist() == [_DIRT] * 4, "memory beside the weights was lost"
            forward(canonical(tensors), problem, *arguments)

        return builder.from_function(run)


def canonical(tensors: Any) -> dict[str, Tensor]:
    """The canonical tensors of a layer from those of this layout.

    Raises:
        AssertionError: the sums do not belong to the weights.
    """
    made = {name: tensor for name, tensor in tensors.items() if name != "w13_sums"}
    for name in ("w13", "w2"):
        codes = tensors[name].view(torch.uint8)[:, :-ROWS, :-COLUMNS].flip(1)
        made[name] = codes.contiguous().view(torch.float8_e4m3fn)
        made[f"{name}_scale"] = tensors[f"{name}_scale"].transpose(1, 2).to(torch.uint8)
    assert torch.equal(tensors["w13_sums"], made["w13"].view(torch.uint8).to(torch.int64).sum(-1))
    return made
