"""Backends with a delay or a fault on the CPU, small layers, and fixtures to measure them.

Modules import the fixtures that they use by name.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tests.lib.cases import GPT_OSS, INT4_G128, MXFP8_W8A8, RELU2, problem, registry
from vllm_moe_oracle import settings
from vllm_moe_oracle.backends.emulation import Emulation, forward
from vllm_moe_oracle.core.problem import Problem, Scheme
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measurements import lookup
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.measuring import benchmarks, engine, precompile, timing, tuning
from vllm_moe_oracle.oracle import selection

MODULES = (selection, tuning, benchmarks, precompile, lookup)
"""The modules that look backends up in the default registry."""

SMALL: dict[str, Any] = {"experts": 16, "top_k": 4, "hidden_size": 128, "intermediate_size": 64}
TOKEN_COUNTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160)
MXFP4 = Scheme("mxfp4", 4, 32, "gpt_oss")
INT4_G32 = dataclasses.replace(INT4_G128, group_size=32)


class Slowed(Emulation):
    """The emulation under another name, with a delay for some numbers of tokens, or with something worse."""

    slept: ClassVar[float] = 0.0
    """Seconds of all delays so far."""
    sleep: ClassVar[Callable[[float], object]] = staticmethod(time.sleep)
    """Waits for a delay; where a clock adds `slept`, nothing needs to wait."""

    def __init__(
        self, name: str, rank: float, delay: Callable[[int], float] = lambda tokens: 0.0, fault: str = ""
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.rank, self.delay, self.fault = rank, delay, fault

    def priority(self, problem: Problem, device: Any) -> float:
        return self.rank

    def activations(self, problem: Problem) -> Any:
        return "16bit"

    def convert(self, expert: Any, problem: Problem, plan: Any) -> dict[str, Tensor]:
        if self.fault == "conversion":
            raise RuntimeError("cannot convert\nand more")
        return dict(expert)

    def build_experts(self, tensors: Any, problem: Problem, plan: Any, builder: Any) -> Any:
        exact = dataclasses.replace(problem, scheme=dataclasses.replace(problem.scheme, activations="16bit"))

        def run(out: Tensor, x: Tensor, *rest: Any) -> None:
            if self.fault == "crash" and x.shape[0] == 8:
                raise RuntimeError("the launch failed\nCUDA error: an illegal memory access was encountered")
            if self.fault == "exit" and x.shape[0] == 4:
                os._exit(3)
            if self.fault == "hang" and x.shape[0] == 4:
                time.sleep(1e6)
            if self.fault == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            forward(tensors, exact, out, x, *rest)
            if self.fault == "numbers":
                out.mul_(1.05)
            if self.fault == "nan":
                out[-1, -1] = float("nan")
            Slowed.sleep(self.delay(x.shape[0]))
            Slowed.slept += self.delay(x.shape[0])

        return builder.from_function(run)


LAYERS = {
    "mxfp8": problem(**SMALL),
    "declared mxfp8": problem(**SMALL, scheme=MXFP8_W8A8),
    "relu2": problem(**SMALL, activation=RELU2),
    "gpt-oss": problem(**SMALL, scheme=MXFP4, activation=dataclasses.replace(GPT_OSS, interleaved=True), has_bias=True),
    "int4": problem(**SMALL, scheme=INT4_G32),
    "int8 per channel": problem(**SMALL, scheme=dataclasses.replace(INT4_G128, bits=8, group_size=-1)),
    "zero points": problem(**SMALL, scheme=dataclasses.replace(INT4_G32, zero_points=True)),
    "act order": problem(**SMALL, scheme=dataclasses.replace(INT4_G32, act_order="group", packing="gptq")),
    "act order, shard": problem(**SMALL, scheme=dataclasses.replace(INT4_G32, act_order="group", packing="gptq"), tp=2),
    "half": problem(**SMALL, dtype="float16"),
    "expert parallel": dataclasses.replace(problem(**SMALL, ep=4), local_experts=4),
    "few experts": problem(**{**SMALL, "experts": 2, "top_k": 1}),
}


HERE = dataclasses.replace(detect.detect(), name="NVIDIA Pretended")


def plan(**changes: Any) -> tuning.TuneOptions:
    return tuning.TuneOptions(**{"token_counts": TOKEN_COUNTS, "routings": ("uniform",), "replays": 3, **changes})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path)
    made.prepare()
    return made


def chosen(tmp_path: Path, **assignments: str) -> settings.Settings:
    objective = {"objective": "1:1,160:1", "cache": str(tmp_path)}
    return settings.load({}, assignments={**objective, **assignments})


SLOW = Slowed("slow", 1.0, lambda tokens: 50e-3)  # more than a busy machine adds to a run of the other
FAST = Slowed("fast", 2.0)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes these the only backends there are."""

    def use(*made: Slowed) -> None:
        found = registry([*made, Emulation()])
        for module in MODULES:
            monkeypatch.setattr(module, "default_registry", lambda: found)

    return use


@pytest.fixture(scope="module")
def ready() -> Iterator[engine.BenchContext]:
    with engine.open_context(detect.detect(), 256) as made:
        yield made


@pytest.fixture
def own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes what this thread worked and its delays: on a busy machine others' work takes longer than delays,
    and nobody waits for them."""

    def round(self: timing.HostClock, runs: Sequence[Callable[[], object]]) -> list[float]:
        times = []
        for run in runs:
            begin = time.thread_time() + Slowed.slept
            run()
            times.append((time.thread_time() + Slowed.slept - begin) * 1e6)
        return times

    monkeypatch.setattr(timing.HostClock, "round", round)
    monkeypatch.setattr(Slowed, "sleep", staticmethod(lambda seconds: None))
