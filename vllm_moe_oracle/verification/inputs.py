"""Experts and tokens for a check: few, and chosen so that every fault of a kernel changes the output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .. import schemes
from ..backends import Tensors
from ..core.activations import spec_of
from ..core.problem import E8M0_MAX, Problem
from ..layouts.byte_views import stack_bytes

NUM_TOKENS = 16
"""Number of different tokens in a group of a check; calls with more repeat them."""

REPEATED_COUNTS = (1, 64, 2, 32, 4, 48, 3, 24, 8, 15, 5, 14, 6, 13, 10, 12, 11)
"""Numbers of tokens of repeated calls, in turn: those of CUDA graphs and of decode steps. With `CHECKED_TOKEN_COUNTS`
they are all up to 16, for each of which a kernel may have a variant of its own. Small ones and large ones alternate: a
kernel may keep something for the rows of the last call."""

CHECKED_TOKEN_COUNTS = (1, 7, 9, NUM_TOKENS, 33, 65)
"""Numbers of tokens of a check's calls: one, no multiples of 8, and more than tiles of 8, 16, 32 and 64 rows."""

ELSEWHERE_TOKEN = 12
"""The token all of whose experts other ranks have, where a check has such experts."""

EXPERTLESS_TOKEN = NUM_TOKENS // 2
"""The token without any expert, where a check has empty slots."""

LAST_TOKENS = (2, 9, 6, 3, 13, 7, 5, 14, 4, 10, 1, 11)
"""The last token of each call in turn, the only one of a call of one: none that is zero or has no expert here, whose
output hides a fault where there are no biases. All slots of the first one have experts of this rank."""

_EMPTY_SLOTS = {7: "first", 13: "last", 6: "all but last", 1: "all but first", 14: "odd"}
"""Which slots of a token hold no expert. None of these tokens is zero, and each keeps an expert of this rank: a kernel
that skips a token by one of its slots, stops there, or counts them is wrong there. Tokens with first products around 1
and 2 keep all experts, most of them: errors are smallest beside the bounds there."""

_REMOTE_SLOTS = {7: "last", 13: "first", 5: "all but last", 11: "all but first", 4: "odd"}
"""Likewise those with experts of other ranks. Of eight ranks one has about one of a token's eight experts."""

NUM_EXPERTS = 4
"""Number of experts in a check, or one more than top-k where that is larger: some calls leave an expert idle. Those of
a rank that has fewer than top-k stand in for others."""

WEIGHT_SUMS = (1.0, 0.5, 8.0, 2.5, 2.0**-6)
"""Sums of a token's routing weights, in turn. Models without normalization have less than 1, the less the more experts
there are. DeepSeek-V3 scales its own to 2.5, LongCat-Flash to 6. A kernel that normalizes or clamps them, or drops
small ones, is wrong."""

OUTLIER = 64.0
"""How many times as large as the root mean square of a token's other features those are that stand out. Activations of
real models have a few that are 50 to 100 times as large.

Those of a token have one magnitude, a power of two, which every format of activations holds exactly, whatever rule
chooses its scales. An error in one of them would move all columns alike, beyond every bound for independent errors.
"""

_OUTLIER_SHARE = 64
"""One feature of so many stands out, and at least `_MIN_OUTLIERS`."""

_MIN_OUTLIERS = 4

_HUGE = 2.0**17
"""Root mean square of first products beyond float16, whose largest number is 65504.

Only of activations without a limit: one that clamps turns into a step, and a rounding error that moves a product across
it is not small. No number leaves float16 there.
"""

_MOST_FLOAT16 = 2.0**15
"""Largest input of a float16 model: half of what the type holds."""

_SLOT_LEAD = 6.0
"""Factor by which one slot of a token leads; it is another slot for each token."""

_EVEN_TOKEN = 10
"""The token whose routing weights are all equal, as where a router has 16 bits."""

_ZERO_WEIGHT_TOKEN = 9
"""The token with a slot of weight 0 between others, as where a softmax underflows."""

_TWINS = (5, 6)
"""Neighboring tokens that are equal, with other experts: of one size, which all groups have."""

WHOLE_BLOCKS = 128
"""Tokens of the call of one token repeated are a multiple of it: each of its experts gets whole blocks of rows."""

