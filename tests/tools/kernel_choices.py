"""The tile configurations that our kernels chose where a shipped profile was measured.

    python -m tests.tools.kernel_choices [--write | --drop | --accept COMPARISON.json...]

The times of our kernels in a profile belong to the configuration that the kernels chose when they were measured,
unless the profile names another. The tables and rules of that choice are not part of the profile's kernel
fingerprint, so that times of other layers hold when one gets an entry. Instead tests/golden/h200/kernel-choices.json
holds a digest of each choice on which a profile's times rest. If a choice changes, its layer must be measured again.
``--accept`` keeps the times of changed choices whose successors were as fast or faster, in one run with them
(`tests.gpu.compare_tiles`; to within 3 %, and for other cards than that run's this is assumed).
tests/golden/h200/replaced-tiles.json holds these with how many times as fast the successor was. ``--drop`` takes the
times of other changed choices out of the profiles, where they cannot be measured again. ``--write`` stores the present
choices, for profiles that were measured with them. It also stores those of benchmarks that it sees for the first time,
in tests/golden/h200/benchmark-choices.json. The latency model is fitted to times of present tiles alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
from pathlib import Path

import msgspec
import torch

from tests.gpu import tune_kernels
from vllm_moe_oracle.kernels.config import choose_config, format_key, shape_key
from vllm_moe_oracle.kernels.launch_config import LaunchConfig
from vllm_moe_oracle.kernels.prefill_config import resolve_stages
from vllm_moe_oracle.kernels.weights import PackedWeights, allocate_weights
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.bench_records import read_samples
from vllm_moe_oracle.measurements.kernel_shape import KernelShape

GOLDEN = Path(__file__).parents[1] / "golden" / "h200" / "kernel-choices.json"
REPLACED = GOLDEN.with_name("replaced-tiles.json")
LEAST_RATIO = 0.97
"""What counts as equally fast: the spread between runs is 2 to 3 %."""
BENCHMARKS = GOLDEN.with_name("benchmark-choices.json")
UNLISTED = sorted(GOLDEN.parent.glob("unlisted-*.jsonl"))
"""Benchmarks that the latency model is fitted to."""
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


Layer = tuple[str, str, bool]
"""Format, shape, and whether there are zero points: what a choice depends on, beside tokens and activations."""


def _layer(weights: PackedWeights, top_k: int) -> Layer:
    return format_key(weights), shape_key(weights, top_k), weights.w13.zeros is not None


def successors(paths: list[Path]) -> dict[tuple[Layer, int, bool], tuple[str, float]]:
    """The tiles that replaced others, as `tune_kernels.describe` names them, and how many times as fast they were, by
    layer, number of tokens and whether they are those for MXFP8 activations; of the last file that has them."""
    found: dict[tuple[Layer, int, bool], tuple[str, float]] = {}
    for path in paths:
        compared = json.loads(path.read_text())
        quantize = "--quantize" in compared["conditions"]["command"].split()
        for row in compared["rows"]:
            weights = tune_kernels.stored(row["scheme"], row["shape"], "meta")
            layer = _layer(weights, tune_kernels.sizes_of(row["shape"])[0][1])
            ratio = round(row["before"] / row["after"], 3)
            found[layer, row["tokens"], quantize] = "".join(row["configs"][1].split()), ratio
    return found


Replaced = dict[str, dict[str, dict[str, float]]]
"""How many times as fast a tile's successor was, by profile, by layer and backend, and by number of tokens."""


def known_replaced() -> Replaced:
    """Shipped times of tiles that the kernels do not choose."""
    return json.loads(REPLACED.read_text()) if REPLACED.exists() else {}


