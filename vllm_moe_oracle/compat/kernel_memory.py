"""The memory of experts in a trial call: full of NaN, or between guards, bytes that a kernel may not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_POISON = 0xFF
"""A byte. A number of such bytes is NaN in every float format that has one, and -1 in integers."""

GUARD_BYTE = 0x5A
"""A byte. Numbers of such bytes are finite, not zero, and none that kernels write."""

_ALIGNMENT = 256
"""A guarded tensor begins at a multiple of as many bytes, as torch's memory does: kernels may need 16, or 128."""

_ALLOCATED = ("workspace13", "workspace2", "output")
"""Arguments of experts' `apply` that vLLM's modular kernel allocates. The output is the last: it may share memory with
the first workspace, and is copied there after it."""


class Guards:
    """Copies of tensors between guards. All guards are compared together, when the calls are over: on a GPU each
    comparison takes the host as long as a call.

    Attributes:
        when: the call that is made, for messages; "" where a guard stands beside what many calls get.
    """

    def __init__(self, size: int) -> None:
        """
        Args:
            size: bytes of a guard, at least.
        """
        self.when = ""
        self._size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._held: list[tuple[list[str], list[Tensor]]] = []

    def around(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of tensors, each between two guards of its own, in one piece of memory.

        Args:
            tensors: by their names in messages, of one device; at least one.
        """
        sizes = [
            each
            for tensor in tensors.values()
            for each in (self._size, tensor.nbytes, self._size, -tensor.nbytes % _ALIGNMENT)
        ]
        device = next(iter(tensors.values())).device
        parts = torch.split(torch.full((sum(sizes),), GUARD_BYTE, dtype=torch.uint8, device=device), sizes)
        found = {}
        for index, (name, tensor) in enumerate(tensors.items()):
            found[name] = parts[4 * index + 1].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        when = f"{self.when}: " if self.when else ""
        words = [f"{when}the kernel has written before or after its {name}" for name in tensors]
        self._held.append((words, [part for index, part in enumerate(parts) if index % 2 == 0]))
        return found

    def release(self) -> None:
        """Keeps the guards of the last copies as they are now, and not the copies."""
        words, parts = self._held.pop()
        self._held.append((words, [torch.cat(parts)]))

    def changed(self) -> Tensor:
        """Whether the guards of each copy so far were changed, bool `[copies]` on the device."""
        guards = torch.cat([part for _, parts in self._held for part in parts])
        return (guards.view(-1, 2 * self._size) != GUARD_BYTE).any(-1)

    def words(self) -> list[str]:
        """What a changed guard means, for each of `changed`."""
        return [each for words, _ in self._held for each in words]


@contextmanager
def poisoned(experts: Any) -> Iterator[None]:
    """While it lasts, modular experts find their output and workspaces full of `_POISON`."""
    run = experts.apply

    def apply(**arguments: Any) -> Any:
        for name in _ALLOCATED:
            if arguments[name] is not None:
                arguments[name].view(torch.uint8).fill_(_POISON)
        return run(**arguments)

    with _replaced_apply(experts, apply):
        yield


@contextmanager
def guarded(experts: Any, guards: Guards) -> Iterator[None]:
    """While it lasts, modular experts find their output and workspaces between guards, as they were otherwise."""
    run = experts.apply

    def apply(**arguments: Any) -> Any:
        own = {name: each for name in _ALLOCATED if (each := arguments[name]) is not None and each.numel()}
        copies = guards.around(own)
        result = run(**arguments | copies)
        for name, each in own.items():
            each.copy_(copies[name])
        guards.release()
        return result

    with _replaced_apply(experts, apply):
        yield


@contextmanager
def _replaced_apply(experts: Any, apply: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, vLLM's kernel calls another function in place of the experts' `apply`."""
    before = vars(experts).get("apply")
    experts.apply = apply
    try:
        yield
    finally:
        if before is None:
            del experts.apply
        else:
            experts.apply = before
