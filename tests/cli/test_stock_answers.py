"""What is said of stock vLLM is one answer: the row, `why`, the gain and the exit status of `explain` never disagree,
and `tune` and `verify` say the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.cli import Run, Write
from tests.lib.configs import AUTO_ROUND, GPTQ, compressed, group, quantized
from tests.lib.releases import every_release
from vllm_moe_oracle.checkpoint.dtypes import dtype_refusal
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.ranks import Ranks
from vllm_moe_oracle.checkpoint.served_layers import Server, decide_layers
from vllm_moe_oracle.cli.commands import tune
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.measuring import verifying
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import NEWEST
from vllm_moe_oracle.settings import Settings

_FLOAT = {"type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "scale_dtype": "torch.uint8"}
_FP8_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_QUARK = {
    "quant_method": "quark", "layer_quant_config": {}, "layer_type_quant_config": {}, "exclude": ["lm_head"],
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
                   "is_dynamic": False, "ch_axis": -1},
        "input_tensors": None, "output_tensors": None, "bias": None,
    },
    "export": {"pack_method": "reorder"},
}  # fmt: skip
FORMATS: dict[str, Any] = {
    "mxfp8": quantized()["quantization_config"],
    "gptq": GPTQ,
    "gptq act order": GPTQ | {"desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "mxfp4 compressed-tensors": compressed(
        group(_FLOAT | {"num_bits": 4}) | {"format": "mxfp4-pack-quantized"}, format="mxfp4-pack-quantized"
    ),
    "mxfp4 compressed-tensors, activations in fp8": compressed(
        group(_FLOAT | {"num_bits": 4}, _FP8_TOKENS) | {"format": "mxfp4-pack-quantized"}, format="mxfp4-pack-quantized"
    ),
    "mxfp4 quark": _QUARK,
    "auto-round": AUTO_ROUND,
}
"""Quantization configs of a Qwen3-30B-A3B."""

DEVICES = ("nvidia-v100", "nvidia-t4", "nvidia-a100", "nvidia-h200", "nvidia-b200", "nvidia-rtx-5090", "cpu")
DEPLOYMENTS: tuple[tuple[Any, ...], ...] = (
    (), ("--lora",), ("--batch-invariant",), ("--lora", "--batch-invariant"), ("--tp", 2, "--ep", "--eplb"),
    ("--tp", 8), ("--tp", 16), ("--dp", 2, "--ep", "--all2all-backend", "deepep_low_latency"), ("--dtype", "float32"),
    ("--moe-backend", "cutlass"), ("--moe-backend", "b12x"), ("--moe-backend", "marlin", "--lora"),
    ("--moe-backend", "triton", "--set", "on_unavailable=fallback"), ("--set", "activations=16bit"),
)  # fmt: skip
"""16 ranks cut 768 features into 48, within a scale group. Stock vLLM alone has kernels named cutlass and b12x."""


SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {"activations": "16bit"}, {"activations": "mxfp8"}, {"backend": "marlin_mxfp8"},
    {"disable": ("marlin", "humming", "triton", "flashinfer_trtllm", "emulation")},
    {"disable": ("marlin", "humming", "emulation"), "on_unavailable": "fallback"},
)  # fmt: skip


def disagreements(status: int, found: dict[str, Any]) -> list[str]:
    """What a group's answers say against each other.

    Args:
        status: the exit status.
        found: the group as JSON.
    """
    stock, left, decision = found["stock_vllm"], found["left_to_stock"], found["decision"]
    runs = bool(stock and stock["stock_class"]) and "Emulation" not in stock["stock_class"]
    is_known = stock is not None
    wrong = {
        "the exit status": (status == 3) != (decision is None and left is None),
        "left, although stock is known not to run it": left is not None and is_known and not runs,
        "left to another class than the row's": runs and left not in (None, stock["stock_class"]),
        "left to nobody, although stock runs it": decision is None and left is None and runs,
        "a class and a refusal": is_known and bool(stock["stock_class"]) == bool(stock["refusal"]),
        "a gain over what cannot run": found["gain_over_stock"] is not None and is_known and bool(stock["refusal"]),
        "left, and not said": (left is not None) != (found["failure"] or "").startswith("left to stock vLLM"),
    }
    return [words for words, is_wrong in wrong.items() if is_wrong]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_", FORMATS)
@every_release
def test_answers_about_stock_agree(release: str, format_: str, device: str, run: Run, write: Write) -> None:
    path = write(quantization_config=FORMATS[format_])
    for options in DEPLOYMENTS:
        result = run("explain", path, "--device", device, "--vllm", release, *options, "--json")
        assert result.json["groups"]
        for found in result.json["groups"]:
            assert not disagreements(result.status, found), (options, found["failure"], found["stock_vllm"])


@pytest.mark.parametrize("device", ["nvidia-h200", "nvidia-b200"])
@pytest.mark.parametrize("options", [("--quantization", "mxfp8"), ("--quantization", "mxfp4")], ids=str)
def test_answers_agree_where_weights_are_quantized_while_they_load(
    options: tuple[str, str], device: str, run: Run, write: Write
) -> None:
    path = write(quantization_config=None)
    for more in DEPLOYMENTS:
        result = run("explain", path, "--device", device, *options, *more, "--json")
        for found in result.json["groups"]:
            assert not disagreements(result.status, found), (more, found["failure"], found["stock_vllm"])


def test_a_named_backend_changes_nothing_about_stock(run: Run, write: Write) -> None:
    """Nor does the precision of activations; `--moe-backend` is stock's own option."""
    asked = ("explain", write(), "--device", "nvidia-h200", "--json")
    plain = run(*asked).json["groups"][0]["stock_vllm"]
    assert plain["backend"] == "humming_mxfp8"
    for options in itertools.chain(
        (("--backend", name) for name in ("hopper_mxfp8", "hopper_mxfp8_w8a8", "hopper_mxfp8_w8a8_token")),
        [("--set", "activations=16bit"), ("--backend", "hopper_mxfp8_w8a8", "--set", "activations=16bit")],
    ):
        assert run(*asked, *options).json["groups"][0]["stock_vllm"] == plain, options
    shown = run("explain", write(), "--device", "nvidia-h200", "--moe-backend", "marlin").text
    assert f"stock vLLM not known for vLLM {NEWEST}: --moe-backend marlin chooses its kernel" in shown