MAX_HAND_OVER = 256
"""Largest number of tokens at which a switch between kernels is checked on both sides. One call with many tokens lies
above all larger ones."""

LARGE_CALL = 2048
"""Tokens of the call with many of them. Kernels for many tokens take over at 100 to 1100."""

MAX_LARGE_CALL = 4096
"""Most tokens of that call, where a hand-over is at more than `LARGE_CALL`. It needs no more memory than the engine's
own largest call, but allocates it while other layers may still be loaded."""

_HOST_PRODUCTS = 1 << 33
"""Multiplications of the first product in the call with many tokens, at most, where there is no GPU."""

_HASH_MULTIPLIERS = (0x21F0AAAD, 0x735A2D97)
"""Odd multipliers below 2**31 of a 32-bit hash in which each input bit flips each output bit about half of the time
(Wellons, "Hash Function Prospector", 2018)."""


def sample_experts(problem: Problem, count: int = 0) -> list[int]:
    """Local experts for a check: the first, the last, and some at even distances between them.

    Args:
        problem: the layer.
        count: number of experts to return; experts repeat where the rank has fewer. 0 for one more than a token is
            routed to, and `NUM_EXPERTS` at least; then experts repeat only where the rank has fewer than a token is
            routed to, for which another kernel may run than for fewer slots.
    """
    wanted = count or max(NUM_EXPERTS, problem.top_k + 1)
    distinct = min(problem.local_experts, wanted)
    steps = max(distinct - 1, 1)
    found = sorted({round(index * (problem.local_experts - 1) / steps) for index in range(distinct)})
    if not count:
        wanted = len(found) if len(found) >= problem.top_k else problem.top_k + 1
    return [found[index % len(found)] for index in range(wanted)]


def canonical_experts(problem: Problem, raw: Tensors, experts: list[int]) -> dict[str, Tensor]:
    """Canonical tensors of some experts of a layer, `[len(experts), ...]` each.

    Args:
        problem: the layer.
        raw: the loaded weights as the scheme's `read` returns them, `[local_experts, ...]` each.
        experts: local expert numbers, which may repeat.
    """
    scheme = schemes.module(problem.scheme.name)
    converted = {
        index: scheme.canonical_expert({name: each[index] for name, each in raw.items()}, problem)
        for index in dict.fromkeys(experts)
    }
    return {name: stack_bytes([converted[index][name] for index in experts]) for name in converted[experts[0]]}


def make_discriminating(experts: dict[str, Tensor], problem: Problem) -> None:
    """Changes a layer's weights so that every fault of a kernel is visible, whatever the model's own weights are.

    Biases get the size of the values that they are added to: a model's biases may be zero or too small to be missed.
    A random half of the scales doubles, and of the zero points grows by one: equal ones, as a model may have, hide a
    wrong order, and zero points in the middle hide that they are ignored.

    Args:
        experts: canonical tensors, `[experts, ...]` each; entries are replaced.
        problem: the layer.
    """
    for name in ("w13_scale", "w2_scale"):
        scales = experts[name]
        if scales.dtype == torch.uint8:
            experts[name] = scales.clamp(max=E8M0_MAX - 1) + _random_bits(scales)
        else:
            doubled = scales * (1 + _random_bits(scales)).to(scales.dtype)
            experts[name] = torch.where(doubled.isfinite(), doubled, scales)
    for name in ("w13_zero_point", "w2_zero_point"):
        if (zeros := experts.get(name)) is not None:
            largest = (1 << problem.scheme.bits) - 1
            experts[name] = torch.where(zeros < largest, zeros + _random_bits(zeros), zeros)
    if problem.has_bias:
        # `make_inputs` scales the first product to about 1.
        second = [each.square().sum(-1).mean().sqrt() for each in _dequantized(problem, experts, "w2")]
        for name, size in (("w13_bias", torch.ones_like(second[0])), ("w2_bias", torch.stack(second).amax())):
            experts[name] = (_random(experts[name], seed=2) * size).to(experts[name].dtype)


