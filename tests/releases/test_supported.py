"""Which vLLM releases are served, by which adapter, and what is said about them."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
import sys
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from tests.lib.releases import DEFAULT_RELEASE, ReleaseUnavailable, every_release, some_releases, sources
from tests.tools import generate, release_names
from vllm_moe_oracle import compat
from vllm_moe_oracle.core import activations
from vllm_moe_oracle.core.activations import ACTIVATIONS
from vllm_moe_oracle.core.problem import Activation, Device
from vllm_moe_oracle.errors import StandDown
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.models import unbalanced_model
from vllm_moe_oracle.releases.supported import (
    CPU_RELEASES,
    NEWEST,
    RELEASE_GROUPS,
    RELEASES,
    TESTED_RELEASES,
    packages_of,
    release_group,
    release_support,
)
from vllm_moe_oracle.releases.vllm_names import MOE_BACKENDS, REMOVED_MODELS, UNBALANCED_MODELS

ROOT = Path(__file__).resolve().parents[2]
NEWEST_GROUP = RELEASE_GROUPS[-1]


@every_release
def test_every_value_of_moe_backend_is_known(release: str) -> None:
    """By vLLM's own list; releases before it had an option of its own keep none there."""
    listed = release_names.moe_backends(sources(release) / "vllm")
    assert listed or release != NEWEST, "the newest release must have the list"
    assert listed <= MOE_BACKENDS


def test_names_of_every_supported_release_are_read() -> None:
    assert not release_names.is_stale(), "run: python -m tests.tools.generate --write"
    text = release_names.text_of(RELEASES, MOE_BACKENDS, REMOVED_MODELS, UNBALANCED_MODELS)
    assert release_names.FILE.read_text() == text, "the file was edited"


@every_release
def test_models_that_a_release_has_no_more_are_known(release: str) -> None:
    removed = release_names.removed_models(sources(release) / "vllm", RELEASES[0])
    assert removed.items() <= REMOVED_MODELS.items()
    assert release != NEWEST or removed == REMOVED_MODELS


@every_release
def test_models_whose_experts_a_release_does_not_balance_are_known(release: str) -> None:
    """A class that has become a `MixtureOfExperts` has remained one."""
    package = sources(release) / "vllm"
    registry = (package / "model_executor" / "models" / "registry.py").read_text()
    known = {name for name in UNBALANCED_MODELS if f'"{name}": (' in registry}
    theirs = release_names.unbalanced_models(package)
    assert theirs == {name for name in known if unbalanced_model([name], release)}
    assert "GptOssForCausalLM" in theirs and "Qwen3MoeForCausalLM" not in theirs
    # What is asked of a model is the protocol, by vLLM's function of that name.
    interfaces = (package / "model_executor" / "models" / "interfaces.py").read_text()
    assert "isinstance(model, MixtureOfExperts)" in interfaces


@pytest.mark.parametrize("release", [None, "main", f"{NEWEST}.post1", "99.0"])
def test_a_release_that_is_not_known_counts_as_the_newest(release: str | None) -> None:
    last = next(name for name, last in UNBALANCED_MODELS.items() if last == NEWEST)
    gone = next(name for name, last in UNBALANCED_MODELS.items() if last != NEWEST)
    assert unbalanced_model(["x", 3, last], release) == last and unbalanced_model([gone], release) == ""


@some_releases(*dict.fromkeys((DEFAULT_RELEASE, NEWEST)))
def test_every_activation_is_one_of_vllm(release: str) -> None:
    text = (sources(release) / "vllm/model_executor/layers/fused_moe/activation.py").read_text()
    known = set(re.findall(r'^    [A-Z0-9_]+ = "(\w+)"$', text, re.MULTILINE))
    assert "silu" in known
    for spec in ACTIVATIONS.values():
        names = [spec.name] * spec.gated + [f"{spec.name}_no_mul"] * spec.ungated
        assert {*names, *filter(None, [spec.halves_name])} <= known, spec.name


@every_release
def test_which_releases_move_humming_before_marlin(release: str) -> None:
    folder = sources(release) / "vllm" / "model_executor" / "layers" / "fused_moe" / "oracle"
    for name in ("int_wna16", "mxfp8"):
        text = (folder / f"{name}.py").read_text()
        moved = "prioritize_humming(" in text
        assert moved == (Version(release) >= Version(min_versions.HUMMING_FIRST)), name
        listed = re.findall(r"^ +\w+Backend\.(\w+),$", text, re.MULTILINE)
        if "HUMMING" in listed:
            assert listed.index("MARLIN") < listed.index("HUMMING"), name


