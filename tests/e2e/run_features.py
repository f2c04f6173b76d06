"""Runs in a process of its own: features of vLLM on a model whose experts run through the plugin.

    python -m tests.e2e.run_features JOBS.json RESULTS.json

A job is an object: ``feature`` (a function of this module), ``checkpoint``, ``other`` (a second checkpoint of the same
sizes), ``adapter`` (a folder with a LoRA adapter), ``prompt`` (token ids) and ``tokens`` (how many); and optionally
``dtype`` (float32), ``oracle`` (settings of the plugin) and ``engine`` (more arguments of vLLM's `LLM`, several ranks
among them). A result is an object with what the feature's function returns and ``served``, the number of MoE layers
that run through the plugin where the model is in this process; or ``error``.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e import run_generate
from tests.e2e.run_generate import answer, greedily, model_of, say

ORACLE = {"activations": "16bit"}


def engine_arguments(job: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """Arguments of an engine: those of tiny models, the feature's, the job's."""
    return run_generate.engine_arguments({"dtype": "float32", "oracle": ORACLE} | job, **arguments)


def engine(job: dict[str, Any], **arguments: Any) -> Any:
    """vLLM's offline engine."""
    from vllm import LLM

    return LLM(**engine_arguments(job, **arguments))


def ranks(llm: Any) -> int:
    """Processes that hold a part of the model."""
    return int(llm.llm_engine.vllm_config.parallel_config.world_size)


def served(llm: Any) -> int | None:
    """MoE layers that run through the plugin; None where they are in other processes."""
    from vllm_moe_oracle.methods.base import OracleMoEMethod

    if ranks(llm) > 1:
        return None
    methods = [getattr(module, "quant_method", None) for module in model_of(llm).modules()]
    return sum(isinstance(each, OracleMoEMethod) for each in methods)


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """One prompt; of an engine that drafts, also how many tokens were drafted and accepted."""
    llm = engine(job, disable_log_stats=False)
    said = say(llm, job["prompt"], job["tokens"])
    counters = {each.name: each.value for each in llm.get_metrics() if each.name.startswith("vllm:spec_decode_num_")
                and hasattr(each, "value")}  # fmt: skip
    drafts = {
        name: counters[f"vllm:spec_decode_num_{name}_tokens"]
        for name in ("draft", "accepted")
        if f"vllm:spec_decode_num_{name}_tokens" in counters
    }
    return {"said": [said], "served": served(llm), **drafts}


def prefix_caching(job: dict[str, Any]) -> dict[str, Any]:
    """The same prompt twice; the second time its blocks are in the cache."""
    llm = engine(job, enable_prefix_caching=True, block_size=32)
    first, second = (say(llm, job["prompt"], job["tokens"]) for _ in range(2))
    from vllm import SamplingParams

    again = llm.generate([{"prompt_token_ids": job["prompt"]}], SamplingParams(detokenize=False), use_tqdm=False)[0]
    return {"said": [first, second], "cached": again.num_cached_tokens, "served": served(llm)}


def chunked_prefill(job: dict[str, Any]) -> dict[str, Any]:
    """A prompt in several steps."""
    llm = engine(job, enable_chunked_prefill=True, max_num_batched_tokens=8)
    return {"said": [say(llm, job["prompt"], job["tokens"])], "served": served(llm)}


def speculative_decoding(job: dict[str, Any]) -> dict[str, Any]:
    """Drafts by n-grams of the prompt, which repeats itself."""
    draft = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    llm = engine(job, speculative_config=draft)
    return {"said": [say(llm, job["prompt"], job["tokens"])], "served": served(llm)}


def prompt_logprobs(job: dict[str, Any]) -> dict[str, Any]:
    """The logprobs of the whole vocabulary at each position of the prompt but the first."""
    from vllm import SamplingParams

    llm = engine(job)
    parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=-1, detokenize=False)
    output = llm.generate([{"prompt_token_ids": job["prompt"]}], parameters, use_tqdm=False)[0]
    rows = [[row[token].logprob for token in sorted(row)] for row in output.prompt_logprobs[1:]]
    return {"prompt_logprobs": rows, "served": served(llm)}


def embeddings(job: dict[str, Any]) -> dict[str, Any]:
    """The normalized last hidden state of the prompt's last token."""
    llm = engine(job, runner="pooling", convert="embed", skip_tokenizer_init=False)
    output = llm.embed([{"prompt_token_ids": job["prompt"]}], use_tqdm=False)[0]
    return {"embedding": list(output.outputs.embedding), "served": served(llm)}


def two_engines(job: dict[str, Any]) -> dict[str, Any]:
    """Two models in one process, by turns."""
    one, two = engine(job), engine(job | {"checkpoint": job["other"]})
    first, second = say(one, job["prompt"], job["tokens"]), say(two, job["prompt"], job["tokens"])
    one.reset_prefix_cache()
    third = say(one, job["prompt"], job["tokens"])
    return {"said": [first, third], "said_other": [second], "served": min(served(one), served(two))}


def async_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Four requests at once through the engine of a server; data-parallel ranks share them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def ask(llm: Any, name: str) -> dict[str, Any]:
        last: Any = None
        async for output in llm.generate({"prompt_token_ids": job["prompt"]}, greedily(job["tokens"]), name):
            last = output.outputs[0]
        return answer(last)

    async def all_of_them() -> list[dict[str, Any]]:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(job)))
        try:
            return list(await asyncio.gather(*(ask(llm, name) for name in "abcd")))
        finally:
            llm.shutdown()

    return {"said": asyncio.run(all_of_them())}


