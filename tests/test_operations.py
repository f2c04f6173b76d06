"""What operators build on: the schema of decision records, the Grafana dashboard and the Kubernetes example."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import vllm_moe_oracle
from vllm_moe_oracle import __version__, decision_records, settings
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.measurements import lookup, model_shapes
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import Settings

ROOT = Path(__file__).parents[1]
PACKAGE = Path(vllm_moe_oracle.__file__).parent
SCHEMA = json.loads((PACKAGE / "decision_record.schema.json").read_text(encoding="utf-8"))
DASHBOARD = json.loads((ROOT / "examples" / "grafana-dashboard.json").read_text(encoding="utf-8"))
KUBERNETES = (ROOT / "examples" / "kubernetes.yaml").read_text(encoding="utf-8")
PAGE = (PACKAGE / "OPERATIONS.md").read_text(encoding="utf-8")

# --- Decision records -------------------------------------------------------------------------------------------------


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record of a model with a measured layer, as a server writes it."""
    pytest.importorskip("torch", reason="records are written where a model is")
    pytest.importorskip("vllm", reason="records name vLLM's release")
    from vllm_moe_oracle.methods import load_summary

    layer, device = model_shapes.parse("mxfp4:gpt-oss-20b"), catalog.known_device("nvidia-h200")
    found = decide(layer, device, Settings(), measurements=lookup.find_measurements(layer, device, Settings()))
    assert found.why == "measured" and any(not each.accepted for each in found.candidates)
    monkeypatch.setattr(load_summary, "_model", load_summary._ModelLoad())
    monkeypatch.setattr(load_summary._model, "decisions", {layer.layer: found})
    monkeypatch.setattr(load_summary._model, "stock_layers", {"model.layers.9.mlp.experts": "no backend"})
    return dict(json.loads(json.dumps(load_summary.model_report(2))))


def _errors(record: dict[str, Any]) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema", reason="vLLM brings it")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    return [f"{each.json_path}: {each.message}" for each in jsonschema.Draft202012Validator(SCHEMA).iter_errors(record)]


def test_a_record_follows_its_schema(record: dict[str, Any]) -> None:
    assert _errors(record) == []
    assert record["record_version"] == decision_records.RECORD_VERSION
    assert SCHEMA["properties"]["record_version"]["const"] == decision_records.RECORD_VERSION


def test_every_field_of_a_record_is_in_the_schema(record: dict[str, Any]) -> None:
    """At the levels that are described whole; what a problem, a device or a plan holds besides is not promised."""
    assert set(record) == set(SCHEMA["required"]) == set(SCHEMA["properties"])
    (group,) = record["groups"]
    assert set(group) == set(SCHEMA["$defs"]["group"]["properties"])
    decision = SCHEMA["$defs"]["decision"]["properties"]
    assert set(group["decision"]) == set(decision)
    assert set(group["decision"]["comparison"]) == set(decision["comparison"]["properties"])
    rejected = next(each for each in group["candidates"] if not each["accepted"])
    assert set(rejected) == set(SCHEMA["$defs"]["candidate"]["properties"])
    assert set(rejected["reasons"][0]) == {"code", "detail", "remedy"}


@pytest.mark.parametrize(
    ("device", "layer", "why"),
    [
        ("nvidia-h200", "mxfp8:qwen3-30b-a3b", "measured"),
        ("nvidia-h800", "mxfp8:qwen3-30b-a3b", "predicted"),
        ("nvidia-a100", "mxfp8:qwen3-30b-a3b", "static"),
    ],
)
def test_every_kind_of_choice_has_one_shape(device: str, layer: str, why: str) -> None:
    """Also in ``explain --json``, which has the same record: what is by backend is an object, as its `time_errors`."""
    jsonschema = pytest.importorskip("jsonschema", reason="vLLM brings it")
    problem, machine = model_shapes.parse(layer), catalog.known_device(device)
    found = decide(problem, machine, Settings(), measurements=lookup.find_measurements(problem, machine, Settings()))
    made = json.loads(msgspec.json.encode(found.to_record()))
    jsonschema.Draft202012Validator(SCHEMA["$defs"]["decision"]).validate(made)
    assert made["why"] == why and (made["comparison"] is None) == (why == "static")
    if made["comparison"] is not None:
        assert bool(made["comparison"]["errors"]) == (why == "predicted")
        assert found.backend in made["comparison"]["times"]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of a schema's required fields, through its definitions."""
    for name in value.get("required", ()):
        yield (*path, name)
    for name, each in value.get("properties", {}).items():
        if each.get("type") == "object" and "required" in each:
            yield from _paths(each, (*path, name))


