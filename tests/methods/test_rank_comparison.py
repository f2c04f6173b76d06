"""Ranks that differ in one thing, whichever it is: the same error on every rank, with the values and who has them."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lib import gloo_ranks
from tests.lib.cases import CPU, backend, problem, registry
from tests.lib.method_layers import undecided
from vllm_moe_oracle import __version__, settings
from vllm_moe_oracle.core.problem import RANK_LOCAL_FIELDS, Activation, Parallel, Problem, Routing, Scheme
from vllm_moe_oracle.errors import RankSyncError
from vllm_moe_oracle.methods import rank_comparison
from vllm_moe_oracle.methods.rank_comparison import describe_differences, require_equal

BASE = problem(experts=64, ep=2)
INTEGERS = dataclasses.replace(BASE, scheme=Scheme("wna16", 4, 32, "gptq"))
"""Of the MX schemes no field but the name and the activations' precision has another value."""
NESTED = {"scheme": Scheme, "activation": Activation, "routing": Routing, "parallel": Parallel}

OTHER_VALUES: dict[str, Any] = {
    "scheme.name": "mxfp4", "scheme.act_order": "group", "scheme.activations": "fp8", "scheme.packing": "other",
    "activation.name": "gelu", "activation.alpha": 1.5, "activation.beta": 2.5, "activation.limit": 7.0,
    "routing.method": "other", "routing.scoring": "sigmoid", "routing.num_groups": 4, "routing.top_k_groups": 2,
    "parallel.format": "batched", "parallel.placement": "round_robin", "dtype": "float16",
}  # fmt: skip


def changed(name: str, base: Problem) -> Problem:
    """The layer with another value of one field; numbers grow, flags turn."""
    outer, _, inner = name.partition(".")
    part = getattr(base, outer)
    value = getattr(part, inner) if inner else part
    value = OTHER_VALUES.get(
        name, not value if isinstance(value, bool) else f"{value}1" if isinstance(value, str | None) else value + 1
    )
    return dataclasses.replace(base, **{outer: dataclasses.replace(part, **{inner: value}) if inner else value})


def field_names() -> list[str]:
    """Every field of a `Problem`, those of its parts by dotted names."""
    return [
        f"{each.name}.{part.name}" if each.name in NESTED else each.name
        for each in dataclasses.fields(Problem)
        for part in (dataclasses.fields(NESTED[each.name]) if each.name in NESTED else [each])
    ]


@pytest.mark.parametrize("name", field_names())
def test_every_field_is_compared_or_declared_local(name: str) -> None:
    if name in RANK_LOCAL_FIELDS:
        assert name not in BASE.common_fields()
        return
    base = INTEGERS if name.startswith("scheme.") else BASE
    ranks = [{"layer": each.common_fields()} for each in (base, base, changed(name, base))]
    ((kind, text),) = describe_differences(ranks)
    assert kind == "layer" and text.startswith(f"{name} is ") and " on rank 2, " in text and "on ranks 0, 1" in text
    assert json.dumps(ranks[0]["layer"][name]) in text or "not there" in text


def test_parts_of_a_problem_are_the_ones_of_this_file() -> None:
    hints = get_type_hints(Problem)
    parts = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    assert parts == NESTED and set(RANK_LOCAL_FIELDS) <= set(hints)
    assert BASE.common_fields() == dataclasses.replace(BASE, layer="x", local_experts=31).common_fields()


@pytest.mark.parametrize("name", settings.FIELDS)
def test_every_setting_says_whether_ranks_share_it(name: str) -> None:
    """A setting that changes the chosen precision, backend or weights is shared; those for one host's files are not."""
    shared, of_rank_0 = (settings.FIELDS[name].metadata[mark] for mark in ("shared", "of_rank_0"))
    assert isinstance(shared, bool) and not (shared and of_rank_0)
    assert (settings.env_var(name) in settings.values_of_rank_0(settings.Settings())) is of_rank_0
    assert (settings.env_var(name) in settings.shared_values(settings.Settings())) is shared


VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2)
PROPERTIES = st.dictionaries(
    st.sampled_from(sorted(rank_comparison._KINDS)), st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3)
)


@given(st.lists(PROPERTIES, min_size=2, max_size=4))
def test_properties_are_equal_or_every_difference_is_named(ranks: list[dict[str, dict[str, Any]]]) -> None:
    found = {(kind, text.partition(" is ")[0]) for kind, text in describe_differences(ranks)}
    for kind in rank_comparison._KINDS:
        for name in "xyz":
            values = {json.dumps(each.get(kind, {}).get(name)) for each in ranks}
            assert ((kind, name) in found) == (len(values) > 1)
    if not found:
        require_equal("topic", ranks)
        return
    with pytest.raises(RankSyncError, match=r"^topic: ranks differ: ") as caught:
        require_equal("topic", ranks)
    assert all(rank_comparison._KINDS[kind][1] in caught.value.remedy for kind, _ in found)


