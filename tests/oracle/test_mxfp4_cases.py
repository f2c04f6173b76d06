"""Situations that users of MXFP4 models hit, and what must happen in each."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.cases import GPT_OSS as HALVES
from tests.lib.cases import problem
from tests.lib.configs import CT_INPUTS, CT_MXFP8, GPTQ, INT4, PACKED, compressed, config, group
from tests.lib.releases import every_release, sources
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.moe_layers import find_moe_layers
from vllm_moe_oracle.checkpoint.ranks import Ranks
from vllm_moe_oracle.compat import ignored_env_vars
from vllm_moe_oracle.core.capabilities import Capabilities
from vllm_moe_oracle.core.decision import ShardPlan
from vllm_moe_oracle.core.problem import Activation, Device, Parallel, Problem, Routing, Scheme
from vllm_moe_oracle.core.sharding import shard_by_blocks
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide, evaluate_candidates
from vllm_moe_oracle.releases.supported import DEFAULT_PACKAGES, NEWEST
from vllm_moe_oracle.settings import Settings

PACKAGES = DEFAULT_PACKAGES["cuda"]
H200 = Device("cuda", "NVIDIA H200", 90, 132, 141.0, packages=PACKAGES)
B200 = Device("cuda", "NVIDIA B200", 100, 148, 180.0, packages=PACKAGES)


def gpt_oss(experts: int = 32, tp: int = 1, ep: int = 1, **changes: Any) -> Problem:
    """gpt-oss-20b's layer, or -120b's with 128 experts, as its method sees it on one rank."""
    made = problem(
        scheme=Scheme("mxfp4", 4, 32, "gpt_oss"), num_experts=experts, local_experts=-(-experts // ep), top_k=4,
        hidden_size=2880, intermediate_size=2880 // tp, activation=dataclasses.replace(HALVES, interleaved=True),
        has_bias=True, routing=Routing("renormalize"), parallel=Parallel(tp=tp, ep=ep), **changes,
    )  # fmt: skip
    return shard_by_blocks(made)


def limits(name: str) -> Capabilities:
    return default_registry()[name].capabilities


@pytest.mark.parametrize("device", [H200, B200])
def test_batch_invariance_needs_a_proven_backend(device: Device) -> None:
    """gpt-oss-120b with VLLM_BATCH_INVARIANT=1."""
    layer = gpt_oss(128, batch_invariant=True)
    for each in evaluate_candidates(layer, device, Settings()):
        proven = limits(each.backend).batch_invariant
        assert ("batch_invariant" in {reason.code for reason in each.reasons}) != proven, each
    try:
        decision = decide(layer, device, Settings())
    except NoBackendError as error:
        lines = [line for line in str(error).splitlines() if "batch invariance is requested and not supported" in line]
        assert lines and all(not each.accepted for each in error.candidates)
    else:
        assert limits(decision.backend).batch_invariant


@pytest.mark.parametrize("device", [H200, B200])
def test_lora_never_gets_a_kernel_that_does_not_know_it(device: Device) -> None:
    """gpt-oss-20b with LoRA: a kernel that routes itself asserts in its first forward."""
    layer = gpt_oss(lora=True)
    for each in evaluate_candidates(layer, device, Settings()):
        if not limits(each.backend).lora:
            assert any("LoRA on experts is requested" in str(reason) for reason in each.reasons), each
        else:
            assert not default_registry()[each.backend].monolithic


@pytest.mark.parametrize(
    ("variable", "instead"),
    [
        ("VLLM_MXFP4_USE_MARLIN", "--moe-backend marlin"),
        ("VLLM_FLASHINFER_MOE_BACKEND", "flashinfer_trtllm"),
        ("VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8", "flashinfer_trtllm"),
        ("VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS", "flashinfer_cutlass"),
        ("VLLM_USE_FLASHINFER_MOE_MXFP4_BF16", "flashinfer_trtllm or flashinfer_cutlass"),
    ],
)
def test_ignored_variables_of_vllm_are_named_once_with_a_substitute(
    variable: str, instead: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv(variable, "1")
    assert ignored_env_vars.warn_ignored(NEWEST) == [variable]
    (record,) = [each for each in caplog.records if variable in each.getMessage()]
    assert instead in record.getMessage()


@pytest.mark.parametrize("inner", [1056, 1376, 2048 - 32])
@pytest.mark.parametrize("device", [H200, B200])
def test_every_backend_pads_or_refuses_partial_tiles(device: Device, inner: int) -> None:
    """DeepSeek-V4's kind of layer with experts over 8 ranks."""
    layer = problem(
        scheme=Scheme("mxfp4", 4, 32, "mxfp4", activations="fp8"), num_experts=256, local_experts=32, top_k=6,
        hidden_size=4096, intermediate_size=inner, activation=Activation("silu", limit=10.0),
        routing=Routing("deepseekv4"), parallel=Parallel(ep=8),
    )  # fmt: skip
    accepted = [each.backend for each in evaluate_candidates(layer, device, Settings()) if each.accepted]
    assert len(accepted) > 1
    for name in accepted:
        backend = default_registry()[name]
        plan = backend.plan(layer, device)
        assert plan.intermediate_size >= inner and plan.intermediate_size % limits(name).intermediate_multiple == 0
        assert bool(plan.notes) == plan.pads(layer), name


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("device", [H200, B200])
def test_every_cut_of_2880_has_a_kernel(device: Device, tp: int) -> None:
    decision = decide(gpt_oss(tp=tp), device, Settings())
    assert decision.backend != "emulation"
    assert decision.problem.intermediate_size % 32 == 0
    assert decision.problem.unsharded_intermediate_size == 2880