def test_packages_of_a_release_are_those_that_its_wheel_requires() -> None:
    assert all(each.requires.keys() == {"torch", "humming-kernels", "flashinfer-python"} for each in TESTED_RELEASES)
    assert packages_of("cuda", f"v{NEWEST.removesuffix('.0')}") == {"vllm": NEWEST, **TESTED_RELEASES[-1].requires}
    assert packages_of("cuda", "0.28.1") == {**packages_of("cuda", "0.28.0"), "vllm": "0.28.1"}
    assert packages_of("cpu", "0.27.1")["torch"] == "2.13.0" and packages_of("cpu", "0.26.0") == {"vllm": "0.26.0"}


@every_release
def test_its_sources_can_be_had(release: str) -> None:
    """Other tests on a release are skipped where they cannot."""
    try:
        assert (sources(release) / "vllm").is_dir()
    except ReleaseUnavailable as error:
        pytest.fail(str(error))


@pytest.mark.parametrize(
    "version", [*RELEASES, "0.32.0+cpu", f"{NEWEST}rc1", "0.23.4", "0.29.1.dev7+g123456", "0.27.0"]
)
def test_served(version: str) -> None:
    compat.check_release(version)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("0.22.0", f"vLLM 0.22.0 is older than the oldest tested release; 0.22.1 to {NEWEST} are tested"),
        ("0.9.1", "older than the oldest"),
        (f"{NEWEST}.1", f"vLLM {NEWEST}.1 is newer than the newest tested release; 0.22.1 to {NEWEST} are tested"),
        ("1.0", "newer than the newest"),
        ("main", "vLLM's version 'main' cannot be read"),
    ],
)
def test_stands_down(version: str, reason: str) -> None:
    with pytest.raises(StandDown, match=reason) as caught:
        compat.check_release(version)
    assert "MOE_ORACLE_FORCE=1" in str(caught.value)
    compat.check_release(version, force=True)


def test_releases_are_in_order_and_in_their_group() -> None:
    versions = [Version(each) for each in RELEASES]
    assert versions == sorted(versions) and len(set(versions)) == len(versions)
    for group in RELEASE_GROUPS:
        for release in group.releases:
            assert release_group(release) is group
        assert Version(group.first) <= Version(group.releases[0])
    assert set(CPU_RELEASES) < set(RELEASES)


@pytest.mark.parametrize(
    ("version", "first"),
    [
        ("0.22.5", "0.22"),
        ("0.23.1", "0.22"),
        ("0.25.0", "0.24"),
        ("0.27.0", "0.27"),
        ("0.30.9+cu130", "0.30"),
        (f"{NEWEST}.1", NEWEST_GROUP.first),
        ("0.1", "0.22"),
        ("main", NEWEST_GROUP.first),
    ],
)
def test_an_untested_release_is_served_by_its_group(version: str, first: str) -> None:
    assert release_group(version).first == first


def test_support_says_what_was_verified() -> None:
    assert release_support(f"{CPU_RELEASES[-1]}+cpu").verified == (
        "sources",
        "registration",
        "serving",
    )
    assert release_support("0.23.0").verified == ("sources", "registration")
    said = str(release_support("0.27.1"))
    serving = ", serving" if "0.27.1" in CPU_RELEASES else ""
    assert said == f"vLLM 0.27.1: supported; tested sources, registration{serving}; same adapter as 0.27.1"
    unlisted = release_support("0.32.9")
    assert (unlisted.tested, unlisted.verified) == (False, ())
    said = f"vLLM 0.32.9: not tested itself; same adapter as 0.31.0 to {NEWEST}; the nearest tested release is 0.32.0"
    assert str(unlisted) == said


@pytest.mark.parametrize(
    ("version", "nearest", "tested"),
    [
        ("0.27.0", "0.27.1", False),
        ("0.25", "0.25.1", False),
        ("0.28.5+cu130", "0.28.0", False),
        ("0.1", RELEASES[0], False),
        ("9.9", NEWEST, False),
        ("main", NEWEST, False),
        (f"v{NEWEST}".removesuffix(".0"), NEWEST, True),
        (f"{NEWEST}rc1+cpu", NEWEST, True),
    ],
)
def test_the_nearest_tested_release(version: str, nearest: str, tested: bool) -> None:
    found = release_support(version)
    assert (found.nearest, found.tested) == (nearest, tested)


