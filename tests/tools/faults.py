"""Injects faults into a copy of the tree, one at a time, and says which test catches each.

    python -m tests.tools.faults [--write] [--jobs N]

A fault is a textual edit of the product: the kind of mistake that gives wrong numbers, or ignores what the user asked
for, and raises nothing. The tests that concern it are run in the default tier first, and in the longer tiers if that
passes. ``--write`` puts the table into tests/README.md.

Exit status: 0 every fault is caught, 1 one is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.lib import readme_sections
from tests.lib.readme_sections import markdown_table
from tests.lib.tree_copies import ROOT, TreeCopy

README = ROOT / "tests" / "README.md"
PACKAGE = "vllm_moe_oracle"


@dataclass(frozen=True)
class Fault:
    """A wrong edit.

    Attributes:
        area: what it is a fault of.
        what: the fault, in a phrase.
        file: the file below the package.
        old: a text that the file has once.
        new: what it becomes.
        tests: the file of tests that concern it.
    """

    area: str
    what: str
    file: str
    old: str
    new: str
    tests: str


@dataclass(frozen=True)
class Caught:
    """The first test that fails with a fault; `tier` is "" where none does."""

    test: str
    tier: str


_EMULATION = "tests/backends/test_emulation.py"

FAULTS = (
    Fault(
        "layouts", "gate and up are not exchanged for kernels that want up first", "layouts/gate_up.py",
        ".flip(0).reshape(w13.shape)", ".reshape(w13.shape)", "tests/layouts/test_scales.py",
    ),
    Fault(
        "layouts", "gate and up rows alternate in sixteens, not in eights", "layouts/wgmma_fragments.py",
        "_GATE_UP_PERIOD = 8", "_GATE_UP_PERIOD = 16", "tests/layouts/test_wgmma_fragments.py",
    ),
    Fault(
        "layouts", "the high nibble comes first", "layouts/nibbles.py",
        "torch.stack((packed & 15, packed >> 4), dim=-1)", "torch.stack((packed >> 4, packed & 15), dim=-1)",
        "tests/schemes/test_wna16_scheme.py",
    ),
    Fault(
        "layouts", "a gated w13 is padded below up, not below gate and below up", "layouts/padding.py",
        "_pad(_halves(tensor, halves), 1, rows, value).flatten(0, 1)", "_pad(tensor, 0, halves * rows, value)",
        "tests/layouts/test_padding.py",
    ),
    Fault(
        "scales", "e8m0 exponents are one too large", "schemes/_mx.py",
        "- largest_exponent + E8M0_BIAS", "- largest_exponent + E8M0_BIAS + 1",
        "tests/schemes/test_mxfp8_scheme.py",
    ),
    Fault(
        "scales", "group scales keep the order of the rows", "layouts/scales.py",
        "return split.transpose(-1, -2).reshape(groups, rows).view(scales.dtype)",
        "return split.reshape(groups, rows).view(scales.dtype)", "tests/layouts/test_scales.py",
    ),
    Fault(
        "scales", "GPTQ's zero points are read as stored, not plus one", "schemes/_packings.py",
        '"gptq": Packing(*_GPTQ, torch.int32, "K", ("k_first",), off_by_one=True)',
        '"gptq": Packing(*_GPTQ, torch.int32, "K", ("k_first",))', "tests/schemes/test_wna16_packings.py",
    ),
    Fault(
        "biases", "the first product's bias is dropped", "backends/emulation.py",
        'if "w13_bias" in expert:', "if False:", _EMULATION,
    ),
    Fault(
        "biases", "the second product's bias is dropped", "backends/emulation.py",
        'if "w2_bias" in expert:', "if False:", _EMULATION,
    ),
    Fault(
        "biases", "a backend that drops biases gets layers with biases", "core/capabilities.py",
        "if problem.has_bias and not capabilities.bias:", "if False:", "tests/core/test_capabilities.py",
    ),
    Fault(
        "activations", "alpha is ignored", "core/activations.py",
        "spec.alpha if activation.alpha is None else activation.alpha,\n        spec.beta",
        "spec.alpha,\n        spec.beta", "tests/core/test_activations.py",
    ),
    Fault(
        "activations", "beta is ignored", "core/activations.py",
        "spec.beta if activation.beta is None else activation.beta,\n    )", "spec.beta,\n    )", _EMULATION,
    ),
    Fault(
        "activations", "the limit is not passed to vLLM's kernels", "compat/adapter.py",
        "gemm1_clamp_limit=activation.limit", "gemm1_clamp_limit=None", "tests/backends/test_mxfp8_built.py",
    ),
    Fault(
        "routing", "the router's weight is ignored on the input", "backends/emulation.py",
        "inputs = inputs * weight.to(x.dtype)", "inputs = inputs * 1", _EMULATION,
    ),
    Fault(
        "routing", "the router's weight is ignored on the output", "backends/emulation.py",
        "result *= weight", "result *= 1", _EMULATION,
    ),
    Fault(
        "routing", "a slot without an expert is read as the first expert's", "backends/emulation.py",
        ".masked_fill(ids < 0, -1)", "", _EMULATION,
    ),
    Fault(
        "routing", "DeepSeek-V3's weights are not renormalized", "verification/routing.py",
        '"deepseekv3": RoutingReference(_sigmoid, renormalize=True,', '"deepseekv3": RoutingReference(_sigmoid,',
        "tests/verification/test_routing.py",
    ),
    Fault(
        "loading", "a reload leaves biases that no file has as the memory was", "methods/base.py",
        "weight_loading.fill_unloaded(parameters.values())", "pass", "tests/methods/test_wna16_methods.py",
    ),
    Fault(
        "loading", "a reload of a stock layer leaves padding as the memory was", "methods/weight_loading.py",
        "parameter.weight_loader = filling_loader(parameter.weight_loader)", "pass",
        "tests/methods/test_unsupported_features.py",
    ),
    Fault(
        "loading", "biases that a model has and a file lacks are zeros", "schemes/_mx.py",
        ', "w13_bias": 0xFF, "w2_bias": 0xFF}', "}", "tests/methods/test_damaged_weights.py",
    ),
    Fault(
        "loading", "NaN that a file holds is taken for a tensor that it lacks", "methods/weight_loading.py",
        'each in ("", shard) and (', "False and (", "tests/methods/test_unloaded_weights.py",
    ),
    Fault(
        "loading", "NaN in a router's correction bias is served", "methods/correction_bias.py",
        "if was_loaded:", "if False:", "tests/methods/test_correction_bias.py",
    ),
    Fault(
        "checks", "small numbers of tokens are left out", "verification/inputs.py",
        "(1, 64, 2, 32, 4, 48, 3, 24,", "(1, 64, 2, 32, 4, 48, 24,", "tests/verification/test_blind_spots.py",
    ),
    Fault(
        "checks", "no token has equal routing weights", "verification/inputs.py",
        "weights.masked_fill(token == _EVEN_TOKEN, 1.0)", "weights", "tests/verification/test_unlisted_faults.py",
    ),
    Fault(
        "checks", "no expert gets whole blocks of 128 rows", "verification/inputs.py",
        "WHOLE_BLOCKS = 128", "WHOLE_BLOCKS = 65", "tests/verification/test_unlisted_faults.py",
    ),
    Fault(
        "checks", "no logit is large", "verification/routing.py",
        "* 2.0 + shift)", "* 2.0)", "tests/verification/test_routing.py",
    ),
    Fault(
        "checks", "settings of torch that a kernel changes are not compared", "verification/self_check.py",
        "[] if poisoned else changed", "[]", "tests/verification/test_blind_spots.py",
    ),
    Fault(
        "checks", "nothing lies beside workspaces", "compat/kernel_memory.py",
        "each for name in _ALLOCATED if", "each for name in _ALLOCATED[2:] if",
        "tests/verification/test_written_memory.py",
    ),
    Fault(
        "checks", "nothing lies beside the expert map", "verification/self_check.py",
        "(self._guards.around({name: each})[name], each)", "(each.clone(), each)",
        "tests/verification/test_written_memory.py",
    ),
    Fault(
        "checks", "what a kernel changes in the expert map is not compared", "verification/self_check.py",
        "(_bits(now) != _bits(before)).any()", "(_bits(now) != _bits(now)).any()",
        "tests/verification/test_absent_experts.py",
    ),
    Fault(
        "checks", "what a kernel changes in its own weights is not compared", "verification/self_check.py",
        "(_checksums(self._held) != self._sums)", "(self._sums != self._sums)",
        "tests/verification/test_written_memory.py",
    ),
    Fault(
        "registries", "the registry forgets a backend", "oracle/registry.py",
        'module_info.name.startswith("_")', 'module_info.name.startswith(("_", "marlin_mxfp8"))',
        "tests/oracle/test_registry.py",
    ),
    Fault(
        "registries", "the registry asks no entry point", "oracle/registry.py",
        "registry.add_entry_points(points, skipped)", "pass", "tests/oracle/test_registry.py",
    ),
    Fault(
        "settings", "`disable` is ignored", "oracle/selection.py",
        "if disabled_as:", "if False:", "tests/oracle/test_selection.py",
    ),
    Fault(
        "settings", "per-layer overrides are ignored", "oracle/selection.py",
        "first_match(settings.overrides, problem.layer,", "first_match((), problem.layer,",
        "tests/oracle/test_selection.py",
    ),
    Fault(
        "settings", "`--additional-config` is ignored", "settings.py",
        "in _plugin_section(additional_config).items()", "in _plugin_section(None).items()",
        "tests/core/test_settings.py",
    ),
)  # fmt: skip


def catch(fault: Fault, tree: TreeCopy) -> Caught:
    """Injects one fault into a copy, runs the tests that concern it, and takes the fault back.

    Raises:
        ValueError: the file does not have the text once: the fault is out of date.
    """
    tree.edit(f"{PACKAGE}/{fault.file}", fault.old, fault.new)
    try:
        for tier, arguments in (("default", ()), ("full", ("-m", "(full or slow) and not gpu and not matrix"))):
            run = tree.test(fault.tests, *arguments)
            if run.failure:
                return Caught(run.failure.partition("[")[0], tier)
    finally:
        tree.restore()
    return Caught("", "")


def table(caught: dict[Fault, Caught]) -> str:
    """The table of tests/README.md."""
    rows = ([fault.area, fault.what, f"`{by.test}`", by.tier] for fault, by in caught.items())
    return markdown_table(["area", "fault", "caught by", "tier"], rows)


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.faults", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true", help="put the table into tests/README.md")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    chosen = parser.parse_args(arguments)
    caught = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(chosen.jobs) as pool:
        copies: SimpleQueue[TreeCopy] = SimpleQueue()
        for number in range(chosen.jobs):
            copies.put(TreeCopy(Path(tempfile.mkdtemp(prefix=f"{number}.", dir=folder))))

        def catch_in_a_copy(fault: Fault) -> Caught:
            tree = copies.get()
            try:
                return catch(fault, tree)
            finally:
                copies.put(tree)

        for fault, by in zip(FAULTS, pool.map(catch_in_a_copy, FAULTS), strict=True):
            caught[fault] = by
            print(f"{by.tier or 'NOT CAUGHT':10} {fault.area}: {fault.what}: {by.test}", flush=True)
    whole = all(by.tier for by in caught.values())
    if chosen.write and whole:
        page = README.read_text(encoding="utf-8")
        README.write_text(readme_sections.with_part(page, "faults", table(caught)), encoding="utf-8")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
