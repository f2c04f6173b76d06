"""Fuzz targets: damaged and hostile configs, tensors' headers, caches, profiles, reports and devices.

Each input is read as the command line tool or a server reads it. Only this project's errors may come of it, in bounded
time and memory (`tests.lib.fuzzing`, which also says how to run more). The table in tests/README.md is of a long run.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lib import fuzzing
from tests.lib.cases import H200, problem
from tests.lib.configs import AUTO_ROUND, CONFIGS, CT_INPUTS, CT_MXFP8, GPTQ, INT4, MODELOPT, PACKED, compressed, group
from tests.lib.samples import HERE, SHAPE, sample
from vllm_moe_oracle import api, settings
from vllm_moe_oracle.checkpoint import tensor_headers
from vllm_moe_oracle.devices.catalog import load_device
from vllm_moe_oracle.errors import MeasurementError, OracleError
from vllm_moe_oracle.measurements import bench_records, lookup, profile
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.measurements.store import Store
from vllm_moe_oracle.report import page_data

Fuzz = Callable[[Callable[[random.Random], Any], Callable[[Any], str]], None]


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Runs a target, and prints what its inputs did."""

    def run(make: Callable[[random.Random], Any], read: Callable[[Any], str]) -> None:
        found = fuzzing.run(make, read)
        print(f"{request.node.name}: {found}")
        assert found.outcomes.get("read", 0), "no input was read: the target tests nothing behind the first check"

    return run


def outcome(read: Callable[[], object]) -> str:
    """``read``, or the type of this project's error. The error must be one short printable line when it is shown."""
    try:
        read()
    except OracleError as error:
        assert "MemoryError" not in str(error) and len(str(error)) < 20_000, str(error)[:500]
        return type(error).__name__
    return "read"


# --- Configs ----------------------------------------------------------------------------------------------------------

QUARK = {
    "quant_method": "quark", "exclude": ["lm_head", "re:.*gate"], "export": {}, "layer_type_quant_config": {},
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
    },
    "layer_quant_config": {"*self_attn*": {"weight": None}},
}  # fmt: skip
MIXED = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.{layer}.mlp.experts.0.{name}": {"quant_algo": "MXFP8"}
        for layer in range(3) for name in ("gate_proj", "up_proj", "down_proj")
    },
}  # fmt: skip
TRANSFORM = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"location": "input", "targets": ["re:.*qkv"]}]}}}
QUANTIZATIONS: list[dict[str, Any]] = [
    MODELOPT,
    MIXED,
    QUARK,
    {**GPTQ, "dynamic": {r"-:.*\.mlp\.gate.*": {}, r"+:^model\.layers\.3\..*": {"bits": 8}}},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["mlp.gate"]},
    {**AUTO_ROUND, "extra_config": {".*mlp.gate.*": {"bits": 16}, "model.layers.1.mlp.experts": {"bits": 8}}},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.1.*", "lm_head", "re:.*router"]},
    {"quant_method": "fp8", "expert_dtype": "fp4", "ignored_layers": ["lm_head"]},
    compressed(group(CT_MXFP8, CT_INPUTS), ignore=["lm_head", "re:.*mlp.gate$"], transform_config=TRANSFORM),
    compressed(group(INT4, targets=(r"re:.*experts.*",)), format=PACKED, ignore=["re:.*self_attn.*"]),
]
MODELS = [json.loads(path.read_text()) for path in sorted(CONFIGS.glob("*.json"))]


def a_config(source: random.Random) -> Any:
    model = copy.deepcopy(source.choice(MODELS))
    if source.random() < 0.8:
        model["quantization_config"] = copy.deepcopy(source.choice(QUANTIZATIONS))
    if source.random() < 0.5:
        # Half of the changes are made where a parser follows names, not among a model's forty numbers.
        model["quantization_config"] = fuzzing.mutated(model.get("quantization_config", {}), source)
        return model
    return fuzzing.mutated(model, source)


