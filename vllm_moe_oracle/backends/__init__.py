"""One file, one backend. `README.md` says how to add one; nothing else has to be edited."""

from ..core.capabilities import Capabilities, Rule
from ._contract import MAX_CHECK_TOKENS, Adapters, Backend, Builder, Forward, Tensors, WorkspaceForward

__all__ = [
    "MAX_CHECK_TOKENS",
    "Adapters",
    "Backend",
    "Builder",
    "Capabilities",
    "Forward",
    "Rule",
    "Tensors",
    "WorkspaceForward",
]
