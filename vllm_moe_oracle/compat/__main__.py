"""Prints the table of supported vLLM releases: ``python -m vllm_moe_oracle.compat``.

With ``--releases`` it prints the tested releases, with ``--cpu`` those that a model is served with, as JSON, for a CI's
matrix.
"""

from __future__ import annotations

import argparse
import json

from ..releases.supported import CPU_RELEASES, RELEASES, support_table

_DESCRIPTION = "Prints the table of supported vLLM releases."


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m vllm_moe_oracle.compat", description=_DESCRIPTION)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--releases", action="store_true", help="the tested releases, as a JSON list")
    kind.add_argument("--cpu", action="store_true", help="the releases that a model is served with, as a JSON list")
    chosen = parser.parse_args()
    if chosen.releases:
        print(json.dumps(RELEASES))
    elif chosen.cpu:
        print(json.dumps(CPU_RELEASES))
    else:
        print(support_table())


if __name__ == "__main__":
    main()
