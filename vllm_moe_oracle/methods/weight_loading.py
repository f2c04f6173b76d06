"""Validation of a checkpoint's tensors as vLLM's loader copies them.

The loader's copy converts dtypes and broadcasts shapes silently; of two tensors for one place the last counts; and a
parameter that is never loaded keeps what its memory held. So the loader checks dtype and shape first, and that nothing
is loaded over other values. A parameter's memory is filled with a sentinel: a byte that hardly any checkpoint holds. It
is filled when the layer is made, and again when vLLM allocates new memory, in a layer-wise reload and in online
quantization. The sentinel is an attribute of the parameter, which vLLM copies. Loaders also note what they bring, which
tells a checkpoint that does hold the sentinel from one that lacks a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.problem import Problem
from ..core.sharding import shard_size
from ..errors import CheckpointError
from ..schemes._checks import SHAPE_REMEDY, dtype_name
from ..schemes._mx import as_parameter
from . import rank_sync

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

_SENTINEL_ATTRIBUTE = "moe_oracle_unloaded"
"""Attribute of a parameter: the byte that fills it before it is loaded."""

_filled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters whose memory holds nothing by chance: it has been filled, or was zeros when the layer was made. Keyed by
the object, because vLLM copies attributes to new parameters."""

_loaded_places: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The set of places of a parameter that were loaded; None once its layer is complete. Keyed by the object: a reload has
new ones."""

_brought: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What loaders have brought into a parameter, as pairs of shard and expert over all ranks; the expert is None for all
experts of this rank, and the shard "" for all shards. Keyed by the object."""