def test_configs(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    def read(text: str) -> str:
        path.write_text(text)
        return outcome(lambda: api.explain_checkpoint(path, device="nvidia-h200", failures=[]))

    fuzz(lambda source: json.dumps(a_config(source)), read)


def a_restructured_config(source: random.Random) -> Any:
    """A config whose parts lie elsewhere, with rules of several formats and values of other types."""
    model, quantization = (copy.deepcopy(source.choice(each)) for each in (MODELS, QUANTIZATIONS))
    if source.random() < 0.5:  # fields of two formats, which contradict each other
        quantization = {**source.choice(QUANTIZATIONS), **quantization}
        quantization["quant_method"] = source.choice(QUANTIZATIONS)["quant_method"]
    quantization = fuzzing.retyped(quantization, source) if source.random() < 0.7 else quantization
    field = source.choice(("quantization_config", "compression_config"))
    inner = {**model, field: quantization}
    places = (
        inner,
        {**model, "text_config": inner},
        {"text_config": inner, "model_type": model.get("model_type"), field: source.choice(QUANTIZATIONS)},
        {"thinker_config": {"text_config": inner}, "architectures": model.get("architectures")},
        {**inner, "llm_config": model, "text_config": None},
        {**inner, "model_type": source.choice(MODELS).get("model_type")},
        {**model, field: {"quantization": quantization, "producer": {"name": "modelopt"}}},
    )
    found = source.choice(places)
    return fuzzing.retyped(found, source) if source.random() < 0.5 else found


def test_restructured_configs(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    def make(source: random.Random) -> tuple[str, dict[str, Any]]:
        ranks = {"tp": source.choice((1, 2, 3, 8)), "dp": source.choice((1, 2)), "ep": source.random() < 0.3}
        device, online = source.choice(("nvidia-h200", "cpu")), source.choice(("", "", "mxfp8", "moe_wna16"))
        return json.dumps(a_restructured_config(source)), {**ranks, "device": device, "quantization": online}

    def read(made: tuple[str, dict[str, Any]]) -> str:
        text, options = made
        path.write_text(text)
        return outcome(lambda: api.explain_checkpoint(path, failures=[], **options))

    fuzz(make, read)


def test_bytes_of_configs(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    def make(source: random.Random) -> bytes:
        model = {**source.choice(MODELS), "quantization_config": source.choice(QUANTIZATIONS)}
        return fuzzing.damaged(json.dumps(model).encode(), source)

    def read(data: bytes) -> str:
        path.write_bytes(data)
        return outcome(lambda: api.explain_checkpoint(path, device="nvidia-h200", failures=[]))

    fuzz(make, read)


def test_headers_of_tensors(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {
        "__metadata__": {"format": "pt"},
        "model.layers.0.mlp.experts.0.up_proj.bias": {"dtype": "F16", "shape": [8], "data_offsets": [0, 16]},
        "model.layers.0.mlp.experts.0.up_proj.qweight": {"dtype": "I32", "shape": [4], "data_offsets": [16, 32]},
    }

    def make(source: random.Random) -> bytes:
        text = json.dumps(fuzzing.mutated(header, source)).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(32)
        return data if source.random() < 0.5 else fuzzing.damaged(data, source)

    def read(data: bytes) -> str:
        path.write_bytes(data)
        kinds = outcome(lambda: tensor_headers.expert_tensors(tmp_path, ["model.layers.0.mlp.experts"]))
        biases = outcome(lambda: tensor_headers.has_nonzero_expert_biases(tmp_path))
        return biases if kinds == "read" else kinds

    fuzz(make, read)


# --- Measurements -----------------------------------------------------------------------------------------------------

SHAPES = [SHAPE, *(kernel_shape_of(problem(hidden_size=32 * index)) for index in range(1, 20))]


def filled_store(folder: Path) -> Path:
    store = Store(folder)
    store.prepare()
    for shape in SHAPES:
        store.add(HERE, shape, [sample(1 << power, name) for power in range(10) for name in ("marlin_mxfp8", "x")])
    return store.path


def start_of_a_server(variables: dict[str, str]) -> None:
    """Looks measurements up as a server does while it loads: no error may end it."""
    chosen = settings.load(variables)
    found = lookup.find_measurements(problem(), H200, chosen)
    assert found is not None and all(remark.isprintable() for remark in found.remarks)
    api_decision = api.decide(problem(), H200, chosen, measurements=found)
    assert api_decision.backend


def read_store(path: Path) -> str:
    """Everything that reads a cache: a server, `status`, `report`, and `tune`."""
    store = Store(path.parent)
    start_of_a_server({"MOE_ORACLE_CACHE": str(path.parent)})
    found = outcome(lambda: store.samples(SHAPE))
    for read in (store.summary, lambda: store.samples_by_kernel_shape(HERE)):
        with contextlib.suppress(MeasurementError):
            read()
    before = path.read_bytes()
    with contextlib.suppress(MeasurementError):
        store.prepare()
        store.add(HERE, SHAPE, [sample(3)])
    aside = [each for each in path.parent.iterdir() if ".damaged-" in each.name]
    assert not aside or [each.read_bytes() for each in aside] == [before], "bytes of a damaged store are lost"
    for each in path.parent.iterdir():
        each.unlink()
    return found


def test_bytes_of_caches(fuzz: Fuzz, tmp_path: Path) -> None:
    data = filled_store(tmp_path / "whole").read_bytes()
    path = tmp_path / "cache" / "measurements.sqlite"
    path.parent.mkdir()

    def make(source: random.Random) -> bytes:
        if source.random() < 0.5:  # the header and the schema, which decide how all the rest is read
            return fuzzing.damaged(data[:4096], source)[:4096].ljust(4096, b"\0") + data[4096:]
        return fuzzing.damaged(data, source)

    def read(changed: bytes) -> str:
        path.write_bytes(changed)
        return read_store(path)

    fuzz(make, read)


def test_contents_of_caches(fuzz: Fuzz, tmp_path: Path) -> None:
    """Tables with hostile values and schemas, which SQLite itself has written."""
    data = filled_store(tmp_path / "whole").read_bytes()
    path = tmp_path / "cache" / "measurements.sqlite"
    path.parent.mkdir()
    places = [("samples", column) for column in ("sample", "kernel_shape", "taken", "environment", "backend", "tokens")]
    places += [("environments", "description"), ("sqlite_master", "sql"), ("sqlite_master", "name")]
    schemas = (
        "CREATE TRIGGER samples AFTER INSERT ON samples BEGIN DELETE FROM samples; END",
        "CREATE VIEW environments AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT * FROM c",
        "CREATE INDEX i ON samples (sample)",
    )

    def make(source: random.Random) -> bytes:
        changes: list[tuple[str, tuple[Any, ...]]] = []
        for _ in range(source.randint(1, 3)):
            table, column = source.choice(places)
            value: Any = fuzzing.value(source)
            if source.random() < 0.5:
                original = json.loads(HERE.key if table == "environments" else SHAPE.key)
                value = json.dumps(fuzzing.mutated(original, source))
            elif isinstance(value, list | dict):
                value = json.dumps(value)
            value = value[:100_000].encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            value = value if not isinstance(value, int) or -(2**63) <= value < 2**63 else 0
            text = "CAST(? AS TEXT)" if source.random() < 0.8 else "?"
            changes.append((f"UPDATE OR REPLACE {table} SET {column} = {text}", (value,)))
        if source.random() < 0.3:
            row = (source.choice(("table", "trigger")), source.choice(("samples", "t")), source.choice(schemas))
            changes.append(("INSERT INTO sqlite_master VALUES (?, ?, 'samples', 0, ?)", row))
        path.write_bytes(data)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            for statement, values in changes:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute(statement, values)
            connection.commit()
        return path.read_bytes()

    def read(changed: bytes) -> str:
        path.write_bytes(changed)
        return read_store(path)

    fuzz(make, read)


def test_profiles(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    whole = profile.encode(
        profile.make(HERE, {shape: [sample(1), sample(8)] for shape in SHAPES[:4]}, {"command": "x"})
    )
    tree = json.loads(whole)

    def make(source: random.Random) -> bytes:
        if source.random() < 0.4:
            return fuzzing.damaged(whole, source)
        return json.dumps(fuzzing.mutated(tree, source)).encode()

    def read(data: bytes) -> str:
        path.write_bytes(data)
        lookup._profile_or_error.cache_clear()
        start_of_a_server({"MOE_ORACLE_PROFILE": str(path), "MOE_ORACLE_CACHE": str(tmp_path / "none")})
        with contextlib.suppress(MeasurementError):
            page_data.read(path, settings.Settings())
        return outcome(lambda: profile.read(path))

    fuzz(make, read)


def bench_lines() -> list[Any]:
    """A file of `bench --jsonl` and a decision record, one object for each line."""
    head = {"conditions": {"command": "bench", "method": "x", "routing": "uniform", "environment": {"gpu": H200.name}}}
    times = {"marlin_mxfp8": 10.0, "hopper_mxfp8": 8.0, "stock:auto": 12.0}
    record = {
        "layer": {"name": "mxfp8:x"}, "kernel_shape": json.loads(SHAPE.key), "tokens": 1, "us": times,
        "quartiles": {name: [us, us] for name, us in times.items()}, "replays": dict.fromkeys(times, 5),
        "activations": {"marlin_mxfp8": "16bit", "hopper_mxfp8": "16bit"}, "stock": {"stock:auto": "Experts"},
        "errors": {"marlin_mxfp8": 0.001, "hopper_mxfp8": 0.001}, "failures": {"humming_mxfp8": "x"},
        "choice": {"backend": "hopper_mxfp8", "why": "measured"}, "roofline_us": 5.0,
    }  # fmt: skip
    return [head, record, {**record, "tokens": 8}]


def server_record() -> dict[str, Any]:
    """A line of the setting `report`."""
    decision = api.decide(problem(), H200, settings.Settings())
    return {
        "moe_oracle": "1", "vllm": "0.32.0", "device": {"name": H200.name}, "moe_layers": 1, "served": 1,
        "groups": [
            {
                "layers": ["model.layers.0.mlp.experts"], "count": 1, "problem": {"scheme": {"name": "mxfp8"}},
                "decision": decision.to_record(), "candidates": [each.to_record() for each in decision.candidates[:3]],
            }
        ],
    }  # fmt: skip


def test_reports(fuzz: Fuzz, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot")
    pytest.importorskip("jinja2", reason="the extra plot")
    from vllm_moe_oracle.report import html_report

    path = tmp_path / "report.jsonl"
    import msgspec

    sources = [bench_lines(), [json.loads(msgspec.json.encode(server_record()))]]
    pages: list[int] = []

    def make(source: random.Random) -> bytes:
        lines = fuzzing.mutated(source.choice(sources), source)
        lines = lines if isinstance(lines, list) else [lines]
        data = "\n".join(map(json.dumps, lines)).encode()
        return data if source.random() < 0.7 else fuzzing.damaged(data, source)

    def read(data: bytes) -> str:
        path.write_bytes(data)
        with contextlib.suppress(MeasurementError):
            bench_records.read_samples(path)
        content: list[page_data.ReportContent] = []
        found = outcome(lambda: content.append(page_data.read(path, settings.Settings())))
        pages.append(len(pages))
        if content and (content[0].panels or content[0].servers) and len(pages) % 10 == 0:  # a page takes half a second
            assert "<html" in html_report.render(page_data.deduplicate(content[0]), "report")[0]
        return found

    fuzz(make, read)


def test_devices(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    import msgspec

    tree = {"device": json.loads(msgspec.json.encode(H200)), "versions": {"vllm": "0.32.0"}}

    def make(source: random.Random) -> bytes:
        data = json.dumps(fuzzing.mutated(tree, source)).encode()
        return data if source.random() < 0.7 else fuzzing.damaged(data, source)

    def read(data: bytes) -> str:
        path.write_bytes(data)

        def explained() -> None:
            with contextlib.suppress(api.NoBackendError):
                api.decide(problem(), load_device(path), settings.Settings())

        return outcome(explained)

    fuzz(make, read)


def test_the_runner_finds_what_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, a hang and a memory hog are failures that name their seed."""
    monkeypatch.setattr(fuzzing, "MAX_SECONDS", 0.5)

    def hang(_: Any) -> str:
        begin = time.process_time()
        while time.process_time() - begin < fuzzing.MAX_SECONDS + 0.1:
            pass
        return "read"

    def hog(_: Any) -> str:
        return str(len(bytearray(2 * fuzzing.MAX_BYTES)))

    def fail(_: Any) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x")

    for read, said in ((hang, " s "), (hog, "MemoryError"), (fail, "UnicodeDecodeError")):
        with pytest.raises(AssertionError, match=rf"seed \d+: .*{said}"):
            fuzzing.run(lambda source: None, read)