def replaced(paths: list[Path]) -> Replaced:
    """Changed choices whose successors were as fast or faster."""
    known = successors(paths)
    stale = set(changed())
    found: Replaced = {}
    for path in sorted(profile.SHIPPED_FOLDER.glob("nvidia_*.json")):
        for entry in profile.read(path).entries:
            shape = entry.kernel_shape
            weights = layer_of(shape)
            for name in sorted(QUANTIZING.keys() & entry.backends):
                timing, key = entry.backends[name], f"{shape}: {name}"
                for count in _counts(timing):
                    if f"{key}, {count} tokens" not in stale or not _own_digest(shape, name, timing, count):
                        continue
                    quantize = QUANTIZING[name]
                    layer = _layer(weights, shape.top_k), int(count), quantize
                    tile, ratio = known.get(layer, ("", 0.0))
                    config = choose_config(weights, shape.top_k, int(count), quantize=quantize)
                    if ratio >= LEAST_RATIO and tile == "".join(tune_kernels.describe(config).split()):
                        found.setdefault(path.name, {}).setdefault(key, {})[count] = ratio
    return found


def accept(paths: list[Path]) -> int:
    """Stores the present choices of `replaced`, and these; how many they are."""
    choices, here, known, accepted = json.loads(GOLDEN.read_text()), present(), known_replaced(), 0
    for name, layers in replaced(paths).items():
        for key, counts in layers.items():
            choices[key] |= {count: here[key][count] for count in counts}
            known.setdefault(name, {}).setdefault(key, {}).update(counts)
            accepted += len(counts)
    for path, value in ((GOLDEN, choices), (REPLACED, known)):
        path.write_text(json.dumps(value, indent=0, sort_keys=True) + "\n")
    return accepted


def measured_again(name: str, keys: set[tuple[str, str]]) -> None:
    """Takes times out of the replaced tiles' that were measured again.

    Args:
        name: of the profile.
        keys: pairs of layer and backend, as in `Replaced`, and number of tokens.
    """
    known = known_replaced()
    if name in known:
        known[name] = {
            key: left
            for key, counts in known[name].items()
            if (left := {count: ratio for count, ratio in counts.items() if (key, count) not in keys})
        }
        REPLACED.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


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


def of_benchmark(path: Path) -> dict[str, dict[str, str]]:
    """Digests of the present choices by layer and backend, then by number of tokens, for the times of a file of
    `UNLISTED`."""
    found: dict[str, dict[str, str]] = {}
    for shape, samples in read_samples(path)[2].items():
        for each in samples:
            if each.backend in QUANTIZING and not each.failure:
                made = digest(layer_of(shape), shape.top_k, each.tokens, QUANTIZING[each.backend], each.tile)
                found.setdefault(f"{shape}: {each.backend}", {})[str(each.tokens)] = made
    return found


@functools.cache
def _of_benchmark(path: Path) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """The choices of a benchmark when it was taken, and the present ones."""
    return json.loads(BENCHMARKS.read_text())[path.name], of_benchmark(path)


def is_still_chosen(path: Path, shape: KernelShape, backend: str, tokens: int) -> bool:
    """Whether a backend still runs the tile that it ran when a file of `UNLISTED` was taken."""
    if backend not in QUANTIZING:
        return True
    if path.name not in json.loads(BENCHMARKS.read_text()):
        raise KeyError(f"{path.name}: run kernel_choices --write with the kernels that it was taken with")
    then, now = (each[f"{shape}: {backend}"][str(tokens)] for each in _of_benchmark(path))
    return then == now


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="store the present choices")
    group.add_argument("--drop", action="store_true", help="take the times of changed choices out of the profiles")
    group.add_argument("--accept", nargs="+", type=Path, help="keep times whose tiles were replaced by ones as fast")
    options = parser.parse_args()
    if options.accept:
        print(f"{accept(options.accept)} times are of tiles that were replaced by ones as fast")
    if options.drop:
        stale = changed()
        for path in sorted(profile.SHIPPED_FOLDER.glob("nvidia_*.json")):
            before = profile.read(path)
            if (after := without_changed(before, stale)) != before:
                path.write_bytes(profile.encode(after))
        profile.shipped.cache_clear()
    if options.write:
        GOLDEN.write_text(json.dumps(present(), indent=0, sort_keys=True) + "\n")
        known = json.loads(BENCHMARKS.read_text()) if BENCHMARKS.exists() else {}
        known |= {path.name: of_benchmark(path) for path in UNLISTED if path.name not in known}
        BENCHMARKS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    found = changed()
    print("\n".join(found) or "no choice has changed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
