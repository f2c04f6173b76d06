"""Decisions on vLLM's Prometheus endpoint: ``vllm:moe_oracle_info`` and ``vllm:moe_oracle_layers``.

vLLM asks one function for the registry of its endpoint, in the process that answers; whatever that returns (the
process's own registry, or one over several API servers) gets a collector that reads the records of the processes that
hold the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from .. import __version__, records

logger = logging.getLogger("vllm.moe_oracle")

NAMESPACE = "vllm"
"""The part before the colon in the names of vLLM's own metrics."""

_served: WeakSet[Any] = WeakSet()


def with_decisions(original: Any) -> Any:
    """vLLM's registry, with our collector in it once."""
    registry = original()
    if registry not in _served:
        registry.register(Decisions())
        _served.add(registry)
    return registry


class Decisions:
    """A collector of `prometheus_client`: what the records say at the time of each scrape."""

    def describe(self) -> list[Any]:
        """Nothing: a registry that asks for names in advance need not read any file."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics; none while no model has been decided."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        info = InfoMetricFamily(
            f"{NAMESPACE}:moe_oracle", "The plugin that chooses MoE kernels, and what it chose, by group of layers"
        )
        layers = GaugeMetricFamily(
            f"{NAMESPACE}:moe_oracle_layers", "MoE layers of the model by who runs them", labels=["rank", "run_by"]
        )
        found = list(records.left())
        for record in found:
            rank = str(record.get("rank", 0))
            served, total = _count(record, "served"), _count(record, "moe_layers")
            layers.add_metric([rank, "moe_oracle"], served)
            layers.add_metric([rank, "stock"], max(total - served, 0))
            for labels in _groups(record):
                info.add_metric([], {"version": __version__, "rank": rank, **labels})
        if found:
            yield info
            yield layers


def _count(record: dict[str, Any], name: str) -> int:
    value = record.get(name, 0)
    return value if isinstance(value, int) else 0


def _groups(record: dict[str, Any]) -> Iterator[dict[str, str]]:
    for group in record["groups"]:
        try:
            yield {
                "scheme": str(group["problem"]["scheme"]["name"]),
                "backend": str(group["decision"]["backend"]),
                "why": str(group["decision"]["why"]),
                "layers": str(group["count"]),
                "first_layer": str(group["layers"][0]),
            }
        except (KeyError, IndexError, TypeError) as error:
            logger.warning("moe_oracle: a record without %s is not shown on the metrics endpoint", error)
