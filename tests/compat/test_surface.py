"""Every use of vLLM is borne out by the sources of the installed release (all with ``-m matrix``)."""

from __future__ import annotations

import ast
import functools
import re
import shutil
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.lib import releases, surface
from tests.lib import stock_names as stock
from tests.lib.releases import DEFAULT_RELEASE, every_release
from tests.lib.tiers import sampled
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import RELEASES, packages_of

SAMPLE = (
    # What we use, of the default release: the file below ``vllm`` that defines it, and the name.
    ("model_executor/layers/fused_moe/config.py", "hidden_dim"),
    ("model_executor/layers/fused_moe/config.py", "has_hash_routing"),
    ("model_executor/layers/fused_moe/config.py", "use_batched_activation_format"),
    ("model_executor/layers/fused_moe/config.py", "mx_alignment"),
    ("model_executor/layers/fused_moe/routed_experts.py", "_expert_routing_tables"),
    ("model_executor/layers/fused_moe/routed_experts.py", "routing_sink"),
    ("model_executor/layers/fused_moe/routed_experts.py", "e_score_correction_bias"),
    ("model_executor/layers/fused_moe/modular_kernel.py", "workspace_shapes"),
    ("model_executor/layers/fused_moe/modular_kernel.py", "apply_monolithic"),
    ("model_executor/layers/fused_moe/modular_kernel.py", "moe_problem_size"),
    ("model_executor/layers/fused_moe/all2all_utils.py", "use_monolithic"),
    ("model_executor/layers/fused_moe/fused_moe_method_base.py", "supports_eplb"),
    ("model_executor/layers/fused_moe/fused_moe_method_base.py", "shared_experts_input"),
    ("model_executor/layers/fused_moe/fused_moe_method_base.py", "moe_kernel"),
    ("model_executor/layers/quantization/modelopt.py", "FusedMoEMethodCls"),
    ("model_executor/layers/quantization/modelopt.py", "w13_weight_scale"),
    ("model_executor/layers/quantization/moe_wna16.py", "full_config"),
    ("model_executor/layers/quantization/__init__.py", "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG"),
    ("model_executor/kernels/linear/__init__.py", "_POSSIBLE_MXFP8_KERNELS"),
    ("model_executor/model_loader/reload/layerwise.py", "_already_called_process_weights_after_loading"),
    ("config/compilation.py", "static_all_moe_layers"),
    ("transformers_utils/model_arch_config_convertor.py", "_normalize_quantization_config"),
    ("envs.py", "VLLM_BATCH_INVARIANT"),
)


@pytest.fixture
def sources(release: str) -> surface.Sources:
    """The sources of a release."""
    return surface.Sources(releases.sources(release))


@every_release
def test_sources_bear_out_every_use(release: str, sources: surface.Sources) -> None:
    problems = surface.check(release, sources)
    assert not problems, "\n" + "\n".join(map(str, problems))
    assert len(sources.used) > 100


@every_release
def test_stock_experts_take_what_they_are_given(release: str, sources: surface.Sources) -> None:
    classes = {each.stock_class for each in default_registry() if each.stock_class}
    checker = surface._Check(release, sources)
    for path in sorted(classes):
        if not checker._within(stock.OPTIONAL_PATHS.get(path, surface._ALWAYS)):
            continue
        signature = checker._constructor(sources.class_at(path))
        assert signature is not None
        layer = ["layer"] if ":Humming" in path and checker._within([("0.22", "0.27")]) else []
        wanted = [*layer, "moe_config", "quant_config"]
        assert signature.positional[: len(wanted)] == wanted, (path, signature.positional)
    batched = "vllm.model_executor.layers.fused_moe.experts.fused_humming_moe:BatchedHummingGroupedExperts"
    signature = checker._constructor(sources.class_at(batched))
    assert signature is not None and {"max_num_tokens", "num_dispatchers"} <= set(signature.named)


