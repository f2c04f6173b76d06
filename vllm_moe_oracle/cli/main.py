"""The entry point: finds the commands, and turns every error that is raised on purpose into one line and status 2."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pkgutil
import signal
import sys
from typing import Annotated, NoReturn

import typer

from .. import __version__
from ..errors import OracleError, sanitize
from ..oracle.watchdog import WATCHED_LOGGER
from . import EXIT_INVALID_INPUT, commands

app = typer.Typer(
    name="vllm-moe-oracle",
    help="Says which kernels vLLM's quantized mixture-of-experts layers get on a machine, and why.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help and usage errors: readable in a log, and rich is not imported for them.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


for _module in pkgutil.iter_modules(commands.__path__):
    _command = importlib.import_module(f"{commands.__name__}.{_module.name}").command
    # The whole first sentence: by itself the list of commands would cut it off.
    _summary = " ".join((inspect.getdoc(_command) or "").partition("\n\n")[0].split())
    app.command(_module.name, short_help=_summary)(_command)


def _end_with_closed_pipe() -> NoReturn:
    """Ends with the status that shells give a process whose reader is gone, e.g. before ``| head``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]
    sys.exit(128 + signal.SIGPIPE)


def main() -> None:
    """Runs the command line tool; ends the process with the command's exit status."""
    # An entry point may end the process or never return: its name must be on the screen before it is imported.
    watched = logging.getLogger(WATCHED_LOGGER)
    watched.setLevel(logging.INFO)
    watched.propagate = False
    watched.handlers[:] = [logging.StreamHandler(sys.stderr)]
    try:
        try:
            app(prog_name="vllm-moe-oracle")
        finally:
            sys.stdout.flush()  # a closed pipe shows here or above, not when the interpreter ends
    except BrokenPipeError:
        _end_with_closed_pipe()
    except SystemExit:
        # click takes a closed pipe for an error with status 1, and wraps standard output.
        if type(sys.stdout).__name__ == "PacifyFlushWrapper":
            _end_with_closed_pipe()
        raise
    except OracleError as error:
        # One line: what tools and people grep for. A message's table, where it has one, belongs to the command.
        print(f"error: {sanitize(str(error))}", file=sys.stderr)
        sys.exit(EXIT_INVALID_INPUT)


if __name__ == "__main__":
    main()
