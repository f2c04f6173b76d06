"""The process of the command line tool: its console script, and ``python -m vllm_moe_oracle.cli``."""

from __future__ import annotations

import signal


def run() -> None:
    """Runs the tool, and ends the process.

    Its modules take half a second to import. Ctrl-C ends the process meanwhile without a traceback, unless whoever
    started it has it ignored, as ``nohup`` does.
    """
    listens = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if listens:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .main import run as run_tool

    if listens:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_tool()


if __name__ == "__main__":
    run()
