"""Decisions on vLLM's Prometheus endpoint: ``vllm:moe_oracle_info`` and ``vllm:moe_oracle_layers``.

One function of vLLM's returns the registry of its endpoint, in the process that answers requests. The registry it
returns (of the process, or of several API servers) gets a collector, which reads the decision records of the processes
that hold the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from .. import __version__, decision_records

logger = logging.getLogger("vllm.moe_oracle")

NAMESPACE = "vllm"
"""Prefix of vLLM's own metrics, before the colon."""

_collected: WeakSet[Any] = WeakSet()


def with_decision_collector(original: Any) -> Any:
    """vLLM's registry, with one `DecisionCollector` registered in it.

    Args:
        original: vLLM's function that returns the registry.
    """
    registry = original()
    if registry not in _collected:
        registry.register(DecisionCollector())
        _collected.add(registry)
    return registry


class DecisionCollector:
    """A collector for `prometheus_client` that reads the decision records at each scrape."""

    def describe(self) -> list[Any]:
        """Empty: registering the collector reads no files."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics; none before a model is loaded."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        info = InfoMetricFamily(
            f"{NAMESPACE}:moe_oracle", "The plugin that chooses MoE kernels, and what it chose, by group of layers"
        )
        layers = GaugeMetricFamily(
            f"{NAMESPACE}:moe_oracle_layers", "MoE layers of the model by who runs them", labels=["rank", "run_by"]
        )
        found = list(decision_records.read_records())
        for record in found:
            rank = str(record.get("rank", 0))
            served, total = _int_field(record, "served"), _int_field(record, "moe_layers")
            layers.add_metric([rank, "moe_oracle"], served)
            layers.add_metric([rank, "stock"], max(total - served, 0))
            for labels in _group_labels(record):
                info.add_metric([], {"version": __version__, "rank": rank, **labels})
        if found:
            yield info
            yield layers


def _int_field(record: dict[str, Any], name: str) -> int:
    value = record.get(name, 0)
    return value if isinstance(value, int) else 0


def _group_labels(record: dict[str, Any]) -> Iterator[dict[str, str]]:
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
