"""What Humming's backends say of their sums, against the configurations of every release of the library."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cases import problem
from releases import ReleaseUnavailable, humming

from vllm_moe_oracle.backends._humming import sums
from vllm_moe_oracle.compat import RELEASES, since

PROBE = Path(__file__).parents[1] / "humming_probe.py"
SERVED = RELEASES[RELEASES.index(since.HUMMING) :]


@cache
def probed(folder: Path) -> dict[str, dict[str, bool]]:
    """Whether products are split, by number of columns, free and with batch invariance."""
    ended = subprocess.run([sys.executable, str(PROBE), str(folder)], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, f"{folder}: {ended.stderr[-2000:]}"
    found: dict[str, dict[str, bool]] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("release", SERVED)
def test_products_are_split_whatever_their_columns_but_with_batch_invariance(release: str) -> None:
    try:
        version, folder = humming(release)
    except ReleaseUnavailable as error:
        pytest.skip(str(error))
    found = probed(folder)
    assert len(found) == 4
    for columns, split in found.items():
        layer = {"hidden_size": int(columns), "intermediate_size": int(columns)}
        for name, invariant in (("free", False), ("invariant", True)):
            said = sums(problem(**layer, batch_invariant=invariant))
            assert ("parts of a product" in said) == split[name], (version, columns, name)