# --- Processes --------------------------------------------------------------------------------------------------------


def decided(processes: Any, odd: int, change: dict[str, Any], index: int) -> Any:
    """What a rank says that decides four layers of two kinds, and then begins to convert them; `change` is what is
    other on rank `odd`, from the layer `index` on."""
    from vllm_moe_oracle.devices import detect
    from vllm_moe_oracle.methods import backend_selection, rank_sync
    from vllm_moe_oracle.oracle.selection import decide

    rank = int(processes.rank())
    mine = change if rank == odd else {}
    detect.detect = lambda: dataclasses.replace(CPU, packages=CPU.packages | mine.get("packages", {}))
    known = registry([backend("first", rank=1.0), backend("second", rank=2.0)])
    chosen = settings.load({}, assignments=mine.get("settings"))
    for name, value in mine.get("variables", {}).items():
        rank_comparison.get_env = lambda each, name=name, value=value: value if each == name else None
    if "version" in mine:
        rank_comparison.__version__ = mine["version"]
    group = rank_sync.RankGroup(processes, 20.0, rank_comparison.explain_difference)
    logged: list[str] = []
    rank_comparison.logger.warning = lambda words, *values: logged.append(words % values)  # type: ignore[method-assign]
    begin = time.monotonic()
    try:
        for layer in range(4):
            name = f"model.layers.{layer}.mlp.experts"
            case = dataclasses.replace(BASE, layer=name, top_k=2 + layer % 2, local_experts=31 + 2 * (rank == 0))
            if layer >= index:
                if mine.get("stock") == layer:
                    continue
                fields = mine.get("problem", {})
                case = dataclasses.replace(case, **fields)
            rank_comparison.require_same_layer(group, case, chosen, mine.get("moe_backend"))
            method = undecided(known, chosen, group)
            backend_selection.select_backend(method, name, lambda case=case: decide(case, CPU, chosen, registry=known))
        rank_comparison.require_same_layers(group)
    except RankSyncError as error:
        return {"message": str(error), "seconds": time.monotonic() - begin}
    return [method.backend.name, logged]


DIFFERENT: list[Any] = [
    ({"settings": {"activations": "16bit"}}, ("MOE_ORACLE_ACTIVATIONS is ", '"16bit"', '"checkpoint"')),
    ({"stock": 2}, ("model.layers.2.mlp.experts: ranks differ: scheme.name is ", "not there", '"mxfp8"')),
]
FULL: list[Any] = [
    ({"packages": {"torch": "9.9"}}, ("torch is ", '"9.9"', json.dumps(CPU.packages.get("torch")))),
    ({"settings": {"mxfp8_scale_rule": "floor"}}, ("MOE_ORACLE_MXFP8_SCALE_RULE is ", '"floor"', '"ceil"')),
    ({"settings": {"backend": "second"}}, ("MOE_ORACLE_BACKEND is ", '"second"', '"auto"')),
    ({"settings": {"overrides": "re:x=y"}}, ("OVERRIDES is ", '[{"pattern": "x", "backend": "y"}]', "[]")),
    ({"version": "9.9"}, ("vllm-moe-oracle is ", '"9.9"', json.dumps(__version__))),
    ({"moe_backend": "marlin"}, ("--moe-backend is ", '"marlin"', "not there")),
    ({"variables": {"VLLM_CPU_INT4_W4A8": "1"}}, ("VLLM_CPU_INT4_W4A8 is ", '"1"', "not set")),
    ({"problem": {"hidden_size": 4096}}, ("hidden_size is ", "4096", str(BASE.hidden_size))),
]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("change", "words"), [*DIFFERENT, *(pytest.param(*each, marks=pytest.mark.full) for each in FULL)]
)
def test_one_difference_is_one_error_on_every_rank(
    tmp_path: Path, ranks: int, change: dict[str, Any], words: tuple[str, str, str]
) -> None:
    found = gloo_ranks.run(decided, ranks, tmp_path, 1, change, 0)
    assert len({each["message"] for each in found}) == 1
    name, odd, normal = words
    others = "rank 0" if ranks == 2 else "ranks 0, 2, 3"
    for text in (name, f"{odd} on rank 1", f"{normal} on {others}"):
        assert text in found[0]["message"], found[0]["message"]
    assert all(each["seconds"] < 15.0 for each in found)


LATER = [({"problem": {"top_k": 5}}, 2), ({"problem": {"top_k": 2}}, 3), ({"problem": {"has_bias": True}}, 3)]