def call_counts(hand_overs: Iterable[int], most: int) -> list[int]:
    """Numbers of tokens of a check's calls, ascending.

    Args:
        hand_overs: last numbers of tokens of ranges in which a kernel, a tile configuration, runs.
        most: most tokens of a call.
    """
    both_sides = {size for edge in hand_overs for size in (edge, edge + 1) if edge <= MAX_HAND_OVER}
    return sorted(count for count in {*CHECKED_TOKEN_COUNTS, *both_sides} if 1 <= count <= most) or [1]


def large_call(own: Sequence[int], small: Sequence[int], edges: Iterable[int], most: int, host_values: int = 0) -> int:
    """Number of tokens of the call that checks the kernels for many tokens; 0 for no such call.

    A hand-over is the last number of tokens of a range in which one kernel runs. The call lies above all hand-overs of
    the served layer and of the small layer that is checked in its place, but not above the first hand-over that the
    small layer has and the served one has not.

    Args:
        own: hand-overs of the served layer's kernels, ascending.
        small: the same of the small layer. With fewer experts they are at fewer tokens.
        edges: other hand-overs, e.g. of measured tiles.
        most: largest number of tokens of a call.
        host_values: multiplications of the first product per token on a machine without a GPU, where the call is made
            only if there is a hand-over; 0 on a GPU.
    """
    least = max((each + 1 for each in (*own, *small[: len(own)], *edges) if each < most), default=0)
    if not host_values:
        least = max(least, min(LARGE_CALL, most))
    elif least * host_values > _HOST_PRODUCTS:
        return 0
    tokens = min(least, most, MAX_LARGE_CALL)
    if len(small) > len(own):
        tokens = min(tokens, small[len(own)])
    return tokens if tokens > MAX_HAND_OVER else 0


def rows_of_call(tokens: int, distinct: int, last: int) -> Tensor:
    """Which of some different tokens each row of a call is, `[tokens]` on the CPU.

    A call with more rows has all tokens, in an order in which no block of rows could stand for another, and not all
    equally often, so that experts have different numbers of rows.

    Args:
        tokens: rows of the call.
        distinct: number of different tokens.
        last: the last row's.
    """
    if tokens <= distinct:
        return (torch.arange(tokens, device="cpu") + last + 1 - tokens) % distinct
    generator = torch.Generator("cpu").manual_seed(4)
    rows = torch.randint(distinct, (tokens,), generator=generator, device="cpu")
    rows[:distinct] = torch.arange(distinct, device="cpu")
    rows[-1] = last
    return rows


