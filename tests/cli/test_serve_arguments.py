"""``--dtype`` and ``--additional-config`` of ``vllm serve``, in the commands that decide layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lib.cli import Run, Write
from tests.lib.configs import INT4, PACKED, compressed, group
from vllm_moe_oracle import settings
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.devices.catalog import known_device

H200 = ("--device", "nvidia-h200")
INT4_PACKED = compressed(group(INT4), format=PACKED)


def write_t4(folder: Path) -> Path:
    """The description of a GPU without bfloat16."""
    path = folder / "t4.json"
    path.write_text(json.dumps({"kind": "cuda", "name": "Tesla T4", "capability": 75}))
    return path


@pytest.mark.parametrize(
    ("stored", "asked", "served"),
    [
        ("bfloat16", (), "bfloat16"),
        ("bfloat16", ("--dtype", "half"), "float16"),
        ("bfloat16", ("--dtype", "float16"), "float16"),
        ("float16", ("--dtype", "auto"), "float16"),
        ("float16", ("--dtype=bfloat16",), "bfloat16"),
        ("float32", (), "bfloat16"),
        ("float32", ("--dtype", "half"), "float16"),
        ("float16", ("--dtype", "float"), "float32"),
    ],
)
def test_the_dtype_is_the_servers(stored: str, asked: tuple[str, ...], served: str, run: Run, write: Write) -> None:
    path = write(torch_dtype=stored, quantization_config=INT4_PACKED)
    found = run("explain", path, *H200, *asked, "--json")
    (layers,) = found.json["groups"]
    assert layers["problem"]["dtype"] == served
    assert any("taken as bfloat16" in each for each in found.json["notes"]) == (stored == "float32" and not asked)
    assert found.status == (3 if served == "float32" else 0)  # no kernel for a GPU computes in float32


def test_a_gpu_without_bfloat16_serves_in_float16(run: Run, write: Write, tmp_path: Path) -> None:
    path, device = write(quantization_config=INT4_PACKED), ("--device", write_t4(tmp_path))
    (layers,) = run("explain", path, *device, "--json").json["groups"]
    assert layers["problem"]["dtype"] == "float16"
    assert "the config says bfloat16: taken as float16 on sm_75" in run("explain", path, *device).text
    refused = run("explain", path, *device, "--dtype", "bfloat16", "--json")
    (layers,) = refused.json["groups"]
    assert refused.status == 3 and layers["decision"] is None and not layers["left_to_stock"]
    assert layers["failure"].startswith("vLLM serves in bfloat16 from sm_80 on, and Tesla T4 has sm_75")


def test_a_dtype_that_the_quantization_lacks_is_refused(run: Run, write: Write) -> None:
    """vLLM's class for ModelOpt's MXFP8 takes bfloat16 alone, although kernels here take float16."""
    found = run("explain", write(), *H200, "--dtype", "half", "--json")
    (layers,) = found.json["groups"]
    rule = "vLLM serves modelopt_mxfp8 checkpoints in bfloat16, and the model's dtype is float16"
    assert found.status == 3 and layers["decision"] is None and layers["stock_vllm"]["refusal"] == rule
    assert layers["failure"] == f"{rule}. Serve with --dtype bfloat16" and not layers["measure"]
    assert f"{rule}: a server would not start" in found.json["notes"]
    assert run("explain", write(), "--device", "cpu", "--dtype", "half").status == 0


@pytest.mark.parametrize("command", ["tune", "bench"])
def test_layers_in_a_refused_dtype_are_not_measured(
    command: str, run: Run, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "detect", lambda: known_device("nvidia-h200"))
    found = run(command, write(), "--dtype", "half")
    assert (found.status, found.out, found.err.count("\n")) == (3, "", 1)
    assert "vLLM serves modelopt_mxfp8 checkpoints in bfloat16, and the model's dtype is float16" in found.err


@pytest.mark.parametrize("place", ["--additional-config", "--set"])
def test_settings_come_from_the_servers_config(place: str, run: Run, write: Write) -> None:
    config = json.dumps({"moe_oracle": {"backend": "marlin"}, "gdn_prefill_backend": "triton"})
    more = ("--set", "backend=humming") if place == "--set" else ()
    (layers,) = run("explain", write(), *H200, "--additional-config", config, *more, "--json").json["groups"]
    backend = "humming_mxfp8" if more else "marlin_mxfp8"
    assert (layers["decision"]["backend"], layers["decision"]["why"]) == (backend, "user")
    shown = run("explain", write(), *H200, "--additional-config", config, *more).text
    assert ("--set backend" if more else "--additional-config moe_oracle.backend") in shown


BAD: list[tuple[str, str]] = [
    ("{", "--additional-config: is not JSON"),
    ("[1]", "--additional-config: [1] is not a JSON object. Write "),
    ('"marlin"', "--additional-config: 'marlin' is not a JSON object"),
    ('{"a": 1, "a": 2}', "--additional-config: has the field 'a' more than once"),
    ("[" * 60 + "]" * 60, "--additional-config: is nested more than 50 levels deep"),
    ("\udcff", "--additional-config: is not JSON"),
]
"""Values that are no JSON object, and what the command says. What the server's reader refuses is asked of it."""
REFUSED: list[Any] = [
    {"moe_oracle": 3},
    {"moe_oracle": {"bakend": "marlin"}},
    {"moe_oracle": {"enabled": False}},
    {"moe_oracle": {"self_check": "never"}},
    {"moe_oracle": {"min_time_saving": 2}},
]


@pytest.mark.parametrize("command", ["explain", "tune", "bench", "verify"])
def test_bad_values_are_one_line(command: str, run: Run, write: Write) -> None:
    path = write()
    cases = [*BAD]
    for config in REFUSED:
        with pytest.raises(settings.SettingError) as error:
            settings.load({}, additional_config=config)
        cases.append((json.dumps(config), str(error.value)))
    for text, said in cases:
        result = run(command, path, "--additional-config", text)
        assert (result.status, result.out) == (2, "") and result.err.count("\n") == 1, text
        assert result.err.startswith(f"error: {said}"), text
    result = run(command, path, "--dtype", "fp16")
    assert (result.status, result.out) == (2, "") and result.err.count("\n") == 1
    assert result.err.startswith("error: --dtype: 'fp16' is not a dtype. Valid are auto, half, float16, bfloat16")


@pytest.mark.parametrize("command", ["explain", "tune", "bench", "verify"])
def test_helps_have_both_arguments(command: str, run: Run) -> None:
    shown = run(command, "--help").text
    assert "--dtype DTYPE As vLLM's --dtype" in shown
    assert "--additional-config JSON As vLLM's --additional-config" in shown
