"""The house rules, read from the source: who may import whom, who may ask what, and that names explain themselves."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "vllm_moe_oracle"

# Each room, and the rooms that its modules may import. A room is the longest prefix here that a module's name has.
BASE = {"errors", "oracle.problem", "oracle.decision", "oracle.planner"}
PURE = BASE | {"oracle.overrides", "oracle.objectives", "settings"}
TENSORS = BASE | {"schemes", "layouts", "kernels"}
RELEASES = {"compat.eras", "compat.since", "compat.order", "compat.expert_names"}  # tables that need no vLLM
DECIDING = PURE | TENSORS | RELEASES | {"backends", "oracle"}
SERVING = (
    DECIDING
    | {"", "device", "records", "checkpoint", "quantization", "measure", "profiles"}
    | {
        "compat",
        "methods",
    }
)
MEASURING = {f"measure.{name}" for name in ("engine", "crew", "tuning", "benching", "reporting", "pages", "plots")}
MAY_IMPORT: dict[str, set[str]] = {
    "": set(),
    "errors": {"oracle.decision"},  # for a type only
    "oracle.problem": {"errors"},
    "oracle.decision": {"oracle.problem", "errors"},
    "oracle.planner": BASE,
    "oracle.overrides": {"errors"},
    "oracle.objectives": {"errors"},
    "settings": {"errors", "oracle.overrides", "oracle.objectives"},
    "records": {"settings"},
    "device": {"errors", "oracle.problem", "compat.eras"},
    "expressions": {"errors"},
    "quantization": BASE | {"expressions", "quantization"},
    "checkpoint": BASE | {"quantization", "checkpoint", "compat.expert_names", "compat.since"},
    "layouts": {"errors", "layouts", "oracle.problem"},
    "schemes": BASE | {"schemes", "layouts"},
    "kernels": {"kernels", "layouts"},  # knows neither vLLM nor the oracle
    "compat.eras": set(),
    "compat.since": {"compat.eras", "oracle.problem"},
    "compat.order": {"oracle.problem"},
    "compat.expert_names": set(),
    "backends": TENSORS | RELEASES | {"backends"},
    "oracle": PURE | {"backends", "oracle"},
    "profiles": BASE,
    "measure": DECIDING | {"", "device", "measure", "profiles"},
    # What measures builds layers as serving does; what serving asks of measurements knows nothing of that.
    **dict.fromkeys(MEASURING, SERVING | MEASURING),
    "compat": DECIDING | {"", "device", "records", "quantization", "compat"},
    "methods": SERVING,
    "plugin": SERVING,
    "cli": SERVING | MEASURING | {"plugin", "cli"},
}


def files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """Name inside the package: ``oracle.problem``; an ``__init__`` has its folder's name, the package's own is ""."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in files()}


def room_of(module: str) -> str:
    rooms = [room for room in MAY_IMPORT if room and (module == room or module.startswith(f"{room}."))]
    return max(rooms, key=len, default="")


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Every import of a file, wherever it stands: full name (``torch.nn``, ``vllm_moe_oracle.errors``) and line."""
    package = [PACKAGE, *path.relative_to(ROOT / PACKAGE).parent.parts]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{source}.{alias.name}", node.lineno


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of this package that a file imports, by their name inside the package."""
    for name, line in imported(path):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            inside = name.removeprefix(PACKAGE).removeprefix(".")
            # `from ..errors import SettingError` imports the module errors.
            while inside and inside not in MODULES:
                inside = inside.rpartition(".")[0]
            yield inside, line


def imports(path: Path, package: str) -> list[int]:
    return [line for name, line in imported(path) if name == package or name.startswith(f"{package}.")]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of an attribute chain; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


# --- Directions ------------------------------------------------------------------------------------------------------


