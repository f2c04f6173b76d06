"""Fixtures of the tests that measure."""

from tests.lib.fake_backends import backends, ready, store  # noqa: F401
