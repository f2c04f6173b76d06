"""Python sources of released vLLM versions, from their wheels, in a cache outside the repository.

    python tests/releases.py [VERSION...]      downloads those that are missing; all supported ones by default

Only ``*.py`` files and the metadata are kept, about 30 MB a release. The cache is ``vllm-moe-oracle/releases`` below
``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_moe_oracle.compat import RELEASES

# The sources are the same for every platform; this one every release was built for.
_PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 24, 28, 31, 34, 35, 39)))


class ReleaseUnavailable(Exception):
    """The package registry has not, or does not give, a release."""


def cache() -> Path:
    """The folder of everything that the tests download."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "vllm-moe-oracle"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds a lock of that name against other processes; a process that dies gives it back."""
    with (cache() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sources(version: str) -> Path:
    """The folder that holds a release's package ``vllm`` and its metadata; downloaded if it is not there.

    Raises:
        ReleaseUnavailable: it is not there and cannot be downloaded.
    """
    folder = cache() / "releases" / version
    if folder.is_dir():
        return folder
    with locked(f"release-{version}"):
        if folder.is_dir():
            return folder
        wheel = _download(version)
        # Unpacked beside its place and then renamed: what is in place is always complete.
        unfinished = folder.with_name(f"{version}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            wanted = [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name]
            archive.extractall(unfinished, wanted)
        unfinished.rename(folder)
        wheel.unlink()
    return folder


def _download(version: str) -> Path:
    wheels = cache() / "wheels"
    found = sorted(wheels.glob(f"vllm-{version}-*.whl"))
    if found:
        return found[0]
    # Downloaded into a folder of its own: a file in `wheels` is always complete.
    unfinished = wheels / f"{version}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--dest", str(unfinished)]
    command += [f"--platform={each}_x86_64" for each in _PLATFORMS]
    result = subprocess.run([*command, f"vllm=={version}"], capture_output=True, text=True)
    found = sorted(unfinished.glob("*.whl"))
    if result.returncode or not found:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise ReleaseUnavailable(
            f"vLLM {version} cannot be downloaded: {said[-1] if said else 'pip gave no wheel'}. "
            f"Its sources are looked for in {cache() / 'releases' / version}"
        )
    wheel = found[0].rename(wheels / found[0].name)
    shutil.rmtree(unfinished)
    return wheel


def main() -> None:
    """See the module."""
    for version in sys.argv[1:] or RELEASES:
        print(version, sources(version), flush=True)


if __name__ == "__main__":
    main()
