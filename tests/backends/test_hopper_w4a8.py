"""MXFP4 weights with fp8 activations: never without the checkpoint's or the user's word, weights exact or refused, all
that the layer has handed to the kernels. The kernels' numbers are tested on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.lib.cases import GPT_OSS, H200, SILU, problem
from tests.lib.function_recorder import FunctionRecorder
from tests.lib.peak_memory import Peak
from tests.lib.stock_rules import converted
from vllm_moe_oracle.backends.hopper_mxfp4_w4a8 import BACKEND
from vllm_moe_oracle.compat import weight_storage
from vllm_moe_oracle.core.decision import Decision
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.kernels.fp8_weights import row_order
from vllm_moe_oracle.layouts import e4m3_folding
from vllm_moe_oracle.oracle.registry import discover
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.schemes import fp8_token, mxfp4
from vllm_moe_oracle.settings import load

MXFP4 = Scheme("mxfp4", 4, 32, "mxfp4")
ALLOWED = {"MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION": "1"}
NAMED = {"MOE_ORACLE_BACKEND": BACKEND.name}
LAYERS = {
    "silu": problem(scheme=MXFP4, experts=3, top_k=2, hidden_size=160, intermediate_size=96, activation=SILU),
    "oai": problem(
        scheme=MXFP4, experts=2, top_k=2, hidden_size=128, intermediate_size=192, activation=GPT_OSS, has_bias=True
    ),
}


def canonical(layer: Problem, spread: int = 10) -> dict[str, torch.Tensor]:
    """Random canonical weights, with scales that differ by less than `spread` binades."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, shape in mxfp4.shapes(layer).items():
        if name.endswith("_bias"):
            made[name] = torch.randn(shape, generator=generator)
        else:
            high = 120 + spread if name.endswith("_scale") else 256
            low = 120 if name.endswith("_scale") else 0
            made[name] = torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)
    return made


def verdict(decision: Decision) -> list[str]:
    return [reason.code for each in decision.candidates if each.backend == BACKEND.name for reason in each.reasons]


@pytest.mark.parametrize("declared", ("16bit", "mxfp8", "fp8"))
def test_rejected_unless_activation_quantization_is_allowed(declared: Any) -> None:
    """Not even for a checkpoint that declares fp8: its scales are for 128 columns, not for a token."""
    layer = dataclasses.replace(LAYERS["oai"], scheme=dataclasses.replace(MXFP4, activations=declared))
    assert verdict(decide(layer, H200, load({}))) == ["activation_quantization"]
    with pytest.raises(Exception, match="fp8_token"):
        decide(layer, H200, load(NAMED))


def test_a_checkpoint_that_declares_one_scale_a_token_asks_for_it() -> None:
    layer = dataclasses.replace(LAYERS["oai"], scheme=dataclasses.replace(MXFP4, activations="fp8_token"))
    decision = decide(layer, H200, load({}))
    assert verdict(decision) == [] and decision.backend != BACKEND.name
    assert decide(layer, H200, load(NAMED)).backend == BACKEND.name
    # Powers of two for smaller groups are not the same numbers; 16 bits lose nothing.
    for each in decision.candidates:
        consumed = discover()[each.backend].activations(layer)
        refused = [reason for reason in each.reasons if reason.code == "activation_quantization"]
        assert bool(refused) == (consumed not in ("16bit", "fp8_token")), each.backend


def test_chosen_by_name_when_allowed() -> None:
    decision = decide(LAYERS["oai"], H200, load(ALLOWED))
    assert verdict(decision) == [] and decision.backend != BACKEND.name
    decision = decide(LAYERS["oai"], H200, load(ALLOWED | NAMED))
    assert decision.backend == BACKEND.name
    summary = decision.summary()
    for word in ("quantized to e4m3 with one scale per token", "in both products", "folded exactly into e4m3"):
        assert word in summary


@pytest.mark.parametrize("name", list(LAYERS))
def test_conversion_is_exact(name: str) -> None:
    layer = LAYERS[name]
    weights = canonical(layer)
    plan = BACKEND.plan(layer, H200)
    for expert in range(layer.local_experts):
        one = {key: tensor[expert] for key, tensor in weights.items()}
        assert BACKEND.validate_weights(one, layer) == ""
        stored = BACKEND.convert(one, layer, plan)
        for which in ("w13", "w2"):
            order = row_order(which, one[which].shape[0], layer.activation.gated)
            values = stored[which].float() * stored[f"{which}_scale"][:, None]
            assert torch.equal(values, mxfp4.dequantize_expert(one, which)[order])
            if layer.has_bias:
                assert torch.equal(stored[f"{which}_bias"], one[f"{which}_bias"][order])


