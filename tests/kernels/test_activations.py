"""Activations: every entry of the table has its formulas, and no kernel or reference takes one for another."""

from __future__ import annotations

import pytest
import torch
from triton.compiler.errors import CompilationError

from tests.lib.kernel_launches import Launch, fp8_launches, launches
from tests.lib.tiers import sampled
from tests.tools.kernel_digests import Digests
from vllm_moe_oracle.core.activations import ACTIVATIONS, with_defaults
from vllm_moe_oracle.core.problem import Activation
from vllm_moe_oracle.kernels.activations import activate
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig

TILE = TileConfig(16, 64, 128)
FORMULAS = [
    with_defaults(Activation(name, gated)) for name, spec in ACTIVATIONS.items() for gated in (True, False)
    if (spec.gated if gated else spec.ungated)
]  # fmt: skip


def with_activation(launch: Launch, name: str) -> Launch:
    kernel, args, kwargs = launch
    return kernel, args, {**kwargs, "ACTIVATION": name}


def first_gemms(gated: bool) -> list[Launch]:
    """The launch of each kernel that applies the activation of a gated layer or of one without a gate."""
    layer = "qwen-mxfp8" if gated else "nemotron"
    calls = [
        launches(layer, 8, LaunchConfig(TILE, TILE)),
        launches(layer, 8, PrefillConfig()),
        fp8_launches(544, 96, "silu" if gated else "relu2", False),
    ]
    return [next(each for each in call if each[2].get("ACTIVATION")) for call in calls]


def compile_error(digests: Digests, launch: Launch) -> str:
    """What Triton says about a launch, of each function from the kernel down to the one with the error."""
    try:
        digests.of(launch)
    except CompilationError as failure:
        said: list[str] = []
        cause: BaseException | None = failure
        while cause is not None:
            said.append(str(cause))
            cause = cause.__cause__
        return "\n".join(said)
    return "compiles"


@pytest.mark.parametrize("activation", FORMULAS, ids=str)
def test_every_entry_has_a_formula_in_torch(activation: Activation) -> None:
    assert torch.isfinite(activate(torch.linspace(-2, 2, 8).view(2, 4), activation)).all()


@pytest.mark.parametrize("gated", (True, False))
def test_an_unknown_formula_in_torch_is_an_error(gated: bool) -> None:
    with pytest.raises(ValueError, match="no formula for the activation 'no_such_activation'"):
        activate(torch.zeros(1, 2), Activation("no_such_activation", gated))


@pytest.mark.parametrize("gated", sampled((False, True), 2))
def test_kernels_compile_what_the_table_names_and_nothing_else(gated: bool) -> None:
    digests = Digests()
    names = {spec.kernel_for(gated) for spec in ACTIVATIONS.values()} - {""}
    assert names
    for launch in first_gemms(gated):
        assert len({digests.of(with_activation(launch, name)) for name in names}) == len(names)
        for unknown in ("no_such_activation", "relu2" if gated else "swiglu"):
            assert "no formula for this" in compile_error(digests, with_activation(launch, unknown))
