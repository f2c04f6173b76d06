"""The experts that emulation computes from a layer in MXFP4, against float64 references."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib import reference
from tests.lib.cases import CPU, GPT_OSS, H200, RELU2, problem
from tests.lib.mx_layers import MXFP4_LAYER
from tests.lib.tolerances import Layer, moe_bound, outside
from vllm_moe_oracle.backends.emulation import BACKEND, forward
from vllm_moe_oracle.core.decision import Accepted
from vllm_moe_oracle.core.problem import Activation, Problem
from vllm_moe_oracle.schemes import fp8, mxfp4

SCHEME = MXFP4_LAYER.scheme
ALTERNATING = MXFP4_LAYER.activation
H, I, E, M, K = 96, 64, 4, 7, 2  # noqa: E741 - the usual letters
OTHER = Activation("swigluoai", alpha=1.25, beta=0.5, limit=2.0)


@dataclasses.dataclass
class Case:
    """A layer with random weights as the checkpoint has them, and routed tokens."""

    problem: Problem
    raw: dict[str, Tensor]
    x: Tensor
    weights: Tensor
    ids: Tensor

    def run(self) -> Tensor:
        """The emulation's output, `[M, H]`."""
        made = [
            mxfp4.canonical_expert({name: tensor[expert] for name, tensor in self.raw.items()}, self.problem)
            for expert in range(E)
        ]
        tensors = {name: torch.stack([each[name] for each in made]) for name in self.raw}
        out = torch.full(self.x.shape, torch.nan, dtype=self.x.dtype)
        forward(tensors, self.problem, out, self.x, self.weights, self.ids)
        return out

    def judge(self) -> Callable[[Tensor], str]:
        """What is wrong with an output of this case as it is now; empty when it is right."""
        act = self.problem.activation
        order = [*range(0, 2 * I, 2), *range(1, 2 * I, 2)] if act.interleaved else list(range(2 * I))

        def numbers(name: str) -> Any:
            return reference.dequantize_mxfp4(self.raw[name].numpy(), self.raw[f"{name}_scale"].numpy())

        def bias(name: str) -> Any:
            return self.raw[name].double().numpy() if name in self.raw else None

        b13 = bias("w13_bias")
        exact = Layer(
            numbers("w13")[:, order], numbers("w2"), act.name, act.alpha, act.beta, act.limit,
            None if b13 is None else b13[:, order], bias("w2_bias"),
        )  # fmt: skip
        expected, bound = moe_bound(
            self.x.double().numpy(), exact, self.ids.numpy(), self.weights.double().numpy(), dtype=self.problem.dtype,
            quantize=self.problem.scheme.activations == "mxfp8",
        )  # fmt: skip
        return lambda out: outside(out.double().numpy(), expected, bound)


