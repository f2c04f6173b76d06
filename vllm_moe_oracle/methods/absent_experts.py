"""Layers of which a checkpoint's files hold no expert: a server refuses them with the words of `explain`.

vLLM takes from some checkpoints' files which layers are quantized. One that no file holds counts as unquantized there,
and would be served with what its memory holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..checkpoint.files import read_checkpoint
from ..checkpoint.moe_layers import require_experts
from ..compat import current_adapter
from ..errors import CheckpointError, DamagedCheckpointError
from . import load_summary


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
    try:
        require_experts(read_checkpoint(model[0]), layer, adapter.version())
    except DamagedCheckpointError:
        raise
    except CheckpointError as error:  # of a config that vLLM reads, and this package does not
        load_summary.warn_once(f"whether the files hold its experts is not known: {error}", layer)


@contextlib.contextmanager
def refused(layer: str) -> Iterator[None]:
    """Has `refuse` say first why nothing was loaded into a layer whose tensors are refused within the context."""
    try:
        yield
    except CheckpointError:
        refuse(layer)
        raise
