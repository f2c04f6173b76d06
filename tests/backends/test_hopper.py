"""The backends over this project's kernels: when they are chosen, and what the kernels are given.

That their storage holds the weights is in `test_padding_is_harmless.py`. The kernels' numbers are tested on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.lib.cases import GPT_OSS, H200, INT4_G128, MXFP8, SILU, problem
from tests.lib.faulty_backends import MXFP4
from tests.lib.function_recorder import FunctionRecorder
from tests.lib.stock_rules import converted, experts
from vllm_moe_oracle.backends import _hopper_warmup
from vllm_moe_oracle.backends.hopper_mxfp8 import BACKEND
from vllm_moe_oracle.backends.hopper_mxfp8_w8a8 import BACKEND as W8A8
from vllm_moe_oracle.core.problem import Parallel
from vllm_moe_oracle.errors import NoBackendError
from vllm_moe_oracle.kernels.config import choose_config
from vllm_moe_oracle.kernels.launch_config import LaunchConfig
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.settings import load

GATED = problem(experts=3, top_k=2, hidden_size=160, intermediate_size=96, activation=SILU)
BIASED = problem(experts=2, top_k=2, hidden_size=128, intermediate_size=192, activation=GPT_OSS, has_bias=True)


def test_without_measurements_they_are_taken_only_by_name() -> None:
    layer = problem()
    assert decide(layer, H200, load({})).backend != BACKEND.name
    assert decide(layer, H200, load({"MOE_ORACLE_BACKEND": "hopper_mxfp8"})).backend == "hopper_mxfp8"


def test_tokens_sorted_by_expert_come_to_them_where_vllm_has_no_kernels() -> None:
    parallel = Parallel(ep=2, dp=2, format="batched")
    layer = dataclasses.replace(problem(experts=4, top_k=2), parallel=parallel, local_experts=2)
    assert decide(layer, H200, load({})).backend == "hopper_mxfp8"
    declared = dataclasses.replace(layer, scheme=dataclasses.replace(MXFP8, activations="mxfp8"))
    assert decide(declared, H200, load({})).backend == "hopper_mxfp8"
    assert "was not measured on tokens that an all-to-all sorts" in W8A8.only_by_name(declared, H200)


def test_activations_are_quantized_only_where_the_checkpoint_says_so() -> None:
    declared = problem(scheme=dataclasses.replace(MXFP8, activations="mxfp8"))
    chosen = load({"MOE_ORACLE_BACKEND": "hopper_mxfp8_w8a8"})
    assert decide(declared, H200, chosen).backend == W8A8.name
    reasons = {each.backend: each.reasons for each in decide(problem(), H200, load({})).candidates}
    assert [reason.code for reason in reasons[W8A8.name]] == ["activation_quantization"]


def test_allowing_quantized_activations_makes_them_a_mere_candidate() -> None:
    allowed = {"MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION": "1"}
    decision = decide(problem(), H200, load(allowed))
    assert decision.backend != W8A8.name
    assert next(each for each in decision.candidates if each.backend == W8A8.name).accepted
    named = decide(problem(), H200, load(allowed | {"MOE_ORACLE_BACKEND": W8A8.name}))
    assert named.backend == W8A8.name and "activations: quantized to MXFP8 per token" in named.summary()
    with pytest.raises(NoBackendError, match="would quantize activations to mxfp8; the layer declares 16bit"):
        decide(problem(), H200, load({"MOE_ORACLE_BACKEND": W8A8.name}))


@pytest.mark.parametrize("backend", [BACKEND, W8A8], ids=lambda each: each.name)
def test_the_kernels_are_given_everything_that_the_layer_has(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    layer = BIASED
    tensors = converted(backend.name, experts(layer, layer.local_experts), layer, H200)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "vllm_moe_oracle.kernels.fused_moe.fused_moe", lambda *args, **kwargs: seen.update(kwargs, args=args)
    )
    run, nbytes = backend.build_experts(tensors, layer, backend.plan(layer, H200), FunctionRecorder())
    x = torch.zeros(5, layer.hidden_size, dtype=torch.bfloat16)
    ids, scratch = torch.zeros(5, 2, dtype=torch.int32), torch.zeros(nbytes(5, 2), dtype=torch.uint8)
    run(x.clone(), x, torch.ones(5, 2), ids, None, scratch)
    assert (seen["activation"], seen["alpha"], seen["beta"], seen["limit"]) == ("swigluoai", 1.702, 1.0, 7.0)
    assert seen["args"][1].w13.bias is not None
    assert seen["quantize_activations"] == (backend is W8A8)
    assert scratch.numel() > 0


@pytest.mark.parametrize("name", ["hopper_mxfp8", "hopper_wna16", "hopper_mxfp4", "hopper_wna16_act_order"])
@pytest.mark.parametrize(
    ("experts", "top_k", "hidden", "inner"), [(128, 8, 2048, 768), (9, 8, 2048, 768), (8, 2, 4096, 14336)]
)
def test_it_hands_over_where_the_kernels_choice_changes(
    name: str, experts: int, top_k: int, hidden: int, inner: int
) -> None:
    backend: Any = default_registry()[name]
    scheme = {"mxfp8": MXFP8, "mxfp4": MXFP4}.get(backend.schemes[0], INT4_G128)
    sizes = {"experts": experts, "top_k": top_k, "hidden_size": hidden, "intermediate_size": inner}
    layer = problem(**sizes, scheme=scheme, activation=SILU)
    seen = layer if name != "hopper_wna16_act_order" else dataclasses.replace(layer, top_k=1)
    blank = backend._allocate(seen, experts, "meta")

    def runs_tiles(tokens: int) -> bool:
        rows = tokens * top_k // seen.top_k
        return isinstance(choose_config(blank, seen.top_k, rows), LaunchConfig)

    (last,) = backend.hand_overs(layer, 4096)
    assert runs_tiles(last) and not any(map(runs_tiles, (last + 1, last + 2, 2 * last, 4096)))
    assert all(map(runs_tiles, range(1, last, 7)))
    assert backend.hand_overs(layer, last) == () and backend.hand_overs(layer, last + 1) == (last,)


def test_one_kernel_for_all_numbers_of_tokens_hands_over_nowhere() -> None:
    layer = problem(experts=128, top_k=8, hidden_size=2048, intermediate_size=768, scheme=MXFP8, activation=SILU)
    batched = dataclasses.replace(layer, parallel=Parallel(dp=2, format="batched"))
    invariant = dataclasses.replace(layer, batch_invariant=True)
    for backend, each in ((W8A8, layer), (BACKEND, invariant), (BACKEND, batched)):
        assert backend.hand_overs(each, 4096) == ()


def test_scratch_memory_grows_with_tokens_up_to_what_vllm_planned() -> None:
    layer = problem(experts=8, top_k=2, hidden_size=256, intermediate_size=128)
    tensors = converted(BACKEND.name, experts(layer, layer.local_experts), layer, H200)
    _, nbytes = BACKEND.build_experts(tensors, layer, BACKEND.plan(layer, H200), FunctionRecorder(max_tokens=300))  # type: ignore[arg-type]
    needs = [nbytes(tokens, 2) for tokens in range(301)]
    assert needs == sorted(needs)
    assert needs[0] == 0 < needs[1]


def test_warming_up_says_how_long_it_took_and_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = GATED
    calls: list[Any] = []
    said: list[str] = []
    monkeypatch.setattr(_hopper_warmup, "_warm_counts", {})
    monkeypatch.setattr(_hopper_warmup.logger, "info", lambda text, *values: said.append(text % values))
    monkeypatch.setattr("vllm_moe_oracle.kernels.fused_moe.warmup", lambda *args, **kwargs: calls.append(kwargs) or 3)
    weights = BACKEND._allocate(layer, layer.local_experts, "meta")
    _hopper_warmup.warm_up(weights, layer, [1, 2], ids_dtype=torch.int32)
    _hopper_warmup.warm_up(weights, layer, [1, 2], ids_dtype=torch.int32)
    assert len(said) == 1 and "up to 2 tokens: 3 configurations ready in" in said[0]
    _hopper_warmup.warm_up(weights, layer, [1, 2], ids_dtype=torch.int32, quantize=True)
    assert [call["quantize_activations"] for call in calls] == [False, True]
    _hopper_warmup.warm_up(weights, layer, [1, 2], ids_dtype=torch.int64)  # Triton compiles for a dtype of ids
    assert [call["ids_dtype"] for call in calls] == [torch.int32, torch.int32, torch.int64]
