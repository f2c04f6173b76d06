"""Configs of integer experts: which layers get a method of ours by the fields of a checkpoint, and what it reads."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

from tests.lib import moe_wna16_layers as moe
from tests.lib.wna16_layers import checkpoint_of, contents_of, layer_of
from vllm_moe_oracle import plugin
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.compat.layer_context import set_current_layer
from vllm_moe_oracle.core.problem import Scheme
from vllm_moe_oracle.errors import CheckpointError, NoBackendError
from vllm_moe_oracle.methods.base import OracleMoEMethod
from vllm_moe_oracle.methods.compressed_tensors import CompressedTensorsConfig
from vllm_moe_oracle.methods.wna16 import expert_layer_names
from vllm_moe_oracle.quantization import parse_config
from vllm_moe_oracle.quantization.types import GATED_PROJECTIONS, LayerNames, describe_format

SIZES = {"experts": 3, "top_k": 2, "hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    plugin.register()
    yield
    plugin.unregister()


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


@pytest.mark.parametrize("stored", ["nowhere", "in 16 bits"])
@pytest.mark.parametrize("packing", ["gptq", "gptq_v2", "awq"])
def test_an_expert_that_files_alone_leave_out_is_missed_by_its_name(packing: str, stored: str, tmp_path: Path) -> None:
    """Where the config lists no module, vLLM takes names from the files: none of them is an entry to correct."""
    asked = layer_of(packing, **SIZES)
    quantized = {key: tensor for key, tensor in contents_of(asked).files().items() if key[0] != 2}
    projections = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    files = {f"{moe.NAME}.{expert}.{projections[shard]}.{end}": t for (expert, shard, end), t in quantized.items()}
    if stored == "in 16 bits":
        files |= {f"{moe.NAME}.2.{each}.weight": torch.ones(4, 4).bfloat16() for each in projections.values()}
    save_file(files, tmp_path / "model.safetensors")
    config = moe.quant_config(asked)
    config.maybe_update_config(str(tmp_path))
    with moe.engine():
        layer = moe.made(asked, moe.moe_config(asked), config=config)
        moe.load(layer, quantized)
        with pytest.raises(CheckpointError, match="w13_qweight of the gate projection of local expert 2 was never loa"):
            layer.quant_method.process_weights_after_loading(layer)


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


def test_adapters_of_what_stock_cannot_run_are_an_error() -> None:
    ordered = layer_of("gptq", act_order="group", **SIZES)
    with (
        moe.engine(backend="auto"),
        pytest.raises(NoBackendError, match=r"LoRA on experts: .* AutoGPTQMoEMethod raises NotImplementedError"),
    ):
        moe.made(ordered, moe.moe_config(ordered, is_lora_enabled=True))
    integers = layer_of("compressed-tensors-int", **SIZES)
    with moe.engine(backend="auto"), pytest.raises(NoBackendError, match="only format: pack-quantized"):
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