@pytest.mark.parametrize("device", ["nvidia-t4", "nvidia-a100", "nvidia-b200", "cpu"])
def test_tune_and_verify_leave_the_same_layers_to_stock(device: str, write: Write) -> None:
    """Also layers in dtypes that vLLM refuses, which `tune` refuses before."""
    outcomes = set()
    gelu = {"model_type": "interns2_mobius", "hidden_act": "gelu", "swiglu_limit": 7.0}
    cases = [("auto", *case) for case in itertools.product(({}, gelu), SETTINGS)] + [("float32", gelu, {})]
    for format_, (dtype, fields, options) in itertools.product(FORMATS, cases):
        server = Server(catalog.known_device(device), Settings(**options), Ranks(), dtype=dtype)
        layers = server.find_layers(read_checkpoint(Path(write(quantization_config=FORMATS[format_], **fields))))
        layer, served = layers.problems[0], decide_layers(server, layers)[0]
        case = (format_, options, dtype, served.outcome.failure)
        is_left = bool(served.outcome.left_to_stock)
        verified = SimpleNamespace(
            device=server.device, settings=server.settings, layers=layers, registry=default_registry()
        )
        plan = verifying.Verification._plan(verified, layer)  # type: ignore[arg-type]
        assert (plan.is_stock, plan.decision is None) == (is_left, served.decision is None), case
        if dtype_refusal(layer, layers.method, server.device) is None and server.device.kind == "cuda":
            assert (tune._without_stocks({layer: layers.method}, server.device, server.settings) == []) == is_left, case
        outcomes.add((is_left, served.decision is None))
    assert (False, True) in outcomes and ((True, True) in outcomes) == (device != "cpu")
