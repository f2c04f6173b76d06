"""What happens to weights after they were loaded: reload, sleep, a second conversion, loading without vLLM's reload.

Real models through a real vLLM; once with the emulation, whose layout is the checkpoint's, and once with a backend
whose layout is as different as can be. A model whose weights were replaced must say exactly what one says that was
started with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from tests.lib import checkpoints, vllm_runner

pytestmark = pytest.mark.full

PROMPT = [5, 6, 7, 8, 9, 10]
TOKENS = 4
ROUTES = ("checkpoint", "online")
MODELS = (("checkpoint", "emulation"), ("checkpoint", "permuted"), ("online", "permuted"))
Results = dict[tuple[str, str], dict[str, dict[str, Any]]]

STEPS = {
    "first": ("generate",),
    "second conversion": ("process",),
    "after the second conversion": ("generate",),
    "reload": ("reload", "second"),
    "after the reload": ("generate",),
    "sleep": ("forget",),
    "waking": ("reload", "first"),
    "awake": ("generate",),
    "loaded again": ("load", "second"),
}
"""What is done to a model that was started with the first checkpoint; the last word of a step may be a checkpoint."""

BROKEN = {"damaged": ("half", "first"), "whole layer": ("run", 0), "half converted layer": ("run", 1)}
"""What is done to one that was started with the second checkpoint; vLLM's reload cannot be repeated after it failed."""

LACKING = {"lacking": ("lack", "first"), "after it": ("run", 1)}
"""The same, where the reload does not bring every tensor."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The results of every step by name, for each route and backend; and under "second" of a model that was started
    with the second checkpoint."""
    folder = tmp_path_factory.mktemp("lifecycle")
    paths = {
        (route, name): checkpoints.write_checkpoint(
            folder / f"{route}-{name}", format="mxfp8" if route == "checkpoint" else "bf16", seed=seed
        )
        for route in ROUTES
        for seed, name in enumerate(("first", "second"))
    }
    jobs: dict[tuple[str, str], dict[str, Any]] = {}

    def add(route: str, name: str, checkpoint: str, backend: str, steps: Iterable[tuple[Any, ...]]) -> None:
        engine = {"quantization": "mxfp8", "quantization_config": {"ignore": ["lm_head", "re:.*\\.mlp\\.gate$"]}}
        jobs[route, name] = {
            "checkpoint": str(paths[route, checkpoint]),
            "engine": engine if route == "online" else {},
            "backend": backend,
            "prompt": PROMPT,
            "tokens": TOKENS,
            "steps": [[word, *(str(paths.get((route, each), each)) for each in rest)] for word, *rest in steps],
        }

    for route, backend in MODELS:
        add(route, backend, "first", backend, STEPS.values())
    add("online", "second", "second", "emulation", [("generate",)])
    add("checkpoint", "second", "second", "emulation", [("generate",), *BROKEN.values()])
    for route in ROUTES:
        add(route, "lacking", "second", "emulation", LACKING.values())
    names = {"second": ["first", *BROKEN], "lacking": list(LACKING)}
    found: Results = {}
    for key, each in vllm_runner.run("run_lifecycle.py", jobs, folder).items():
        found[key] = dict(zip(names.get(key[1], list(STEPS)), each, strict=False))
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two models said the same, to the last bit of every logprob."""
    return one["said"]["tokens"] == other["said"]["tokens"] and bool(
        np.array_equal(one["said"]["logprobs"], other["said"]["logprobs"])
    )


each_model = pytest.mark.parametrize(("route", "backend"), MODELS)


@each_model
def test_it_is_served(results: Results, route: str, backend: str) -> None:
    steps = results[route, backend]
    assert "error" not in steps["first"]
    assert steps["first"]["states"] == ["converted"] * 2
    assert not same(steps["first"], results[route, "second"]["first"])


def test_every_layout_says_the_same(results: Results) -> None:
    first, second = results["checkpoint", "emulation"]["first"], results["checkpoint", "permuted"]["first"]
    assert same(first, second)
    assert first["digests"] != second["digests"]


@each_model
def test_a_second_conversion_changes_nothing(results: Results, route: str, backend: str) -> None:
    steps = results[route, backend]
    for name in ("second conversion", "after the second conversion"):
        assert "error" not in steps[name]
        for what in ("addresses", "digests", "states"):
            assert steps[name][what] == steps["first"][what]
    assert same(steps["after the second conversion"], steps["first"])


@each_model
def test_reload_gives_the_new_outputs_at_the_old_addresses(results: Results, route: str, backend: str) -> None:
    steps = results[route, backend]
    assert "error" not in steps["reload"]
    assert same(steps["after the reload"], results[route, "second"]["first"])
    assert steps["reload"]["addresses"] == steps["first"]["addresses"]
    assert steps["reload"]["states"] == ["converted"] * 2


@each_model
def test_sleep_and_wake_up_keep_weights_and_addresses(results: Results, route: str, backend: str) -> None:
    steps = results[route, backend]
    assert not set(steps["sleep"]["digests"].values()) & set(steps["first"]["digests"].values())
    assert "error" not in steps["waking"]
    assert same(steps["awake"], steps["first"])
    for what in ("addresses", "digests", "states"):
        assert steps["waking"][what] == steps["first"][what]


def test_a_layer_whose_conversion_failed_does_not_run(results: Results) -> None:
    steps = results["checkpoint", "second"]
    assert "CheckpointError: model.layers.1.mlp.experts" in steps["damaged"]["error"]
    assert steps["damaged"]["states"] == ["converted", "converting"]
    assert "error" not in steps["whole layer"]
    assert "LifecycleError: model.layers.1.mlp.experts" in steps["half converted layer"]["error"]
    assert "they are converting" in steps["half converted layer"]["error"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_reload_without_a_tensor_is_refused(results: Results, route: str) -> None:
    steps = results[route, "lacking"]
    name = "model.layers.1.mlp.experts"
    assert f"{name}: the up projection of local expert 3 was never loaded" in steps["lacking"]["error"]
    assert steps["lacking"]["states"] == ["converted", "converting"]
    assert f"{name}: the layer was run before its weights were converted" in steps["after it"]["error"]


@each_model
def test_loading_without_vllms_reload_is_an_error(results: Results, route: str, backend: str) -> None:
    """With the checkpoint's layout, too: nothing would look for damage, and a bias would count once for each rank."""
    steps = results[route, backend]
    assert "LifecycleError: model.layers." in steps["loaded again"]["error"]
    assert "in the kernel's layout already" in steps["loaded again"]["error"]
