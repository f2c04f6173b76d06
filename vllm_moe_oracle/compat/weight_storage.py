"""Storage of a layer's weights: one buffer per expert, for the checkpoint's tensor first and for the kernel's later.

The conversion works in place, one expert at a time: its peak memory is one expert, not a second layer. Where a kernel's
tensor is larger than the checkpoint's (padding), the buffers have the larger size before anything is loaded; loaders
see parameters of the checkpoint's shape, strided over the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LifecycleError

ConvertFunction = Callable[[dict[str, Tensor]], dict[str, Tensor]]

_ALIGNMENT = 16
"""Alignment of an expert's buffer in bytes: the widest load of a GPU."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one expert's tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The spec of one expert's tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


def converted_specs(convert: ConvertFunction, experts: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Specs of one expert's kernel tensors, from a conversion of meta tensors.

    Args:
        convert: makes the kernel tensors of one expert from its loaded ones.
        experts: loaded tensors of the layer, `[local_experts, ...]` each; only shapes and dtypes are used.
    """
    empty = {name: torch.empty(each.shape[1:], dtype=each.dtype, device="meta") for name, each in experts.items()}
    return {name: TensorSpec.of(tensor) for name, tensor in convert(empty).items()}


def reserve_expert_buffers(parameter: nn.Parameter, spec: TensorSpec) -> None:
    """Moves a parameter that is not loaded yet to buffers that can also hold `spec`.

    Args:
        parameter: `[local_experts, ...]`; its data is replaced, its shape and dtype stay.
        spec: what each expert's buffer will hold later.
    """
    raw = TensorSpec.of(parameter.data[0])
    if not _fits_in_place(raw, spec):
        parameter.data = allocate(parameter.shape[0], raw, spec, parameter.device)


def allocate(count: int, raw: TensorSpec, spec: TensorSpec | None, device: torch.device) -> Tensor:
    """Zeros `[count, *raw.shape]` in buffers that can also hold `spec`.

    Args:
        count: number of experts.
        raw: spec of the loaded tensor of one expert.
        spec: spec of its kernel tensor; None where the kernel has none.
        device: the device.
    """
    stride = raw.nbytes
    if spec is not None and not _fits_in_place(raw, spec):
        stride = -(-max(spec.nbytes, raw.nbytes) // _ALIGNMENT) * _ALIGNMENT
    return _view(torch.zeros(count, stride, dtype=torch.uint8, device=device), raw)


def convert_in_place(layer: nn.Module, names: Mapping[str, str], convert: ConvertFunction) -> dict[str, str]:
    """Converts a layer's loaded parameters, one expert at a time.

    A kernel tensor replaces the parameter of its name; parameters that the kernel does not need are deleted. Experts
    of a kernel tensor follow one another without gaps: some kernels, vLLM where it moves experts between ranks, and
    files of a saved state need it.

    Args:
        layer: the layer.
        names: parameter name by tensor name.
        convert: makes the kernel tensors of one expert from its loaded ones.

    Returns:
        Parameter name by kernel tensor name.

    Raises:
        LifecycleError: an expert's tensors have other names, shapes or dtypes than the first expert's. The layer is not
            usable then.
    """
    raw = {name: getattr(layer, parameter).data for name, parameter in names.items()}
    count = next(iter(raw.values())).shape[0]
    specs = converted_specs(convert, raw)
    device = next(iter(raw.values())).device
    memory = {name: _slot_memory(raw.get(name), count, spec, device) for name, spec in specs.items()}
    # Left in their place are only tensors without gaps: buffers may be larger for a backend that was refused since.
    in_place = {name for name, tensor in raw.items() if tensor.is_contiguous()}
    changed: set[str] = set()
    for index in range(count):
        # A function, so that the temporaries of one expert are freed before the next one.
        changed |= _convert_one(index, raw, convert, specs, memory, in_place)
    for name in raw.keys() - specs.keys():
        delattr(layer, names[name])
    for name in changed:
        parameter = names.get(name, name)
        replace_parameter(layer, parameter, _view(memory[name], specs[name]))
    return {name: names.get(name, name) for name in specs}


def _convert_one(
    index: int,
    raw: Mapping[str, Tensor],
    convert: ConvertFunction,
    specs: Mapping[str, TensorSpec],
    memory: Mapping[str, Tensor],
    in_place: Container[str],
) -> set[str]:
    """Converts one expert in place; returns the names of the tensors that were written, which are those that the
    conversion changed or that are not `in_place`."""
    before = {name: tensor[index] for name, tensor in raw.items()}
    after = convert(before)
    ready = {}
    for name in sorted(specs.keys() | after.keys()):
        tensor = after.get(name)
        if tensor is None or TensorSpec.of(tensor) != specs.get(name):
            became = "is missing" if tensor is None else f"became {TensorSpec.of(tensor)}"
            rule = f"expert {index}'s {name} {became}, the first one's is {specs.get(name, 'missing')}"
            raise LifecycleError(rule, "The backend's conversion depends on values, which its contract forbids")
        if tensor is not before.get(name) or name not in in_place:
            # A view of memory that is about to be overwritten must be copied first.
            shared = any(
                tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in raw.values()
            )
            ready[name] = tensor.clone() if shared else tensor
    for name, tensor in ready.items():
        _view(memory[name][index : index + 1], specs[name])[0].copy_(tensor)
    return set(ready)


def rename_parameters(layer: nn.Module, names: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Renames parameters; their memory stays.

    Args:
        layer: the layer.
        names: parameter name by tensor name.
        wanted: new parameter name by canonical name, for some of them.

    Returns:
        The new parameter name by canonical name.
    """
    found = dict(names)
    for canonical in names.keys() & wanted.keys():
        old, new = names[canonical], wanted[canonical]
        if old != new:
            data = getattr(layer, old).data
            delattr(layer, old)
            replace_parameter(layer, new, data)
            found[canonical] = new
    return found


def forbid_loading(parameter: nn.Parameter, layer: str, local_expert: Callable[[int], int]) -> None:
    """Makes it an error to load checkpoint weights into a converted parameter. vLLM's reload uses fresh parameters.

    Another rank's expert is passed over, as vLLM's loader does: where weights are converted while they are loaded, a
    layer is converted once this rank's experts are there, and the model's loader still offers it the others'.

    Args:
        parameter: a kernel tensor.
        layer: the layer's name, for the message.
        local_expert: this rank's number of an expert, or -1, by its number over all ranks.
    """

    def weight_loader(
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str = "",
        shard_id: str | None = None,
        expert_id: int | None = None,
        return_success: bool = False,
    ) -> bool | None:
        if expert_id is not None and local_expert(expert_id) == -1:
            return False if return_success else None
        rule = "checkpoint weights were loaded into a layer whose weights are in the kernel's layout already"
        raise LifecycleError(rule, "Reload through vLLM's reload_weights, which starts from fresh parameters", layer)

    parameter.weight_loader = weight_loader  # type: ignore[attr-defined]  # vLLM's loaders look for it


def keep_names(layer: nn.Module, names: Iterable[str], experts: int) -> list[str]:
    """Registers a byte for each expert under the names that a layer has lost.

    The loaders of models look a parameter up by its name in the checkpoint before they offer it another rank's expert.
    In a reload they do so after the layer was converted, and a kernel may have no tensor of that name.

    Args:
        layer: the layer.
        names: its parameters before the conversion.
        experts: experts on this rank; EPLB moves every parameter expert by expert.

    Returns:
        The names that were lost.
    """
    lost = [name for name in names if not hasattr(layer, name)]
    device = next(layer.parameters()).device
    for name in lost:
        layer.register_parameter(
            name, nn.Parameter(torch.zeros(experts, 1, dtype=torch.uint8, device=device), requires_grad=False)
        )
    return lost


def replace_parameter(layer: nn.Module, name: str, data: Tensor, **attributes: Any) -> nn.Parameter:
    """Adds or replaces a parameter of a layer; nothing else registers parameters.

    Args:
        layer: the layer.
        name: the parameter's name.
        data: its data.
        attributes: attributes of the parameter, such as its loader; those of the old parameter are dropped.

    Returns:
        The new parameter.
    """
    if name in layer._parameters:
        delattr(layer, name)
    parameter = nn.Parameter(data, requires_grad=False)
    for attribute, value in attributes.items():
        setattr(parameter, attribute, value)
    layer.register_parameter(name, parameter)
    return parameter


def is_other_attribute(layer: nn.Module, name: str) -> bool:
    """Whether a layer has something else than a parameter under a name."""
    return hasattr(layer, name) and name not in layer._parameters


def register_buffers(layer: nn.Module, tensors: Iterable[Tensor], prefix: str = "") -> None:
    """Registers tensors that a kernel holds on to as buffers of its layer, unless the layer owns their memory already.

    vLLM's sleep level 2 saves buffers and discards everything else that was allocated while a model was loaded. Its
    layer-wise reload leaves buffers alone that no checkpoint has.

    Args:
        layer: the layer.
        tensors: the tensors.
        prefix: distinguishes the kernels of one layer.
    """
    known = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *layer.buffers())}
    for index, tensor in enumerate(tensors):
        if tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() not in known:
            layer.register_buffer(f"moe_oracle_kept_{prefix}{index}", tensor, persistent=False)


