"""MXFP4 inside vLLM: configs and methods are the heirs of the stock classes, and tensors arrive as the files have them,
also by a reload."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm.model_executor.layers.quantization import mxfp4 as stock
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kMxfp4Dynamic,
    kMxfp8Dynamic,
)

from tests.lib import checkpoints, vllm_runner
from tests.lib.cases import problem
from vllm_moe_oracle import methods
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import mx_scheme
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.methods import dtypes, mxfp4
from vllm_moe_oracle.methods.base import OracleMoEMethod
from vllm_moe_oracle.methods.inc_mxfp4 import INCMxfp4MoEMethod

CONFIGS = {"mxfp4": mxfp4.Mxfp4Config, "gpt_oss_mxfp4": mxfp4.GptOssMxfp4Config}
METHODS = (mxfp4.Mxfp4MoEMethod, mxfp4.GptOssMxfp4MoEMethod)
PUBLISHED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

# --- Classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_takes_the_place_of_the_stock_one(name: str) -> None:
    ours = CONFIGS[name]
    assert methods.configs()[name] == (f"{ours.__module__}:{ours.__name__}",)
    assert issubclass(ours, getattr(stock, ours.__name__))
    assert ours.get_name() == name
    made = ours.from_config(PUBLISHED)
    assert type(pickle.loads(pickle.dumps(made))) is ours


def test_only_gpt_oss_is_claimed_by_its_name() -> None:
    def claim(model_type: str) -> str | None:
        config = SimpleNamespace(model_type=model_type)
        found: str | None = mxfp4.GptOssMxfp4Config.override_quantization_method(PUBLISHED, None, hf_config=config)
        return found

    assert (claim("gpt_oss"), claim("qwen3_moe")) == ("gpt_oss_mxfp4", None)


NAMES = ["0.gate_up_proj", "0.gate_proj", "0.up_proj", "0.down_proj", "gate_up_proj", "down_proj"]


@pytest.mark.parametrize("name", NAMES)
def test_vllms_loader_of_gpt_oss_skips_what_compressed_tensors_packs(name: str) -> None:
    """Why such checkpoints are refused: no name of theirs becomes that of a parameter, or of one expert's part."""
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM, GptOssModel

    def becomes(tensor: str) -> str:
        (found,) = GptOssForCausalLM.hf_to_vllm_mapper.apply_list([f"layers.0.mlp.experts.{tensor}"])
        return str(found)

    parameters = dict.fromkeys(f"layers.0.mlp.experts.routed_experts.w{part}_weight_packed" for part in (13, 2))
    for suffix in ("weight_packed", "qweight"):
        packed = becomes(f"{name}.{suffix}")
        assert packed.endswith(f"{name}.{suffix}")
        assert GptOssModel._get_streamed_expert_info(packed, parameters) is None
    assert becomes("down_proj_blocks").endswith("experts.w2_weight")  # as OpenAI's are


@pytest.mark.parametrize("activations", ["16bit", "mxfp4", "fp8_token"])
def test_experts_of_gpt_oss_that_compressed_tensors_packed_are_refused(activations: Any) -> None:
    made = mxfp4.BaseMxfp4MoEMethod.__new__(mxfp4.BaseMxfp4MoEMethod)
    scheme = mx_scheme("mxfp4", "compressed-tensors", activations)
    asked = problem(scheme=scheme, even_expert_split=True)
    with pytest.raises(CheckpointError, match=r"gpt-oss skips experts .* \(weight_packed\)"):
        made._refine_problem(asked)
    assert made._refine_problem(replace(asked, even_expert_split=False)).scheme == scheme
    assert made._refine_problem(replace(asked, scheme=mx_scheme("mxfp4", "gpt_oss"))).even_expert_split


