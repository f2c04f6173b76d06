"""MXFP8 weights on fp8 tensor cores, with one scale a row and a token: never without the user's word, weights next to
exact or refused. The kernels' numbers are tested on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.lib.cases import H200, RELU2, SILU, problem
from vllm_moe_oracle.backends.hopper_mxfp8_w8a8_token import BACKEND, MAX_BLOCK_ERROR
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.kernels.fp8_weights import row_order
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.schemes import mxfp8
from vllm_moe_oracle.settings import load

ALLOWED = {"MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION": "1"}
NAMED = {"MOE_ORACLE_BACKEND": BACKEND.name}
SCHEME = Scheme("mxfp8", 8, 32, "modelopt")
LAYERS = {
    "silu": problem(scheme=SCHEME, experts=2, top_k=2, hidden_size=160, intermediate_size=96, activation=SILU),
    "relu2": problem(
        scheme=SCHEME, experts=2, top_k=2, hidden_size=128, intermediate_size=192, activation=RELU2, has_bias=True
    ),
}


def canonical(layer: Problem) -> dict[str, torch.Tensor]:
    """Normal weights, quantized as checkpoints are: a row's scales differ by a few binades."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for name, shape in mxfp8.shapes(layer).items():
        if name.endswith("_bias"):
            made[name] = torch.randn(shape, generator=generator)
        elif not name.endswith("_scale"):
            codes, scales = mxfp8.quantize(torch.randn(shape, generator=generator) * 0.02)
            made |= {name: codes, f"{name}_scale": scales}
    return made


def one_of(weights: dict[str, torch.Tensor], expert: int) -> dict[str, torch.Tensor]:
    return {name: each[expert].clone() for name, each in weights.items()}


@pytest.mark.parametrize("declared", ("16bit", "mxfp8"))
def test_rejected_unless_activation_quantization_is_allowed(declared: Any) -> None:
    """Not even for a checkpoint that declares MXFP8 activations: its scales are for 32 columns, not for a token."""
    layer = dataclasses.replace(LAYERS["silu"], scheme=dataclasses.replace(SCHEME, activations=declared))
    found = [each for each in decide(layer, H200, load({})).candidates if each.backend == BACKEND.name]
    assert [reason.code for each in found for reason in each.reasons] == ["activation_quantization"]
    with pytest.raises(Exception, match="fp8_token"):
        decide(layer, H200, load(NAMED))
    assert decide(layer, H200, load(ALLOWED)).backend != BACKEND.name
    decision = decide(layer, H200, load(ALLOWED | NAMED))
    assert decision.backend == BACKEND.name
    for word in ("quantized to e4m3 with one scale per token", "in both products", "a power of two per row"):
        assert word in decision.summary()


@pytest.mark.parametrize("name", list(LAYERS))
def test_conversion_is_what_was_loaded_but_for_what_is_subnormal(name: str) -> None:
    layer = LAYERS[name]
    weights, plan = canonical(layer), BACKEND.plan(layer, H200)
    for expert in range(layer.local_experts):
        one = one_of(weights, expert)
        assert BACKEND.validate_weights(one, layer) == ""
        stored = BACKEND.convert(one, layer, plan)
        for which in ("w13", "w2"):
            order = row_order(which, one[which].shape[0], layer.activation.gated)
            values = stored[which].float() * stored[f"{which}_scale"][:, None]
            exact = mxfp8.dequantize_expert(one, which)[order]
            assert ((values - exact).abs() <= 2.0**-10 * stored[f"{which}_scale"][:, None]).all()
            blocks = exact.unflatten(1, (-1, 32)).norm(dim=-1)
            assert ((values - exact).unflatten(1, (-1, 32)).norm(dim=-1) <= MAX_BLOCK_ERROR * blocks).all()
            if layer.has_bias:
                assert torch.equal(stored[f"{which}_bias"], one[f"{which}_bias"][order])


def test_a_row_that_would_lose_more_is_named_with_its_numbers() -> None:
    """A block of 1.125 alone, 256 under the row's other scale: 2**-6 * 1.125 is held, 2**-7 * 1.125 is a tie of e4m3's
    subnormals, which have three bits less there."""
    layer = LAYERS["silu"]
    one = one_of(canonical(layer), 0)
    codes = torch.full((layer.intermediate_size,), 1.125)
    codes[0], codes[1:32] = 256.0, 0.0
    one["w2"][7] = codes.to(torch.float8_e4m3fn)
    one["w2_scale"][7] = 100
    for distance, lost in ((0, 0.0), (6, 0.0), (7, 1 / 9), (8, 1 / 9)):
        one["w2_scale"][7, 0] = 100 + distance
        said = BACKEND.validate_weights(one, layer)
        assert bool(said) == (lost > MAX_BLOCK_ERROR), distance
        if said:
            for word in (
                "row 7 of w2", f"from 2**-27 to 2**{distance - 27}", f"{lost:.1e} of a block",
                f"{MAX_BLOCK_ERROR:.1e} is allowed",
                f"1 of {layer.hidden_size} rows", "hopper_mxfp8 takes such weights",
            ):  # fmt: skip
                assert word in said, said


def test_normal_weights_with_scales_ten_binades_apart_are_taken() -> None:
    layer = LAYERS["silu"]
    one = one_of(canonical(layer), 0)
    one["w2_scale"][5, 0] += 10
    assert BACKEND.validate_weights(one, layer) == ""
    one["w2_scale"][5, 0] += 10
    assert "row 5 of w2" in BACKEND.validate_weights(one, layer)
