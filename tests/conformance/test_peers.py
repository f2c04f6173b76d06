"""The conformance tests of `vllm_moe_oracle.testing` for peers, which the default registry does not hold."""

from __future__ import annotations

import pytest

from vllm_moe_oracle import testing
from vllm_moe_oracle.measuring import peers
from vllm_moe_oracle.oracle.registry import Registry, default_registry
from vllm_moe_oracle.testing import _one_thread  # noqa: F401  # a fixture for all tests here

CLASSES = {each.name: each for each in peers.peer_classes()}
TESTS = [
    testing.test_supports_some_layer,
    testing.test_declares_what_it_does,
    testing.test_refuses_with_code_and_words,
    testing.test_has_a_priority_of_its_own,
    testing.test_converts_meta_tensors_to_the_same_shapes,
    testing.test_conversion_is_pure,
    testing.test_backends_that_share_a_layout_convert_to_the_same_bits,
    testing.test_every_element_matters,
]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_peer_is_a_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Registry()
    for each in CLASSES.values():
        found.add(each(), "a peer")
    monkeypatch.setattr(testing, "default_registry", lambda: found)
    for test in TESTS:
        test(name)


def test_no_peer_is_in_the_default_registry() -> None:
    assert CLASSES and not {each.name for each in default_registry()} & set(CLASSES)
    assert not [each.name for each in default_registry() if each.name.startswith("peer:")]
