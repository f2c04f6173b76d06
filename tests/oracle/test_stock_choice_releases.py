"""What stock vLLM takes, by this package's rules, is what the selectors of every release take.

Each release's own functions and expert classes run from its sources, without a GPU: the platform is made up. No release
is skipped; where the rules do not reach, they must say so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.lib.cases import problem
from tests.lib.golden_decisions import GoldenTable, agrees
from tests.lib.golden_tables import TABLES
from tests.lib.releases import every_release
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, exists, load
from tests.lib.stock_rules import machine, number
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.stock_choice import choose_stock
from vllm_moe_oracle.oracle.stock_refusals import load_refusal
from vllm_moe_oracle.releases import min_versions

CT_MOE = "compressed_tensors/compressed_tensors_moe/compressed_tensors_moe"
"""The beginning of the names of files with methods of compressed-tensors."""

GPUS = {"A100": 80, "L40S": 89, "H200": 90, "B200": 100}
"""Compute capabilities."""

KNOWN_SINCE = {
    "mxfp8": min_versions.STOCK_RULES_MXFP8,
    "mxfp4": min_versions.STOCK_RULES_MXFP4,
    "wna16": min_versions.STOCK_RULES_WNA16,
}
"""The first release whose choice on a GPU the rules give, by scheme."""


def _spread(layer: Problem) -> Problem:
    """The layer where an all-to-all sorts tokens by expert."""
    parallel = dataclasses.replace(layer.parallel, tp=1, ep=8, dp=8, format="batched")
    return dataclasses.replace(layer, local_experts=layer.num_experts // 8, parallel=parallel)


def _with(activation: Activation) -> Callable[[Problem], Problem]:
    """Gives layers another activation; those of gpt-oss have their own."""
    return lambda layer: layer if layer.activation.interleaved else dataclasses.replace(layer, activation=activation)


def _of(**fields: Any) -> Callable[[Problem], Problem]:
    """Changes the format of layers with integers; zero points are for 4 bits of compressed-tensors."""

    def changed(layer: Problem) -> Problem:
        scheme = layer.scheme
        has_zero_points = scheme.bits == 4 and scheme.packing == "compressed-tensors"
        if scheme.name != "wna16" or ("zero_points" in fields and not has_zero_points):
            return layer
        return dataclasses.replace(layer, scheme=dataclasses.replace(scheme, **fields))

    return changed


VARIANTS: dict[str, Callable[[Problem], Problem]] = {
    "as it is": lambda layer: layer,
    "EPLB": lambda layer: dataclasses.replace(layer, eplb=True),
    "LoRA": lambda layer: dataclasses.replace(layer, lora=True),
    "biases": lambda layer: dataclasses.replace(layer, has_bias=True),
    "float16": lambda layer: dataclasses.replace(layer, dtype="float16"),
    "gelu": _with(Activation("gelu")),
    "relu2 without a gate": _with(Activation("relu2", gated=False)),
    "swigluoai": _with(Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)),
    "one scale a row": _of(group_size=-1),
    "groups of 32": _of(group_size=32),
    "zero points": _of(zero_points=True),
    "batch invariance": lambda layer: dataclasses.replace(layer, batch_invariant=True),
    "batch invariance with LoRA": lambda layer: dataclasses.replace(layer, batch_invariant=True, lora=True),
    "another hidden size": lambda layer: dataclasses.replace(layer, hidden_size=2880),
    "a batched all-to-all": _spread,
}


METHODS = {
    ("mxfp8", "modelopt"): "modelopt:ModelOptMxFp8FusedMoE",
    ("mxfp4", "gpt_oss"): "mxfp4:GptOssMxfp4MoEMethod",
    ("mxfp4", "mxfp4"): "mxfp4:Mxfp4MoEMethod",
    ("mxfp4", "quark"): "quark/quark_moe:QuarkOCP_MX_MoEMethod",
    ("mxfp4", "online"): "online/moe_base:OnlineMoEMethodBase",
    ("mxfp4", "compressed-tensors"): f"{CT_MOE}_w4a4_mxfp4:CompressedTensorsW4A4Mxfp4MoEMethod",
    ("wna16", "gptq"): "auto_gptq:AutoGPTQMoEMethod",
    ("wna16", "awq"): "auto_awq:AutoAWQMoEMethod",
    ("wna16", "moe_wna16"): "moe_wna16:MoeWNA16Method",
    ("wna16", "compressed-tensors"): f"{CT_MOE}_wna16:CompressedTensorsWNA16MoEMethod",
}
"""Stock's method for a packing: its file and class."""


def _asked_for_eplb(layer: Problem, stock: dict[str, str], release: str) -> dict[str, str]:
    """What stock does where vLLM asks the method that has chosen a class whether experts may move (`RoutedExperts`)."""
    file, _, name = METHODS[layer.scheme.name, layer.scheme.packing].partition(":")
    if not layer.eplb or not stock.get("class"):
        return stock
    found = load(release, f"{QUANTIZATION}/{file}.py", WNA16MoEBackend=SimpleNamespace(TRITON="TRITON"))[name]
    asked = getattr(found, "supports_eplb", property(lambda method: False))  # the base class's
    moves = asked.fget(SimpleNamespace(wna16_backend=stock["backend"], mxfp4_backend=stock["backend"]))
    return stock if moves else stock | {"raises": "NotImplementedError: EPLB is not supported"}


