"""The formula that an entry of the table states is what the reference and the kernels compute.

The text of `ActivationSpec.formula` is evaluated in float64. The source of the kernels' formulas runs in float64
too, with NumPy's functions for Triton's; that it compiles is the subject of test_activations.py. A new entry needs a
line here only for a word that neither NumPy nor `WORDS` has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.lib.cases import H200, problem  # noqa: E402
from vllm_moe_oracle.backends.emulation import BACKEND as EMULATION  # noqa: E402
from vllm_moe_oracle.core.activations import ACTIVATIONS, alpha_beta, spec_of  # noqa: E402
from vllm_moe_oracle.core.decision import Accepted  # noqa: E402
from vllm_moe_oracle.core.problem import Activation  # noqa: E402
from vllm_moe_oracle.kernels import epilogue  # noqa: E402
from vllm_moe_oracle.kernels.activations import activate  # noqa: E402

GATE, UP = (each.ravel() for each in np.meshgrid(np.linspace(-6, 6, 49), np.linspace(-4, 4, 17)))
"""Beyond the limit and the bounds below, on both sides."""

_erf = np.vectorize(math.erf)


class _Functions:
    """NumPy's functions by name; those of Python's `math` that NumPy has not, for arrays.

    Raises:
        NameError: neither has it.
    """

    def __getattr__(self, name: str) -> Any:
        if name in np.__all__:
            return getattr(np, name)
        if hasattr(math, name):
            return np.vectorize(getattr(math, name))
        raise NameError(f"neither NumPy nor math has {name!r}: add it to {type(self).__qualname__} in {__file__}")


def _gelu(x: Any, approximate: str = "none") -> Any:
    inner = _erf(x / 2**0.5) if approximate == "none" else np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + inner)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


WORDS = {
    **{name: getattr(np, name) for name in ("abs", "cos", "exp", "log", "log1p", "sin", "sqrt", "where")},
    "erf": _erf,
    "max": np.maximum,
    "softplus": lambda x: np.logaddexp(0, x),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "gelu": _gelu,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "min": np.minimum,
    "clamp": np.clip,
}
"""What the formulas of the table are written in."""


def _cases() -> Iterator[Activation]:
    """Each entry of the table with each of its parameters, at values that are not the defaults, and without them."""
    for name, spec in ACTIVATIONS.items():
        alpha, beta = (1.25 if "alpha" in spec.parameters else None), (1.5 if "beta" in spec.parameters else None)
        if spec.gated:
            for limit in (2.0,) if "limit" in spec.parameters else (None,) if spec.bounds_outputs else (None, 2.0):
                yield Activation(name, alpha=alpha, beta=beta, limit=limit)
            if not spec.bounds_outputs and (alpha or beta):
                yield Activation(name)
        if spec.ungated:
            yield Activation(name, gated=False)


CASES = list(_cases())


def stated(activation: Activation) -> Any:
    """What the table's formula gives; a limit that the formula does not name clamps gate and up before it."""
    spec, limit = spec_of(activation), activation.limit
    gate, up = (GATE, UP) if activation.gated else (GATE, np.ones(()))
    if limit is not None and "limit" not in spec.parameters:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    alpha, beta = alpha_beta(activation)
    values = {"gate": gate, "up": up, "x": gate, "alpha": alpha, "beta": beta, "limit": limit}
    return eval(spec.formula, {"__builtins__": {}}, WORDS | values)


def in_float64(function: Any) -> Callable[..., Any]:
    """A device function of `epilogue` with NumPy for Triton, and so are the device functions that it calls."""

    def static_assert(condition: bool, message: str = "") -> None:
        assert condition, message

    functions = _Functions()
    functions.static_assert = static_assert
    known = {"tl": functions, "libdevice": functions, "__builtins__": {}}
    for name, each in vars(epilogue).items():
        if isinstance(each, type(function)):
            known[name] = FunctionType(each.fn.__code__, known)
    return known[function.fn.__name__]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_declared_parameters_are_those_of_the_formula(name: str) -> None:
    spec = ACTIVATIONS[name]
    words = set(re.findall("[a-z]+", spec.formula))
    assert {*spec.parameters} == words & {"alpha", "beta", "limit"}
    assert {*spec.required} <= {*spec.parameters}


@pytest.mark.parametrize("activation", CASES, ids=str)
def test_the_emulation_takes_the_parameters_that_the_formula_names(activation: Activation) -> None:
    assert EMULATION.check(problem(activation=activation), H200) == Accepted()


@pytest.mark.parametrize("activation", CASES, ids=str)
def test_the_reference_computes_the_tables_formula(activation: Activation) -> None:
    rows = [GATE, UP] if activation.gated else [GATE]
    found = activate(torch.from_numpy(np.concatenate(rows))[None].float(), activation)[0]
    # A dozen operations in float32, each within 2**-24 of numbers of at most 6 * (4 + 1.5).
    np.testing.assert_allclose(found, stated(activation), rtol=0, atol=12 * 33 * 2.0**-24)


@pytest.mark.parametrize("activation", [each for each in CASES if spec_of(each).kernel_for(each.gated)], ids=str)
def test_the_kernels_compute_the_tables_formula(activation: Activation) -> None:
    kernel = spec_of(activation).kernel_for(activation.gated)
    if activation.gated:
        limit = activation.limit
        found = in_float64(epilogue.activate)(
            GATE, UP, *alpha_beta(activation), limit or 0.0, ACTIVATION=kernel, HAS_LIMIT=limit is not None
        )
    else:
        found = in_float64(epilogue.activate_ungated)(GATE, ACTIVATION=kernel)
    np.testing.assert_allclose(found, stated(activation), rtol=1e-12, atol=1e-12)
