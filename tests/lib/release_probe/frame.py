"""The process: vLLM on its CPU platform, the plugin loaded as vLLM loads it, checks and their results."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import os
import sys
import traceback
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for variable in [each for each in os.environ if each.startswith(("MOE_ORACLE_", "VLLM_PLUGINS"))]:
    del os.environ[variable]

Check = Callable[[], None]

CHECKS: dict[str, Check] = {}
"""Checks of the loaded plugin by name, in the order in which they run."""

STAND_INS = {"gguf": "vLLM 0.22 and 0.23 import it for a file format that has nothing to do with this project"}


def check(function: Check) -> Check:
    """Adds a function to `CHECKS` under its own name."""
    CHECKS[function.__name__] = function
    return function


def has_since(release: str, there: bool) -> bool:
    """Whether this vLLM has something that came with `release`: `there`, which must hold for it and for later ones."""
    from vllm_moe_oracle.compat import current_adapter

    assert there or current_adapter().version() < release, f"missing in {current_adapter().version()}"
    return there


def run(function: Check) -> str:
    """``ok``, or the traceback of a check."""
    try:
        function()
    except Exception:
        return traceback.format_exc(limit=-12)
    finally:
        gc.collect()
    return "ok"


def run_in_child(function: Check) -> str:
    """The outcome of a check in a copy of this process, which itself stays as it is."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(write, "w") as pipe:
            pipe.write(run(function))
            pipe.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome or "the process died"


class _Anything(type):
    """Classes whose every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of packages that are not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        known = name.partition(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(_Anything("module", (), {}), name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def start() -> None:
    """Puts vLLM on its CPU platform, which a release without compiled extensions does not find by itself."""
    sys.meta_path.append(StandIns())  # last: what is installed is taken
    import vllm.platforms as platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()


def load_plugins() -> None:
    """Loads plugins as every process of vLLM does."""
    import vllm.plugins

    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
