"""Writes the golden decisions: `python -m tests.tools.golden_decisions --write`.

What stock vLLM chooses is computed from its sources, so these must be there (`tests/lib/releases.py`). Where stock's
choices stay, `tests.tools.generate --write` is enough.
"""

from __future__ import annotations

import sys

from tests.lib import stock_choice_mxfp4, stock_choice_mxfp8, stock_choice_wna16
from tests.lib.golden_decisions import FULL_TEXT_FILE, full_text

TABLES = (stock_choice_mxfp8.GOLDEN, stock_choice_mxfp4.GOLDEN, stock_choice_wna16.GOLDEN)


def main() -> None:
    """Writes all files and prints the rows that changed."""
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    for table in TABLES:
        print("\n".join(table.write()))
    FULL_TEXT_FILE.write_text(full_text(TABLES))


if __name__ == "__main__":
    main()
