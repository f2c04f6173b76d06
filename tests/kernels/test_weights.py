"""The kernels' weights, configurations and reference, on the CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.kernel_cases import CASES, Case, Layer, by_name, make_layer, reference  # noqa: E402
from vllm_moe_oracle.kernels import config as configs  # noqa: E402
from vllm_moe_oracle.kernels import fused_moe as fm  # noqa: E402
from vllm_moe_oracle.kernels import heuristic, launch_config  # noqa: E402
from vllm_moe_oracle.kernels import weights as kernel_weights  # noqa: E402
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig  # noqa: E402
from vllm_moe_oracle.testing.conftest import one_thread  # noqa: E402, F401  # a fixture


def stored(case: Case, layer: Layer) -> kernel_weights.PackedWeights:
    weights = kernel_weights.allocate_weights(
        case.format, case.experts, case.hidden, case.inner, gated=case.gated, group=case.group, dtype=case.dtype,
        zero_points=case.zero_points, bias=case.bias,
    )  # fmt: skip
    for which in ("w13", "w2"):
        for expert in range(case.experts):
            parts = (layer.codes, layer.scales, layer.zeros, layer.bias)
            tensors = [None if part[which] is None else part[which][expert] for part in parts]
            kernel_weights.pack_expert(weights, which, expert, *tensors)
    return weights


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_come_back(case: Case) -> None:
    layer = make_layer(case)
    weights = stored(case, layer)
    for which in ("w13", "w2"):
        for expert in (0, case.experts - 1):
            restored = kernel_weights.unpack_expert(weights, which, expert)
            for tensor, part in zip(restored, (layer.codes, layer.scales, layer.zeros, layer.bias), strict=True):
                assert (tensor is None) == (part[which] is None)
                if tensor is not None:
                    assert torch.equal(tensor.float(), part[which][expert].float())
            values = kernel_weights.dequantize_expert(weights, which, expert)
            assert torch.equal(values, layer.matrix[which][expert])


FEW = ("int4-g32-zero-bias", "int8-row-fp16", "mxfp4-swigluoai", "mxfp8-relu2", "int4-g64-zero-gelu")


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("case", by_name(*FEW), ids=lambda case: case.name)
def test_reference_agrees_with_an_independent_one(case: Case, quantize: bool) -> None:
    layer = make_layer(case)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, case.hidden, generator=generator).to(case.dtype)
    ids = torch.randint(-1, case.experts, (9, case.top_k), generator=generator)
    router = torch.rand(9, case.top_k, generator=generator)
    out = fm.fused_moe_reference(x, stored(case, layer), router, ids, activation=case.activation, limit=case.limit,
                                 quantize_activations=quantize)  # fmt: skip
    expected = reference(case, layer, x, router, ids, quantize=quantize)
    # Both round h alike; only the output's rounding differs.
    assert (out.float() - expected).norm() <= torch.finfo(case.dtype).eps / 12**0.5 * expected.norm()


def test_extreme_mx_scales_come_back() -> None:
    weights = kernel_weights.allocate_weights("mxfp8", 1, 64, 64, gated=False)
    codes = torch.arange(64 * 64).view(64, 64).to(torch.uint8)
    scales = torch.tensor([[0, 254], [254, 0], [0, 0], [255, 1], [127, 255]], dtype=torch.uint8).repeat(13, 1)[:64]
    kernel_weights.pack_expert(weights, "w13", 0, codes, scales)
    restored = kernel_weights.unpack_expert(weights, "w13", 0)
    assert torch.equal(restored[0], codes)
    assert torch.equal(restored[1], scales)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fp5", 64, 64, 32, torch.bfloat16), "weight format"),
        (("int4", 48, 64, 32, torch.bfloat16), "hidden size 48"),
        (("int4", 192, 128, 128, torch.bfloat16), "hidden size 192 is not a multiple of the scale group 128"),
        (("mxfp4", 64, 64, 64, torch.bfloat16), "scale group 64"),
        (("int8", 64, 64, 64, torch.float32), "float32"),
    ],
)
def test_every_broken_rule_is_reported(arguments: tuple[Any, ...], words: str) -> None:
    assert any(words in reason for reason in kernel_weights.storage_errors(*arguments))
    format, hidden, inner, group, dtype = arguments
    with pytest.raises(ValueError, match=words.split()[0]):
        kernel_weights.allocate_weights(format, 1, hidden, inner, group=group, dtype=dtype)


def test_wrong_tensors_are_refused() -> None:
    weights = kernel_weights.allocate_weights("int4", 1, 64, 64, group=32)
    scales = torch.ones(128, 2)
    with pytest.raises(ValueError, match="codes of expert 0"):
        kernel_weights.pack_expert(weights, "w13", 0, torch.zeros(128, 64, dtype=torch.uint8), scales)
    with pytest.raises(ValueError, match="scales of expert 0"):
        kernel_weights.pack_expert(weights, "w13", 0, torch.zeros(128, 32, dtype=torch.uint8), scales[:, :1])
    with pytest.raises(ValueError, match="zero points and biases"):
        kernel_weights.pack_expert(weights, "w13", 0, torch.zeros(128, 32, dtype=torch.uint8), scales, scales.byte())


def layers() -> list[tuple[kernel_weights.PackedWeights, int]]:
    shapes = [(128, 8, 2048, 768), (32, 4, 2880, 2880), (384, 8, 7168, 256), (8, 2, 256, 96), (64, 1, 4096, 14336)]
    return [
        (kernel_weights.allocate_weights(format, experts, hidden, inner, group=group, device="meta"), top_k)
        for experts, top_k, hidden, inner in shapes
        for format, group in (("mxfp8", 32), ("mxfp4", 32), ("int4", 32), ("int8", 32))
    ]


def test_every_number_of_tokens_has_a_configuration() -> None:
    for weights, top_k in layers():
        for tokens in (1, 2, 3, 4, 5, 7, 16, 33, 64, 100, 256, 513, 1000, 4096, 20000):
            config = configs.choose_config(weights, top_k, tokens)
            tiles = configs.choose_launch_config(weights, top_k, tokens)
            assert launch_config.keeps_mx_groups(
                weights, configs.choose_launch_config(weights, top_k, tokens, quantize=True)
            )
            assert configs.choose_config(weights, top_k, tokens, quantize=True) == configs.choose_launch_config(
                weights, top_k, tokens, quantize=True
            )
            assert LaunchConfig.from_json(json.loads(json.dumps(tiles.to_json()))) == tiles
            plan = fm.workspace_layout(weights, tokens, top_k, config)
            slots = tokens * top_k
            assert plan.partial - plan.h >= slots * weights.intermediate * 2
            assert plan.nbytes >= plan.scratch >= plan.partial + slots * weights.hidden * 2
            assert all(offset % 256 == 0 for offset in (plan.h, plan.partial, plan.sorted, plan.blocks, plan.scratch))


def test_measured_table_is_in_order() -> None:
    for shapes in configs.measured_table().values():
        for rows in shapes.values():
            counts = [row["tokens"] for row in rows]
            assert counts == sorted(set(counts))
            for row in rows:
                assert row["config"] is None or LaunchConfig.from_json(row["config"])


def test_the_table_leaves_a_choice_to_the_rule_where_it_has_none() -> None:
    """Between its own configurations, so that the next one's does not reach down."""
    between = 0
    for name, shapes in configs.measured_table().items():
        format, _, group = name.partition(" g")
        for shape, table in shapes.items():
            experts, total, top_k, hidden, inner, gated = configs._parse_shape_key(shape)
            weights = kernel_weights.allocate_weights(
                format, experts, hidden, inner, gated=gated, group=int(group or 32), num_experts=total, device="meta"
            )
            for place, row in enumerate(table[:-1]):
                if row["config"] is None:
                    chosen = configs.choose_launch_config(weights, top_k, row["tokens"])
                    assert chosen == heuristic.heuristic_config(weights, top_k, row["tokens"])
                    assert None not in configs.candidate_configs(weights, top_k, row["tokens"], 50)
                    between += place > 0
    assert between > 0


