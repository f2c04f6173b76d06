"""How the processes of one server leave their decisions for its metrics endpoint.

Decisions fall in the processes that hold the model, the endpoint belongs to another one. The first process of a server
names a folder in an environment variable, which the processes that it starts inherit; each leaves its record there as a
file. The folder goes with the process that named it. What is written here is only shown: no error of
a file system changes how a model is served.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import settings

logger = logging.getLogger("vllm.moe_oracle")

MOST_BYTES = 1 << 24
"""A larger file is no record of one process."""


def open_folder() -> None:
    """Names the folder in a server's first process; in the others it has a name already.

    It is made by the first process that leaves something in it: most processes that load plugins hold no model.
    """
    if settings.records_folder() is not None:
        return
    # A name that nobody else can have made a folder of beforehand.
    folder = os.path.join(tempfile.gettempdir(), f"vllm-moe-oracle-{secrets.token_hex(8)}")
    settings.set_records_folder(folder)
    atexit.register(_remove, folder, os.getpid())


def close_folder() -> None:
    """Removes the folder, and takes its name away."""
    folder = settings.records_folder()
    if folder is not None:
        settings.set_records_folder(None)
        shutil.rmtree(folder, ignore_errors=True)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process inherits what runs at exit
        shutil.rmtree(folder, ignore_errors=True)


def leave(record: dict[str, Any]) -> None:
    """Leaves this process's record of one model, in place of an earlier one of the same layers.

    Args:
        record: JSON's own types; `groups` holds the layers.
    """
    folder = settings.records_folder()
    if folder is None:
        return
    first = next((layer for group in record["groups"] for layer in group["layers"]), "")
    name = f"{os.getpid()}-{first}".replace("/", "_")[:200]
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor, beside = tempfile.mkstemp(dir=folder, suffix=".part")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(record, file)
        os.replace(beside, Path(folder) / f"{name}.json")
    except OSError as error:
        logger.warning("moe_oracle: these decisions will miss on the metrics endpoint: %s", error)


def left() -> Iterator[dict[str, Any]]:
    """The records of all processes, in the order of their files' names; what is no record is passed over with a
    warning."""
    folder = settings.records_folder()
    if folder is None:
        return
    for path in sorted(Path(folder).glob("*.json")):
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError("it is too large")
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or not isinstance(found.get("groups"), list):
                raise ValueError("it has no groups")
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("moe_oracle: %s is no record of decisions: %s", path, error)
            continue
        yield found