@every_release
def test_the_layer_stub_has_what_humming_reads(release: str, sources: surface.Sources) -> None:
    if not surface._Check(release, sources)._within([("0.22", "0.27")]):
        return
    module = sources.find("vllm.model_executor.layers.fused_moe.experts.fused_humming_moe")
    assert isinstance(module, surface.Module)
    read = {
        node.attr
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("layer", "self.layer")
    }
    ours = next(file for file in surface.our_files() if file.name.endswith("compat/humming.py"))
    function = next(node for node in ours.tree.body if isinstance(node, ast.FunctionDef) and node.name == "layer_stub")
    given = {node.value for node in ast.walk(function) if isinstance(node, ast.Constant)}
    assert read and read - {"activation", "expert_map"} <= given, read - given


def _renamed(root: Path, file: str, name: str) -> str:
    text = (root / file).read_text()
    assert re.search(rf"\b{name}\b", text), f"{file} has no {name}"
    return re.sub(rf"\b{name}\b", f"{name}_renamed", text)


@functools.cache
def _lines() -> dict[str, set[tuple[str, int]]]:
    """Where our code uses each name: as an attribute, a keyword, an import, a method, in a string."""
    found: dict[str, set[tuple[str, int]]] = {}
    for file in (*surface.our_files(), *surface._files("schemes")):
        for node in ast.walk(file.tree):
            words: list[str] = []
            if isinstance(node, ast.Attribute):
                words = [node.attr]
            elif isinstance(node, ast.Call):
                words = [each.arg or "" for each in node.keywords]
            elif isinstance(node, ast.Import | ast.ImportFrom):
                words = [each.name for each in node.names]
            elif isinstance(node, ast.Assign):
                words = [each.id for each in node.targets if isinstance(each, ast.Name)]
            elif isinstance(node, ast.FunctionDef | ast.arg):
                words = [node.name if isinstance(node, ast.FunctionDef) else node.arg]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = re.findall(r"\w+", node.value)
            for word in words:
                found.setdefault(word, set()).add((file.name, node.lineno))
    return found


@pytest.mark.parametrize(("file", "name"), sampled(SAMPLE, 3))
def test_a_renamed_attribute_is_named_with_our_line(file: str, name: str) -> None:
    release = DEFAULT_RELEASE
    root = releases.sources(release)
    path = f"vllm/{file}"
    problems = surface.check(release, surface.Sources(root, {path: _renamed(root, path, name)}))
    assert problems
    assert {(each.file, each.line) for each in problems} & _lines()[name], "\n".join(map(str, problems))


@pytest.mark.matrix
@pytest.mark.parametrize("release", RELEASES)
def test_every_renamed_attribute_is_noticed(release: str, sources: surface.Sources) -> None:
    root = releases.sources(release)
    assert not surface.check(release, sources)
    unnoticed = [
        (file, name)
        for file, name in sorted(sources.used)
        if not name.startswith("__")
        and not surface.finds_fault(release, surface.Sources(root, {file: _renamed(root, file, name)}))
    ]
    assert not unnoticed


