"""Quantization methods for vLLM and the life cycle of their layers: load, check, convert, run, reload.

Machinery:

* `base`: the life cycle that all formats share (`OracleMoEMethod`).
* `stock_fallback`: which layers are left to stock vLLM.
* `backend_selection`: the oracle's decision, the verdict of vLLM's own class, one backend for all ranks.
* `first_start`, `measure_hook`: what is measured before weights are loaded, unless `measure_at_start` is 0.
* `backend_check`: the self-check on loaded weights, and the fallback.
* `rank_comparison`: what all ranks have in common, compared before they compute together.
* `rank_sync`: gathers the results of all ranks; a failure of one reaches the others.
* `load_caches`: what holds for one load only.
* `token_dispatch`: two backends for one layer, by number of tokens.
* `weight_loading`: checks of tensors as vLLM's loader copies them; sentinels.
* `absent_experts`: layers and experts that a checkpoint's files lack, which vLLM would take for unquantized ones.
* `correction_bias`: what a checkpoint brings into routers' correction biases.
* `load_summary`: which layers of a model are served by which backend.
* `dtypes`: dtypes of models with quantized experts.

Formats:

* MXFP8: `modelopt`, `online`, `inc_mxfp8`, `compressed_tensors`.
* MXFP4: `mxfp4`, `quark`, `online_mxfp4`, `inc_mxfp4`, `compressed_tensors_mxfp4`, `compressed_tensors_mxfp4_fp8`.
* Integers: `wna16` has the common part; `gptq`, `awq`, `awq_marlin` (older releases), `moe_wna16`,
  `compressed_tensors`. `awq_common` is what both AWQ modules share.

A module that serves a checkpoint format declares it in a literal `SERVES`:

    SERVES = {
        "schemes": ["wna16"],
        "quantizations": {"gptq": "AutoGPTQConfig", "inc": None},
        "replaces": ["auto_gptq:AutoGPTQMoEMethod"],
    }

- ``schemes``: the schemes whose MoE layers the module's methods serve.
- ``quantizations``: vLLM's name of each quantization, and the module's config class for it; None where vLLM's own
  config class stays.
- ``replaces``: stock classes, as ``module:Class`` below vLLM's quantization package, in place of which vLLM constructs
  the module's of that name; or stock methods, which the module's functions of that name wrap.

The literal is read from the module's source: importing the module imports vLLM's quantization classes, which takes
seconds. A module serves the releases that have the stock modules whose classes it replaces.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files

_STOCK = "vllm.model_executor.layers.quantization"
_SERVES = re.compile(r"^SERVES = (\{.*?^\})", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Declaration:
    """What one module of this package serves; see the package.

    Attributes:
        module: the module's full name.
        schemes: see the package.
        quantizations: see the package.
        replaces: the module's class or function by what it replaces; see the package.
    """

    module: str
    schemes: tuple[str, ...] = ()
    quantizations: Mapping[str, str | None] = field(default_factory=dict)
    replaces: Mapping[str, str] = field(default_factory=dict)


@functools.cache
def declarations() -> tuple[Declaration, ...]:
    """What the modules of this package declare, by module name."""
    found = []
    for file in sorted(files(__name__).iterdir(), key=lambda each: each.name):
        if file.name.endswith(".py") and file.name != "__init__.py":
            match = _SERVES.search(file.read_text(encoding="utf-8"))
            if match is not None:
                declared = ast.literal_eval(match[1])
                declared["schemes"] = tuple(declared.get("schemes", ()))
                declared["replaces"] = {stock: re.split("[:.]", stock)[-1] for stock in declared["replaces"]}
                found.append(Declaration(f"{__name__}.{file.name.removesuffix('.py')}", **declared))
    return tuple(found)


def configs() -> dict[str, tuple[str, ...]]:
    """``module:Class`` of our config classes by vLLM's name of the quantization; of several, a release has one."""
    found: dict[str, tuple[str, ...]] = {}
    for each in declarations():
        for name, config in each.quantizations.items():
            if config is not None:
                found[name] = (*found.get(name, ()), f"{each.module}:{config}")
    return found


def replacements() -> dict[str, str]:
    """``module:name`` of our class or function by that of the stock class or method."""
    return {
        f"{_STOCK}.{stock}": f"{each.module}:{ours}" for each in declarations() for stock, ours in each.replaces.items()
    }


def required_modules() -> dict[str, str]:
    """The stock module that a release must have for one of our modules, by our module's name."""
    return {
        each.module: f"{_STOCK}.{next(iter(each.replaces)).partition(':')[0]}"
        for each in declarations()
        if each.replaces
    }


def served_schemes() -> dict[str, tuple[str, ...]]:
    """Schemes whose MoE layers get our methods, by vLLM's name of the checkpoint's quantization."""
    found: dict[str, set[str]] = {}
    for each in declarations():
        for name in each.quantizations:
            found.setdefault(name, set()).update(each.schemes)
    return {name: tuple(sorted(schemes)) for name, schemes in sorted(found.items())}
