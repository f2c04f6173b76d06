"""Starts vLLM on a GPU that no measurement and no prediction covers, with the setting `measure_at_start`.

    python tests/gpu/first_start.py --json first-start.json [--budget 60]

As many GPUs as ``--ranks``, with vLLM and the plugin installed. They are made unknown by a copy of the installed plugin
without its shipped times and without its latency model. Two layers with random weights are served, each start in its
own processes:

* a first start, which measures within its budget, and a second one, which measures nothing, or only what the first
  one says that it left for the next;
* a start that is killed while it measures, and the next one, which completes it;
* a start whose cache lies on a full disk;
* a start beside another server on the same GPU.

Each of them has to serve. Exit status 1 when one does not, or says something else than it should.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu import serve  # noqa: E402

MEASURED = r"measuring, [1-9]\d* of \d+"  # progress, once a time is kept

SERVER = """
import sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
              max_model_len=2048, max_num_batched_tokens=4096, gpu_memory_utilization=0.3, enable_prefix_caching=False,
              tensor_parallel_size=int(sys.argv[3]))
    out = llm.generate([{"prompt_token_ids": list(range(5, 40))}], SamplingParams(max_tokens=8, detokenize=False))
    print("SERVED", len(out[0].outputs[0].token_ids), flush=True)
    time.sleep(float(sys.argv[2]))
"""


def unknown_gpu(folder: Path) -> Path:
    """A copy of the installed plugin whose data covers no GPU."""
    import vllm_moe_oracle

    installed = Path(vllm_moe_oracle.__file__).parent
    shutil.copytree(installed, folder / installed.name)
    for metadata in installed.parent.glob("vllm_moe_oracle-*.dist-info"):
        shutil.copytree(metadata, folder / metadata.name)
    profiles = folder / installed.name / "profiles"
    for path in profiles.glob("*nvidia_*.json"):
        path.unlink()
    model = json.loads((profiles / "latency_model.json").read_text())
    (profiles / "latency_model.json").write_text(json.dumps(model | {"backends": {}}))
    return folder


class Starts:
    """Runs starts one after the other and keeps what they said."""

    def __init__(self, folder: Path, plugin: Path, budget: float, file: Path, ranks: int) -> None:
        self.folder, self.plugin, self.budget, self.file, self.ranks = folder, plugin, budget, file, ranks
        self.rows: list[dict[str, Any]] = []
        (folder / "server.py").write_text(SERVER)

    def model(self, name: str) -> Path:
        """Two layers of a model of `serve.MODELS`."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            serve.write_model(folder, serve.config_of(name, 2, False))
        return folder

    def popen(self, model: str, cache: Path, stay: float = 0.0) -> subprocess.Popen[str]:
        """A server that stays for some seconds after it has served."""
        path = os.pathsep.join([str(self.plugin), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {
            "PYTHONPATH": path, "MOE_ORACLE_MEASURE_AT_START": f"{self.budget:g}", "MOE_ORACLE_CACHE": str(cache),
            "VLLM_LOGGING_LEVEL": "INFO", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        command = [sys.executable, str(self.folder / "server.py"), str(self.model(model)), str(stay), str(self.ranks)]
        return subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def start(
        self, name: str, model: str, cache: Path, expected: tuple[str, ...], absent: tuple[str, ...] = (),
        kill_at: str = "",
    ) -> None:  # fmt: skip
        """One start. It has to say `expected`, not `absent`, and to serve, unless it is killed where a line first has
        the expression `kill_at`."""
        begin, process = time.monotonic(), self.popen(model, cache)
        lines = []
        for line in process.stdout or ():
            lines.append(line.rstrip())
            if kill_at and re.search(kill_at, line):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        said = [line.partition("moe_oracle: ")[2] for line in lines if "moe_oracle: " in line]
        served = any(line.startswith("SERVED") for line in lines)
        ok = all(any(words in line for line in said) for words in expected)
        ok &= not any(words in line for words in absent for line in said) and served != bool(kill_at)
        row: dict[str, Any] = {
            "start": name,
            "model": model,
            "ok": ok,
            "seconds": round(time.monotonic() - begin, 1),
            "said": said,
        }
        if not ok:
            row["log"] = lines[-40:]
        self.rows.append(row)
        self.write()
        print(f"== {name}, {model}: {'ok' if ok else 'NOT AS EXPECTED'}, {row['seconds']} s", flush=True)
        for line in said:
            print("  ", line[:260], flush=True)
        for line in row.get("log", ()):
            print("   |", line[-200:], flush=True)

    def write(self) -> None:
        """Writes what was said so far, with the conditions."""
        import torch

        conditions = {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "budget": self.budget,
            "command": "python tests/gpu/first_start.py " + " ".join(sys.argv[1:]),
        }  # fmt: skip
        self.file.write_text(json.dumps({"conditions": conditions, "starts": self.rows}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=60)
    parser.add_argument("--models", default="qwen3-mxfp8,gpt-oss")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--parts", default="twice,kill,disk,neighbor", help="which starts; a full disk needs root")
    args = parser.parse_args()
    first, *rest = args.models.split(",")
    other = rest[0] if rest else first
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        starts = Starts(folder, unknown_gpu(folder / "plugin"), args.budget, args.json, args.ranks)
        measured, measuring, served = "measured at this start", "is measured for up to", "run through the oracle"
        parts = args.parts.split(",")
        if "twice" in parts:
            starts.start("first", first, folder / "cache", (measuring, measured))
            left = any("the next start continues" in line for line in starts.rows[-1]["said"])
            says, silent = ((measured,), ()) if left else ((served,), (measuring, measured))
            starts.start("second", first, folder / "cache", says, silent)
        if "kill" in parts:
            starts.start("killed", other, folder / "killed", (measuring,), (), MEASURED)
            starts.start("after the kill", other, folder / "killed", (measured,))
        if "disk" in parts:
            full = folder / "full"
            full.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(full)], check=True)
            try:
                starts.start("full disk", first, full, (served,), (measured,))
            finally:
                subprocess.run(["umount", "-l", str(full)], check=True)
        if "neighbor" in parts:
            neighbor = starts.popen(first, folder / "cache", stay=600)
            for line in neighbor.stdout or ():
                if line.startswith("SERVED"):
                    break
            starts.start("beside a server", other, folder / "alone", ("another process uses the GPU",), (measured,))
            os.killpg(neighbor.pid, signal.SIGKILL)
            neighbor.wait()
    return 0 if all(row["ok"] for row in starts.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
