"""Compiling beforehand: each kernel once, whatever layers have it, and none that a layer will run is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("vllm", reason="the module that compiles builds layers with vLLM")

from triton.runtime.jit import JITFunction  # noqa: E402

from vllm_moe_oracle import device, settings  # noqa: E402
from vllm_moe_oracle.backends import Backend  # noqa: E402
from vllm_moe_oracle.kernels import fused_moe, prefill_launch  # noqa: E402
from vllm_moe_oracle.kernels.config import choose  # noqa: E402
from vllm_moe_oracle.measure import shapes, tuning  # noqa: E402
from vllm_moe_oracle.oracle.problem import Problem  # noqa: E402
from vllm_moe_oracle.oracle.registry import default_registry  # noqa: E402

H200 = device.named("nvidia-h200")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
LAYERS = [
    shapes.parse(name)
    for name in (
        "mxfp8:qwen3-30b-a3b", "mxfp8:qwen3-235b-a22b@tp4", "mxfp8:glm-4.5@tp8", "int4_g128:qwen3-30b-a3b",
        "int4_g128:glm-4.5-air", "int4_g128:qwen3.5-35b-a3b", "int4_g32:kimi-k2@tp8", "int8_g128:qwen3-30b-a3b",
        "mxfp4:gpt-oss-20b", "mxfp4:gpt-oss-120b@tp2", "mxfp8:nemotron-3-nano", "int4_g32:nemotron-3-nano",
        "int4_g128:mixtral-8x7b",
    )
]  # fmt: skip
TILES = 2


def work() -> list[tuple[Problem, tuple[str, ...]]]:
    return [(layer, tuning.accepted(layer, H200, settings.load({}))) for layer in LAYERS]


def launches(backend: Any, problem: Problem, tokens: int, tile: str) -> set[Any]:
    """What Triton would compile for a call: kernel, constants, what it asks of other arguments, and options."""
    weights = backend._allocate(problem, problem.local_experts, "meta")
    quantise = backend.activations(problem) == "mxfp8"
    found: set[Any] = set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        asked = []
        for parameter in self.params:
            value = given.pop(parameter.name)
            if parameter.is_constexpr:
                asked.append(value)
            elif isinstance(value, torch.Tensor):
                asked.append(value.dtype)
            elif isinstance(value, int) and not parameter.do_not_specialize:
                asked.append((value == 1, value % 16 == 0))
        found.add(
            (self.__name__, tuple(map(str, asked)), tuple(sorted((key, str(each)) for key, each in given.items())))
        )

    with pytest.MonkeyPatch.context() as patch, backend.tiled(problem, tile) if tile else patch.context():
        patch.setattr(JITFunction, "run", record)
        patch.setattr(prefill_launch, "_processors", lambda device: 132)
        config = choose(weights, problem.top_k, tokens, quantise=quantise)
        plan = fused_moe.plan_workspace(weights, tokens, problem.top_k, config, quantise=quantise)
        x = torch.empty(tokens, problem.hidden_size, dtype=torch.bfloat16, device="meta")
        routed = torch.empty(tokens, problem.top_k, device="meta")
        activation = problem.activation
        fused_moe.fused_moe(
            x, weights, routed, routed.to(torch.int32), activation=activation.name, alpha=activation.alpha,
            beta=activation.beta, limit=activation.limit, out=torch.empty_like(x), pdl=True,
            workspace=torch.empty(plan.nbytes, dtype=torch.uint8, device="meta"),
            counters=torch.empty(max(1, plan.counters), dtype=torch.int32, device="meta"),
            quantise_activations=quantise, config=config,
        )  # fmt: skip
    return found


def calls(backend: Backend, problem: Problem) -> Iterator[tuple[int, str]]:
    for count in COUNTS:
        yield count, ""
        yield from ((count, tile) for tile in backend.tiles(problem, count, TILES))


def test_every_kernel_that_a_layer_will_run_is_compiled() -> None:
    compiled: set[Any] = set()
    for job in tuning._jobs(work(), H200, COUNTS, TILES):
        if job.backend.startswith("own") and not job.again:
            for call in job.calls:
                compiled |= launches(default_registry()[job.backend], job.problem, *call)
    needed: set[Any] = set()
    for problem, names in work():
        for name in names:
            if name.startswith("own"):
                for call in calls(default_registry()[name], problem):
                    needed |= launches(default_registry()[name], problem, *call)
    assert needed <= compiled, sorted(needed - compiled, key=str)[:3]


def test_few_are_compiled_twice() -> None:
    """Of all layers of the list: without telling kernels apart, each would compile all of its own."""
    layers = [(layer, tuning.accepted(layer, H200, settings.load({}))) for layer in shapes.served()]
    jobs = [job for job in tuning._jobs(layers, H200, COUNTS, TILES) if job.backend.startswith("own")]
    once, all_of_it = (sum(len(job.calls) for job in jobs if job.again == again) for again in (False, True))
    assert once < 0.5 * all_of_it


def test_a_backend_that_brings_its_kernels_has_no_part_and_an_unknown_one_all() -> None:
    jobs = [*tuning._jobs(work(), H200, COUNTS, 0)]
    assert not any("marlin" in job.backend for job in jobs)
    for problem, names in work():
        for name in names:
            mine = [job.calls for job in jobs if (job.problem, job.backend) == (problem, name) and not job.again]
            if name.startswith("triton"):
                assert sorted(count for each in mine for count, _ in each) == [*COUNTS], name
            if "humming" in name:  # compiles for all numbers of tokens at once
                assert [len(each) for each in mine] == [1], name
            assert all(len(each) <= tuning.CALLS for each in mine)


def test_equal_layers_compile_once_and_a_difference_is_noticed() -> None:
    own = next(each for each in default_registry() if each.name == "own_wna16")
    layer = shapes.parse("int4_g128:qwen3-30b-a3b")
    other = shapes.parse("int4_g32:qwen3-30b-a3b")
    assert own.compiled(layer, 16) == own.compiled(layer, 16) != own.compiled(other, 16)
    tile = own.tiles(layer, 16, 1)[0]
    assert own.compiled(layer, 16, tile) != own.compiled(layer, 16)


def test_the_most_important_layer_comes_first() -> None:
    jobs = [*tuning._jobs(work(), H200, COUNTS, TILES)]
    for again in (False, True):
        order = [LAYERS.index(job.problem) for job in jobs if job.again == again]
        assert order == sorted(order)
    assert [job.again for job in jobs] == sorted(job.again for job in jobs)


def test_everything_that_a_layer_runs_is_run_once_more_where_kernels_are_shared() -> None:
    jobs = [job for job in tuning._jobs(work(), H200, COUNTS, TILES) if job.again]
    expected = {
        (problem.layer, name): [*calls(default_registry()[name], problem)]
        for problem, names in work()
        for name in names
        if name.startswith("own") or "humming" in name
    }
    found = {(job.problem.layer, job.backend): list(job.calls) for job in jobs}
    assert {key: sorted(each) for key, each in found.items()} == {key: sorted(each) for key, each in expected.items()}


def test_a_backend_that_fails_to_say_what_it_compiles_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = default_registry()["own_wna16"]

    def fails(self: Any, *args: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(type(own), "compiled", fails)
    layer = shapes.parse("int4_g128:qwen3-30b-a3b")
    with caplog.at_level("WARNING", logger="vllm.moe_oracle"):
        jobs = [*tuning._jobs([(layer, ("own_wna16", "triton_wna16"))], H200, COUNTS, TILES)]
    mine = sorted(count for job in jobs if job.backend == "own_wna16" for count, _ in job.calls)
    assert mine == [*COUNTS]
    assert "own_wna16: compiled fails for" in caplog.text
