"""Measures what formats and backends do to a real model's predictions, and which injected faults the gate catches.

    python -m tests.tools.accuracy [--formats mxfp8,...] [--backends cpu_mxfp4,...] [--windows 80] [--write]
    python -m tests.tools.accuracy --dtype float32 [--formats ...] [--write]         # nothing is rounded to 16 bits
    python -m tests.tools.accuracy --dtype float16 [--formats gptq-int4-g32,...] [--write]    # integers alone
    python -m tests.tools.accuracy --tp 2 [--formats ...] [--write]                  # two tensor-parallel ranks' shards
    python -m tests.tools.accuracy --whole --windows 16 --formats mxfp8 [--write]    # and the whole model in bfloat16
    python -m tests.tools.accuracy --cut-off --windows 24 --formats mxfp8 [--write]  # vLLM's operator as it is
    python -m tests.tools.accuracy --faults [--windows 8] [--write]
    python -m tests.tools.accuracy --device cuda --write           # on a machine with an NVIDIA GPU

`tests.lib.accuracy` says what is compared, on which text, and what the gate is. `--write` puts the figures into
`tests/golden/accuracy/MACHINE.json`, format by format, beside the machine, the versions and the text, of which a run
takes the first windows. The exit status is 1 when a backend that leaves activations in 16 bits does not pass the gate.

About 2 GiB of disk for the checkpoints, which are made once (`--checkpoints`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.lib import accuracy, faulty_backends, smollm2
from tests.lib.accuracy import Figures, Switch
from tests.lib.faulty_backends import Faulty, after
from tests.lib.integer_checkpoints import Integers
from tests.tools import accuracy_tables
from vllm_moe_oracle import settings
from vllm_moe_oracle.backends import cpu_dequantized
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.compat import standalone_layer
from vllm_moe_oracle.core.problem import Device, Problem
from vllm_moe_oracle.devices import detect
from vllm_moe_oracle.measuring.verifying import Verification

GOLDEN = Path(__file__).parents[1] / "golden" / "accuracy"
FORMATS = (
    "mxfp8", "mxfp8-compressed-a16", "mxfp4-compressed-a16", "gptq-int4-g32", "gptq-int8", "awq",
    "compressed-int4-zero-points",
)  # fmt: skip
FAULT_FORMAT = "mxfp4-compressed-a16"
SCORE_POINTS = 8.0
"""Points of accuracy that a gate on a benchmark's score may let a backend lose. Here the score is the accuracy of the
next token: a model of this size solves no problems of GSM8K."""


class Rarely:
    """The right output, but in every twentieth call of a layer."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, tensors: Any, layer: Problem, out: Tensor, *more: Any) -> None:
        forward(tensors, layer, out, *more)
        self._calls += 1
        if self._calls % 20 == 0:
            out.mul_(1.5)


def coarse(bits: int) -> Callable[[Tensor], object]:
    """Rounds an output to that many significant bits, as sums in too few bits would leave it."""

    def change(out: Tensor) -> None:
        mantissa, exponent = torch.frexp(out.float())
        out.copy_(torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent))

    return change


FAULTS: tuple[Faulty, ...] = (
    Faulty("none"),
    Faulty("gate and up swapped", faulty_backends.swap_halves),
    Faulty("scales of w13 in another order", faulty_backends.swizzle("w13_scale")),
    Faulty("scales of w2 in another order", faulty_backends.swizzle("w2_scale")),
    Faulty("scales of w13 one exponent up", faulty_backends.shift("w13_scale", 1)),
    Faulty("scales of w2 one exponent up", faulty_backends.shift("w2_scale", 1)),
    Faulty("scales of w2 one exponent down", faulty_backends.shift("w2_scale", -1)),
    Faulty("one of 100 scales of w13 one up", faulty_backends.some_scales("w13_scale", 1)),
    Faulty("one of 100 scales of w2 one up", faulty_backends.some_scales("w2_scale", 1)),
    Faulty("one expert of 8 has another's weights", compute=faulty_backends.wrong_experts(lambda index: index == 2)),
    Faulty("last 32 columns 10 % too large", compute=after(lambda out: out[:, -32:].mul_(1.1))),
    Faulty("last column is zero", compute=after(lambda out: out[:, -1].zero_())),
    Faulty("last token of a call is half", compute=after(lambda out: out[-1].mul_(0.5))),
    Faulty("every 20th call 50 % too large", compute=Rarely()),
    Faulty("output 1 % too large", compute=after(lambda out: out.mul_(1.01))),
    Faulty("output in 5 significant bits", compute=after(coarse(5))),
    Faulty("last router weight is the first's", compute=faulty_backends.last_weight),
)
"""Backends with one fault in every layer. The last one changes nothing here: all router weights are alike."""


