"""Small MXFP8 layers, their weights, and backends with one fault each, for tests of the self-check.

A faulty backend is the emulation with a change to its weights, its problem, its inputs or its output. It runs through
vLLM's modular kernel, as every backend does when it is checked.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import itertools
import locale
import logging
import operator
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.lib import vllm_configs
from tests.lib.cases import CPU, GPT_OSS, MXFP8, MXFP8_W8A8, RELU2, SILU, problem, registry
from vllm_moe_oracle import schemes
from vllm_moe_oracle.backends.emulation import Emulation, forward, round_inputs
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
from vllm_moe_oracle.kernels.activations import activate
from vllm_moe_oracle.methods import backend_check
from vllm_moe_oracle.methods.rank_sync import RankGroup
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.schemes import mxfp4, mxfp8
from vllm_moe_oracle.settings import Settings
from vllm_moe_oracle.verification import converted_layer, self_check, whole_layer

OAI = dataclasses.replace(GPT_OSS, interleaved=False)
SMALL: dict[str, Any] = {"experts": 8, "top_k": 2, "hidden_size": 128, "intermediate_size": 64}

MXFP4 = Scheme("mxfp4", 4, 32, "compressed-tensors")
MXFP4_W4A4 = dataclasses.replace(MXFP4, activations="mxfp4")

LAYERS = {
    "silu": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU),
    "silu, 16 bit": problem(**SMALL, scheme=MXFP8, activation=SILU),
    "silu, float32": problem(**SMALL, scheme=MXFP8, activation=SILU, dtype="float32"),
    "silu, biases": problem(**SMALL, scheme=MXFP8_W8A8, activation=SILU, has_bias=True),
    "gpt-oss": problem(**SMALL, scheme=MXFP8_W8A8, activation=OAI, has_bias=True),
    "gpt-oss, 16 bit": problem(**SMALL, scheme=MXFP8, activation=OAI, has_bias=True, dtype="float16"),
    "relu2": problem(**SMALL, scheme=MXFP8_W8A8, activation=RELU2),
    "relu2, biases": problem(**SMALL, scheme=MXFP8, activation=RELU2, has_bias=True),
    "situ": problem(**SMALL, scheme=MXFP8, activation=Activation("situ", alpha=4.0, beta=25.0)),
    "swiglustep": problem(**SMALL, scheme=MXFP8, activation=Activation("swiglustep", limit=7.0)),
}


def moe_config(layer: Problem) -> Any:
    """vLLM's description of the layer, as a model on one rank has it."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    name = {"swigluoai": "swigluoai_uninterleave", "relu2": "relu2_no_mul"}.get(layer.activation.name, "silu")
    config = vllm_configs.moe_config(layer)
    config.activation = MoEActivation(name)  # vLLM's constructor refuses experts without a gate on a CPU
    return config


def weights(layer: Problem, size: float = 0.05, biases: float = 0.0) -> dict[str, Tensor]:
    """Loaded weights; biases are zeros, as where a model has them and never trained them, unless a size is given."""
    return {name: tensor.clone() for name, tensor in _weights(layer, size, biases).items()}


@functools.lru_cache(maxsize=64)
def _weights(layer: Problem, size: float, biases: float) -> dict[str, Tensor]:
    scheme, generator = schemes.module(layer.scheme.name), torch.Generator().manual_seed(0)
    shapes = scheme.shapes(layer)
    found: dict[str, Tensor] = {}
    for name in ("w13", "w2"):
        shape = (*shapes[name][:2], shapes[f"{name}_scale"][2] * 32)
        found[name], found[f"{name}_scale"] = scheme.quantize(torch.randn(shape, generator=generator) * size)
    if layer.has_bias:
        for name in ("w13_bias", "w2_bias"):
            found[name] = (torch.randn(shapes[name], generator=generator) * biases).to(getattr(torch, layer.dtype))
    return found


# --- Faults -----------------------------------------------------------------------------------------------------------

Convert = Callable[[dict[str, Tensor], Problem], dict[str, Tensor]]
Understand = Callable[[Problem], Problem]
Compute = Callable[..., None]


