"""Digests of what the kernels compile to: ``python -m tests.tools.kernel_digests OUT.json``.

For every shipped configuration, the heuristic's, and variants in float16, with zero points, expert maps and MXFP8
activations, it hashes what Triton's later passes read: the IR after calls were inlined, without symbol names and
locations, and the compile options. It also hashes what decides how many variants a server compiles: the constants and
the arguments whose values are not specialized. A statement that moves to a function of its own changes no digest.

The configurations chosen and suggested for each layer are hashed too. Equal digests, made by one version of the tool
under one Triton version, mean equal machine code and equal choices, so `tests.tools.restamp_profiles` may renew the
profiles' fingerprint.

Needs no GPU. To compare with another commit, copy this file into a worktree of that commit and run it there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import Language
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from tests.lib.kernel_launches import LAYERS, MEASURED, TARGET, Launch, fp8_launches, launches, specialize
from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels import heuristic, launch_config
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
CHOICES = (*range(1, 130), *TOKENS[8:], 700, 1500, 3000, 9000)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_names(text: str) -> str:
    """IR with symbols numbered in the order of their appearance."""
    numbers: dict[str, int] = {}
    return re.sub(r'@"[^"]*"|@[\w.$]+', lambda found: f"@{numbers.setdefault(found[0], len(numbers))}", text)


class Digests:
    """Hashes of launches; equal launches are compiled once."""

    def __init__(self) -> None:
        self._backend = make_backend(TARGET)
        self._known: dict[Any, str] = {}

    def of(self, launch: Launch) -> str:
        """Hash of one launch."""
        source, options = specialize(launch)
        kernel = launch[0]
        # Pointers that are left out are no arguments of what is compiled.
        absent = {index for (index, *_), value in source.constants.items() if value is None}
        specialization = (
            sorted((index, repr(value)) for index, value in source.constants.items() if value is not None),
            sorted(source.attrs.items()),
            [
                (each.do_not_specialize, each.do_not_specialize_on_alignment)
                for index, each in enumerate(kernel.params)
                if index not in absent
            ],
            sorted(options.items()),
        )
        key = (kernel.fn.__module__, kernel.__name__, tuple(source.signature.values()), repr(specialization))
        if key not in self._known:
            self._known[key] = sha(without_names(self._inlined_ir(source, options)) + repr(specialization))
        return self._known[key]

    def _inlined_ir(self, source: ASTSource, options: dict[str, Any]) -> str:
        """The IR after the first stage with passes, which begin with the inliner."""
        parsed = self._backend.parse_options(dict(options))
        context = ir.context()
        ir.load_dialects(context)
        self._backend.load_dialects(context)
        functions, modules = self._backend.get_codegen_implementation(parsed), self._backend.get_module_map()
        made = source.make_ir(TARGET, parsed, functions, modules, context)
        stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
        self._backend.add_stages(stages, parsed, source.language)
        text: str = stages["ttgir" if source.language == Language.GLUON else "ttir"](made, {}).str_nodebug()
        assert " call @" not in text and "tt.call" not in text, "a call was not inlined"
        return text

    def __len__(self) -> int:
        return len(self._known)


def text_of(config: LaunchConfig | PrefillConfig) -> str:
    return type(config).__name__ + json.dumps(config.to_json(), sort_keys=True)


def layer_weights(layer: str, **extra: Any) -> PackedWeights:
    format, group, hidden, inner, experts, _, activation, bias = (LAYERS | MEASURED)[layer]
    return allocate_weights(format, experts, hidden, inner, gated=activation != "relu2", group=group, bias=bias,
                            device="meta", **extra)  # fmt: skip


def calls() -> dict[str, list[Launch]]:
    """Launches by a name of the call, for every configuration that is shipped or that the heuristic makes."""
    found: dict[str, list[Launch]] = {}
    for layer, shape in (LAYERS | MEASURED).items():
        weights, top_k = layer_weights(layer), shape[5]
        for tokens in TOKENS:
            for config in {
                configs.choose_launch_config(weights, top_k, tokens): None,
                **({heuristic.heuristic_config(weights, top_k, tokens): None} if layer in LAYERS else {}),
            }:
                key = f"{layer}: {text_of(config)}"
                if key not in found:
                    found[key] = launches(layer, min(tokens, 2048), config)
    for layer, shape in LAYERS.items():
        found |= _variants(layer, shape[0].startswith("int"), shape[5])
    for hidden, inner, activation, bias, dtype in (
        (2880, 2880, "swigluoai", True, torch.bfloat16),
        (544, 96, "silu", False, torch.float16),
        (544, 96, "gelu", False, torch.float16),
        (544, 96, "gelu_tanh", False, torch.float16),
        (544, 96, "relu2", False, torch.bfloat16),
    ):
        found[f"fp8 {activation} {dtype}"] = fp8_launches(hidden, inner, activation, bias, dtype)
        if dtype == torch.bfloat16 and activation != "relu2":
            found[f"fp8 {activation} mxfp4"] = fp8_launches(hidden, inner, activation, bias, format="mxfp4")
    return found


def _variants(layer: str, integers: bool, top_k: int) -> dict[str, list[Launch]]:
    """A layer's launches in other dtypes, with zero points, expert maps and MXFP8 activations."""
    found = {f"{layer}: invariant": launches(layer, 64, launch_config.BATCH_INVARIANT_CONFIG)}
    for tokens in (1, 64):
        half = layer_weights(layer, dtype=torch.float16, zero_points=integers)
        config = heuristic.heuristic_config(half, top_k, tokens)
        found[f"{layer}: float16, {tokens}"] = launches(
            layer, tokens, config, dtype=torch.float16, zero_points=integers
        )
        if integers:
            found[f"{layer}: zero points, {tokens}"] = launches(layer, tokens, config, zero_points=True)
    if layer in ("qwen-mxfp8", "nemotron", "glm"):
        for tokens in (2, 64):
            config = configs.choose_launch_config(layer_weights(layer), top_k, tokens, quantize=True)
            found[f"{layer}: quantized, {tokens}"] = launches(layer, tokens, config, quantize_activations=True)
    tile = TileConfig(16, 64, 128, split_k=2)
    split = LaunchConfig(tile, tile, per_slot=True, fuse_sum=True, prefetch=True)
    mapped = {"expert_map": torch.arange(4, dtype=torch.int32), "apply_router_weight_on_input": True}
    found[f"{layer}: split, map"] = launches(layer, 2, split, **mapped)
    found[f"{layer}: prefill"] = launches(layer, 256, PrefillConfig())
    found[f"{layer}: prefill, map"] = launches(layer, 256, PrefillConfig(), **mapped)
    return found


def choices() -> dict[str, str]:
    """Hashes of what runs, and of what is suggested for timing, by layer and number of tokens."""
    found = {}
    for layer, shape in (LAYERS | MEASURED).items():
        weights, top_k = layer_weights(layer), shape[5]
        for tokens in CHOICES:
            chosen = [heuristic.heuristic_config(weights, top_k, tokens)]
            for quantize in (False, True):
                chosen.append(configs.choose_config(weights, top_k, tokens, quantize=quantize))
                chosen += configs.candidate_configs(weights, top_k, tokens, 6, quantize=quantize)
            found[f"{layer}: {tokens}"] = sha("".join(map(text_of, chosen)))
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    digests = Digests()
    compiled = {name: [digests.of(launch) for launch in each] for name, each in calls().items()}
    tool = sha(Path(__file__).read_text())
    made = {"tool": tool, "triton": triton.__version__, "compiled": compiled, "choices": choices()}
    args.out.write_text(json.dumps(made, indent=0, sort_keys=True) + "\n")
    print(f"{len(compiled)} calls, {len(digests)} kernels, {len(made['choices'])} choices")


if __name__ == "__main__":
    main()
