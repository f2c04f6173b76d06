"""Stock vLLM's own layers beside the backends of a benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.problem import Device
from ..measurements.bench_records import STOCK_PREFIX
from .engine import LayerBench


def add_stock_layers(
    layers: LayerBench, device: Device, moe_backends: Sequence[str], max_tokens: int
) -> dict[str, str]:
    """Adds stock layers to a benchmark. A layer that vLLM cannot build becomes a failure.

    Args:
        layers: the benchmark of a layer.
        device: this machine.
        moe_backends: values of vLLM's ``--moe-backend``, one stock layer each.
        max_tokens: largest number of tokens of a call.

    Returns:
        vLLM's expert class by name of the stock layer.
    """
    from ..compat import standalone_layer  # imports vLLM, which `engine.open_context` checks for

    classes: dict[str, str] = {}
    for moe_backend in moe_backends:
        name = f"{STOCK_PREFIX}{moe_backend}"
        try:
            layer = standalone_layer.StockLayer(layers.problem, moe_backend, device.kind, max_tokens)
        except Exception as error:  # that stock vLLM cannot build the layer is a result
            layers.fail(name, error)
            continue
        layers.stock_layers[name] = layer
        classes[name] = layer.name
    return classes
