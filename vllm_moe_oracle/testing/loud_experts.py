"""Weights and tokens that hide no row, scale, zero point or bias, and the comparison of outputs with the reference.

**Weights.** No code is near its zero, scales are within a factor of two of each other, and biases are as large as what
they are added to: without one of them, or with another one in its place, a product is off by a good part of itself.
Codes of 8 bits stay near their zero point, which would not matter beside them.

**Tokens.** Each has one expert, and 16 neighboring input features; the others are zero. So each of its first products
depends on one scale or two, and is wrong by as much as they are. One of them in 128 moves a token's output by a tenth
of itself. The features of a token have one sign, half of the tokens the other one: a zero point moves all products of a
row into one direction, and no gate is closed for all tokens.

**Bounds** are those of the check at load (`vllm_moe_oracle.verification.bounds`), for each block of 32 columns of a
token, each column over 32 tokens with the same features, and each token. They follow from the formats' rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .. import schemes
from ..backends import Backend
from ..core.problem import E8M0_BIAS, Device, Problem
from ..verification import bounds, inputs
from ..verification.tolerances import rounding_error
from .cases import few_experts

FEW_EXPERTS = 4

_RUN = 16
"""Neighboring input features that a token has."""

_TOKENS = 32
"""Tokens with the same features."""

_SIZES = ((256, 64), (256, 128))
"""Hidden and intermediate sizes of loud experts; the first that the backend takes. The fewer rows, the louder is each
one."""

_FIRST_PRODUCTS = 2.0
"""Their root mean square, where activations are curved."""


class Case(NamedTuple):
    """A call and its reference.

    Attributes:
        layer: with the precision of activations that the backend uses, and as many experts as there are here.
        experts: canonical tensors, `[experts, ...]` each.
        x: `[M, hidden]` in the model's dtype.
        weights: `[M, top_k]` float32.
        ids: `[M, top_k]` int32; -1 for a slot without an expert.
        reference: the expected output and its bounds.
        sets: rows of tokens that are compared together, by what they have in common.
        remedy: what to look at where only some of the sets are wrong.
    """

    layer: Problem
    experts: Mapping[str, Tensor]
    x: Tensor
    weights: Tensor
    ids: Tensor
    reference: bounds.Reference
    sets: dict[str, Tensor]
    remedy: str


def small_layer(backend: Backend, layer: Problem, device: Device, loud: bool) -> Problem:
    """The layer with few experts, all on one rank, and for loud ones of a small size, as far as the backend takes
    them."""
    parallel = dataclasses.replace(layer.parallel, ep=1)
    few = dataclasses.replace(layer, num_experts=FEW_EXPERTS, local_experts=FEW_EXPERTS, parallel=parallel)
    sized = [
        dataclasses.replace(few, hidden_size=hidden, intermediate_size=inner)
        for hidden, inner in _SIZES
        if loud and inner % layer.scheme.group_size == 0  # -1, too
    ]
    whole = dataclasses.replace(layer, num_experts=layer.local_experts, parallel=parallel)
    return next((each for each in (*sized, few) if not backend.check(each, device).reasons), whole)


def usual_cases(backend: Backend, layer: Problem) -> list[Case]:
    """Calls with the tokens of the check at load, on random weights; see `verification.inputs.make_inputs`.

    Args:
        backend: whose outputs are compared.
        layer: from `small_layer`.
    """
    experts = dict(few_experts(layer, layer.num_experts))
    inputs.make_discriminating(experts, layer)
    exact, found = layer.with_activations(backend.activations(layer)), []
    for empty_slots in (False, True):
        x, weights, ids = (
            each[: 2 * inputs.NUM_TOKENS] for each in inputs.make_inputs(exact, experts, empty_slots=empty_slots)
        )
        rounding = rounding_error(backend, layer)
        reference = bounds.reference_output(experts, exact, rounding, x, weights, ids, groups=2)
        last = inputs.LAST_TOKENS[0]
        what = "tokens with empty slots (expert id -1)" if empty_slots else "tokens with top-k experts"
        sets = {f"{len(x)} {what}": torch.arange(len(x)), f"token {last} of {what}": torch.tensor([last])}
        remedy = (
            "the function that `build_experts` makes: gate and up, the activation, biases, which tokens an expert gets "
            "with which routing weights, and slots of -1"
        )
        found.append(Case(exact, experts, x, weights, ids, reference, sets, remedy))
    return found


def loud_case(backend: Backend, layer: Problem, seed: int = 0) -> Case:
    """A call in which one wrong scale, zero point or bias shows; see the module.

    Args:
        backend: whose outputs are compared.
        layer: from `small_layer`.
        seed: of weights and tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    experts = _loud_experts(layer, generator)
    exact = layer.with_activations(backend.activations(layer))
    scheme = schemes.module(layer.scheme.name)
    hidden, runs = layer.hidden_size, layer.hidden_size // _RUN
    tokens = layer.num_experts * runs * _TOKENS
    x = torch.zeros(layer.num_experts, runs, _TOKENS, hidden)
    order = experts.get("w13_order", torch.arange(hidden).expand(layer.num_experts, hidden)).long()
    values = torch.randn(layer.num_experts, runs, _TOKENS, _RUN, generator=generator).abs()
    values[:, :, ::2].neg_()
    features = order.view(layer.num_experts, runs, 1, _RUN).expand_as(values)
    x.scatter_(-1, features, values)
    w13 = [scheme.dequantize_expert(_one(experts, index), "w13") for index in range(layer.num_experts)]
    squares = torch.stack(
        [(each.flatten(0, 1) @ matrix.T).square().mean() for each, matrix in zip(x, w13, strict=True)]
    )
    x = (x.view(tokens, hidden) * (_FIRST_PRODUCTS / squares.mean().sqrt())).to(getattr(torch, layer.dtype))
    expert, slot = torch.arange(tokens) // (runs * _TOKENS), torch.arange(tokens) % layer.top_k
    ids = torch.full((tokens, layer.top_k), -1, dtype=torch.int32)
    ids[torch.arange(tokens), slot] = expert.int()
    weights = torch.ones(tokens, layer.top_k)
    reference = bounds.reference_output(experts, exact, rounding_error(backend, layer), x, weights, ids)
    every = torch.arange(tokens).view(layer.num_experts, runs, _TOKENS)
    sets = {
        f"tokens of expert {index} with features of columns {run * _RUN} to {(run + 1) * _RUN - 1} of w13": rows
        for index, own in enumerate(every)
        for run, rows in enumerate(own)
    }
    sets |= {f"all tokens of expert {index}": own.flatten() for index, own in enumerate(every)}
    remedy = (
        "w13 in these columns (weights, scales, zero points) if only tokens with a few features are wrong; at rows of "
        "w2 (with scales, zero points, biases) if a few output columns are, of all tokens of an expert; if all are, at "
        "the biases of w13, and at which expert's tensors are read"
    )
    return Case(exact, experts, x, weights, ids, reference, sets, remedy)


