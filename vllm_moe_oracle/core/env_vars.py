"""The environment variables of settings: how every remedy names a setting."""

from __future__ import annotations

ENV_PREFIX = "MOE_ORACLE_"


def env_var(name: str) -> str:
    """The environment variable of a setting.

    Args:
        name: that of a field of `settings.Settings`.
    """
    return ENV_PREFIX + name.upper()
