"""Arguments that several commands take."""

from __future__ import annotations

from ..errors import SettingError


def read_assignments(words: list[str]) -> dict[str, str]:
    """Settings by name, from the words after ``--set``.

    Raises:
        SettingError: a word without a value, or a name that is given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise SettingError(f"{word!r} has no =", "Write --set backend=emulation", "--set")
        if name in found:
            remedy = "Separate several overrides with ;" if name == "overrides" else ""
            raise SettingError(f"{name} is given twice", remedy, "--set")
        found[name] = value
    return found
