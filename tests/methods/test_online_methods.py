"""Online MXFP8: whole layers in bounded memory, to the bit as other implementations of the same rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.peak_memory import Peak
from vllm_moe_oracle.core.problem import E8M0_NAN
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.schemes import mxfp8
from vllm_moe_oracle.settings import ScaleRule

RULES: tuple[ScaleRule, ...] = ("ceil", "floor", "llm-compressor")


def weights(experts: int, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """`[experts, rows, columns]` over many binades, with a block of zeros and one of a single large element."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(experts, rows, columns, generator=generator)
    values *= torch.exp2(torch.randint(-12, 12, (experts, rows, 1), generator=generator))
    values[0, 0, :32] = 0
    values[-1, -1, -32:] = 0
    values[-1, -1, -1] = 448
    return values.to(dtype)


def into(values: Tensor, rule: ScaleRule, slot: int = 0) -> tuple[Tensor, Tensor]:
    """What `quantize_into` writes into memory with `slot` bytes between experts' codes."""
    experts, rows, columns = values.shape
    memory = torch.zeros(experts, rows * columns + slot, dtype=torch.uint8)
    codes = memory[:, : rows * columns].view(torch.float8_e4m3fn).unflatten(1, (rows, columns))
    scales = torch.zeros(experts, rows, columns // 32, dtype=torch.uint8)
    mxfp8.quantize_into(values, codes, scales, rule)
    assert not memory[:, rows * columns :].any()
    return codes, scales


# --- One layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@given(
    experts=st.integers(1, 4), rows=st.integers(1, 9), blocks=st.integers(1, 3), slot=st.integers(0, 40),
    limit=st.integers(1, 1 << 16),
)  # fmt: skip
def test_passes_of_any_size_write_what_one_pass_gives(
    rule: ScaleRule, experts: int, rows: int, blocks: int, slot: int, limit: int
) -> None:
    values = weights(experts, rows, 32 * blocks)
    expected, expected_scales = mxfp8.quantize(values, rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mxfp8, "PASS_BYTES", limit)
        codes, scales = into(values, rule, slot)
    assert torch.equal(
        codes.view(torch.uint8) if slot == 0 else codes.contiguous().view(torch.uint8), bytes_of(expected)
    )
    assert torch.equal(scales, expected_scales)


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_a_layer_is_quantized_in_bounded_memory_and_not_expert_by_expert() -> None:
    values = weights(64, 256, 1024)  # 16 Mi elements: 64 MiB a temporary if it were one pass
    codes, scales = torch.empty(values.shape, dtype=torch.float8_e4m3fn), torch.empty(64, 256, 32, dtype=torch.uint8)
    with Peak(values, codes, scales) as peak:
        mxfp8.quantize_into(values, codes, scales)
    assert 0 < peak.peak <= mxfp8.PASS_BYTES
    with Peak() as one:
        mxfp8.quantize(values[0])
    assert peak.calls < 16 * one.calls, "passes follow from memory, not from the number of experts"


# --- Other implementations -------------------------------------------------------------------------------------------


def compressed_tensors(weight: Tensor) -> dict[str, Tensor]:
    """A whole tensor `[N, K]` through the package's own scale computation and compressor."""
    package = pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP8", ["Linear"])
    blocks = weight.unflatten(-1, (-1, 32))
    scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
    made: dict[str, Tensor] = package.compressors.MXFP8QuantizationCompressor.compress(state, scheme)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_llm_compressor_rule_equals_the_package(dtype: torch.dtype, seed: int) -> None:
    values = weights(3, 64, 512, dtype, seed)
    # Largest numbers of 1.75 times a power of two, where the rules part.
    powers = torch.exp2(torch.log2(values[1].abs().float().amax(-1, keepdim=True)).ceil())
    values[1, :, ::32] = (powers * 1.75).to(dtype)
    if dtype == torch.float16:  # the package gives blocks of zeros the scale 1 there
        values[values == 0] = 1
    codes, scales = into(values, "llm-compressor")
    for expert in range(3):
        made = compressed_tensors(values[expert])
        assert torch.equal(scales[expert], made["weight_scale"])
        assert torch.equal(bytes_of(codes[expert]), bytes_of(made["weight"]))
    assert not torch.equal(into(values, "floor")[1], scales)


def test_the_default_rule_is_stock_vllms_online_quantizer() -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import mxfp8_e4m3_quantize

    values = weights(2, 64, 512)
    codes, scales = into(values, "ceil")
    for expert in range(2):
        expected, expected_scales = mxfp8_e4m3_quantize(values[expert], is_sf_swizzled_layout=False)
        # A block of zeros: 2**-127 here and 2**-126 there, both times zeros.
        differ = scales[expert] != expected_scales
        assert torch.equal(differ, (values[expert].unflatten(-1, (-1, 32)) == 0).all(-1) & differ)
        assert torch.equal(bytes_of(codes[expert]), bytes_of(expected))