def test_a_record_without_a_required_field_is_refused(record: dict[str, Any]) -> None:
    for path in _paths(SCHEMA):
        damaged = copy.deepcopy(record)
        inner = damaged
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        assert _errors(damaged), path
    for part, within in (("group", ()), ("decision", ("decision",)), ("candidate", ("candidates", 0))):
        for path in _paths(SCHEMA["$defs"][part]):
            damaged = copy.deepcopy(record)
            inner = damaged["groups"][0]
            for name in (*within, *path[:-1]):
                inner = inner[name]
            del inner[path[-1]]
            assert _errors(damaged), (part, path)
    for change in ({"record_version": 2}, {"rank": -1}, {"moe_oracle": None}, {"left_to_stock": ["x"]}):
        assert _errors(record | change), change


def test_a_record_with_more_fields_is_of_the_same_version(record: dict[str, Any]) -> None:
    record["later"] = record["groups"][0]["later"] = record["groups"][0]["decision"]["later"] = 1
    assert _errors(record) == []


# --- The dashboard ----------------------------------------------------------------------------------------------------


def _queries() -> list[str]:
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]] + variables


def _metrics_of(queries: list[str]) -> set[str]:
    return {name for query in queries for name in re.findall(r"vllm:[a-z_]+", query)}


def test_the_dashboard_is_whole() -> None:
    panels = DASHBOARD["panels"]
    assert len({each["id"] for each in panels}) == len(panels) > 5
    assert all(each["title"] and each["description"] and each["targets"] for each in panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x + place["x"], y + place["y"]) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
    sources = {json.dumps(each["datasource"]) for panel in panels for each in (panel, *panel["targets"])}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}
    named = {each["name"] for each in DASHBOARD["templating"]["list"]}
    asked = {name for query in _queries() for name in re.findall(r"\$(\w+)", query)} - {"__rate_interval"}
    assert asked <= named
    for query in _queries():
        assert all(query.count(one) == query.count(other) for one, other in ("()", "{}", "[]")), query


def test_every_metric_of_this_package_that_it_asks_for_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: dict[str, Any]
) -> None:
    prometheus = pytest.importorskip("prometheus_client", reason="vLLM brings it")
    from vllm_moe_oracle.compat import metrics

    monkeypatch.setenv(settings._RECORDS_DIR_VAR, str(tmp_path))
    decision_records.write_record(record)
    registry = prometheus.CollectorRegistry()
    registry.register(metrics.DecisionCollector())
    samples = [sample for family in registry.collect() for sample in family.samples]
    asked = {name for name in _metrics_of(_queries()) if "moe_oracle" in name}
    assert asked == {each.name for each in samples} == set(re.findall(r"`(vllm:moe_oracle_\w+)`", PAGE))
    labels = {name for sample in samples for name in sample.labels}
    used = {name for query in _queries() for name in re.findall(r'(\w+)=~?"', query)}
    used |= {
        name.strip()
        for query in _queries()
        for found in re.findall(r"by \(([^)]*)\)", query)
        for name in found.split(",")
    }
    assert used - {"job", "instance", "le"} <= labels
    assert (
        set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Metrics")[2].partition("\n## ")[0], re.MULTILINE))
        == labels
    )


def test_every_metric_of_vllm_that_it_asks_for_exists() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("no vLLM here")
    source = (Path(found.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py").read_text(encoding="utf-8")
    known = set(re.findall(r'"(vllm:[a-z_]+)"', source))
    asked = {name for name in _metrics_of(_queries()) if "moe_oracle" not in name}
    assert asked and {re.sub(r"_(bucket|total)$", "", name) for name in asked} <= known


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def test_the_kubernetes_example_keeps_caches_and_waits_for_its_start() -> None:
    yaml = pytest.importorskip("yaml", reason="vLLM brings it")
    claim, deployment = yaml.safe_load_all(KUBERNETES)
    assert (claim["kind"], deployment["kind"]) == ("PersistentVolumeClaim", "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # Pinned, and told apart from what a reader must replace.
    assert container["image"].endswith(f":v{NEWEST}-{__version__}")
    assert f"FROM vllm/vllm-openai:v{NEWEST}\n#   RUN pip install vllm-moe-oracle=={__version__}\n" in KUBERNETES
    for line in KUBERNETES.splitlines():
        assert ("# PLACEHOLDER" in line) == any(word in line for word in ("registry.example", "args:", "gpu:", "marks"))
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    (cache,) = [each for each in pod["volumes"] if "persistentVolumeClaim" in each]
    assert cache["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME", "MOE_ORACLE_REPORT"):
        assert variables[name].startswith(mounts[cache["name"]]), name
    own = {each for each in variables if each.startswith("MOE_ORACLE_")}
    assert own <= {settings.env_var(name) for name in settings.FIELDS}
    port = container["ports"][0]["containerPort"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200
    assert (
        deployment["spec"]["selector"]["matchLabels"].items()
        <= deployment["spec"]["template"]["metadata"]["labels"].items()
    )
