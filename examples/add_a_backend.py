"""A backend in one file: `python examples/add_a_backend.py` decides with it, runs it and checks its output.

It dequantizes MXFP8 experts to bfloat16 once, when weights are loaded, and multiplies in bfloat16: twice the memory,
and no decoding while serving. To serve with it, put the class into a package of your own with an entry point, or into a
file of `vllm_moe_oracle/backends/`, whose imports are others (`vllm_moe_oracle/backends/README.md` has both).
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from vllm_moe_oracle.api import (
    ENTRY_POINT_GROUP,
    Activation,
    Backend,
    Builder,
    Capabilities,
    Numerics,
    Problem,
    Scheme,
    ShardPlan,
    Tensors,
    decide,
    discover,
    format_candidates,
    known_device,
    load_settings,
    reference_forward,
    scheme_functions,
)

if TYPE_CHECKING:
    from torch import Tensor


class DequantizedOnce(Backend):
    """Experts in bfloat16, dequantized from MXFP8 when they are loaded."""

    name = "dequantized_once"
    schemes = ("mxfp8",)
    # What is not declared here is refused, with a reason: biases, other activations, LoRA, ...
    capabilities = Capabilities(devices=("cpu",), dtypes=("bfloat16",), gated=("silu",))
    static_priority = 50.0  # before cpu_dequantized, which is at 90
    # Activations stay as they are, also where the checkpoint declares MXFP8 activations: nothing is lost.
    activation_precision = "16bit"
    # bfloat16 holds 8 significant bits and e4m3 has 4: no weight is rounded.
    arithmetic = Numerics("dequantized to bfloat16 when loaded", "{dtype}, also between the products")

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """The two matrices of one expert in bfloat16, `[R, H]` and `[H, I]`, with their scales multiplied in."""
        import torch

        dequantize = scheme_functions("mxfp8").dequantize
        return {name: dequantize(expert[name], expert[f"{name}_scale"], torch.bfloat16) for name in ("w13", "w2")}

    def build_experts(self, tensors: Tensors, problem: Problem, plan: ShardPlan, builder: Builder) -> Any:
        """A function of routed tokens, which vLLM's modular kernel will call."""
        import torch
        from torch.nn.functional import silu

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            ids = topk_ids.long()
            if expert_map is not None:
                ids = expert_map.long()[ids.clamp(min=0)].masked_fill(ids < 0, -1)
            total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
            for index in ids.unique().tolist():
                if index < 0:  # no expert, or an expert of another rank
                    continue
                token, choice = torch.nonzero(ids == index, as_tuple=True)
                gate, up = (x[token] @ tensors["w13"][index].T).chunk(2, dim=-1)
                result = (silu(gate) * up) @ tensors["w2"][index].T
                total.index_add_(0, token, result.float() * topk_weights[token, choice].float()[:, None])
            out.copy_(total)

        return builder.from_function(run)


BACKEND = DequantizedOnce()


class FunctionBuilder:
    """Stands in for vLLM: what a backend builds from a function is the function."""

    def from_function(self, forward: Any) -> Any:
        return forward


def main() -> None:
    """Decides, converts, runs and compares with the emulation, on a layer of random weights."""
    import torch

    # An installed package with this entry point registers the backend; the name before the colon is its module.
    point = EntryPoint("dequantized_once", f"{__name__}:BACKEND", ENTRY_POINT_GROUP)
    registry = discover([point])

    scheme = Scheme("mxfp8", bits=8, group_size=32, packing="modelopt")
    layer = Problem("model.layers.0.mlp.experts", scheme, 8, 8, 2, 256, 128, Activation("silu"))
    cpu, settings = known_device("cpu"), load_settings({})
    decision = decide(layer, cpu, settings, registry=registry)
    print(f"{layer}\n{decision.summary()}\n{format_candidates(decision.candidates)}\n")

    with_bias = Problem("model.layers.1.mlp.experts", scheme, 8, 8, 2, 256, 128, Activation("silu"), has_bias=True)
    refused = decide(with_bias, cpu, settings, registry=registry)
    print(f"The same with biases:\n{format_candidates(refused.candidates)}\n")

    generator = torch.Generator().manual_seed(0)
    canonical: dict[str, Tensor] = {}
    for name, rows, width in (("w13", layer.w13_rows, layer.hidden_size), ("w2", layer.hidden_size, 128)):
        weights = torch.randn(8, rows, width, generator=generator) / width**0.5
        canonical[name], canonical[f"{name}_scale"] = scheme_functions("mxfp8").quantize(weights)
    backend, plan = registry[decision.backend], decision.plan
    converted = [
        backend.convert({name: tensor[expert] for name, tensor in canonical.items()}, layer, plan)
        for expert in range(layer.local_experts)
    ]
    kernel = {name: torch.stack([expert[name] for expert in converted]) for name in converted[0]}
    experts = backend.build_experts(kernel, layer, plan, FunctionBuilder())  # type: ignore[arg-type]

    x = torch.randn(16, layer.hidden_size, generator=generator).bfloat16()
    scores = torch.rand(16, layer.num_experts, generator=generator).softmax(-1)
    topk_weights, topk_ids = scores.topk(layer.top_k)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    experts(found, x, topk_weights, topk_ids, None)
    reference_forward(canonical, layer, expected, x, topk_weights, topk_ids)
    error = float((found - expected).float().norm() / expected.float().norm())
    # Each side rounds to bfloat16, by at most 2**-8 of a number, after the first product, the silu, the gated product,
    # the second product and the sum.
    tolerance = 5 * 2.0**-8
    print(f"Relative difference from the emulation: {error:.4f}; tolerance {tolerance:.4f}")
    if error > tolerance:
        raise SystemExit("the backend computes something else")


if __name__ == "__main__":
    main()
