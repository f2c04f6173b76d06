"""Shards of integer experts: every backend's verdict on a cut is that of counting what one rank would hold, its
arithmetic is true, and what a refusal offers is accepted."""

from __future__ import annotations

import dataclasses
import re

from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.lib.cases import problem
from vllm_moe_oracle.core.decision import Reason, Rejected
from vllm_moe_oracle.core.problem import Device, Problem, Scheme
from vllm_moe_oracle.core.sharding import shard_by_scale_groups
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases.supported import NEWEST

PACKAGES = {"vllm": NEWEST, "humming-kernels": "0.1.19", "flashinfer-python": "0.6.0", "triton": "3.6.0"}
DEVICES = (
    Device("cuda", "an sm_90", 90, 132, 141.0, packages=PACKAGES),
    Device("cuda", "an sm_100", 100, 148, 180.0, packages=PACKAGES),
    Device("cpu", "a CPU", features=("avx512f", "avx512_bf16"), packages=PACKAGES),
)
BACKENDS = [backend.name for backend in default_registry().for_scheme("wna16")]

WORDS = {"gptq": 4, "gptq_v2": 4, "awq": 4, "moe_wna16": 1, "compressed-tensors": 4, "compressed-tensors-int": 1}
"""Bytes of a packed word."""

MULTIPLES = {
    "cpu_int4": (32, 32), "cpu_dequantized": (32, 1), "hopper_wna16": (32, 32), "hopper_wna16_act_order": (32, 32),
    "marlin_wna16": (128, 1), "marlin_wna16_batched": (128, 1), "triton_wna16": (64, 1),
}  # fmt: skip
"""What kernels want of the hidden and of the intermediate size beyond groups and words; the others pad both, or neither
matters to them."""


