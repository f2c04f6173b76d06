"""The environment variables of settings: how every remedy names a setting."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import lru_cache

ENV_PREFIX = "MOE_ORACLE_"


def env_var(name: str) -> str:
    """The environment variable of a setting.

    Args:
        name: that of a field of `settings.Settings`.
    """
    return ENV_PREFIX + name.upper()


@lru_cache(maxsize=1024)
def meant_variable(word: str, names: tuple[str, ...]) -> str:
    """The variable of a setting, or the beginning of all, for which a word is a slip: ``MOEORACLE_BACKEND``,
    ``moe-orcale``. "" for any other word, such as the variables that Kubernetes makes of a service's name
    (``VLLM_MOE_ORACLE_PORT``).

    Args:
        word: a variable's name, or a key's.
        names: the settings.
    """
    beginning, word = _letters(ENV_PREFIX), _letters(word).removeprefix("vllm")
    if _is_slip(word, beginning):
        return f"{ENV_PREFIX}..."
    for name in names:
        if word.endswith(_letters(name)) and _is_slip(word.removesuffix(_letters(name)), beginning):
            return env_var(name)
    rest = word.removeprefix(beginning)
    meant = [name for name in names if rest != word and _is_slip(rest, _letters(name))]
    return env_var(meant[0]) if meant else ""


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


_SLIP = 0.85
"""Similarity of a word and its misspelling: ``moeorcale`` has 0.89. ``oracle``, which other products are called, has
0.80, as ``port`` and ``report``."""


def _is_slip(word: str, meant: str) -> bool:
    return SequenceMatcher(None, word, meant).ratio() >= _SLIP
