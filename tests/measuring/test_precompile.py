"""Compiling beforehand: each kernel once, whatever layers have it, and none that a layer will run is left out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from triton.runtime.jit import JITFunction  # noqa: E402

from vllm_moe_oracle import settings  # noqa: E402
from vllm_moe_oracle.backends import Backend, hopper_mxfp4  # noqa: E402
from vllm_moe_oracle.backends._hopper_fp8 import HopperFp8Backend  # noqa: E402
from vllm_moe_oracle.core.problem import Activation, Parallel, Problem  # noqa: E402
from vllm_moe_oracle.devices import catalog  # noqa: E402
from vllm_moe_oracle.kernels import fp8_moe, fused_moe, prefill_launch  # noqa: E402
from vllm_moe_oracle.kernels.config import choose_config  # noqa: E402
from vllm_moe_oracle.kernels.launch_config import parse_config  # noqa: E402
from vllm_moe_oracle.measurements import model_shapes  # noqa: E402
from vllm_moe_oracle.measuring import precompile, tuning, worker_pool  # noqa: E402
from vllm_moe_oracle.oracle.checked_backend import unchecked  # noqa: E402
from vllm_moe_oracle.oracle.registry import default_registry  # noqa: E402

H200 = catalog.known_device("nvidia-h200")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096)
LAYERS = [
    model_shapes.parse(name)
    for name in (
        "mxfp8:qwen3-30b-a3b", "mxfp8:qwen3-235b-a22b@tp4", "mxfp8:glm-4.5@tp8", "int4_g128:qwen3-30b-a3b",
        "int4_g128:glm-4.5-air", "int4_g128:qwen3.5-35b-a3b", "int4_g32:kimi-k2@tp8", "int8_g128:qwen3-30b-a3b",
        "mxfp4:gpt-oss-20b", "mxfp4:gpt-oss-120b@tp2", "mxfp8:nemotron-3-nano", "int4_g32:nemotron-3-nano",
        "int4_g128:mixtral-8x7b",
    )
]  # fmt: skip
TILES = 2


def work() -> list[tuple[Problem, tuple[str, ...]]]:
    return [(layer, tuning.accepted_backends(layer, H200, settings.load({}))) for layer in LAYERS]


def fp8_work() -> list[tuple[Problem, tuple[str, ...]]]:
    """Layers with the backends that quantize activations to fp8, which a setting allows."""
    asked = settings.load({"MOE_ORACLE_ALLOW_ACTIVATION_QUANTIZATION": "1"})
    mine = {each.name for each in default_registry() if isinstance(unchecked(each), HopperFp8Backend)}
    accepted = [(layer, mine & {*tuning.accepted_backends(layer, H200, asked)}) for layer in LAYERS]
    return [(layer, tuple(sorted(names))) for layer, names in accepted if names]


def launches(backend: Any, problem: Problem, tokens: int, tile: str) -> set[Any]:
    """What Triton would compile for a call: kernel, constants, what it asks of other arguments, and options."""
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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(prefill_launch, "num_sms", lambda device: 132)
        x = torch.empty(tokens, problem.hidden_size, dtype=getattr(torch, problem.dtype), device="meta")
        routed = torch.empty(tokens, problem.top_k, device="meta")
        activation = problem.activation
        shared: dict[str, Any] = {
            "topk_weights": routed, "topk_ids": routed.to(torch.int32), "activation": activation.name,
            "alpha": activation.alpha, "beta": activation.beta, "limit": activation.limit, "out": torch.empty_like(x),
            "pdl": True,
        }  # fmt: skip
        if problem.parallel.ep > 1:
            shared["expert_map"] = torch.empty(problem.num_experts, dtype=torch.int32, device="meta")
        if isinstance(unchecked(backend), HopperFp8Backend):
            call_fp8(backend, problem, x, **shared)
        else:
            call(backend, problem, x, tile, **shared)
    return found


def call(backend: Any, problem: Problem, x: Any, tile: str, **shared: Any) -> None:
    """The kernels on nothing, as a layer calls them."""
    tokens, top_k = shared["topk_ids"].shape
    weights = backend._allocate(problem, problem.local_experts, "meta")
    quantize = backend.activations(problem) == "mxfp8"
    config = parse_config(tile) if tile else choose_config(weights, top_k, tokens, quantize=quantize)
    plan = fused_moe.workspace_layout(weights, tokens, top_k, config, quantize=quantize)
    fused_moe.fused_moe(
        x, weights, workspace=torch.empty(plan.nbytes, dtype=torch.uint8, device="meta"),
        counters=torch.empty(max(1, plan.counters), dtype=torch.int32, device="meta"),
        quantize_activations=quantize, config=config, **shared,
    )  # fmt: skip


def call_fp8(backend: HopperFp8Backend, problem: Problem, x: Any, **shared: Any) -> None:
    """As `call`, with activations in fp8."""
    experts, hidden, inner = problem.local_experts, problem.hidden_size, problem.intermediate_size
    tensors = {}
    for name, rows, columns in (("w13", inner * (1 + problem.activation.gated), hidden), ("w2", hidden, inner)):
        tensors[name] = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device="meta")
        tensors[f"{name}_scale"] = torch.empty(experts, rows, device="meta")
        if problem.has_bias:
            tensors[f"{name}_bias"] = torch.empty(experts, rows, device="meta")
    if problem.scheme.name == "mxfp4":
        weights = hopper_mxfp4.BACKEND._allocate(problem, experts, "meta")
    else:
        weights = backend._stored(tensors, problem)
    nbytes = fp8_moe.workspace_bytes(weights, *shared["topk_ids"].shape)
    fp8_moe.fused_moe_fp8(x, weights, workspace=torch.empty(nbytes, dtype=torch.uint8, device="meta"), **shared)


def calls(backend: Backend, problem: Problem) -> Iterator[tuple[int, str]]:
    for count in COUNTS:
        yield count, ""
        yield from ((count, tile) for tile in backend.tiles(problem, count, TILES))


@pytest.mark.parametrize("layers", (work, fp8_work))
def test_every_kernel_that_a_layer_will_run_is_compiled(layers: Any) -> None:
    compiled: set[Any] = set()
    for job in precompile._compile_jobs(layers(), H200, COUNTS, TILES):
        if job.backend.startswith("hopper") and not job.repeated:
            for call in job.calls:
                compiled |= launches(default_registry()[job.backend], job.problem, *call)
    needed: set[Any] = set()
    for problem, names in layers():
        for name in names:
            if name.startswith("hopper"):
                for call in calls(default_registry()[name], problem):
                    needed |= launches(default_registry()[name], problem, *call)
    assert needed and needed <= compiled, sorted(needed - compiled, key=str)[:3]


def test_fp8_kernels_are_compiled_at_one_number_of_tokens() -> None:
    jobs = [*precompile._compile_jobs(fp8_work(), H200, COUNTS, TILES)]
    assert all(len(job.calls) == 1 for job in jobs if not job.repeated)
    assert {job.backend for job in jobs} == {"hopper_mxfp4_w4a8", "hopper_mxfp8_w8a8_token"}
    w4a8, w8a8 = (default_registry()[name] for name in ("hopper_mxfp4_w4a8", "hopper_mxfp8_w8a8_token"))
    four, eight = model_shapes.parse("mxfp4:qwen3-30b-a3b"), model_shapes.parse("mxfp8:qwen3-30b-a3b")
    for backend, layer in ((w4a8, four), (w8a8, eight)):
        assert backend.compile_keys(layer, 1) == backend.compile_keys(layer, 4096)
        assert launches(backend, layer, 1, "") == launches(backend, layer, 4096, "")


@pytest.mark.parametrize("name", ("hopper_mxfp8_w8a8_token", "hopper_mxfp4_w4a8"))
def test_fp8_compile_keys_cover_every_compiled_kernel(name: str) -> None:
    """A layer is not compiled when two others have all that it says it needs: each differs from it in one thing, so
    what one kernel forgets to tell is missing from both."""
    own = default_registry()[name]
    layer = model_shapes.parse(f"{own.schemes[0]}:qwen3-30b-a3b")
    changes: list[dict[str, Any]] = [
        {"has_bias": True}, {"top_k": 4}, {"num_experts": 256, "local_experts": 256},
        {"num_experts": 256, "parallel": Parallel(ep=2)}, {"activation": Activation("silu", limit=10.0)},
        {"activation": Activation("gelu")}, {"hidden_size": 1824}, {"hidden_size": 4096}, {"intermediate_size": 736},
        {"intermediate_size": 1536},
    ]  # fmt: skip
    if own.schemes == ("mxfp8",):
        changes += [{"dtype": "float16"}, {"activation": Activation("relu2", gated=False)}]
    others = [dataclasses.replace(layer, **each) for each in changes]
    assert all(own.check(each, H200) == own.check(layer, H200) for each in others)
    told, run = own.compile_keys(layer, 1), launches(own, layer, 1, "")
    assert told is not None
    known = [(own.compile_keys(each, 1), launches(own, each, 1, "")) for each in others]
    assert all(their_run != run for _, their_run in known)
    covered = [
        run <= run_by_one | run_by_other
        for (one, run_by_one), (other, run_by_other) in itertools.combinations(known, 2)
        if told <= (one or frozenset()) | (other or frozenset())
    ]
    assert covered and all(covered)


def test_sharing_kernels_halves_the_calls_to_compile() -> None:
    """Of all layers of the list: without telling kernels apart, each would compile all of its own."""
    layers = [
        (layer, tuning.accepted_backends(layer, H200, settings.load({}))) for layer in model_shapes.served_problems()
    ]
    jobs = [job for job in precompile._compile_jobs(layers, H200, COUNTS, TILES) if job.backend.startswith("hopper")]
    once, all_of_it = (sum(len(job.calls) for job in jobs if job.repeated == again) for again in (False, True))
    assert once < 0.5 * all_of_it


def test_a_library_is_called_once_a_format_and_unknown_kernels_always() -> None:
    jobs = [*precompile._compile_jobs(work(), H200, COUNTS, 0)]
    of_library = [job for job in jobs if "marlin" in job.backend]
    assert all(job.calls == ((1, ""),) and not job.repeated for job in of_library)
    formats = [(job.backend, job.problem.scheme) for job in of_library]
    assert len(formats) == len(set(formats)) > 3
    assert {*formats} == {(name, problem.scheme) for problem, names in work() for name in names if "marlin" in name}
    for problem, names in work():
        for name in names:
            mine = [job.calls for job in jobs if (job.problem, job.backend) == (problem, name) and not job.repeated]
            if name.startswith("triton"):
                assert sorted(count for each in mine for count, _ in each) == [*COUNTS], name
            if "humming" in name:  # compiles for all numbers of tokens at once
                assert [len(each) for each in mine] == [1], name
            assert all(len(each) <= precompile.CALLS_PER_JOB for each in mine)


def test_what_did_not_come_back_is_told_from_what_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One backend ends its process, one loses it to others, one hangs in its first call, one in its second."""
    layer = LAYERS[3]
    ends: dict[str, list[Any]] = {
        "triton_wna16": [False, "its process ended with status 3"], "humming_wna16": [False, "ended by others"],
        "marlin_wna16": [False, worker_pool.TIME_SPENT], "hopper_wna16": [False, True, worker_pool.TIME_SPENT],
    }  # fmt: skip
    clock = iter(range(0, 1000, 10))

    def run(function: Any, jobs: Any, gpus: Any, attempts: int, quiet: bool, limits: Any) -> Any:
        assert limits.until == 45
        for index, job in enumerate(jobs):
            for value in ends[job.backend]:
                kind = "lost" if isinstance(value, str) else "progress"
                yield worker_pool.TaskEvent(index, kind, value, value == "ended by others")

    monkeypatch.setattr(worker_pool, "run_tasks", run)
    monkeypatch.setattr(precompile.time, "monotonic", lambda: next(clock))
    said: list[str] = []
    found = precompile.precompile(
        [(layer, [*ends])], H200, (1, 64), 4, lambda words, *counts: said.append(words), seconds=45
    )
    assert found.lost == {(layer.layer, "triton_wna16"): "its process ended with status 3"}
    assert [*found.waited] == [(layer.layer, "marlin_wna16")] and found.waited[layer.layer, "marlin_wna16"] > 0
    assert said[0].startswith("compiling in ") and any(
        "triton_wna16 is not compiled beforehand" in each for each in said
    )