class Faulty(Emulation):
    """The emulation with a fault in one place."""

    rank = 1.0
    runs = 0

    def __init__(
        self,
        name: str,
        convert: Convert = lambda expert, layer: expert,
        understand: Understand = lambda layer: layer,
        compute: Compute = forward,
        beyond: tuple[int, ...] = (),
        scratch: bool = False,
    ) -> None:
        """`beyond`: the numbers of tokens after which it says that another kernel takes over. `scratch`: `compute` also
        gets a workspace, of a float32 number for each one of the output."""
        self.name = name  # type: ignore[misc]
        self._beyond, self._scratch = beyond, scratch
        self._convert = convert
        self._understand = understand
        self._compute = compute

    def priority(self, problem: Problem, device: Any) -> float:
        return self.rank

    def hand_overs(self, problem: Problem, most: int) -> tuple[int, ...]:
        return tuple(each for each in self._beyond if each < most)

    def convert(self, expert: Any, problem: Problem, plan: Any) -> dict[str, Tensor]:
        return self._convert(dict(expert), problem)

    def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        self.runs += 1

        def run(*arguments: Any) -> None:
            self._compute(tensors, self._understand(problem), *arguments)

        if self._scratch:
            return builder.from_workspace_function(run, lambda tokens, top_k: 4 * tokens * problem.hidden_size)
        return builder.from_function(run)


class Kept(Faulty):
    """Computes with the weights that it was built over, whatever is loaded later."""

    def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        kept = {name: tensor.clone() for name, tensor in tensors.items()}
        return builder.from_function(lambda *arguments: forward(kept, problem, *arguments))


