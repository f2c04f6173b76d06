"""The references must be right by themselves: they are checked against torch's casts, transformers and hand results."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lib import reference
from tests.lib.checkpoints import encode, rewrite_tensors, write_checkpoint

ALL_CODES = np.arange(256, dtype=np.uint8)


# --- Formats ---------------------------------------------------------------------------------------------------------


def test_every_e4m3_code_is_torchs_value() -> None:
    ours = reference.decode_e4m3(ALL_CODES)
    theirs = torch.from_numpy(ALL_CODES).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[:0x7F]), False)
    np.testing.assert_array_equal(np.signbit(ours[0x80:0xFF]), True)


def test_every_e8m0_code_is_torchs_value() -> None:
    theirs = torch.from_numpy(ALL_CODES).view(torch.float8_e8m0fnu).double().numpy()
    np.testing.assert_array_equal(reference.decode_e8m0(ALL_CODES), theirs)


def test_every_e2m1_code() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert [reference.e2m1_value(c) for c in range(16)] == positive + [-v for v in positive]


def test_dequantize_gives_each_block_its_own_scale() -> None:
    codes = np.full((2, 64), 0x38, dtype=np.uint8)  # 1.0 everywhere
    scales = np.array([[127, 128], [0, 254]], dtype=np.uint8)
    expected = np.repeat([[1.0, 2.0], [2.0**-127, 2.0**127]], 32, axis=1)
    np.testing.assert_array_equal(reference.dequantize_mxfp8(codes, scales), expected)


def test_dequantize_mxfp4() -> None:
    packed = np.full((1, 16), 0x72, dtype=np.uint8)  # 1.0 and 6.0
    np.testing.assert_array_equal(
        reference.dequantize_mxfp4(packed, np.array([[126]], dtype=np.uint8)), [[0.5, 3.0] * 16]
    )


# --- Quantization ----------------------------------------------------------------------------------------------------


def test_encoding_every_code_gives_it_back() -> None:
    finite = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]
    np.testing.assert_array_equal(reference.encode_e4m3(reference.decode_e4m3(finite)), finite)


def test_encoding_rounds_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    midpoints = (reference.decode_e4m3(ALL_CODES[:126]) + reference.decode_e4m3(ALL_CODES[1:127])) / 2
    values = np.concatenate([rng.standard_normal(4000) * np.exp2(rng.uniform(-12, 7, 4000)), midpoints])
    values = np.clip(np.concatenate([values, -values]), -448, 448).astype(np.float32)
    theirs = torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(reference.encode_e4m3(values), theirs)


def test_encoding_saturates_and_keeps_nan() -> None:
    codes = reference.encode_e4m3([449.0, 1e30, math.inf, -1e30, math.nan])
    np.testing.assert_array_equal(codes, [0x7E, 0x7E, 0x7E, 0xFE, 0x7F])


@pytest.mark.parametrize("exponent", [-130, -127, -100, -9, 0, 9, 100, 118])
def test_ceil_rule_is_exact_at_its_edges(exponent: int) -> None:
    edge = 448 * 2.0**exponent
    for amax, expected in ((edge, exponent), (np.nextafter(edge, math.inf), exponent + 1), (edge / 2, exponent - 1)):
        assert reference.mxfp8_exponent(float(amax)) == max(-127, expected)


def test_floor_rule() -> None:
    assert reference.mxfp8_exponent(256.0, "floor") == 0
    assert reference.mxfp8_exponent(511.0, "floor") == 0
    assert reference.mxfp8_exponent(512.0, "floor") == 1
    assert reference.mxfp8_exponent(1.0, "floor") == -8
    with pytest.raises(ValueError, match="valid: ceil, floor"):
        reference.mxfp8_exponent(1.0, "round")  # type: ignore[arg-type]


def test_floor_rule_saturates_and_ceil_rule_does_not() -> None:
    block = np.full(32, 500.0)
    assert reference.fake_quantize_mxfp8(block, "floor")[0] == 448.0
    assert reference.fake_quantize_mxfp8(block, "ceil")[0] == 512.0  # 250 lies between the codes 240 and 256


def test_zero_blocks_and_extreme_scales() -> None:
    codes, scales = reference.quantize_mxfp8(np.zeros((1, 32)))
    assert scales.tolist() == [[0]] and not codes.any()
    _, scales = reference.quantize_mxfp8(np.full((1, 32), 1e-45))
    assert scales.tolist() == [[0]]
    _, scales = reference.quantize_mxfp8(np.full((1, 32), 3.4e38))
    assert scales.tolist() == [[127 + 120]]


def test_quantization_error_is_at_most_half_a_step() -> None:
    x = np.random.default_rng(2).standard_normal((16, 256)) * np.exp2(np.arange(256) / 16)
    codes, scales = reference.quantize_mxfp8(x)
    error = np.abs(reference.dequantize_mxfp8(codes, scales) - x)
    # 3 bits of mantissa: half a step is 2**-4 of the value, or of the smallest normal number, 2**-6, of the scale.
    floor = np.repeat(reference.decode_e8m0(scales), 32, axis=-1) * 2.0**-6
    assert (error <= 2.0**-4 * np.maximum(np.abs(x), floor)).all()


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 32), (3, 0)])
def test_nothing_to_quantize(shape: tuple[int, ...]) -> None:
    codes, scales = reference.quantize_mxfp8(np.zeros(shape))
    assert codes.shape == shape and scales.shape == (*shape[:-1], shape[-1] // 32)
    assert reference.dequantize_mxfp8(codes, scales).shape == shape


# --- Activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("relu2", lambda x: torch.relu(x).square()),
    ],
)
def test_activations_against_torch(name: str, function) -> None:  # type: ignore[no-untyped-def]
    y = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 8
    gated = function(y[:, :8]) * y[:, 8:]
    np.testing.assert_allclose(reference.activate(name, y.numpy()), gated, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(reference.activate(f"{name}_no_mul", y.numpy()), function(y), rtol=1e-12, atol=1e-12)


def test_swigluoai_against_gpt_oss_in_transformers() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = GptOssExperts(GptOssConfig(num_local_experts=1, hidden_size=32, intermediate_size=32))
    gate_up = torch.randn(7, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 6
    theirs = experts._apply_gate(gate_up).numpy()
    ours = reference.activate("swigluoai", gate_up.numpy(), interleaved=True)
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    halves = np.concatenate([gate_up[:, ::2], gate_up[:, 1::2]], axis=1)
    np.testing.assert_array_equal(reference.activate("swigluoai", halves), ours)
    again = reference.activate("swigluoai_uninterleave", halves, alpha=1.702, beta=1.0, limit=7.0)
    np.testing.assert_array_equal(again, ours)


def test_clamps() -> None:
    y = np.array([[9.0, -9.0, 1.0, 9.0, -9.0, -9.0]])  # gates 9, -9, 1 and ups 9, -9, -9
    silu = reference.activate("silu", np.array([[2.0, -9.0, 1.0, 2.0, -2.0, -2.0]]))
    np.testing.assert_array_equal(reference.activate("silu", y, limit=2.0), silu)
    plain = reference.activate("swigluoai_uninterleave", y, limit=2.0)
    np.testing.assert_array_equal(plain, silu)  # alpha 1 and beta 0 unless given
    shifted = reference.activate("swigluoai_uninterleave", y, limit=2.0, beta=1.0)
    gate = np.array([2.0, -9.0, 1.0])
    np.testing.assert_allclose(shifted[0], gate / (1 + np.exp(-gate)) * np.array([3.0, -1.0, -1.0]), rtol=1e-15)


def test_no_overflow_far_from_zero() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert reference.activate("silu_no_mul", np.array([[-1e4, 1e4]])).tolist() == [[0.0, 1e4]]


# --- The layer -------------------------------------------------------------------------------------------------------


def layer(gated: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    tokens, experts, hidden, intermediate, top_k = 6, 4, 64, 32, 2
    rows = 2 * intermediate if gated else intermediate
    return {
        "x": rng.standard_normal((tokens, hidden)),
        "w13": rng.standard_normal((experts, rows, hidden)) / 8,
        "w2": rng.standard_normal((experts, hidden, intermediate)) / 6,
        "topk_ids": np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)]),
        "topk_weights": rng.uniform(0.1, 0.9, (tokens, top_k)),
    }


def test_layer_against_transformers() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    case = layer()
    experts = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=4, hidden_size=64, moe_intermediate_size=32)).double()
    with torch.no_grad():
        experts.gate_up_proj.copy_(torch.from_numpy(case["w13"]))
        experts.down_proj.copy_(torch.from_numpy(case["w2"]))
        theirs = experts(*(torch.from_numpy(case[name]) for name in ("x", "topk_ids", "topk_weights")))
    np.testing.assert_allclose(reference.moe(**case), theirs.numpy(), rtol=1e-10, atol=1e-12)


def test_layer_against_gpt_oss_with_biases() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    case = layer()
    rng = np.random.default_rng(4)
    b13, b2 = rng.standard_normal((4, 64)), rng.standard_normal((4, 64))
    experts = GptOssExperts(GptOssConfig(num_local_experts=4, hidden_size=64, intermediate_size=32)).double()

    def interleave(halves: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.stack([halves[:, :32], halves[:, 32:]], axis=2).reshape(halves.shape))

    with torch.no_grad():
        experts.gate_up_proj.copy_(interleave(case["w13"]).transpose(1, 2))
        experts.gate_up_proj_bias.copy_(interleave(b13))
        experts.down_proj.copy_(torch.from_numpy(case["w2"]).transpose(1, 2))
        experts.down_proj_bias.copy_(torch.from_numpy(b2))
        theirs = experts(*(torch.from_numpy(case[name]) for name in ("x", "topk_ids", "topk_weights")))
    ours = reference.moe(**case, activation="swigluoai", b13=b13, b2=b2)
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-10, atol=1e-12)


def test_non_gated_layer() -> None:
    case = layer(gated=False)
    y = np.zeros_like(case["x"])
    for t in range(6):
        for e, weight in zip(case["topk_ids"][t], case["topk_weights"][t], strict=True):
            y[t] += weight * (case["w2"][e] @ np.square(np.maximum(case["w13"][e] @ case["x"][t], 0)))
    np.testing.assert_allclose(reference.moe(**case, activation="relu2_no_mul"), y, rtol=1e-12)


def test_router_weight_on_input_acts_through_the_activation() -> None:
    case = layer(gated=False)
    on_input = reference.moe(**case, activation="relu2_no_mul", router_weight_on_input=True)
    # relu2 is homogeneous of degree 2: a weight on the input is its square on the output.
    squared = {**case, "topk_weights": case["topk_weights"] ** 2}
    np.testing.assert_allclose(on_input, reference.moe(**squared, activation="relu2_no_mul"), rtol=1e-12)


def test_expert_map_splits_a_layer_into_ranks() -> None:
    case = layer()
    case["topk_ids"][0, 0] = -1
    parts = np.zeros_like(case["x"])
    for rank_experts in ([0, 2], [1, 3]):
        expert_map = np.full(4, -1)
        expert_map[rank_experts] = [0, 1]
        weights = {"w13": case["w13"][rank_experts], "w2": case["w2"][rank_experts]}
        parts += reference.moe(**{**case, **weights}, expert_map=expert_map)
    np.testing.assert_allclose(parts, reference.moe(**case), rtol=1e-12)


def test_no_tokens() -> None:
    case = layer()
    empty = {**case, **{name: case[name][:0] for name in ("x", "topk_ids", "topk_weights")}}
    assert reference.moe(**empty).shape == (0, 64)


def test_quantized_activations_round_both_inputs() -> None:
    case = {**layer(), "topk_ids": np.zeros((6, 1), int), "topk_weights": np.ones((6, 1))}
    h = reference.activate("silu", reference.fake_quantize_mxfp8(case["x"]) @ case["w13"][0].T)
    expected = reference.fake_quantize_mxfp8(h) @ case["w2"][0].T
    ours = reference.moe(**case, quantize_activations="ceil")
    np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-12)
    assert np.abs(ours - reference.moe(**case)).max() > 1e-3


# --- A checkpoint ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_replaced_experts_compute_what_transformers_does(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = encode("hello, world")
    plain = reference.greedy(reference.load_transformers(checkpoint), prompt)
    replaced = reference.load_transformers(checkpoint, quantize_activations="ceil")
    quantized = reference.greedy(replaced, prompt)
    monkeypatch.setattr(reference, "fake_quantize_mxfp8", lambda values, rule: values)
    exact = reference.greedy(replaced, prompt)
    np.testing.assert_allclose(exact.logits, plain.logits, atol=1e-4)
    assert 0.01 < np.abs(quantized.logits - plain.logits).max() < 1.0


def test_continuations_carry_consistent_numbers(checkpoint: Path) -> None:
    (run,) = reference.transformers_logits(checkpoint, [encode("abc")], max_new_tokens=5)
    assert len(run.tokens) == 5 and run.logits.shape == (8, 64)
    np.testing.assert_allclose(np.exp(run.logprobs).sum(-1), 1.0, rtol=1e-12)
    for i, token in enumerate(run.tokens):
        row = run.logits[2 + i].astype(np.float64)
        assert row.argmax() == token
        assert run.margins[i] == np.sort(row)[-1] - np.sort(row)[-2]
        assert run.token_logprobs[i] == pytest.approx(row[token] - np.log(np.exp(row).sum()), rel=1e-12)


def test_a_missing_scale_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.up_proj.weight_scale"
    broken = rewrite_tensors(checkpoint, tmp_path / "broken", lambda tensors: tensors.__delitem__(name))
    with pytest.raises(ValueError, match=name):
        reference.read_weights(broken)
