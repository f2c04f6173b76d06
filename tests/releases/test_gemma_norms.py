"""Models with Gemma's norms: the table against the code of vLLM's models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.lib.releases import DEFAULT_RELEASE, every_release, some_releases, sources
from vllm_moe_oracle.releases.gemma_norms import MODEL_CODE
from vllm_moe_oracle.releases.supported import NEWEST

MIXED = {"InternS2PreviewForConditionalGeneration", "Step3p7ForConditionalGeneration"}
"""Architectures whose language model is another file's class."""

NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "pre_feedforward_layernorm_2", "input_layernorm")
"""Norms of decoder layers."""


def model_files(root: Path) -> Iterator[Path]:
    yield from (root / "model_executor/models").rglob("*.py")
    yield from (root / "models").rglob("*.py")


def place(path: Path, root: Path) -> str:
    """As in `MODEL_CODE`: a file of the models, or the folder of one model."""
    parts = path.relative_to(root).parts
    return "/".join(parts[:2] if parts[0] == "models" else parts)


@cache
def with_gemma_norms(release: str) -> set[str]:
    """The code with experts that builds norms of decoder layers as Gemma's."""
    root = sources(release) / "vllm"
    texts = {path: path.read_text(encoding="utf-8") for path in model_files(root)}
    norms = {"GemmaRMSNorm"}
    for text in texts.values():
        if "GemmaRMSNorm" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                norms |= {each.asname for each in node.names if each.name == "GemmaRMSNorm" and each.asname}
            if isinstance(node, ast.ClassDef) and node.name.endswith("GemmaRMSNorm"):
                norms.add(node.name)
    found = set()
    for path, text in texts.items():
        if not any(f"{each}(" in text for each in norms):
            continue
        code = ast.parse(text)
        has_experts = any(
            isinstance(node, ast.Name) and "MoE" in node.id.replace("Moe", "MoE") for node in ast.walk(code)
        )
        if has_experts and any(_is_norm_of_a_layer(node, norms) for node in ast.walk(code)):
            found.add(place(path, root))
    return found


def _is_norm_of_a_layer(node: ast.AST, norms: set[str]) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return False
    target, made = node.targets[0], node.value.func
    named = isinstance(target, ast.Attribute) and target.attr in NORMS
    return named and isinstance(made, ast.Name) and made.id in norms


@cache
def registered(release: str) -> dict[str, str]:
    """The code of each architecture in vLLM's registry of models, as `place` names it."""
    text = (sources(release) / "vllm/model_executor/models/registry.py").read_text(encoding="utf-8")
    found = {}
    for node in ast.walk(ast.parse(text)):
        for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                module = ast.literal_eval(value)[0]
                inside = module.startswith("vllm.")
                code = "/".join(module.split(".")[1:3]) if inside else f"model_executor/models/{module}.py"
                found[ast.literal_eval(key)] = code
    return found


def in_release(release: str) -> set[str]:
    """The table's code that a release has."""
    return {each for each in MODEL_CODE.values() if (sources(release) / "vllm" / each).exists()}


@every_release
def test_models_with_gemma_norms_are_those_of_the_table(release: str) -> None:
    code = with_gemma_norms(release)
    assert code == in_release(release)
    theirs = {name for name, each in registered(release).items() if each in code and not name.endswith("MTP")}
    ours = {name for name, each in MODEL_CODE.items() if each in code and name in registered(release)}
    assert theirs <= ours
    assert ours - theirs <= MIXED


@some_releases(*dict.fromkeys((DEFAULT_RELEASE, NEWEST)))
def test_every_architecture_is_one_of_vllm(release: str) -> None:
    code = in_release(release)
    assert release != NEWEST or code == set(MODEL_CODE.values())
    assert {name for name, each in MODEL_CODE.items() if each in code} <= registered(release).keys()