def make_inputs(
    problem: Problem, experts: Tensors, empty_slots: bool = False, remote: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of a check, in groups of `NUM_TOKENS` tokens with the same routing.

    The first group has plain tokens, for calls of all sizes. The tokens of the second one have first products that are
    as large, but come from few features that stand out by `OUTLIER`: a conversion that saturates is wrong there, and a
    scale that the largest value does not set. The third one, in bfloat16 and float32, has the same tokens so large that
    sums leave float16: a kernel is wrong that computes bfloat16 in float16.

    The first and the last token of a group are zero, so that the output shows the biases alone. The other tokens give
    first products of different root mean squares, measured on the expert with the largest (a pruned expert may be all
    zeros): alpha and beta matter most around 1, the limit matters beyond itself. Two neighbors are equal and have other
    experts, one token has equal routing weights, and one has a weight of 0.

    Args:
        problem: the layer.
        experts: its canonical tensors, `[num_experts, ...]` each.
        empty_slots: some slots hold no expert (-1), `EXPERTLESS_TOKEN` has none at all.
        remote: number of experts of other ranks, as many as here or 0; `place_experts` has the ids. Some slots have
            them, and all of `ELSEWHERE_TOKEN`.

    Returns:
        `x` `[groups * NUM_TOKENS, hidden]` in the model's dtype; weights (float32) and ids (int32), `[..., top_k]`.
    """
    device = experts["w13"].device
    token, slot = torch.arange(NUM_TOKENS, device=device)[:, None], torch.arange(problem.top_k, device=device)[None, :]
    local = problem.num_experts - remote
    # Neighbors in both orders and others, or a kernel could take a token's experts for neighbors.
    strides = torch.tensor(distinct_strides(local, problem.top_k), device=device)
    ids = (token + slot * strides[token // local % len(strides)]) % local
    weights = _random(torch.empty(NUM_TOKENS, problem.top_k, device=device), seed=3).abs() + 0.5
    # All slots alike would hide a wrong weight of one of many.
    weights = torch.where(token % problem.top_k == slot, weights * _SLOT_LEAD, weights)
    weights = weights.masked_fill(token == _EVEN_TOKEN, 1.0)
    if problem.top_k > 1:
        weights[_ZERO_WEIGHT_TOKEN, (problem.top_k - 1) // 2] = 0.0
    sums = torch.tensor(WEIGHT_SUMS, dtype=torch.float32, device=device)
    weights *= sums[token % len(sums)] / weights.sum(-1, keepdim=True)
    empty = _slots_of(_EMPTY_SLOTS, ids)
    if remote:
        away = _slots_of(_REMOTE_SLOTS, ids, empty) | (token == ELSEWHERE_TOKEN)
        ids = torch.where(away, local + (token + slot) % remote, ids)
        ids = torch.cat(place_experts(local)).to(device)[ids]
    if empty_slots:
        ids = ids.masked_fill(empty | (token == EXPERTLESS_TOKEN), -1)
    x = _make_tokens(problem, experts)
    groups = len(x) // NUM_TOKENS
    return x.to(getattr(torch, problem.dtype)), weights.repeat(groups, 1), ids.to(torch.int32).repeat(groups, 1)


def add_strange_tokens(x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two more tokens behind those of `make_inputs`, with the experts of one of them.

    The first one, the *spoiled* token, has NaN, both infinities and ones for features, in turn, as padding and a bad
    request may. A sum over tokens spreads each of them, a maximum over tokens an infinity at least. The other one, the
    *weightless* token, has routing weights of 0: its output is 0 times finite numbers.

    Args:
        x: see `make_inputs`, as are the others.
        weights: likewise.
        ids: likewise.
    """
    alike = [LAST_TOKENS[0]] * 2
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0], dtype=x.dtype, device=x.device)
    spoiled = values[torch.arange(x.shape[1], device=x.device) % len(values)]
    return (
        torch.cat((x, spoiled.unsqueeze(0), x[alike[1:]])),
        torch.cat((weights, weights[alike[1:]], torch.zeros_like(weights[alike[1:]]))),
        torch.cat((ids, ids[alike])),
    )


def _slots_of(tokens: Mapping[int, str], ids: Tensor, taken: Tensor | None = None) -> Tensor:
    """Which slots some tokens have named, bool `[NUM_TOKENS, top_k]`; none of a token that would keep no other slot.

    Args:
        tokens: names of slots by token.
        ids: `[NUM_TOKENS, top_k]`.
        taken: slots that the token does not keep in any case, likewise; None for none.
    """
    slot = torch.arange(ids.shape[1], device=ids.device)
    first, last = slot == 0, slot == len(slot) - 1
    named = {"first": first, "last": last, "all but first": ~first, "all but last": ~last, "odd": slot % 2 == 1}
    found = torch.zeros_like(ids, dtype=torch.bool)
    for token, name in tokens.items():
        found[token] = named[name]
    lost = found if taken is None else found | taken
    return found & ~lost.all(-1, keepdim=True)


