"""Problems, devices and backends that tests share; no torch, no vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vllm_moe_oracle.backends import Backend, Capabilities, Rule
from vllm_moe_oracle.core.decision import Numerics
from vllm_moe_oracle.core.problem import Activation, ActOrder, Device, Parallel, Problem, Scheme
from vllm_moe_oracle.oracle.registry import Registry
from vllm_moe_oracle.releases.supported import DEFAULT_PACKAGES

MXFP8 = Scheme("mxfp8", bits=8, group_size=32, packing="modelopt", activations="16bit")
MXFP8_W8A8 = dataclasses.replace(MXFP8, activations="mxfp8")
INT4_G128 = Scheme("wna16", bits=4, group_size=128, packing="compressed-tensors")
INT4_G32 = Scheme("wna16", bits=4, group_size=32, packing="compressed-tensors")
"""Its groups cannot be halved."""

SILU = Activation("silu")
RELU2 = Activation("relu2", gated=False)
GPT_OSS = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)

_GPU_PACKAGES = {name: DEFAULT_PACKAGES["cuda"][name] for name in ("vllm", "torch")}

CPU = Device("cpu", "a CPU", features=("avx2",), packages=DEFAULT_PACKAGES["cpu"])
H200 = Device("cuda", "NVIDIA H200", 90, 132, 141.0, packages=_GPU_PACKAGES)
B200 = Device("cuda", "NVIDIA B200", 100, 148, 180.0, packages=_GPU_PACKAGES)

_QWEN3 = Problem(
    layer="model.layers.0.mlp.experts",
    scheme=MXFP8,
    num_experts=128,
    local_experts=128,
    top_k=8,
    hidden_size=2048,
    intermediate_size=768,
    activation=SILU,
)


def problem(**changes: Any) -> Problem:
    """Qwen3-30B-A3B's MoE layer in MXFP8, with `changes`; `tp`, `ep`, ... change `parallel`, `experts` both counts."""
    parallel = {name: changes.pop(name) for name in ("tp", "ep", "dp", "format") if name in changes}
    if parallel:
        changes["parallel"] = Parallel(**parallel)
    if "experts" in changes:
        changes["num_experts"] = changes["local_experts"] = changes.pop("experts")
    return dataclasses.replace(_QWEN3, **changes)


def int_scheme(packing: str, bits: int, group: int, zeros: bool = False, order: ActOrder = "none") -> Scheme:
    """A format of integers."""
    return Scheme("wna16", bits, group, packing, zeros, order)


class Plain(Backend):
    """A backend that runs anything of its schemes anywhere, until its attributes are changed."""

    name = "plain"
    schemes = ("mxfp8",)
    capabilities = Capabilities(devices=("cuda", "cpu"))
    rank = 10.0
    consumes: Any = "16bit"

    def priority(self, problem: Problem, device: Device) -> float:
        """Its `rank`."""
        return self.rank

    def activations(self, problem: Problem) -> Any:
        """What it `consumes`."""
        return self.consumes

    def numerics(self, problem: Problem) -> Numerics:
        """Words of no meaning."""
        return Numerics("as they are", self.consumes)

    def convert(self, expert: Any, problem: Problem, plan: Any) -> Any:
        """The same tensors."""
        return dict(expert)

    def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        """What the builder makes of nothing."""
        return builder.from_function(lambda *args: None)


def backend(name: str, **attributes: Any) -> Backend:
    """A `Plain` backend of that name with other class attributes."""
    made = type(f"Made_{name}", (Plain,), {"name": name, **attributes})()
    assert isinstance(made, Backend)
    return made


def refusing(name: str, *codes: str, remedy: str = "", **attributes: Any) -> Backend:
    """A backend that refuses everything, with one reason a code."""

    def rule(code: str) -> Rule:
        return Rule(code, lambda p, d: True, lambda p, d: f"{name} refuses by {code} for {p.hidden_size}", remedy)

    return backend(name, rules=tuple(map(rule, codes)), **attributes)


def registry(backends: Iterable[Backend]) -> Registry:
    """A registry of exactly these."""
    made = Registry()
    for item in backends:
        made.add(item, "test")
    return made
