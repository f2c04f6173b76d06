"""Proof that the plugin is engaged: which layers were decided, which were converted, and of how many.

Each process logs one line for each group of layers with equal problem and decision, and one when the last of its layers
is ready. With the `report` setting it also appends one JSON object for the model to a file.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__, device, records
from ..compat import current_adapter
from ..oracle.decision import Decision
from ..oracle.overrides import override_error, unmatched
from ..settings import Settings
from . import choice, selfcheck

logger = logging.getLogger("vllm.moe_oracle")


class _Model:
    """The layers of the model that this process is loading."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}
        self.waiting: set[str] = set()
        self.reloaded: set[str] = set()
        self.settings: Settings | None = None
        self.said: set[tuple[Any, ...]] = set()


_model = _Model()


def decided(decision: Decision, settings: Settings) -> None:
    """Notes a layer's decision; logs it when it is the first of its kind, and at WARNING where it is regretted."""
    global _model
    layer = decision.problem.layer
    if _is_of_another_model(layer):
        _forget()
        _model = _Model()  # a draft model, a test, or another try after a model that failed
    _model.decisions[layer] = decision
    _model.waiting.add(layer)
    _model.settings = settings
    kind = (decision.problem.key(), decision.backend, decision.because)
    if kind in _model.said:
        return
    _model.said.add(kind)
    level = logging.WARNING if decision.regretted else logging.INFO
    logger.info("moe_oracle: %s: %s", layer, decision.problem)
    logger.log(level, "moe_oracle: %s: %s", layer, decision.summary())


def _forget() -> None:
    """Ends a load: what ranks found out about its layers holds for no other."""
    choice.forget()
    selfcheck.forget()


def _is_of_another_model(layer: str) -> bool:
    """Whether the layers noted so far belong to another model: one has the same name, or the one being loaded, whose
    layers enter their names one after the other, has them not."""
    names = set(current_adapter().moe_layer_names())
    return layer in _model.decisions or any(_listed(each, names) is None for each in _model.decisions)


def _listed(layer: str, names: Collection[str]) -> str | None:
    """The name under which vLLM lists a layer: the module's own, or its parent's."""
    return next((each for each in (layer, layer.rpartition(".")[0]) if each in names), None)


def converted(decision: Decision) -> None:
    """Notes that a layer is ready; after the last one says how many of the model's MoE layers are ours, and which not.

    Raises:
        SettingError: an override matches none of the model's layers, and the setting `strict` is on.
    """
    layer = decision.problem.layer
    _model.decisions[layer] = decision  # the self-check may have taken another candidate
    if layer not in _model.waiting:  # its weights were reloaded
        _model.reloaded.add(layer)
        if _model.reloaded >= set(_model.decisions):
            _model.reloaded.clear()
            _forget()
        return
    _model.waiting.discard(layer)
    if _model.waiting:
        return
    _forget()
    layers = current_adapter().moe_layer_names()
    ours = {_listed(each, layers) for each in _model.decisions}
    others = [each for each in layers if each not in ours]
    total = len(_model.decisions) + len(others)
    counts = Counter(each.backend for each in _model.decisions.values())
    words = ", ".join(f"{backend} x {count}" for backend, count in sorted(counts.items()))
    logger.info("moe_oracle: %d of %d MoE layers run through the oracle: %s", len(_model.decisions), total, words)
    if others:
        why = "unquantised, in a format that is not served here, or left to it for a reason given before"
        logger.warning("moe_oracle: %d MoE layers are stock vLLM's: %s: %s", len(others), why, ", ".join(others))
    records.leave(record(total))
    if _model.settings is not None:
        _check_overrides(_model.settings)
        if _model.settings.report:
            write_report(Path(_model.settings.report), total)


def _check_overrides(settings: Settings) -> None:
    for override in unmatched(settings.overrides, _model.decisions):
        error = override_error(override, _model.decisions, settings.source("overrides"))
        if settings.strict:
            raise error
        logger.warning("moe_oracle: %s", error)


def record(total: int) -> dict[str, Any]:
    """What was decided for the model, as JSON's own types.

    Args:
        total: MoE layers of the model, ours or not.
    """
    groups: dict[tuple[Any, ...], list[Decision]] = {}
    for decision in _model.decisions.values():
        groups.setdefault((decision.problem.key(), decision.backend, decision.because), []).append(decision)
    return {
        "moe_oracle": __version__,
        "vllm": current_adapter().version(),
        **_rank(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "program": Path(sys.argv[0]).name,
        "device": msgspec.to_builtins(device.detect()),
        "moe_layers": total,
        "served": len(_model.decisions),
        "groups": [
            {
                "layers": [each.problem.layer for each in group],
                "count": len(group),
                "problem": msgspec.to_builtins(group[0].problem),
                "decision": {
                    "backend": group[0].backend,
                    "why": group[0].why,
                    "because": group[0].because,
                    "numerics": str(group[0].numerics),
                    "plan": msgspec.to_builtins(group[0].plan),
                    "measured": msgspec.to_builtins(group[0].measured),
                    "steps": msgspec.to_builtins(group[0].steps),
                },
                "candidates": [
                    {
                        "backend": candidate.backend,
                        "accepted": candidate.accepted,
                        "reasons": msgspec.to_builtins(candidate.reasons),
                    }
                    for candidate in group[0].candidates
                ],
            }
            for group in groups.values()
        ],
    }


def _rank() -> dict[str, int]:
    """Which of the processes that hold the model this is; rank 0 of 1 where none but this does."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {"rank": 0, "ranks": 1}
    return {"rank": dist.get_rank(), "ranks": dist.get_world_size()}


def write_report(path: Path, total: int) -> None:
    """Appends the record as one line; a file that cannot be written is a warning, never a failed start."""
    line = json.dumps(record(total)) + "\n"
    try:
        # One write of one line in append mode: several ranks may share the file.
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        logger.warning("moe_oracle: the report %s could not be written: %s", path, error.strerror)