def over_http(job: dict[str, Any]) -> dict[str, Any]:
    """``vllm serve``: one request alone, then the same one four times among 60 others at once, which data-parallel
    ranks share. Where vLLM is told to be batch invariant, all five have the same bits. Prints the server's output.

    Raises:
        ServingError: the server ended, or was not ready in time.
        httpx.HTTPError: it did not answer a request.
    """
    import httpx

    from vllm_moe_oracle.cli import served_benchmark

    arguments = engine_arguments(job, skip_tokenizer_init=False, max_num_seqs=64, max_num_batched_tokens=4096)
    del arguments["model"]
    words = ["--served-model-name", "tiny"]
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", json.dumps(value) if isinstance(value, dict) else str(value)]
    port = served_benchmark.free_port()
    command = served_benchmark.server_command(job["checkpoint"], port, words)
    # A server has its engine in another process, as by default; this one's engines are in their own.
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    url = f"http://{served_benchmark.LOCALHOST}:{port}/v1/completions"

    def ask(prompt: list[int]) -> dict[str, Any]:
        request = {
            "model": "tiny", "prompt": prompt, "max_tokens": job["tokens"], "temperature": 0.0, "logprobs": -1,
            "ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        reply = httpx.post(url, json=request, timeout=60)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        rows = [[row[f"token_id:{token}"] for token in range(len(row))] for row in choice["logprobs"]["top_logprobs"]]
        return {"tokens": choice["token_ids"], "logprobs": rows}

    prompts = [[3 + (start + index) % 60 for index in range(2 + start % 17)] for start in range(60)]
    for place in (7, 23, 41, 60):
        prompts.insert(place, job["prompt"])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        try:
            with (
                served_benchmark.server(command, environment, port, log, limit=210),
                ThreadPoolExecutor(len(prompts)) as pool,
            ):
                alone = ask(job["prompt"])
                answers = list(pool.map(ask, prompts))
        finally:
            print(log.read_text(errors="replace"))
    among = [each for each, prompt in zip(answers, prompts, strict=True) if prompt is job["prompt"]]
    invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    return {"said": [alone, *among], **({"same_bits": all(each == alone for each in among)} if invariant else {})}


def _reload(job: dict[str, Any], *parts: str) -> dict[str, Any]:
    """Reloads the other checkpoint's tensors whose names hold one of `parts`, one call for each."""
    from safetensors.torch import load_file

    llm = engine(job)
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


def reload_and_back(job: dict[str, Any]) -> dict[str, Any]:
    """The other checkpoint by vLLM's own layer-wise reload, then this one again."""
    llm = engine(job)
    answers = [say(llm, job["prompt"], job["tokens"])]
    for name in ("other", "checkpoint"):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": job[name]})
        llm.reset_prefix_cache()
        answers.append(say(llm, job["prompt"], job["tokens"]))
    return {"said": answers[::2], "said_other": [answers[1]], "served": served(llm)}


def sleep(job: dict[str, Any]) -> dict[str, Any]:
    """Level 1 keeps the weights in the host's memory, level 2 drops them and reads the checkpoint again."""
    llm = engine(job, enable_sleep_mode=True)
    answers = [say(llm, job["prompt"], job["tokens"])]
    llm.sleep(level=1)
    llm.wake_up()
    answers.append(say(llm, job["prompt"], job["tokens"]))
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    llm.collective_rpc("reload_weights")
    llm.wake_up(tags=["kv_cache"])
    llm.reset_prefix_cache()
    answers.append(say(llm, job["prompt"], job["tokens"]))
    return {"said": answers, "served": served(llm)}


def expert_load_balancing(job: dict[str, Any]) -> dict[str, Any]:
    """Experts move between ranks every fourth step, while requests run."""
    balance = {"window_size": 4, "step_interval": 4, "num_redundant_experts": 2, "log_balancedness": True}
    llm = engine(job, enable_eplb=True, eplb_config=balance | job.get("eplb", {}))
    return {"said": [say(llm, job["prompt"], job["tokens"]) for _ in range(8)], "served": served(llm)}


def lora(job: dict[str, Any]) -> dict[str, Any]:
    """An adapter, of the attention unless the engine's arguments name others: without it, and both in one batch."""
    from vllm.lora.request import LoRARequest

    llm = engine(job, enable_lora=True, max_lora_rank=8, lora_target_modules=["q_proj", "v_proj"])
    adapter = LoRARequest("adapter", 1, job["adapter"])
    prompt = {"prompt_token_ids": job["prompt"]}
    outputs = llm.generate([prompt, prompt], greedily(job["tokens"]), lora_request=[None, adapter], use_tqdm=False)
    plain, adapted = (answer(each.outputs[0]) for each in outputs)
    return {"said": [say(llm, job["prompt"], job["tokens"]), plain], "said_other": [adapted], "served": served(llm)}


def in_a_batch(job: dict[str, Any]) -> dict[str, Any]:
    """The same prompt alone, and among 63 others; batch invariance asks for the same bits."""
    llm = engine(job, max_num_seqs=64, max_num_batched_tokens=4096)
    alone = say(llm, job["prompt"], job["tokens"])
    prompts = [[3 + (start + index) % 60 for index in range(2 + start % 17)] for start in range(63)]
    prompts.insert(31, job["prompt"])
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], greedily(job["tokens"]), use_tqdm=False)
    among = answer(outputs[31].outputs[0])
    return {"said": [alone, among], "same_bits": alone == among, "served": served(llm)}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One job; see the module."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        found: dict[str, Any] = globals()[job["feature"]](job)
        return found
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are ended on the way
    run_generate.main(run)
