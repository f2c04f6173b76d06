"""The license that the metadata names is here, in full, and goes into what is built."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]

APACHE = "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"
"""SHA-256 of the Apache License 2.0 as most packages carry it."""


def test_the_text_is_the_apache_license_and_the_metadata_names_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE
