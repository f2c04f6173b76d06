"""A reload by vLLM's own functions: the kernel that serves is checked with the weights that it reads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload import layerwise

from tests.lib import method_layers
from tests.lib.faulty_backends import Faulty, Kept
from tests.lib.method_layers import Layer, created
from vllm_moe_oracle import plugin
from vllm_moe_oracle.errors import SelfCheckError
from vllm_moe_oracle.methods import load_caches
from vllm_moe_oracle.schemes import mxfp8

EXPERTS, HIDDEN, INNER = 8, 128, 256


class Loaded(Layer):
    """Takes whole tensors from its loader, as vLLM wraps it in a reload."""

    def weight_loader(
        self,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str = "",
        shard_id: Any = None,
        expert_id: Any = None,
        return_success: bool = False,
    ) -> bool | None:
        """See the class."""
        param.data.copy_(loaded_weight)
        return True if return_success else None


def load(layer: Any, seed: int) -> None:
    """Loads random weights through the parameters' loaders."""
    generator = torch.Generator().manual_seed(seed)
    for name, shape in (("w13", (EXPERTS, 2 * INNER, HIDDEN)), ("w2", (EXPERTS, HIDDEN, INNER))):
        codes, scales = mxfp8.quantize(torch.randn(shape, generator=generator) * 0.05)
        for loaded, tensor in ((f"{name}_weight", codes), (f"{name}_weight_scale", scales)):
            parameter = getattr(layer, loaded)
            parameter.weight_loader(parameter, tensor, name, None, None)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[[Faulty, str], torch.nn.Module]:
    """A model of one served layer whose weights are loaded, under the patch of vLLM's function."""
    wrapped = functools.partial(plugin._finish_reload, layerwise.finalize_layerwise_processing)
    monkeypatch.setattr(layerwise, "finalize_layerwise_processing", wrapped)

    def build(backend: Faulty, mode: str) -> torch.nn.Module:
        load_caches.end_load()
        method_layers.use_backends([backend], monkeypatch)
        found, layer = torch.nn.Module(), Loaded()
        with method_layers.moe_config({"self_check": mode}, EXPERTS, HIDDEN, INNER) as config:
            layer.quant_method = method = created(config, layer, layer.weight_loader)
            found.layer = layer
            layerwise.record_metadata_for_reloading(found)
            load(layer, 0)
            method.process_weights_after_loading(layer)
        return found

    return build


@pytest.mark.parametrize("mode", ["group", "all"])
def test_a_kernel_that_keeps_its_weights_is_caught_by_a_reload(
    mode: str, model: Callable[[Faulty, str], torch.nn.Module]
) -> None:
    """vLLM converts fresh tensors, and copies them afterwards to where the kernel reads."""
    with method_layers.moe_config({"self_check": mode}, EXPERTS, HIDDEN, INNER):
        for backend in (Faulty("right"), Kept("keeps")):
            built = model(backend, mode)
            for seed in (1, 2):
                layerwise.initialize_layerwise_reload(built)
                load(built.layer, seed)
                if backend.name == "right":
                    layerwise.finalize_layerwise_reload(built, None)
                    continue
                with pytest.raises(SelfCheckError, match="keeps disagrees with the reference after a reload"):
                    layerwise.finalize_layerwise_reload(built, None)
                break


def test_without_checks_nothing_is_called(model: Callable[[Faulty, str], torch.nn.Module]) -> None:
    built = model(Kept("keeps"), "off")
    with method_layers.moe_config({"self_check": "off"}, EXPERTS, HIDDEN, INNER):
        layerwise.initialize_layerwise_reload(built)
        load(built.layer, 1)
        layerwise.finalize_layerwise_reload(built, None)
