"""The architecture, checked in the source: import directions, what exists in one place only, documentation, paths, and
the size of functions."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from vllm_moe_oracle import settings
from vllm_moe_oracle.core import env_vars

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_moe_oracle"

# The packages and modules of the product from bottom to top. Each imports only itself and what stands above it in this
# table, imports inside functions included. Letters: "t" may import torch and triton when it is imported, "v" may import
# vLLM. ("v" in brackets: only files that wrap one of vLLM's classes.)
LAYERS = {
    "errors":           "  ",  # exception types
    "untrusted":        "  ",  # files that come from anywhere
    "whole_files":      "  ",  # files that are written whole or not at all
    "core":             "  ",  # Problem, Device, Capabilities, ShardPlan, Decision
    "settings":         "  ",
    "decision_records": "  ",
    "profiles":         "  ",  # data files
    "releases":         "  ",  # facts about vLLM releases
    "devices":          "  ",
    "layouts":          "t ",
    "schemes":          "t ",
    "kernels":          "t ",
    "backends":         " (v)",
    "oracle":           "  ",
    "measurements":     "  ",
    "quantization":     "  ",
    "checkpoint":       "  ",
    "compat":           "tv",
    "verification":     "tv",
    "methods":          "tv",
    "measuring":        "tv",
    "report":           "  ",
    "plugin":           " v",
    "cli":              "  ",
    "api":              "  ",
    "testing":          "t ",  # conformance tests for third parties' backends
}  # fmt: skip

# Packages that may import less than all packages below them.
MAY_IMPORT_ONLY = {
    "layouts": {"errors", "core"},
    "kernels": {"core", "layouts"},
    "oracle": {"errors", "core", "settings", "decision_records", "releases", "devices", "backends"},
    "report": {
        "errors",
        "untrusted",
        "core",
        "settings",
        "decision_records",
        "devices",
        "profiles",
        "oracle",
        "measurements",
        "checkpoint",
    },
}


def files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    """Name inside the package: ``core.problem``; an ``__init__`` has its folder's name, the package's own is ""."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in files()}
ORDER = list(LAYERS)


def package_of(module: str) -> str:
    """The row of `LAYERS` that a module belongs to; "" for the package itself."""
    return module.partition(".")[0]


def place(module: str, line: int) -> str:
    """File and line, for a message."""
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


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


# --- Import direction -------------------------------------------------------------------------------------------------


def forbidden_imports(module: str) -> list[str]:
    """Imports of a module against the table, as ``file:line imports module``."""
    package = package_of(module)
    allowed = MAY_IMPORT_ONLY.get(package, set(ORDER[: ORDER.index(package)])) | {package, ""}
    return [
        f"{place(module, line)} imports {target}"
        for target, line in own_imports(MODULES[module])
        if package_of(target) not in allowed
    ]


def test_every_module_has_a_row_in_the_table() -> None:
    assert {package_of(module) for module in MODULES} <= {"", *LAYERS}


def test_imports_point_downward() -> None:
    wrong = [each for module in MODULES if module for each in forbidden_imports(module)]
    assert not wrong, "\n".join(wrong)


def test_exceptions_to_the_order_only_restrict_it() -> None:
    for package, allowed in MAY_IMPORT_ONLY.items():
        assert allowed <= set(ORDER[: ORDER.index(package)]), package


def test_every_form_of_import_is_seen() -> None:
    found = {target for target, _ in own_imports(MODULES["oracle.selection"])}
    assert {"errors", "settings", "core.decision", "oracle.registry"} <= found
    assert "schemes" in {target for target, _ in own_imports(MODULES["backends.emulation"])}, "inside a function"


