"""What a checkpoint's tensors must be before vLLM's loader copies them: copying converts dtypes and spreads shapes in
silence, and what was never loaded stays whatever the memory held."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..oracle.problem import Problem
from . import agreement

_E8M0 = getattr(torch, "float8_e8m0fnu", None)


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
                return loader(param, fitting(param, loaded_weight, problem, *args, **kwargs), *args, **kwargs)

        return plain
    function = loader.__func__  # type: ignore[attr-defined]

    @functools.wraps(function)
    def bound(self: Any, param: nn.Parameter, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        with agreement.telling(group, topic):
            return function(self, param, fitting(param, loaded_weight, problem, *args, **kwargs), *args, **kwargs)

    return MethodType(bound, layer)


def fitting(
    parameter: nn.Parameter,
    tensor: Tensor,
    problem: Problem,
    weight_name: str = "",
    shard_id: str = "",
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """The checkpoint's tensor, when it is what the parameter holds.

    Args:
        parameter: `[local_experts, ...]`.
        tensor: of one expert; those of all experts at once are looked at for their dtype only.
        problem: the layer.
        weight_name: the parameter's name, for messages.
        shard_id: ``w1`` (gate), ``w2`` (down) or ``w3`` (up).
        args: what else vLLM passes to its loader.
        kwargs: likewise.

    Returns:
        The tensor; scales that are stored as float8_e8m0fnu come back as the bytes that they are.

    Raises:
        CheckpointError: another dtype or shape.
    """
    if _E8M0 is not None and tensor.dtype == _E8M0 and parameter.dtype == torch.uint8:
        tensor = tensor.view(torch.uint8)
    both_real = parameter.dtype.itemsize > 1 and parameter.dtype.is_floating_point and tensor.dtype.is_floating_point
    if tensor.dtype != parameter.dtype and not (both_real and tensor.dtype.itemsize > 1):
        rule = f"the checkpoint stores it as {_word(tensor.dtype)}, {problem.scheme.name} as {_word(parameter.dtype)}"
        remedy = "The checkpoint is not in the format that its config names"
        raise CheckpointError(rule, remedy, f"{problem.layer}, {weight_name}, {shard_id}")
    expected = _shape(parameter, problem, shard_id)
    if expected is not None and tensor.ndim == len(expected) and tuple(tensor.shape) != expected:
        rule = f"an expert's tensor has shape {list(tensor.shape)}, expected {list(expected)}"
        raise CheckpointError(rule, "", f"{problem.layer}, {weight_name}, {shard_id}")
    return tensor


def _shape(parameter: nn.Parameter, problem: Problem, shard_id: str) -> tuple[int, ...] | None:
    """Shape of one expert's tensor over all tensor-parallel ranks."""
    inner, ranks = problem.full_intermediate_size, problem.parallel.tp
    if shard_id in ("w1", "w3"):
        return (inner,) if parameter.ndim == 2 else (inner, int(parameter.shape[-1]))
    if shard_id == "w2":
        return (problem.hidden_size,) if parameter.ndim == 2 else (problem.hidden_size, parameter.shape[-1] * ranks)
    return None


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


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
