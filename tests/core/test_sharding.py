"""Shard arithmetic: properties, and the words that users read."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.lib.cases import INT4_G32, INT4_G128, MXFP8, problem
from vllm_moe_oracle.core.problem import Activation, Scheme
from vllm_moe_oracle.core.sharding import (
    describe_loaded_group,
    describe_shard,
    is_shardable,
    loader_reasons,
    padded_plan,
    round_up,
    scale_group_size,
    shard_by_scale_groups,
    shard_size,
    split_reasons,
    suggest_parallelism,
)

MXFP4 = Scheme("mxfp4", 4, 32, "gpt_oss")
GPT_OSS = Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0, interleaved=True)

SIZES = st.integers(1, 20000)
MULTIPLES = st.sampled_from([1, 2, 8, 16, 32, 64, 96, 128, 256, 512])


@given(SIZES, MULTIPLES)
def test_rounding_up_gives_the_smallest_multiple_that_is_enough(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert rounded - multiple < value <= rounded


@given(SIZES, SIZES, MULTIPLES, MULTIPLES)
def test_padding_is_minimal_and_noted_exactly_where_it_happens(
    hidden: int, inner: int, hidden_multiple: int, inner_multiple: int
) -> None:
    layer = problem(hidden_size=hidden, intermediate_size=inner)
    plan = padded_plan(layer, hidden_multiple, inner_multiple)
    for name, real, kernel, multiple in (
        ("hidden", hidden, plan.hidden_size, hidden_multiple),
        ("intermediate", inner, plan.intermediate_size, inner_multiple),
    ):
        assert kernel % multiple == 0 and kernel - multiple < real <= kernel
        notes = [note for note in plan.notes if note.startswith(f"{name} size {real} is")]
        assert notes == (
            [f"{name} size {real} is zero-padded to {kernel}, the next multiple of {multiple}"] * (kernel != real)
        )
    assert plan.pads(layer) is bool(plan.notes)


def test_without_multiples_nothing_is_padded() -> None:
    layer = problem(hidden_size=2688, intermediate_size=1856)
    assert padded_plan(layer).notes == () and not padded_plan(layer).pads(layer)


@pytest.mark.parametrize(("inner", "expected"), [(1856, 1920), (928, 1024)])
def test_nemotron_nano_is_padded_to_whole_tiles(inner: int, expected: int) -> None:
    plan = padded_plan(problem(hidden_size=2688, intermediate_size=inner), 128, 128)
    assert (plan.hidden_size, plan.intermediate_size) == (2688, expected)
    assert plan.notes == (f"intermediate size {inner} is zero-padded to {expected}, the next multiple of 128",)


@given(st.sampled_from([2, 3, 4, 6, 8, 16]), st.integers(1, 4000), MULTIPLES, st.sampled_from([1, 4, 128]))
def test_every_way_out_really_works(tp: int, shard: int, multiple: int, experts: int) -> None:
    layer = problem(intermediate_size=shard, tp=tp, experts=experts, top_k=1)
    words = suggest_parallelism(layer, lambda other: other.intermediate_size % multiple == 0)
    full = shard * tp
    # TP 1 is a way whenever the whole size is a multiple; then, and only then, is there any way.
    assert bool(words) is (full % multiple == 0)
    assume(words)
    size = int(words.removeprefix("TP ").split()[0])
    works = [each for each in range(1, tp) if tp % each == 0 and (full // each) % multiple == 0]
    assert size == max(works)
    assert ("expert parallelism" in words) is (experts >= tp)


def test_a_way_that_nothing_works_under_is_not_offered() -> None:
    assert suggest_parallelism(problem(intermediate_size=80, tp=2, scheme=INT4_G32), lambda other: False) == ""
    asked = []
    assert (
        suggest_parallelism(
            problem(intermediate_size=80, tp=2, scheme=INT4_G32), lambda other: bool(asked.append(other))
        )
        == ""
    )
    assert [(each.parallel.tp, each.parallel.ep, each.intermediate_size) for each in asked] == [
        (1, 1, 160), (1, 2, 160), (2, 1, 96),
    ]  # fmt: skip


def test_a_loader_that_cuts_between_blocks_has_more_ways_out() -> None:
    # gpt-oss-20b: 2880 / 16 = 180 splits a block; 8 ranks have 384 each but the last, which has 192.
    layer = problem(scheme=MXFP4, intermediate_size=180, tp=16, activation=GPT_OSS)
    assert suggest_parallelism(layer, is_shardable).startswith("TP 8 or expert parallelism")
    even = problem(scheme=MXFP4, intermediate_size=180, tp=16)
    assert suggest_parallelism(even, is_shardable).startswith("TP 2 or expert parallelism")


@pytest.mark.parametrize(
    ("experts", "ranks", "inner", "ways"),
    [
        (7, 2, 96, "the same ranks without --enable-expert-parallel"),
        (9, 4, 128, "expert parallelism over 3 ranks, or the same ranks without --enable-expert-parallel"),
        (9, 4, 32, "expert parallelism over 3 ranks"),
        (7, 2, 32, "one rank"),
    ],
)
def test_experts_that_a_loader_loses_have_ways_out_that_work(experts: int, ranks: int, inner: int, ways: str) -> None:
    layer = problem(
        scheme=MXFP4, num_experts=experts, top_k=4, local_experts=-(-experts // ranks), intermediate_size=inner,
        ep=ranks, activation=GPT_OSS, even_expert_split=True,
    )  # fmt: skip
    (reason,) = loader_reasons(layer)
    assert f"gives each of {ranks} ranks {experts // ranks} of {experts} experts" in reason.detail
    assert reason.remedy == ways


def test_shares_of_whole_groups_are_noted_with_the_schemes_own_group() -> None:
    ragged = shard_by_scale_groups(problem(scheme=INT4_G32, intermediate_size=80, tp=2))
    assert "is sharded in whole groups of 32: 96 on each of 2 ranks" in padded_plan(ragged).notes[0]


def test_halved_groups_are_reported() -> None:
    halved = problem(scheme=Scheme("wna16", 4, 128, "gptq"), intermediate_size=192, tp=4)
    words = "scale groups of 128 are loaded as groups of 64, because 192 features are not a multiple of 128"
    assert describe_loaded_group(halved) == words
    assert describe_loaded_group(problem(scheme=INT4_G128, intermediate_size=192, tp=4)) == words
    ordered = dataclasses.replace(INT4_G128, act_order="group")
    assert describe_loaded_group(problem(scheme=ordered, intermediate_size=192, tp=4)) == ""
    (reason,) = split_reasons(problem(scheme=INT4_G128, intermediate_size=48, tp=16))
    words = "intermediate size 768 / 16 = 48 is not a multiple of the scale group 32, halved from 128 (48 mod 32 = 16)"
    assert reason.detail == words and reason.remedy.startswith("TP 8 or expert parallelism")


def test_without_a_cut_there_is_no_other_cut_to_offer() -> None:
    assert suggest_parallelism(problem(intermediate_size=100), lambda other: True) == ""


def test_a_shard_that_splits_a_scale_group_is_refused_with_a_remedy() -> None:
    (reason,) = split_reasons(problem(scheme=INT4_G32, intermediate_size=80, tp=2))
    assert reason.code == "group.intermediate"
    assert reason.detail == "intermediate size 160 / 2 = 80 is not a multiple of the scale group 32 (80 mod 32 = 16)"
    assert reason.remedy == (
        "TP 1 or expert parallelism over the 2 ranks (--enable-expert-parallel) would work; so would "
        "MOE_ORACLE_RAGGED_SHARDS=1, with 96 on the first rank and 64 on the last"
    )


def test_shares_of_whole_groups_are_as_equal_as_groups_allow() -> None:
    layer = problem(scheme=INT4_G32, intermediate_size=80, tp=2)
    ragged = shard_by_scale_groups(layer)
    assert (ragged.intermediate_size, ragged.unsharded_intermediate_size) == (96, 160)
    assert [shard_size(ragged, rank) for rank in range(2)] == [96, 64]
    assert split_reasons(ragged) == []
    even = problem(scheme=INT4_G32, intermediate_size=96, tp=2)
    assert shard_by_scale_groups(even) is even
    # A rank would get nothing: 3 groups over 4 ranks.
    few = problem(scheme=INT4_G32, intermediate_size=24, tp=4)
    assert shard_by_scale_groups(few) is few and split_reasons(few)
    ordered = dataclasses.replace(layer, scheme=dataclasses.replace(INT4_G32, act_order="group"))
    assert shard_by_scale_groups(ordered) is ordered


def test_the_largest_smaller_cut_is_offered() -> None:
    # In groups of 32: 192 / 4 = 48 splits a group, 192 / 2 = 96 does not.
    (reason,) = split_reasons(problem(scheme=INT4_G32, intermediate_size=48, tp=4))
    assert "192 / 4 = 48" in reason.detail and "48 mod 32 = 16" in reason.detail
    assert reason.remedy.startswith("TP 2 or expert parallelism over the 4 ranks")
    assert split_reasons(problem(scheme=INT4_G32, intermediate_size=96, tp=2)) == []


def test_expert_parallelism_keeps_the_size_and_the_groups() -> None:
    assert split_reasons(problem(scheme=INT4_G128, intermediate_size=640, ep=2, local_experts=64)) == []


def test_both_sizes_are_reported_when_both_fail() -> None:
    reasons = split_reasons(problem(scheme=MXFP8, hidden_size=100, intermediate_size=50))
    assert [reason.code for reason in reasons] == ["group.hidden", "group.intermediate"]
    assert "100 mod 32 = 4" in reasons[0].detail and "50 mod 32 = 18" in reasons[1].detail
    assert [reason.remedy for reason in reasons] == ["", ""]


@pytest.mark.parametrize(
    ("scheme", "group"),
    [
        (MXFP8, 32),
        (Scheme("mxfp4", 4, 32, "gpt-oss"), 32),
        (INT4_G128, 128),
        (Scheme("wna16", 4, 32, "gptq"), 32),
        (Scheme("wna16", 8, -1, "gptq"), 1),
    ],
)
def test_scale_groups(scheme: Scheme, group: int) -> None:
    layer = problem(scheme=scheme, intermediate_size=group * 7, hidden_size=group * 3)
    assert scale_group_size(layer) == group
    assert not any(reason.code.startswith("group.") for reason in split_reasons(layer))


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4000))
def test_describe_shard_states_the_division(tp: int, shard: int) -> None:
    words = describe_shard(problem(intermediate_size=shard, tp=tp))
    if tp == 1:
        assert words == str(shard)
    else:
        left, _, result = words.partition(" = ")
        full, _, ranks = left.partition(" / ")
        assert math.prod((int(result), int(ranks))) == int(full) and int(result) == shard
