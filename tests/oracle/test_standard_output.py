"""What third parties' code writes below Python goes to standard error, and standard output keeps the tool's answer."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.lib import configs, distributions
from tests.lib.fresh_process import TOOL, python
from vllm_moe_oracle.oracle.registry import ENTRY_POINT_GROUP
from vllm_moe_oracle.oracle.watchdog import third_party_code

ROOT = Path(__file__).parents[2]

WRITES = """
import ctypes, os, subprocess, sys

def write(word):
    os.write(1, f"{word} descriptor ".encode())
    os.system(f"echo {word} program")
    print(word, "stream", file=sys.__stdout__)
    ctypes.CDLL(None).printf(f"{word} library\\n".encode())
"""
WAYS = ("descriptor", "program", "stream", "library")
BACKEND = f"""{WRITES}
from tests.lib.cases import Plain

class Theirs(Plain):
    name = "theirs"

    def __init__(self): write("constructor")

    def numerics(self, problem):
        write("method")
        return super().numerics(problem)

write("import")
BACKEND = Theirs
"""


def test_the_answer_of_the_tool_stays_json(tmp_path: Path) -> None:
    distributions.install(tmp_path, "theirs", ENTRY_POINT_GROUP, ["loud = loud:BACKEND"], {"loud": BACKEND})
    config = tmp_path / "config.json"
    config.write_text(json.dumps(configs.quantized(quantization_config=configs.MODELOPT)))
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    found = python(*TOOL, "explain", config, "--device", "nvidia-h200", "--json", PYTHONPATH=path, VLLM_PLUGINS="")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)
    for place in ("import", "constructor", "method"):
        for way in WAYS:
            assert f"{place} {way}" in found.stderr


SCRIPT = """
import os, sys
from vllm_moe_oracle.oracle.watchdog import third_party_code

{before}
for word in ("first", "second"):
    with third_party_code("it", "wait"):
        try:
            os.write(1, word.encode())
        except OSError:
            pass
        {code}
try:
    os.write(1, b"after")
except OSError:
    os._exit(3)
os._exit(0)
"""
CLOSED_BY_CODE = {
    "pass": (0, "after", "firstsecond"),
    "os.close(1)": (0, "after", "firstsecond"),
    "os.closerange(1, 3)": (0, "after", "first"),
    "os.closerange(3, 100)": (3, "", "firstsecond"),  # what is left of standard output must not take an answer
}
CLOSED_BEFORE = {
    "os.close(1)": (3, "", ""),
    "os.close(2)": (0, "after", ""),
    "os.closerange(1, 3)": (3, "", ""),
    "os.closerange(0, 3)": (3, "", ""),
}


@pytest.mark.parametrize("code", CLOSED_BY_CODE)
def test_code_that_closes_descriptors(code: str) -> None:
    found = python("-c", SCRIPT.format(before="", code=code))
    assert (found.returncode, found.stdout, found.stderr) == CLOSED_BY_CODE[code]


@pytest.mark.parametrize("before", CLOSED_BEFORE)
def test_descriptors_that_are_closed_before(before: str) -> None:
    """Standard output stays closed, and nothing takes its place or that of standard error."""
    found = python("-c", SCRIPT.format(before=before, code="pass"))
    assert (found.returncode, found.stdout, found.stderr) == CLOSED_BEFORE[before]


def test_threads_and_nested_code_share_it(capfd: pytest.CaptureFixture[str]) -> None:
    """The first that ends does not put it back for the others."""
    inside, go_on = threading.Event(), threading.Event()

    def runs() -> None:
        with third_party_code("thread", "wait"), third_party_code("nested", "wait"):
            inside.set()
            assert go_on.wait(60)

    thread = threading.Thread(target=runs)
    with third_party_code("main", "wait"):
        thread.start()
        assert inside.wait(60)
    os.write(1, b"during ")
    go_on.set()
    thread.join()
    os.write(1, b"after")
    assert capfd.readouterr() == ("after", "during ")
