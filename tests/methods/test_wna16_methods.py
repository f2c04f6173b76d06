"""Methods for integer experts: files of every packing, loaded tensor by tensor and cut over ranks, give the layer that
they say; what contradicts itself, or is missing, is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.lib import moe_wna16_layers as moe
from tests.lib.tiers import sampled
from tests.lib.wna16_layers import checkpoint_of, contents_of, layer_of
from vllm_moe_oracle import plugin
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.compat.layer_context import set_current_layer
from vllm_moe_oracle.core.problem import Scheme
from vllm_moe_oracle.errors import CheckpointError, NoBackendError
from vllm_moe_oracle.methods import load_summary
from vllm_moe_oracle.methods.base import OracleMoEMethod
from vllm_moe_oracle.methods.compressed_tensors import CompressedTensorsConfig
from vllm_moe_oracle.methods.wna16 import expert_layer_names
from vllm_moe_oracle.quantization import parse_config
from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames, describe_format
from vllm_moe_oracle.schemes._wna16_checkpoint import rank_shard

SIZES = {"experts": 3, "top_k": 2, "hidden_size": 64, "intermediate_size": 128}
FLOAT32 = 4e-6
"""Relative: 64 and 128 products of float32 numbers, summed in another order, through an activation: 2**-24 times the
square root of some hundred terms, with room for cancellation."""


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    plugin.register()
    yield
    plugin.unregister()


def cells() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Packing, vLLM's name, and what the layer is like."""
    kinds: list[dict[str, Any]] = [
        {}, {"zero_points": True}, {"bias": True}, {"group": -1}, {"group": 64, "zero_points": True, "bias": True},
        {"gated": False},
    ]  # fmt: skip
    more: list[dict[str, Any]] = [
        {"bits": 8}, {"bits": 8, "group": -1, "zero_points": True}, {"act_order": "static"}, {"act_order": "group"},
        {"act_order": "group", "zero_points": True, "bits": 8, "bias": True}, {"act_order": "group", "group": -1},
    ]  # fmt: skip
    for packing in ("gptq", "gptq_v2", "awq", "compressed-tensors", "compressed-tensors-int"):
        for kind in kinds + (more if packing != "awq" else []):
            if packing.startswith("compressed") and kind.get("group") == -1 and "act_order" in kind:
                continue  # the package refuses to write it
            names = ("", "moe_wna16") if packing in ("gptq", "awq") else ("",)
            yield from ((packing, name, kind) for name in names)


def said(cell: tuple[str, str, dict[str, Any]]) -> str:
    packing, name, kind = cell
    return "-".join([packing, *([name] if name else []), *(f"{key}={value}" for key, value in kind.items())])


CELLS = [cell for cell in cells() if cell[2].get("gated", True)]


def whole_of(layers: list[moe.Layer], contents: Any) -> float:
    """Relative error of the sum over ranks."""
    x, weights, ids = moe.tokens(contents.problem)
    found = sum(moe.run(layer, x, weights, ids) for layer in layers)
    wanted = moe.expected(contents, x, weights, ids)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def loaded(contents: Any, name: str = "", ranks: int = 1, files: Any = None) -> list[moe.Layer]:
    """The layer on each rank, converted."""
    layers = []
    for rank in range(ranks):
        layer = moe.made(contents.problem, moe.moe_config(contents.problem, rank, ranks), name)
        assert isinstance(layer.quant_method, OracleMoEMethod)
        moe.load(layer, files or contents.files())
        layer.quant_method.process_weights_after_loading(layer)
        layers.append(layer)
    return layers


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cell", sampled(((each,) for each in CELLS), 3), ids=said)
def test_ranks_compute_what_the_files_say(cell: tuple[str, str, dict[str, Any]], ranks: int) -> None:
    packing, name, kind = cell
    contents = contents_of(layer_of(packing, **SIZES, **kind), seed=ranks)
    with moe.engine():
        layers = loaded(contents, name, ranks)
        assert whole_of(layers, contents) < FLOAT32
    for layer in layers:
        assert layer.moe_oracle_state == "converted"
        assert {name for name, _ in layer.named_parameters()} >= {"w13_weight", "w2_weight"}


