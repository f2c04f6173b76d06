"""Our classes in vLLM's table of quantisation configs, imported when they are first asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, MutableMapping
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
