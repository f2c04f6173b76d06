"""The self-check: a few tokens through the chosen kernel and through the dequantised reference, before a layer is used.

A few experts are taken from the loaded weights and converted into a layer of their own, so that the check needs no
second copy, the loaded weights stay as they are, and another backend can still be taken when this one fails.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import schemes
from ..backends import Backend, Tensors
from ..backends.emulation import forward
from ..errors import CheckpointError, LifecycleError, NoBackendError, SelfCheckError
from ..oracle.decision import Plan, Reason
from ..oracle.problem import Parallel, Problem, Routing
from ..oracle.registry import Registry, default_registry
from . import agreement, routing, storage
from .builder import VllmBuilder
from .choice import Chooser, remaining, take

if TYPE_CHECKING:
    from ..compat.adapter import Adapter

logger = logging.getLogger("vllm.moe_oracle")

TOKENS = 8
_LARGEST_SCALE = 254
"""The e8m0 code of 2**127; 255 is NaN."""
EXPERTS = 4
"""Experts that are tried, or as many as a token chooses where that is more."""

_ROUNDINGS = 5
"""Places where a kernel may round to the model's dtype on the way from input to output: a dequantised weight, the first
product, the activation, the second product, the sum over experts."""
_UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
_FORMAT_ERROR = {"16bit": 0.0, "mxfp8": 2.0**-4, "fp8": 2.0**-4, "fp8_token": 2.0**-4, "mxfp4": 2.0**-2,
                 "int8": 2.0**-7}  # fmt: skip
"""Relative error of one rounding in the format of the activations: kernel and reference round values that differ in the
last bit to neighbouring codes."""
_FLOAT32_SUMS = 1e-4
"""Two float32 sums over some thousand terms in different orders: 2**-24 times the square root of their number, with
room for cancellation. Only matters to float32 models."""


_HASH = (0x21F0AAAD, 0x735A2D97)
"""Odd numbers below 2**31, of a hash of 32 bits that was found by search: each bit of its input changes each of its
output about every other time (Wellons, "Hash Function Prospector", 2018)."""


Logits = tuple[Tensor, Tensor | None, float]
"""Router logits `[M, E]`, correction bias `[E]` or none, scaling factor."""


@dataclass(frozen=True, slots=True)
class Result:
    """What the check found.

    Attributes:
        error: largest relative L2 error over the tokens.
        tolerance: what the formats allow.
        seconds: what it took, compilation included.
        skipped: why nothing was compared; "" when something was.
    """

    error: float
    tolerance: float
    seconds: float
    skipped: str = ""

    @property
    def passed(self) -> bool:
        """Whether the kernel agrees with the reference. NaN does not."""
        return bool(self.skipped) or self.error <= self.tolerance

    def __str__(self) -> str:
        if self.skipped:
            return f"not checked: {self.skipped}"
        return f"relative error {self.error:.2e}, allowed {self.tolerance:.2e}; took {self.seconds:.2f} s"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks found together.

    Attributes:
        said: what was found, or what the backend raised; of several ranks those that it failed on.
        passed: it is right on every rank.
        left: backends that every rank could take instead, best first.
    """

    said: str
    passed: bool
    left: tuple[str, ...]


def tolerance(backend: Backend, problem: Problem) -> float:
    """Largest relative L2 error of a token's output that the formats explain."""
    # A kernel that routes may round its weights, too.
    rounding = (_ROUNDINGS + backend.monolithic) * _UNIT_ROUNDOFF[problem.dtype]
    return rounding + _FORMAT_ERROR[backend.activations(problem)] + _FLOAT32_SUMS


def sample(problem: Problem, needed: int = 0) -> list[int]:
    """Local experts that are tried: the first, the last, and some evenly between.

    Args:
        problem: the layer.
        needed: how many there must be, some of them twice where the rank has fewer; 0 for as many as a check of kernels
            that are given routed tokens takes.
    """
    count = min(problem.local_experts, needed or max(EXPERTS, problem.top_k))
    if count == 1:
        return [0] * max(needed, 1)
    found = sorted({round(index * (problem.local_experts - 1) / (count - 1)) for index in range(count)})
    return [found[index % len(found)] for index in range(max(needed, len(found)))]


