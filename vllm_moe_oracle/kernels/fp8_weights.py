"""Storage of a layer whose weights are e4m3 with one scale per row, as `fp8_gemm.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layouts import e4m3_folding


@dataclass(frozen=True)
class Fp8Matrix:
    """One projection of all experts, logically `[rows, columns]` each, both multiples of 32.

    codes float8_e4m3fn `[E, rows, columns]`, row_scale float32 `[E, rows]`, bias float32 `[E, rows]` or None, rows in
    the order of `layouts/e4m3_folding.py`: `gated_row_order` (w13 of a gated layer) or `row_order`.
    """

    codes: torch.Tensor
    row_scale: torch.Tensor
    bias: torch.Tensor | None

    @property
    def rows(self) -> int:
        """Rows of an expert."""
        return self.codes.shape[1]

    @property
    def columns(self) -> int:
        """Columns of an expert."""
        return self.codes.shape[2]


@dataclass(frozen=True)
class Fp8Weights:
    """A layer's weights; dtype is the activations' (bfloat16 or float16). Not gated: w13 has no gate rows."""

    w13: Fp8Matrix
    w2: Fp8Matrix
    dtype: torch.dtype
    gated: bool = True

    @property
    def experts(self) -> int:
        """Local experts."""
        return self.w13.codes.shape[0]

    @property
    def hidden(self) -> int:
        """Columns of w13 and rows of w2."""
        return self.w13.columns

    @property
    def intermediate(self) -> int:
        """Columns of w2, and rows of w13, or half of them where the layer is gated."""
        return self.w2.columns


def row_order(which: str, rows: int, gated: bool, device: torch.device | None = None) -> torch.Tensor:
    """Which canonical row is stored in each place; `which` is "w13" (gate rows, then up rows, if gated) or "w2"."""
    pairs = which == "w13" and gated
    return e4m3_folding.gated_row_order(rows, device) if pairs else e4m3_folding.row_order(rows, device)


def pack_fp8_expert(
    which: str, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, gated: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One expert's part of `Fp8Matrix` from its canonical tensors.

    Args:
        which: "w13" or "w2".
        codes: of MXFP8, float8_e4m3fn `[N, K]`.
        scales: e8m0, one byte each, `[N, K/32]`.
        bias: `[N]`, or None.
        gated: whether w13 has gate rows.
    """
    order = row_order(which, codes.shape[0], gated, codes.device)
    ordered = codes.view(torch.uint8)[order].view(codes.dtype)
    folded, row_scale, _ = e4m3_folding.fold_mxfp8(ordered, scales.view(torch.uint8)[order])
    return folded, row_scale, None if bias is None else bias[order].float()
