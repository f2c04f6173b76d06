"""Fixtures of the tests that measure."""

from tests.lib.fake_backends import backends, own_time, ready, store  # noqa: F401