def faults(found: Tensor, case: Case) -> str:
    """What of an output is beyond its bounds, in words, with numbers; "" for nothing.

    Args:
        found: `[M, hidden]`, for the tokens of the case.
        case: the call.
    """
    missing = found.isnan().sum(-1).nonzero().flatten().tolist()
    if missing:
        return (
            f"{int(found.isnan().sum())} of {found.numel()} values are NaN, first those of token {missing[0]} with the "
            f"expert ids {case.ids[missing[0]].tolist()}. `out` holds NaN before the call, and must be overwritten "
            "completely, also for tokens without an expert"
        )
    rows = list(case.sets.values())
    excess = bounds.excesses([found[each] for each in rows], case.reference, rows).nan_to_num(nan=torch.inf)
    wrong = int((excess > 1).sum())
    if not wrong:
        return ""
    worst, names = int(excess.argmax()), list(case.sets)
    own = rows[worst]
    _, columns, _ = bounds.ratios(found[own], case.reference, own)
    off = (columns.nan_to_num(nan=torch.inf) > 1).nonzero().flatten().tolist()
    which = f" ({', '.join(map(str, off[:4]))}{', ...' if len(off) > 4 else ''})" if off else ""
    return (
        f"of {names[worst]}, {bounds.describe_excess(found[own], case.reference, own)} (a relative error of "
        f"{float(case.reference.tolerance):.2g} of a block at most). Over these tokens {len(off)} of {len(columns)} "
        f"output columns are wrong{which}; {wrong} of {len(rows)} sets of tokens are. Look at {case.remedy}"
    )


def _one(experts: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    return {name: tensor[index] for name, tensor in experts.items()}


def _loud_experts(layer: Problem, generator: torch.Generator) -> dict[str, Tensor]:
    """Canonical tensors of the layer's experts, `[experts, ...]` each; see the module."""

    def integers(like: Tensor, most: int) -> Tensor:
        return torch.randint(most, like.shape, dtype=torch.uint8, generator=generator)

    made = dict(few_experts(layer, layer.num_experts))
    for name in ("w13", "w2"):
        scales = made[f"{name}_scale"]
        if scales.dtype == torch.uint8:
            made[f"{name}_scale"] = integers(scales, 4) // 3 + (E8M0_BIAS - 3)
        else:
            spread = torch.rand(scales.shape, generator=generator) * 0.4 + 0.8
            made[f"{name}_scale"] = (spread * scales.float().mean()).to(scales.dtype)
        if f"{name}_zero_point" in made:
            middle = 1 << layer.scheme.bits - 1
            made[f"{name}_zero_point"] = integers(scales, 3) + (middle - 1)
        made[name] = _loud_codes(layer, integers(made[name].view(torch.uint8), 256)).view(made[name].dtype)
    if layer.has_bias:
        scheme = schemes.module(layer.scheme.name)
        w2 = scheme.dequantize_expert(_one(made, 0), "w2")
        sizes = {"w13_bias": _FIRST_PRODUCTS / 2, "w2_bias": _FIRST_PRODUCTS * float(w2.square().sum(-1).mean().sqrt())}
        for name, size in sizes.items():
            signs = integers(made[name], 2).float() * 2 - 1
            if name == "w13_bias":
                signs[:, : layer.intermediate_size] = 1.0  # gates are open
            values = signs * (torch.rand(signs.shape, generator=generator) / 2 + 0.5) * size
            made[name] = values.to(made[name].dtype)
    return made


def _loud_codes(layer: Problem, drawn: Tensor) -> Tensor:
    """Random codes that are not near zero, uint8, of random bytes: e4m3 from 0.5 to 1.875, e2m1 from 2 to 6, integers
    4 to 8 from the middle, all with both signs."""
    if layer.scheme.name == "mxfp8":
        return drawn & 0x8F | 0x30
    if layer.scheme.name == "mxfp4":
        return drawn | 0x44
    nibbles = drawn & 0xBB | (drawn & 0x88) >> 1  # the two upper bits of each are equal
    return nibbles if layer.scheme.bits == 4 else (nibbles & 0x0F) + 120
