"""The errors that this project raises. Each message has the rule, the numbers of the case and the remedy."""

from __future__ import annotations

import difflib
import dis
import logging
import re
import signal
import sys
import traceback
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: str, valid: Iterable[str], prefix: str = "", strict: bool = False) -> str:
    """``Did you mean hopper_mxfp8? `` with the closest valid name, or the only one that contains the name.

    Case and hyphens are ignored. "" if no valid name is close.

    Args:
        name: the unknown name.
        valid: the valid names.
        prefix: a beginning that many of them share; it is not compared.
        strict: suggest only what a slip of a letter explains: names of products that differ in a digit are different
            products.
    """

    def comparable(text: str) -> str:
        return text.strip().lower().removeprefix(prefix).replace("-", "_")

    words = {comparable(each): each for each in valid}
    word = comparable(name)
    holding = [each for each in words if word in each and not strict]
    close = holding if len(holding) == 1 else difflib.get_close_matches(word, words, 1, 0.88 if strict else 0.6)
    return f"Did you mean {words[close[0]]}? " if close else ""


def sanitize(text: str) -> str:
    """Text from a file or a library as one printable line.

    Each run of white space and unprintable characters becomes a space, so that the text cannot move a terminal's cursor
    or start a line of a log.
    """
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


def short_repr(value: object) -> str:
    """A value for a message, shortened if it is long."""
    return shortened(repr(value), 60)


def shortened(text: str, most: int = 160) -> str:
    """Words from a file for a message, shortened if they are long."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def exit_words(status: int) -> str:
    """How a process ended: ``status 3``, or ``signal SIGKILL`` for a negative one; real-time signals have no name."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


MAX_ERROR_TEXT = 1000
"""Characters of another package's error message that a message of this project repeats."""


def describe_error(error: BaseException) -> str:
    """An exception's type and message as one printable line of limited length, whatever its ``str`` does."""
    try:
        text = str(error)
    except Exception as failure:  # a third party's __str__ may raise anything
        text = f"a message that cannot be read ({type(failure).__name__})"
    line = sanitize(f"{type(error).__name__}: {text[: 2 * MAX_ERROR_TEXT]}").rstrip(": ")
    return line if len(line) <= MAX_ERROR_TEXT else f"{line[:MAX_ERROR_TEXT]} ..."


_MAX_TRACEBACK_LINES = 60
"""The last lines of a traceback that the log gets: those of the place that raised, and the message."""


def describe_traceback(error: BaseException) -> str:
    """An exception's traceback as printable lines of limited length and number, whatever its ``str`` does.

    Lines are indented, so that none of a third party's looks like a line of the log.
    """
    try:
        lines = "".join(traceback.format_exception(error)).splitlines()
    except Exception as failure:  # likewise
        lines = [f"a traceback that cannot be read ({type(failure).__name__})"]
    left_out = len(lines) - _MAX_TRACEBACK_LINES
    head = [f"({left_out} lines are left out)"] if left_out > 0 else []
    kept = [line[:MAX_ERROR_TEXT] + " ..." * (len(line) > MAX_ERROR_TEXT) for line in lines[-_MAX_TRACEBACK_LINES:]]
    return "\n".join(f"  {printable(line)}".rstrip() for line in (*head, *kept))


def is_interruption(error: BaseException) -> bool:
    """Whether an exception is meant to end the process: Ctrl-C, or raised by one of its signal handlers.

    vLLM's handlers raise SystemExit. The same exception from a ``raise`` or ``sys.exit`` of other code is not meant so.
    """
    if isinstance(error, Exception):
        return False
    handlers = {getattr(signal.getsignal(each), "__code__", None) for each in signal.valid_signals()} - {None}
    frames = [*traceback.walk_tb(error.__traceback__)]
    if any(frame.f_code in handlers for frame, _ in frames):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    # Python's own handler of Ctrl-C has no frame: the exception appears between two instructions.
    raised = last is not None and dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return type(error) is KeyboardInterrupt and not raised


_HOST_OUT_OF_MEMORY = r"(?:can't|cannot) allocate memory"
_OUT_OF_MEMORY = re.compile(rf"OutOfMemoryError|MemoryError|out of memory|{_HOST_OUT_OF_MEMORY}", re.IGNORECASE)
_ASKED_BYTES = re.compile(r"allocate (\d+) bytes")


def mentions_out_of_memory(text: str) -> bool:
    """Whether an error's type and message say that memory was not sufficient, on a GPU or on a CPU.

    torch raises its OutOfMemoryError for devices only. For the CPU it raises RuntimeError("... DefaultCPUAllocator:
    can't allocate memory: you tried to allocate N bytes. Error code 12 (Cannot allocate memory)").
    """
    return _OUT_OF_MEMORY.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was not sufficient; see `mentions_out_of_memory`.

    Words about a device's memory count only where this process uses a device: on a CPU they are a backend's invention,
    and no memory that is freed helps. A typed error of this project that repeats such words is what its type says.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OracleError) or not isinstance(error, RuntimeError | OSError):
        return False
    text = describe_error(error)
    return mentions_out_of_memory(text) and (_uses_device() or _is_of_host(text))


def _is_of_host(text: str) -> bool:
    return re.search(_HOST_OUT_OF_MEMORY, text, re.IGNORECASE) is not None


