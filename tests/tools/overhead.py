"""Measures the plugin's overhead: import, registration, decision, `explain`, search for damage, and a layer's call.

    python -m tests.tools.overhead [--write]

Prints a table. ``--write`` replaces tests/golden/costs.json, which the README shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from vllm_moe_oracle.devices import detect

ROOT = Path(__file__).resolve().parents[2]
RUNS = 7

IMPORT = """
import time; start = time.perf_counter(); import vllm_moe_oracle; print((time.perf_counter() - start) * 1e3)
"""
REGISTER = """
import time
import vllm.engine.arg_utils
start = time.perf_counter()
from vllm_moe_oracle import plugin; plugin.register()
print((time.perf_counter() - start) * 1e3)
assert plugin.state().active, plugin.state()
"""
DECIDE = """
import time
from pathlib import Path
from vllm_moe_oracle import settings
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
machine, chosen = known_device("nvidia-h200"), settings.load({})
scheme = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")
problem = Problem("model.layers.0.mlp.experts", scheme, 128, 128, 8, 2048, 768, Activation("silu"))
decide(problem, machine, chosen)
start = time.perf_counter()
for _ in range(200):
    decide(problem, machine, chosen)
print((time.perf_counter() - start) / 200 * 1e3)
"""
WEIGHTS = """
import time, torch
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
from vllm_moe_oracle.schemes import mxfp8
torch.set_num_threads(1)
scheme = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")
problem = Problem("model.layers.0.mlp.experts", scheme, 128, 128, 8, 2048, 768, Activation("silu"))
tensors = {}
for name, shape in mxfp8.shapes(problem).items():
    scales = name.endswith("_scale")
    tensors[name] = torch.randint(115 if scales else 0, 125, shape, dtype=torch.uint8)
    tensors[name] = tensors[name] if scales else tensors[name].view(torch.float8_e4m3fn)
work = %s
work()
start = time.perf_counter()
work()
print((time.perf_counter() - start) * 1e3)
"""
SEARCH = WEIGHTS % "lambda: mxfp8.check_values(tensors, problem)"
COPY = WEIGHTS % "lambda: [each.clone() for each in tensors.values()]"
LAYER_CALL = """
import time, torch
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.compat.experts_builder import VllmBuilder
from vllm_moe_oracle.compat.standalone_layer import fused_moe_config, layer_namespace, single_rank_worker
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
from vllm_moe_oracle.methods.base import STATE_ATTRIBUTE, OracleMoEMethod
from vllm.model_executor.layers.fused_moe.prepare_finalize.no_dp_ep import make_moe_prepare_and_finalize_no_dp_ep
torch.set_num_threads(1)
scheme = Scheme("mxfp8", 8, 32, "modelopt")
problem = Problem("model.layers.0.mlp.experts", scheme, 8, 8, 8, 576, 192, Activation("silu"))
x, weights = torch.zeros(1, 576, dtype=torch.bfloat16), torch.ones(1, 8)
ids = torch.arange(8, dtype=torch.int32).unsqueeze(0)
with single_rank_worker("cpu", 8), torch.inference_mode():
    adapter, moe = current_adapter(), fused_moe_config(problem, "cpu", 8)
    experts = VllmBuilder(adapter, moe, adapter.quant_config(problem, {})).from_function(lambda *arguments: None)
    kernel = adapter.modular_kernel(make_moe_prepare_and_finalize_no_dp_ep(use_monolithic=False), experts)
    method = object.__new__(OracleMoEMethod)
    method.adapter, method.moe_kernel, method.token_dispatch = adapter, kernel, None
    tensors = {"w13": torch.empty(8, 384, 576, device="meta"), "w2": torch.empty(8, 576, 192, device="meta")}
    layer = layer_namespace(problem, moe, tensors)
    setattr(layer, STATE_ATTRIBUTE, "converted")
    arguments = dict(topk_weights=weights, topk_ids=ids, activation=moe.activation, global_num_experts=8)
    arguments |= dict(expert_map=None, apply_router_weight_on_input=False)
    if %r:
        experts.apply = lambda **given: None
        call = lambda: kernel.apply(x, tensors["w13"], tensors["w2"], **arguments)
    else:
        call = lambda: method.apply(layer, x, weights, ids, shared_experts=None, shared_experts_input=None)
    found = []
    for _ in range(200):
        start = time.thread_time()
        for _ in range(20):
            call()
        found.append((time.thread_time() - start) / 20 * 1e3)
print(sorted(found)[len(found) // 2])
"""


def run_python(*words: str) -> str:
    """Standard output of a fresh process, which reads and writes byte code as an installed package does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def measured(code: str, runs: int = RUNS) -> float:
    """Median over fresh processes of the number that `code` prints last, after a first one that compiles modules."""
    found = [float(run_python("-c", code).strip().splitlines()[-1]) for _ in range(runs + 1)]
    return statistics.median(found[1:])


def explain_ms() -> float:
    """Median wall time of the whole command, process start included, after a first one that compiles modules."""
    words = ["explain", str(ROOT / "examples/qwen3-30b-a3b-mxfp8.json"), "--device", "nvidia-h200"]
    found = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        run_python("-c", "from vllm_moe_oracle.cli.main import main; main()", *words)
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found[1:])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    rows = [
        {"what": "`import vllm_moe_oracle`", "value": measured(IMPORT), "unit": "ms"},
        {"what": "`register()`, on top of vLLM's own imports", "value": measured(REGISTER, 3), "unit": "ms"},
        {"what": "one decision, every candidate's every reason", "value": measured(DECIDE), "unit": "ms"},
        {
            "what": "`vllm-moe-oracle explain` of Qwen3-30B-A3B, process start to exit",
            "value": explain_ms(),
            "unit": "ms",
        },
        {
            "what": "search of a layer's weights for damage, one thread (Qwen3-30B-A3B in MXFP8, 620 MB)",
            "value": measured(SEARCH, 3),
            "unit": "ms",
        },
        {"what": "a copy of these weights in memory, for comparison", "value": measured(COPY, 3), "unit": "ms"},
        {
            "what": "a call of a layer on the host in eager mode, without what its kernel does, processor time",
            "value": measured(LAYER_CALL % False),
            "unit": "ms",
        },
        {
            "what": "of it vLLM's modular kernel, which unquantized layers have, too",
            "value": measured(LAYER_CALL % True),
            "unit": "ms",
        },
    ]
    for row in rows:
        row["value"] = float(f"{row['value']:.2g}")
        print(f"{row['value']:>8g} {row['unit']}  {row['what']}")
    runs = f"Medians of {RUNS} fresh processes (3 for `register()`, the search and the copy)"
    conditions = f"{runs}, {detect._cpu_name()}, Python {platform.python_version()}"
    result = {"command": "python -m tests.tools.overhead --write", "conditions": conditions, "rows": rows}
    if write:
        (ROOT / "tests/golden/costs.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