def checkpoint(folder: Path, name: str, dtype: str = "bfloat16") -> Path:
    """The model in a format, written unless it is there; of integers with its twin in float32."""
    path = folder / (name if dtype == "bfloat16" else f"{name}-{dtype}")
    if not (path / "tokenizer_config.json").exists():
        smollm2.write(path, name, twin=True, dtype=dtype)
    return path


def prepare(path: Path, name: str, device: str) -> tuple[Any, list[Switch]]:
    """The dense model, with the reference of a checkpoint in its switches."""
    twin = path.with_name(f"{path.name}-exact") if isinstance(smollm2.FORMATS[name], Integers) else path
    config = json.loads((path / "config.json").read_text())
    model, switches = accuracy.dense_model(config["num_hidden_layers"], device)
    for switch, functions in zip(switches, accuracy.dequantized(twin, config["num_local_experts"]), strict=True):
        switch.functions |= functions
    return model, switches


def measure(
    path: Path, name: str, backends: list[str], tokens: Tensor, device: Device, *, dtype: str, tp: int = 1,
    whole: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Figures of a format by backend, and those of the baseline.

    Args:
        path: the checkpoint.
        name: its format.
        backends: by name; none for all that accept the layers.
        tokens: from `accuracy.windows`.
        device: this machine.
        dtype: of the layers.
        tp: tensor-parallel ranks.
        whole: also the whole model in bfloat16.
    """
    kind = "cuda" if device.kind == "cuda" else "cpu"
    begin = time.perf_counter()

    def say(words: str) -> None:
        print(f"{time.perf_counter() - begin:6.0f} s  {name}: {words}", file=sys.stderr, flush=True)

    with standalone_layer.single_rank_worker(kind, 2048):
        found, refused = accuracy.served(path, backends, device, dtype, tp, say)
        model, switches = prepare(path, name, kind)
        for backend, functions in found.items():
            for switch, function in zip(switches, functions, strict=True):
                switch.functions[backend] = function
        baseline = [accuracy.BASELINES[dtype]] if dtype in accuracy.BASELINES else []
        others = {accuracy.WHOLE: accuracy.in_bfloat16(model)} if whole else {}
        figures = accuracy.compare(model, switches, [*found, *baseline], tokens, others=others, say=say)
    for backend, reason in refused.items():
        say(f"{backend}: {reason}")
    with Verification(read_checkpoint(path), device, settings.load({})) as made:
        precision = {each: made.registry[each].activations(made.plans[0].problem) for each in found}
    return {
        each: {"activations": precision.get(each, "16bit"), "is_backend": each in found, **record(figures[each])}
        for each in figures
    }


def inject(path: Path, tokens: Tensor, device: Device) -> dict[str, Any]:
    """Figures of each fault."""
    kind = "cuda" if device.kind == "cuda" else "cpu"
    with standalone_layer.single_rank_worker(kind, 2048):
        model, switches = prepare(path, FAULT_FORMAT, kind)
        with Verification(read_checkpoint(path), device, settings.load({})) as made:
            for fault in FAULTS:
                for switch, plan in zip(switches, made.plans, strict=True):
                    switch.functions[fault.name] = accuracy.mlp(plan, fault, device)
        baseline = accuracy.BASELINES["bfloat16"]
        figures = accuracy.compare(model, switches, [*(fault.name for fault in FAULTS), baseline], tokens)
    del figures[baseline]
    return {
        name: {**record(each), "caught": each.shown_beyond, "passes_score_gate": each.points_lost < SCORE_POINTS}
        for name, each in figures.items()
    }


def record(found: Figures) -> dict[str, Any]:
    """Figures for the file."""
    return {**accuracy.as_record(found), "passes": found.passes, "points_lost": round(found.points_lost, 3)}


def write(device: Device, part: str, figures: dict[str, Any], pieces: list[accuracy.Piece]) -> Path:
    """Adds figures to the file of the machine.

    Raises:
        ValueError: a piece of text has another hash than the file says.
    """
    path = GOLDEN / f"{accuracy_tables.machine(device)}.json"
    held = json.loads(path.read_text()) if path.exists() else {}
    text = {piece.name: piece.sha256 for piece in pieces}
    if changed := [each for each, digest in text.items() if held.get("text", {}).get(each, digest) != digest]:
        raise ValueError(f"{path} was made with another text of {', '.join(changed)}")
    held |= {"model": "SmolLM2-135M-Instruct, 8 experts of 192 columns, top-8 with equal weights"}
    held |= {"window": accuracy.WINDOW, "context": accuracy.CONTEXT, "alpha": accuracy.ALPHA}
    held |= {"max_kl": accuracy.MAX_KL, "max_perplexity": accuracy.MAX_PERPLEXITY}
    held |= {"text": {**held.get("text", {}), **text}}
    entry = {"device": str(device), "packages": device.packages}
    held[part] = {**held.get(part, {}), **{key: {**entry, "figures": value} for key, value in figures.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(held, indent=1) + "\n")
    return path


def show(name: str, figures: dict[str, Any]) -> None:
    """One line for each backend or fault."""
    for backend, each in figures.items():
        words = "passes" if each["passes"] else "does not pass"
        if "caught" in each:
            words = "caught" if each["caught"] else words
            words += ", a gate of 8 points lets it pass" if each["passes_score_gate"] else ", so a gate of 8 points"
        change = each["perplexity"] / each["reference_perplexity"] - 1
        print(
            f"{name}: {backend}: KL {each['kl']:.2e} (limit {each['kl_limit']:.2e}; beyond the baseline's "
            f"{each['excess']:+.2e} +- {each['excess_half_width']:.1e}), perplexity "
            f"{each['reference_perplexity']:.3f} {change:+.3%}, top-1 {each['top1']:.2%}, points "
            f"{-each['points_lost']:+.2f}: {words}"
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line, with ``formats`` as a list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS), help="names of tests.lib.smollm2.FORMATS")
    parser.add_argument("--backends", default="", help="default: all that accept the layers")
    parser.add_argument("--windows", type=int, default=0, help=f"of {accuracy.WINDOW} tokens; default 80, faults 8")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of layers")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks: their shards, one after the other")
    parser.add_argument("--whole", action="store_true", help="also the whole model in bfloat16")
    parser.add_argument("--cut-off", action="store_true", help="cpu_dequantized without its factor for cut numbers")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what this machine must be")
    parser.add_argument("--faults", action="store_true", help="inject faults, one at a time")
    parser.add_argument("--checkpoints", type=Path, help="where checkpoints are, and are made")
    parser.add_argument("--write", action="store_true", help="write the figures")
    options = parser.parse_args(arguments)
    options.formats = [FAULT_FORMAT] if options.faults else options.formats.split(",")
    if unknown := [name for name in options.formats if name not in FORMATS]:
        parser.error(f"no format: {', '.join(unknown)}; valid: {', '.join(FORMATS)}")
    if options.dtype == "float16":  # it has not the range of block scales
        options.formats = [name for name in options.formats if isinstance(smollm2.FORMATS[name], Integers)]
    return options


def part_of(options: argparse.Namespace) -> str:
    """The part of the figures that a run writes."""
    if options.whole or options.cut_off:
        return "whole model" if options.whole else "cut off"
    part = "faults" if options.faults else "formats"
    part += f", {options.dtype}" if options.dtype != "bfloat16" else ""
    return part + (f", tp {options.tp}" if options.tp > 1 else "")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns an exit status."""
    options = parse(arguments)
    device = detect.detect()
    if options.device not in ("auto", device.kind):
        print(f"this machine is {device}", file=sys.stderr)
        return 2
    if reason := smollm2.missing():
        print(reason, file=sys.stderr)
        return 2
    tokens, pieces = accuracy.windows(options.windows or (8 if options.faults else accuracy.WINDOWS))
    backends = [name for name in options.backends.split(",") if name]
    if options.cut_off:
        cpu_dequantized._cuts_off = lambda: False  # type: ignore[assignment]
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        place = options.checkpoints or Path(folder)
        for name in options.formats:
            path = checkpoint(place, name, "float16" if options.dtype == "float16" else "bfloat16")
            if options.faults:
                figures = inject(path, tokens, device)
            else:
                figures = measure(
                    path, name, backends, tokens, device, dtype=options.dtype, tp=options.tp, whole=options.whole
                )
                gated = [each for each in figures.values() if each["is_backend"] and each["activations"] == "16bit"]
                wrong |= not all(each["passes"] for each in gated)
            show(name, figures)
            if options.write:
                print(write(device, part_of(options), {name: figures}, pieces), file=sys.stderr)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
