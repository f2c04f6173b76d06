"""LoRA adapters on experts that call a Python function.

vLLM computes what adapters add; its mixin says how, in every supported release. The function gets that as an addend of
its first product, and adds the second product's part to its output (`backends.Adapters`). So a batch without adapters
runs as without LoRA, and an adapter of zeros adds zeros to float32 sums.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

from ..releases import min_versions
from .function_experts import FunctionExperts


class LoRAFunctionExperts(LoRAExpertsMixin, FunctionExperts):
    """`FunctionExperts` whose function takes ``adapters``.

    Args:
        alternating: in vLLM's order of rows, gate's and up's alternate (gpt-oss).
        arguments: those of `FunctionExperts`.

    Attributes:
        mixin_interleaves: vLLM's mixin leaves columns of gate and up from two adapters alternating.
    """

    def __init__(self, *arguments: Any, alternating: bool, **sizes: Any) -> None:
        super().__init__(*arguments, **sizes)
        self.alternating: bool = alternating
        self.mixin_interleaves: bool = alternating and _mixin_interleaves()

    def _run(self, *arguments: Any) -> None:
        """Calls the function; a batch with adapters without our operator, whose arguments are tensors. Adapters run on
        GPUs alone, where an operator of vLLM's hides the whole layer from torch.compile."""
        lora_context = self._lora_context
        if lora_context is None or not _any_adapter(lora_context.punica_wrapper):
            super()._run(*arguments)
        else:
            _, x, *routed, _ = arguments
            self.runner(*arguments, adapters=_CallAdapters(self, lora_context, x, *routed))


def _mixin_interleaves() -> bool:
    """Whether vLLM's mixin leaves gate and up as the layer orders them; before, it writes two halves."""
    return min_versions.vllm_at_least(vllm.__version__, minimum=min_versions.LORA_ALTERNATING_ROWS)


def _any_adapter(punica_wrapper: Any) -> bool:
    """Whether a token of the batch has an adapter, as far as vLLM knows on the host.

    vLLM's own LoRA kernels ask the same flag. CUDA graphs are captured with it, and vLLM replays one that fits the
    batch.
    """
    return not bool(punica_wrapper.token_mapping_meta.no_lora_flag_cpu.item())


class _CallAdapters:
    """`backends.Adapters` of one call, over vLLM's context."""

    def __init__(
        self,
        experts: LoRAFunctionExperts,
        lora_context: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        expert_map: Tensor | None,
    ) -> None:
        moe = experts.moe_config
        self._experts, self._context, self._x = experts, lora_context, x
        self._topk_weights, self._topk_ids, self._expert_map = topk_weights, topk_ids, expert_map
        inner, hidden = moe.intermediate_size_per_partition, moe.hidden_dim
        shape = moe.num_local_experts, (1 + bool(moe.is_act_and_mul)) * inner
        # vLLM chooses its kernels' tiles by the shapes that unquantized weights would have, and reads nothing else.
        self._weights = {
            "w1": torch.empty(*shape, hidden, device="meta"),
            "w2": torch.empty(shape[0], hidden, inner, device="meta"),
        }
        self._lists: tuple[Any, ...] = ()

    def gate_up(self) -> Tensor:
        """See `backends.Adapters`."""
        tokens, top_k = self._topk_ids.shape
        delta = self._x.new_zeros(tokens, top_k, self._weights["w1"].shape[1])
        self._lists = self._experts.apply_w13_lora(
            self._context,
            y=delta,
            x=self._x,
            topk_ids=self._topk_ids,
            topk_weights=self._topk_weights,
            expert_map=self._expert_map,
            num_tokens=tokens,
            top_k_num=top_k,
            **self._weights,
        )
        if self._alternates():
            delta = delta.view(tokens, top_k, -1, 2).transpose(-1, -2).contiguous()
        return delta.view(tokens * top_k, -1)

    def _alternates(self) -> bool:
        """Whether vLLM's mixin has left gate and up columns alternating."""
        # An adapter of both in one tensor has the rows of the checkpoint.
        of_both = self._context.w13_num_slices == 1
        return self._experts.alternating if of_both else self._experts.mixin_interleaves

    def add_down(self, out: Tensor, h: Tensor) -> None:
        """See `backends.Adapters`."""
        tokens, top_k = self._topk_ids.shape
        delta = out.new_zeros(tokens, top_k, out.shape[1])
        sorted_ids, expert_ids, padded, mapping = self._lists
        self._experts.apply_w2_lora(
            self._context,
            y=delta,
            x=h,
            topk_weights=self._topk_weights,
            sorted_token_ids_lora=sorted_ids,
            expert_ids_lora=expert_ids,
            num_tokens_post_padded_lora=padded,
            token_lora_mapping=mapping,
            num_tokens=tokens,
            top_k_num=top_k,
            **self._weights,
        )
        out += delta.sum(1, dtype=torch.float32)
