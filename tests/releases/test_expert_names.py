"""Names by which compressed-tensors configs are asked about experts: the table against every release's own code."""

from __future__ import annotations

import ast
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.configs import CT_INPUTS, CT_MXFP8, INT4, PACKED, compressed, config, group
from tests.lib.releases import every_release, sources
from tests.lib.stock_code import load
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.releases.expert_names import min_expert_width, projection_names
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES

KINDS = {
    "mixtral": "mixtral", "minimax_m2": "minimax_m2", "phimoe": "phimoe", "lfm2_moe": "lfm2_moe",
    "nemotron_h": "nemotron_h", "nemotron_h_puzzle": "nemotron_h", "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v4", "qwen3_moe": "qwen3_moe", "deepseek_v3": "deepseek_v2", "kimi_k3": "kimi_k3",
}  # fmt: skip
"""Kinds of model, and the file or folder of vLLM's code for them."""

NUMBERED = ("w1", "w3", "w2")
DEFAULT = ("gate_proj", "up_proj", "down_proj")


@cache
def said(release: str) -> dict[str, tuple[str | None, ...]]:
    """What models' code says, gate, up, down, by the model's file, or its folder where it has one."""
    root = sources(release) / "vllm"
    found: dict[str, tuple[str | None, ...]] = {}
    for path in [*(root / "model_executor/models").rglob("*.py"), *(root / "models").rglob("*.py")]:
        if "ckpt_names=" not in (text := path.read_text(encoding="utf-8")):
            continue
        name = path.stem if path.is_relative_to(root / "model_executor") else path.relative_to(root / "models").parts[0]
        for node in ast.walk(ast.parse(text)):
            for word in node.keywords if isinstance(node, ast.Call) else ():
                if word.arg == "ckpt_names":
                    gate, down, up = ast.literal_eval(word.value)
                    assert found.setdefault(name, (gate, up, down)) == (gate, up, down)
    return found


class Config:
    """Stands for vLLM's config object and keeps the names that it is asked about."""

    def __init__(self, answer: Any = None) -> None:
        self.names: list[str] = []
        self.answer = answer

    def _add_fused_moe_to_target_scheme_map(self) -> None:
        pass

    def get_scheme_dict(self, layer: Any, layer_name: str) -> Any:
        self.names.append(layer_name)
        return self.answer


def layer_of(release: str, names: tuple[str | None, ...] | None) -> SimpleNamespace:
    """A layer as the release makes it for a model whose code says these names."""
    layer = SimpleNamespace(moe_config=None)
    if names is not None:
        layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = names
    return layer


@every_release
def test_the_table_is_what_each_release_asks(release: str) -> None:
    of_models = said(release)
    assert set(of_models) <= set(KINDS.values())  # a model that says names anew belongs into the table
    folder = "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe"
    stock = load(release, f"{folder}/compressed_tensors_moe.py")["CompressedTensorsMoEMethod"]
    for kind, file in KINDS.items():
        config = Config()
        stock.get_moe_method(config, layer_of(release, of_models.get(file, DEFAULT)), "experts")
        assert tuple(config.names) == tuple(f"experts.0.{name}" for name in projection_names(kind, release).stock), kind


@every_release
def test_wna16_methods_ask_by_the_names_in_the_models_code(release: str) -> None:
    pytest.importorskip("vllm")
    from vllm_moe_oracle.methods.compressed_tensors import _integer_arguments

    of_models = said(release)
    routed = sources(release) / "vllm/model_executor/layers/fused_moe/routed_experts.py"
    has_names = routed.is_file() and "self.ckpt_gate_proj_name = " in routed.read_text(encoding="utf-8")
    for kind, file in KINDS.items():
        config = Config()
        names = of_models.get(file, DEFAULT) if has_names else None
        assert _integer_arguments(config, layer_of(release, names), "experts") is None
        assert tuple(config.names) == tuple(f"experts.0.{name}" for name in projection_names(kind, release).wna16), kind


