"""Makes the changes that people make most often, each in a copy of the tree, and counts the files that each touches.

    python -m tests.tools.drills [NAME...]

Each change is made properly first: it may touch at most as many files as stated, and the tests that concern it must
pass without a line of theirs being edited. Then it is made badly, in several ways, and the same tests must fail each
time: a change that is easy because nobody checks it is worth nothing. Prints a table.

Exit status: 0 every drill holds, 1 one does not, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.lib import distributions, releases
from tests.lib.tree_copies import ROOT, Run, TreeCopy
from vllm_moe_oracle.releases.supported import NEWEST, RELEASES

PACKAGE = "vllm_moe_oracle"

Change = Callable[[TreeCopy], None]
"""Edits files of a copy of the tree."""


@dataclass(frozen=True)
class Drill:
    """One kind of change.

    Attributes:
        what: the change, in a phrase.
        most_files: how many files it may touch, generated ones not counted.
        change: makes it.
        bad: what makes a proper change a bad one, by a name in words.
        tests: what must notice: the arguments of each run of pytest.
        generate: run ``python -m tests.tools.generate --write`` after it; what that writes is counted apart.
        prepare: makes the tree in which the change is missing, where it is in the tree already.
    """

    what: str
    most_files: int
    change: Change
    bad: Mapping[str, Change]
    tests: tuple[str, ...]
    generate: bool = False
    prepare: Change | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a drill.

    Attributes:
        touched: files that were edited or added.
        generated: files that the command wrote.
        failure: why the proper change did not pass; empty where it did.
        noticed: the test that noticed each bad form, by the form's name; empty where none did.
        seconds: of all runs.
    """

    touched: tuple[str, ...]
    generated: tuple[str, ...]
    failure: str
    noticed: Mapping[str, str]
    seconds: float

    def holds(self, drill: Drill) -> bool:
        """Whether the drill is as it should be."""
        return not self.failure and all(self.noticed.values()) and len(self.touched) <= drill.most_files


def edit(file: str, old: str, new: str) -> Change:
    """A change of one text in one file."""
    return lambda tree: tree.edit(file, old, new)


# --- A GPU -----------------------------------------------------------------------------------------------------------

_GPU = f"{PACKAGE}/devices/nvidia-h150.json"


def _add_gpu(tree: TreeCopy) -> None:
    spec = json.loads((tree.root / PACKAGE / "devices" / "nvidia-h200.json").read_text(encoding="utf-8"))
    spec |= {"name": "NVIDIA H150", "aliases": ["H150 SXM"], "memory_gib": 80}
    tree.add(_GPU, json.dumps(spec, indent=1) + "\n")


def _bandwidth_in_terabytes(tree: TreeCopy) -> None:
    spec = json.loads((tree.root / _GPU).read_text(encoding="utf-8"))
    tree.write(_GPU, json.dumps(spec | {"memory_bandwidth_gb_s": 4.0}))


# --- A release of vLLM -----------------------------------------------------------------------------------------------

_RELEASES = f"{PACKAGE}/releases/supported.py"


def _next_release() -> str:
    major, minor, _ = NEWEST.split(".")
    return f"{major}.{int(minor) + 1}.0"


def _add_release(tree: TreeCopy) -> None:
    """A release like the newest; what the tools look up in its sources is found in the newest's."""
    cache = tree.beside("cache") / "vllm-moe-oracle"
    (cache / "releases").mkdir(parents=True)
    for each in releases.cache().iterdir():
        if each.name != "releases":
            (cache / each.name).symlink_to(each)
    for version in (*RELEASES, _next_release()):
        place = releases.cache() / "releases" / (version if version in RELEASES else NEWEST)
        if version not in RELEASES and not place.is_dir():
            place = releases.sources(releases.INSTALLED)
        if place.is_dir():
            (cache / "releases" / version).symlink_to(place)
    tree.environment["XDG_CACHE_HOME"] = str(cache.parent)
    text = (tree.root / _RELEASES).read_text(encoding="utf-8")
    newest = re.findall(r"^    Release\(.*\n", text, re.MULTILINE)[-1]
    tree.edit(_RELEASES, newest, newest + newest.replace(NEWEST, _next_release()))


