"""The environment variables of settings: how every remedy names a setting, and of which names they are misspelled."""

from __future__ import annotations

from difflib import SequenceMatcher
from functools import cache

ENV_PREFIX = "MOE_ORACLE_"


def env_var(name: str) -> str:
    """The environment variable of a setting.

    Args:
        name: that of a field of `settings.Settings`.
    """
    return ENV_PREFIX + name.upper()


@cache  # an environment may have thousands of names, and settings are read for every layer
def meant_variable(word: str, names: tuple[str, ...]) -> str:
    """The variable of a setting for which a word is a slip, such as ``MOEORACLE_BACKEND``, or the beginning of all for
    ``MOE_ORACLE`` alone. "" for any other word, such as the variables that Kubernetes makes of a service's name
    (``VLLM_MOE_ORACLE_PORT``).

    Args:
        word: a variable's name, or a key's.
        names: the settings.
    """
    letters = _letters(word)
    if letters == _BEGINNING:
        return f"{ENV_PREFIX}..."
    letters = letters.removeprefix("vllm")
    for name in names:
        if letters.endswith(_letters(name)) and _is_slip(letters.removesuffix(_letters(name)), _BEGINNING):
            return env_var(name)
    rest = letters.removeprefix(_BEGINNING)
    meant = [name for name in names if rest != letters and _is_slip(rest, _letters(name))]
    return env_var(meant[0]) if meant else ""


def is_meant_section(key: str) -> bool:
    """Whether a key of ``--additional-config`` is a slip for this plugin's section: ``moe_orcale``, ``moe-oracle``."""
    return _is_slip(_letters(key), _BEGINNING)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


_BEGINNING = _letters(ENV_PREFIX)

_SLIP = 0.85
"""Similarity of a word and its misspelling: ``moeorcale`` has 0.89. ``oracle``, which other products are called, has
0.80, as ``port`` and ``report``."""


def _is_slip(word: str, meant: str) -> bool:
    # Most words are much longer or shorter, which alone bounds the similarity.
    matcher = SequenceMatcher(None, word, meant)
    return matcher.real_quick_ratio() >= _SLIP and matcher.quick_ratio() >= _SLIP and matcher.ratio() >= _SLIP