def test_impossible_tiles_are_refused() -> None:
    up, merged = TileConfig(16, 64, 128), TileConfig(1, 16, 128, num_warps=8, no_k_loop=True, fused_topk=True)
    with pytest.raises(ValueError, match="excludes split_k"):
        TileConfig(16, 64, 128, split_k=2, no_k_loop=True)
    with pytest.raises(ValueError, match="n_tiles excludes"):
        TileConfig(8, 64, 128, k_parts=2, n_tiles=4)
    with pytest.raises(ValueError, match="fused_topk needs"):
        TileConfig(1, 16, 128, num_warps=8, fused_topk=True)
    with pytest.raises(ValueError, match="only down"):
        LaunchConfig(TileConfig(16, 64, 128, n_tiles=2), up)
    with pytest.raises(ValueError, match="fuse_sum"):
        LaunchConfig(up, TileConfig(16, 64, 128, n_tiles=2), fuse_sum=True)
    with pytest.raises(ValueError, match="fuse_sum"):
        LaunchConfig(up, merged, per_slot=True, fuse_sum=True)
    with pytest.raises(ValueError, match="bm \\* k_parts"):
        TileConfig(8, 64, 128)
    with pytest.raises(ValueError, match="bn \\* k_parts"):
        TileConfig(16, 32, 128)
    with pytest.raises(ValueError, match="must be equal"):
        LaunchConfig(TileConfig(16, 64, 128), TileConfig(32, 64, 128))


