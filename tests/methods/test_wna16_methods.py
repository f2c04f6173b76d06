"""Methods for integer experts: files of every packing, loaded tensor by tensor and cut over ranks, give the layer that
they say; what contradicts itself, or is missing, is refused by name."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from tests.lib import moe_wna16_layers as moe
from tests.lib.moe_wna16_layers import loaded, whole_of
from tests.lib.tiers import sampled
from tests.lib.wna16_layers import contents_of, layer_of
from vllm_moe_oracle import plugin
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import CheckpointError, NoBackendError
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
    factor: float, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
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
    packing: str, bits: int, word: int, odd: bool, caplog: pytest.LogCaptureFixture
) -> None:
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


NAMED = [
    ("gptq", ""), ("gptq", "moe_wna16"), ("awq", ""), ("awq", "moe_wna16"), ("compressed-tensors", ""),
    ("compressed-tensors-int", ""),
]  # fmt: skip
"""Packings, and names of vLLM's that read them."""


@pytest.mark.parametrize(("packing", "name"), NAMED)
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


@pytest.mark.parametrize(("packing", "name"), NAMED[:-1])
def test_a_tensor_that_never_came_is_named(packing: str, name: str) -> None:
    contents = contents_of(layer_of(packing, zero_points=True, **SIZES))
    zeros = "weight_zero_point" if packing == "compressed-tensors" else "qzeros"
    for tensor in (*PLAIN[packing], zeros):
        words = refused(contents, lambda files, tensor=tensor: files.pop((1, "w3", tensor)), name)
        assert f"w13_{tensor} of the up projection of local expert 1 was never loaded" in words
        assert f"(1 such in w13_{tensor})" in words


@pytest.mark.parametrize("packing", PLAIN)
def test_a_tensor_that_came_full_of_nan_is_damage(packing: str) -> None:
    contents = contents_of(layer_of(packing, **SIZES))
    name = "weight_scale" if packing == "compressed-tensors" else "scales"
    words = refused(contents, replaced(name, lambda tensor: torch.full_like(tensor, torch.nan)))
    assert f"scales in w13_{name} are NaN or infinite; the first is nan of local expert 1 at" in words
    assert "The checkpoint is damaged" in words and "never loaded" not in words


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
    floats = f"the packing {packing} as bfloat16, float16 or float32"
    assert f"the checkpoint stores it as int32, {floats}. The checkpoint is not in the format" in words
    words = refused(contents, replaced(scales, lambda tensor: tensor.to(torch.float64)))
    assert f"the checkpoint stores it as float64, {floats}. Convert it to one of these" in words
    wrong = contents.files()[1, "w3", codes].T
    words = refused(contents, replaced(codes, lambda tensor: tensor.T.contiguous()))
    assert f"an expert's tensor has shape {list(wrong.shape)}, expected {list(wrong.T.shape)}" in words
    words = refused(contents, replaced(scales, lambda tensor: tensor[:1].clone(), "w2"))
    assert "an expert's tensor has shape [1, " in words
    words = refused(contents, replaced(scales, lambda tensor: tensor * float("nan")))
    assert "scales in w13_" in words and "NaN or infinite" in words


def one_group(files: dict[tuple[int, str, str], Any]) -> None:
    for shard in ("w1", "w3"):
        files[1, shard, "g_idx"][:] = 1


@pytest.mark.parametrize(
    ("packing", "order", "change", "words"),
    [
        (
            "gptq", "group", replaced("g_idx", lambda groups: groups.roll(1)),
            "local expert 1: gate and up have different group indices, from input",
        ),
        ("gptq", "group", one_group, "w13_g_idx gives group 1 of expert 1 64 input features, not 32"),
        (
            "compressed-tensors", "none", replaced("weight_shape", lambda shape: shape + 1),
            "weight_shape is (129, 65), expected (128, 64)",
        ),
    ],
    ids=["gate and up", "one group", "shape"],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(packing: str, order: Any, change: Any, words: str) -> None:
    assert words in refused(contents_of(layer_of(packing, act_order=order, **SIZES)), change)


def test_an_order_that_the_config_does_not_declare_is_noticed() -> None:
    contents = contents_of(layer_of("gptq", **SIZES))
    index = torch.arange(64, dtype=torch.int32) // 32
    words = refused(contents, lambda files: files.update({(1, "w1", "g_idx"): index.roll(3)}))
    assert "the group index orders the input features, but the config declares no act order" in words
    files = {**contents.files(), (1, "w1", "g_idx"): torch.zeros(64, dtype=torch.int32)}
    with moe.engine():
        assert whole_of(loaded(contents, files=files), contents) < FLOAT32


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


def written(contents: Any, path: Path, *, biases: bool = True) -> Any:
    """Our config object for a checkpoint that is stored so, after it has looked for biases."""
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    files = {f"{moe.NAME}.{expert}.{names[shard]}.{name}": t for (expert, shard, name), t in contents.files().items()}
    save_file({name: each for name, each in files.items() if biases or not name.endswith(".bias")}, path)
    config = moe.quant_config(dataclasses.replace(contents.problem, has_bias=biases))
    config.maybe_update_config(str(path.parent))
    return config


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("packing", ["gptq", "awq"])
def test_biases_come_from_the_checkpoint(
    packing: str, declared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm.moe_oracle")
    asked = layer_of(packing, bias=True, **SIZES)
    contents = contents_of(asked)
    config = written(contents, tmp_path / "model.safetensors")
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
    config = written(contents, tmp_path / "model.safetensors", biases=False)
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


def test_zero_biases_count_as_absent(tmp_path: Path) -> None:
    """AutoGPTQ wrote one for every matrix. With a bias, vLLM's Triton kernel and TRTLLM's could not run the layer."""
    asked = layer_of("gptq", bias=True, **SIZES)
    contents = contents_of(asked)
    for bias in contents.biases.values():
        bias.zero_()
    config = written(contents, tmp_path / "model-00001.safetensors")
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
    last = {f"{moe.NAME}.0.down_proj.bias": torch.full((asked.hidden_size,), 0.5)}
    save_file(last, tmp_path / "model-00002.safetensors")
    config.maybe_update_config(str(tmp_path))
    assert config.expert_biases


def test_of_a_repository_names_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_moe_oracle.methods import wna16 as method

    found = {"model.layers.0.mlp.experts.7.down_proj.bias": {}}
    monkeypatch.setattr(method, "get_safetensors_params_metadata", lambda model, revision: found)
    assert method.has_expert_biases("somebody/model", "main")
    found.clear()
    assert not method.has_expert_biases("somebody/model", "main")


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