@pytest.mark.parametrize(
    ("config", "activations"), [({"act_bits": 16}, "16bit"), ({"act_bits": 4}, "mxfp4"), ({}, "mxfp4")]
)
def test_inputs_have_the_precision_that_auto_round_declared(
    config: dict[str, Any], activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = SimpleNamespace(quantization_config={"quant_method": "auto-round", "bits": 4, **config})
    engine = SimpleNamespace(model_config=SimpleNamespace(hf_config=checkpoint))
    monkeypatch.setattr(current_adapter(), "_last_engine", lambda: engine, raising=False)
    asked = []
    monkeypatch.setattr(OracleMoEMethod, "decide", lambda self, moe, scheme: asked.append(scheme))
    made = INCMxfp4MoEMethod.__new__(INCMxfp4MoEMethod)
    made.__init__(None)  # type: ignore[misc]
    assert asked == [mx_scheme("mxfp4", "auto-round", activations)]
    checkpoint.quantization_config["act_bits"] = 6
    with pytest.raises(CheckpointError, match="inputs of 6 bits, which no format has"):
        made.__init__(None)  # type: ignore[misc]


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_emulated_dtypes_are_offered_on_a_cpu_only(name: str, cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
    more = [torch.float16, torch.float32] if cpu else []
    assert CONFIGS[name].from_config(PUBLISHED).get_supported_act_dtypes() == [torch.bfloat16, *more]


@pytest.mark.parametrize("ours", METHODS)
def test_a_method_keeps_what_vllms_loaders_look_at(ours: type[Any]) -> None:
    assert issubclass(ours, OracleMoEMethod) and issubclass(ours, getattr(stock, ours.__name__))
    weight_dtype = "gpt_oss_mxfp4" if "GptOss" in ours.__name__ else "mxfp4"
    made = ours.__new__(ours)
    assert made.weight_dtype == weight_dtype
    assert not (made.skip_forward_padding or made.has_unpadded_output or made.supports_pre_processed_weights)


@pytest.mark.parametrize("ours", METHODS)
@pytest.mark.parametrize("sizes", [(2880, 2880), (2880, 1440), (96, 32)])
def test_no_size_is_rounded_up(ours: type[Any], sizes: tuple[int, int]) -> None:
    alone = type("Alone", (), {"__getattr__": lambda self, name: False})()  # no all-to-all of any name
    made = ours.__new__(ours)
    made.decision = SimpleNamespace(problem=SimpleNamespace(intermediate_size=sizes[1]))
    assert made.maybe_roundup_sizes(*sizes, torch.bfloat16, alone) == sizes


# --- What is declared ------------------------------------------------------------------------------------------------


def test_an_fp8_config_declares_fp8_in_every_release() -> None:
    fp8 = Fp8Config(True, "dynamic", weight_block_size=[128, 128])
    layer = SimpleNamespace(quant_config=fp8)
    for key in (None, kMxfp8Dynamic):
        assert mxfp4.activations_of_key(layer, key) == "fp8"
    for key, expected in ((None, "16bit"), (kMxfp8Dynamic, "mxfp8"), (kMxfp4Dynamic, "mxfp4"),
                          (kFp8DynamicTokenSym, "fp8_token"), (kFp8Dynamic128Sym, "fp8")):  # fmt: skip
        assert mxfp4.activations_of_key(SimpleNamespace(quant_config=None), key) == expected
        assert mxfp4.activations_of_key(None, key) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_other_layers_are_the_stock_classes_business(name: str) -> None:
    assert CONFIGS[name].from_config(PUBLISHED).get_quant_method(torch.nn.Linear(1, 1), "lm_head") is None


def experts_layer() -> Any:
    """A layer of experts, as far as a config class looks at it."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    layer = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.moe_config = SimpleNamespace(is_act_and_mul=True, num_logical_experts=4)
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "gate", "up", "down"
    return layer


LEFT = [
    "model.layers.3.mlp.experts", "model.layers.3", "layers.3.mlp", "*.layers.3.*", "model.layers.3*",
    r"re:.*layers\.3\..*",
]  # fmt: skip


@pytest.mark.parametrize("entry", [*LEFT, "hf.layers.3.mlp"])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_that_are_left_out_are_stock_s_or_for_gpt_oss_refused(
    name: str, entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    made: list[Any] = []
    monkeypatch.setattr(mxfp4, "UnquantizedFusedMoEMethod", lambda moe: "stock's")
    monkeypatch.setattr(mxfp4, "_moe_method", lambda kind, layer, prefix: made.append(prefix) or "ours")
    config = CONFIGS[name].from_config({**PUBLISHED, "modules_to_not_convert": ["lm_head", entry]})
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"hf.": "model."}))
    first, third = (f"model.layers.{index}.mlp.experts" for index in (30, 3))
    assert config.get_quant_method(experts_layer(), first) == "ours"
    if name == "mxfp4":
        assert config.get_quant_method(experts_layer(), third) == "stock's"
    else:
        with pytest.raises(CheckpointError, match="loader of gpt-oss reads them all as MXFP4") as caught:
            config.get_quant_method(experts_layer(), third)
        assert third in caught.value.where and repr(config.excluded_modules[1]) in caught.value.rule
    assert made == [first]


# --- Tensors ---------------------------------------------------------------------------------------------------------


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def wanted(checkpoint: Path) -> dict[str, str]:
    """Digests of what the experts' parameters must hold, from the file alone, in plain numpy."""
    # As bytes: numpy has no bfloat16. Each element of a bias is two of them.
    loaded = load_file(checkpoint / "model.safetensors")
    tensors = {name: tensor.unsqueeze(-1).view(torch.uint8).numpy() for name, tensor in loaded.items()}
    layers = {name.partition(".mlp.")[0] for name in tensors if ".mlp.experts" in name}
    found = {}
    for layer in layers:
        for matrix, name in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            for part, suffix in (("_blocks", "_weight"), ("_scales", "_weight_scale"), ("_bias", "_bias")):
                array = tensors[f"{layer}.mlp.experts.{matrix}{part}"]
                if name == "w13":
                    array = np.concatenate([array[:, 0::2], array[:, 1::2]], axis=1)
                found[f"{layer}.{name}{suffix}"] = digest(array)
    return found


def held(step: dict[str, Any]) -> dict[str, str]:
    """What a step's model held, by layer and parameter."""
    return {f"{n.partition('.mlp.')[0]}.{n.rpartition('.')[2]}": value for n, value in step["digests"].items()}


@pytest.mark.full
def test_gpt_oss_loads_and_reloads_at_the_same_addresses(tmp_path: Path) -> None:
    size = replace(checkpoints.Size(), top_k=4)
    first, second = (
        checkpoints.write_checkpoint(tmp_path / str(seed), arch="gpt_oss", format="mxfp4", size=size, seed=seed)
        for seed in range(2)
    )
    steps = [["process"], ["reload", str(second)], ["load", str(first)], ["reload", str(first)]]
    job = {"checkpoint": str(first), "backend": "emulation", "engine": {}, "steps": steps}
    loaded, reloaded, refused, back = vllm_runner.run("run_lifecycle.py", {"gpt-oss": job}, tmp_path)["gpt-oss"]
    assert held(loaded) == wanted(first) == held(back)
    assert held(reloaded) == wanted(second) != wanted(first)
    assert loaded["addresses"] == reloaded["addresses"] == back["addresses"]
    assert "LifecycleError" in refused["error"]
    for step in (loaded, reloaded, back):
        assert "error" not in step and step["states"] == ["converted"] * size.layers
