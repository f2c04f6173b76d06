"""Summary of a model's load: which of its MoE layers the oracle decided and converted, and which stay stock vLLM's.

A process logs one line for each group of layers with equal problem and decision, and one line when its last layer is
ready. With the setting `report` it also appends one JSON object for the model to a file.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__, decision_records
from ..checkpoint.layer_names import compact_layer_names
from ..compat import current_adapter
from ..core.decision import Decision
from ..core.overrides import unused_override_errors
from ..devices import detect
from ..errors import NoBackendError, sanitize
from ..measurements.tune_command import tune_command
from ..oracle.backend_names import list_without_effect
from ..oracle.registry import Registry
from ..settings import AUTO, Settings, report_path
from ..untrusted import describe
from . import backend_check, first_start
from .load_caches import end_load, per_load

logger = logging.getLogger("vllm.moe_oracle")


class _ModelLoad:
    """The layers of the model that this process is loading."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}
        self.pending: set[str] = set()
        self.reloaded: set[str] = set()
        self.settings: Settings | None = None
        self.overrides_checked = False
        self.logged: set[tuple[Any, ...]] = set()
        self.stock_layers: dict[str, str] = {}
        self.start_clocks()

    def start_clocks(self) -> None:
        """Takes now for the beginning of the load."""
        self.began, self._began_monotonic = time.time(), time.monotonic()

    def ended(self) -> float:
        """Now, in seconds since the epoch by the clock as it was when the load began: it may have been set since."""
        return self.began + (time.monotonic() - self._began_monotonic)


_model = _ModelLoad()

_warned: set[str] = per_load(set())
"""What was warned of."""


def start_layer(layer: str) -> None:
    """Begins another load if the layer is the first of another model: a draft model, or a new attempt after a failure.

    Args:
        layer: the name of the layer that is about to be decided.
    """
    global _model
    if _starts_new_model(layer):
        end_load()
        _model = _ModelLoad()
    elif not _model.decisions and not _model.stock_layers:  # this module may have been imported long before
        _model.start_clocks()


def record_decision(decision: Decision, settings: Settings) -> None:
    """Records a layer's decision, and logs the first of its kind; at WARNING level if it is degraded.

    The line names the backend, then the kind of evidence. That of a static choice which measurements could improve ends
    with the command that takes them.
    """
    layer = decision.problem.layer
    _model.decisions[layer] = decision
    _model.pending.add(layer)
    _model.settings = settings
    kind = (decision.problem.key(), decision.backend, decision.explanation)
    if kind in _model.logged:
        return
    _model.logged.add(kind)
    level = logging.WARNING if decision.degraded else logging.INFO
    logger.info("moe_oracle: %s: %s", layer, decision.problem)
    command = _tune_command(decision, settings) if decision.tunable else ""
    more = f"; to measure: {sanitize(command)}" if command else ""
    logger.log(level, "moe_oracle: %s: %s%s", layer, decision.summary(), more)


def _tune_command(decision: Decision, settings: Settings) -> str:
    """The command that measures the layers of the model that this process serves; "" where it is unknown."""
    model = current_adapter().served_model()
    if model is None:
        return ""
    path, tp = model
    problem = decision.problem
    ranks = max(problem.parallel.tp, problem.parallel.ep)
    tp = tp if ranks % tp == 0 else ranks
    # What a checkpoint does not say by itself.
    quantization = {"online": problem.scheme.name, "moe_wna16": "moe_wna16"}.get(problem.scheme.packing, "")
    return tune_command(
        path,
        settings,
        tp=tp,
        dp=ranks // tp,
        ep=problem.parallel.ep > 1,
        quantization=quantization,
        dtype=AUTO if problem.dtype == "bfloat16" else problem.dtype,
        batch_invariant=problem.batch_invariant or None,
    )


def warn_once(words: str, where: str) -> None:
    """Logs a warning about loaded weights at the first place of a load or a reload, not for every tensor."""
    if words not in _warned:
        _warned.add(words)
        logger.warning("moe_oracle: %s: %s", where, words)


def warn_without_effect(settings: Settings, moe_backend: str, registry: Registry) -> None:
    """Warns once per load of settings that have no effect, whatever the model is.

    Raises:
        SettingError: there is one, and the setting `strict` is on.
    """
    # Of a model and its draft each may have a --moe-backend of its own.
    known = None if current_adapter().has_draft() else moe_backend
    for words in list_without_effect(settings, known, registry):
        if words not in _warned:
            _warned.add(words)
            logger.warning("moe_oracle: %s", words)


def record_stock_layer(layer: str, features: Collection[str], stock_class: str, error: NoBackendError) -> None:
    """Records a layer that no backend can run and stock vLLM serves, and logs the first of its kind.

    Args:
        layer: the layer's name.
        features: what only some backends support and the layer needs, in words.
        stock_class: the class of stock vLLM's method.
        error: why no backend can run it. What its candidates say against wrappers of stock classes may be wrong with
            stock's as well: without `features` the log has the whole table.
    """
    start_layer(layer)
    reason = f"{error.rule}. {error.remedy}" if error.remedy else error.rule
    needs = f"{' and '.join(features)}: " if features else ""
    _model.stock_layers[layer] = f"{needs}{reason}"
    if (needs, reason, stock_class) not in _model.logged:
        _model.logged.add((needs, reason, stock_class))
        more = "" if features or not error.table else f"\n{error.table}"
        logger.warning("moe_oracle: %s: %sleft to stock vLLM's %s; %s%s", layer, needs, stock_class, reason, more)
    if not _model.decisions:  # no conversion will write a record, if no other layer is ours
        decision_records.write_record(model_report(len(_model.stock_layers)))


