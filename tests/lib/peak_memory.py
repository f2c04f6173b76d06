"""Measures the peak memory and the operations of torch code, on any device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Peak(TorchDispatchMode):
    """Counts allocations and operations inside a `with` block.

    Attributes:
        peak: largest sum of bytes of storages allocated inside and alive at the same time.
        calls: torch operations.
        starts: operations that launch a kernel on a GPU: no views, no allocations, no meta tensors.
    """

    def __init__(self, *own: Tensor) -> None:
        """
        Args:
            own: tensors whose memory existed before and does not count.
        """
        super().__init__()
        self._alive = {tensor.untyped_storage().data_ptr(): 0 for tensor in own if not tensor.is_meta}
        self.peak = 0
        self.calls = 0
        self.starts = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Runs an operation and records its results' storages."""
        self.calls += 1
        result = function(*arguments, **(keywords or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in function._schema.returns)
        meta = any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in made)
        self.starts += not (views or meta or function._schema.name.startswith(("aten::empty", "aten::new_empty")))
        for tensor in made:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in self._alive and memory.nbytes():
                    self._alive[memory.data_ptr()] = memory.nbytes()
                    weakref.finalize(memory, self._alive.pop, memory.data_ptr(), None)
                    self.peak = max(self.peak, sum(self._alive.values()))
        return result
