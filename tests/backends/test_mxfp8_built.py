"""Stock classes over MXFP8 weights, as the backends build them.

Biases and the parameters of the activation are theirs from the start, sizes are those of the plan.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.lib.built_experts import Built, built
from tests.lib.cases import MXFP8_W8A8, SILU, problem
from tests.lib.stock_rules import gpu

pytest.importorskip("vllm", reason="vLLM's own classes are built")

from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import Activation, Problem, Routing
from vllm_moe_oracle.oracle.registry import default_registry

OAI = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)
# Humming's classes need its package, which is for GPUs: `tests/gpu` builds and runs them.
CAPABILITIES = {"marlin_mxfp8": 90, "trtllm_mxfp8": 100, "trtllm_mxfp8_monolithic": 100, "deep_gemm_mxfp8": 100}
HIDDEN, INNER = 384, 96


def build(name: str, layer: Problem, monkeypatch: pytest.MonkeyPatch) -> Built:
    made = built(name, layer, gpu(CAPABILITIES[name]), monkeypatch)
    told = (made.config.hidden_dim, made.config.intermediate_size_per_partition)
    if name.startswith("trtllm"):
        assert made.plan.pads(layer) and told == (made.plan.hidden_size, made.plan.intermediate_size)
    else:
        assert told == (HIDDEN, INNER)
    return made


def usual(**changes: Any) -> Problem:
    return problem(
        **{
            "scheme": MXFP8_W8A8, "routing": Routing("renormalize"), "hidden_size": HIDDEN, "intermediate_size": INNER,
            "experts": 8, "top_k": 2, "activation": SILU,
        }
        | changes
    )  # fmt: skip


@pytest.mark.parametrize("name", CAPABILITIES)
def test_weights_and_inputs_are_described_as_the_class_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tensors, *_ = build(name, usual(), monkeypatch)
    consumed = default_registry()[name].activations(usual())
    assert made.quant_config.quant_dtype == {"16bit": None, "mxfp8": "mxfp8"}[consumed]
    assert not made.quant_config.is_scale_swizzled
    assert made.w1_bias is None and made.w2_bias is None
    scale = made.w1_scale if name != "deep_gemm_mxfp8" else made.w1_scale.transpose(-1, -2)
    assert scale.data_ptr() == tensors["w13_scale"].data_ptr()


@pytest.mark.parametrize("name", CAPABILITIES)
def test_biases_are_in_the_quant_config_or_the_layer_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = usual(has_bias=True)
    if name != "marlin_mxfp8":
        device = gpu(CAPABILITIES[name])
        assert [reason.code for reason in default_registry()[name].check(layer, device).reasons] == ["bias"]
        return
    made, tensors, plan, _ = build(name, layer, monkeypatch)
    # The kernel's own tensors, not copies: a reload writes new biases there.
    assert made.quant_config.w1_bias.data_ptr() == made.w1_bias.data_ptr() == tensors["w13_bias"].data_ptr()
    assert made.quant_config.w2_bias.data_ptr() == made.w2_bias.data_ptr() == tensors["w2_bias"].data_ptr()
    assert made.w1_bias.shape == (8, 2 * plan.intermediate_size) and made.w2_bias.shape == (8, HIDDEN)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_the_activations_parameters_are_the_classes_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(name, usual(activation=OAI), monkeypatch).experts
    described = made.quant_config
    assert (described.gemm1_alpha, described.gemm1_beta, described.gemm1_clamp_limit) == (1.702, 1.0, 7.0)
    if name.startswith("trtllm"):
        # One number for each expert, as the kernel reads them.
        for tensor, value in ((made.gemm1_alpha, 1.702), (made.gemm1_beta, 1.0), (made.gemm1_clamp_limit, 7.0)):
            assert tensor.shape == (8,) and tensor.unique().tolist() == pytest.approx([value])
    if name == "deep_gemm_mxfp8":
        assert (made.gemm1_alpha, made.gemm1_beta, made.gemm1_clamp_limit) == (1.702, 1.0, 7.0)
    if name == "marlin_mxfp8":
        given = made.activation_config
        assert (given.alpha, given.beta, given.clamp_limit) == (1.702, 1.0, 7.0)


@pytest.mark.parametrize("activation", [Activation("situ", alpha=4.0, beta=25.0), Activation("swiglustep", limit=7.0)])
def test_numbers_that_vllm_keeps_elsewhere_are_not_given_twice(
    activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build("marlin_mxfp8", usual(activation=activation), monkeypatch).experts
    given = made.activation_config
    assert (given.alpha, given.beta, given.clamp_limit) == (1.0, 0.0, None)
    assert (given.activation_situ_beta, given.activation_situ_linear_beta) == (activation.alpha, activation.beta)
    assert made._supports_activation(made.moe_config.activation)
    # Read back as it was given.
    assert current_adapter().activation(made.moe_config) == activation