def test_a_copy_with_a_renamed_attribute_on_disk_fails(tmp_path: Path) -> None:
    release = DEFAULT_RELEASE
    copy = tmp_path / "copy"
    shutil.copytree(releases.sources(release) / "vllm", copy / "vllm")
    file = copy / "vllm/model_executor/layers/fused_moe/config.py"
    file.write_text(_renamed(copy, "vllm/model_executor/layers/fused_moe/config.py", "experts_per_token"))
    said = "\n".join(map(str, surface.check(release, surface.Sources(copy))))
    assert re.search(r"vllm_moe_oracle/compat/adapter\.py:\d+: vLLM .* has no experts_per_token", said), said


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(thing: Any) -> None:\n    thing.size\n", "thing is annotated with Any; declare"),
        ("def f(thing: Any) -> None:\n    thing(1)\n", "thing is called, but cannot be followed"),
        ("def f(moe: Any) -> None:\n    moe.no_such_field\n", "has no no_such_field"),
        ("def f(moe: Any) -> None:\n    moe.moe_parallel_config.no_such_size\n", "has no no_such_size"),
        ("def f(layer: Any) -> None:\n    getattr(layer, 'fresh', None)\n", "fresh is asked for with a default"),
        ("from vllm.nowhere import x\n", "no module vllm.nowhere"),
        ("from vllm.config import nothing_of_the_kind\n", "has no nothing_of_the_kind"),
        ("PLACE = 'vllm.config:NoSuchConfig'\n", "has no NoSuchConfig"),
        (
            "from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantDesc as D\nMADE = D(scales=1)\n",
            "has no parameter scales",
        ),
        (
            "from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel\nK = FusedMoEKernel(1)\n",
            "needs fused_experts",
        ),
        (
            "import vllm.model_executor.layers.fused_moe.modular_kernel as mk\n"
            "class E(mk.FusedMoEExpertsModular):\n    def no_such_hook(self) -> None: ...\n",
            "E.no_such_hook overrides nothing",
        ),
        (
            "import vllm.model_executor.layers.fused_moe.modular_kernel as mk\n"
            "class E(mk.FusedMoEExpertsModular):\n    def workspace_shapes(self, M: int) -> None: ...\n",
            "E.workspace_shapes does not take",
        ),
        (
            "from vllm.model_executor.layers.fused_moe import modular_kernel as mk\n"
            "class E(mk.FusedMoEExpertsModular): ...\n",
            "does not define the abstract apply",
        ),
        (
            "from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config\n"
            "class C(MoeWNA16Config):\n    def f(self) -> int:\n        self.bits = 4\n        return self.bits\n",
            "does not speak of bits; if it is ours alone, annotate",
        ),
        (
            "from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config\n"
            "class C(MoeWNA16Config):\n    weight_bits: int\n",
            "C.weight_bits is declared as ours, but vllm",
        ),
        (
            "from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config\n"
            "class C(MoeWNA16Config):\n    def f(self) -> None:\n        self.weight_bits: int = 4\n",
            "C.weight_bits is declared as ours, but vllm",
        ),
        (
            "from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config\n"
            "class C(MoeWNA16Config):\n    bits: Any\n",
            "does not speak of bits",
        ),
        (
            # A method of ours of the same name does not answer for another object's.
            "from vllm.model_executor.layers.quantization.moe_wna16 import MoeWNA16Config\n"
            "class C(MoeWNA16Config):\n"
            "    def convert(self, kernel: Any) -> None:\n        kernel.convert()\n",
            "has no convert",
        ),
    ],
)
def test_what_cannot_be_proven_is_a_problem(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = DEFAULT_RELEASE
    file = surface.OurFile("vllm_moe_oracle/compat/example.py", ast.parse(code))
    supported = next(each for each in surface.our_files() if each.name.endswith("releases/supported.py"))
    caches = (surface._our_classes, surface._our_bases, surface._own_types, surface._heirs, surface._called_on_self)
    with monkeypatch.context() as patch:
        patch.setattr(surface, "our_files", lambda: (file, supported))
        for each in caches:
            each.cache_clear()
        problems = surface.check(release, surface.Sources(releases.sources(release)))
    for each in caches:
        each.cache_clear()
    assert any(message in str(each) for each in problems), problems
    assert all(each.file == file.name and each.line > 0 for each in problems)


@pytest.mark.matrix
@pytest.mark.parametrize("release", RELEASES)
def test_what_an_installation_brings_is_what_its_metadata_says(release: str) -> None:
    (metadata,) = releases.sources(release).glob("vllm-*.dist-info/METADATA")
    required = {
        requirement.name: str(requirement.specifier).removeprefix("==")
        for requirement in map(Requirement, re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE))
    }
    brought = packages_of("cuda", release)
    assert brought.pop("vllm") == release
    assert brought == {name: required[name] for name in brought}


def test_every_declaration_is_used() -> None:
    arguments = {node.arg for file in surface.our_files() for node in ast.walk(file.tree) if isinstance(node, ast.arg)}
    assert {*stock.TYPES, *stock.NOT_STOCK} <= arguments
    wrapped = {each.stock_class for each in default_registry()}
    for name in (
        *stock.STRING_NAMES,
        *stock.REGISTERED_PARAMETERS,
        *stock.OPTIONAL_ATTRIBUTES,
        *stock.OPTIONAL_PATHS,
        *stock.OUR_ATTRIBUTES,
    ):
        assert surface.uses_of_string(name) or name in wrapped, f"stock_names declares {name!r}, which nothing uses"
    defined = {
        node.name for file in surface.our_files() for node in ast.walk(file.tree) if isinstance(node, ast.FunctionDef)
    }
    assert set(stock.OPTIONAL_HOOKS) <= defined