def _releases_out_of_order(tree: TreeCopy) -> None:
    lines = re.findall(r"^    Release\(.*\n", (tree.root / _RELEASES).read_text(encoding="utf-8"), re.MULTILINE)
    tree.edit(_RELEASES, lines[0] + lines[1], lines[1] + lines[0])


def _stale_row_of_the_table(tree: TreeCopy) -> None:
    page = tree.root / PACKAGE / "releases" / "README.md"
    kept = [line for line in page.read_text(encoding="utf-8").splitlines() if f"| {_next_release()} " not in line]
    page.write_text("\n".join(kept) + "\n", encoding="utf-8")


# --- A backend, ours or a third party's ------------------------------------------------------------------------------

_BACKEND = f"{PACKAGE}/backends/dequantized_once.py"


def _example(tree: TreeCopy) -> str:
    """The backend of the example, without what the example does with it."""
    text = (tree.root / "examples" / "add_a_backend.py").read_text(encoding="utf-8")
    head, mark, _ = text.partition("BACKEND = DequantizedOnce()\n")
    if not mark:
        raise ValueError("examples/add_a_backend.py has no BACKEND")
    return head + mark


def _add_backend(tree: TreeCopy) -> None:
    """The example with the imports that `backends/README.md` names for a file of the package."""
    page = (tree.root / PACKAGE / "backends" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n((?: *from \.\S* import .*\n)+)", page)
    if found is None:
        raise ValueError("backends/README.md has no imports for a file of the package")
    imports = textwrap.dedent(found[1])
    text = re.sub(r"from importlib\S* import .*\n", "", _example(tree))
    text = re.sub(rf"from {PACKAGE}\.api import \(.*?\)\n", imports, text, flags=re.DOTALL)
    functions = 'dequantize = scheme_functions("mxfp8").dequantize'
    tree.add(_BACKEND, text.replace(functions, "from ..schemes.mxfp8 import dequantize\n"))


_BAD_BACKENDS = {
    "the input is mutated": (
        "        return {name: dequantize(",
        "        expert['w13'].view(torch.uint8).zero_()\n        return {name: dequantize(",
    ),
    "gate and up are exchanged": ("gate, up = (x[token]", "up, gate = (x[token]"),
    "biases are declared and dropped": ('gated=("silu",))', 'gated=("silu",), bias=True)'),
    "its name is taken": ("    name = ", '    name = "emulation"  # '),
    "its priority is taken": ("static_priority = 50.0", "static_priority = 1000.0"),
}
"""What a text of the example becomes in a backend made badly."""


def _install_theirs(old: str = "BACKEND", new: str = "BACKEND") -> Change:
    """Installs a third party's distribution beside the tree, with `new` for `old` in its module and its entry point."""

    def change(tree: TreeCopy) -> None:
        theirs = tree.beside("theirs")
        tree.environment["PYTHONPATH"] = str(theirs)
        module = _example(tree).replace('"dequantized_once"', '"theirs"')
        point = "theirs = their_backend:BACKEND"
        if old not in module + point:
            raise ValueError(f"the backend has no {old!r}")
        modules = {"their_backend": module.replace(old, new)}
        points = [point.replace(old, new)]
        distributions.install(theirs, "their-backend", f"{PACKAGE}.backends", points, modules)

    return change


# --- A wrapper of one of vLLM's classes ------------------------------------------------------------------------------

_WRAPPER = f"{PACKAGE}/backends/cpu_mxfp4_class.py"

_WRAPPER_TEXT = '''"""vLLM's class for MXFP4 experts on x86 CPUs, which asks for AMX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.capabilities import Capabilities
from ..core.decision import Numerics, ShardPlan
from ..core.problem import MX_BLOCK, Problem
from ..releases import min_versions
from ._contract import Tensors
from ._stock import EXPERTS, UNPROVEN_EPLB, StockDifference, StockBackend
from ._stock_rules import gpt_oss_activation_rule

if TYPE_CHECKING:
    from torch import Tensor


class CpuMxfp4Class(StockBackend):
    """vLLM's `CPUExpertsMxfp4`."""

    name = "cpu_mxfp4_class"
    schemes = ("mxfp4",)
    stock_class = f"{EXPERTS}.cpu_moe:CPUExpertsMxfp4"
    stock_kernel = "CPU"
    stock_differences = (
        StockDifference(("silu", "gelu", "gelu_tanh"), "nobody has run the class with it"),
        StockDifference((), "the class routes tokens itself", before=min_versions.CPU_INT4_ROUTED_IDS),
        UNPROVEN_EPLB,
    )
    static_priority = 85.0
    activation_precision = "16bit"
    arithmetic = Numerics("converted exactly to bfloat16 and scaled in bfloat16", "left in {dtype}")
    capabilities = Capabilities(
        devices=("cpu",),
        features=("avx512f", "avx512_bf16"),
        packages={"vllm": min_versions.CPU_INT4_ROUTED_IDS},
        dtypes=("bfloat16",),
        gated=("swigluoai",),
        activation_params=True,
        bias=True,
        bits=(4,),
        groups=(MX_BLOCK,),
        hidden_multiple=MX_BLOCK,
        intermediate_multiple=MX_BLOCK,
        expert_parallel=False,
    )
    rules = (gpt_oss_activation_rule("CPUExpertsMxfp4"),)

    def convert(self, expert: Tensors, problem: Problem, plan: ShardPlan) -> dict[str, Tensor]:
        """Rows that alternate gate and up, in blocks of 32: scales `[block, group, row]`; biases float32."""
        import torch

        converted = {}
        for name, tensor in expert.items():
            rows = tensor.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if name.startswith("w13") else tensor
            if name.endswith("_bias"):
                converted[name] = rows.to(torch.float32)
            elif name.endswith("_scale"):
                converted[name] = rows.unflatten(0, (-1, 32)).transpose(1, 2).reshape(rows.shape)
            else:
                converted[name] = _pairs(rows)
        return converted


def _pairs(codes: Tensor) -> Tensor:
    """Rows r and 16 + r of every 32 share bytes, r in the low nibbles: `[block, pair of columns, r, column]`."""
    import torch

    first, second = codes.unflatten(0, (-1, 2, 16)).transpose(2, 3).unbind(1)
    even, odd = (first & 15) | second << 4, first >> 4 | (second & 240)
    return torch.stack((even, odd), dim=-1).reshape(codes.shape)


BACKEND = CpuMxfp4Class()
'''
"""Over a class that no backend wraps, with an order of weights of its own: `cpu_mxfp4` calls the operator behind it."""


def _add_wrapper(tree: TreeCopy) -> None:
    wrapped = re.compile(r":CPUExpertsMxfp4\b")
    if any(wrapped.search(each.read_text(encoding="utf-8")) for each in (tree.root / PACKAGE / "backends").iterdir()):
        raise ValueError("a backend wraps vLLM's CPUExpertsMxfp4: the drill needs another class")
    tree.add(_WRAPPER, _WRAPPER_TEXT)


# --- A checkpoint format of a known scheme ---------------------------------------------------------------------------

_READER, _METHOD = f"{PACKAGE}/quantization/quark.py", f"{PACKAGE}/methods/quark.py"


def _forget_format(tree: TreeCopy) -> None:
    for name in (_READER, _METHOD):
        (tree.root / name).unlink()


def _add_format(tree: TreeCopy) -> None:
    for name in (_READER, _METHOD):
        tree.write(name, (ROOT / name).read_text(encoding="utf-8"))


# --- An activation ---------------------------------------------------------------------------------------------------

_SPECS, _IN_TORCH, _IN_KERNELS = (
    f"{PACKAGE}/{name}.py" for name in ("core/activations", "kernels/activations", "kernels/epilogue")
)
_ENTRY = (
    '    ActivationSpec("hardswish", "gate * clamp(alpha * gate + 3, 0, 6) / 6 * up", kernel="hardswish", '
    'parameters=("alpha",)),\n'
    '    ActivationSpec("relu6", "clamp(x, 0, 6)", gated=False, ungated=True, ungated_kernel="relu6"),\n'
)
_TORCH_BRANCH = '    if name == "hardswish":\n        return x * (alpha * x + 3.0).clamp(0.0, 6.0) / 6.0\n'
_TORCH_UNGATED = '    if name == "relu6":\n        return x.clamp(0.0, 6.0)\n'
_KERNEL_BRANCH = (
    '    elif ACTIVATION == "hardswish":\n'
    "        return gate * tl.minimum(tl.maximum(alpha * gate + 3.0, 0.0), 6.0) / 6.0 * up\n"
)
_KERNEL_UNGATED = '    elif ACTIVATION == "relu6":\n        return tl.minimum(tl.maximum(x, 0.0), 6.0)\n'


def _before(mark: str, text: str) -> tuple[str, str]:
    return mark, text + mark


def _add_activation(tree: TreeCopy) -> None:
    """Hardswish with a slope for experts with a gate, and relu6 for experts without one."""
    tree.edit(_SPECS, *_before('    ActivationSpec(\n        "relu2"', _ENTRY))
    tree.edit(_IN_TORCH, *_before('    if name == "relu2":\n', _TORCH_BRANCH + _TORCH_UNGATED))
    tree.edit(_IN_KERNELS, *_before('    else:\n        tl.static_assert(ACTIVATION == "gelu_tanh"', _KERNEL_BRANCH))
    tree.edit(_IN_KERNELS, *_before("    else:\n        tl.static_assert(False", _KERNEL_UNGATED))


DRILLS: Mapping[str, Drill] = {
    "activation": Drill(
        "activations with and without a gate: entries of one table, formulas in torch and in the kernels",
        4,
        _add_activation,
        {
            "the kernels have no formula": edit(_IN_KERNELS, _KERNEL_BRANCH, ""),
            "the kernels ignore alpha": edit(_IN_KERNELS, "alpha * gate + 3.0", "gate + 3.0"),
            "the kernels clamp elsewhere": edit(_IN_KERNELS, "0.0), 6.0) / 6.0", "0.0), 3.0) / 6.0"),
            "the kernels have none without a gate": edit(_IN_KERNELS, _KERNEL_UNGATED, ""),
            "the kernels clamp elsewhere without a gate": edit(_IN_KERNELS, "(x, 0.0), 6.0)", "(x, 0.0), 5.0)"),
            "torch has no formula": edit(_IN_TORCH, _TORCH_BRANCH, ""),
            "torch shifts by another number": edit(_IN_TORCH, "alpha * x + 3.0", "alpha * x + 2.0"),
            "its alias is taken": edit(_SPECS, 'kernel="hardswish",', 'kernel="hardswish", aliases=("swish",),'),
        },
        (
            "tests/core/test_activations.py",
            "tests/kernels/test_activation_formulas.py",
            "tests/kernels/test_activations.py",
        ),
    ),
    "gpu": Drill(
        "a GPU: one data file",
        1,
        _add_gpu,
        {
            "an alias is used twice": edit(_GPU, '"H150 SXM"', '"h200"'),
            "bandwidth in terabytes": _bandwidth_in_terabytes,
            "a field is misspelled": edit(_GPU, '"sm_count"', '"sms"'),
        },
        ("tests/devices", "tests/test_readme.py"),
        generate=True,
    ),
    "format": Drill(
        "a checkpoint format of a known scheme: a reader and a method",
        3,
        _add_format,
        {
            "no method serves it": edit(_METHOD, '{"quark": None}', '{"quark_of_old": None}'),
            "the replaced class has another name": edit(_METHOD, ':QuarkOCP_MX_MoEMethod",', ':QuarkMoEMethod",'),
            "declared activations are dropped": edit(_READER, '"16bit" if inputs is None else "mxfp4"', '"16bit"'),
            "the scale's format is not looked at": edit(_READER, '!= "e8m0":', '== "none":'),
        },
        ("tests/methods/test_declarations.py", "tests/checkpoint/test_mxfp4_configs.py -k 'quark or another_format'"),
        prepare=_forget_format,
    ),
    "backend": Drill(
        "a backend of our own: one file",
        1,
        _add_backend,
        {
            **{name: edit(_BACKEND, *texts) for name, texts in _BAD_BACKENDS.items()},
            "a docstring is missing": edit(
                _BACKEND, '    """Experts in bfloat16, dequantized from MXFP8 when they are loaded."""\n', ""
            ),
        },
        ("tests/conformance -k dequantized_once", "tests/test_architecture.py", "tests/test_readme.py"),
        generate=True,
    ),
    "wrapper": Drill(
        "a wrapper of a stock class that nobody wraps, with an order of weights of its own: one file",
        1,
        _add_wrapper,
        {
            "vLLM has no such class": edit(_WRAPPER, ":CPUExpertsMxfp4", ":CPUExpertsMxfp4OfOld"),
            "vLLM has the class elsewhere": edit(_WRAPPER, "cpu_moe:", "cpu_mxfp4_moe:"),
            "the class is another scheme's": edit(_WRAPPER, ":CPUExpertsMxfp4", ":CPUExpertsInt4"),
            "the kernel is another class's": edit(_WRAPPER, '"CPU"', '"EMULATION"'),
            "vLLM has no such kernel": edit(_WRAPPER, '"CPU"', '"CPU_MXFP4"'),
            "the kernel is not declared": edit(_WRAPPER, "    stock_kernel = ", "    kernel = "),
            "the scheme is another": edit(_WRAPPER, '("mxfp4",)', '("wna16",)'),
            "the class takes other activations": edit(_WRAPPER, '= "16bit"', '= "mxfp8"'),
            "the class has no LoRA": edit(_WRAPPER, "bias=True", "bias=True, lora=True"),
            "the class takes no batched tokens": edit(_WRAPPER, "bias=True", 'bias=True, formats=("batched",)'),
            "the class takes no rows in halves": edit(_WRAPPER, "    rules = (", "    unused = ("),
            "the class runs on no GPU": edit(_WRAPPER, 'devices=("cpu",)', 'devices=("cuda",)'),
            "a refusal has no reason": edit(_WRAPPER, '("silu", ', "("),
            "a reason is for nothing": edit(
                _WRAPPER, "UNPROVEN_EPLB,\n", 'UNPROVEN_EPLB, StockDifference(("lora",), "slow"),\n'
            ),
            "its priority is taken": edit(_WRAPPER, "static_priority = 85.0", "static_priority = 80.0"),
            "its numerics are not declared": edit(_WRAPPER, "    arithmetic = ", "    arithmetics = "),
            "the last row is lost": edit(
                _WRAPPER, "_pairs(rows)", "_pairs(torch.nn.functional.pad(rows[:-1], (0, 0, 0, 1)))"
            ),
            "the signs of half of the codes are lost": edit(_WRAPPER, "codes.unflatten", "(codes & 127).unflatten"),
        },
        (
            "tests/backends/test_stock_rules.py -k 'cpu_mxfp4_class or wrapped'",
            "tests/conformance -k cpu_mxfp4_class",
            "tests/compat/test_surface.py::test_stock_experts_take_what_they_are_given",
            "tests/backends tests/oracle/test_golden_decisions.py tests/test_readme.py",
        ),
        generate=True,
    ),
    "third-party": Drill(
        "a third party's backend: an installed distribution, no file of the tree",
        0,
        _install_theirs(),
        {
            **{name: _install_theirs(*texts) for name, texts in _BAD_BACKENDS.items()},
            "its module fails": _install_theirs("from __future__", "import no_such_module\nfrom __future__"),
            "its entry point names nothing": _install_theirs("their_backend:BACKEND", "their_backend:NONE"),
        },
        (f"--pyargs {PACKAGE}.testing -k theirs",),
    ),
    "release": Drill(
        "a vLLM release: one line and one command",
        1,
        _add_release,
        {
            "a row of the table of releases is stale": _stale_row_of_the_table,
            "the workflow's list is stale": edit(".github/workflows/ci.yml", f', "{_next_release()}"]', "]"),
            "the releases are out of order": _releases_out_of_order,
            "its code was not read": edit(f"{PACKAGE}/releases/vllm_names.py", f'    "{_next_release()}",\n', ""),
            "a script names the release": edit(
                "examples/setup.sh", "# vLLM asks for", f"# vLLM {_next_release()} asks for"
            ),
            "a module compares with the release": edit(
                f"{PACKAGE}/oracle/selection.py",
                "\nfrom __future__ import annotations\n",
                f'\nfrom __future__ import annotations\n\n_SINCE = "{_next_release()}"\n',
            ),
        },
        ("tests/test_readme.py tests/releases/test_supported.py tests/test_architecture.py",),
        generate=True,
    ),
}
"""By name."""


def _check(tree: TreeCopy, drill: Drill) -> Run:
    """Runs the tests that concern a change, up to the first failure."""
    for arguments in drill.tests:
        run = tree.test(*shlex.split(arguments))
        if not run.passed:
            break
    return run


def _generate(tree: TreeCopy) -> None:
    made = tree.python("-m", "tests.tools.generate", "--write")
    if made.returncode:
        raise SystemExit(f"the command that generates fails\n{made.stdout[-2000:]}\n{made.stderr[-2000:]}")


def run(drill: Drill, folder: Path, report: Callable[[str], None] = lambda line: None) -> Outcome:
    """Does one drill.

    Args:
        drill: which.
        folder: empty, for the copy.
        report: gets a line for each step.

    Raises:
        ValueError: a text that the drill edits is not there: the drill is out of date.
    """
    began = time.monotonic()
    tree = TreeCopy(folder)
    if drill.prepare:
        drill.prepare(tree)
        tree.commit()
    drill.change(tree)
    touched = tree.touched()
    tree.commit()
    generated: tuple[str, ...] = ()
    if drill.generate:
        _generate(tree)
        generated = tree.touched()
        tree.commit()
    proper = _check(tree, drill)
    report(f"made properly: {'passes' if proper.passed else proper.output}")
    noticed = {}
    for name, spoil in drill.bad.items():
        spoil(tree)
        bad = _check(tree, drill)
        noticed[name] = "" if bad.passed else bad.failure
        report(f"{name}: {noticed[name] or 'NOT NOTICED'}{'' if bad.passed or bad.failure else bad.output}")
        tree.restore()
    failure = "" if proper.passed else proper.failure or "the tests did not run"
    return Outcome(touched, generated, failure, noticed, time.monotonic() - began)


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.drills", description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(DRILLS)}; all by default")
    names = parser.parse_args(arguments).names
    if unknown := sorted(set(names) - set(DRILLS)):
        parser.error(f"unknown drill {', '.join(unknown)}; valid: {', '.join(DRILLS)}")
    lines, failed = [], False
    for name in names or DRILLS:
        drill = DRILLS[name]
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(drill, Path(folder), lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True))  # noqa: B023
        failed |= not outcome.holds(drill)
        lines.append(
            f"{name:12} {'holds' if outcome.holds(drill) else 'FAILS':6} "
            f"{f'{len(outcome.touched)} of {drill.most_files}':7} {len(outcome.generated):9}  "
            f"{f'{sum(map(bool, outcome.noticed.values()))} of {len(outcome.noticed)}':15} {outcome.seconds:4.0f} s"
        )
    print("change              files   generated  faults noticed")
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
