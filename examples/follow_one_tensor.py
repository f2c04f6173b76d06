"""One expert's weights on their way from the checkpoint to the kernel and back: `python examples/follow_one_tensor.py`.

The experts are random and in MXFP8, as ModelOpt stores them. The decision is for an H200, but everything runs on a
laptop's CPU: layouts are pure tensor functions. torch is needed, vLLM is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_moe_oracle.api import (
    Activation,
    Problem,
    Scheme,
    decide,
    discover,
    known_device,
    layout_functions,
    load_settings,
    scheme_functions,
)

if TYPE_CHECKING:
    from torch import Tensor

EXPERTS, HIDDEN, INTERMEDIATE = 4, 256, 128
EXPERT, ROW, COLUMN = 2, 5, 77
"""The weight that is followed: an element of the expert's first matrix, ``w13``."""


def describe(tensors: dict[str, Tensor]) -> str:
    """Names, dtypes and shapes, one tensor a line."""
    return "\n".join(
        f"  {name:<16} {str(tensor.dtype).removeprefix('torch.'):<13} {list(tensor.shape)}"
        for name, tensor in tensors.items()
    )


def checkpoint_tensors(problem: Problem) -> dict[str, Tensor]:
    """The layer's parameters as vLLM's loaders fill them: e4m3 codes, and an e8m0 scale for each 32 columns."""
    import torch

    mxfp8 = scheme_functions("mxfp8")
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, rows, columns in (("w13", problem.w13_rows, HIDDEN), ("w2", HIDDEN, INTERMEDIATE)):
        weights = torch.randn(EXPERTS, rows, columns, generator=generator) / columns**0.5
        found[f"{name}_weight"], found[f"{name}_weight_scale"] = mxfp8.quantize(weights)
    return found


def main() -> None:
    """Follows one weight, and checks that the way back restores every byte."""
    import torch

    scheme = Scheme("mxfp8", bits=8, group_size=32, packing="modelopt")
    problem = Problem(
        "model.layers.0.mlp.experts", scheme, num_experts=EXPERTS, local_experts=EXPERTS, top_k=2, hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE, activation=Activation("silu"),
    )  # fmt: skip
    print(f"1. The layer: {problem}\n")

    parameters = checkpoint_tensors(problem)
    print(f"2. Checkpoint tensors, as vLLM's loaders leave them:\n{describe(parameters)}\n")

    mxfp8 = scheme_functions("mxfp8")
    canonical = mxfp8.read(parameters, problem)
    expert = {name: tensor[EXPERT] for name, tensor in canonical.items()}
    code = expert["w13"].view(torch.uint8)[ROW, COLUMN].item()
    scale = expert["w13_scale"].view(torch.uint8)[ROW, COLUMN // 32].item()
    value = mxfp8.dequantize(expert["w13"], expert["w13_scale"])[ROW, COLUMN].item()
    print(f"3. Canonical weights of expert {EXPERT} (gate rows, then up rows):\n{describe(expert)}")
    print(f"   w13[{ROW}, {COLUMN}]: e4m3 code 0x{code:02x}, scale 2**{scale - 127}, value {value:.5f}\n")

    settings = load_settings({})
    decision = decide(problem, known_device("nvidia-h200"), settings, registry=discover())
    name = "hopper_mxfp8"
    print(f"4. The decision on an H200 without measurements: {decision.backend}; followed here: {name}\n")

    device, backend = known_device("nvidia-h200"), discover()[name]
    plan = backend.plan(problem, device)
    operand = backend.convert(expert, problem, plan)
    print(f"5. Kernel operands in the layout {backend.layout(problem, plan)!r}:\n{describe(operand)}")

    flipped = expert["w13"].clone()
    flipped.view(torch.uint8)[ROW, COLUMN] ^= 0xFF
    changed = backend.convert({**expert, "w13": flipped}, problem, plan)["w13"] != operand["w13"]
    chunk_row, chunk_column, _ = (index[0].item() for index in changed.nonzero(as_tuple=True))
    offsets = changed[chunk_row, chunk_column].nonzero().flatten().tolist()
    print(f"   w13[{ROW}, {COLUMN}] lies in chunk [{chunk_row}, {chunk_column}] (64 rows x 32 columns) of w13, in its")
    print(f"   bytes {offsets}: a 16-bit word holds the codes of two rows, with their bits interleaved;")
    print(f"   lane {offsets[0] // 16 % 32} of warp {offsets[0] // 512} loads it among 16 bytes at once\n")

    fragments = layout_functions("wgmma_fragments")
    stored = fragments.unshuffle_e4m3(operand["w13"], problem.w13_rows, HIDDEN)
    restored = fragments.unpair_gate_up(stored)
    if not torch.equal(restored, expert["w13"].view(torch.uint8)):
        raise SystemExit("the inverse layout does not restore the checkpoint's codes")
    print(f"6. Back through the inverse layout: all {restored.numel()} codes of w13 are the checkpoint's")


if __name__ == "__main__":
    main()
