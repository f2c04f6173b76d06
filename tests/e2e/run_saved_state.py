"""Runs in a process of its own: saves a served model by vLLM's `ShardedStateLoader`, and tries to load it.

    python -m tests.e2e.run_saved_state JOBS.json RESULTS.json

A job is as for `run_generate`, with ``folder`` for the saved state. A result has ``flat``: whether every parameter of
the experts can be viewed flat; ``saved``: the experts' tensors in the files, each equal to the model's or not; and
``error``, of saving or of loading.
"""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

from tests.e2e import run_generate


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job; see the module."""
    import torch
    from safetensors.torch import load_file
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.model_loader import ShardedStateLoader

    found: dict[str, Any] = {}
    folder, llm = Path(job["folder"]), None
    try:
        llm = LLM(**run_generate.engine_arguments(job))
        model = run_generate.model_of(llm)
        found["flat"] = all(
            each.is_contiguous() for name, each in model.named_parameters() if ".experts" in name and each.numel()
        )
        folder.mkdir()
        ShardedStateLoader.save_model(model, str(folder))
        parameters = dict(model.named_parameters())
        found["saved"] = {
            name: torch.equal(tensor.view(torch.uint8), parameters[name].data.view(torch.uint8))
            for each in folder.glob("*.safetensors") for name, tensor in load_file(each).items()
            if "experts" in name and name.rpartition(".")[2].startswith(("w13", "w2"))
        }  # fmt: skip
        for each in Path(job["checkpoint"]).glob("*.json"):
            if "index" not in each.name:
                shutil.copy(each, folder)
        del llm, model, parameters
        llm = None
        gc.collect()
        cleanup_dist_env_and_memory()
        llm = LLM(**run_generate.engine_arguments(job | {"checkpoint": str(folder)}, load_format="sharded_state"))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
    return found


if __name__ == "__main__":
    run_generate.main(run)
