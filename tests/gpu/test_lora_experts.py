"""LoRA adapters on experts with this project's kernels, on one Hopper card.

The kernels with an addend against a float32 reference; whole layers with vLLM's LoRA layer and its own LoRA kernels,
against merged weights (`lora_layer.py`); tiny models served with an adapter of their experts, against float32
transformers. Needs vLLM; the last part needs the plugin installed. Compiling takes most of the time:

    python -m pytest -q -m gpu -n 8 --dist worksteal -p no:benchmark tests/gpu/test_lora_experts.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.gpu import backend_table, kernel_cases, lora_layer, ranks
from tests.gpu.kernel_cases import UNIT, by_name, half_elsewhere, inputs, reference
from tests.gpu.stored_layers import call, check, layer_of
from tests.lib import adapters
from tests.lib import reference as transformers_reference
from vllm_moe_oracle.core.problem import Routing, Scheme
from vllm_moe_oracle.kernels import config as configs
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig
from vllm_moe_oracle.kernels.weights import allocate_weights

# --- The kernels ------------------------------------------------------------------------------------------------------

CASES = by_name(
    "int4-g128", "int4-g32-zero-bias", "int4-row", "int8-row-zero", "int8-g128-relu2", "mxfp4-swigluoai", "mxfp8",
    "mxfp8-relu2", "mxfp8-fp16",
)  # fmt: skip
MANY = (
    kernel_cases.Case("int4", "int4", 128, hidden=384, inner=256),
    kernel_cases.Case("mxfp8", "mxfp8", 32, experts=4, hidden=320, inner=224),
    kernel_cases.Case("relu2", "mxfp8", 32, "relu2", experts=4, hidden=256, inner=288),
    kernel_cases.Case("swigluoai", "mxfp4", 32, "swigluoai", bias=True, limit=7.0, experts=4, hidden=320, inner=160),
)
"""For the persistent kernels: blocks of all four sizes, inner sizes that end within a tile of 256 rows."""
TILES = {
    "split, sum in the second GEMM": LaunchConfig(
        TileConfig(16, 64, 128, split_k=2), TileConfig(16, 128, 128, split_k=2), per_slot=True, fuse_sum=True
    ),
    "one GEMM of all choices": LaunchConfig(
        TileConfig(8, 64, 128, k_parts=2), TileConfig(1, 32, 64, no_k_loop=True, fused_topk=True), per_slot=True
    ),
    "48": LaunchConfig(TileConfig(48, 128, 128, num_stages=3), TileConfig(48, 64, 64)),
    "128": LaunchConfig(
        TileConfig(128, 128, 64, num_warps=8, num_stages=3), TileConfig(128, 128, 64, num_warps=8, num_stages=3)
    ),
}


def assert_adds(
    case: kernel_cases.Case, tokens: int, config: LaunchConfig | PrefillConfig | None = None, mapped: bool = False
) -> None:
    """An addend of zeros changes no bit, another does what the reference does, and h comes by slot."""
    layer, weights = layer_of(case)
    x, router, ids = inputs(case, tokens, "negative" if tokens > 1 else "random")
    expert_map, local = None, ids
    if mapped:
        expert_map, ids, local = (each.cuda() for each in half_elsewhere(case, tokens))
        ids = ids.int()
    slots, rows = ids.numel(), weights.w13.rows
    size = float(layer.matrix["w13"].std() * x.float().norm(dim=1).mean()) / 2
    generator = torch.Generator(device="cuda").manual_seed(1)
    addend = (torch.randn(slots, rows, device="cuda", generator=generator) * size).to(x.dtype)
    addend[local.flatten() < 0] = torch.nan  # is not read

    def run(addend: torch.Tensor | None, h: torch.Tensor | None) -> torch.Tensor:
        return call(weights, x, router, ids, case, config, expert_map=expert_map, addend=addend, h=h)

    h, ignored, expected_h = (x.new_full((slots, case.inner), torch.nan) for _ in range(3))
    plain = run(None, None)
    assert torch.equal(run(torch.zeros_like(addend), ignored), plain)
    out = run(addend, h)
    check(out, reference(case, layer, x, router, local, addend=addend, slot_h=expected_h))
    assert torch.equal(out, run(addend, ignored)) and not torch.equal(out, plain)
    here = local.flatten() >= 0
    assert bool(h[~here].isnan().all())
    difference = h[here].double() - expected_h[here].double()
    # h is rounded once on both sides. An addend in the wrong rows or columns would be as large as h.
    assert difference.norm() <= 2 * UNIT[x.dtype] * expected_h[here].double().norm()


@pytest.mark.parametrize("tokens", (1, 17, 129))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_addend_is_added_before_the_activation(case: kernel_cases.Case, tokens: int) -> None:
    assert_adds(case, tokens)


@pytest.mark.parametrize("name", TILES)
def test_with_every_kind_of_tile(name: str) -> None:
    assert_adds(by_name("int4-g128")[0], 3 if TILES[name].per_slot else 129, TILES[name])


@pytest.mark.parametrize("mapped", (False, True), ids=("all here", "expert map"))
@pytest.mark.parametrize("case", MANY, ids=lambda case: case.name)
def test_with_the_persistent_kernels(case: kernel_cases.Case, mapped: bool) -> None:
    assert_adds(case, 500, PrefillConfig(), mapped)


def test_with_an_expert_map() -> None:
    assert_adds(by_name("mxfp8")[0], 17, mapped=True)


# --- Layers -----------------------------------------------------------------------------------------------------------

_MXFP8 = backend_table.table_of("mxfp8").cases["tiny_silu"].scheme
RELU2 = backend_table.Case("tiny_relu2", _MXFP8, 8, 2, 256, 96, "relu2_no_mul")
PERSISTENT = backend_table.Case(
    "eight_experts", Scheme("mxfp4", bits=4, group_size=32, packing="mxfp4"), 8, 2, 2048, 768, "silu",
    routing=Routing("renormalize"),
)  # fmt: skip
LAYERS = (
    ("mxfp8", "tiny_silu", False), ("mxfp8", "tiny_swigluoai", False), ("mxfp8", RELU2, False),
    ("mxfp4", "tiny_oai", False), ("mxfp4", "tiny_oai", True), ("mxfp4", "tiny_silu", False),
    ("wna16", "tiny_g32", False), ("wna16", "tiny_int8_zeros", False), ("wna16", "tiny_bias", False),
    ("mxfp4", PERSISTENT, False),
)  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """vLLM's process groups of this process, and the plugin; kernels compile when they are called."""
    from vllm_moe_oracle import plugin

    backend_table.join_alone("cuda")
    plugin.register()
    with mock.patch("vllm_moe_oracle.backends._hopper.warm_up"):
        yield
    plugin.unregister()
    backend_table.leave()


