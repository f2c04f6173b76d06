"""vLLM's config of a MoE layer, translated to a `Problem`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core import activations
from ..core.problem import (
    EVEN_SPLIT_MODEL_TYPE,
    Activation,
    Parallel,
    Placement,
    Problem,
    Routing,
    Scheme,
    are_groups_ignored,
    features_for_stock,
)
from ..releases.expert_names import min_expert_width
from .engine_adapter import EngineAdapter
from .layer_context import current_layer


class LayerAdapter(EngineAdapter):
    """What vLLM's config and constructors say about a MoE layer under construction."""

    def unsupported_features(self, moe: Any) -> list[str]:
        """Features of a layer that only stock vLLM's own methods support, in words."""
        return features_for_stock(
            self.lora_reaches_experts(moe, current_layer()[1]),
            moe.moe_parallel_config.use_batched_activation_format,
            self.unpadded_intermediate_size(moe) > 0,
        )

    def unpadded_intermediate_size(self, moe: Any) -> int:
        """Intermediate size of the checkpoint's experts, where the model's code pads them with zeros; 0 elsewhere.

        Args:
            moe: vLLM's `FusedMoEConfig`. It holds the padded size alone until the layer has been built.
        """
        width = self._model_field("moe_intermediate_size", 0)
        if not min_expert_width(self.model_type(), self.version()) or type(width) is not int:
            return 0
        built = moe.intermediate_size_per_partition * moe.moe_parallel_config.tp_size
        return width if 0 < width < built else 0

    def problem(self, moe: Any, layer: Any, name: str, scheme: Scheme) -> Problem:
        """The `Problem` of one MoE layer on this rank.

        Args:
            moe: vLLM's `FusedMoEConfig`.
            layer: the layer under construction; None where vLLM does not pass it on. Routing details are unknown then.
            name: the layer's name.
            scheme: the number format of the checkpoint.
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
            lora=self.lora_reaches_experts(moe, name),
            eplb=bool(parallel.enable_eplb),
            batch_invariant=self.batch_invariant(),
            even_expert_split=self.model_type() == EVEN_SPLIT_MODEL_TYPE,
            num_layers=self.num_layers(),
            unpadded_intermediate_size=self.unpadded_intermediate_size(moe),
        )

    def placement(self, moe: Any, layer: Any) -> Placement:
        """How experts are placed on ranks.

        vLLM decides before it constructs the layer's method. It places experts round-robin only if the user asks for
        it, if there are several expert groups, without EPLB, and not with every all-to-all. Without the layer, the
        user's request is taken for the decision; that rules out some kernels which could run.

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

    def local_expert(self, layer: Any, expert: int) -> int:
        """This rank's number of an expert, or -1.

        Args:
            layer: the layer.
            expert: the expert's number over all ranks; with redundant experts that of a copy.
        """
        return int(layer._map_global_expert_id_to_local_expert_id(expert))

    def activation(self, moe: Any) -> Activation:
        """The layer's activation with its parameters."""
        name = str(moe.activation.value)
        fields = self.activation_fields(activations.canonical_name(name))
        stated = {parameter: getattr(moe, field) for parameter, field in fields.items()}
        return activations.from_vllm(name, bool(moe.is_act_and_mul), **stated)

    def uninterleaved_activation(self, moe: Any) -> Any:
        """vLLM's ``MoEActivation`` for gate rows, then up rows. Its plain ``swigluoai`` expects rows that alternate.

        In a release without ``swigluoai_uninterleave`` the activation stays as it is; no expert class accepts it there.

        Args:
            moe: vLLM's `FusedMoEConfig`.

        Returns:
            A member of `MoEActivation`.
        """
        name = f"{moe.activation.value}_uninterleave"
        return next((each for each in type(moe.activation) if str(each.value) == name), moe.activation)

    def activation_fields(self, name: str) -> Mapping[str, str]:
        """The fields of `FusedMoEConfig` in which a model sets alpha, beta and limit; those that the release has.

        Args:
            name: the activation's in `core.activations.ACTIVATIONS`.
        """
        return activations.layer_fields(name)

    def routing(self, moe: Any, layer: Any) -> Routing:
        """How the layer routes tokens to experts."""
        method = moe.routing_method.name.lower()
        if layer is None:
            return Routing(method=method)
        grouped = layer.use_grouped_topk and not are_groups_ignored(layer.num_expert_group, moe.num_logical_experts)
        return Routing(
            method=method,
            scoring=layer.scoring_func,
            renormalize=bool(layer.renormalize),
            num_groups=layer.num_expert_group if grouped else None,
            top_k_groups=layer.topk_group if grouped else None,
            correction_bias=layer.e_score_correction_bias is not None,
            apply_router_weight_on_input=bool(layer.apply_router_weight_on_input),
            hash_routing=self.hash_routing(moe, layer),
        )

    def hash_routing(self, moe: Any, layer: Any) -> bool:
        """Whether the layer looks experts up in a table by token id. A monolithic kernel needs that table."""
        return bool(moe.has_hash_routing)
