"""Humming's products of few tokens are not cut into many parts, each of which is rounded before it is added."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from cases import problem
from releases import sources

from vllm_moe_oracle.backends._humming import whole_sums
from vllm_moe_oracle.compat import RELEASES, since
from vllm_moe_oracle.oracle.decision import Plan
from vllm_moe_oracle.oracle.problem import Activation, Scheme
from vllm_moe_oracle.oracle.registry import default_registry

H200 = 132
KIMI = problem(scheme=Scheme("wna16", 4, 32, "gptq"), experts=384, hidden_size=7168, intermediate_size=256, tp=8)
QWEN3 = problem(scheme=Scheme("wna16", 4, 128, "gptq"))


def configs(stream_k: bool, block: int = 128, **more: Any) -> list[list[Any]]:
    """As ``get_heuristics_config`` of humming-kernels gives them for a layer on an H200."""
    return [
        [lower, upper, {"block_shape": (rows, block, 256), "use_stream_k": stream_k, "num_stages": 4, **more}]
        for lower, upper, rows in ((0, 344, 8), (344, 1008, 16), (1008, 1 << 30, 64))
    ]


def made(layer: Any, first: list[list[Any]], second: list[list[Any]]) -> Any:
    experts = SimpleNamespace(w13_tuning_config=first, w2_tuning_config=second)
    whole_sums(experts, layer, H200)
    return experts


def chosen(found: Any, choices: int) -> dict[str, Any]:
    """The configuration for a call with so many choices, as vLLM and the library look it up."""
    (one,) = [config for lower, upper, config in found if lower < choices <= upper]
    assert isinstance(one, dict)
    return one


def parts(layer: Any, config: dict[str, Any], choices: int) -> int:
    """Most parts of one block's sum when every choice is another expert: the multiprocessors take equal shares of all
    columns, wherever these begin."""
    blocks = choices * math.ceil(layer.w13_rows / config["block_shape"][1])
    room = H200 * config.get("num_ctas_per_sm", 1)
    if not config["use_stream_k"] or blocks >= room:
        return 1
    return math.ceil(room / blocks) + 1


@pytest.mark.parametrize("more", [{}, {"num_ctas_per_sm": 2}])
@pytest.mark.parametrize("layer", [KIMI, QWEN3], ids=["kimi", "qwen3"])
def test_no_sum_has_more_than_three_parts(layer: Any, more: dict[str, Any]) -> None:
    before = configs(True, **more)
    after = made(layer, configs(True, **more), configs(True, **more)).w13_tuning_config
    assert max(parts(layer, chosen(before, choices), choices) for choices in range(1, 400)) > 5
    for choices in range(1, 400):
        config, own = chosen(after, choices), chosen(before, choices)
        assert parts(layer, config, choices) <= 3
        assert config | {"use_stream_k": True} == own
        few = 2 * choices * math.ceil(layer.w13_rows / 128) < H200 * more.get("num_ctas_per_sm", 1)
        assert config["use_stream_k"] is not few, "two multiprocessors for a block are left to the library"


def test_one_token_of_qwen3_is_as_the_library_has_it_and_two_of_kimis_are_not() -> None:
    """Per token: 8 choices of 12 blocks are 96 for 132 multiprocessors; 8 of 4 are 32."""
    assert chosen(made(QWEN3, configs(True), configs(True)).w13_tuning_config, 8)["use_stream_k"]
    kimi = made(KIMI, configs(True), configs(True)).w13_tuning_config
    assert [chosen(kimi, 8 * tokens)["use_stream_k"] for tokens in (1, 2, 3, 64)] == [False, False, True, True]


def test_what_was_whole_stays_as_it_was_and_the_library_keeps_its_own() -> None:
    first, second = configs(True), configs(False)
    experts = made(KIMI, first, second)
    assert first == configs(True), "the library remembers this list for other layers"
    assert [list(each) for each in experts.w2_tuning_config] == second
    for name in ("w13", "w2"):
        text = getattr(experts, f"{name}_tuning_config_str")
        assert json.loads(text) == json.loads(json.dumps(getattr(experts, f"{name}_tuning_config")))


@pytest.mark.parametrize("release", [each for each in RELEASES if each >= since.HUMMING])
def test_every_release_reads_the_configurations_where_they_are_set(release: str) -> None:
    source = (sources(release) / "vllm/model_executor/layers/fused_moe/experts/fused_humming_moe.py").read_text()
    for name in ("w13", "w2"):
        assert f"self.{name}_tuning_config_str = json.dumps(self.{name}_tuning_config)" in source
        assert re.search(rf'"?tuning_config"?\s*[:=]\s*self\.{name}_tuning_config_str', source)


class Builder:
    """Notes what was asked, and gives experts that nobody changed yet."""

    def stock(self, class_name: str, **kwargs: Any) -> Any:
        return SimpleNamespace(
            name=class_name, w13_tuning_config=configs(True), w2_tuning_config=configs(True), w13_tuning_config_str=""
        )


def on_card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernel tensors as on an H200."""
    import torch

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=H200))
    return {"w13": SimpleNamespace(is_cuda=True, device="cuda:0")}


@pytest.mark.parametrize("name", ["humming_mxfp8", "humming_mxfp8_grouped", "humming_wna16", "humming_mxfp4"])
@pytest.mark.parametrize("gated", [True, False])
def test_who_cuts_into_few_parts(name: str, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integer weights, and of MXFP8 experts without a gate: the others' errors are small enough as it is."""
    scheme = {
        "wna16": Scheme("wna16", 4, 32, "gptq"),
        "mxfp8": Scheme("mxfp8", 8, 32, "modelopt"),
        "mxfp4": Scheme("mxfp4", 4, 32, "gpt_oss"),
    }[name.split("_")[1]]
    activation = Activation("silu") if gated else Activation("relu2", gated=False)
    layer = problem(scheme=scheme, experts=128, hidden_size=2688, intermediate_size=928, activation=activation)
    backend, plan = default_registry()[name], Plan(2688, 928)
    made = backend.experts(on_card(monkeypatch), layer, plan, Builder())  # type: ignore[arg-type]
    few = "wna16" in name or not gated
    assert (made.w13_tuning_config != configs(True)) is few
    assert bool(made.w13_tuning_config_str) is few
    assert ("up to three parts" in str(backend.numerics(layer))) is few


def test_it_is_said() -> None:
    words = str(default_registry()["humming_wna16"].numerics(KIMI))
    assert "those of up to three parts of a product of few tokens in bfloat16" in words
