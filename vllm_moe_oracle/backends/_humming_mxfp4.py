"""What the Humming backends for MXFP4 share: as for MXFP8, with two e2m1 codes in a byte and gpt-oss's rows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ..compat import since
from ..compat.order import mxfp4_place
from ..oracle.decision import Plan
from ..oracle.planner import round_up
from ..oracle.problem import MX_BLOCK, Device, Problem
from ._contract import Tensors
from ._humming import COLUMN_MULTIPLE, ONE, ROW_MULTIPLE, Humming
from ._mxfp4 import in_rows_of, oai_rule

if TYPE_CHECKING:
    from torch import Tensor


class HummingMxfp4(Humming):
    """MXFP4 weights through one of vLLM's classes over Humming."""

    schemes = ("mxfp4",)
    limits = dataclasses.replace(Humming.limits, bits=(4,))

    def estimate(self, problem: Problem, device: Device) -> float:
        """Directly before Marlin on sm_90, behind it elsewhere, as in stock."""
        return mxfp4_place("humming" if self.kind == "indexed" else "humming_grouped", problem, device)

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """Pads and orders codes, scales and biases. The library pads rows at the end, whatever they are.

        Returns:
            ``w13`` int32 `[K/16, 2 N]`, ``w13_scale`` float8_e8m0fnu `[K/32, N]`, ``w13_bias`` `[N]` in the model's
            dtype, and the same of ``w2``, with N and K padded.
        """
        import torch

        from ..layouts.pack import pack_nibbles
        from ..layouts.pad import pad_columns, pad_rows
        from ..layouts.scales import order_bias, order_group_scales

        ordered = {name: in_rows_of(problem, each) if name.startswith("w13") else each for name, each in expert.items()}
        converted = {}
        for name in ("w13", "w2"):
            codes, scales = ordered[name], ordered[f"{name}_scale"]
            rows, columns = round_up(codes.shape[0], ROW_MULTIPLE), round_up(2 * codes.shape[1], COLUMN_MULTIPLE)
            codes = pad_rows(pad_columns(codes, columns // 2), rows)
            converted[name] = pack_nibbles(codes, "transposed" if plan.layout == "transposed" else "interleaved")
            scales = pad_rows(pad_columns(scales, columns // MX_BLOCK, ONE), rows, value=ONE)
            converted[f"{name}_scale"] = order_group_scales(scales).view(torch.float8_e8m0fnu)
            if f"{name}_bias" in ordered:
                bias = ordered[f"{name}_bias"].to(getattr(torch, problem.dtype))
                converted[f"{name}_bias"] = order_bias(pad_rows(bias, rows))
        return converted


RULES_MXFP4 = (oai_rule(halves_since=since.HUMMING_HALVES),)
"""Rules of both kinds."""
