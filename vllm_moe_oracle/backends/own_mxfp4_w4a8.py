"""This project's kernels for MXFP4 weights on fp8 tensor cores, with activations in e4m3, on Hopper."""

from __future__ import annotations

import dataclasses

from ..oracle.decision import Numerics
from ..oracle.problem import Problem
from ._contract import Tensors
from ._own_fp8 import ACTIVATIONS_ARE, FP8_LIMITS, SUMS_ARE, OwnFp8


class OwnMxfp4W4A8(OwnFp8):
    """Weights become e4m3 with one power of two a row, exactly or not at all; activations lose what e4m3 does not hold.

    In memory the weights take twice what MXFP4 takes, so few tokens are slower than with `own_mxfp4`.
    """

    name = "own_mxfp4_w4a8"
    schemes = ("mxfp4",)
    limits = dataclasses.replace(FP8_LIMITS, bits=(4,), ungated=())

    def numerics(self, problem: Problem) -> Numerics:
        """Exact weights; both products' inputs rounded to e4m3."""
        return Numerics(
            "folded exactly into e4m3 with a power of two per row",
            ACTIVATIONS_ARE.format(problem.dtype),
            SUMS_ARE,
        )

    def objection(self, expert: Tensors, problem: Problem) -> str:
        """The first row whose exponents e4m3 cannot hold."""
        import torch

        from ..layouts import fold

        found = {name: fold.exponents(expert[name], expert[f"{name}_scale"]) for name in ("w13", "w2")}
        wide = {name: top - last > fold.SPREAD for name, (top, last) in found.items()}
        # Both matrices at once: the host waits for a GPU each time that it asks.
        if not torch.cat([*wide.values()]).any():
            return ""
        name = next(name for name, rows in wide.items() if rows.any())
        (top, last), rows = found[name], wide[name]
        row = int(rows.nonzero()[0])
        return (
            f"row {row} of {name} holds numbers up to 2**{int(top[row])} with last bits down to "
            f"2**{int(last[row])}, and e4m3 holds {fold.SPREAD} binades; {int(rows.sum())} of {len(rows)} rows "
            f"of this matrix are so. own_mxfp4 takes such weights, with activations left in {problem.dtype}"
        )


BACKEND = OwnMxfp4W4A8()