def compared(table: GoldenTable, release: str, asked: str, variant: str, capability: int) -> Iterator[tuple[str, bool]]:
    """What the rules say of each layer of a table, and whether the code of a release does so. Only of layers that the
    rules know and the release has.

    Args:
        table: the layers.
        release: whose code runs.
        asked: the release that the rules are asked about.
        variant: of the layers, a key of `VARIANTS`.
        capability: of the GPU; 0 for a CPU.
    """
    device = machine(asked, capability)
    for model in table.models:
        for shard in table.shards:
            layer = VARIANTS[variant](table.layer(model, shard))
            found = choose_stock(layer, device, default_registry())
            stock = _asked_for_eplb(layer, table.stock(layer, capability, release), release)
            if variant == "as it is" and capability:
                assert bool(found.unknown) == (not stock), f"{model}, {shard}: {found}, vLLM {release}: {stock}"
            if not found.unknown:
                yield f"{variant}, {model}, {shard}, sm_{capability}: {found}; {stock}", agrees(found, stock)


@every_release
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_rules_choose_as_each_releases_code(table: GoldenTable, release: str) -> None:
    if number(release) < number(KNOWN_SINCE[table.name]):
        for capability in GPUS.values():
            layers = (table.layer(model, shard) for model in table.models for shard in table.shards)
            choices = [choose_stock(layer, machine(release, capability), default_registry()) for layer in layers]
            # What does not depend on a list: the model's loader, and act order.
            assert not any(each.stock_class for each in choices)
        return
    for variant in VARIANTS:
        found = [each for gpu in GPUS.values() for each in compared(table, release, release, variant, gpu)]
        assert [words for words, agreed in found if not agreed] == []
        assert found or (table.name, variant) == ("mxfp8", "float16")


@every_release
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_rules_choose_as_each_releases_code_on_cpus(
    table: GoldenTable, release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    known = number(release) >= number(min_versions.STOCK_RULES_ON_CPU)
    if not known:
        cpu, layers = (
            machine(release, 0),
            [table.layer(model, shard) for model in table.models for shard in table.shards],
        )
        choices = [choose_stock(layer, cpu, default_registry()) for layer in layers]
        refused = [
            load_refusal(layer, cpu, default_registry()) for layer in layers
        ]  # of shards that cut groups, on any machine
        assert [each.refusal for each in choices] == refused and "" in refused
        assert all(bool(each.unknown) != bool(each.refusal) for each in choices)
        return
    found = list(compared(table, release, release, "as it is", 0))
    # vLLM's class for MXFP8 is chosen, and cannot run: its kernels are Triton's.
    assert [words for words, agreed in found if not agreed and words.count("Mxfp8EmulationTritonExperts") != 2] == []
    assert bool(found) == (table.name != "wna16")


@pytest.mark.matrix
@pytest.mark.parametrize("table", TABLES[:2], ids=lambda table: table.name)
def test_the_choice_of_another_release_is_found(table: GoldenTable) -> None:
    found = [each for gpu in GPUS.values() for each in compared(table, "0.31.0", "0.32.0", "as it is", gpu)]
    assert not all(agreed for _, agreed in found)


@every_release
@pytest.mark.parametrize(("whole", "ranks"), [(768, 16), (1856, 4), (1408, 8)])
@pytest.mark.parametrize("packing", ["compressed-tensors", "quark", "mxfp4"])
def test_stocks_loader_takes_scales_of_other_features(packing: str, whole: int, ranks: int, release: str) -> None:
    """Rank 1's scales of w2, copied by the release's own loader out of a file's, against what the rules say."""
    size = whole // ranks
    names = {f"{FUSED_MOE}/routed_experts.py": "RoutedExperts", f"{FUSED_MOE}/layer.py": "FusedMoE"}
    path, name = next((path, name) for path, name in names.items() if exists(release, path))
    loader = object.__new__(load(release, path)[name])
    parallel = SimpleNamespace(tp_size=ranks)
    loader.moe_config = SimpleNamespace(moe_parallel_config=parallel, tp_shard_with_padding=False)
    padded = size if packing == "compressed-tensors" else -(-size // 128) * 128
    scales = torch.full((4, padded // 32), 255, dtype=torch.uint8)
    loader._load_w2(scales, 1, torch.arange(whole // 32, dtype=torch.uint8).repeat(4, 1), 1)
    first = int(scales[0, 0]) * 32
    assert first != size
    layer = problem(scheme=Scheme("mxfp4", 4, 32, packing), intermediate_size=size, tp=ranks)
    said = load_refusal(layer, machine(release, 90), default_registry())
    if packing == "compressed-tensors" or number(release) >= number(min_versions.STOCK_RULES_MXFP4):
        assert said.endswith(f"from feature {first} on for weights from feature {size} on")
    assert said.startswith("ranks cut scale groups of 32")
