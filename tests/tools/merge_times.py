"""Takes benchmarks into the shipped profile of their GPU: ``python -m tests.tools.merge_times FILE.jsonl...``

The files are those of ``vllm-moe-oracle bench --jsonl FILE`` or of `tests.gpu.unlisted_layers`, in the order in which
they were taken. A new time replaces the profile's of the same layer, backend, routing and number of tokens; everything
else stays. Failures are not taken over: what cannot run on a machine without its memory runs on another.

A profile is of one GPU with one stack: vLLM, torch, Triton and the kernels' sources. ``--new NAME`` begins one for the
benchmark's stack. Times of layers that no profile has go to the last by its file's name, so that the one of ``tune``
keeps both routings of each layer. A layer of which no two backends with the same precision of activations were timed is
left out: no time is needed there. So is a new layer between whose numbers of tokens lies more than a factor of
`MAX_TOKEN_RATIO`: nothing is decided by such times, only the latency model is fitted to them. Afterwards run
``kernel_choices --write``, which says on which configurations the times rest. A time of another tile than the kernels'
choice brings that tile into the profile: this GPU runs it there, and other GPUs' profiles and the kernels' tables stay
as they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import msgspec

from tests.gpu.unlisted_layers import HELD_OUT
from tests.tools import kernel_choices
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.bench_records import read_samples
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import KernelShape, Sample, kernel_shape_of
from vllm_moe_oracle.oracle.measured_choice import MAX_TOKEN_RATIO


def merged(shipped: profile.Profile, environment: Environment, new: dict[KernelShape, list[Sample]]) -> profile.Profile:
    """A profile with new samples.

    Raises:
        ValueError: the samples ran on another GPU, or with other packages or kernels; or some of a layer's times
            include the router and others do not.
    """
    if environment.key != shipped.environment.key:
        raise ValueError(f"the benchmark ran on {environment.key}, the profile's times on {shipped.environment.key}")
    samples: dict[KernelShape, dict[tuple[str, str, int], Sample]] = {
        entry.kernel_shape: {each.key: each for each in shipped.samples(entry.kernel_shape)}
        for entry in shipped.entries
    }
    for shape, found in new.items():
        samples.setdefault(shape, {}).update({each.key: each for each in found if not each.failure})
        if len({each.router for each in samples[shape].values() if not each.failure}) > 1:
            raise ValueError(f"{shape}: times with the router beside times without; time all backends of the layer")
        backends = {(each.backend, each.activations) for each in samples[shape].values()}
        counts = sorted({each.tokens for each in samples[shape].values()})
        gap = any(high > MAX_TOKEN_RATIO * low for low, high in pairwise(counts)) and not shipped.samples(shape)
        if gap or len({precision for _, precision in backends}) == len(backends):
            del samples[shape]
    made = profile.make(
        shipped.environment, {shape: found.values() for shape, found in samples.items()}, shipped.conditions
    )
    entries = []
    for entry in made.entries:
        classes = shipped.stock_classes(entry.kernel_shape)
        backends = {
            name: msgspec.structs.replace(each, stock_class=classes.get(name, each.stock_class))
            for name, each in entry.backends.items()
        }
        entries.append(msgspec.structs.replace(entry, backends=backends))
    return msgspec.structs.replace(made, entries=tuple(entries))


def shipped_for(gpu: str, packages: Mapping[str, str]) -> dict[Path, profile.Profile]:
    """The shipped profiles of a GPU with these packages by file, the one that takes new layers last."""
    paths = sorted(profile.SHIPPED_FOLDER.glob("nvidia_*.json"))
    return {
        path: found
        for path in paths
        if (found := profile.read(path)).environment.gpu == gpu
        and packages.items() <= found.environment.packages.items()
    }


def by_profile(
    shipped: dict[Path, profile.Profile], new: dict[KernelShape, list[Sample]]
) -> dict[Path, dict[KernelShape, list[Sample]]]:
    """New times by the profile that has their layer already; those of other layers go to the last."""
    found: dict[Path, dict[KernelShape, list[Sample]]] = {}
    for shape, samples in new.items():
        path = next((path for path, each in shipped.items() if each.samples(shape)), list(shipped)[-1])
        found.setdefault(path, {})[shape] = samples
    return found


def held_out(new: Mapping[KernelShape, list[Sample]]) -> list[str]:
    """Names of the layers among a benchmark's that no profile may have."""
    return sorted(each.layer for each in HELD_OUT if kernel_shape_of(each) in new)


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--new", metavar="NAME", help="begin profiles/NAME.json where no profile has the stack")
    options = parser.parse_args(arguments)
    for file in options.files:
        environment, conditions, new = read_samples(file)
        if held := held_out(new):
            parser.error(f"{file}: {', '.join(held)}: layers of HELD_OUT judge choices, and make none")
        shipped = shipped_for(environment.gpu, environment.packages)
        if not shipped and options.new:
            path = profile.SHIPPED_FOLDER / f"{options.new}.json"
            if path.exists() or not options.new.startswith("nvidia_"):
                parser.error(f"--new {options.new}: the name of a new file, nvidia_... as all shipped ones")
            shipped[path] = profile.make(environment, {}, conditions)
        elif options.new and f"{options.new}.json" not in {path.name for path in shipped}:
            names = ", ".join(path.name for path in shipped)
            parser.error(f"--new {options.new}: {names} have this stack; without --new the times join them")
        if not shipped:
            packages = " ".join(f"{name} {version}" for name, version in environment.packages.items())
            print(f"{file}: no profile of {environment.gpu} with {packages}; --new NAME begins one", file=sys.stderr)
            return 1
        parts = by_profile(shipped, new)
        try:
            made = {path: merged(shipped[path], environment, own) for path, own in parts.items()}
        except ValueError as error:
            print(f"{file}: {error}", file=sys.stderr)
            return 1
        for path, each in made.items():
            profile.write(each, path)
            again = {
                (f"{shape}: {one.backend}", str(one.tokens))
                for shape, own in parts[path].items()
                for one in own
                if not one.failure and one.key in {known.key for known in each.samples(shape)}
            }
            kernel_choices.measured_again(path.name, again)
            layers = [found for shape, found in parts[path].items() if each.samples(shape)]
            taken = sum(not sample.failure for found in layers for sample in found)
            print(f"{path.name}: {taken} times of {len(layers)} layers; {len(parts[path]) - len(layers)} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