def run(backend: Backend, problem: Problem, plan: Plan, raw: Tensors, moe: Any, release: Adapter) -> Result:
    """Compares a backend's kernel with the reference on a few experts of a layer.

    Args:
        backend: whose conversion and kernel are tried.
        problem: the layer.
        plan: the backend's plan for it.
        raw: the layer's loaded weights as the scheme's `read` found them, `[local_experts, ...]` each; not modified.
        moe: vLLM's `FusedMoEConfig` of the layer.
        release: vLLM's side.

    Raises:
        CheckpointError: the weights are such that the reference itself is NaN or infinite.
    """
    start = time.perf_counter()
    limit = tolerance(backend, problem)
    routes = backend.monolithic
    if routes and routing.recipe(problem.routing) is None:
        return Result(0.0, limit, 0.0, skipped=f"no reference for routing by {problem.routing.method}")
    picked = sample(problem, routing.enough_experts(problem, backend.limits.experts_multiple) if routes else 0)
    experts = canonical(problem, raw, picked)
    make_telling(experts, problem)
    small = dataclasses.replace(
        problem,
        num_experts=len(picked),
        local_experts=len(picked),
        top_k=min(problem.top_k, len(picked)),
        parallel=Parallel(tp=problem.parallel.tp),
        routing=problem.routing if routes else Routing(),
        lora=False,
        eplb=False,
    )
    # The reference sees activations in the precision in which this backend consumes them.
    reference = dataclasses.replace(
        small, scheme=dataclasses.replace(small.scheme, activations=backend.activations(problem))
    )
    x, weights, ids = tokens(reference, experts)
    logits: Logits | None = None
    if routes:
        logits = routed = routing.telling(small.routing, small.top_k, TOKENS, len(picked), release.logits_dtype(moe))
        weights, ids = (each.to(x.device) for each in routing.route(small.routing, small.top_k, *routed))
    expected = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    forward(experts, reference, expected, x, weights, ids)
    _refuse_to_judge(expected, picked, problem)
    made, layer, tensors = _converted(backend, small, plan, experts, moe, release)
    if logits is None:
        actual = release.run_alone(made, layer, tensors, x, weights, ids)
    else:
        actual = release.run_alone_routing(made, tensors, x, small, *logits)
    error = token_error(actual, expected)
    return Result(error, limit, time.perf_counter() - start)


def _refuse_to_judge(expected: Tensor, experts: list[int], problem: Problem) -> None:
    """Raises where what kernels are compared with is no number: all of them would fail, none for its own fault."""
    bad = int((~torch.isfinite(expected)).any(-1).sum())
    if bad:
        rule = (
            f"the float32 reference is NaN or infinite for {bad} of {len(expected)} tokens on the weights of local "
            f"experts {', '.join(map(str, dict.fromkeys(experts)))}: no backend can be judged by it"
        )
        # Inputs are made for the weights' size; of tiny ones float16 does not hold them.
        which = f"some of its weights are no numbers, or so small or large that {problem.dtype} does not reach as far"
        raise CheckpointError(rule, f"The checkpoint is damaged: {which}", problem.layer)


def canonical(problem: Problem, raw: Tensors, experts: list[int]) -> dict[str, Tensor]:
    """Canonical tensors of a few experts of a layer, `[len(experts), ...]` each, from those that `read` found."""
    scheme = schemes.module(problem.scheme.name)
    made = [scheme.canonical_expert({name: each[index] for name, each in raw.items()}, problem) for index in experts]
    # As bytes: not every type of 8 bits can be stacked.
    return {
        name: torch.stack([one[name].view(torch.uint8) for one in made]).view(made[0][name].dtype) for name in made[0]
    }


def make_telling(experts: dict[str, Tensor], problem: Problem) -> None:
    """Changes a layer's weights so that every fault of a kernel shows, whatever the model's own are like.

    Biases become as large as what they are added to: a model's may be zeros, or too small to be missed. Every other
    e8m0 scale, at random, becomes one exponent larger: a model's may be all alike, so that their order did not matter.

    Args:
        experts: canonical tensors, `[experts, ...]` each; entries are replaced.
        problem: the layer.
    """
    for name in ("w13_scale", "w2_scale"):
        if experts[name].dtype == torch.uint8:
            experts[name] = experts[name].clamp(max=_LARGEST_SCALE - 1) + _random_bits(experts[name])
    if problem.has_bias:
        # Of the first product, for inputs as `tokens` makes them; a part of the second, for activations around 1: all
        # of it would drown what alpha does.
        second = max(each.square().sum(-1).mean().sqrt().item() for each in _dequantised(problem, experts, "w2"))
        sizes = {"w13_bias": 1.0, "w2_bias": 0.3 * second}
        for name, size in sizes.items():
            experts[name] = (_random(experts[name], seed=2) * size).to(experts[name].dtype)


