"""What this project's kernels chose to run where a shipped profile was measured: ``python tests/own_choices.py``.

A profile's times of our kernels are those of the tile configuration that the kernels chose by themselves then, where
it names no other. Its fingerprint does not cover the tables and rules of that choice, so that another layer's entry
voids nothing; this holds instead: tests/golden/h200/own-choices.json has a digest of every choice that a profile's
times rest on. A choice that has changed since needs new measurements of its layer. ``--write`` takes the present
choices, for profiles that were measured with them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch

from vllm_moe_oracle.kernels.config import Config, choose
from vllm_moe_oracle.kernels.prefill_config import stages_of
from vllm_moe_oracle.kernels.weights import OwnWeights, allocate
from vllm_moe_oracle.measure import profile
from vllm_moe_oracle.measure.cells import Cell

GOLDEN = Path(__file__).parent / "golden" / "h200" / "own-choices.json"
QUANTISING = {"own_wna16": False, "own_mxfp4": False, "own_mxfp8": False, "own_mxfp8_w8a8": True}
"""The backends that choose, and whether they quantise activations to MXFP8."""


def layer_of(cell: Cell) -> OwnWeights:
    """The cell's layer as the kernels see it, without memory."""
    format = cell.scheme if cell.scheme != "wna16" else f"int{cell.bits}"
    return allocate(
        format, cell.local, cell.hidden, cell.inner, gated=cell.gated, group=max(cell.group, 0),
        dtype=getattr(torch, cell.dtype), zero_points=cell.zero_points, bias=cell.bias, device="meta",
    )  # fmt: skip


def digest(weights: OwnWeights, top_k: int, tokens: int, quantise: bool, tile: str) -> str:
    """Eight characters that say which configuration runs; "" where the profile's tile does, in small tiles' place."""
    config = choose(weights, top_k, tokens, quantise=quantise)
    if tile and isinstance(config, Config):
        return ""
    stages = [] if isinstance(config, Config) else [stages_of(weights, config, g) for g in (weights.gated, False)]
    words = json.dumps([type(config).__name__, config.to_json(), stages], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:8]


def present() -> dict[str, dict[str, str]]:
    """By layer and backend, then by number of tokens: what runs now where a shipped profile names no other tile."""
    found: dict[str, dict[str, str]] = {}
    for shipped in profile.shipped():
        for entry in shipped.entries:
            for backend in sorted(QUANTISING.keys() & entry.backends):
                timing = entry.backends[backend]
                counts = sorted({int(count) for times in timing.times.values() for count in times})
                tiles = timing.tiles.get("uniform", {})
                weights, quantise = layer_of(entry.cell), QUANTISING[backend]
                key = f"{entry.cell}: {backend}"
                found[key] = {
                    str(count): digest(weights, entry.cell.top_k, count, quantise, tiles.get(str(count), ""))
                    for count in counts
                }
    return found


def changed() -> list[str]:
    """Measured choices that are others now, or that were never noted."""
    before = json.loads(GOLDEN.read_text())
    return [
        f"{key}, {count} tokens"
        for key, choices in present().items()
        for count, which in choices.items()
        if before.get(key, {}).get(count) != which
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="take the present choices")
    if parser.parse_args().write:
        GOLDEN.write_text(json.dumps(present(), indent=0, sort_keys=True) + "\n")
    found = changed()
    print("\n".join(found) or "every choice is the one that was measured")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
