"""LoRA adapters of experts: random ones, merged weights, vLLM's layer with them, and its LoRA kernels in torch.

Nothing here imports the package. Adapters are in vLLM's order: gate (w1), down (w2), up (w3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RANK = 8


@dataclass(frozen=True)
class Adapter:
    """One adapter: ``a`` `[E, rank, in]` and ``b`` `[E, out, rank]` by projection, ``w3`` of gated experts only."""

    a: dict[str, Tensor]
    b: dict[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> Adapter:
        """The adapter with a function of each of its tensors."""
        a, b = ({name: function(each) for name, each in part.items()} for part in (self.a, self.b))
        return Adapter(a, b)

    def update(self, name: str, expert: int) -> Tensor:
        """Float32 ``b @ a`` of one expert's projection."""
        return self.b[name][expert].float() @ self.a[name][expert].float()

    def merged(self, which: str, expert: int, weight: Tensor, alternating: bool) -> Tensor:
        """A float32 weight with the adapter merged into it.

        Args:
            which: ``w13`` or ``w2``.
            expert: its number.
            weight: `[rows, columns]`.
            alternating: rows of gate and up alternate.
        """
        if which == "w2":
            return weight + self.update("w2", expert)
        rows = [self.update(name, expert) for name in ("w1", "w3") if name in self.a]
        return weight + (torch.stack(rows, 1).flatten(0, 1) if alternating else torch.cat(rows))


def random_adapter(
    experts: int, hidden: int, inner: int, gated: bool, dtype: torch.dtype, sizes: dict[str, float], seed: int
) -> Adapter:
    """Random adapters whose ``b @ a`` have elements of about the given sizes (``w13``, ``w2``)."""
    generator = torch.Generator().manual_seed(seed)
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    for name in ("w1", "w2", "w3") if gated else ("w1", "w2"):
        rows, columns = (hidden, inner) if name == "w2" else (inner, hidden)
        size = sizes["w2" if name == "w2" else "w13"] / RANK**0.5
        a[name] = torch.randn(experts, RANK, columns, generator=generator).to(dtype)
        b[name] = (torch.randn(experts, rows, RANK, generator=generator) * size).to(dtype)
    return Adapter(a, b)


class AdaptedLayer:
    """vLLM's own LoRA layer around a layer of experts.

    Args:
        runner: vLLM's layer, with converted weights.
        adapters: of its experts.
        config: vLLM's `LoRAConfig`.
        punica_wrapper: vLLM's kernels, or those of this module.
        of_both: the adapters have gate and up in one tensor, whose rows alternate, as gpt-oss's have.
    """

    def __init__(
        self, runner: Any, adapters: Sequence[Adapter], config: Any, punica_wrapper: Any, of_both: bool = False
    ) -> None:
        from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA

        self.wrapper = (FusedMoE3DWithLoRA if of_both else FusedMoEWithLoRA)(runner)
        model = SimpleNamespace(architectures=["GptOssForCausalLM"])
        self.wrapper.create_lora_weights(config.max_loras, config, model)
        for index, adapter in enumerate(adapters):
            a, b = dict(adapter.a), dict(adapter.b)
            if of_both:
                # One factor of both: each has its half of the rank.
                a13 = torch.cat((a["w1"], a["w3"]), 1)
                none = torch.zeros_like(b["w1"])
                rows = torch.cat((b["w1"], none), 2), torch.cat((none, b["w3"]), 2)
                b13 = torch.stack(rows, 2).flatten(1, 2)
                self.wrapper.set_lora(index, [a13, a["w2"]], [b13, b["w2"]])
                continue
            names = ("w1", "w2", "w3" if "w3" in a else "w1")
            self.wrapper.set_lora(index, [a[name] for name in names], [b[name] for name in names])
        self.punica_wrapper, self.most = punica_wrapper, config.max_loras
        self.wrapper.set_mapping(punica_wrapper)

    def choose(self, adapters: Sequence[int]) -> None:
        """Sets each token's adapter; -1 for none."""
        from vllm.lora.layers import LoRAMapping

        wanted = tuple(each + 1 for each in adapters)
        mapping = LoRAMapping(index_mapping=wanted, prompt_mapping=wanted, is_prefill=True)
        self.punica_wrapper.update_metadata(mapping, [index + 1 for index in range(self.most)], self.most, 32000)


class TorchPunica:
    """vLLM's kernels for LoRA on experts in plain torch, as the docstrings of its mixin and its context ask for it."""

    def __init__(self) -> None:
        self.token_mapping_meta = SimpleNamespace(no_lora_flag_cpu=torch.tensor([True]))
        self.adapter = torch.zeros(0, dtype=torch.long)
        self.calls: list[str] = []

    def update_metadata(self, mapping: Any, ids: list[int], *more: Any) -> None:
        """Takes each token's adapter."""
        self.adapter = torch.tensor([ids.index(each) if each else -1 for each in mapping.index_mapping])
        self.token_mapping_meta.no_lora_flag_cpu[0] = bool((self.adapter < 0).all())

    def add_lora_w13(
        self, y: Tensor, x: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], topk_ids: Tensor,
        topk_weights: Tensor, expert_map: Tensor | None, w1: Tensor, w2: Tensor, *more: Any, **options: Any,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """``y[token, choice] += b @ a @ x[token]``, slice by slice."""
        self.calls.append("w13")
        experts, hidden = a[0].shape[1], x.shape[-1]
        assert w1.shape == (experts, y.shape[-1], hidden) and w2.shape[:2] == (experts, hidden)
        ids = topk_ids.long()
        local = ids if expert_map is None else expert_map.long()[ids.clamp(min=0)]
        local = local.masked_fill(topk_ids < 0, -1)
        rows = y.view(*topk_ids.shape, len(a), -1)
        for index, (down, up) in enumerate(zip(a, b, strict=True)):
            self._add(rows[:, :, index], x[:, None].expand(-1, topk_ids.shape[1], -1), down, up, local, None)
        return local, None, None, None

    def add_lora_w2(
        self, y: Tensor, x: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], topk_weights: Tensor, lists: Tensor,
        *more: Any, **options: Any,
    ) -> None:  # fmt: skip
        """``y[token, choice] += weight * b @ a @ x[slot]``."""
        self.calls.append("w2")
        self._add(y, x.view(*topk_weights.shape, -1), a[0], b[0], lists, topk_weights)

    def _add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, local: Tensor, weights: Tensor | None) -> None:
        for token, choice in (local >= 0).nonzero().tolist():
            adapter, expert = int(self.adapter[token]), int(local[token, choice])
            if adapter < 0:
                continue
            # As vLLM's kernels round: the factor between both products to the adapter's dtype.
            between = (a[adapter, expert].float() @ x[token, choice].float()).to(a.dtype)
            added = b[adapter, expert].float() @ between.float()
            y[token, choice] += (added if weights is None else added * weights[token, choice]).to(y.dtype)