def test_every_module_lives_in_a_room_with_a_rule() -> None:
    assert {name for name in MODULES if name and not room_of(name)} == set()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    allowed = MAY_IMPORT[room_of(module)]
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {target or PACKAGE}"
        for target, line in own_imports(MODULES[module])
        if room_of(target) not in allowed and target != module
    ]
    # A folder's own __init__ is on the way to each of its modules.
    assert [line for line in wrong if not line.endswith(" imports oracle")] == []


def test_the_rules_see_every_form_of_import() -> None:
    found = {target for target, _ in own_imports(MODULES["oracle.oracle"])}
    assert {"backends", "errors", "settings", "oracle.decision", "oracle.registry"} <= found
    assert "oracle.decision" in {target for target, _ in own_imports(MODULES["errors"])}
    assert "schemes" in {target for target, _ in own_imports(MODULES["backends.emulation"])}


def test_the_rules_are_one_way() -> None:
    order = ["errors", "oracle.problem", "layouts", "schemes", "backends", "oracle", "methods", "plugin", "cli"]
    for index, lower in enumerate(order):
        for higher in order[index + 1 :]:
            assert higher not in MAY_IMPORT[lower]


def wraps_a_stock_class(path: Path) -> bool:
    """Whether a class in the file sets ``stock_class`` to a name."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant) and node.value.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(dotted(target) == "stock_class" for target in targets):
                return True
    return False


@pytest.mark.parametrize("module", MODULES)
def test_only_compat_methods_and_wrappers_of_stock_kernels_name_vllm(module: str) -> None:
    path = MODULES[module]
    if room_of(module) in ("compat", "methods") or (room_of(module) == "backends" and wraps_a_stock_class(path)):
        return
    assert imports(path, "vllm") == []


RELEASE = re.compile(r"(?<![\w.])0\.(2[2-9]|3\d)(\.\d+)?(?![\w.])")


def documentation(module: ast.Module) -> set[ast.AST]:
    """The docstrings of a module, and strings below constants that serve as such."""
    return {node.value for node in ast.walk(module) if isinstance(node, ast.Expr)}


def releases_named(module: ast.Module) -> list[int]:
    """Lines of code, not of its documentation, in which a release of vLLM stands: ``"0.28"`` or ``(0, 28, 0)``."""
    said = documentation(module)
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            found += [node.lineno] * bool(RELEASE.search(node.value))
        elif isinstance(node, ast.Tuple) and len(node.elts) in (2, 3):
            numbers = [each.value if isinstance(each, ast.Constant) else None for each in node.elts[:2]]
            found += [node.lineno] * (numbers[0] == 0 and numbers[1] in range(22, 40))
    return found


def test_only_compat_names_a_release_of_vllm() -> None:
    for code in ('since = "0.28.0"', 'f"since vLLM 0.30; {x}"', "release < (0, 24, 1)"):
        assert releases_named(ast.parse(code)) == [1], code
    assert not releases_named(ast.parse('"""Since 0.28."""\nx = 0.28, "10.28.1", (0, 0)'))
    named = {module: releases_named(tree(path)) for module, path in MODULES.items() if not module.startswith("compat")}
    assert {module: lines for module, lines in named.items() if lines} == {}


@pytest.mark.parametrize("module", MODULES)
def test_what_explaining_needs_names_no_torch_at_import(module: str) -> None:
    tensors = ("schemes", "layouts", "kernels", "compat", "methods", "measure")
    if room_of(module).split(".")[0] in tensors:
        return
    typing_only = {
        child
        for node in ast.walk(tree(MODULES[module]))
        if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    lazily = {
        child
        for node in ast.walk(tree(MODULES[module]))
        if isinstance(node, ast.FunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree(MODULES[module])):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in typing_only | lazily:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not [name for name in names if name.split(".")[0] in ("torch", "triton", "vllm")], node.lineno


# --- Who may ask what ------------------------------------------------------------------------------------------------

HARDWARE = re.compile(
    r"torch\.cuda\.(is_available|device_count|get_device_\w+|mem_get_info)|torch\.version\.(hip|cuda)"
    r"|torch\.backends\.cuda\.is_\w+"  # its other attributes are settings, not questions
    r"|platform\.(processor|machine|uname|node)|torch\.cpu\.\w+|os\.cpu_count"
)


@pytest.mark.parametrize("module", MODULES)
def test_only_device_asks_the_hardware(module: str) -> None:
    if module == "device":
        return
    path = MODULES[module]
    asked = {node: dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    # Code that was handed a tensor may ask what that tensor's own device can do: it knows no `Device`.
    of_a_tensor = {
        node.func
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and node.args and dotted(node.args[0]).split(".")[-1] == "device"
    }
    wrong = {(name, node.lineno) for node, name in asked.items() if HARDWARE.match(name) and node not in of_a_tensor}
    assert wrong == set()
    assert not [name for name in ("pynvml", "psutil", "cpuinfo") if imports(path, name)]
    strings = [n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    assert not [text for text in strings if text.startswith(("/proc/", "/sys/", "nvidia-smi"))]


@pytest.mark.parametrize("module", MODULES)
def test_only_settings_reads_the_environment(module: str) -> None:
    if module == "settings":
        return
    path = MODULES[module]
    names = {dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert names.isdisjoint({"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"})
    assert not imports(path, "os.environ") and not imports(path, "os.getenv")


def test_the_device_and_the_settings_really_do_ask() -> None:
    """The two rules above would hold for names that nothing has."""
    for module, pattern in (("device", HARDWARE), ("settings", re.compile(r"os\.environ"))):
        names = [dotted(node) for node in ast.walk(tree(MODULES[module])) if isinstance(node, ast.Attribute)]
        assert [name for name in names if pattern.match(name)]


def test_experts_parameters_are_registered_and_replaced_in_one_place() -> None:
    found = {
        (module, node.attr)
        for module, path in MODULES.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("register_parameter", "_parameters", "__setattr__")
    }
    assert found == {("methods.storage", "register_parameter"), ("methods.storage", "_parameters")}


# --- Light imports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm_moe_oracle",
        "import vllm_moe_oracle.plugin",
        "import vllm_moe_oracle.cli.main",
        """
