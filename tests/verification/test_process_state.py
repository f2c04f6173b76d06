"""What is kept around a backend's code: each setting is named when it was changed, and put back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="the changes stand beside kernels that run through vLLM")

from tests.lib.faulty_backends import SETTING_CHANGES
from vllm_moe_oracle.verification import process_state

SEEDS = "seed of random numbers"
"""Kept besides the settings that are listed."""


def needs_hardware(name: str) -> None:
    if "CUDA" in name and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    if "CPU" in name and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is no other CPU")


@pytest.mark.parametrize("name", [*process_state._SETTINGS, SEEDS])
def test_a_change_is_named_and_put_back(name: str) -> None:
    """An entry of the list without a change in `SETTING_CHANGES` fails."""
    change = SETTING_CHANGES[name]
    needs_hardware(name)
    read = {each: read for each, (read, _) in process_state._SETTINGS.items()}
    before, numbers = {each: ask() for each, ask in read.items()}, torch.get_rng_state()
    with process_state.kept() as changed:
        change()
        assert name == SEEDS or read[name]() != before[name]
    assert changed == [name]
    assert {each: ask() for each, ask in read.items()} == before and torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("name", process_state._SETTINGS)
def test_it_is_put_back_when_the_code_raises(name: str) -> None:
    needs_hardware(name)
    read, _ = process_state._SETTINGS[name]
    before = read()
    with pytest.raises(ZeroDivisionError), process_state.kept():
        SETTING_CHANGES[name]()
        raise ZeroDivisionError
    assert read() == before


def test_drawing_random_numbers_is_no_change() -> None:
    numbers = torch.get_rng_state()
    with process_state.kept() as changed:
        torch.rand(3)
    assert not changed and torch.equal(torch.get_rng_state(), numbers)


def test_a_removed_working_directory_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with process_state.kept() as changed:
        os.chdir(tmp_path)
        folder.rmdir()
        torch.set_grad_enabled(not torch.is_grad_enabled())
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    assert changed == ["gradient mode", "working directory", "recursion limit"]
    with process_state.kept() as changed:
        pass
    assert not changed


def test_the_umask_is_read_without_setting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may create a file meanwhile."""
    mask = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)
        assert process_state._umask() == 0o027
    finally:
        monkeypatch.undo()
        os.umask(mask)


def test_a_stream_and_a_seed_of_a_gpu_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's functions, which take no GPU here. vLLM has a function of its own in the place of the last."""
    current, generator = (7, 1, 1), torch.Generator().manual_seed(3)

    def set_stream(stream: tuple[int, int, int]) -> None:
        nonlocal current
        current = stream

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda device: current, raising=False)
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda *, stream_id, device_index, device_type: (stream_id, device_index, device_type)
    )
    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
    with process_state.kept() as changed:
        set_stream((9, 0, 1))
        generator.manual_seed(4)
    assert changed == ["seed of random numbers", "CUDA device and stream"]
    assert current == (7, 1, 1) and generator.initial_seed() == 3


@pytest.mark.parametrize("common", ["highest", "high"])
def test_precisions_that_a_kernel_sets_by_either_interface_stay_readable(common: str) -> None:
    """torch raises where the common precision is read after one library's was set by the other interface."""
    libraries = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    own = [each.fp32_precision for each in libraries]
    changes: tuple[Callable[[], object], ...] = (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: setattr(libraries[0], "fp32_precision", "tf32" if common == "highest" else "ieee"),
    )
    try:
        torch.set_float32_matmul_precision(common)
        for change in changes:
            with process_state.kept() as changed:
                change()
            assert changed == ["precision of float32 products"]
            assert torch.get_float32_matmul_precision() == common
            assert torch.backends.cuda.matmul.allow_tf32 == (common == "high")
    finally:
        torch.set_float32_matmul_precision("highest")
        for library, precision in zip(libraries, own, strict=True):
            library.fp32_precision = precision
