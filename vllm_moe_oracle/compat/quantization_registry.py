"""Our quantization configs in vLLM's registry, imported at the first lookup."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


class LazyQuantizationConfigs(MutableMapping[str, Any]):
    """vLLM's registry of customized quantization configs, extended by ours.

    Importing one of our classes imports vLLM's, which takes seconds. A process that looks up no config (model
    inspection, an API server's front end) does not import them.
    """

    def __init__(
        self, table: MutableMapping[str, Any], ours: dict[str, str], when: Callable[[], bool] = lambda: True
    ) -> None:
        """
        Args:
            table: vLLM's registry. Entries that others add go there and take precedence.
            ours: ``module:Class`` by quantization name.
            when: whether a lookup finds ours.
        """
        self.table = table
        self._ours = ours
        self._when = when

    @property
    def ours(self) -> dict[str, str]:
        """``module:Class`` of ours by quantization name; empty where a lookup does not find them."""
        return self._ours if self._when() else {}

    def __getitem__(self, name: str) -> Any:
        if name in self.table:
            return self.table[name]
        return resolve_name(self.ours[name])

    def __setitem__(self, name: str, config: Any) -> None:
        self.table[name] = config

    def __delitem__(self, name: str) -> None:
        del self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.ours, **self.table})

    def __len__(self) -> int:
        return len({*self.ours, *self.table})


def available_configs(configs: Mapping[str, Sequence[str]], needs: Mapping[str, str]) -> dict[str, str]:
    """``module:Class`` of our config by quantization name, for the names in the installed release.

    Args:
        configs: classes for different releases by quantization name.
        needs: stock module that a module of ours requires, where not every release has it.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    found = {}
    for name, paths in configs.items():
        usable = [path for path in paths if matches_release(path, needs)]
        if name in QUANTIZATION_METHODS and usable:
            found[name] = usable[0]
    return found


def matches_release(path: str, needs: Mapping[str, str]) -> bool:
    """Whether the installed release has the stock module that one of ours requires.

    Args:
        path: ``module:name`` of ours.
        needs: see `available_configs`.
    """
    stock = needs.get(path.partition(":")[0])
    return stock is None or _module_exists(stock)


def _module_exists(module: str) -> bool:
    """Whether a module of vLLM exists. Looks for its file, since `find_spec` imports the parent packages."""
    package, *names = module.split(".")
    found = importlib.util.find_spec(package)
    places = [] if found is None else [Path(each).joinpath(*names) for each in found.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)