from vllm_moe_oracle import device, settings
from vllm_moe_oracle.oracle.oracle import decide
from vllm_moe_oracle.oracle.problem import Activation, Problem, Scheme
scheme = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")
layer = Problem("layers.0", scheme, 128, 128, 8, 2048, 768, Activation("silu"))
assert decide(layer, device.named("nvidia-h200"), settings.load({})).candidates
""",
    ],
    ids=["package", "plugin", "cli", "deciding"],
)
def test_neither_torch_nor_vllm_is_imported_by(statement: str) -> None:
    check = "import sys; heavy = {'torch', 'vllm', 'triton', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{statement}\n{check}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# --- Names and places ------------------------------------------------------------------------------------------------


def public_definitions(module: ast.Module) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Public classes and functions of a module and public methods of its public classes; nothing inside functions."""
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node
            for child in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
                    yield f"{node.name}.{child.name}", child


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    if MODULES[module].stat().st_size:
        assert ast.get_docstring(tree(MODULES[module])), "the module"
    missing = [name for name, node in public_definitions(tree(MODULES[module])) if not ast.get_docstring(node)]
    assert missing == []


def tracked() -> list[str]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_repository_has_no_other_top_level_names() -> None:
    allowed = {PACKAGE, "tests", "examples", "pyproject.toml", "setup.cfg", "README.md", "CHANGELOG.md", "LICENSE"}
    top = {name.split("/")[0] for name in tracked()}
    assert {name for name in top if not name.startswith(".")} <= allowed


PLACES = re.compile(r"(?<![\w.}$/-])/(?:home|root|Users|work|workspace|mnt|scratch)/[\w.]")


def test_no_file_mentions_a_path_of_somebodys_machine() -> None:
    assert PLACES.search("see /" + "home/someone/x") and not PLACES.search("a/work/b and $X/home/b")
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match.group()}" for match in PLACES.finditer(text)]
    assert found == []
