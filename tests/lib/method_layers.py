"""An MXFP8 layer of llm-compressor's and the method that vLLM calls for it, without a model and without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.lib import vllm_configs
from tests.lib.cases import problem, registry

EXPERTS, HIDDEN, INNER = 64, 512, 1024


class Layer(nn.Module):
    """What the method sees of vLLM's MoE layer."""

    layer_name = "model.layers.0.mlp.experts"
    scoring_func = "softmax"
    renormalize = True
    use_grouped_topk = False
    e_score_correction_bias = None
    apply_router_weight_on_input = False

    class quant_config:
        """Weight-only, whatever the layer."""

        @staticmethod
        def get_scheme_dict(layer: Any, name: str) -> dict[str, Any]:
            from compressed_tensors.quantization import QuantizationArgs

            assert name.startswith("model.layers.") and name.endswith(".mlp.experts.0.down_proj")
            weights = QuantizationArgs(
                num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
            )
            return {"weights": weights, "input_activations": None, "format": "mxfp8-quantized"}

    def _expert_routing_tables(self) -> None:
        return None

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert


@contextmanager
def moe_config(settings: dict[str, Any], experts: int, hidden: int, inner: int) -> Iterator[Any]:
    """vLLM's config of a MoE layer with two experts a token, inside an engine's config with settings of the plugin."""
    from vllm.config import VllmConfig, set_current_vllm_config

    layer = problem(experts=experts, top_k=2, hidden_size=hidden, intermediate_size=inner)
    with set_current_vllm_config(VllmConfig(additional_config={"moe_oracle": settings})):
        yield vllm_configs.moe_config(layer)


def undecided(backends: Any, chosen: Any, group: Any) -> Any:
    """What `select_backend` sees of a method before its decision.

    Args:
        backends: the registry.
        chosen: the settings.
        group: the ranks of the layer.
    """
    adapter = SimpleNamespace(stock_class_rejection=lambda *arguments: "")
    return SimpleNamespace(registry=backends, settings=chosen, rank_group=group, moe=None, adapter=adapter)


def use_backends(backends: Iterable[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes these the only backends of the process."""
    from vllm_moe_oracle.methods import base

    found = registry(list(backends))
    monkeypatch.setattr(base, "default_registry", lambda: found)


@contextmanager
def inside_vllm(backend: Any, monkeypatch: pytest.MonkeyPatch, experts: int = EXPERTS) -> Iterator[Any]:
    """vLLM's config of a MoE layer, in a process that has only this backend."""
    use_backends([backend], monkeypatch)
    with moe_config({"self_check": "off"}, experts, HIDDEN, INNER) as config:
        yield config


def loader(*args: Any, **kwargs: Any) -> None:
    """Stands for the layer's own loader."""


def created(config: Any, layer: Layer, weight_loader: Any = loader) -> Any:
    """The method of an MXFP8 layer of llm-compressor's, with its parameters registered."""
    from vllm_moe_oracle.compat.layer_context import set_current_layer
    from vllm_moe_oracle.methods.compressed_tensors import CompressedTensorsW8A8Mxfp8MoEMethod

    with set_current_layer(layer):
        method = CompressedTensorsW8A8Mxfp8MoEMethod(config)
    problem = method.decision.problem
    assert problem.scheme.activations == "16bit"
    sizes = config.num_experts, problem.hidden_size, problem.intermediate_size
    method.create_weights(layer, *sizes, torch.bfloat16, weight_loader=weight_loader)
    return method


def loaded(config: Any) -> tuple[Layer, Any]:
    """A layer with random weights that are not converted yet, and its method."""
    layer = Layer()
    method = created(config, layer)
    load_random(layer, 0)
    return layer, method


def load(layer: Layer) -> None:
    """Small numbers in every code, ones in every scale."""
    for name, parameter in layer.named_parameters():
        parameter.data.view(torch.uint8).fill_(127 if name.endswith("_scale") else 0x11)


def load_random(layer: Layer, seed: int) -> None:
    """Random weights, as a quantizer writes them."""
    from vllm_moe_oracle.schemes import mxfp8

    generator = torch.Generator().manual_seed(seed)
    for name in ("w13", "w2"):
        codes, scales = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale").data
        made = mxfp8.quantize(torch.randn(codes.shape, generator=generator) * 0.05)
        codes.copy_(made[0])
        scales.copy_(made[1])
