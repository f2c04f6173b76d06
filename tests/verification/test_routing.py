"""The self-check of kernels that route themselves: the reference agrees with vLLM's routers, faults are caught.

The stand-in for such a kernel routes with vLLM's own code for CPUs, does one thing wrong, and computes with the
emulation. It is run by vLLM's modular kernel through its monolithic interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router import cpu_router

from tests.lib import faulty_backends as modular
from tests.lib.cases import CPU, MXFP8, MXFP8_W8A8, SILU, problem
from tests.lib.tiers import each_once
from vllm_moe_oracle.backends.emulation import Emulation, forward
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import Problem, Routing
from vllm_moe_oracle.verification import routing, self_check

GROUPED = {"num_groups": 4, "top_k_groups": 2}
ROUTINGS = {
    "default": Routing("default", "softmax", renormalize=False),
    "renormalize": Routing("renormalize", "softmax"),
    "renormalizenaive": Routing("renormalizenaive", "softmax"),
    "topk": Routing("topk", "none", renormalize=False),
    "sigmoid": Routing("sigmoid", "sigmoid", renormalize=False),
    "sigmoidrenorm": Routing("sigmoidrenorm", "sigmoid"),
    "minimax2": Routing("minimax2", "sigmoid", correction_bias=True),
    "deepseekv3": Routing("deepseekv3", "sigmoid", correction_bias=True, **GROUPED),
    "deepseekv4": Routing("deepseekv4", "sqrtsoftplus", correction_bias=True),
}


def layer(experts: int, top_k: int, **changes: Any) -> Problem:
    """A small layer."""
    return problem(experts=experts, top_k=top_k, hidden_size=128, intermediate_size=64, **changes)


LAYERS = {name: layer(32, 4, scheme=MXFP8, activation=SILU, routing=how) for name, how in ROUTINGS.items()} | {
    "deepseekv3, W8A8": layer(64, 8, scheme=MXFP8_W8A8, activation=SILU, routing=ROUTINGS["deepseekv3"]),
    "renormalize, biases": layer(
        16, 4, scheme=MXFP8, activation=modular.OAI, has_bias=True, routing=ROUTINGS["renormalize"]
    ),
}


def stock_route(
    how: Routing, top_k: int, logits: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """vLLM's own routing on a CPU; by DeepSeek-V4's formula, and for plain top-k, torch's."""
    if how.scoring in ("softmax", "sigmoid"):
        return cpu_router._grouped_topk(
            logits,
            top_k,
            how.renormalize,
            how.num_groups or 1,
            how.top_k_groups or 1,
            how.scoring,
            scale or 1.0,
            bias,
        )
    scores = logits.float()
    if how.scoring == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(scores).sqrt()
    ids = torch.topk(scores if bias is None else scores + bias, top_k).indices
    weights = scores.gather(1, ids)
    if how.renormalize:
        weights = weights / weights.sum(-1, keepdim=True) * (scale or 1.0)
    return weights, ids.to(torch.int32)


Wrong = Callable[[dict[str, Any]], dict[str, Any]]
After = Callable[[Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor]]