def test_equal_layers_compile_once_and_a_difference_is_noticed() -> None:
    own = next(each for each in default_registry() if each.name == "hopper_wna16")
    layer = model_shapes.parse("int4_g128:qwen3-30b-a3b")
    other = model_shapes.parse("int4_g32:qwen3-30b-a3b")
    assert own.compile_keys(layer, 16) == own.compile_keys(layer, 16) != own.compile_keys(other, 16)
    tile = own.tiles(layer, 16, 1)[0]
    assert own.compile_keys(layer, 16, tile) != own.compile_keys(layer, 16)


def test_the_most_important_layer_comes_first() -> None:
    jobs = [*precompile._compile_jobs(work(), H200, COUNTS, TILES)]
    for again in (False, True):
        order = [LAYERS.index(job.problem) for job in jobs if job.repeated == again]
        assert order == sorted(order)
    assert [job.repeated for job in jobs] == sorted(job.repeated for job in jobs)


def test_every_call_runs_once_more_where_kernels_are_shared() -> None:
    jobs = [job for job in precompile._compile_jobs(work(), H200, COUNTS, TILES) if job.repeated]
    expected = {
        (problem.layer, name): [*calls(default_registry()[name], problem)]
        for problem, names in work()
        for name in names
        if name.startswith("hopper") or "humming" in name
    }
    found = {(job.problem.layer, job.backend): list(job.calls) for job in jobs}
    assert {key: sorted(each) for key, each in found.items()} == {key: sorted(each) for key, each in expected.items()}


def test_a_backend_whose_compile_keys_fail_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = default_registry()["hopper_wna16"]

    def fails(self: Any, *args: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr(type(own), "compile_keys", fails)
    layer = model_shapes.parse("int4_g128:qwen3-30b-a3b")
    with caplog.at_level("WARNING", logger="vllm.moe_oracle"):
        jobs = [*precompile._compile_jobs([(layer, ("hopper_wna16", "triton_wna16"))], H200, COUNTS, TILES)]
    mine = sorted(count for job in jobs if job.backend == "hopper_wna16" for count, _ in job.calls)
    assert mine == [*COUNTS]
    assert "hopper_wna16: compile_keys fails for" in caplog.text