def case(
    activation: Activation = ALTERNATING, dtype: str = "float32", bias: bool = True, activations: Any = "16bit"
) -> Case:
    """Weights and tokens such that first products are of the order of 3: limits of 2 and 7 are reached."""
    layer = problem(
        scheme=dataclasses.replace(SCHEME, activations=activations), experts=E, top_k=K, hidden_size=H,
        intermediate_size=I, activation=activation, has_bias=bias, dtype=dtype,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    raw: dict[str, Tensor] = {}
    for name, rows, width in (("w13", layer.w13_rows, H), ("w2", H, I)):
        spread = np.exp2(rng.integers(-2, 3, (E, rows, width // 32))).repeat(32, axis=-1)
        codes, scales = reference.quantize_mxfp4(rng.standard_normal((E, rows, width)) * spread / np.sqrt(width))
        raw |= {name: torch.from_numpy(codes), f"{name}_scale": torch.from_numpy(scales)}
        if bias:
            raw[f"{name}_bias"] = torch.from_numpy(rng.standard_normal((E, rows))).bfloat16()
    ids = np.argsort(rng.random((M, E)), axis=1)[:, :K]
    return Case(
        layer,
        raw,
        torch.from_numpy(rng.standard_normal((M, H)) * 1.5).to(getattr(torch, dtype)),
        torch.from_numpy(rng.uniform(0.1, 1.0, (M, K)).astype(np.float32)),
        torch.from_numpy(ids.astype(np.int64)),
    )


ACTIVATIONS = {
    "swigluoai, alternating": ALTERNATING,
    "swigluoai, apart": GPT_OSS,
    "swigluoai with other numbers": dataclasses.replace(OTHER, interleaved=True),
    "silu": Activation("silu"),
    "silu with limit": Activation("silu", limit=2.0),
    "gelu": Activation("gelu"),
}


@pytest.mark.parametrize("activations", ["16bit", "mxfp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_in_every_precision(name: str, bias: bool, dtype: str, activations: str) -> None:
    made = case(ACTIVATIONS[name], dtype, bias, activations)
    assert BACKEND.check(made.problem, H200) == BACKEND.check(made.problem, CPU) == Accepted()
    assert made.judge()(made.run()) == ""


def test_mxfp4_activations_are_rounded_before_both_products() -> None:
    """With integers everything is exact in float32, and so must the result be."""
    rng = np.random.default_rng(4)
    layer = problem(
        scheme=dataclasses.replace(SCHEME, activations="mxfp4"), experts=2, top_k=1, hidden_size=64,
        intermediate_size=32, activation=RELU2, dtype="float32",
    )  # fmt: skip
    assert BACKEND.check(layer, H200) == Accepted() and "MXFP4" in str(BACKEND.numerics(layer))
    weights = {"w13": rng.integers(-3, 4, (2, 32, 64)), "w2": rng.integers(-3, 4, (2, 64, 32))}
    tensors: dict[str, Tensor] = {}
    for name, values in weights.items():
        codes, scales = reference.quantize_mxfp4(values)
        np.testing.assert_array_equal(reference.dequantize_mxfp4(codes, scales), values)
        tensors |= {name: torch.from_numpy(codes), f"{name}_scale": torch.from_numpy(scales)}
    x = rng.integers(-9, 10, (5, 64))
    ids = np.array([[0], [1], [1], [0], [1]])
    out = torch.empty(5, 64)
    forward(tensors, layer, out, torch.from_numpy(x).float(), torch.ones(5, 1), torch.from_numpy(ids))
    rounded = reference.fake_quantize_mxfp4(x)
    assert (rounded != x).any()
    for token in range(5):
        expert = int(ids[token, 0])
        hidden = reference.fake_quantize_mxfp4(np.square(np.maximum(weights["w13"][expert] @ rounded[token], 0)))
        np.testing.assert_array_equal(out[token].numpy(), weights["w2"][expert] @ hidden)


def pairs(tensor: Tensor) -> Tensor:
    """Rows of gate for rows of up."""
    return tensor.reshape(E, I, 2, -1).flip(2).reshape(tensor.shape)


Fault = Callable[[Case], None]


def change(*names: str, by: Callable[[Tensor], Tensor]) -> Fault:
    def inject(made: Case) -> None:
        for name in names:
            made.raw[name] = by(made.raw[name])

    return inject


def one_scale(scales: Tensor) -> Tensor:
    scales = scales.clone()
    scales[3, 5, 1] += 1
    return scales


def one_bit(codes: Tensor) -> Tensor:
    codes = codes.clone()
    codes[3, 5, 7] ^= 1
    return codes


def activation(**changes: Any) -> Fault:
    def inject(made: Case) -> None:
        act = dataclasses.replace(made.problem.activation, **changes)
        made.problem = dataclasses.replace(made.problem, activation=act)

    return inject


def scheme_of(**changes: Any) -> Fault:
    def inject(made: Case) -> None:
        made.problem = dataclasses.replace(made.problem, scheme=dataclasses.replace(made.problem.scheme, **changes))

    return inject


FAULTS: dict[str, Fault] = {
    "rows taken for halves": activation(interleaved=False),
    "gate and up swapped": change("w13", "w13_scale", "w13_bias", by=pairs),
    "gate and up swapped in weights only": change("w13", by=pairs),
    "gate and up swapped in scales only": change("w13_scale", by=pairs),
    "gate and up swapped in biases only": change("w13_bias", by=pairs),
    "high nibble first in w13": change("w13", by=lambda codes: codes << 4 | codes >> 4),
    "high nibble first in w2": change("w2", by=lambda codes: codes << 4 | codes >> 4),
    "no bias of w13": change("w13_bias", by=torch.zeros_like),
    "no bias of w2": change("w2_bias", by=torch.zeros_like),
    "all scales off by one exponent": change("w2_scale", by=lambda scales: scales + 1),
    "one scale off by one exponent": change("w2_scale", by=one_scale),
    "blocks of scales in another order": change("w2_scale", by=lambda scales: scales.flip(-1)),
    "one bit of one code": change("w2", by=one_bit),
    "alpha": activation(alpha=1.0),
    "beta": activation(beta=0.0),
    "limit": activation(limit=None),
    "activations in mxfp8": scheme_of(activations="mxfp8"),
    "activations in mxfp4": scheme_of(activations="mxfp4"),
    "activations in fp8": scheme_of(activations="fp8"),
    "activations in fp8 per token": scheme_of(activations="fp8_token"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_outside_the_bound(fault: str) -> None:
    made = case(dataclasses.replace(OTHER, interleaved=True))
    judge = made.judge()
    assert judge(made.run()) == ""
    FAULTS[fault](made)
    assert judge(made.run()) != ""


@pytest.mark.parametrize("activations", ["int8"])
def test_precisions_that_emulation_cannot_round_to_are_refused(activations: Any) -> None:
    layer = dataclasses.replace(MXFP4_LAYER, scheme=dataclasses.replace(SCHEME, activations=activations))
    (reason,) = BACKEND.check(layer, CPU).reasons
    assert reason.code == "activations" and activations in reason.detail
    assert "mxfp8 or fp8 or fp8_token or mxfp4" in reason.detail


@pytest.mark.parametrize("columns", [32, 128, 160, 384])
def test_fp8_activations_have_one_power_of_two_per_128(columns: int) -> None:
    """Against a loop over groups in float64, with the code's value from its bits."""
    generator = torch.Generator().manual_seed(columns)
    values = torch.randn(3, columns, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (3, columns), generator=generator).float()
    )
    values[0, :20] = 0
    values[1] = 0
    found = fp8.fake_quantize(values)
    assert found.shape == values.shape and found.dtype == torch.float32
    numbers = [e4m3(code) for code in range(127)]
    for row in range(3):
        for start in range(0, columns, 128):
            group = values[row, start : start + 128].tolist()
            largest = max(map(abs, group))
            scale = 2.0 ** max(math.ceil(math.log2(largest / 448)), -127) if largest else 1.0
            for value, result in zip(group, found[row, start : start + 128].tolist(), strict=True):
                nearest = min(numbers, key=lambda number: abs(abs(value) / scale - number))
                assert abs(abs(result) / scale - abs(value) / scale) == abs(abs(value) / scale - nearest)
                assert result == 0 or (result < 0) == (value < 0)


def e4m3(code: int) -> float:
    """A positive e4m3 number: 4 bits of exponent with bias 7, 3 of fraction."""
    exponent, fraction = code >> 3, code & 7
    return math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10)


# TP 4 is a way out of TP 8: its ranks get 736 or 672 features, all in whole blocks.
@pytest.mark.parametrize(("tp", "size", "way_out"), [(4, 720, "TP 2"), (8, 360, "TP 4")])
def test_a_cut_that_splits_blocks_is_refused_with_numbers_and_a_way_out(tp: int, size: int, way_out: str) -> None:
    layer = dataclasses.replace(
        problem(tp=tp), scheme=SCHEME, hidden_size=2880, intermediate_size=size, activation=ALTERNATING
    )
    (reason,) = BACKEND.check(layer, CPU).reasons
    assert reason.code == "group.intermediate" and f"2880 / {tp} = {size}" in reason.detail
    assert way_out in reason.remedy and "expert parallel" in reason.remedy
