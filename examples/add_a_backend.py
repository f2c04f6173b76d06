"""A backend of your own, in one file: `python examples/add_a_backend.py` decides with it, runs it and checks it.

It dequantises MXFP8 experts to bfloat16 once, when weights are loaded, and then multiplies in bfloat16: twice the
memory of MXFP8, and no decoding while serving. To serve with it, put the class into a file of
`vllm_moe_oracle/backends/`, or into a package of yours with an entry point (`vllm_moe_oracle/backends/README.md`).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from vllm_moe_oracle.backends import Backend, Builder, Limits, Tensors
from vllm_moe_oracle.oracle.decision import Numerics, Plan
from vllm_moe_oracle.oracle.problem import ActivationPrecision, Device, Problem

if TYPE_CHECKING:
    from torch import Tensor


class DequantisedOnce(Backend):
    """Experts in bfloat16, made from MXFP8 when they are loaded."""

    name = "dequantised_once"
    schemes = ("mxfp8",)
    # Everything that is not said here is refused, with a reason: biases, other activations, LoRA, ...
    limits = Limits(devices=("cpu",), dtypes=("bfloat16",), gated=("silu",))

    def estimate(self, problem: Problem, device: Device) -> float:
        """Before the emulation, which is at 1000."""
        return 500.0

    def activations(self, problem: Problem) -> ActivationPrecision:
        """Left as they are, also where the checkpoint would have them quantised: that is allowed, it loses nothing."""
        return "16bit"

    def numerics(self, problem: Problem) -> Numerics:
        """bfloat16 holds 8 significant bits, e4m3 has 4: no weight is rounded."""
        return Numerics("dequantised to bfloat16 when loaded", "bfloat16, also between the products")

    def convert(self, expert: Tensors, problem: Problem, plan: Plan) -> dict[str, Tensor]:
        """One expert's two matrices in bfloat16; the scales are in them."""
        import torch

        from vllm_moe_oracle.schemes.mxfp8 import dequantise

        return {name: dequantise(expert[name], expert[f"{name}_scale"], torch.bfloat16) for name in ("w13", "w2")}

    def experts(self, tensors: Tensors, problem: Problem, plan: Plan, builder: Builder) -> Any:
        """A function over routed tokens, which vLLM's modular kernel will call."""
        import torch
        from torch.nn.functional import silu

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            slots = topk_ids.long()
            if expert_map is not None:
                slots = expert_map.long()[slots.clamp(min=0)].masked_fill(slots < 0, -1)
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for slot in slots.unique().tolist():
                if slot < 0:  # no expert, or one of another rank
                    continue
                token, choice = torch.nonzero(slots == slot, as_tuple=True)
                gate, up = (x[token] @ tensors["w13"][slot].T).chunk(2, dim=-1)
                result = (silu(gate) * up) @ tensors["w2"][slot].T
                total.index_add_(0, token, result.float() * topk_weights[token, choice].float()[:, None])
            out.copy_(total)

        return builder.from_function(run)


BACKEND = DequantisedOnce()


class _Functions:
    """Stands in for vLLM's side: what a backend builds from a function is the function."""

    def from_function(self, forward: Any) -> Any:
        return forward

    def stock(self, class_name: str, **kwargs: Any) -> Any:
        raise NotImplementedError(class_name)


def main() -> None:
    """Decides, converts, runs and compares with the emulation, on a layer of random weights."""
    import torch

    from vllm_moe_oracle import device, settings
    from vllm_moe_oracle.backends import emulation
    from vllm_moe_oracle.oracle.decision import table
    from vllm_moe_oracle.oracle.oracle import decide
    from vllm_moe_oracle.oracle.problem import Activation, Scheme
    from vllm_moe_oracle.oracle.registry import ENTRY_POINT_GROUP, discover
    from vllm_moe_oracle.schemes import mxfp8

    # What an installed package with this entry point leads to; the name before the colon is its module.
    point = EntryPoint("dequantised_once", f"{__name__}:BACKEND", ENTRY_POINT_GROUP)
    registry = discover([point])

    scheme = Scheme("mxfp8", bits=8, group_size=32, packing="modelopt")
    layer = Problem("model.layers.0.mlp.experts", scheme, 8, 8, 2, 256, 128, Activation("silu"))
    cpu, chosen = device.named("cpu"), settings.load({})
    decision = decide(layer, cpu, chosen, registry=registry)
    print(f"{layer}\n{decision.summary()}\n{table(decision.candidates)}\n")

    with_bias = Problem("model.layers.1.mlp.experts", scheme, 8, 8, 2, 256, 128, Activation("silu"), has_bias=True)
    print(f"The same with biases:\n{table(decide(with_bias, cpu, chosen, registry=registry).candidates)}\n")

    generator = torch.Generator().manual_seed(0)
    canonical: dict[str, Tensor] = {}
    for name, rows, width in (("w13", layer.w13_rows, layer.hidden_size), ("w2", layer.hidden_size, 128)):
        weights = torch.randn(8, rows, width, generator=generator) / width**0.5
        canonical[name], canonical[f"{name}_scale"] = mxfp8.quantise(weights)
    backend, plan = registry[decision.backend], decision.plan
    each = [backend.convert({k: t[e] for k, t in canonical.items()}, layer, plan) for e in range(layer.local_experts)]
    kernel = {name: torch.stack([expert[name] for expert in each]) for name in each[0]}
    experts = backend.experts(kernel, layer, plan, _Functions())

    x = torch.randn(16, layer.hidden_size, generator=generator).bfloat16()
    scores = torch.rand(16, layer.num_experts, generator=generator).softmax(-1)
    topk_weights, topk_ids = scores.topk(layer.top_k)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    experts(found, x, topk_weights, topk_ids, None)
    emulation.forward(canonical, layer, expected, x, topk_weights, topk_ids)
    error = float((found - expected).float().norm() / expected.float().norm())
    # Each side rounds to bfloat16, by at most 2**-8 of a number, after the first product, the silu, the gated product,
    # the second product and the sum.
    tolerance = 5 * 2.0**-8
    print(f"Relative difference from the emulation: {error:.4f}; the format allows {tolerance:.4f}")
    if error > tolerance:
        raise SystemExit("the backend computes something else")


if __name__ == "__main__":
    main()
