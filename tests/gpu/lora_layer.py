"""A layer of experts with LoRA adapters, through vLLM's own LoRA layer, against float32 with merged weights.

    python -m tests.gpu.lora_layer --scheme mxfp4 --layer tiny_oai --backend emulation --device cpu

On a GPU the adapters run in vLLM's kernels, on a CPU, where vLLM has none, in `TorchPunica`.

Tolerance: a rounding to p bits has a root mean square of at most UNIT = 2**(1 - p) / sqrt(12). A layer rounds weights,
h, each slot's row and the sum: `tests.gpu.test_kernels` counts four. For each of the layer's two products an adapter
rounds the factor between its own products, and its result. The output is rounded once more. Nine independent roundings
are 3 UNIT, and half a UNIT is left for float32 sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch

from tests.gpu import backend_table
from tests.gpu.backend_table import Built, Call, Case, Checkpoint, Table
from tests.lib.lora_experts import RANK, AdaptedLayer, TorchPunica, random_adapter

LIMIT = 3.5 * torch.finfo(torch.bfloat16).eps / 12**0.5
ADAPTERS = 2
ZERO = ADAPTERS
"""The adapter that is all zeros: one that vLLM has enabled and that adds nothing."""


def lora_config() -> Any:
    """vLLM's config for the adapters."""
    from vllm.config.lora import LoRAConfig

    return LoRAConfig(max_lora_rank=2 * RANK, max_loras=ADAPTERS + 1, lora_dtype=torch.bfloat16)


def punica_wrapper(device: str, config: Any, tokens: int) -> Any:
    """vLLM's LoRA kernels on a GPU, or torch's."""
    if device == "cpu":
        return TorchPunica()
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    return PunicaWrapperGPU(tokens, tokens, torch.device(device), lora_config=config)


class Layer:
    """A case's layer, converted, and its adapters.

    Args:
        table: of the scheme.
        case: the layer.
        device: ``cuda`` or ``cpu``.
        own: the plugin's backend.
        tokens: most tokens of a call.
        of_both: adapters have gate and up in one tensor.
    """

    def __init__(self, table: Table, case: Case, device: str, own: str, tokens: int, of_both: bool = False) -> None:
        self.case, self.device, self.checkpoint = case, device, table.checkpoint(case, device)
        config = lora_config()
        self.built: Built = backend_table.build(table, case, self.checkpoint, device, "auto", own, config)
        self.method = self.built.method
        assert self.method.decision.backend == own and self.method.decision.problem.lora
        self.built.convert()
        sizes = {which: float(self.checkpoint.matrix(which, 0).std()) / 2 for which in ("w13", "w2")}
        self.adapters = [
            random_adapter(case.experts, case.hidden, case.inner, case.gated, torch.bfloat16, sizes, seed)
            for seed in range(ADAPTERS)
        ]
        self.adapters = [each.map(lambda tensor: tensor.to(device)) for each in self.adapters]
        self.adapters.append(self.adapters[0].map(torch.zeros_like))
        self._config, self._of_both, self._tokens = config, of_both, tokens
        self.adapted: AdaptedLayer | None = None

    def wrap(self) -> None:
        """Puts vLLM's LoRA layer around it, as vLLM does once a model is loaded."""
        wrapper = punica_wrapper(self.device, self._config, self._tokens)
        self.adapted = AdaptedLayer(self.built.runner, self.adapters, self._config, wrapper, self._of_both)

    def __call__(self, call: Call, adapters: Sequence[int], places: torch.Tensor | None = None) -> torch.Tensor:
        """Runs it on tokens with these adapters; places: an expert map."""
        assert self.adapted is not None
        self.adapted.choose(adapters)
        return self.built(*call) if places is None else self.spread(call, places)

    def spread(self, call: Call, places: torch.Tensor) -> torch.Tensor:
        """Runs it as on a rank where each expert has another place, or none."""
        from vllm.forward_context import set_forward_context

        seen = backend_table._Spread(self.built.layer, places)
        with set_forward_context(None, self.built.config, num_tokens=call[0].shape[0]):
            return self.method.adapter.apply(self.method.moe_kernel, seen, *call, {})

    def reference(self, call: Call, adapters: Sequence[int]) -> torch.Tensor:
        """The same in float32, each token with its adapter merged into the weights; ids are places."""
        out = torch.zeros(call[0].shape, dtype=torch.float32, device=self.device)
        chosen = torch.tensor(adapters, device=self.device)
        for adapter in set(adapters):
            tokens = chosen == adapter
            x, weights, ids = (each[tokens] for each in call)
            out[tokens] = backend_table.reference(self.case, self._merged(adapter), [(x, weights, ids)])[0]
        return out

    def _merged(self, adapter: int) -> Checkpoint:
        if adapter < 0:
            return self.checkpoint
        one, case, plain = self.adapters[adapter], self.case, self.checkpoint

        def matrix(which: str, expert: int) -> torch.Tensor:
            return one.merged(which, expert, plain.matrix(which, expert), case.interleaved)

        return dataclasses.replace(plain, matrix=matrix)


