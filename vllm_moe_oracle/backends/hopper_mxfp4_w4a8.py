"""This project's kernels for MXFP4 weights on fp8 tensor cores, with activations in e4m3, on Hopper."""

from __future__ import annotations

import dataclasses

from ..core.decision import Numerics
from ..core.problem import Problem
from ._contract import Tensors
from ._hopper_fp8 import ACCUMULATION, ACTIVATION_NUMERICS, FP8_CAPABILITIES, HopperFp8Backend


class HopperMxfp4W4A8(HopperFp8Backend):
    """Weights become e4m3 with one power of two a row, exactly or not at all; activations lose what e4m3 does not hold.

    In memory the weights take twice what MXFP4 takes, so few tokens are slower than with `hopper_mxfp4`.
    """

    name = "hopper_mxfp4_w4a8"
    schemes = ("mxfp4",)
    capabilities = dataclasses.replace(FP8_CAPABILITIES, bits=(4,), ungated=())
    arithmetic = Numerics("folded exactly into e4m3 with a power of two per row", ACTIVATION_NUMERICS, ACCUMULATION)

    def validate_weights(self, expert: Tensors, problem: Problem) -> str:
        """The first row whose exponents e4m3 cannot hold."""
        import torch

        from ..layouts import e4m3_folding

        found = {name: e4m3_folding.row_exponents(expert[name], expert[f"{name}_scale"]) for name in ("w13", "w2")}
        wide = {name: top - last > e4m3_folding.MAX_EXPONENT_SPREAD for name, (top, last) in found.items()}
        # Both matrices in one call: each call makes the host wait for the GPU.
        if not torch.cat([*wide.values()]).any():
            return ""
        name = next(name for name, rows in wide.items() if rows.any())
        (top, last), rows = found[name], wide[name]
        row = int(rows.nonzero()[0])
        return (
            f"row {row} of {name} holds numbers up to 2**{int(top[row])} with last bits down to "
            f"2**{int(last[row])}, and e4m3 holds {e4m3_folding.MAX_EXPONENT_SPREAD} binades; "
            f"{int(rows.sum())} of {len(rows)} rows "
            f"of this matrix are so. hopper_mxfp4 takes such weights, with activations left in {problem.dtype}"
        )


BACKEND = HopperMxfp4W4A8()
