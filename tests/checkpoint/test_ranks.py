"""Tensor- and data-parallel ranks, expert parallelism and all-to-alls: the same layers as a server has."""

from __future__ import annotations

import dataclasses
import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lib.configs import quantized
from tests.lib.releases import INSTALLED
from vllm_moe_oracle.checkpoint.ranks import Ranks
from vllm_moe_oracle.checkpoint.serving import check_exchange
from vllm_moe_oracle.core.problem import Parallel, Problem
from vllm_moe_oracle.errors import CheckpointError, NoBackendError, SettingError
from vllm_moe_oracle.releases.all2all import REMOVED_ALL2ALL, all2all_names, effective_all2all

TP, DP = (1, 2, 4), (1, 2, 3, 4, 8)


def first(explain: Any, data: dict[str, Any], *ranks: Any, **more: Any) -> Problem:
    """The first layer as a rank sees it."""
    found: Problem = explain(data, *ranks, **more).problems[0]
    return found


def served(
    layer: Problem, ranks: Ranks, rank: int, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> Problem:
    """The problem that the installed vLLM's config of a layer becomes, on one data-parallel rank.

    Args:
        layer: the layer on one rank of its own.
        ranks: the options, with vLLM's own word for the all-to-all.
        rank: the data-parallel rank.
        sequence_parallel: vLLM shards the tokens of a tensor-parallel group.
        monkeypatch: replaces vLLM's process groups.
    """
    import torch
    from vllm._aiter_ops import rocm_aiter_ops
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import config as stock
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map

    from vllm_moe_oracle.compat import current_adapter

    monkeypatch.setattr(stock, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(stock, "get_dp_group", lambda: SimpleNamespace(rank_in_group=rank))
    monkeypatch.setattr(rocm_aiter_ops, "is_fused_moe_enabled", lambda: True)  # for MoRI
    monkeypatch.setattr(type(current_adapter()), "num_layers", lambda adapter: layer.num_layers)  # without a model
    options = SimpleNamespace(enable_expert_parallel=ranks.ep, all2all_backend=ranks.all2all, enable_eplb=False)
    parallel = stock.FusedMoEParallelConfig.make(ranks.tp, 1, ranks.dp, ranks.tp if sequence_parallel else 1, options)
    local, _, _ = determine_expert_map(parallel.ep_size, parallel.ep_rank, layer.num_experts)
    with set_current_vllm_config(VllmConfig()):
        moe = stock.FusedMoEConfig(
            num_experts=layer.num_experts,
            num_local_experts=local,
            num_logical_experts=layer.num_experts,
            experts_per_token=layer.top_k,
            hidden_dim=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            activation=MoEActivation.SILU,
            device="cpu",
            routing_method=stock.RoutingMethodType.RenormalizeNaive,
            moe_parallel_config=parallel,
            in_dtype=torch.bfloat16,
        )
        found: Problem = current_adapter().problem(moe, None, layer.layer, layer.scheme)
    return found


@pytest.mark.parametrize(("tp", "dp", "ep"), [*itertools.product(TP, DP, (False, True))])
def test_a_server_has_the_same_problem(
    tp: int, dp: int, ep: bool, explain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every all-to-all of the installed vLLM, and those that it takes for others."""
    pytest.importorskip("vllm")
    data = quantized(num_hidden_layers=1)
    whole = first(explain, data)
    for name in (*all2all_names(INSTALLED), *REMOVED_ALL2ALL):
        ranks = Ranks(tp, dp, ep, effective_all2all(name, INSTALLED))
        ours = first(explain, data, tp, ep, vllm=INSTALLED, dp=dp, all2all=name)
        for shares_tokens in {False, ep and tp > 1 and dp > 1}:
            assert served(whole, ranks, 0, shares_tokens, monkeypatch) == ours, name
        # The last rank may have fewer experts, and nothing else.
        last = served(whole, ranks, dp - 1, False, monkeypatch)
        assert last.common_fields() == ours.common_fields() and last.local_experts <= ours.local_experts


def test_the_removed_ones_become_what_vllm_makes_of_them() -> None:
    config = pytest.importorskip("vllm.config")
    for name in (*all2all_names(INSTALLED), *REMOVED_ALL2ALL):
        assert config.ParallelConfig(all2all_backend=name).all2all_backend == effective_all2all(name, INSTALLED)


def test_experts_are_sharded_over_all_ranks(explain: Any) -> None:
    data = quantized()
    assert first(explain, data, 2, dp=4).parallel == Parallel(tp=8, dp=4)
    assert first(explain, data, 2, dp=4).intermediate_size == 96
    assert first(explain, data, 2, True, dp=4).parallel == Parallel(ep=8, dp=4)
    uneven = first(explain, data, 1, True, dp=3, all2all="nixl_ep")
    assert uneven.parallel == Parallel(ep=3, dp=3, format="batched") and uneven.local_experts == 43
    assert first(explain, data, 8, True, all2all="nixl_ep").parallel == Parallel(ep=8)
    assert "intermediate 96 (768 / TP 2 x DP 4)" in str(first(explain, data, 2, dp=4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp": 5}, r"over 5 ranks \(TP 1 x DP 5\) does not divide .* 768 \(768 mod 5 = 3\)\. Use DP 4, or --ep$"),
        ({"tp": 4, "dp": 5}, r"over 20 ranks \(TP 4 x DP 5\) .* \(768 mod 20 = 8\)\. Use DP 4, or --ep$"),
        ({"dp": 200, "ep": True}, r"over 200 ranks leaves ranks without one of the 128 experts\. Use DP 128$"),
        ({"tp": 32, "dp": 5, "ep": True}, r"over 160 ranks leaves .* Use TP 16, or DP 4$"),
        ({"tp": 7, "dp": 9}, r"7 ranks, which do not divide the 32 .* Use TP 4 x DP 8$"),
        ({"tp": 6, "ep": True}, r"6 ranks, which do not divide the 32 .* \(32 mod 6 = 2\)\. Use TP 4$"),
        ({"tp": 10**6}, r"1000000 ranks, which do not divide the 32 .* Use TP 32$"),
        ({"tp": 10**20, "dp": 10**20, "ep": True}, r"one of the 128 experts\. Use TP 32 x DP 4$"),
        ({"tp": 5, "dp": 2}, r"5 ranks, which do not divide the 32 .* Use TP 4$"),
        ({"dp": 1 << 17}, r"over 131072 ranks \(TP 1 x DP 131072\) does not divide .* Use DP 768$"),
        ({"tp": 1 << 9, "dp": 1 << 9}, r"512 ranks, which do not divide the 32 .* Use TP 32 x DP 24$"),
    ],
)
def test_ranks_that_cannot_share_the_layers(options: dict[str, Any], words: str, explain: Any) -> None:
    with pytest.raises(CheckpointError, match=words):
        explain(quantized(), **options)


UNLIMITED = quantized(model_type="other_moe", quantization_config=None, num_attention_heads=None)
"""A model whose experts are not quantized, and whose config does not say how many heads it has."""


@pytest.mark.parametrize(
    ("data", "tp", "words"),
    [
        (quantized(num_attention_heads=20), 5, r"over 5 ranks .* 768 \(768 mod 5 = 3\)\. Use TP 4, or --ep$"),
        # Expert parallelism is not suggested for more ranks than experts.
        (quantized("mixtral-8x7b", num_attention_heads=96, intermediate_size=14368), 48, "Use TP 32$"),
        *((UNLIMITED, tp, f"^.*: {tp} ranks are more than 65536.* Use fewer") for tp in (1 << 17, 10**20)),
        *((quantized(num_experts=65536, num_attention_heads=10**30 + 1), tp, "Use TP 1$") for tp in (65536, 10**9)),
    ],
)
def test_the_remedy_is_for_the_models_sizes(data: dict[str, Any], tp: int, words: str, explain: Any) -> None:
    """Whatever the numbers, it is found at once."""
    with pytest.raises(CheckpointError, match=words):
        explain(data, tp)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize(("tp", "dp"), [(3, 1), (1, 7), (6, 5), (9, 100), (48, 3), (31, 31), (1, 131), (64, 64)])
def test_the_remedy_is_the_nearest_number_that_works(tp: int, dp: int, ep: bool, explain: Any) -> None:
    data = quantized(num_hidden_layers=1)

    def works(size: int, copies: int) -> bool:
        try:
            first(explain, data, size, ep, dp=copies)
        except CheckpointError:
            return False
        return True

    if works(tp, dp):
        return
    with pytest.raises(CheckpointError) as caught:
        first(explain, data, tp, ep, dp=dp)
    ways = re.findall(r"(?:TP (\d+))?(?: x )?(?:DP (\d+))?", caught.value.remedy)
    named = [(int(size or tp), int(copies or dp)) for size, copies in ways if size or copies]
    assert named
    for size, copies in named:
        assert works(size, copies)
        assert not any(works(larger, copies) for larger in range(size + 1, tp + 1))
        assert not any(works(size, larger) for larger in range(copies + 1, dp + 1))


@pytest.mark.parametrize("options", [{"dp": 0}, {"dp": -2, "ep": True}, {"tp": 0, "dp": 2}])
def test_ranks_below_one_are_refused(options: dict[str, Any], explain: Any) -> None:
    with pytest.raises(SettingError, match=r"ranks are not possible\. Give 1 or more"):
        first(explain, quantized(), **options)


def test_split_scale_groups_are_told_what_would_do(explain: Any) -> None:
    """The options that users give, not the ranks that they make."""
    from vllm_moe_oracle.core.sharding import suggest_parallelism

    layer = first(explain, quantized(moe_intermediate_size=640), 4, dp=8)
    assert suggest_parallelism(layer, lambda each: each.intermediate_size >= 40).startswith("TP 2 x DP 8 or expert par")
    assert suggest_parallelism(layer, lambda each: each.intermediate_size == 160).startswith("TP 4 x DP 1 would work")
    assert suggest_parallelism(first(explain, quantized(), 8), lambda each: each.parallel.tp == 2) == "TP 2 would work"


def test_an_all_to_all_that_rounds_the_hidden_size_is_refused(explain: Any) -> None:
    data = quantized(hidden_size=2880)
    for name in ("deepep_high_throughput", "deepep_low_latency"):
        with pytest.raises(
            NoBackendError, match="does not carry hidden size 2880: vLLM rounds it up to 3072"
        ) as caught:
            check_exchange(first(explain, data, 1, True, dp=2, all2all=name), name, "cuda")
        assert caught.value.remedy == "Choose another --all2all-backend"
        check_exchange(first(explain, data, 2, True, all2all=name), name, "cuda")
        check_exchange(first(explain, quantized(), 1, True, dp=2, all2all=name), name, "cuda")
    with pytest.raises(NoBackendError, match="hidden size 16384: it is too large"):
        check_exchange(
            first(explain, quantized(hidden_size=16384), 1, True, dp=2, all2all="nixl_ep"), "nixl_ep", "cuda"
        )
    check_exchange(first(explain, data, 1, True, dp=2), "allgather_reducescatter", "cuda")
    with pytest.raises(NoBackendError, match="between data-parallel ranks on a CPU") as caught:
        check_exchange(first(explain, data, 1, dp=2), "allgather_reducescatter", "cpu")
    assert caught.value.remedy == "Use --tp instead of --dp"


def test_an_all_to_all_that_vllms_lora_layer_refuses(explain: Any) -> None:
    """It compares the option with expert parallelism, also where no tokens are exchanged."""
    for ranks, refused in (({"tp": 2, "ep": True}, True), ({"tp": 2}, False), ({}, False)):
        layer = dataclasses.replace(first(explain, quantized(), ranks.get("tp", 1), ranks.get("ep", False)), lora=True)
        check_exchange(layer, "allgather_reducescatter", "cuda")
        if refused:
            with pytest.raises(NoBackendError, match=r"the option says nixl_ep. Leave out --all2all-backend"):
                check_exchange(layer, "nixl_ep", "cuda")
        else:
            check_exchange(layer, "nixl_ep", "cuda")
        check_exchange(dataclasses.replace(layer, lora=False), "nixl_ep", "cuda")
