"""What LoRA adapters add to the first product: `fused_moe`'s addend, without a GPU.

The epilogue runs in Triton's interpreter, in a process of its own (see test_route.py). Its sums are float32 additions,
which are the same everywhere; the activation's exponential is not, so `torch` is compared within a few units in the
last place and the epilogue with itself bit for bit.
"""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

import triton.language as tl  # noqa: E402

from tests.lib.interpreted import run_interpreted  # noqa: E402
from tests.lib.kernel_launches import compile_launch, launches, stack_bytes  # noqa: E402
from tests.lib.tiers import sampled  # noqa: E402
from tests.tools.kernel_digests import Digests  # noqa: E402
from vllm_moe_oracle.core.problem import Activation  # noqa: E402
from vllm_moe_oracle.kernels.activations import activate  # noqa: E402
from vllm_moe_oracle.kernels.epilogue import store_activated  # noqa: E402
from vllm_moe_oracle.kernels.fused_moe import check_slot_rows, fused_moe_reference  # noqa: E402
from vllm_moe_oracle.kernels.launch_config import LaunchConfig, TileConfig  # noqa: E402
from vllm_moe_oracle.kernels.prefill_config import PrefillConfig  # noqa: E402
from vllm_moe_oracle.kernels.weights import allocate_weights, pack_expert  # noqa: E402

# gated, biases, router weights on the input, limit
EPILOGUES = [
    (True, False, False, None), (True, True, False, 1.5), (True, True, True, None), (False, True, False, None),
    (False, False, False, None),
]  # fmt: skip
INNER, BM, BN, SLOTS = 40, 16, 64, 24
TILE = TileConfig(16, 64, 128)
SPILLS = 256
"""Bytes a thread that the persistent first GEMM with an addend keeps on the stack; without one it keeps none. Triton
3.9 and 3.6 keep 16 to 240, in the epilogue."""


def test_the_epilogue_adds_before_the_activation() -> None:
    assert run_interpreted(__file__) == ["added"] * len(EPILOGUES)


