"""Measures the plugin's overhead before it serves: import, registration, decision, `explain`, search for damage.

    python -m tests.tools.overhead [--write]

Prints a table. ``--write`` replaces tests/golden/costs.json, which the README shows.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

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


def measured(code: str, runs: int = RUNS) -> float:
    """Median over fresh processes of the number that `code` prints last."""
    found = []
    for _ in range(runs):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        found.append(float(done.stdout.strip().splitlines()[-1]))
    return statistics.median(found)


def explain_ms() -> float:
    """Median wall time of the whole command, process start included."""
    found = []
    for _ in range(RUNS):
        start = time.perf_counter()
        words = ["explain", str(ROOT / "examples/qwen3-30b-a3b-mxfp8.json"), "--device", "nvidia-h200"]
        code = "from vllm_moe_oracle.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=True)
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


def cpu_name() -> str:
    """The processor's name, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


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
    ]
    for row in rows:
        row["value"] = float(f"{row['value']:.2g}")
        print(f"{row['value']:>8g} {row['unit']}  {row['what']}")
    runs = f"Medians of {RUNS} fresh processes (3 for `register()` and the last two)"
    conditions = f"{runs}, {cpu_name()}, Python {platform.python_version()}"
    result = {"command": "python -m tests.tools.overhead --write", "conditions": conditions, "rows": rows}
    if write:
        (ROOT / "tests/golden/costs.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
