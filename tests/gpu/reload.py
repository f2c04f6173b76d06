"""New weights under captured CUDA graphs, and sleep: outputs of the new weights, kernel tensors where they were.

    python tests/gpu/reload.py --json reload.json
    python tests/gpu/reload.py --only mxfp8:hopper_mxfp8

A tiny random model (tests/lib/checkpoints.py) is started with the first of two checkpoints, its decode steps captured
as CUDA graphs. Then, each time followed by the same prompt: vLLM's layer-wise reload with the second checkpoint, and
with the first again; sleep of level 2 (vLLM's allocator gives all memory away), waking, reload with the second; sleep
of level 1 and waking. The same weights must give the same logprobs, whatever came between, other weights others; the
model must recite its alphabet all the time, which takes all weights of one checkpoint; and no tensor of an expert
layer may have moved. On a CPU (``--cpu``) reloads alone are tried, without graphs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CASES = (
    "mxfp8:auto", "mxfp8:marlin_mxfp8", "mxfp8:hopper_mxfp8", "online:hopper_mxfp8", "padded:marlin_mxfp8",
    "mxfp4:auto", "mxfp4:marlin_mxfp4", "mxfp4:hopper_mxfp4",
)  # fmt: skip
"""Checkpoint and backend."""
FORMATS = {
    "mxfp8": ("qwen3_moe", "mxfp8"),
    "online": ("qwen3_moe", "bf16"),
    "padded": ("qwen3_moe", "mxfp8"),
    "mxfp4": ("gpt_oss", "mxfp4"),
}
"""Architecture and format of the checkpoint."""
INTERMEDIATE = {"padded": 160}
"""Intermediate sizes other than 256: one that Marlin pads to 192, while loaders see the checkpoint's own."""
ENGINE: dict[str, dict[str, Any]] = {
    "online": {"quantization": "mxfp8", "quantization_config": {"ignore": ["lm_head", "re:.*\\.mlp\\.gate$"]}}
}
PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 24
ALPHABET = list(range(PROMPT[-1] + 1, PROMPT[-1] + 1 + TOKENS))
"""What the models say after the prompt, whatever their seed."""
TOLERANCE = 0.06
"""Largest difference of a logprob between two runs of the same weights: what bf16 arithmetic in another order does to
these models (tests/lib/checkpoints.py); other weights of one expert move it by 0.3 and more."""


def write(folder: Path, case: str, seed: int) -> str:
    """The checkpoint of a case and seed."""
    from tests.lib import checkpoints

    kind, _, _ = case.partition(":")
    arch, written = FORMATS[kind]
    size = checkpoints.Size(
        layers=2,
        hidden=512,
        intermediate=INTERMEDIATE.get(kind, 256),
        experts=16,
        top_k=4,
        heads=8,
        kv_heads=2,
        head_dim=64,
    )
    return str(checkpoints.write_checkpoint(folder / f"{kind}-{seed}", arch=arch, format=written, seed=seed, size=size))


class Served:
    """A model in this process."""

    def __init__(self, case: str, checkpoint: str, cpu: bool) -> None:
        from vllm import LLM

        from tests.e2e import run_generate

        kind, _, backend = case.partition(":")
        graphs = {
            "enforce_eager": False,
            "enable_sleep_mode": True,
            # Decode steps as whole graphs, nothing compiled: that only takes time here.
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4],
            },
        }
        self.say = run_generate.say
        self.llm: Any = LLM(
            model=checkpoint,
            dtype="bfloat16",
            **run_generate.SMALL | ({} if cpu else graphs) | ENGINE.get(kind, {}),
            **({} if backend == "auto" else {"additional_config": {"moe_oracle": {"backend": backend}}}),
        )
        self.model = run_generate.model_of(self.llm)

    def generate(self) -> dict[str, Any]:
        """What it says; a prompt's cache does not outlive the weights."""
        self.llm.reset_prefix_cache()
        said: dict[str, Any] = self.say(self.llm, PROMPT, TOKENS)
        return said

    def addresses(self) -> dict[str, int]:
        """Of every parameter and buffer of the expert layers."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: tensor.data_ptr() for name, tensor in tensors.items() if ".experts" in name}

    def backends(self) -> list[str]:
        """Those of its layers."""
        methods = [getattr(module, "quant_method", None) for module in self.model.modules()]
        return sorted({method.backend.name for method in methods if hasattr(method, "decision")})

    def reload(self, checkpoint: str) -> None:
        """vLLM's layer-wise reload."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})


