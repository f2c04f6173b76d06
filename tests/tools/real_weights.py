"""The self-check and `verify` on the real model's weights: what they catch, whether they refuse what is right, and the
price.

    python -m tests.tools.real_weights --faults              # every fault of the suite's list, on each layout
    python -m tests.tools.real_weights --seeds 1000          # right backends with other inputs and biases each time
    python -m tests.tools.real_weights --seeds 1000 --backends cpu_dequantized       # the others here are slow
    python -m tests.tools.real_weights --price               # seconds and memory of the check at load
    python -m tests.tools.real_weights --faults --write      # figures into tests/golden/accuracy/self_check.json

The model is `tests.lib.smollm2` in three layouts: MXFP8 with activations in MXFP8, MXFP8 with activations in 16 bits,
and gpt-oss's, which has biases and parameters of the activation. Layers have 8 experts, of which 4 are chosen, so that
experts may be idle; that is not the dense model where it is gpt-oss's layout. Faults are those of
`faulty_backends.FAULTS`; a fault is tried at load first, and by `verify` where that misses it. A fault that a layout
cannot have (a bias where there is none) is left out. Seeds change the random numbers of the check's inputs, biases and
slots; weights go through the model's layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.lib import faulty_backends, smollm2
from tests.lib.faulty_backends import Faulty
from tests.lib.peak_memory import Peak
from vllm_moe_oracle import settings
from vllm_moe_oracle.backends import Backend
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.compat import current_adapter, standalone_layer
from vllm_moe_oracle.core.problem import Device
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measuring.verifying import LayerPlan, Verification
from vllm_moe_oracle.verification import inputs, self_check, token_stream, whole_layer
from vllm_moe_oracle.verification.layer_result import LayerResult

GOLDEN = Path(__file__).parents[1] / "golden" / "accuracy" / "self_check.json"
LAYERS = 3
LAYOUTS = {"mxfp8": "mxfp8", "mxfp8, 16 bit": "mxfp8-compressed-a16", "gpt-oss": "mxfp4"}
"""Format by layout."""

_PARAMETERS = ("alpha ignored", "beta ignored", "limit ignored")
_OTHER_LAYERS = ("situ's bound of gate ignored", "situ's bound of up ignored", "swiglustep's limit ignored")
_BIASES = ("no bias of w13", "no bias of w2", "bias of the last columns")
_ONLY_MXFP8 = ("codes of w2 transposed",)


def faults(layout: str) -> list[Faulty]:
    """The faults that a layout can have."""
    left_out = {*_OTHER_LAYERS, *(() if layout == "gpt-oss" else (*_PARAMETERS, *_BIASES))}
    left_out |= set(_ONLY_MXFP8) if layout == "gpt-oss" else set()
    return [fault for name, fault in faulty_backends.FAULTS.items() if name not in left_out]


def checkpoint(folder: Path, layout: str) -> Path:
    """The first layers of the model in a layout, written unless they are there."""
    path = folder / layout.replace(", ", "-").replace(" ", "-")
    if not (path / "tokenizer_config.json").exists():
        if layout == "gpt-oss":
            model = smollm2.gpt_oss(LAYERS)
            model.config["num_experts_per_tok"] = 4
        else:
            model = smollm2.mixture(LAYERS, experts=4, gate="routed")
        smollm2.write(path, LAYOUTS[layout], model)
    return path


@contextmanager
def opened(path: Path, device: Device) -> Iterator[Verification]:
    """A checkpoint, inside what a worker of vLLM has."""
    kind = "cuda" if device.kind == "cuda" else "cpu"
    config = read_checkpoint(path)
    with standalone_layer.single_rank_worker(kind, 2048), Verification(config, device, settings.load({})) as made:
        yield made


def at_load(backend: Backend, plan: LayerPlan, device: Device, raw: dict[str, Tensor]) -> self_check.Comparison:
    """The check of a server."""
    kind = "cuda" if device.kind == "cuda" else "cpu"
    moe = standalone_layer.fused_moe_config(plan.problem, kind, 2048)
    own = backend.plan(plan.problem, device)
    return self_check.compare_with_reference(backend, plan.problem, own, raw, moe, current_adapter())


def whole(backend: Backend, made: Verification, plan: LayerPlan, device: Device) -> LayerResult:
    """The check of `verify`, without the one at load."""
    assert plan.tensors is not None
    tokens = token_stream.TokenStream(made.files, plan.problem.hidden_size, made.gemma_norms).inputs(plan.tensors)
    kind = "cuda" if device.kind == "cuda" else "cpu"
    check = whole_layer.LayerCheck(
        plan.problem, plan.tensors.expert, (tokens.x, tokens.weights, tokens.ids), current_adapter(), kind
    )
    return check.run(backend, backend.plan(plan.problem, device))


def raw_layer(plan: LayerPlan, device: Device) -> dict[str, Tensor]:
    """A layer as the scheme's ``read`` returns it."""
    assert plan.tensors is not None
    parts = [plan.tensors.raw_expert(index) for index in range(plan.problem.num_experts)]
    place = "cuda" if device.kind == "cuda" else "cpu"
    return {
        name: torch.cat([each[name].view(torch.uint8) for each in parts]).view(first.dtype).to(place)
        for name, first in parts[0].items()
    }


def try_faults(folder: Path, device: Device) -> dict[str, dict[str, str]]:
    """Where each fault is caught, by layout and fault: ``load``, ``verify`` or ``missed``."""
    found: dict[str, dict[str, str]] = {}
    for layout in LAYOUTS:
        with opened(checkpoint(folder, layout), device) as made:
            plan = made.plans[-1]
            raw = raw_layer(plan, device)
            for fault in faults(layout):
                found.setdefault(layout, {})[fault.name] = caught = _caught(fault, made, plan, device, raw)
                print(f"{layout}: {fault.name}: {caught}", flush=True)
    return found


