"""Runs in a process of its own: loads checkpoints into vLLM one after the other, generates, prints what came out.

    python -m tests.e2e.run_generate JOBS.json RESULTS.json

A job is an object: ``checkpoint``, ``dtype``, ``prompt`` (token ids), ``tokens`` (how many), ``oracle`` (settings of
the plugin), ``engine`` (more arguments of vLLM's `LLM`), ``experts`` (keywords that every MoE layer of the model
gets on top of its own: biases, another activation), and ``online_experts`` (vLLM's name of a `QuantKey`: experts are
quantized while they load), and ``reload`` (a checkpoint, for vLLM's layer-wise reload after the first answer: the
result has what the model says then in ``reloaded``). A result has ``tokens``, ``logprobs`` (one list over the
vocabulary for each token), ``layers`` (what the plugin says about its layers), ``digests`` (SHA-256 of the bytes of
each parameter of the MoE layers, by name) and ``kept`` (names of these parameters that are alive after the engine has
been deleted), or ``error``. The last three are there when the model is in this process.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "max_logprobs": -1,
    "gpu_memory_utilization": 0.2,
    "kv_cache_memory_bytes": 16 << 20,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}
"""Arguments of vLLM's `LLM` for a tiny model that starts fast."""


def engine_arguments(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: those of tiny models, `more`, and the job's."""
    config = {"moe_oracle": job.get("oracle", {})}
    own = {"model": job["checkpoint"], "dtype": job["dtype"], "additional_config": config}
    return {**own, **SMALL | more | job.get("engine", {})}


def with_experts(**keywords: Any) -> None:
    """Gives the MoE layers of Qwen3-MoE models more keywords: biases and activations that this family does not have."""
    from vllm.model_executor.models import qwen3_moe

    name = "FusedMoEFactory" if hasattr(qwen3_moe, "FusedMoEFactory") else "FusedMoE"
    factory = getattr(qwen3_moe, name)
    original = getattr(factory, "func", factory)
    setattr(qwen3_moe, name, functools.partial(original, **keywords) if keywords else original)


def online_experts(job: dict[str, Any]) -> dict[str, Any]:
    """Arguments that quantize a 16-bit checkpoint's experts alone; in vLLM's words a format has one name for linear
    layers too, and those of some have no kernel on a CPU."""
    if "online_experts" not in job:
        return {}
    from vllm.config.quantization import QuantSpec
    from vllm.model_executor.layers.quantization.utils import quant_utils

    return {
        "quantization": "online",
        "quantization_config": {"moe": QuantSpec(weight=getattr(quant_utils, job["online_experts"]))},
    }


def model_of(llm: Any) -> Any:
    """The torch module of an engine that runs in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def digests(model: Any) -> dict[str, str]:
    """SHA-256 of the bytes of each parameter of a MoE layer, by name."""
    import torch

    return {
        name: hashlib.sha256(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
        if ".mlp.experts" in name
    }


def greedily(count: int) -> Any:
    """Parameters of a request for the likeliest next tokens."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=count, temperature=0.0, logprobs=-1, ignore_eos=True, detokenize=False)


def answer(output: Any) -> dict[str, Any]:
    """A completion's tokens, and for each the logprobs of the whole vocabulary."""
    rows = [[row[token].logprob for token in sorted(row)] for row in output.logprobs]
    return {"tokens": list(output.token_ids), "logprobs": rows}


def say(llm: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """The likeliest next tokens."""
    return answer(llm.generate([{"prompt_token_ids": prompt}], greedily(count), use_tqdm=False)[0].outputs[0])


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job; see the module."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    with_experts(**job.get("experts", {}))
    llm = None
    parameters: dict[str, weakref.ref[Any]] = {}
    said: dict[str, Any] = {}
    try:
        llm = LLM(**engine_arguments(job, enforce_eager=job.get("eager", True), **online_experts(job)))
        said |= say(llm, job["prompt"], job["tokens"])
        if "reload" in job:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
            llm.reset_prefix_cache()
            said["reloaded"] = say(llm, job["prompt"], job["tokens"])
        if job.get("engine", {}).get("tensor_parallel_size", 1) > 1:  # the model is in other processes
            return said
        from vllm_moe_oracle.methods import load_summary

        said |= {"layers": load_summary.model_report(0), "digests": digests(model_of(llm))}
        named = model_of(llm).named_parameters()
        parameters |= {name: weakref.ref(parameter) for name, parameter in named if ".mlp.experts" in name}
        return said
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        gc.collect()
        said["kept"] = [name for name, parameter in parameters.items() if parameter() is not None]


def fork_ranks() -> None:
    """Ranks begin as copies of this process, as they do on a GPU. On a CPU vLLM starts new interpreters, each of which
    imports for 14 s of a processor; they stay where the variable ``SPAWN_RANKS`` is set, for plugins that act on one
    rank while it starts."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return  # vLLM's CPU worker replaces torch.cuda's streams when it is imported
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    if "SPAWN_RANKS" not in os.environ:
        for module in (coordinator, utils, multiproc_executor):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[assignment]


def main(run: Callable[[dict[str, Any]], Any] = run) -> None:
    """Runs the jobs of the file that the first argument names; results go to the second's, after each job."""
    import vllm.entrypoints.llm  # noqa: F401

    fork_ranks()
    gc.freeze()  # what the imports made: each engine's end collects ten times, and walked a million objects of it
    # vLLM freezes what an engine made, and unfreezes everything at its end.
    gc.freeze = gc.unfreeze = lambda: None  # type: ignore[assignment]
    jobs, results = map(Path, sys.argv[1:3])
    found = []
    for job in json.loads(jobs.read_text()):
        found.append(run(job))
        results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