class Experts(mk.FusedMoEExpertsMonolithic):
    """A kernel that routes: its arguments changed by `before`, its routing by `after`."""

    def __init__(self, moe: Any, quant_config: Any, tensors: Any, layer: Problem, before: Wrong, after: After) -> None:
        super().__init__(moe, quant_config)
        self.tensors, self.layer, self.before, self.after = tensors, layer, before, after

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    activation_format = staticmethod(lambda: mk.FusedMoEActivationFormat.Standard)
    _supports_current_device = staticmethod(lambda: True)
    _supports_no_act_and_mul = staticmethod(lambda: True)
    _supports_quant_scheme = staticmethod(lambda weight_key, activation_key: True)
    _supports_activation = staticmethod(lambda activation: True)
    _supports_parallel_config = staticmethod(lambda config: True)

    def apply(
        self,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        router_logits: Tensor,
        *args: Any,
        num_expert_group: int | None = None,
        e_score_correction_bias: Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        how = dataclasses.replace(self.layer.routing, num_groups=num_expert_group, top_k_groups=topk_group)
        given = {"how": how, "logits": router_logits, "bias": e_score_correction_bias, "scale": routed_scaling_factor}
        given = self.before(given)
        weights, ids = stock_route(
            given["how"], self.moe_config.experts_per_token, given["logits"], given["bias"], given["scale"]
        )
        weights, ids = self.after(weights, ids, given)
        out = torch.empty_like(hidden_states)
        forward(self.tensors, self.layer, out, hidden_states, weights, ids)
        return out


class Routes(Emulation):
    """A backend over it."""

    monolithic = True

    def __init__(
        self,
        name: str = "none",
        before: Wrong = lambda given: given,
        after: After = lambda weights, ids, given: (weights, ids),
        convert: modular.Convert = lambda expert, layer: expert,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self._parts = before, after
        self._convert = convert

    def convert(self, expert: Any, problem: Problem, plan: Any) -> dict[str, Tensor]:
        return self._convert(dict(expert), problem)

    def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        return Experts(builder._moe, builder._quant_config, tensors, problem, *self._parts)


def change(**fields: Any) -> Wrong:
    return lambda given: given | {"how": dataclasses.replace(given["how"], **fields)}


def biased_weights(weights: Tensor, ids: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    scores = (given["logits"].float().sigmoid() + given["bias"]).gather(1, ids.long())
    return scores / scores.sum(-1, keepdim=True) * given["scale"], ids


def unshifted_softmax(weights: Tensor, ids: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Without the largest logit subtracted."""
    scores = given["logits"].float().exp()
    found = (scores / scores.sum(-1, keepdim=True)).gather(1, ids.long())
    return found / found.sum(-1, keepdim=True) if given["how"].renormalize else found, ids


BIASED = ["minimax2", "deepseekv3", "deepseekv4", "deepseekv3, W8A8"]
RENORMALIZED = [*BIASED, "renormalize", "renormalizenaive", "sigmoidrenorm", "renormalize, biases"]
GROUPS = ["deepseekv3", "deepseekv3, W8A8"]
SOFTMAX = ["default", "renormalize", "renormalizenaive", "renormalize, biases"]
FAULTS: list[tuple[Routes, list[str]]] = [
    (Routes("not renormalized", change(renormalize=False)), RENORMALIZED),
    (Routes("renormalized", change(renormalize=True)), ["default", "sigmoid"]),
    (Routes("softmax scores", change(scoring="softmax")), ["sigmoid", "sigmoidrenorm", *BIASED[:2]]),
    (Routes("sigmoid scores", change(scoring="sigmoid")), ["default", "renormalize", "renormalizenaive", "deepseekv4"]),
    (Routes("no groups", change(num_groups=None, top_k_groups=None)), GROUPS),
    (Routes("one group too many", lambda g: change(top_k_groups=g["how"].top_k_groups + 1)(g)), GROUPS),
    (Routes("no correction bias", lambda given: given | {"bias": None}), BIASED),
    (Routes("bias in the weights", after=biased_weights), ["minimax2", *GROUPS]),
    (Routes("no scaling factor", lambda given: given | {"scale": 1.0}), BIASED),
    (Routes("logits clamped at 50", lambda given: given | {"logits": given["logits"].clamp(max=50.0)}), SOFTMAX),
    (Routes("softmax of large logits overflows", after=unshifted_softmax), SOFTMAX),
    (Routes("one expert fewer", after=lambda w, ids, g: (w[:, 1:], ids[:, 1:])), list(LAYERS)),
    (Routes("experts one further", after=lambda w, ids, g: (w, (ids + 1) % g["logits"].shape[1])), list(LAYERS)),
    (Routes("weights of other experts", after=lambda w, ids, g: (w.roll(1, 0), ids)), list(LAYERS)),
    (Routes("swapped halves", convert=modular.swap_halves), list(LAYERS)),
    (Routes("scales of w2 one up", convert=modular.shift("w2_scale", 1)), list(LAYERS)),
]


def check(backend: Routes, layer: Problem, held: int | None = None) -> self_check.Comparison:
    """The check on a rank that holds `held` of the experts."""
    loaded = modular.weights(layer)
    if held is not None:
        layer = dataclasses.replace(layer, local_experts=held, parallel=dataclasses.replace(layer.parallel, ep=4))
        loaded = {name: tensor[:held] for name, tensor in loaded.items()}
    plan = backend.plan(layer, CPU)
    return self_check.compare_with_reference(backend, layer, plan, loaded, modular.moe_config(layer), current_adapter())


@pytest.mark.parametrize(("fault", "name"), each_once(FAULTS, lambda fault: fault.name))
def test_a_fault_is_caught(fault: Routes, name: str) -> None:
    result = check(fault, LAYERS[name])
    print(result)
    assert not result.skip_reason and not result.passed, result


@pytest.mark.parametrize("name", BIASED)
def test_a_kernel_that_changes_the_correction_bias_is_named(name: str) -> None:
    def adds(weights: Tensor, ids: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        given["bias"].add_(1.0)  # to all alike: the routing stays as it is
        return weights, ids

    result = check(Routes("adds", after=adds), LAYERS[name])
    assert not result.passed and "the kernel has changed its correction bias" in result.fault


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("held", [None, 3, 1])
def test_a_faultless_kernel_passes_with_any_number_of_experts_on_the_rank(name: str, held: int | None) -> None:
    result = check(Routes(), LAYERS[name], held)
    assert result.passed and not result.skip_reason, result
    # One rounding, of the output, of the six that the tolerance allows.
    assert result.error <= result.tolerance / 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_reference_agrees_with_vllms_routers(name: str, dtype: torch.dtype) -> None:
    how, top_k = ROUTINGS[name], 4
    logits, bias, scale = routing.discriminating_logits(how, top_k, 16, 24, dtype)
    assert logits.dtype == dtype and logits.shape == (16, 24)
    weights, ids = routing.route(how, top_k, logits, bias, scale)
    expected, chosen = stock_route(how, top_k, logits.float(), bias, scale)
    dense, other = (torch.zeros(16, 24).scatter(1, i.long(), w) for w, i in ((weights, ids), (expected, chosen)))
    torch.testing.assert_close(dense, other, rtol=1e-5, atol=1e-6)
    assert all(len(set(row)) == top_k for row in ids.tolist())


@pytest.mark.parametrize(
    "how",
    [
        Routing("llama4", "sigmoid", renormalize=False, apply_router_weight_on_input=True),
        Routing("custom"),
        Routing("simulated"),
        Routing("unspecified"),
        Routing("deepseekv4", "sqrtsoftplus", hash_routing=True),
        # Names and fields that contradict each other.
        Routing("renormalize", num_groups=4, top_k_groups=2),
        Routing("sigmoid", "sigmoid", correction_bias=True),
    ],
    ids=str,
)
def test_routing_without_a_reference_is_not_called_checked(how: Routing) -> None:
    result = check(Routes(), dataclasses.replace(LAYERS["renormalize"], routing=how))
    assert f"no reference for routing by {how.method}" in result.skip_reason and "not checked" in str(result)


@pytest.mark.parametrize(
    ("experts", "top_k", "groups", "chosen", "multiple", "needed"),
    [
        (128, 8, None, None, 1, 9),
        (128, 8, None, None, 4, 12),
        (8, 8, None, None, 4, 8),
        (256, 8, 8, 4, 4, 24),
        (256, 8, 8, 1, 4, 72),
        (64, 4, 4, 2, 1, 12),
    ],
)
def test_enough_experts_for_every_step(
    experts: int, top_k: int, groups: int | None, chosen: int | None, multiple: int, needed: int
) -> None:
    how = Routing("deepseekv3", "sigmoid", num_groups=groups, top_k_groups=chosen)
    assert routing.min_experts(layer(experts, top_k, scheme=MXFP8, routing=how), multiple) == needed


def test_logits_that_cannot_be_clear_are_an_error() -> None:
    with pytest.raises(ValueError, match="margin"):
        routing.discriminating_logits(ROUTINGS["sigmoid"], 2000, 8, 4000, torch.bfloat16)
