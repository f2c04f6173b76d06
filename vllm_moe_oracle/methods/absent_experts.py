"""Layers of which a checkpoint's files lack experts: a server refuses them with the words of `explain`.

vLLM takes from some checkpoints' files which modules are quantized. A layer that no file holds counts as unquantized
there, and would be served with what its memory holds; a single expert counts as unquantized among quantized ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..checkpoint.files import read_checkpoint
from ..checkpoint.moe_layers import refused_layers
from ..compat import current_adapter
from ..errors import CheckpointError, DamagedCheckpointError
from . import load_summary
from .load_caches import per_load

_Found = Mapping[str, DamagedCheckpointError] | CheckpointError
"""The error of each layer that is refused, by its name; the error of a config that vLLM reads, and this package does
not."""

_found: dict[str, _Found] = per_load({})
"""What was found in a folder of checkpoint files, by its path. Reading takes a second for a model of 50 files, and a
model may have as many unquantized layers."""


def refuse(layer: str) -> None:
    """Refuses a layer of the served model of which its folder holds no expert, or others than its config says. Nothing
    else is judged: not dummy weights, a repository's files, which vLLM may still fetch, saved states, or a model that
    drafts.

    Args:
        layer: vLLM's name of the layer.

    Raises:
        DamagedCheckpointError: as by `find_moe_layers`, naming the layers.
    """
    adapter = current_adapter()
    model = adapter.served_model()
    if model is None or not Path(model[0]).is_dir() or adapter.loads_no_checkpoint():
        return
    if model[0] not in _found:
        _found[model[0]] = _read(model[0], adapter.version())
    found = _found[model[0]]
    if isinstance(found, CheckpointError):
        load_summary.warn_once(f"whether the files hold its experts is not known: {found}", layer)
    elif layer in found:
        raise found[layer]


def _read(folder: str, vllm: str) -> _Found:
    """Reads config and headers of tensors.

    Raises:
        DamagedCheckpointError: a file is damaged, whatever the layer.
    """
    try:
        return refused_layers(read_checkpoint(folder), vllm)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        return error


@contextlib.contextmanager
def refused(layer: str) -> Iterator[None]:
    """Has `refuse` say first what the files lack of a layer whose tensors are refused within the context."""
    try:
        yield
    except CheckpointError:
        refuse(layer)
        raise
