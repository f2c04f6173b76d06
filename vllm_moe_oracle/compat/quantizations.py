"""Our classes in vLLM's table of quantisation configs, imported when they are first asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any


class LazyConfigs(MutableMapping[str, Any]):
    """What vLLM's table of customised configs becomes: its own entries, and ours by module and class name.

    Importing a config class imports vLLM's own, which takes seconds; a process that never looks a config up (model
    inspection, an API server's front end) must not pay for that.
    """

    def __init__(self, table: MutableMapping[str, Any], ours: dict[str, str]) -> None:
        """
        Args:
            table: vLLM's own table; entries that others add go there and win over ours.
            ours: ``module:Class`` by quantisation name.
        """
        self.table = table
        self.ours = ours

    def __getitem__(self, name: str) -> Any:
        if name in self.table:
            return self.table[name]
        module, _, attribute = self.ours[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __setitem__(self, name: str, config: Any) -> None:
        self.table[name] = config

    def __delitem__(self, name: str) -> None:
        del self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.ours, **self.table})

    def __len__(self) -> int:
        return len({*self.ours, *self.table})


def offered(configs: Mapping[str, str | tuple[str, ...]], needs: Mapping[str, str]) -> dict[str, str]:
    """``module:Class`` of our config by each name that this release knows and that one of our classes is for.

    Args:
        configs: one class, or several of which each release has one, by quantisation name.
        needs: stock module by module of ours, of those that are not for every release.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    found = {}
    for name, paths in configs.items():
        usable = [path for path in ((paths,) if isinstance(paths, str) else paths) if is_for_release(path, needs)]
        if name in QUANTIZATION_METHODS and usable:
            found[name] = usable[0]
    return found


def is_for_release(path: str, needs: Mapping[str, str]) -> bool:
    """Whether this release has the stock module that one of ours is made for.

    Args:
        path: ``module:name`` of ours.
        needs: see `offered`.
    """
    stock = needs.get(path.partition(":")[0])
    return stock is None or _is_there(stock)


def _is_there(module: str) -> bool:
    """Whether a module of vLLM exists, by its file: looking it up would import the packages that it is in."""
    package, *names = module.split(".")
    found = importlib.util.find_spec(package)
    places = [] if found is None else [Path(each).joinpath(*names) for each in found.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)
