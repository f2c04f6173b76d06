"""What is said of stock vLLM in its own words, its errors and its names of kernels, each release's sources say."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.cases import CPU, INT4_G128, MXFP8_W8A8, problem
from tests.lib.releases import every_release, sources
from tests.lib.stock_code import FUSED_MOE, QUANTIZATION, load
from tests.lib.stock_rules import machine
from tests.tools import release_names
from vllm_moe_oracle.core.problem import Activation, Parallel, Problem, Scheme
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.stock_choice import choose_stock
from vllm_moe_oracle.oracle.stock_refusals import load_refusal
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.min_versions import vllm_at_least_on

MXFP4 = Scheme("mxfp4", 4, 32, "mxfp4")
CLASSES = ("", "MarlinExperts", "TritonWNA16Experts", "CutlassExpertsMxfp4")
SCHEMES = (
    MXFP8_W8A8, Scheme("mxfp8", 8, 32, "modelopt"), Scheme("mxfp8", 8, 32, "online", activations="mxfp8"), MXFP4,
    Scheme("mxfp4", 4, 32, "gpt_oss"), Scheme("mxfp4", 4, 32, "compressed-tensors"), INT4_G128,
    Scheme("wna16", 4, -1, "compressed-tensors"), Scheme("wna16", 4, 32, "gptq"),
    Scheme("wna16", 4, 128, "gptq", act_order="group"), Scheme("wna16", 4, 128, "moe_wna16"),
    Scheme("wna16", 4, 128, "compressed-tensors-int"),
)  # fmt: skip
CHANGES: tuple[dict[str, object], ...] = (
    {}, {"lora": True}, {"eplb": True, "parallel": Parallel(ep=2)}, {"intermediate_size": 48, "tp": 16},
    {"hidden_size": 2050}, {"activation": Activation("relu2", gated=False)}, {"activation": Activation("unknown")},
    {"batch_invariant": True}, {"parallel": Parallel(ep=8, dp=8, format="batched")},
)  # fmt: skip
FOLDERS = (QUANTIZATION, FUSED_MOE, "vllm/lora/layers")
QUOTED = re.compile(r"(?:^|: )(ValueError|AssertionError|NotImplementedError): ([^(]+)")
"""An error of vLLM's own code with the beginning of its words. Others are of torch and of operators."""


def _words(node: ast.expr) -> str:
    """A message's text, with ``{}`` for what is only known when it is raised."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_words, node.values))
    return "{}"


def _raised(release: str) -> Iterator[tuple[str, str]]:
    """Each error that a release's code of experts raises itself: its type and its words, or a condition without any."""
    for file in itertools.chain.from_iterable((sources(release) / folder).rglob("*.py") for folder in FOLDERS):
        for node in ast.walk(_parsed(file)):
            if isinstance(node, ast.Assert):
                yield "AssertionError", ast.unparse(node.test).replace("'", '"')
                yield "AssertionError", _words(node.msg) if node.msg else ""
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield ast.unparse(node.exc.func), "".join(map(_words, node.exc.args))


@functools.cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _begins(message: str, said: str) -> bool:
    """Whether a message begins with words; what is only known when it is raised stands for one of them."""
    pairs = zip(said.split(), message.split(), strict=False)
    fits = all("{}" in theirs or ours.rstrip(".,") == theirs.rstrip(".,") for ours, theirs in pairs)
    return fits and len(said.split()) <= len(message.split())


def _quotations(release: str) -> set[tuple[str, str]]:
    """Types and words of all errors of stock that the rules name for a release."""
    found: set[tuple[str, str]] = set()
    for device in (machine(release, 90), machine(release, 100), dataclasses.replace(CPU, packages={"vllm": release})):
        for scheme, change in itertools.product(SCHEMES, CHANGES):
            layer: Problem = problem(scheme=scheme, **change)  # type: ignore[arg-type]
            said = [choose_stock(layer, device, default_registry()).refusal]
            said += [load_refusal(layer, device, default_registry(), name) for name in CLASSES]
            found |= {(match[1], match[2].strip()) for each in said for match in QUOTED.finditer(each)}
    return found


@every_release
def test_quoted_errors_are_those_of_the_release(release: str) -> None:
    raised = list(_raised(release))
    quotations = _quotations(release)
    assert len(quotations) > 3
    wrong = [
        (kind, said)
        for kind, said in quotations
        if not any(kind == each and _begins(message, said) for each, message in raised)
    ]
    assert wrong == []


def _kernel(release: str, scheme: str, name: str) -> str:
    """Kernels that a release's list for a scheme has for a value of ``--moe-backend``; "" where it has none."""
    file = {"wna16": "int_wna16"}.get(scheme, scheme)
    names = load(release, f"{FUSED_MOE}/oracle/{file}.py")
    if scheme == "mxfp8":
        return str(names["_BACKEND_NAME_MAP"].get(name, ""))
    try:
        return str(names[f"map_{scheme}_backend"](name))
    except ValueError:
        return ""


@every_release
@pytest.mark.parametrize("scheme", [MXFP8_W8A8, MXFP4, INT4_G128], ids=lambda scheme: scheme.name)
def test_kernels_that_stock_alone_has_by_name(scheme: Scheme, release: str) -> None:
    """Those of other makers' GPUs, and names that its list does not have, are errors. Some models read a name first."""
    layer, device = problem(scheme=scheme), machine(release, 90)
    own = {name for each in default_registry() for name in each.vllm_names}
    is_read = scheme.name != "wna16" or vllm_at_least_on(device, min_versions.TRITON_WNA16_LISTED)
    for name in release_names.moe_backends(sources(release) / "vllm") - own:
        stock = choose_stock(layer, device, default_registry(), name)
        if not is_read:  # by all methods for integers
            assert stock == choose_stock(layer, device, default_registry())
            continue
        kernels = _kernel(release, scheme.name, name)
        of_a_model = scheme.name == "mxfp4" and "_mega_" in name and "aiter" not in name
        may_run = bool(kernels) and not re.search("AITER|RDNA3", kernels)
        assert bool(stock.unknown) == (may_run or of_a_model), (name, kernels, stock)
        assert stock.unknown or f"--moe-backend {name} names none of its kernels" in stock.refusal