MERGE = TileConfig(1, 16, 128, num_warps=8, no_k_loop=True, fused_topk=True)
UP = TileConfig(8, 32, 128, k_parts=2)


@pytest.mark.parametrize(
    ("format", "top_k", "config", "reason"),
    [
        (
            "int4",
            2,
            LaunchConfig(TileConfig(16, 64, 32), TileConfig(16, 64, 64)),
            "gate_up: int4 codes are stored by 64 columns, bk 32",
        ),
        (
            "mxfp4",
            2,
            LaunchConfig(TileConfig(16, 64, 64), TileConfig(16, 64, 32)),
            "down: mxfp4 codes are stored by 64 columns, bk 32",
        ),
        (
            "int8",
            2,
            LaunchConfig(TileConfig(16, 64, 128), TileConfig(16, 64, 128, n_tiles=2)),
            "320 columns are not a multiple of bk 128",
        ),
        (
            "int4",
            12,
            LaunchConfig(UP, replace(MERGE, k_parts=2), per_slot=True),
            r"16 \(top_k 12\) x 2 \(k_parts\) parts",
        ),
        ("int4", 17, LaunchConfig(UP, MERGE, per_slot=True), r"32 \(top_k 17\) x 1 \(k_parts\) parts of 16 rows"),
        ("int4", 2, LaunchConfig(UP, MERGE, per_slot=True), r"2 \(top_k 2\) x 1 \(k_parts\) parts of 16 rows"),
        (
            "mxfp8",
            2,
            LaunchConfig(TileConfig(16, 256, 256, num_stages=5), TileConfig(16, 64, 128)),
            "5 stages .* 311296 bytes .* 232448",
        ),
        (
            "int4",
            2,
            LaunchConfig(TileConfig(256, 128, 128, num_stages=4), TileConfig(256, 64, 64)),
            "gate_up: 4 stages of 256 x 128",
        ),
    ],
)
def test_configurations_that_no_kernel_runs_are_refused(
    format: str, top_k: int, config: LaunchConfig, reason: str
) -> None:
    """With what is wrong, before anything is launched; candidates leave them out."""
    weights = kernel_weights.allocate_weights(format, 32, 256, 320, group=32)
    (found,) = launch_config.config_errors(weights, top_k, config)
    assert re.search(reason, found)
    assert not configs.is_suitable(weights, top_k, config, quantize=False)
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    ids = torch.zeros(1, top_k, dtype=torch.int32)
    with pytest.raises(ValueError, match=reason):
        fm.fused_moe(x, weights, ids.float(), ids, activation="silu", workspace=torch.empty(1 << 20, dtype=torch.uint8),
                     counters=torch.zeros(64, dtype=torch.int32), out=x.clone(), config=config)  # fmt: skip


def test_measured_configurations_run_on_their_shapes() -> None:
    for name, shapes in configs.measured_table().items():
        format, _, group = name.partition(" g")
        for shape, rows in shapes.items():
            experts, top_k, hidden, inner = map(int, re.findall(r"\d+", shape))
            weights = kernel_weights.allocate_weights(format, experts, hidden, inner, gated=shape.endswith("gated"),
                                              group=int(group or 32), device="meta")  # fmt: skip
            for row in rows:
                if row["config"] is not None:
                    found = LaunchConfig.from_json(row["config"])
                    assert not launch_config.config_errors(weights, top_k, found), (name, shape, row)


def test_blocks_are_enough_for_any_routing() -> None:
    generator = torch.Generator().manual_seed(0)
    for experts, slots, bm in ((1, 1, 16), (4, 100, 16), (128, 64, 16), (3, 17, 32), (5, 161, 32)):
        most = fm.max_blocks(slots, experts, bm)
        for _ in range(50):
            counts = torch.bincount(torch.randint(0, experts, (slots,), generator=generator), minlength=experts)
            assert int((-(-counts // bm)).sum()) <= most
        assert -(-slots // bm) <= most
