"""Counts by what the oracle decides published models' layers: measured times, predicted ones, or the static order.

    python -m tests.tools.evidence [--models qwen3-30b-a3b,...] [--write]

Every config of tests/golden/configs is taken in each format that the plugin serves, over 1 to 8 tensor-parallel ranks,
with and without expert parallelism, on two Hopper cards, under three releases of vLLM, without a cache. One answer is
one such model; the kind of its least certain layer counts. `--write` puts the counts into tests/golden/evidence.json,
which takes four minutes; `tests.tools.generate --write` does so where the file is of other releases, configs or times.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.lib import configs
from tests.lib.readme_sections import markdown_table, paragraph
from vllm_moe_oracle import settings
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.checkpoint.ranks import Ranks
from vllm_moe_oracle.checkpoint.served_layers import Server, decide_layers
from vllm_moe_oracle.core.decision import Decision
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices.catalog import known_device
from vllm_moe_oracle.errors import CheckpointError
from vllm_moe_oracle.measurements import profile
from vllm_moe_oracle.releases.supported import NEWEST

GOLDEN = Path(__file__).parents[1] / "golden" / "evidence.json"
GPUS = ("h200", "h100")
RELEASES = ("0.27.1", "0.31.0", NEWEST)
RANKS = tuple((tp, ep) for tp in (1, 2, 4, 8) for ep in (False, True) if tp > 1 or not ep)
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp8": configs.MODELOPT,
    "mxfp4": configs.compressed(configs.group(_MXFP4), format="mxfp4-pack-quantized"),
    "int4-g32": configs.compressed(configs.group(configs.INT4 | {"group_size": 32}), format=configs.PACKED),
    "int4-g128": configs.compressed(configs.group(configs.INT4), format=configs.PACKED),
    "gptq": configs.GPTQ,
    "gptq-int8": configs.GPTQ | {"bits": 8},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}
"""``quantization_config`` by format."""
PUBLISHED = ("gpt-oss-20b", "kimi-k2-thinking")
"""Models whose published config is quantized in a served format; they are taken as they are."""
ORDER = ("measured", "predicted", "alone", "static", "stock", "none", "refused")
"""Kinds, the most certain first: ``alone`` has one candidate, ``stock`` is left to vLLM, ``none`` ends the start, since
stock vLLM is known not to run it either, ``refused`` is not served."""
DECIDED = ORDER[:2]


def inputs() -> dict[str, Any]:
    """What the counts rest on: GPUs, releases, and a digest of the configs, of the shipped times and of the model."""
    files = [*configs.CONFIGS.glob("*.json"), *profile.SHIPPED_FOLDER.glob("*.json")]
    files = sorted(each for each in files if not each.name.startswith("stock_"))
    digest = hashlib.sha256(b"".join(each.name.encode() + each.read_bytes() for each in files)).hexdigest()
    return {"gpus": list(GPUS), "releases": list(RELEASES), "digest": digest}


def is_stale() -> bool:
    """Whether the committed counts rest on something else than what is here."""
    held = json.loads(GOLDEN.read_text())
    return any(held.get(name) != value for name, value in inputs().items())


def cases(models: list[str]) -> list[tuple[str, str, dict[str, Any]]]:
    """Model, format and config."""
    found = []
    for model in models:
        if model in PUBLISHED:
            found.append((model, "published", configs.config(model)))
        else:
            found += [
                (model, name, configs.quantized(model, quantization_config=each)) for name, each in FORMATS.items()
            ]
    return found


def kind_of(config: Path, device: Device, tp: int, ep: bool, chosen: settings.Settings) -> tuple[str, str]:
    """The kind of an answer, and why it is not decided by figures."""
    server = Server(device, chosen, Ranks(tp, ep=ep))
    try:
        layers = decide_layers(server, server.find_layers(read_checkpoint(config)))
    except CheckpointError as error:
        return "refused", str(error)
    if failed := [each.outcome for each in layers if each.decision is None]:
        unserved = [each for each in failed if not each.left_to_stock]
        return ("none", unserved[0].failure) if unserved else ("stock", failed[0].failure)
    decisions = [each.decision for each in layers if each.decision is not None]
    if not decisions:
        return "stock", "no layer is quantized"
    least = max(decisions, key=lambda each: ORDER.index(_kind(each)))
    return _kind(least), least.explanation


def _kind(decision: Decision) -> str:
    return "alone" if decision.why == "static" and not decision.tunable else decision.why


def count(models: list[str]) -> dict[str, Any]:
    """Counts by model, by GPU, release and parallelism, and by kind; and why answers are not decided by figures, with
    their number."""
    found: dict[str, dict[str, Counter[str]]] = {}
    undecided: Counter[str] = Counter()
    every = cases(models)
    with tempfile.TemporaryDirectory() as folder:
        chosen = settings.load({}, assignments={"cache": f"{folder}/none"})
        path = Path(folder) / "config.json"
        for index, (model, name, config) in enumerate(every, 1):
            path.write_text(json.dumps(config))
            for gpu, release, (tp, ep) in itertools.product(GPUS, RELEASES, RANKS):
                device = known_device(gpu)
                device = dataclasses.replace(device, packages={**device.packages, "vllm": release})
                kind, why = kind_of(path, device, tp, ep, chosen)
                place = f"{gpu}, {release}, {'EP' if ep else 'TP'}"
                found.setdefault(model, {}).setdefault(place, Counter())[kind] += 1
                if kind not in DECIDED:
                    undecided[f"{model}, {'EP' if ep else 'TP'} {tp}: {kind}: {why.replace(device.name, 'GPU')}"] += 1
            print(f"{index} of {len(every)}: {model}, {name}", file=sys.stderr)
    return {
        "command": "python -m tests.tools.evidence --write",
        "configs": len(every),
        **inputs(),
        "counts": found,
        "undecided": dict(sorted(undecided.items())),
    }


def total(counts: dict[str, dict[str, dict[str, int]]]) -> dict[str, Counter[str]]:
    """Counts of all models."""
    places = dict.fromkeys(place for each in counts.values() for place in each)
    return {place: sum((Counter(each[place]) for each in counts.values()), Counter()) for place in places}


def table() -> str:
    """The table of the package's page."""
    held = json.loads(GOLDEN.read_text())
    counts = total(held["counts"])
    kinds = [kind for kind in ORDER if any(kind in each for each in counts.values())]
    rows = ([key, *(each.get(kind, 0) for kind in kinds), f"{share(each):.1%}"] for key, each in counts.items())
    every: Counter[str] = sum(counts.values(), Counter())
    words = paragraph(
        f"{held['configs']} configs over 1, 2, 4 and 8 ranks (`{held['command']}`), {sum(every.values())} answers.",
        f"{share(every):.1%} of those that a backend runs are decided by measured or predicted times.",
    )
    return f"{markdown_table(['answers for', *kinds, 'by times'], rows)}\n\n{words}"


def share(counts: dict[str, int]) -> float:
    """Part of the answers that figures decide, of those that the plugin gives."""
    served = sum(number for kind, number in counts.items() if kind in (*DECIDED, "alone", "static"))
    return sum(counts.get(kind, 0) for kind in DECIDED) / served if served else 1.0


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names of files in tests/golden/configs; default: all")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    every = sorted(each.stem for each in configs.CONFIGS.glob("*.json"))
    found = count(options.models.split(",") if options.models else every)
    for key, counts in total(found["counts"]).items():
        print(f"{key}: {share(counts):.1%} of {sum(counts.values())}: {counts}")
    for why, number in found["undecided"].items():
        print(f"{number} times {why}")
    if options.write:
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
