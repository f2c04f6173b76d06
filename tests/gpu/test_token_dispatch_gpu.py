"""Two backends of one layer by turns, under vLLM's own CUDA graphs: each graph holds the one for its number of tokens.

A tiny model that recites an alphabet (tests/lib/checkpoints.py) is served with a profile in which this project's
kernels win up to 8 tokens and Marlin beyond. Which of them ran in the replayed graphs is what CUPTI saw. Started
twice from one cache, it decides the same and says the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.e2e import run_generate
from tests.lib import checkpoints
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import KernelShape, Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store

FEW, MANY = "hopper_mxfp8", "marlin_mxfp8"
BATCHES = (1, 4, 16, 32)
SWITCH = 11
"""Between 8 and 16, in the middle of their logarithms."""
OWN_KERNELS = ("gate_up", "down", "down_loop_n", "down_fused_topk")
FP8 = "hopper_mxfp4_w4a8"
FEW_TOKENS = 480
"""Most tokens that `FP8` leaves to another backend: 120 an expert, of 16 experts with 4 a token."""
FP8_BATCHES = (4, FEW_TOKENS, FEW_TOKENS + 8)
SIZE = checkpoints.Size(hidden=512, intermediate=256, experts=16, top_k=4, heads=8, head_dim=64)
PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 24
ALPHABET = list(range(PROMPT[-1] + 1, PROMPT[-1] + 1 + TOKENS))
"""What the models say after the prompt."""


def samples() -> list[Sample]:
    """Times as they might have been measured here."""
    times = {FEW: (20.0, 90.0), MANY: (30.0, 60.0), "humming_mxfp8": (95.0, 95.0)}
    return [
        Sample(name, "16bit", count, "uniform", us, us, us, 9, 1e-3)
        for name, both in times.items()
        for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        for us in [both[count > 8]]
    ]


def cell(folder: str) -> KernelShape:
    return kernel_shape_of(find_moe_layers(read_checkpoint(Path(folder))).problems[0])


def started(folder: str, **where: str) -> Any:
    """The model in vLLM, with measurements from somewhere."""
    settings = {"allow_second_layout": True, "objective": "1:1,16:1,512:1", "min_time_saving": 0.03, **where}
    return engine(folder, BATCHES, settings, max_num_batched_tokens=512)


def engine(folder: str, batches: tuple[int, ...], settings: dict[str, Any], **more: Any) -> Any:
    """The model in vLLM, with a graph for each number of prompts."""
    from vllm import LLM

    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(batches)}
    options = {"enforce_eager": False, "max_num_seqs": max(batches), "compilation_config": graphs, **more}
    return LLM(
        model=folder, dtype="bfloat16", **run_generate.SMALL | options, additional_config={"moe_oracle": settings}
    )


def run(log: Path, *words: str) -> dict[str, Any]:
    """What this file prints as a script. An engine has a process of its own: it leaves the plugin registered and vLLM's
    workspaces locked, with which nothing can be measured afterwards (test_measuring_gpu.py)."""
    # What other modules of this process set for theirs: `backend_table` registers the plugin by hand.
    clean = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "MOE_ORACLE_SELF_CHECK")}
    with log.open("w") as output:
        subprocess.run(
            [sys.executable, __file__, *words], stdout=output, stderr=subprocess.STDOUT, check=False,
            env=clean | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, timeout=300,
        )  # fmt: skip
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("SAID ")]
    assert lines, text[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("SAID "))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(checkpoints.write_checkpoint(tmp_path_factory.mktemp("model"), size=SIZE))


@pytest.fixture(scope="module")
def seen(folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("profile") / "p.json"
    made = profile.make(Environment.of(detect.detect()), {cell(folder): samples()}, {"command": "none: made up"})
    profile.write(made, path)
    return run(path.with_name("log"), "watch", folder, str(path))


def methods(llm: Any) -> list[Any]:
    found = [getattr(module, "quant_method", None) for module in run_generate.model_of(llm).modules()]
    return [method for method in found if hasattr(method, "decision")]


def steps_of(method: Any) -> list[tuple[str, int | None]]:
    return [(step.backend, step.max_tokens) for step in method.decision.token_ranges]


def test_every_layer_takes_turns_with_a_copy_of_its_weights(seen: dict[str, Any]) -> None:
    assert seen["layers"] == [{"steps": [[FEW, SWITCH], [MANY, None]], "dispatches": True, "copies": 1}] * 2


@pytest.mark.parametrize("batch", BATCHES)
def test_a_graph_holds_the_backend_of_its_number_of_tokens(seen: dict[str, Any], batch: int) -> None:
    # marlin_moe_wna16's name is mangled, ours are what the functions are called.
    marlin = {name for name in seen["batches"][str(batch)]["kernels"] if "marlin" in name.lower()}
    assert_decoded(seen, batch, {FEW: set(OWN_KERNELS), MANY: marlin}, FEW if batch <= SWITCH else MANY)


def assert_decoded(seen: dict[str, Any], batch: int, kernels: dict[str, set[str]], backend: str) -> None:
    """The text is right, and of two backends one ran in every decode step of the two layers.

    Args:
        seen: what `watched` says.
        batch: number of prompts.
        kernels: names of each backend's kernels.
        backend: the one that a step of so many tokens runs; the other may run the prompts.
    """
    found = seen["batches"][str(batch)]
    assert found["text"] == [ALPHABET] * batch
    ran = {name: sum(found["kernels"].get(each, 0) for each in own) for name, own in kernels.items()}
    steps = 2 * (TOKENS - 1)  # one kernel of each a layer and step; the first token comes with the prompt
    (other,) = {*kernels} - {backend}
    assert ran[backend] >= steps and ran[other] < steps / 2, (ran, sorted(found["kernels"]))


def test_a_restart_with_the_same_cache_decides_and_says_the_same(folder: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    store = Store(cache)
    store.prepare()
    store.add(Environment.of(detect.detect()), cell(folder), samples())
    before = store.path.read_bytes()
    said = [run(tmp_path / f"{number}.log", "say", folder, str(cache)) for number in range(2)]
    assert said[0] == said[1]
    assert {tuple(map(tuple, steps)) for steps in said[0]["steps"]} == {((FEW, SWITCH), (MANY, None))}
    assert store.path.read_bytes() == before  # serving writes nothing


@pytest.fixture(scope="module")
def seen_fp8(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mxfp4")
    path = checkpoints.write_checkpoint(folder / "model", arch="gpt_oss", format="mxfp4", size=SIZE)
    return run(folder / "log", "watch_fp8", str(path))


def test_fp8_products_by_name_leave_few_tokens_to_16_bits(seen_fp8: dict[str, Any]) -> None:
    """Both read the same tensors."""
    steps = [["hopper_mxfp4", FEW_TOKENS], [FP8, None]]
    assert seen_fp8["layers"] == [{"steps": steps, "dispatches": True, "copies": 0}] * 2


@pytest.mark.parametrize("batch", FP8_BATCHES)
def test_a_graph_above_them_holds_fp8_products(seen_fp8: dict[str, Any], batch: int) -> None:
    kernels = {FP8: {"product", "quantize_rows"}, "hopper_mxfp4": set(OWN_KERNELS)}
    assert_decoded(seen_fp8, batch, kernels, "hopper_mxfp4" if batch <= FEW_TOKENS else FP8)


def watch(folder: str, path: str) -> dict[str, Any]:
    """The token ranges of layers with a profile, and the kernels that run for each number of prompts, with counts."""
    return watched(started(folder, profile=path), BATCHES)


def watch_fp8(folder: str) -> dict[str, Any]:
    """The same with products in fp8, asked for by name."""
    settings = {"backend": FP8, "allow_activation_quantization": True}
    llm = engine(folder, FP8_BATCHES, settings, max_num_batched_tokens=4096, kv_cache_memory_bytes=256 << 20)
    return watched(llm, FP8_BATCHES)


def watched(llm: Any, batches: tuple[int, ...]) -> dict[str, Any]:
    """What `watch` says of an engine."""
    from vllm import SamplingParams

    layers = [
        {"steps": steps_of(each), "dispatches": each.token_dispatch is not None, "copies": len(each.weight_copies)}
        for each in methods(llm)
    ]
    parameters = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    found = {}
    for batch in batches:
        prompts = [{"prompt_token_ids": PROMPT} for _ in range(batch)]
        llm.reset_prefix_cache()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            outputs = llm.generate(prompts, parameters, use_tqdm=False)
        on_card = [event for event in profiled.events() if event.device_type == torch.profiler.DeviceType.CUDA]
        found[batch] = {
            "text": [list(each.outputs[0].token_ids) for each in outputs],
            "kernels": Counter(event.name for event in on_card),
        }
    return {"layers": layers, "batches": found}


def say(folder: str, cache: str) -> dict[str, Any]:
    """What a start decides, and what it says after its alphabet and after prompts that are none of it."""
    from vllm import SamplingParams

    llm = started(folder, cache=cache)
    parameters = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [PROMPT, [40, 3, 17, 33, 8], [11] * 9]
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], parameters, use_tqdm=False)
    decided = methods(llm)
    return {
        "text": [list(each.outputs[0].token_ids) for each in outputs],
        "explanation": [each.decision.explanation for each in decided],
        "steps": [steps_of(each) for each in decided],
    }


WATCHES: dict[str, Callable[..., dict[str, Any]]] = {"watch": watch, "watch_fp8": watch_fp8, "say": say}

if __name__ == "__main__":
    print("SAID " + json.dumps(WATCHES[sys.argv[1]](*sys.argv[2:])), flush=True)
