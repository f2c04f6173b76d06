"""Names in the code of vLLM's releases: ``python -m tests.tools.release_names [--all]``.

Reads the releases of `releases.supported` that `releases/vllm_names.py` has not been made from, all of them with
``--all``, and writes that file again. Their sources are downloaded where they are not in the cache.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from packaging.version import Version

from tests.lib.releases import sources
from tests.tools.config_defaults import wrapped
from vllm_moe_oracle.releases import vllm_names
from vllm_moe_oracle.releases.supported import RELEASES

FILE = Path(vllm_names.__file__)


def moe_backends(package: Path) -> set[str]:
    """Values of ``--moe-backend`` beside ``auto``: `MoEBackend` in ``vllm.config.kernel``. Empty before a release has
    that list.

    Args:
        package: the release's folder ``vllm``.
    """
    file = package / "config" / "kernel.py"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    listed = re.search(r"^MoEBackend = Literal\[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r'"(\w+)"', listed[1])) - {"auto"} if listed else set()


def removed_models(package: Path, oldest: str) -> dict[str, str]:
    """The last release with each architecture that vLLM has no more: ``_PREVIOUSLY_SUPPORTED_MODELS`` of its registry.

    Args:
        package: the release's folder ``vllm``.
        oldest: a release before which nothing is of interest.

    Raises:
        ValueError: the registry has no such table.
    """
    text = (package / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    tables = re.findall(r"_PREVIOUSLY_SUPPORTED_MODELS = \{(.*?)\n\}", text, re.DOTALL)
    if len(tables) != 1:
        raise ValueError(f"{len(tables)} tables of models that vLLM had before; there must be one")
    listed = dict(re.findall(r'"(\w+)": "([\d.]+)"', tables[0]))
    return {name: last for name, last in listed.items() if Version(last) >= Version(oldest)}


_LISTED_MODEL = re.compile(r'"(\w+For(?:CausalLM|ConditionalGeneration))": \(\s*"([\w.]+)",\s*"(\w+)"')


def unbalanced_models(package: Path) -> set[str]:
    """Architectures with experts whose class is no `MixtureOfExperts`, which vLLM asks a model for before it moves its
    experts between ranks (EPLB). A class whose files, or its base classes', mention the protocol counts as one.

    Args:
        package: the release's folder ``vllm``.
    """
    found = set()
    for architecture, classes in listed_models(package).items():
        for module, name in classes:
            code = "".join(code_of_class(package.parent, module, name))
            if "fused_moe" in code and "MixtureOfExperts" not in code and not module.endswith(".transformers"):
                found.add(architecture)
    return found


def listed_models(package: Path) -> dict[str, list[tuple[str, str]]]:
    """Module and name of the classes of each architecture in vLLM's registry.

    Args:
        package: the release's folder ``vllm``.
    """
    registry = (package / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8")
    found: dict[str, list[tuple[str, str]]] = {}
    for architecture, module, name in _LISTED_MODEL.findall(registry):
        place = module if module.startswith("vllm.") else f"vllm.model_executor.models.{module}"
        found.setdefault(architecture, []).append((place, name))
    return found


def code_of_class(root: Path, module: str, name: str, seen: set[tuple[str, str]] | None = None) -> Iterator[str]:
    """The files of a class of a model and of its base classes; where a file imports a class, that of the class, for
    NVIDIA's GPUs where there are several.

    Args:
        root: the folder that the package ``vllm`` is in.
        module: the class's.
        name: the class's.
        seen: what is left out, and gets what is read.
    """
    seen = set() if seen is None else seen
    paths = (root / f"{module.replace('.', '/')}.py", root / module.replace(".", "/") / "__init__.py")
    file = next(filter(Path.exists, paths), None)
    if file is None or (module, name) in seen or ".models." not in module or module.endswith(".interfaces"):
        return
    seen.add((module, name))
    text = file.read_text(encoding="utf-8")
    yield text
    tree, package = ast.parse(text), module if file.name == "__init__.py" else module.rpartition(".")[0]
    imported: dict[str, tuple[str, str]] = {}
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)):
        place = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        for alias in node.names:
            if alias.name not in imported or ".nvidia." in place:
                imported[alias.asname or alias.name] = (place, alias.name)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    wanted = [name]
    while wanted:
        each = wanted.pop()
        if each in classes:
            wanted += map(ast.unparse, classes.pop(each).bases)
        elif each in imported:
            yield from code_of_class(root, *imported[each], seen)


def _by_release(models: Mapping[str, str]) -> str:
    """Models with a release, by the release."""
    found = ""
    for last in sorted({*models.values()}, key=Version):
        names = (f"{json.dumps(name)}," for name in sorted(models) if models[name] == last)
        found += f"    **dict.fromkeys((\n{wrapped(names, 8)}    ), {json.dumps(last)}),\n"
    return found


def text_of(
    releases: Iterable[str], backends: Iterable[str], models: Mapping[str, str], unbalanced: Mapping[str, str]
) -> str:
    """The file."""
    read = "".join(f"    {json.dumps(each)},\n" for each in releases)
    names = "".join(f"        {json.dumps(each)},\n" for each in sorted(backends))
    return f'''"""Names in the code of vLLM's releases. Generated by ``python -m tests.tools.generate --write``."""

READ_FROM = (
{read})
"""The releases whose code was read."""

MOE_BACKENDS = frozenset(
    {{
{names}    }}
)
"""Values of ``--moe-backend`` beside ``auto`` of all these releases, for experts of any kind (`vllm.config.kernel`)."""

# fmt: off
REMOVED_MODELS = {{
{_by_release(models)}}}
"""Architectures that one of these releases has and the newest has no more, and the last release that has each."""

UNBALANCED_MODELS = {{
{_by_release(unbalanced)}}}
"""Architectures none of whose experts move between ranks (EPLB), and the last of these releases that moves none."""
# fmt: on
'''


def is_stale() -> bool:
    """Whether the file was made from other releases than the supported ones."""
    return vllm_names.READ_FROM != RELEASES


def renewed(all_releases: bool = False) -> str:
    """The file for the supported releases.

    Args:
        all_releases: read each of them, not only those that are new.
    """
    known = () if all_releases else vllm_names.READ_FROM
    backends = set() if all_releases else set(vllm_names.MOE_BACKENDS)
    unbalanced = {} if all_releases else dict(vllm_names.UNBALANCED_MODELS)
    for release in RELEASES:
        if release not in known:
            backends |= moe_backends(sources(release) / "vllm")
            unbalanced |= dict.fromkeys(unbalanced_models(sources(release) / "vllm"), release)
    models = removed_models(sources(RELEASES[-1]) / "vllm", RELEASES[0])
    return text_of(RELEASES, backends, models, unbalanced)


def main() -> int:
    """The command line; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="read every supported release again")
    options = parser.parse_args()
    FILE.write_text(renewed(options.all), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