def steps(case: str, paths: list[str], cpu: bool) -> None:
    """Everything that is done to one model; what was found so far is printed after each step."""
    begin = time.perf_counter()
    served = Served(case, paths[0], cpu)
    found: dict[str, Any] = {"backends": served.backends(), "said": {}, "moved": {}}
    before = served.addresses()

    def note(step: str) -> None:
        after = served.addresses()
        moved = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        found["moved"][step] = moved
        found["said"][step] = served.generate()
        print(f"{case}: {step} after {time.perf_counter() - begin:.1f} s", flush=True)
        print("FOUND " + json.dumps(found), flush=True)

    note("start")
    served.reload(paths[1])
    note("reload")
    served.reload(paths[0])
    note("back")
    if not cpu:
        served.llm.sleep(level=2)
        served.llm.wake_up(tags=["weights"])
        served.reload(paths[1])
        served.llm.wake_up(tags=["kv_cache"])
        note("sleep 2")
        served.llm.sleep(level=1)
        served.llm.wake_up()
        note("sleep 1")


def run(case: str, paths: list[str], cpu: bool, seconds: float, folder: Path) -> dict[str, Any]:
    """One process's result, or the end of what it printed under ``error``; ended after so many seconds."""
    command = [sys.executable, __file__, "--only", case, "--inner", *paths, *(["--cpu"] if cpu else [])]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_PLUGINS": "moe_oracle"},
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: nothing else is in it
            process.wait()
    said = log.read_text(errors="replace")
    found = [line.removeprefix("FOUND ") for line in said.splitlines() if line.startswith("FOUND ")]
    if found:
        result: dict[str, Any] = json.loads(found[-1])
        if process.returncode:
            result["ended"] = f"exit status {process.returncode} after {', '.join(result['said'])}"
        return result
    lines = said.splitlines()
    errors = [line[:400] for line in lines if "Error" in line or line.startswith(case)]
    return {"error": "\n".join([f"exit status {process.returncode}", *errors[:10], said[-800:]])}


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of two logprobs; infinite where the tokens are different."""
    if one["tokens"] != other["tokens"]:
        return float("inf")
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return max(abs(a - b) for row, its in pairs for a, b in zip(row, its, strict=True))


def judge(found: dict[str, Any]) -> dict[str, Any]:
    """What is right and wrong with a case, from what its process found."""
    if "error" in found:
        return {"passed": False, "error": found["error"]}
    said = found["said"]
    expected = {"back": "start", "sleep 2": "reload", "sleep 1": "reload"}
    differences = {
        step: difference(said[step], said[as_at]) for step, as_at in expected.items() if {step, as_at} <= said.keys()
    }
    moved = {step: names for step, names in found["moved"].items() if names}
    recites = all(each["tokens"] == ALPHABET for each in said.values())
    other = 0.0
    if "reload" in said:
        pairs = zip(said["start"]["logprobs"], said["reload"]["logprobs"], strict=True)
        other = max(abs(a - b) for row, its in pairs for a, b in zip(row, its, strict=True))
    passed = (
        "ended" not in found
        and recites
        and other > TOLERANCE
        and not moved
        and all(each <= TOLERANCE for each in differences.values())
    )
    return {
        "passed": passed,
        **({"ended": found["ended"]} if "ended" in found else {}),
        "backends": found["backends"],
        "recites": recites,
        "differences": {
            step: str(each) if each == float("inf") else round(each, 5) for step, each in differences.items()
        },
        "between_checkpoints": round(other, 3),
        "moved": moved,
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help=f"of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=180.0, help="for each process, after which it is ended")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inner:
        steps(chosen.only[0], chosen.inner, chosen.cpu)
        return 0
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen.only or CASES:
            begin = time.perf_counter()
            paths = [write(Path(folder), case, seed) for seed in (0, 1)]
            found = run(case, paths, chosen.cpu, chosen.seconds, Path(folder))
            rows[case] = {**judge(found), "seconds": round(time.perf_counter() - begin, 1)}
            print(case, json.dumps(rows[case]), flush=True)
            if chosen.json:
                chosen.json.write_text(json.dumps({"conditions": conditions(), "cases": rows}, indent=1) + "\n")
    print("\n".join(f"{'PASS' if row['passed'] else 'FAIL'} {case}" for case, row in rows.items()))
    return int(not all(row["passed"] for row in rows.values()))


def conditions() -> dict[str, Any]:
    """What the results were seen with."""
    import torch
    import vllm

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "tolerance": TOLERANCE,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join(["tests/gpu/reload.py", *sys.argv[1:]]),
    }


if __name__ == "__main__":
    sys.exit(main())