def tokens(problem: Problem, experts: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs that show every fault: `x` `[TOKENS, hidden]`, weights and ids `[TOKENS, top_k]`.

    The first token is zero, so that its output is what the biases make of it. The others lead to first products of
    different sizes (root mean square, of the expert whose are largest: one may be all zeros, as pruned ones are):
    around 1 alpha and beta matter most, beyond the limit the limit does.
    """
    device = experts["w13"].device
    x = _random(torch.empty(TOKENS, problem.hidden_size, device=device), seed=0)
    largest = max((x @ each.T).square().mean().sqrt().item() for each in _dequantised(problem, experts, "w13"))
    activation = problem.activation
    bounds = (activation.alpha or 0.0, activation.beta or 0.0) if activation.name == "situ" else ()
    limit = max(bounds, default=0.0) or activation.limit or 2.0
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, limit, limit, 2 * limit], dtype=torch.float32, device=device)
    x = x * (sizes / (largest or 1.0)).unsqueeze(-1)
    first, choice = torch.arange(TOKENS, device=device)[:, None], torch.arange(problem.top_k, device=device)[None, :]
    ids = (first + choice) % problem.num_experts
    weights = _random(torch.empty(TOKENS, problem.top_k, device=device), seed=3).abs() + 0.5
    weights /= weights.sum(-1, keepdim=True)
    return x.to(getattr(torch, problem.dtype)), weights, ids.to(torch.int32)


def _random(like: Tensor, seed: int) -> Tensor:
    """Normal float32 numbers of a tensor's shape, on its device; the same on every device."""
    # Everything is named: while it loads a model, vLLM sets torch's default device and dtype to the model's.
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(like.device)


def _random_bits(like: Tensor) -> Tensor:
    """Zeros and ones in uint8, of a tensor's shape, made on its device; the same on every device.

    A hash of the element's number, for the scales of a few experts are millions: drawn on the host, and sent over, they
    took as long as the rest of a check. 32 bits at a time in integers of 64, where no product overflows.
    """
    values = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    for factor in _HASH:
        values ^= values >> 16
        values = values.mul_(factor).bitwise_and_(0xFFFFFFFF)
    return (values >> 16).bitwise_and_(1).to(torch.uint8).view(like.shape)


def _dequantised(problem: Problem, experts: Tensors, which: str) -> Iterator[Tensor]:
    """One weight matrix of each expert in turn, float32 `[N, K]`."""
    scheme = schemes.module(problem.scheme.name)
    for index in range(experts[which].shape[0]):
        yield scheme.dequantise_expert({name: tensor[index] for name, tensor in experts.items()}, which)


def token_error(actual: Tensor, expected: Tensor) -> float:
    """Largest relative L2 error over tokens; a token whose expected output is zero must be zero. NaN stays NaN."""
    difference = (actual.float() - expected.float()).norm(dim=-1)
    size = expected.float().norm(dim=-1)
    relative = torch.where(size > 0, difference / size.clamp(min=1e-30), difference)
    return relative.max().item()


def _converted(
    backend: Backend, problem: Problem, plan: Plan, experts: Tensors, moe: Any, release: Adapter
) -> tuple[Any, nn.Module, Tensors]:
    """A layer of its own that holds only these experts: what the backend built for it, its module, kernel tensors."""
    layer = nn.Module()
    for name, tensor in experts.items():
        storage.replace(layer, name, tensor.clone())
    own = {name: name for name in experts}
    names = storage.convert_in_place(layer, own, lambda expert: backend.convert(expert, problem, plan), backend.dense)
    tensors = {name: getattr(layer, parameter).data for name, parameter in names.items()}
    config = release.lone_config(moe, problem)
    quant_config = release.quant_config(problem, tensors)
    builder = VllmBuilder(release, config, quant_config, serves=False)
    return backend.experts(tensors, problem, plan, builder), layer, tensors


_Group = tuple[Problem, str]
_results: dict[_Group, Verdict] = {}
"""What all ranks found for each problem and backend while weights were loaded."""


def forget() -> None:
    """Ends a load: what was found does not hold for other weights, be they another model's or reloaded ones."""
    _results.clear()


def settle(method: Chooser, raw: Tensors, fixed: bool = False, registry: Registry | None = None) -> None:
    """Checks a method's backend on its loaded weights, and takes the next candidate where it cannot hold them or fails
    on any rank.

    Args:
        method: its backend and decision are changed when another candidate is taken.
        raw: the layer's loaded weights as the scheme's `read` found them, `[local_experts, ...]` each.
        fixed: the kernel is built already, and weights are loaded into it anew: no other candidate can be taken.
        registry: the backends that the decision speaks of; None for this process's own.

    Raises:
        NoBackendError: the weights are not what the backend can hold, and it was chosen explicitly, or the check is
            strict, or nothing is left.
        SelfCheckError: the backend fails, and it was chosen explicitly, or the check is strict, or nothing is left.
        AgreementError: another rank could not check.
        LifecycleError: a CUDA graph is being captured, which would hold what the check does.
    """
    mode = method.settings.self_check
    if _captured(raw):
        rule = "weights were loaded while a CUDA graph was captured; checking and converting them would be part of it"
        raise LifecycleError(rule, "Load weights before graphs are captured", method.decision.problem.layer)
    while True:
        problem, name = method.decision.problem, method.backend.name
        held = holds(method, raw)
        verdict = held if not held.passed or mode == "off" else judge(method, raw)
        if verdict.passed:
            return
        doing = "fails its self-check on" if held.passed else "cannot hold the loaded weights of"
        found = f"{name} {doing} {problem}: {verdict.said}"
        if fixed or mode == "strict" or method.decision.why in ("user", "override") or not verdict.left:
            if not held.passed:
                raise NoBackendError(found, "Choose another backend", problem.layer)
            remedy = "Choose another backend, and report this with the model's name; MOE_ORACLE_SELF_CHECK=off skips it"
            raise SelfCheckError(found, remedy, problem.layer)
        following = verdict.left[0]
        logger.error("moe_oracle: %s: %s; taking %s instead", problem.layer, found, following)
        code = "self_check" if held.passed else "weights"
        did = "failed its self-check on the loaded weights" if held.passed else "cannot hold the loaded weights"
        reason = Reason(code, f"{did}: {verdict.said}")
        take(method, reason, f"{name}, which came first, {did}", following, registry or default_registry())


def _captured(raw: Tensors) -> bool:
    """Whether what is done to the tensors now becomes part of a CUDA graph."""
    return any(each.is_cuda for each in raw.values()) and torch.cuda.is_current_stream_capturing()


def holds(method: Chooser, raw: Tensors) -> Verdict:
    """Whether a method's backend can hold the loaded weights of every expert of the layer, on all ranks.

    Args:
        method: the method; not changed.
        raw: see `settle`.
    """
    backend, problem = method.backend, method.decision.problem
    if type(backend).objection is Backend.objection:
        return Verdict("", True, ())

    def first_objection() -> str:
        for index in range(problem.local_experts):
            expert = {name: each[0] for name, each in canonical(problem, raw, [index]).items()}
            said = backend.objection(expert, problem)
            if said:
                return f"expert {index}: {said}"
        return ""

    return _together(method, f"the weights of {problem.layer} in {backend.name}", first_objection)


def judge(method: Chooser, raw: Tensors) -> Verdict:
    """What all ranks find of a method's backend on its loaded weights; asked once for each kind of layer of a load,
    unless every layer is to be checked.

    Args:
        method: the method; not changed.
        raw: see `settle`.
    """
    problem, name = method.decision.problem, method.backend.name
    group = (problem.key(), name)
    if method.settings.self_check == "all" or group not in _results:
        _results[group] = _on_all_ranks(method, raw)
        logger.info("moe_oracle: %s: self-check of %s: %s", problem.layer, name, _results[group].said)
    return _results[group]


def _on_all_ranks(method: Chooser, raw: Tensors) -> Verdict:
    """Tries the method's backend here, and hears what the other ranks of the layer found with their experts."""
    problem, name = method.decision.problem, method.backend.name
    passed = ""

    def complaint() -> str:
        nonlocal passed
        result = _try(method, raw)
        if isinstance(result, Result) and result.passed:
            passed = str(result)
            return ""
        return str(result)

    verdict = _together(method, f"the self-check of {name} for {problem.layer}", complaint)
    return dataclasses.replace(verdict, said=verdict.said or passed)


def _together(method: Chooser, topic: str, complaint: Callable[[], str]) -> Verdict:
    """What all ranks find of a method's backend: it passes where none of them complains."""

    def found() -> dict[str, Any]:
        said = complaint()
        return {"passed": not said, "said": said, "left": remaining(method.decision, method.backend.name)}

    ranks = agreement.gather(method.group, topic, found)
    failed = {rank: each["said"] for rank, each in enumerate(ranks) if not each["passed"]}
    said = "; ".join(f"rank {rank}: {words}" if len(ranks) > 1 else words for rank, words in failed.items())
    left = [each for each in ranks[0]["left"] if all(each in other["left"] for other in ranks)]
    return Verdict(said, not failed, tuple(left))


def _try(method: Chooser, raw: Tensors) -> Result | str:
    problem, plan = method.decision.problem, method.decision.plan
    try:
        return run(method.backend, problem, plan, raw, method.moe, method.release)
    # Say nothing about the backend: another one would need as much, and read the same weights.
    except (torch.OutOfMemoryError, CheckpointError):
        raise
    except Exception as error:  # a backend that crashes is a backend that fails; the error becomes the reason
        logger.exception("moe_oracle: %s: %s raised in its self-check", problem.layer, method.backend.name)
        return f"{type(error).__name__}: {error}"