@triton.jit
def store_tile(acc_ptr, scale_ptr, bias_ptr, router_ptr, h_ptr, slot_ptr, addend_ptr, count, inner, alpha, beta, limit,
               HAS_BIAS: tl.constexpr, WEIGHT_INPUT: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
               HAS_LIMIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """`store_activated` of one tile, whose sums are `[tiles * BN, BM]` in memory."""
    tile_n = tl.program_id(0)
    n, m = tile_n * BN + tl.arange(0, BN), tl.arange(0, BM)
    acc = tl.load(acc_ptr + n[:, None] * BM + m[None, :])
    slot = tl.load(slot_ptr + m)
    scale, bias, router = tl.load(scale_ptr + n), tl.load(bias_ptr + n), tl.load(router_ptr + slot)
    store_activated(acc, scale, bias, router, h_ptr, slot, m < count, tile_n, inner, alpha, beta, limit, True, HAS_BIAS,
                    WEIGHT_INPUT, GATED, ACTIVATION, HAS_LIMIT, False, BM, BN, addend_ptr)  # fmt: skip


def added(gated: bool, bias: bool, on_input: bool, limit: float | None) -> None:
    """Asserts what holds of the rows that the first GEMM's tiles store, for slots out of order."""
    generator = torch.Generator().manual_seed(gated + 2 * bias)
    rows = INNER * (1 + gated)
    tiles = -(-rows // BN)
    stored = torch.randn(tiles * BN, BM, generator=generator)
    scale, biases = torch.rand(tiles * BN, generator=generator) + 0.5, torch.randn(tiles * BN, generator=generator)
    slot = torch.randperm(SLOTS, generator=generator)[:BM].int()
    count = BM - 3  # rows of the block beyond that are nobody's
    router = torch.rand(SLOTS, generator=generator)
    addend = torch.randn(SLOTS, rows, generator=generator).half()
    activation = Activation("silu" if gated else "relu2", gated, 1.25 if gated else None, 0.5 if gated else None, limit)

    def run(extra: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        h = torch.full((SLOTS, INNER), torch.nan, dtype=dtype)
        store_tile[(tiles,)](stored, scale, biases, router, h, slot, extra, count, INNER, 1.25, 0.5, limit or 0.0, bias,
                        on_input, gated, "swiglu" if gated else "relu2", limit is not None, BM=BM, BN=BN)  # fmt: skip
        return h

    product = stored * scale[:, None]
    if on_input:
        product = product * router[slot.long()]
    product = product + biases[:, None] if bias else product
    if gated:  # rows of gate and up alternate in eights
        gate, up = product.view(-1, 2, 8, BM).transpose(0, 1).flatten(1, 2)
        product = torch.cat((gate[:INNER], up[:INNER]))
    y = product[:rows].T
    mine = slot[:count].long()
    other = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, mine, False)
    plain, zero, moved = run(None), run(torch.zeros_like(addend)), run(addend)
    assert torch.equal(plain[mine], zero[mine]) and bool(plain[other].isnan().all() & moved[other].isnan().all())
    torch.testing.assert_close(plain[mine], activate(y, activation)[:count], rtol=2e-6, atol=2e-6)
    wanted = activate(y[:count] + addend[mine].float(), activation)
    torch.testing.assert_close(moved[mine], wanted, rtol=2e-6, atol=2e-6)
    # h is rounded once, as without an addend.
    assert torch.equal(run(addend, torch.float16)[mine], moved[mine].half())


def layer(gated: bool = True, bias: bool = True) -> object:
    weights = allocate_weights("int4", 4, 64, 32, gated=gated, group=32, bias=bias, dtype=torch.float16, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for which, matrix in (("w13", weights.w13), ("w2", weights.w2)):
        for expert in range(4):
            codes = torch.randint(0, 256, (matrix.rows, matrix.columns // 2), generator=generator, dtype=torch.uint8)
            scales = (torch.rand(matrix.rows, matrix.columns // 32, generator=generator) / 64).half()
            offsets = torch.randn(matrix.rows, generator=generator) if bias else None
            pack_expert(weights, which, expert, codes, scales, None, offsets)
    return weights


@pytest.mark.parametrize("gated", (True, False))
def test_the_reference_adds_what_a_larger_weight_would(gated: bool) -> None:
    """The addend is what more weight gives: x @ update.T of each slot's expert."""
    weights, generator = layer(gated), torch.Generator().manual_seed(1)
    rows = 32 * (1 + gated)
    x = torch.randn(5, 64, generator=generator).half()
    router, ids = torch.rand(5, 2, generator=generator), torch.tensor([[0, 3], [1, 2], [-1, 1], [5, 0], [-1, -1]])
    places = torch.tensor([2, 0, 1, -1, -1, 3], dtype=torch.int32)
    options = {"activation": "swigluoai" if gated else "relu2", "limit": 2.0 if gated else None, "expert_map": places}
    h, nothing = (torch.full((10, 32), torch.nan, dtype=torch.float16) for _ in range(2))
    plain = fused_moe_reference(x, weights, router, ids, **options)
    zeros = torch.zeros(10, rows, dtype=torch.float16)
    assert torch.equal(fused_moe_reference(x, weights, router, ids, addend=zeros, h=nothing, **options), plain)
    addend = torch.randn(10, rows, generator=generator).half()
    moved = fused_moe_reference(x, weights, router, ids, addend=addend, h=h, **options)
    local = torch.where(ids >= 0, places.long()[ids.clamp(min=0)], -1)
    here = (local >= 0).flatten()
    assert bool(h[~here].isnan().all()) and bool(h[here].isfinite().all())
    assert not torch.equal(moved, plain) and not moved[-1].any()


def test_arguments_that_do_not_fit_are_refused() -> None:
    weights, x, ids = layer(), torch.zeros(3, 64).half(), torch.zeros(3, 2)
    addend, h = torch.zeros(6, 64).half(), torch.zeros(6, 32).half()
    check_slot_rows(x, weights, ids, addend, h)
    check_slot_rows(x, weights, ids, None, None)
    with pytest.raises(ValueError, match="h is missing"):
        check_slot_rows(x, weights, ids, addend, None)
    with pytest.raises(ValueError, match=r"addend is torch.float32 \(6, 64\); expected contiguous torch.float16"):
        check_slot_rows(x, weights, ids, addend.float(), h)
    with pytest.raises(ValueError, match=r"h is torch.float16 \(3, 32\); expected .* \(6, 32\)"):
        check_slot_rows(x, weights, ids, addend, h[:3])


@pytest.mark.full
@pytest.mark.parametrize("layer_name", sampled(["gptoss", "nemotron"], 2))
def test_kernels_with_an_addend_compile_beside_those_without(layer_name: str) -> None:
    """Both first GEMMs; those without an addend have no argument for it, all other kernels are the same."""
    digests = Digests()
    for config, spills in ((LaunchConfig(TILE, TILE), 0), (PrefillConfig(), SPILLS)):
        plain, adapted = (launches(layer_name, 64, config, addend=addend) for addend in (False, True))
        for one, other in zip(plain, adapted, strict=True):
            assert (digests.of(one) == digests.of(other)) == (one[0].__name__ != "gate_up")
        made = compile_launch(next(each for each in adapted if each[0].__name__ == "gate_up"))
        assert stack_bytes(made.asm["cubin"]) <= spills and made.metadata.shared <= 227 * 1024


if __name__ == "__main__":
    for case in EPILOGUES:
        added(*case)
        print("added")
