"""The entry point: finds the commands, and turns every error that is raised on purpose into one line and its status."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import logging
import os
import pkgutil
import re
import signal
import sys
import textwrap
import threading
import traceback
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperArgument, TyperCommand

from .. import __version__
from ..errors import (
    DeploymentError,
    NoBackendError,
    OracleError,
    PrintableFilter,
    describe_error,
    is_interruption,
    printable,
)
from ..oracle.watchdog import WATCHED_LOGGER
from . import (
    EXIT_INTERRUPTED,
    EXIT_INVALID_INPUT,
    EXIT_NO_BACKEND,
    EXIT_UNHEALTHY,
    child_process,
    commands,
    output,
    usage_hints,
    writable,
)
from .bug_report import where_to_report

logging.getLogger("vllm.moe_oracle").addFilter(PrintableFilter())

app = typer.Typer(
    name="vllm-moe-oracle",
    help="""\
Says which kernels vLLM's quantized mixture-of-experts layers get on a machine, and why.

\b
Examples:
  vllm-moe-oracle explain ~/models/Qwen3-30B-A3B-MXFP8 --device nvidia-h200
  vllm-moe-oracle status --check
  vllm-moe-oracle tune ~/models/gpt-oss-20b
""",
    no_args_is_help=True,
    # Plain help and usage errors: readable in a log, and rich is not imported for them.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_HYPHEN = "\N{NON-BREAKING HYPHEN}"

_NARROW_COLUMNS = 78
"""Columns of help below which descriptions begin below the options' names, not beside them."""


class _Command(TyperCommand):
    """A command whose help breaks no name and has no Python types, which newer releases of typer show."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Takes vLLM's names of options, too."""
        options = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        return super().parse_args(ctx, usage_hints.with_own_names(args, options, ctx.ignore_unknown_options))

    def invoke(self, ctx: Any) -> Any:
        """Runs the command, which ends with a status of its own alone: nothing in it may exit as if it were done.

        Raises:
            MeasurementError: it needs the working directory, which is gone.
        """
        if self.name in _IN_WORKING_DIRECTORY:
            writable.require_working_directory(str(self.name))
        try:
            return super().invoke(ctx)
        except SystemExit as error:
            if is_interruption(error):
                raise SystemExit(error.code or EXIT_UNHEALTHY) from error
            last = [*traceback.walk_tb(error.__traceback__)][-1]
            rule = f"code that is no part of this tool asked to end it ({describe_error(error)})"
            raise OracleError(rule, where=f"{last[0].f_code.co_filename}, line {last[1]}") from error

    def get_help(self, ctx: Any) -> str:
        """The help; lines are broken at spaces alone, and the list of exit statuses is fitted to the terminal, too."""
        formatter = ctx.make_formatter()
        write_text, write_dl = formatter.write_text, formatter.write_dl

        def fitted_text(text: str) -> None:
            whole = formatter.width - formatter.current_indent
            paragraphs = [_fit(each, whole) for each in text.split("\n\n")]
            write_text("\n\n".join(paragraphs).replace("-", _HYPHEN))

        def fitted_list(rows: Any, **options: Any) -> None:
            names = 30 if formatter.width >= _NARROW_COLUMNS else 8
            write_dl([(name, text.replace("-", _HYPHEN)) for name, text in rows], **{"col_max": names, **options})

        formatter.write_text, formatter.write_dl = fitted_text, fitted_list
        self.format_help(ctx, formatter)
        return str(formatter.getvalue()).rstrip("\n").replace(_HYPHEN, "-")

    def get_params(self, ctx: Any) -> Any:
        """The parameters, arguments without a type."""
        found = super().get_params(ctx)
        for each in found:
            if isinstance(each, TyperArgument):
                each.display_type_rich = lambda ctx: None  # type: ignore[method-assign]  # typer has no option for it
        return found


def _fit(paragraph: str, width: int) -> str:
    """A paragraph whose lines are kept (``\\b``), broken where they are longer than the terminal is wide; commands,
    which people copy, are not."""
    lines = paragraph.split("\n")
    if lines[0].strip() != "\b" or lines[1].strip() != "Exit status:":
        return paragraph
    found = lines[:2]
    items = "\n".join(lines[2:])
    for item in re.split(r"\n(?=  \S|\S)", items):
        words = item.split()
        status = words[0].isdecimal()
        first, then = ("  ", "     ") if status else ("", "")
        text = f"{words[0]}  {' '.join(words[1:])}" if status else " ".join(words)
        found += textwrap.wrap(text, width, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)
    return "\n".join(found)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-moe-oracle {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = (False),
) -> None:
    pass


_IN_WORKING_DIRECTORY = set[str]()
"""Commands that import torch, or write files."""