@every_release
def test_declared_inputs_are_those_of_the_name_that_stock_asks_for(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry of another name may not be there, or may declare other inputs."""
    pytest.importorskip("vllm")
    from compressed_tensors.quantization import QuantizationArgs

    from vllm_moe_oracle.methods import compressed_tensors

    weights = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")
    monkeypatch.setattr(compressed_tensors, "current_adapter", lambda: SimpleNamespace(version=lambda: release))
    of_models = said(release)
    for kind, file in KINDS.items():
        layer = layer_of(release, of_models.get(file, DEFAULT))
        layer.quant_config = Config({"weights": weights, "input_activations": None})
        assert compressed_tensors.declared_activations(layer, "experts", "mxfp8") == "16bit"
        assert layer.quant_config.names == [f"experts.0.{projection_names(kind, release).stock[-1]}"], kind


def test_what_cannot_be_read_is_the_newest_release() -> None:
    assert (
        projection_names("mixtral", None)
        == projection_names("mixtral", "of today")
        == projection_names("mixtral", RELEASES[-1])
    )
    assert (
        projection_names("mixtral", RELEASES[0]).stock == DEFAULT
        and projection_names("mixtral", RELEASES[-1]).stock == NUMBERED
    )
    assert projection_names("mixtral", f"{RELEASES[-1]}+cpu").stock == NUMBERED


MXFP8 = group(CT_MXFP8, CT_INPUTS)
BY_NUMBER, BY_WORD = r"re:.*experts\..*\.w[123]$", r"re:.*experts\..*\.(gate|up|down)_proj$"


@pytest.fixture
def read_for(explain: Any) -> Any:
    """Reads a model's config with this quantization, for a release."""
    return lambda name, quantization, release: explain(config(name, quantization_config=quantization), vllm=release)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "minimax-m2"])
@pytest.mark.parametrize(
    ("release", "pattern", "hits"),
    [
        (None, BY_NUMBER, True), (None, BY_WORD, False), ("0.32.0", BY_NUMBER, True), ("0.32.0", BY_WORD, False),
        ("0.31.0", BY_NUMBER, False), ("0.31.0", BY_WORD, True),
    ],
)  # fmt: skip
def test_entries_hit_experts_by_the_names_that_vllm_asks(
    name: str, release: str | None, pattern: str, hits: bool, read_for: Any
) -> None:
    ignored = read_for(name, compressed(MXFP8, ignore=[pattern]), release)
    assert bool(ignored.unquantized) == hits and bool(ignored.problems) == (not hits)
    # As targets: experts that no entry hits are left in 16 bits.
    only = read_for(name, compressed({**MXFP8, "targets": [pattern]}), release)
    assert bool(only.problems) == hits and bool(only.unquantized) == (not hits)


def test_entries_of_unasked_names_do_not_make_a_mixture(read_for: Any) -> None:
    some = compressed(MXFP8, ignore=["re:.*gate_proj$"])
    assert len(read_for("mixtral-8x7b", some, "0.32.0").problems) == 32
    with pytest.raises(CheckpointError, match="gate_proj: not quantized"):
        read_for("mixtral-8x7b", some, "0.31.0")
    with pytest.raises(CheckpointError, match="w1: not quantized"):
        read_for("mixtral-8x7b", compressed(MXFP8, ignore=[r"re:.*\.w1$"]), "0.32.0")


def test_integers_use_the_models_names_where_stock_does_not(read_for: Any) -> None:
    ints = compressed({**group(INT4), "targets": [BY_NUMBER]}, format=PACKED)
    for release in ("0.25.1", "0.31.0", "0.32.0"):
        assert len(read_for("mixtral-8x7b", ints, release).problems) == 32
    assert len(read_for("mixtral-8x7b", ints, "0.24.0").unquantized) == 32


def test_formats_of_non_gated_experts_are_looked_up_under_gate_too(read_for: Any) -> None:
    name, mine = "nemotron-3-nano-30b-a3b", r"re:.*experts\..*\.(up|down)_proj$"
    for release, odd in (("0.25.1", "gate_proj"), (NEWEST, "None")):
        with pytest.raises(CheckpointError, match=f"{odd}: not quantized"):
            read_for(name, compressed({**MXFP8, "targets": [mine]}), release)
        assert read_for(name, compressed(MXFP8, ignore=[]), release).problems
    ints = compressed({**group(INT4), "targets": [mine]}, format=PACKED)
    assert read_for(name, ints, NEWEST).problems


@pytest.mark.parametrize("release", ["0.32", "0.32.0", "0.32.0rc1", "0.32.0+cpu", "0.33"])
def test_a_release_may_be_written_in_any_way(release: str) -> None:
    assert projection_names("mixtral", release) == projection_names("mixtral", None)


@every_release
def test_kimis_experts_are_filled_up_where_a_releases_code_says_so(release: str) -> None:
    root = sources(release) / "vllm"
    files = [*(root / "model_executor/models").glob("kimi_linear.py"), *(root / "models").glob("kimi_k3/*/*.py")]
    asks = {
        tuple(ast.literal_eval(each) for each in node.args[1:])
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr" and "min_moe_" in ast.unparse(node)
    }
    assert files
    least = min_expert_width("kimi_linear", release)
    assert asks == ({("min_moe_intermediate_per_partition", least)} if least else set())
    assert min_expert_width("qwen3_moe", release) == 0
