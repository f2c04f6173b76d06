"""The tile configurations that our kernels chose where a shipped profile was measured.

    python -m tests.tools.kernel_choices [--write | --drop]

The times of our kernels in a profile belong to the configuration that the kernels chose when they were measured,
unless the profile names another. The tables and rules of that choice are not part of the profile's kernel
fingerprint, so that a new entry for one layer does not invalidate others. Instead tests/golden/h200/kernel-choices.json
holds a digest of each choice on which a profile's times rest. If a choice changes, its layer must be measured again.
``--drop`` takes the times of changed choices out of the profiles, where they cannot be measured again. ``--write``
stores the present choices, for profiles that were measured with them.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import msgspec
import torch

from vllm_moe_oracle.kernels.config import choose_config
from vllm_moe_oracle.kernels.launch_config import LaunchConfig
from vllm_moe_oracle.kernels.prefill_config import resolve_stages
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.kernel_shape import KernelShape

GOLDEN = Path(__file__).parents[1] / "golden" / "h200" / "kernel-choices.json"
QUANTIZING = {"hopper_wna16": False, "hopper_mxfp4": False, "hopper_mxfp8": False, "hopper_mxfp8_w8a8": True}
"""The backends that choose, and whether they quantize activations to MXFP8."""


def layer_of(shape: KernelShape) -> PackedWeights:
    """The weights of a kernel shape on the meta device."""
    format = shape.scheme if shape.scheme != "wna16" else f"int{shape.bits}"
    return allocate_weights(
        format, shape.local_experts, shape.hidden_size, shape.intermediate_size,
        gated=shape.gated, group=max(shape.group_size, 0), num_experts=shape.num_experts,
        dtype=getattr(torch, shape.dtype), zero_points=shape.zero_points, bias=shape.has_bias, device="meta",
    )  # fmt: skip


def digest(weights: PackedWeights, top_k: int, tokens: int, quantize: bool, tile: str) -> str:
    """Eight characters that identify the configuration; "" if the profile names a tile that replaces it."""
    config = choose_config(weights, top_k, tokens, quantize=quantize)
    if tile and isinstance(config, LaunchConfig):
        return ""
    stages = (
        [] if isinstance(config, LaunchConfig) else [resolve_stages(weights, config, g) for g in (weights.gated, False)]
    )
    # By position, so that the name of a field is not part of the digest.
    words = json.dumps([isinstance(config, LaunchConfig), dataclasses.astuple(config), stages])
    return hashlib.sha256(words.encode()).hexdigest()[:8]


def _counts(timing: profile.BackendTimes) -> list[str]:
    """The numbers of tokens of a backend's times, ascending."""
    return sorted({count for times in timing.times.values() for count in times}, key=int)


def _own_digest(shape: KernelShape, name: str, timing: profile.BackendTimes, count: str) -> str:
    """The digest of a backend's choice at a number of tokens, as its profile's time rests on it."""
    tile = timing.tiles.get("uniform", {}).get(count, "")
    return digest(layer_of(shape), shape.top_k, int(count), QUANTIZING[name], tile)


def present() -> dict[str, dict[str, str]]:
    """Digests of the present choices by layer and backend, then by number of tokens."""
    found: dict[str, dict[str, str]] = {}
    for shipped in profile.shipped():
        for entry in shipped.entries:
            for name in sorted(QUANTIZING.keys() & entry.backends):
                digests = found.setdefault(f"{entry.kernel_shape}: {name}", {})
                for count in _counts(entry.backends[name]):
                    made = _own_digest(entry.kernel_shape, name, entry.backends[name], count)
                    # Another GPU's profile may have the choice's own time where one names a tile that replaces it.
                    digests[count] = made or digests.get(count, "")
    return found


def changed() -> list[str]:
    """Choices that differ from the stored ones, or are not stored."""
    before = json.loads(GOLDEN.read_text())
    return [
        f"{key}, {count} tokens"
        for key, choices in present().items()
        for count, which in choices.items()
        if before.get(key, {}).get(count) != which
    ]


def without_changed(shipped: profile.Profile, stale: list[str]) -> profile.Profile:
    """A profile without the times of changed choices, which are named as by `changed`.

    Times of a tile that this profile names stay, whatever the kernels choose themselves and other GPUs' profiles hold.
    """
    entries = []
    for entry in shipped.entries:
        backends = {}
        for name, timing in entry.backends.items():
            key = f"{entry.kernel_shape}: {name}"
            changed_counts = {count for count in _counts(timing) if f"{key}, {count} tokens" in stale}
            gone = {count for count in changed_counts if _own_digest(entry.kernel_shape, name, timing, count)}
            times = {
                routing: {count: each for count, each in found.items() if count not in gone}
                for routing, found in timing.times.items()
            }
            if kept := {routing: found for routing, found in times.items() if found}:
                backends[name] = msgspec.structs.replace(timing, times=kept)
        entries.append(msgspec.structs.replace(entry, backends=backends))
    return msgspec.structs.replace(shipped, entries=tuple(entries))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="store the present choices")
    group.add_argument("--drop", action="store_true", help="take the times of changed choices out of the profiles")
    options = parser.parse_args()
    if options.drop:
        stale = changed()
        for path in sorted(profile.SHIPPED_FOLDER.glob("nvidia_*.json")):
            before = profile.read(path)
            if (after := without_changed(before, stale)) != before:
                path.write_bytes(profile.encode(after))
        profile.shipped.cache_clear()
    if options.write:
        GOLDEN.write_text(json.dumps(present(), indent=0, sort_keys=True) + "\n")
    found = changed()
    print("\n".join(found) or "no choice has changed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