def _caught(fault: Faulty, made: Verification, plan: LayerPlan, device: Device, raw: dict[str, Tensor]) -> str:
    try:
        result = at_load(fault, plan, device, raw)
    except Exception as error:  # a kernel that raises is refused
        return f"load ({type(error).__name__})"
    if not result.passed:
        return "load"
    return "verify" if whole(fault, made, plan, device).fault else "missed"


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Other random numbers in the inputs of the check at load."""
    plain = inputs._random

    def other(like: Tensor, seed: int) -> Tensor:
        return plain(like, seed + 1009 * number)

    inputs._random = other
    try:
        yield
    finally:
        inputs._random = plain


def healthy(plan: LayerPlan, made: Verification) -> list[Backend]:
    """Backends that are right: those that accept the layer, and one that rounds wherever a kernel may."""
    assert plan.decision is not None
    accepted = [made.registry[each.backend] for each in plan.decision.candidates if each.accepted]
    many: dict[str, Any] = {"beyond": (600,)}  # where a kernel for many tokens would take over
    rounding = [
        Faulty(f"rounds, {rule}", compute=faulty_backends.every_rounding(rule), **many) for rule in ("ceil", "floor")
    ]
    if plan.problem.scheme.activations == "16bit":
        rounding = rounding[:1]
    return [
        *(each for each in accepted if not self_check.is_reference(each)),
        Faulty("emulation, all calls", **many),
        *rounding,
    ]


def try_seeds(folder: Path, device: Device, count: int, budget: float, names: Sequence[str] = ()) -> dict[str, Any]:
    """Checks and refusals by layout and backend, and the largest error as a part of what is allowed.

    Args:
        folder: where checkpoints are.
        device: this machine.
        count: of seeds for each layout.
        budget: seconds of all; fewer seeds are tried where it is spent.
        names: backends; none for all that are right.
    """
    found: dict[str, Any] = {}
    start = time.perf_counter()
    done = 0
    for place, layout in enumerate(LAYOUTS, 1):
        until = start + budget * place / len(LAYOUTS)
        with opened(checkpoint(folder, layout), device) as made:
            layers = [(plan, raw_layer(plan, device)) for plan in made.plans]
            backends = [each for each in healthy(made.plans[0], made) if not names or each.name in names]
            for number in range(count):
                if time.perf_counter() > until:
                    break
                plan, raw = layers[number % len(layers)]
                for backend in backends:
                    with seeded(number):
                        result = at_load(backend, plan, device, raw)
                    entry = found.setdefault(f"{layout}: {backend.name}", {"seeds": 0, "refused": 0, "worst": 0.0})
                    entry["seeds"] += 1
                    entry["refused"] += not result.passed
                    entry["worst"] = round(max(entry["worst"], result.error / result.tolerance), 4)
                    done += 1
                    if not result.passed:
                        print(f"{layout}, seed {number}: {backend.name}: {result}", flush=True)
    print(f"{done} checks in {time.perf_counter() - start:.0f} s", flush=True)
    return found


def price(folder: Path, device: Device) -> dict[str, Any]:
    """Seconds of the check at load, its second call, and the memory that it allocates, by layout and backend."""
    found: dict[str, Any] = {}
    for layout in LAYOUTS:
        with opened(checkpoint(folder, layout), device) as made:
            plan = made.plans[0]
            raw = raw_layer(plan, device)
            for backend in healthy(plan, made):
                first = at_load(backend, plan, device, raw)
                start = time.thread_time()
                second = at_load(backend, plan, device, raw)
                busy = time.thread_time() - start
                with Peak(*raw.values()) as memory:
                    at_load(backend, plan, device, raw)
                found[f"{layout}: {backend.name}"] = {
                    "seconds": round(second.seconds, 3),
                    "first_seconds": round(first.seconds, 3),
                    "thread_seconds": round(busy, 3),
                    "mebibytes": round(memory.peak / 2**20, 1),
                }
    return found


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where a fault is missed or a right backend refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--seeds", type=int, default=0, metavar="N")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="of the seeds")
    parser.add_argument("--backends", default="", help="of the seeds; default: all that are right")
    parser.add_argument("--price", action="store_true")
    parser.add_argument("--checkpoints", type=Path, help="where checkpoints are, and are made")
    parser.add_argument("--write", action="store_true", help="write the figures")
    options = parser.parse_args(arguments)
    if reason := smollm2.missing():
        print(reason, file=sys.stderr)
        return 2
    device = detect.detect()
    made: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.checkpoints or Path(temporary)
        if options.faults:
            made["faults"] = try_faults(folder, device)
        if options.seeds:
            made["seeds"] = try_seeds(
                folder, device, options.seeds, options.budget, [name for name in options.backends.split(",") if name]
            )
        if options.price:
            made["price"] = price(folder, device)
    print(json.dumps(made, indent=1))
    if options.write:
        held = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        conditions = {"device": str(device), "packages": dataclasses.asdict(device)["packages"]}
        for part, each in made.items():
            entry = held.setdefault(f"{part}, {device.kind}", {})
            entry |= {**conditions, "figures": {**entry.get("figures", {}), **each}}
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(json.dumps(held, indent=1) + "\n")
    missed = [name for each in made.get("faults", {}).values() for name, where in each.items() if where == "missed"]
    return int(bool(missed) or any(each["refused"] for each in made.get("seeds", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
