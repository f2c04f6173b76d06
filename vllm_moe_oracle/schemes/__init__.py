"""Checkpoint formats of expert weights: one module a scheme, each with the same four functions.

``read`` turns a layer's parameters into canonical tensors, ``dequantise`` gives one expert's two weight matrices,
``quantise`` makes codes and scales from real values. A scheme that quantises activations has ``round_trip`` for them.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ..oracle.problem import SchemeName


def module(name: SchemeName) -> ModuleType:
    """The module of a scheme; imports torch."""
    return importlib.import_module(f"{__name__}.{name}")