def check(table: Table, case: Case, device: str, own: str, tokens: Sequence[int], of_both: bool = False,
          graph: bool = False) -> dict[str, float]:  # fmt: skip
    """Asserts what holds of a layer with adapters, for calls of some numbers of tokens.

    Returns:
        The largest relative L2 error without adapters, with them, with an expert map, and of a wrong adapter.
    """
    layer = Layer(table, case, device, own, max(tokens), of_both)
    calls = {count: backend_table.inputs(case, count, device) for count in tokens}
    plain = {count: layer.built(*call) for count, call in calls.items()}
    layer.wrap()
    errors = dict.fromkeys(("plain", "adapters", "expert map", "wrong adapter"), 0.0)
    for count, call in calls.items():
        mixed = [(index + 1) % 3 - 1 for index in range(count)] if count > 1 else [1]
        none = torch.tensor([each < 0 for each in mixed], device=device)
        found = layer(call, mixed)
        # The same bits without adapters, with one of zeros, and of tokens without an adapter beside others.
        assert torch.equal(layer(call, [-1] * count), plain[count]), count
        assert torch.equal(layer(call, [ZERO] * count), plain[count]), count
        assert torch.equal(found[none], plain[count][none]), count
        assert torch.equal(layer(call, mixed), found), count
        wanted = layer.reference(call, mixed)
        errors["plain"] = max(errors["plain"], error(plain[count], layer.reference(call, [-1] * count)))
        errors["adapters"] = max(errors["adapters"], error(found, wanted))
        swapped = [1 - each if each >= 0 else each for each in mixed]
        errors["wrong adapter"] = max(errors["wrong adapter"], error(layer(call, swapped), wanted))
        if case.ep == 1:
            places = backend_table.spread_places(case, device)
            x, weights, ids = call
            moved = x, weights, places[ids.long()]
            got = layer(call, mixed, places)
            errors["expert map"] = max(errors["expert map"], error(got, layer.reference(moved, mixed)))
    if graph:
        _check_graph(layer, max(tokens))
    layer.built.close()
    assert max(errors["plain"], errors["adapters"], errors["expert map"]) <= LIMIT, errors
    assert errors["wrong adapter"] > 10 * LIMIT, errors
    return errors


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance."""
    return backend_table.relative_error(actual, expected)


def _check_graph(layer: Layer, tokens: int) -> None:
    """A captured call with adapters does on other inputs, and for other adapters, what a call does."""
    assert layer.adapted is not None
    first, other = ([(index + shift) % 3 - 1 for index in range(tokens)] for shift in (0, 1))
    static = backend_table.inputs(layer.case, tokens, "cuda", seed=1)
    call = backend_table.inputs(layer.case, tokens, "cuda", seed=2)
    layer.adapted.choose(first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer.built(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = layer.built(*static)
    for target, source in zip(static, call, strict=True):
        target.copy_(source)
    layer.adapted.choose(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, layer(call, other))


def main() -> None:
    """See the module."""
    from vllm_moe_oracle import plugin
    from vllm_moe_oracle.core import lora

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", required=True)
    parser.add_argument("--layer", nargs="+", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--of-both", action="store_true")
    args = parser.parse_args()
    if args.device == "cpu":  # the rule is about vLLM's kernels, which `TorchPunica` replaces
        lora.LORA_RULES = tuple(rule for rule in lora.LORA_RULES if rule.code != "lora.device")
    table = backend_table.table_of(args.scheme)
    backend_table.join_alone(args.device)
    plugin.register()
    for name in args.layer:
        errors = check(table, table.cases[name], args.device, args.backend, args.tokens, args.of_both)
        print(json.dumps({"layer": name, **errors}), flush=True)
    backend_table.leave()


if __name__ == "__main__":
    main()
