"""Layers of which a checkpoint's files hold no expert: a server refuses them with the words of `explain`.

vLLM takes from some checkpoints' files which layers are quantized. One that no file holds counts as unquantized there,
and would be served with what its memory holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path

from ..checkpoint.files import read_checkpoint
from ..checkpoint.moe_layers import layers_without_experts
from ..compat import current_adapter
from ..errors import CheckpointError, DamagedCheckpointError
from . import load_summary
from .load_caches import per_load

_Found = tuple[Collection[str], CheckpointError | None]
"""Names of layers, and the error to refuse them with; no names and an error of a config that vLLM reads, and this
package does not."""

_found: dict[str, _Found] = per_load({})
"""What was found in a folder of checkpoint files, by its path. Reading takes a second for a model of 50 files, and a
model may have as many unquantized layers."""


def refuse(layer: str) -> None:
    """Refuses a layer of the served model of which its folder holds no expert. Nothing else is judged: not dummy
    weights, a repository's files, which vLLM may still fetch, saved states, or a model that drafts.

    Args:
        layer: vLLM's name of the layer.

    Raises:
        DamagedCheckpointError: the files hold experts of other layers, and none of this one.
    """
    adapter = current_adapter()
    model = adapter.served_model()
    if model is None or not Path(model[0]).is_dir() or adapter.loads_no_checkpoint():
        return
    absent, error = _found.get(model[0]) or _found.setdefault(model[0], _read(model[0], adapter.version()))
    if isinstance(error, DamagedCheckpointError):
        if layer in absent:
            raise error
    elif error is not None:
        load_summary.warn_once(f"whether the files hold its experts is not known: {error}", layer)


def _read(folder: str, vllm: str) -> _Found:
    """Reads config and headers of tensors.

    Raises:
        DamagedCheckpointError: a file is damaged, whatever the layer.
    """
    try:
        return layers_without_experts(read_checkpoint(folder), vllm)
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:
        return (), error


@contextlib.contextmanager
def refused(layer: str) -> Iterator[None]:
    """Has `refuse` say first why nothing was loaded into a layer whose tensors are refused within the context."""
    try:
        yield
    except CheckpointError:
        refuse(layer)
        raise
