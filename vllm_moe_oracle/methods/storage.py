"""The storage of a layer's weights: one slot an expert, which holds the checkpoint's tensor first, the kernel's later.

Conversion goes expert by expert and in place, so that its peak is one expert, not a second layer. Where a kernel's
tensor is larger than the checkpoint's (padding), slots are made large enough before anything is loaded; the loaders see
parameters of the checkpoint's own shape, strided over the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LifecycleError

Convert = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_ALIGNMENT = 16
"""Bytes that every expert's slot is aligned to: the widest load of a GPU."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Shape and dtype of one expert's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Kind:
        """The kind of a tensor of one expert."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def kinds_after(convert: Convert, experts: Mapping[str, Tensor]) -> dict[str, Kind]:
    """What a conversion makes of one expert, learnt from tensors without data.

    Args:
        convert: from canonical tensors of one expert to kernel tensors.
        experts: canonical tensors of the layer, `[local_experts, ...]` each; only shapes and dtypes are looked at.
    """
    empty = {name: torch.empty(each.shape[1:], dtype=each.dtype, device="meta") for name, each in experts.items()}
    return {name: Kind.of(tensor) for name, tensor in convert(empty).items()}


def make_room(parameter: nn.Parameter, kind: Kind) -> None:
    """Lays a parameter that is not loaded yet over slots that can hold `kind` as well.

    Args:
        parameter: `[local_experts, ...]`; its data are replaced, its shape and dtype stay.
        kind: what each expert's slot must be able to hold.
    """
    raw = Kind.of(parameter.data[0])
    if not _fits(raw, kind):
        parameter.data = allocate(parameter.shape[0], raw, kind, parameter.device)


def allocate(count: int, raw: Kind, kind: Kind | None, device: torch.device) -> Tensor:
    """Zeros of one kind over slots that can hold another as well: `[count, *raw.shape]`.

    Args:
        count: number of experts.
        raw: what is written first.
        kind: what each expert's slot must be able to hold later; None when that is nothing.
        device: where.
    """
    slot = raw.nbytes
    if kind is not None and not _fits(raw, kind):
        slot = -(-max(kind.nbytes, raw.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return _view(torch.zeros(count, slot, dtype=torch.uint8, device=device), raw)


def convert_in_place(
    layer: nn.Module, names: Mapping[str, str], convert: Convert, dense: bool = False
) -> dict[str, str]:
    """Converts a layer's loaded parameters, expert by expert.

    A kernel tensor takes the parameter's place under its name; parameters that the kernel does not need are dropped.

    Args:
        layer: whose parameters they are.
        names: parameter name by canonical name.
        convert: from canonical tensors of one expert to kernel tensors.
        dense: experts follow one another without room between them, as vLLM wants it that moves them while serving.

    Returns:
        Parameter name by kernel tensor name.

    Raises:
        LifecycleError: an expert's tensors came out in another shape or dtype than the first's. Nothing that was
            converted before is usable; the layer says so when it is run.
    """
    raw = {name: getattr(layer, parameter).data for name, parameter in names.items()}
    count = next(iter(raw.values())).shape[0]
    kinds = kinds_after(convert, raw)
    memory = {
        name: _memory(raw.get(name), count, kind, next(iter(raw.values())).device, dense)
        for name, kind in kinds.items()
    }
    changed: set[str] = set()
    for index in range(count):
        # In a function of its own: what one expert's conversion made must be gone when the next one's begins.
        changed |= _convert_one(index, raw, convert, kinds, memory)
    for name in raw.keys() - kinds.keys():
        delattr(layer, names[name])
    for name in changed:
        parameter = names.get(name, name)
        replace(layer, parameter, _view(memory[name], kinds[name]))
    return {name: names.get(name, name) for name in kinds}


def _convert_one(
    index: int, raw: Mapping[str, Tensor], convert: Convert, kinds: Mapping[str, Kind], memory: Mapping[str, Tensor]
) -> set[str]:
    """Converts one expert and writes it into its place; names of the tensors that are not those that came in."""
    before = {name: tensor[index] for name, tensor in raw.items()}
    after = convert(before)
    ready = {}
    for name, tensor in after.items():
        if Kind.of(tensor) != kinds.get(name):
            rule = f"expert {index}'s {name} became {Kind.of(tensor)}, the first one's is {kinds.get(name)}"
            raise LifecycleError(rule, "The backend's conversion depends on values, which its contract forbids")
        if tensor is not before.get(name):
            # A view of what is about to be overwritten must be copied out first.
            shared = any(
                tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in raw.values()
            )
            ready[name] = tensor.clone() if shared else tensor
    for name, tensor in ready.items():
        _view(memory[name][index : index + 1], kinds[name])[0].copy_(tensor)
    return set(ready)


def rename(layer: nn.Module, names: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Gives parameters other names; their memory stays where it is.

    Args:
        layer: whose parameters they are.
        names: parameter name by canonical name.
        wanted: new parameter names by canonical name, for some of them.

    Returns:
        Parameter name by canonical name afterwards.
    """
    found = dict(names)
    for canonical in names.keys() & wanted.keys():
        old, new = names[canonical], wanted[canonical]
        if old != new:
            data = getattr(layer, old).data
            delattr(layer, old)
            replace(layer, new, data)
            found[canonical] = new
    return found


