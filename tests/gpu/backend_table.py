"""Every backend that the oracle accepts on this GPU, through vLLM's MoE layer, against a float32 reference.

    python tests/gpu/backend_table.py --scheme mxfp8 --json table.json     every layer, in processes of their own
    python tests/gpu/backend_table.py --scheme mxfp8 --layer qwen3_silu    one layer, in this process

What a scheme's layers are is data in ``table_<scheme>.py`` beside this file: `Table`. For each layer the same random
weights go through stock vLLM's own method first (``--moe-backend`` of each class that a backend wraps), then through
the plugin's method with each accepted backend, eager and under a CUDA graph that was captured on other inputs. An error
is the relative L2 distance of all tokens' outputs from the reference, which shares no code with the package, over as
many calls as make `DRAWN` tokens: of one token the distance is one draw of a random quantity, a third up or down; for
backends that quantize activations, as the checkpoint declares, the reference does so too. Then a rank of expert
parallelism is played: an expert map says that every other expert is elsewhere, which must add nothing, and that the
others are in other places. Also measured: peak memory beyond what was there before while weights are converted; what a
self-check takes when kernels are compiled; and what it says when the conversion is broken on purpose.

`PASS` asks at most 6e-3 (or what a table allows where activations are quantized), at most 1.2 times the error of the
stock class that the backend wraps, where it wraps one and stock could run the layer, at most one expert plus 64 MiB for
the conversion, at most 150 ms for the self-check, that it keeps no memory, and that it finds every fault.

Many processes share the cards, all that the machine has, and the cores; nothing else should. Self-checks are timed
last, one after the other, while every other process of the table waits. Our kernels compile for 10 to 40 s a layer.
Marlin's first call for a type of weights takes 45 to 65 s, later ones on the same machine nothing of that, in other
processes either. Humming has up to 43 kernels a product and compiles all of them with a layer's first call: it is given
the numbers of rows that the table calls it with, and compiles the kernels that its own configurations have for these
(`FewKernels`); a row names them under ``rows_of_kernels``.

    python tests/gpu/backend_table.py --scheme wna16 --processes 12 --seconds 280 --json wna16-vllm-VERSION.json
    python -m pytest -m gpu tests/gpu/test_wna16_backends.py

`--seconds` ends what is late; rows that are ready are kept, and their self-checks timed. Tables of some layers each
become one:

    python tests/gpu/backend_table.py --scheme wna16 --merge some.json others.json --json wna16-vllm-VERSION.json
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_PLUGINS", "")  # registered by hand, after stock has run
os.environ.setdefault("MOE_ORACLE_SELF_CHECK", "off")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm_moe_oracle.core.problem import Activation, Parallel, Problem, Routing, Scheme

TOKENS = (1, 7, 64, 513)
DRAWN = 16
SPREAD_TOKENS = 64
LIMIT = 6e-3
RATIO = 1.2
CONVERSION_SLACK_MIB = 64
SELF_CHECK_SECONDS = 0.15
PROCESSES = 16
TIMED = 3
TIMING_SECONDS = 1.0
KEEP_SECONDS = 5
FREE = ("date", "packages", "runs")
"""Conditions that tables which become one need not have in common."""

Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Routed tokens: x `[M, hidden]` bfloat16, weights `[M, top_k]` float32, int32 ids `[M, top_k]`."""
Raw = dict[str, torch.Tensor]
"""A layer's checkpoint by vLLM's names of parameters, `[experts, ...]` each."""


@dataclass(frozen=True)
class Case:
    """One MoE layer; `activation` in vLLM's words, `ep` ranks that its experts are spread over, this one the first."""

    name: str
    scheme: Scheme
    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: str = "silu"
    bias: bool = False
    alpha: float | None = None
    beta: float | None = None
    limit: float | None = None
    routing: Routing = field(default_factory=Routing)
    ep: int = 1

    @property
    def local_experts(self) -> int:
        """Experts on this rank: the first ones."""
        return self.experts // self.ep

    @property
    def interleaved(self) -> bool:
        """The rows of the first product alternate gate and up, in the checkpoint too."""
        return self.activation == "swigluoai"

    @property
    def gated(self) -> bool:
        """Two halves of rows in the first product."""
        return not self.activation.endswith("_no_mul")

    @property
    def rows(self) -> dict[str, int]:
        """Rows of both matrices."""
        return {"w13": self.inner * (2 if self.gated else 1), "w2": self.hidden}

    @property
    def columns(self) -> dict[str, int]:
        """Columns of both matrices."""
        return {"w13": self.hidden, "w2": self.inner}

    def problem(self) -> Problem:
        """The layer as the oracle sees it."""
        name = self.activation.removesuffix("_no_mul").removesuffix("_uninterleave")
        return Problem(
            layer="model.layers.0.mlp.experts",
            scheme=self.scheme,
            num_experts=self.experts,
            local_experts=self.local_experts,
            top_k=self.top_k,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            has_bias=self.bias,
            activation=Activation(name, self.gated, self.alpha, self.beta, self.limit, self.interleaved),
            routing=self.routing,
            parallel=Parallel(ep=self.ep),
        )


@dataclass(frozen=True)
class Checkpoint:
    """Random weights of a layer.

    Attributes:
        raw: as vLLM would have loaded them; biases are ``w13_bias`` and ``w2_bias``. Where a release registers a
            parameter with its last two dimensions exchanged, it gets them so.
        matrix: float32 weights `[N, K]` of ``w13`` or ``w2`` of one expert, by the scheme's definition.
    """

    raw: Raw
    matrix: Callable[[str, int], torch.Tensor]

    @property
    def expert_mib(self) -> float:
        """One expert as the checkpoint has it."""
        return sum(each[0].nbytes for each in self.raw.values()) / 2**20


@dataclass(frozen=True)
class Table:
    """What a scheme brings.

    Attributes:
        cases: the layers; those whose names begin with ``tiny`` only run when they are asked for.
        checkpoint: random weights of a layer on a device; biases about as large as the products.
        quantization: vLLM's config of such a checkpoint, stock's own, or the plugin's once that is registered.
        stock: vLLM's ``--moe-backend`` for the class that a backend wraps.
        load: fills a layer's parameters; None copies each tensor into the parameter of its name.
        rounded: how inputs of products are rounded for backends that quantize activations, by their precision.
        limits: largest error, by precision of activations; `LIMIT` for the others.
        faults: conversions that go wrong, besides those of `faults`, by name.
        ignored: what of an activation a kernel might leave out: by name, the activation's fields as it takes them.
        before_conversion: makes stock vLLM do what its method alone would not, on a layer with loaded weights.
        after_conversion: the same, on a converted layer.
    """

    cases: Mapping[str, Case]
    checkpoint: Callable[[Case, str], Checkpoint]
    quantization: Callable[[Case], Any]
    stock: Mapping[str, str]
    load: Callable[[Any, Case, Raw], None] | None = None
    rounded: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    faults: Callable[[Case], Mapping[str, Callable[[Raw], Raw]]] = lambda case: {}
    ignored: Callable[[Case], Mapping[str, Mapping[str, Any]]] = lambda case: {}
    before_conversion: Callable[[Any, Case, Raw, str], None] = lambda layer, case, raw, moe_backend: None
    after_conversion: Callable[[Any, Case, Raw, str], None] = lambda layer, case, raw, moe_backend: None


