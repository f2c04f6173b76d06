"""Runs in a process of its own: what happens to a served model's weights after they were loaded.

    python -m tests.e2e.run_lifecycle JOBS.json RESULTS.json

A job is an object: ``checkpoint``, ``engine`` (more arguments of vLLM's `LLM`), ``backend``, ``prompt`` (token ids),
``tokens`` (how many), and ``steps``, done one after the other:

* ``["generate"]``: what the model says;
* ``["reload", CHECKPOINT]``: vLLM's layer-wise reload;
* ``["load", CHECKPOINT]``: the model's `load_weights`, without vLLM's reload around it, with the experts' tensors
  (vLLM's own linear layers do not survive that);
* ``["process"]``: every layer's `process_weights_after_loading` once more;
* ``["forget"]``: every weight becomes something else, as after sleep of level 2;
* ``["half", CHECKPOINT]``: a reload in which the second layer's tensors turn out to be damaged;
* ``["lack", CHECKPOINT]``: a reload in which a tensor of the second layer does not come;
* ``["run", NUMBER]``: one MoE layer by itself.

A result is a list with one object for each step: ``said`` (tokens and logprobs, after "generate"), ``addresses`` and
``digests`` of the experts' parameters by name, ``states`` of the layers, and ``error``, where the step raised.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.e2e import run_generate


class Served:
    """A model in this process."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.job = job
        own = {"dtype": "bfloat16", "oracle": {"backend": job["backend"]}}
        self.llm: Any = LLM(**run_generate.engine_arguments(job | own))
        self.model = run_generate.model_of(self.llm)

    def layers(self) -> dict[str, Any]:
        """Every MoE layer of ours by name."""
        from vllm_moe_oracle.methods.base import OracleMoEMethod

        found = {}
        for name, module in self.model.named_modules():
            if isinstance(getattr(module, "quant_method", None), OracleMoEMethod):
                found[name] = module
        return found

    def generate(self) -> dict[str, Any]:
        """What the model says; a prompt's cache does not outlive the weights."""
        self.llm.reset_prefix_cache()
        return run_generate.say(self.llm, self.job["prompt"], self.job["tokens"])

    def reload(self, checkpoint: str) -> None:
        """vLLM's own way to new weights."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})

    def load(self, checkpoint: str) -> None:
        """New weights without vLLM's preparations."""
        tensors = load_file(Path(checkpoint, "model.safetensors"))
        self.model.load_weights((name, tensor) for name, tensor in tensors.items() if ".mlp.experts." in name)

    def process(self) -> None:
        """A second call for every layer."""
        for layer in self.layers().values():
            layer.quant_method.process_weights_after_loading(layer)

    def forget(self) -> None:
        """Bytes of another pattern in every parameter, in place, and in whatever else was made with the model: all but
        its buffers, which vLLM saves."""
        import torch

        from tests.lib import fake_layout

        saved = {each.data_ptr() for each in self.model.buffers()}
        held = [each for each in fake_layout.HELD if each.data_ptr() not in saved]
        for tensor in (*self.model.parameters(), *held):
            tensor.data.view(torch.uint8).fill_(0x3C)

    def half(self, checkpoint: str) -> None:
        """A reload in which the second layer's tensors turn out to be damaged."""
        tensors = load_file(Path(checkpoint, "model.safetensors"))
        damaged = next(name for name in tensors if ".layers.1." in name and ".experts.3.up_proj.weight_scale" in name)
        tensors[damaged].fill_(255)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(tensors.items())})

    def lack(self, checkpoint: str) -> None:
        """A reload in which a tensor of the second layer does not come."""
        tensors = load_file(Path(checkpoint, "model.safetensors"))
        tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight")
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(tensors.items())})

    def run(self, number: str) -> None:
        """A layer on one token; an engine that failed could not be used any more."""
        import torch

        layer = list(self.layers().values())[int(number)]
        ids = torch.zeros(1, layer.top_k, dtype=torch.int32)
        weights = torch.ones(1, layer.top_k)
        layer.quant_method.apply(layer, torch.ones(1, layer.moe_config.hidden_dim), weights, ids)


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One job; see the module."""
    from vllm.distributed import cleanup_dist_env_and_memory

    served = Served(job)
    results: list[dict[str, Any]] = []
    for name, *arguments in job["steps"]:
        result: dict[str, Any] = {}
        try:
            said = getattr(served, name)(*arguments)
            if said is not None:
                result["said"] = said
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
        parameters = {key: value for key, value in served.model.named_parameters() if ".mlp.experts" in key}
        result["addresses"] = {key: value.data_ptr() for key, value in parameters.items()}
        result["digests"] = run_generate.digests(served.model)
        result["states"] = [layer.moe_oracle_state for layer in served.layers().values()]
        results.append(result)
    del served
    gc.collect()
    cleanup_dist_env_and_memory()
    return results


if __name__ == "__main__":
    from tests.lib.fake_layout import Permuted
    from vllm_moe_oracle.oracle.registry import default_registry

    default_registry().add(Permuted(), "test")
    run_generate.main(run)
