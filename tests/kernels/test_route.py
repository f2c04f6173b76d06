"""Lists of slots and blocks, by Triton's interpreter: no GPU, but the kernels' own code.

The interpreter is chosen when kernels are defined, so it runs in a process of its own: this file, as a script.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.lib.interpreted import run_interpreted  # noqa: E402

# experts, slots, rows of a block, share of slots that one expert gets
LISTS = [
    (1, 1, 16, 0.0), (1, 700, 16, 0.0), (8, 40, 16, 0.0), (60, 50, 16, 0.3), (8, 511, 48, 0.0), (8, 512, 48, 0.0),
    (16, 2048, 16, 0.0), (12, 4096, 48, 0.7), (5, 5000, 16, 0.5), (10, 9000, 64, 0.2),
]  # fmt: skip


def test_slots_and_blocks_are_listed() -> None:
    assert run_interpreted(__file__) == ["listed"] * len(LISTS)


def listed(experts: int, slots: int, bm: int, share: float) -> None:
    """Asserts that the sorting kernel for so many slots lists them as a loop over experts does."""
    from vllm_moe_oracle.kernels import fused_moe

    generator = torch.Generator().manual_seed(slots)
    ids = torch.randint(-1, experts, (slots,), generator=generator, dtype=torch.int32)
    ids[torch.rand(slots, generator=generator) < share] = experts // 2
    blocks = fused_moe._block_list_entries(slots, experts, bm)
    table, ordered = torch.full((blocks * 4,), -7, dtype=torch.int32), torch.full((slots,), -7, dtype=torch.int32)
    sort, compiled = fused_moe._sort_kernel(slots, experts)
    sort[(experts,)](ids, ids, ordered, table, slots, experts, blocks, HAS_MAP=False, BM=bm, PDL=False, **compiled)
    expected: list[list[int]] = []
    order: list[int] = []
    for expert in range(experts):
        mine = (ids == expert).nonzero()[:, 0].tolist()
        expected += [[expert, len(order) + at, min(bm, len(mine) - at)] for at in range(0, len(mine), bm)]
        order += mine
    entries = table.view(blocks, 4)
    assert ordered[: len(order)].tolist() == order
    assert bool((ordered[len(order) :] == -7).all())
    assert entries[entries[:, 0] >= 0, :3].tolist() == expected
    assert bool((entries[:, 0] >= -1).all())


if __name__ == "__main__":
    for case in LISTS:
        listed(*case)
        print("listed")