def cut_survives(backend: str, layer: Problem) -> bool:
    """By counting: whether each rank's sizes are whole groups and whole words, and what the kernel wants."""
    scheme, hidden, inner = layer.scheme, layer.hidden_size, layer.intermediate_size
    last = layer.unsharded_intermediate_size - (layer.parallel.tp - 1) * inner
    word = max(WORDS[scheme.packing] * 8 // scheme.bits, 8 // scheme.bits)
    if hidden % word or inner % word or last % word:
        return False
    for size, multiple in zip((hidden, inner), MULTIPLES.get(backend, (1, 1)), strict=True):
        if size % multiple:
            return False
    if scheme.group_size == -1:
        return True
    ordered = scheme.act_order == "group"
    if ordered and layer.parallel.tp > 1:  # every rank has all scales
        inner = last = layer.unsharded_intermediate_size
    groups = [scheme.group_size]
    if not ordered:
        while groups[-1] % 2 == 0 and groups[-1] // 2 >= 32:
            groups.append(groups[-1] // 2)
    return any(hidden % group == 0 and inner % group == 0 and last % group == 0 for group in groups)


def about_shapes(backend: str, layer: Problem, device: Device) -> list[Reason]:
    verdict = default_registry()[backend].check(layer, device)
    found = verdict.reasons if isinstance(verdict, Rejected) else ()
    return [reason for reason in found if reason.code.startswith(("group.", "packing.", "alignment."))]


def over(layer: Problem, tp: int = 1, ep: int = 1) -> Problem:
    """The same layer of the checkpoint over other ranks."""
    full = layer.unsharded_intermediate_size
    parallel = dataclasses.replace(layer.parallel, tp=tp, ep=ep)
    local = -(-layer.num_experts // ep)
    found = dataclasses.replace(
        layer, intermediate_size=full // tp, ragged_intermediate_size=0, local_experts=local, parallel=parallel
    )
    return shard_by_scale_groups(found) if layer.ragged_intermediate_size else found


SHARDS = st.one_of(
    st.integers(1, 4000),
    *(st.integers(1, 4096 // step).map(lambda count, step=step: count * step) for step in (2, 8, 16, 32, 64, 128)),  # type: ignore[misc]
)


@st.composite
def layers(draw: st.DrawFn) -> Problem:
    scheme = Scheme(
        "wna16",
        draw(st.sampled_from([4, 8])),
        draw(st.sampled_from([-1, 16, 32, 64, 96, 128, 256])),
        draw(st.sampled_from(sorted(WORDS))),
        draw(st.booleans()),
        draw(st.sampled_from(["none", "static", "group"])),
    )
    layer = problem(
        scheme=scheme,
        hidden_size=draw(SHARDS),
        intermediate_size=draw(SHARDS),
        tp=draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16])),
        experts=draw(st.sampled_from([2, 8, 128])),
        top_k=2,
    )
    return shard_by_scale_groups(layer) if draw(st.booleans()) else layer


@settings(max_examples=600)
@given(layers(), st.sampled_from(BACKENDS), st.sampled_from(DEVICES))
def test_a_cut_is_refused_exactly_where_something_does_not_survive_it(
    layer: Problem, backend: str, device: Device
) -> None:
    reasons = about_shapes(backend, layer, device)
    assert bool(reasons) is not cut_survives(backend, layer), reasons
    for reason in reasons:
        found = re.findall(r"(\d+) mod (\d+) = (\d+)", reason.detail)
        assert found, reason
        for size, multiple, rest in found:
            assert int(rest) == int(size) % int(multiple) > 0, reason
        for full, ranks, share in re.findall(r"(\d+) / (\d+) = (\d+)", reason.detail):
            assert (int(full), int(ranks)) == (layer.unsharded_intermediate_size, layer.parallel.tp), reason
            assert int(full) == int(ranks) * int(share), reason


@settings(max_examples=1500)
@given(layers(), st.sampled_from(BACKENDS), st.sampled_from(DEVICES))
def test_what_a_refusal_offers_is_accepted_and_what_would_be_is_offered(
    layer: Problem, backend: str, device: Device
) -> None:
    ranks = layer.parallel.tp
    whole = default_registry()[backend].capabilities.expert_parallel and layer.num_experts >= ranks
    for reason in about_shapes(backend, layer, device):
        offered = {}
        for size in re.findall(r"TP (\d+)", reason.remedy):
            offered[size] = over(layer, tp=int(size))
        if f"expert parallelism over the {ranks} ranks" in reason.remedy:
            offered["ep"] = over(layer, ep=ranks)
        if ragged := re.search(r"RAGGED_SHARDS=1, with (\d+) on the first rank and (\d+) on the last", reason.remedy):
            offered["ragged"] = shard_by_scale_groups(layer)
            first, last = map(int, ragged.groups())
            assert first * (ranks - 1) + last == layer.unsharded_intermediate_size, reason
            assert first == offered["ragged"].intermediate_size, reason
        event(f"{reason.code}: {', '.join('TP' if each.isdigit() else each for each in sorted(offered)) or 'nothing'}")
        for how, other in offered.items():
            assert about_shapes(backend, other, device) == [], (how, reason)
            assert cut_survives(backend, other), (how, reason)
        if not offered and reason.code.endswith(".intermediate"):
            smaller = [size for size in range(1, ranks) if ranks % size == 0]
            assert not any(cut_survives(backend, over(layer, tp=size)) for size in smaller), reason
            assert not (whole and ranks > 1 and cut_survives(backend, over(layer, ep=ranks))), reason


def test_a_way_out_that_another_rule_closes_is_not_offered() -> None:
    # 8864 / 4 = 2216 is not a multiple of 32; at TP 1 it is, but 8864 is not a multiple of the group, which act order
    # does not let halve.
    scheme = Scheme("wna16", 4, 128, "compressed-tensors", act_order="group")
    layer = problem(scheme=scheme, hidden_size=2304, intermediate_size=2216, tp=4)
    reasons = {reason.code: reason.remedy for reason in about_shapes("hopper_wna16", layer, DEVICES[0])}
    assert reasons == {"group.intermediate": "", "alignment.intermediate": ""}
    # Nothing about ranks helps where the hidden size is what does not fit.
    layer = problem(scheme=scheme, hidden_size=2000, intermediate_size=320, tp=2)
    assert {reason.remedy for reason in about_shapes("emulation", layer, DEVICES[0])} == {""}
