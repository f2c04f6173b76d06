"""The persistent kernels for many tokens on a GPU against the float32 reference; tolerances as in test_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu import stored_layers
from tests.gpu.kernel_cases import CASES, Case, half_elsewhere, inputs, reference
from tests.gpu.stored_layers import check, layer_of
from vllm_moe_oracle.kernels import prefill_launch, prefill_route
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig, prefill_errors
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights


def whole_steps(case: Case) -> Case:
    """The case with sizes that are whole steps of 64 columns, and odd numbers of steps where groups allow it."""
    unit = max(64, case.group)
    return replace(case, hidden=-(-case.hidden // unit) * unit, inner=-(-case.inner // unit) * unit)


def supported(case: Case) -> bool:
    weights = allocate_weights(case.format, 1, case.hidden, case.inner, group=case.group, dtype=case.dtype,
                       zero_points=case.zero_points, device="meta")  # fmt: skip
    return not prefill_errors(weights)


def half_steps(case: Case) -> Case:
    """The case with half a step at the end of h, where scales are of MX or one a row."""
    return replace(case, name=f"{case.name}-half", inner=case.inner + 32)


PREFILL_CASES = [case for case in map(whole_steps, CASES) if supported(case)]
PREFILL_CASES += [case for case in map(half_steps, PREFILL_CASES) if case.group in (0, 32) and supported(case)]


def call(weights: PackedWeights, x: torch.Tensor, router: torch.Tensor, ids: torch.Tensor, case: Case,
         config: PrefillConfig | None = None, **options: object) -> torch.Tensor:  # fmt: skip
    """`stored_layers.call` with the persistent kernels."""
    return stored_layers.call(weights, x, router, ids, case, config or PrefillConfig(), **options)


@pytest.mark.parametrize("tokens", (1, 17, 129, 513, 2200))
@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.name)
def test_matches_reference(case: Case, tokens: int) -> None:
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens)
    out = call(weights, x, router, ids, case)
    check(out, reference(case, layer, x, router, ids))
    assert torch.equal(out, call(weights, x, router, ids, case))


@pytest.mark.parametrize("routing", ("one", "negative", "none"))
@pytest.mark.parametrize("tokens", (3, 129, 700))
@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.name)
def test_degenerate_routings(case: Case, tokens: int, routing: str) -> None:
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens, routing)
    check(call(weights, x, router, ids, case), reference(case, layer, x, router, ids))


@pytest.mark.parametrize("case", PREFILL_CASES, ids=lambda case: case.name)
def test_every_number_of_tokens_of_a_block(case: Case) -> None:
    """All tokens to the same experts: blocks of every size around those that have products of their own."""
    layer, weights = layer_of(case)
    for tokens in (31, 32, 33, 64, 65, 95, 96, 97, 127, 128, 160, 161, 192, 193, 224, 256, 257):
        x, router, ids = inputs(case, tokens, "one")
        ids = torch.arange(case.top_k, device="cuda", dtype=torch.int32).expand(tokens, -1).contiguous()
        check(call(weights, x, router, ids, case), reference(case, layer, x, router, ids))


@pytest.mark.parametrize("case", PREFILL_CASES[:1], ids=lambda case: case.name)
def test_expert_map_and_weights_on_input(case: Case) -> None:
    layer, weights = layer_of(case)
    x, router, _ = inputs(case, 300)
    expert_map, ids, local = (each.cuda() for each in half_elsewhere(case, 300))
    out = call(weights, x, router, ids, case, expert_map=expert_map)
    check(out, reference(case, layer, x, router, local))
    out = call(weights, x, router, local.int(), case, apply_router_weight_on_input=True)
    check(out, reference(case, layer, x, router, local, apply_router_weight_on_input=True))


@pytest.mark.parametrize(("offset", "gap"), ((0, 16), (0, 8), (0, 1), (8, 16), (1, 15)))
@pytest.mark.parametrize("case", PREFILL_CASES[:1], ids=lambda case: case.name)
def test_rows_of_x_anywhere(case: Case, offset: int, gap: int) -> None:
    """Rows that are `gap` elements apart, the first one `offset` elements behind an aligned address."""
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 300)
    apart = torch.full((300, case.hidden + gap), float("nan"), dtype=case.dtype, device="cuda")
    apart = apart[:, offset : offset + case.hidden]
    apart.copy_(x)
    assert torch.equal(call(weights, apart, router, ids, case), call(weights, x, router, ids, case))


@pytest.mark.parametrize("config", (PrefillConfig(num_stages=2), PrefillConfig(num_stages=3)), ids=str)
@pytest.mark.parametrize("case", [case for case in PREFILL_CASES if case.name in ("int4-g128", "mxfp8")],
                         ids=lambda case: case.name)  # fmt: skip
def test_stages_agree_bitwise(case: Case, config: PrefillConfig) -> None:
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 700)
    assert torch.equal(call(weights, x, router, ids, case, config), call(weights, x, router, ids, case))


WIDER = (
    Case("int4-wide", "int4", 64, hidden=704, inner=192, dtype=torch.float16, zero_points=True),
    Case("mxfp4-wide", "mxfp4", 32, "swigluoai", bias=True, limit=7.0, experts=16, top_k=4, hidden=1088, inner=192),
    Case("mxfp8-wide", "mxfp8", 32, "relu2", hidden=1344, inner=320, top_k=3),
)
"""Three, five and six tiles of columns, of which the last is a short one."""


@pytest.mark.parametrize(
    "case", [*(case for case in PREFILL_CASES if case.hidden > 256), *WIDER], ids=lambda case: case.name
)
def test_two_launches_of_the_second_product_give_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weights = layer_of(case)
    for tokens, routing in ((1, "random"), (17, "negative"), (129, "none"), (700, "random"), (2200, "one")):
        given = inputs(case, tokens, routing)
        for options in ({}, {"pdl": False}, {"apply_router_weight_on_input": True}):
            whole = call(weights, *given, case, **options)
            with monkeypatch.context() as patch:
                patch.setattr(prefill_launch, "_MIN_OVERLAPPED_BYTES", 0)
                assert torch.equal(call(weights, *given, case, **options), whole)


@pytest.mark.parametrize("top_k", (2, 8))
def test_a_sum_beside_the_second_product_reads_what_is_there(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer so large that the sum does run beside: programs that began too early would add up poison."""
    case = Case("large", "int4", 128, hidden=2048, inner=768, experts=8, top_k=top_k)
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 65536 // top_k)
    assert ids.numel() * case.hidden * 2 >= prefill_launch._MIN_OVERLAPPED_BYTES
    both = (x, x.flip(0).contiguous())
    with monkeypatch.context() as patch:
        patch.setattr(prefill_launch, "_MIN_OVERLAPPED_BYTES", 1 << 62)
        alone = [call(weights, each, router, ids, case) for each in both]
    assert not torch.equal(*alone)
    # By turns: what a multiprocessor still had from the call before would be of the other x.
    for turn in range(20):
        whole = call(weights, both[turn % 2], router, ids, case)
        assert torch.isfinite(whole).all()
        assert torch.equal(whole, alone[turn % 2])


