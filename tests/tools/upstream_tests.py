"""vLLM's own tests of quantization, MoE layers and LoRA, with and without the plugin: what differs, as JSON.

    python -m tests.tools.upstream_tests SOURCES [--output FILE] [--paths tests/quantization ...] [--seconds 300]

SOURCES is a folder or an archive (.tar.gz) of the sources of vLLM's installed release, which its wheel does not have:

    curl -LO https://github.com/vllm-project/vllm/archive/refs/tags/v$RELEASE.tar.gz

or, from a package registry, the source distribution (it needs setuptools-scm and setuptools-rust installed):

    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$RELEASE \\
        pip download --no-deps --no-build-isolation --no-binary vllm vllm==$RELEASE

vLLM's tests need tblib, pytest-asyncio and soundfile. Tests that need a GPU or a download are skipped or fail, equally
in both runs. A test that ends or blocks its process counts as crashed, and the run goes on with the next one; so does a
module that ends it while it is imported.

Expected differences, with their reasons, are in tests/golden/upstream_differences.json.

Exit status: 0 no unexpected difference, 1 at least one, 2 the sources cannot be used.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.lib import fresh_process
from vllm_moe_oracle.devices.detect import installed_packages

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "tests" / "golden" / "upstream_differences.json"
PATHS = ("tests/quantization", "tests/kernels/moe", "tests/lora")
MODULES = {"tblib": "tblib", "pytest_asyncio": "pytest-asyncio", "soundfile": "soundfile"}
MAX_CRASHES = 50

_PLUGIN = '''
"""Loads vLLM's plugins, writes down each test's outcome, and leaves out tests whose outcome is there already."""
import faulthandler, json, os, signal, sys

import pytest

PATH, SECONDS = os.environ["UPSTREAM_RESULTS"], float(os.environ["UPSTREAM_SECONDS"])


def write(**entry):
    with open(PATH, "a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\\n")


def written():
    with open(PATH, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def pytest_configure(config):
    entries = written()
    ended = {each.get("collecting") for each in entries} - {each.get("collected") for each in entries}
    config.ends_the_process = ended - {None}
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    oracle = sys.modules.get("vllm_moe_oracle.plugin")
    write(active=bool(oracle and oracle.state().active))


def pytest_ignore_collect(collection_path, config):
    name = os.path.relpath(collection_path, config.rootpath)
    if name in config.ends_the_process:
        write(test=name, outcome="crashed")
        return True


def pytest_collectstart(collector):
    if isinstance(collector, pytest.Module):
        write(collecting=collector.nodeid)


def pytest_collection_modifyitems(items):
    done = {entry.get("test") for entry in written()}
    items[:] = [item for item in items if item.nodeid not in done]


def expire(*args):
    raise TimeoutError(f"longer than {SECONDS:g} s")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    write(test=item.nodeid, outcome="crashed")
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    faulthandler.dump_traceback_later(2 * SECONDS, exit=True)  # for code that no signal handler interrupts
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        lines = str(report.longrepr).strip().splitlines() if report.failed else []
        write(test=report.nodeid, outcome=report.outcome, message=next((l for l in lines if l[:2] == "E "), "")[:300])


def pytest_sessionfinish():
    write(finished=True)


def pytest_collectreport(report):
    write(collected=report.nodeid)
    if report.failed:
        write(test=report.nodeid, outcome="not collected", message=str(report.longrepr)[-300:])
'''


class SourcesError(Exception):
    """The sources cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class Difference:
    """A test with another outcome under the plugin.

    Attributes:
        test: pytest's node ID.
        stock: outcome without the plugin; "absent" where the test did not run.
        plugin: outcome with it.
        message: the first line of the error under the plugin.
        expected: why the difference is right; "" for one that is not expected.
    """

    test: str
    stock: str
    plugin: str
    message: str
    expected: str


def unpack(sources: Path, folder: Path) -> Path:
    """The folder that holds `tests` of the installed release.

    Raises:
        SourcesError: there is none, or it is of another release.
    """
    if sources.is_file():
        with tarfile.open(sources) as archive:
            archive.extractall(folder, filter="data")
        sources = next(iter(sorted(folder.iterdir())))
    if not (sources / "tests" / "conftest.py").is_file():
        raise SourcesError(f"{sources} has no tests/conftest.py: it is not vLLM's source tree (see --help)")
    installed = (_vllm_version() or "none").partition("+")[0]
    found = re.search(r"\d+\.\d+\.\d+\S*", sources.resolve().name)
    if found and found[0] != installed:
        raise SourcesError(f"the sources are of vLLM {found[0]}, {installed} is installed")
    missing = [package for name, package in MODULES.items() if not _is_installed(name)]
    if missing:
        raise SourcesError(f"vLLM's tests need {', '.join(missing)}: pip install {' '.join(missing)}")
    return sources