def wraps_a_stock_class(path: Path) -> bool:
    """Whether a class in the file derives from `StockBackend` or sets ``stock_class``."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef) and any(dotted(base) == "StockBackend" for base in node.bases):
            return True
        if isinstance(node, ast.Assign) and any(dotted(target) == "stock_class" for target in node.targets):
            return True
    return False


def test_only_the_packages_of_the_table_import_vllm() -> None:
    wrong = []
    for module, path in MODULES.items():
        rights = LAYERS.get(package_of(module), "")
        if "v" not in rights or ("(v)" in rights and not wraps_a_stock_class(path)):
            wrong += [place(module, line) for line in imports(path, "vllm")]
    assert not wrong, "\n".join(wrong)


def deferred(path: Path) -> set[ast.AST]:
    """Nodes inside functions and below ``if TYPE_CHECKING``: they do not run when the module is imported."""
    roots = [
        node
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING")
    ]
    return {child for root in roots for child in ast.walk(root)}


def test_only_the_packages_of_the_table_import_torch_at_import() -> None:
    wrong = []
    for module, path in MODULES.items():
        if "t" in LAYERS.get(package_of(module), ""):
            continue
        later = deferred(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in later:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                wrong += [place(module, node.lineno) for name in names if name.split(".")[0] in HEAVY]
    assert not wrong, "\n".join(wrong)


HEAVY = ("torch", "triton", "vllm")

RELEASE = re.compile(r"(?<![\w.])0\.(2[2-9]|3\d)(\.\d+)?(?![\w.])")


def documentation(module: ast.Module) -> set[ast.AST]:
    """The docstrings of a module, and strings below constants that serve as such."""
    return {node.value for node in ast.walk(module) if isinstance(node, ast.Expr)}


def releases_named(module: ast.Module) -> list[int]:
    """Lines of code, not of documentation, with a release of vLLM in them: ``"0.28"`` or ``(0, 28, 0)``."""
    said = documentation(module)
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            found += [node.lineno] * bool(RELEASE.search(node.value))
        elif isinstance(node, ast.Tuple) and len(node.elts) in (2, 3):
            numbers = [each.value if isinstance(each, ast.Constant) else None for each in node.elts[:2]]
            found += [node.lineno] * (numbers[0] == 0 and numbers[1] in range(22, 40))
    return found


def test_only_releases_and_compat_name_a_release_of_vllm() -> None:
    for code in ('since = "0.28.0"', 'f"since vLLM 0.30; {x}"', "release < (0, 24, 1)"):
        assert releases_named(ast.parse(code)) == [1], code
    assert not releases_named(ast.parse('"""Since 0.28."""\nx = 0.28, "10.28.1", (0, 0)'))
    others = [module for module in MODULES if package_of(module) not in ("releases", "compat")]
    wrong = [place(module, line) for module in others for line in releases_named(tree(MODULES[module]))]
    assert not wrong, "\n".join(wrong)


# --- Single places ----------------------------------------------------------------------------------------------------

HARDWARE = re.compile(
    r"torch\.cuda\.(is_available|device_count|get_device_\w+|mem_get_info)|torch\.version\.(hip|cuda)"
    r"|torch\.backends\.cuda\.is_\w+"  # its other attributes are settings
    r"|platform\.(processor|machine|uname|node)|torch\.cpu\.\w+|os\.cpu_count"
)
ENVIRONMENT = re.compile(r"os\.(environ|environb|getenv|putenv|unsetenv)")


def hardware_queries(path: Path) -> list[int]:
    """Lines that ask what this machine has. A query about the device of a given tensor does not count."""
    of_a_tensor = {
        node.func
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and node.args and dotted(node.args[0]).split(".")[-1] == "device"
    }
    found = [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and HARDWARE.match(dotted(node)) and node not in of_a_tensor
    ]
    found += [line for name in ("pynvml", "psutil", "cpuinfo") for line in imports(path, name)]
    return found + [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(
            ("/proc/cpuinfo", "/proc/meminfo", "/proc/driver", "/proc/devices", "/sys/", "nvidia-smi")
        )
    ]


def environment_reads(path: Path) -> list[int]:
    """Lines that read or write environment variables."""
    found = [line for name in ("os.environ", "os.getenv") for line in imports(path, name)]
    attributes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)]
    return found + [node.lineno for node in attributes if ENVIRONMENT.fullmatch(dotted(node))]


def test_only_device_detection_asks_the_hardware() -> None:
    asking = {module: lines for module, path in MODULES.items() if (lines := hardware_queries(path))}
    assert set(asking) == {"devices.detect"}, asking


def test_only_settings_reads_the_environment() -> None:
    reading = {module: lines for module, path in MODULES.items() if (lines := environment_reads(path))}
    assert set(reading) == {"settings"}, reading


def named_settings(path: Path) -> Iterator[tuple[object, int]]:
    """The names of which a file asks `settings.env_var` for the variable, as far as they stand in the call; lines."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] == "env_var":
            yield from ((each.value, node.lineno) for each in node.args if isinstance(each, ast.Constant))


