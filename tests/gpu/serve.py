"""A whole model with random weights through vLLM on a GPU, by backend: start, self-check, decode step, prefill.

    python tests/gpu/serve.py --backend auto --backend own_mxfp8 --json serve.json

Qwen3-30B-A3B's shape with fewer layers, MXFP8, weights that vLLM makes up (``--load-format dummy``), CUDA graphs on.
Every backend runs in a process of its own; ``stock`` is vLLM without the plugin. A decode step is the slope of the time
over the number of generated tokens, at each batch size; prefill is 32 prompts of 1024 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "qwen3-30b-a3b-mxfp8.json"


def measure(folder: str, backend: str) -> dict[str, Any]:
    """Loads the model and times it; in a process of its own."""
    from vllm import LLM, SamplingParams

    oracle = {} if backend in ("stock", "auto") else {"backend": backend}
    begin = time.perf_counter()
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.6,
        additional_config={"moe_oracle": oracle} if oracle else {},
        enable_prefix_caching=False,
    )
    found: dict[str, Any] = {"start_seconds": round(time.perf_counter() - begin, 1), "decode_ms": {}}

    def run(batch: int, prompt: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [(7 * row + at) % 1000 for at in range(prompt)]} for row in range(batch)]
        parameters = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - begin

    for batch in (1, 8, 64):
        run(batch, 16, 8)
        short, long = (min(run(batch, 16, tokens) for _ in range(2)) for tokens in (16, 144))
        found["decode_ms"][batch] = round((long - short) / 128 * 1e3, 3)
    run(32, 1024, 1)
    found["prefill_tokens_per_second"] = round(32 * 1024 / min(run(32, 1024, 1) for _ in range(2)))
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", action="append", required=True)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inner:
        print("RESULT " + json.dumps(measure(chosen.inner, chosen.backend[0])), flush=True)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads(CONFIG.read_text()) | {"num_hidden_layers": chosen.layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        for backend in chosen.backend:
            environment = os.environ | {"VLLM_PLUGINS": "" if backend == "stock" else "moe_oracle"}
            command = [sys.executable, __file__, "--backend", backend, "--inner", folder]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            output = done.stdout + done.stderr
            row: dict[str, Any] = {"backend": backend}
            result = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
            row |= json.loads(result[1]) if result else {"error": output[-1500:]}
            said = [line.split("moe_oracle: ", 1)[1] for line in output.splitlines() if "moe_oracle: " in line]
            row["said"] = [line[:300] for line in said]
            rows.append(row)
            print(json.dumps(row), flush=True)
    import torch
    import vllm

    conditions = {
        "gpu": torch.cuda.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "layers": chosen.layers,
        "command": "python " + " ".join(["tests/gpu/serve.py", *sys.argv[1:]]),
    }
    if chosen.json:
        chosen.json.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
