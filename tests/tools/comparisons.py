"""The shipped times beside stock vLLM's own layer: ``python -m tests.tools.comparisons [--write]``.

``--write`` makes ``vllm_moe_oracle/profiles/stock_nvidia_GPU.json``, and one more for each other Triton than
`FIRST_TRITON`, of each GPU's committed benchmarks under ``tests/golden/GPU``: ``choice*-vllm-VERSION.jsonl``
(``vllm-moe-oracle bench --stock auto --jsonl FILE``), and of ``listed-*`` and ``unlisted-*-vllm-VERSION.jsonl``
(`tests.gpu.unlisted_layers`) the layers that ran beside stock's. Of a layer in several of them, the last run counts at
each number of tokens, the first kind's before the others'. Without ``--write`` the exit status is 1 where a file is
stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import msgspec

from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.measurements.bench_records import STOCK_DEFAULT, BenchRecord
from vllm_moe_oracle.measurements.environment import Environment
from vllm_moe_oracle.measurements.kernel_shape import KernelShape, Sample

GOLDEN = Path(__file__).parents[1] / "golden"
PATTERNS = ("*/unlisted-*-vllm-*.jsonl", "*/listed-*-vllm-*.jsonl", "*/choice*-vllm-*.jsonl")
"""Files of records. Those of a later pattern count: they judge choices (`oracle_quality`), and the others made them."""
FIRST_TRITON = "3.6"
"""Files of this one have no suffix."""
ACTIVATIONS = "stock"
"""Stands where a backend's precision of activations is; a stock layer does not say it."""

Layers = dict[KernelShape, dict[int, BenchRecord]]
"""The record of each number of tokens."""


def runs(paths: list[Path]) -> dict[str, list[tuple[dict[str, str], Environment, Layers]]]:
    """The benchmarks by the file's name of GPU and Triton, in the order in which they ran.

    Args:
        paths: files of records, any order. The number after ``choice-`` or ``unlisted-`` is the run's; the first choice
            has none.
    """
    found: dict[str, list[tuple[dict[str, str], Environment, Layers]]] = {}
    for path in sorted(paths, key=_run):
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        conditions = msgspec.json.decode(head)["conditions"]
        layers: Layers = {}
        for line in lines:
            record = msgspec.json.decode(line, type=BenchRecord)
            if path.name.startswith("unlisted") and STOCK_DEFAULT not in record.us:
                continue  # an expert-parallel rank: stock's layer on one GPU has all experts
            layers.setdefault(record.kernel_shape, {})[record.tokens] = record
        environment = msgspec.convert(conditions["environment"], Environment)
        name = environment.gpu.lower().replace(" ", "_")
        if not environment.packages["triton"].startswith(f"{FIRST_TRITON}."):
            name += f"_triton{environment.packages['triton'].rpartition('.')[0]}"
        found.setdefault(name, []).append((conditions, environment, layers))
    return found


def _run(path: Path) -> tuple[bool, int]:
    """Whether it is one of choices, and the run's number."""
    match = re.match(r"[a-z]+-(\d+)-vllm", path.name)
    return path.name.startswith("choice"), int(match[1]) if match else 1


def comparison(found: list[tuple[dict[str, str], Environment, Layers]]) -> profile.Profile:
    """One profile of a GPU's benchmarks.

    Raises:
        ValueError: they ran under different packages or drivers, or under skewed routing.
    """
    environments = {msgspec.structs.replace(each, kernels="").key for _, each, _ in found}
    if len(environments) != 1:
        raise ValueError(f"runs under different conditions: {environments}")
    if routings := {each["routing"] for each, _, _ in found} - {"uniform"}:
        raise ValueError(f"routing {routings}; only uniform routing is compared")
    layers: Layers = {}
    for _, _, each in found:
        for shape, records in each.items():
            known = layers.setdefault(shape, {})
            # A run of some backends alone does not replace one that has these and others beside stock.
            known |= {
                tokens: record
                for tokens, record in records.items()
                if tokens not in known or not record.us.keys() < known[tokens].us.keys()
            }
    samples = {
        shape: [one for record in records.values() for one in _samples(record)] for shape, records in layers.items()
    }
    conditions = {"command": "; ".join(each["command"] for each, _, _ in found), "method": found[-1][0]["method"]}
    # The runs had different sources of this project's kernels, so the file names none.
    made = profile.make(msgspec.structs.replace(found[-1][1], kernels=""), samples, conditions)
    classes = {
        shape: {k: v for record in records.values() for k, v in record.stock.items()}
        for shape, records in layers.items()
    }
    return msgspec.structs.replace(
        made, entries=tuple(_with_classes(entry, classes[entry.kernel_shape]) for entry in made.entries)
    )


def _samples(record: BenchRecord) -> list[Sample]:
    """The samples of a record with stock's own; tile configurations are left out, they choose nothing here."""
    found = [msgspec.structs.replace(each, tile="") for each in record.samples("uniform")]
    fields = {"backend": STOCK_DEFAULT, "activations": ACTIVATIONS, "tokens": record.tokens, "routing": "uniform"}
    if STOCK_DEFAULT in record.us:
        low, high = record.quartiles[STOCK_DEFAULT]
        fields |= {"us": record.us[STOCK_DEFAULT], "low": low, "high": high, "replays": record.replays[STOCK_DEFAULT]}
    else:
        fields |= {"failure": record.failures[STOCK_DEFAULT]}
    return [*found, msgspec.convert(fields, Sample)]


def _with_classes(entry: profile.Entry, classes: dict[str, str]) -> profile.Entry:
    backends = {
        name: msgspec.structs.replace(each, stock_class=classes.get(name, "")) for name, each in entry.backends.items()
    }
    return msgspec.structs.replace(entry, backends=backends)


def files() -> dict[Path, bytes]:
    """Every file with what should be in it."""
    return {
        profile.SHIPPED_FOLDER / f"stock_{name}.json": profile.encode(comparison(found))
        for name, found in runs([path for pattern in PATTERNS for path in GOLDEN.glob(pattern)]).items()
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    stale = []
    for path, data in files().items():
        if not path.exists() or path.read_bytes() != data:
            stale.append(path.name)
            if write:
                path.write_bytes(data)
    if stale and not write:
        sys.exit(f"stale: {', '.join(stale)}")
    print(f"{'written' if stale else 'up to date'}: {', '.join(stale) or 'all'}")


if __name__ == "__main__":
    main()