@pytest.mark.parametrize(
    ("scheme", "layer", "of_both"), LAYERS, ids=[f"{a}-{getattr(b, 'name', b)}{'-both' * c}" for a, b, c in LAYERS]
)
def test_layers_with_adapters_do_what_merged_weights_do(
    scheme: str, layer: str | backend_table.Case, of_both: bool, alone: None
) -> None:
    table = backend_table.table_of(scheme)
    case = layer if isinstance(layer, backend_table.Case) else table.cases[layer]
    tokens = (1500,) if case is PERSISTENT else (1, 3, 17, 65)
    if case is PERSISTENT:
        blank = allocate_weights("mxfp4", case.experts, case.hidden, case.inner, device="meta")
        assert isinstance(configs.choose_config(blank, case.top_k, tokens[0]), PrefillConfig)
    errors = lora_layer.check(table, case, "cuda", f"hopper_{scheme}", tokens, of_both, graph=True)
    words = ", ".join(f"{name} {value:.4f}" for name, value in errors.items())
    print(f"{scheme} {case.name}{' both' * of_both}: {words}; limit {lora_layer.LIMIT:.4f}")


# --- Models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "eager"), [("mxfp8 modelopt", False), ("gptq g32", True)])
def test_a_model_with_an_adapter_of_its_experts(name: str, eager: bool, tmp_path: Path) -> None:
    """Without the adapter, with it, and both in one batch; compiled with CUDA graphs, or eagerly."""
    path, exact = ranks.write_format(tmp_path, name, 0)
    adapter = adapters.write_experts(exact, tmp_path / "adapter", tmp_path / "merged")
    engine = {"lora_target_modules": None, "enforce_eager": eager} | ({} if eager else ranks.GRAPHS)
    backend = ranks.BACKENDS["wna16" if name in ranks.INTEGERS else name.partition(" ")[0]]
    job = {
        "feature": "lora", "checkpoint": str(path), "adapter": str(adapter), "dtype": "bfloat16",
        "tokens": ranks.TOKENS, "prompt": ranks.LONG_PROMPT, "oracle": {"backend": backend}, "engine": engine,
    }  # fmt: skip
    plain, merged = (
        transformers_reference.transformers_logits(
            each, [ranks.LONG_PROMPT], max_new_tokens=ranks.TOKENS
        )[0] for each in (exact, tmp_path / "merged")
    )  # fmt: skip
    folder = tmp_path / "served"
    folder.mkdir()
    row = ranks.judge(job, ranks.serve(folder, job, 0), plain, merged)
    print(name, {key: value for key, value in row.items() if key != "log"})
    assert row["ok"] and row["backends"] == [backend] and row["answers"] == 3, row
