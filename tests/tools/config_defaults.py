"""Makes `vllm_moe_oracle/checkpoint/config_defaults.py`: the defaults of the config classes that a server reads models
with experts by, from the installed transformers and vLLM. A default that a class computes from other fields is left
out. ``python -m tests.tools.generate --write`` writes the file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import io
import json
import logging
import textwrap
import warnings
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from vllm_moe_oracle.checkpoint import config_defaults, layer_names, layer_problem, model_fields

FILE = Path(config_defaults.__file__)

COUNTS = frozenset(model_fields.NUM_EXPERTS_FIELDS)
FIELDS = (
    *model_fields.NUM_EXPERTS_FIELDS,
    *model_fields.NUM_LAYERS_FIELDS,
    *layer_problem.TOP_K_FIELDS,
    *layer_problem.INTERMEDIATE_SIZE_FIELDS,
    *layer_problem.HIDDEN_SIZE_FIELDS,
    *layer_problem.ACTIVATION_FIELDS,
    *layer_problem.ROUTING_FIELDS,
    *layer_names.PLACE_FIELDS,
    "num_attention_heads",
    "num_key_value_heads",
)
"""The fields of a model with experts that are read."""


COMPUTED = ("n_group", "topk_group", "moe_intermediate_size")
"""Fields of which some classes compute a default that depends on no other field."""


def _dense_layers(config: Any) -> int:
    """The layers without experts at the beginning, where a class lists a kind for each layer, and all others have
    experts; 0 elsewhere."""
    kinds = getattr(config, "mlp_layer_types", None) or getattr(config, "moe_layer_freq", None)
    if not isinstance(kinds, list):
        return 0
    sparse = [kind in ("sparse", "moe", 1) for kind in kinds]
    return sparse.count(False) if sparse == sorted(sparse) else 0


@functools.cache
def config_class(kind: str) -> Any:
    """The class of the config of a model type, vLLM's before that of transformers."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else CONFIG_MAPPING[kind]


def made(cls: Any, **fields: Any) -> Any:
    """A config of a class; what it logs of made-up fields is left out."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return cls(**fields)
    finally:
        logging.disable(logging.NOTSET)


def language_model(kind: str) -> Any:
    """The class of the config of a model type's language model."""
    cls = config_class(kind)
    return type(text) if (text := getattr(made(cls), "text_config", None)) is not None else cls


def stated_defaults(cls: Any) -> dict[str, Any]:
    """The defaults of a class's fields, before it computes anything."""
    found = {}
    for name, each in inspect.signature(cls.__init__).parameters.items():
        if each.default is not inspect.Parameter.empty:
            found[name] = each.default
    for each in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if each.default is not dataclasses.MISSING:
            found[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            found[each.name] = each.default_factory()
    return found


def defaults_of(kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The defaults of a model type, and the names under which its class takes fields besides their own.

    Args:
        kind: the ``model_type``.
    """
    cls = language_model(kind)
    usual, other = made(cls), made(cls, num_hidden_layers=7)
    aliases = dict(getattr(cls, "attribute_map", None) or {})
    found = {}
    stated = stated_defaults(cls)
    for name, value in ((name, stated[name]) for name in FIELDS if name in stated):
        values = [getattr(each, name, None) for each in (usual, other)]
        if name in model_fields.NUM_LAYERS_FIELDS:
            value = values[0] if value is None and values[0] == values[1] else value
        elif name in COMPUTED and values[0] == values[1]:
            value = values[0]
        elif values != [value, value]:
            value = None
        if value is not None:
            found[aliases.get(name, name)] = list(value) if isinstance(value, tuple) else value
    dense = {_dense_layers(each) for each in (usual, other)}
    if len(dense) == 1 and (count := dense.pop()) and "first_k_dense_replace" not in found:
        found["first_k_dense_replace"] = count
    return found, {alias: name for alias, name in aliases.items() if name in found}


def has_experts(kind: str) -> bool:
    """Whether a model type's class has a number of experts, of which some say none by default."""
    try:
        return not stated_defaults(language_model(kind)).keys().isdisjoint(COUNTS)
    except Exception:  # of classes that need other packages or files: none of a model with experts
        return False


def text_of(kinds: Iterable[str]) -> str:
    """The file."""
    groups: dict[str, list[str]] = {}
    for kind in sorted(kinds):
        groups.setdefault(repr(defaults_of(kind)), []).append(kind)
    same = {other: kind for kind, *others in groups.values() for other in others}
    defaults = ""
    renamed: dict[tuple[str, str], list[str]] = {}
    for kind, *_ in groups.values():
        found, others = defaults_of(kind)
        defaults += f"    {json.dumps(kind)}: {{\n{_lines(found, 8)}    }},\n"
        for names in others.items():
            renamed.setdefault(names, []).append(kind)
    aliases = ""
    for (other, own), kinds in sorted(renamed.items()):
        words = wrapped((f"{json.dumps(each)}," for each in kinds), 8)
        aliases += f"    ({json.dumps(other)}, {json.dumps(own)}): (\n{words}    ),\n"
    return f'''"""Defaults of models with experts by ``model_type``, and the other names of their fields.

Generated by ``python -m tests.tools.generate --write`` from the config classes of transformers and vLLM. A server reads
configs by these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {{
{defaults}}}

SAME_AS: Mapping[str, str] = {{
{_lines(same, 4)}}}

OTHER_NAMES: Mapping[tuple[str, str], tuple[str, ...]] = {{
{aliases}}}
# fmt: on
"""Under another name, and the field's own, the model types whose classes take it."""
'''


def _lines(fields: Mapping[str, Any], indent: int) -> str:
    """The entries of a dictionary in full lines."""
    return wrapped((f"{json.dumps(name)}:\xa0{_literal(fields[name])}," for name in sorted(fields)), indent)


def wrapped(words: Iterable[str], indent: int) -> str:
    """Words in full lines."""
    lines = textwrap.wrap(" ".join(words), 119 - indent, break_long_words=False, break_on_hyphens=False)
    return "".join(f"{' ' * indent}{line}\n" for line in lines).replace("\xa0", " ")


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def is_stale() -> bool:
    """Whether a class of a model type in the file has other defaults; not where the classes are not installed."""
    if not all(map(importlib.util.find_spec, ("transformers", "vllm"))):
        return False
    return text_of((*config_defaults.DEFAULTS, *config_defaults.SAME_AS)) != FILE.read_text(encoding="utf-8")


def renewed() -> str:
    """The file, for every model type with experts that the installed packages have."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return text_of(filter(has_experts, {*CONFIG_MAPPING_NAMES, *_CONFIG_REGISTRY}))
