"""`verify` with third parties' backends that end the process, exit, print, or change it: the status is 0 only where all
layers were compared, and the answer stays what it is."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.lib import distributions, forked
from tests.lib.checkpoints import Size, write_checkpoint
from tests.lib.fresh_process import environment
from tests.lib.tiers import sampled
from vllm_moe_oracle.oracle.registry import ENTRY_POINT_GROUP

LAYERS = [f"model.layers.{index}.mlp.experts" for index in range(2)]

BACKEND = """
import os, signal, sys
from vllm_moe_oracle.backends.emulation import Emulation, forward

class Stop(BaseException):
    pass

def fault(kind, layer, **names):
    if kind == os.environ["WHERE"] and os.environ["LAYER"] in layer:
        exec(os.environ["FAULT"], globals() | names)

class Theirs(Emulation):
    name = "theirs"

    def priority(self, problem, device):
        return -5.0

    def convert(self, expert, problem, plan):
        fault("convert", problem.layer)
        converted = super().convert(expert, problem, plan)
        fault("converted", problem.layer, tensors=converted)
        return converted

    def build_experts(self, tensors, problem, plan, builder):
        def run(out, x, *more):
            fault("function", problem.layer)
            forward(tensors, problem, out, x, *more)

        experts = builder.from_function(run)

        class Own(type(experts)):
            def apply(self, *args, **more):
                fault("class", problem.layer)
                return super().apply(*args, **more)

            def workspace_shapes(self, *args, **more):
                fault("shapes", problem.layer)
                return super().workspace_shapes(*args, **more)

        experts.__class__ = Own
        return experts

if os.environ["WHERE"] == "import":
    exec(os.environ["FAULT"])
BACKEND = Theirs()
"""

RUN = """
import sys
sys.path[:0] = [{folder!r}, {root!r}]
sys.argv = ["vllm-moe-oracle", "verify", *{arguments!r}]
from vllm_moe_oracle.cli.__main__ import run
run()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("faults") / "mxfp8", size=Size(experts=6, top_k=2))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "package"
    return distributions.install(
        folder, "theirs", ENTRY_POINT_GROUP, ["theirs = moe_theirs:BACKEND"], {"moe_theirs": BACKEND}
    )


def verify(
    package: Path, where: str, fault: str, *arguments: object, layer: str = LAYERS[1]
) -> subprocess.CompletedProcess[str]:
    code = RUN.format(folder=str(package), root=str(Path(__file__).parents[2]), arguments=[*map(str, arguments)])
    return forked.python(code, environment(WHERE=where, FAULT=fault, LAYER=layer, VLLM_PLUGINS="", COLUMNS="80"))


ENDED = (
    "the process that checked it ended with {} before it was done, in backend theirs: its {}, in the check of theirs in"
)


@pytest.mark.parametrize(
    ("where", "fault", "end", "part"),
    sampled([
        ("function", "os._exit(0)", "status 0", "kernel"),
        ("class", "os._exit(0)", "status 0", "kernel"),
        ("class", "os.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV", "kernel"),
        ("shapes", "os._exit(0)", "status 0", "kernel"),
        ("convert", "os._exit(0)", "status 0", "method convert"),
    ], 2, 1),
)  # fmt: skip
def test_a_process_that_ends_is_a_failure_of_its_layer(
    package: Path, model: Path, where: str, fault: str, end: str, part: str
) -> None:
    found = verify(package, where, fault, model, "--json")
    assert found.returncode == 1
    answer = json.loads(found.stdout)
    assert [(each["layer"], each["status"]) for each in answer["layers"]] == [
        *zip(LAYERS, ("passed", "ended"), strict=True)
    ]
    said = f"{ENDED.format(end, part)} {LAYERS[1]}; MOE_ORACLE_DISABLE=theirs leaves it out"
    assert answer["interrupted"] and answer["layers"][1]["fault"] == said
    assert f"\nerror: {LAYERS[1]}: theirs: {said}\n" in found.stderr