def swap_halves(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
    half = layer.intermediate_size
    swapped = {name: torch.cat([expert[name][half:], expert[name][:half]]) for name in expert if name[:3] == "w13"}
    return expert | swapped


def swizzle(name: str) -> Convert:
    """Scales column by column: what a kernel sees that expects another order."""
    return lambda expert, layer: expert | {name: expert[name].T.reshape(expert[name].shape)}


def shift(name: str, exponents: int) -> Convert:
    return lambda expert, layer: expert | {name: (expert[name].to(torch.int16) + exponents).to(torch.uint8)}


def drop(name: str) -> Convert:
    return lambda expert, layer: {each: tensor for each, tensor in expert.items() if each != name}


def transpose_codes(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
    codes = expert["w2"].view(torch.uint8)
    return expert | {"w2": codes.T.reshape(codes.shape).view(torch.float8_e4m3fn)}


def ignore(**changes: Any) -> Understand:
    return lambda layer: dataclasses.replace(layer, activation=dataclasses.replace(layer.activation, **changes))


@dataclasses.dataclass(frozen=True)
class Call:
    """What a kernel gets. `places` is the expert map."""

    layer: Problem
    out: Tensor
    x: Tensor
    weights: Tensor
    ids: Tensor
    places: Tensor | None = None


def reads(**changes: Callable[[Call], Tensor | None]) -> Compute:
    """The right kernel, with other `x`, `weights`, `ids` or `places` than it gets."""

    def compute(tensors: Any, layer: Problem, out: Tensor, *given: Any) -> None:
        call = Call(layer, out, *given)
        names = ("x", "weights", "ids", "places")
        forward(tensors, layer, out, *(changes.get(name, operator.attrgetter(name))(call) for name in names))

    return compute


def then(change: Callable[[Call], object]) -> Compute:
    """The right kernel, and a change after it."""

    def compute(tensors: Any, layer: Problem, out: Tensor, *given: Any) -> None:
        forward(tensors, layer, out, *given)
        change(Call(layer, out, *given))

    return compute


other_experts = reads(ids=lambda call: (call.ids + 1) % call.layer.num_experts)
other_weights = reads(weights=lambda call: call.weights.flip(-1))
one_nan = then(lambda call: call.out[-1, -1].fill_(torch.nan))


def raises(tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
    raise RuntimeError("CUDA error: no kernel image is available")


def nothing(tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
    out.zero_()


def after(change: Callable[[Tensor], object], calls: Callable[[int], object] = lambda tokens: True) -> Compute:
    """The right output, changed in the calls whose number of tokens `calls` accepts."""
    return then(lambda call: change(call.out) if calls(len(call.x)) else None)


def sets(change: Callable[[], object]) -> Compute:
    """The right output, and another setting of the process."""
    return after(lambda out: change())


def nth(number: int) -> Compute:
    """The right output, changed in one call."""
    numbers = itertools.count(1)
    return after(lambda out: out.mul_(1.5), lambda tokens: next(numbers) == number)


def wrong_experts(wrong: Callable[[int], bool]) -> Compute:
    """Computes some experts, by their place in the layer, with the weights of the first."""

    def compute(tensors: Any, layer: Problem, *more: Any) -> None:
        held = {name: tensor.clone() for name, tensor in tensors.items()}
        for index in range(len(held["w2"])):
            if wrong(index):
                held["w2"][index].view(torch.uint8).copy_(held["w2"][0].view(torch.uint8))
        forward(held, layer, *more)

    return compute


def has_idle_experts(call: Call) -> bool:
    return len(call.ids[call.ids >= 0].unique()) < call.layer.local_experts


nan_where_idle = then(lambda call: call.out[0, 0].fill_(torch.nan) if has_idle_experts(call) else None)
empty_is_first = reads(ids=lambda call: call.ids.clamp(min=0))
ignores_map = reads(ids=lambda call: call.ids.clamp(max=call.layer.local_experts - 1), places=lambda call: None)
writes_into_x = then(lambda call: call.x[-1, -1].add_(1))
last_weight = reads(weights=lambda call: torch.cat((call.weights[:, :-1], call.weights[:, :1]), 1))
normalizes = reads(weights=lambda call: call.weights / call.weights.sum(-1, keepdim=True))
clamps = reads(weights=lambda call: call.weights.clamp(max=1.0))


def many_tokens(wrong: Compute, more_than: int = 600) -> Compute:
    """The right output up to some number of tokens, `wrong` beyond: another kernel."""

    def compute(tensors: Any, layer: Problem, out: Tensor, x: Tensor, *more: Any) -> None:
        (wrong if x.shape[0] > more_than else forward)(tensors, layer, out, x, *more)

    return compute


def masked(width: int) -> Compute:
    """Marks a token's experts in a mask of `width` bits: of two that share a bit, the second is lost."""

    def weights(call: Call) -> Tensor:
        bits = torch.where(call.ids < 0, -1, call.ids % width)
        same = (bits[:, :, None] == bits[:, None, :]) & (call.ids[:, :, None] >= 0)
        return call.weights.masked_fill(same.tril(-1).any(-1), 0.0)

    return reads(weights=weights)


def without_distant_experts(call: Call) -> Tensor:
    """Weights in which experts eight or more beyond the first of a token are lost."""
    lost = ((call.ids - call.ids[:, :1]) % call.layer.num_experts >= 8) & (call.ids >= 0)
    return call.weights.masked_fill(lost, 0.0)


def after_the_first(call: Call) -> Tensor:
    """Ids that follow a token's first one."""
    slots = torch.arange(call.ids.shape[1], device=call.ids.device)
    taken = (call.ids[:, :1].clamp(min=0) + slots) % call.layer.num_experts
    return torch.where(call.ids < 0, call.ids, taken).to(call.ids.dtype)


distant_experts = reads(weights=without_distant_experts)
neighbors_of_the_first = reads(ids=after_the_first)


def kept_by_address() -> Compute:
    """Keeps what it has sorted by number of tokens and address of the ids, as code for CUDA graphs may."""
    kept: dict[tuple[Any, ...], Tensor] = {}
    return reads(ids=lambda call: kept.setdefault((call.ids.shape, call.ids.data_ptr()), call.ids.clone()))


def last_expert_last_columns(call: Call) -> None:
    """The last 32 columns of the tokens of the last expert are off by a half."""
    mine = (call.ids == call.layer.num_experts - 1).any(-1, keepdim=True)
    call.out[:, -32:] *= torch.where(mine, 1.5, 1.0)


def exchanged(rows: int) -> Compute:
    """Whole blocks of as many tokens in another order."""

    def change(out: Tensor) -> None:
        whole = out[: len(out) // rows * rows].view(-1, rows, out.shape[1])
        whole.copy_(whole.roll(1, 0))

    return after(change)


def leaves_columns(tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
    """Does not write the last column."""
    made = out.clone()
    forward(tensors, layer, made, *more)
    out[:, :-1] = made[:, :-1]


def reads_workspace(
    tensors: Any, layer: Problem, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, places: Any, workspace: Tensor
) -> None:
    """Adds nothing times what the workspace held, as a kernel does that masks what it has not written."""
    forward(tensors, layer, out, x, weights, ids, places)
    out += (workspace.view(torch.float32)[: out.numel()].view(out.shape) * 0.0).to(out.dtype)


narrow_ids = reads(ids=lambda call: call.ids.view(torch.int32)[:, : call.ids.shape[1]])
"""Takes every id for an int32."""


def some_scales(name: str, exponents: int) -> Convert:
    """One scale of a hundred is off by a power of two."""

    def convert(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
        if expert[name].is_meta:
            return expert
        hit = torch.rand(expert[name].shape, generator=torch.Generator().manual_seed(5)) < 0.01
        return expert | {name: (expert[name].to(torch.int16) + hit * exponents).to(torch.uint8)}

    return convert


def short_bias(expert: dict[str, Tensor], layer: Problem) -> dict[str, Tensor]:
    """The last 16 columns get no bias."""
    if expert["w2_bias"].is_meta:
        return expert
    return expert | {"w2_bias": torch.cat((expert["w2_bias"][:-16], torch.zeros_like(expert["w2_bias"][-16:])))}


def every_rounding(rule: str) -> Compute:
    """A right kernel with each rounding that the tolerance names, after each product and each sum; `rule` is the one
    for the scales of MX activations."""

    def compute(tensors: Any, layer: Problem, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor, *more: Any) -> None:
        scheme = {"mxfp8": mxfp8, "mxfp4": mxfp4}[layer.scheme.name]
        formats = {"mxfp8": mxfp8, "mxfp4": mxfp4}

        def rounded(values: Tensor) -> Tensor:
            if layer.scheme.activations not in formats:
                return round_inputs(values, x.dtype, layer)
            form = formats[layer.scheme.activations]
            return form.dequantize(*form.quantize(values, rule))  # type: ignore[attr-defined, no-any-return]

        @functools.cache  # an expert serves several slots
        def dequantized(index: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
            expert = {name: tensor[index] for name, tensor in tensors.items()}
            w13, w2 = (scheme.dequantize_expert(expert, which).to(x.dtype).float() for which in ("w13", "w2"))
            return expert, w13, w2

        total = torch.zeros_like(x)
        for slot in range(ids.shape[1]):
            part = torch.zeros_like(x)
            for index in ids[:, slot].unique().tolist():
                if not 0 <= index < layer.local_experts:
                    continue
                mine = ids[:, slot] == index
                expert, w13, w2 = dequantized(index)
                hidden = rounded(x[mine].float()) @ w13.T + (expert["w13_bias"].float() if layer.has_bias else 0.0)
                hidden = activate(hidden.to(x.dtype).float(), layer.activation).to(x.dtype).float()
                output = rounded(hidden) @ w2.T + (expert["w2_bias"].float() if layer.has_bias else 0.0)
                part[mine] = (output * weights[mine, slot, None]).to(x.dtype)
            total += part
        out.copy_(total)

    return compute


FAULTS: dict[str, Faulty] = {
    fault.name: fault
    for fault in (
        Faulty("swapped halves", swap_halves),
        Faulty("swizzled scales of w13", swizzle("w13_scale")),
        Faulty("swizzled scales of w2", swizzle("w2_scale")),
        Faulty("scales of w13 one up", shift("w13_scale", 1)),
        Faulty("scales of w13 one down", shift("w13_scale", -1)),
        Faulty("scales of w2 one up", shift("w2_scale", 1)),
        Faulty("scales of w2 one down", shift("w2_scale", -1)),
        Faulty("codes of w2 transposed", transpose_codes),
        Faulty("no bias of w13", drop("w13_bias")),
        Faulty("no bias of w2", drop("w2_bias")),
        Faulty("alpha ignored", understand=ignore(alpha=1.0)),
        Faulty("beta ignored", understand=ignore(beta=0.0)),
        Faulty("limit ignored", understand=ignore(limit=None)),
        Faulty("situ's bound of gate ignored", understand=ignore(alpha=1e9)),
        Faulty("situ's bound of up ignored", understand=ignore(beta=None)),
        Faulty("swiglustep's limit ignored", understand=ignore(limit=1e9)),
        Faulty("other experts", compute=other_experts),
        Faulty("other router weights", compute=other_weights),
        Faulty("one NaN", compute=one_nan),
        Faulty("zeros", compute=nothing),
        Faulty("one token", compute=after(lambda out: out.mul_(1.2), lambda tokens: tokens == 1)),
        Faulty("one token, zeros", compute=after(Tensor.zero_, lambda tokens: tokens == 1)),
        Faulty("more than 8", compute=after(lambda out: out[-1].mul_(0.5), lambda tokens: tokens > 8)),
        Faulty("more than 64", compute=after(lambda out: out[64].zero_(), lambda tokens: tokens > 64)),
        Faulty("no multiple of 8", compute=after(lambda out: out[-1].zero_(), lambda tokens: tokens % 8)),
        Faulty("last 16 columns", compute=after(lambda out: out[:, -16:].zero_())),
        Faulty("last column", compute=after(lambda out: out[:, -1].zero_())),
        Faulty("one expert", compute=wrong_experts(lambda index: index == 2)),
        Faulty("idle experts", compute=nan_where_idle),
        Faulty("empty slots", compute=empty_is_first),
        Faulty("input changed", compute=writes_into_x),
        Faulty("last weight", compute=last_weight),
        Faulty("router weights normalized", compute=normalizes),
        Faulty("router weights clamped at 1", compute=clamps),
        Faulty("steps of 2 to 64", compute=after(Tensor.zero_, lambda tokens: tokens in (2, 4, 8, 32, 64))),
        Faulty("3 tokens", compute=after(lambda out: out[-1].zero_(), lambda tokens: tokens == 3)),
        Faulty("10 to 15 tokens", compute=after(lambda out: out[-1].zero_(), lambda tokens: 10 <= tokens <= 15)),
        Faulty("17 to 31 tokens", compute=after(lambda out: out[-1].zero_(), lambda tokens: 17 <= tokens <= 31)),
        Faulty("torch's default dtype", compute=sets(lambda: torch.set_default_dtype(torch.float16))),
        Faulty("torch's random numbers", compute=sets(lambda: torch.manual_seed(0))),
        Faulty("torch's threads", compute=sets(lambda: torch.set_num_threads(torch.get_num_threads() + 1))),
        Faulty("working directory", compute=sets(lambda: os.chdir("/"))),
        Faulty("handler of SIGTERM", compute=sets(lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))),
        Faulty("scales of w13", some_scales("w13_scale", 1)),
        Faulty("scales of w2", some_scales("w2_scale", 1)),
        Faulty("smaller scales of w13", some_scales("w13_scale", -1)),
        Faulty("smaller scales of w2", some_scales("w2_scale", -1)),
        Faulty("bias of the last columns", short_bias),
        Faulty("many tokens, one expert", compute=many_tokens(wrong_experts(lambda index: index == 2)), beyond=(600,)),
        Faulty("many tokens, last columns", compute=many_tokens(then(last_expert_last_columns)), beyond=(600,)),
        Faulty("many tokens, blocks", compute=many_tokens(exchanged(64)), beyond=(600,)),
        Faulty("blocks of 16", compute=exchanged(16)),
        Faulty("output left", compute=leaves_columns),
        Faulty("workspace read", compute=reads_workspace, scratch=True),
    )
}
"""One fault each, by name, for tests and tools."""


SETTING_CHANGES: dict[str, Callable[[], object]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float16),
    "default device": lambda: torch.set_default_device("meta"),
    "gradient mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "autocast": lambda: torch.autocast("cpu").__enter__(),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "switches of mkldnn and cuDNN": lambda: torch.backends.mkldnn.set_flags(False),  # type: ignore[attr-defined]
    "precision of float32 products": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),  # type: ignore[attr-defined]
    "flushing of subnormal numbers": lambda: torch.set_flush_denormal(True),
    "CUDA device and stream": lambda: torch.cuda.set_stream(torch.cuda.Stream()),
    "CPU affinity": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "working directory": lambda: os.chdir("/"),
    "umask": lambda: os.umask(0),
    "signal handlers": lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
    "garbage collection": gc.disable,
    "disabled logging": lambda: logging.disable(logging.CRITICAL),
    "recursion limit": lambda: sys.setrecursionlimit(5000),
    "thread switch interval": lambda: sys.setswitchinterval(1.0),
    "exception hooks": lambda: setattr(sys, "excepthook", lambda *args: os._exit(0)),
    "trace and profile functions": lambda: sys.setprofile(lambda *args: None),
    "standard streams": lambda: setattr(sys, "stderr", io.StringIO()),
    "warnings raised as errors": lambda: warnings.simplefilter("error", EncodingWarning),
    "locale": lambda: locale.setlocale(locale.LC_ALL, "C" if locale.setlocale(locale.LC_ALL) != "C" else "C.UTF-8"),
    "seed of random numbers": lambda: torch.manual_seed(0),
}
"""What changes a setting of the process, by its name in `process_state`."""


def check(backend: Emulation, layer: Problem, loaded: dict[str, Tensor]) -> self_check.Comparison:
    return self_check.compare_with_reference(
        backend, layer, backend.plan(layer, CPU), loaded, moe_config(layer), current_adapter()
    )


def converted(
    backend: Emulation, layer: Problem, loaded: dict[str, Tensor], every: bool = True
) -> converted_layer.InstalledLayer:
    """A layer after its conversion, with the parts of its experts that its check needs; where it is one of several
    ranks', the second's, and ranks share the experts in turn."""
    adapter, parts = current_adapter(), converted_layer.WeightParts(layer, every)
    # Kernels get the map with each call; the layer that is built has the rank's experts alone.
    own = dataclasses.replace(layer, num_experts=layer.local_experts)
    made = whole_layer.KernelTensors(backend, own, backend.plan(layer, CPU))
    for index in range(layer.local_experts):
        expert = {name: tensor[index] for name, tensor in loaded.items()}
        parts.add(expert)
        assert not made.put(expert, index)
    if (ranks := layer.num_experts // layer.local_experts) > 1:
        made.layer.expert_map = torch.full((layer.num_experts,), -1, dtype=torch.int32)
        made.layer.expert_map[1::ranks] = torch.arange(layer.local_experts, dtype=torch.int32)
    made._problem = layer
    experts = made.build(adapter, "cpu", 64)
    return converted_layer.InstalledLayer(backend, parts, experts, made.layer, made.tensors, adapter)


SWAPPED = ("swapped", swap_halves)


class Method(SimpleNamespace):
    """What `check_or_fallback` sees of a layer's method."""

    @classmethod
    def over(
        cls, *backends: Any, layer: Problem | None = None, group: RankGroup | None = None, **settings: Any
    ) -> Method:
        """The method of a layer, `LAYERS["silu"]` by default, in a process that has these backends alone."""
        return cls.of(registry(list(backends)), layer or LAYERS["silu"], group, **settings)

    def check(self, loaded: dict[str, Tensor] | None = None, kernel_built: bool = False) -> None:
        """Has loaded weights checked, right ones by default."""
        loaded = weights(self.decision.problem) if loaded is None else loaded
        backend_check.check_or_fallback(self, loaded, kernel_built)

    @classmethod
    def of(cls, backends: Any, layer: Problem, group: RankGroup | None = None, **settings: Any) -> Method:
        chosen = Settings(**settings)
        decision = decide(layer, CPU, chosen, registry=backends)
        return cls(
            decision=decision,
            backend=backends[decision.backend],
            settings=chosen,
            adapter=current_adapter(),
            moe=moe_config(layer),
            rank_group=group or RankGroup(),
            in_own_order=False,
            registry=backends,
        )


def second(rank: float = 2.0) -> Faulty:
    made = Faulty("second")
    made.rank = rank
    return made
