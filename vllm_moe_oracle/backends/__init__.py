"""One file, one backend. `README.md` says how to add one; nothing else has to be edited."""

from ._contract import Backend, Builder, Forward, ScratchForward, Tensors
from ._limits import Limits, Rule

__all__ = ["Backend", "Builder", "Forward", "Limits", "Rule", "ScratchForward", "Tensors"]
