"""Storage of a layer whose weights are e4m3 with one scale per row, as `fp8_products.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..layouts import fold

ROWS = 32  # rows and columns come in multiples of these
COLUMNS = 32


@dataclass(frozen=True)
class Fp8Matrix:
    """One projection of all experts, logically `[rows, columns]` each.

    codes float8_e4m3fn `[E, rows, columns]`, row_scale float32 `[E, rows]`, bias float32 `[E, rows]` or None, rows in
    the order of `layouts/fold.py`: `lanes_of_pairs` (w13) or `lanes_of_rows` (w2).
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
    """A gated layer's weights; dtype is the activations' (bfloat16 or float16)."""

    w13: Fp8Matrix
    w2: Fp8Matrix
    dtype: torch.dtype

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
        """Columns of w2, half the rows of w13."""
        return self.w2.columns


def order_of(which: str, rows: int, device: torch.device | None = None) -> torch.Tensor:
    """Which canonical row is stored in each place; `which` is "w13" (gate rows, then up rows) or "w2"."""
    return fold.lanes_of_pairs(rows, device) if which == "w13" else fold.lanes_of_rows(rows, device)


def convert_expert(
    which: str, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One expert's part of `Fp8Matrix` from its canonical MXFP4 tensors: uint8 `[N, K/2]`, uint8 `[N, K/32]`, `[N]`."""
    order = order_of(which, codes.shape[0], codes.device)
    folded, row_scale = fold.fold(codes[order], scales.view(torch.uint8)[order])
    return folded, row_scale, None if bias is None else bias[order].float()