@pytest.mark.parametrize(
    ("change", "index"), [LATER[0], *(pytest.param(*each, marks=pytest.mark.full) for each in LATER[1:])]
)
def test_a_later_layer_that_differs_is_named_with_its_field(tmp_path: Path, change: dict[str, Any], index: int) -> None:
    """Of a new kind on one rank and of a known one on the other; or of a known one on both."""
    first, second = gloo_ranks.run(decided, 2, tmp_path, 1, change, index)
    ((name, value),) = change["problem"].items()
    assert first["message"] == second["message"] and first["seconds"] < 15.0
    for words in (f"model.layers.{index}.mlp.experts", "ranks differ", f"{name} is ", f"{json.dumps(value)} on rank 1"):
        assert words in first["message"], first["message"]


OVERRULED = (
    'moe_oracle: MOE_ORACLE_OBJECTIVE is "decode" on rank 1 and "balanced" on rank 0, whose order of the backends all '
    "ranks take"
)


@pytest.mark.parametrize(
    ("change", "logged"),
    [
        pytest.param({}, [], marks=pytest.mark.full),
        ({"settings": {"rank_sync_timeout": "30", "objective": "decode", "cache": "/tmp/x"}}, [OVERRULED]),
    ],
)
def test_ranks_that_may_differ_so_take_the_same_backend(
    tmp_path: Path, change: dict[str, Any], logged: list[str]
) -> None:
    assert gloo_ranks.run(decided, 2, tmp_path, 1, change, 0) == [["first", []], ["first", logged]]


def absent(processes: Any, folder: str) -> Any:
    """Rank 1 has no plugin: it says nothing, and lives."""
    from vllm_moe_oracle.methods import rank_sync

    if processes.rank() == 1:
        gloo_ranks.wait_for_result(0, folder)
        return "stock"
    rank_sync._LATE_SECONDS, remarks = 0.2, []
    rank_sync.logger.warning = lambda text, *arguments: remarks.append(text % arguments)  # type: ignore[method-assign]
    group = rank_sync.RankGroup(processes, 1.0, rank_comparison.explain_difference)
    try:
        rank_comparison.require_same_layer(group, BASE, settings.Settings(), None)
    except RankSyncError as error:
        return {"message": str(error), "remarks": remarks}
    return None


def test_a_rank_without_the_plugin_is_named_before_the_timeout(tmp_path: Path) -> None:
    first, second = gloo_ranks.run(absent, 2, tmp_path, str(tmp_path))
    assert second == "stock"
    (remark,) = first["remarks"]
    assert "waiting for rank 1, up to 1 s" in remark
    assert "rank 1 did not answer within 1 s" in first["message"]
    for text in (remark, first["message"]):
        assert "the plugin is not installed, not enabled or stands down there" in text


def damaged(processes: Any, ours: bool) -> Any:
    """Rank 1 cannot read its files; vLLM's own code raises it."""
    from vllm_moe_oracle import plugin
    from vllm_moe_oracle.methods import rank_sync

    rank_comparison.current_adapter = lambda: SimpleNamespace(peer_group=lambda: processes)  # type: ignore[assignment]
    group = rank_comparison.make_group(20.0)
    if ours:
        rank_comparison.require_same_layer(group, BASE, settings.Settings(), None)

    def load_model(loader: None, name: str) -> str:
        if group.rank == 1:
            raise OSError(f"{name}: file not fully covered")
        return name

    if not ours:  # nobody waits, so nobody is told
        rank_sync.notify_failure = lambda *arguments: gloo_ranks.die()
    try:
        plugin._load_model(load_model, None, "model-00002.safetensors")
        rank_sync.all_gather(group, "the self-check", lambda: 1) if ours else None
    except RankSyncError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("ours", [True, pytest.param(False, marks=pytest.mark.full)])
def test_what_one_rank_cannot_load_ends_the_others_with_its_cause(tmp_path: Path, ours: bool) -> None:
    first, second = gloo_ranks.run(damaged, 2, tmp_path, ours)
    cause = "model-00002.safetensors: file not fully covered"
    assert second == {"raised": "OSError", "message": cause}
    assert first == (f"the self-check: rank 1 gave up at loading the model: OSError: {cause}" if ours else "loaded")


NOT_NUMERIC = {
    "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "how the same kernel's buffers are shared",
    "VLLM_DEEPEP_BUFFER_SIZE_MB": "memory",
    "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE": "the way between hosts",
    "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL": "the way between hosts",
    "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE": "the way between hosts",
    "VLLM_DEEPEP_V2_PREFER_OVERLAP": "order of launches",
    "VLLM_DEEP_GEMM_WARMUP": "when kernels are compiled",
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD": "the same numbers, earlier",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "the same numbers, earlier",
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS": "threads that compile",
}
"""Variables of vLLM whose names say that they are of experts, formats or sums, and that change no numbers."""
NUMERIC_WORDS = re.compile(
    "MOE|MARLIN|HUMMING|DEEP_?GEMM|DEEPEP|TRITON|ALLREDUCE|MXFP|FP8|FP4|INT4|PRECISION|TUNED|REDUC|SYMM|QUANT"
)