def test_tables_and_what_was_kept_before_the_process_ended(package: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    found = verify(package, "class", "os._exit(0)", model, "--resume", file)
    assert found.returncode == 1 and "ended after 2 of 2 layers; " in " ".join(found.stdout.split())
    assert "the file of --resume keeps the results of 1. The same command goes on" in " ".join(found.stdout.split())
    assert [line.split()[1] for line in found.stdout.splitlines() if line.startswith(("  0 ", "  1 "))] == [
        "ok",
        "ENDED",
    ]
    assert len(file.read_text().splitlines()) == 2
    found = verify(package, "nowhere", "", model, "--resume", file)
    assert found.returncode == 0 and "[0/2]" not in found.stderr and "[1/2]" in found.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_tool_blames_no_layer(package: Path, model: Path, number: signal.Signals) -> None:
    """It ends by the signal, as a shell expects, after what it has compared and one line."""
    fault = f"os.kill(os.getppid(), {number.value}); signal.pause()"
    found = verify(package, "class", fault, model)
    assert found.returncode == -number
    assert "ended after 1 of 2 layers; --resume FILE keeps what is done\n" in found.stdout
    assert "1 of 2 layers agree" in found.stdout and "ENDED" not in found.stdout
    (line,) = [line for line in found.stderr.splitlines() if line.startswith("error: ")]
    words = f"error: the process of the command ended with signal {number.name} before it was done, in backend theirs"
    assert line.startswith(words) and "MOE_ORACLE_DISABLE" not in line
    told = verify(package, "class", fault, model, "--json")
    answer = json.loads(told.stdout)
    assert told.returncode == -number and answer["interrupted"]
    assert [(each["layer"], each["status"]) for each in answer["layers"]] == [(LAYERS[0], "passed")]


def test_an_import_that_ends_the_process(package: Path, model: Path) -> None:
    found = verify(package, "import", "os._exit(0)", model, "--json")
    assert (found.returncode, found.stdout) == (1, "")
    said = "before it was done, in the import of entry point 'theirs' = moe_theirs:BACKEND of theirs 1.0"
    assert f"{said}; MOE_ORACLE_DISABLE=theirs leaves it out\n" in found.stderr


@pytest.mark.parametrize("where", ["class", "shapes", "function"])
@pytest.mark.parametrize(("fault", "words"), [("raise SystemExit(0)", "SystemExit: 0"), ("raise Stop(7)", "Stop: 7")])
def test_what_is_no_error_is_one_of_the_backend(package: Path, model: Path, where: str, fault: str, words: str) -> None:
    found = verify(package, where, fault, model, "--json")
    assert found.returncode == 1
    first, second = json.loads(found.stdout)["layers"]
    assert (first["status"], second["status"]) == ("passed", "failed")
    assert f"backend theirs: its kernel raised {words}" in second["fault"]


def test_what_a_class_prints_is_no_answer(package: Path, model: Path) -> None:
    found = verify(package, "class", "print('printed'); os.write(1, b'written')", model, "--json")
    assert found.returncode == 0 and [each["status"] for each in json.loads(found.stdout)["layers"]] == ["passed"] * 2
    assert "printed" in found.stderr and "written" in found.stderr


FORK_ONCE = """
try:
    os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    pass
else:
    copy = os.fork()
    if copy:
        os.waitpid(copy, 0)
"""


@pytest.mark.parametrize(("where", "part"), sampled([("convert", "method convert"), ("class", "kernel")], 1))
def test_a_copy_of_the_process_gives_no_answer(
    package: Path, model: Path, tmp_path: Path, where: str, part: str
) -> None:
    found = verify(package, where, FORK_ONCE.format(flag=str(tmp_path / "forked")), model, "--json")
    assert found.returncode == 0 and (tmp_path / "forked").exists()
    assert [each["status"] for each in json.loads(found.stdout)["layers"]] == ["passed", "passed"]
    said = f"backend theirs: its {part} forked process "
    (line,) = [each for each in found.stderr.splitlines() if said in each]
    assert line.endswith(", and the copy went on: it ends here; MOE_ORACLE_DISABLE=theirs leaves it out")


UNCOPIED = {
    "dtype": (
        "import torch; tensors['extra'] = torch.empty(4, dtype=torch.uint7)",
        "its extra cannot be copied: NotImplementedError",
    ),
    "class": (
        """
import torch

class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise SystemExit(0)

tensors["w2"] = torch.Tensor.as_subclass(tensors["w2"], Odd)
""",
        "its w2 is a Odd, expected a torch.Tensor",
    ),
}
BLAMED = {
    "the checkpoint": (
        "from vllm_moe_oracle.errors import CheckpointError; raise CheckpointError('it is damaged')",
        "its kernel raised CheckpointError: it is damaged",
    ),
    "the machine": (
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ),
}


@pytest.mark.parametrize(
    ("where", "fault", "words"),
    sampled(
        [*(("converted", *each) for each in UNCOPIED.values()), *(("function", *each) for each in BLAMED.values())], 2
    ),
)
def test_a_backend_blames_nobody_and_the_other_layers_are_checked(
    package: Path, model: Path, where: str, fault: str, words: str
) -> None:
    found = verify(package, where, fault, model, "--json", layer=LAYERS[0])
    assert found.returncode == 1 and "Traceback" not in found.stderr, found.stderr
    first, second = json.loads(found.stdout)["layers"]
    assert [(each["status"], each["backend"]) for each in (first, second)] == [
        ("failed", "theirs"),
        ("passed", "theirs"),
    ]
    assert words in first["fault"]
