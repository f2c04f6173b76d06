"""MoE layers of public models, by names such as ``mxfp4:gpt-oss-20b`` or ``int4_g32:kimi-k2@tp8``.

Sizes of the models and the formats in which they are served are data in ``profiles/shapes.json``, most important first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..core.activations import with_defaults
from ..core.problem import Activation, Parallel, Problem, Routing, Scheme, mx_scheme
from ..core.sharding import shard_by_blocks, split_reasons
from ..errors import MeasurementError, did_you_mean

FILE = Path(__file__).parents[1] / "profiles" / "shapes.json"

ACTIVATIONS = {
    "silu": Activation("silu"),
    "silu-limit-10": Activation("silu", limit=10.0),
    "relu2": Activation("relu2", gated=False),
    # gpt-oss interleaves the rows of gate and up; MiniMax-M3 does not.
    "swigluoai": with_defaults(Activation("swigluoai", interleaved=True)),
    "swigluoai-halves": with_defaults(Activation("swigluoai")),
}
"""Activations of the shapes by their names in ``shapes.json``."""

SCHEME_NAMES = ("mxfp8", "mxfp4", "int4_g128", "int4_g32", "int8_g128")
"""The formats that are served most. ``int<bits>_g<group size>`` and ``int<bits>_channel`` are valid as well."""


class ModelShape(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={
        "num_experts": "experts",
        "hidden_size": "hidden",
        "intermediate_size": "inner",
        "has_bias": "bias",
    },
):
    """Sizes of a model's MoE layers over all ranks, with shorter names in JSON.

    Attributes:
        name: name of the shape.
        family: name of the model's family, for headings.
        model: the model's repository.
        num_experts: routed experts.
        top_k: experts per token.
        hidden_size: features of the hidden state.
        intermediate_size: features between the two products.
        activation: key of `ACTIVATIONS`.
        has_bias: whether both products add a bias.
    """

    name: str
    family: str
    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    has_bias: bool = False


class ServedShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shape in a format and at a tensor-parallel size in which it is served."""

    shape: str
    scheme: str
    tp: int


class _ShapesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    shapes: tuple[ModelShape, ...]
    served: tuple[ServedShape, ...]


@cache
def _shapes_file() -> _ShapesFile:
    return msgspec.json.decode(FILE.read_bytes(), type=_ShapesFile)


def names() -> list[str]:
    """Names of the shapes."""
    return [shape.name for shape in _shapes_file().shapes]


def find(layer: str) -> ModelShape | None:
    """The shape of a layer's name, such as ``mxfp4:gpt-oss-20b@tp2``; None if there is no such shape."""
    return _named(layer.partition(":")[2].partition("@")[0])


def _named(name: str) -> ModelShape | None:
    return next((shape for shape in _shapes_file().shapes if shape.name == name), None)


def families() -> list[str]:
    """Names of the models' families, most important first."""
    return list(dict.fromkeys(shape.family for shape in _shapes_file().shapes))


def served_problems() -> list[Problem]:
    """Every layer that is served, most important first. `Problem.layer` is the name that `parse` accepts."""
    return [make_problem(each.scheme, each.shape, each.tp) for each in _shapes_file().served]


def parse(name: str) -> Problem:
    """The layer named ``SCHEME:SHAPE`` or ``SCHEME:SHAPE@tpN``.

    Raises:
        MeasurementError: the name is malformed or unknown.
    """
    match = re.fullmatch(r"([^:@]+):([^:@]+)(?:@(.*))?", name)
    if match is None:
        raise MeasurementError(f"{name!r} is not a layer", "Write SCHEME:SHAPE, like mxfp4:gpt-oss-20b, or ...@tp2")
    return make_problem(match[1], match[2], 1 if match[3] is None else parse_ranks(match[3], name))


def parse_ranks(words: str, name: str) -> int:
    """The number in ``tpN``.

    Args:
        words: what follows the sign ``@``.
        name: the whole name, for messages.

    Raises:
        MeasurementError: there is no number, or it is below one.
    """
    match = re.fullmatch(r"tp(-?\d{1,9})", words, re.ASCII)
    if match is None:
        remedy = "Write @tpN for N tensor-parallel ranks"
        if words.lower().startswith(("ep", "dp")):
            remedy += "; for expert- and data-parallel ones give the model's config.json, with --ep and --dp"
        raise MeasurementError(f"@{words[:40]} is not a number of ranks", remedy, name)
    _check_ranks(int(match[1]), name)
    return int(match[1])