for _module in pkgutil.iter_modules(commands.__path__):
    _file = importlib.import_module(f"{commands.__name__}.{_module.name}")
    # The whole first sentence: by itself the list of commands would cut it off.
    _summary = " ".join(_file.HELP.partition("\n\n")[0].split())
    _more = getattr(_file, "CONTEXT_SETTINGS", None)
    if getattr(_file, "NEEDS_WORKING_DIRECTORY", False):
        _IN_WORKING_DIRECTORY.add(_module.name)
    app.command(_module.name, cls=_Command, help=_file.HELP, short_help=_summary, context_settings=_more)(_file.command)


_ClickError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])
"""click's base class of what it says to users; newer releases of typer have a click of their own."""


_EXTRAS = {
    **dict.fromkeys(("vllm", "torch", "triton", "numpy"), "vllm"),
    **dict.fromkeys(("jinja2", "matplotlib"), "plot"),
}
"""The extra that brings a module, by the module's name. Commands import such modules when they need them."""


def _end_with_closed_pipe() -> NoReturn:
    """Ends with the status that shells give a process whose reader is gone, e.g. before ``| head``."""
    _discard_output()
    sys.exit(128 + signal.SIGPIPE)


def _discard_output() -> None:
    """Drops what could not be written: the interpreter would try again when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]  # it was written to


def _fail(message: str, status: int = EXIT_INVALID_INPUT) -> NoReturn:
    """Ends with one line and the status, by default the one for unusable input."""
    output.print_message("error", message)
    sys.exit(status)


def main() -> None:
    """Runs the command line tool; ends the process with the command's exit status."""
    if sys.stderr is None:  # the process was started without it
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        _fail("standard output is closed")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale may lack the signs of a table
            stream.reconfigure(errors="backslashreplace")
    # An entry point may end the process or never return: its name must be on the screen before it is imported.
    watched = logging.getLogger(WATCHED_LOGGER)
    watched.setLevel(logging.INFO)
    watched.propagate = False
    watched.handlers[:] = [logging.StreamHandler(sys.stderr)]
    try:
        try:
            status = app(prog_name="vllm-moe-oracle", standalone_mode=False)
        finally:
            sys.stdout.flush()  # a closed pipe shows here or above, not when the interpreter ends
    except BrokenPipeError:
        _end_with_closed_pipe()
    except SystemExit:
        # click takes a closed pipe for an error with status 1, and wraps standard output.
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            _end_with_closed_pipe()
        raise
    except _ClickError as error:
        text = io.StringIO()
        context = getattr(error, "ctx", None)
        options = [name for each in (context.command.params if context else ()) for name in each.opts]
        if words := usage_hints.hint(error.format_message(), context.info_name if context else "", options):
            error.message = f"{error.message.rstrip('.')}. Hint: {words}"
        error.show(file=text)
        output.write_error_text(printable(text.getvalue()))
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):  # which one depends on the release of typer
        sys.exit(EXIT_INTERRUPTED)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(f"this needs {error.name}, which is not installed. Install it: pip install 'vllm-moe-oracle[{extra}]'")
    except OracleError as error:
        # One line: what tools and people grep for. A message's table, where it has one, belongs to the command.
        refused = isinstance(error, DeploymentError | NoBackendError)
        _fail(str(error), EXIT_NO_BACKEND if refused else EXIT_INVALID_INPUT)
    except OSError as error:
        if error.filename is not None:  # not standard output
            raise
        _discard_output()
        _fail(f"standard output cannot be written: {error.strerror}")
    except ValueError:
        if not sys.stdout.closed:
            raise
        # Third parties' code that was imported has closed it.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        _fail("standard output was closed")
    sys.exit(status)


def run() -> None:
    """The tool as a process of its own: `main` in a child process, then an end without taking down what was imported.

    vLLM's import leaves more than 4,000 modules, for which that takes a second. What is registered for the end runs.
    Threads that third parties' backends may have left are named, and not waited for.
    """
    child_process.begin()
    try:
        main()
    except SystemExit as ended:
        status = 0 if ended.code is None else ended.code
        child_process.finish(status if isinstance(status, int) else EXIT_UNHEALTHY)
        others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
        if not isinstance(status, int) or not ("torch" in sys.modules or others):
            raise
        if others:
            from ..oracle.registry import installed_entry_points  # 150 ms, where the command did not decide

            if not installed_entry_points():  # ours, or vLLM's: the interpreter waits for them
                raise
            names = ", ".join(sorted(each.name for each in others))
            output.print_message("note", f"ended while threads of a third party's backend were running: {names}")
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(status)
    except BaseException as error:  # a traceback says what ended it
        child_process.finish(EXIT_UNHEALTHY)
        if isinstance(error, Exception):
            error.add_note(f"Please report this: {where_to_report()}")
        raise


if __name__ == "__main__":
    run()
