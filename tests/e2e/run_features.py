"""Runs in a process of its own: features of vLLM on a model whose experts run through the plugin.

    python -m tests.e2e.run_features JOBS.json RESULTS.json

A job is an object: ``feature`` (a function of this module), ``checkpoint``, ``other`` (a second checkpoint of the same
sizes), ``prompt`` (token ids) and ``tokens`` (how many). A result is an object with what the feature's function returns
and ``served``, the number of MoE layers that run through the plugin where the model is in this process; or ``error``.
"""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

from tests.e2e import run_generate
from tests.e2e.run_generate import SMALL, model_of, say

DTYPE = "float32"
CONFIG = {"moe_oracle": {"activations": "16bit"}}


def engine(checkpoint: str, **arguments: Any) -> Any:
    """vLLM's offline engine."""
    from vllm import LLM

    return LLM(model=checkpoint, dtype=DTYPE, additional_config=CONFIG, **SMALL | arguments)


def served(llm: Any) -> int:
    """MoE layers that run through the plugin."""
    from vllm_moe_oracle.methods.base import OracleMoEMethod

    methods = [getattr(module, "quant_method", None) for module in model_of(llm).modules()]
    return sum(isinstance(each, OracleMoEMethod) for each in methods)


def prefix_caching(job: dict[str, Any]) -> dict[str, Any]:
    """The same prompt twice; the second time its blocks are in the cache."""
    llm = engine(job["checkpoint"], enable_prefix_caching=True, block_size=32)
    first, second = (say(llm, job["prompt"], job["tokens"]) for _ in range(2))
    from vllm import SamplingParams

    again = llm.generate([{"prompt_token_ids": job["prompt"]}], SamplingParams(detokenize=False), use_tqdm=False)[0]
    return {"said": [first, second], "cached": again.num_cached_tokens, "served": served(llm)}


def chunked_prefill(job: dict[str, Any]) -> dict[str, Any]:
    """A prompt in several steps."""
    llm = engine(job["checkpoint"], enable_chunked_prefill=True, max_num_batched_tokens=8)
    return {"said": [say(llm, job["prompt"], job["tokens"])], "served": served(llm)}


def speculative_decoding(job: dict[str, Any]) -> dict[str, Any]:
    """Drafts by n-grams of the prompt, which repeats itself."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine(job["checkpoint"], speculative_config=draft)
    return {"said": [say(llm, job["prompt"], job["tokens"])], "served": served(llm)}


def prompt_logprobs(job: dict[str, Any]) -> dict[str, Any]:
    """The logprobs of the whole vocabulary at each position of the prompt but the first."""
    from vllm import SamplingParams

    llm = engine(job["checkpoint"])
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    output = llm.generate([{"prompt_token_ids": job["prompt"]}], parameters, use_tqdm=False)[0]
    rows = [[row[token].logprob for token in sorted(row)] for row in output.prompt_logprobs[1:]]
    return {"prompt_logprobs": rows, "served": served(llm)}


def embeddings(job: dict[str, Any]) -> dict[str, Any]:
    """The normalized last hidden state of the prompt's last token."""
    llm = engine(job["checkpoint"], runner="pooling", convert="embed", skip_tokenizer_init=False)
    output = llm.embed([{"prompt_token_ids": job["prompt"]}], use_tqdm=False)[0]
    return {"embedding": list(output.outputs.embedding), "served": served(llm)}


def two_engines(job: dict[str, Any]) -> dict[str, Any]:
    """Two models in one process, by turns."""
    one, two = engine(job["checkpoint"]), engine(job["other"])
    first, second = say(one, job["prompt"], job["tokens"]), say(two, job["prompt"], job["tokens"])
    one.reset_prefix_cache()
    third = say(one, job["prompt"], job["tokens"])
    return {"said": [first, third], "said_other": [second], "served": min(served(one), served(two))}


def async_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Two requests at once through the engine of a server."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def ask(llm: Any, name: str) -> dict[str, Any]:
        parameters = SamplingParams(
            max_tokens=job["tokens"], temperature=0.0, logprobs=-1, ignore_eos=True, detokenize=False
        )
        last: Any = None
        async for output in llm.generate({"prompt_token_ids": job["prompt"]}, parameters, name):
            last = output.outputs[0]
        rows = [[row[token].logprob for token in sorted(row)] for row in last.logprobs]
        return {"tokens": list(last.token_ids), "logprobs": rows}

    async def both() -> list[dict[str, Any]]:
        arguments = AsyncEngineArgs(model=job["checkpoint"], dtype=DTYPE, additional_config=CONFIG, **SMALL)
        llm = AsyncLLM.from_engine_args(arguments)
        try:
            return list(await asyncio.gather(ask(llm, "a"), ask(llm, "b")))
        finally:
            llm.shutdown()

    return {"said": asyncio.run(both())}


def _reload(job: dict[str, Any], *parts: str) -> dict[str, Any]:
    """Reloads the other checkpoint's tensors whose names hold one of `parts`, one call for each."""
    from safetensors.torch import load_file

    llm = engine(job["checkpoint"])
    tensors = load_file(Path(job["other"], "model.safetensors"))
    for part in parts:
        chosen = [(name, tensor) for name, tensor in tensors.items() if part in name]
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": chosen})
    llm.reset_prefix_cache()
    return {"said_other": [say(llm, job["prompt"], job["tokens"])], "served": served(llm)}


def reload_by_iterator(job: dict[str, Any]) -> dict[str, Any]:
    """All tensors of the other checkpoint at once."""
    return _reload(job, "")


def reload_by_layer(job: dict[str, Any]) -> dict[str, Any]:
    """One call for each layer, and one for each tensor outside of layers."""
    return _reload(job, ".layers.0.", ".layers.1.", "embed_tokens", "model.norm.", "lm_head")


def reload_attention(job: dict[str, Any]) -> dict[str, Any]:
    """The attention alone: the experts stay as they are."""
    return _reload(job, ".self_attn.")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job; see the module."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        found: dict[str, Any] = globals()[job["feature"]](job)
        return found
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    run_generate.main(run)