def _check_ranks(tp: int, name: str) -> None:
    if tp < 1:
        raise MeasurementError(f"{tp} ranks are not possible", "Give 1 or more", name)


def make_problem(scheme_name: str, shape_name: str, tp: int = 1) -> Problem:
    """A layer of a public model on one rank.

    Args:
        scheme_name: the format, see `SCHEME_NAMES`.
        shape_name: one of `names`.
        tp: number of tensor-parallel ranks.

    Raises:
        MeasurementError: a name is unknown, or the layer cannot be sharded over the ranks.
    """
    shape = _named(shape_name)
    if shape is None:
        remedy = f"{did_you_mean(shape_name, names())}Valid are {', '.join(names())}, or a model"
        raise MeasurementError(f"unknown shape {shape_name!r}", remedy)
    layer = f"{scheme_name}:{shape_name}" + (f"@tp{tp}" if tp != 1 else "")
    _check_ranks(tp, layer)
    activation = ACTIVATIONS[shape.activation]
    scheme = parse_scheme(scheme_name, activation)
    if left := shape.intermediate_size % tp:
        size = shape.intermediate_size
        rule = f"{size} features cannot be split over {tp} ranks ({size} mod {tp} = {left})"
        near = " or ".join(map(str, _nearest_ranks(scheme_name, shape, tp)))
        raise MeasurementError(rule, f"Give {near} ranks" if near else "", layer)
    if scheme.name != "mxfp4" and activation.interleaved:  # only gpt-oss's own format interleaves gate and up
        activation = ACTIVATIONS["swigluoai-halves"]
    problem = Problem(
        layer=layer,
        scheme=scheme,
        num_experts=shape.num_experts,
        local_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size // tp,
        activation=activation,
        has_bias=shape.has_bias,
        routing=Routing(method="renormalize"),
        parallel=Parallel(tp=tp),
    )
    if activation.interleaved:  # gpt-oss's loader splits between blocks
        problem = shard_by_blocks(problem)
    if reasons := split_reasons(problem):
        raise MeasurementError("; ".join(map(str, reasons)), where=layer)
    return problem


def _nearest_ranks(scheme_name: str, shape: ModelShape, tp: int) -> Iterator[int]:
    """The next smaller and the next larger number of ranks that can share a layer, as far as there are any."""
    size = shape.intermediate_size
    for counts in (range(min(tp - 1, size), 0, -1), range(tp + 1, size + 1)):
        for count in counts:
            if size % count == 0:
                try:
                    make_problem(scheme_name, shape.name, count)
                except MeasurementError:
                    continue
                yield count
                break


def parse_scheme(name: str, activation: Activation) -> Scheme:
    """The scheme of a format's name.

    Args:
        name: see `SCHEME_NAMES`.
        activation: the layer's; an interleaved one selects gpt-oss's packing of MXFP4.

    Raises:
        MeasurementError: the name is unknown.
    """
    if name == "mxfp8":
        return mx_scheme("mxfp8", "modelopt", "mxfp8")
    if name == "mxfp4":
        return mx_scheme("mxfp4", "gpt_oss" if activation.interleaved else "compressed-tensors")
    match = re.fullmatch(r"int([48])_(?:g([1-9]\d{0,4})|channel)", name)
    if match is None:
        remedy = f"Valid are {', '.join(SCHEME_NAMES)}, int4_channel, int8_channel and other group sizes"
        raise MeasurementError(f"unknown scheme {name!r}", remedy)
    return Scheme("wna16", int(match[1]), int(match[2] or -1), "compressed-tensors")


def scheme_name(problem: Problem) -> str:
    """The name of a layer's format, as `parse_scheme` accepts it."""
    scheme = problem.scheme
    if scheme.name != "wna16":
        return scheme.name
    return f"int{scheme.bits}_" + ("channel" if scheme.group_size == -1 else f"g{scheme.group_size}")


def to_json(problem: Problem) -> dict[str, Any]:
    """The fields of a layer that bench records and tables contain."""
    return {
        "name": problem.layer,
        "scheme": scheme_name(problem),
        "experts": problem.num_experts,
        "local_experts": problem.local_experts,
        "top_k": problem.top_k,
        "hidden": problem.hidden_size,
        "inner": problem.intermediate_size,
        "activation": str(problem.activation),
        "bias": problem.has_bias,
    }