@pytest.mark.parametrize(("experts", "ep", "left", "instead"), [(32, 6, 2, 4), (128, 12, 8, 8), (32, 3, 2, 2)])
def test_experts_that_gpt_osss_loader_would_lose_are_refused_with_numbers(
    experts: int, ep: int, left: int, instead: int
) -> None:
    """vLLM's map gives the first ranks one expert more, its loader of gpt-oss cuts into equal parts: what the second
    rank loads are other experts than it is asked for. Experts of other models come one by one."""
    with pytest.raises(NoBackendError) as caught:
        decide(gpt_oss(experts, ep=ep), H200, Settings())
    for each in caught.value.candidates:
        (reason,) = (reason for reason in each.reasons if reason.code == "expert_parallel.loader")
        assert (
            f"each of {ep} ranks {experts // ep} of {experts} experts, which leaves {left} without a rank"
            in reason.detail
        )
        assert f"over {instead} ranks" in reason.remedy
    others = dataclasses.replace(gpt_oss(experts, ep=ep), scheme=Scheme("mxfp4", 4, 32, "mxfp4"))
    assert decide(others, H200, Settings()).backend != "emulation"
    assert decide(gpt_oss(experts, ep=instead), H200, Settings()).backend != "emulation"


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "mxfp4"}, compressed(group(CT_MXFP8, CT_INPUTS)),
        compressed(group(INT4 | {"group_size": 32}), format=PACKED), GPTQ | {"group_size": 32},
    ],
    ids=["own", "MXFP8", "int4", "GPTQ"],
)  # fmt: skip
def test_gpt_osss_experts_are_refused_in_every_packing_before_they_load(quantization: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(config("gpt-oss-20b", quantization_config=quantization, num_attention_heads=60))
    )

    def of(ranks: int) -> Problem:
        return find_moe_layers(read_checkpoint(tmp_path), Ranks(ranks, ep=True)).problems[0]

    for each in evaluate_candidates(of(6), H200, Settings()):
        (reason,) = (reason for reason in each.reasons if reason.code == "expert_parallel.loader")
        assert "each of 6 ranks 5 of 32 experts, which leaves 2 without a rank" in reason.detail
        assert "over 4 ranks, or the same ranks without --enable-expert-parallel" in reason.remedy
    with pytest.raises(NoBackendError, match="which leaves 2 without a rank"):
        decide(of(6), H200, Settings(backend="emulation"))
    for each in evaluate_candidates(of(4), H200, Settings()):
        assert "expert_parallel.loader" not in {reason.code for reason in each.reasons}


@every_release
def test_gpt_osss_loader_cuts_experts_into_equal_parts(release: str) -> None:
    """What the refusals of the tests before say of every release; nothing else decides what a rank loads, of whatever
    packing. Experts that come one by one are what a server hands out while it runs, none that checkpoints have."""
    text = (sources(release) / "vllm/model_executor/models/gpt_oss.py").read_text()
    assert "experts_per_rank = num_experts // ep_size" in text
    assert "ep_rank_start = ep_rank * experts_per_rank" in text
    loaders = [node for node in ast.walk(ast.parse(text)) if getattr(node, "name", "").startswith("_load_weights_")]
    assert {"_load_weights_mxfp4", "_load_weights_other"} <= {node.name for node in loaders}  # type: ignore[attr-defined]
    for node in loaders:
        assert "[ep_rank_start:ep_rank_end" in ast.unparse(node)


def test_what_lies_between_ranks_is_as_wide_as_what_kernels_see() -> None:
    """gpt-oss's 2880 features with expert parallelism: a kernel that crops its own output between an all-to-all's two
    halves leaves them with 2880 and 3072."""
    pytest.importorskip("vllm", reason="adapters import vLLM")
    from vllm_moe_oracle.compat.adapter import Adapter
    from vllm_moe_oracle.compat.legacy_adapters import Vllm022Adapter

    plan = ShardPlan(3072, 2944)
    for adapter, in_config in ((Adapter, 2880), (Vllm022Adapter, 3072)):
        experts, moe = SimpleNamespace(hidden_dim_unpadded=2880), SimpleNamespace(hidden_dim_unpadded=2880)
        adapter.keep_padded_output(adapter.__new__(adapter), experts, moe, plan)
        assert (experts.hidden_dim_unpadded, moe.hidden_dim_unpadded) == (3072, in_config)
        other = SimpleNamespace()
        adapter.keep_padded_output(adapter.__new__(adapter), other, moe, plan)
        assert vars(other) == {}


def test_an_explicit_backend_of_another_card_is_an_error_before_weights() -> None:
    with pytest.raises(NoBackendError, match="sm_100 to below sm_110") as caught:
        decide(gpt_oss(), H200, Settings(), "flashinfer_trtllm")
    assert "--moe-backend flashinfer_trtllm" in str(caught.value)


def test_a_name_of_four_backends_gets_each_reason_once_with_its_owner() -> None:
    with pytest.raises(NoBackendError) as caught:
        decide(gpt_oss(), H200, Settings(), "flashinfer_trtllm")
    said = str(caught.value).splitlines()[0]
    assert said.count("needs compute capability sm_100 to below sm_110") == 1
    assert "trtllm_mxfp4_a8_monolithic, trtllm_mxfp4_a8: would quantize activations to mxfp8" in said
