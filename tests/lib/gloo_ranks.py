"""Runs a function in several processes of one gloo group, as the ranks of a model on CPUs.

They fork from a server that has imported what they need; see `forked`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lib import forked

DIED = 9
"""Exit status of a rank that `die` ended."""


def die() -> None:
    """Ends this process like a crash: without any cleanup."""
    os._exit(DIED)


def wait_for_result(rank: int, folder: str, seconds: float = 60.0) -> None:
    """Waits, in a function that `run` runs in a folder, until another rank has returned from it."""
    until = time.monotonic() + seconds
    while not Path(folder, f"{rank}.json").exists() and time.monotonic() < until:
        time.sleep(0.05)


def run(function: Callable[..., Any], size: int, folder: Path, *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """Runs `function(group, *arguments)` in `size` processes.

    Args:
        function: a module-level function, so that a new process can import it; its first argument is the process group.
        size: number of ranks.
        folder: an empty folder.
        arguments: its other arguments.
        seconds: time after which remaining ranks are killed.

    Returns:
        By rank: what it returned, as JSON; ``{"raised": type, "message": text}``; or None when it died or was killed.
    """
    context = forked.context()
    common = (size, str(folder), dict(os.environ), function, arguments)
    processes = [context.Process(target=_rank, args=(rank, *common)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
    results = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text()) if path.exists() else None for path in results]


def _rank(
    rank: int, size: int, folder: str, environment: dict[str, str], function: Callable[..., Any], arguments: Any
) -> None:
    import torch.distributed as dist

    forked.set_environment(environment)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        found = function(dist.group.WORLD, *arguments)
    except Exception as error:
        found = {"raised": type(error).__name__, "message": str(error)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    # Without destroying the group: that would wait for ranks that have died.
    os._exit(0)