def test_the_variables_are_those_that_vllm_reads() -> None:
    """A release's new variable is either compared, or known to change no numbers."""
    envs = pytest.importorskip("vllm.envs", reason="its table of variables is asked")
    compared = set(rank_comparison.NUMERIC_VARIABLES)
    assert compared <= set(envs.environment_variables)
    # This plugin serves no ROCm.
    named = {name for name in envs.environment_variables if NUMERIC_WORDS.search(name) and "_ROCM_" not in name}
    assert named - compared == NOT_NUMERIC.keys()


@pytest.mark.parametrize("name", (*rank_comparison.NUMERIC_VARIABLES, *rank_comparison.LIBRARY_VARIABLES))
def test_a_variable_that_one_rank_has_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    usual = rank_comparison.process_properties(settings.Settings())
    monkeypatch.setenv(name, "1")
    ((kind, text),) = describe_differences([usual, rank_comparison.process_properties(settings.Settings())])
    assert kind == "variable" and text.startswith(f"{name} is ") and '"1" on rank 1' in text


class _Files:
    """A method of two ranks whose engine reads files in several threads."""

    def __init__(self, size: int, extra: Any) -> None:
        from vllm_moe_oracle.compat.engine_adapter import EngineAdapter

        self.adapter = EngineAdapter()
        engine = SimpleNamespace(load_config=SimpleNamespace(model_loader_extra_config=extra))
        self.adapter.engine = lambda: engine  # type: ignore[method-assign,assignment,return-value]
        self.rank_group = SimpleNamespace(size=size)


@pytest.mark.parametrize("extra", [{}, {"enable_multithread_load": False}, {"enable_multithread_load": True}, "uri"])
@pytest.mark.parametrize("size", [1, 2])
def test_ranks_read_files_in_one_order(size: int, extra: Any, caplog: pytest.LogCaptureFixture) -> None:
    from vllm_moe_oracle.methods.base import OracleMoEMethod

    threads = isinstance(extra, dict) and extra.get("enable_multithread_load", False)
    method: Any = _Files(size, extra)
    for _ in range(2):
        OracleMoEMethod._keep_load_order(method)
    remarks = [each.getMessage() for each in caplog.records if each.name == "vllm.moe_oracle"]
    assert ["enable_multithread_load is off" in each for each in remarks] == [True] * (threads and size > 1)
    if threads:
        assert extra["enable_multithread_load"] is (size == 1)


# --- Packages of third parties ----------------------------------------------------------------------------------------


def chosen_with(processes: Any, versions: list[dict[str, str]]) -> Any:
    """The backend that a rank takes of a third party's package, which has a version of its own on each rank."""
    from tests.lib.cases import CPU, backend, problem
    from vllm_moe_oracle.methods import backend_selection
    from vllm_moe_oracle.methods.rank_sync import RankGroup
    from vllm_moe_oracle.oracle.registry import Registry
    from vllm_moe_oracle.oracle.selection import decide
    from vllm_moe_oracle.settings import Settings

    group = RankGroup(processes, 60.0)
    registry = Registry()
    registry.add(backend("theirs", rank=1.0), "an entry point", versions[group.rank])
    registry.add(backend("other", rank=2.0), "an entry point", {"unused": str(group.rank)})
    method = undecided(registry, Settings(), group)
    layer = problem()
    backend_selection.select_backend(method, layer.layer, lambda: decide(layer, CPU, Settings(), registry=registry))
    return method.backend.name


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        (({"theirs": "1.0", "their-kernels": "2"},) * 2, ()),
        (({"theirs": "1.0"}, {"theirs": "1.1"}), ('theirs of the backend theirs is "1.', "on rank 0", "on rank 1")),
        (
            ({"theirs": "1.0", "their-kernels": "2"}, {"theirs": "1.0"}),
            ("their-kernels of the backend theirs is ", "not installed on rank 1", "Install the same versions"),
        ),
    ],
    ids=["same", "other version", "not installed"],
)
def test_ranks_have_the_same_version_of_a_third_partys_package(
    tmp_path: Path, versions: list[dict[str, str]], words: tuple[str, ...]
) -> None:
    for found in gloo_ranks.run(chosen_with, 2, tmp_path, versions):
        if not words:
            assert found == "theirs"
        else:
            assert found["raised"] == "RankSyncError"
            assert all(word in found["message"] for word in words), found["message"]