def distinct_strides(count: int, slots: int) -> list[int]:
    """Distances between the experts of neighboring slots, of `count` in a circle, with which a token's experts are
    different; the first is 1, and the second -1 if that is another."""
    found = [stride for stride in range(1, count) if count // math.gcd(stride, count) >= slots]
    return [*found[:1], *found[:0:-1]] or [1]


def spread_order(count: int, generator: torch.Generator) -> list[int]:
    """All of `count` experts, in an order in which neighbors are far apart or near: by powers of two, of which a bit
    mask may be too short for both, and by random distances."""
    powers = [1 << bit for bit in reversed(range(count.bit_length()))]
    randoms = torch.randint(max(count, 1), (count,), generator=generator, device="cpu").tolist()
    found, left = [], dict.fromkeys(range(count))
    place = randoms[0] if count else 0
    for index in range(count):
        place = next(each % count for each in range(place, place + count) if each % count in left)
        del left[place]
        found.append(place)
        place += randoms[index] if index % 2 else powers[index // 2 % len(powers)]
    return found


def place_experts(count: int) -> tuple[Tensor, Tensor]:
    """Global ids of the experts of a small layer with as many of other ranks, int64 `[count]` on the CPU: this rank's
    and the others'.

    They alternate, and this rank's descend: a kernel that takes a rank's experts for neighbors in ascending order, as
    they are until vLLM moves them, computes with wrong ones. The first id and the last one are this rank's, so that a
    kernel that looks up -1 finds an expert.
    """
    here = torch.arange(0, 2 * count, 2, device="cpu").flip(0)
    here[0] += count > 1
    away = torch.ones(2 * count, dtype=torch.bool, device="cpu").index_fill(0, here, False)
    return here, away.nonzero().flatten()


def _make_tokens(problem: Problem, experts: Tensors) -> Tensor:
    """The tokens of all groups, float32 `[groups * NUM_TOKENS, hidden]`; see `make_inputs`."""
    device, hidden = experts["w13"].device, problem.hidden_size
    plain = _random(torch.empty(NUM_TOKENS, hidden, device=device), seed=0)
    order = _random(plain, seed=5).argsort(-1)
    outliers = order[:, : min(max(hidden // _OUTLIER_SHARE, _MIN_OUTLIERS), hidden)]
    spiky = plain.scatter(-1, outliers, plain.gather(-1, outliers).sign() * OUTLIER)
    both = torch.cat((plain, spiky))
    squares = torch.stack([(both @ each.T).square().mean(-1) for each in _dequantized(problem, experts, "w13")])
    largest = squares[:, :NUM_TOKENS].mean(-1).amax().sqrt()
    largest_spiky = squares[:, NUM_TOKENS:].amax(0).sqrt()
    activation = problem.activation
    bounds = (activation.alpha or 0.0, activation.beta or 0.0) if spec_of(activation).bounds_outputs else ()
    limit = max(bounds, default=0.0) or activation.limit or 2.0
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, limit, limit, 2 * limit], dtype=torch.float32, device=device)
    sizes = torch.cat((sizes, sizes.roll(-1)))  # the last token is zero, too
    x = plain * (sizes / torch.where(largest > 0, largest, 1.0)).unsqueeze(-1)
    scales = sizes / torch.where(largest_spiky > 0, largest_spiky, 1.0)
    if problem.dtype == "float16":
        scales = scales.clamp(max=_MOST_FLOAT16 / OUTLIER)
    spiky *= _power_of_two(scales).unsqueeze(-1)
    for each in (x, spiky):
        each[_TWINS[1]] = each[_TWINS[0]]
    if bounds or activation.limit is not None or problem.dtype == "float16":
        return torch.cat((x, spiky))
    return torch.cat((x, spiky, spiky * _HUGE))


def _power_of_two(values: Tensor) -> Tensor:
    """The largest power of two that is no larger, for float32 values that are not negative; 0 for 0."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa > 0).to(torch.float32) / 2, exponent)


def _random(like: Tensor, seed: int) -> Tensor:
    """Normally distributed float32 values of a tensor's shape, on its device; equal on every device."""
    # Device and dtype are explicit: while vLLM loads a model, torch's defaults are the model's.
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device)


def _random_bits(like: Tensor) -> Tensor:
    """Zeros and ones, uint8, of a tensor's shape, computed on its device; equal on every device.

    A hash of the element's index: drawing millions of scale bits on the host and copying them takes as long as the
    rest of a check. The 32-bit hash runs in int64, where no product overflows.
    """
    values = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    for factor in _HASH_MULTIPLIERS:
        values ^= values >> 16
        values = values.mul_(factor).bitwise_and_(0xFFFFFFFF)
    return (values >> 16).bitwise_and_(1).to(torch.uint8).view(like.shape)


def _dequantized(problem: Problem, experts: Tensors, which: str) -> Iterator[Tensor]:
    """One weight matrix of each expert in turn, float32 `[N, K]`."""
    scheme = schemes.module(problem.scheme.name)
    for index in range(experts[which].shape[0]):
        yield scheme.dequantize_expert({name: tensor[index] for name, tensor in experts.items()}, which)