def _vllm_version() -> str | None:
    return installed_packages().get("vllm")


def _is_installed(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0


def lay_out(sources: Path, folder: Path) -> Path:
    """A folder with vLLM's tests and this package, but not vLLM's sources, which would hide the installed package."""
    shutil.copytree(sources / "tests", folder / "tests")
    shutil.copy(sources / "pyproject.toml", folder)
    (folder / "vllm_moe_oracle").symlink_to(ROOT / "vllm_moe_oracle", target_is_directory=True)
    (folder / "moe_oracle_upstream.py").write_text(_PLUGIN, encoding="utf-8")
    return folder


def run(folder: Path, paths: Sequence[str], plugins: str, seconds: float) -> dict[str, tuple[str, str]]:
    """Outcome and message of each test, by node ID.

    Args:
        folder: from `lay_out`.
        paths: what pytest gets.
        plugins: value of ``VLLM_PLUGINS``.
        seconds: time limit of one test.

    Raises:
        SourcesError: no test passes without the plugin, or it is active where it should not be, or the other way round.
    """
    results = folder / f"results-{plugins or 'stock'}.jsonl"
    results.touch()
    clean = fresh_process.environment()
    environment = clean | {
        "VLLM_PLUGINS": plugins,
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [clean.get("PYTHONPATH")])]),
        "UPSTREAM_RESULTS": str(results),
        "UPSTREAM_SECONDS": str(seconds),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "moe_oracle_upstream"]
    command += ["--continue-on-collection-errors", *paths]
    log, entries, outcomes = folder / "output.txt", [], {}
    for _ in range(MAX_CRASHES):
        with log.open("wb") as output:  # a pipe would stay open as long as processes that a test left
            subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        entries = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
        outcomes = {each["test"]: (each["outcome"], each.get("message", "")) for each in entries if "test" in each}
        if not entries or "finished" in entries[-1]:  # else a test ended the process: on with the next one
            break
    if not plugins and not any(outcome == "passed" for outcome, _ in outcomes.values()):
        said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SourcesError(f"no test passed with VLLM_PLUGINS={plugins!r}: {said}")
    active = {each["active"] for each in entries if "active" in each}
    if active != {bool(plugins)}:
        wanted = "is not" if plugins else "is"
        raise SourcesError(f"the plugin {wanted} active with VLLM_PLUGINS={plugins!r}; vllm-moe-oracle status says why")
    return outcomes


def compare(
    stock: Mapping[str, tuple[str, str]], plugin: Mapping[str, tuple[str, str]], expected: Mapping[str, str]
) -> list[Difference]:
    """Tests whose outcomes differ, sorted. One that passes in neither run may do so in different ways: some of vLLM's
    tests draw their parameters anew in each process, or take longer than the limit in one run. One that was skipped,
    and fails or crashes with the plugin, differs.

    Args:
        stock: from `run` without the plugin.
        plugin: with it.
        expected: reasons by pattern of node IDs.
    """
    absent = ("absent", "")
    found = []
    for test in sorted({*stock, *plugin}):
        one, (other, message) = stock.get(test, absent)[0], plugin.get(test, absent)
        worse = one in ("skipped", "absent") and other in ("crashed", "failed")
        if one != other and ("passed" in (one, other) or worse):
            reason = next((why for pattern, why in expected.items() if fnmatch.fnmatchcase(test, pattern)), "")
            found.append(Difference(test, one, other, message, reason))
    return found


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.upstream_tests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", type=Path)
    parser.add_argument("--output", type=Path, help="file of the report; by default standard output")
    parser.add_argument("--paths", nargs="+", default=PATHS, help=f"what to run; by default {' '.join(PATHS)}")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of one test (300)")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="upstream-tests-") as name:
        for part in ("unpacked", "run"):
            (Path(name) / part).mkdir()
        try:
            folder = lay_out(unpack(chosen.sources, Path(name) / "unpacked"), Path(name) / "run")
            stock, plugin = (run(folder, chosen.paths, plugins, chosen.seconds) for plugins in ("", "moe_oracle"))
        except SourcesError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    differences = compare(stock, plugin, json.loads(EXPECTED.read_text(encoding="utf-8")))
    report = {
        "vllm": _vllm_version(),
        "paths": list(chosen.paths),
        "stock": Counter(outcome for outcome, _ in stock.values()),
        "plugin": Counter(outcome for outcome, _ in plugin.values()),
        "differences": [asdict(each) for each in differences],
    }
    text = json.dumps(report, indent=2) + "\n"
    if chosen.output is not None:
        chosen.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return int(any(not each.expected for each in differences))


if __name__ == "__main__":
    sys.exit(main())
