"""MXFP4 weights with fp8 activations: never without the checkpoint's or the user's word, weights exact or refused, all
that the layer has handed to the kernels. The kernels' numbers are tested on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.lib.cases import GPT_OSS, H200, SILU, problem
from tests.lib.function_recorder import FunctionRecorder
from tests.lib.peak_memory import Peak
from tests.lib.stock_rules import converted, expert, experts
from vllm_moe_oracle.backends.hopper_mxfp4_w4a8 import BACKEND
from vllm_moe_oracle.core.decision import Decision
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.layouts import wgmma_fragments
from vllm_moe_oracle.oracle.registry import discover
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.schemes import fp8_token
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


def fitting_expert(layer: Problem) -> dict[str, torch.Tensor]:
    """Random canonical weights of an expert, with scales that differ by less than 10 binades."""
    return {name: each % 10 + 120 if name.endswith("_scale") else each for name, each in expert(layer).items()}


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
    few, many = decision.token_ranges
    assert (few.backend, few.max_tokens) == ("hopper_mxfp4", 120)
    assert (many.backend, many.max_tokens) == (BACKEND.name, None)
    assert "hopper_mxfp4 up to 120 tokens" in decision.explanation
    summary = decision.summary()
    for word in ("quantized to e4m3 with one scale per token", "in both products", "converted exactly to e4m3"):
        assert word in summary


def test_it_runs_every_number_of_tokens_alone_where_it_must() -> None:
    """Where one kernel has to run all numbers of tokens, and where the other backend is disabled."""
    invariant = dataclasses.replace(LAYERS["oai"], batch_invariant=True)
    assert decide(invariant, H200, load(ALLOWED | NAMED)).token_ranges == ()
    disabled = load(ALLOWED | NAMED | {"MOE_ORACLE_DISABLE": "hopper_mxfp4"})
    assert decide(LAYERS["oai"], H200, disabled).token_ranges == ()


@pytest.mark.parametrize("code", range(16))
@pytest.mark.parametrize("below", range(wgmma_fragments.MAX_E4M3_SPREAD + 1))
def test_every_code_is_a_number_of_e4m3(code: int, below: int) -> None:
    """What the kernel makes of it: a byte of a table whose exponents are lowered by the binades below the largest
    scale, zero's excepted, and a sign."""
    tables = torch.tensor([0x00, 0x60, 0x68, 0x6C, 0x70, 0x74, 0x78, 0x7C], dtype=torch.uint8)
    byte = tables[code & 7] - (8 * below if code & 7 else 0) | (code & 8) << 4
    value = byte.to(torch.uint8).view(1).view(torch.float8_e4m3fn).float()
    magnitude = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    assert float(value) == (-1 if code & 8 else 1) * magnitude * 2.0 ** (6 - below)


def test_a_row_that_does_not_fit_is_named_with_its_scales() -> None:
    layer = LAYERS["silu"]
    one = fitting_expert(layer)
    one["w2"][7] = 0x11  # 0.5 everywhere
    one["w2_scale"][7] = 100
    one["w2_scale"][7, 0] = 111
    assert BACKEND.validate_weights(one, layer) == ""
    one["w2_scale"][7, 0] = 112
    said = BACKEND.validate_weights(one, layer)
    for word in ("row 7 of w2", "12 binades below", "up to 11", "1 of 160 rows", "hopper_mxfp4"):
        assert word in said
    # Blocks of zeros may have any scale.
    one["w2"][7, 16:] &= 0x88
    assert BACKEND.validate_weights(one, layer) == ""


def test_looking_at_an_experts_scales_takes_few_operations() -> None:
    layer = problem(scheme=MXFP4, experts=2, top_k=2, hidden_size=2880, intermediate_size=2880, activation=GPT_OSS)
    one = fitting_expert(layer)
    with Peak() as found:
        assert BACKEND.validate_weights(one, layer) == ""
    assert found.starts <= 2 * 12 + 4


def test_the_kernels_are_given_everything_that_the_layer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LAYERS["oai"]
    tensors, plan = converted(BACKEND.name, experts(layer, 2), layer, H200), BACKEND.plan(layer, H200)
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
        assert matrix.scales is tensors[f"{name}_scale"] and matrix.row_scale is tensors[f"{name}_row_scale"]
    needs = [nbytes(tokens, 2) for tokens in range(300)]
    assert needs == sorted(needs) and needs[0] == 0 < needs[1]


def test_rounding_of_the_reference() -> None:
    """Scales 1, none and 2: of 0.011 the nearest is 6 / 512, of 33 / 2 it is 16, with 18 next."""
    values = torch.tensor([[448.0, 1.0, -3.0, 0.011], [0.0, 0.0, 0.0, 0.0], [896.0, 2.0, 33.0, -0.125]])
    expected = torch.tensor([[448.0, 1.0, -3.0, 6 / 512], [0.0, 0.0, 0.0, 0.0], [896.0, 2.0, 32.0, -0.125]])
    assert torch.equal(fp8_token.fake_quantize(values), expected)
    assert torch.isnan(fp8_token.fake_quantize(torch.tensor([[1.0, float("nan")]]))[0, 1])
