"""Where measured times hold: differences of environments, other models with the same shard, the kernels' sources."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.lib.cases import MXFP8_W8A8, problem
from vllm_moe_oracle.core.problem import Activation
from vllm_moe_oracle.measurements import environment
from vllm_moe_oracle.measurements.kernel_shape import kernel_shape_of
from vllm_moe_oracle.releases.supported import NEWEST

THERE = environment.Environment(
    "NVIDIA H200",
    90,
    132,
    {"vllm": NEWEST, "flashinfer-python": "0.7.2", "humming-kernels": "0.1.19", "torch": "2.14.0", "triton": "3.9.0"},
    "580.65",
    "abc",
)


def differs(**changes: Any) -> environment.Differences:
    packages = {**THERE.packages, **changes.pop("packages", {})}
    return environment.differences(THERE, msgspec.structs.replace(THERE, packages=packages, **changes))


@pytest.mark.parametrize(
    ("changes", "is_hard"),
    [
        ({"gpu": "NVIDIA H100"}, True),
        ({"sm_count": 60}, True),
        ({"packages": {"vllm": "0.32.0"}}, False),
        ({"packages": {"flashinfer-python": "0.7.2.post1"}}, False),
        ({"packages": {"humming-kernels": "0.1.20"}}, False),
        ({"packages": {"vllm": f"{NEWEST}.dev7+gabc1234"}}, False),
        ({"packages": {"vllm": f"{NEWEST}+cu130"}}, False),
        ({"packages": {"torch": "2.15.0"}}, False),
        ({"packages": {"triton": "3.10.0"}}, False),
        ({"driver": "581.1"}, False),
        ({"kernels": "def"}, False),
    ],
)
def test_hard_differences_void_measurements_and_soft_ones_do_not(changes: dict[str, Any], is_hard: bool) -> None:
    found = differs(**changes)
    assert (bool(found.hard), bool(found.soft)) == (is_hard, not is_hard)


def test_what_is_not_known_is_not_compared() -> None:
    assert differs() == environment.Differences((), ())
    assert differs(driver="", kernels="", sm_count=0) == environment.Differences((), ())
    without = msgspec.structs.replace(THERE, packages={"vllm": NEWEST})
    assert environment.differences(THERE, without) == environment.Differences((), ())


def test_words_about_the_kernels_do_not_change_their_hash(tmp_path: Path) -> None:
    code = "def f(x):\n    return x + 1\n"
    written = '"""A page."""\n\n# why\ndef f(x):\n    """Adds\n    one."""\n\n    return x + 1\n'
    hashes = []
    for text in (code, written, code.replace("1", "2"), code.replace("x + 1", "'# ' + x")):
        (tmp_path / "k.py").write_text(text)
        hashes.append(environment.hash_sources(tmp_path))
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    for chooses in ("tiles.json", "config.py", "heuristic.py", "launch_config.py", "prefill_config.py"):
        (tmp_path / chooses).write_text("{}")
        assert environment.hash_sources(tmp_path) == hashes[-1]
    (tmp_path / "launch.py").write_text("{}")
    assert environment.hash_sources(tmp_path) not in hashes


def test_the_same_shard_of_another_model_is_the_same_cell() -> None:
    one = problem(layer="a", intermediate_size=384, tp=2)
    other = problem(layer="b", intermediate_size=384, scheme=dataclasses.replace(MXFP8_W8A8, packing="online"))
    assert kernel_shape_of(one) == kernel_shape_of(other)
    for changes in ({"hidden_size": 4096}, {"experts": 64}, {"has_bias": True}, {"dtype": "float16"}, {"ep": 2}):
        assert kernel_shape_of(problem(**changes)) != kernel_shape_of(problem())
    limited = dataclasses.replace(problem().activation, limit=7.0)
    assert kernel_shape_of(problem(activation=limited)) != kernel_shape_of(problem())
    assert kernel_shape_of(problem(activation=Activation("silu"))) == kernel_shape_of(problem())
