"""One file, one backend. `README.md` says how to add one; nothing else has to be edited."""

from ..core.capabilities import Capabilities, Rule
from ._contract import Adapters, Backend, Builder, Forward, Tensors, WorkspaceForward

__all__ = ["Adapters", "Backend", "Builder", "Capabilities", "Forward", "Rule", "Tensors", "WorkspaceForward"]
