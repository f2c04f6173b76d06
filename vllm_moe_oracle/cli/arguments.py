"""Arguments that several commands take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import MeasurementError, SettingError

if TYPE_CHECKING:
    from ..settings import Settings


def command_settings(words: list[str] | None, ignore_bad_profile: bool = False) -> Settings:
    """The settings of a command: the environment's, and over them those after ``--set``.

    Args:
        words: see `parse_assignments`; None for none.
        for_a_server: the command says what a server would do in this environment, which starts without a profile that
            cannot be read: only one of ``--set`` is refused.

    Raises:
        SettingError: as by `settings.load` and `parse_assignments`, or the profile cannot be read.
    """
    from pathlib import Path

    from ..measurements import profile
    from ..settings import load

    chosen = load(assignments=parse_assignments(words or []))
    source = chosen.source("profile")
    if chosen.profile and (source.startswith("--set") or not ignore_bad_profile):
        try:
            profile.read(Path(chosen.profile).expanduser())
        except MeasurementError as error:
            rule = f"{error.where}: {error.rule}" if error.where else error.rule
            remedy = error.remedy or "Name a file that tune --export has written, or leave the setting out"
            raise SettingError(rule, remedy, source) from error
    return chosen


def parse_assignments(words: list[str]) -> dict[str, str]:
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
            remedy = "Separate several overrides with ;" if name == "overrides" else "Leave one of them out"
            raise SettingError(f"{name} is given twice", remedy, "--set")
        found[name] = value
    return found
