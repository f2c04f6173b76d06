"""Quantization schemes of expert weights: one module per scheme, each with the same functions.

* ``parameter_names(problem)``: names of the parameters that vLLM's loaders fill, by canonical name.
* ``shapes(problem)``: shapes of the canonical tensors.
* ``read(parameters, problem)``: the loaded parameters by canonical name, checked.
* ``check_values(tensors, problem)``: refuses values in what ``read`` returned with which no kernel can compute.
* ``canonical_expert(expert, problem)``: canonical tensors of one expert.
* ``quantize``, ``dequantize``, ``dequantize_expert(expert, which)``,
  ``dequantize_part(expert, which, problem, rows, features)``: reference conversions.
* ``fake_quantize(values)``: activations quantized and dequantized.
* ``UNLOADED``, ``DUMMY_FILL``: bytes for what was not loaded yet, and for vLLM's dummy weights.

In shapes E are a rank's experts, H is the hidden size, I a rank's intermediate size, and M a number of tokens. A matrix
has N rows, its outputs, and K columns, its inputs. `w13` holds the matrices before the activation (gate and up), `w2`
the one after it (down).

`fp8` and `fp8_token` are formats of activations only and have ``fake_quantize`` alone.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Literal

from ..core.problem import SchemeName


def module(name: SchemeName | Literal["fp8", "fp8_token"]) -> ModuleType:
    """The module of a scheme or of an activation format; imports torch."""
    return importlib.import_module(f"{__name__}.{name}")
