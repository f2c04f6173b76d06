"""MX weights in float16: stored exactly as far as float16 reaches, which numerics say. The kernels' decoding of what is
stored is tested in `tests/kernels/test_decode.py`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.lib.cases import H200, SILU, problem
from vllm_moe_oracle.backends import hopper_mxfp4, hopper_mxfp8, hopper_mxfp8_w8a8
from vllm_moe_oracle.core.problem import Scheme
from vllm_moe_oracle.kernels.weights import dequantize_expert
from vllm_moe_oracle.schemes import mxfp4, mxfp8

BACKENDS = [hopper_mxfp4.BACKEND, hopper_mxfp8.BACKEND, hopper_mxfp8_w8a8.BACKEND]
SPREADS = {"mxfp4": 24, "mxfp8": 22}
"""From the formats: e2m1 has values down to 2**-1 and is stored times 2, e4m3 down to 2**-9 and times 2**7, of the
row's largest scale; float16 has multiples of 2**-24."""


def layer_of(backend: Any, dtype: str = "float16") -> Any:
    name = backend.schemes[0]
    scheme = Scheme(name, 4 if name == "mxfp4" else 8, 32, name)
    return problem(
        scheme=scheme, experts=1, top_k=1, hidden_size=160, intermediate_size=96, activation=SILU, dtype=dtype
    )


def expert_of(layer: Any, spread: int) -> dict[str, torch.Tensor]:
    """Random canonical weights of an expert, whose rows' scales differ by `spread` binades at most."""
    generator = torch.Generator().manual_seed(0)
    module = {"mxfp4": mxfp4, "mxfp8": mxfp8}[layer.scheme.name]
    made = {}
    for name, shape in module.shapes(layer).items():
        if name.endswith("_scale"):
            made[name] = torch.randint(100, 101 + spread, shape[1:], dtype=torch.uint8, generator=generator)
        else:
            codes = torch.randint(1, 127, shape[1:], dtype=torch.uint8, generator=generator)
            made[name] = codes.view(torch.float8_e4m3fn) if module is mxfp8 else codes
    return made


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_weights_that_float16_holds_are_stored_exactly(backend: Any) -> None:
    layer = layer_of(backend)
    expert = expert_of(layer, SPREADS[layer.scheme.name])
    assert backend.validate_weights(expert, layer) == ""
    stored = backend.convert(expert, layer, backend.plan(layer, H200))
    own = backend._stored({key: tensor[None] for key, tensor in stored.items()}, backend._allocate(layer, 1, "meta"))
    module = {"mxfp4": mxfp4, "mxfp8": mxfp8}[layer.scheme.name]
    for which in ("w13", "w2"):
        assert torch.equal(dequantize_expert(own, which, 0), module.dequantize_expert(expert, which))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_numerics_say_how_far_float16_reaches(backend: Any) -> None:
    layer = layer_of(backend)
    weights = backend.numerics(layer).weights
    assert weights.endswith(f"float16, exact within {SPREADS[layer.scheme.name]} binades of a row's largest scale")
    plain = backend.numerics(dataclasses.replace(layer, dtype="bfloat16"))
    assert plain.weights == "converted exactly to bfloat16 and scaled in bfloat16"
    assert plain.activations.replace("bfloat16", "float16") == backend.numerics(layer).activations


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.name)
def test_what_float16_cannot_hold_is_off_by_a_small_part_of_the_row(backend: Any) -> None:
    """Blocks of almost nothing beside ordinary ones, as rows with dead columns have."""
    layer = layer_of(backend)
    expert = expert_of(layer, 3)
    expert["w2_scale"][7] = torch.tensor([120, 120 - SPREADS[layer.scheme.name] - 3, 2], dtype=torch.uint8)
    stored = backend.convert(expert, layer, backend.plan(layer, H200))
    own = backend._stored({key: tensor[None] for key, tensor in stored.items()}, backend._allocate(layer, 1, "meta"))
    module = {"mxfp4": mxfp4, "mxfp8": mxfp8}[layer.scheme.name]
    off = (dequantize_expert(own, "w2", 0) - module.dequantize_expert(expert, "w2")).abs()
    # Half of float16's smallest number, of a row whose largest scale is stored as 2**1 (e2m1) or 2**7 (e4m3).
    assert off[7].max() <= 2.0 ** (120 - 127 - {"mxfp4": 26, "mxfp8": 32}[layer.scheme.name])
    off[7] = 0
    assert not off.any()
