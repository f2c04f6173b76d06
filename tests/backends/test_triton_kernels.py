"""What the package triton_kernels, as each release brings it, is handed: the very tensors that it would make itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.lib.releases import release_params, sources
from tests.lib.stock_rules import GPT_OSS, TRITON, backend, expert, gpt_oss_layer, gpu
from vllm_moe_oracle.backends import _triton_kernels
from vllm_moe_oracle.backends._padding import order_rows_for_stock, pad_expert
from vllm_moe_oracle.core.problem import Activation, Problem
from vllm_moe_oracle.releases.supported import RELEASES


@pytest.fixture(params=release_params(*RELEASES))
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package of a release under its own name, as vLLM makes it known."""
    folder = sources(request.param) / "vllm/third_party"
    known = {name for name in sys.modules if name.partition(".")[0] == "triton_kernels"}
    monkeypatch.syspath_prepend(str(folder))
    for name in known:
        monkeypatch.delitem(sys.modules, name)
    try:
        import triton_kernels.matmul_ogs_details.opt_flags as flags
    except ImportError as error:
        pytest.skip(f"the installed triton cannot run it: {error}")
    yield flags
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton_kernels"]:
        del sys.modules[name]


def tensors_of(
    name: str, each: Problem, capability: int
) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A backend's plan, its kernel tensors of three experts, and the padded ones that they are made from."""
    chosen, device = backend(name), gpu(capability)
    plan = chosen.plan(each, device)
    originals = [expert(each, seed) for seed in range(3)]
    stacks = []
    for made in (
        [chosen.convert(one, each, plan) for one in originals],
        [order_rows_for_stock(pad_expert(one, each, plan), each) for one in originals],
    ):
        stacks.append({key: torch.stack([one[key] for one in made]) for key in made[0]})
    return plan, stacks[0], stacks[1]


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("hidden", "inner"), [(320, 96), (64, 736)])
def test_tensors_are_those_that_the_package_would_make(package: Any, capability: int, hidden: int, inner: int) -> None:
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout as layouts

    each = gpt_oss_layer(hidden_size=hidden, intermediate_size=inner, experts=3, top_k=2)
    plan, held, padded = tensors_of("triton_mxfp4", each, capability)
    hopper = capability == 90
    for name, rows, columns in (
        ("w13", 2 * plan.intermediate_size, plan.hidden_size),
        ("w2", plan.hidden_size, plan.intermediate_size),
    ):
        ours, precision = _triton_kernels._wrap_matrix(held, name, rows, columns, plan.layout)
        codes, scales = padded[name], padded[f"{name}_scale"]
        if hopper:
            scales = torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))
            kinds = (layouts.HopperMXValueLayout, {"mx_axis": 1}), (layouts.HopperMXScaleLayout, {"mx_axis": 1})
        else:
            kinds = (layouts.BlackwellMXValueLayout, {}), (layouts.BlackwellMXScaleLayout, {})
        theirs = (
            convert_layout(wrap_torch_tensor(codes.transpose(-2, -1), dtype=FP4), kinds[0][0], **kinds[0][1]),
            convert_layout(wrap_torch_tensor(scales.transpose(-2, -1)), kinds[1][0], **kinds[1][1]),
        )
        for mine, expected in zip((ours, precision.weight_scale), theirs, strict=True):
            assert (mine.shape, mine.shape_max, mine.dtype) == (expected.shape, expected.shape_max, expected.dtype)
            assert mine.storage.data.stride() == expected.storage.data.stride()
            assert torch.equal(mine.storage.data, expected.storage.data)
            assert type(mine.storage.layout) is type(expected.storage.layout)
            assert _plain(vars(mine.storage.layout)) == _plain(vars(expected.storage.layout))
        # Reloaded weights are copied into the layer's memory: that is what the package must read.
        assert ours.storage.data.data_ptr() == held[name].data_ptr()
        assert precision.weight_scale.storage.data.data_ptr() == held[f"{name}_scale"].data_ptr()


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list | tuple) else value for key, value in values.items()}


class Stock:
    """An expert class of vLLM, as far as the backends look at it."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def apply(self, **arguments: Any) -> str:
        self.seen = arguments
        return "done"

    def moe_problem_size(self, x: Any, w1: Any, w2: Any, ids: Any) -> tuple[int, ...]:
        return w1.shape[0], x.shape[0], w1.shape[2], x.shape[1], ids.shape[1]


class Builder:
    """vLLM's side: keeps what it was asked for."""

    def stock(self, name: str, **arguments: Any) -> Stock:
        self.asked = name, arguments
        return Stock()


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize("capability", [90, 100, 120])
@pytest.mark.parametrize("activation", [GPT_OSS, Activation("silu")])
def test_the_stock_class_is_given_the_packages_tensors(
    package: Any, name: str, capability: int, activation: Activation
) -> None:
    if activation.name == "silu" and name != "triton_mxfp4_unfused":
        pytest.skip("only gpt-oss's activation")
    package.reset_opt_flags_constraints()
    each = gpt_oss_layer(hidden_size=64, intermediate_size=96, experts=3, top_k=2, activation=activation)
    plan, held, _ = tensors_of(name, each, capability)
    builder = Builder()
    experts = backend(name).build_experts(held, each, plan, builder)  # type: ignore[arg-type]
    asked, arguments = builder.asked
    assert asked == backend(name).stock_class
    assert [type(scale).__name__ for scale in arguments["scales"]] == ["PrecisionConfig", "PrecisionConfig"]
    wanted = {"split_k": 1} if capability == 90 else {"is_persistent": True, "epilogue_subtile": 1}
    assert package._opt_flags_constraints == wanted
    x, ids = torch.zeros(5, 64), torch.zeros(5, 2)
    assert experts.apply(hidden_states=x, w1=held["w13"], w2=held["w2"], topk_ids=ids) == "done"
    assert (experts.seen["w1"].shape, experts.seen["w2"].shape) == ([3, 64, 256], [3, 128, 64])
    assert experts.seen["hidden_states"] is x
    if name != "triton_mxfp4_monolithic":
        assert experts.moe_problem_size(x, held["w13"], held["w2"], ids) == (3, 5, 256, 64, 2)
