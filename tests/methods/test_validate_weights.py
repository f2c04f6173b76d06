"""A backend that cannot hold the loaded weights says so before they are converted, and the next candidate is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.faulty_backends import LAYERS, Method, second, weights
from vllm_moe_oracle.backends.emulation import Emulation
from vllm_moe_oracle.errors import NoBackendError

LAYER = LAYERS["silu"]


class Choosy(Emulation):
    """Takes no expert whose first scale is 1."""

    name = "choosy"

    def priority(self, problem: Any, device: Any) -> float:
        return 1.0

    def validate_weights(self, expert: Any, problem: Any) -> str:
        return "the first scale is 1" if int(expert["w13_scale"][0, 0]) == 1 else ""


def bad_weights(expert: int = 3) -> dict[str, Tensor]:
    found = weights(LAYER)
    found["w13_scale"][expert, 0, 0] = 1
    return found


@pytest.mark.parametrize("mode", ("off", "group"))
def test_the_next_candidate_is_taken_and_the_decision_says_why(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    method = Method.over(Choosy(), second(), self_check=mode)
    assert method.decision.backend == "choosy"
    with caplog.at_level("ERROR", "vllm.moe_oracle"):
        method.check(bad_weights())
    assert method.backend.name == method.decision.backend == "second"
    refused = next(each for each in method.decision.candidates if each.backend == "choosy")
    assert [reason.code for reason in refused.reasons] == ["weights"]
    assert "expert 3: the first scale is 1" in refused.reasons[0].detail
    assert "cannot hold the loaded weights" in method.decision.explanation
    assert "choosy cannot hold the loaded weights" in caplog.text and "taking second instead" in caplog.text


def test_fitting_weights_have_no_reasons() -> None:
    method = Method.over(Choosy(), second())
    method.check()
    assert method.backend.name == "choosy"


def test_every_layer_is_asked_although_layers_of_a_kind_are_checked_once() -> None:
    first, other = (Method.over(Choosy(), second()) for _ in range(2))
    first.check()
    other.check(bad_weights(LAYER.local_experts - 1))
    assert (first.backend.name, other.backend.name) == ("choosy", "second")


@pytest.mark.parametrize(
    ("settings", "kernel_built"),
    [
        ({"self_check": "strict"}, False),
        ({"backend": "choosy"}, False),
        ({"backend": "choosy", "self_check": "off"}, False),
        ({}, True),  # a reload
    ],
    ids=str,
)
def test_where_no_other_may_take_the_layer_it_is_an_error(settings: dict[str, Any], kernel_built: bool) -> None:
    method = Method.over(Choosy(), second(), **settings)
    with pytest.raises(
        NoBackendError, match=r"choosy cannot hold the (re)?loaded weights.*expert 3: the first scale is 1"
    ):
        method.check(bad_weights(), kernel_built=kernel_built)
    assert method.backend.name == method.decision.backend == "choosy"


def test_when_nothing_is_left_the_layer_is_refused() -> None:
    method = Method.over(Choosy())
    with pytest.raises(NoBackendError):
        method.check(bad_weights())


def test_what_was_checked_stays_as_it_was() -> None:
    raw = bad_weights()
    before = {name: each.clone() for name, each in raw.items()}
    Method.over(Choosy(), second()).check(raw)
    assert all(torch.equal(raw[name].view(torch.uint8), each.view(torch.uint8)) for name, each in before.items())


class Raising(Choosy):
    """Raises where it should answer."""

    def validate_weights(self, expert: Any, problem: Any) -> str:
        raise SystemExit("a bug")


def test_an_answer_that_fails_is_a_refusal() -> None:
    method = Method.over(Raising(), second())
    method.check()
    assert method.backend.name == "second"
    refused = next(each for each in method.decision.candidates if each.backend == "choosy")
    assert "its method validate_weights raised SystemExit: a bug" in refused.reasons[0].detail
