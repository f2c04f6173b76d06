"""Functions of backends are called directly, and through an operator where torch.compile traces."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib import faulty_backends
from tests.lib.cases import MXFP8, problem
from vllm_moe_oracle.compat import current_adapter
from vllm_moe_oracle.compat.experts_builder import VllmBuilder
from vllm_moe_oracle.compat.function_experts import FunctionExperts

TOKENS, HIDDEN, TOP_K = 3, 8, 2


def forward(out: Any, x: Any, weights: Any, ids: Any, expert_map: Any, workspace: Any) -> None:
    """Branches on data, as torch.compile cannot."""
    assert workspace.dtype == torch.uint8
    workspace.fill_(1)
    factor = 2 if int(ids.min()) < 0 else 3
    out.copy_(factor * x * weights.sum(1, keepdim=True))


def experts() -> FunctionExperts:
    """Experts over `forward`, with a workspace of 16 bytes."""
    layer, adapter = problem(num_experts=4, local_experts=4, top_k=TOP_K, scheme=MXFP8), current_adapter()
    moe = adapter.single_rank_config(faulty_backends.moe_config(layer), layer)
    builder = VllmBuilder(adapter, moe, adapter.quant_config(layer, {}), for_serving=False)
    made = builder.from_workspace_function(forward, lambda tokens, top_k: 16)
    assert type(made) is FunctionExperts
    return made


def call(made: FunctionExperts, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The output of vLLM's modular kernel, without its steps between ranks."""
    out, workspace = torch.empty_like(x), torch.empty(8, dtype=torch.bfloat16)
    empty = x.new_empty(0)
    made.apply(
        out, x, empty, empty, torch.ones(x.shape[0], TOP_K), ids, "silu", 4, None, None, None, None, workspace, None,
        False,
    )  # fmt: skip
    return out


class Seen(TorchDispatchMode):
    """The operators of this project that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "vllm_moe_oracle":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_without_a_compiler_no_operator_is_between() -> None:
    made, x = experts(), torch.ones(TOKENS, HIDDEN)
    with torch.inference_mode(), Seen() as seen:
        found = call(made, x, torch.zeros(TOKENS, TOP_K, dtype=torch.int32))
    assert seen.names == []
    assert torch.equal(found, 6 * x)


def test_the_compiler_sees_one_operator_and_not_the_function() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    made, x = experts(), torch.ones(TOKENS, HIDDEN)
    compiled = torch.compile(lambda x, ids: call(made, x, ids), backend=keep, fullgraph=True)
    for first, factor in ((0, 3), (-1, 2)):  # the function's branch is taken at each call
        ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
        ids[0, 0] = first
        assert torch.equal(compiled(x, ids), 2 * factor * x)
    names = [str(node.target) for node in graphs[0].graph.nodes if "run_experts" in str(node.target)]
    assert len(graphs) == len(names) == 1


def test_the_operator_says_what_it_writes() -> None:
    made, x = experts(), torch.ones(TOKENS, HIDDEN)
    operator: Any = torch.ops.vllm_moe_oracle.run_experts.default
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32)
    arguments = (torch.empty_like(x), x, torch.ones(TOKENS, TOP_K), ids, None, torch.empty(8, dtype=torch.bfloat16))
    torch.library.opcheck(operator, (*arguments, made.runner.handle), test_utils=("test_schema", "test_faketensor"))
    writes = [each.name for each in operator._schema.arguments if each.alias_info and each.alias_info.is_write]
    assert writes == ["out", "workspace"]