@pytest.mark.parametrize("experts", (1, 8, 100, 128, 384, 512))
@pytest.mark.parametrize("tokens", (3, 64, 512, 3000))
def test_lists_of_slots_and_blocks(experts: int, tokens: int) -> None:
    top_k, most_rows = min(8, experts), 128
    slots = tokens * top_k
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (slots,), generator=generator, dtype=torch.int32)
    if tokens == 64:
        ids[:] = experts - 1
    router = torch.rand(slots, generator=generator)
    most, padded = prefill_launch.max_blocks(slots, experts), prefill_launch.padded_experts(experts)
    chunks = prefill_launch._num_sort_chunks(slots)
    table, ordered, counts, totals = (
        torch.full((n,), -7, dtype=torch.int32, device="cuda")
        for n in ((1 + 2 * most) * 4, slots, chunks * padded, padded)
    )
    routers = torch.full((slots,), -7.0, device="cuda")
    device_ids, lists = ids.cuda(), {"EP": padded, "PDL": False}
    prefill_route.count_slots[(chunks,)](device_ids, device_ids, counts, slots, HAS_MAP=False, CHUNK=128, num_warps=1,
                                         **lists)  # fmt: skip
    add = chunks * padded > prefill_launch._MAX_INLINE_COUNTS
    if add:
        prefill_route.scan_chunks[(padded,)](counts, totals, chunks, BLOCK=512, **lists)
    prefill_route.place_slots[(max(chunks, experts),)](
        device_ids, device_ids, router.cuda(), counts, totals, ordered, routers, table, slots, chunks, experts, most,
        INLINE_SCAN=not add, HAS_MAP=False, CHUNK=128, BM=most_rows, num_warps=1, **lists,
    )  # fmt: skip
    large, small, start = [], [], 0
    by_expert = [(ids == expert).nonzero()[:, 0].tolist() for expert in range(experts)]
    for expert, mine in enumerate(by_expert):
        for at in range(0, len(mine), most_rows):
            rows = min(most_rows, len(mine) - at)
            (large if rows > most_rows // 2 else small).append([expert, start + at, rows])
        start += len(mine)
    flat = [slot for mine in by_expert for slot in mine]
    entries = table.view(-1, 4).cpu()
    assert entries[0, :2].tolist() == [len(large), len(small)]
    assert entries[1 : 1 + len(large), :3].tolist() == large
    assert entries[1 + most : 1 + most + len(small), :3].tolist() == small
    assert ordered[:start].tolist() == flat
    assert torch.equal(routers[:start].cpu(), router[flat])