def test_one_function_spells_the_variables_of_settings() -> None:
    spelled = [
        place(module, number)
        for module, path in MODULES.items()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if env_vars.ENV_PREFIX in line and module not in ("core.env_vars", "settings")
    ]
    assert not spelled, "write env_var(...): " + ", ".join(spelled)


def test_variables_are_asked_for_by_names_that_settings_has() -> None:
    asked = [(name, place(module, line)) for module, path in MODULES.items() for name, line in named_settings(path)]
    assert {"disable", "cache", "force"} <= {name for name, _ in asked}
    assert not [each for each in asked if each[0] not in settings.FIELDS]


def texts(parsed: ast.AST) -> Iterator[tuple[str, int]]:
    """Texts other than docstrings, without what f-strings compute, and their lines."""
    parts = {id(part) for node in ast.walk(parsed) if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in ast.walk(parsed) if isinstance(node, ast.Expr)}
    for node in ast.walk(parsed):
        values = node.values if isinstance(node, ast.JoinedStr) else [] if id(node) in parts else [node]
        words = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in values]
        if isinstance(node, ast.JoinedStr | ast.Constant):
            yield "".join(words), node.lineno


def bare_settings(text: str) -> list[str]:
    """Where a text for users calls a setting by its name, which is not what a server reads; ``--set`` of the command
    line tool does."""
    names = "|".join(settings.FIELDS)
    found = re.findall(rf"(?<!--set )(?<!--set ')\b(?:{names})=|\bsettings? (?:{names})\b", text)
    return found + [name for name in settings.FIELDS if "_" in name and " " in text and re.search(rf"\b{name}\b", text)]


def test_messages_name_the_variables_of_settings() -> None:
    said = [
        f"{place(module, line)} ({', '.join(bare)})"
        for module, path in MODULES.items()
        if module != "settings"  # its texts stand beside the names
        for text, line in texts(tree(path))
        if (bare := bare_settings(text))
    ]
    assert not said, "write env_var(...): " + ", ".join(said)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('f"Set disable={name}"', ["disable="]),
        ('"take it out of the setting disable"', ["setting disable"]),
        ('"only with allow_activation_quantization"', ["allow_activation_quantization"]),
        ("f\"Set {env_var('disable')}={name}\"", []),
        ('"Write --set backend=emulation"', []),
        ('def asked():\n    """disable=NAME"""', []),
    ],
)
def test_a_bare_setting_is_seen(source: str, found: list[str]) -> None:
    assert [
        bare
        for text, _ in texts(ast.parse(f"said = {source}" if "def" not in source else source))
        for bare in bare_settings(text)
    ] == found


def docstring_reads(path: Path) -> list[int]:
    """Lines that read a docstring; Python has none under ``PYTHONOPTIMIZE=2``."""
    return [
        node.lineno
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Name | ast.Attribute)
        and dotted(node).split(".")[-1] in ("__doc__", "getdoc", "getcomments")
    ]


def test_nothing_that_people_read_comes_from_a_docstring() -> None:
    reading = {module: lines for module, path in MODULES.items() if (lines := docstring_reads(path))}
    assert not reading, reading


def test_experts_parameters_are_registered_and_replaced_in_one_place() -> None:
    found = {
        (module, node.attr)
        for module, path in MODULES.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("register_parameter", "_parameters", "__setattr__")
    }
    assert found == {("compat.weight_storage", "register_parameter"), ("compat.weight_storage", "_parameters")}


