"""Layers of integer experts with random contents, and the parameters that vLLM would have loaded of them.

Files are written by `reference`, in each packing's documented layout; the scheme under test has no part in it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tests.lib import integer_checkpoints, reference
from tests.lib.cases import problem
from tests.lib.tolerances import Layer, moe_bound, outside
from vllm_moe_oracle.backends.emulation import forward
from vllm_moe_oracle.core.problem import Activation, ActOrder, Parallel, Problem, Scheme

Array = npt.NDArray[Any]
Matrix = Literal["w13", "w2"]

PACKINGS = ("gptq", "gptq_v2", "awq", "moe_wna16", "compressed-tensors", "compressed-tensors-int")
INPUTS_FIRST = ("gptq", "gptq_v2", "awq")
"""Packings whose files have input features first."""
TWO_LAYOUTS = ("compressed-tensors", "compressed-tensors-int")
NAMES = {
    **dict.fromkeys(("gptq", "gptq_v2", "awq", "moe_wna16"), ("qweight", "scales", "qzeros", "g_idx")),
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    "compressed-tensors-int": ("weight", "weight_scale", "weight_zero_point", "weight_g_idx"),
}


def layer_of(
    packing: str = "compressed-tensors",
    bits: int = 4,
    group: int = 32,
    zero_points: bool = False,
    act_order: ActOrder = "none",
    bias: bool = False,
    gated: bool = True,
    **changes: Any,
) -> Problem:
    """A small layer; `changes` are fields of the problem, or of its parallel settings."""
    fields: dict[str, Any] = {"experts": 2, "top_k": 1, "hidden_size": 64, "intermediate_size": 96} | changes
    activation = Activation("silu") if gated else Activation("relu2", gated=False)
    scheme = Scheme("wna16", bits, group, packing, zero_points, act_order)
    return problem(**{"scheme": scheme, "activation": activation, "has_bias": bias} | fields)


@dataclass
class Contents:
    """What the experts of a whole layer hold, nothing packed, input features in their own order.

    Attributes:
        problem: the layer without any cut.
        codes: int64 `[E, N, K]` by matrix, unsigned.
        scales: bfloat16 `[E, N, G]`.
        zeros: int64 `[E, N, G]`, or nothing.
        groups: int64 `[E, K]`, the group of each input feature.
        biases: bfloat16 `[E, N]`, or nothing.
    """

    problem: Problem
    codes: dict[Matrix, Array]
    scales: dict[Matrix, Tensor]
    zeros: dict[Matrix, Array]
    groups: dict[Matrix, Array]
    biases: dict[Matrix, Tensor]

    def weights(self, matrix: Matrix) -> Array:
        """Exact weights, float64 `[E, N, K]`."""
        return np.stack(
            [
                reference.dequantize_integers(
                    self.codes[matrix][expert],
                    self.scales[matrix][expert].double().numpy(),
                    self.problem.scheme.bits,
                    self.zeros[matrix][expert] if self.zeros else None,
                    self.groups[matrix][expert],
                )
                for expert in range(self.problem.num_experts)
            ]
        )

    def exact(self) -> dict[str, Any]:
        """The experts as arguments of `reference.moe`."""
        activation = self.problem.activation
        found: dict[str, Any] = {matrix: self.weights(matrix) for matrix in self.codes}
        found |= {f"b{matrix[1:]}": bias.double().numpy() for matrix, bias in self.biases.items()}
        return found | {"activation": activation.name if activation.gated else f"{activation.name}_no_mul"}

    def parameters(self, transposed: bool | None = None, rank: int = 0, ranks: int = 1) -> dict[str, Tensor]:
        """What vLLM has loaded on a rank: files cut as its loaders cut them.

        Args:
            transposed: whether compressed-tensors are loaded with their input features first.
            rank: which.
            ranks: tensor-parallel size.
        """
        scheme, files = self.problem.scheme, self.files()
        codes, scale, zero, index = NAMES[scheme.packing]
        rows, columns = (1, 0) if scheme.packing in INPUTS_FIRST else (0, 1)
        whole, repeats = scheme.act_order == "group", 1
        if scheme.group_size > 0 and not whole:
            repeats = scheme.group_size // effective_group(self.problem, ranks)
        found: dict[str, list[Tensor]] = {}
        for (expert, shard, name), tensor in files.items():
            if shard == "w3" or name == "weight_shape":
                continue
            matrix, flat = "w2" if shard == "w2" else "w13", tensor.dim() == 1
            gated = shard == "w1" and self.problem.activation.gated
            halves = [tensor, files[expert, "w3", name]] if gated else [tensor]
            if name in (scale, zero):
                halves = [half.repeat_interleave(repeats, columns) for half in halves]
            if name == index:
                made = tensor if matrix == "w13" else tensor.chunk(ranks)[rank]
            elif matrix == "w13":
                made = torch.cat([half.chunk(ranks, 0 if flat else rows)[rank] for half in halves], 0 if flat else rows)
            elif flat or (name != codes and (whole or halves[0].shape[columns] == 1)):
                made = halves[0]
            else:
                made = halves[0].chunk(ranks, columns)[rank]
            found.setdefault(f"{matrix}_{name}", []).append(made.T if transposed and not flat else made)
        return {name: torch.stack(experts) for name, experts in found.items()}

    def files(self, packing: str = "") -> dict[tuple[int, str, str], Tensor]:
        """What a tool writes: a tensor by expert, projection (w1 gate, w2 down, w3 up) and the end of its name.

        Args:
            packing: of the files; that of the problem where it is not given.
        """
        packing, scheme = packing or self.problem.scheme.packing, self.problem.scheme
        codes, scale, zero, index = NAMES[packing]
        inputs_first = packing in INPUTS_FIRST
        found: dict[tuple[int, str, str], Tensor] = {}
        shards: list[tuple[str, Matrix, int]] = [("w1", "w13", 0), ("w3", "w13", 1), ("w2", "w2", 0)]
        for expert in range(self.problem.num_experts):
            for shard, matrix, half in shards:
                count = 2 if matrix == "w13" and self.problem.activation.gated else 1
                if half >= count:
                    continue
                rows = self.codes[matrix].shape[1] // count
                mine = slice(half * rows, (half + 1) * rows)
                packed = reference.pack_integers(packing, scheme.bits, self.codes[matrix][expert][mine])
                scales = self.scales[matrix][expert][mine]
                tensors = {codes: torch.from_numpy(packed), scale: scales.T if inputs_first else scales}
                if scheme.zero_points:
                    zeros = reference.pack_integers(packing, scheme.bits, self.zeros[matrix][expert][mine], zeros=True)
                    tensors[zero] = torch.from_numpy(zeros)
                if scheme.act_order == "group" and scheme.group_size != -1:
                    tensors[index] = torch.from_numpy(self.groups[matrix][expert]).to(torch.int32)
                if packing == "compressed-tensors":
                    shape = [rows, self.codes[matrix].shape[2]]
                    tensors["weight_shape"] = torch.tensor(shape, dtype=torch.int64)
                if self.biases:
                    tensors["bias"] = self.biases[matrix][expert][mine]
                found |= {(expert, shard, name): tensor.contiguous() for name, tensor in tensors.items()}
        return found

    def on_rank(self, ranks: int) -> Problem:
        """The problem of one of `ranks` tensor-parallel ranks."""
        inner = self.problem.intermediate_size // ranks
        return dataclasses.replace(self.problem, intermediate_size=inner, parallel=Parallel(tp=ranks))


def effective_group(problem: Problem, ranks: int) -> int:
    """The group in which scales are loaded: halved until it divides both sizes."""
    group, inner = problem.scheme.group_size, problem.intermediate_size // ranks
    while group > 32 and (problem.hidden_size % group or inner % group):
        group //= 2
    return group


def contents_of(layer: Problem, seed: int = 0) -> Contents:
    """Random contents: every code and zero point occurs, scales differ by powers of two and more."""
    rng = np.random.default_rng(seed)
    experts, scheme = layer.num_experts, layer.scheme
    made = Contents(layer, {}, {}, {}, {}, {})
    sizes: dict[Matrix, tuple[int, int]] = {
        "w13": (layer.w13_rows, layer.hidden_size),
        "w2": (layer.hidden_size, layer.intermediate_size),
    }
    for matrix, (rows, columns) in sizes.items():
        group = columns if scheme.group_size == -1 else scheme.group_size
        groups = np.tile(np.arange(columns) // group, (experts, 1))
        if scheme.act_order == "group":
            groups = rng.permuted(groups, axis=1)
        shape = (experts, rows, -(-columns // group))  # the last group may be shorter
        spread = np.exp2(rng.integers(-2, 3, shape))
        # Such that the layer's products are of the order of one.
        size = rng.uniform(0.5, 1.0, shape) * spread / (2**scheme.bits * np.sqrt(columns))
        made.codes[matrix] = rng.integers(0, 2**scheme.bits, (experts, rows, columns))
        made.scales[matrix] = torch.from_numpy(size).to(torch.bfloat16)
        if scheme.zero_points:
            made.zeros[matrix] = rng.integers(0, 2**scheme.bits, shape)
        made.groups[matrix] = groups
        if layer.has_bias:
            made.biases[matrix] = torch.from_numpy(rng.standard_normal((experts, rows))).to(torch.bfloat16)
    return made


def checkpoint_of(layer: Problem, **more: Any) -> dict[str, Any]:
    """The ``quantization_config`` that the packing's tool writes."""
    return integer_checkpoints.tool_config(layer.scheme, **more)


def emulation_error(made: Contents, layer: Problem, tensors: dict[str, Tensor], seed: int = 0) -> str:
    """The emulation's worst deviation from the reference on four random tokens, in words; empty if within the bound."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((4, layer.num_experts)), axis=1)[:, : layer.top_k].astype(np.int64)
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    x = torch.from_numpy(rng.standard_normal((len(ids), layer.hidden_size))).to(getattr(torch, layer.dtype))
    out = torch.full_like(x, torch.nan)
    forward(tensors, layer, out, x, torch.from_numpy(weights), torch.from_numpy(ids))
    return deviation(made, out, x, ids, weights)


def deviation(made: Contents, out: Tensor, x: Tensor, ids: Array, weights: Array) -> str:
    """An output's worst deviation from the reference, in words; empty if within the bound of `x`'s dtype."""
    inputs, exact, shares = x.double().numpy(), made.exact(), weights.astype(np.float64)
    expected = reference.moe(inputs, topk_ids=ids, topk_weights=shares, **exact)
    _, bound = moe_bound(inputs, Layer(**exact), ids, shares, dtype=str(x.dtype).removeprefix("torch."))
    return outside(out.double().numpy(), expected, bound)
