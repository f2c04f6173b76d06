"""`verify`: tables, exit statuses, resuming, and input that cannot be used."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.lib import cli, faulty_backends, integer_checkpoints
from tests.lib.checkpoints import Size, rewrite_tensors, write_checkpoint
from tests.lib.integer_checkpoints import Integers
from tests.lib.tiers import sampled
from vllm_moe_oracle import settings
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measuring import verifying
from vllm_moe_oracle.oracle.registry import Registry
from vllm_moe_oracle.verification import whole_layer

NAMES = [f"model.layers.{index}.mlp.experts" for index in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verify") / "mxfp8", size=Size(experts=6, top_k=2))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify") / "plain"
    return write_checkpoint(folder, format="bf16", size=Size(layers=1, experts=4, top_k=2))


def use(monkeypatch: pytest.MonkeyPatch, backend: faulty_backends.Faulty) -> None:
    """Makes a backend the only one."""
    only = Registry()
    only.add(backend, "a test")
    monkeypatch.setattr(verifying, "default_registry", lambda: only)


# --- Answers ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_right(run: cli.Run, model: Path) -> None:
    found = run("verify", model)
    assert found.status == 0, found.err
    assert "2 of 2 layers agree with the float32 reference" in found.out
    table, _, legend = found.out.partition("relative errors (L2): ")
    columns = re.search(r"verdict +(.*)", table)
    assert columns is not None and columns[1].split() == ["error", "worst", "allowed", "beyond", "experts", "seconds"]
    assert all(re.search(rf"\b{each}(:| is| of) ", legend) for each in ("error", "worst", "allowed", "beyond"))
    assert re.search("^(error|warning|note): ", found.out, re.MULTILINE) is None  # as messages on standard error begin
    assert "inputs: embedding, the layer's norm, the layer's router" in found.out
    assert "[1/2] model.layers.1.mlp.experts" in found.err
    told = run("verify", model, "--json", "--device", "cpu")
    assert told.status == 0
    for name, layer in zip(NAMES, told.json["layers"], strict=True):
        assert (layer["layer"], layer["status"]) == (name, "passed")
        assert layer["experts_checked"] == layer["experts"] == 6 and layer["outliers"] == 0 < layer["blocks"]
        assert 0 < layer["error"] <= layer["worst"] < layer["allowed"]


def test_the_dtype_is_the_servers(run: cli.Run, model: Path) -> None:
    """In float32 nothing rounds to 16 bits, by 2**-9 of a number or more."""
    config = json.dumps({"moe_oracle": {"backend": "emulation"}})
    for dtype, rounds in (("bfloat16", True), ("float", False)):
        found = run("verify", model, "--dtype", dtype, "--additional-config", config, "--json")
        assert found.status == 0, found.err
        for layer in found.json["layers"]:
            assert layer["backend"] == "emulation" and (layer["error"] > 2**-12) == rounds


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "mxfp4": lambda plain, to: write_checkpoint(to, format="mxfp4", size=Size(layers=1, experts=4)),
    "mxfp8, compressed-tensors": lambda plain, to: write_checkpoint(
        to, tag="compressed-tensors", size=Size(layers=1, experts=4)
    ),
    "gpt-oss": lambda plain, to: write_checkpoint(to, arch="gpt_oss", format="mxfp4", size=Size(layers=1, experts=4)),
    "gptq": lambda plain, to: integer_checkpoints.write(plain, to, Integers("gptq", act_order="group")),
    "gptq int8": lambda plain, to: integer_checkpoints.write(plain, to, Integers("gptq", bits=8, bias=True)),
    "awq": lambda plain, to: integer_checkpoints.write(plain, to, Integers("awq", zero_points=True)),
    "compressed-tensors int4": lambda plain, to: integer_checkpoints.write(
        plain, to, Integers("compressed-tensors", zero_points=True)
    ),
    "compressed-tensors int8": lambda plain, to: integer_checkpoints.write(
        plain, to, Integers("compressed-tensors-int", bits=8, group=-1)
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_read(run: cli.Run, plain: Path, tmp_path: Path, name: str) -> None:
    found = run("verify", FORMATS[name](plain, tmp_path / "model"), "--json")
    assert found.status == 0, found.err
    assert [each["status"] for each in found.json["layers"]] == ["passed"]


@pytest.mark.parametrize("shard", ["gate_proj", "up_proj", "down_proj"])
def test_group_indices_that_gate_and_up_do_not_share(run: cli.Run, plain: Path, tmp_path: Path, shard: str) -> None:
    """One order serves both; an order of the second product is its own."""

    def edit(tensors: dict[str, Tensor]) -> None:
        name = f"model.layers.0.mlp.experts.3.{shard}.g_idx"
        tensors[name] = tensors[name].flip(0)

    found = run(
        "verify", rewrite_tensors(FORMATS["gptq"](plain, tmp_path / "model"), tmp_path / "damaged", edit), "--json"
    )
    (layer,) = found.json["layers"]
    assert layer["status"] == ("passed" if shard == "down_proj" else "damaged")
    words = "expert 3: gate and up have different group indices, from input 0 on"
    assert (words in (layer["fault"] or "")) == (shard != "down_proj"), layer["fault"]


def test_what_is_read_is_what_the_codes_stand_for(plain: Path, tmp_path: Path) -> None:
    """The reader of tensors shares code with the scheme: here it is compared with the twin in float32."""
    from safetensors.torch import load_file

    from vllm_moe_oracle.schemes import wna16

    target = tmp_path / "model"
    integer_checkpoints.write(plain, target, Integers("awq", zero_points=True))
    twin = load_file(tmp_path / "model-exact" / "model.safetensors")
    config = read_checkpoint(target)
    with verifying.Verification(config, detect.detect(), settings.load({})) as made:
        tensors = made.plans[0].tensors
        assert tensors is not None
        for index in range(4):
            expert = tensors.expert(index)
            names = [f"model.layers.0.mlp.experts.{index}.{each}_proj.weight" for each in ("gate", "up", "down")]
            w13, w2 = wna16.dequantize_expert(expert, "w13"), wna16.dequantize_expert(expert, "w2")
            torch.testing.assert_close(w13, torch.cat([twin[names[0]], twin[names[1]]]), rtol=2**-7, atol=0)
            torch.testing.assert_close(w2, twin[names[2]], rtol=2**-7, atol=0)


def one_expert(tensors: Any, layer: Any, *more: Any) -> None:
    held = {name: tensor.clone() for name, tensor in tensors.items()}
    held["w2_scale"][3] += 1
    forward(held, layer, *more)


@pytest.mark.parametrize(
    ("fault", "words"),
    sampled([
        (faulty_backends.Faulty("swapped", faulty_backends.swap_halves), "all 6 experts are wrong by themselves"),
        (faulty_backends.Faulty("scales", faulty_backends.shift("w13_scale", 1)), "all 6 experts"),
        (faulty_backends.Faulty("one", compute=one_expert), "3 are wrong by themselves"),
        (faulty_backends.Faulty("raises", compute=faulty_backends.raises), "no kernel image is available"),
    ], 2, 1),
    ids=lambda each: each.name if isinstance(each, faulty_backends.Faulty) else "",
)  # fmt: skip
def test_a_wrong_kernel_is_named_with_layer_and_expert(
    run: cli.Run, model: Path, monkeypatch: pytest.MonkeyPatch, fault: faulty_backends.Faulty, words: str
) -> None:
    use(monkeypatch, fault)
    found = run("verify", model, "--json")
    assert found.status == 1
    for name, layer in zip(NAMES, found.json["layers"], strict=True):
        assert layer["status"] == "failed" and words in layer["fault"]
        assert f"error: {name}: {fault.name}: " in found.err
    monkeypatch.setattr(whole_layer, "CALLS", 1)
    assert "WRONG" in run("verify", model).out


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.0.post_attention_layernorm"])
def test_a_wrong_kernel_is_found_where_the_files_hold_zeros(
    run: cli.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    small = write_checkpoint(tmp_path / "model", size=Size(layers=1, experts=4, top_k=2))
    folder = rewrite_tensors(small, tmp_path / "zeros", fill(f"{name}.weight", 0))
    use(monkeypatch, faulty_backends.Faulty("swapped", faulty_backends.swap_halves))
    found = run("verify", folder)
    assert found.status == 1 and "are wrong by themselves" in found.err and "of 32 tokens: " in found.out


# --- Damaged checkpoints ----------------------------------------------------------------------------------------------

EXPERT = "model.layers.1.mlp.experts.4"
Edit = Callable[[dict[str, Tensor]], object]


def fill(name: str, value: float, place: Any = ..., *, bits: bool = False) -> Edit:
    """Writes a number into a tensor, or a code."""

    def edit(tensors: dict[str, Tensor]) -> None:
        (tensors[name].view(torch.uint8) if bits else tensors[name])[place] = value

    return edit


def drop(name: str) -> Edit:
    return lambda tensors: tensors.pop(name)


def replace(name: str, make: Callable[[Tensor], Tensor]) -> Edit:
    return lambda tensors: tensors.update({name: make(tensors[name])})


NAN = {
    "attention": fill("model.layers.0.self_attn.q_proj.weight", torch.nan),
    "embedding": fill("model.embed_tokens.weight", torch.nan, (3, 5)),
}


def other_names(tensors: dict[str, Tensor]) -> None:
    for name in [each for each in tensors if ".experts." in each]:
        tensors[name.replace("gate_proj", "wi_0").replace("up_proj", "wi_1")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("edit", "words", "status"),
    [
        (
            drop(f"{EXPERT}.up_proj.weight_scale"),
            f"{EXPERT}.up_proj.weight_scale: the tensor is missing",
            1,
        ),
        (
            drop(f"{NAMES[0]}.0.gate_proj.weight"),
            f"{NAMES[0]}.0.gate_proj.weight: the tensor is missing",
            1,
        ),
        (
            replace(f"{EXPERT}.down_proj.weight", lambda stored: stored.to(torch.bfloat16)),
            "down_proj.weight (model.safetensors): the checkpoint stores it as bfloat16, mxfp8 as float8_e4m3fn",
            1,
        ),
        (
            replace(f"{EXPERT}.gate_proj.weight", lambda stored: stored[:-1].clone()),
            "gate_proj.weight (model.safetensors): it has shape [63, 128], expected [64, 128]",
            1,
        ),
        (other_names, "none of the names that its first expert may have is in the files", 2),
    ],
    ids=["missing", "first", "dtype", "shape", "names"],
)
def test_an_unreadable_checkpoint_is_refused_before_anything_is_computed(
    run: cli.Run, model: Path, tmp_path: Path, edit: Any, words: str, status: int
) -> None:
    found = run("verify", rewrite_tensors(model, tmp_path / "damaged", edit))
    assert found.status == status and words in found.err and found.out == "" and "[0/2]" not in found.err
    assert len(found.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            fill(f"{EXPERT}.up_proj.weight_scale", 255, (3, 1)),
            "1 of 256 scales in {up_proj.weight_scale} are NaN (e8m0 code 255); the first is code 255",
        ),
        (
            fill(f"{EXPERT}.down_proj.weight", 0x7F, (7, 9), bits=True),
            "codes in {down_proj.weight} are NaN (e4m3 codes 127 and 255); the first is code 127",
        ),
        (  # of the byte that fills a parameter before it is loaded
            fill(f"{EXPERT}.gate_proj.weight", 0x7F, bits=True),
            "codes in {gate_proj.weight} are NaN (e4m3 codes 127 and 255); the first is code 127",
        ),
        (
            fill(f"{EXPERT}.gate_proj.weight_scale", 250),
            "{gate_proj.weight}: the weight of expert 4 in row 0, input feature 0 is",
        ),
    ],
    ids=["a scale", "a code", "all codes", "huge"],
)
def test_damaged_values_are_named_and_the_other_layers_are_compared(
    run: cli.Run, model: Path, tmp_path: Path, edit: Any, words: str
) -> None:
    found = run("verify", rewrite_tensors(model, tmp_path / "damaged", edit), "--json")
    assert found.status == 1
    first, second = found.json["layers"]
    assert first["status"] == "passed" and second["status"] == "damaged"
    stored = re.sub(r"\{(.*)\}", rf"{EXPERT}.\1 (model.safetensors)", words)
    assert second["fault"].startswith("expert 4: ") and stored in second["fault"], second["fault"]
    assert "expert 0" not in second["fault"]
    line = f"error: {NAMES[1]}: {second['backend']}: {second['fault']}\n"
    assert line in found.err and line.count(NAMES[1]) == 1 + line.count(EXPERT)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors int8"])
@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
def test_a_damaged_scale_of_integers_is_named(
    run: cli.Run, plain: Path, tmp_path: Path, name: str, matrix: str
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        (found,) = [each for each in tensors if re.search(rf"experts\.2\.{matrix}_proj\.(weight_)?scales?$", each)]
        tensors[found].view(-1)[-1] = torch.nan
        damaged.append((found, tensors[found].numel()))

    damaged: list[tuple[str, int]] = []
    folder = rewrite_tensors(FORMATS[name](plain, tmp_path / "model"), tmp_path / "damaged", edit)
    (layer,) = run("verify", folder, "--json").json["layers"]
    ((stored, count),) = damaged
    words = f"expert 2: 1 of {count} scales in {stored} (model.safetensors) are NaN or infinite"
    assert layer["status"] == "damaged" and layer["fault"].startswith(words), layer["fault"]


def test_a_damaged_tensor_of_all_experts_is_named(run: cli.Run, plain: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    whole = FORMATS["gpt-oss"](plain, tmp_path / "model")
    folder = rewrite_tensors(whole, tmp_path / "damaged", fill(name, 255, (3, 5, 1)))
    (layer,) = run("verify", folder, "--json").json["layers"]
    assert re.match(rf"expert 3: 1 of \d+ scales in {name} \(model.safetensors\) are NaN .* \[5, 1\]", layer["fault"])


def test_a_missing_tensor_of_all_experts_is_named(run: cli.Run, plain: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    whole = FORMATS["gpt-oss"](plain, tmp_path / "model")
    found = run("verify", rewrite_tensors(whole, tmp_path / "damaged", drop(name)))
    assert found.status == 1 and f"{name}: the tensor is missing" in found.err


def drop_an_expert(tensors: dict[str, Tensor]) -> None:
    for name in [each for each in tensors if each.startswith("model.layers.1.mlp.experts.5.")]:
        del tensors[name]


def test_what_is_not_read_is_said(run: cli.Run, model: Path, tmp_path: Path) -> None:
    found = run("verify", rewrite_tensors(model, tmp_path / "damaged", NAN["attention"]))
    said = " ".join(found.out.split())
    assert found.status == 0 and "not read: attention, " in said and "compare the files' checksums" in said


@pytest.mark.parametrize("edit", [drop_an_expert, NAN["embedding"]], ids=["an expert", "the embedding"])
def test_damage_of_a_whole_checkpoint_is_no_unusable_input(
    run: cli.Run, model: Path, tmp_path: Path, edit: Any
) -> None:
    found = run("verify", rewrite_tensors(model, tmp_path / "damaged", edit))
    assert found.status == 1 and len(found.err.splitlines()) == 1, found.err
    assert (
        "model.embed_tokens.weight (model.safetensors): 2 of 4096 values are NaN" in found.err or edit is drop_an_expert
    )


def test_what_is_no_checkpoint_with_tensors_is_unusable_input(
    run: cli.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    found = run("verify", "some/model")
    assert found.status == 2 and found.err.endswith("where its cache has it: hf download some/model\n")
    assert "or its config.json" not in found.err
    told = run("verify", "some/model", "--report-only", "--report", tmp_path / "none")
    assert told.status == 2 and "hf download some/model --include '*config.json'" in told.err
    folder = tmp_path / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_bytes((cli.CONFIGS / "gpt-oss-20b.json").read_bytes())
    found = run("verify", "some/model")
    assert found.status == 2 and found.err.endswith("not its config alone: hf download some/model\n"), found.err


def test_a_truncated_file_is_refused(run: cli.Run, model: Path, tmp_path: Path) -> None:
    damaged = rewrite_tensors(model, tmp_path / "damaged", lambda tensors: None)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    found = run("verify", damaged)
    assert found.status == 1 and "the file, and a server does not start" in found.err and "Fetch" in found.err
    assert "layers agree" not in found.out
    found = run("verify", damaged, "--json")
    assert found.status == 1 and found.json["layers"] == [] and not found.json["interrupted"]
    assert found.json["damage"] in found.err and "the file, and a server does not start" in found.json["damage"]


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"x": "model-2.safetensors"}}, "the file is missing"),
        ({"weight_map": {"x": "../model.safetensors"}}, "which is no safetensors file of its folder"),
        ({"weight_map": ["model.safetensors"]}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit(run: cli.Run, model: Path, tmp_path: Path, index: Any, words: str) -> None:
    damaged = rewrite_tensors(model, tmp_path / "damaged", lambda tensors: None)
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    found = run("verify", damaged)
    assert found.status == 1 and words in found.err


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        f"{NAMES[1]}.3.gate_proj.weight", f"{NAMES[1]}.3.down_proj.weight_scale",
        "model.norm.weight", "model.layers.0.self_attn.q_proj.weight",
    ],
)  # fmt: skip
def test_a_tensor_that_two_files_hold(run: cli.Run, model: Path, tmp_path: Path, name: str, has_index: bool) -> None:
    """Equal values are none that a server refuses; others are, and no remedy takes a file that the index names."""
    twice = rewrite_tensors(model, tmp_path / "twice", lambda tensors: None)
    tensor = load_file(twice / "model.safetensors")[name]
    if has_index:
        files = {each: "model.safetensors" for each in load_file(twice / "model.safetensors")}
        index = {"weight_map": files | {"other": "model-2.safetensors"}}
        (twice / "model.safetensors.index.json").write_text(json.dumps(index))

    def told(held: Tensor) -> cli.Result:
        save_file({name: held.contiguous(), "other": torch.zeros(3)}, twice / "model-2.safetensors")
        return run("verify", twice)

    equal = told(tensor)
    assert equal.status == 0, equal.err
    warned = re.findall(r"warning: \S+: (\S+) \(model\S*\): in model\S*, too, with the same values", equal.err)
    assert warned == ([name] if ".experts." in name else [])
    last = tensor.clone()
    last.view(torch.uint8).flatten()[-1] ^= 1
    for other in (
        last,
        tensor[:-1],
        tensor.to(torch.float32) if tensor.element_size() > 1 else tensor.view(torch.int8),
    ):
        found = told(other)
        assert found.status == 1 and re.search(f"'{name}' is in model\\S*, too, with other values", found.err), (
            found.err
        )
        assert "if both do, fetch or write the model again" in found.err


def test_a_folder_without_tensors_and_a_model_without_experts(run: cli.Run, plain: Path, tmp_path: Path) -> None:
    found = run("verify", cli.CONFIGS / "qwen3-30b-a3b.json")
    assert found.status == 2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    found = run("verify", tmp_path)
    assert found.status == 2 and "no MoE layers" in found.err
    found = run("verify", plain)
    assert found.status == 2 and len(found.err.splitlines()) == 1


def test_layers_that_are_all_left_to_stock(run: cli.Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verifying.Verification,
        "_plan",
        lambda self, problem: verifying.LayerPlan(
            problem, None, "left to stock vLLM (marlin_mxfp8: it would drop the limit)", is_stock=True
        ),
    )
    found = run("verify", model)
    assert found.status == 2 and "nothing to verify: stock vLLM serves all 2 MoE layers (left to stock" in found.err


def test_a_layer_that_nothing_runs(run: cli.Run, model: Path) -> None:
    found = run("verify", model, "--set", "disable=emulation,cpu_dequantized")
    assert found.status in (1, 2)
    found = run("verify", model, "--set", "backend=no_such")
    assert found.status == 2 and "no_such" in found.err


def test_another_machine_than_the_option_names(run: cli.Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not one of auto, cpu, cuda" in run("verify", model, "--device", "tpu").err
    if detect.detect().kind == "cpu":
        assert "there is no GPU" in run("verify", model, "--device", "cuda").err
    monkeypatch.setattr(detect, "detect", lambda: Device("cuda", "NVIDIA H200", 90))
    assert "its vLLM is built for GPUs" in run("verify", model, "--device", "cpu").err


# --- Resuming ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_continues(
    run: cli.Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "resume.jsonl"
    compare = verifying.Verification._compare

    def interrupted(self: Any, plan: Any, *more: Any) -> Any:
        if plan.problem.layer == NAMES[1]:
            raise KeyboardInterrupt
        return compare(self, plan, *more)

    monkeypatch.setattr(verifying.Verification, "_compare", interrupted)
    first = run("verify", model, "--resume", file)
    words = "interrupted after 1 of 2 layers; the file of --resume keeps the results of 1. The same command goes on\n"
    command = f"vllm-moe-oracle verify {model} --resume {file}\n"
    assert first.status == 130 and NAMES[0][:9] in first.out and " ".join(words.split()) in " ".join(first.out.split())
    assert first.out.endswith(f"\n{command}")
    assert "interrupted after 1 of 2 layers; --resume FILE keeps what is done\n" in run("verify", model).out
    again = run("verify", model, "--resume", file, "--json")
    assert again.json["interrupted"] and f"note: {words.strip()}: {command.strip()} --json\n" in again.err
    monkeypatch.setattr(verifying.Verification, "_compare", compare)
    with file.open("ab") as opened:
        opened.write(b'{"layer": "model.lay')  # killed while it wrote
    second = run("verify", model, "--resume", file, "--json")
    assert second.status == 0 and [each["layer"] for each in second.json["layers"]] == NAMES
    assert len(file.read_text().splitlines()) == 3
    third = run("verify", model, "--resume", file)
    assert third.status == 0 and "[" not in third.err.replace("[0m", "")
    assert f"note: 2 results are of an earlier run, from {file}\n" in third.err and "earlier run" not in first.err


def overwrite_scales(folder: Path, name: str) -> None:
    """Writes NaN over a tensor in place; the file keeps its size and its time of change."""
    file = folder / "model.safetensors"
    times = file.stat()
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    first, last = (8 + length + each for each in json.loads(data[8 : 8 + length])[name]["data_offsets"])
    file.write_bytes(data[:first] + b"\xff" * (last - first) + data[last:])
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_mtime_ns == times.st_mtime_ns and file.stat().st_size == times.st_size


def test_a_resume_file_of_tensors_that_have_changed(run: cli.Run, model: Path, tmp_path: Path) -> None:
    folder, file = rewrite_tensors(model, tmp_path / "changed", lambda tensors: None), tmp_path / "resume.jsonl"
    assert run("verify", folder, "--resume", file).status == 0
    kept = file.read_bytes()
    overwrite_scales(folder, f"{EXPERT}.gate_proj.weight_scale")
    found = run("verify", folder, "--resume", file)
    assert found.status == 2 and "of files that have changed since" in found.err and file.read_bytes() == kept


def test_a_resume_file_of_other_kernels(model: Path) -> None:
    """A third party's package is another version, or a layer's tiles were measured anew."""
    config, here = read_checkpoint(model), detect.detect()
    backend = faulty_backends.Faulty("right")

    def identity(packages: dict[str, str], tiles: tuple[tuple[int, str], ...] = ()) -> str:
        only = Registry()
        only.add(backend, "a test", packages)
        with verifying.Verification(config, here, settings.load({}), only) as made:
            for place, each in enumerate(made.plans):
                assert each.decision is not None
                (candidate,) = each.decision.candidates
                plan = dataclasses.replace(candidate.answers.plan, tiles=tiles)
                candidate = dataclasses.replace(candidate, known=dataclasses.replace(candidate.answers, plan=plan))
                decision = dataclasses.replace(each.decision, candidates=(candidate,))
                made.plans[place] = dataclasses.replace(each, decision=decision)
            return made._identity(config)

    assert identity({"theirs": "1.0"}) == identity({"theirs": "1.0"})
    assert identity({"theirs": "1.0"}) != identity({"theirs": "1.1"})
    assert identity({}) != identity({}, tiles=((8, "{}"),))


def test_a_resume_file_that_cannot_be_used(run: cli.Run, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "resume.jsonl"
    assert run("verify", model, "--resume", file).status == 0
    header, *lines = file.read_bytes().splitlines()
    result = json.loads(lines[0])
    hostile: dict[str, tuple[bytes, str]] = {
        "binary": (b"\x89PNG\r\n" * 50 + b"\n", "line 1"),
        "deep": (b"[" * 100_000 + b"\n", "line 1"),
        "another file": (b'{"kind": "something"}\n', "is not a file of verify --resume"),
        "another model": (header.replace(b'"identity": "', b'"identity": "0'), "is of another checkpoint"),
        "unknown field": (header + b'\n{"layer": "x", "rm": 1}', "line 2"),
        "types": (header + b"\n" + json.dumps({**result, "outliers": "many"}).encode(), "is not a result"),
        "status": (header + b"\n" + json.dumps({**result, "status": "fine"}).encode(), "is not a result"),
        "layer": (header + b"\n" + json.dumps({**result, "layer": "\x1b[2J"}).encode(), "that is not verified"),
        "lines": (header + b"\n" + b"{}\n" * 20, "lines for 2 results"),
        "list": (header + b"\n[1]", "is not a result"),
    }
    for name, (data, words) in hostile.items():
        file.write_bytes(data + b"\n" * (not data.endswith(b"\n")))
        found = run("verify", model, "--resume", file)
        assert found.status == 2 and words in found.err, (name, found.err)
        assert len(found.err.splitlines()) == 1 and "\x1b" not in found.err, name
    folder = run("verify", model, "--resume", tmp_path)
    assert folder.status == 2 and "directory" in folder.err
    nowhere = run("verify", model, "--resume", tmp_path / "none" / "file")
    assert nowhere.status == 2 and "cannot be written" in nowhere.err
    full = run("verify", model, "--resume", "/dev/full")
    assert full.status == 2
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run("verify", model, "--resume", pipe).status == 2
