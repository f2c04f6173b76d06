"""What a checkpoint's tensors must be before vLLM's loader copies them: copying converts dtypes and spreads shapes in
silence, and what was never loaded stays whatever the memory held.

A parameter's memory is filled with a byte that no checkpoint holds before anything is loaded into it: when the layer is
made, and again where vLLM makes new memory for it without contents, in a layer-wise reload and while weights are
quantised online. The byte is an attribute of the parameter, which vLLM takes along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import CheckpointError
from ..oracle.planner import share_of
from ..oracle.problem import Problem
from . import agreement

_E8M0 = getattr(torch, "float8_e8m0fnu", None)
_PAIRS = (torch.int8, getattr(torch, "float4_e2m1fn_x2", None))
"""What files call bytes of two e2m1 codes, beside uint8: DeepSeek-V4's int8."""

_UNLOADED = "moe_oracle_unloaded"
"""Attribute of a parameter: the byte that fills it before anything is loaded."""

_prepared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Parameters whose memory has been filled. By the object: vLLM copies attributes from one to the next."""


def checked(loader: Callable[..., Any], problem: Problem, group: agreement.Group) -> Callable[..., Any]:
    """A layer's weight loader that looks at each tensor first, and tells the other ranks of what it raises: each has
    its own part of the files, and those whose part is right would wait for this one at their self-check.

    It stays a bound method of the layer, with the loader's own marks: vLLM's reload unbinds loaders from their layers,
    and models ask loaders what they can do.

    Args:
        loader: the layer's own, called as ``loader(param, loaded_weight, weight_name, shard_id, expert_id, ...)``.
        problem: the layer, whose experts' matrices have one row an output feature.
        group: the ranks that hold parts of the layer.
    """
    topic = f"loading the weights of {problem.layer}"
    layer = getattr(loader, "__self__", None)
    if layer is None:

        @functools.wraps(loader)
        def plain(param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
            with agreement.telling(group, topic):
                _prepare(param)
                return loader(param, fitting(param, loaded_weight, problem, *args, **kwargs), *args, **kwargs)

        return plain
    function = loader.__func__  # type: ignore[attr-defined]

    @functools.wraps(function)
    def bound(self: Any, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        with agreement.telling(group, topic):
            _prepare(param)
            return function(self, param, fitting(param, loaded_weight, problem, *args, **kwargs), *args, **kwargs)

    return MethodType(bound, layer)


def fitting(
    parameter: nn.Parameter,
    tensor: Tensor,
    problem: Problem,
    weight_name: str = "",
    shard_id: str | None = "",
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The checkpoint's tensor, when it is what the parameter holds.

    Args:
        parameter: `[local_experts, ...]`.
        tensor: of one expert, over all tensor-parallel ranks; or of all experts, as this rank has them (gpt-oss).
        problem: the layer.
        weight_name: the parameter's name, for messages.
        shard_id: ``w1`` (gate), ``w2`` (down) or ``w3`` (up); nothing for all experts.
        args: what else vLLM passes to its loader.
        kwargs: likewise.

    Returns:
        The tensor; scales that are stored as float8_e8m0fnu, and pairs of 4-bit codes, come back as the bytes that they
        are.

    Raises:
        CheckpointError: another dtype or shape.
    """
    where = ", ".join(each for each in (problem.layer, weight_name, shard_id) if each)
    if parameter.dtype == torch.uint8:
        is_scale = "scale" in weight_name.rpartition(".")[2]
        if (_E8M0 is not None and tensor.dtype == _E8M0) or (tensor.dtype in _PAIRS and not is_scale):
            tensor = tensor.view(torch.uint8)
    both_real = parameter.dtype.itemsize > 1 and parameter.dtype.is_floating_point and tensor.dtype.is_floating_point
    if tensor.dtype != parameter.dtype and not (both_real and tensor.dtype.itemsize > 1):
        format = "a model in 16 bits" if problem.scheme.packing == "online" else problem.scheme.name
        rule = f"the checkpoint stores it as {_word(tensor.dtype)}, {format} as {_word(parameter.dtype)}"
        remedy = "The checkpoint is not in the format that its config names"
        raise CheckpointError(rule, remedy, where)
    if not shard_id:
        possible = _whole_shapes(parameter, problem, weight_name)
        if tensor.ndim == parameter.ndim and tuple(tensor.shape) not in possible:
            words = " or ".join(str(list(shape)) for shape in dict.fromkeys(possible))
            raise CheckpointError(f"all experts' tensor has shape {list(tensor.shape)}, expected {words}", "", where)
        return tensor
    expected = _shape(parameter, problem, shard_id)
    if expected is not None and tensor.ndim == len(expected) and tuple(tensor.shape) != expected:
        rule = f"an expert's tensor has shape {list(tensor.shape)}, expected {list(expected)}"
        raise CheckpointError(rule, "", where)
    return tensor


