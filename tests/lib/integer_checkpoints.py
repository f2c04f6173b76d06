"""Tiny checkpoints with integer experts, in the file layouts of GPTQ, AWQ and compressed-tensors.

The compressed-tensors package writes its own format; GPTQ and AWQ files follow their documented layouts, which
`reference` packs. Beside each checkpoint lies its exact twin: the same model in float32 with the dequantized values.
Quantization rounds to nearest, in numpy, and shares no code with the package under test.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.lib import configs, reference
from vllm_moe_oracle.core.problem import ActOrder, Scheme

Array = npt.NDArray[Any]
_EXPERT = re.compile(r"(?P<module>.*\.experts\.\d+\.((gate|up)_proj|w1|w3|(?P<down>down_proj|w2)))\.weight")
"""Qwen's names of an expert's matrices, and Mixtral's."""


@dataclass(frozen=True)
class Integers:
    """How the experts of a checkpoint are stored.

    Attributes:
        packing: ``gptq``, ``gptq_v2``, ``awq``, ``compressed-tensors`` or ``compressed-tensors-int``.
        bits: bits per code.
        group: input features per scale; -1 for one scale per row.
        zero_points: the checkpoint has zero points.
        act_order: ``none``, ``group`` (a group's features are anywhere) or ``static``.
        bias: every projection adds a bias.
        config: more fields of ``quantization_config``.
    """

    packing: str
    bits: int = 4
    group: int = 32
    zero_points: bool = False
    act_order: ActOrder = "none"
    bias: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def scheme(self) -> Scheme:
        """The same as the package describes it."""
        return Scheme("wna16", self.bits, self.group, self.packing, self.zero_points, self.act_order)


@dataclass
class _Matrix:
    """One matrix `[N, K]`: unsigned codes, scales `[N, G]` as stored, zero points `[N, G]`, group of each feature."""

    codes: Array
    scales: Any
    zeros: Array | None
    groups: Array

    def values(self, bits: int) -> Array:
        return reference.dequantize_integers(self.codes, self.scales.double().numpy(), bits, self.zeros, self.groups)


