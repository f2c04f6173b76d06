"""Everything this project raises on purpose: few types, and each message carries the rule, the numbers, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .oracle.decision import Candidate


def meant(name: str, valid: Iterable[str]) -> str:
    """``Did you mean own_mxfp8? `` with the valid name that is most like a name, or the only one that holds it.

    Capitals and hyphens do not matter; "" where no name is like it.
    """
    words = {each.lower().replace("-", "_"): each for each in valid}
    word = name.strip().lower().replace("-", "_")
    holding = [each for each in words if word in each]
    close = holding if len(holding) == 1 else difflib.get_close_matches(word, words, n=1)
    return f"Did you mean {words[close[0]]}? " if close else ""


def plain(text: str) -> str:
    """Text from a file or a library on one line, each run of white space and unprintable characters a space: none of it
    moves a terminal's cursor or begins a line of a log."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


class OracleError(Exception):
    """Base of every error raised on purpose.

    Args:
        rule: what was violated, with the numbers of the case, as one sentence without a full stop.
        remedy: what the user can do about it, as one sentence; empty when nothing can be done.
        where: the file, layer, tensor or setting that the rule speaks of; empty when the rule says it.
    """

    def __init__(self, rule: str, remedy: str = "", where: str = "") -> None:
        self.rule = rule
        self.remedy = remedy
        self.where = where
        super().__init__(str(self))

    def __str__(self) -> str:
        message = f"{self.where}: {self.rule}" if self.where else self.rule
        if not self.remedy:
            return message.rstrip("\n")
        # A table closes with a line break of its own.
        return f"{message}{'' if message.endswith(chr(10)) else '. '}{self.remedy}"

    def __reduce__(self) -> tuple[type[OracleError], tuple[str, str, str]]:
        # vLLM sends a worker's exception to the engine by pickle; the default would drop remedy and where.
        return type(self), (self.rule, self.remedy, self.where)


class SettingError(OracleError, ValueError):
    """A setting of ours has an unknown name or a value that it cannot take."""


class CheckpointError(OracleError, ValueError):
    """A checkpoint, or the config that describes it, cannot be used as it is."""


class NoBackendError(OracleError, ValueError):
    """No backend can run a layer, or the one asked for cannot; the message holds the table of all reasons.

    Args:
        rule: as for `OracleError`, with the table.
        remedy: as for `OracleError`.
        where: the layer's name.
        candidates: the verdict of every candidate. Not carried across processes: the message has them in words.
    """

    def __init__(self, rule: str, remedy: str = "", where: str = "", candidates: tuple[Candidate, ...] = ()) -> None:
        super().__init__(rule, remedy, where)
        self.candidates = candidates


class RegistryError(OracleError):
    """A backend cannot be registered: a broken import, a wrong type, a duplicate name."""


class SelfCheckError(OracleError, RuntimeError):
    """A kernel disagrees with the reference on the loaded weights, and nothing else may be taken instead."""


class AgreementError(OracleError, RuntimeError):
    """The ranks of a model could not agree: one failed, died, did not come, or was asked something else."""


class MeasurementError(OracleError, ValueError):
    """Measurements cannot be read, kept or taken: a damaged file, a full disk, no GPU. Serving goes on without them."""


class LifecycleError(OracleError, RuntimeError):
    """Weights were loaded into, or read from, a layer that is not in the state that this needs."""


class StandDown(OracleError):
    """The plugin cannot serve this installation and leaves vLLM as it is; the reason is reported, not raised."""
