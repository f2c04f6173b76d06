"""Checkpoint formats of expert weights: one module a scheme, each with the same functions.

``parameters`` names what vLLM's loaders fill, ``read`` checks it, ``canonical_expert`` makes one expert's canonical
tensors of it, whose shapes are in ``shapes``. ``dequantise_expert`` gives one of an expert's two weight matrices,
``quantise`` makes codes and scales from real values. A format that activations may have has ``round_trip`` for them.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from ..oracle.problem import SchemeName


def module(name: SchemeName | Literal["fp8", "fp8_token"]) -> ModuleType:
    """The module of a scheme, or of a format that only activations have; imports torch."""
    return importlib.import_module(f"{__name__}.{name}")
