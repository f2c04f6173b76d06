"""A distribution in a folder for PYTHONPATH, as pip would leave it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def install(folder: Path, name: str, group: str, points: Iterable[str], modules: Mapping[str, str]) -> Path:
    """Writes a distribution.

    Args:
        folder: made where it does not exist.
        name: the distribution's name.
        group: the group of its entry points.
        points: entry points, ``name = module:attribute`` each.
        modules: source text by name of the module.

    Returns:
        The folder.
    """
    metadata = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *points, ""]), encoding="utf-8")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
    return folder
