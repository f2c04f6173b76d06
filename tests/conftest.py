"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Shared and slow machines are no defect; the same examples each time, and nothing is written beside the tests.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")