def refuse_loading(parameter: nn.Parameter, layer: str) -> None:
    """Makes loading checkpoint weights into a converted parameter an error; vLLM's reload goes another way.

    Args:
        parameter: a kernel tensor.
        layer: the layer's name, for the message.
    """

    def weight_loader(*args: Any, **kwargs: Any) -> None:
        rule = "checkpoint weights were loaded into a layer whose weights are in the kernel's layout already"
        raise LifecycleError(rule, "Reload through vLLM's reload_weights, which starts from fresh parameters", layer)

    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]


def replace(layer: nn.Module, name: str, data: Tensor, **attributes: Any) -> nn.Parameter:
    """Replaces a parameter of a layer, or adds it; the one place where that happens.

    Args:
        layer: the layer.
        name: the parameter's name.
        data: what it holds from now on.
        attributes: of the parameter, its loader first of all. Those of the old one are gone.

    Returns:
        The parameter.
    """
    if name in layer._parameters:
        delattr(layer, name)
    parameter = nn.Parameter(data, requires_grad=False)
    for attribute, value in attributes.items():
        setattr(parameter, attribute, value)
    layer.register_parameter(name, parameter)
    return parameter


def keep(layer: nn.Module, tensors: Iterable[Tensor], of: str = "") -> None:
    """Makes tensors that a kernel holds on to buffers of its layer, unless they are views of what the layer has.

    vLLM's sleep of level 2 saves buffers and forgets everything else that was made while a model was loaded; its
    layer-wise reload leaves those alone that no checkpoint has.

    Args:
        layer: the layer.
        tensors: what the kernel holds on to.
        of: tells several kernels of one layer apart.
    """
    known = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *layer.buffers())}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() not in known:
            layer.register_buffer(f"moe_oracle_kept_{of}{index}", tensor, persistent=False)


def _fits(raw: Kind, kind: Kind) -> bool:
    """Whether experts of one kind, one right after the other, leave each its room for the other kind."""
    return kind.nbytes <= raw.nbytes and raw.nbytes % kind.dtype.itemsize == 0


def _view(memory: Tensor, kind: Kind) -> Tensor:
    """`[experts, *kind.shape]` over the first bytes of each row of uint8 `[experts, slot]`."""
    return torch.unflatten(memory[:, : kind.nbytes].view(kind.dtype), 1, kind.shape)


def _memory(raw: Tensor | None, count: int, kind: Kind, device: torch.device, dense: bool) -> Tensor:
    """uint8 `[experts, slot]`: the raw tensor's own memory where the kind fits into it, new memory otherwise.

    Dense, an expert of the kernel's begins before the slot of its raw one, and ends before that of the next, which is
    converted after it: nothing is overwritten that will be read.
    """
    if raw is not None and raw[0].is_contiguous():
        storage = torch.empty(0, dtype=torch.uint8, device=device).set_(raw.untyped_storage())
        offset = raw.storage_offset() * raw.element_size()
        slot = raw.stride(0) * raw.element_size() if count > 1 else storage.numel() - offset
        if kind.nbytes <= slot and slot % kind.dtype.itemsize == 0 and offset % kind.dtype.itemsize == 0:
            return storage.as_strided((count, kind.nbytes), (kind.nbytes if dense else slot, 1), offset)
    return torch.empty(count, kind.nbytes, dtype=torch.uint8, device=device)