def _fits_in_place(raw: TensorSpec, spec: TensorSpec) -> bool:
    """Whether `spec` fits into each expert's part of a contiguous tensor of `raw` specs."""
    return spec.nbytes <= raw.nbytes and raw.nbytes % spec.dtype.itemsize == 0


def _view(memory: Tensor, spec: TensorSpec) -> Tensor:
    """A view `[experts, *spec.shape]` of the first bytes of each row of uint8 `[experts, stride]`."""
    if not spec.nbytes:  # torch refuses to view no bytes as wider numbers
        return memory.new_empty((memory.shape[0], *spec.shape), dtype=spec.dtype)
    return torch.unflatten(memory[:, : spec.nbytes].view(spec.dtype), 1, spec.shape)


def _slot_memory(raw: Tensor | None, count: int, spec: TensorSpec, device: torch.device) -> Tensor:
    """uint8 `[experts, bytes]` without gaps: the raw tensor's memory if `spec` fits, else new memory.

    The kernel tensor of an expert starts no later than its raw buffer and ends before that of the next expert, which
    is converted later: nothing is overwritten that is still to be read.
    """
    if raw is not None and raw[0].is_contiguous():
        storage = torch.empty(0, dtype=torch.uint8, device=device).set_(raw.untyped_storage())
        offset = raw.storage_offset() * raw.element_size()
        stride = raw.stride(0) * raw.element_size() if count > 1 else storage.numel() - offset
        if spec.nbytes <= stride and stride % spec.dtype.itemsize == 0 and offset % spec.dtype.itemsize == 0:
            return storage.as_strided((count, spec.nbytes), (spec.nbytes, 1), offset)
    return torch.empty(count, spec.nbytes, dtype=torch.uint8, device=device)