def validating_loader(
    loader: Callable[..., Any],
    problem: Problem,
    group: rank_sync.RankGroup,
    local_expert: Callable[[Any, int], int],
) -> Callable[..., Any]:
    """A layer's weight loader that validates each tensor first, and that nothing is loaded over other values.

    An error is sent to the other ranks, too: each rank reads its own part of the files, and the others would wait for
    this one at their self-check.

    The result is a bound method of the layer with the attributes of its loader: vLLM's reload unbinds loaders, and
    models look at a loader's attributes.

    Args:
        loader: the layer's loader, called as ``loader(param, loaded_weight, weight_name, shard_id, expert_id, ...)``.
        problem: the layer; its matrices have one row per output feature.
        group: the ranks that hold parts of the layer.
        local_expert: this rank's number of an expert of a layer, or -1; see `LayerAdapter.local_expert`.
    """
    topic = f"loading the weights of {problem.layer}"

    def load_validated(
        load: Callable[..., Any], layer: Any, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        with rank_sync.notify_on_failure(group, topic):
            fill_once(param)
            tensor = validated_tensor(param, loaded_weight, problem, *args, **kwargs)
            _note_brought(param, tensor, *args, **kwargs)
            name, shard, expert = _place(*args, **kwargs)
            local = None
            if expert is not None and layer is not None and tensor.ndim < param.ndim:
                local = local_expert(layer, expert)
            if local == -1 or not loaded_before(param, (name, shard, expert)):
                return load(param, tensor, *args, **kwargs)
            held = param.data if local is None else param.data[local]
            before = held.clone()
            result = load(param, tensor, *args, **kwargs)
            require_equal(before, held, _place_words(problem, name, shard, expert))
            return result

    return _around(loader, load_validated)


def _place(
    weight_name: str = "", shard_id: str | None = "", expert_id: int | None = None, *args: Any, **kwargs: Any
) -> tuple[str, str | None, int | None]:
    """Name, shard and expert, of a loader's arguments after the tensor."""
    return weight_name, shard_id, expert_id


def loaded_before(parameter: Tensor, place: Hashable) -> bool:
    """Whether a place of a parameter was loaded before in this load. From now on it was; False after `end_load`.

    Args:
        parameter: `[local_experts, ...]`. On the meta device, where vLLM only counts elements, no place is loaded.
        place: names the place among those of the parameter.
    """
    if parameter.is_meta:
        return False
    if parameter not in _loaded_places:
        _loaded_places[parameter] = set()
    places: set[Hashable] | None = _loaded_places[parameter]
    if places is None or place in places:
        return places is not None
    places.add(place)
    return False


def require_equal(held: Tensor, new: Tensor, where: str) -> None:
    """Raises where a place would get other values than it holds.

    Args:
        held: what the place held.
        new: what is to be there, of the same shape; any dtype and device.
        where: the place, for the message.

    Raises:
        CheckpointError: their bytes differ in the dtype of `held`.
    """
    before, after = (
        each.to(device=held.device, dtype=held.dtype).contiguous().reshape(-1).view(torch.uint8) for each in (held, new)
    )
    if not torch.equal(before, after):
        different = int((before != after).sum())
        rule = f"the checkpoint has two tensors for it, with different values in {different} of {before.numel()} bytes"
        remedy = "Look for two files, or two names in one file, that hold it; verify names a tensor that two files hold"
        raise CheckpointError(rule, remedy, where)


def _note_brought(param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> None:
    """Notes what a loader brings; arguments as it gets them."""
    if not param.is_meta:  # there vLLM only counts elements
        _, shard, expert = _place(*args, **kwargs)
        part = shard or "", None if loaded_weight.ndim >= param.ndim else expert
        if param not in _brought:
            _brought[param] = set()
        _brought[param].add(part)


def was_loaded(parameter: Tensor, shard: str, expert: int, local_expert: Callable[[int], int]) -> bool:
    """Whether a loader of `validating_loader` or `filling_loader` has brought an expert's part of a parameter.

    Args:
        parameter: `[local_experts, ...]`.
        shard: vLLM's name of the part.
        expert: local expert number.
        local_expert: this rank's number of an expert over all ranks, or -1.
    """
    parts: set[tuple[str, int | None]] = _brought.get(parameter, set())  # type: ignore[no-untyped-call]
    return any(each in ("", shard) and (number is None or local_expert(number) == expert) for each, number in parts)


def end_load(parameters: Iterable[Tensor]) -> None:
    """Forgets what was loaded into parameters, whose layer is complete: later loads into them bring new values."""
    for parameter in parameters:
        _loaded_places[parameter] = None


def filling_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    """A loader that fills a parameter's new memory with the sentinel first; otherwise as `validating_loader`."""

    def load_filled(
        load: Callable[..., Any], layer: Any, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        fill_once(param)
        _note_brought(param, loaded_weight, *args, **kwargs)
        return load(param, loaded_weight, *args, **kwargs)

    return _around(loader, load_filled)


def _around(loader: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A loader that calls `call(load, layer, param, ...)`, where `load` is the loader that was there: bound to the same
    layer, with the same attributes. The layer is None for a function."""
    layer = getattr(loader, "__self__", None)
    if layer is None:
        return functools.wraps(loader)(functools.partial(call, loader, None))
    function = loader.__func__  # type: ignore[attr-defined]  # a bound method: it has __self__

    @functools.wraps(function)
    def load_bound(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(functools.partial(function, self), self, *args, **kwargs)

    return MethodType(load_bound, layer)


def validated_tensor(
    parameter: nn.Parameter,
    tensor: Tensor,
    problem: Problem,
    weight_name: str = "",
    shard_id: str | None = "",
    expert_id: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """A checkpoint's tensor, if it has the parameter's dtype and shape.

    Args:
        parameter: `[local_experts, ...]`.
        tensor: one expert's tensor over all tensor-parallel ranks, or a matrix of all this rank's; without a shard
            all experts' tensor on this rank (gpt-oss).
        problem: the layer.
        weight_name: the parameter's name, for messages.
        shard_id: ``w1`` (gate), ``w2`` (down) or ``w3`` (up); None or "" for all experts.
        expert_id: the expert's number over all ranks, for messages.
        args: further arguments of vLLM's loader.
        kwargs: likewise.

    Returns:
        The tensor; e8m0 scales, also those that are stored as numbers, and pairs of 4-bit codes as uint8.

    Raises:
        CheckpointError: another dtype or shape, or a scale that e8m0 does not hold.
    """
    where = _place_words(problem, weight_name, shard_id, expert_id)
    if parameter.dtype == torch.uint8:
        tensor = as_parameter(tensor, "scale" in weight_name.rpartition(".")[2], problem, where)
    both_wide_floats = (
        parameter.dtype.itemsize > 1 and parameter.dtype.is_floating_point and tensor.dtype.is_floating_point
    )
    if tensor.dtype != parameter.dtype and not (both_wide_floats and tensor.dtype.itemsize > 1):
        format = "a model in 16 bits" if problem.scheme.packing == "online" else problem.scheme.name
        rule = f"the checkpoint stores it as {dtype_name(tensor.dtype)}, {format} as {dtype_name(parameter.dtype)}"
        remedy = "The checkpoint is not in the format that its config names"
        raise CheckpointError(rule, remedy, where)
    if not shard_id:
        expected_shapes = _all_experts_shapes(parameter, problem, weight_name)
        if tuple(tensor.shape) not in expected_shapes:
            words = " or ".join(str(list(shape)) for shape in dict.fromkeys(expected_shapes))
            rule = f"all experts' tensor has shape {list(tensor.shape)}, expected {words}"
            raise CheckpointError(rule, SHAPE_REMEDY, where)
        return tensor
    expected = _expert_shape(parameter, problem, shard_id)
    # vLLM's loader also takes a matrix of all experts.
    whole = (parameter.shape[0], *expected) if expected is not None and parameter.ndim == 3 else expected
    if expected is not None and tuple(tensor.shape) not in (expected, whole):
        rule = f"an expert's tensor has shape {list(tensor.shape)}, expected {list(expected)}"
        raise CheckpointError(rule, SHAPE_REMEDY, where)
    return tensor


def _place_words(problem: Problem, weight_name: str, shard_id: str | None, expert_id: int | None) -> str:
    """A place of a parameter, for messages."""
    expert = "" if expert_id is None else f"expert {expert_id}"
    return ", ".join(each for each in (problem.layer, weight_name, expert, shard_id) if each)


def _expert_shape(parameter: nn.Parameter, problem: Problem, shard_id: str) -> tuple[int, ...] | None:
    """Shape of one expert's tensor over all tensor-parallel ranks."""
    inner, ranks = problem.unsharded_intermediate_size, problem.parallel.tp
    if shard_id in ("w1", "w3"):
        return (inner,) if parameter.ndim == 2 else (inner, int(parameter.shape[-1]))
    if shard_id == "w2":
        return (problem.hidden_size,) if parameter.ndim == 2 else (problem.hidden_size, parameter.shape[-1] * ranks)
    return None


def _all_experts_shapes(parameter: nn.Parameter, problem: Problem, name: str) -> list[tuple[int, ...]]:
    """Shapes of all experts' tensor on this rank: the parameter's, or with the smaller shard of the last rank."""
    shape = tuple(parameter.shape)
    last = shard_size(problem, problem.parallel.tp - 1)
    dimension = 1 if "w13_" in name else 2
    if dimension >= len(shape):  # the bias of the second product is not sharded
        return [shape]
    size = shape[dimension] * last // problem.intermediate_size
    return [shape, (*shape[:dimension], size, *shape[dimension + 1 :])]


def fill_with_sentinel(parameters: Mapping[str, nn.Parameter], codes: Mapping[str, int]) -> None:
    """Fills parameters with a byte: the sentinel, or valid values for a model with dummy weights.

    Args:
        parameters: by canonical name.
        codes: the byte by canonical name; parameters without one keep their contents, which are zeros if they have no
            sentinel.
    """
    for name, parameter in parameters.items():
        if name in codes:
            parameter.data.view(torch.uint8).fill_(codes[name])
        if name in codes or getattr(parameter, _SENTINEL_ATTRIBUTE, None) == 0:
            _filled[parameter] = True


def set_sentinel(parameters: Mapping[str, nn.Parameter], codes: Mapping[str, int]) -> None:
    """Sets the sentinel of parameters; a `validating_loader` fills new memory with it before the first tensor.

    Args:
        parameters: by canonical name.
        codes: the byte by canonical name; 0 for the others.
    """
    for name, parameter in parameters.items():
        setattr(parameter, _SENTINEL_ATTRIBUTE, codes.get(name, 0))


def zero_before_loading(method: FusedMoEMethodBase) -> None:
    """Makes a stock method fill its weights and scales with zeros when it registers them, and new memory that a reload
    gives them.

    vLLM's code of Kimi means to zero padded experts and looks for their weights in the wrong module (0.32), so that the
    padding keeps what the memory held. Biases and per-tensor scales, with fewer dimensions than a matrix for each
    expert, stay.

    Args:
        method: the method of a layer whose experts are padded.
    """
    create = method.create_weights

    @functools.wraps(create)
    def create_zeros(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        create(layer, *args, **kwargs)
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.ndim > 2:
                parameter.data.zero_()
                set_sentinel({name: parameter}, {})
                fill_with_sentinel({name: parameter}, {})
                if hasattr(parameter, "weight_loader"):
                    parameter.weight_loader = filling_loader(parameter.weight_loader)

    method.create_weights = create_zeros


def fill_once(parameter: Tensor) -> None:
    """Fills a parameter's memory with its sentinel, unless that was done before or it has none; for loaders."""
    code = getattr(parameter, _SENTINEL_ATTRIBUTE, None)
    if code is not None and not parameter.is_meta and parameter not in _filled:
        parameter.data.view(torch.uint8).fill_(code)
        _filled[parameter] = True


def fill_unloaded(parameters: Iterable[Tensor]) -> None:
    """Fills new memory with zeros into which nothing was loaded: of biases that files may leave out.

    Args:
        parameters: those of a layer, after `check_all_loaded`.
    """
    for parameter in parameters:
        if getattr(parameter, _SENTINEL_ATTRIBUTE, None) == 0:
            fill_once(parameter)


def check_all_loaded(parameters: Mapping[str, Tensor], layer: str) -> None:
    """Raises where nothing was loaded into new memory of a parameter.

    Args:
        parameters: by name, after `set_sentinel`.
        layer: the layer's name.

    Raises:
        CheckpointError: nothing was loaded into some parameters, other than those that files may leave out.
    """
    never_loaded = [
        name for name, each in parameters.items() if getattr(each, _SENTINEL_ATTRIBUTE, 0) != 0 and each not in _filled
    ]
    if never_loaded:
        rule = f"nothing was loaded into {', '.join(never_loaded)}"
        remedy = (
            "The checkpoint lacks it or names it differently, or the model's loader bypasses vLLM's weight loader, "
            "which quantization and reload need"
        )
        raise CheckpointError(rule, remedy, layer)
