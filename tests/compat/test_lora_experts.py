"""LoRA on experts over functions, in vLLM's own LoRA layer, on a CPU: the emulation, with vLLM's LoRA kernels in torch.

`tests/gpu/lora_layer.py` says what is compared; `tests/gpu/test_lora_experts.py` runs it with Hopper's kernels.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_moe_oracle.releases.supported import NEWEST

pytest.importorskip("vllm", reason="its LoRA layers are used")

from tests.lib import forked
from tests.lib.tiers import sampled
from vllm_moe_oracle.errors import BackendDefect

LAYERS = {
    "mxfp8": ["tiny_silu", "tiny_swigluoai"],
    "mxfp4": ["tiny_oai", "tiny_silu"],
    "wna16": ["tiny_g32", "tiny_int8_zeros", "tiny_bias", "tiny_act_order"],
}
PROGRAM = """
import sys
from tests.gpu import lora_layer
{before}
sys.argv = ["lora_layer", "--device", "cpu", "--backend", "emulation", *{arguments!r}]
lora_layer.main()
"""
ORDER_LOST = (
    "from vllm_moe_oracle.compat import lora_experts; lora_experts._CallAdapters._alternates = lambda self: False"
)
WEIGHTS_LOST = (
    "from vllm_moe_oracle.compat import lora_experts; lora_experts._CallAdapters.add_down = lambda self, out, h: None"
)


def run(*arguments: str, before: str = "") -> Any:
    environment = os.environ | {"MOE_ORACLE_ACTIVATIONS": "16bit"}
    return forked.python(PROGRAM.format(before=before, arguments=list(arguments)), environment)


@pytest.mark.parametrize("scheme", sampled(LAYERS, 3))
def test_adapters_do_what_merged_weights_do(scheme: str) -> None:
    """Biases, alpha and limit, rows that alternate, act order, an expert map; two adapters and none in one batch."""
    found = run("--scheme", scheme, "--layer", *LAYERS[scheme])
    assert found.returncode == 0, found.stderr[-2000:]
    rows = [json.loads(line) for line in found.stdout.splitlines() if line.startswith('{"layer"')]
    assert [each["layer"] for each in rows] == LAYERS[scheme]


def test_an_adapter_of_gate_and_up_in_one_tensor() -> None:
    """As gpt-oss's adapters are: its rows alternate as the checkpoint's do."""
    found = run("--scheme", "mxfp4", "--layer", "tiny_oai", "--of-both")
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.parametrize("fault", [ORDER_LOST, WEIGHTS_LOST], ids=["order of rows", "second product"])
def test_a_fault_is_found(fault: str) -> None:
    found = run("--scheme", "mxfp4", "--layer", "tiny_oai", before=fault)
    assert found.returncode and "AssertionError" in found.stderr


@pytest.mark.parametrize(
    ("alternating", "slices", "release", "expected"),
    [
        (True, 2, NEWEST, True), (True, 2, "0.32.0", True), (True, 2, "0.31.0", False), (True, 1, "0.31.0", True),
        (True, 1, NEWEST, True), (False, 2, NEWEST, False), (False, 1, NEWEST, False),
    ],
)  # fmt: skip
def test_the_order_in_which_vllm_leaves_gate_and_up(
    alternating: bool, slices: int, release: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.32 vLLM's mixin writes two halves whatever the layer's order."""
    import vllm

    from vllm_moe_oracle.compat import lora_experts

    monkeypatch.setattr(vllm, "__version__", release)
    call = object.__new__(lora_experts._CallAdapters)
    call._context = SimpleNamespace(w13_num_slices=slices)
    interleaves = alternating and lora_experts._mixin_interleaves()
    call._experts = SimpleNamespace(alternating=alternating, mixin_interleaves=interleaves)
    assert call._alternates() is expected


def test_a_function_without_adapters_is_refused_when_it_is_built() -> None:
    """A third party's backend whose capabilities include lora; a server would end at its first batch with adapters."""
    from vllm_moe_oracle.compat import current_adapter

    def run(out: Any, x: Any, topk_weights: Any, topk_ids: Any, expert_map: Any) -> None: ...

    with pytest.raises(BackendDefect, match=r"include lora, .* takes no adapters. Give the function a keyword"):
        current_adapter().function_experts(SimpleNamespace(is_lora_enabled=True), None, run)
