"""Settings of a GPU that are kept while code of others runs: its stream, the current device, its random numbers."""

from __future__ import annotations

import pytest
import torch

from vllm_moe_oracle.verification import process_state


def test_a_stream_and_a_seed_are_put_back() -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no types here
    before, other = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]  # the same
    seed, numbers = torch.cuda.initial_seed(), torch.cuda.get_rng_state()
    with process_state.kept() as changed:
        torch.cuda.set_stream(other)
        torch.cuda.manual_seed(seed + 1)
    assert changed == ["seed of random numbers", "CUDA device and stream"]
    assert torch.cuda.current_stream() == before
    assert torch.cuda.initial_seed() == seed and torch.equal(torch.cuda.get_rng_state(), numbers)


def test_a_stream_that_is_not_the_default_is_put_back() -> None:
    own = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types here
    with torch.cuda.stream(own):
        with process_state.kept() as changed:
            torch.cuda.set_stream(torch.cuda.default_stream())
        assert changed == ["CUDA device and stream"]
        assert torch.cuda.current_stream() == own


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_is_put_back() -> None:
    with process_state.kept() as changed:
        torch.cuda.set_device(1)
    assert changed == ["CUDA device and stream"]
    assert torch.cuda.current_device() == 0


def test_products_in_between_change_nothing() -> None:
    with process_state.kept() as changed:
        torch.rand(64, 64, device="cuda") @ torch.rand(64, 64, device="cuda")
    assert not changed
