"""Fills the padding of kernel tensors with garbage: a layer's outputs must not change.

What each kernel pads, and why the padding is harmless:

* Humming pads rows to a multiple of 256 and columns to a multiple of 128, at the end of each matrix, and reads all of
  it. Results of padded rows are never stored (``epilogue/gmem_writer.cuh``). For padded columns the input is filled
  with zeros (``memory/g2s_loader/loader_a.cuh``), so their weights must be finite; padded rows may hold anything.
* Marlin and vLLM's Triton kernel for integers read and store everything. Scales and biases of zero make padding
  harmless (Marlin treats the e8m0 scale 2**-127 as zero); codes and zero points may hold anything.
* Our kernels pad rows and columns of 4-bit codes to multiples of 64, and e8m0 scales to whole words of four. Results of
  padded rows are never stored, and inputs of padded columns are 0: rows may hold anything, columns anything finite,
  which is every 4-bit code and every scale except e8m0's NaN.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from vllm_moe_oracle.core.problem import Problem
from vllm_moe_oracle.core.sharding import loaded_group_size, round_up
from vllm_moe_oracle.layouts import wgmma_fragments

Tensors = dict[str, torch.Tensor]

HUMMING_ROWS, HUMMING_COLUMNS = 256, 128
NAN_OF_E4M3 = 127
MATRICES = ("w13", "w2")


@dataclasses.dataclass(frozen=True)
class Cut:
    """Real rows or columns at the end of a matrix that are treated as padding, to prove that garbage is noticed."""

    rows: int = 0
    columns: int = 0


class Dirty:
    """Conversions of a backend that leave garbage in the padding.

    Args:
        backend: a backend.
        cut: real rows or columns to overwrite too; outputs must then change.
        seed: seed of the garbage.
    """

    def __init__(self, backend: Any, cut: Cut | None = None, seed: int = 0) -> None:
        self._backend, self._cut = backend, cut or Cut()
        self._generator = torch.Generator().manual_seed(seed)
        self.filled = 0
        """Number of elements that were overwritten with garbage."""

    def installed(self) -> Any:
        """A copy of the backend that converts like this."""
        made = copy.copy(self._backend)
        made.convert = self.convert
        return made

    def convert(self, expert: Mapping[str, torch.Tensor], problem: Problem, plan: Any) -> Tensors:
        """Kernel tensors, of the same shapes and dtypes as the backend's own."""
        name = self._backend.name
        if next(iter(expert.values())).is_meta:
            return self._made(expert, problem, plan)
        if name.startswith("hopper"):
            return self._in_storage(self._made(expert, problem, plan), problem)
        if name.startswith("humming"):
            wide = self._at_the_end(expert, problem)
        elif name.startswith(("marlin", "triton_wna16")):
            wide = self._under_zero_scales(expert, problem, plan)
        else:
            raise ValueError(f"the padding of {name} is not described")
        found, clean = self._made(wide, problem, plan), self._made(expert, problem, plan)
        for own, tensor in clean.items():
            if (found[own].shape, found[own].dtype) != (tensor.shape, tensor.dtype):
                raise AssertionError(f"{name} pads {own} to {list(tensor.shape)}, not to {list(found[own].shape)}")
        return found

    def _made(self, expert: Mapping[str, torch.Tensor], problem: Problem, plan: Any) -> Tensors:
        found: Tensors = self._backend.convert(expert, problem, plan)
        return found

    def _at_the_end(self, expert: Mapping[str, torch.Tensor], problem: Problem) -> Tensors:
        """Canonical tensors of Humming's sizes: garbage after the last column and row."""
        bits = problem.scheme.bits
        # Gate and up rows that alternate are interleaved before they are padded.
        alternate = problem.activation.interleaved and problem.scheme.name == "mxfp4"
        found = {}
        for own, tensor in expert.items():
            which, _, kind = own.partition("_")
            rows = round_up(tensor.shape[0], HUMMING_ROWS)
            features = round_up(problem.hidden_size if which == "w13" else problem.intermediate_size, HUMMING_COLUMNS)
            shape: tuple[int, ...] = (rows, features * bits // 8)
            if kind == "bias":
                shape = (rows,)
            elif kind:
                group = loaded_group_size(problem)
                shape = (rows, 1 if group == -1 else features // group)
            moved = alternate and which == "w13"
            source = torch.stack(tensor.chunk(2), 1).flatten(0, 1) if moved else tensor
            wide = self._filled(source, shape, kind, problem)
            found[own] = torch.cat((wide[::2], wide[1::2])) if moved else wide
        return found

    def _under_zero_scales(self, expert: Mapping[str, torch.Tensor], problem: Problem, plan: Any) -> Tensors:
        """Canonical tensors of a plan's sizes: garbage in padded codes and zero points, zeros in scales and biases."""
        halves, inner = 2 if problem.activation.gated else 1, plan.intermediate_size
        found = {}
        for own, tensor in expert.items():
            which, _, kind = own.partition("_")
            shape = list(tensor.shape)
            if which == "w13":
                shape[0] = inner * halves
            elif kind != "bias":
                wider = tensor.shape[1] * inner / problem.intermediate_size
                shape[1] = 1 if kind and loaded_group_size(problem) == -1 else int(wider)
            found[own] = self._filled(tensor, tuple(shape), kind, problem, halves if which == "w13" else 1)
        return found

    def _filled(
        self, tensor: torch.Tensor, shape: tuple[int, ...], kind: str, problem: Problem, halves: int = 1
    ) -> torch.Tensor:
        """A tensor in the upper left corner of garbage of a shape, half by half. Scales and biases of kernels that read
        padding get zeros."""
        known = self._backend.name.startswith("humming")
        garbage = self._garbage(shape, tensor.dtype, kind, problem)
        if kind in ("scale", "bias") and not known:
            garbage = torch.zeros(shape, dtype=garbage.dtype, device="cpu")
        wide = garbage.view(tensor.dtype).to(tensor.device)
        before = wide.numel()
        for room, part in zip(wide.chunk(halves), tensor.chunk(halves), strict=True):
            kept = self._kept(part, kind, problem)
            before -= kept.numel()
            # torch has few operations for 8-bit floats.
            raw = (lambda each: each.view(torch.uint8)) if tensor.element_size() == 1 else (lambda each: each)
            raw(room)[tuple(slice(size) for size in kept.shape)] = raw(kept)
        self.filled += before if kind in ("", "zero_point") or known else 0
        return wide

    def _kept(self, tensor: torch.Tensor, kind: str, problem: Problem) -> torch.Tensor:
        """The tensor without what `cut` overwrites; only codes are cut."""
        if kind:
            return tensor
        columns = tensor.shape[1] - self._cut.columns * problem.scheme.bits // 8
        return tensor[: tensor.shape[0] - self._cut.rows, :columns]

    def _garbage(self, shape: tuple[int, ...], dtype: torch.dtype, kind: str, problem: Problem) -> torch.Tensor:
        """Random finite values: all codes and zero points, scales and biases far beyond the layer's."""
        if kind == "bias":
            return (torch.randn(shape, generator=self._generator, device="cpu") * 1000).to(dtype)
        if kind == "scale" and dtype.is_floating_point and dtype.itemsize > 1:
            return torch.randn(shape, generator=self._generator, device="cpu").to(dtype)
        low, high = {"scale": (117, 138), "zero_point": (0, 1 << problem.scheme.bits)}.get(kind, (0, 256))
        found = torch.randint(low, high, shape, dtype=torch.uint8, generator=self._generator, device="cpu")
        if not kind and problem.scheme.name == "mxfp8":
            found = torch.where(found & NAN_OF_E4M3 == NAN_OF_E4M3, found - 1, found)
        return found

    def _in_storage(self, converted: Tensors, problem: Problem) -> Tensors:
        """Tensors of our kernels with random bits in the padding."""
        found = dict(converted)
        for which in MATRICES:
            rows = problem.w13_rows if which == "w13" else problem.hidden_size
            columns = problem.hidden_size if which == "w13" else problem.intermediate_size
            for own, inside in self._inside(which, rows, columns, converted, problem).items():
                tensor = converted[own].contiguous()
                mask = inside.contiguous().view(torch.uint8).to(tensor.device)
                bits = torch.randint(0, 256, mask.shape, dtype=torch.uint8, generator=self._generator, device="cpu")
                if problem.scheme.name != "wna16" and own.endswith("_scale") and "row" not in own:
                    bits = bits.clamp(max=254)  # 255 is NaN, and NaN times 0 is NaN
                elif own.endswith(("_row_scale", "_bias")):
                    bits = torch.full_like(tensor, float("nan"), device="cpu").view(torch.uint8)
                dirty = tensor.view(torch.uint8) & mask | bits.to(tensor.device) & ~mask
                self.filled += int((mask != 255).sum())
                found[own] = dirty.view(tensor.dtype)
        return found

    def _inside(self, which: str, rows: int, columns: int, converted: Tensors, problem: Problem) -> Tensors:
        """For each tensor of a matrix, a mask with all bits set where it holds weights, scales or biases of the
        layer."""
        bits, mx = problem.scheme.bits, problem.scheme.name != "wna16"
        codes = torch.zeros(rows, columns * bits // 8, dtype=torch.uint8, device="cpu")
        codes[: rows - self._cut.rows, : (columns - self._cut.columns) * bits // 8] = 255
        if bits == 8:
            found = {which: wgmma_fragments.shuffle_e4m3(codes) if mx else wgmma_fragments.shuffle_int8(codes)}
        else:
            found = {which: wgmma_fragments.shuffle_e2m1(codes) if mx else wgmma_fragments.shuffle_int4(codes)}
        every = wgmma_fragments.padded_rows(rows)
        for kind in ("scale", "zero_point", "row_scale", "bias"):
            own = f"{which}_{kind}"
            if own not in converted:
                continue
            if kind in ("row_scale", "bias"):
                found[own] = pad(torch.full((rows,), -1, dtype=torch.int32, device="cpu"), (0, every - rows))
            elif mx:
                # A row's largest scale is stored as 254, so equal scales all are, and padding is 0.
                words = wgmma_fragments.shuffle_mx_scales(
                    torch.zeros(rows, columns // 32, dtype=torch.uint8, device="cpu")
                )[0]
                found[own] = (words.view(torch.uint8) == 254).to(torch.uint8) * 255
            else:
                found[own] = wgmma_fragments.shuffle_group_scales(
                    torch.full((rows, columns // loaded_group_size(problem)), -1, dtype=torch.int16, device="cpu")
                )
        return found