# --- Linear layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_linear_layers_are_quantized_by_the_requested_scale_rule(rule: ScaleRule) -> None:
    pytest.importorskip("vllm")
    from vllm_moe_oracle.methods.online import Mxfp8OnlineLinearMethod

    values = weights(1, 48, 96)[0]
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(values.clone(), requires_grad=False)
    method = object.__new__(Mxfp8OnlineLinearMethod)
    method.scale_rule = rule
    # What the constructor, which asks for a kernel, would have set.
    method.requantization_source, method.requantization_source_parameters = None, {}
    converted: list[Any] = []
    method.kernel = SimpleNamespace(process_weights_after_loading=converted.append)
    for _ in range(2):  # the second changes nothing
        method.process_weights_after_loading(layer)
        assert converted == [layer]
        codes, scales = mxfp8.quantize(values, rule)
        assert torch.equal(bytes_of(layer.weight.data), bytes_of(codes))
        assert layer.weight_scale.dtype == torch.uint8 and torch.equal(layer.weight_scale.data, scales)
    if rule != "ceil":
        assert not torch.equal(layer.weight_scale.data, mxfp8.quantize(values)[1])


# --- Sizes -----------------------------------------------------------------------------------------------------------


def test_every_size_that_blocks_do_not_divide_is_named_with_the_layer() -> None:
    pytest.importorskip("vllm")
    from vllm_moe_oracle.methods.online import validate_input_sizes

    validate_input_sizes("model.layers.0.mlp.experts", hidden_size=64, intermediate_size=32)
    with pytest.raises(CheckpointError) as caught:
        validate_input_sizes("model.layers.7.mlp.experts", hidden_size=72, intermediate_size=40)
    for word in ("model.layers.7.mlp.experts", "multiples of 32", "hidden size 72 (remainder 8)", "size 40 (remain"):
        assert word in str(caught.value)


def test_nan_weights_get_the_nan_scale() -> None:
    values = weights(2, 4, 64)
    values[1, 2, 40] = torch.nan
    assert into(values, "ceil")[1][1, 2].tolist()[1] == E8M0_NAN


def test_the_setting_offers_exactly_the_rules_that_there_are() -> None:
    from typing import get_args

    from vllm_moe_oracle import settings

    assert get_args(settings.ScaleRule) == get_args(mxfp8.ScaleRule) == RULES
    chosen: Any = settings.load({"MOE_ORACLE_MXFP8_SCALE_RULE": "llm-compressor"})
    assert chosen.mxfp8_scale_rule == "llm-compressor"


# --- Biases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("loaded", ["both", "one expert's not", "none"])
def test_biases_are_loaded_and_never_what_new_memory_holds(
    scheme: str, loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from tests.lib import method_layers
    from vllm_moe_oracle.backends.emulation import Emulation
    from vllm_moe_oracle.compat.layer_context import set_current_layer
    from vllm_moe_oracle.methods import online, online_mxfp4

    class Layer(method_layers.Layer):
        params_dtype = torch.bfloat16

        def weight_loader(self, param: Any, tensor: Tensor, name: str, shard: str, expert: int) -> None:
            data = param.data[expert]
            half = len(data) // 2
            (data if shard == "w2" else data[half:] if shard == "w3" else data[:half]).copy_(tensor)

    monkeypatch.setattr(online, "initialize_online_processing", lambda layer: None)
    method_layers.use_backends([Emulation()], monkeypatch)
    method_class = {"mxfp8": online.Mxfp8OnlineMoEMethod, "mxfp4": online_mxfp4.Mxfp4OnlineMoEMethod}[scheme]
    experts, hidden, inner = 4, 64, 32
    with method_layers.moe_config({"self_check": "group"}, experts, hidden, inner) as config:
        config.has_bias, layer = True, Layer()
        with set_current_layer(layer):
            method = method_class(moe=config)
        method.create_weights(layer, experts, hidden, inner, torch.bfloat16, weight_loader=layer.weight_loader)
        for name, parameter in list(layer.named_parameters()):  # as vLLM gives them memory
            made = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), requires_grad=False)
            made.data.view(torch.uint8).fill_(0x41)
            made.__dict__.update(parameter.__dict__)
            setattr(layer, name, made)
        sizes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
        for expert in range(experts):
            for shard, (rows, columns) in sizes.items():
                tensors = {"weight": torch.ones(rows, columns), "bias": torch.full((rows,), 2.0)}
                if loaded == "none" or (loaded != "both" and expert == 1):
                    del tensors["bias"]
                for kind, tensor in tensors.items():
                    parameter = getattr(layer, f"{'w2' if shard == 'w2' else 'w13'}_{kind}")
                    parameter.weight_loader(parameter, tensor.bfloat16(), f"experts.{kind}", shard, expert)
        if loaded != "both":
            with pytest.raises(
                CheckpointError, match=r"nothing was loaded into w13_bias, w2_bias|biases of .* expert 1 were never"
            ):
                method.process_weights_after_loading(layer)
            return
        method.process_weights_after_loading(layer)
        assert bool((layer.w13_bias == 2.0).all()) and bool((layer.w2_bias == 2.0).all())