def write(plain: Path, target: Path, how: Integers, seed: int = 0, *, twin: bool = True, dtype: str = "") -> Path:
    """Writes a checkpoint with integer experts, and its twin as ``<target>-exact``.

    Args:
        plain: a checkpoint of `checkpoints.write_checkpoint` in 16 bits or float32, not quantized.
        target: the folder to make.
        how: the format.
        seed: of orders and biases.
        twin: False leaves the twin out.
        dtype: of everything that is not quantized; "" leaves it as it is.
    """
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    rng = np.random.default_rng(seed)
    source = load_file(plain / "model.safetensors")
    stored: dict[str, Any] = {}
    config = json.loads((plain / "config.json").read_text())
    if dtype:
        config["dtype"] = dtype
        kept = getattr(torch, dtype)
        source = {name: tensor if _EXPERT.fullmatch(name) else tensor.to(kept) for name, tensor in source.items()}
    exact = {name: tensor.float() for name, tensor in source.items()}
    orders: dict[str, Array] = {}
    for name, tensor in sorted(source.items()):
        found = _EXPERT.fullmatch(name)
        if found is None:
            stored[name] = tensor
            continue
        module = found["module"]
        # Tools order features by statistics of the inputs, which gate and up have in common.
        inputs = module.rpartition(".")[0] + (".down" if found["down"] else ".inputs")
        orders.setdefault(inputs, rng.permutation(tensor.shape[1]))
        matrix = _quantize(tensor.double().numpy(), how, orders[inputs])
        exact[name] = torch.from_numpy(matrix.values(how.bits)).float()
        stored |= {f"{module}.{end}": each.contiguous() for end, each in _tensors(matrix, how).items()}
        if how.bias:
            bias = torch.from_numpy(rng.uniform(-0.5, 0.5, tensor.shape[0])).to(torch.float16)
            stored[f"{module}.bias"] = bias
            exact[f"{module}.bias"] = bias.float()
    written = [(target, stored, {"quantization_config": _config(how)})]
    if twin:
        written.append((target.with_name(f"{target.name}-exact"), exact, {"dtype": "float32"}))
    for folder, tensors, fields in written:
        shutil.copytree(plain, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.safetensors"))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({**config, **fields}, indent=2))
    return target


def _quantize(values: Array, how: Integers, order: Array) -> _Matrix:
    import torch

    columns = values.shape[1]
    group = columns if how.group == -1 else how.group
    largest = 2**how.bits - 1
    groups = np.arange(columns) // group
    if how.act_order == "group":
        groups = groups[np.argsort(order)]
    members = [np.flatnonzero(groups == each) for each in range(columns // group)]
    blocks = np.stack([values[:, each] for each in members], axis=1)
    if how.zero_points:
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
    else:
        high = np.abs(blocks).max(-1)
        low = -high
    kind = torch.bfloat16 if how.packing.startswith("compressed") else torch.float16
    scales = torch.from_numpy((high - low) / largest).to(kind)
    steps = scales.double().numpy()
    zeros = np.clip(np.rint(-low / steps), 0, largest).astype(np.int64) if how.zero_points else None
    middle = np.full(steps.shape, 2 ** (how.bits - 1)) if zeros is None else zeros
    codes = np.clip(np.rint(values / steps[:, groups]) + middle[:, groups], 0, largest).astype(np.int64)
    return _Matrix(codes, scales, zeros, groups)


def _tensors(matrix: _Matrix, how: Integers) -> dict[str, Any]:
    import torch

    if how.packing.startswith("compressed"):
        return _compressed(matrix, how)
    found = {
        "qweight": torch.from_numpy(reference.pack_integers(how.packing, how.bits, matrix.codes)),
        "scales": matrix.scales.T,
    }
    # Both tools store zero points of symmetric weights too.
    zeros = np.full(matrix.scales.shape, 2 ** (how.bits - 1)) if matrix.zeros is None else matrix.zeros
    found["qzeros"] = torch.from_numpy(reference.pack_integers(how.packing, how.bits, zeros, zeros=True))
    if how.packing != "awq":
        found["g_idx"] = torch.from_numpy(matrix.groups).to(torch.int32)
    return found


def _compressed(matrix: _Matrix, how: Integers) -> dict[str, Any]:
    """What the package makes of weights that the codes hold exactly."""
    import torch
    from compressed_tensors import compressors
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**_arguments(how.scheme)))
    kind = "PackedQuantizationCompressor" if how.packing == "compressed-tensors" else "IntQuantizationCompressor"
    state = {"weight": torch.from_numpy(matrix.values(how.bits)).float(), "weight_scale": matrix.scales.float()}
    if matrix.zeros is not None:
        state["weight_zero_point"] = torch.from_numpy(matrix.zeros - 2 ** (how.bits - 1)).to(torch.int8)
    if how.act_order == "group":
        state["weight_g_idx"] = torch.from_numpy(matrix.groups).to(torch.int32)
    found: dict[str, Any] = getattr(compressors, kind).compress(state, scheme)
    return {**found, "weight_scale": matrix.scales}


def _arguments(scheme: Scheme) -> dict[str, Any]:
    group = scheme.group_size
    return {
        "num_bits": scheme.bits, "type": "int", "symmetric": not scheme.zero_points, "dynamic": False,
        "actorder": None if scheme.act_order == "none" else scheme.act_order,
        "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group,
    }  # fmt: skip


def tool_config(scheme: Scheme, **more: Any) -> dict[str, Any]:
    """The ``quantization_config`` that the packing's tool writes, with `more` fields."""
    bits, group, ordered = scheme.bits, scheme.group_size, scheme.act_order != "none"
    if scheme.packing.startswith("compressed"):
        form = "pack-quantized" if scheme.packing == "compressed-tensors" else "int-quantized"
        group = configs.group(_arguments(scheme)) | {"format": form}
        return configs.compressed(group, format=form, ignore=["lm_head"], quantization_status="compressed") | more
    if scheme.packing == "awq":
        found: dict[str, Any] = {"quant_method": "awq", "version": "gemm", "zero_point": scheme.zero_points}
        return found | {"bits": bits, "group_size": group} | more
    found = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": not scheme.zero_points}
    found |= {"desc_act": ordered, "static_groups": scheme.act_order == "static", "lm_head": False}
    return found | {"checkpoint_format": scheme.packing} | more


_UNQUANTIZED = {
    "compressed-tensors": {"ignore": ["lm_head", r"re:.*self_attn.*", r"re:.*(mlp|block_sparse_moe)\.gate$"]},
    "awq": {"modules_to_not_convert": ["self_attn", "mlp.gate", "block_sparse_moe.gate", "lm_head"]},
}
"""What tools say where they quantized the experts only, by quantization method."""


def _config(how: Integers) -> dict[str, Any]:
    """What the tool says of a model of which it quantized the experts only."""
    method = "compressed-tensors" if how.packing.startswith("compressed") else how.packing
    return tool_config(how.scheme, **_UNQUANTIZED.get(method, {}) | how.config)
