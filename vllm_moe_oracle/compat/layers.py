"""vLLM's config of a layer as a problem."""

from __future__ import annotations

from typing import Any

from ..oracle.problem import EQUAL_EXPERTS, Activation, Parallel, Placement, Problem, Routing, Scheme
from .engine import Engine

_OAI_DEFAULTS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
"""gpt-oss's constants, which vLLM's kernels for ``swigluoai`` have built in."""

_STEP_LIMIT = 7.0
"""The limit that vLLM's kernels for ``swiglustep`` have built in."""


class Layers(Engine):
    """What vLLM says of a MoE layer that is being built."""

    def beyond_us(self, moe: Any) -> list[str]:
        """What a layer is asked to do that only stock vLLM's own methods are known to do."""
        batched = moe.moe_parallel_config.use_batched_activation_format
        return ["LoRA on experts"] * bool(moe.is_lora_enabled) + ["a batched all-to-all"] * bool(batched)

    def problem(self, moe: Any, layer: Any, name: str, scheme: Scheme) -> Problem:
        """One MoE layer of this rank as a problem.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            layer: the layer under construction, or None where vLLM does not hand it out; routing details are then
                unknown.
            name: the layer's name.
            scheme: what the checkpoint holds.
        """
        parallel = moe.moe_parallel_config
        return Problem(
            layer=name,
            scheme=scheme,
            num_experts=moe.num_experts,
            local_experts=moe.num_local_experts,
            top_k=moe.experts_per_token,
            hidden_size=moe.hidden_dim,
            intermediate_size=moe.intermediate_size_per_partition,
            activation=self.activation(moe),
            has_bias=bool(moe.has_bias),
            dtype=str(moe.in_dtype).removeprefix("torch."),
            routing=self.routing(moe, layer),
            parallel=Parallel(
                tp=parallel.tp_size,
                ep=parallel.ep_size if parallel.use_ep else 1,
                dp=parallel.dp_size,
                format="batched" if parallel.use_batched_activation_format else "standard",
                placement=self.placement(moe, layer),
            ),
            lora=bool(moe.is_lora_enabled),
            eplb=bool(parallel.enable_eplb),
            batch_invariant=self.batch_invariant(),
            equal_experts=self.model_type() == EQUAL_EXPERTS,
        )

    def placement(self, moe: Any, layer: Any) -> Placement:
        """How experts are dealt out to ranks. vLLM deals by turns, where asked to, only experts in several groups, not
        under EPLB, and not with every all-to-all; before it asks for the layer's method it has decided. Of a layer that
        it does not hand out, what was asked for is taken, and a few kernels are refused that could run.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            layer: the layer under construction, or None.
        """
        parallel = moe.moe_parallel_config
        if not (parallel.use_ep and parallel.ep_size > 1):
            return "linear"
        if layer is not None:
            return "round_robin" if layer.expert_placement_strategy == "round_robin" else "linear"
        asked = self.engine().parallel_config.expert_placement_strategy
        return "round_robin" if asked == "round_robin" and not parallel.enable_eplb else "linear"

    def activation(self, moe: Any) -> Activation:
        """The layer's activation with its parameters."""
        name = str(moe.activation.value)
        gated = bool(moe.is_act_and_mul)
        interleaved = name == "swigluoai"
        name = name.removesuffix("_no_mul").removesuffix("_uninterleave")
        alpha, beta, limit = self.activation_parameters(moe)
        if name == "situ":
            return Activation(name, gated, *self.situ_parameters(moe), limit)
        if name == "swiglustep":
            return Activation(name, gated, alpha, beta, _STEP_LIMIT if limit is None else limit)
        if name == "swigluoai":
            alpha = _OAI_DEFAULTS["alpha"] if alpha is None else alpha
            beta = _OAI_DEFAULTS["beta"] if beta is None else beta
            limit = _OAI_DEFAULTS["limit"] if limit is None else limit
        return Activation(name, gated, alpha, beta, limit, interleaved)

    def activation_in_halves(self, moe: Any) -> Any:
        """vLLM's activation for gate rows, then up rows: its ``swigluoai`` takes rows that alternate, and the other one
        has a name of its own. The very activation where the release has no other: no class takes the layer there."""
        name = f"{moe.activation.value}_uninterleave"
        return next((each for each in type(moe.activation) if str(each.value) == name), moe.activation)

    def activation_parameters(self, moe: Any) -> tuple[float | None, float | None, float | None]:
        """Alpha, beta and limit as the model set them."""
        return moe.swiglu_alpha, moe.swiglu_beta, moe.swiglu_limit

    def situ_parameters(self, moe: Any) -> tuple[float | None, float | None]:
        """Alpha and beta of ``situ`` as the model set them; a beta not above zero leaves up as it is."""
        return moe.activation_situ_beta, _positive(moe.activation_situ_linear_beta)

    def routing(self, moe: Any, layer: Any) -> Routing:
        """How the layer's tokens choose experts."""
        method = moe.routing_method.name.lower()
        if layer is None:
            return Routing(method=method)
        return Routing(
            method=method,
            scoring=layer.scoring_func,
            renormalize=bool(layer.renormalize),
            num_groups=layer.num_expert_group if layer.use_grouped_topk else None,
            top_k_groups=layer.topk_group if layer.use_grouped_topk else None,
            correction_bias=layer.e_score_correction_bias is not None,
            weight_on_input=bool(layer.apply_router_weight_on_input),
            hashed=self.hashed(moe, layer),
        )

    def hashed(self, moe: Any, layer: Any) -> bool:
        """Whether experts come from a table over token ids, which a kernel that routes itself has to be given."""
        return bool(moe.has_hash_routing)


def _positive(value: float | None) -> float | None:
    return value if value is not None and value > 0 else None
