"""What this plugin uses of vLLM, held against the sources of vLLM's nightly wheel.

    python -m tests.tools.nightly --state FILE [--wheel WHEEL]

Prints a summary in Markdown. A difference counts as an alarm when the run before had it too: nightly wheels are
sometimes broken for a night. A wheel that cannot be downloaded or unpacked is no alarm either. The index of nightly
wheels is the variable ``VLLM_NIGHTLY_INDEX``; without it the configured registry is asked for a pre-release.

Exit status: 0 no difference that two runs have, 1 at least one, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.lib import releases, surface
from vllm_moe_oracle.releases.supported import RELEASES


def download(folder: Path) -> Path:
    """Downloads vLLM's newest pre-release wheel into a folder.

    Raises:
        releases.ReleaseUnavailable: pip gave no wheel; the message holds pip's last line.
    """
    index = os.environ.get("VLLM_NIGHTLY_INDEX")
    return releases.downloaded("vllm", folder, "--pre", *(("--index-url", index) if index else ()))


def differences(wheel: Path, folder: Path) -> list[str]:
    """What the newest tested release has and the wheel's sources have not, one line each, sorted.

    Raises:
        zipfile.BadZipFile: the wheel is damaged.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    try:
        return sorted(str(problem) for problem in surface.check(RELEASES[-1], surface.Sources(folder)))
    except Exception as error:  # Sources of a shape that the check does not know are a difference, not a broken job.
        return [f"the check cannot follow these sources: {type(error).__name__}: {error}"]


def previous(state: Path) -> set[str]:
    """The differences of the run before; empty where there is no such file, or none that can be read."""
    try:
        kept = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    return {str(each) for each in kept} if isinstance(kept, list) else set()


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.nightly", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--state", type=Path, required=True, help="JSON file of the differences, read and written")
    parser.add_argument("--wheel", type=Path, help="a wheel that is there already")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            wheel = chosen.wheel or download(folder)
            found = differences(wheel, folder / "sources")
        except (releases.ReleaseUnavailable, zipfile.BadZipFile) as error:
            print(f"There is no nightly wheel to check: {error}")
            return 0
    lasting = previous(chosen.state) & set(found)
    chosen.state.parent.mkdir(parents=True, exist_ok=True)
    chosen.state.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"### {wheel.name}: {len(found)} differences, {len(lasting)} of them in the run before too\n")
    for each in found:
        print(f"* {'**lasting** ' if each in lasting else ''}{each}")
    return 1 if lasting else 0


if __name__ == "__main__":
    sys.exit(main())