def _uses_device() -> bool:
    """Whether this process has begun to use a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and any(getattr(torch, name).is_initialized() for name in ("cuda", "xpu"))


def asked_memory(error: BaseException) -> str:
    """How much memory a failed allocation asked for, e.g. ``1.50 GiB``; "some" where the error does not say it."""
    found = _ASKED_BYTES.search(str(error))
    return f"{int(found[1]) / 2**30:.2f} GiB" if found else "some"


def printable(text: str) -> str:
    """Text from anywhere as printable lines: each unprintable character except a line break becomes a space.

    Everything that the command line tool and the log print goes through this: names of folders, words of configs and
    errors of third parties could otherwise move a terminal's cursor, or change its title and colors.
    """
    return text if text.isprintable() else "".join(each if each.isprintable() or each == "\n" else " " for each in text)


class PrintableFilter(logging.Filter):
    """Makes the records of a logger printable, tracebacks included."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record; none is dropped."""
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info and not record.exc_text:  # formatters take this text where it is set
            error = record.exc_info[1]
            record.exc_text = "" if error is None else describe_traceback(error)
        return True


_LONG_WORD = re.compile(r"\S{1000,}")


def _with_short_words(text: str) -> str:
    """Text whose words have less than 1000 characters: longer ones come from hostile files and mistakes, and lose their
    middle."""
    return _LONG_WORD.sub(lambda word: f"{word[0][:200]} ... {word[0][-100:]}", text)


class OracleError(Exception):
    """Base class of this project's errors.

    Args:
        rule: what was violated, with the numbers of the case, as one sentence without a period.
        remedy: what the user can do, as one sentence; empty if nothing helps.
        where: the file, layer, tensor or setting; empty if the rule names it.
    """

    def __init__(self, rule: str, remedy: str = "", where: str = "") -> None:
        self.rule = _with_short_words(rule)
        self.remedy = remedy
        self.where = _with_short_words(where)
        super().__init__(str(self))

    def __str__(self) -> str:
        # Printable here, too: vLLM logs and prints the exceptions that reach it.
        return printable(f"{self._head}. {self.remedy}" if self.remedy else self._head)

    @property
    def _head(self) -> str:
        return f"{self.where}: {self.rule}" if self.where else self.rule

    def __reduce__(self) -> tuple[type[OracleError], tuple[Any, ...]]:
        # vLLM pickles a worker's exception for the engine; the default would drop the remedy and where.
        return type(self), (self.rule, self.remedy, self.where)


class SettingError(OracleError, ValueError):
    """A setting has an unknown name or an invalid value."""


class FieldError(SettingError):
    """A part of a case, such as a layer or a device, has a value that is not possible."""


class CheckpointError(OracleError, ValueError):
    """A checkpoint or its config cannot be used."""


class DamagedCheckpointError(CheckpointError):
    """The files of a checkpoint's tensors are damaged or incomplete, or do not fit its config."""


class DeploymentError(CheckpointError):
    """vLLM refuses to serve a checkpoint so: with these numbers of ranks or options, or in this release. Its files are
    right."""


class LeftToStockError(CheckpointError):
    """All of the model is stock vLLM's: it has no experts, or none that are served here. Nothing is wrong."""


class NoBackendError(OracleError, ValueError):
    """No backend can run a layer, or the requested one cannot. The message has the table of all reasons.

    Args:
        rule: as for `OracleError`, on one line.
        remedy: as for `OracleError`.
        where: the layer's name.
        candidates: every `core.decision.Candidate` with its verdict. Not pickled; the table has them as text.
        table: lines with every reason, which the message has after rule and remedy; "" without.
    """

    def __init__(
        self, rule: str, remedy: str = "", where: str = "", candidates: tuple[Any, ...] = (), table: str = ""
    ) -> None:
        self.candidates = candidates
        self.table = _with_short_words(table)  # before the base class makes the message
        super().__init__(rule, remedy, where)

    def __str__(self) -> str:
        # The remedy stands on the first line: that is the one that a search of a long log shows.
        return printable("\n".join(filter(None, (super().__str__(), self.table))))

    def __reduce__(self) -> tuple[type[OracleError], tuple[Any, ...]]:
        return type(self), (self.rule, self.remedy, self.where, (), self.table)


class RegistryError(OracleError):
    """A backend cannot be registered: its import fails, its type is wrong, or its name is taken."""


class UnknownBackendError(OracleError, KeyError):
    """A registry has no backend of a name."""


class BackendDefect(OracleError, RuntimeError):
    """A backend's method raised, or returned what the contract does not allow."""


class SelfCheckError(OracleError, RuntimeError):
    """A kernel disagrees with the reference on the loaded weights, and no fallback is allowed."""


class HostMemoryError(OracleError, MemoryError):
    """The CPU's memory is not sufficient to load a layer. Another backend would need as much."""


class RankSyncError(OracleError, RuntimeError):
    """The ranks of a model could not synchronize: one failed, died, timed out, or is configured differently."""


class MeasurementError(OracleError, ValueError):
    """Measurements cannot be read, written or taken: a damaged file, a full disk, no GPU. Serving goes on."""


class LifecycleError(OracleError, RuntimeError):
    """Weights were loaded into, or read from, a layer in the wrong state."""


class StandDown(OracleError):
    """The plugin does not support this installation and leaves vLLM unchanged; the reason is reported, not raised."""
