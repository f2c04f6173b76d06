"""The kernel that sorts slots for peers, by Triton's interpreter (see tests/kernels/test_route.py)."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tests.lib.interpreted import run_interpreted  # noqa: E402

# tokens, experts per token, experts, expert map
CALLS = [(1, 1, 1, False), (1, 8, 128, False), (33, 4, 16, True), (700, 8, 5, False), (1030, 8, 12, True)]


def test_slots_are_sorted() -> None:
    assert run_interpreted(__file__) == ["sorted"] * len(CALLS)


def sorts(tokens: int, top_k: int, experts: int, mapped: bool) -> None:
    """Asserts that the kernel lists slots as a loop over experts does."""
    from vllm_moe_oracle.measuring.peers import _by_expert

    generator = torch.Generator().manual_seed(tokens)
    everywhere = 2 * experts if mapped else experts
    ids = torch.randint(-1 if mapped else 0, everywhere, (tokens, top_k), generator=generator, dtype=torch.int32)
    weights = torch.rand(tokens, top_k, generator=generator)
    expert_map = None
    if mapped:
        expert_map = torch.full((everywhere,), -1, dtype=torch.int32)
        expert_map[experts:] = torch.arange(experts, dtype=torch.int32).flip(0)
    found = _by_expert.sort_slots(ids, weights, expert_map, experts)
    local = ids if expert_map is None else expert_map[ids.clamp(min=0).long()].where(ids >= 0, -1)
    row = 0
    for expert in range(experts):
        assert int(found.offsets[expert]) == row
        for token, choice in (local == expert).nonzero().tolist():
            assert int(found.rows[choice, token]) == row and int(found.tokens[row]) == token
            assert found.weights[choice, token] == weights[token, choice]
            row += 1
    assert int(found.offsets[experts]) == row
    assert bool((found.rows.T[local < 0] == -1).all())


if __name__ == "__main__":
    for call in CALLS:
        sorts(*call)
        print("sorted")
