"""What tests ask of stock's expert classes, release by release: built from their sources by `stock_code`, for the tests
that compare what the classes claim with what our backends' rules say."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from releases import ReleaseUnavailable
from stock_code import FUSED_MOE, Platform, load, tree

from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.compat import RELEASES
from vllm_moe_oracle.oracle.problem import Activation, Device, Problem
from vllm_moe_oracle.oracle.registry import default_registry

every_release = pytest.mark.parametrize("release", RELEASES)

CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 110, 120, 121)
HALVES = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)
ACTIVATIONS = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": dataclasses.replace(HALVES, interleaved=True),
    "swigluoai_uninterleave": HALVES,
    "situ": Activation("situ", alpha=4.0, beta=25.0),
    "swiglustep": Activation("swiglustep", limit=7.0),
    "silu_no_mul": Activation("silu", gated=False),
    "gelu_no_mul": Activation("gelu", gated=False),
    "gelu_tanh_no_mul": Activation("gelu_tanh", gated=False),
    "relu2_no_mul": Activation("relu2", gated=False),
}
"""By vLLM's names."""
IN_HALVES = {name: activation for name, activation in ACTIVATIONS.items() if not activation.interleaved}
"""Those of gate rows, then up rows, as all layers have them but those of MXFP4: rows that alternate are put apart while
they are loaded."""

_OWN = "the library's own kernel for it, of which nobody has run one"
UNTRIED = {
    **dict.fromkeys([(f"humming_{scheme}{kind}", name) for scheme in ("mxfp8", "mxfp4", "wna16")
                     for kind in ("", "_grouped") for name in ("situ", "swiglustep")], _OWN),
    **dict.fromkeys([(f"trtllm_mxfp4{kind}", "situ") for kind in ("", "_monolithic", "_a8", "_a8_monolithic")],
                    "a kernel that FlashInfer does not give to everybody"),
    **dict.fromkeys([(f"deep_gemm_{scheme}", name) for scheme in ("mxfp8", "mxfp4") for name in ("situ", "swiglustep")],
                    "activated apart and rounded once more, which nobody has run"),
    ("triton_mxfp4_unfused", "swiglustep"): "nobody has run it between these products",
}  # fmt: skip
"""Activations that a backend refuses although the class of some release claims them, by vLLM's name, and why."""


def number(release: str) -> tuple[int, ...]:
    """A release as something to compare."""
    return tuple(map(int, release.split(".")))


def backend(name: str) -> Backend:
    """One of ours."""
    return default_registry()[name]


def codes_of(name: str, problem: Problem, device: Device) -> set[str]:
    """Of the rules by which a backend refuses a layer on a device."""
    return {reason.code for reason in backend(name).check(problem, device).reasons}


def globals_of(release: str, path: str, **given: Any) -> dict[str, Any]:
    """The globals of a file of a release after it has run, as by `stock_code.load`; the test is skipped where the
    release cannot be had."""
    try:
        return load(release, path, **given)
    except ReleaseUnavailable as error:
        pytest.skip(str(error))


def tree_of(release: str, path: str) -> ast.Module:
    """The syntax tree of a file of a release; the test is skipped where the release cannot be had."""
    try:
        return tree(release, path)
    except ReleaseUnavailable as error:
        pytest.skip(str(error))


def node_of(release: str, path: str, *names: str) -> Any:
    """The syntax tree of a class, a method or a function of a release."""
    found: Any = tree_of(release, path)
    for name in names:
        found = next(each for each in found.body if getattr(each, "name", "") == name)
    return found


def source_of(release: str, path: str, *names: str) -> str:
    """Source of a file, a class, a method or a function of a release, without spaces that do not matter."""
    return ast.unparse(node_of(release, path, *names))


def members_of(release: str, path: str, name: str) -> list[str]:
    """Members of an enumeration of a release."""
    return [
        target.id
        for statement in node_of(release, path, name).body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name)
    ]


def stock_class(release: str, file: str, name: str, platform: Platform, **given: Any) -> tuple[Any, Mapping[str, Any]]:
    """An expert class of a release on some device, and the names of its file.

    Args:
        release: vLLM's version.
        file: the module's name, in the folder of experts.
        name: the class's.
        platform: the device.
        given: names that the file would have imported.
    """
    asked = ("MoEActivation", "apply_moe_activation_supported", "apply_moe_activation_masked_supported")
    activation = globals_of(release, f"{FUSED_MOE}/activation.py", current_platform=platform)
    given = {key: activation[key] for key in asked if key in activation} | given
    names = globals_of(release, f"{FUSED_MOE}/experts/{file}.py", current_platform=platform, **given)
    return names[name], names


def claims_activation(stock: Any, names: Mapping[str, Any], stock_name: str, activation: Activation) -> bool:
    """Whether an expert class takes an activation.

    Args:
        stock: the class, and `names`, of `stock_class`.
        names: see there.
        stock_name: vLLM's name of the activation.
        activation: the same by ours.
    """
    member = [each for each in names["MoEActivation"] if each.value == stock_name]
    claimed = bool(member) and bool(stock._supports_activation(member[0]))
    return claimed and (activation.gated or bool(stock._supports_no_act_and_mul()))
