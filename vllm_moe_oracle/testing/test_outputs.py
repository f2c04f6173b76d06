"""What a backend for CPUs computes is what the emulation computes, as far as rounding allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ..backends import Backend
from ..core.problem import Device
from ..errors import BackendDefect, OracleError
from ..measuring.random_weights import convert_experts
from .cases import about, backend_names, distinct, each_value_once, registry
from .loud_experts import Case, faults, loud_case, small_layer, usual_cases

ON_CPU = [name for name in backend_names() if "cpu" in registry()[name].capabilities.devices]


class FunctionBuilder:
    """A builder whose experts are the function itself."""

    max_tokens = 4096
    for_serving = False
    ids_dtype = torch.int32

    def register_buffer(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def from_function(self, function: Any) -> Any:
        """The function."""
        return function

    def from_workspace_function(self, function: Any, nbytes: Any) -> Any:
        """The function, with a workspace for each call, all of whose bits are ones."""

        def run(out: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None) -> None:
            workspace = torch.full((nbytes(*topk_ids.shape),), 0xFF, dtype=torch.uint8)
            function(out, x, topk_weights, topk_ids, expert_map, workspace)

        return run


@pytest.mark.parametrize("name", ON_CPU)
def test_computes_what_the_emulation_computes(name: str) -> None:
    """A backend for CPUs over a function of routed tokens gives the emulation's output: for each layer with the tokens
    of the check at load, some of whose slots have no expert (-1); and in layers that together have every scheme,
    activation and size, with weights and tokens that show one wrong scale, zero point or bias (`loud_experts`)."""
    backend = registry()[name]
    if backend.stock_class:
        pytest.skip("vLLM's class runs only inside vLLM")
    loud = each_value_once(backend)
    for layer, device in distinct(backend):
        if device.kind != "cpu":
            continue
        for case in usual_cases(backend, small_layer(backend, layer, device, loud=False)):
            compare_outputs(backend, case, device)
        if layer in loud:
            compare_outputs(backend, loud_case(backend, small_layer(backend, layer, device, loud=True)), device)


def compare_outputs(backend: Backend, case: Case, device: Device) -> None:
    """Converts the experts of a case, and runs its tokens together and those of sets of one token alone. Skips the test
    where the backend says that it cannot be built here.

    Raises:
        AssertionError: an output is beyond the bounds, or what the function gets is changed.
    """
    which = about(backend, case.layer, device)
    experts = _build(backend, case, device)
    found = _run(experts, which, case.x, case.weights, case.ids)
    wrong = faults(found, case)
    for what, rows in case.sets.items():
        if not wrong and len(rows) == 1:
            found[rows] = _run(experts, which, case.x[rows], case.weights[rows], case.ids[rows])
            words = faults(found, case)
            wrong = f"in a call of one token, {what}, {words}" if words else ""
    assert not wrong, f"{which}: the output is not the reference's: {wrong}"


def _build(backend: Backend, case: Case, device: Device) -> Any:
    """The function that the backend builds, over converted experts."""
    plan = backend.plan(case.layer, device)
    # Copies: other backends get the same experts, and a conversion that writes to its input is another test's failure.
    copies = {name: tensor.clone() for name, tensor in case.experts.items()}
    kernel = convert_experts(backend, copies, case.layer, plan)
    try:
        return backend.build_experts(kernel, case.layer, plan, FunctionBuilder())  # type: ignore[arg-type]  # part of one
    except OracleError as error:
        # A backend says with an error of this project, or a missing package, that a machine lacks what it needs.
        if isinstance(error, BackendDefect) and not isinstance(error.__cause__, ImportError):
            raise
        pytest.skip(f"{about(backend, case.layer, device)}: `build_experts` says that it cannot run here: {error}")


def _run(experts: Any, which: str, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The output of one call, which begins as NaN."""
    given = {"x": x, "topk_weights": weights, "topk_ids": ids}
    copies = {name: tensor.clone() for name, tensor in given.items()}
    out = torch.full_like(x, torch.nan)
    with torch.inference_mode():  # as in a server
        experts(out, *copies.values(), None)
    changed = [name for name, tensor in given.items() if not torch.equal(tensor, copies[name])]
    assert not changed, f"{which}: the function changes {' and '.join(changed)}, which vLLM reads after the call"
    return out