def _shape(parameter: nn.Parameter, problem: Problem, shard_id: str) -> tuple[int, ...] | None:
    """Shape of one expert's tensor over all tensor-parallel ranks."""
    inner, ranks = problem.full_intermediate_size, problem.parallel.tp
    if shard_id in ("w1", "w3"):
        return (inner,) if parameter.ndim == 2 else (inner, int(parameter.shape[-1]))
    if shard_id == "w2":
        return (problem.hidden_size,) if parameter.ndim == 2 else (problem.hidden_size, parameter.shape[-1] * ranks)
    return None


def _whole_shapes(parameter: nn.Parameter, problem: Problem, name: str) -> list[tuple[int, ...]]:
    """Shapes that a tensor of all experts on this rank may have: the parameter's, and on the last rank what is left."""
    shape = tuple(parameter.shape)
    last = share_of(problem, problem.parallel.tp - 1)
    dimension = 1 if "w13_" in name else 2
    if dimension >= len(shape):  # the second product's bias is not cut
        return [shape]
    left = shape[dimension] * last // problem.intermediate_size
    return [shape, (*shape[:dimension], left, *shape[dimension + 1 :])]


def fill(parameters: Mapping[str, nn.Parameter], codes: Mapping[str, int]) -> None:
    """Fills parameters with a byte: one that no checkpoint holds, so that what was never loaded is noticed, or a usable
    one where none will be read.

    Args:
        parameters: by canonical name.
        codes: the byte for each canonical name that has one.
    """
    for name, code in codes.items():
        if name in parameters:
            parameters[name].data.view(torch.uint8).fill_(code)
            _prepared[parameters[name]] = True


def remember(parameters: Mapping[str, nn.Parameter], codes: Mapping[str, int]) -> None:
    """Has new memory of parameters filled when the first tensor is loaded into it, by a loader that is `checked`.

    Args:
        parameters: by canonical name.
        codes: the byte for each canonical name that has one; the others get zeros.
    """
    for name, parameter in parameters.items():
        setattr(parameter, _UNLOADED, codes.get(name, 0))


def _prepare(parameter: nn.Parameter) -> None:
    code = getattr(parameter, _UNLOADED, None)
    if code is not None and not parameter.is_meta and parameter not in _prepared:
        parameter.data.view(torch.uint8).fill_(code)
        _prepared[parameter] = True


def refuse_untouched(parameters: Mapping[str, Tensor], layer: str) -> None:
    """Raises where nothing at all was loaded into new memory, which is whatever was there before.

    Args:
        parameters: by name, after `remember`.
        layer: the layer's name.

    Raises:
        CheckpointError: it names the parameters. Biases are none of them: files may leave those of zeros out.
    """
    untouched = [
        name for name, each in parameters.items() if getattr(each, _UNLOADED, 0) != 0 and each not in _prepared
    ]
    if untouched:
        rule = f"nothing was loaded into {', '.join(untouched)}"
        remedy = (
            "The checkpoint lacks it or names it differently, or the model's own loader passes by the one that vLLM "
            "quantises and reloads with"
        )
        raise CheckpointError(rule, remedy, layer)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
