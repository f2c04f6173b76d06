"""The fused MoE kernels on a GPU against a float32 reference that shares no code with them.

Tolerances come from the formats. Rounding to p significant bits has a root mean square of at most eps / sqrt(12), eps =
2**(1 - p): that is UNIT. A layer rounds h, each slot's row, the sum, and with group scales on wide tiles the weights;
four independent roundings give 2 UNIT, and half a UNIT more is left for float32 accumulation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.kernel_cases import CASES, Case, by_name, half_elsewhere, inputs, reference
from tests.gpu.stored_layers import call, check, layer_of
from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels import fused_moe as fm
from vllm_moe_oracle.kernels import gemm
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig

TOKENS = (1, 2, 3, 17, 129, 513)
MANY_TOKENS = 2200  # more than 8192 slots of top-4: ids are then sorted in more than one step


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_reference(case, tokens):
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens)
    out = call(weights, x, router, ids, case)
    check(out, reference(case, layer, x, router, ids))
    assert torch.equal(out, call(weights, x, router, ids, case))


@pytest.mark.parametrize("routing", ["one", "negative"])
@pytest.mark.parametrize("tokens", (1, 3, 17, 129))
@pytest.mark.parametrize("case", by_name("int4-g128", "mxfp4-swigluoai", "mxfp8"), ids=lambda case: case.name)
def test_degenerate_routings(case, tokens, routing):
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens, routing)
    out = call(weights, x, router, ids.long(), case)
    check(out, reference(case, layer, x, router, ids))


@pytest.mark.parametrize("tokens", (1, 17, 129))
def test_expert_map(tokens):
    case = by_name("mxfp8")[0]
    layer, weights = layer_of(case)
    x, router, _ = inputs(case, tokens)
    expert_map, ids, local = (each.cuda() for each in half_elsewhere(case, tokens))
    out = call(weights, x, router, ids.int(), case, expert_map=expert_map)
    check(out, reference(case, layer, x, router, local))


def test_many_tokens():
    case = by_name("mxfp8")[0]
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, MANY_TOKENS, "negative")
    check(call(weights, x, router, ids, case), reference(case, layer, x, router, ids))


@pytest.mark.parametrize("experts", (1, 8, 100, 128, 384, 512, 1500))
@pytest.mark.parametrize("tokens", (3, 16, 64, 180, 200, 512, 3000))
@pytest.mark.parametrize("skewed", (False, True))
def test_lists_of_slots_and_blocks(experts, tokens, skewed):
    top_k, bm = min(8, experts), 16
    slots = tokens * top_k
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (slots,), generator=generator, dtype=torch.int32)
    if skewed:
        ids[torch.rand(slots, generator=generator) < 0.7] = experts // 2
    blocks = fm._block_list_entries(slots, experts, bm)
    table, ordered = (torch.full((n,), -7, dtype=torch.int32, device="cuda") for n in (blocks * 4, slots))
    sort, compiled = fm._sort_kernel(slots, experts)
    device_ids = ids.cuda()
    sort[(experts,)](device_ids, device_ids, ordered, table, slots, experts, blocks, HAS_MAP=False, BM=bm, PDL=False,
                     **compiled)  # fmt: skip
    expected, start = [], 0
    by_expert = [(ids == expert).nonzero()[:, 0].tolist() for expert in range(experts)]
    for expert, mine in enumerate(by_expert):
        expected += [[expert, start + at, min(bm, len(mine) - at)] for at in range(0, len(mine), bm)]
        start += len(mine)
    table = table.view(blocks, 4).cpu()
    assert ordered[:start].tolist() == [slot for mine in by_expert for slot in mine]
    assert table[table[:, 0] >= 0, :3].tolist() == expected
    assert (table[:, 0] >= -1).all()


def test_no_tokens():
    case = by_name("int4-g128")[0]
    x, router, ids = inputs(case, 0)
    assert call(layer_of(case)[1], x, router, ids, case).shape == (0, case.hidden)


@pytest.mark.parametrize("tokens", (1, 17, 129))
@pytest.mark.parametrize("case", by_name("mxfp8", "mxfp8-relu2", "mxfp8-fp16"), ids=lambda case: case.name)
def test_quantized_activations(case, tokens):
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens)
    out = call(weights, x, router, ids, case, quantize_activations=True)
    # A last-place difference of h can move one e4m3 value by its spacing, 2**-3 at most, in a few of many elements.
    check(out, reference(case, layer, x, router, ids, quantize=True))


@pytest.mark.parametrize(
    "tile",
    [
        TileConfig(16, 256, 64, scale_accumulators=False),
        TileConfig(16, 128, 128, num_stages=3, scale_accumulators=False),
        TileConfig(16, 256, 128, num_stages=3, scale_accumulators=False),
        TileConfig(16, 64, 128, num_stages=6),
        TileConfig(48, 128, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("format", ["int4", "mxfp4", "int8", "mxfp8"])
def test_the_same_bits_where_products_are_dense(format, tile):
    """Several programs to a multiprocessor and data in the cache: products are then late, and a step's weights must not
    be decoded into registers that products in flight still read."""
    case = Case("dense", format, 128 if format.startswith("int") else 32, hidden=1024, inner=512, experts=8, top_k=4)
    layer, weights = layer_of(case)
    config = LaunchConfig(tile, tile)
    for tokens in (64, 320):
        x, router, ids = inputs(case, tokens)
        outs = [call(weights, x, router, ids, case, config) for _ in range(12)]
        check(outs[0], reference(case, layer, x, router, ids))
        assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("tokens", (1, 17, 129))
def test_router_weight_on_input(tokens):
    case = by_name("int4-g128")[0]
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens)
    out = call(weights, x, router, ids, case, apply_router_weight_on_input=True)
    check(out, reference(case, layer, x, router, ids, apply_router_weight_on_input=True))


TILES = {
    "split-fused": LaunchConfig(
        TileConfig(16, 64, 128, split_k=2), TileConfig(16, 128, 128, split_k=2), per_slot=True, fuse_sum=True
    ),
    "split-lists": LaunchConfig(
        TileConfig(16, 128, 128, split_k=3), TileConfig(16, 64, 128, split_k=2), fuse_sum=True, prefetch=True
    ),
    "deep": LaunchConfig(
        TileConfig(16, 64, 256, num_stages=3), TileConfig(16, 128, 256, num_stages=3), per_slot=True, prefetch=True
    ),
    "k_parts": LaunchConfig(
        TileConfig(8, 64, 128, k_parts=2, num_warps=8), TileConfig(8, 64, 128, k_parts=2), per_slot=True, prefetch=True
    ),
    "fold-lists": LaunchConfig(
        TileConfig(4, 64, 64, k_parts=4, split_k=2), TileConfig(4, 64, 128, k_parts=4, num_warps=8), fuse_sum=True
    ),
    "fold-rows": LaunchConfig(
        TileConfig(8, 32, 128, k_parts=2), TileConfig(4, 16, 128, k_parts=4, num_stages=3), per_slot=True
    ),
    "fold-rows-lists": LaunchConfig(TileConfig(8, 32, 128, k_parts=2), TileConfig(8, 32, 64, k_parts=2), fuse_sum=True),
    "capped": LaunchConfig(
        TileConfig(16, 128, 128, num_stages=3, maxnreg=96, scale_accumulators=False),
        TileConfig(16, 128, 128, maxnreg=128),
    ),
    "no_k_loop": LaunchConfig(
        TileConfig(4, 32, 128, k_parts=4, no_k_loop=True),
        TileConfig(8, 64, 64, k_parts=2, no_k_loop=True),
        per_slot=True,
    ),
    "straight-wide": LaunchConfig(
        TileConfig(2, 32, 64, num_warps=8, k_parts=8, no_k_loop=True),
        TileConfig(16, 64, 128, no_k_loop=True),
        per_slot=True,
    ),
    "straight-lists": LaunchConfig(
        TileConfig(8, 32, 128, k_parts=2, no_k_loop=True), TileConfig(8, 64, 128, k_parts=2, no_k_loop=True)
    ),
    "merged": LaunchConfig(
        TileConfig(8, 64, 128, k_parts=2), TileConfig(1, 32, 64, no_k_loop=True, fused_topk=True), per_slot=True
    ),
    "merged-fold": LaunchConfig(
        TileConfig(8, 64, 128, k_parts=2),
        TileConfig(1, 16, 128, k_parts=4, no_k_loop=True, fused_topk=True),
        per_slot=True,
    ),
    "256-rows": LaunchConfig(TileConfig(16, 256, 64, scale_accumulators=False), TileConfig(16, 256, 64, num_stages=3)),
    "256-rows-lists": LaunchConfig(
        TileConfig(16, 256, 128, num_stages=3, scale_accumulators=False),
        TileConfig(16, 256, 64, scale_accumulators=False),
    ),
    "48": LaunchConfig(TileConfig(48, 128, 128, num_stages=3), TileConfig(48, 64, 64)),
    "80": LaunchConfig(TileConfig(80, 128, 64), TileConfig(80, 128, 128, num_warps=8, num_stages=3)),
    "96": LaunchConfig(TileConfig(96, 128, 64, num_stages=3), TileConfig(96, 128, 64, num_stages=3)),
    "32": LaunchConfig(TileConfig(32, 128, 128, num_stages=3), TileConfig(32, 64, 128, num_stages=3), fuse_sum=True),
    "64": LaunchConfig(TileConfig(64, 128, 128, num_stages=3), TileConfig(64, 128, 64, num_stages=3)),
    "128": LaunchConfig(
        TileConfig(128, 128, 64, num_warps=8, num_stages=3), TileConfig(128, 128, 64, num_warps=8, num_stages=3)
    ),
    "256": LaunchConfig(
        TileConfig(256, 128, 64, num_warps=8, num_stages=3), TileConfig(256, 128, 64, num_warps=8, num_stages=3)
    ),
}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize(
    "case",
    by_name("int4-g128", "int4-g32", "int4-g32-zero-bias", "int8-g128-relu2", "mxfp4-swigluoai", "mxfp8"),
    ids=lambda case: case.name,
)
def test_tiles(case, tiles):
    layer, weights = layer_of(case)
    config = TILES[tiles]
    for tokens in (3, 16) if config.per_slot else (3, 40, 300):
        x, router, ids = inputs(case, tokens, "negative")
        check(call(weights, x, router, ids, case, config), reference(case, layer, x, router, ids))


@pytest.mark.parametrize(
    ("case", "bk"),
    [("int4-g128", 128), ("int4-g128", 64), ("int8-g128-relu2", 128), ("int4-row-zero", 64), ("mxfp4-fp16", 64),
     ("mxfp8", 32), ("mxfp8-wide-scales", 128)],
)  # fmt: skip
@pytest.mark.parametrize("sweep", [2, 3])
def test_sweep(case, bk, sweep):
    (case,) = by_name(case)
    layer, weights = layer_of(case)
    config = LaunchConfig(TileConfig(16, 64, 128), TileConfig(16, 64, bk, num_stages=3, n_tiles=sweep))
    for tokens in (3, 40, 300):
        x, router, ids = inputs(case, tokens, "negative")
        check(call(weights, x, router, ids, case, config), reference(case, layer, x, router, ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batch_invariance(case):
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 257)
    alone = call(weights, x[:1], router[:1], ids[:1], case, batch_invariant=True)
    for tokens in (4, 16, 64, 257):
        out = call(weights, x[:tokens], router[:tokens], ids[:tokens], case, batch_invariant=True)
        assert torch.equal(out[:1], alone)


@pytest.mark.parametrize("tile", [TileConfig(16, 64, 128), TileConfig(64, 128, 64)], ids=["narrow", "wide"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_hot_rows_give_back_the_weights(case, tile):
    """h = one-hot rows makes the second product return single weights: decoding must be exact to the last bit."""
    layer, weights = layer_of(case)
    matrix, slots, expert = weights.w2, case.inner, 1
    h = torch.eye(slots, device="cuda", dtype=case.dtype)
    ids = torch.full((slots, 1), expert, device="cuda", dtype=torch.int32)
    ones = torch.ones(slots, 1, device="cuda")
    blocks = -(-slots // tile.bm)
    first = torch.arange(blocks, device="cuda", dtype=torch.int32) * tile.bm
    rows = (slots - first).clamp(max=tile.bm)
    table = torch.stack((torch.full_like(first, expert), first, rows, first), dim=1).contiguous()
    order = torch.arange(slots, device="cuda", dtype=torch.int32)
    out = torch.full((slots, case.hidden), float("nan"), device="cuda", dtype=case.dtype)
    tiles = -(-case.hidden // tile.bn)
    gemm.down[(blocks * tiles,)](
        h, *fm._tensor_arguments(matrix, ids), out, out, ids, ids, ones, order, table, out, table, table, slots, tiles,
        case.inner, case.hidden, out.stride(0), *matrix.codes.shape[1:3], fm._scale_stride(matrix), TOP_K=1,
        FORMAT=case.format, GROUP=case.group, HAS_MAP=False, WEIGHT_INPUT=False, PER_SLOT=False, FUSE_SUM=False,
        PDL=False, **{**fm._constexprs(weights, matrix, tile), "HAS_BIAS": False}, **fm._compile_options(tile, False),
    )  # fmt: skip
    assert torch.equal(out.T, layer.matrix["w2"][expert].cuda().to(case.dtype))


def test_graph_replay():
    case = by_name("mxfp4-swigluoai")[0]
    layer, weights = layer_of(case)
    for tokens in (2, 40):
        x, router, ids = inputs(case, tokens)
        config = configs.choose_config(weights, case.top_k, tokens)
        plan = fm.workspace_layout(weights, tokens, case.top_k, config)
        workspace = torch.empty(plan.nbytes, dtype=torch.uint8, device="cuda")
        counters = torch.zeros(max(1, plan.counters), dtype=torch.int32, device="cuda")
        out = torch.empty_like(x)
        arguments = {"activation": case.activation, "limit": case.limit, "workspace": workspace, "counters": counters}
        fm.fused_moe(x, weights, router, ids, out=out, **arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                fm.fused_moe(x, weights, router, ids, out=out, **arguments)
        for seed in range(3):
            fresh = inputs(replace(case), tokens + 100 + seed)
            for target, source in zip((x, router, ids), fresh, strict=True):
                target.copy_(source[:tokens])
            out.fill_(float("nan"))
            graph.replay()
            check(out, reference(case, layer, x, router, ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reference_beside_the_launcher(case):
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, 17, "negative")
    out = fm.fused_moe_reference(x, weights, router, ids, activation=case.activation, limit=case.limit)
    check(out, reference(case, layer, x, router, ids))


def test_errors():
    case = by_name("int4-g128")[0]
    _, weights = layer_of(case)
    x, router, ids = inputs(case, 4)
    for name in ("tanh", "relu2"):
        with pytest.raises(ValueError, match=f"'{name}' of experts with a gate"):
            call(weights, x, router, ids, replace(case, activation=name))
    with pytest.raises(ValueError, match="expected"):
        call(weights, x[:, :32].contiguous(), router, ids, case)
    with pytest.raises(ValueError, match="workspace of"):
        fm.fused_moe(x, weights, router, ids, activation="silu", workspace=torch.empty(16, device="cuda"),
                     counters=torch.zeros(1, dtype=torch.int32, device="cuda"), out=torch.empty_like(x))  # fmt: skip
