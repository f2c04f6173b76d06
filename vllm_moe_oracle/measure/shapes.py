"""Layers of public models as problems to measure, and names for them: ``mxfp4:gpt-oss-20b``, ``int4_g32:kimi-k2@tp8``.

The models' sizes, and the formats in which they are served, are data: ``profiles/shapes.json``, in the order of their
importance.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from ..errors import MeasurementError
from ..oracle.planner import group_reasons, in_whole_blocks, packing_reasons
from ..oracle.problem import MX_BLOCK, Activation, Parallel, Problem, Routing, Scheme

FILE = Path(__file__).parents[1] / "profiles" / "shapes.json"

ACTIVATIONS = {
    "silu": Activation("silu"),
    "silu-limit-10": Activation("silu", limit=10.0),
    "relu2": Activation("relu2", gated=False),
    # gpt-oss alternates rows of gate and up; MiniMax-M3 does not.
    "swigluoai": Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, interleaved=True),
    "swigluoai-halves": Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0),
}

SCHEMES = ("mxfp8", "mxfp4", "int4_g128", "int4_g32", "int8_g128")
"""Names of the formats that are served most; any ``int<bits>_g<group>`` and ``int<bits>_channel`` can be asked for."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of a model's MoE layers over all ranks.

    Attributes:
        name: what it is called here.
        model: where it comes from.
        experts: routed experts.
        top_k: experts per token.
        hidden: features of the hidden state.
        inner: features between the products.
        activation: a key of `ACTIVATIONS`.
        bias: both products add a bias.
    """

    name: str
    model: str
    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str
    bias: bool = False


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A format and a tensor-parallel size in which a shape is served."""

    shape: str
    scheme: str
    tp: int


class _Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: str
    shapes: tuple[Shape, ...]
    served: tuple[Served, ...]


@cache
def _data() -> _Data:
    return msgspec.json.decode(FILE.read_bytes(), type=_Data)


def names() -> list[str]:
    """Names of the shapes."""
    return [shape.name for shape in _data().shapes]


def served() -> list[Problem]:
    """Every layer of the list, the most important first; each problem's layer is its name here."""
    return [problem(each.scheme, each.shape, each.tp) for each in _data().served]


def parse(cell: str) -> Problem:
    """The layer behind ``SCHEME:SHAPE`` or ``SCHEME:SHAPE@tpN``.

    Raises:
        MeasurementError: it is none.
    """
    match = re.fullmatch(r"([^:@]+):([^:@]+)(?:@tp(\d{1,4}))?", cell)
    if match is None:
        raise MeasurementError(f"{cell!r} is no layer", "Write SCHEME:SHAPE, like mxfp4:gpt-oss-20b, or ...@tp2")
    return problem(match[1], match[2], int(match[3] or 1))


def problem(scheme: str, shape: str, tp: int = 1) -> Problem:
    """A layer of a public model on one rank; its `layer` is the name by which `parse` finds it.

    Args:
        scheme: the format, see `SCHEMES`.
        shape: a name of `names`.
        tp: tensor-parallel ranks.

    Raises:
        MeasurementError: a name is unknown, or the ranks cannot cut the layer.
    """
    found = next((each for each in _data().shapes if each.name == shape), None)
    if found is None:
        close = difflib.get_close_matches(shape, names(), n=1)
        guess = f"Did you mean {close[0]}? " if close else ""
        raise MeasurementError(f"unknown shape {shape!r}", f"{guess}Valid are {', '.join(names())}, or a model")
    where = f"{scheme}:{shape}" + (f"@tp{tp}" if tp > 1 else "")
    if tp < 1 or found.inner % tp:
        raise MeasurementError(f"{found.inner} features cannot be cut into {tp} parts", where=where)
    activation = ACTIVATIONS[found.activation]
    made = scheme_of(scheme, activation)
    if made.name != "mxfp4" and activation.interleaved:  # only gpt-oss's own format has rows that alternate
        activation = ACTIVATIONS["swigluoai-halves"]
    layer = Problem(
        layer=where,
        scheme=made,
        num_experts=found.experts,
        local_experts=found.experts,
        top_k=found.top_k,
        hidden_size=found.hidden,
        intermediate_size=found.inner // tp,
        activation=activation,
        has_bias=found.bias,
        routing=Routing(method="renormalize"),
        parallel=Parallel(tp=tp),
    )
    if activation.interleaved:  # gpt-oss's loader cuts between blocks
        layer = in_whole_blocks(layer)
    if reasons := group_reasons(layer) + packing_reasons(layer):
        raise MeasurementError("; ".join(map(str, reasons)), where=where)
    return layer


def scheme_of(name: str, activation: Activation) -> Scheme:
    """A format by its name.

    Raises:
        MeasurementError: there is none of that name.
    """
    if name == "mxfp8":
        return Scheme("mxfp8", 8, MX_BLOCK, "modelopt", activations="mxfp8")
    if name == "mxfp4":
        return Scheme("mxfp4", 4, MX_BLOCK, "gpt_oss" if activation.interleaved else "compressed-tensors")
    match = re.fullmatch(r"int([48])_(?:g(\d{1,5})|channel)", name)
    if match is None:
        remedy = f"Valid are {', '.join(SCHEMES)}, int4_channel, int8_channel and other groups"
        raise MeasurementError(f"unknown scheme {name!r}", remedy)
    return Scheme("wna16", int(match[1]), int(match[2] or -1), "compressed-tensors")


def scheme_name(problem: Problem) -> str:
    """The name by which `scheme_of` finds a problem's format."""
    scheme = problem.scheme
    if scheme.name != "wna16":
        return scheme.name
    return f"int{scheme.bits}_" + ("channel" if scheme.group_size == -1 else f"g{scheme.group_size}")


def to_json(problem: Problem) -> dict[str, Any]:
    """A layer in a few fields, for records."""
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
