"""Models of the Hugging Face Hub that lie in this machine's cache, where ``hf download`` and vLLM put them.

The layout is the documented one of huggingface_hub, which is not a dependency: ``models--ORG--NAME`` with
``refs/main``, a file that holds a revision, and ``snapshots/REVISION``, the checkpoint's folder.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ..errors import CheckpointError
from ..settings import hub_cache_dir
from ..untrusted import read_file

_MAX_REVISION_BYTES = 1 << 10


def is_hub_name(word: str) -> bool:
    """Whether a word is written as the Hub writes names of models, ``ORG/NAME``."""
    return not word.endswith(".json") and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", word, re.ASCII) is not None


def name_of_snapshot(folder: Path) -> str:
    """The model's name, ``ORG/NAME``, of a folder that `cached_snapshot` returns; "" for another folder."""
    kind, _, name = folder.parent.parent.name.partition("--")
    name = name.replace("--", "/", 1)
    return name if kind == "models" and folder.parent.name == "snapshots" and is_hub_name(name) else ""


def cached_snapshot(name: str) -> Path | None:
    """The folder of a model's cached main revision; None where the cache has none.

    Args:
        name: as `is_hub_name` accepts it.
    """
    with contextlib.suppress(CheckpointError, OSError, RuntimeError):  # RuntimeError: there is no home
        folder = hub_cache_dir() / f"models--{name.replace('/', '--')}"
        revision = read_file(folder / "refs" / "main", _MAX_REVISION_BYTES, CheckpointError).decode("ascii", "replace")
        if re.fullmatch(r"[\w-]+", revision.strip(), re.ASCII):
            snapshot = folder / "snapshots" / revision.strip()
            return snapshot if snapshot.is_dir() else None
    return None
