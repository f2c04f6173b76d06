"""The conformance tests of `vllm_moe_oracle.testing` for peers, which the default registry does not hold."""

from __future__ import annotations

import inspect

import pytest

from vllm_moe_oracle.measuring import peers
from vllm_moe_oracle.oracle.registry import Registry, default_registry
from vllm_moe_oracle.testing import cases, test_conversion, test_declarations, test_outputs

CLASSES = {each.name: each for each in peers.peer_classes()}
LEFT_OUT = {
    test_declarations.test_can_be_loaded: "its package may be missing",
    test_outputs.test_computes_what_the_emulation_computes: "it builds no experts on a CPU",
}
"""Tests of one backend that a peer does not take, with the reason."""
TESTS = [
    test
    for module in (test_declarations, test_conversion, test_outputs)
    for name, test in vars(module).items()
    if name.startswith("test_") and "name" in inspect.signature(test).parameters and test not in LEFT_OUT
]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_peer_is_a_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Registry()
    for each in CLASSES.values():
        found.add(each(), "a peer")
    monkeypatch.setattr(cases, "default_registry", lambda: found)
    for test in TESTS:
        test(name)


def test_no_peer_is_in_the_default_registry() -> None:
    assert CLASSES and not {each.name for each in default_registry()} & set(CLASSES)
    assert not [each.name for each in default_registry() if each.name.startswith("peer:")]
