"""Layers of a checkpoint by equal decision, as `explain` shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from ..checkpoint.layer_names import compact_layer_names
from ..checkpoint.served_layers import ServedLayer, Server
from ..measurements.stock_gain import StockGain, stock_gain, time_errors
from ..oracle.registry import default_registry
from ..oracle.stock_choice import StockChoice, assume_stock


@dataclasses.dataclass(frozen=True, slots=True)
class LayerGroup(ServedLayer):
    """Equal layers with equal decisions; the problem is the first one's.

    Attributes:
        names: the layers' names.
        gain: the gain over stock vLLM, where it is known.
        runs_stock_kernel: the layers run the kernel that stock vLLM takes alone: nothing can be gained, or lost.
        measure: the command that measures the layers, if that could improve on the static choice; else "".
        refused: why vLLM does not start with the model's other layers, so that nothing is gained; "" where it does.
        switched_off: the plugin would not be registered, so that nothing is gained.
        stock: what stock vLLM does with the layers.
    """

    names: tuple[str, ...] = ()
    gain: StockGain | None = None
    runs_stock_kernel: bool = False
    measure: str = ""
    refused: str = ""
    switched_off: bool = False
    stock: StockChoice = dataclasses.field(default_factory=StockChoice)

    @property
    def is_refused(self) -> bool:
        """Whether a server would not start with the layers."""
        return self.decision is None and not self.outcome.left_to_stock

    @property
    def layers(self) -> str:
        """The layers' names, numbers in ranges."""
        return compact_layer_names(self.names)

    def to_json(self, brief: bool) -> dict[str, Any]:
        """The group as JSON values; brief: without rejected candidates."""
        candidates = [each for each in self.outcome.candidates if each.accepted or not brief]
        comparison = None if self.decision is None else self.decision.comparison
        return {
            "layers": self.layers,
            "count": len(self.names),
            "is_mtp": self.is_mtp,
            "problem": self.problem,
            "decision": None if self.decision is None else self.decision.to_record(),
            "failure": self.outcome.failure or None,
            "left_to_stock": self.outcome.left_to_stock or None,
            "stock_vllm": None if self.stock.unknown else self.stock.to_json(),
            "gain_over_stock": self.gain,
            "time_errors": {} if comparison is None else time_errors(comparison),
            "measure": self.measure or None,
            "candidates": [candidate.to_record() for candidate in candidates],
        }


def group_layers(layers: Iterable[ServedLayer], server: Server, measure: str) -> list[LayerGroup]:
    """Layers by equal problem and equal outcome, in the order of their first layer.

    Args:
        layers: from `decide_layers`.
        server: the server that they are on.
        measure: the command that measures them.
    """
    groups: dict[object, LayerGroup] = {}
    known: dict[tuple[int, bool], object] = {}
    for layer in layers:
        outcome = layer.outcome
        case = (id(outcome), layer.is_mtp)
        if case not in known:
            kind = layer.problem.key()
            same = outcome.decision and dataclasses.replace(outcome.decision, problem=kind)
            known[case] = (kind, same, outcome.failure, layer.is_mtp)
            if known[case] not in groups:
                groups[known[case]] = _new_group(layer, server, measure)
        before = groups[known[case]]
        groups[known[case]] = dataclasses.replace(before, names=(*before.names, layer.problem.layer))
    return list(groups.values())


def _new_group(layer: ServedLayer, server: Server, measure: str) -> LayerGroup:
    """A group of layers like this one, which names none yet."""
    chosen, stock = layer.decision, layer.outcome.stock
    found = LayerGroup(layer.problem, layer.outcome, layer.is_mtp, stock=stock)
    if chosen is None:
        return found
    if stock.unknown:
        stock = assume_stock(chosen, server.device, default_registry())
    return dataclasses.replace(
        found,
        gain=stock_gain(chosen, server.device, stock, server.settings.objective, is_assumed=bool(found.stock.unknown)),
        runs_stock_kernel=chosen.backend == stock.backend and not chosen.token_ranges,
        measure=measure if chosen.tunable else "",
    )