# --- Light imports ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "import vllm_moe_oracle",
        "import vllm_moe_oracle.plugin",
        "import vllm_moe_oracle.cli.main",
        """
from vllm_moe_oracle import settings
from vllm_moe_oracle.core import env_vars
from vllm_moe_oracle.devices import catalog
from vllm_moe_oracle.oracle.selection import decide
from vllm_moe_oracle.core.problem import Activation, Problem, Scheme
scheme = Scheme("mxfp8", 8, 32, "modelopt", activations="mxfp8")
layer = Problem("layers.0", scheme, 128, 128, 8, 2048, 768, Activation("silu"))
assert decide(layer, catalog.known_device("nvidia-h200"), settings.load({})).candidates
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


def test_every_public_name_has_a_docstring() -> None:
    missing = [module for module, path in MODULES.items() if path.stat().st_size and not ast.get_docstring(tree(path))]
    missing += [
        f"{place(module, node.lineno)} {name}"
        for module, path in MODULES.items()
        for name, node in public_definitions(tree(path))
        if not ast.get_docstring(node)
    ]
    assert not missing, "\n".join(missing)


# --- Size of functions ------------------------------------------------------------------------------------------------

MAX_LINES, MAX_PATHS = 80, 25

_ONE_KERNEL = "the body of a kernel: what it shares with others is split off, and shipped times are of these lines"
# Functions of the product and of the tests that are larger, each with its reason.
LARGER = {
    f"{PACKAGE}/kernels/fused_moe.py:fused_moe": "checks, then launches in their order, which share their arguments",
    f"{PACKAGE}/kernels/gemm.py:down": _ONE_KERNEL,
    f"{PACKAGE}/kernels/gemm.py:down_fused_topk": _ONE_KERNEL,
    f"{PACKAGE}/kernels/launch_config.py:__post_init__": "one condition for each rule of a configuration",
    f"{PACKAGE}/kernels/mainloop.py:mainloop": _ONE_KERNEL,
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def paths_through(function: Function) -> int:
    """Branches, loops, handlers, conditions of comprehensions and operands of ``and`` and ``or``, plus one; functions
    inside count by themselves."""
    found, nodes = 1, [*function.body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        nodes += ast.iter_child_nodes(node)
        branches = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.match_case
        found += isinstance(node, branches)
        if isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
    return found


def larger_functions(module: ast.Module) -> Iterator[str]:
    """Names of functions with more lines or more paths than is usual."""
    for node in ast.walk(module):
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_LINES or paths_through(node) > MAX_PATHS:
                yield node.name


def test_functions_are_small_but_for_those_of_the_table() -> None:
    long = "def long():\n" + "    pass\n" * MAX_LINES
    deep = f"def deep(x):\n    return {' or '.join(['x'] * MAX_PATHS)} or [y for y in x if y]\n"
    usual = "def usual():\n" + "    pass\n" * (MAX_LINES - 1)
    assert [*larger_functions(ast.parse(long + deep + usual))] == ["long", "deep"]
    read = [*files(), *sorted((ROOT / "tests").rglob("*.py"))]
    assert {f"{path.relative_to(ROOT)}:{name}" for path in read for name in larger_functions(tree(path))} == {*LARGER}


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


def test_no_test_module_imports_another() -> None:
    found = re.compile(r"^\s*(?:from|import) tests(?:\.\w+)*\.test_", re.MULTILINE)
    assert found.search("from tests.cli.test_" + "x import y") and not found.search("from tests.lib.cases import y")
    assert [path for path in (ROOT / "tests").rglob("*.py") if found.search(path.read_text())] == []


def test_names_of_tests_have_fewer_than_70_characters() -> None:
    names = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
    found = [name for path in (ROOT / "tests").rglob("test_*.py") for name in names.findall(path.read_text())]
    assert len(found) > 2000 and [name for name in found if len(name) >= 70] == []


PLACES = re.compile(r"(?<![\w.}$/-])/(?:home|root|Users|work|workspace|mnt|scratch)/[\w.]")


def test_no_file_mentions_a_path_of_a_developers_machine() -> None:
    assert PLACES.search("see /" + "home/someone/x") and not PLACES.search("a/work/b and $X/home/b")
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}: {match.group()}" for match in PLACES.finditer(text)]
    assert found == []