def _starts_new_model(layer: str) -> bool:
    """Whether the recorded layers belong to another model: one of them has this name, or is missing among the names
    that the layers of the model being loaded have registered."""
    names = set(current_adapter().moe_layer_names())
    known = _model.decisions.keys() | _model.stock_layers.keys()
    return layer in known or any(_listed_name(each, names) is None for each in known)


def _listed_name(layer: str, names: Collection[str]) -> str | None:
    """The name under which vLLM lists a layer: the module's or its parent's."""
    return next((each for each in (layer, layer.rpartition(".")[0]) if each in names), None)


def begin_conversion(layer: str) -> None:
    """Begins another reload where a layer comes a second time: not all layers need to have come in the last one, as
    where a server reloads the model without its draft."""
    if layer in _model.reloaded:
        _model.reloaded.clear()
        end_load()


def record_conversion(decision: Decision) -> None:
    """Records that a layer is ready; after the last one has the first of each kind called once more, and logs how many
    of the model's MoE layers run through the oracle, and by which backend.

    Raises:
        SelfCheckError: a layer computes with other weights than when it was converted.
        SettingError: an override decides no layer of the model, and the setting `strict` is on.
    """
    layer = decision.problem.layer
    _model.decisions[layer] = decision  # the self-check may have switched the backend
    if layer not in _model.pending:  # a reload of its weights
        _model.reloaded.add(layer)
        if _model.reloaded >= set(_model.decisions):
            _model.reloaded.clear()
            backend_check.check_first_layers()
            end_load(reloading=True)
        return
    _model.pending.discard(layer)
    if _model.pending:
        return
    backend_check.check_first_layers()
    end_load()
    layers = current_adapter().moe_layer_names()
    ours = {_listed_name(each, layers) for each in _model.decisions}
    others = [each for each in layers if each not in ours]
    total = len(_model.decisions) + len(others)
    by_backend: dict[str, list[str]] = {}
    for name, each in _model.decisions.items():
        by_backend.setdefault(each.backend, []).append(name)
    words = ", ".join(
        f"{backend} x {len(names)} ({compact_layer_names(names)})" for backend, names in sorted(by_backend.items())
    )
    logger.info("moe_oracle: %d of %d MoE layers run through the oracle: %s", len(_model.decisions), total, words)
    if others:
        why = "they are unquantized, in a format that is not supported here, or have a warning above"
        left = compact_layer_names(others)
        logger.warning("moe_oracle: %d MoE layers are left to stock vLLM (%s): %s", len(others), why, left)
    decision_records.write_record(model_report(total))
    if _model.settings is not None:
        first_start.log_summary(_model.decisions, functools.partial(_tune_command, settings=_model.settings))
        check_overrides()  # of a loader that builds models by itself
        if (path := report_path(_model.settings)) is not None:
            write_report(path, total)


_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_overrides() -> None:
    """Warns, once per model, of overrides that decide no layer of it. All of its layers must have been built.

    Raises:
        SettingError: there is one, and the setting `strict` is on.
    """
    settings = _model.settings
    if settings is None or _model.overrides_checked:
        return
    _model.overrides_checked = True
    adapter, names = current_adapter(), list(_model.decisions)
    if adapter.is_pipeline_stage():  # the layers of other stages have such names with other numbers
        names += [_LAYER_NUMBER.sub(str(n), each, count=1) for n in range(adapter.num_layers()) for each in names]
    for error in unused_override_errors(settings.overrides, names, settings.source("overrides"), _model.decisions):
        if settings.strict:
            raise error
        logger.warning("moe_oracle: %s", error)


def model_report(total: int) -> dict[str, Any]:
    """What was decided for the model, as JSON's own types, by ``decision_record.schema.json``.

    Args:
        total: MoE layers of the model, ours or not.
    """
    groups: dict[tuple[Any, ...], list[Decision]] = {}
    for decision in _model.decisions.values():
        groups.setdefault((decision.problem.key(), decision.backend, decision.explanation), []).append(decision)
    report = {
        "record_version": decision_records.RECORD_VERSION,
        "moe_oracle": __version__,
        "vllm": current_adapter().version(),
        **_rank_fields(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "load_began": _model.began,
        "load_ended": _model.ended(),
        "program": Path(sys.argv[0]).name,
        "device": detect.detect(),
        "moe_layers": total,
        "served": len(_model.decisions),
        "left_to_stock": _model.stock_layers,
        "groups": [
            {
                "layers": [each.problem.layer for each in group],
                "count": len(group),
                "problem": group[0].problem,
                "decision": group[0].to_record(),
                "candidates": [candidate.to_record() for candidate in group[0].candidates],
            }
            for group in groups.values()
        ],
    }
    fields: dict[str, Any] = msgspec.to_builtins(report)
    return fields


def _rank_fields() -> dict[str, int]:
    """Which of the processes that hold the model this is; rank 0 of 1 where none but this does."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return {"rank": 0, "ranks": 1}
    return {"rank": dist.get_rank(), "ranks": dist.get_world_size()}


def write_report(path: Path, total: int) -> None:
    """Appends the record as one line; a file that cannot be written is a warning, never a failed start."""
    line = json.dumps(model_report(total)) + "\n"
    try:
        # One write of one line in append mode: several ranks may share the file. Non-blocking: a pipe without a reader
        # would hold the server up.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags, 0o666), "a", encoding="utf-8") as file:
            file.write(line)
    except (OSError, ValueError) as error:  # a path may hold a null byte
        logger.warning("moe_oracle: the report could not be written: %s", sanitize(f"{path}: {describe(error)}"))