def test_the_table_has_every_release() -> None:
    for release in RELEASES:
        assert f"| {release} | yes | yes |" in generate.support_table()


@pytest.mark.parametrize("room", ["methods", "oracle", "schemes", "layouts", "kernels", "plugin.py"])
def test_what_runs_inside_vllm_knows_no_release(room: str) -> None:
    """Versions of vLLM are compared in `compat` and `releases` only. (A backend's rules may ask for the packages of a
    device.)
    """
    place = ROOT / "vllm_moe_oracle" / room
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        text = path.read_text(encoding="utf-8")
        assert "__version__" not in text.replace("from .. import __version__", "").replace('": __version__', ""), path
        assert not re.search(r"\bVersion\(|packaging\.version", text), path


# --- Adapters, with any vLLM installed -------------------------------------------------------------------------------


def legacy(name: str) -> Any:
    pytest.importorskip("vllm", reason="adapters speak to an installed vLLM")
    return getattr(importlib.import_module("vllm_moe_oracle.compat.legacy_adapters"), name)()


def newest() -> Any:
    pytest.importorskip("vllm", reason="adapters speak to an installed vLLM")
    return importlib.import_module("vllm_moe_oracle.compat.adapter").Adapter()


def test_every_group_has_its_adapter() -> None:
    chain = []
    pytest.importorskip("vllm", reason="adapters speak to an installed vLLM")
    for each in reversed(RELEASE_GROUPS):
        module, _, name = each.adapter.partition(":")
        chain.append(getattr(importlib.import_module(module), name))
    for newer, older in itertools.pairwise(chain):
        assert older.__bases__ == (newer,), "an older adapter subclasses the next newer one"


def test_before_0_24_only_the_limit_is_set() -> None:
    moe = SimpleNamespace(activation=SimpleNamespace(value="silu"), is_act_and_mul=True, swiglu_limit=7.0)
    assert legacy("Vllm022Adapter").activation(moe) == Activation("silu", limit=7.0)
    with pytest.raises(AttributeError, match="swiglu_alpha"):
        newest().activation(moe)


@pytest.mark.parametrize("spec", activations.ACTIVATIONS.values(), ids=lambda spec: spec.name)
def test_each_activation_is_read_from_the_fields_of_its_entry(spec: activations.ActivationSpec) -> None:
    """A limit, too, for which an entry may have no field: it is not overlooked, though no kernel may take it."""
    config = pytest.importorskip("vllm.model_executor.layers.fused_moe.config").FusedMoEConfig
    fields = activations.layer_fields(spec.name)
    assert [*fields] == ["alpha", "beta", "limit"]
    assert set(fields.values()) <= {each.name for each in dataclasses.fields(config)}
    others = {field: 9.0 for each in activations.ACTIVATIONS for field in activations.layer_fields(each).values()}
    moe = SimpleNamespace(activation=SimpleNamespace(value=spec.name), is_act_and_mul=spec.gated)
    vars(moe).update(others | dict(zip(fields.values(), (0.5, 1.5, 2.5), strict=True)))
    found = newest().activation(moe)
    assert (found.name, found.alpha, found.beta, found.limit) == (spec.name, 0.5, 1.5, 2.5)