def test_a_row_that_does_not_fit_is_named_with_its_exponents() -> None:
    layer = LAYERS["silu"]
    one = {key: tensor[0] for key, tensor in canonical(layer).items()}
    one["w2"][7] = 0x11  # 0.5 everywhere
    one["w2_scale"][7] = 100
    one["w2"][7, 0] = 0x77  # 6.0
    one["w2_scale"][7, 0] = 114
    assert BACKEND.validate_weights(one, layer) == ""
    one["w2_scale"][7, 0] = 115
    said = BACKEND.validate_weights(one, layer)
    for word in ("row 7 of w2", "up to 2**-10", "down to 2**-28", "17 binades", "1 of 160 rows", "hopper_mxfp4"):
        assert word in said
    # Should it be converted all the same, the row is not silently another one.
    scale = BACKEND.convert(one, layer, BACKEND.plan(layer, H200))["w2_scale"]
    assert torch.isnan(scale).sum() == 1


def test_converting_an_expert_takes_few_operations_and_little_memory() -> None:
    """What a conversion of four experts takes of the 150 ms of a self-check, and of the memory of one expert and 64 MiB
    that a layer's may take, follows from these two."""
    scheme = dataclasses.replace(MXFP4, packing="gpt_oss")
    activation = dataclasses.replace(GPT_OSS, interleaved=True)
    layer = problem(
        scheme=scheme, experts=2, top_k=2, hidden_size=2880, intermediate_size=2880, activation=activation,
        has_bias=True,
    )  # fmt: skip
    plan = BACKEND.plan(layer, H200)

    def convert(expert: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return BACKEND.convert(mxfp4.canonical_expert(expert, layer), layer, plan)

    weights = canonical(layer)
    one = mxfp4.canonical_expert({key: each[0] for key, each in weights.items()}, layer)
    expected = convert({key: each[1] for key, each in weights.items()})
    with Peak() as validating:
        assert BACKEND.validate_weights(one, layer) == ""
    module = nn.Module()
    for key, each in weights.items():
        weight_storage.replace_parameter(module, key, torch.empty_like(each))
    for key, kind in weight_storage.converted_specs(convert, weights).items():
        weight_storage.reserve_expert_buffers(module.get_parameter(key), kind)
        module.get_parameter(key).data.copy_(weights[key])
    with Peak(*module.parameters()) as converting:
        weight_storage.convert_in_place(module, {key: key for key in weights}, convert)
    assert all(torch.equal(bits(module.get_parameter(key)[1]), bits(each)) for key, each in expected.items())
    # Four parts of w13 and two of w2, eleven operations each; 24 a matrix beside them
    # (`tests/layouts/test_e4m3_folding.py`), what puts eight tensors into order, and six that are written.
    assert validating.starts <= 6 * 9 + 2 * 24
    assert converting.starts <= 2 * (6 * 11 + 2 * 24 + 4 * 8 + 6)
    # w13 in the order of the format; both matrices in e4m3, one of them in the kernels' order; three bytes for each
    # number of a part, and what scales and the order take.
    matrix = 2880 * 2880
    assert converting.peak <= matrix + 3 * matrix + matrix + 3 * e4m3_folding._CHUNK_ELEMENTS_MXFP4 + matrix // 2


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_the_kernels_are_given_everything_that_the_layer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["oai"]
    tensors, plan = converted(BACKEND.name, canonical(layer), layer, H200), BACKEND.plan(layer, H200)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "vllm_moe_oracle.kernels.fp8_moe.fused_moe_fp8", lambda *args, **kwargs: seen.update(kwargs, args=args)
    )
    run, nbytes = BACKEND.build_experts(tensors, layer, plan, FunctionRecorder())  # type: ignore[arg-type]
    x = torch.zeros(5, layer.hidden_size, dtype=torch.bfloat16)
    ids, places = torch.zeros(5, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    run(x.clone(), x, torch.ones(5, 2), ids, places, torch.zeros(nbytes(5, 2), dtype=torch.uint8))
    assert (seen["activation"], seen["alpha"], seen["beta"], seen["limit"]) == ("swigluoai", 1.702, 1.0, 7.0)
    assert seen["expert_map"] is places
    # Some all-to-alls deliver int64; the kernels are compiled for int32 before.
    run(x.clone(), x, torch.ones(5, 2), ids.long(), places, torch.zeros(nbytes(5, 2), dtype=torch.uint8))
    assert seen["args"][3].dtype == torch.int32
    given = seen["args"][1]
    for matrix, name in ((given.w13, "w13"), (given.w2, "w2")):
        assert matrix.codes is tensors[name] and matrix.bias is tensors[f"{name}_bias"]
    needs = [nbytes(tokens, 2) for tokens in range(300)]
    assert needs == sorted(needs) and needs[0] == 0 < needs[1]


def test_rounding_of_the_reference() -> None:
    """Scales 1, none and 2: of 0.011 the nearest is 6 / 512, of 33 / 2 it is 16, with 18 next."""
    values = torch.tensor([[448.0, 1.0, -3.0, 0.011], [0.0, 0.0, 0.0, 0.0], [896.0, 2.0, 33.0, -0.125]])
    expected = torch.tensor([[448.0, 1.0, -3.0, 6 / 512], [0.0, 0.0, 0.0, 0.0], [896.0, 2.0, 32.0, -0.125]])
    assert torch.equal(fp8_token.fake_quantize(values), expected)
    assert torch.isnan(fp8_token.fake_quantize(torch.tensor([[1.0, float("nan")]]))[0, 1])