def add_what_symmetric_files_carry(files: dict[tuple[int, str, str], Any], group: int) -> None:
    """GPTQ's zero points of symmetric weights, here of no meaning at all, and the group index of no order."""
    for expert, shard, name in list(files):
        if name == "qweight":
            words, rows = files[expert, shard, name].shape
            groups = files[expert, shard, "scales"].shape[0]
            files[expert, shard, "qzeros"] = torch.full((groups, rows // 8), 0x01234567, dtype=torch.int32)
            files[expert, shard, "g_idx"] = torch.arange(8 * words, dtype=torch.int32) // group


@pytest.mark.parametrize("name", ["", "moe_wna16"])
def test_zero_points_of_a_symmetric_file_are_not_applied(name: str) -> None:
    contents = contents_of(layer_of("gptq", **SIZES))
    files = contents.files()
    add_what_symmetric_files_carry(files, 32)
    with moe.engine():
        assert whole_of(loaded(contents, name, files=files), contents) < FLOAT32


def test_a_kernel_tensor_does_not_take_the_name_of_a_layers_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("gptq", **SIZES | {"experts": 5})
    monkeypatch.setattr(
        Emulation, "convert", lambda self, expert, problem, plan: {**expert, "quant_config": expert["w13"]}
    )
    with (
        moe.engine(backend="emulation"),
        pytest.raises(NoBackendError, match="converts to a tensor quant_config, a name that vLLM's layer uses"),
    ):
        moe.made(layer, moe.moe_config(layer))


@pytest.mark.parametrize(("factor", "told"), [(1.0, False), (2.0**-20, True)])
def test_scales_that_the_models_dtype_changes_are_told_of_once(
    factor: float, told: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_summary, "_warned", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    layer = dataclasses.replace(layer_of("gptq", **SIZES), dtype="float16")
    contents = contents_of(layer)
    files = contents.files()
    for key in [each for each in files if each[2] == "scales"]:
        files[key] = (files[key].to(torch.float32) * factor).to(torch.bfloat16)
    with moe.engine():
        made = moe.made(layer, moe.moe_config(layer, in_dtype=torch.float16))
        moe.load(made, files)
    warned = [each.getMessage() for each in caplog.records if "changes scales" in each.getMessage()]
    assert len(warned) == told and all("by more than 0.8%" in each and "--dtype bfloat16" in each for each in warned)


@pytest.mark.parametrize(
    ("packing", "bits", "word", "odd"),
    [
        ("gptq", 4, 0x77777777, False), ("gptq", 4, -0x77777778, False), ("gptq", 4, 0, False),
        ("gptq_v2", 4, -0x77777778, False), ("gptq", 8, 0x7F7F7F7F, False), ("awq", 4, -0x77777778, False),
        ("gptq", 4, 0x77777776, True), ("gptq", 8, 0x77777777, True), ("awq", 4, 0x33333333, True),
        ("compressed-tensors-int", 8, 0, False), ("compressed-tensors-int", 8, 1, True),
        ("compressed-tensors", 4, -0x77777778, False), ("compressed-tensors", 4, 0x11111111, True),
    ],
)  # fmt: skip
def test_zero_points_that_no_symmetric_file_has_are_told_of_once(
    packing: str, bits: int, word: int, odd: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_summary, "_warned", set())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    contents = contents_of(layer_of(packing, bits=bits, **SIZES))
    files = contents.files()
    name = "weight_zero_point" if packing.startswith("compressed") else "qzeros"
    kind = torch.int8 if packing.endswith("int") else torch.int32
    for expert, shard, _ in list(files):
        files[expert, shard, name] = torch.full((4, 8), word, dtype=kind)
    with caplog.at_level("WARNING"), moe.engine():
        assert whole_of(loaded(contents, files=files), contents) < FLOAT32
    said = [record.getMessage() for record in caplog.records if "not those of symmetric weights" in record.getMessage()]
    assert len(said) == odd
    assert all("expert" in words and "correct sym" in words for words in said)


def test_a_borrow_between_packed_zero_points_is_not_lost() -> None:
    contents = contents_of(layer_of("gptq", zero_points=True, **SIZES))
    # All zero points of a word are 0: stored less one as a whole, 0xFFFFFFFF - 0x11111110; each by itself would be 15.
    for zeros in contents.zeros.values():
        zeros[:] = 0
        zeros[:, ::3] = 5
    stored = contents.files()[0, "w1", "qzeros"]
    assert not torch.equal(stored & 0xF, torch.full_like(stored, 4)), "some nibble was borrowed from"
    for name in ("", "moe_wna16"):
        with moe.engine():
            assert whole_of(loaded(contents, name), contents) < FLOAT32


@pytest.mark.parametrize(
    ("packing", "name"),
    [("gptq", ""), ("gptq", "moe_wna16"), ("awq", ""), ("awq", "moe_wna16"), ("compressed-tensors", ""),
     ("compressed-tensors-int", "")],
)  # fmt: skip
def test_groups_that_a_cut_splits_are_halved(packing: str, name: str) -> None:
    contents = contents_of(
        layer_of(packing, group=128, zero_points=True, experts=2, hidden_size=128, intermediate_size=384)
    )
    with moe.engine():
        layers = loaded(contents, name, ranks=2)
        assert layers[0].quant_method.decision.problem.intermediate_size == 192
        assert whole_of(layers, contents) < FLOAT32
        scales = getattr(layers[0], "w2_weight_scale" if packing.startswith("compressed") else "w2_scales")
        assert scales.shape == (2, 128, 3)


def test_a_group_that_a_cut_splits_is_refused_before_anything_is_loaded() -> None:
    asked = layer_of("compressed-tensors", group=128, experts=8, hidden_size=256, intermediate_size=1152)
    with moe.engine(), pytest.raises(NoBackendError) as error:
        moe.made(asked, moe.moe_config(asked, 0, 8))
    for words in ("1152 / 8 = 144", "scale group 32, halved from 128 (144 mod 32 = 16)", "TP 4", "expert parallelism"):
        assert words in str(error.value)


RAGGED = [
    ("compressed-tensors", {"zero_points": True}), ("compressed-tensors", {"bias": True, "bits": 8}),
    ("compressed-tensors-int", {}), ("awq", {"zero_points": True, "bias": True}), ("gptq", {"bits": 8}),
]  # fmt: skip


@pytest.mark.parametrize(("packing", "kind"), RAGGED)
def test_ranks_may_have_shares_of_whole_groups(packing: str, kind: dict[str, Any]) -> None:
    # 5 groups over 2 ranks: 3 and 2. Groups of 32 cannot be halved.
    group = kind.get("group", 32)
    sizes = {"experts": 3, "top_k": 2, "hidden_size": 64, "intermediate_size": 5 * group}
    contents = contents_of(layer_of(packing, **kind, **sizes))
    with (
        moe.engine(),
        pytest.raises(NoBackendError, match=r"so would MOE_ORACLE_RAGGED_SHARDS=1, with \d+ on the first rank"),
    ):
        moe.made(contents.problem, moe.moe_config(contents.problem, 0, 2))
    with moe.engine(ragged_shards=True):
        layers = loaded(contents, ranks=2)
        assert [layer.quant_method.decision.problem.intermediate_size for layer in layers] == [3 * group] * 2
        assert whole_of(layers, contents) < FLOAT32
        assert layers[1].quant_method.decision.problem.ragged_intermediate_size == 5 * group


@pytest.mark.parametrize(("packing", "kind"), RAGGED)
@pytest.mark.parametrize(("whole", "ranks", "share"), [(736, 2, 384), (1856, 8, 256)])
def test_groups_of_different_shares_are_halved_until_they_divide_each(
    packing: str, kind: dict[str, Any], whole: int, ranks: int, share: int
) -> None:
    # The first shares are multiples of the checkpoint's groups of 128; the last, 352 and 64 features, are not.
    sizes = {"experts": 2, "top_k": 2, "hidden_size": 128, "intermediate_size": whole}
    contents = contents_of(layer_of(packing, **kind | {"group": 128}, **sizes))
    with moe.engine(ragged_shards=True):
        layers = loaded(contents, ranks=ranks)
        assert layers[-1].quant_method.decision.problem.intermediate_size == share
        assert whole_of(layers, contents) < FLOAT32


def test_a_share_of_a_part_of_a_slice_is_refused() -> None:
    asked = layer_of("gptq", intermediate_size=48, tp=2)
    with pytest.raises(CheckpointError, match="rank 1 has features 48 to 96 of 96, not a whole number of 3 slices"):
        rank_shard(torch.ones(3, 64), "_scale", "w2", asked, "gptq", 1)


def test_a_rank_of_expert_parallelism_takes_its_own_experts() -> None:
    contents = contents_of(layer_of("gptq", zero_points=True, **{**SIZES, "experts": 4}))
    with moe.engine():
        config = moe.moe_config(contents.problem, num_local_experts=2)
        layer = moe.made(contents.problem, config)
        layer.first_expert = 2
        moe.load(layer, contents.files())
        layer.quant_method.process_weights_after_loading(layer)
    first = contents.files()[2, "w2", "scales"].T
    assert torch.equal(layer.w2_scales[0], first.float())


def test_rows_of_gpt_oss_that_alternate_are_put_apart() -> None:
    asked = layer_of("compressed-tensors", bias=True, **SIZES)
    contents = contents_of(asked)
    files = contents.files()
    with moe.engine():
        layer = moe.made(asked, moe.moe_config(asked))
        alternating = {}
        for (expert, shard, name), tensor in files.items():
            if shard == "w1" and name != "weight_shape":
                both = torch.stack((tensor, files[expert, "w3", name]), 1).flatten(0, 1)
                alternating[expert, "gpt_oss_w13", name] = both
            elif shard == "w2":
                alternating[expert, "gpt_oss_w2", name] = tensor
        parameters = dict(layer.named_parameters())
        for (expert, shard, name), tensor in alternating.items():
            parameter = parameters[f"{shard.removeprefix('gpt_oss_')}_{name}"]
            parameter.weight_loader(parameter, tensor, f"{moe.NAME}.{name}", shard, expert, True)
        layer.quant_method.process_weights_after_loading(layer)
        assert not layer.quant_method.decision.problem.activation.interleaved
        assert whole_of([layer], contents) < FLOAT32


def alternating_layer(**changes: Any) -> Any:
    """A layer of gpt-oss in integers on the emulation, which vLLM describes by its activation for alternating rows."""
    asked = layer_of("compressed-tensors", bias=True, **SIZES)
    return moe.made(asked, moe.moe_config(asked, activation=MoEActivation.SWIGLUOAI, **changes))


def test_gpt_oss_activation_is_uninterleaved_for_vllm() -> None:
    with moe.engine():
        layer = alternating_layer()
        method = layer.quant_method
        assert method.decision.problem.activation.name == "swigluoai"
        assert layer.activation is layer.moe_config.activation is MoEActivation.SWIGLUOAI_UNINTERLEAVE
        quant_config = method.get_fused_moe_quant_config(layer)
        limits = quant_config.gemm1_alpha, quant_config.gemm1_beta, quant_config.gemm1_clamp_limit
        assert limits == (1.702, 1.0, 7.0)


def test_adapters_of_gpt_oss_rows_are_left_to_stock() -> None:
    with moe.engine(), pytest.raises(NoBackendError, match="LoRA adapters for interleaved rows of gate and up"):
        alternating_layer(is_lora_enabled=True)


def test_an_unsupported_layer_keeps_vllms_activation() -> None:
    asked = layer_of("compressed-tensors", bias=True, **SIZES)
    config = moe.moe_config(asked, activation=MoEActivation.SWIGLUOAI, is_lora_enabled=True)
    with moe.engine(), pytest.raises(NoBackendError):
        moe.made(asked, config)
    assert config.activation is MoEActivation.SWIGLUOAI


# --- What is wrong ---------------------------------------------------------------------------------------------------


def refused(contents: Any, change: Any, name: str = "") -> str:
    files = contents.files()
    change(files)
    with moe.engine(), pytest.raises(CheckpointError) as error:
        loaded(contents, name, files=files)
    assert str(error.value).startswith(moe.NAME)
    return str(error.value)


def replaced(name: str, make: Any, shard: str = "w3") -> Any:
    return lambda files: files.update({(1, shard, name): make(files[1, shard, name])})


PLAIN = {
    "gptq": ("qweight", "scales"),
    "awq": ("qweight", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale"),
}


@pytest.mark.parametrize("name", ["", "moe_wna16"])
@pytest.mark.parametrize("packing", PLAIN)
def test_a_tensor_that_never_came_is_named(packing: str, name: str) -> None:
    if name and packing == "compressed-tensors":
        return
    contents = contents_of(layer_of(packing, zero_points=True, **SIZES))
    zeros = "weight_zero_point" if packing == "compressed-tensors" else "qzeros"
    for tensor in (*PLAIN[packing], zeros):
        words = refused(contents, lambda files, tensor=tensor: files.pop((1, "w3", tensor)), name)
        assert f"w13_{tensor} of the up projection of local expert 1 was never loaded" in words
        assert f"(1 such in w13_{tensor})" in words


@pytest.mark.parametrize("packing", ["gptq", "compressed-tensors"])
def test_a_group_index_that_never_came_is_named(packing: str) -> None:
    contents = contents_of(layer_of(packing, act_order="group", **SIZES))
    index = "g_idx" if packing == "gptq" else "weight_g_idx"
    for shard, matrix, projection in (("w1", "w13", "gate"), ("w3", "w13", "up"), ("w2", "w2", "down")):
        words = refused(contents, lambda files, shard=shard: files.pop((1, shard, index)))
        assert f"{matrix}_{index} of the {projection} projection of local expert 1 was never loaded" in words


@pytest.mark.parametrize("packing", PLAIN)
def test_two_tensors_for_one_place_are_an_error_where_they_differ(packing: str) -> None:
    order = "none" if packing == "awq" else "group"
    contents = contents_of(layer_of(packing, zero_points=order == "none", act_order=order, **SIZES))
    files = contents.files()
    with moe.engine():
        for key, tensor in files.items():
            layer = moe.made(contents.problem, moe.moe_config(contents.problem))
            moe.load(layer, files)
            moe.load(layer, {key: tensor})
            other = tensor.clone()
            other.view(torch.uint8).view(-1)[-1] ^= 1
            if key[2].endswith("weight_shape"):
                continue
            with pytest.raises(CheckpointError, match="has two tensors for it, with different values") as error:
                moe.load(layer, {key: other})
            assert f"_{key[2]}, expert {key[0]}, {key[1]}: " in str(error.value)


@pytest.mark.parametrize("packing", PLAIN)
def test_tensors_of_another_type_or_shape_are_refused(packing: str) -> None:
    contents = contents_of(layer_of(packing, zero_points=True, **SIZES))
    codes, scales = PLAIN[packing]
    words = refused(contents, replaced(codes, lambda tensor: tensor.to(torch.int64)))
    assert f"the checkpoint stores it as int64, the packing {packing} as int32" in words
    assert f"w13_{codes}, expert 1, w3" in words
    words = refused(contents, replaced(scales, lambda tensor: tensor.to(torch.int32)))
    assert f"the checkpoint stores it as int32, the packing {packing} as bfloat16" in words
    wrong = contents.files()[1, "w3", codes].T
    words = refused(contents, replaced(codes, lambda tensor: tensor.T.contiguous()))
    assert f"an expert's tensor has shape {list(wrong.shape)}, expected {list(wrong.T.shape)}" in words
    words = refused(contents, replaced(scales, lambda tensor: tensor[:1].clone(), "w2"))
    assert "an expert's tensor has shape [1, " in words
    words = refused(contents, replaced(scales, lambda tensor: tensor * float("nan")))
    assert "scales in w13_" in words and "NaN or infinite" in words


def test_gate_and_up_must_read_their_inputs_alike() -> None:
    contents = contents_of(layer_of("gptq", act_order="group", **SIZES))
    words = refused(contents, replaced("g_idx", lambda groups: groups.roll(1)))
    assert "local expert 1: gate and up have different group indices, from input" in words


def test_an_order_that_the_config_does_not_declare_is_noticed() -> None:
    contents = contents_of(layer_of("gptq", **SIZES))
    index = torch.arange(64, dtype=torch.int32) // 32
    words = refused(contents, lambda files: files.update({(1, "w1", "g_idx"): index.roll(3)}))
    assert "the group index orders the input features, but the config declares no act order" in words
    files = {**contents.files(), (1, "w1", "g_idx"): torch.zeros(64, dtype=torch.int32)}
    with moe.engine():
        assert whole_of(loaded(contents, files=files), contents) < FLOAT32


def test_a_damaged_group_index_is_refused_with_numbers() -> None:
    contents = contents_of(layer_of("gptq", act_order="group", **SIZES))

    def damage(files: Any) -> None:
        for shard in ("w1", "w3"):
            files[1, shard, "g_idx"][:] = 1

    assert "w13_g_idx gives group 1 of expert 1 64 input features, not 32" in refused(contents, damage)


def test_a_shape_that_compressed_tensors_give_must_be_the_layers() -> None:
    contents = contents_of(layer_of("compressed-tensors", **SIZES))
    words = refused(contents, replaced("weight_shape", lambda shape: shape + 1))
    assert "weight_shape is (129, 65), expected (128, 64)" in words


@pytest.mark.parametrize("packing", ["gptq", "awq", "compressed-tensors"])
def test_undeclared_biases_are_never_dropped(packing: str) -> None:
    contents = contents_of(layer_of(packing, **SIZES))
    words = refused(contents, lambda files: files.update({(1, "w1", "bias"): torch.ones(128)}))
    assert "the checkpoint has expert biases, which the model's config does not declare" in words
    files = {**contents.files(), (1, "w1", "bias"): torch.zeros(128)}
    with moe.engine():
        assert whole_of(loaded(contents, files=files), contents) < FLOAT32


def test_a_layer_is_loaded_again_from_nothing() -> None:
    contents = contents_of(layer_of("gptq", **SIZES))
    with moe.engine():
        layer = loaded(contents)[0]
        with pytest.raises(CheckpointError, match="was never loaded"):
            layer.quant_method._read_weights(layer)


def test_real_weights_after_made_up_ones_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = contents_of(layer_of("gptq", **SIZES))
    with moe.engine():
        layer = moe.made(contents.problem, moe.moe_config(contents.problem))
        monkeypatch.setattr(layer.quant_method.adapter, "uses_dummy_weights", lambda: True)
        for parameter in layer.parameters():
            parameter.data.fill_(0)
        layer.quant_method._read_weights(layer)
        files = contents.files()
        missing = next(key for key in files if key[2] == "scales")
        moe.load(layer, {key: tensor for key, tensor in files.items() if key != missing})
        with pytest.raises(CheckpointError, match="was never loaded"):
            layer.quant_method._read_weights(layer)


# --- Configs ---------------------------------------------------------------------------------------------------------

NAMES = ("gptq", "gptq_marlin", "auto_gptq", "awq", "awq_marlin", "auto_awq", "moe_wna16", "compressed-tensors")


@pytest.mark.parametrize("name", NAMES)
def test_configs_are_the_stock_ones_heirs_and_travel(name: str) -> None:
    packing = "awq" if "awq" in name else "compressed-tensors" if name == "compressed-tensors" else "gptq"
    config = moe.quant_config(layer_of(packing, **SIZES), name)
    assert type(config).__module__.startswith("vllm_moe_oracle.methods.")
    stock = type(config).__mro__[1:]
    assert type(config).__name__ in {each.__name__ for each in stock}
    assert type(pickle.loads(pickle.dumps(config))) is type(config)
    assert torch.float32 in config.get_supported_act_dtypes()


@pytest.mark.parametrize("packing", ["gptq", "awq", "compressed-tensors"])
def test_experts_that_a_config_leaves_alone_are_stock_vllms(packing: str) -> None:
    excluded = {
        "gptq": {"dynamic": {r"-:.*layers\.3\..*\.experts\..*": {}}},
        "awq": {"modules_to_not_convert": [["lm_head"], ["layers.3.mlp"]]},
        "compressed-tensors": {"ignore": ["lm_head", r"re:.*layers\.3\.mlp\.experts\..*"]},
    }[packing]
    asked = layer_of(packing, **SIZES)
    config = moe.quant_config(asked, **excluded)
    with moe.engine():
        left = moe.made(asked, moe.moe_config(asked), config=config)
        assert type(left.quant_method) is UnquantizedFusedMoEMethod
        served = moe.made(asked, moe.moe_config(asked), config=config, layer_name="model.layers.4.mlp.experts")
        assert isinstance(served.quant_method, OracleMoEMethod)


@pytest.mark.parametrize("name", ["", "moe_wna16"])
def test_exceptions_of_a_gptq_config_hold_for_experts(name: str) -> None:
    override = {"bits": 8, "group_size": 64, "desc_act": True}
    asked = layer_of("gptq", **SIZES)
    config = moe.quant_config(asked, name, dynamic={r"+:.*layers\.3\..*": override})
    with moe.engine():
        scheme = moe.made(asked, moe.moe_config(asked), config=config).quant_method.decision.problem.scheme
        assert (scheme.bits, scheme.group_size, scheme.act_order) == (8, 64, "group")
        other = moe.made(asked, moe.moe_config(asked), config=config, layer_name="model.layers.4.mlp.experts")
        assert other.quant_method.decision.problem.scheme.bits == 4


@pytest.mark.parametrize("name", ["", "moe_wna16"])
@pytest.mark.parametrize(
    "override",
    [{"static_groups": False}, {"static_groups": True}, {"desc_act": False}, {"group_size": 32}, {"bits": 8}, {}],
    ids=str,
)
@pytest.mark.parametrize("static", [True, False])
def test_a_layers_method_reads_what_its_rules_say(name: str, override: dict[str, Any], static: bool) -> None:
    """What `explain` reads for the layer is what its method has: no answer is written into fields and read again."""
    asked = layer_of("gptq", **SIZES)
    rules = {r"+:.*layers\.3\..*": override}
    config = moe.quant_config(asked, name, desc_act=True, static_groups=static, dynamic=rules)
    expected = config.scheme_of("model.layers.3.mlp.experts")
    with moe.engine():
        method = moe.made(asked, moe.moe_config(asked), config=config).quant_method
    found = method.decision.problem.scheme
    assert (found.bits, found.group_size, found.act_order) == (expected.bits, expected.group_size, expected.act_order)
    assert type(config).expert_scheme is config.expert_scheme is None, "the model's config is no layer's"


def test_a_target_in_two_groups_is_the_later_groups_alone() -> None:
    """Weights and inputs of one group, and nothing of the other, whichever of them stock vLLM must be shown changed."""
    packed = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    unpacked = {**packed, "num_bits": 8, "strategy": "channel", "group_size": None}
    groups = [
        {"targets": ["Linear"], "weights": unpacked, "format": "int-quantized"},
        {"targets": ["Linear"], "weights": packed, "format": "pack-quantized"},
        {"targets": ["Linear"], "weights": {**packed, "actorder": "group"}, "format": "pack-quantized"},
    ]
    for first, second in itertools.permutations(groups, 2):
        config = {"quant_method": "compressed-tensors", "config_groups": {"a": first, "b": second}, "ignore": []}
        made = CompressedTensorsConfig.from_config(config)
        found = made.target_scheme_map["Linear"]
        expected = second["weights"]
        assert (found["weights"].num_bits, found["format"]) == (expected["num_bits"], second["format"])
        assert getattr(found["weights"].actorder, "value", found["weights"].actorder) == expected.get("actorder")
        lookup = parse_config(config, "quantization_config")
        asked = lookup(LayerNames(("model.layers.0.mlp.experts",), GATED_PROJECTIONS, GATED_PROJECTIONS[0]))
        assert asked.bits == expected["num_bits"]


def test_lists_of_modules_may_be_lists_of_lists() -> None:
    asked = layer_of("gptq", **SIZES)
    of_experts = [
        [f"mlp.experts.{number}.{name}_proj" for name in ("gate", "up", "down")] for number in range(SIZES["experts"])
    ]
    listed = [["self_attn.q_proj", "self_attn.k_proj"], *of_experts]
    config = moe.quant_config(asked, modules_in_block_to_quantize=listed)
    assert config.modules_in_block_to_quantize[0] == "self_attn.q_proj"
    config.apply_vllm_mapper(SimpleNamespace(apply_list=lambda names: [f"new.{name}" for name in names]))
    assert config.modules_in_block_to_quantize[0] == "new.self_attn.q_proj"
    without = moe.quant_config(asked, modules_in_block_to_quantize=listed[:1])
    with moe.engine():
        whole, partial = (moe.quant_config(asked, modules_in_block_to_quantize=names) for names in (listed, listed[:2]))
        assert isinstance(moe.made(asked, moe.moe_config(asked), config=whole).quant_method, OracleMoEMethod)
        with pytest.raises(CheckpointError, match="expert 1 differs from others: it is stored as not quantized"):
            moe.made(asked, moe.moe_config(asked), config=partial)
        assert type(moe.made(asked, moe.moe_config(asked), config=without).quant_method) is UnquantizedFusedMoEMethod


@pytest.mark.parametrize("kind", [{"zero_points": True}, {"act_order": "group"}])
@pytest.mark.parametrize("name", ["", "moe_wna16"])
def test_linear_layers_without_a_stock_kernel_are_refused(name: str, kind: dict[str, Any]) -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    config = moe.quant_config(layer_of("gptq", **SIZES, **kind), name)
    linear = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(linear)
    linear.params_dtype = torch.bfloat16
    with moe.engine(), pytest.raises(ValueError):
        config.get_quant_method(linear, "model.layers.0.self_attn.o_proj")


@pytest.mark.parametrize("packing", ["gptq", "awq"])
def test_linear_layers_beside_emulated_experts_keep_stocks_dtypes(packing: str) -> None:
    """A model may be in float32 for its experts; a kernel of linear layers would fail with an error of its own."""
    from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

    config = moe.quant_config(layer_of(packing, **SIZES))
    linear = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(linear)
    for dtype, served in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        linear.params_dtype = dtype
        if served:
            assert config.get_quant_method(linear, "model.layers.0.self_attn.o_proj") is not None
            continue
        words = r"o_proj: torch.float32 is not supported for quantized linear layers .* only for its experts"
        with pytest.raises(ValueError, match=words):
            config.get_quant_method(linear, "model.layers.0.self_attn.o_proj")
        config.refuse_linear_dtype(linear, UnquantizedLinearMethod(), "o_proj")


def test_act_order_of_a_linear_layer_in_compressed_tensors_is_refused() -> None:
    from vllm.model_executor.layers.linear import ReplicatedLinear

    config = moe.quant_config(layer_of("compressed-tensors", act_order="group", **SIZES))
    linear = ReplicatedLinear.__new__(ReplicatedLinear)
    torch.nn.Module.__init__(linear)
    with pytest.raises(ValueError, match=r"o_proj: group/dynamic activation ordering .* not supported for linear"):
        config.get_quant_method(linear, "model.layers.0.self_attn.o_proj")


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("packing", ["gptq", "awq"])
def test_biases_come_from_the_checkpoint(
    packing: str, declared: bool, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from safetensors.torch import save_file

    caplog.set_level(logging.WARNING, "vllm.moe_oracle")
    logging.getLogger("vllm").propagate = True

    asked = layer_of(packing, bias=True, **SIZES)
    contents = contents_of(asked)
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    files = {f"{moe.NAME}.{expert}.{names[shard]}.{name}": t for (expert, shard, name), t in contents.files().items()}
    save_file(files, tmp_path / "model.safetensors")
    config = moe.quant_config(asked)
    config.maybe_update_config(str(tmp_path))
    assert config.expert_biases
    with moe.engine():
        layer = moe.made(asked, moe.moe_config(asked, has_bias=declared), config=config)
        assert layer.quant_method.decision.problem.has_bias
        given = contents.files()
        if not declared:  # some experts may have none
            contents.biases["w2"][1] = 0
            del given[1, "w2", "bias"]
        moe.load(layer, given)
        layer.quant_method.process_weights_after_loading(layer)
        assert whole_of([layer], contents) < FLOAT32
        words = "w2_bias of the down projection of local expert 1 is not in the checkpoint, others are (1 missing)"
        assert (words in caplog.text) is not declared
    without = dataclasses.replace(asked, has_bias=False)
    plain = {name: tensor for name, tensor in files.items() if not name.endswith(".bias")}
    save_file(plain, tmp_path / "model.safetensors")
    config = moe.quant_config(without)
    config.maybe_update_config(str(tmp_path))
    with moe.engine():
        assert not moe.made(without, moe.moe_config(without), config=config).quant_method.decision.problem.has_bias


def test_a_reload_without_some_biases_reads_no_memory_that_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM's own reload, which gives parameters new memory."""
    from vllm.model_executor.model_loader import reload

    asked = layer_of("gptq", bias=True, **SIZES)
    contents = contents_of(asked)
    config = moe.quant_config(asked)
    config.expert_biases = True
    found, empty = [], torch.empty_strided
    with moe.engine():
        layer = moe.made(asked, moe.moe_config(asked, has_bias=False), config=config)
        model = torch.nn.ModuleList([layer])
        reload.record_metadata_for_reloading(model)
        moe.load(layer, contents.files())
        layer.quant_method.process_weights_after_loading(layer)
        found.append(whole_of([layer], contents))
        monkeypatch.setattr(torch, "empty_strided", lambda *args, **more: empty(*args, **more).fill_(3))
        for left_out in ([1], range(asked.num_experts)):
            contents.biases["w2"][left_out] = 0
            reload.initialize_layerwise_reload(model)
            files = contents.files()
            moe.load(
                layer, {key: each for key, each in files.items() if key[1:] != ("w2", "bias") or key[0] not in left_out}
            )
            reload.finalize_layerwise_reload(model, None)
            found.append(whole_of([layer], contents))
    assert max(found) < FLOAT32, found


def test_zero_biases_count_as_absent(tmp_path: Any) -> None:
    """AutoGPTQ wrote one for every matrix. With a bias, vLLM's Triton kernel and TRTLLM's could not run the layer."""
    from safetensors.torch import save_file

    asked = layer_of("gptq", bias=True, **SIZES)
    contents = contents_of(asked)
    for bias in contents.biases.values():
        bias.zero_()
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    files = {f"{moe.NAME}.{expert}.{names[shard]}.{name}": t for (expert, shard, name), t in contents.files().items()}
    assert any(name.endswith(".bias") for name in files)
    save_file(files, tmp_path / "model-00001.safetensors")
    config = moe.quant_config(asked)
    config.maybe_update_config(str(tmp_path))
    with moe.engine():
        layer = moe.made(asked, moe.moe_config(asked, has_bias=False), config=config)
        assert not layer.quant_method.decision.problem.has_bias
        moe.load(layer, contents.files())
        layer.quant_method.process_weights_after_loading(layer)
        assert whole_of([layer], contents) < FLOAT32
        wrong = moe.made(asked, moe.moe_config(asked, has_bias=False), config=config)
        contents.biases["w2"][1, 3] = 0.5
        with pytest.raises(CheckpointError, match="the checkpoint has expert biases"):
            moe.load(wrong, contents.files())
    # One expert's are enough, in whichever file.
    last = next(name for name in files if name.endswith("down_proj.bias"))
    save_file({last: torch.full((asked.hidden_size,), 0.5)}, tmp_path / "model-00002.safetensors")
    config.maybe_update_config(str(tmp_path))
    assert config.expert_biases


def test_of_a_repository_names_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_oracle.methods import wna16 as method

    found = {"model.layers.0.mlp.experts.7.down_proj.bias": {}}
    monkeypatch.setattr(method, "get_safetensors_params_metadata", lambda model, revision: found)
    assert method.has_expert_biases("somebody/model", "main")
    found.clear()
    assert not method.has_expert_biases("somebody/model", "main")


def test_only_group_indices_of_experts_are_loaded() -> None:
    config = moe.quant_config(layer_of("gptq", **SIZES))
    if not hasattr(type(config).__mro__[1], "get_checkpoint_weight_mapper"):
        return
    mapper = config.get_checkpoint_weight_mapper()
    names = [
        "model.layers.0.mlp.experts.7.gate_proj.g_idx", "model.layers.0.self_attn.q_proj.g_idx",
        "model.layers.0.mlp.shared_experts.gate_proj.g_idx", "model.layers.0.self_attn.q_proj.qweight",
    ]  # fmt: skip
    assert mapper.apply_list(names) == [names[0], names[3]]


def test_lora_leaves_to_stock_what_stock_can_read() -> None:
    ordered = layer_of("gptq", act_order="group", **SIZES)
    with (
        moe.engine(backend="auto"),
        pytest.raises(NoBackendError, match=r"LoRA on experts: .* AutoGPTQMoEMethod does not know"),
    ):
        moe.made(ordered, moe.moe_config(ordered, is_lora_enabled=True))
    integers = layer_of("compressed-tensors-int", **SIZES)
    with moe.engine(backend="auto"), pytest.raises(NoBackendError, match="reads the format pack-quantized only"):
        moe.made(integers, moe.moe_config(integers, is_lora_enabled=True))


@pytest.mark.parametrize(
    ("inputs", "declared"),
    [
        (None, "16bit"),
        ({"num_bits": 8, "strategy": "token", "dynamic": True}, "fp8_token"),
        ({"num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True}, "fp8"),
        ({"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True}, "mxfp8"),
        ({"num_bits": 8, "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"}, "mxfp8"),
        ({"num_bits": 4, "strategy": "group", "group_size": 32, "dynamic": True}, "mxfp4"),
        ({"num_bits": 8, "strategy": "tensor", "dynamic": True}, "8-bit float, strategy tensor, group_size None"),
        ({"num_bits": 8, "strategy": "tensor"}, "8-bit float, strategy tensor, group_size None, static"),
        ({"num_bits": 8, "group_size": 64, "dynamic": True}, "strategy group, group_size 64"),
        ({"num_bits": 8, "group_size": 32, "dynamic": True, "scale_dtype": "torch.float32"}, "scale_dtype float32"),
        ({"num_bits": 8, "group_size": 128, "dynamic": True, "scale_dtype": "torch.uint8"}, "group_size 128"),
        ({"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}, "strategy tensor_group"),
        ({"num_bits": 4, "strategy": "token", "dynamic": True}, "4-bit float, strategy token"),
        ({"num_bits": 8, "strategy": "token", "dynamic": True, "type": "int"}, "8-bit int, strategy token"),
        ({"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False}, "asymmetric 8-bit float, strategy"),
        ({"num_bits": 8, "strategy": "token", "dynamic": True, "scale_dtype": "torch.uint8"}, "scale_dtype uint8"),
        ({"num_bits": 8, "strategy": "token", "dynamic": True, "scale_dtype": "torch.float32"}, "fp8_token"),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_explain_and_method_read_the_same_activations(inputs: Any, declared: str, bits: int) -> None:
    """The precision, or what both say of inputs that have none of ours."""
    from compressed_tensors.quantization import QuantizationArgs

    from vllm_moe_oracle.methods.compressed_tensors import declared_activations
    from vllm_moe_oracle.quantization import parse_config
    from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames, UnsupportedFormat

    weights = {"type": "float", "num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": True}
    weights["scale_dtype"] = "torch.uint8"
    typed = None if inputs is None else {"type": "float", "symmetric": True, **inputs}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": typed}
    config = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "config_groups": {"g": group}}
    explained = parse_config(config, "x")(LayerNames(("m.experts",), GATED_PROJECTIONS))
    found: dict[str, Any] = {"format": config["format"], "weights": QuantizationArgs.model_validate(weights)}
    found["input_activations"] = None if typed is None else QuantizationArgs.model_validate(typed)
    layer = SimpleNamespace(quant_config=SimpleNamespace(get_scheme_dict=lambda layer, name: found))
    if isinstance(explained, Scheme):
        assert explained.name == f"mxfp{bits}" and explained.activations == declared
        assert declared_activations(layer, "m.experts", default="mxfp8") == declared
    else:
        assert isinstance(explained, UnsupportedFormat) and declared in explained.format
        with pytest.raises(CheckpointError, match=declared) as caught:
            declared_activations(layer, "m.experts", default="mxfp8")
        assert caught.value.where == "m.experts" and caught.value.remedy


def test_with_lora_the_stock_function_says_which_of_its_classes_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases have two, of which the one of the same name as ours reads few checkpoints."""
    from vllm_moe_oracle.methods import compressed_tensors

    def refuses(self: Any, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("not for this checkpoint")

    monkeypatch.setattr(compressed_tensors.stock_wna16.CompressedTensorsWNA16MoEMethod, "__init__", refuses)
    asked = layer_of("compressed-tensors", group=-1, **SIZES)
    with moe.engine(backend="auto"):
        layer = moe.Layer(moe.moe_config(asked, is_lora_enabled=True))
        config = moe.quant_config(asked)
        with set_current_layer(layer, moe.NAME):
            made = compressed_tensors.get_moe_method(lambda *args: ("stock's", args), config, layer, moe.NAME)
    assert made == ("stock's", (config, layer, moe.NAME))


@pytest.mark.parametrize("eplb", [False, True])
def test_unread_parameters_stay_unless_experts_move(eplb: bool) -> None:
    contents = contents_of(layer_of("compressed-tensors", **SIZES))
    with moe.engine():
        config = moe.moe_config(contents.problem)
        config.moe_parallel_config.enable_eplb = eplb
        layer = moe.made(contents.problem, config)
        moe.load(layer, contents.files())
        layer.quant_method.process_weights_after_loading(layer)
        parameters = dict(layer.named_parameters())
        assert ("w13_weight_shape" in parameters) is not eplb
        if eplb:
            assert all(parameter.shape[0] == 3 for parameter in parameters.values())
            return
        late = contents.files()[2, "w3", "weight_shape"]
        moe.load(layer, {(2, "w3", "weight_shape"): late})
        with pytest.raises(CheckpointError, match="weight_shape is"):
            moe.load(layer, {(2, "w3", "weight_shape"): late + 1})


def test_layers_of_a_mixed_checkpoint_are_decided_each_by_itself() -> None:
    asked = layer_of("compressed-tensors", **SIZES)
    mx = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    mx |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    groups = checkpoint_of(asked)["config_groups"]
    first = {
        "targets": [r"re:.*layers\.[0-9]\..*"],
        "weights": mx,
        "input_activations": None,
        "format": "mxfp8-quantized",
    }
    config = moe.quant_config(asked, config_groups={"first": first, **groups})
    with moe.engine(backend="auto", overrides=r"re:layers\.[0-9]\.=emulation"):
        made = {
            index: moe.made(asked, moe.moe_config(asked), config=config, layer_name=f"model.layers.{index}.mlp.experts")
            for index in (3, 12)
        }
    decisions = {index: layer.quant_method.decision for index, layer in made.items()}
    assert {index: decision.problem.scheme.name for index, decision in decisions.items()} == {3: "mxfp8", 12: "wna16"}
    assert {index: decision.why for index, decision in decisions.items()} == {3: "override", 12: "static"}


def test_loaders_stay_bound_to_their_layer_with_its_marks() -> None:
    asked = layer_of("gptq", **SIZES)
    with moe.engine():
        layer = moe.made(asked, moe.moe_config(asked))
    for name, parameter in layer.named_parameters():
        assert parameter.weight_loader.__self__ is layer, name
        assert parameter.weight_loader.supports_moe_loading


def test_the_product_of_everything_is_served_on_a_cpu() -> None:
    """Decisions alone; their numbers are above."""
    for bits, group, zero_points, order in itertools.product((4, 8), (32, 64, -1), (False, True), ("none", "group")):
        asked = layer_of("gptq", bits, group, zero_points, order, **SIZES)  # type: ignore[arg-type]
        with moe.engine():
            assert moe.made(asked, moe.moe_config(asked)).quant_method.decision.backend == "emulation"


# --- what a layer's matrices are called -------------------------------------------------------------------------------

_ROUTER = {r"-:.*gate.*": {}}
_UP_AND_DOWN = {r"-:.*layers\.3\.mixer\.experts\..*(up|down)_proj": {}}
_DEFAULT = ("gate_proj", "down_proj", "up_proj")
_INT4 = "int4 symmetric, groups of 128 (gptq)"


@pytest.mark.parametrize(
    ("kind", "names", "gated", "dynamic", "answer"),
    [
        # Of old releases layers have no names; the model is known all the same, but for tests of a layer by itself.
        ("mixtral", None, True, _ROUTER, _INT4),
        ("minimax_m2", None, True, _ROUTER, _INT4),
        ("phimoe", None, True, _ROUTER, _INT4),
        ("lfm2_moe", None, True, _ROUTER, _INT4),
        ("", None, True, _ROUTER, _INT4),
        # Models that say nothing get the default of later releases.
        ("minimax_m3_text", _DEFAULT, True, _ROUTER, _INT4),
        ("kimi_linear", _DEFAULT, True, _ROUTER, _INT4),
        ("kimi_k3", _DEFAULT, True, _ROUTER, _INT4),
        ("mixtral", ("w1", "w2", "w3"), True, _ROUTER, _INT4),
        ("unheard_of", ("w1", "w2", "w3"), True, _ROUTER, _INT4),
        # Here it is a matrix.
        ("qwen3_moe", _DEFAULT, True, _ROUTER, None),
        ("qwen3_moe", None, True, _ROUTER, None),
        ("mixtral", ("w1", "w2", "w3"), True, {r"-:.*\.w1": {}}, None),
        ("mixtral", None, True, {r"-:.*\.w1": {}}, None),
        # Without a gate nothing has to be said of one.
        ("nemotron_h", None, False, _UP_AND_DOWN, "not quantized"),
        ("", None, False, _UP_AND_DOWN, "not quantized"),
        ("nemotron_h", _DEFAULT, False, _UP_AND_DOWN, "not quantized"),
        ("nemotron_h", ("up_proj", "down_proj", None), False, _UP_AND_DOWN, "not quantized"),
        ("nemotron_h", None, False, {r"-:.*\.up_proj": {}}, None),
    ],
)
def test_entries_on_matrices_go_by_the_models_names_for_them(
    kind: str, names: Any, gated: bool, dynamic: Any, answer: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "dynamic": dynamic}
    layer = SimpleNamespace(moe_config=SimpleNamespace(is_act_and_mul=gated, num_logical_experts=4))
    for part, name in zip(("gate", "down", "up"), names or (), strict=bool(names)):
        setattr(layer, f"ckpt_{part}_proj_name", name)
    model = SimpleNamespace(hf_text_config=SimpleNamespace(model_type=kind)) if kind else None
    monkeypatch.setattr(current_adapter(), "_last_engine", lambda: SimpleNamespace(model_config=model))
    called = expert_layer_names("model.layers.3.mixer.experts", layer)
    if answer is None:
        with pytest.raises(CheckpointError, match="the matrices of one layer's experts are stored differently"):
            parse_config(config, "config.json")(called)
    else:
        assert describe_format(parse_config(config, "config.json")(called)) == answer


@pytest.mark.parametrize(
    ("targets", "reaches"),
    [
        (None, True),
        (["q_proj", "o_proj"], False),
        (["qkv_proj", "gate_proj", "up_proj", "down_proj"], False),
        ([], False),
        (["o_proj", "experts"], True),
        ([moe.NAME], True),
        ([f"{moe.NAME}.0.gate_proj"], True),
        (["model.layers.99.mlp.experts"], True),  # perhaps another name of these
    ],
)
def test_experts_that_no_adapter_targets_need_no_lora_backend(targets: list[str] | None, reaches: bool) -> None:
    from vllm.config import get_current_vllm_config
    from vllm.config.lora import LoRAConfig

    asked = layer_of("gptq", **SIZES)
    with moe.engine(backend="auto"):
        get_current_vllm_config().lora_config = LoRAConfig(target_modules=targets)
        config = moe.moe_config(asked, is_lora_enabled=True)
        if not reaches:
            method = moe.made(asked, config).quant_method
            assert (method.decision.backend, method.decision.problem.lora) == ("cpu_dequantized", False)
            assert not config.is_lora_enabled  # vLLM's classes refuse LoRA by it
            return
        words = "LoRA on experts: no backend .*--lora-target-modules, without experts"
        with pytest.raises(NoBackendError, match=f"(?s){words}"):
            moe.made(asked, config)