def test_before_0_31_hash_routing_is_inferred() -> None:
    moe = SimpleNamespace()
    for scoring, expected in (("softmax", False), ("sqrtsoftplus", True)):
        assert legacy("Vllm030Adapter").hash_routing(moe, SimpleNamespace(scoring_func=scoring)) is expected
    for table in (None, torch.zeros(1)):
        layer = SimpleNamespace(hash_indices_table=table)
        assert legacy("Vllm022Adapter").hash_routing(moe, layer) is (table is not None)
    with pytest.raises(AttributeError):
        newest().hash_routing(moe, SimpleNamespace(scoring_func="softmax"))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_before_0_27_biases_of_single_experts_are_loaded(gated: bool, rank: int) -> None:
    """Each rank gets its rows of gate and up, and all of down; padding at the end stays."""
    parallel = SimpleNamespace(tp_size=2, tp_rank=rank)
    layer = SimpleNamespace(
        moe_config=SimpleNamespace(moe_parallel_config=parallel, is_act_and_mul=gated),
        _map_global_expert_id_to_local_expert_id=lambda expert: {5: 1}.get(expert, -1),
    )
    whole: list[tuple[Any, ...]] = []
    own = MethodType(lambda _, *arguments: whole.append(arguments), layer)
    load = legacy("Vllm024Adapter").bias_loader(layer, own)
    held = [cell.cell_contents for cell in load.__func__.__closure__ or ()]
    assert layer not in held and own not in held, "vLLM would keep the layer for the life of the process"
    w13, w2 = torch.zeros(2, 8 if gated else 4), torch.zeros(2, 4)
    gate, up, down = torch.arange(1.0, 7.0), torch.arange(11.0, 17.0), torch.arange(21.0, 24.0)
    p13, p2 = (torch.nn.Parameter(each, requires_grad=False) for each in (w13, w2))
    assert load(p13, gate, "w13_bias", "w1", 5, return_success=True) is True
    if gated:
        assert load(p13, up, "w13_bias", "w3", 5, return_success=True) is True
    assert load(p2, down, "w2_bias", "w2", 5) is None
    assert load(p2, down, "w2_bias", "w2", 4, return_success=True) is False, "of another rank"
    rows = slice(3 * rank, 3 * rank + 3)
    expected = torch.zeros(2, 8 if gated else 4)
    expected[1, :3] = gate[rows]
    if gated:
        expected[1, 4:7] = up[rows]
    assert torch.equal(p13.data, expected)
    assert torch.equal(p2.data[1], torch.tensor([21.0, 22.0, 23.0, 0.0])) and not p2.data[0].any()
    load(p13, torch.zeros(2, 8), "w13_bias", "w1", 0)
    assert len(whole) == 1, "what comes for all experts at once goes to the layer's own loader"


def test_since_0_27_the_layers_own_loader_is_right() -> None:
    loader = object()
    assert newest().bias_loader(None, loader) is loader


def test_before_0_30_a_cpu_is_given_router_logits() -> None:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    backend = SimpleNamespace(monolithic=False)
    assert newest().is_monolithic(backend) is False
    assert legacy("Vllm028Adapter").is_monolithic(backend) is bool(current_platform.is_cpu())
    assert legacy("Vllm028Adapter").is_monolithic(SimpleNamespace(monolithic=True)) is True


@pytest.mark.parametrize(("grouped", "expected"), [(True, (8, 4)), (False, (None, None))])
def test_monolithic_kernels_get_groups_only_with_grouped_topk(
    grouped: bool, expected: tuple[int | None, int | None]
) -> None:
    """A model may hand both numbers to vLLM's layer and not route by them."""
    pytest.importorskip("vllm", reason="the adapter is written against vLLM")
    from vllm_moe_oracle.compat.adapter import Adapter

    told: dict[str, Any] = {}
    kernel = SimpleNamespace(apply_monolithic=lambda *args, **given: told.update(given))
    names = ("w13_weight", "w2_weight", "activation", "global_num_experts", "expert_map",
             "apply_router_weight_on_input", "e_score_correction_bias", "routed_scaling_factor")  # fmt: skip
    layer = SimpleNamespace(**dict.fromkeys(names), use_grouped_topk=grouped, num_expert_group=8, topk_group=4)
    Adapter().apply_monolithic(kernel, layer, None, None, {})
    assert (told["num_expert_group"], told["topk_group"]) == expected


def test_the_package_exports_its_names_after_all_imports() -> None:
    """A module of the package must not take the place of a function of the same name."""
    pytest.importorskip("vllm")
    importlib.import_module("vllm_moe_oracle.compat.legacy_adapters")
    for name in ("check_release", "current_adapter"):
        assert not isinstance(getattr(compat, name), type(sys)), name
    assert compat.current_adapter() is compat.current_adapter()


def test_what_came_with_a_release_names_a_tested_one() -> None:
    given = {name: value for name, value in vars(min_versions).items() if name.isupper() and name != "RELEASES"}
    assert len(given) > 15 and {name: value for name, value in given.items() if value not in RELEASES} == {}
    assert min_versions.release_before("0.30.0") == "0.29.0"


@pytest.mark.parametrize(
    ("installed", "there"),
    [
        ("0.29.0", False),
        ("0.30.0", True),
        ("0.30", True),
        ("0.30.0rc1", True),
        ("0.30.1.dev3+g12", True),
        ("main", True),
        (None, True),
    ],
)
def test_whether_a_machine_has_what_a_release_brought(installed: str | None, there: bool) -> None:
    packages = {} if installed is None else {"vllm": installed}
    assert min_versions.vllm_at_least_on(Device("cuda", "a GPU", 90, packages=packages), "0.30.0") is there