def by_name(cases: tuple[Case, ...]) -> dict[str, Case]:
    """Cases by their names."""
    return {case.name: case for case in cases}


def table_of(scheme: str) -> Table:
    """The table of a scheme."""
    found: Table = importlib.import_module(f"tests.gpu.table_{scheme}").TABLE
    return found


# --- The reference --------------------------------------------------------------------------------------------------


def reference(
    case: Case,
    checkpoint: Checkpoint,
    calls: Sequence[Call],
    enter: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> list[torch.Tensor]:
    """What the layer gives for some calls, in float32: `[M, hidden]` each.

    Args:
        case: the layer.
        checkpoint: its weights.
        calls: routed tokens; an id of -1 is an expert elsewhere.
        enter: what becomes of both products' inputs.
    """
    x, weights, ids = (torch.cat(each) for each in zip(*calls, strict=True))
    out = torch.zeros(x.shape[0], case.hidden, dtype=torch.float32, device=x.device)
    for expert in filter(lambda each: each >= 0, ids.unique().tolist()):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        hidden = enter(x[token].float()) @ checkpoint.matrix("w13", expert).T
        if case.bias:
            hidden += checkpoint.raw["w13_bias"][expert].float()
        result = enter(_activate(case, hidden)) @ checkpoint.matrix("w2", expert).T
        if case.bias:
            result += checkpoint.raw["w2_bias"][expert].float()
        out.index_add_(0, token, result * weights[token, choice].unsqueeze(-1))
    return list(out.split([each[0].shape[0] for each in calls]))


def _activate(case: Case, hidden: torch.Tensor) -> torch.Tensor:
    if not case.gated:
        return hidden.clamp(min=0) ** 2
    gate, up = hidden[:, : case.inner], hidden[:, case.inner :]
    if case.interleaved:
        gate, up = hidden[:, ::2], hidden[:, 1::2]
    if case.limit is not None:
        gate, up = gate.clamp(max=case.limit), up.clamp(min=-case.limit, max=case.limit)
    alpha, beta = (1.0 if case.alpha is None else case.alpha), (0.0 if case.beta is None else case.beta)
    return gate / (1 + torch.exp(-alpha * gate)) * (up + beta)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance; NaN when any value is."""
    return float((actual.float() - expected).norm() / expected.norm())


# --- Layers ---------------------------------------------------------------------------------------------------------


@dataclass
class Built:
    """A layer with its weights; `convert` must be called before it is run."""

    layer: Any
    config: Any
    device: str
    runner: Any = None
    seconds: float = 0.0
    peak: int = 0

    @property
    def method(self) -> Any:
        """The layer's method."""
        return self.layer.quant_method

    def convert(self) -> None:
        """Converts the weights, and measures it."""
        before = 0
        # What earlier layers left in cycles would be freed while this one is measured.
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        self.method.process_weights_after_loading(self.layer)
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - before
        self.seconds = time.perf_counter() - start

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Runs the layer's method on routed tokens, padded and cropped as vLLM's runner does it; one that routes itself
        is given logits that lead to these weights and ids."""
        from vllm.forward_context import set_forward_context

        wide = self._padded(x)
        with set_forward_context(None, self.config, num_tokens=x.shape[0]):
            if self.method.is_monolithic:
                output: torch.Tensor = self.method.apply_monolithic(self.layer, wide, self._logits(weights, ids))
            else:
                output = self.method.apply(self.layer, wide, weights, ids, None, None)
        return output[..., : x.shape[-1]]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, self.layer.moe_config.hidden_dim - x.shape[-1]))

    def _logits(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Logits whose largest lead to the ids, and whose softmax is the weights, which sum to one."""
        shape = ids.shape[0], self.layer.moe_config.num_experts
        blank = torch.full(shape, -100.0, dtype=torch.float32, device=ids.device)
        return blank.scatter(1, ids.long(), weights.log())

    def spread(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Runs the plugin's method as on a rank where each expert has another place, or none.

        Args:
            x: `[M, hidden]`.
            weights: `[M, top_k]`.
            ids: `[M, top_k]`.
            places: int32 `[experts]`: the expert whose weights are meant, -1 for none.
        """
        from vllm.forward_context import set_forward_context

        kernel, release, wide = self.method.moe_kernel, self.method.adapter, self._padded(x)
        with set_forward_context(None, self.config, num_tokens=x.shape[0]):
            seen = _Spread(self.layer, places)
            if self.method.is_monolithic:
                logits = self._logits(weights, ids)
                output: torch.Tensor = release.apply_monolithic(kernel, seen, wide, logits, {})
            else:
                output = release.apply(kernel, seen, wide, weights, ids, {})
        return output[..., : x.shape[-1]]

    def close(self) -> None:
        """Leaves vLLM's config context and frees the layer."""
        leave()
        self.layer = self.runner = None


_entered: list[Any] = []
"""vLLM's config context of the layer that was built last."""


def leave() -> None:
    """Leaves vLLM's config context and the layer's dtype, where one was entered."""
    while _entered:
        _entered.pop().__exit__(None, None, None)
        torch.set_default_dtype(torch.float32)


class _Spread:
    """A layer with another expert map."""

    def __init__(self, layer: Any, places: torch.Tensor) -> None:
        self._layer = layer
        self.expert_map = places

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def build(
    table: Table,
    case: Case,
    checkpoint: Checkpoint,
    device: str,
    moe_backend: str,
    own: str = "",
    lora_config: Any = None,
) -> Built:
    """A layer of vLLM with the checkpoint's weights, not converted yet.

    Args:
        table: of the case's scheme.
        case: the layer.
        checkpoint: its weights.
        device: ``cuda`` or ``cpu``.
        moe_backend: vLLM's ``--moe-backend``.
        own: the plugin's backend; "" when stock's method is meant.
        lora_config: vLLM's `LoRAConfig`, for a layer that may have adapters.
    """
    from vllm.config import DeviceConfig, KernelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import layer as moe_layer

    factory = getattr(moe_layer, "FusedMoEFactory", None) or moe_layer.FusedMoE
    extra: dict[str, Any] = {"additional_config": {"moe_oracle": {"backend": own}}} if own else {}
    config = VllmConfig(
        device_config=DeviceConfig(device=device), kernel_config=KernelConfig(moe_backend=moe_backend), **extra
    )
    # Not given above: since 0.33 vLLM asks the model's config then, and there is no model.
    config.lora_config = lora_config
    # What vLLM makes expert parallelism of: more than one rank of tensor parallelism, and this.
    config.parallel_config.enable_expert_parallel = case.ep > 1
    leave()  # a layer that failed may have left its own
    _entered.append(set_current_vllm_config(config))
    _entered[0].__enter__()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        runner = factory(
            num_experts=case.experts, top_k=case.top_k, hidden_size=case.hidden, intermediate_size=case.inner,
            params_dtype=torch.bfloat16, renormalize=True, quant_config=table.quantization(case),
            prefix="model.layers.0.mlp.experts", activation=case.activation, has_bias=case.bias,
            ckpt_names=("gate_proj", "down_proj", "up_proj") if case.gated else ("up_proj", "down_proj", None),
            swiglu_limit=case.limit, swiglu_alpha=case.alpha, swiglu_beta=case.beta,
            **({"tp_size": case.ep} if case.ep > 1 else {}),
        )  # fmt: skip
    layer = getattr(runner, "routed_experts", runner)
    raw = here(case, checkpoint)
    if not own:
        table.before_conversion(layer, case, raw, moe_backend)
    if table.load is not None:
        table.load(layer, case, raw)
    parameters = dict(layer.named_parameters()) if table.load is None else {}
    for name, tensor in raw.items():
        if name in parameters:
            halves = 2 if name.startswith("w13") and case.gated and not case.interleaved else 1
            _fill(parameters[name].data, tensor, name, halves)
    return Built(layer, config, device, runner)


def here(case: Case, checkpoint: Checkpoint) -> Raw:
    """The checkpoint's tensors of the experts on this rank."""
    return {name: tensor[: case.local_experts] for name, tensor in checkpoint.raw.items()}


def seen(case: Case, call: Call) -> Call:
    """Routed tokens as this rank sees them: -1 for experts that are elsewhere."""
    x, weights, ids = call
    return x, weights, ids.masked_fill(ids >= case.local_experts, -1)


def spread_places(case: Case, device: str) -> torch.Tensor:
    """An expert map that no rank has: every other expert is elsewhere, or more where a rank has fewer; the others'
    places run backwards. int32 `[experts]`."""
    places = torch.full((case.experts,), -1, dtype=torch.int32, device=device)
    others = places[1::2]
    # As many as there is room for: no two experts share a place.
    count = torch.arange(min(len(others), case.local_experts), dtype=torch.int32, device=device)
    others[count * len(others) // len(count)] = case.local_experts - 1 - count * case.local_experts // len(count)
    return places


def _fill(target: torch.Tensor, tensor: torch.Tensor, name: str, halves: int) -> None:
    """Copies a tensor into a parameter of its shape, of its shape with the last two dimensions exchanged, or of a
    larger one, as stock pads it: with zeros, each half of the rows by itself."""
    if target.dim() == 3 and target.shape != tensor.shape and target.shape == tensor.transpose(1, 2).shape:
        tensor = tensor.transpose(1, 2)
    larger = all(room >= size for room, size in zip(target.shape, tensor.shape, strict=True))
    if not larger or target.element_size() != tensor.element_size():
        raise ValueError(f"{name} is {list(tensor.shape)} {tensor.dtype}, vLLM has {list(target.shape)} {target.dtype}")
    if target.shape == tensor.shape:
        target.copy_(tensor)
        return
    target.zero_()
    for room, part in zip(target.chunk(halves, 1), tensor.chunk(halves, 1), strict=True):
        room[tuple(slice(size) for size in part.shape)].copy_(part)


def inputs(case: Case, tokens: int, device: str, seed: int = 0) -> Call:
    """Random tokens with their experts: x, weights that sum to one, int32 ids."""
    generator = torch.Generator(device=device).manual_seed(1000 * seed + tokens)
    x = (torch.randn(tokens, case.hidden, device=device, generator=generator) * 0.5).bfloat16()
    logits = torch.randn(tokens, case.experts, device=device, generator=generator)
    weights, ids = torch.topk(torch.softmax(logits.float(), -1), case.top_k, dim=-1)
    return x, weights / weights.sum(-1, keepdim=True), ids.to(torch.int32)


def drawn(case: Case, tokens: int, device: str) -> list[Call]:
    """Calls of so many tokens each, `DRAWN` tokens or more in all."""
    # Seeds 1 and 2 are what graphs are captured on, and the spread experts' tokens.
    return [inputs(case, tokens, device, seed) for seed in (0, *range(3, 2 + -(-DRAWN // tokens)))]


def outputs(built: Built, calls: Sequence[Call]) -> torch.Tensor:
    """The outputs of calls, one below the other: `[calls * M, hidden]`."""
    return torch.cat([built(*call) for call in calls])


def captured(built: Built, case: Case, calls: Sequence[Call]) -> torch.Tensor:
    """As `outputs`, from a CUDA graph that was captured on other inputs of the same shapes."""
    static = inputs(case, calls[0][0].shape[0], "cuda", seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            built(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = built(*static)
    found = []
    for call in calls:
        for target, source in zip(static, call, strict=True):
            target.copy_(source)
        graph.replay()
        found.append(output.clone())
    torch.cuda.synchronize()
    return torch.cat(found)


# --- The self-check and what it must find -----------------------------------------------------------------------------


def _rolled(tensor: torch.Tensor, dimension: int) -> torch.Tensor:
    """As bytes where that is what it holds: 8-bit floats know few operations."""
    view = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return view.roll(1, dimension).view(tensor.dtype)


def _halves(expert: Raw) -> Raw:
    names = ("w13", "w13_scale", "w13_zero_point", "w13_bias")
    return {name: torch.cat(expert[name].chunk(2)[::-1]) for name in names if name in expert}


def faults(case: Case) -> dict[str, Callable[[Raw], Raw]]:
    """Conversions that go wrong: canonical tensors of an expert to those that are not as they should be."""
    scheme = case.scheme
    found: dict[str, Callable[[Raw], Raw]] = {
        "scales of rows moved": lambda expert: {name: _rolled(expert[name], 0) for name in ("w13_scale", "w2_scale")},
        "rows of w2 moved": lambda expert: {"w2": _rolled(expert["w2"], 0)},
    }
    if case.gated:
        found["gate and up exchanged"] = _halves
    if -1 < scheme.group_size < case.hidden:
        found["scales of groups moved"] = lambda expert: {"w13_scale": _rolled(expert["w13_scale"], 1)}
    if scheme.zero_points:
        middle = 1 << scheme.bits - 1
        found["zero points left out"] = lambda expert: {
            name: torch.full_like(expert[name], middle) for name in ("w13_zero_point", "w2_zero_point")
        }
    if scheme.act_order == "group":
        found["order left out"] = lambda expert: {
            name: torch.arange(expert[name].numel(), dtype=expert[name].dtype, device=expert[name].device)
            for name in ("w13_order", "w2_order")
        }
    if case.bias:
        found["w13's biases left out"] = lambda expert: {"w13_bias": torch.zeros_like(expert["w13_bias"])}
        found["w2's biases left out"] = lambda expert: {"w2_bias": torch.zeros_like(expert["w2_bias"])}
    return found


class _Faulty:
    """A backend whose conversion gets other tensors than it should, or whose experts another activation."""

    def __init__(
        self,
        backend: Any,
        fault: Callable[[Raw], Raw] = lambda expert: expert,
        activation: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._backend, self._fault, self._activation = backend, fault, activation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def convert(self, expert: Mapping[str, torch.Tensor], problem: Any, plan: Any) -> Any:
        """Of the wrong tensors."""
        return self._backend.convert({**expert, **self._fault(dict(expert))}, problem, plan)

    def build_experts(self, tensors: Any, problem: Any, plan: Any, builder: Any) -> Any:
        """With the wrong activation."""
        return self._backend.build_experts(tensors, _with(problem, self._activation), plan, builder)


class _Misled:
    """vLLM's side, which tells its classes of another activation in both of their configs."""

    def __init__(self, release: Any, activation: Mapping[str, Any]) -> None:
        self._release, self._activation = release, activation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._release, name)

    def quant_config(self, problem: Any, tensors: Any) -> Any:
        """Of a layer with the wrong activation."""
        return self._release.quant_config(_with(problem, self._activation), tensors)

    def single_rank_config(self, moe: Any, problem: Any) -> Any:
        """Likewise."""
        config = self._release.single_rank_config(moe, problem)
        for name, value in self._activation.items():
            if hasattr(config, f"swiglu_{name}"):
                setattr(config, f"swiglu_{name}", value)
        return config


def _with(problem: Any, activation: Mapping[str, Any]) -> Any:
    return dataclasses.replace(problem, activation=dataclasses.replace(problem.activation, **activation))


def _checked(built: Built, backend: Any, release: Any, plan: Any = None, batched: bool = False) -> Any:
    """What the self-check says of a backend, on a layer that is not converted; `plan` is the decision's by default.

    With `batched`, of tokens that an all-to-all has sorted by expert. No device is torch's default, as where vLLM
    processes loaded weights: a default is asked for by each of thousands of operations.
    """
    from vllm_moe_oracle import schemes
    from vllm_moe_oracle.verification import self_check

    method = built.method
    problem = method.decision.problem
    if batched:
        problem = dataclasses.replace(problem, parallel=dataclasses.replace(problem.parallel, format="batched"))
    raw = schemes.module(problem.scheme.name).read(dict(built.layer.named_parameters(recurse=False)), problem)
    plan = plan or method.decision.plan
    result = self_check.compare_with_reference(backend, problem, plan, raw, method.moe, release)
    if built.device == "cuda":
        torch.cuda.synchronize()
    return result


def _allocated(device: str) -> int:
    """Bytes on the card that something holds on to."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def self_check(built: Built, table: Table, case: Case) -> dict[str, Any]:
    """What the self-check says of the layer's backend, and of the same backend with each fault. Before conversion.

    A fault with which the backend raises is not found by a comparison; it is named under ``raised``. What of the
    activation a backend cannot ignore, for it refuses every other value, is under ``refused``, with its reason.
    """
    import vllm_moe_oracle.devices.detect as machine

    method = built.method
    before = _allocated(built.device)
    first = _checked(built, method.backend, method.adapter)
    kept = _allocated(built.device) - before
    with _Compiled() as compiled:
        second = _checked(built, method.backend, method.adapter)
    found: dict[str, Any] = {"tolerance": float(f"{second.tolerance:.3e}"), "first_seconds": round(first.seconds, 3)}
    found["first_kept_mib"] = round(kept / 2**20, 3)
    if compiled.count:
        found["compiled"] = compiled.count
    if second.skip_reason:
        return found | {"skipped": second.skip_reason}
    found |= {"error": float(f"{second.error:.3e}"), "seconds": round(second.seconds, 4), "passed": second.passed}
    faulty = {
        name: (_Faulty(method.backend, fault), method.adapter)
        for name, fault in {**faults(case), **table.faults(case)}.items()
    }
    found |= {"faults": {}, "missed": [], "raised": {}, "refused": {}}
    for name, activation in table.ignored(case).items():
        # A kernel that has the value built in can be told of no other: its backend refuses layers that have one.
        refused = method.backend.check(_with(method.decision.problem, activation), machine.detect()).reasons
        if refused:
            found["refused"][name] = str(refused[0])
        else:
            faulty[name] = _Faulty(method.backend, activation=activation), _Misled(method.adapter, activation)
    for name, (backend, release) in faulty.items():
        try:
            result = _checked(built, backend, release)
        except Exception as error:  # one fault's must not hide what is said of the others
            found["raised"][name] = f"{type(error).__name__}: {error}"[:200]
            continue
        found["faults"][name] = float(f"{result.error:.3e}")
        found["missed"] += [name] * result.passed
    return found


def assert_faults_show(table: Table, case: Case, name: str) -> None:
    """Asserts that a backend's self-check passes on a layer of the emulation's, and fails with each fault.

    For backends that vLLM's layer does not run on one rank, so that `rows_of` has none of theirs.
    """
    from vllm_moe_oracle import plugin
    from vllm_moe_oracle.devices import detect
    from vllm_moe_oracle.oracle.registry import default_registry

    backend = default_registry()[name]
    plugin.register()
    try:
        built = build(table, case, table.checkpoint(case, "cuda"), "cuda", "auto", own="emulation")
        plan = backend.plan(built.method.decision.problem, detect.detect())
        result = _checked(built, backend, built.method.adapter, plan)
        assert result.passed and not result.skip_reason, str(result)
        for fault, changed in {**faults(case), **table.faults(case)}.items():
            assert not _checked(built, _Faulty(backend, changed), built.method.adapter, plan).passed, fault
        built.close()
    finally:
        plugin.unregister()


_WEIGHTS = ("weight_packed", "qweight", "weight")
"""Ends of the names of a layer's codes, by packing."""


def stored(built: Built) -> dict[str, torch.Tensor]:
    """The tensors that stock's expert class looks at, by canonical name."""
    config = built.method.moe_kernel.fused_experts.quant_config
    found = {}
    for own, index in (("w13", 1), ("w2", 2)):
        names = [f"{own}_{name}" for name in _WEIGHTS if hasattr(built.layer, f"{own}_{name}")]
        found[own] = getattr(built.layer, names[0])
        for suffix, attribute in (("scale", "scale"), ("zero_point", "zp"), ("bias", "bias")):
            found[f"{own}_{suffix}"] = getattr(config, f"w{index}_{attribute}")
    return {name: tensor.data.clone() for name, tensor in found.items() if tensor is not None}


def assert_same_bytes(tensor: torch.Tensor, expected: torch.Tensor, name: str, same: bool = True) -> None:
    """Asserts that two tensors of one shape hold the same bytes, or, with `same` false, that they do not."""
    assert tensor.shape == expected.shape and tensor.element_size() == expected.element_size(), name
    found, theirs = (each.contiguous().view(torch.uint8) for each in (tensor, expected))
    assert torch.equal(found, theirs) is same, name


class Quiet:
    """A lock that processes share while they work, and that each has alone while it measures time.

    Args:
        file: the lock's file; "" where no other process works.
    """

    def __init__(self, file: str) -> None:
        self._file = os.open(file, os.O_RDWR | os.O_CREAT) if file else None
        self._take(fcntl.LOCK_SH)

    def _take(self, how: int) -> None:
        if self._file is not None:
            fcntl.flock(self._file, how)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process works."""
        self._take(fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._take(fcntl.LOCK_SH)


def time_self_checks(
    table: Table, case: Case, checkpoint: Checkpoint, device: str, rows: list[dict[str, Any]], quiet: Quiet
) -> None:
    """Puts the longest of some self-checks of each row in its place, timed alone, after one that is not counted.

    Args:
        table: of the case's scheme.
        case: the layer.
        checkpoint: its weights.
        device: ``cuda`` or ``cpu``.
        rows: of the layer, in this process; those whose self-check passed, and that did not fail after it, are changed.
        quiet: nobody else works while it is held.
    """
    from vllm_moe_oracle import plugin

    plugin.register()
    for row in rows:
        # A backend may refuse the weights after its self-check passed: there is nothing of it to judge.
        if "failure" in row or not row.get("self_check", {}).get("passed"):
            continue
        built = build(table, case, checkpoint, device, "auto", own=row["backend"])
        with quiet.alone(), _Compiled() as compiled:
            method = built.method
            _checked(built, method.backend, method.adapter)
            before = _allocated(device)
            seconds = [round(_checked(built, method.backend, method.adapter).seconds, 4) for _ in range(TIMED)]
            kept = (_allocated(device) - before) / 2**20
        row["self_check"] |= {"seconds": max(seconds), "each": seconds, "alone": True, "kept_mib": round(kept, 3)}
        if compiled.count:
            # From the cache on disk, by the check that is not counted.
            row["self_check"]["loaded"] = compiled.count
        row["broken"] = broken(row)
        row["pass"] = not row["broken"]
        built.close()
    plugin.unregister()


# --- The table ------------------------------------------------------------------------------------------------------


class _Compiled:
    """Counts the kernels that Triton compiles, or loads from its cache, while it is entered."""

    def __enter__(self) -> _Compiled:
        from triton import knobs

        self.count, self._runtime = 0, knobs.runtime
        self._runtime.jit_post_compile_hook = self._counted
        return self

    def _counted(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def __exit__(self, *args: object) -> None:
        self._runtime.jit_post_compile_hook = None


def accepted(case: Case, machine: Any) -> dict[str, str]:
    """The backends that the oracle accepts for the layer on a machine, and the precision of their activations."""
    from vllm_moe_oracle import settings
    from vllm_moe_oracle.oracle.registry import default_registry
    from vllm_moe_oracle.oracle.selection import evaluate_candidates

    problem, registry = case.problem(), default_registry()
    return {
        each.backend: registry[each.backend].activations(problem)
        for each in evaluate_candidates(problem, machine, settings.load())
        if each.accepted
    }


class FewKernels:
    """While it is entered, Humming compiles the kernels of these numbers of rows only: of its configurations for a
    product, each for a range of rows, those whose range has one of them. What is launched for them stays the same;
    the library's launcher raises for any other number.

    Args:
        rows: of calls; a launch looks at the kernel of one row, too.
    """

    def __init__(self, rows: Iterable[int]) -> None:
        self.rows = frozenset(rows) | {1}
        self._called: dict[str, str] = {}

    def __enter__(self) -> FewKernels:
        self._kernel = importlib.import_module("humming.kernel.humming").HummingKernel
        self._whole = vars(self._kernel)["prepare_kernels"]
        prepare = self._kernel.prepare_kernels

        def few(layer: Any, compute: Any = None, tuning: Any = None, *device: Any) -> Any:
            return prepare(layer, compute, self.called(tuning) if isinstance(tuning, str) else tuning, *device)

        self._kernel.prepare_kernels = staticmethod(few)
        return self

    def __exit__(self, *args: object) -> None:
        self._kernel.prepare_kernels = self._whole

    def called(self, tuning: str) -> str:
        """Those of some configurations ``[more than, up to, configuration]`` in JSON that are called."""
        if tuning not in self._called:
            found = json.loads(tuning)
            if isinstance(found, list):
                found = [each for each in found if any(each[0] < rows <= (each[1] or 1 << 30) for rows in self.rows)]
            self._called[tuning] = json.dumps(found)
        return self._called[tuning]


def rows_called(case: Case, tokens: Iterable[int]) -> set[int]:
    """Numbers of rows by which vLLM's classes over Humming choose a kernel: those of calls of so many tokens, of which
    a rank has its share, of the spread experts' call and of self-checks, whose layers are whole."""
    from vllm_moe_oracle.backends import MAX_CHECK_TOKENS
    from vllm_moe_oracle.verification import converted_layer, inputs

    share = {-(-count * case.top_k * case.local_experts // case.experts) for count in (*tokens, SPREAD_TOKENS)}
    chosen = min(case.top_k, len(inputs.sample_experts(case.problem())))
    checked = {*inputs.call_counts([], 1 << 20), *inputs.REPEATED_COUNTS, inputs.WHOLE_BLOCKS}
    checked |= {inputs.LARGE_CALL, inputs.MAX_LARGE_CALL}
    small = {count * chosen for count in checked}
    # The converted layer's: one token for each expert on this rank, many tokens, and the last ones once more.
    whole = {count * case.top_k for count in (case.local_experts, MAX_CHECK_TOKENS, converted_layer.FEW_EXPERTS)}
    return share | small | whole | {-(-rows * case.local_experts // case.experts) for rows in whole}


def takes_any_map(name: str, case: Case, machine: Any) -> bool:
    """Whether a rank's experts may be any for a backend; there are some that take them for neighbors."""
    from vllm_moe_oracle.oracle.registry import default_registry

    backend, problem = default_registry()[name], case.problem()
    dealt_out = dataclasses.replace(problem, parallel=Parallel(ep=2, placement="round_robin"))
    codes = {reason.code for reason in backend.check(dealt_out, machine).reasons}
    return backend.capabilities.expert_parallel and "expert_parallel.placement" not in codes


def join_alone(device: str) -> None:
    """vLLM's process groups for this process alone, and its workspaces; several modules may ask for them."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    from vllm_moe_oracle.compat import standalone_layer

    torch.backends.cuda.matmul.allow_tf32 = False
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device=device))):
        standalone_layer.join_alone(device)


def rows_of(
    table: Table,
    case: Case,
    device: str,
    only: set[str],
    tokens: tuple[int, ...],
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
    quiet: Quiet | None = None,
) -> list[dict[str, Any]]:
    """The rows of one layer; `join_alone` must have been called.

    Args:
        table: of the case's scheme.
        case: the layer.
        device: ``cuda`` or ``cpu``.
        only: backends; all accepted ones when empty.
        tokens: how many tokens a call has.
        keep: called with the rows so far after each: a kernel may take the process down.
        quiet: shared with other processes while they work; None when there are none.
    """
    import vllm_moe_oracle.devices.detect as machine
    from vllm_moe_oracle import plugin

    plugin.unregister()
    backends = {name: kind for name, kind in accepted(case, machine.detect()).items() if not only or name in only}
    humming = any(name.startswith("humming") for name in backends)
    with FewKernels(rows_called(case, tokens)) if humming else nullcontext():
        return _rows_of(table, case, device, backends, tokens, keep, quiet or Quiet(""))


@dataclass(frozen=True)
class _Samples:
    """A layer's weights and calls.

    Attributes:
        checkpoint: its weights.
        calls: by number of tokens.
        spread: the call of the spread experts.
        places: their expert map.
        expected: outputs by precision of activations and number of tokens, those of `spread` under 0.
    """

    checkpoint: Checkpoint
    calls: Mapping[int, Sequence[Call]]
    spread: Call
    places: torch.Tensor
    expected: Mapping[str, Mapping[int, torch.Tensor]]


def _samples(table: Table, case: Case, device: str, tokens: tuple[int, ...], kinds: set[str]) -> _Samples:
    """Random weights and calls, and outputs for each precision of activations in `kinds`, and for 16 bits."""
    checkpoint = table.checkpoint(case, device)
    calls = {count: drawn(case, count, device) for count in tokens}
    places = spread_places(case, device)
    spread = inputs(case, SPREAD_TOKENS, device, seed=2)
    placed = (*spread[:2], places[spread[2].long()])
    mine = [seen(case, call) for call in chain(*calls.values())]
    expected: dict[str, dict[int, torch.Tensor]] = {}
    for kind in {*kinds, "16bit"}:
        given = iter(reference(case, checkpoint, [*mine, placed], table.rounded.get(kind, lambda values: values)))
        expected[kind] = {count: torch.cat([next(given) for _ in each]) for count, each in calls.items()}
        expected[kind][0] = next(given)
    return _Samples(checkpoint, calls, spread, places, expected)


def _measure(row: dict[str, Any], table: Table, case: Case, sample: _Samples, device: str) -> None:
    """Adds to a row what a backend does with a layer: self-check, conversion, errors."""
    from vllm_moe_oracle.devices import detect

    expected = sample.expected[row["activations"]]
    built = build(table, case, sample.checkpoint, device, "auto", own=row["backend"])
    row["self_check"] = self_check(built, table, case)
    built.convert()
    row["experts"] = type(built.method.moe_kernel.fused_experts).__name__
    row["convert_seconds"], row["convert_peak_mib"] = round(built.seconds, 3), round(built.peak / 2**20, 1)
    row["one_expert_mib"] = round(sample.checkpoint.expert_mib, 1)
    row["kernel_mib"] = round(sum(each.untyped_storage().nbytes() for each in built.layer.parameters()) / 2**20)
    row["checkpoint_mib"] = round(sample.checkpoint.expert_mib * case.local_experts)
    row["error"] = {}
    for count, calls in sample.calls.items():
        with _Compiled() if device == "cuda" else nullcontext() as compiled:
            eager = outputs(built, calls)
        if compiled is not None and compiled.count:
            row.setdefault("compiled", {})[count] = compiled.count
        found = {"eager": relative_error(eager, expected[count])}
        if device == "cuda":
            found["graph"] = relative_error(captured(built, case, calls), expected[count])
        row["error"][count] = {mode: float(f"{value:.3e}") for mode, value in found.items()}
    if takes_any_map(row["backend"], case, detect.detect()):
        found_spread = built.spread(*sample.spread, sample.places)
        row["spread_error"] = float(f"{relative_error(found_spread, expected[0]):.3e}")
    built.close()


def _rows_of(
    table: Table,
    case: Case,
    device: str,
    backends: Mapping[str, str],
    tokens: tuple[int, ...],
    keep: Callable[[list[dict[str, Any]]], None],
    quiet: Quiet,
) -> list[dict[str, Any]]:
    """As `rows_of`, of backends with the precision of their activations."""
    import vllm

    from vllm_moe_oracle import plugin

    sample = _samples(table, case, device, tokens, set(backends.values()))
    # Humming compiles for long, and Marlin's first call takes as long: what is given up with them are their own rows.
    order = sorted(backends.items(), key=lambda each: (each[0] != "emulation", each[0].startswith("humming")))
    rows: list[dict[str, Any]] = []
    for name, kind in order:
        stock, stock_error = {}, ""
        if name in table.stock:
            expected = sample.expected["16bit"]
            stock, stock_error = _stock(table, case, sample.checkpoint, device, name, sample.calls, expected)
        plugin.register()
        state = plugin.state()
        if not state.active:
            raise SystemExit(f"the plugin stands down: {state.reason}")
        row: dict[str, Any] = {"layer": case.name, "backend": name, "vllm": vllm.__version__, "activations": kind}
        if kind in table.limits:
            row["limit"] = table.limits[kind]
        if name.startswith("humming"):
            row["rows_of_kernels"] = sorted(rows_called(case, tokens))
        start = time.perf_counter()
        try:
            _measure(row, table, case, sample, device)
            if stock:
                row["stock_error"] = {count: float(f"{stock[count]:.3e}") for count in tokens}
                row["stock_convert_peak_mib"] = round(stock[0] / 2**20, 1)
            if stock_error:
                row["stock_failure"] = stock_error
            row["broken"] = broken(row)
            row["pass"] = not row["broken"]
        except Exception as error:
            row |= {"failure": f"{type(error).__name__}: {error}"[:400], "pass": False}
        row["seconds"] = round(time.perf_counter() - start, 1)
        rows.append(row)
        print_row(row)
        keep(rows)
        plugin.unregister()
        if device == "cuda":
            torch.cuda.empty_cache()
    time_self_checks(table, case, sample.checkpoint, device, rows, quiet)
    keep(rows)
    return rows


def _stock(
    table: Table,
    case: Case,
    checkpoint: Checkpoint,
    device: str,
    name: str,
    real: Mapping[int, Sequence[Call]],
    expected: Mapping[int, torch.Tensor],
) -> tuple[dict[int, float], str]:
    """What stock vLLM makes of the layer with the class that a backend wraps.

    Args:
        table: of the case's scheme.
        case: the layer.
        checkpoint: its weights.
        device: ``cuda`` or ``cpu``.
        name: the backend.
        real: calls, by number of tokens.
        expected: what they should give.

    Returns:
        Errors by number of tokens, under 0 the conversion's peak in bytes, and no words; or nothing, and why not.
    """
    from vllm_moe_oracle.oracle.registry import default_registry

    try:
        built = build(table, case, checkpoint, device, table.stock[name])
        built.convert()
        runs = type(getattr(built.method.moe_kernel, "fused_experts", None)).__name__
        if runs != default_registry()[name].stock_class_name:
            raise RuntimeError(f"stock runs {runs}")
        table.after_conversion(built.layer, case, here(case, checkpoint), table.stock[name])
        errors = {count: relative_error(outputs(built, calls), expected[count]) for count, calls in real.items()}
        errors[0] = built.peak
        built.close()
    except Exception as error:  # that stock cannot run a layer is a result
        return {}, f"{type(error).__name__}: {error}"[:200]
    return errors, ""


def broken(row: dict[str, Any]) -> list[str]:
    """The module's rules that a row does not keep; empty when it passes."""
    found = []
    limit = row.get("limit", LIMIT)
    if row["convert_peak_mib"] > row["one_expert_mib"] + CONVERSION_SLACK_MIB:
        found.append("conversion's peak")
    for count, modes in row["error"].items():
        stock = row.get("stock_error", {}).get(count)
        allowed = limit if stock is None else min(limit, RATIO * stock)
        # NaN is not within any limit.
        found += [f"{mode} at {count}" for mode, error in modes.items() if not error <= allowed]
    if not row.get("spread_error", 0.0) <= limit:
        found.append("spread experts")
    check = row["self_check"]
    if "skipped" not in check:
        found += [f"self-check misses: {name}" for name in check["missed"]]
        found += [f"not self-checked, raised: {name}" for name in check["raised"]]
        found += ["self-check"] * (not check["passed"])
        found += ["self-check's time"] * (check["seconds"] > SELF_CHECK_SECONDS)
        found += ["self-check's memory"] * (check.get("kept_mib", 0.0) > 0)
    return found


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    where = f"{row['layer']:22} {row['backend']:22}"
    if "failure" in row:
        print(f"{where} FAIL {row['failure']}", flush=True)
        return
    errors = "  ".join(
        f"{count}: {'/'.join(f'{value:.2e}' for value in modes.values())}"
        + (f" (stock {row['stock_error'][count]:.2e})" if "stock_error" in row else "")
        for count, modes in row["error"].items()
    )
    check = row["self_check"]
    words = check.get("skipped") or f"{1e3 * check['seconds']:.0f} ms, {len(check['faults'])} faults"
    memory = f"peak {row['convert_peak_mib']} of {row['one_expert_mib']}+{CONVERSION_SLACK_MIB} MiB"
    mark = "PASS" if row["pass"] else f"FAIL ({'; '.join(row['broken'])})"
    spread = f"spread {row['spread_error']:.2e}" if "spread_error" in row else "not spread"
    print(f"{where} {mark} {errors}  {spread}  {memory}  self-check {words}", flush=True)


def conditions(scheme: str) -> dict[str, Any]:
    """What the numbers depend on."""
    from vllm_moe_oracle.devices import detect

    found = detect.detect()
    return {
        "gpu": found.name, "capability": found.capability, "packages": dict(found.packages), "torch": torch.__version__,
        "cuda": torch.version.cuda, "limit": LIMIT, "ratio_to_stock": RATIO, "dtype": "bfloat16",
        "self_check_seconds": SELF_CHECK_SECONDS, "conversion_slack_mib": CONVERSION_SLACK_MIB,
        "error": f"relative L2 over all tokens, {DRAWN} or more, against float32", "date": time.strftime("%Y-%m-%d"),
        "command": f"python tests/gpu/backend_table.py --scheme {scheme} --json FILE",
    }  # fmt: skip


def in_processes(
    scheme: str,
    names: list[str],
    only: set[str],
    extra: list[str],
    processes: int,
    seconds: float,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Runs each layer in processes of its own, many at once: kernels are compiled on many cores, and one that writes
    where it must not harms no other backend. A process that is ready but for the times of its self-checks makes room
    for another, and waits until all are: many at once on one card are no measure of time. Processes are spread over
    the visible cards.

    Args:
        scheme: whose table.
        names: layers.
        only: backends; all when empty.
        extra: arguments of each process.
        processes: how many at once.
        seconds: what all may take. What then would leave no time to time the self-checks of the others is ended before,
            and says so in its row; its rows before that are kept.
        keep: called with the rows so far, also those of processes that still run: the table may be ended, too.
    """
    import vllm_moe_oracle.devices.detect as machine

    table = table_of(scheme)
    folder = Path(tempfile.mkdtemp())
    waiting: list[_Task] = []
    for name in names:
        found = [each for each in accepted(table.cases[name], machine.detect()) if not only or each in only]
        # vLLM brings Marlin's kernels compiled.
        quick = [each for each in found if each.startswith("marlin") or each == "emulation"]
        groups = (*([each] for each in found if each not in quick), quick)
        waiting += [_Task(name, tuple(group), folder) for group in groups if group]
    # What compiles comes first.
    waiting.sort(key=lambda task: "emulation" in task.backends)
    deadline = time.monotonic() + seconds
    rows = _run_tasks(scheme, waiting, extra, processes, deadline, lambda rows: keep(in_order(table, rows)))
    return in_order(table, rows)


def in_order(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by their layers' order, and by backend."""
    order = list(table.cases)
    return sorted(rows, key=lambda row: (order.index(row["layer"]), row["backend"]))


def merge(scheme: str, files: list[str]) -> dict[str, Any]:
    """One table of several that were made under the same conditions; where two have a row, the later file's holds, but
    one without numbers replaces none that has some.

    ``runs`` of the conditions say by name how rows were run, of each row its ``run``: the tables' are put together.
    Days may differ (the last one is kept), and so may what is installed, but for what two have in another version.

    Raises:
        ValueError: other conditions differ, or one name is said of two runs.
    """
    tables = [json.loads(Path(file).read_text()) for file in files]
    first = tables[0]["conditions"]
    merged = {**first, "packages": {}, "runs": {}}
    for file, each in zip(files, tables, strict=True):
        kept = each["conditions"]
        differ = [name for name in first | kept if name not in FREE and first.get(name) != kept.get(name)]
        for name in ("packages", "runs"):
            known, more = merged[name], kept.get(name, {})
            differ += [f"{name}: {one}" for one in known if one in more and known[one] != more[one]]
            known.update(more)
        if differ:
            raise ValueError(f"{file} was made with another {', '.join(differ)} than {files[0]}")
    merged = {name: value for name, value in merged.items() if name not in ("packages", "runs") or value}
    if "date" in first:
        merged["date"] = max(each["conditions"]["date"] for each in tables)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for row in chain.from_iterable(each["rows"] for each in tables):
        key = row["layer"], row["backend"]
        if key not in rows or "failure" not in row or "failure" in rows[key]:
            rows[key] = row
    return {"conditions": merged, "rows": in_order(table_of(scheme), list(rows.values()))}


@dataclass(frozen=True)
class _Task:
    """Some backends of one layer, in a process of their own.

    Attributes:
        layer: its name.
        backends: their names.
        folder: for the process's rows and log.
    """

    layer: str
    backends: tuple[str, ...]
    folder: Path

    @property
    def file(self) -> Path:
        """The rows that the process has written."""
        return self.folder / f"{self.layer}.{self.backends[0]}.json"

    @property
    def log(self) -> Path:
        """Its output."""
        return self.file.with_suffix(".log")

    def rows(self) -> list[dict[str, Any]]:
        """The rows so far."""
        found: list[dict[str, Any]] = json.loads(self.file.read_text())["rows"] if self.file.exists() else []
        return found

    def waits(self) -> bool:
        """Whether only the times of self-checks are missing."""
        return len(self.rows()) == len(self.backends)

    def missing_rows(self, backends: Iterable[str], why: str) -> list[dict[str, Any]]:
        """Rows that say why backends have none."""
        return [{"layer": self.layer, "backend": each, "failure": why, "pass": False} for each in backends]

    def start(self, scheme: str, extra: list[str], card: str) -> subprocess.Popen[bytes]:
        """Starts the process on a card."""
        command = [sys.executable, __file__, "--scheme", scheme, "--layer", self.layer, "--json", str(self.file)]
        command += [*extra, "--quiet", str(self.folder / "quiet")]
        command += [word for each in self.backends for word in ("--backend", each)]
        environment = os.environ | ({"CUDA_VISIBLE_DEVICES": card} if card else {})
        with self.log.open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    def finish(self, process: subprocess.Popen[bytes], late: bool) -> list[dict[str, Any]]:
        """Ends the process, prints its lines of the table, and returns a row for each backend."""
        if process.poll() is None and not self.waits():
            process.send_signal(signal.SIGUSR1)  # its log says where it is
            time.sleep(1)
        process.kill()
        process.wait()
        text = self.log.read_text()
        print("\n".join(line for line in text.splitlines() if line.startswith(f"{self.layer} ")), flush=True)
        rows = self.rows()
        checks = {row["backend"]: row.get("self_check", {}) for row in rows if "failure" not in row}
        beside = [each for each, check in checks.items() if check.get("passed") and "alone" not in check]
        if beside:
            print(f"{self.layer} {', '.join(beside)}: self-check not timed alone:\n{text[-1000:]}", flush=True)
        # A negative status is a signal: a kernel's library may end the process without a word of Python.
        why = "ended, being late: " if late else f"no result, exit status {process.returncode}: "
        missing = [each for each in self.backends if each not in {row["backend"] for row in rows}]
        if missing:
            print(f"{self.layer} {', '.join(missing)}: {why}\n{text[-2000:]}", flush=True)
        return rows + self.missing_rows(missing, why + text[-400:])


def _run_tasks(
    scheme: str,
    waiting: list[_Task],
    extra: list[str],
    processes: int,
    deadline: float,
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """The rows of tasks, `processes` at once besides those that only wait for silence. Those that are late are ended
    while there is time left for these."""
    running: dict[_Task, tuple[subprocess.Popen[bytes], str]] = {}
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    rows: list[dict[str, Any]] = []
    reserve = TIMING_SECONDS * len(waiting)
    kept = time.monotonic()
    while waiting or running:
        if time.monotonic() > kept + KEEP_SECONDS:
            kept = time.monotonic()
            keep([*rows, *chain.from_iterable(task.rows() for task in running)])
        busy = [card for task, (_, card) in running.items() if not task.waits()]
        while waiting and len(busy) < processes:
            card = min(cards, key=busy.count)
            busy.append(card)
            task = waiting.pop(0)
            running[task] = task.start(scheme, extra, card), card
        time.sleep(0.2)
        left = deadline - time.monotonic()
        if left < reserve:
            rows += chain.from_iterable(task.missing_rows(task.backends, "not begun") for task in waiting)
            waiting.clear()
        for task, (process, _) in list(running.items()):
            late = left < (0 if task.waits() else reserve)
            if late or process.poll() is not None:
                del running[task]
                rows += task.finish(process, late)
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", required=True, help="mxfp8, wna16...: the name of a table beside this file")
    parser.add_argument("--layer", action="append", help="a name of a case; every one that is not tiny by default")
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", help="file to write; - for none")
    parser.add_argument("--merge", nargs="+", help="tables of some layers each, to become one; nothing is run")
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument("--seconds", type=float, default=540, help="after which what still runs is given up")
    parser.add_argument("--quiet", default="", help="of a process of a table: the lock that they share while they work")
    args = parser.parse_args()
    tokens = tuple(int(each) for each in args.tokens.split(","))
    table = table_of(args.scheme)

    def keep(rows: list[dict[str, Any]]) -> None:
        if args.json and args.json != "-":
            content = {"conditions": conditions(args.scheme), "rows": rows}
            partial = Path(args.json).with_suffix(".part")
            partial.write_text(json.dumps(content, indent=1) + "\n")
            partial.replace(args.json)  # a process that is ended leaves a whole file

    names = args.layer or [name for name in table.cases if not name.startswith("tiny")]
    for name in names:
        if name not in table.cases:
            parser.error(f"no layer {name}; there are {', '.join(table.cases)}")
    if args.merge:
        merged = merge(args.scheme, args.merge)
        Path(args.json).write_text(json.dumps(merged, indent=1) + "\n")
        rows = merged["rows"]
    elif len(names) == 1:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)
        quiet = Quiet(args.quiet)
        join_alone(args.device)
        rows = rows_of(table, table.cases[names[0]], args.device, set(args.backend), tokens, keep, quiet)
        keep(rows)
    else:
        extra = ["--tokens", args.tokens, "--device", args.device]
        rows = in_processes(args.scheme, names, set(args.backend), extra, args.processes, args.seconds, keep)
        keep(rows)
    failed = [f"{row['layer']} {row['backend']}" for row in rows if not row["pass"]]
    print(
        f"{len(rows) - len(failed)} of {len(rows)} rows pass{'; not ' if failed else ''}{', '.join(failed)}", flush=True
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    # A table's file imports this one by name: it must be the same module.
    sys.modules["tests.gpu.backend_table"] = sys.modules["__main__"]
    main()
