"""One measured time with its shape and environment, and cards as shipped profiles were measured on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec

from tests.lib.cases import H200, problem
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import Sample, kernel_shape_of
from vllm_moe_oracle.measurements.store import Store

SHAPE = kernel_shape_of(problem())
HERE = Environment.of(H200)


def sample(tokens: int = 1, backend: str = "marlin_mxfp8", us: float = 50.0) -> Sample:
    return Sample(backend, "16bit", tokens, "uniform", us, us * 0.98, us * 1.02, 20, 1e-3)


def kept(store: Store) -> dict[int, float]:
    """The times of a store's samples of `SHAPE`, by tokens."""
    return {each.tokens: each.us for _, samples in store.samples(SHAPE) for each in samples}


def measured_card(path: Path) -> Device:
    """The card that a shipped profile names, with the packages of its measurements.

    The catalog's cards have the packages of the newest vLLM release, which a profile may precede.
    """
    card = catalog.known_device("-".join(path.stem.split("_")[:2]))
    return dataclasses.replace(card, packages={**card.packages, **profile.read(path).environment.packages})


def measured_h200(folder: Path) -> Path:
    """The file of an H200 for which the shipped profile is valid, whatever vLLM release is the newest."""
    path = folder / "h200.json"
    path.write_bytes(msgspec.json.encode(measured_card(profile.SHIPPED_FOLDER / "nvidia_h200.json")))
    return path
